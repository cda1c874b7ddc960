/* The engine from inside: its table of kernels, caches, scratch memory and layouts. Only src/kern includes this. */
#ifndef MUI_ENGINE_H
#define MUI_ENGINE_H

#include "base/arena.h"
#include "base/profile.h"
#include "kern/kern.h"

/* Row-major C (m, n) = op(A) op(B) + bias, of bfloat16. */
typedef struct mui_bf16_product {
    int64_t m, n, k;
    bool trans_a, trans_b;
    bool wide_b;     /* B is float32, and rounded first */
    bool wide_c;     /* C is float32, and added to when accumulate */
    bool accumulate;
    bool bias;       /* (n), float32, rounded first; not with wide_c */
} mui_bf16_product;

/* One backend fills one of these. An entry it leaves NULL is taken from the reference. An entry of a backend that cannot
 * do a particular shape calls the reference's function for it, or the emulation's for shapes with bf16. Rows of sizes 0
 * never get here, except in gemm. */
typedef struct mui_kernels {
    bool bf16;              /* takes shapes with bf16 and has the rows that begin so; else those never get here */
    bool bf16_instructions; /* the CPU's own; without them bf16 is no faster than float32 */
    mu_status (*bf16_reorder)(mui_engine *e, mu_dims dims, const mui_layout *from, const void *src, const mui_layout *to,
                              void *dst);
    mu_status (*bf16_product)(mui_engine *e, const mui_bf16_product *p, const void *a, const void *b, const float *bias,
                              void *c);
    const mui_conv2d_plan *(*conv2d_plan)(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w);
    const mui_layout *(*conv2d_weight_layout)(mui_engine *e, mu_dims weight, int64_t groups, int64_t stride);
    mu_status (*reorder)(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src, const mui_layout *to,
                         float *dst);
    /* NULL: images are plain. The block is not 1, the dims not empty. */
    bool (*image_layout)(mui_engine *e, mu_dims dims, int64_t block, const mui_layout **out);
    mu_status (*gemm)(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                      const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
    size_t (*norm_mask_bytes)(mui_engine *e, const mui_norm_shape *s);
    mu_status (*norm_forward)(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                              const float *beta, void *y, float *mean, float *var, void *mask);
    /* evaluate: mean and var are constants, mask is NULL. */
    mu_status (*norm_backward)(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                               const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                               float *dgamma, float *dbeta, bool accumulate, bool evaluate);
    mu_status (*norm_forward_eval)(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                   const float *beta, const float *mean, const float *var, void *y);
    const mui_layout *(*pool_out_layout)(mui_engine *e, const mui_pool2d_shape *s);
    size_t (*pool_workspace_bytes)(mui_engine *e, const mui_pool2d_shape *s);
    mu_status (*pool_forward)(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y, void *workspace);
    mu_status (*pool_backward)(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace,
                               void *dx);
} mui_kernels;

/* A plan knows who made it, since a backend may leave a shape to the reference. Backends extend this struct. */
typedef struct mui_conv2d_impl {
    mui_conv2d_plan plan; /* first: the public pointer is this one */
    mu_status (*forward)(mui_engine *e, const mui_conv2d_plan *p, const void *x, const float *w, const float *bias,
                         void *y);
    mu_status (*backward_data)(mui_engine *e, const mui_conv2d_plan *p, const void *dy, const float *w, void *dx);
    mu_status (*backward_weights)(mui_engine *e, const mui_conv2d_plan *p, const void *x, const void *dy, float *dw,
                                  float *db, bool accumulate_w, bool accumulate_b);
} mui_conv2d_impl;

/* A map from small plain keys (no padding, a multiple of 8 bytes) to objects of the engine. */
#define MUI_KEY_WORDS 24
typedef struct mui_key {
    uint64_t word[MUI_KEY_WORDS]; /* unused ones 0; word 0 tells kinds apart */
} mui_key;
typedef struct mui_cache_slot {
    mui_key key;
    void *value; /* NULL: free */
} mui_cache_slot;
typedef struct mui_cache {
    mui_cache_slot *slots;
    size_t count, capacity; /* capacity is a power of two */
} mui_cache;
enum { MUI_KEY_PLAN = 1, MUI_KEY_WEIGHT, MUI_KEY_NORM, MUI_KEY_POOL, MUI_KEY_REORDER, MUI_KEY_SUBSAMPLE,
       MUI_KEY_BF16_REORDER, MUI_KEY_BF16_PRODUCT };
void *mui_cache_find(const mui_cache *cache, const mui_key *key);
/* false with MU_ERR_NOMEM. The key must not be there yet. */
bool mui_cache_put(mui_engine *e, mui_cache *cache, const mui_key *key, void *value);

/* Scratch memory lives until the same slot is asked for again with more bytes. */
typedef enum mui_scratch {
    MUI_SCRATCH_BACKEND, /* oneDNN's scratchpad */
    MUI_SCRATCH_W,       /* a weight in another layout */
    MUI_SCRATCH_DW,      /* its gradient before it is added or converted */
    MUI_SCRATCH_DB,
    MUI_SCRATCH_X,       /* images converted for a kernel that cannot read them as they are */
    MUI_SCRATCH_Y,
    MUI_SCRATCH_DX,
    MUI_SCRATCH_SMALL,   /* per channel */
    MUI_SCRATCH_REORDER,
    MUI_SCRATCH_BF16_X,  /* operands of the emulation of bfloat16, in float32 */
    MUI_SCRATCH_BF16_W,
    MUI_SCRATCH_BF16_B,
    MUI_SCRATCH_BF16_Y,
    MUI_SCRATCH_NARROW_X, /* in bfloat16, for a kernel that wants another layout, or weights rounded */
    MUI_SCRATCH_NARROW_Y,
    MUI_SCRATCH_COUNT
} mui_scratch;

struct mui_layout {
    char name[64];
    size_t bytes;
    bool padded;
    int64_t elements; /* without padding */
    const void *backend; /* its description, owned by the backend */
};

/* fn(user) in so many threads at once, the caller's among them, or in fewer; returns when all have. */
typedef void (*mui_together_fn)(void (*fn)(void *user), void *user, unsigned threads, unsigned flags);

struct mui_dnnl;
struct mui_engine {
    mu_context *context;
    mui_engine *home;      /* of a fork: the context's, whose layouts it uses; else itself */
    pthread_mutex_t layouts; /* of the home: held while layouts are looked up or made */
    int threads;
    mui_together_fn together; /* for our own loops, see share.h; NULL: alone */
    mui_kernels k;
    mui_cache cache;
    void *scratch[MUI_SCRATCH_COUNT];
    size_t scratch_bytes[MUI_SCRATCH_COUNT];
    mui_arena kept;        /* plans and layouts: as long as the engine */
    struct mui_dnnl *dnnl; /* NULL: plain C only */
    bool bf16_told;        /* that bfloat16 is not fast here, by a warning */
};

static inline int64_t mui_elements(mu_dims dims)
{
    int64_t n = 1;
    for (int i = 0; i < dims.ndim; i++) {
        n *= dims.dim[i];
    }
    return n;
}

/* For entry points that work without an engine too. */
static inline void mui_kernel_start(mui_timer *t, const mui_engine *e, mui_kind kind)
{
    mui_timer_start(t, e != NULL ? e->context : NULL, kind);
}
/* Of n floats. */
static inline double mui_float_bytes(int64_t n)
{
    return (double)n * (double)sizeof(float);
}

/* 64-byte aligned, contents undefined; NULL with MU_ERR_NOMEM. bytes 0 gives memory too. */
void *mui_engine_scratch(mui_engine *e, mui_scratch slot, size_t bytes);
/* Memory that lives as long as the engine, cleared. */
void *mui_engine_keep(mui_engine *e, size_t bytes);

/* The reference. */
extern const mui_kernels mui_ref_kernels;
const mui_conv2d_plan *mui_ref_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w);
mu_status mui_ref_gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                       const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
mu_status mui_ref_norm_forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                               const float *beta, void *y, float *mean, float *var, void *mask);
mu_status mui_ref_norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                                const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                                float *dgamma, float *dbeta, bool accumulate, bool evaluate);
mu_status mui_ref_norm_forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                    const float *beta, const float *mean, const float *var, void *y);
size_t mui_ref_pool_workspace_bytes(mui_engine *e, const mui_pool2d_shape *s);
mu_status mui_ref_pool_forward(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y, void *workspace);
mu_status mui_ref_pool_backward(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace,
                                void *dx);

/* The end of what began with mui_timer_start: the counter of flops and the profile's come from this one call. */
void mui_count_flops(mui_engine *e, mui_timer *t, double flops, double bytes);

/* Every copy into another layout is counted by whoever starts it, once: here what and its size in the new layout. Its time
 * is t's until mui_timer_stop. */
typedef enum mui_conversion { MUI_CONVERT_LAYOUT, MUI_CONVERT_WEIGHT } mui_conversion;
void mui_conversion_start(mui_timer *t, mui_engine *e, mui_conversion what, size_t bytes);
/* mui_reorder, counted as that. */
mu_status mui_reorder_as(mui_engine *e, mui_conversion what, mu_dims dims, const mui_layout *from, const float *src,
                         const mui_layout *to, float *dst) MU_MUST_USE;
/* x in plain layout: x itself, or a conversion into that scratch slot (a weight into MUI_SCRATCH_W). NULL on failure. */
const float *mui_to_plain(mui_engine *e, mu_dims dims, const mui_layout *layout, const float *x, mui_scratch slot);

#if MUI_HAVE_DNNL
/* Fills e->dnnl and the entries oneDNN has. False with an error raised. */
bool mui_dnnl_open(mui_engine *e);
void mui_dnnl_close(mui_engine *e);
void mui_dnnl_set_threads(int threads);
/* The threads oneDNN computes with, for others' work; flags are 0. NULL: it has none that can be asked. */
mui_together_fn mui_dnnl_together(void);
#endif

#endif
