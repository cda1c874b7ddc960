/* NumPy's arrays and scalars inside a pickle, seen as tensors over the pickle's own bytes. */
#ifndef MUI_NUMPY_VALUES_H
#define MUI_NUMPY_VALUES_H

#include "io/torch_values.h"

/* As mui_tensor_read. Arrays of objects are MUI_WRAPS around their list; of texts, dates and records: MUI_NOT_TENSOR. */
mui_tensor_verdict mui_numpy_read(const mui_meaning *w, const mui_value *v, mui_file_tensor *out, mui_value **inner,
                                  char *problem, size_t problem_bytes);

#endif
