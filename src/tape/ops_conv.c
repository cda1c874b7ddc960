/* Convolution. */
#include "tape/op_rows.h"

#include <limits.h>
#include <string.h>

/* -- conv2d ----------------------------------------------------------------------------------------------------- */

typedef struct conv_attr {
    const mui_conv2d_plan *plan; /* NULL: the output is empty */
    bool bias;
} conv_attr;

static mu_status fill_zero(mui_backward *b, mui_node *n, int input)
{
    const mu_tensor *x = n->in[input];
    if (!mui_wants_grad(b, n, input)) {
        return MU_OK;
    }
    void *dx = mui_grad_put(b, n, input, NULL);
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    memset(dx, 0, mui_bytes_as(x->dims, x->dtype, NULL));
    return MU_OK;
}

static mu_status conv_backward(mui_backward *b, mui_node *n)
{
    const conv_attr *a = n->attr;
    if (a->plan == NULL) {
        mu_status s = MU_OK;
        for (int i = 0; i < n->in_count && s == MU_OK; i++) {
            s = fill_zero(b, n, i);
        }
        return s;
    }
    const mui_conv2d_plan *p = a->plan;
    mui_engine *e = mui_backward_engine(b);
    const void *dy = mui_grad_in(b, n, p->y);
    if (dy == NULL) {
        return mui_backward_failed(n);
    }
    bool want_w = mui_wants_grad(b, n, 1), want_b = a->bias && mui_wants_grad(b, n, 2);
    if (want_w || want_b) {
        bool add_w = false, add_b = false;
        float *dw = want_w ? mui_grad_out(b, n, 1, p->w, &add_w) : NULL;
        float *db = want_b ? mui_grad_out(b, n, 2, NULL, &add_b) : NULL;
        if ((want_w && dw == NULL) || (want_b && db == NULL)) {
            return mui_backward_failed(n);
        }
        mu_status s = mui_conv2d_backward_weights(e, p, n->in[0]->data, dy, dw, db, add_w, add_b);
        if (s != MU_OK) {
            return s;
        }
    }
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    void *dx = mui_grad_put(b, n, 0, p->x);
    return dx != NULL ? mui_conv2d_backward_data(e, p, dy, mui_cfloats(n->in[1]), dx) : mui_backward_failed(n);
}

static bool conv_options_bad(mu_tape *t, const mu_conv2d_options *o)
{
    for (int i = 0; i < 2; i++) {
        if (o->stride[i] < 0 || o->padding[i] < 0 || o->dilation[i] < 0) {
            mui_op_fail(t, MU_ERR_ARG, "conv2d", "negative stride %d, padding %d or dilation %d", o->stride[i],
                        o->padding[i], o->dilation[i]);
            return true;
        }
    }
    if (o->groups < 0) {
        mui_op_fail(t, MU_ERR_ARG, "conv2d", "negative groups %d", o->groups);
        return true;
    }
    return false;
}

static bool conv_shape_of(mu_tape *t, const mu_tensor *x, const mu_tensor *w, const mu_tensor *bias,
                          const mu_conv2d_options *o, mui_conv2d_shape *s)
{
    char xt[MUI_DIMS_TEXT], wt[MUI_DIMS_TEXT], bt[MUI_DIMS_TEXT];
    memset(s, 0, sizeof(*s));
    s->groups = o->groups > 0 ? o->groups : 1;
    bool fits = x->dims.ndim == 4 && w->dims.ndim == 4;
    if (fits) {
        const int64_t *xd = x->dims.dim, *wd = w->dims.dim;
        s->n = xd[0], s->ic = xd[1], s->ih = xd[2], s->iw = xd[3];
        s->oc = wd[0], s->kh = wd[2], s->kw = wd[3];
        fits = wd[1] > 0 && wd[2] > 0 && wd[3] > 0 && wd[0] > 0 && s->ic % s->groups == 0 &&
               s->oc % s->groups == 0 && s->ic / s->groups == wd[1];
    }
    if (!fits) {
        mui_op_fail(t, MU_ERR_SHAPE, "conv2d",
                    "input %s and weight %s do not fit with %lld groups: (N, C, H, W) and (K, C/groups, R, S) were "
                    "expected",
                    mui_dims_text(x->dims, xt), mui_dims_text(w->dims, wt), (long long)s->groups);
        return false;
    }
    if (bias != NULL && (bias->dims.ndim != 1 || bias->dims.dim[0] != s->oc)) {
        mui_op_fail(t, MU_ERR_SHAPE, "conv2d", "bias %s does not fit weight %s: one value per output channel",
                    mui_dims_text(bias->dims, bt), mui_dims_text(w->dims, wt));
        return false;
    }
    int64_t in[2] = {s->ih, s->iw}, kernel[2] = {s->kh, s->kw}, out[2];
    for (int i = 0; i < 2; i++) {
        s->stride[i] = o->stride[i] > 0 ? o->stride[i] : 1;
        s->pad[i] = o->padding[i];
        s->dilation[i] = o->dilation[i] > 0 ? o->dilation[i] : 1;
        int64_t room = in[i] + 2 * s->pad[i] - s->dilation[i] * (kernel[i] - 1) - 1;
        out[i] = room < 0 || in[i] == 0 ? 0 : room / s->stride[i] + 1;
    }
    s->oh = out[0], s->ow = out[1];
    if (s->oh == 0 || s->ow == 0) {
        mui_op_fail(t, MU_ERR_SHAPE, "conv2d", "input %s, padding included, is smaller than the kernel of weight %s",
                    mui_dims_text(x->dims, xt), mui_dims_text(w->dims, wt));
        return false;
    }
    s->bias = bias != NULL;
    return true;
}

mu_tensor *mu_conv2d(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias, const mu_conv2d_options *options)
{
    static const mu_conv2d_options defaults;
    const mu_conv2d_options *o = options != NULL ? options : &defaults;
    mu_tensor *in[3] = {x, weight, bias};
    int count = bias != NULL ? 3 : 2;
    mui_conv2d_shape s;
    if (mui_matrix_bad(t, "conv2d", in, count, 1)) {
        return NULL;
    }
    x = in[0], weight = in[1], bias = in[2];
    if (conv_options_bad(t, o) || !conv_shape_of(t, x, weight, bias, o, &s)) {
        return NULL;
    }
    mu_dtype dtype = x->dtype;
    s.bf16 = dtype == MU_BF16;
    mu_dims out = MU_DIMS(s.n, s.oc, s.oh, s.ow);
    conv_attr a = {.bias = bias != NULL};
    size_t bytes = 0;
    /* Padding can make any size of a small image. */
    if (mui_dims_check(x->context, out, dtype, &bytes) != MU_OK) {
        return NULL;
    }
    if (mui_dims_elements(out) == 0) {
        return mui_record_reads(t, &mui_op_conv2d, mui_tensor_new(t, out, dtype, NULL), in, count, &a, sizeof(a), NULL,
                                0, 0);
    }
    s.inference = !mui_will_record(t, in, count);
    mui_engine *e = mui_tape_engine(t);
    a.plan = mui_conv2d_plan_get(e, &s, weight->layout);
    if (a.plan == NULL) {
        return NULL;
    }
    in[0] = mui_in_layout(t, x, a.plan->x);
    in[1] = mui_in_layout(t, weight, a.plan->w);
    in[2] = mui_in_layout(t, bias, NULL);
    mu_tensor *y = in[0] != NULL && in[1] != NULL ? mui_tensor_new(t, out, dtype, a.plan->y) : NULL;
    if (y == NULL || (bias != NULL && in[2] == NULL) ||
        mui_conv2d_forward(e, a.plan, in[0]->data, mui_cfloats(in[1]), bias != NULL ? mui_cfloats(in[2]) : NULL, y->data) !=
            MU_OK) {
        return NULL;
    }
    uint32_t reads = (mui_tensor_wants_grad(weight) ? MUI_READS_IN(0) : 0) |
                     (bias != NULL && mui_tensor_wants_grad(bias) ? MUI_READS_IN(0) : 0) |
                     (mui_tensor_wants_grad(x) ? MUI_READS_IN(1) : 0);
    return mui_record_reads(t, &mui_op_conv2d, y, in, count, &a, sizeof(a), NULL, 0, reads);
}

static mu_tensor *conv_sample(mu_tape *t, int i, uint64_t seed)
{
    /* Channels in, out, image, kernel, options, bias, input made non-contiguous. */
    static const struct {
        int64_t n, c, h, w, k, r, s;
        mu_conv2d_options o;
        bool bias, permuted;
    } samples[] = {
        {2, 3, 5, 4, 4, 3, 3, {.padding = {1, 1}}, true, false},
        {1, 1, 1, 1, 1, 1, 1, {.groups = 1}, false, false},
        {2, 5, 6, 5, 7, 2, 3, {.stride = {2, 1}, .padding = {0, 2}}, true, true},
        {1, 4, 7, 7, 6, 3, 3, {.dilation = {2, 2}, .groups = 2, .padding = {2, 1}}, true, false},
        {2, 4, 4, 4, 4, 3, 3, {.groups = 4, .padding = {1, 1}}, false, false},
        {0, 3, 5, 5, 2, 3, 3, {.groups = 1}, true, false},
        {1, 16, 4, 4, 17, 1, 1, {.stride = {2, 2}}, true, false},
    };
    if (i < 0 || (size_t)i >= sizeof(samples) / sizeof(samples[0])) {
        return NULL;
    }
    int64_t g = samples[i].o.groups > 0 ? samples[i].o.groups : 1;
    mu_tensor *x = NULL;
    if (samples[i].permuted) {
        x = mui_sample_leaf(t, MU_DIMS(samples[i].n, samples[i].h, samples[i].w, samples[i].c), seed);
        x = mu_permute(t, x, MU_DIMS(0, 3, 1, 2));
    } else {
        x = mui_sample_leaf(t, MU_DIMS(samples[i].n, samples[i].c, samples[i].h, samples[i].w), seed);
    }
    mu_tensor *w = mui_sample_leaf(t, MU_DIMS(samples[i].k, samples[i].c / g, samples[i].r, samples[i].s), seed + 1);
    mu_tensor *b = samples[i].bias ? mui_sample_leaf(t, MU_DIMS(samples[i].k), seed + 2) : NULL;
    return mu_conv2d(t, x, w, b, &samples[i].o);
}

const mui_op mui_op_conv2d = {"conv2d", conv_backward, conv_sample, MUI_READS_IN(0) | MUI_READS_IN(1), false};
