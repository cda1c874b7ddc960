/* bfloat16 on the kernels' floor: flat conversions, element-wise kernels and matrix products. oneDNN has bfloat16 kernels
 * with AVX-512; elsewhere they are emulated (bf16_emulate.c): operands are widened into scratch memory, the float32 kernel
 * runs, the result is rounded to nearest even. Weights and biases are float32 and rounded inside, so that nobody keeps
 * rounded copies. A bfloat16 tensor in a layout has its elements where a float32 one of that layout has them. */
#ifndef MUI_BF16_H
#define MUI_BF16_H

#include "kern/kern.h"

/* Says once for each engine where bfloat16 is not fast: rank 0 by a warning. */
void mui_bf16_warn(mui_engine *e);

/* -- flat over n elements --------------------------------------------------------------------------------------- */
void mui_bf16_widen(int64_t n, const uint16_t *x, float *y);
void mui_bf16_round(int64_t n, const float *x, uint16_t *y);
void mui_bf16_coarsen(int64_t n, const float *x, float *y); /* rounded, and float32 again. y may equal x */
/* The same two for a tape, timed: to bfloat16, or from it. */
void mui_bf16_cast(mui_engine *e, int64_t n, const void *from, void *to, bool narrow);
/* Each result is computed in float32 and rounded once. y may equal an operand. */
void mui_bf16_relu(mui_engine *e, int64_t n, const uint16_t *x, uint16_t *y);
void mui_bf16_relu_backward(mui_engine *e, int64_t n, const uint16_t *y, const uint16_t *dy, uint16_t *dx);
void mui_bf16_add(mui_engine *e, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y);
void mui_bf16_add_relu(mui_engine *e, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y);
/* mui_dropout of bfloat16, with the same draws. */
mu_status mui_bf16_dropout(mui_engine *e, int64_t n, const uint16_t *x, uint16_t *y, float p, uint64_t key,
                           uint64_t stream) MU_MUST_USE;

/* -- of shapes -------------------------------------------------------------------------------------------------- */
/* As mui_reorder. */
mu_status mui_bf16_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const uint16_t *src,
                           const mui_layout *to, uint16_t *dst) MU_MUST_USE;
/* Dense row-major C (m, n) = op(A) op(B), summed in float32. */
mu_status mui_bf16_gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t *a,
                        const uint16_t *b, uint16_t *c) MU_MUST_USE;
/* C (m, n) = A op(W) + bias, where W and bias (n, or NULL) are float32 and rounded first. */
mu_status mui_bf16_linear(mui_engine *e, bool trans_w, int64_t m, int64_t n, int64_t k, const uint16_t *a, const float *w,
                          const float *bias, uint16_t *c) MU_MUST_USE;
/* mui_bf16_gemm with a float32 result, added to C when accumulate. */
mu_status mui_bf16_gemm_f32(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                            const uint16_t *a, const uint16_t *b, float *c, bool accumulate) MU_MUST_USE;

#endif
