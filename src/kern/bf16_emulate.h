/* What engine.c hands to the emulation of bfloat16: the kernels of kern.h for shapes with bf16 set. */
#ifndef MUI_BF16_EMULATE_H
#define MUI_BF16_EMULATE_H

#include "kern/bf16.h"
#include "kern/engine.h"

mu_status mui_bf16_emulated_product(mui_engine *e, const mui_bf16_product *p, const void *a, const void *b,
                                    const float *bias, void *c);

mu_status mui_bf16_emulated_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const void *src,
                                    const mui_layout *to, void *dst);

const mui_conv2d_plan *mui_bf16_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w);
size_t mui_bf16_norm_mask_bytes(mui_engine *e, const mui_norm_shape *s);
mu_status mui_bf16_norm_forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                const float *beta, void *y, float *mean, float *var, void *mask);
mu_status mui_bf16_norm_forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                     const float *beta, const float *mean, const float *var, void *y);
mu_status mui_bf16_norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                                 const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                                 float *dgamma, float *dbeta, bool accumulate, bool evaluate);
const mui_layout *mui_bf16_pool_out_layout(mui_engine *e, const mui_pool2d_shape *s);
size_t mui_bf16_pool_workspace_bytes(mui_engine *e, const mui_pool2d_shape *s);
mu_status mui_bf16_pool_forward(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y, void *workspace);
mu_status mui_bf16_pool_backward(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace,
                                 void *dx);

#endif
