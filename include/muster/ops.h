/* Operations. Each takes the tape and tensors, records itself when a gradient may be wanted, and returns a tensor of
 * the tape; NULL (and the context's error, with shapes and module path) on failure. A NULL tensor argument is a
 * failure upstream: the operation returns NULL without a second error. All compute in float32.
 * Option structs may be NULL: all defaults; a zero field is that field's default. */
#ifndef MUSTER_OPS_H
#define MUSTER_OPS_H

#include <muster/group.h>
#include <muster/tape.h>

#ifdef __cplusplus
extern "C" {
#endif

/* -- convolution and linear ------------------------------------------------------------------------------------- */
typedef struct mu_conv2d_options {
    int stride[2];   /* rows, columns; 0: 1 */
    int padding[2];  /* zeros on both sides of rows, columns */
    int dilation[2]; /* 0: 1 */
    int groups;      /* 0: 1; divides both channel counts */
} mu_conv2d_options;
/* x (N, C, H, W), weight (K, C/groups, R, S), bias (K) or NULL -> (N, K, H', W'), as torch.nn.functional.conv2d. */
MU_API mu_tensor *mu_conv2d(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias,
                            const mu_conv2d_options *options);
/* x (..., in), weight (out, in), bias (out) or NULL -> (..., out). */
MU_API mu_tensor *mu_linear_op(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias);
/* a (M, K), b (K, N) -> (M, N). */
MU_API mu_tensor *mu_matmul(mu_tape *t, mu_tensor *a, mu_tensor *b);

/* -- normalisation ---------------------------------------------------------------------------------------------- */
typedef struct mu_batch_norm_options {
    float eps;       /* 0: 1e-5 */
    float momentum;  /* weight of the new value in the running statistics, in (0, 1]; 0: 0.1 */
    bool evaluate;   /* normalise by the running statistics, and leave them alone */
    bool relu;       /* max(0, result) in the same pass */
} mu_batch_norm_options;
/* x (N, C) or (N, C, H, W); weight, bias (C) or both NULL; running_mean, running_var (C) or both NULL, updated in
 * training (unbiased variance, as PyTorch). Training with one value per channel is MU_ERR_SHAPE. */
MU_API mu_tensor *mu_batch_norm(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias, mu_tensor *running_mean,
                                mu_tensor *running_var, const mu_batch_norm_options *options);

/* The same with the statistics of all ranks' batches together: outputs, running statistics and gradients of x are those
 * of one process that has the whole batch; gradients of weight and bias are this rank's part, for mu_ddp_backward. In
 * training it is a collective that blocks, and so is its backward: all ranks of g run the same ones in the same order, else
 * MU_ERR_COMM on all of them, naming both sides. Batches may
 * differ in size; a rank without samples runs it on an empty batch (0, C, ...), and its loss has to depend on the result,
 * as mu_sum of an empty tensor does. A rank that abandons the step ends it on the others without an error: the result is
 * NULL, and their mu_ddp_backward (over the same group) MU_SKIPPED. One value per channel on all ranks together is
 * MU_ERR_SHAPE on all of them. Evaluation, and a group of one or NULL: mu_batch_norm. */
MU_API mu_tensor *mu_sync_batch_norm(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias,
                                     mu_tensor *running_mean, mu_tensor *running_var, mu_group *g,
                                     const mu_batch_norm_options *options);

/* -- element by element ----------------------------------------------------------------------------------------- */
MU_API mu_tensor *mu_relu(mu_tape *t, mu_tensor *x);
MU_API mu_tensor *mu_leaky_relu(mu_tape *t, mu_tensor *x, float slope);
MU_API mu_tensor *mu_sigmoid(mu_tape *t, mu_tensor *x);
MU_API mu_tensor *mu_tanh(mu_tape *t, mu_tensor *x);
MU_API mu_tensor *mu_gelu(mu_tape *t, mu_tensor *x);     /* exact form, with erf */
MU_API mu_tensor *mu_softplus(mu_tape *t, mu_tensor *x); /* linear above 20, as PyTorch */
/* Shapes of a and b broadcast as in NumPy. */
MU_API mu_tensor *mu_add(mu_tape *t, mu_tensor *a, mu_tensor *b);
MU_API mu_tensor *mu_sub(mu_tape *t, mu_tensor *a, mu_tensor *b);
MU_API mu_tensor *mu_mul(mu_tape *t, mu_tensor *a, mu_tensor *b);
/* max(0, a + b) in one pass; shapes equal. The end of a residual block. */
MU_API mu_tensor *mu_add_relu(mu_tape *t, mu_tensor *a, mu_tensor *b);
MU_API mu_tensor *mu_scale(mu_tape *t, mu_tensor *x, float factor);
/* Drops each element with probability p in [0, 1) and scales the others by 1/(1-p). */
MU_API mu_tensor *mu_dropout(mu_tape *t, mu_tensor *x, float p);

/* -- pooling ---------------------------------------------------------------------------------------------------- */
typedef struct mu_pool2d_options {
    int stride[2];            /* 0: the kernel size */
    int padding[2];           /* at most half the kernel */
    bool count_exclude_pad;   /* average pooling: divide by the number of real elements only */
} mu_pool2d_options;
/* x (N, C, H, W); kernel_h x kernel_w windows, floor mode. */
MU_API mu_tensor *mu_max_pool2d(mu_tape *t, mu_tensor *x, int kernel_h, int kernel_w, const mu_pool2d_options *options);
MU_API mu_tensor *mu_avg_pool2d(mu_tape *t, mu_tensor *x, int kernel_h, int kernel_w, const mu_pool2d_options *options);
/* (N, C, H, W) -> (N, C, 1, 1) */
MU_API mu_tensor *mu_global_avg_pool2d(mu_tape *t, mu_tensor *x);
MU_API mu_tensor *mu_global_max_pool2d(mu_tape *t, mu_tensor *x);

/* -- shape and reduction ---------------------------------------------------------------------------------------- */
/* One dimension may be -1. */
MU_API mu_tensor *mu_reshape(mu_tape *t, mu_tensor *x, mu_dims dims);
/* Joins dimensions from start on into one; negative counts from the end. */
MU_API mu_tensor *mu_flatten(mu_tape *t, mu_tensor *x, int start);
/* A view: dimension order[i] of x becomes dimension i. */
MU_API mu_tensor *mu_permute(mu_tape *t, mu_tensor *x, mu_dims order);
/* A view of elements start .. start+length-1 along dim. */
MU_API mu_tensor *mu_narrow(mu_tape *t, mu_tensor *x, int dim, int64_t start, int64_t length);
/* count >= 1 tensors equal in all dimensions but dim. */
MU_API mu_tensor *mu_concat(mu_tape *t, mu_tensor *const *parts, int count, int dim);
/* Over all elements -> scalar. */
MU_API mu_tensor *mu_sum(mu_tape *t, mu_tensor *x);
MU_API mu_tensor *mu_mean(mu_tape *t, mu_tensor *x);
/* Over the last dimension. */
MU_API mu_tensor *mu_softmax(mu_tape *t, mu_tensor *x);
MU_API mu_tensor *mu_log_softmax(mu_tape *t, mu_tensor *x);

/* -- losses, all -> scalar -------------------------------------------------------------------------------------- */
#define MU_IGNORE_INDEX_DEFAULT (-100)
typedef struct mu_cross_entropy_options {
    float label_smoothing; /* in [0, 1) */
    int64_t ignore_index;  /* labels with this value do not count; 0: MU_IGNORE_INDEX_DEFAULT, for class 0 give
                              ignore_class_0 */
    bool ignore_class_0;
} mu_cross_entropy_options;
/* Mean over the labels that count. logits (N, C), labels (N) MU_I64, each in [0, C) or ignored. Zero labels: NaN as in
 * PyTorch. */
MU_API mu_tensor *mu_cross_entropy(mu_tape *t, mu_tensor *logits, mu_tensor *labels);
MU_API mu_tensor *mu_cross_entropy_with(mu_tape *t, mu_tensor *logits, mu_tensor *labels,
                                        const mu_cross_entropy_options *options);
/* Means over all elements; shapes equal. */
MU_API mu_tensor *mu_mse_loss(mu_tape *t, mu_tensor *x, mu_tensor *target);
MU_API mu_tensor *mu_bce_with_logits(mu_tape *t, mu_tensor *logits, mu_tensor *target);

/* -- gradient control ------------------------------------------------------------------------------------------- */
/* The same values, off the tape: no gradient passes. */
MU_API mu_tensor *mu_detach(mu_tape *t, mu_tensor *x);

#ifdef __cplusplus
}
#endif
#endif
