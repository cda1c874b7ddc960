/* Batch normalisation. */
#include "tape/ops_norm.h"
#include "tape/parallel.h"
#include "tape/segment.h"

#include <string.h>

typedef struct norm_attr {
    mui_norm_shape shape;
    bool affine, evaluate, empty;
} norm_attr;

/* saved[0]: mean and variance that were used (c each); saved[1]: the kernel's mask, when it has one. */

/* The kernel adds to both gradients or to none; where they differ it writes to scratch. */
mu_status mui_norm_settle_affine(mui_backward *b, mui_node *n, int64_t c, const float *both)
{
    for (int i = 0; i < 2; i++) {
        bool add = false;
        if (!mui_wants_grad(b, n, 1 + i)) {
            continue;
        }
        float *d = mui_grad_out(b, n, 1 + i, NULL, &add);
        if (d == NULL) {
            return mui_backward_failed(n);
        }
        if (add) {
            mui_axpy(mui_backward_engine(b), c, 1.0f, both + i * c, d);
        } else if (c > 0) {
            memcpy(d, both + i * c, (size_t)c * sizeof(float));
        }
    }
    return MU_OK;
}

static mu_status norm_backward(mui_backward *b, mui_node *n)
{
    const norm_attr *a = n->attr;
    const mui_norm_shape *s = &a->shape;
    mui_engine *e = mui_backward_engine(b);
    const void *dy = NULL;
    void *dx = mui_grad_remake(b, n, s->layout, &dy);
    /* The channel sums need no more room than 2c floats: small beside everything else, so always from scratch. */
    float *both = mui_grad_scratch(b, (size_t)s->c * 2);
    if (dx == NULL || both == NULL) {
        return mui_backward_failed(n);
    }
    mui_fill(both, s->c * 2, 0.0f);
    if (!a->empty) {
        const float *stats = n->saved[0]->data;
        const void *mask = n->saved_count > 1 ? n->saved[1]->data : NULL;
        const float *gamma = a->affine ? mui_cfloats(n->in[1]) : NULL;
        const void *x = n->in[0]->data, *y = s->relu && (mask == NULL || a->evaluate) ? n->out->data : NULL;
        float *dgamma = a->affine ? both : NULL, *dbeta = a->affine ? both + s->c : NULL;
        mu_status r = a->evaluate ? mui_batch_norm_backward_eval(e, s, x, y, dy, gamma, stats, stats + s->c, dx, dgamma,
                                                                 dbeta, false)
                                  : mui_batch_norm_backward(e, s, x, y, dy, gamma, stats, stats + s->c, mask, dx,
                                                            dgamma, dbeta, false);
        if (r != MU_OK) {
            return r;
        }
    }
    mu_status r = a->affine ? mui_norm_settle_affine(b, n, s->c, both) : MU_OK;
    return r == MU_OK ? mui_grad_pass(b, n, 0) : r;
}

static bool per_channel(const mu_tensor *x, int64_t c)
{
    return x == NULL || (x->dims.ndim == 1 && x->dims.dim[0] == c);
}

bool mui_norm_bad(mu_tape *t, const char *op, mui_norm_args *a, const mu_batch_norm_options *o, bool alone)
{
    char xt[MUI_DIMS_TEXT], wt[MUI_DIMS_TEXT];
    const mu_tensor *x = a->x;
    mu_tensor *all[4] = {a->weight, a->bias, a->running_mean, a->running_var};
    int given = 0;
    for (int i = 0; i < 4; i++) {
        if (all[i] != NULL) {
            all[given++] = all[i];
        }
    }
    if (mui_either_bad(t, op, &a->x, 1) || mui_floats_bad(t, op, all, given)) {
        return true;
    }
    if (x->dims.ndim != 2 && x->dims.ndim != 4) {
        mui_op_fail(t, MU_ERR_SHAPE, op, "input %s: (N, C) or (N, C, H, W) was expected", mui_dims_text(x->dims, xt));
        return true;
    }
    int64_t c = x->dims.dim[1];
    const mu_tensor *each[4] = {a->weight, a->bias, a->running_mean, a->running_var};
    static const char *const names[4] = {"weight", "bias", "running mean", "running variance"};
    for (int i = 0; i < 4; i++) {
        if (!per_channel(each[i], c)) {
            mui_op_fail(t, MU_ERR_SHAPE, op, "%s %s does not fit input %s: one value per channel", names[i],
                        mui_dims_text(each[i]->dims, wt), mui_dims_text(x->dims, xt));
            return true;
        }
    }
    if ((each[0] == NULL) != (each[1] == NULL) || (each[2] == NULL) != (each[3] == NULL)) {
        mui_op_fail(t, MU_ERR_ARG, op, "weight and bias, and running mean and variance, come in pairs");
        return true;
    }
    if (each[2] != NULL && (!mui_tensor_is_plain(each[2]) || !mui_tensor_is_plain(each[3]))) {
        mui_op_fail(t, MU_ERR_ARG, op, "running statistics are not contiguous");
        return true;
    }
    if (!(o->momentum >= 0.0f && o->momentum <= 1.0f && o->eps >= 0.0f)) { /* not NaN either */
        mui_op_fail(t, MU_ERR_ARG, op, "momentum %g is not in [0, 1] or eps %g is negative", (double)o->momentum,
                    (double)o->eps);
        return true;
    }
    int64_t per = x->dims.dim[0];
    for (int i = 2; i < x->dims.ndim; i++) {
        per *= x->dims.dim[i];
    }
    if (alone && per == 1 && c > 0 && !(o->evaluate && each[2] != NULL)) {
        mui_op_fail(t, MU_ERR_SHAPE, op,
                    "training needs more than one value per channel, input is %s: drop a last batch of one",
                    mui_dims_text(x->dims, xt));
        return true;
    }
    return false;
}

void mui_norm_update_running(mu_tape *t, mu_tensor *running_mean, mu_tensor *running_var,
                             const float *batch_mean, const float *batch_var, int64_t c, int64_t count, float momentum)
{
    float m = momentum > 0.0f ? momentum : 0.1f;
    float unbias = (float)((double)count / (double)(count - 1));
    mui_late late = {.target = running_mean, .value = batch_mean, .scale = 1, .momentum = m, .weight = (double)count};
    if (mui_tape_defer(t, &late)) {
        late = (mui_late){.target = running_var, .value = batch_var, .scale = unbias, .momentum = m,
                          .weight = (double)count};
        mui_tape_defer(t, &late);
        return;
    }
    float *mean = mui_floats(running_mean), *var = mui_floats(running_var);
    for (int64_t i = 0; i < c; i++) {
        mean[i] = (1.0f - m) * mean[i] + m * batch_mean[i];
        var[i] = (1.0f - m) * var[i] + m * batch_var[i] * unbias;
    }
    mui_tensor_touch(running_mean);
    mui_tensor_touch(running_var);
}

mui_norm_shape mui_norm_shape_of(const mu_tensor *x, const mu_batch_norm_options *o)
{
    bool image = x->dims.ndim == 4;
    return (mui_norm_shape){.n = x->dims.dim[0], .c = x->dims.dim[1], .h = image ? x->dims.dim[2] : 1,
                            .w = image ? x->dims.dim[3] : 1, .layout = x->layout, .relu = o->relu, .bf16 = mui_is_bf16(x),
                            .eps = o->eps > 0.0f ? o->eps : 1e-5f};
}

/* Runs the kernel; saved gets statistics and mask, saved_count is how many there are, also on failure. */
static mu_status norm_run(mu_tape *t, const norm_attr *a, mu_tensor *const *in, mu_tensor *y, mu_tensor *running_mean,
                          mu_tensor *running_var, mui_storage **saved, int *saved_count)
{
    const mui_norm_shape *s = &a->shape;
    mui_engine *e = mui_tape_engine(t);
    size_t mask_bytes = a->evaluate ? 0 : mui_batch_norm_mask_bytes(e, s);
    saved[0] = mui_storage_new(mui_tape_pool(t), ((size_t)s->c * 2 + 1) * sizeof(float));
    if (saved[0] == NULL) {
        return MU_ERR_NOMEM;
    }
    *saved_count = 1;
    if (mask_bytes > 0) {
        saved[1] = mui_storage_new(mui_tape_pool(t), mask_bytes);
        if (saved[1] == NULL) {
            return MU_ERR_NOMEM;
        }
        *saved_count = 2;
    }
    float *stats = saved[0]->data;
    const float *gamma = a->affine ? mui_cfloats(in[1]) : NULL, *beta = a->affine ? mui_cfloats(in[2]) : NULL;
    if (a->evaluate) {
        size_t bytes = (size_t)s->c * sizeof(float);
        const void *first = mui_tape_recall(t, bytes * 2); /* the buffers may have moved on since */
        if (first != NULL) {
            memcpy(stats, first, bytes * 2);
        } else {
            memcpy(stats, running_mean->data, bytes);
            memcpy(stats + s->c, running_var->data, bytes);
        }
        if (mui_failed(mui_tape_context(t)) || mui_tape_remember(t, stats, bytes * 2) != MU_OK) {
            return mu_context_status(mui_tape_context(t));
        }
        return mui_batch_norm_forward_eval(e, s, in[0]->data, gamma, beta, stats, stats + s->c, y->data);
    }
    return mui_batch_norm_forward(e, s, in[0]->data, gamma, beta, y->data, stats, stats + s->c,
                                  mask_bytes > 0 ? saved[1]->data : NULL);
}

mu_tensor *mu_batch_norm(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias, mu_tensor *running_mean,
                         mu_tensor *running_var, const mu_batch_norm_options *options)
{
    static const mu_batch_norm_options defaults;
    const mu_batch_norm_options *o = options != NULL ? options : &defaults;
    mui_norm_args args = {x, weight, bias, running_mean, running_var};
    if (mui_norm_bad(t, "batch_norm", &args, o, true)) {
        return NULL;
    }
    mu_tensor *in[3] = {mui_in_layout(t, x, x->layout), mui_in_layout(t, weight, NULL), mui_in_layout(t, bias, NULL)};
    int count = weight != NULL ? 3 : 1;
    norm_attr a;
    memset(&a, 0, sizeof(a));
    a.affine = weight != NULL;
    a.evaluate = o->evaluate && running_mean != NULL;
    a.empty = mui_dims_elements(x->dims) == 0;
    a.shape = mui_norm_shape_of(x, o);
    mu_tensor *y = in[0] != NULL ? mui_tensor_new(t, x->dims, x->dtype, x->layout) : NULL;
    if (y == NULL || (weight != NULL && (in[1] == NULL || in[2] == NULL))) {
        return NULL;
    }
    if (a.empty) {
        return mui_record_reads(t, &mui_op_batch_norm, y, in, count, &a, sizeof(a), NULL, 0, 0);
    }
    mui_storage *saved[2] = {NULL, NULL};
    int saved_count = 0;
    if (norm_run(t, &a, in, y, running_mean, running_var, saved, &saved_count) != MU_OK) {
        for (int i = 0; i < saved_count; i++) {
            mui_storage_release(saved[i]);
        }
        return NULL;
    }
    if (!a.evaluate && running_mean != NULL && !mui_tape_recomputes(t)) {
        const float *stats = saved[0]->data;
        mui_norm_update_running(t, running_mean, running_var, stats, stats + a.shape.c, a.shape.c,
                                a.shape.n * a.shape.h * a.shape.w, o->momentum);
    }
    uint32_t reads = MUI_READS_IN(0) | (weight != NULL ? MUI_READS_IN(1) : 0) |
                     (o->relu && saved_count < 2 ? MUI_READS_OUT : 0);
    return mui_record_reads(t, &mui_op_batch_norm, y, in, count, &a, sizeof(a), saved, saved_count, reads);
}

static mu_tensor *norm_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *mean = NULL, *var = NULL;
    mu_batch_norm_options o = {0};
    mu_dims dims = MU_DIMS(3, 5, 2, 3);
    bool affine = true;
    switch (i) {
    case 0: break;
    case 1: dims = MU_DIMS(4, 3), affine = false; break;
    case 2: o.relu = true; break;
    case 3: o.evaluate = true; break;
    case 4: o.evaluate = true, o.relu = true, dims = MU_DIMS(2, 3, 2, 2); break;
    case 5: dims = MU_DIMS(2, 1), o.eps = 0.5f; break;
    case 6: dims = MU_DIMS(0, 3, 2, 2); break;
    case 7: break;
    default: return NULL;
    }
    mu_tensor *x = mui_sample_leaf(t, i == 7 ? MU_DIMS(5, 3, 3, 2) : dims, seed);
    if (i == 7) { /* non-contiguous */
        x = mu_permute(t, x, MU_DIMS(1, 0, 3, 2));
    }
    mu_dims channels = MU_DIMS(mu_tensor_dim(x, 1));
    mu_tensor *w = affine ? mui_sample_leaf(t, channels, seed + 1) : NULL;
    mu_tensor *b = affine ? mui_sample_leaf(t, channels, seed + 2) : NULL;
    if (i != 1) {
        mean = mui_sample_constant(t, channels, seed + 3);
        var = mu_tensor_zeros(t, channels);
        if (var != NULL) {
            mui_fill(mui_floats(var), channels.dim[0], 1.5f);
        }
    }
    return mu_batch_norm(t, x, w, b, mean, var, &o);
}

const mui_op mui_op_batch_norm = {"batch_norm", norm_backward, norm_sample,
                                  MUI_READS_IN(0) | MUI_READS_IN(1) | MUI_READS_OUT, false};
