/* Batch normalisation by oneDNN. With relu, training saves a bit mask (oneDNN's workspace), so backward needs no y.
 * Backward of evaluation masks dy by y first, since oneDNN's fused form would want the workspace that only training
 * writes. Gamma and beta that are NULL are ones and zeros. */
#include "kern/bf16_emulate.h"
#include "kern/dnnl_compat.h"

#include <stdio.h>
#include <string.h>

typedef struct dnnl_norm {
    mui_exec *forward, *backward, *forward_eval, *backward_eval; /* NULL: not made yet */
    dnnl_primitive_desc_t forward_pd, eval_pd;
    size_t mask_bytes;
    bool slow;         /* oneDNN has nothing better than the reference, or the emulation of bfloat16: use that */
    char what[120];
} dnnl_norm;

#define AFFINE (dnnl_use_scale | dnnl_use_shift)

static mui_md md_of(mui_engine *e, const mui_norm_shape *s)
{
    const int64_t dims[] = {s->n, s->c, s->h, s->w};
    if (s->layout == NULL && s->h == 1 && s->w == 1) {
        /* (N, C): the same memory, but vector code over the channels */
        return mui_md_typed(e, 4, dims, dnnl_acdb, s->bf16 ? dnnl_bf16 : dnnl_f32);
    }
    return s->bf16 ? mui_dnnl_bf16_md(e, MU_DIMS(s->n, s->c, s->h, s->w), s->layout) : mui_dnnl_md(e, 4, dims, s->layout);
}

static bool better_than_reference(dnnl_primitive_desc_t pd)
{
    return pd != NULL && strstr(mui_pd_name(pd), "ref") == NULL;
}

static dnnl_norm *make(mui_engine *e, const mui_norm_shape *s)
{
    dnnl_norm *p = mui_engine_keep(e, sizeof(*p));
    mui_md x = md_of(e, s);
    if (p == NULL || (x == NULL && !s->bf16)) {
        return NULL;
    }
    if (x == NULL) {
        p->slow = true;
        return p;
    }
    snprintf(p->what, sizeof(p->what), "batch norm of (%lld, %lld, %lld, %lld)", (long long)s->n, (long long)s->c,
             (long long)s->h, (long long)s->w);
    unsigned flags = AFFINE | (s->relu ? dnnl_fuse_norm_relu : 0u);
    dnnl_primitive_desc_t back = NULL;
    if (mui_pd_norm_forward(e, true, x, s->eps, flags, &p->forward_pd) != MU_OK ||
        mui_pd_norm_forward(e, false, x, s->eps, flags | dnnl_use_global_stats, &p->eval_pd) != MU_OK) {
        return NULL;
    }
    if (p->forward_pd != NULL && mui_pd_norm_backward(e, x, s->eps, flags, p->forward_pd, &back) != MU_OK) {
        return NULL;
    }
    /* All or nothing: a mask written by one implementation is read by the other. */
    p->slow = !better_than_reference(p->forward_pd) || !better_than_reference(p->eval_pd) || !better_than_reference(back);
    if (!p->slow) {
        p->mask_bytes = s->relu ? mui_pd_workspace_bytes(p->forward_pd) : 0;
    }
    return p;
}

/* NULL on failure. */
static dnnl_norm *find(mui_engine *e, const mui_norm_shape *s)
{
    uint32_t eps;
    memcpy(&eps, &s->eps, sizeof(eps));
    mui_key key = {{MUI_KEY_NORM, (uint64_t)s->n, (uint64_t)s->c, (uint64_t)s->h, (uint64_t)s->w,
                    (uint64_t)(uintptr_t)s->layout, (uint64_t)s->bf16 << 33 | (uint64_t)s->relu << 32 | eps}};
    dnnl_norm *p = mui_cache_find(&e->cache, &key);
    if (p == NULL) {
        p = make(e, s);
        if (p != NULL && !mui_cache_put(e, &e->cache, &key, p)) {
            return NULL;
        }
    }
    return p;
}

/* Per-channel scratch: ones and zeros for missing gamma and beta, and raw gradients. */
typedef struct channels {
    const float *gamma, *beta;
    float *dgamma, *dbeta;
} channels;

static bool channels_of(mui_engine *e, int64_t c, const float *gamma, const float *beta, channels *out)
{
    float *m = mui_engine_scratch(e, MUI_SCRATCH_SMALL, (size_t)(4 * c) * sizeof(float));
    if (m == NULL) {
        return false;
    }
    if (gamma == NULL) {
        mui_fill(m, c, 1.0f);
    }
    if (beta == NULL) {
        mui_fill(m + c, c, 0.0f);
    }
    *out = (channels){gamma != NULL ? gamma : m, beta != NULL ? beta : m + c, m + 2 * c, m + 3 * c};
    return true;
}

static size_t mask_bytes(mui_engine *e, const mui_norm_shape *s)
{
    dnnl_norm *p = find(e, s);
    return p == NULL ? 0 : p->slow && s->bf16 ? mui_bf16_norm_mask_bytes(e, s) : p->mask_bytes;
}

static mui_exec *forward_exec(mui_engine *e, dnnl_norm *p, const mui_norm_shape *s, bool evaluate)
{
    mui_exec **x = evaluate ? &p->forward_eval : &p->forward;
    if (*x == NULL) {
        dnnl_primitive_desc_t pd = evaluate ? p->eval_pd : p->forward_pd;
        mui_md data = md_of(e, s), channel = mui_md_plain(e, 1, &s->c), workspace = NULL;
        bool mask = !evaluate && p->mask_bytes > 0;
        if (mask) {
            workspace = mui_pd_md(e, pd, dnnl_query_workspace_md);
        }
        if (data == NULL || channel == NULL || (mask && workspace == NULL)) {
            return NULL;
        }
        *x = mui_exec_new(e, pd, mask ? 7 : 6,
                          (const int[]){DNNL_ARG_SRC, DNNL_ARG_SCALE, DNNL_ARG_SHIFT, DNNL_ARG_DST, DNNL_ARG_MEAN,
                                        DNNL_ARG_VARIANCE, DNNL_ARG_WORKSPACE},
                          (const mui_md[]){data, channel, channel, data, channel, channel, workspace}, p->what);
    }
    return *x;
}

static mu_status forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma, const float *beta,
                         void *y, float *mean, float *var, void *mask)
{
    dnnl_norm *p = find(e, s);
    if (p == NULL) {
        return MU_ERR_DEVICE;
    }
    if (p->slow) {
        return (s->bf16 ? mui_bf16_norm_forward : mui_ref_norm_forward)(e, s, x, gamma, beta, y, mean, var, mask);
    }
    channels k;
    mui_exec *exec = forward_exec(e, p, s, false);
    if (exec == NULL || !channels_of(e, s->c, gamma, beta, &k)) {
        return MU_ERR_DEVICE;
    }
    return mui_exec_run(e, exec, p->mask_bytes > 0 ? 7 : 6,
                        (const void *const[]){x, k.gamma, k.beta, y, mean, var, mask});
}

static mu_status forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                              const float *beta, const float *mean, const float *var, void *y)
{
    dnnl_norm *p = find(e, s);
    if (p == NULL) {
        return MU_ERR_DEVICE;
    }
    if (p->slow) {
        return (s->bf16 ? mui_bf16_norm_forward_eval : mui_ref_norm_forward_eval)(e, s, x, gamma, beta, mean, var, y);
    }
    channels k;
    mui_exec *exec = forward_exec(e, p, s, true);
    if (exec == NULL || !channels_of(e, s->c, gamma, beta, &k)) {
        return MU_ERR_DEVICE;
    }
    return mui_exec_run(e, exec, 6, (const void *const[]){x, k.gamma, k.beta, y, mean, var});
}

enum { SRC, MEAN, VARIANCE, DIFF_DST, DIFF_SRC, SCALE, DIFF_SCALE, DIFF_SHIFT, SHIFT, WORKSPACE, BACKWARD_ARGS };

/* The arguments that this primitive takes, of the BACKWARD_ARGS there are; returns their number. */
static int backward_args(bool mask, int *picked)
{
    int n = 0;
    for (int i = 0; i < BACKWARD_ARGS; i++) {
        if ((i != SHIFT || MUI_NORM_BACKWARD_TAKES_SHIFT) && (i != WORKSPACE || mask)) {
            picked[n++] = i;
        }
    }
    return n;
}

static mui_exec *backward_exec(mui_engine *e, dnnl_norm *p, const mui_norm_shape *s, bool evaluate)
{
    mui_exec **out = evaluate ? &p->backward_eval : &p->backward;
    if (*out != NULL) {
        return *out;
    }
    static const int names[BACKWARD_ARGS] = {
        [SRC] = DNNL_ARG_SRC,           [MEAN] = DNNL_ARG_MEAN,         [VARIANCE] = DNNL_ARG_VARIANCE,
        [DIFF_DST] = DNNL_ARG_DIFF_DST, [DIFF_SRC] = DNNL_ARG_DIFF_SRC, [SCALE] = DNNL_ARG_SCALE,
        [DIFF_SCALE] = DNNL_ARG_DIFF_SCALE, [DIFF_SHIFT] = DNNL_ARG_DIFF_SHIFT,
        [SHIFT] = DNNL_ARG_SHIFT,       [WORKSPACE] = DNNL_ARG_WORKSPACE};
    bool mask = !evaluate && p->mask_bytes > 0;
    unsigned flags = AFFINE | (mask ? dnnl_fuse_norm_relu : 0u) | (evaluate ? dnnl_use_global_stats : 0u);
    mui_md data = md_of(e, s), channel = mui_md_plain(e, 1, &s->c);
    dnnl_primitive_desc_t pd = NULL;
    if (data == NULL || channel == NULL ||
        mui_pd_norm_backward(e, data, s->eps, flags, evaluate ? p->eval_pd : p->forward_pd, &pd) != MU_OK) {
        return NULL;
    }
    if (pd == NULL) {
        mui_dnnl_fail(e, dnnl_unimplemented, p->what);
        return NULL;
    }
    mui_md workspace = mask ? mui_pd_md(e, pd, dnnl_query_workspace_md) : NULL;
    int picked[BACKWARD_ARGS], args[BACKWARD_ARGS];
    mui_md mds[BACKWARD_ARGS];
    int n = backward_args(mask, picked);
    for (int i = 0; i < n; i++) {
        args[i] = names[picked[i]];
        bool is_data = picked[i] == SRC || picked[i] == DIFF_DST || picked[i] == DIFF_SRC;
        mds[i] = is_data ? data : picked[i] == WORKSPACE ? workspace : channel;
    }
    *out = mask && workspace == NULL ? NULL : mui_exec_new(e, pd, n, args, mds, p->what);
    return *out;
}

/* out = in where y > 0, else 0. */
static void mask_by(const mui_norm_shape *s, const void *y, const void *in, void *out)
{
    int64_t n = (int64_t)(mui_bytes_in_layout(MU_DIMS(s->n, s->c, s->h, s->w), s->layout) / sizeof(float));
    if (s->bf16) {
        mui_bf16_relu_backward(NULL, n, y, in, out);
        return;
    }
    mui_unary_backward(NULL, MUI_RELU, n, NULL, y, in, out, 0.0f, false);
}

static void deliver(int64_t c, const float *raw, float *to, bool accumulate)
{
    for (int64_t i = 0; to != NULL && i < c; i++) {
        to[i] = accumulate ? to[i] + raw[i] : raw[i];
    }
}

static mu_status backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                          const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                          float *dgamma, float *dbeta, bool accumulate, bool evaluate)
{
    dnnl_norm *p = find(e, s);
    if (p == NULL) {
        return MU_ERR_DEVICE;
    }
    if (p->slow) {
        return (s->bf16 ? mui_bf16_norm_backward : mui_ref_norm_backward)(e, s, x, y, dy, gamma, mean, var, mask, dx,
                                                                          dgamma, dbeta, accumulate, evaluate);
    }
    if (s->relu && evaluate) {
        mask_by(s, y, dy, dx);
        dy = dx;
    }
    channels k;
    mui_exec *exec = backward_exec(e, p, s, evaluate);
    if (exec == NULL || !channels_of(e, s->c, gamma, NULL, &k)) {
        return MU_ERR_DEVICE;
    }
    const void *all[BACKWARD_ARGS] = {[SRC] = x, [MEAN] = mean, [VARIANCE] = var, [DIFF_DST] = dy, [DIFF_SRC] = dx,
                                      [SCALE] = k.gamma, [DIFF_SCALE] = k.dgamma, [DIFF_SHIFT] = k.dbeta,
                                      [SHIFT] = k.beta, [WORKSPACE] = mask};
    int picked[BACKWARD_ARGS];
    const void *data[BACKWARD_ARGS];
    int n = backward_args(!evaluate && p->mask_bytes > 0, picked);
    for (int i = 0; i < n; i++) {
        data[i] = all[picked[i]];
    }
    mu_status st = mui_exec_run(e, exec, n, data);
    if (st == MU_OK) {
        deliver(s->c, k.dgamma, dgamma, accumulate);
        deliver(s->c, k.dbeta, dbeta, accumulate);
    }
    return st;
}

void mui_dnnl_norm_fill(mui_kernels *k)
{
    k->norm_mask_bytes = mask_bytes;
    k->norm_forward = forward;
    k->norm_forward_eval = forward_eval;
    k->norm_backward = backward;
}
