/* The rows of the op table and what the op files share. Not for other folders. */
#ifndef MUI_OP_ROWS_H
#define MUI_OP_ROWS_H

#include "kern/bf16.h"
#include "tape/op.h"

extern const mui_op mui_op_conv2d, mui_op_linear, mui_op_matmul;
extern const mui_op mui_op_batch_norm, mui_op_sync_batch_norm;
extern const mui_op mui_op_relu, mui_op_leaky_relu, mui_op_sigmoid, mui_op_tanh, mui_op_gelu, mui_op_softplus;
extern const mui_op mui_op_scale, mui_op_dropout, mui_op_detach;
extern const mui_op mui_op_add, mui_op_sub, mui_op_mul, mui_op_add_relu;
extern const mui_op mui_op_max_pool2d, mui_op_avg_pool2d;
extern const mui_op mui_op_reshape, mui_op_permute, mui_op_narrow, mui_op_concat, mui_op_subsample;
extern const mui_op mui_op_sum, mui_op_mean, mui_op_softmax, mui_op_log_softmax;
extern const mui_op mui_op_cast;
extern const mui_op mui_op_cross_entropy, mui_op_mse_loss, mui_op_bce_with_logits;

static inline const float *mui_cfloats(const mu_tensor *x)
{
    return (const float *)(const void *)x->data;
}

static inline float *mui_floats(mu_tensor *x)
{
    return (float *)(void *)x->data;
}

static inline bool mui_is_bf16(const mu_tensor *x)
{
    return x->dtype == MU_BF16;
}

static inline const uint16_t *mui_cbf16(const mu_tensor *x)
{
    return (const uint16_t *)(const void *)x->data;
}

static inline uint16_t *mui_bf16(mu_tensor *x)
{
    return (uint16_t *)(void *)x->data;
}

/* Status of a failed call inside backward. */
static inline mu_status mui_backward_failed(const mui_node *n)
{
    mu_status s = mu_context_status(n->out->context);
    return s != MU_OK ? s : MU_ERR_INTERNAL;
}

/* A leaf for samples: requires a gradient; values between -2 and 2, all different and at least 0.05 from 0, so that
 * neither kinks nor ties lie within reach of a finite difference. */
mu_tensor *mui_sample_leaf(mu_tape *t, mu_dims dims, uint64_t seed);
/* The same without gradient. */
mu_tensor *mui_sample_constant(mu_tape *t, mu_dims dims, uint64_t seed);

#endif
