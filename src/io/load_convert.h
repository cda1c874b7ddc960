/* Elements of a file's type to those of a model's, as tensor.copy_ converts. */
#ifndef MUI_LOAD_CONVERT_H
#define MUI_LOAD_CONVERT_H

#include "tensor/tensor.h"

bool mui_can_convert(mu_dtype from, mu_dtype to);
/* src and dst do not overlap; n elements. */
mu_status mui_convert(mu_context *c, mu_dtype from, mu_dtype to, int64_t n, const void *src, void *dst) MU_MUST_USE;

#endif
