/* The weights' gradient of convolutions of few input channels, such as the first of a network on grey images. oneDNN's
 * kernels for AVX2 fill the input up to 8 channels (except 3) and multiply all of them. Input plain, gradient of the output in
 * blocks of MUI_FEW_BLOCK channels, weights plain, one group. */
#ifndef MUI_FEW_CHANNELS_H
#define MUI_FEW_CHANNELS_H

#include "kern/engine.h"

#define MUI_FEW_BLOCK 8

/* Overwrites; db may be NULL. Output channels beyond the last whole block are padding in dy, and not in dw and db. */
mu_status mui_few_backward_weights(mui_engine *e, const mui_conv2d_shape *s, const float *x, const float *dy, float *dw,
                                   float *db) MU_MUST_USE;

#endif
