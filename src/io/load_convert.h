/* Tensors of a file for a model: whether they fit it, and elements of their type as those of the model's, as tensor.copy_
 * converts. */
#ifndef MUI_LOAD_CONVERT_H
#define MUI_LOAD_CONVERT_H

#include "io/checkpoint_file.h"
#include "tensor/tensor.h"

#define MUI_PROBLEM_BYTES 256

bool mui_can_convert(mu_dtype from, mu_dtype to);
/* src and dst do not overlap; n elements. */
mu_status mui_convert(mu_context *c, mu_dtype from, mu_dtype to, int64_t n, const void *src, void *dst) MU_MUST_USE;

/* Whether v, of k's pickle, is a tensor; out's axes are in room. false: problem may say why it is a broken one. */
bool mui_tensor_of(const mu_checkpoint_file *k, const mui_value *v, mui_axes *room, mui_file_tensor *out,
                   char problem[MUI_PROBLEM_BYTES]);
bool mui_shape_is(const mui_file_tensor *t, mu_dims d);
/* All of an exact tensor, row-major, as a type that it can be converted to. */
mu_status mui_tensor_load_as(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, mu_dtype to,
                             void *out) MU_MUST_USE;

#endif
