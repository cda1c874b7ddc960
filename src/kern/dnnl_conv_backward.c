/* The gradients of convolutions by oneDNN: each direction is made when it is first asked for, by the best there is. */
#include "kern/bf16_emulate.h"
#include "kern/dnnl_conv.h"
#include "kern/few_channels.h"
#include "kern/tap_conv.h"

#include <string.h>

/* The best primitive of a backward direction: first on the plan's own layouts with the stored weight, then with any
 * weight, then with any of all. Winograd falls back to direct inside each. */
static mu_status choose_backward(mui_engine *e, mui_dnnl_conv *c, mui_conv_pass pass, dnnl_primitive_desc_t *pd)
{
    const mui_conv2d_plan *p = &c->base.plan;
    mui_conv_dims d = mui_conv_dims_of(&p->shape);
    dnnl_data_type_t type = mui_conv_type_of(&p->shape), w_type = pass == MUI_CONV_BACKWARD_WEIGHTS ? dnnl_f32 : type;
    mui_md x = c->x, y = c->y, w = c->stored, any_x = mui_conv_any(e, 4, d.x, type),
           any_y = mui_conv_any(e, 4, d.y, type), any_w = mui_conv_any(e, d.w_ndims, d.w, w_type);
    mui_md b = pass == MUI_CONV_BACKWARD_WEIGHTS && p->shape.bias ? mui_md_plain(e, 1, d.b) : NULL;
    if (any_x == NULL || any_y == NULL || any_w == NULL) {
        return MU_ERR_DEVICE;
    }
    const mui_md tries[3][3] = {{x, w, y}, {x, any_w, y}, {any_x, any_w, any_y}};
    dnnl_primitive_desc_t slow = NULL;
    for (int i = 0; i < 6; i++) {
        bool winograd = i < 3;
        if ((winograd && c->algorithm != dnnl_convolution_winograd) || (i % 3 == 0 && w_type == dnnl_bf16)) {
            continue; /* a weight as stored is float32 */
        }
        mui_dnnl_conv_args a =
            mui_conv_args_of(&p->shape, winograd ? dnnl_convolution_winograd : dnnl_convolution_direct);
        a.x = tries[i % 3][0];
        a.w = tries[i % 3][1];
        a.y = tries[i % 3][2];
        a.b = b;
        mu_status s = mui_pd_conv(e, pass, &a, c->forward_pd, pd);
        if (s != MU_OK || (*pd != NULL && !mui_conv_is_slow(*pd))) {
            return s;
        }
        slow = *pd != NULL ? *pd : slow;
    }
    *pd = p->shape.bf16 && slow != NULL && strstr(mui_pd_name(slow), "ref") != NULL ? NULL : slow;
    return MU_OK;
}

/* The reference, or the emulation, takes over a direction that oneDNN cannot do at all. */
static mu_status use_reference(mui_engine *e, mui_dnnl_conv *c, mui_conv_pass which)
{
    const mui_conv2d_shape *s = &c->base.plan.shape;
    const mui_conv2d_plan *p = (s->bf16 ? mui_bf16_conv2d_plan : mui_ref_conv2d_plan)(e, s, c->base.plan.w);
    if (p == NULL) {
        return MU_ERR_NOMEM;
    }
    c->reference = (const mui_conv2d_impl *)p;
    c->pass[which].by = MUI_BY_REFERENCE;
    return MU_OK;
}

/* Whether that primitive multiplies at least as much padding of the input's channels as input, or is no vector code. */
static bool few_channels_pay(mui_engine *e, const mui_dnnl_conv *c, dnnl_primitive_desc_t pd)
{
    const mui_conv2d_plan *p = &c->base.plan;
    const mui_conv2d_shape *s = &p->shape;
    const mui_layout *blocks = NULL;
    mui_md x = mui_pd_md(e, pd, dnnl_query_src_md);
    return x != NULL && !s->bf16 && s->groups == 1 && 2 * s->ic <= MUI_FEW_BLOCK && p->x == NULL &&
           (mui_conv_is_slow(pd) || mui_md_bytes(x) >= 2 * mui_bytes_in_layout(MU_DIMS(s->n, s->ic, s->ih, s->iw), NULL)) &&
           mui_image_layout(e, MU_DIMS(s->n, s->oc, s->oh, s->ow), MUI_FEW_BLOCK, &blocks) && blocks == p->y;
}

static mu_status make_few_channels(mui_engine *e, mui_dnnl_conv *c)
{
    mui_dnnl_pass *p = &c->pass[MUI_CONV_BACKWARD_WEIGHTS];
    mui_conv_dims d = mui_conv_dims_of(&c->base.plan.shape);
    mui_md w = mui_md_plain(e, d.w_ndims, d.w);
    if (w == NULL || !mui_conv_reorder(e, w, c->stored, &p->weight_reorder)) {
        return MU_ERR_DEVICE;
    }
    p->weight_bytes = mui_md_bytes(w);
    p->by = MUI_BY_FEW_CHANNELS;
    return MU_OK;
}

static mu_status make_backward(mui_engine *e, mui_dnnl_conv *c, mui_conv_pass which)
{
    bool data = which == MUI_CONV_BACKWARD_DATA;
    dnnl_primitive_desc_t pd = NULL;
    if (!c->base.plan.shape.bf16 && mui_taps_pay(&c->base.plan.shape, !data) &&
        (data || c->algorithm != dnnl_convolution_winograd)) {
        return mui_conv_make_taps(e, c, which);
    }
    mu_status s = choose_backward(e, c, which, &pd);
    if (s != MU_OK || pd == NULL) {
        return s != MU_OK ? s : use_reference(e, c, which);
    }
    if (!data && few_channels_pay(e, c, pd)) {
        return make_few_channels(e, c);
    }
    mui_dnnl_pass *p = &c->pass[which];
    mui_md x = mui_pd_md(e, pd, data ? dnnl_query_diff_src_md : dnnl_query_src_md);
    mui_md w = mui_pd_md(e, pd, data ? dnnl_query_weights_md : dnnl_query_diff_weights_md);
    mui_md y = mui_pd_md(e, pd, dnnl_query_diff_dst_md), stored = c->stored, plan_x = c->x, plan_y = c->y, b = NULL;
    if (x == NULL || w == NULL || y == NULL) {
        return MU_ERR_DEVICE;
    }
    if (!mui_conv_reorder(e, data ? stored : w, data ? w : stored, &p->weight_reorder) ||
        !mui_conv_reorder(e, data ? x : plan_x, data ? plan_x : x, &p->x_reorder) ||
        !mui_conv_reorder(e, plan_y, y, &p->y_reorder)) {
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
    p->by = MUI_BY_PRIMITIVE;
    return MU_OK;
}

/* Makes the direction when it is first asked for. */
static mu_status made(mui_engine *e, mui_dnnl_conv *c, mui_conv_pass which)
{
    return c->pass[which].by == MUI_NOT_MADE ? make_backward(e, c, which) : MU_OK;
}

/* Images from one layout to another, in that scratch slot where they differ. NULL on failure. */
static const void *moved(mui_engine *e, bool bf16, mu_dims dims, const mui_layout *from, const void *x,
                         const mui_layout *to, mui_scratch slot)
{
    if (from == to) {
        return x;
    }
    void *out = mui_engine_scratch(e, slot, mui_bytes_in_layout(dims, to));
    mu_status s = out == NULL ? MU_ERR_NOMEM
                  : bf16      ? mui_bf16_reorder(e, dims, from, x, to, out)
                              : mui_reorder(e, dims, from, x, to, out);
    return s == MU_OK ? out : NULL;
}

/* By the reference, which knows plain images only, or by the emulation in its own layouts. Its slots are not those that
 * either uses within. */
static mu_status reference_data(mui_engine *e, const mui_dnnl_conv *c, const void *dy, const float *w, void *dx)
{
    const mui_conv2d_plan *p = &c->base.plan, *own = &c->reference->plan;
    const mui_conv2d_shape *s = &p->shape;
    mu_dims x = MU_DIMS(s->n, s->ic, s->ih, s->iw), y = MU_DIMS(s->n, s->oc, s->oh, s->ow);
    dy = moved(e, s->bf16, y, p->y, dy, own->y, MUI_SCRATCH_NARROW_Y);
    void *out = p->x == own->x ? dx : mui_engine_scratch(e, MUI_SCRATCH_NARROW_X, mui_bytes_in_layout(x, own->x));
    if (dy == NULL || out == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status st = c->reference->backward_data(e, own, dy, w, out);
    if (st != MU_OK || p->x == own->x) {
        return st;
    }
    return s->bf16 ? mui_bf16_reorder(e, x, own->x, out, p->x, dx) : mui_reorder(e, x, own->x, out, p->x, dx);
}

mu_status mui_dnnl_conv_backward_data(mui_engine *e, const mui_conv2d_plan *plan, const void *dy, const float *w, void *dx)
{
    mui_dnnl_conv *c = (mui_dnnl_conv *)plan; /* plans are the engine's: const for callers only */
    mui_dnnl_pass *p = &c->pass[MUI_CONV_BACKWARD_DATA];
    mu_status s = made(e, c, MUI_CONV_BACKWARD_DATA);
    if (s != MU_OK || p->by == MUI_BY_REFERENCE) {
        return s != MU_OK ? s : reference_data(e, c, dy, w, dx);
    }
    w = mui_conv_wanted_weight(e, p, w);
    dy = mui_conv_wanted(e, p->y_reorder, p->y_bytes, dy, MUI_SCRATCH_Y);
    void *out = p->x_reorder == NULL ? dx : mui_engine_scratch(e, MUI_SCRATCH_DX, p->x_bytes);
    if (w == NULL || dy == NULL || out == NULL) {
        return MU_ERR_DEVICE;
    }
    s = p->by == MUI_BY_TAPS ? mui_tap_backward_data(e, &plan->shape, dy, w, out)
                         : mui_exec_run(e, p->exec, 3, (const void *const[]){out, w, dy});
    if (s == MU_OK && p->x_reorder != NULL) {
        s = mui_conv_convert(e, MUI_CONVERT_LAYOUT, p->x_reorder, out, dx);
    }
    return s;
}

static mu_status reference_weights(mui_engine *e, const mui_dnnl_conv *c, const void *x, const void *dy, float *dw,
                                   float *db, bool accumulate_w, bool accumulate_b)
{
    const mui_conv2d_plan *p = &c->base.plan, *own = &c->reference->plan;
    const mui_conv2d_shape *s = &p->shape;
    x = moved(e, s->bf16, MU_DIMS(s->n, s->ic, s->ih, s->iw), p->x, x, own->x, MUI_SCRATCH_NARROW_X);
    dy = moved(e, s->bf16, MU_DIMS(s->n, s->oc, s->oh, s->ow), p->y, dy, own->y, MUI_SCRATCH_NARROW_Y);
    if (x == NULL || dy == NULL) {
        return MU_ERR_NOMEM;
    }
    return c->reference->backward_weights(e, own, x, dy, dw, db, accumulate_w, accumulate_b);
}

/* Where the primitive writes dw: the caller's memory, or scratch when it must be added or converted afterwards. */
static float *weight_target(mui_engine *e, const mui_dnnl_pass *p, float *dw, bool accumulate)
{
    if (dw != NULL && p->weight_reorder == NULL && !accumulate) {
        return dw;
    }
    return mui_engine_scratch(e, MUI_SCRATCH_W, p->weight_bytes);
}

static mu_status deliver_weight(mui_engine *e, const mui_dnnl_conv *c, const mui_dnnl_pass *p, const float *raw, float *dw,
                                bool accumulate)
{
    if (dw == NULL || raw == dw) {
        return MU_OK;
    }
    if (p->weight_reorder != NULL) {
        float *to = accumulate ? mui_engine_scratch(e, MUI_SCRATCH_DW, c->stored_bytes) : dw;
        mu_status s = to == NULL ? MU_ERR_NOMEM : mui_conv_convert(e, MUI_CONVERT_WEIGHT, p->weight_reorder, raw, to);
        if (s != MU_OK || !accumulate) {
            return s;
        }
        raw = to;
    }
    mui_axpy(e, (int64_t)(c->stored_bytes / sizeof(float)), 1.0f, raw, dw);
    return MU_OK;
}

mu_status mui_dnnl_conv_backward_weights(mui_engine *e, const mui_conv2d_plan *plan, const void *x, const void *dy,
                                         float *dw, float *db, bool accumulate_w, bool accumulate_b)
{
    mui_dnnl_conv *c = (mui_dnnl_conv *)plan;
    mui_dnnl_pass *p = &c->pass[MUI_CONV_BACKWARD_WEIGHTS];
    mu_status s = made(e, c, MUI_CONV_BACKWARD_WEIGHTS);
    if (s != MU_OK || p->by == MUI_BY_REFERENCE) {
        return s != MU_OK ? s : reference_weights(e, c, x, dy, dw, db, accumulate_w, accumulate_b);
    }
    bool bias = plan->shape.bias;
    size_t bias_bytes = (size_t)plan->shape.oc * sizeof(float);
    float *b = !bias || (db != NULL && !accumulate_b) ? db : mui_engine_scratch(e, MUI_SCRATCH_DB, bias_bytes);
    float *w = weight_target(e, p, dw, accumulate_w);
    x = mui_conv_wanted(e, p->x_reorder, p->x_bytes, x, MUI_SCRATCH_X);
    dy = mui_conv_wanted(e, p->y_reorder, p->y_bytes, dy, MUI_SCRATCH_Y);
    if (w == NULL || x == NULL || dy == NULL || (bias && b == NULL)) {
        return MU_ERR_DEVICE;
    }
    switch (p->by) {
    case MUI_BY_TAPS: s = mui_tap_backward_weights(e, &plan->shape, x, dy, w, b); break;
    case MUI_BY_FEW_CHANNELS: s = mui_few_backward_weights(e, &plan->shape, x, dy, w, b); break;
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
