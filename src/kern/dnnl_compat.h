/* oneDNN as the dnnl_*.c files use it: what differs between its 2.x and 3.x interfaces ends here and in dnnl_compat.c,
 * and so do the life of its objects (all end with the engine) and the turning of its statuses into errors. */
#ifndef MUI_DNNL_COMPAT_H
#define MUI_DNNL_COMPAT_H

#include "kern/engine.h"
#include <oneapi/dnnl/dnnl.h>

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t mui_md;
#else
typedef const dnnl_memory_desc_t *mui_md;
#endif

/* One primitive with its memory objects, made once; each run sets the data pointers that changed. */
enum { MUI_EXEC_ARGS = 12 };
typedef struct mui_exec {
    dnnl_primitive_t primitive;
    int count;
    dnnl_exec_arg_t arg[MUI_EXEC_ARGS];
    const void *data[MUI_EXEC_ARGS];
    size_t scratch_bytes; /* scratchpad; its argument is the first */
    size_t out_bytes;     /* of a reorder: its result */
    const char *what;     /* for messages */
} mui_exec;

enum { MUI_OBJECT_PD, MUI_OBJECT_PRIMITIVE, MUI_OBJECT_MEMORY, MUI_OBJECT_MD };
typedef struct mui_dnnl_object {
    void *handle;
    int kind;
} mui_dnnl_object;

struct mui_dnnl {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_attr_t attr; /* user-mode scratchpad */
    mui_dnnl_object *objects;   /* destroyed at close, newest first */
    size_t object_count, object_capacity;
    mui_layout **layouts;
    size_t layout_count, layout_capacity;
};

/* Raises MU_ERR_DEVICE with oneDNN's word for the status; what names the operation and its shape. */
mu_status mui_dnnl_fail(mui_engine *e, dnnl_status_t s, const char *what);

/* -- memory descriptors: live as long as the engine; NULL with an error raised ------------------------------------- */
typedef struct mui_md_info {
    int ndims;
    int64_t dims[DNNL_MAX_NDIMS], padded[DNNL_MAX_NDIMS], strides[DNNL_MAX_NDIMS];
    int blocks;
    int64_t block[DNNL_MAX_NDIMS];
    int block_dim[DNNL_MAX_NDIMS];
    size_t bytes;
    bool blocked; /* false: an opaque form, only oneDNN's own */
} mui_md_info;
mui_md mui_md_typed(mui_engine *e, int ndims, const int64_t *dims, dnnl_format_tag_t tag, dnnl_data_type_t type);
mui_md mui_md_tagged(mui_engine *e, int ndims, const int64_t *dims, dnnl_format_tag_t tag); /* float32, as those below */
mui_md mui_md_any(mui_engine *e, int ndims, const int64_t *dims);
mui_md mui_md_plain(mui_engine *e, int ndims, const int64_t *dims); /* row-major */
mui_md mui_md_copy(mui_engine *e, mui_md md);
size_t mui_md_bytes(mui_md md);
mui_md_info mui_md_query(mui_md md);

/* -- primitive descriptors: *pd NULL (and no error) when oneDNN has no implementation ------------------------------ */
typedef struct mui_dnnl_conv_args {
    dnnl_alg_kind_t algorithm;
    mui_md x, w, b, y; /* b NULL: none */
    dnnl_dims_t stride, gaps, pad; /* gaps between taps: 0 is dense */
} mui_dnnl_conv_args;
typedef enum mui_conv_pass { MUI_CONV_FORWARD, MUI_CONV_BACKWARD_DATA, MUI_CONV_BACKWARD_WEIGHTS } mui_conv_pass;
mu_status mui_pd_conv(mui_engine *e, mui_conv_pass pass, const mui_dnnl_conv_args *a, dnnl_primitive_desc_t hint,
                      dnnl_primitive_desc_t *pd) MU_MUST_USE;
mu_status mui_pd_norm_forward(mui_engine *e, bool training, mui_md x, float eps, unsigned flags,
                              dnnl_primitive_desc_t *pd) MU_MUST_USE;
mu_status mui_pd_norm_backward(mui_engine *e, mui_md x, float eps, unsigned flags, dnnl_primitive_desc_t hint,
                               dnnl_primitive_desc_t *pd) MU_MUST_USE;
/* 2.x reads the shift in backward, 3.x refuses it. */
#define MUI_NORM_BACKWARD_TAKES_SHIFT (DNNL_VERSION_MAJOR < 3)
typedef struct mui_dnnl_pool_args {
    dnnl_alg_kind_t algorithm;
    mui_md x, y; /* or their gradients */
    dnnl_dims_t stride, kernel, pad;
} mui_dnnl_pool_args;
/* hint NULL: forward; the forward's descriptor: backward. */
mu_status mui_pd_pool(mui_engine *e, const mui_dnnl_pool_args *a, dnnl_primitive_desc_t hint,
                      dnnl_primitive_desc_t *pd) MU_MUST_USE;
/* y = x w + bias; bias may be NULL. */
mu_status mui_pd_matmul(mui_engine *e, mui_md x, mui_md w, mui_md bias, mui_md y, dnnl_primitive_desc_t *pd) MU_MUST_USE;
mu_status mui_pd_reorder(mui_engine *e, mui_md from, mui_md to, dnnl_primitive_desc_t *pd) MU_MUST_USE;
/* "jit:avx512_core" */
const char *mui_pd_name(dnnl_primitive_desc_t pd);
/* A descriptor it chose; NULL with an error. */
mui_md mui_pd_md(mui_engine *e, dnnl_primitive_desc_t pd, dnnl_query_t what);
size_t mui_pd_workspace_bytes(dnnl_primitive_desc_t pd);

/* -- running ------------------------------------------------------------------------------------------------------ */
/* args: DNNL_ARG_... of each memory, md of each. what must live as long as the engine. */
mui_exec *mui_exec_new(mui_engine *e, dnnl_primitive_desc_t pd, int count, const int *args, const mui_md *mds,
                       const char *what);
/* data of each argument in the order given to mui_exec_new. Inputs are not written, const or not. */
mu_status mui_exec_run(mui_engine *e, mui_exec *x, int count, const void *const *data) MU_MUST_USE;

/* -- layouts, dnnl_layout.c --------------------------------------------------------------------------------------- */
/* The interned layout of a blocked descriptor: NULL for what is row-major in memory. False on failure. Two descriptors
 * that put every element to the same place give the same layout. */
bool mui_dnnl_layout(mui_engine *e, mui_md md, const mui_layout **out);
/* The descriptor of dims in that layout. */
mui_md mui_dnnl_md(mui_engine *e, int ndims, const int64_t *dims, const mui_layout *layout);
bool mui_dnnl_image_layout(mui_engine *e, mu_dims dims, int64_t block, const mui_layout **out);
mu_status mui_dnnl_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src, const mui_layout *to,
                           float *dst);
/* Whether two of one type put every element to the same place. */
bool mui_dnnl_same_place(mui_md a, mui_md b);
/* A reorder between two descriptors of the same dims. */
mui_exec *mui_dnnl_reorder_exec(mui_engine *e, mui_md from, mui_md to);

/* -- bfloat16, dnnl_bf16.c: only where the CPU has AVX-512, else it is emulated ------------------------------------ */
bool mui_dnnl_has_bf16(void);
bool mui_dnnl_has_bf16_instructions(void);
/* The layout that an image's bfloat16 descriptor is the like of; false when there is none. */
bool mui_dnnl_bf16_layout(mui_engine *e, mui_md md, const mui_layout **out);
/* The bfloat16 descriptor of images of dims in that layout; NULL when there is none. */
mui_md mui_dnnl_bf16_md(mui_engine *e, mu_dims dims, const mui_layout *layout);
mu_status mui_dnnl_bf16_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const void *src,
                                const mui_layout *to, void *dst);
mu_status mui_dnnl_bf16_product(mui_engine *e, const mui_bf16_product *p, const void *a, const void *b,
                                const float *bias, void *c);

/* -- the rows of the kernel table --------------------------------------------------------------------------------- */
const mui_conv2d_plan *mui_dnnl_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w);
const mui_layout *mui_dnnl_conv2d_weight_layout(mui_engine *e, mu_dims weight, int64_t groups, int64_t stride);
void mui_dnnl_norm_fill(mui_kernels *k);
void mui_dnnl_pool_fill(mui_kernels *k);

#endif
