/* Small networks, and all networks by name. */
#include "nn/nn.h"
#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_SIDE = 1 << 16 }; /* pixels of an input: products with it stay far from overflow */

/* -- cnn -------------------------------------------------------------------------------------------------------- */
static mu_tensor *cnn_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self, *pool = mui_module_need(m, "pool");
    x = mu_forward(t, pool, mu_relu(t, mu_forward(t, mui_module_need(m, "conv1"), x)));
    x = mu_forward(t, pool, mu_relu(t, mu_forward(t, mui_module_need(m, "conv2"), x)));
    x = mu_relu(t, mu_forward(t, mui_module_need(m, "fc1"), mu_flatten(t, x, 1)));
    return mu_forward(t, mui_module_need(m, "fc2"), x);
}

mu_module *mu_small_cnn(mu_context *c, int in_channels, int side, int classes)
{
    if (in_channels < 1 || side < 4 || side > LARGEST_SIDE || side % 4 != 0 || classes < 1) {
        mui_fail(c, MU_ERR_ARG,
                 "cnn: %d input channels, side %d, %d classes; the side must be divisible by 4 and at most %d",
                 in_channels, side, classes, LARGEST_SIDE);
        return NULL;
    }
    mu_conv_options same = {.padding = 1};
    mu_module *m = mu_module_new(c, "SmallCNN", &(mu_module_options){.forward = cnn_forward});
    mui_module_put(m, "conv1", mu_conv2d_layer(c, in_channels, 32, 3, &same));
    mui_module_put(m, "conv2", mu_conv2d_layer(c, 32, 64, 3, &same));
    mui_module_put(m, "pool", mu_max_pool2d_layer(c, 2, 2, 0));
    mui_module_put(m, "fc1", mu_linear(c, (int64_t)64 * (side / 4) * (side / 4), 128, NULL));
    mui_module_put(m, "fc2", mu_linear(c, 128, classes, NULL));
    if (mui_failed(c)) {
        return NULL;
    }
    m->head = "fc2";
    return m;
}

/* -- mlp -------------------------------------------------------------------------------------------------------- */
static mu_tensor *mlp_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self;
    x = mu_flatten(t, x, 1);
    for (size_t i = 0; i < m->child_count; i++) {
        x = mu_forward(t, m->children[i], x);
    }
    return x;
}

mu_module *mu_mlp(mu_context *c, int64_t in, const int64_t *hidden, int hidden_count, int64_t classes)
{
    if (hidden_count < 0 || (hidden_count > 0 && hidden == NULL)) {
        mui_fail(c, MU_ERR_ARG, "mlp: %d hidden layers without sizes", hidden_count);
        return NULL;
    }
    mu_module *m = mu_module_new(c, "Sequential", &(mu_module_options){.forward = mlp_forward});
    if (m == NULL) {
        return NULL;
    }
    for (int i = 0; i <= hidden_count; i++) {
        int64_t out = i < hidden_count ? hidden[i] : classes;
        if (mu_sequential_append(m, mu_linear(c, in, out, NULL)) != MU_OK ||
            (i < hidden_count && mu_sequential_append(m, mu_relu_layer(c)) != MU_OK)) {
            return NULL;
        }
        in = out;
    }
    snprintf(m->head_text, sizeof(m->head_text), "%d", 2 * hidden_count);
    m->head = m->head_text;
    return m;
}

/* -- by name ---------------------------------------------------------------------------------------------------- */
static const char *const names[] = {"resnet20", "resnet32", "resnet44", "resnet56", "resnet18",
                                    "resnet34", "resnet50", "cnn",      "mlp",      NULL};

const char *const *mu_model_names(void)
{
    return names;
}

static mu_module *unknown(mu_context *c, const char *name)
{
    mui_text list;
    mui_text_init(&list, c);
    for (size_t i = 0; names[i] != NULL; i++) {
        mui_text_add(&list, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    mui_fail(c, MU_ERR_ARG, "there is no model \"%s\"; there are %s", name != NULL ? name : "", mui_text_get(&list));
    mui_text_free(&list);
    return NULL;
}

mu_module *mu_model(mu_context *c, const char *name, const mu_model_options *options)
{
    mu_model_options o = options != NULL ? *options : (mu_model_options){0};
    if (mui_failed(c)) {
        return NULL;
    }
    bool known = false;
    for (size_t i = 0; name != NULL && names[i] != NULL; i++) {
        known = known || strcmp(names[i], name) == 0;
    }
    if (!known) {
        return unknown(c, name);
    }
    if (strncmp(name, "resnet", 6) == 0) {
        int depth = atoi(name + 6);
        mu_resnet_options r = {.classes = o.classes, .in_channels = o.in_channels};
        return depth == 18 || depth == 34 || depth == 50 ? mu_resnet(c, depth, &r) : mu_resnet_cifar(c, depth, &r);
    }
    int classes = o.classes != 0 ? o.classes : 10, channels = o.in_channels != 0 ? o.in_channels : 3;
    int side = o.side != 0 ? o.side : 32;
    if (strcmp(name, "cnn") == 0) {
        return mu_small_cnn(c, channels, side, classes);
    }
    if (channels < 1 || side < 1 || side > LARGEST_SIDE) {
        mui_fail(c, MU_ERR_ARG, "mlp: %d input channels, side %d; both must be at least 1, the side at most %d", channels,
                 side, LARGEST_SIDE);
        return NULL;
    }
    const int64_t hidden[] = {256, 128};
    return mu_mlp(c, (int64_t)channels * side * side, hidden, 2, classes);
}

const char *mu_model_head(const mu_module *model)
{
    return model != NULL ? model->head : NULL;
}

mu_status mu_model_replace_head(mu_module *model, int classes)
{
    if (model == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "replacing a head: the model is NULL");
    }
    mu_context *c = model->source.context;
    int64_t in = 0, out = 0;
    mu_linear_options options;
    if (model->head == NULL || !mui_is_linear(mu_module_get(model, model->head), &in, &out, &options)) {
        return mui_fail(c, MU_ERR_ARG, "replacing a head: the %s has no linear layer that is known as its head",
                        model->kind);
    }
    mu_module *head = mu_linear(c, in, classes, &options);
    return head != NULL ? mu_module_replace(model, model->head, head) : mu_context_status(c);
}
