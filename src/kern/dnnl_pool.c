/* Pooling by oneDNN: the output takes the input's kind of layout. */
#include "kern/bf16_emulate.h"
#include "kern/dnnl_compat.h"

#include <stdio.h>
#include <string.h>

typedef struct dnnl_pool {
    mui_exec *forward, *backward; /* backward NULL: not made yet */
    dnnl_primitive_desc_t forward_pd;
    mui_md y_md; /* as forward has it: for 1x1 results its layout is plain too, but plain would choose slow code */
    const mui_layout *y;
    size_t workspace_bytes;
    bool slow; /* the reference serves this shape, on plain output, or the emulation of bfloat16 */
    char what[120];
} dnnl_pool;

static dnnl_alg_kind_t algorithm_of(const mui_pool2d_shape *s)
{
    return s->kind == MUI_POOL_MAX   ? dnnl_pooling_max
           : s->kind == MUI_POOL_AVG ? dnnl_pooling_avg_include_padding
                                     : dnnl_pooling_avg_exclude_padding;
}

static mui_dnnl_pool_args args_of(const mui_pool2d_shape *s, mui_md x, mui_md y)
{
    return (mui_dnnl_pool_args){.algorithm = algorithm_of(s),
                                .x = x,
                                .y = y,
                                .stride = {s->stride[0], s->stride[1]},
                                .kernel = {s->kh, s->kw},
                                .pad = {s->pad[0], s->pad[1]}};
}

static mui_md x_md(mui_engine *e, const mui_pool2d_shape *s)
{
    return s->bf16 ? mui_dnnl_bf16_md(e, MU_DIMS(s->n, s->c, s->ih, s->iw), s->x)
                   : mui_dnnl_md(e, 4, (const int64_t[]){s->n, s->c, s->ih, s->iw}, s->x);
}

static bool make_forward(mui_engine *e, const mui_pool2d_shape *s, dnnl_pool *p, mui_md x)
{
    mui_md y = p->y_md, workspace = NULL;
    p->workspace_bytes = s->kind == MUI_POOL_MAX ? mui_pd_workspace_bytes(p->forward_pd) : 0;
    if (p->workspace_bytes > 0) {
        workspace = mui_pd_md(e, p->forward_pd, dnnl_query_workspace_md);
    }
    if (p->workspace_bytes > 0 && workspace == NULL) {
        return false;
    }
    p->forward = mui_exec_new(e, p->forward_pd, workspace != NULL ? 3 : 2,
                              (const int[]){DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_WORKSPACE},
                              (const mui_md[]){x, y, workspace}, p->what);
    return p->forward != NULL;
}

static dnnl_pool *make_slow(mui_engine *e, const mui_pool2d_shape *s, dnnl_pool *p)
{
    p->slow = true;
    if (s->bf16) {
        p->y = mui_bf16_pool_out_layout(e, s);
        p->workspace_bytes = mui_bf16_pool_workspace_bytes(e, s);
    } else {
        p->workspace_bytes = s->kind == MUI_POOL_MAX ? mui_ref_pool_workspace_bytes(e, s) : 0;
    }
    return p;
}

/* The layout of y_md; *known false: a bfloat16 one that float32 has no like of. False on failure. */
static bool out_layout_of(mui_engine *e, const mui_pool2d_shape *s, dnnl_pool *p, bool *known)
{
    *known = true;
    p->y_md = mui_pd_md(e, p->forward_pd, dnnl_query_dst_md);
    if (p->y_md != NULL && s->bf16) {
        *known = mui_dnnl_bf16_layout(e, p->y_md, &p->y);
        return true;
    }
    return p->y_md != NULL && mui_dnnl_layout(e, p->y_md, &p->y);
}

static dnnl_pool *make(mui_engine *e, const mui_pool2d_shape *s)
{
    dnnl_pool *p = mui_engine_keep(e, sizeof(*p));
    const int64_t out[] = {s->n, s->c, s->oh, s->ow};
    mui_md x = x_md(e, s), y = mui_md_typed(e, 4, out, dnnl_format_tag_any, s->bf16 ? dnnl_bf16 : dnnl_f32);
    if (p != NULL && x == NULL && s->bf16) {
        return make_slow(e, s, p);
    }
    if (p == NULL || x == NULL || y == NULL) {
        return NULL;
    }
    snprintf(p->what, sizeof(p->what), "pooling of (%lld, %lld, %lld, %lld) by %lldx%lld", (long long)s->n,
             (long long)s->c, (long long)s->ih, (long long)s->iw, (long long)s->kh, (long long)s->kw);
    mui_dnnl_pool_args a = args_of(s, x, y);
    if (mui_pd_pool(e, &a, NULL, &p->forward_pd) != MU_OK) {
        return NULL;
    }
    bool known = false;
    if (p->forward_pd == NULL || strstr(mui_pd_name(p->forward_pd), "ref") != NULL) {
        return make_slow(e, s, p);
    }
    if (!out_layout_of(e, s, p, &known)) {
        return NULL;
    }
    if (!known) {
        return make_slow(e, s, p);
    }
    return make_forward(e, s, p, x) ? p : NULL;
}

static dnnl_pool *find(mui_engine *e, const mui_pool2d_shape *s)
{
    mui_key key = {{MUI_KEY_POOL, (uint64_t)s->n, (uint64_t)s->c, (uint64_t)s->ih, (uint64_t)s->iw, (uint64_t)s->oh,
                    (uint64_t)s->ow, (uint64_t)s->kh, (uint64_t)s->kw, (uint64_t)s->stride[0], (uint64_t)s->stride[1],
                    (uint64_t)s->pad[0], (uint64_t)s->pad[1], (uint64_t)s->bf16 << 8 | (uint64_t)s->kind,
                    (uint64_t)(uintptr_t)s->x}};
    dnnl_pool *p = mui_cache_find(&e->cache, &key);
    if (p == NULL) {
        p = make(e, s);
        if (p != NULL && !mui_cache_put(e, &e->cache, &key, p)) {
            return NULL;
        }
    }
    return p;
}

static const mui_layout *out_layout(mui_engine *e, const mui_pool2d_shape *s)
{
    dnnl_pool *p = find(e, s);
    return p == NULL ? NULL : p->y;
}

static size_t workspace_bytes(mui_engine *e, const mui_pool2d_shape *s)
{
    dnnl_pool *p = find(e, s);
    return p == NULL ? 0 : p->workspace_bytes;
}

static mu_status forward(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y, void *workspace)
{
    dnnl_pool *p = find(e, s);
    if (p == NULL) {
        return MU_ERR_DEVICE;
    }
    if (p->slow) {
        return (s->bf16 ? mui_bf16_pool_forward : mui_ref_pool_forward)(e, s, x, y, workspace);
    }
    if (p->workspace_bytes > 0 && workspace == NULL) {
        /* The primitive writes where the maxima were in any case. */
        workspace = mui_engine_scratch(e, MUI_SCRATCH_Y, p->workspace_bytes);
        if (workspace == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    return mui_exec_run(e, p->forward, p->workspace_bytes > 0 ? 3 : 2, (const void *const[]){x, y, workspace});
}

static bool make_backward(mui_engine *e, const mui_pool2d_shape *s, dnnl_pool *p)
{
    mui_md dx = x_md(e, s), dy = p->y_md, workspace = NULL;
    mui_dnnl_pool_args a = args_of(s, dx, dy);
    dnnl_primitive_desc_t pd = NULL;
    if (dx == NULL || mui_pd_pool(e, &a, p->forward_pd, &pd) != MU_OK) {
        return false;
    }
    if (pd == NULL) {
        mui_dnnl_fail(e, dnnl_unimplemented, p->what);
        return false;
    }
    if (p->workspace_bytes > 0) {
        workspace = mui_pd_md(e, pd, dnnl_query_workspace_md);
        if (workspace == NULL) {
            return false;
        }
    }
    p->backward = mui_exec_new(e, pd, workspace != NULL ? 3 : 2,
                               (const int[]){DNNL_ARG_DIFF_DST, DNNL_ARG_DIFF_SRC, DNNL_ARG_WORKSPACE},
                               (const mui_md[]){dy, dx, workspace}, p->what);
    return p->backward != NULL;
}

static mu_status backward(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace, void *dx)
{
    dnnl_pool *p = find(e, s);
    if (p == NULL) {
        return MU_ERR_DEVICE;
    }
    if (p->slow) {
        return (s->bf16 ? mui_bf16_pool_backward : mui_ref_pool_backward)(e, s, dy, workspace, dx);
    }
    if (p->backward == NULL && !make_backward(e, s, p)) {
        return MU_ERR_DEVICE;
    }
    return mui_exec_run(e, p->backward, p->workspace_bytes > 0 ? 3 : 2, (const void *const[]){dy, dx, workspace});
}

void mui_dnnl_pool_fill(mui_kernels *k)
{
    k->pool_out_layout = out_layout;
    k->pool_workspace_bytes = workspace_bytes;
    k->pool_forward = forward;
    k->pool_backward = backward;
}
