/* The op table, and the inputs of its samples. */
#include "tape/op_rows.h"
#include "base/rng.h"
#include "tape/tape_state.h"

const mui_op *const *mui_ops(void)
{
    static const mui_op *const rows[] = {
        &mui_op_conv2d,     &mui_op_linear,        &mui_op_matmul,   &mui_op_batch_norm,      &mui_op_relu,
        &mui_op_leaky_relu, &mui_op_sigmoid,       &mui_op_tanh,     &mui_op_gelu,            &mui_op_softplus,
        &mui_op_scale,      &mui_op_dropout,       &mui_op_detach,   &mui_op_add,             &mui_op_sub,
        &mui_op_mul,        &mui_op_add_relu,      &mui_op_max_pool2d, &mui_op_avg_pool2d,    &mui_op_reshape,
        &mui_op_permute,    &mui_op_narrow,        &mui_op_concat,   &mui_op_sum,             &mui_op_mean,
        &mui_op_softmax,    &mui_op_log_softmax,   &mui_op_cross_entropy, &mui_op_mse_loss,
        &mui_op_bce_with_logits, &mui_op_subsample, &mui_op_sync_batch_norm, NULL,
    };
    return rows;
}

mu_tensor *mui_sample_constant(mu_tape *t, mu_dims dims, uint64_t seed)
{
    mu_tensor *x = mu_tensor_zeros(t, dims);
    if (x == NULL) {
        return NULL;
    }
    int64_t n = mui_dims_elements(dims);
    float *v = mui_floats(x);
    mui_rng r;
    mui_rng_init(&r, seed, (uint64_t)n);
    for (int64_t i = 0; i < n; i++) {
        /* Evenly spaced, half of them negative, then shuffled. */
        float step = ((float)(i / 2) + 0.5f) / ((float)n / 2.0f + 0.5f);
        float value = 0.05f + 1.95f * step;
        int64_t j = (int64_t)mui_rng_below(&r, (uint64_t)i + 1);
        v[i] = v[j];
        v[j] = i % 2 == 0 ? value : -value;
    }
    return x;
}

mu_tensor *mui_sample_leaf(mu_tape *t, mu_dims dims, uint64_t seed)
{
    mu_tensor *x = mui_sample_constant(t, dims, seed);
    if (x == NULL) {
        return NULL;
    }
    if (t->nudge.leaf == t->sample_leaves++ && t->nudge.element < mui_dims_elements(dims)) {
        mui_floats(x)[t->nudge.element] += t->nudge.delta;
    }
    return mu_tensor_require_grad(t, x);
}
