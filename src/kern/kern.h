/* Kernels: the one signature of each, and the engine that runs them.
 *
 * Two implementations fill this table: plain C (ref, the oracle and the fallback) and oneDNN (dnnl). Kernels know flat
 * memory, shapes and layouts; nothing of tensors, tapes or modules. All data is float32 unless said: shapes with bf16 set
 * have bfloat16 images, `void *` below (kern/bf16.h). Their weights and biases are float32 like all else, and rounded in
 * kernels that multiply by them.
 *
 * Layouts. `const mui_layout *` is interned: pointer equality is layout equality, NULL is plain row-major without gaps.
 * A layout other than NULL is a backend's blocked form of one particular shape; its bytes may exceed the product of
 * dimensions, and the padding is zero and must be kept zero (mui_layout_padded tells). Anything flat (add, relu, SGD)
 * may run over the whole of a blocked buffer as long as it maps zero to zero, or the layout is not padded. */
#ifndef MUI_KERN_H
#define MUI_KERN_H

#include "base/context.h"
#include <muster/tensor.h>

typedef struct mui_engine mui_engine;
typedef struct mui_layout mui_layout;

/* The engine of a context, made on first use from its options (kernels, threads, no_winograd) and owned by it. It
 * belongs to the thread that first asks for it (whose OpenMP setting it makes that of the options) and holds primitive
 * caches, scratchpad and layouts. After a shape's first use, a call takes no memory. NULL on failure. */
mui_engine *mui_engine_of(mu_context *c);
/* Another engine for another thread, of so many threads of its own, which shares the layouts of the context's: memory in
 * one's layout can be used with the other. While forks run, nobody may call the context's engine. NULL on failure. */
mui_engine *mui_engine_fork(mu_context *c, int threads);
void mui_engine_join(mui_engine *fork); /* frees it; NULL is allowed */
/* Makes the calling thread's OpenMP setting that of the engine; the engine is then this thread's. */
void mui_engine_enter(const mui_engine *e);

/* -- layouts ---------------------------------------------------------------------------------------------------- */
size_t mui_layout_bytes(const mui_layout *layout); /* not for NULL */
bool mui_layout_padded(const mui_layout *layout);  /* false for NULL */
/* A stable description ("OIhw16i16o") for layout hashes and messages; "plain" for NULL. */
const char *mui_layout_name(const mui_layout *layout);
/* Bytes of a float32 tensor of these dims in that layout. */
size_t mui_bytes_in_layout(mu_dims dims, const mui_layout *layout);
/* dst = src in another layout; from and to may be NULL, not both equal. Writes dst's padding as zero. */
mu_status mui_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src, const mui_layout *to,
                      float *dst) MU_MUST_USE;

/* The layout of images (N, C, H, W) that keeps so many channels of a pixel side by side (1: plain). False: there is none
 * here, or it failed. */
#define MUI_CHANNELS_LAST ((int64_t)0)
bool mui_image_layout(mui_engine *e, mu_dims dims, int64_t block, const mui_layout **out);

/* -- convolution ------------------------------------------------------------------------------------------------ */
/* Cleared with memset before filling: it is a cache key. */
typedef struct mui_conv2d_shape {
    int64_t n, ic, ih, iw, oc, oh, ow, kh, kw;
    int64_t stride[2], pad[2], dilation[2], groups; /* dilation 1: dense */
    bool bias;      /* forward is given one, and backward may give its gradient */
    bool inference; /* no backward is meant; so far the same kernels */
    bool bf16;      /* x, y, dx and dy */
} mui_conv2d_shape;
/* What the kernels below want and give; backends extend it. Belongs to the engine, cached by (shape, layout of w). */
typedef struct mui_conv2d_plan {
    mui_conv2d_shape shape;
    const mui_layout *x, *w, *y; /* layouts of input (and its gradient), weight (and its gradient), output (and its) */
} mui_conv2d_plan;
/* w is the layout the weight is stored in; the plan's w is that whenever the backend can work from it, and the
 * conversions it needs inside (weights for backward data) are its own business. */
const mui_conv2d_plan *mui_conv2d_plan_get(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w);
/* The layout in which a weight (oc, ic/groups, kh, kw) is best stored for good: a function of these numbers, the CPU and
 * the options only, never of the input's size, so all ranks of one kind of machine agree. */
const mui_layout *mui_conv2d_weight_layout(mui_engine *e, mu_dims weight, int64_t groups, int64_t stride);
mu_status mui_conv2d_forward(mui_engine *e, const mui_conv2d_plan *p, const void *x, const float *w,
                             const float *bias /* (oc), NULL unless shape.bias */, void *y) MU_MUST_USE;
mu_status mui_conv2d_backward_data(mui_engine *e, const mui_conv2d_plan *p, const void *dy, const float *w,
                                   void *dx /* overwritten */) MU_MUST_USE;
/* accumulate: add to dw and db, else overwrite (padding as zero). dw may be NULL; db too, and is without shape.bias. */
mu_status mui_conv2d_backward_weights(mui_engine *e, const mui_conv2d_plan *p, const void *x, const void *dy,
                                      float *dw, float *db, bool accumulate_w, bool accumulate_b) MU_MUST_USE;

/* -- matrix product --------------------------------------------------------------------------------------------- */
/* Row-major C (m, n) = alpha op(A) op(B) + beta C, as BLAS; ld in elements; sizes may be 0. beta 0 never reads C. */
mu_status mui_gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                   const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                   int64_t ldc) MU_MUST_USE;

/* -- batch normalisation ---------------------------------------------------------------------------------------- */
typedef struct mui_norm_shape {
    int64_t n, c, h, w;       /* (N, C): h = w = 1 */
    const mui_layout *layout; /* of x, y and their gradients */
    bool relu;                /* y = max(0, .); the gradient passes where y > 0 */
    float eps;
    bool bf16;                /* x, y and their gradients */
} mui_norm_shape;
/* Training: writes batch mean and biased variance (c each). gamma and beta may be NULL (1 and 0). */
mu_status mui_batch_norm_forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                 const float *beta, void *y, float *mean, float *var, void *mask) MU_MUST_USE;
/* Bytes of `mask`, where forward notes for backward which results relu let through. oneDNN wants one (1/32 of y for
 * blocked layouts), so that y need not be kept; the reference does not, and reads y. 0 without relu. */
size_t mui_batch_norm_mask_bytes(mui_engine *e, const mui_norm_shape *s);
/* dx may equal dy. dgamma, dbeta (c) or NULL; added to when accumulate. y is the forward's output where s->relu and
 * mask_bytes is 0, else unused and may be NULL. */
mu_status mui_batch_norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y,
                                  const void *dy, const float *gamma, const float *mean, const float *var,
                                  const void *mask, void *dx, float *dgamma, float *dbeta, bool accumulate) MU_MUST_USE;
/* Evaluation: by given mean and var. There is no mask: with relu, backward reads y. dx may equal dy. */
mu_status mui_batch_norm_forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                      const float *beta, const float *mean, const float *var, void *y) MU_MUST_USE;
mu_status mui_batch_norm_backward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y,
                                       const void *dy, const float *gamma, const float *mean, const float *var,
                                       void *dx, float *dgamma, float *dbeta, bool accumulate) MU_MUST_USE;

/* -- pooling ---------------------------------------------------------------------------------------------------- */
typedef enum mui_pool_kind { MUI_POOL_MAX, MUI_POOL_AVG, MUI_POOL_AVG_EXCLUDE_PAD } mui_pool_kind;
typedef struct mui_pool2d_shape {
    int64_t n, c, ih, iw, oh, ow, kh, kw;
    int64_t stride[2], pad[2];
    mui_pool_kind kind;
    const mui_layout *x; /* layout of the input and its gradient */
    bool bf16;           /* x, y and their gradients */
} mui_pool2d_shape;
/* Layout of the output and its gradient for that input. */
const mui_layout *mui_pool2d_out_layout(mui_engine *e, const mui_pool2d_shape *s);
size_t mui_pool2d_workspace_bytes(mui_engine *e, const mui_pool2d_shape *s); /* max: where the maxima were */
/* workspace may be NULL when no backward is meant. */
mu_status mui_pool2d_forward(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y,
                             void *workspace) MU_MUST_USE;
mu_status mui_pool2d_backward(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace,
                              void *dx /* overwritten */) MU_MUST_USE;

/* -- subsampling ------------------------------------------------------------------------------------------------ */
/* (N, C, H, W) -> (N, before + C + after, ceil(H/step), ceil(W/step)): every step-th row and column, and channels of
 * zeros. */
typedef struct mui_subsample_shape {
    int64_t n, c, h, w, step, before, after;
    const mui_layout *x; /* layout of the input */
} mui_subsample_shape;
/* Belongs to the engine, cached by shape. */
typedef struct mui_subsample_plan {
    mui_subsample_shape shape;
    const mui_layout *x, *y; /* layouts it works on: the shape's x and its like, or plain where that has other blocks */
    int64_t block;           /* as of mui_image_layout */
} mui_subsample_plan;
const mui_subsample_plan *mui_subsample_plan_get(mui_engine *e, const mui_subsample_shape *s);
void mui_subsample_forward(mui_engine *e, const mui_subsample_plan *p, const float *x, float *y);
/* dx is added to when accumulate, else overwritten, its padding too. */
void mui_subsample_backward(mui_engine *e, const mui_subsample_plan *p, const float *dy, float *dx, bool accumulate);

/* -- element by element, flat over n floats --------------------------------------------------------------------- */
typedef enum mui_unary {
    MUI_RELU, MUI_LEAKY_RELU, MUI_SIGMOID, MUI_TANH, MUI_GELU, MUI_SOFTPLUS, MUI_SCALE,
    MUI_UNARY_COUNT
} mui_unary;
bool mui_unary_keeps_zero(mui_unary op);    /* f(0) == 0: may run over padding */
bool mui_unary_needs_input(mui_unary op);   /* backward reads x */
bool mui_unary_needs_output(mui_unary op);  /* backward reads y */
/* a: slope of MUI_LEAKY_RELU, factor of MUI_SCALE. y may equal x. */
void mui_unary_forward(mui_engine *e, mui_unary op, int64_t n, const float *x, float *y, float a);
/* x, y may be NULL where not needed; dx may equal dy; dx is added to when accumulate. */
void mui_unary_backward(mui_engine *e, mui_unary op, int64_t n, const float *x, const float *y, const float *dy,
                        float *dx, float a, bool accumulate);
void mui_add_relu_forward(mui_engine *e, int64_t n, const float *a, const float *b, float *y);
void mui_fill(float *y, int64_t n, float value);
void mui_axpy(mui_engine *e, int64_t n, float a, const float *x, float *y); /* y += a x */
/* Dropout: keeps element i when its draw, word i % 4 of Philox(key, stream, i / 4) as a float in [0, 1), is >= p;
 * y = x / (1 - p) where kept, else 0. The same call on dy is the backward. y may equal x. */
void mui_dropout(mui_engine *e, int64_t n, const float *x, float *y, float p, uint64_t key, uint64_t stream);

/* y[i] = deviation times mui_rng_normal's draw i of (key, stream), to a few units in the last place: the same bits on every CPU. */
void mui_normal(int64_t n, float *y, float deviation, uint64_t key, uint64_t stream);

/* -- strided and broadcasting ----------------------------------------------------------------------------------- */
typedef enum mui_binary { MUI_ADD, MUI_SUB, MUI_MUL } mui_binary;
/* y (dims, plain) = a op b; strides in elements of dims.ndim entries, 0 where broadcast. */
void mui_binary_forward(mui_engine *e, mui_binary op, mu_dims dims, const float *a, const int64_t *stride_a,
                        const float *b, const int64_t *stride_b, float *y);
/* Both sides strided; elements of `bytes` (1, 2, 4, 8 or 16). */
void mui_copy_strided(mui_engine *e, mu_dims dims, size_t bytes, const void *src, const int64_t *src_stride, void *dst,
                      const int64_t *dst_stride);
/* dst (strided) += src (strided); a stride of 0 in dst sums over that dimension. */
void mui_add_strided(mui_engine *e, mu_dims dims, const float *src, const int64_t *src_stride, float *dst,
                     const int64_t *dst_stride);

/* -- reductions and losses, plain rows -------------------------------------------------------------------------- */
/* Sum in a fixed order with double accumulators. */
double mui_sum(mui_engine *e, int64_t n, const float *x);
void mui_softmax_forward(mui_engine *e, int64_t rows, int64_t cols, const float *x, float *y, bool log);
/* y is the forward's output. */
void mui_softmax_backward(mui_engine *e, int64_t rows, int64_t cols, const float *y, const float *dy, float *dx,
                          bool log);
/* Mean cross-entropy over rows whose label is not `ignore`; writes d loss / d logits (scaled by 1/counted) to grad if
 * not NULL. counted 0: loss NaN, grad 0. *bad_row is the first row whose label is neither in [0, cols) nor ignored,
 * -1 if none (then nothing was written). */
void mui_cross_entropy(mui_engine *e, int64_t rows, int64_t cols, const float *logits, const int64_t *labels,
                       float smoothing, int64_t ignore, float *loss, float *grad, int64_t *bad_row);
/* Mean over n; grad may be NULL. */
void mui_mse(mui_engine *e, int64_t n, const float *x, const float *target, float *loss, float *grad);
void mui_bce_with_logits(mui_engine *e, int64_t n, const float *x, const float *target, float *loss, float *grad);

/* -- optimiser updates, flat, PyTorch's arithmetic and order of operations -------------------------------------- */
typedef struct mui_sgd_args {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, first; /* first: the momentum buffer starts as the gradient */
} mui_sgd_args;
void mui_sgd_update(mui_engine *e, int64_t n, float *w, const float *g, float *m /* NULL without momentum */,
                    const mui_sgd_args *a);
/* Doubles: 1 - beta2 of a float beta2 is already wrong in the fifth digit. Defaults are 0.9, 0.999, 1e-8 as doubles. */
typedef struct mui_adam_args {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled;       /* AdamW */
    int64_t step;         /* from 1 */
} mui_adam_args;
void mui_adam_update(mui_engine *e, int64_t n, float *w, const float *g, float *m, float *v, const mui_adam_args *a);
/* In a fixed order, the same on every CPU: lines of MUI_SQUARES_LINE as a tree, lines one after the other within blocks of
 * MUI_SQUARES_BLOCK lines, blocks one after the other; each sum from 0. */
enum { MUI_SQUARES_LINE = 16, MUI_SQUARES_BLOCK = 64 };
double mui_sum_squares(int64_t n, const float *x);
void mui_scale_inplace(int64_t n, float *x, float a);

#endif
