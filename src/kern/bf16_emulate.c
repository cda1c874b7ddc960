/* bfloat16 kernels on CPUs without: see bf16.h. What is widened lives in the engine's scratch until the next call. */
#include "kern/bf16_emulate.h"

#include <string.h>

void mui_bf16_warn(mui_engine *e)
{
    if (!e->bf16_told && !(e->k.bf16 && e->k.bf16_instructions)) {
        e->bf16_told = true;
        mui_log(e->context, e->context->rank == 0 ? MU_LOG_WARN : MU_LOG_INFO, "%s",
                e->k.bf16 ? "this CPU has no bfloat16 instructions: kernels convert as they go, and may be slower than float32"
                          : "bfloat16 is emulated here, by float32 kernels and rounding: correct, but slower than float32");
    }
}

static int64_t elements_in(mu_dims dims, const mui_layout *layout)
{
    return (int64_t)(mui_bytes_in_layout(dims, layout) / sizeof(float));
}

/* Room for so many floats in the slot; never NULL for 0 of them but on failure. */
static float *room(mui_engine *e, mui_scratch slot, int64_t n)
{
    return mui_engine_scratch(e, slot, (size_t)n * sizeof(float));
}

/* x widened into the slot. NULL on failure. */
static float *wide(mui_engine *e, mui_scratch slot, int64_t n, const void *x)
{
    float *to = room(e, slot, n);
    if (to != NULL) {
        mui_bf16_widen(n, x, to);
    }
    return to;
}

/* The same of float32 rounded to bfloat16. */
static float *coarse(mui_engine *e, mui_scratch slot, int64_t n, const float *x)
{
    float *to = room(e, slot, n);
    if (to != NULL) {
        mui_bf16_coarsen(n, x, to);
    }
    return to;
}

mu_status mui_bf16_dropout(mui_engine *e, int64_t n, const uint16_t *x, uint16_t *y, float p, uint64_t key,
                           uint64_t stream)
{
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_ELEMENTWISE);
    float *w = wide(e, MUI_SCRATCH_BF16_X, n, x);
    if (w != NULL) {
        mui_dropout(e, n, w, w, p, key, stream);
        mui_bf16_round(n, w, y);
    }
    mui_timer_stop(&t, 0, 2.0 * (double)n * (double)sizeof(*x));
    return w != NULL ? MU_OK : MU_ERR_NOMEM;
}

mu_status mui_bf16_emulated_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const void *src,
                                    const mui_layout *to, void *dst)
{
    int64_t n = elements_in(dims, to);
    float *w = wide(e, MUI_SCRATCH_BF16_X, elements_in(dims, from), src), *r = room(e, MUI_SCRATCH_BF16_Y, n);
    mu_status s = w != NULL && r != NULL ? e->k.reorder(e, dims, from, w, to, r) : MU_ERR_NOMEM;
    if (s == MU_OK) {
        mui_bf16_round(n, r, dst);
    }
    return s;
}

/* -- matrix products ---------------------------------------------------------------------------------------------- */
mu_status mui_bf16_emulated_product(mui_engine *e, const mui_bf16_product *p, const void *a, const void *b,
                                    const float *bias, void *c)
{
    int64_t m = p->m, n = p->n, k = p->k;
    const float *wa = wide(e, MUI_SCRATCH_BF16_X, m * k, a);
    const float *wb = p->wide_b ? coarse(e, MUI_SCRATCH_BF16_W, k * n, b) : wide(e, MUI_SCRATCH_BF16_W, k * n, b);
    float *sum = p->wide_c ? c : room(e, MUI_SCRATCH_BF16_Y, m * n);
    if (wa == NULL || wb == NULL || sum == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t i = 0; p->bias && i < m; i++) {
        mui_bf16_coarsen(n, bias, sum + i * n);
    }
    mu_status s = (k == 0 ? mui_ref_gemm : e->k.gemm)(e, p->trans_a, p->trans_b, m, n, k, 1.0f, wa, p->trans_a ? m : k,
                                                      wb, p->trans_b ? k : n, p->bias || p->accumulate ? 1.0f : 0.0f,
                                                      sum, n);
    if (s == MU_OK && !p->wide_c) {
        mui_bf16_round(m * n, sum, c);
    }
    return s;
}

/* -- convolution -------------------------------------------------------------------------------------------------- */
typedef struct emulated_conv {
    mui_conv2d_impl base;
    const mui_conv2d_impl *wide; /* of the same shape in float32 */
    int64_t x, w, y;             /* elements, padding included */
} emulated_conv;

static mu_status conv_forward(mui_engine *e, const mui_conv2d_plan *p, const void *x, const float *w, const float *bias,
                              void *y)
{
    const emulated_conv *c = (const emulated_conv *)p;
    const float *fx = wide(e, MUI_SCRATCH_BF16_X, c->x, x), *fw = coarse(e, MUI_SCRATCH_BF16_W, c->w, w);
    const float *fb = bias != NULL ? coarse(e, MUI_SCRATCH_BF16_B, p->shape.oc, bias) : NULL;
    float *fy = room(e, MUI_SCRATCH_BF16_Y, c->y);
    if (fx == NULL || fw == NULL || fy == NULL || (bias != NULL && fb == NULL)) {
        return MU_ERR_NOMEM;
    }
    mu_status s = c->wide->forward(e, &c->wide->plan, fx, fw, fb, fy);
    if (s == MU_OK) {
        mui_bf16_round(c->y, fy, y);
    }
    return s;
}

static mu_status conv_backward_data(mui_engine *e, const mui_conv2d_plan *p, const void *dy, const float *w, void *dx)
{
    const emulated_conv *c = (const emulated_conv *)p;
    const float *fy = wide(e, MUI_SCRATCH_BF16_Y, c->y, dy), *fw = coarse(e, MUI_SCRATCH_BF16_W, c->w, w);
    float *fx = room(e, MUI_SCRATCH_BF16_X, c->x);
    if (fy == NULL || fw == NULL || fx == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = c->wide->backward_data(e, &c->wide->plan, fy, fw, fx);
    if (s == MU_OK) {
        mui_bf16_round(c->x, fx, dx);
    }
    return s;
}

static mu_status conv_backward_weights(mui_engine *e, const mui_conv2d_plan *p, const void *x, const void *dy,
                                       float *dw, float *db, bool accumulate_w, bool accumulate_b)
{
    const emulated_conv *c = (const emulated_conv *)p;
    const float *fx = wide(e, MUI_SCRATCH_BF16_X, c->x, x), *fy = wide(e, MUI_SCRATCH_BF16_Y, c->y, dy);
    if (fx == NULL || fy == NULL) {
        return MU_ERR_NOMEM;
    }
    return c->wide->backward_weights(e, &c->wide->plan, fx, fy, dw, db, accumulate_w, accumulate_b);
}

const mui_conv2d_plan *mui_bf16_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w)
{
    emulated_conv *c = mui_engine_keep(e, sizeof(*c));
    mui_conv2d_shape wider = *shape; /* with its padding: a cache key */
    wider.bf16 = false;
    const mui_conv2d_plan *p = c != NULL ? mui_conv2d_plan_get(e, &wider, w) : NULL;
    if (p == NULL) {
        return NULL;
    }
    c->base = (mui_conv2d_impl){.plan = {.shape = *shape, .x = p->x, .w = p->w, .y = p->y},
                                .forward = conv_forward,
                                .backward_data = conv_backward_data,
                                .backward_weights = conv_backward_weights};
    c->wide = (const mui_conv2d_impl *)p;
    c->x = elements_in(MU_DIMS(shape->n, shape->ic, shape->ih, shape->iw), p->x);
    c->w = elements_in(MU_DIMS(shape->oc, shape->ic / shape->groups, shape->kh, shape->kw), p->w);
    c->y = elements_in(MU_DIMS(shape->n, shape->oc, shape->oh, shape->ow), p->y);
    return &c->base.plan;
}

/* -- batch normalisation ------------------------------------------------------------------------------------------ */
static int64_t norm_elements(const mui_norm_shape *s)
{
    return elements_in(MU_DIMS(s->n, s->c, s->h, s->w), s->layout);
}

static mui_norm_shape wider_norm(const mui_norm_shape *s)
{
    mui_norm_shape w = *s;
    w.bf16 = false;
    return w;
}

size_t mui_bf16_norm_mask_bytes(mui_engine *e, const mui_norm_shape *s)
{
    mui_norm_shape w = wider_norm(s);
    return mui_batch_norm_mask_bytes(e, &w);
}

mu_status mui_bf16_norm_forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                const float *beta, void *y, float *mean, float *var, void *mask)
{
    mui_norm_shape w = wider_norm(s);
    int64_t n = norm_elements(s);
    float *f = wide(e, MUI_SCRATCH_BF16_X, n, x), *fy = room(e, MUI_SCRATCH_BF16_Y, n);
    mu_status r = f != NULL && fy != NULL ? mui_batch_norm_forward(e, &w, f, gamma, beta, fy, mean, var, mask)
                                          : MU_ERR_NOMEM;
    if (r == MU_OK) {
        mui_bf16_round(n, fy, y);
    }
    return r;
}

mu_status mui_bf16_norm_forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                     const float *beta, const float *mean, const float *var, void *y)
{
    mui_norm_shape w = wider_norm(s);
    int64_t n = norm_elements(s);
    float *f = wide(e, MUI_SCRATCH_BF16_X, n, x), *fy = room(e, MUI_SCRATCH_BF16_Y, n);
    mu_status r = f != NULL && fy != NULL ? mui_batch_norm_forward_eval(e, &w, f, gamma, beta, mean, var, fy)
                                          : MU_ERR_NOMEM;
    if (r == MU_OK) {
        mui_bf16_round(n, fy, y);
    }
    return r;
}

mu_status mui_bf16_norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                                 const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                                 float *dgamma, float *dbeta, bool accumulate, bool evaluate)
{
    mui_norm_shape w = wider_norm(s);
    int64_t n = norm_elements(s);
    const float *fx = wide(e, MUI_SCRATCH_BF16_X, n, x);
    const float *fy = y != NULL ? wide(e, MUI_SCRATCH_BF16_Y, n, y) : NULL;
    float *d = wide(e, MUI_SCRATCH_BF16_W, n, dy);
    if (fx == NULL || d == NULL || (y != NULL && fy == NULL)) {
        return MU_ERR_NOMEM;
    }
    mu_status r = evaluate ? mui_batch_norm_backward_eval(e, &w, fx, fy, d, gamma, mean, var, d, dgamma, dbeta,
                                                          accumulate)
                           : mui_batch_norm_backward(e, &w, fx, fy, d, gamma, mean, var, mask, d, dgamma, dbeta,
                                                     accumulate);
    if (r == MU_OK) {
        mui_bf16_round(n, d, dx);
    }
    return r;
}

/* -- pooling ------------------------------------------------------------------------------------------------------ */
static mui_pool2d_shape wider_pool(const mui_pool2d_shape *s)
{
    mui_pool2d_shape w = *s;
    w.bf16 = false;
    return w;
}

const mui_layout *mui_bf16_pool_out_layout(mui_engine *e, const mui_pool2d_shape *s)
{
    mui_pool2d_shape w = wider_pool(s);
    return mui_pool2d_out_layout(e, &w);
}

size_t mui_bf16_pool_workspace_bytes(mui_engine *e, const mui_pool2d_shape *s)
{
    mui_pool2d_shape w = wider_pool(s);
    return mui_pool2d_workspace_bytes(e, &w);
}

static int64_t pool_in(const mui_pool2d_shape *s)
{
    return elements_in(MU_DIMS(s->n, s->c, s->ih, s->iw), s->x);
}

static int64_t pool_out(mui_engine *e, const mui_pool2d_shape *s)
{
    return elements_in(MU_DIMS(s->n, s->c, s->oh, s->ow), mui_bf16_pool_out_layout(e, s));
}

mu_status mui_bf16_pool_forward(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y, void *workspace)
{
    mui_pool2d_shape w = wider_pool(s);
    int64_t n = pool_out(e, s);
    const float *fx = wide(e, MUI_SCRATCH_BF16_X, pool_in(s), x);
    float *fy = room(e, MUI_SCRATCH_BF16_Y, n);
    mu_status r = fx != NULL && fy != NULL ? mui_pool2d_forward(e, &w, fx, fy, workspace) : MU_ERR_NOMEM;
    if (r == MU_OK) {
        mui_bf16_round(n, fy, y);
    }
    return r;
}

mu_status mui_bf16_pool_backward(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace,
                                 void *dx)
{
    mui_pool2d_shape w = wider_pool(s);
    int64_t n = pool_in(s);
    const float *fy = wide(e, MUI_SCRATCH_BF16_Y, pool_out(e, s), dy);
    float *fx = room(e, MUI_SCRATCH_BF16_X, n);
    mu_status r = fx != NULL && fy != NULL ? mui_pool2d_backward(e, &w, fy, workspace, fx) : MU_ERR_NOMEM;
    if (r == MU_OK) {
        mui_bf16_round(n, fx, dx);
    }
    return r;
}
