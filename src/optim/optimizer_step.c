/* The step: a loop over runs of neighbouring slices, or of the pieces of them that this rank has. */
#include "optim/shard.h"
#include "base/beacon.h"
#include "base/profile.h"
#include "base/text.h"

#include <stdio.h>

enum { UNREDUCED_NAMED = 4 };

/* Neighbouring slices that are updated alike. */
typedef struct run {
    size_t offset, floats; /* in the slabs */
    size_t at;             /* in the state: the same, unless it is shared */
    int group;
    bool first;     /* no state yet */
    int64_t step;   /* Adam: of each parameter in the run */
} run;

static void update(const mu_optimizer *o, mui_store *s, const run *r)
{
    mui_engine *e = o->context->engine; /* the store's layouts are its; asked for here, it could fail amid a step */
    const mui_settings *g = &o->groups[r->group].settings;
    int64_t n = (int64_t)r->floats;
    float *w = s->values + r->offset;
    const float *grad = s->grads + r->offset;
    float *first = mui_optimizer_state_at(o, 0, r->at);
    if (o->kind == MUI_OPTIMIZER_SGD) {
        mui_sgd_update(e, n, w, grad, first,
                       &(mui_sgd_args){.lr = g->lr,
                                       .momentum = g->momentum,
                                       .dampening = g->dampening,
                                       .weight_decay = g->weight_decay,
                                       .nesterov = g->nesterov,
                                       .first = r->first});
        return;
    }
    mui_adam_update(e, n, w, grad, first, mui_optimizer_state_at(o, 1, r->at),
                    &(mui_adam_args){.lr = g->lr,
                                     .beta1 = g->beta1,
                                     .beta2 = g->beta2,
                                     .eps = g->eps,
                                     .weight_decay = g->weight_decay,
                                     .decoupled = o->kind == MUI_OPTIMIZER_ADAMW,
                                     .step = r->step});
}

/* Ranks that step on gradients of their own drift apart; PyTorch says nothing when forward went around the wrapper. */
static void warn_unreduced(mu_optimizer *o, const mui_store *s)
{
    mui_text names;
    mui_text_init(&names, o->context);
    int64_t count = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        if (o->progress[i].ours && !p->frozen && (p->grad_state == MUI_GRAD_LOCAL || p->grad_state == MUI_GRAD_MIXED)) {
            if (count < UNREDUCED_NAMED) {
                mui_text_add(&names, "%s%s", count > 0 ? ", " : "", p->name);
            }
            count++;
        }
    }
    if (count > 0) {
        o->warned_unreduced = true;
        mui_log(o->context, MU_LOG_WARN,
                "rank %d of %d: the optimiser steps on gradients of %lld parameters that no reduction brought together "
                "(mu_backward or a deferred mu_ddp_backward_with came last): %s%s; the replicas will differ",
                mu_context_rank(o->context), mu_context_size(o->context), (long long)count, mui_text_get(&names),
                count > UNREDUCED_NAMED ? ", ..." : "");
    }
    mui_text_free(&names);
}

/* Goes on with the run, or ends it and begins another. */
static void extend(const mu_optimizer *o, mui_store *s, run *r, const run *part)
{
    bool alike = r->floats > 0 && r->offset + r->floats == part->offset && r->at + r->floats == part->at &&
                 r->group == part->group && r->first == part->first &&
                 (o->kind == MUI_OPTIMIZER_SGD || r->step == part->step);
    if (alike) {
        r->floats += part->floats;
        return;
    }
    if (r->floats > 0) {
        update(o, s, r);
    }
    *r = *part;
}

/* Of a parameter, what this rank updates: all of it, or its pieces, which lie in the order of the slabs. */
static void extend_by(const mu_optimizer *o, mui_store *s, run *r, int64_t place, run part, size_t *piece)
{
    const mui_shard *h = o->shard;
    const mu_parameter *p = s->parameters[s->order[place]];
    if (h == NULL) {
        part.offset = part.at = p->offset;
        part.floats = p->capacity;
        extend(o, s, r, &part);
        return;
    }
    while (*piece < h->count && h->pieces[*piece].place < place) {
        ++*piece;
    }
    for (; *piece < h->count && h->pieces[*piece].place == place; ++*piece) {
        const mui_piece *q = &h->pieces[*piece];
        part.offset = p->offset + q->from;
        part.at = q->at;
        part.floats = q->floats;
        extend(o, s, r, &part);
    }
}

static mu_status begin_step(mu_optimizer *o, mui_store *s)
{
    if (o->shard == NULL) {
        if (s->reduced_over > 1 && !o->warned_unreduced) {
            warn_unreduced(o, s);
        }
        return MU_OK;
    }
    char what[48];
    snprintf(what, sizeof(what), "step %lld", (long long)o->steps + 1);
    mu_status status = mui_shard_meet(o, MUI_KIND_STEP, what, mui_shard_check(o, s));
    return status == MU_OK ? mui_shard_settle(o) : status;
}

/* Counts, and updates values and states. Returns the number of floats. */
static int64_t step_all(mu_optimizer *o, mui_store *s, uint64_t now)
{
    run r = {0};
    int64_t floats = 0;
    size_t piece = 0;
    for (int64_t i = 0; i < s->count; i++) {
        int64_t index = s->order[i];
        mu_parameter *p = s->parameters[index];
        mui_progress *q = &o->progress[index];
        if (!q->ours || p->frozen || p->grad_state == MUI_GRAD_NONE) {
            continue;
        }
        q->step++;
        p->updates++;
        p->stepped = now;
        extend_by(o, s, &r, i, (run){.group = q->group, .first = !q->has_state, .step = q->step}, &piece);
        floats += (int64_t)p->capacity;
        q->has_state = true;
        if (!o->keep_grad) {
            p->grad_state = MUI_GRAD_NONE;
        }
    }
    if (r.floats > 0) {
        update(o, s, &r);
    }
    return floats / mu_optimizer_ranks(o);
}

mu_status mu_optimizer_step(mu_optimizer *o)
{
    if (o == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "optimiser step: the optimiser is NULL");
    }
    if (mui_failed(o->context)) {
        return mu_context_status(o->context);
    }
    mui_store *s = mui_optimizer_follow(o);
    if (s == NULL) {
        mu_status failed = mu_context_status(o->context);
        return o->shard != NULL ? mui_shard_meet(o, MUI_KIND_STEP, "a step", failed) : failed;
    }
    mui_place before = mui_go(o->context, MUI_OPTIMISER, NULL);
    mui_timer timer;
    mu_status status = begin_step(o, s);
    mui_timer_start(&timer, o->context, MUI_KIND_OPTIMIZER);
    uint64_t now = ++o->context->writes;
    int64_t floats = status == MU_OK ? step_all(o, s, now) : 0;
    int states = mui_optimizer_states(o);
    /* The value and each state read and written, the gradient read. */
    mui_timer_stop(&timer, 0, (double)floats * (double)sizeof(float) * (3 + 2 * states));
    if (status == MU_OK && o->shard != NULL) {
        char after[80];
        status = mui_shard_gather(o, s, now);
        snprintf(after, sizeof(after), "after step %lld of the sharded optimiser", (long long)o->steps + 1);
        mui_work(o->context, after); /* for those who wait for this rank somewhere else */
    }
    if (status == MU_OK) {
        o->steps++;
        s->clears += !o->keep_grad;
    }
    mui_go(o->context, before.stage, before.path);
    return status;
}
