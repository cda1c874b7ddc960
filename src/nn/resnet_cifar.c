/* The CIFAR form of ResNets (He et al. 2015, section 4.2), with the names and initial values of the public checkpoints:
 * three stages of 16, 32, 64 channels, option A shortcuts (subsample, pad channels with zeros: no parameters). */
#include "nn/nn.h"
#include "tape/op.h"

#include <stdio.h>

static const mu_init fan_in = {MU_INIT_KAIMING_NORMAL_IN, 0};

static mu_module *conv(mu_context *c, int64_t in, int64_t out, int stride)
{
    return mu_conv2d_layer(c, in, out, 3,
                           &(mu_conv_options){.stride = stride, .padding = 1, .no_bias = true, .init = fan_in});
}

/* x[:, :, ::2, ::2] between zero channels: half of the new channels are those of x. */
static mu_tensor *option_a_forward(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    int64_t channels = mu_tensor_dim(x, 1);
    return mui_subsample_pad(t, x, 2, channels / 2, channels / 2);
}

static mu_tensor *block_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self, *shortcut = mui_module_child(m, "shortcut");
    mu_module *bn1 = mui_module_need(m, "bn1");
    mu_tensor *y = mu_forward(t, mui_module_need(m, "conv1"), x);
    y = mui_forward_norm_relu(t, bn1, y);
    y = mu_forward(t, mui_module_need(m, "conv2"), y);
    y = mu_forward(t, mui_module_need(m, "bn2"), y);
    mu_tensor *z = mu_add_relu(t, y, shortcut != NULL ? mu_forward(t, shortcut, x) : x);
    mui_forget_norm(t, mui_module_child(m, "bn2"), y);
    return z;
}

static mu_module *block(mu_context *c, int64_t in, int64_t out, int stride)
{
    mu_module *m = mu_module_new(c, "BasicBlock", &(mu_module_options){.forward = block_forward});
    mui_module_put(m, "conv1", conv(c, in, out, stride));
    mui_module_put(m, "bn1", mu_batch_norm_layer(c, out, NULL));
    mui_module_put(m, "conv2", conv(c, out, out, 1));
    mui_module_put(m, "bn2", mu_batch_norm_layer(c, out, NULL));
    mu_module *shortcut = in != out ? mu_module_new(c, "LambdaLayer", &(mu_module_options){.forward = option_a_forward})
                                    : mu_sequential(c);
    return mui_module_put(m, "shortcut", shortcut) != NULL && !mui_failed(c) ? m : NULL;
}

static mu_tensor *resnet_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self, *bn1 = mui_module_need(m, "bn1");
    x = mu_forward(t, mui_module_need(m, "conv1"), x);
    x = mui_forward_norm_relu(t, bn1, x);
    x = mu_forward(t, mui_module_need(m, "layer1"), x);
    x = mu_forward(t, mui_module_need(m, "layer2"), x);
    x = mu_forward(t, mui_module_need(m, "layer3"), x);
    x = mu_flatten(t, mu_global_avg_pool2d(t, x), 1);
    return mu_forward(t, mui_module_need(m, "linear"), x);
}

mu_module *mu_resnet_cifar(mu_context *c, int depth, const mu_resnet_options *options)
{
    mu_resnet_options o = options != NULL ? *options : (mu_resnet_options){0};
    o.classes = o.classes != 0 ? o.classes : 10;
    o.in_channels = o.in_channels != 0 ? o.in_channels : 3;
    if ((depth != 20 && depth != 32 && depth != 44 && depth != 56 && depth != 110) || o.classes < 1 ||
        o.in_channels < 1) {
        mui_fail(c, MU_ERR_ARG,
                 "resnet, CIFAR form: depth %d, %d classes, %d input channels; depths are 20, 32, 44, 56, 110", depth,
                 o.classes, o.in_channels);
        return NULL;
    }
    mu_module *m = mu_module_new(c, "ResNet", &(mu_module_options){.forward = resnet_forward});
    mui_module_put(m, "conv1", conv(c, o.in_channels, 16, 1));
    mui_module_put(m, "bn1", mu_batch_norm_layer(c, 16, NULL));
    int64_t in = 16;
    for (int stage = 0; stage < 3; stage++) {
        int64_t width = (int64_t)16 << stage;
        char name[16];
        snprintf(name, sizeof(name), "layer%d", stage + 1);
        mu_module *layer = mui_module_put(m, name, mu_sequential(c));
        for (int i = 0; i < (depth - 2) / 6; i++) {
            mu_module *b = block(c, in, width, stage > 0 && i == 0 ? 2 : 1);
            if (layer == NULL || mu_sequential_append(layer, b) != MU_OK) {
                return NULL;
            }
            in = width;
        }
    }
    mui_module_put(m, "linear", mu_linear(c, in, o.classes, &(mu_linear_options){.init = fan_in}));
    if (mui_failed(c)) {
        return NULL;
    }
    m->head = "linear";
    return m;
}
