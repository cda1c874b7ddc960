/* Layers with the names, defaults and printing of torch.nn. */
#include "nn/nn.h"
#include "base/alloc.h"
#include "base/text.h"
#include "tape/parallel.h"
#include "tape/segment.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

mu_module *mui_module_put(mu_module *parent, const char *name, mu_module *child)
{
    return mu_module_add(parent, name, child) == MU_OK ? child : NULL;
}

mu_module *mui_module_need(mu_module *m, const char *name)
{
    mu_module *child = mui_module_child(m, name);
    if (child == NULL) {
        mui_fail(m->source.context, MU_ERR_STATE, "the %s%s%s has no child %s any more", m->kind,
                 m->path != NULL ? " at " : "", m->path != NULL ? m->path : "", name);
    }
    return child;
}

/* What the layers of this file keep; each uses its part. */
typedef struct layer {
    mu_context *context;
    mu_module *module;
    mu_parameter *weight, *bias;
    mu_tensor *running_mean, *running_var, *batches; /* batch norm */
    mu_conv2d_options conv;
    mu_batch_norm_options norm;
    mu_group *group;              /* batch norm, synchronised over it */
    float p;                      /* dropout */
    int kernel, stride, padding;  /* pooling */
} layer;

static void destroy_layer(void *self)
{
    layer *l = self;
    mui_free(l->context, l);
}

/* A module with a `layer`; NULL on failure. */
static layer *make(mu_context *c, const char *kind, mu_forward_fn forward, const char *extra)
{
    layer *l = mui_failed(c) ? NULL : mui_calloc(c, 1, sizeof(*l));
    if (l == NULL) {
        return NULL;
    }
    l->context = c;
    mu_module *m = mu_module_new(
        c, kind,
        &(mu_module_options){.forward = forward, .self = l, .destroy = destroy_layer, .extra = extra});
    if (m == NULL) {
        return NULL; /* l is gone */
    }
    l->module = m;
    return l;
}

/* Parameters "weight" and perhaps "bias"; the module, or NULL. PyTorch's bias is uniform in 1 / sqrt(fan_in). */
static mu_module *add_weight(layer *l, mu_dims dims, mu_init init, bool no_bias)
{
    if (init.kind == MU_INIT_ZEROS) {
        init = (mu_init){MU_INIT_KAIMING_UNIFORM, sqrtf(5.0f)};
    }
    double fan_in = 1;
    for (int i = 1; i < dims.ndim; i++) {
        fan_in *= (double)dims.dim[i];
    }
    l->weight = mu_module_parameter(l->module, "weight", dims, init);
    if (!no_bias) {
        float bound = fan_in > 0 ? (float)(1.0 / sqrt(fan_in)) : 0.0f;
        l->bias = mu_module_parameter(l->module, "bias", MU_DIMS(dims.dim[0]), (mu_init){MU_INIT_UNIFORM, bound});
    }
    return l->weight != NULL && (no_bias || l->bias != NULL) ? l->module : NULL;
}

static mu_tensor *value(mu_parameter *p)
{
    return p != NULL ? mu_parameter_tensor(p) : NULL;
}

/* -- linear ----------------------------------------------------------------------------------------------------- */
static mu_tensor *linear_forward(void *self, mu_tape *t, mu_tensor *x)
{
    layer *l = self;
    return mu_linear_op(t, x, value(l->weight), value(l->bias));
}

mu_module *mu_linear(mu_context *c, int64_t in, int64_t out, const mu_linear_options *options)
{
    mu_linear_options o = options != NULL ? *options : (mu_linear_options){0};
    if (in < 1 || out < 1) {
        mui_fail(c, MU_ERR_ARG, "linear layer: %lld inputs, %lld outputs; both must be at least 1", (long long)in,
                 (long long)out);
        return NULL;
    }
    char extra[100];
    snprintf(extra, sizeof(extra), "in_features=%lld, out_features=%lld, bias=%s", (long long)in, (long long)out,
             o.no_bias ? "False" : "True");
    layer *l = make(c, "Linear", linear_forward, extra);
    return l != NULL ? add_weight(l, MU_DIMS(out, in), o.init, o.no_bias) : NULL;
}

bool mui_is_linear(const mu_module *m, int64_t *in, int64_t *out, mu_linear_options *options)
{
    if (m == NULL || m->forward != linear_forward) {
        return false;
    }
    const layer *l = m->self;
    *out = l->weight->value.dims.dim[0];
    *in = l->weight->value.dims.dim[1];
    *options = (mu_linear_options){.no_bias = l->bias == NULL,
                                   .init = {(mu_init_kind)l->weight->init_kind, l->weight->init_value}};
    return true;
}

/* -- convolution ------------------------------------------------------------------------------------------------ */
static mu_tensor *conv_forward(void *self, mu_tape *t, mu_tensor *x)
{
    layer *l = self;
    return mu_conv2d(t, x, value(l->weight), value(l->bias), &l->conv);
}

mu_module *mu_conv2d_layer(mu_context *c, int64_t in, int64_t out, int kernel, const mu_conv_options *options)
{
    mu_conv_options o = options != NULL ? *options : (mu_conv_options){0};
    o.stride = o.stride != 0 ? o.stride : 1;
    o.dilation = o.dilation != 0 ? o.dilation : 1;
    o.groups = o.groups != 0 ? o.groups : 1;
    if (in < 1 || out < 1 || kernel < 1 || o.stride < 1 || o.padding < 0 || o.dilation < 1 || o.groups < 1 ||
        in % o.groups != 0 || out % o.groups != 0) {
        mui_fail(c, MU_ERR_ARG,
                 "convolution: %lld to %lld channels, kernel %d, stride %d, padding %d, dilation %d, groups %d; groups "
                 "must divide both channel counts, and only padding may be 0",
                 (long long)in, (long long)out, kernel, o.stride, o.padding, o.dilation, o.groups);
        return NULL;
    }
    mui_text extra;
    mui_text_init(&extra, c);
    mui_text_add(&extra, "%lld, %lld, kernel_size=(%d, %d), stride=(%d, %d)", (long long)in, (long long)out, kernel,
                 kernel, o.stride, o.stride);
    if (o.padding != 0) {
        mui_text_add(&extra, ", padding=(%d, %d)", o.padding, o.padding);
    }
    if (o.dilation != 1) {
        mui_text_add(&extra, ", dilation=(%d, %d)", o.dilation, o.dilation);
    }
    if (o.groups != 1) {
        mui_text_add(&extra, ", groups=%d", o.groups);
    }
    if (o.no_bias) {
        mui_text_add(&extra, ", bias=False");
    }
    layer *l = make(c, "Conv2d", conv_forward, mui_text_get(&extra));
    mui_text_free(&extra);
    if (l == NULL) {
        return NULL;
    }
    l->conv = (mu_conv2d_options){.stride = {o.stride, o.stride},
                                  .padding = {o.padding, o.padding},
                                  .dilation = {o.dilation, o.dilation},
                                  .groups = o.groups};
    mu_module *m = add_weight(l, MU_DIMS(out, in / o.groups, kernel, kernel), o.init, o.no_bias);
    if (m != NULL) {
        l->weight->conv_groups = o.groups;
        l->weight->conv_stride = o.stride;
    }
    return m;
}

/* -- batch normalisation ---------------------------------------------------------------------------------------- */
static mu_tensor *norm_forward_with(layer *l, mu_tape *t, mu_tensor *x, bool relu)
{
    mu_batch_norm_options o = l->norm;
    o.relu = o.relu || relu;
    o.evaluate = o.evaluate || !mui_tape_decide(t, l->module->training);
    int64_t *batches = (int64_t *)l->batches->data;
    if (o.momentum < 0) {
        o.momentum = (float)(1.0 / (double)(*batches + 1)); /* the mean over all batches so far */
    }
    mu_tensor *y =
        mu_sync_batch_norm(t, x, value(l->weight), value(l->bias), l->running_mean, l->running_var, l->group, &o);
    if (y != NULL && !o.evaluate && !mui_tape_recomputes(t) &&
        !mui_tape_defer(t, &(mui_late){.target = l->batches, .add = 1})) {
        (*batches)++;
    }
    return y;
}

static mu_tensor *norm_forward(void *self, mu_tape *t, mu_tensor *x)
{
    return norm_forward_with(self, t, x, false);
}

static mu_tensor *norm_relu_forward(void *self, mu_tape *t, mu_tensor *x)
{
    return norm_forward_with(self, t, x, true);
}

/* Python's repr of the float of shortest digits. */
static void python_float(char *out, size_t size, float v)
{
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(out, size, "%.*g", digits, (double)v);
        float back = 0;
        if (sscanf(out, "%f", &back) == 1 && back == v) {
            break;
        }
    }
    if (strpbrk(out, ".en") == NULL && strlen(out) + 3 <= size) {
        strcat(out, ".0");
    }
}

mu_module *mu_batch_norm_layer(mu_context *c, int64_t channels, const mu_batch_norm_options *options)
{
    mu_batch_norm_options o = options != NULL ? *options : (mu_batch_norm_options){0};
    o.eps = o.eps != 0 ? o.eps : 1e-5f;
    o.momentum = o.momentum != 0 ? o.momentum : 0.1f;
    if (channels < 1 || !(o.eps > 0) || !(o.momentum <= 1)) {
        mui_fail(c, MU_ERR_ARG,
                 "batch norm layer: %lld channels, eps %g, momentum %g; the first two must be positive, the last at most 1",
                 (long long)channels, (double)o.eps, (double)o.momentum);
        return NULL;
    }
    char eps[32], momentum[32] = "None", extra[200];
    python_float(eps, sizeof(eps), o.eps);
    if (o.momentum > 0) {
        python_float(momentum, sizeof(momentum), o.momentum);
    }
    snprintf(extra, sizeof(extra), "%lld, eps=%s, momentum=%s, affine=True, track_running_stats=True",
             (long long)channels, eps, momentum);
    layer *l = make(c, "BatchNorm2d", norm_forward, extra);
    if (l == NULL) {
        return NULL;
    }
    l->norm = o;
    mu_dims d = MU_DIMS(channels);
    l->weight = mu_module_parameter(l->module, "weight", d, (mu_init){MU_INIT_CONSTANT, 1});
    l->bias = mu_module_parameter(l->module, "bias", d, (mu_init){0});
    l->running_mean = mu_module_buffer(l->module, "running_mean", d, MU_F32, 0);
    l->running_var = mu_module_buffer(l->module, "running_var", d, MU_F32, 1);
    l->batches = mu_module_buffer(l->module, "num_batches_tracked", MU_SCALAR, MU_I64, 0);
    return l->batches != NULL ? l->module : NULL;
}

mu_module *mu_sync_batch_norm_layer(mu_context *c, int64_t channels, mu_group *g, const mu_batch_norm_options *options)
{
    mu_module *m = mu_batch_norm_layer(c, channels, options);
    return m != NULL && mu_sync_batch_norm_convert(m, g, NULL) == MU_OK ? m : NULL;
}

static int64_t count_norms(const mu_module *m)
{
    int64_t n = m->forward == norm_forward || m->forward == norm_relu_forward;
    for (size_t i = 0; i < m->child_count; i++) {
        n += count_norms(m->children[i]);
    }
    return n;
}

/* Kinds are for printing; they are made before anything is changed, so that this cannot fail. */
static void convert_norms(mu_module *m, mu_group *g, char **kinds, int64_t *next)
{
    if (m->forward == norm_forward || m->forward == norm_relu_forward) {
        layer *l = m->self;
        l->group = g;
        mui_free(l->context, m->kind);
        m->kind = kinds[(*next)++];
    }
    for (size_t i = 0; i < m->child_count; i++) {
        convert_norms(m->children[i], g, kinds, next);
    }
}

mu_status mu_sync_batch_norm_convert(mu_module *root, mu_group *g, int64_t *count)
{
    if (root == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = mu_module_context(root);
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    int64_t n = count_norms(root), made = 0, next = 0;
    char **kinds = mui_calloc(c, (size_t)n + 1, sizeof(*kinds));
    while (kinds != NULL && made < n && (kinds[made] = mui_strdup(c, g != NULL ? "SyncBatchNorm" : "BatchNorm2d")) != NULL) {
        made++;
    }
    mu_status s = kinds != NULL && made == n ? MU_OK : MU_ERR_NOMEM;
    if (s == MU_OK) {
        convert_norms(root, g, kinds, &next);
        if (count != NULL) {
            *count = n;
        }
    }
    for (int64_t i = next; i < made; i++) {
        mui_free(c, kinds[i]);
    }
    mui_free(c, kinds);
    return s;
}

/* -- without parameters ----------------------------------------------------------------------------------------- */
static mu_tensor *relu_forward(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    return mu_relu(t, x);
}

mu_module *mui_relu_layer(mu_context *c, const char *extra)
{
    return mu_module_new(c, "ReLU", &(mu_module_options){.forward = relu_forward, .extra = extra});
}

mu_module *mu_relu_layer(mu_context *c)
{
    return mui_relu_layer(c, NULL);
}

static mu_tensor *dropout_forward(void *self, mu_tape *t, mu_tensor *x)
{
    layer *l = self;
    return mui_tape_decide(t, l->module->training) ? mu_dropout(t, x, l->p) : x;
}

mu_module *mu_dropout_layer(mu_context *c, float p)
{
    if (!(p >= 0 && p < 1)) {
        mui_fail(c, MU_ERR_ARG, "dropout layer: probability %g; it must be in [0, 1)", (double)p);
        return NULL;
    }
    char text[32], extra[64];
    python_float(text, sizeof(text), p);
    snprintf(extra, sizeof(extra), "p=%s, inplace=False", text);
    layer *l = make(c, "Dropout", dropout_forward, extra);
    if (l == NULL) {
        return NULL;
    }
    l->p = p;
    return l->module;
}

static mu_tensor *max_pool_forward(void *self, mu_tape *t, mu_tensor *x)
{
    layer *l = self;
    return mu_max_pool2d(t, x, l->kernel, l->kernel,
                         &(mu_pool2d_options){.stride = {l->stride, l->stride}, .padding = {l->padding, l->padding}});
}

mu_module *mu_max_pool2d_layer(mu_context *c, int kernel, int stride, int padding)
{
    stride = stride != 0 ? stride : kernel;
    if (kernel < 1 || stride < 1 || padding < 0 || padding > kernel / 2) {
        mui_fail(c, MU_ERR_ARG, "max pool layer: kernel %d, stride %d, padding %d; padding is at most half the kernel",
                 kernel, stride, padding);
        return NULL;
    }
    char extra[120];
    snprintf(extra, sizeof(extra), "kernel_size=%d, stride=%d, padding=%d, dilation=1, ceil_mode=False", kernel,
             stride, padding);
    layer *l = make(c, "MaxPool2d", max_pool_forward, extra);
    if (l == NULL) {
        return NULL;
    }
    l->kernel = kernel;
    l->stride = stride;
    l->padding = padding;
    return l->module;
}

static mu_tensor *global_avg_forward(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    return mu_global_avg_pool2d(t, x);
}

mu_module *mu_global_avg_pool2d_layer(mu_context *c)
{
    return mu_module_new(c, "AdaptiveAvgPool2d",
                         &(mu_module_options){.forward = global_avg_forward, .extra = "output_size=(1, 1)"});
}

static mu_tensor *flatten_forward(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    return mu_flatten(t, x, 1);
}

mu_module *mu_flatten_layer(mu_context *c)
{
    return mu_module_new(c, "Flatten",
                         &(mu_module_options){.forward = flatten_forward, .extra = "start_dim=1, end_dim=-1"});
}

mu_module *mu_identity_layer(mu_context *c)
{
    return mu_module_new(c, "Identity", NULL);
}

mu_module *mu_sequential(mu_context *c)
{
    return mu_module_new(c, "Sequential", NULL);
}

mu_status mu_sequential_append(mu_module *sequential, mu_module *child)
{
    char name[24];
    snprintf(name, sizeof(name), "%zu", sequential != NULL ? sequential->child_count : 0);
    return mu_module_add(sequential, name, child);
}

/* -- fused pairs ------------------------------------------------------------------------------------------------ */
mu_tensor *mui_forward_norm_relu(mu_tape *t, mu_module *norm, mu_tensor *x)
{
    if (norm == NULL || norm->forward != norm_forward || norm->checkpoint) {
        return norm != NULL ? mu_relu(t, mu_forward(t, norm, x)) : NULL;
    }
    return mui_forward_as(t, norm, norm_relu_forward, x);
}

mu_tensor *mui_forward_norm_act(mu_tape *t, mu_module *norm, mu_module *act, mu_tensor *x)
{
    if (norm == NULL || act == NULL) {
        return NULL;
    }
    return act->forward == relu_forward ? mui_forward_norm_relu(t, norm, x) : mu_forward(t, act, mu_forward(t, norm, x));
}

mu_tensor *mui_forward_add_act(mu_tape *t, mu_module *act, mu_tensor *a, mu_tensor *b)
{
    if (act == NULL) {
        return NULL;
    }
    return act->forward == relu_forward ? mu_add_relu(t, a, b) : mu_forward(t, act, mu_add(t, a, b));
}

static bool is_plain(const mu_module *m, mu_forward_fn fn)
{
    return m != NULL && m->forward == fn && !m->checkpoint;
}

void mui_forget_norm(mu_tape *t, const mu_module *m, mu_tensor *x)
{
    while (is_plain(m, NULL) && m->child_count > 0) { /* a sequence, whose last child made x */
        m = m->children[m->child_count - 1];
    }
    if (is_plain(m, norm_forward)) {
        mui_tensor_forget(t, x);
    }
}

void mui_forget_pooled(mu_tape *t, const mu_module *norm, const mu_module *act, const mu_module *pool, mu_tensor *x)
{
    if (is_plain(norm, norm_forward) && is_plain(act, relu_forward) && is_plain(pool, max_pool_forward)) {
        mui_tensor_forget(t, x);
    }
}
