/* Batch normalisation over the batches of all ranks together.
 *
 * Forward brings each rank's count, means and variances to all (one all-reduce in which every rank fills its own part) and
 * combines them in rank order (Chan, Golub, LeVeque 1979), so every rank has the same bits. The rest is the evaluation
 * kernel with these statistics. Backward adds up sum(dy) and sum(dy * xhat) over the ranks; gradients of weight and bias
 * stay this rank's own, the reduction averages them like all others.
 *
 * Both are collectives within a step: where a rank abandons the step instead of coming, they end without an error, and
 * the tape remembers why. */
#include "tape/ops_norm.h"
#include "base/rng.h"
#include "comm/group.h"
#include "tape/tape_state.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KIND = MUI_KIND_WITHIN | 1 };

typedef struct sync_attr {
    mui_norm_shape shape;
    mu_group *group;
    double total; /* values per channel on all ranks */
    bool affine, empty;
} sync_attr;

/* saved[0]: mean and variance of all ranks, c each. */

/* Adds up over the ranks. MU_SKIPPED: another rank abandoned the step. */
static mu_status add_up(mu_tape *t, mu_group *g, const char *module, const char *way, int64_t channels, double *x,
                        int64_t count)
{
    mui_identity id = {.kind = KIND, .sequence = t->group_calls++};
    id.hash = mui_hash_u64(mui_hash_string(mui_hash_string(MUI_HASH_START, module), way), (uint64_t)channels);
    snprintf(id.text, sizeof(id.text),
             "%s of synchronised batch norm `%.60s` of %lld channels (a rank without samples runs it on an empty batch)",
             way, module, (long long)channels);
    mu_request *r = mui_all_reduce_start(g, x, count, MU_F64, MU_SUM, &id);
    mu_status s = r != NULL ? mu_request_wait(r) : mu_context_status(t->context);
    if (s == MU_SKIPPED) {
        snprintf(t->skipped, sizeof(t->skipped), "%s", mui_group_skip_text(g));
        return s;
    }
    return r == NULL && s == MU_OK ? MU_ERR_COMM : s;
}

/* -- backward --------------------------------------------------------------------------------------------------- */
/* What the batch's own mean and variance take away from dx: (S0 + xhat * S1) * gamma / (total * std), per channel an
 * affine map of x: a normalisation with other weights. */
static mu_status subtract_shares(mui_backward *b, mui_node *n, const double *sums, float *dx)
{
    const sync_attr *a = n->attr;
    const mui_norm_shape *s = &a->shape;
    const float *stats = n->saved[0]->data, *gamma = a->affine ? mui_cfloats(n->in[1]) : NULL;
    int64_t floats = mui_floats_in_layout(n->out->dims, s->layout);
    float *weights = mui_grad_scratch(b, (size_t)s->c * 2), *share = mui_grad_scratch(b, (size_t)floats);
    if (weights == NULL || share == NULL) {
        return mui_backward_failed(n);
    }
    for (int64_t i = 0; i < s->c; i++) {
        double scale = (gamma != NULL ? (double)gamma[i] : 1.0) / (sqrt((double)stats[s->c + i] + (double)s->eps) * a->total);
        weights[s->c + i] = (float)(scale * sums[i]);
        weights[i] = (float)(scale * sums[s->c + i]);
    }
    mui_norm_shape plain = *s;
    plain.relu = false;
    mui_fill(share, floats, 0.0f);
    mu_status r = mui_batch_norm_forward_eval(mui_backward_engine(b), &plain, mui_cfloats(n->in[0]), weights,
                                              weights + s->c, stats, stats + s->c, share);
    if (r == MU_OK) {
        mui_axpy(mui_backward_engine(b), floats, -1.0f, share, dx);
    }
    return r;
}

static mu_status sync_backward(mui_backward *b, mui_node *n)
{
    const sync_attr *a = n->attr;
    const mui_norm_shape *s = &a->shape;
    mui_engine *e = mui_backward_engine(b);
    const float *stats = n->saved[0]->data;
    const void *dy = NULL;
    float *dx = mui_grad_remake(b, n, s->layout, &dy);
    float *own = mui_grad_scratch(b, (size_t)s->c * 2); /* sum(dy * xhat), sum(dy): gradients of weight and bias */
    double *sums = (double *)(void *)mui_grad_scratch(b, (size_t)s->c * 4 + 1);
    if (dx == NULL || own == NULL || sums == NULL) {
        return mui_backward_failed(n);
    }
    mui_fill(own, s->c * 2, 0.0f);
    if (!a->empty) {
        mu_status r = mui_batch_norm_backward_eval(e, s, mui_cfloats(n->in[0]), s->relu ? mui_cfloats(n->out) : NULL, dy,
                                                   a->affine ? mui_cfloats(n->in[1]) : NULL, stats, stats + s->c, dx,
                                                   own, own + s->c, false);
        if (r != MU_OK) {
            return r;
        }
    }
    for (int64_t i = 0; i < s->c; i++) {
        sums[i] = (double)own[s->c + i];
        sums[s->c + i] = (double)own[i];
    }
    mu_status r = add_up(b->tape, a->group, n->module, "backward", s->c, sums, s->c * 2);
    r = r == MU_OK && !a->empty ? subtract_shares(b, n, sums, dx) : r;
    r = r == MU_OK && a->affine ? mui_norm_settle_affine(b, n, s->c, own) : r;
    return r == MU_OK ? mui_grad_pass(b, n, 0) : r;
}

/* -- forward ---------------------------------------------------------------------------------------------------- */
/* parts: for each rank its count, c means and c biased variances. Writes mean and variance of all; returns the count. */
static double combine(const double *parts, int ranks, int64_t c, float *mean, float *var)
{
    double total = 0;
    for (int r = 0; r < ranks; r++) {
        total += parts[(1 + 2 * c) * r];
    }
    for (int64_t i = 0; i < c; i++) {
        double n = 0, m = 0, squares = 0;
        for (int r = 0; r < ranks; r++) {
            const double *p = parts + (1 + 2 * c) * r;
            if (p[0] > 0) {
                double delta = p[1 + i] - m, sum = n + p[0];
                m += delta * p[0] / sum;
                squares += p[1 + c + i] * p[0] + delta * delta * n * p[0] / sum;
                n = sum;
            }
        }
        mean[i] = (float)m;
        var[i] = (float)(n > 0 ? squares / n : 0);
    }
    return total;
}

/* Fills stats and a->total from all ranks' x. y is overwritten. */
static mu_status find_statistics(mu_tape *t, sync_attr *a, const mu_tensor *x, mu_tensor *y, float *stats)
{
    const mui_norm_shape *s = &a->shape;
    int ranks = mu_group_size(a->group);
    int64_t part = 1 + 2 * s->c;
    mui_storage *room = mui_storage_new(t->pool, (size_t)(part * ranks) * sizeof(double));
    if (room == NULL) {
        return MU_ERR_NOMEM;
    }
    double *parts = room->data, *own = parts + part * mu_group_rank(a->group);
    memset(parts, 0, (size_t)(part * ranks) * sizeof(double));
    mu_status r = MU_OK;
    if (!a->empty) {
        mui_norm_shape plain = *s;
        plain.relu = false;
        r = mui_batch_norm_forward(t->engine, &plain, mui_cfloats(x), NULL, NULL, mui_floats(y), stats, stats + s->c,
                                   NULL);
        own[0] = (double)(s->n * s->h * s->w);
        for (int64_t i = 0; i < 2 * s->c; i++) {
            own[1 + i] = (double)stats[i];
        }
    }
    r = r == MU_OK ? add_up(t, a->group, mui_here_of(t->context)->path, "forward", s->c, parts, part * ranks) : r;
    if (r == MU_OK) {
        a->total = combine(parts, ranks, s->c, stats, stats + s->c);
        if (a->total == 1 && s->c > 0) { /* seen by all ranks */
            mui_op_fail(t, MU_ERR_SHAPE, "sync_batch_norm",
                        "training needs more than one value per channel, and all ranks together have one");
            r = MU_ERR_SHAPE;
        }
    }
    mui_storage_release(room);
    return r;
}

/* The same; in a recompute what was found in the first run, since the other ranks may not come a second time. There is
 * room for a double behind the statistics. */
static mu_status statistics(mu_tape *t, sync_attr *a, const mu_tensor *x, mu_tensor *y, float *stats)
{
    size_t bytes = (size_t)a->shape.c * 2 * sizeof(float);
    const char *first = mui_tape_recall(t, bytes + sizeof(double));
    if (first != NULL) {
        memcpy(stats, first, bytes);
        memcpy(&a->total, first + bytes, sizeof(double));
        return MU_OK;
    }
    if (mui_failed(t->context)) {
        return mu_context_status(t->context);
    }
    mu_status r = find_statistics(t, a, x, y, stats);
    memcpy((char *)stats + bytes, &a->total, sizeof(double));
    return r == MU_OK ? mui_tape_remember(t, stats, bytes + sizeof(double)) : r;
}

static mu_tensor *sync_norm(mu_tape *t, const mui_norm_args *args, mu_group *g, const mu_batch_norm_options *o)
{
    mu_tensor *x = args->x;
    mu_tensor *in[3] = {mui_in_layout(t, x, x->layout), mui_in_layout(t, args->weight, NULL),
                        mui_in_layout(t, args->bias, NULL)};
    bool affine = args->weight != NULL;
    sync_attr a;
    memset(&a, 0, sizeof(a));
    a.affine = affine;
    a.group = g;
    a.empty = mui_dims_elements(x->dims) == 0;
    a.shape = mui_norm_shape_of(x, o);
    mu_tensor *y = in[0] != NULL ? mui_tensor_new(t, x->dims, MU_F32, x->layout) : NULL;
    if (y == NULL || (affine && (in[1] == NULL || in[2] == NULL))) {
        return NULL;
    }
    mui_storage *saved = mui_storage_new(t->pool, ((size_t)a.shape.c * 2 + 2) * sizeof(float));
    if (saved == NULL) {
        return NULL;
    }
    float *stats = saved->data, *var = stats + a.shape.c;
    mu_status r = statistics(t, &a, in[0], y, stats);
    if (r == MU_OK && !a.empty) {
        r = mui_batch_norm_forward_eval(t->engine, &a.shape, mui_cfloats(in[0]), affine ? mui_cfloats(in[1]) : NULL,
                                        affine ? mui_cfloats(in[2]) : NULL, stats, var, mui_floats(y));
    }
    if (r != MU_OK) {
        mui_storage_release(saved);
        return NULL;
    }
    if (args->running_mean != NULL && a.total > 1 && !mui_tape_recomputes(t)) {
        mui_norm_update_running(t, args->running_mean, args->running_var, stats, var, a.shape.c, (int64_t)a.total,
                                o->momentum);
    }
    uint32_t reads = MUI_READS_IN(0) | (affine ? MUI_READS_IN(1) : 0) | (o->relu ? MUI_READS_OUT : 0);
    return mui_record_reads(t, &mui_op_sync_batch_norm, y, in, affine ? 3 : 1, &a, sizeof(a), &saved, 1, reads);
}

mu_tensor *mu_sync_batch_norm(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias, mu_tensor *running_mean,
                              mu_tensor *running_var, mu_group *g, const mu_batch_norm_options *options)
{
    static const mu_batch_norm_options defaults;
    const mu_batch_norm_options *o = options != NULL ? options : &defaults;
    if (g == NULL || mu_group_size(g) == 1 || (o->evaluate && running_mean != NULL)) {
        return mu_batch_norm(t, x, weight, bias, running_mean, running_var, options);
    }
    mui_norm_args args = {x, weight, bias, running_mean, running_var};
    if (mui_norm_bad(t, "sync_batch_norm", &args, o, false)) {
        return NULL;
    }
    if (t != NULL && t->replica) {
        return mui_op_fail(t, MU_ERR_UNSUPPORTED, "sync_batch_norm",
                           "replicas of a data parallel module cannot each take part in a group's call");
    }
    if (g->context != t->context) {
        return mui_op_fail(t, MU_ERR_ARG, "sync_batch_norm", "the group belongs to another context than the tape");
    }
    /* Between casts: what the ranks add up is float32. */
    args.x = mui_cast(t, x, MU_F32);
    mu_tensor *y = args.x != NULL ? sync_norm(t, &args, g, o) : NULL;
    return y != NULL ? mui_cast(t, y, x->dtype) : NULL;
}

/* With a group of one, which the public function leaves to plain batch norm. */
static mu_tensor *sync_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_batch_norm_options o = {.relu = i == 2};
    mu_dims dims = i == 1 ? MU_DIMS(4, 3) : MU_DIMS(3, 5, 2, 3);
    mu_group *g = i < 3 ? mu_group_self(t->context) : NULL;
    if (g == NULL) {
        return NULL;
    }
    mui_norm_args args = {.x = mui_sample_leaf(t, dims, seed)};
    mu_dims channels = MU_DIMS(dims.dim[1]);
    if (i != 1) {
        args.weight = mui_sample_leaf(t, channels, seed + 1);
        args.bias = mui_sample_leaf(t, channels, seed + 2);
    }
    return args.x != NULL && (i == 1 || args.bias != NULL) ? sync_norm(t, &args, g, &o) : NULL;
}

const mui_op mui_op_sync_batch_norm = {"sync_batch_norm", sync_backward, sync_sample,
                                       MUI_READS_IN(0) | MUI_READS_IN(1) | MUI_READS_OUT, true};
