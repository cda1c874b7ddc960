/* PyTorch's element types as files name them: by storage class or by torch.NAME. */
#ifndef MUI_TORCH_DTYPE_H
#define MUI_TORCH_DTYPE_H

#include "io/pickle.h"
#include <muster/tensor.h>

typedef struct mui_torch_dtype {
    const char *name;     /* of torch.NAME, e.g. "float32" */
    const char *storage;  /* class name, NULL: has none */
    const char *safetensors; /* its name there, NULL: has none */
    mu_dtype carrier;     /* same size; the type itself where Muster has it */
    uint8_t bytes;
    uint8_t swap;         /* width of one number for byte swapping; complex numbers are two */
    bool exact;           /* the carrier is the type itself, not just room for its bits */
    bool quantised;
    uint8_t packed_bits;  /* of one element, when several share bytes; 0: an element is `bytes` long */
} mui_torch_dtype;

const mui_torch_dtype *mui_torch_dtype_of_storage(const mui_value *global); /* NULL: not a storage class */
const mui_torch_dtype *mui_torch_dtype_of_name(const mui_value *global);    /* torch.float32 and so on */
const mui_torch_dtype *mui_torch_dtype_of_safetensors(const char *name);    /* "F32" and so on */
const mui_torch_dtype *mui_torch_dtype_named(const char *name);             /* "float32" and so on */
bool mui_torch_is_untyped_storage(const mui_value *global); /* which holds uint8 */
/* Of a type that Muster has. */
const mui_torch_dtype *mui_torch_dtype_for(mu_dtype t);
/* One of the floating types that Muster has. */
bool mui_torch_dtype_is_float(const mui_torch_dtype *d);

#endif
