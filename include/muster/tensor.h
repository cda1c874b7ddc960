/* Tensors: a shape, an element type and a view of memory.
 *
 * A tensor belongs to a tape (one step: gone at mu_tape_reset) or to the context (parameters, kept tensors). Element
 * counts are int64_t; sizes in bytes are size_t and say so. Dimensions are in PyTorch's order (images: N, C, H, W). */
#ifndef MUSTER_TENSOR_H
#define MUSTER_TENSOR_H

#include <muster/base.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MU_MAX_DIMS 8

typedef enum mu_dtype {
    MU_F32 = 0, /* the type of computation, but for tapes with bf16; others are for labels, storage and checkpoints */
    MU_F64,
    MU_F16,
    MU_BF16,
    MU_I64,
    MU_I32,
    MU_I16,
    MU_I8,
    MU_U8,
    MU_BOOL,
    MU_C64,
    MU_C128,
    MU_DTYPE_COUNT
} mu_dtype;

/* PyTorch's name, e.g. "float32". */
MU_API const char *mu_dtype_name(mu_dtype t);
MU_API size_t mu_dtype_bytes(mu_dtype t);

typedef struct mu_dims {
    int ndim;                   /* 0 (a scalar) to MU_MAX_DIMS */
    int64_t dim[MU_MAX_DIMS];   /* the first ndim are used; each >= 0 */
} mu_dims;

/* MU_DIMS(2, 3) is a 2x3 shape, by value. MU_SCALAR is the shape of a single number. */
#ifdef __cplusplus
}
template <typename... Ints> static inline mu_dims mu_dims_of(Ints... d)
{
    mu_dims r = {(int)sizeof...(d), {(int64_t)d...}};
    return r;
}
extern "C" {
#define MU_DIMS(...) mu_dims_of(__VA_ARGS__)
#define MU_SCALAR mu_dims_of()
#else
#define MU_DIMS(...)                                                                                                   \
    ((mu_dims){.ndim = (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), .dim = {__VA_ARGS__}})
#define MU_SCALAR ((mu_dims){.ndim = 0, .dim = {0}})
#endif

typedef struct mu_tensor mu_tensor;

/* Shape and type. t may be NULL (a failed builder): then a scalar, MU_F32, and 0 elements. */
MU_API mu_dims mu_tensor_dims(const mu_tensor *t);
MU_API int64_t mu_tensor_dim(const mu_tensor *t, int i); /* negative i counts from the end */
MU_API mu_dtype mu_tensor_dtype(const mu_tensor *t);
MU_API int64_t mu_tensor_elements(const mu_tensor *t);

/* Copies the elements out, row-major, from whatever layout the tensor has. elements must equal mu_tensor_elements.
 * MU_F32, MU_F64, MU_F16, MU_BF16 tensors can be read as float; integer and bool ones as int64_t.
 * MU_ERR_STATE when backward has already given the tensor's memory back (see mu_tensor_retain). */
MU_API mu_status mu_tensor_read(const mu_tensor *t, float *out, int64_t elements) MU_MUST_USE;
MU_API mu_status mu_tensor_read_i64(const mu_tensor *t, int64_t *out, int64_t elements) MU_MUST_USE;

/* Overwrites the elements, row-major. Not for values that a recorded operation has already read. */
MU_API mu_status mu_tensor_write(mu_tensor *t, const float *in, int64_t elements) MU_MUST_USE;

/* The single element of a one-element tensor; NaN when there is none (the context then has the reason). */
MU_API float mu_tensor_item(const mu_tensor *t);

#ifdef __cplusplus
}
#endif
#endif
