/* Convolutions of small maps as matrix products, tap by tap. Images (N, H, W, C), weights (KH, KW, IC, OC), one group. */
#ifndef MUI_TAP_CONV_H
#define MUI_TAP_CONV_H

#include "kern/engine.h"

/* The fixed rule of when they are faster than direct kernels; never by timing, so that all ranks do the same. weights:
 * the gradient of the weights; else forward and the gradient of the input. */
bool mui_taps_pay(const mui_conv2d_shape *s, bool weights);
mu_status mui_tap_forward(mui_engine *e, const mui_conv2d_shape *s, const float *x, const float *w,
                          const float *bias /* or NULL */, float *y) MU_MUST_USE;
mu_status mui_tap_backward_data(mui_engine *e, const mui_conv2d_shape *s, const float *dy, const float *w,
                                float *dx) MU_MUST_USE;
/* Overwrites; db may be NULL. */
mu_status mui_tap_backward_weights(mui_engine *e, const mui_conv2d_shape *s, const float *x, const float *dy, float *dw,
                                   float *db) MU_MUST_USE;

#endif
