/* Convolutions by oneDNN. The forward primitive chooses the layouts of input and output; the weight stays in the layout
 * it is stored in wherever a fast implementation can work from it, else it is converted inside each call (it changes at
 * every step, so there is nothing to keep). Backward primitives are made when first asked for. */
#include "kern/dnnl_compat.h"
#include "kern/few_channels.h"
#include "kern/tap_conv.h"

#include <stdio.h>
#include <string.h>

typedef enum conv_by { NOT_MADE, BY_PRIMITIVE, BY_TAPS, BY_FEW_CHANNELS, BY_REFERENCE } conv_by;
/* One direction: what does it, and what that wants instead of the stored weight, the plan's x, or the plan's y. */
typedef struct conv_pass {
    conv_by by;
    mui_exec *exec; /* the primitive. With taps, x_reorder and y_reorder of a result go back to the plan's layout */
    mui_exec *weight_reorder, *x_reorder, *y_reorder; /* NULL: works on the plan's layout */
    size_t weight_bytes, x_bytes, y_bytes;
} conv_pass;

typedef struct dnnl_conv {
    mui_conv2d_impl base;
    dnnl_primitive_desc_t forward_pd; /* hint for the backward ones */
    dnnl_alg_kind_t algorithm;
    mui_md x, y, stored; /* as forward has them; a layout of 1x1 maps is plain too, but plain would choose slow code */
    conv_pass pass[3];                /* by mui_conv_pass */
    const mui_conv2d_impl *reference; /* serves a direction that oneDNN lacks; NULL until needed */
    size_t stored_bytes;              /* of the weight */
    char what[160];
} dnnl_conv;

/* -- descriptors ------------------------------------------------------------------------------------------------ */
typedef struct conv_dims {
    int64_t x[4], y[4], w[5], b[1];
    int w_ndims;
} conv_dims;

static conv_dims dims_of(const mui_conv2d_shape *s)
{
    conv_dims d = {.x = {s->n, s->ic, s->ih, s->iw}, .y = {s->n, s->oc, s->oh, s->ow}, .b = {s->oc}};
    if (s->groups > 1) {
        d.w_ndims = 5;
        memcpy(d.w, (const int64_t[]){s->groups, s->oc / s->groups, s->ic / s->groups, s->kh, s->kw}, sizeof(d.w));
    } else {
        d.w_ndims = 4;
        memcpy(d.w, (const int64_t[]){s->oc, s->ic, s->kh, s->kw}, 4 * sizeof(int64_t));
    }
    return d;
}

static mui_dnnl_conv_args args_of(const mui_conv2d_shape *s, dnnl_alg_kind_t algorithm)
{
    return (mui_dnnl_conv_args){.algorithm = algorithm,
                                .stride = {s->stride[0], s->stride[1]},
                                .gaps = {s->dilation[0] - 1, s->dilation[1] - 1},
                                .pad = {s->pad[0], s->pad[1]}};
}

/* The fixed rule of when Winograd F(4x3) pays; never by timing, so that all ranks do the same. */
static bool winograd_pays(const mui_engine *e, const mui_conv2d_shape *s)
{
    return !e->context->no_winograd && s->kh == 3 && s->kw == 3 && s->stride[0] == 1 && s->stride[1] == 1 &&
           s->dilation[0] == 1 && s->dilation[1] == 1 && s->groups == 1 && s->ic % 16 == 0 && s->oc % 16 == 0 &&
           s->ic >= 64 && s->oc >= 64 && s->oh * s->ow >= 16;
}

/* Implementations on plain layouts or without vector code: taken only when there is nothing else. */
static bool is_slow(dnnl_primitive_desc_t pd)
{
    const char *name = mui_pd_name(pd);
    return strstr(name, "ref") != NULL || strstr(name, "gemm") != NULL;
}

/* -- forward ---------------------------------------------------------------------------------------------------- */
/* Tries the stored weight as it is, then a weight of oneDNN's choice. *pd NULL: unimplemented. */
static mu_status choose_forward(mui_engine *e, const mui_conv2d_shape *s, dnnl_alg_kind_t algorithm, mui_md stored,
                                dnnl_primitive_desc_t *pd)
{
    conv_dims d = dims_of(s);
    mui_dnnl_conv_args a = args_of(s, algorithm);
    a.x = mui_md_any(e, 4, d.x);
    a.y = mui_md_any(e, 4, d.y);
    a.b = s->bias ? mui_md_plain(e, 1, d.b) : NULL;
    mui_md any = mui_md_any(e, d.w_ndims, d.w);
    if (a.x == NULL || a.y == NULL || any == NULL || (s->bias && a.b == NULL)) {
        return MU_ERR_DEVICE;
    }
    *pd = NULL;
    if (stored != NULL) {
        a.w = stored;
        mu_status st = mui_pd_conv(e, MUI_CONV_FORWARD, &a, NULL, pd);
        if (st != MU_OK || (*pd != NULL && !is_slow(*pd))) {
            return st;
        }
    }
    a.w = any;
    return mui_pd_conv(e, MUI_CONV_FORWARD, &a, NULL, pd);
}

/* A reorder between the stored form and what a primitive wants; *out NULL when they are one. */
static bool weight_reorder(mui_engine *e, mui_md from, mui_md to, mui_exec **out)
{
    mui_md_info a = mui_md_query(from), b = mui_md_query(to);
    *out = NULL;
    if (a.blocked && b.blocked) {
        const mui_layout *x = NULL, *y = NULL;
        if (!mui_dnnl_layout(e, from, &x) || !mui_dnnl_layout(e, to, &y)) {
            return false;
        }
        if (x == y) {
            return true;
        }
    }
    *out = mui_dnnl_reorder_exec(e, from, to);
    return *out != NULL;
}

/* The pass by matrix products: what it reads and writes is in tap_conv.h's layouts, the rest is converted. */
static mu_status make_taps(mui_engine *e, dnnl_conv *c, mui_conv_pass which)
{
    conv_pass *p = &c->pass[which];
    conv_dims d = dims_of(&c->base.plan.shape);
    mui_md x = mui_md_tagged(e, 4, d.x, dnnl_acdb), y = mui_md_tagged(e, 4, d.y, dnnl_acdb);
    mui_md w = mui_md_tagged(e, 4, d.w, dnnl_cdba);
    bool from_x = which != MUI_CONV_BACKWARD_DATA, from_y = which != MUI_CONV_FORWARD;
    bool from_w = which != MUI_CONV_BACKWARD_WEIGHTS;
    if (x == NULL || y == NULL || w == NULL || !weight_reorder(e, from_x ? c->x : x, from_x ? x : c->x, &p->x_reorder) ||
        !weight_reorder(e, from_y ? c->y : y, from_y ? y : c->y, &p->y_reorder) ||
        !weight_reorder(e, from_w ? c->stored : w, from_w ? w : c->stored, &p->weight_reorder)) {
        return MU_ERR_DEVICE;
    }
    p->weight_bytes = mui_md_bytes(w);
    p->x_bytes = mui_md_bytes(x);
    p->y_bytes = mui_md_bytes(y);
    p->by = BY_TAPS;
    return MU_OK;
}

static bool make_forward(mui_engine *e, dnnl_conv *c, mui_md stored)
{
    const mui_conv2d_shape *s = &c->base.plan.shape;
    conv_pass *p = &c->pass[MUI_CONV_FORWARD];
    dnnl_primitive_desc_t pd = c->forward_pd;
    mui_md x = c->x = mui_pd_md(e, pd, dnnl_query_src_md), y = c->y = mui_pd_md(e, pd, dnnl_query_dst_md);
    mui_md w = mui_pd_md(e, pd, dnnl_query_weights_md), b = NULL;
    c->stored = stored;
    if (x == NULL || y == NULL || w == NULL || !mui_dnnl_layout(e, x, &c->base.plan.x) ||
        !mui_dnnl_layout(e, y, &c->base.plan.y) || !weight_reorder(e, stored, w, &p->weight_reorder)) {
        return false;
    }
    p->weight_bytes = mui_md_bytes(w);
    c->stored_bytes = mui_md_bytes(stored);
    if (mui_taps_pay(s, false)) {
        return make_taps(e, c, MUI_CONV_FORWARD) == MU_OK;
    }
    if (s->bias) {
        b = mui_md_plain(e, 1, (const int64_t[]){s->oc});
    }
    p->exec = mui_exec_new(e, pd, s->bias ? 4 : 3,
                           (const int[]){DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS},
                           (const mui_md[]){x, w, y, b}, c->what);
    p->by = BY_PRIMITIVE;
    return p->exec != NULL;
}

static mu_status convert(mui_engine *e, mui_conversion what, mui_exec *reorder, const float *from, float *to)
{
    mui_timer t;
    mui_conversion_start(&t, e, what, reorder->out_bytes);
    mu_status s = mui_exec_run(e, reorder, 2, (const void *const[]){from, to});
    mui_timer_stop(&t, 0, 2.0 * (double)reorder->out_bytes);
    return s;
}

/* Input of a pass converted to what it wants, in that scratch slot (a weight in MUI_SCRATCH_W). NULL on failure. */
static const float *wanted(mui_engine *e, mui_exec *reorder, size_t bytes, const float *from, mui_scratch slot)
{
    if (reorder == NULL) {
        return from;
    }
    float *to = mui_engine_scratch(e, slot, bytes);
    mui_conversion what = slot == MUI_SCRATCH_W ? MUI_CONVERT_WEIGHT : MUI_CONVERT_LAYOUT;
    if (to == NULL || convert(e, what, reorder, from, to) != MU_OK) {
        return NULL;
    }
    return to;
}

static const float *wanted_weight(mui_engine *e, const conv_pass *p, const float *w)
{
    return wanted(e, p->weight_reorder, p->weight_bytes, w, MUI_SCRATCH_W);
}

static mu_status forward(mui_engine *e, const mui_conv2d_plan *p, const void *x, const float *w, const float *bias,
                         void *y)
{
    const dnnl_conv *c = (const dnnl_conv *)p;
    const conv_pass *pass = &c->pass[MUI_CONV_FORWARD];
    w = wanted_weight(e, pass, w);
    if (w == NULL) {
        return MU_ERR_DEVICE;
    }
    if (pass->by == BY_PRIMITIVE) {
        return mui_exec_run(e, pass->exec, p->shape.bias ? 4 : 3, (const void *const[]){x, w, y, bias});
    }
    x = wanted(e, pass->x_reorder, pass->x_bytes, x, MUI_SCRATCH_X);
    float *out = pass->y_reorder == NULL ? y : mui_engine_scratch(e, MUI_SCRATCH_Y, pass->y_bytes);
    if (x == NULL || out == NULL) {
        return MU_ERR_DEVICE;
    }
    mu_status s = mui_tap_forward(e, &p->shape, x, w, bias, out);
    return s == MU_OK && out != y ? convert(e, MUI_CONVERT_LAYOUT, pass->y_reorder, out, y) : s;
}

/* -- backward --------------------------------------------------------------------------------------------------- */
/* The best primitive of a backward direction: first on the plan's own layouts with the stored weight, then with any
 * weight, then with any of all. Winograd falls back to direct inside each. */
static mu_status choose_backward(mui_engine *e, dnnl_conv *c, mui_conv_pass pass, dnnl_primitive_desc_t *pd)
{
    const mui_conv2d_plan *p = &c->base.plan;
    conv_dims d = dims_of(&p->shape);
    mui_md x = c->x, y = c->y, w = c->stored, any_x = mui_md_any(e, 4, d.x),
           any_y = mui_md_any(e, 4, d.y), any_w = mui_md_any(e, d.w_ndims, d.w);
    mui_md b = pass == MUI_CONV_BACKWARD_WEIGHTS && p->shape.bias ? mui_md_plain(e, 1, d.b) : NULL;
    if (any_x == NULL || any_y == NULL || any_w == NULL) {
        return MU_ERR_DEVICE;
    }
    const mui_md tries[3][3] = {{x, w, y}, {x, any_w, y}, {any_x, any_w, any_y}};
    dnnl_primitive_desc_t slow = NULL;
    for (int i = 0; i < 6; i++) {
        bool winograd = i < 3;
        if (winograd && c->algorithm != dnnl_convolution_winograd) {
            continue;
        }
        mui_dnnl_conv_args a =
            args_of(&p->shape, winograd ? dnnl_convolution_winograd : dnnl_convolution_direct);
        a.x = tries[i % 3][0];
        a.w = tries[i % 3][1];
        a.y = tries[i % 3][2];
        a.b = b;
        mu_status s = mui_pd_conv(e, pass, &a, c->forward_pd, pd);
        if (s != MU_OK || (*pd != NULL && !is_slow(*pd))) {
            return s;
        }
        slow = *pd != NULL ? *pd : slow;
    }
    *pd = slow;
    return MU_OK;
}

/* The reference takes over a direction that oneDNN cannot do at all. */
static mu_status use_reference(mui_engine *e, dnnl_conv *c, mui_conv_pass which)
{
    const mui_conv2d_plan *p = mui_ref_conv2d_plan(e, &c->base.plan.shape, c->base.plan.w);
    if (p == NULL) {
        return MU_ERR_NOMEM;
    }
    c->reference = (const mui_conv2d_impl *)p;
    c->pass[which].by = BY_REFERENCE;
    return MU_OK;
}

/* Whether that primitive multiplies at least as much padding of the input's channels as input, or is no vector code. */
static bool few_channels_pay(mui_engine *e, const dnnl_conv *c, dnnl_primitive_desc_t pd)
{
    const mui_conv2d_plan *p = &c->base.plan;
    const mui_conv2d_shape *s = &p->shape;
    const mui_layout *blocks = NULL;
    mui_md x = mui_pd_md(e, pd, dnnl_query_src_md);
    return x != NULL && s->groups == 1 && 2 * s->ic <= MUI_FEW_BLOCK && p->x == NULL &&
           (is_slow(pd) || mui_md_bytes(x) >= 2 * mui_bytes_in_layout(MU_DIMS(s->n, s->ic, s->ih, s->iw), NULL)) &&
           mui_image_layout(e, MU_DIMS(s->n, s->oc, s->oh, s->ow), MUI_FEW_BLOCK, &blocks) && blocks == p->y;
}

static mu_status make_few_channels(mui_engine *e, dnnl_conv *c)
{
    conv_pass *p = &c->pass[MUI_CONV_BACKWARD_WEIGHTS];
    conv_dims d = dims_of(&c->base.plan.shape);
    mui_md w = mui_md_plain(e, d.w_ndims, d.w);
    if (w == NULL || !weight_reorder(e, w, c->stored, &p->weight_reorder)) {
        return MU_ERR_DEVICE;
    }
    p->weight_bytes = mui_md_bytes(w);
    p->by = BY_FEW_CHANNELS;
    return MU_OK;
}

static mu_status make_backward(mui_engine *e, dnnl_conv *c, mui_conv_pass which)
{
    bool data = which == MUI_CONV_BACKWARD_DATA;
    dnnl_primitive_desc_t pd = NULL;
    if (mui_taps_pay(&c->base.plan.shape, !data) &&
        (data || c->algorithm != dnnl_convolution_winograd)) {
        return make_taps(e, c, which);
    }
    mu_status s = choose_backward(e, c, which, &pd);
    if (s != MU_OK || pd == NULL) {
        return s != MU_OK ? s : use_reference(e, c, which);
    }
    if (!data && few_channels_pay(e, c, pd)) {
        return make_few_channels(e, c);
    }
    conv_pass *p = &c->pass[which];
    mui_md x = mui_pd_md(e, pd, data ? dnnl_query_diff_src_md : dnnl_query_src_md);
    mui_md w = mui_pd_md(e, pd, data ? dnnl_query_weights_md : dnnl_query_diff_weights_md);
    mui_md y = mui_pd_md(e, pd, dnnl_query_diff_dst_md), stored = c->stored, plan_x = c->x, plan_y = c->y, b = NULL;
    if (x == NULL || w == NULL || y == NULL) {
        return MU_ERR_DEVICE;
    }
    if (!weight_reorder(e, data ? stored : w, data ? w : stored, &p->weight_reorder) ||
        !weight_reorder(e, data ? x : plan_x, data ? plan_x : x, &p->x_reorder) ||
        !weight_reorder(e, plan_y, y, &p->y_reorder)) {
        return MU_ERR_DEVICE;
    }
    p->weight_bytes = mui_md_bytes(w);
    p->x_bytes = mui_md_bytes(x);
    p->y_bytes = mui_md_bytes(y);
    bool bias = !data && c->base.plan.shape.bias;
    if (bias) {
        b = mui_md_plain(e, 1, (const int64_t[]){c->base.plan.shape.oc});
    }
    p->exec = mui_exec_new(
        e, pd, bias ? 4 : 3,
        data ? (const int[]){DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST, 0}
             : (const int[]){DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST, DNNL_ARG_DIFF_BIAS},
        (const mui_md[]){x, w, y, b}, c->what);
    if (p->exec == NULL) {
        return MU_ERR_DEVICE;
    }
    p->by = BY_PRIMITIVE;
    return MU_OK;
}

/* Makes the direction when it is first asked for. */
static mu_status made(mui_engine *e, dnnl_conv *c, mui_conv_pass which)
{
    return c->pass[which].by == NOT_MADE ? make_backward(e, c, which) : MU_OK;
}

/* By the reference, which knows plain images only. */
static mu_status reference_data(mui_engine *e, const dnnl_conv *c, const float *dy, const float *w, float *dx)
{
    const mui_conv2d_plan *p = &c->base.plan, *plain = &c->reference->plan;
    const mui_conv2d_shape *s = &p->shape;
    mu_dims x = MU_DIMS(s->n, s->ic, s->ih, s->iw), y = MU_DIMS(s->n, s->oc, s->oh, s->ow);
    dy = mui_to_plain(e, y, p->y, dy, MUI_SCRATCH_Y);
    float *out = p->x == NULL ? dx : mui_engine_scratch(e, MUI_SCRATCH_DX, mui_bytes_in_layout(x, NULL));
    if (dy == NULL || out == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status st = c->reference->backward_data(e, plain, dy, w, out);
    return st != MU_OK || p->x == NULL ? st : mui_reorder(e, x, NULL, out, p->x, dx);
}

static mu_status backward_data(mui_engine *e, const mui_conv2d_plan *plan, const void *dy, const float *w, void *dx)
{
    dnnl_conv *c = (dnnl_conv *)plan; /* plans are the engine's: const for callers only */
    conv_pass *p = &c->pass[MUI_CONV_BACKWARD_DATA];
    mu_status s = made(e, c, MUI_CONV_BACKWARD_DATA);
    if (s != MU_OK || p->by == BY_REFERENCE) {
        return s != MU_OK ? s : reference_data(e, c, dy, w, dx);
    }
    w = wanted_weight(e, p, w);
    dy = wanted(e, p->y_reorder, p->y_bytes, dy, MUI_SCRATCH_Y);
    float *out = p->x_reorder == NULL ? dx : mui_engine_scratch(e, MUI_SCRATCH_DX, p->x_bytes);
    if (w == NULL || dy == NULL || out == NULL) {
        return MU_ERR_DEVICE;
    }
    s = p->by == BY_TAPS ? mui_tap_backward_data(e, &plan->shape, dy, w, out)
                         : mui_exec_run(e, p->exec, 3, (const void *const[]){out, w, dy});
    if (s == MU_OK && p->x_reorder != NULL) {
        s = convert(e, MUI_CONVERT_LAYOUT, p->x_reorder, out, dx);
    }
    return s;
}

static mu_status reference_weights(mui_engine *e, const dnnl_conv *c, const float *x, const float *dy, float *dw,
                                   float *db, bool accumulate_w, bool accumulate_b)
{
    const mui_conv2d_plan *p = &c->base.plan;
    const mui_conv2d_shape *s = &p->shape;
    x = mui_to_plain(e, MU_DIMS(s->n, s->ic, s->ih, s->iw), p->x, x, MUI_SCRATCH_X);
    dy = mui_to_plain(e, MU_DIMS(s->n, s->oc, s->oh, s->ow), p->y, dy, MUI_SCRATCH_Y);
    if (x == NULL || dy == NULL) {
        return MU_ERR_NOMEM;
    }
    return c->reference->backward_weights(e, &c->reference->plan, x, dy, dw, db, accumulate_w, accumulate_b);
}

/* Where the primitive writes dw: the caller's memory, or scratch when it must be added or converted afterwards. */
static float *weight_target(mui_engine *e, const conv_pass *p, float *dw, bool accumulate)
{
    if (dw != NULL && p->weight_reorder == NULL && !accumulate) {
        return dw;
    }
    return mui_engine_scratch(e, MUI_SCRATCH_W, p->weight_bytes);
}

static mu_status deliver_weight(mui_engine *e, const dnnl_conv *c, const conv_pass *p, const float *raw, float *dw,
                                bool accumulate)
{
    if (dw == NULL || raw == dw) {
        return MU_OK;
    }
    if (p->weight_reorder != NULL) {
        float *to = accumulate ? mui_engine_scratch(e, MUI_SCRATCH_DW, c->stored_bytes) : dw;
        mu_status s = to == NULL ? MU_ERR_NOMEM : convert(e, MUI_CONVERT_WEIGHT, p->weight_reorder, raw, to);
        if (s != MU_OK || !accumulate) {
            return s;
        }
        raw = to;
    }
    mui_axpy(e, (int64_t)(c->stored_bytes / sizeof(float)), 1.0f, raw, dw);
    return MU_OK;
}

static mu_status backward_weights(mui_engine *e, const mui_conv2d_plan *plan, const void *x, const void *dy,
                                  float *dw, float *db, bool accumulate_w, bool accumulate_b)
{
    dnnl_conv *c = (dnnl_conv *)plan;
    conv_pass *p = &c->pass[MUI_CONV_BACKWARD_WEIGHTS];
    mu_status s = made(e, c, MUI_CONV_BACKWARD_WEIGHTS);
    if (s != MU_OK || p->by == BY_REFERENCE) {
        return s != MU_OK ? s : reference_weights(e, c, x, dy, dw, db, accumulate_w, accumulate_b);
    }
    bool bias = plan->shape.bias;
    size_t bias_bytes = (size_t)plan->shape.oc * sizeof(float);
    float *b = !bias || (db != NULL && !accumulate_b) ? db : mui_engine_scratch(e, MUI_SCRATCH_DB, bias_bytes);
    float *w = weight_target(e, p, dw, accumulate_w);
    x = wanted(e, p->x_reorder, p->x_bytes, x, MUI_SCRATCH_X);
    dy = wanted(e, p->y_reorder, p->y_bytes, dy, MUI_SCRATCH_Y);
    if (w == NULL || x == NULL || dy == NULL || (bias && b == NULL)) {
        return MU_ERR_DEVICE;
    }
    switch (p->by) {
    case BY_TAPS: s = mui_tap_backward_weights(e, &plan->shape, x, dy, w, b); break;
    case BY_FEW_CHANNELS: s = mui_few_backward_weights(e, &plan->shape, x, dy, w, b); break;
    default: s = mui_exec_run(e, p->exec, bias ? 4 : 3, (const void *const[]){x, w, dy, b}); break;
    }
    if (s == MU_OK) {
        s = deliver_weight(e, c, p, w, dw, accumulate_w);
    }
    if (s == MU_OK && bias && db != NULL && b != db) {
        mui_axpy(e, plan->shape.oc, 1.0f, b, db);
    }
    return s;
}

/* -- plans ------------------------------------------------------------------------------------------------------ */
static void describe(const mui_conv2d_shape *s, char *what, size_t bytes)
{
    snprintf(what, bytes, "convolution (%lld, %lld, %lld, %lld) by (%lld, %lld, %lld, %lld), groups %lld",
             (long long)s->n, (long long)s->ic, (long long)s->ih, (long long)s->iw, (long long)s->oc,
             (long long)(s->ic / s->groups), (long long)s->kh, (long long)s->kw, (long long)s->groups);
}

const mui_conv2d_plan *mui_dnnl_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w)
{
    conv_dims d = dims_of(shape);
    mui_md stored = mui_dnnl_md(e, d.w_ndims, d.w, w);
    dnnl_conv *c = mui_engine_keep(e, sizeof(*c));
    if (stored == NULL || c == NULL) {
        return NULL;
    }
    c->base = (mui_conv2d_impl){.plan = {.shape = *shape, .w = w},
                                .forward = forward,
                                .backward_data = backward_data,
                                .backward_weights = backward_weights};
    describe(shape, c->what, sizeof(c->what));
    c->algorithm = winograd_pays(e, shape) ? dnnl_convolution_winograd : dnnl_convolution_direct;
    /* A plain weight never decides: implementations that accept it are the slow ones. */
    mui_md fixed = w != NULL ? stored : NULL;
    if (choose_forward(e, shape, c->algorithm, fixed, &c->forward_pd) != MU_OK) {
        return NULL;
    }
    if (c->forward_pd == NULL && c->algorithm == dnnl_convolution_winograd) {
        c->algorithm = dnnl_convolution_direct;
        if (choose_forward(e, shape, c->algorithm, fixed, &c->forward_pd) != MU_OK) {
            return NULL;
        }
    }
    if (c->forward_pd == NULL) {
        return mui_ref_conv2d_plan(e, shape, w);
    }
    return make_forward(e, c, stored) ? &c->base.plan : NULL;
}

/* Found by asking about a nominal input, so that it depends on the weight alone. */
const mui_layout *mui_dnnl_conv2d_weight_layout(mui_engine *e, mu_dims weight, int64_t groups, int64_t stride)
{
    mui_conv2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = 16;
    s.groups = groups;
    s.oc = weight.dim[0];
    s.ic = weight.dim[1] * groups;
    s.kh = weight.dim[2];
    s.kw = weight.dim[3];
    s.stride[0] = s.stride[1] = stride;
    s.dilation[0] = s.dilation[1] = 1;
    s.pad[0] = s.kh / 2;
    s.pad[1] = s.kw / 2;
    s.ih = s.iw = 56 + s.kh + s.kw;
    s.oh = (s.ih + 2 * s.pad[0] - s.kh) / stride + 1;
    s.ow = (s.iw + 2 * s.pad[1] - s.kw) / stride + 1;
    mui_key key = {{MUI_KEY_WEIGHT, (uint64_t)s.oc, (uint64_t)s.ic, (uint64_t)s.kh, (uint64_t)s.kw, (uint64_t)groups,
                    (uint64_t)stride}};
    const mui_layout **known = mui_cache_find(&e->cache, &key);
    if (known != NULL) {
        return *known;
    }
    known = mui_engine_keep(e, sizeof(*known));
    dnnl_primitive_desc_t pd = NULL;
    if (known == NULL || choose_forward(e, &s, dnnl_convolution_direct, NULL, &pd) != MU_OK) {
        return NULL;
    }
    mui_md md = pd == NULL ? NULL : mui_pd_md(e, pd, dnnl_query_weights_md);
    if (md != NULL && !is_slow(pd) && mui_md_query(md).blocked && !mui_dnnl_layout(e, md, known)) {
        return NULL;
    }
    return mui_cache_put(e, &e->cache, &key, (void *)known) ? *known : NULL;
}
