/* Communication hook: PowerSGD. What is kept of a parameter, and what travels. */
#include "base/alloc.h"
#include "base/rng.h"
#include "ddp/hook_powersgd.h"
#include "ddp/replica.h"
#include <muster/hooks.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { PLAIN_REDUCTIONS = 1000 };

/* What is kept of a parameter from step to step. */
typedef struct kept {
    char *name;
    int64_t rows, columns, rank;
    float *residual; /* rows * columns; NULL: without error feedback */
    float *q;        /* rank columns, the same on all ranks */
    bool warm;       /* q is of the last step */
    uint64_t drawn;  /* how often q was drawn */
} kept;

/* A parameter of the bucket in work. */
typedef struct part {
    kept *kept;       /* NULL: not compressed */
    float *p, *q;     /* in what is sent */
    mu_tensor *other; /* its part of the data, where that is not row-major */
    float *m;         /* row-major: its part of the data, or a copy */
} part;

struct mu_powersgd {
    mu_ddp *d;
    mu_context *context;
    mu_powersgd_options options;
    kept *kept;
    size_t count, capacity;
    size_t next; /* parameters come in the same order as a rule */
    mu_powersgd_stats stats, running;
};

static void forget(mu_context *c, kept *k)
{
    mui_free(c, k->name);
    mui_free(c, k->residual);
    mui_free(c, k->q);
    *k = (kept){0};
}

static void powersgd_destroy(void *object)
{
    mu_powersgd *s = object;
    for (size_t i = 0; i < s->count; i++) {
        forget(s->context, &s->kept[i]);
    }
    mui_free(s->context, s->kept);
    mui_free(s->context, s);
}

static kept *find(mu_powersgd *s, const char *name)
{
    for (size_t i = 0; i < s->count; i++) {
        kept *k = &s->kept[(s->next + i) % s->count];
        if (strcmp(k->name, name) == 0) {
            s->next = (s->next + i + 1) % s->count;
            return k;
        }
    }
    return NULL;
}

/* Fills what find did not find, or what has another shape now. */
static bool keep(mu_powersgd *s, kept *k, const char *name, const kept *shape)
{
    mu_context *c = s->context;
    forget(c, k);
    *k = *shape;
    k->name = mui_strdup(c, name);
    k->q = mui_calloc(c, (size_t)(k->columns * k->rank), sizeof(float));
    if (!s->options.no_error_feedback) {
        k->residual = mui_calloc(c, (size_t)(k->rows * k->columns), sizeof(float));
    }
    return k->name != NULL && k->q != NULL && (s->options.no_error_feedback || k->residual != NULL);
}

/* Convolution weights are in an order of the kernels'; the gradient's tensor knows which. */
static mu_tensor *in_other_order(const mu_powersgd *s, const mu_bucket *b, const mu_bucket_parameter *p)
{
    for (int64_t i = 0; i < s->d->member_count && !p->row_major; i++) {
        mu_tensor *view = &s->d->members[i].parameter->grad_view;
        if (view->data == (void *)(b->data + p->offset)) {
            return view;
        }
    }
    return NULL;
}

/* Sets x->kept to NULL for a parameter that is not compressed. */
static mu_status select_kept(mu_powersgd *s, const mu_bucket *b, const mu_bucket_parameter *p, part *x)
{
    *x = (part){.other = in_other_order(s, b, p)};
    if (p->dims.ndim < 2 || (!p->row_major && x->other == NULL)) {
        return MU_OK;
    }
    kept shape = {.rows = p->dims.dim[0], .columns = p->elements / p->dims.dim[0], .rank = s->options.rank};
    int64_t most = shape.rows < shape.columns ? shape.rows : shape.columns;
    shape.rank = shape.rank < most ? shape.rank : most;
    double sent = (double)(shape.rows + shape.columns) * (double)shape.rank;
    if (sent * s->options.min_compression_rate >= (double)p->elements) {
        return MU_OK;
    }
    kept *found = find(s, p->name);
    if (found == NULL) {
        if (!MUI_GROW(s->context, s->kept, s->count, s->capacity)) {
            return MU_ERR_NOMEM;
        }
        found = &s->kept[s->count];
        *found = (kept){0};
        if (!keep(s, found, p->name, &shape)) {
            forget(s->context, found);
            return MU_ERR_NOMEM;
        }
        s->count++;
    } else if (found->rows != shape.rows || found->columns != shape.columns || found->rank != shape.rank) {
        /* A failure here ends the group; the entry stays, with whatever it got. */
        if (!keep(s, found, p->name, &shape)) {
            return MU_ERR_NOMEM;
        }
    }
    x->kept = found;
    return MU_OK;
}

/* Row-major, as callers and PyTorch have it, to one column after the other. */
static void turn(const float *in, float *out, int64_t columns, int64_t rank)
{
    for (int64_t j = 0; j < columns; j++) {
        for (int64_t k = 0; k < rank; k++) {
            out[k * columns + j] = in[j * rank + k];
        }
    }
}

static void draw(const mu_powersgd *s, kept *k, float *q)
{
    int64_t n = k->columns * k->rank;
    if (s->options.q_init != NULL && k->drawn == 0) {
        s->options.q_init(s->options.q_user, k->name, k->columns, k->rank, q);
    } else {
        mui_rng rng;
        mui_rng_init(&rng, mui_hash_string(mui_hash_u64(MUI_HASH_START, s->options.seed), k->name), k->drawn);
        for (int64_t i = 0; i < n; i++) {
            q[i] = mui_rng_normal(&rng);
        }
    }
    k->drawn++;
    turn(q, k->q, k->columns, k->rank);
}

/* Rows after rows: what is to be compressed, with what was left out before; Q; P, into what is sent. */
static mu_status prepare(const mu_powersgd *s, const mu_bucket *b, const mu_bucket_parameter *p, part *x)
{
    kept *k = x->kept;
    float *m = x->m;
    mu_status status = x->other != NULL ? mu_tensor_read(x->other, m, p->elements) : MU_OK;
    double scale = (double)mu_group_size(b->group) / b->divisor;
    bool finite = true;
    for (int64_t i = 0; i < p->elements && k->residual != NULL; i++) {
        finite = finite && isfinite(k->residual[i]);
    }
    for (int64_t i = 0; i < p->elements && b->weighted; i++) {
        m[i] = (float)((double)m[i] * scale);
    }
    for (int64_t i = 0; i < p->elements && k->residual != NULL; i++) {
        /* One gradient that is not finite must not spoil all later ones. */
        m[i] += finite ? k->residual[i] : 0.0F;
        k->residual[i] = m[i];
    }
    if (!k->warm || s->options.no_warm_start || mui_powersgd_useless(k->q, k->columns, k->rank)) {
        draw(s, k, x->q);
    }
    mui_powersgd_orthogonalise(k->q, k->columns, k->rank, s->options.epsilon);
    mui_powersgd_p(m, k->q, x->p, k->rows, k->columns, k->rank);
    return status;
}

static mu_status restore(const mu_bucket_parameter *p, const part *x)
{
    kept *k = x->kept;
    float *m = x->m;
    memcpy(k->q, x->q, (size_t)(k->columns * k->rank) * sizeof(float));
    k->warm = true;
    mui_powersgd_restore(m, x->p, x->q, k->rows, k->columns, k->rank);
    for (int64_t i = 0; i < p->elements && k->residual != NULL; i++) {
        k->residual[i] -= m[i];
    }
    return x->other != NULL ? mu_tensor_write(x->other, m, p->elements) : MU_OK;
}

/* What is sent: all Ps, all Qs, all that is not compressed, each in one piece. */
typedef struct sent {
    part *parts;
    float *p, *q, *flat, *copies; /* the last is not sent: row-major copies */
    int64_t p_count, q_count, flat_count, copies_count;
} sent;

static mu_status sort(mu_powersgd *s, const mu_bucket *b, sent *x)
{
    for (int64_t i = 0; i < b->parameter_count; i++) {
        const mu_bucket_parameter *p = &b->parameters[i];
        mu_status status = p->ranks > 0 ? select_kept(s, b, p, &x->parts[i]) : MU_OK;
        if (status != MU_OK) {
            return status;
        }
    }
    /* Only now: the list of what is kept has its final place. */
    for (int64_t i = 0; i < b->parameter_count; i++) {
        const mu_bucket_parameter *p = &b->parameters[i];
        if (p->ranks == 0) {
            continue;
        }
        mu_status status = select_kept(s, b, p, &x->parts[i]);
        if (status != MU_OK) {
            return status;
        }
        const kept *k = x->parts[i].kept;
        x->p_count += k != NULL ? k->rows * k->rank : 0;
        x->q_count += k != NULL ? k->columns * k->rank : 0;
        x->flat_count += k != NULL ? 0 : p->room;
        x->copies_count += k != NULL && x->parts[i].other != NULL ? p->elements : 0;
        s->running.compressed += k != NULL;
        s->running.plain += k == NULL;
        s->running.elements += p->elements;
        s->running.sent += k != NULL ? (k->rows + k->columns) * k->rank : p->elements;
    }
    return MU_OK;
}

/* There and back. */
static void copy_flat(const mu_bucket *b, const sent *x, bool back)
{
    float *flat = x->flat;
    for (int64_t i = 0; i < b->parameter_count; i++) {
        const mu_bucket_parameter *p = &b->parameters[i];
        if (p->ranks > 0 && x->parts[i].kept == NULL) {
            float *data = b->data + p->offset;
            memcpy(back ? data : flat, back ? flat : data, (size_t)p->room * sizeof(float));
            flat += p->room;
        }
    }
}

static mu_status sum(const mu_bucket *b, float *data, int64_t n, mu_reduce_op op)
{
    return n > 0 ? mu_all_reduce(b->group, data, n, MU_F32, op) : MU_OK;
}

static mu_status send(const mu_powersgd *s, mu_bucket *b, sent *x)
{
    float *p_at = x->p, *q_at = x->q, *copy_at = x->copies;
    mu_status status = MU_OK;
    for (int64_t i = 0; i < b->parameter_count && status == MU_OK; i++) {
        const mu_bucket_parameter *p = &b->parameters[i];
        part *one = &x->parts[i];
        if (one->kept != NULL) {
            one->p = p_at;
            one->q = q_at;
            p_at += one->kept->rows * one->kept->rank;
            q_at += one->kept->columns * one->kept->rank;
            one->m = one->other != NULL ? copy_at : b->data + p->offset;
            copy_at += one->other != NULL ? p->elements : 0;
            status = prepare(s, b, p, one);
        }
    }
    copy_flat(b, x, false);
    mu_bucket flat = *b;
    flat.data = x->flat;
    flat.elements = x->flat_count;
    status = status == MU_OK && x->flat_count > 0 ? mu_bucket_all_reduce(&flat) : status;
    status = status == MU_OK ? sum(b, x->p, x->p_count, MU_SUM) : status;
    if (status != MU_OK) {
        return status;
    }
    copy_flat(b, x, true);
    for (int64_t i = 0; i < b->parameter_count; i++) {
        const part *one = &x->parts[i];
        const kept *k = one->kept;
        if (k != NULL) {
            mui_powersgd_orthogonalise(one->p, k->rows, k->rank, s->options.epsilon);
            mui_powersgd_q(one->m, one->p, one->q, k->rows, k->columns, k->rank);
        }
    }
    status = sum(b, x->q, x->q_count, MU_MEAN);
    for (int64_t i = 0; i < b->parameter_count && status == MU_OK; i++) {
        if (x->parts[i].kept != NULL) {
            status = restore(&b->parameters[i], &x->parts[i]);
        }
    }
    return status;
}

static mu_status powersgd_hook(void *user, mu_bucket *b)
{
    mu_powersgd *s = user;
    mu_context *c = s->context;
    bool plain = (double)s->stats.reductions < (double)s->options.plain_reductions;
    mu_status status;
    if (plain) {
        status = mu_bucket_all_reduce(b);
    } else {
        sent x = {.parts = mui_calloc(c, (size_t)b->parameter_count, sizeof(part))};
        status = x.parts != NULL ? sort(s, b, &x) : MU_ERR_NOMEM;
        x.p = status == MU_OK ? mui_calloc(c, (size_t)x.p_count, sizeof(float)) : NULL;
        x.q = status == MU_OK ? mui_calloc(c, (size_t)x.q_count, sizeof(float)) : NULL;
        x.flat = status == MU_OK ? mui_calloc(c, (size_t)x.flat_count, sizeof(float)) : NULL;
        x.copies = status == MU_OK ? mui_calloc(c, (size_t)x.copies_count, sizeof(float)) : NULL;
        if (status == MU_OK) {
            bool all = x.p != NULL && x.q != NULL && x.flat != NULL && x.copies != NULL;
            status = all ? send(s, b, &x) : MU_ERR_NOMEM;
        }
        mui_free(c, x.copies);
        mui_free(c, x.p);
        mui_free(c, x.q);
        mui_free(c, x.flat);
        mui_free(c, x.parts);
    }
    if (status == MU_OK && b->is_last) {
        uint64_t reductions = s->stats.reductions + 1;
        s->stats = plain ? s->stats : s->running;
        s->stats.reductions = reductions;
        s->running = (mu_powersgd_stats){0};
    }
    return status;
}

static mu_status check_options(mu_context *c, mu_powersgd_options *o)
{
    if (o->rank < 0 || !(o->min_compression_rate >= 0) || !(o->epsilon >= 0)) {
        return mui_fail(c, MU_ERR_ARG, "mu_powersgd_new: rank %d, min_compression_rate %g, epsilon %g: none may be "
                        "negative", o->rank, o->min_compression_rate, o->epsilon);
    }
    o->rank = o->rank > 0 ? o->rank : 1;
    o->plain_reductions = o->plain_reductions == 0 ? PLAIN_REDUCTIONS : o->plain_reductions < 0 ? 0 : o->plain_reductions;
    o->min_compression_rate = o->min_compression_rate > 0 ? o->min_compression_rate : 2;
    return MU_OK;
}

mu_powersgd *mu_powersgd_new(mu_ddp *d, const mu_powersgd_options *options)
{
    if (d == NULL) {
        return NULL;
    }
    mu_context *c = d->context;
    mu_powersgd_options o = options != NULL ? *options : (mu_powersgd_options){0};
    if (mui_failed(c) || check_options(c, &o) != MU_OK) {
        return NULL;
    }
    mu_powersgd *s = mui_calloc(c, 1, sizeof(*s));
    if (s == NULL) {
        return NULL;
    }
    s->d = d;
    s->context = c;
    s->options = o;
    /* Ranks with other options are told apart by the name. */
    char name[200];
    snprintf(name, sizeof(name), "PowerSGD(rank %d%s%s, from %lld, rate %g, epsilon %g, seed %llu%s)", o.rank,
             o.no_error_feedback ? ", no feedback" : "", o.no_warm_start ? ", no warm start" : "",
             (long long)o.plain_reductions, o.min_compression_rate, o.epsilon, (unsigned long long)o.seed,
             o.q_init != NULL ? ", own Q" : "");
    if (mui_context_own(c, s, powersgd_destroy, MUI_OWN_LAST) != MU_OK) {
        return NULL;
    }
    if (mu_ddp_set_hook(d, name, powersgd_hook, s) != MU_OK) {
        mu_powersgd_free(s);
        return NULL;
    }
    return s;
}

void mu_powersgd_free(mu_powersgd *s)
{
    if (s != NULL) {
        mui_context_disown(s->context, s);
        powersgd_destroy(s);
    }
}

mu_powersgd_stats mu_powersgd_get_stats(const mu_powersgd *s)
{
    return s != NULL ? s->stats : (mu_powersgd_stats){0};
}

const float *mu_powersgd_residual(const mu_powersgd *s, const char *name, int64_t *elements)
{
    for (size_t i = 0; s != NULL && name != NULL && i < s->count; i++) {
        const kept *k = &s->kept[i];
        if (k->name != NULL && strcmp(k->name, name) == 0) {
            if (elements != NULL) {
                *elements = k->residual != NULL ? k->rows * k->columns : 0;
            }
            return k->residual;
        }
    }
    if (elements != NULL) {
        *elements = 0;
    }
    return NULL;
}
