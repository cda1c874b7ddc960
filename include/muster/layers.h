/* Layers and networks, named and initialised as in torch.nn, torchvision and the public CIFAR ResNets. All belong to
 * the context until added to a parent. NULL on error; NULL options: all defaults. */
#ifndef MUSTER_LAYERS_H
#define MUSTER_LAYERS_H

#include <muster/module.h>
#include <muster/ops.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_linear_options {
    bool no_bias;
    mu_init init;  /* of the weight; kind MU_INIT_ZEROS: PyTorch's default */
} mu_linear_options;
/* weight (out, in), bias (out). */
MU_API mu_module *mu_linear(mu_context *c, int64_t in, int64_t out, const mu_linear_options *options);

typedef struct mu_conv_options {
    int stride;    /* 0: 1 */
    int padding;
    int dilation;  /* 0: 1 */
    int groups;    /* 0: 1 */
    bool no_bias;
    mu_init init;  /* of the weight; kind MU_INIT_ZEROS: PyTorch's default */
} mu_conv_options;
/* weight (out, in/groups, kernel, kernel), bias (out). */
MU_API mu_module *mu_conv2d_layer(mu_context *c, int64_t in, int64_t out, int kernel, const mu_conv_options *options);

/* weight, bias, running_mean, running_var (channels), num_batches_tracked (scalar MU_I64). Inputs (N, C) or
 * (N, C, H, W). A negative momentum means that the running statistics are the mean over all batches (PyTorch's None). */
MU_API mu_module *mu_batch_norm_layer(mu_context *c, int64_t channels, const mu_batch_norm_options *options);

/* The same over the batches of all ranks of g, see mu_sync_batch_norm. The group has to outlive the layer's use. */
MU_API mu_module *mu_sync_batch_norm_layer(mu_context *c, int64_t channels, mu_group *g,
                                           const mu_batch_norm_options *options);
/* Makes every batch norm of the tree synchronised over g, in place: parameters, buffers, names, modes and what optimisers
 * and reducers know of them stay. NULL: plain ones again. *count (may be NULL) is how many there are. Local; all ranks
 * alike. All or nothing. */
MU_API mu_status mu_sync_batch_norm_convert(mu_module *root, mu_group *g, int64_t *count) MU_MUST_USE;

MU_API mu_module *mu_relu_layer(mu_context *c);
MU_API mu_module *mu_dropout_layer(mu_context *c, float p); /* the identity in evaluation mode */
MU_API mu_module *mu_max_pool2d_layer(mu_context *c, int kernel, int stride, int padding);
MU_API mu_module *mu_global_avg_pool2d_layer(mu_context *c);
MU_API mu_module *mu_flatten_layer(mu_context *c); /* from dimension 1 */
MU_API mu_module *mu_identity_layer(mu_context *c);
/* Children are added with mu_module_add; unnamed ones with mu_sequential_append get "0", "1", ... */
MU_API mu_module *mu_sequential(mu_context *c);
MU_API mu_status mu_sequential_append(mu_module *sequential, mu_module *child) MU_MUST_USE;

typedef struct mu_resnet_options {
    int classes;      /* 0: 10 for the CIFAR form, 1000 for the ImageNet form */
    int in_channels;  /* 0: 3 */
} mu_resnet_options;
/* CIFAR form (He et al. 2015, section 4.2), option A shortcuts, names as in the public checkpoints:
 * "layer1.0.conv1.weight", "linear.weight". depth 20, 32, 44, 56, 110. Input (N, in_channels, H, W), any H, W >= 4. */
MU_API mu_module *mu_resnet_cifar(mu_context *c, int depth, const mu_resnet_options *options);
/* ImageNet form, torchvision's names: "layer1.0.downsample.0.weight", "fc.weight". depth 18, 34, 50. */
MU_API mu_module *mu_resnet(mu_context *c, int depth, const mu_resnet_options *options);

/* conv 32, pool, conv 64, pool, fc 128, fc classes, for images of in_channels x side x side, side divisible by 4. */
MU_API mu_module *mu_small_cnn(mu_context *c, int in_channels, int side, int classes);
/* in -> hidden[0] -> ... -> classes with relu between; flattens its input; names "0.weight", "2.weight", ... as a
 * torch.nn.Sequential of Linear and ReLU. */
MU_API mu_module *mu_mlp(mu_context *c, int64_t in, const int64_t *hidden, int hidden_count, int64_t classes);

typedef struct mu_model_options {
    int classes;     /* 0: the network's default */
    int in_channels; /* 0: 3 */
    int side;        /* height and width of the input; 0: 32. Used by cnn and mlp */
} mu_model_options;
/* By name: resnet20 resnet32 resnet44 resnet56 resnet18 resnet34 resnet50 cnn mlp. Unknown: MU_ERR_ARG, listing them. */
MU_API mu_module *mu_model(mu_context *c, const char *name, const mu_model_options *options);
/* Names, NULL-terminated. */
MU_API const char *const *mu_model_names(void);
/* Path of the classification head of a network made here ("linear", "fc", ...), NULL if unknown. */
MU_API const char *mu_model_head(const mu_module *model);
/* Replaces the head by a new one with that many classes, same kind and input size. */
MU_API mu_status mu_model_replace_head(mu_module *model, int classes) MU_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
