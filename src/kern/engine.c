/* The engine: made from the context's options, owns caches and scratch memory, and hands every call to the kernel chosen
 * at creation. What is empty is answered here, so that no backend has to know of sizes 0. */
#include "kern/engine.h"
#include "kern/bf16_emulate.h"
#include "base/alloc.h"
#include "base/rng.h"
#include "dev/pages.h"

#include <string.h>

/* -- memory ----------------------------------------------------------------------------------------------------- */
void *mui_engine_scratch(mui_engine *e, mui_scratch slot, size_t bytes)
{
    if (e->scratch[slot] == NULL || e->scratch_bytes[slot] < bytes) {
        mui_pages_free(e->context, e->scratch[slot]);
        e->scratch_bytes[slot] = 0;
        e->scratch[slot] = mui_pages_alloc(e->context, bytes);
        if (e->scratch[slot] == NULL) {
            return NULL;
        }
        e->scratch_bytes[slot] = bytes;
    }
    return e->scratch[slot];
}

void *mui_engine_keep(mui_engine *e, size_t bytes)
{
    void *p = mui_arena_alloc(&e->kept, bytes);
    if (p != NULL) {
        memset(p, 0, bytes);
    }
    return p;
}

static uint64_t hash_of(const mui_key *key)
{
    uint64_t h = MUI_HASH_START;
    for (int i = 0; i < MUI_KEY_WORDS; i++) {
        h = (h ^ key->word[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

/* The slot of the key, or the free one where it belongs. capacity > count, so there always is one. */
static mui_cache_slot *slot_of(const mui_cache *cache, const mui_key *key)
{
    size_t i = (size_t)hash_of(key) & (cache->capacity - 1);
    while (cache->slots[i].value != NULL && memcmp(&cache->slots[i].key, key, sizeof(*key)) != 0) {
        i = (i + 1) & (cache->capacity - 1);
    }
    return &cache->slots[i];
}

void *mui_cache_find(const mui_cache *cache, const mui_key *key)
{
    return cache->count == 0 ? NULL : slot_of(cache, key)->value;
}

bool mui_cache_put(mui_engine *e, mui_cache *cache, const mui_key *key, void *value)
{
    if (cache->count * 2 >= cache->capacity) {
        mui_cache bigger = {.capacity = cache->capacity == 0 ? 64 : cache->capacity * 2};
        bigger.slots = mui_calloc(e->context, bigger.capacity, sizeof(*bigger.slots));
        if (bigger.slots == NULL) {
            return false;
        }
        for (size_t i = 0; i < cache->capacity; i++) {
            if (cache->slots[i].value != NULL) {
                *slot_of(&bigger, &cache->slots[i].key) = cache->slots[i];
            }
        }
        bigger.count = cache->count;
        mui_free(e->context, cache->slots);
        *cache = bigger;
    }
    *slot_of(cache, key) = (mui_cache_slot){*key, value};
    cache->count++;
    return true;
}

/* -- life ------------------------------------------------------------------------------------------------------- */
static void engine_free(void *object)
{
    mui_engine *e = object;
    mu_context *c = e->context;
#if MUI_HAVE_DNNL
    mui_dnnl_close(e);
#endif
    for (int i = 0; i < MUI_SCRATCH_COUNT; i++) {
        mui_pages_free(c, e->scratch[i]);
    }
    mui_free(c, e->cache.slots);
    mui_arena_free(&e->kept);
    if (c->engine == e) {
        c->engine = NULL;
    }
    pthread_mutex_destroy(&e->layouts);
    mui_free(c, e);
}

static mui_engine *engine_new(mu_context *c, mui_engine *home, int threads)
{
    mui_engine *e = mui_calloc(c, 1, sizeof(*e));
    if (e == NULL) {
        return NULL;
    }
    if (pthread_mutex_init(&e->layouts, NULL) != 0) {
        mui_fail(c, MU_ERR_IO, "cannot make a mutex");
        mui_free(c, e);
        return NULL;
    }
    e->context = c;
    e->home = home != NULL ? home : e;
    e->threads = threads;
    e->k = mui_ref_kernels;
    mui_arena_init(&e->kept, c);
#if MUI_HAVE_DNNL
    if (c->kernels == MU_KERNELS_DEFAULT && !mui_dnnl_open(e)) {
        engine_free(e);
        return NULL;
    }
#endif
    return e;
}

mui_engine *mui_engine_of(mu_context *c)
{
    mui_bound *own = mui_bound_of(c);
    if (own != NULL && own->engine != NULL) {
        return own->engine;
    }
    if (c == NULL || c->engine != NULL) {
        return c == NULL ? NULL : c->engine;
    }
    mui_engine *e = engine_new(c, NULL, c->threads);
    if (e == NULL) {
        return NULL;
    }
    /* Last of all: tapes and modules hold its layouts. */
    if (mui_context_own(c, e, engine_free, MUI_OWN_LAST) != MU_OK) {
        return NULL;
    }
    c->engine = e;
    return e;
}

mui_engine *mui_engine_fork(mu_context *c, int threads)
{
    mui_engine *home = mui_engine_of(c);
    mui_engine *e = home != NULL ? engine_new(c, home, threads) : NULL;
    if (home != NULL) {
        mui_engine_enter(home); /* opening e has changed the setting */
    }
    return e;
}

void mui_engine_join(mui_engine *fork)
{
    if (fork != NULL) {
        engine_free(fork);
    }
}

void mui_engine_enter(const mui_engine *e)
{
#if MUI_HAVE_DNNL
    if (e->dnnl != NULL) {
        mui_dnnl_set_threads(e->threads);
    }
#else
    (void)e;
#endif
}

/* -- layouts ---------------------------------------------------------------------------------------------------- */
size_t mui_layout_bytes(const mui_layout *layout)
{
    return layout->bytes;
}

bool mui_layout_padded(const mui_layout *layout)
{
    return layout != NULL && layout->padded;
}

const char *mui_layout_name(const mui_layout *layout)
{
    return layout == NULL ? "plain" : layout->name;
}

size_t mui_bytes_in_layout(mu_dims dims, const mui_layout *layout)
{
    return layout != NULL ? layout->bytes : (size_t)mui_elements(dims) * sizeof(float);
}

void mui_conversion_start(mui_timer *t, mui_engine *e, mui_conversion what, size_t bytes)
{
    bool weight = what == MUI_CONVERT_WEIGHT;
    mui_count(weight ? &e->context->weight_conversions : &e->context->layout_conversions, 1);
    mui_count(&e->context->converted_bytes, bytes);
    mui_timer_start(t, e->context, weight ? MUI_KIND_WEIGHT_REORDER : MUI_KIND_REORDER);
}

mu_status mui_reorder_as(mui_engine *e, mui_conversion what, mu_dims dims, const mui_layout *from, const float *src,
                         const mui_layout *to, float *dst)
{
    int64_t n = mui_elements(dims);
    if ((from != NULL && from->elements != n) || (to != NULL && to->elements != n)) {
        return mui_fail(e->context, MU_ERR_INTERNAL, "reorder from %s to %s: the layouts are not of %lld elements",
                        mui_layout_name(from), mui_layout_name(to), (long long)n);
    }
    if (n == 0) {
        return MU_OK;
    }
    if (from == to) { /* not meant, but harmless */
        memcpy(dst, src, mui_bytes_in_layout(dims, from));
        return MU_OK;
    }
    size_t bytes = mui_bytes_in_layout(dims, to);
    mui_timer t;
    mui_conversion_start(&t, e, what, bytes);
    mu_status s = e->k.reorder(e, dims, from, src, to, dst);
    mui_timer_stop(&t, 0, (double)(mui_bytes_in_layout(dims, from) + bytes));
    return s;
}

mu_status mui_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src, const mui_layout *to,
                      float *dst)
{
    return mui_reorder_as(e, MUI_CONVERT_LAYOUT, dims, from, src, to, dst);
}

const float *mui_to_plain(mui_engine *e, mu_dims dims, const mui_layout *layout, const float *x, mui_scratch slot)
{
    if (layout == NULL || x == NULL) {
        return x;
    }
    float *plain = mui_engine_scratch(e, slot, (size_t)mui_elements(dims) * sizeof(float));
    mui_conversion what = slot == MUI_SCRATCH_W ? MUI_CONVERT_WEIGHT : MUI_CONVERT_LAYOUT;
    if (plain == NULL || mui_reorder_as(e, what, dims, layout, x, NULL, plain) != MU_OK) {
        return NULL;
    }
    return plain;
}

void mui_count_flops(mui_engine *e, mui_timer *t, double flops, double bytes)
{
    mui_count(&e->context->flops, (uint64_t)flops);
    mui_timer_stop(t, flops, bytes);
}

static bool emulates(const mui_engine *e, bool bf16)
{
    return bf16 && !e->k.bf16;
}

/* -- convolution ------------------------------------------------------------------------------------------------ */
static bool conv_is_empty(const mui_conv2d_shape *s)
{
    return s->n == 0 || s->ic == 0 || s->oc == 0 || s->oh == 0 || s->ow == 0;
}

const mui_conv2d_plan *mui_conv2d_plan_get(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w)
{
    const mui_conv2d_shape *s = shape;
    mui_key key = {{MUI_KEY_PLAN, (uint64_t)s->n, (uint64_t)s->ic, (uint64_t)s->ih, (uint64_t)s->iw, (uint64_t)s->oc,
                    (uint64_t)s->oh, (uint64_t)s->ow, (uint64_t)s->kh, (uint64_t)s->kw, (uint64_t)s->stride[0],
                    (uint64_t)s->stride[1], (uint64_t)s->pad[0], (uint64_t)s->pad[1], (uint64_t)s->dilation[0],
                    (uint64_t)s->dilation[1], (uint64_t)s->groups,
                    (uint64_t)s->bf16 << 2 | (uint64_t)s->bias << 1 | s->inference, (uint64_t)(uintptr_t)w}};
    const mui_conv2d_plan *p = mui_cache_find(&e->cache, &key);
    if (p != NULL) {
        return p;
    }
    p = emulates(e, s->bf16) || (s->bf16 && conv_is_empty(s)) ? mui_bf16_conv2d_plan(e, s, w)
        : conv_is_empty(s)                                    ? mui_ref_conv2d_plan(e, s, w)
                                                              : e->k.conv2d_plan(e, s, w);
    if (p == NULL || !mui_cache_put(e, &e->cache, &key, (void *)p)) {
        return NULL;
    }
    return p;
}

const mui_layout *mui_conv2d_weight_layout(mui_engine *e, mu_dims weight, int64_t groups, int64_t stride)
{
    if (e->k.conv2d_weight_layout == NULL || mui_elements(weight) == 0) {
        return NULL;
    }
    return e->k.conv2d_weight_layout(e, weight, groups, stride);
}

static double conv_flops(const mui_conv2d_shape *s)
{
    return 2.0 * (double)(s->n * s->oc * s->oh * s->ow) * (double)(s->ic / s->groups * s->kh * s->kw);
}

/* Of images in that layout. */
static double image_bytes(mu_dims dims, const mui_layout *layout, bool bf16)
{
    return (double)mui_bytes_in_layout(dims, layout) / (bf16 ? 2 : 1);
}

static double conv_bytes(const mui_conv2d_plan *p)
{
    const mui_conv2d_shape *s = &p->shape;
    return image_bytes(MU_DIMS(s->n, s->ic, s->ih, s->iw), p->x, s->bf16) +
           (double)mui_bytes_in_layout(MU_DIMS(s->oc, s->ic / s->groups, s->kh, s->kw), p->w) +
           image_bytes(MU_DIMS(s->n, s->oc, s->oh, s->ow), p->y, s->bf16);
}

mu_status mui_conv2d_forward(mui_engine *e, const mui_conv2d_plan *p, const void *x, const float *w,
                             const float *bias, void *y)
{
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_CONV_FORWARD);
    mu_status r = ((const mui_conv2d_impl *)p)->forward(e, p, x, w, bias, y);
    mui_count_flops(e, &t, conv_flops(&p->shape), conv_bytes(p));
    return r;
}

mu_status mui_conv2d_backward_data(mui_engine *e, const mui_conv2d_plan *p, const void *dy, const float *w, void *dx)
{
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_CONV_BACKWARD_DATA);
    mu_status r = ((const mui_conv2d_impl *)p)->backward_data(e, p, dy, w, dx);
    mui_count_flops(e, &t, conv_flops(&p->shape), conv_bytes(p));
    return r;
}

mu_status mui_conv2d_backward_weights(mui_engine *e, const mui_conv2d_plan *p, const void *x, const void *dy,
                                      float *dw, float *db, bool accumulate_w, bool accumulate_b)
{
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_CONV_BACKWARD_WEIGHTS);
    mu_status r = ((const mui_conv2d_impl *)p)->backward_weights(e, p, x, dy, dw, db, accumulate_w, accumulate_b);
    mui_count_flops(e, &t, conv_flops(&p->shape), conv_bytes(p));
    return r;
}

/* -- matrix product --------------------------------------------------------------------------------------------- */
mu_status mui_gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                   const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    if (m == 0 || n == 0) {
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_GEMM);
    mu_status s = k == 0 ? mui_ref_gemm(e, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
                         : e->k.gemm(e, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    mui_count_flops(e, &t, 2.0 * (double)m * (double)n * (double)k,
                (double)sizeof(float) * ((double)m * (double)k + (double)k * (double)n + (double)m * (double)n));
    return s;
}

/* -- batch normalisation ---------------------------------------------------------------------------------------- */
static bool norm_is_empty(const mui_norm_shape *s)
{
    return s->n == 0 || s->c == 0 || s->h == 0 || s->w == 0;
}

/* Of so many tensors like x. */
static double norm_bytes(const mui_norm_shape *s, int tensors)
{
    return image_bytes(MU_DIMS(s->n, s->c, s->h, s->w), s->layout, s->bf16) * tensors;
}

/* No values: mean and variance are 0, and so are all gradients. */
static void zero_channels(int64_t channels, float *a, float *b)
{
    if (a != NULL) {
        memset(a, 0, (size_t)channels * sizeof(float));
    }
    if (b != NULL) {
        memset(b, 0, (size_t)channels * sizeof(float));
    }
}

size_t mui_batch_norm_mask_bytes(mui_engine *e, const mui_norm_shape *s)
{
    if (emulates(e, s->bf16)) {
        return mui_bf16_norm_mask_bytes(e, s);
    }
    return norm_is_empty(s) || e->k.norm_mask_bytes == NULL ? 0 : e->k.norm_mask_bytes(e, s);
}

mu_status mui_batch_norm_forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                 const float *beta, void *y, float *mean, float *var, void *mask)
{
    if (norm_is_empty(s)) {
        zero_channels(s->c, mean, var);
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_NORM_FORWARD);
    mu_status r = emulates(e, s->bf16) ? mui_bf16_norm_forward(e, s, x, gamma, beta, y, mean, var, mask)
                          : e->k.norm_forward(e, s, x, gamma, beta, y, mean, var, mask);
    mui_timer_stop(&t, 0, norm_bytes(s, 2));
    return r;
}

static mu_status norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                               const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                               float *dgamma, float *dbeta, bool accumulate, bool evaluate)
{
    if (norm_is_empty(s)) {
        if (!accumulate) {
            zero_channels(s->c, dgamma, dbeta);
        }
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_NORM_BACKWARD);
    mu_status r = (emulates(e, s->bf16) ? mui_bf16_norm_backward : e->k.norm_backward)(
        e, s, x, y, dy, gamma, mean, var, mask, dx, dgamma, dbeta, accumulate, evaluate);
    mui_timer_stop(&t, 0, norm_bytes(s, 3));
    return r;
}

mu_status mui_batch_norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y,
                                  const void *dy, const float *gamma, const float *mean, const float *var,
                                  const void *mask, void *dx, float *dgamma, float *dbeta, bool accumulate)
{
    return norm_backward(e, s, x, y, dy, gamma, mean, var, mask, dx, dgamma, dbeta, accumulate, false);
}

mu_status mui_batch_norm_forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                      const float *beta, const float *mean, const float *var, void *y)
{
    if (norm_is_empty(s)) {
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_NORM_FORWARD);
    mu_status r = emulates(e, s->bf16) ? mui_bf16_norm_forward_eval(e, s, x, gamma, beta, mean, var, y)
                          : e->k.norm_forward_eval(e, s, x, gamma, beta, mean, var, y);
    mui_timer_stop(&t, 0, norm_bytes(s, 2));
    return r;
}

mu_status mui_batch_norm_backward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y,
                                       const void *dy, const float *gamma, const float *mean, const float *var,
                                       void *dx, float *dgamma, float *dbeta, bool accumulate)
{
    return norm_backward(e, s, x, y, dy, gamma, mean, var, NULL, dx, dgamma, dbeta, accumulate, true);
}

/* -- pooling ---------------------------------------------------------------------------------------------------- */
static bool pool_is_empty(const mui_pool2d_shape *s)
{
    return s->n == 0 || s->c == 0 || s->oh == 0 || s->ow == 0;
}

static double pool_bytes(const mui_pool2d_shape *s)
{
    return (s->bf16 ? 2 : 4) * (double)(s->n * s->c) * (double)(s->ih * s->iw + s->oh * s->ow);
}

const mui_layout *mui_pool2d_out_layout(mui_engine *e, const mui_pool2d_shape *s)
{
    if (emulates(e, s->bf16)) {
        return mui_bf16_pool_out_layout(e, s);
    }
    return pool_is_empty(s) || e->k.pool_out_layout == NULL ? NULL : e->k.pool_out_layout(e, s);
}

size_t mui_pool2d_workspace_bytes(mui_engine *e, const mui_pool2d_shape *s)
{
    if (emulates(e, s->bf16)) {
        return mui_bf16_pool_workspace_bytes(e, s);
    }
    return pool_is_empty(s) || s->kind != MUI_POOL_MAX ? 0 : e->k.pool_workspace_bytes(e, s);
}

mu_status mui_pool2d_forward(mui_engine *e, const mui_pool2d_shape *s, const void *x, void *y, void *workspace)
{
    if (pool_is_empty(s)) {
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_POOL_FORWARD);
    mu_status r = emulates(e, s->bf16) ? mui_bf16_pool_forward(e, s, x, y, workspace)
                          : e->k.pool_forward(e, s, x, y, workspace);
    mui_timer_stop(&t, 0, pool_bytes(s));
    return r;
}

mu_status mui_pool2d_backward(mui_engine *e, const mui_pool2d_shape *s, const void *dy, const void *workspace,
                              void *dx)
{
    if (pool_is_empty(s)) {
        size_t bytes = mui_bytes_in_layout(MU_DIMS(s->n, s->c, s->ih, s->iw), s->x) / (s->bf16 ? 2 : 1);
        if (bytes > 0) {
            memset(dx, 0, bytes);
        }
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_POOL_BACKWARD);
    mu_status r = emulates(e, s->bf16) ? mui_bf16_pool_backward(e, s, dy, workspace, dx)
                          : e->k.pool_backward(e, s, dy, workspace, dx);
    mui_timer_stop(&t, 0, pool_bytes(s));
    return r;
}
