/* The ImageNet form of ResNets, as torchvision.models.resnet18, 34 and 50: same names, order, initial values and
 * printing. Activations are run fused with what precedes them. */
#include "nn/nn.h"

#include <stdio.h>

static const mu_init fan_out = {MU_INIT_KAIMING_NORMAL, 0};

static mu_module *conv(mu_context *c, int64_t in, int64_t out, int kernel, int stride)
{
    return mu_conv2d_layer(
        c, in, out, kernel,
        &(mu_conv_options){.stride = stride, .padding = kernel / 2, .no_bias = true, .init = fan_out});
}

static mu_tensor *conv_norm_act(mu_tape *t, mu_module *m, const char *conv_name, const char *norm_name, mu_module *act,
                                mu_tensor *x)
{
    mu_module *norm = mui_module_need(m, norm_name);
    x = mu_forward(t, mui_module_need(m, conv_name), x);
    return mui_forward_norm_act(t, norm, act, x);
}

static mu_tensor *conv_norm(mu_tape *t, mu_module *m, const char *conv_name, const char *norm_name, mu_tensor *x)
{
    x = mu_forward(t, mui_module_need(m, conv_name), x);
    return mu_forward(t, mui_module_need(m, norm_name), x);
}

/* relu(y + shortcut of x), y the result of the module `norm`. */
static mu_tensor *join(mu_tape *t, mu_module *m, const char *norm, mu_tensor *y, mu_tensor *x)
{
    mu_module *down = mui_module_child(m, "downsample");
    mu_tensor *shortcut = down != NULL ? mu_forward(t, down, x) : x;
    mu_tensor *z = mui_forward_add_act(t, mui_module_need(m, "relu"), y, shortcut);
    mui_forget_norm(t, mui_module_child(m, norm), y);
    mui_forget_norm(t, down, shortcut);
    return z;
}

static mu_tensor *basic_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self, *act = mui_module_need(m, "relu");
    mu_tensor *y = conv_norm_act(t, m, "conv1", "bn1", act, x);
    y = conv_norm(t, m, "conv2", "bn2", y);
    return join(t, m, "bn2", y, x);
}

static mu_tensor *bottleneck_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self, *act = mui_module_need(m, "relu");
    mu_tensor *y = conv_norm_act(t, m, "conv1", "bn1", act, x);
    y = conv_norm_act(t, m, "conv2", "bn2", act, y);
    y = conv_norm(t, m, "conv3", "bn3", y);
    return join(t, m, "bn3", y, x);
}

/* One residual block from `in` to width * expansion channels. */
static mu_module *block(mu_context *c, int64_t in, int64_t width, int stride, bool bottleneck)
{
    int64_t out = bottleneck ? width * 4 : width;
    mu_module *m = mu_module_new(c, bottleneck ? "Bottleneck" : "BasicBlock",
                                 &(mu_module_options){.forward = bottleneck ? bottleneck_forward : basic_forward});
    if (bottleneck) {
        /* The stride is in the 3x3 convolution, torchvision's "V1.5". */
        mui_module_put(m, "conv1", conv(c, in, width, 1, 1));
        mui_module_put(m, "bn1", mu_batch_norm_layer(c, width, NULL));
        mui_module_put(m, "conv2", conv(c, width, width, 3, stride));
        mui_module_put(m, "bn2", mu_batch_norm_layer(c, width, NULL));
        mui_module_put(m, "conv3", conv(c, width, out, 1, 1));
        mui_module_put(m, "bn3", mu_batch_norm_layer(c, out, NULL));
        mui_module_put(m, "relu", mui_relu_layer(c, "inplace=True"));
    } else {
        mui_module_put(m, "conv1", conv(c, in, width, 3, stride));
        mui_module_put(m, "bn1", mu_batch_norm_layer(c, width, NULL));
        mui_module_put(m, "relu", mui_relu_layer(c, "inplace=True"));
        mui_module_put(m, "conv2", conv(c, width, width, 3, 1));
        mui_module_put(m, "bn2", mu_batch_norm_layer(c, width, NULL));
    }
    if (stride != 1 || in != out) {
        mu_module *down = mui_module_put(m, "downsample", mu_sequential(c));
        mui_module_put(down, "0", conv(c, in, out, 1, stride));
        mui_module_put(down, "1", mu_batch_norm_layer(c, out, NULL));
    }
    return mui_failed(c) ? NULL : m;
}

static mu_tensor *resnet_forward(void *self, mu_tape *t, mu_tensor *x)
{
    static const char *const rest[] = {"maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"};
    mu_module *m = self;
    x = conv_norm_act(t, m, "conv1", "bn1", mui_module_need(m, "relu"), x);
    for (size_t i = 0; i < sizeof(rest) / sizeof(rest[0]); i++) {
        mu_tensor *y = mu_forward(t, mui_module_need(m, rest[i]), x);
        if (i == 0) {
            mui_forget_pooled(t, mui_module_child(m, "bn1"), mui_module_child(m, "relu"), mui_module_child(m, rest[0]), x);
        }
        x = y;
    }
    return mu_forward(t, mui_module_need(m, "fc"), mu_flatten(t, x, 1));
}

mu_module *mu_resnet(mu_context *c, int depth, const mu_resnet_options *options)
{
    static const int plans[][5] = {{18, 2, 2, 2, 2}, {34, 3, 4, 6, 3}, {50, 3, 4, 6, 3}};
    const int *plan = NULL;
    for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
        plan = plans[i][0] == depth ? plans[i] : plan;
    }
    mu_resnet_options o = options != NULL ? *options : (mu_resnet_options){0};
    o.classes = o.classes != 0 ? o.classes : 1000;
    o.in_channels = o.in_channels != 0 ? o.in_channels : 3;
    if (plan == NULL || o.classes < 1 || o.in_channels < 1) {
        mui_fail(c, MU_ERR_ARG, "resnet: depth %d, %d classes, %d input channels; depths are 18, 34, 50", depth,
                 o.classes, o.in_channels);
        return NULL;
    }
    bool bottleneck = depth >= 50;
    mu_module *m = mu_module_new(c, "ResNet", &(mu_module_options){.forward = resnet_forward});
    mui_module_put(m, "conv1", conv(c, o.in_channels, 64, 7, 2));
    mui_module_put(m, "bn1", mu_batch_norm_layer(c, 64, NULL));
    mui_module_put(m, "relu", mui_relu_layer(c, "inplace=True"));
    mui_module_put(m, "maxpool", mu_max_pool2d_layer(c, 3, 2, 1));
    int64_t in = 64;
    for (int stage = 0; stage < 4; stage++) {
        int64_t width = (int64_t)64 << stage;
        char name[16];
        snprintf(name, sizeof(name), "layer%d", stage + 1);
        mu_module *layer = mui_module_put(m, name, mu_sequential(c));
        for (int i = 0; i < plan[stage + 1]; i++) {
            mu_module *b = block(c, in, width, stage > 0 && i == 0 ? 2 : 1, bottleneck);
            if (layer == NULL || mu_sequential_append(layer, b) != MU_OK) {
                return NULL;
            }
            in = bottleneck ? width * 4 : width;
        }
    }
    mui_module_put(m, "avgpool", mu_global_avg_pool2d_layer(c));
    mui_module_put(m, "fc", mu_linear(c, in, o.classes, NULL));
    if (mui_failed(c)) {
        return NULL;
    }
    m->head = "fc";
    return m;
}
