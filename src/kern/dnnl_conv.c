/* Convolutions by oneDNN. The forward primitive chooses the layouts of input and output; the weight stays in the layout
 * it is stored in wherever a fast implementation can work from it, else it is converted inside each call (it changes at
 * every step, so there is nothing to keep). Backward primitives are made when first asked for.
 * With bf16 the weight is rounded as it is converted; where there is no fast primitive the emulation is asked. */
#include "kern/bf16_emulate.h"
#include "kern/dnnl_conv.h"
#include "kern/tap_conv.h"

#include <stdio.h>
#include <string.h>

/* -- descriptors ------------------------------------------------------------------------------------------------ */
mui_conv_dims mui_conv_dims_of(const mui_conv2d_shape *s)
{
    mui_conv_dims d = {.x = {s->n, s->ic, s->ih, s->iw}, .y = {s->n, s->oc, s->oh, s->ow}, .b = {s->oc}};
    if (s->groups > 1) {
        d.w_ndims = 5;
        memcpy(d.w, (const int64_t[]){s->groups, s->oc / s->groups, s->ic / s->groups, s->kh, s->kw}, sizeof(d.w));
    } else {
        d.w_ndims = 4;
        memcpy(d.w, (const int64_t[]){s->oc, s->ic, s->kh, s->kw}, 4 * sizeof(int64_t));
    }
    return d;
}

mui_dnnl_conv_args mui_conv_args_of(const mui_conv2d_shape *s, dnnl_alg_kind_t algorithm)
{
    return (mui_dnnl_conv_args){.algorithm = algorithm,
                                .stride = {s->stride[0], s->stride[1]},
                                .gaps = {s->dilation[0] - 1, s->dilation[1] - 1},
                                .pad = {s->pad[0], s->pad[1]}};
}

/* The fixed rule of when Winograd F(4x3) pays; never by timing, so that all ranks do the same. */
static bool winograd_pays(const mui_engine *e, const mui_conv2d_shape *s)
{
    return !e->context->no_winograd && !s->bf16 && s->kh == 3 && s->kw == 3 && s->stride[0] == 1 && s->stride[1] == 1 &&
           s->dilation[0] == 1 && s->dilation[1] == 1 && s->groups == 1 && s->ic % 16 == 0 && s->oc % 16 == 0 &&
           s->ic >= 64 && s->oc >= 64 && s->oh * s->ow >= 16;
}

dnnl_data_type_t mui_conv_type_of(const mui_conv2d_shape *s)
{
    return s->bf16 ? dnnl_bf16 : dnnl_f32;
}

mui_md mui_conv_any(mui_engine *e, int ndims, const int64_t *dims, dnnl_data_type_t type)
{
    return mui_md_typed(e, ndims, dims, dnnl_format_tag_any, type);
}

/* The layout of a descriptor that a primitive chose for images. False on failure, and for one of bfloat16 without a like
 * of float32; then there is no error. */
static bool layout_of(mui_engine *e, const mui_conv2d_shape *s, mui_md md, const mui_layout **out)
{
    return s->bf16 ? mui_dnnl_bf16_layout(e, md, out) : mui_dnnl_layout(e, md, out);
}

bool mui_conv_is_slow(dnnl_primitive_desc_t pd)
{
    const char *name = mui_pd_name(pd);
    return strstr(name, "ref") != NULL || strstr(name, "gemm") != NULL;
}

/* -- forward ---------------------------------------------------------------------------------------------------- */
/* Tries the stored weight as it is, then a weight of oneDNN's choice. *pd NULL: unimplemented. */
static mu_status choose_forward(mui_engine *e, const mui_conv2d_shape *s, dnnl_alg_kind_t algorithm, mui_md stored,
                                dnnl_primitive_desc_t *pd)
{
    mui_conv_dims d = mui_conv_dims_of(s);
    mui_dnnl_conv_args a = mui_conv_args_of(s, algorithm);
    a.x = mui_conv_any(e, 4, d.x, mui_conv_type_of(s));
    a.y = mui_conv_any(e, 4, d.y, mui_conv_type_of(s));
    a.b = s->bias ? mui_md_plain(e, 1, d.b) : NULL;
    mui_md any = mui_conv_any(e, d.w_ndims, d.w, mui_conv_type_of(s));
    if (a.x == NULL || a.y == NULL || any == NULL || (s->bias && a.b == NULL)) {
        return MU_ERR_DEVICE;
    }
    *pd = NULL;
    if (stored != NULL) {
        a.w = stored;
        mu_status st = mui_pd_conv(e, MUI_CONV_FORWARD, &a, NULL, pd);
        if (st != MU_OK || (*pd != NULL && !mui_conv_is_slow(*pd))) {
            return st;
        }
    }
    a.w = any;
    return mui_pd_conv(e, MUI_CONV_FORWARD, &a, NULL, pd);
}

bool mui_conv_reorder(mui_engine *e, mui_md from, mui_md to, mui_exec **out)
{
    *out = NULL;
    if (mui_dnnl_same_place(from, to)) { /* no float32 takes as many bytes as bfloat16 */
        return true;
    }
    *out = mui_dnnl_reorder_exec(e, from, to);
    return *out != NULL;
}

mu_status mui_conv_make_taps(mui_engine *e, mui_dnnl_conv *c, mui_conv_pass which)
{
    mui_dnnl_pass *p = &c->pass[which];
    mui_conv_dims d = mui_conv_dims_of(&c->base.plan.shape);
    mui_md x = mui_md_tagged(e, 4, d.x, dnnl_acdb), y = mui_md_tagged(e, 4, d.y, dnnl_acdb);
    mui_md w = mui_md_tagged(e, 4, d.w, dnnl_cdba);
    bool from_x = which != MUI_CONV_BACKWARD_DATA, from_y = which != MUI_CONV_FORWARD;
    bool from_w = which != MUI_CONV_BACKWARD_WEIGHTS;
    if (x == NULL || y == NULL || w == NULL || !mui_conv_reorder(e, from_x ? c->x : x, from_x ? x : c->x, &p->x_reorder) ||
        !mui_conv_reorder(e, from_y ? c->y : y, from_y ? y : c->y, &p->y_reorder) ||
        !mui_conv_reorder(e, from_w ? c->stored : w, from_w ? w : c->stored, &p->weight_reorder)) {
        return MU_ERR_DEVICE;
    }
    p->weight_bytes = mui_md_bytes(w);
    p->x_bytes = mui_md_bytes(x);
    p->y_bytes = mui_md_bytes(y);
    p->by = MUI_BY_TAPS;
    return MU_OK;
}

static bool make_forward(mui_engine *e, mui_dnnl_conv *c, mui_md stored)
{
    const mui_conv2d_shape *s = &c->base.plan.shape;
    mui_dnnl_pass *p = &c->pass[MUI_CONV_FORWARD];
    dnnl_primitive_desc_t pd = c->forward_pd;
    mui_md x = c->x = mui_pd_md(e, pd, dnnl_query_src_md), y = c->y = mui_pd_md(e, pd, dnnl_query_dst_md);
    mui_md w = mui_pd_md(e, pd, dnnl_query_weights_md), b = NULL;
    c->stored = stored;
    if (x == NULL || y == NULL || w == NULL || !layout_of(e, s, x, &c->base.plan.x) ||
        !layout_of(e, s, y, &c->base.plan.y) || !mui_conv_reorder(e, stored, w, &p->weight_reorder)) {
        return false;
    }
    p->weight_bytes = mui_md_bytes(w);
    c->stored_bytes = mui_md_bytes(stored);
    if (!s->bf16 && mui_taps_pay(s, false)) {
        return mui_conv_make_taps(e, c, MUI_CONV_FORWARD) == MU_OK;
    }
    if (s->bias) {
        b = mui_md_plain(e, 1, (const int64_t[]){s->oc});
    }
    p->exec = mui_exec_new(e, pd, s->bias ? 4 : 3,
                           (const int[]){DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS},
                           (const mui_md[]){x, w, y, b}, c->what);
    p->by = MUI_BY_PRIMITIVE;
    return p->exec != NULL;
}

mu_status mui_conv_convert(mui_engine *e, mui_conversion what, mui_exec *reorder, const void *from, void *to)
{
    mui_timer t;
    mui_conversion_start(&t, e, what, reorder->out_bytes);
    mu_status s = mui_exec_run(e, reorder, 2, (const void *const[]){from, to});
    mui_timer_stop(&t, 0, 2.0 * (double)reorder->out_bytes);
    return s;
}

const void *mui_conv_wanted(mui_engine *e, mui_exec *reorder, size_t bytes, const void *from, mui_scratch slot)
{
    if (reorder == NULL) {
        return from;
    }
    void *to = mui_engine_scratch(e, slot, bytes);
    mui_conversion what = slot == MUI_SCRATCH_W ? MUI_CONVERT_WEIGHT : MUI_CONVERT_LAYOUT;
    if (to == NULL || mui_conv_convert(e, what, reorder, from, to) != MU_OK) {
        return NULL;
    }
    return to;
}

const void *mui_conv_wanted_weight(mui_engine *e, const mui_dnnl_pass *p, const void *w)
{
    return mui_conv_wanted(e, p->weight_reorder, p->weight_bytes, w, MUI_SCRATCH_W);
}

/* As the primitive takes it: rounded for bfloat16, but float32 all the same. NULL on failure. */
static const float *wanted_bias(mui_engine *e, const mui_conv2d_shape *s, const float *bias)
{
    float *to = s->bf16 ? mui_engine_scratch(e, MUI_SCRATCH_BF16_B, (size_t)s->oc * sizeof(*to)) : NULL;
    if (to != NULL) {
        mui_bf16_coarsen(s->oc, bias, to);
    }
    return s->bf16 ? to : bias;
}

static mu_status forward(mui_engine *e, const mui_conv2d_plan *p, const void *x, const float *w, const float *bias,
                         void *y)
{
    const mui_dnnl_conv *c = (const mui_dnnl_conv *)p;
    const mui_dnnl_pass *pass = &c->pass[MUI_CONV_FORWARD];
    w = mui_conv_wanted_weight(e, pass, w);
    bias = p->shape.bias ? wanted_bias(e, &p->shape, bias) : NULL;
    if (w == NULL || (p->shape.bias && bias == NULL)) {
        return MU_ERR_DEVICE;
    }
    if (pass->by == MUI_BY_PRIMITIVE) {
        return mui_exec_run(e, pass->exec, p->shape.bias ? 4 : 3, (const void *const[]){x, w, y, bias});
    }
    x = mui_conv_wanted(e, pass->x_reorder, pass->x_bytes, x, MUI_SCRATCH_X);
    void *out = pass->y_reorder == NULL ? y : mui_engine_scratch(e, MUI_SCRATCH_Y, pass->y_bytes);
    if (x == NULL || out == NULL) {
        return MU_ERR_DEVICE;
    }
    mu_status s = mui_tap_forward(e, &p->shape, x, w, bias, out);
    return s == MU_OK && out != y ? mui_conv_convert(e, MUI_CONVERT_LAYOUT, pass->y_reorder, out, y) : s;
}

/* -- plans ------------------------------------------------------------------------------------------------------ */
static void describe(const mui_conv2d_shape *s, char *what, size_t bytes)
{
    snprintf(what, bytes, "convolution (%lld, %lld, %lld, %lld) by (%lld, %lld, %lld, %lld), groups %lld",
             (long long)s->n, (long long)s->ic, (long long)s->ih, (long long)s->iw, (long long)s->oc,
             (long long)(s->ic / s->groups), (long long)s->kh, (long long)s->kw, (long long)s->groups);
}

/* Whether the forward primitive is worth more than the emulation, and float32 has the likes of its layouts. */
static bool fits_bf16(mui_engine *e, const mui_dnnl_conv *c)
{
    const mui_layout *unused;
    if (c->forward_pd == NULL || mui_conv_is_slow(c->forward_pd)) {
        return false;
    }
    mui_md x = mui_pd_md(e, c->forward_pd, dnnl_query_src_md), y = mui_pd_md(e, c->forward_pd, dnnl_query_dst_md);
    return x != NULL && y != NULL && mui_dnnl_bf16_layout(e, x, &unused) && mui_dnnl_bf16_layout(e, y, &unused);
}

const mui_conv2d_plan *mui_dnnl_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w)
{
    mui_conv_dims d = mui_conv_dims_of(shape);
    mui_md stored = mui_dnnl_md(e, d.w_ndims, d.w, w);
    mui_dnnl_conv *c = mui_engine_keep(e, sizeof(*c));
    if (stored == NULL || c == NULL) {
        return NULL;
    }
    c->base = (mui_conv2d_impl){.plan = {.shape = *shape, .w = w},
                                .forward = forward,
                                .backward_data = mui_dnnl_conv_backward_data,
                                .backward_weights = mui_dnnl_conv_backward_weights};
    describe(shape, c->what, sizeof(c->what));
    c->algorithm = winograd_pays(e, shape) ? dnnl_convolution_winograd : dnnl_convolution_direct;
    /* A plain weight never decides: implementations that accept it are the slow ones. */
    mui_md fixed = w != NULL && !shape->bf16 ? stored : NULL;
    if (choose_forward(e, shape, c->algorithm, fixed, &c->forward_pd) != MU_OK) {
        return NULL;
    }
    if (c->forward_pd == NULL && c->algorithm == dnnl_convolution_winograd) {
        c->algorithm = dnnl_convolution_direct;
        if (choose_forward(e, shape, c->algorithm, fixed, &c->forward_pd) != MU_OK) {
            return NULL;
        }
    }
    if (shape->bf16 && !fits_bf16(e, c)) {
        return mui_bf16_conv2d_plan(e, shape, w);
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
    if (md != NULL && !mui_conv_is_slow(pd) && mui_md_query(md).blocked && !mui_dnnl_layout(e, md, known)) {
        return NULL;
    }
    return mui_cache_put(e, &e->cache, &key, (void *)known) ? *known : NULL;
}
