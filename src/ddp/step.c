/* The one call that is a reduction: the tape, the store and the reducer put together. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/os.h"
#include "base/profile.h"
#include "base/rng.h"
#include "base/trace.h"
#include "ddp/replica.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Nanoseconds: a trace shows what a reduction took of backward from here on. */
enum { PROGRESS_SEEN = 20000 };

typedef struct step {
    mu_tape *tape;
    mu_tensor *loss;
    bool weighted;
    int64_t samples;
    const char *reason; /* this rank abandons, and why; NULL: it takes part */
    mu_status local;    /* its own failure, MU_OK when it only abandons */
    mui_aside failure;  /* the error that goes with it, put aside while collectives run */
    uint64_t agreement;
    uint64_t steps, updates; /* of optimisers, see mui_identity */
    int64_t found;   /* parameters that have a gradient already */
    int64_t earlier; /* of them, those whose gradient was reduced before and is added to */
    char note[128];
    bool entered; /* gradients were put aside */
} step;

static float *slice(float *slab, const mui_member *m)
{
    return slab + m->parameter->offset;
}

/* This rank fails in this step; the first reason counts. */
static void fail_here(mu_ddp *d, step *s, mu_status status)
{
    if (s->local == MU_OK && s->reason == NULL) {
        s->local = status;
        mui_aside_put(d->context, &s->failure);
        s->reason = s->failure.message;
    }
}

static void scale(float *x, size_t n, float factor)
{
    for (size_t k = 0; k < n; k++) {
        x[k] *= factor;
    }
}

static void add_note(step *s, const char *format, ...) MU_PRINTF(2, 3);
static void add_note(step *s, const char *format, ...)
{
    size_t used = strlen(s->note);
    va_list args;
    va_start(args, format);
    vsnprintf(s->note + used, sizeof(s->note) - used, format, args);
    va_end(args);
}

/* What all ranks have to agree on in this reduction, and the state each gradient is in. */
static void note_identity(mu_ddp *d, step *s)
{
    for (int64_t i = 0; i < d->member_count; i++) {
        mui_member *m = &d->members[i];
        m->entry = (uint8_t)m->parameter->grad_state;
        s->found += m->entry != MUI_GRAD_NONE;
        s->updates += m->parameter->updates;
        s->steps = m->parameter->updates > s->steps ? m->parameter->updates : s->steps;
        if (m->entry == MUI_GRAD_REDUCED || m->entry == MUI_GRAD_MIXED) {
            s->earlier++;
            s->agreement = mui_hash_u64(s->agreement, (uint64_t)i + 1);
        }
    }
    if (s->earlier > 0) {
        add_note(s, " adding to %lld gradients", (long long)s->earlier);
    }
    if (d->deferred > 0) {
        s->agreement = mui_hash_u64(s->agreement, (uint64_t)d->deferred);
        add_note(s, " after %lld deferred", (long long)d->deferred);
    }
    int64_t written = 0;
    const char *first = NULL;
    uint64_t values = mui_ddp_hash_written(d, &written, &first);
    if (written > 0) {
        s->agreement = mui_hash_u64(s->agreement, values);
        add_note(s, " with values of %lld parameters written: `%.24s`%s (hash %08x)", (long long)written, first,
                 written > 1 ? ", ..." : "", (unsigned)(values ^ values >> 32));
    }
}

/* Puts aside the gradients that are there: those of earlier reductions, to be added afterwards, and this rank's own,
 * so that they can be given back if the step is skipped. The usual step finds none. */
static mu_status put_aside(mu_ddp *d, step *s)
{
    mui_store *st = d->store;
    if (s->found > 0 && d->stash == NULL) {
        d->stash = mui_alloc(d->context, st->floats * sizeof(float));
        if (d->stash == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    for (int64_t i = 0; s->found > 0 && i < d->member_count; i++) {
        mui_member *m = &d->members[i];
        if (m->entry == MUI_GRAD_NONE) {
            continue;
        }
        size_t n = m->parameter->capacity;
        float *g = slice(st->grads, m);
        memcpy(slice(d->stash, m), g, n * sizeof(float));
        if (m->entry == MUI_GRAD_REDUCED) {
            m->parameter->grad_state = MUI_GRAD_NONE; /* what comes now is averaged by itself */
            continue;
        }
        if (m->entry == MUI_GRAD_MIXED) {
            const float *mean = slice(st->reduced->data, m);
            m->parameter->grad_state = MUI_GRAD_LOCAL;
            for (size_t k = 0; k < n; k++) {
                g[k] -= mean[k];
            }
        }
        if (s->weighted && !d->deferred_weighted) {
            scale(g, n, (float)s->samples);
        }
    }
    s->entered = true;
    return MU_OK;
}

static void give_back(mu_ddp *d, const step *s)
{
    for (int64_t i = 0; s->entered && i < d->member_count; i++) {
        mui_member *m = &d->members[i];
        m->parameter->grad_state = (mui_grad_state)m->entry;
        if (m->entry != MUI_GRAD_NONE) {
            memcpy(slice(d->store->grads, m), slice(d->stash, m), m->parameter->capacity * sizeof(float));
        }
    }
}

static void keep_reduced(mu_ddp *d)
{
    int size = mu_group_size(d->group);
    for (int64_t i = 0; i < d->member_count; i++) {
        mui_member *m = &d->members[i];
        int ranks = mui_reducer_ranks(d->reducer, i);
        float *g = slice(d->store->grads, m);
        m->parameter->grad_state = ranks > 0 ? MUI_GRAD_REDUCED : MUI_GRAD_NONE;
        if (d->options.mean_over_contributors && ranks > 0 && ranks < size) {
            scale(g, m->parameter->capacity, (float)size / (float)ranks);
        }
        if (m->entry != MUI_GRAD_REDUCED && m->entry != MUI_GRAD_MIXED) {
            continue;
        }
        const float *before =
            m->entry == MUI_GRAD_MIXED ? slice(d->store->reduced->data, m) : slice(d->stash, m);
        m->parameter->grad_state = MUI_GRAD_REDUCED;
        if (ranks == 0) {
            memcpy(g, before, m->parameter->capacity * sizeof(float));
            continue;
        }
        for (size_t k = 0; k < m->parameter->capacity; k++) {
            g[k] += before[k];
        }
    }
}

/* Fills slice_states: who will come, who is there, who is absent. */
static void expect(mu_ddp *d, const step *s)
{
    for (int64_t i = 0; i < d->member_count; i++) {
        const mu_parameter *p = d->members[i].parameter;
        bool comes = s->reason == NULL && s->loss != NULL && p->reads > 0;
        d->slice_states[i] = comes                            ? MUI_SLICE_EXPECTED
                             : p->grad_state != MUI_GRAD_NONE ? MUI_SLICE_READY
                                                              : MUI_SLICE_ABSENT;
    }
}

static void became_ready(void *user, mu_parameter *p)
{
    mu_ddp *d = user;
    int64_t i = d->slice_of[p->index];
    if (i >= 0) {
        mui_timer timer;
        mui_timer_start(&timer, d->context, MUI_KIND_ALL_REDUCE);
        int64_t traced = mui_trace_began(d->context);
        mui_reducer_ready(d->reducer, i, p->grad_state != MUI_GRAD_NONE);
        if (d->context->trace != NULL && mui_trace_now() - traced > PROGRESS_SEEN) {
            mui_trace_ended(d->context, MUI_TRACE_PROGRESS, "reduction", traced, 0);
        }
        mui_timer_stop(&timer, 0, 0);
    }
}

static mu_status check_call(mu_ddp *d, const step *s)
{
    mu_context *c = d->context;
    if (s->samples < 0 || s->samples + d->deferred_samples > MUI_MAX_SAMPLES) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_backward_weighted: %lld samples%s, expected 0 to %d",
                        (long long)(s->samples < 0 ? s->samples : s->samples + d->deferred_samples),
                        d->deferred_samples > 0 ? ", deferred ones included" : "", MUI_MAX_SAMPLES);
    }
    if (d->deferred > 0 && d->deferred_weighted != s->weighted) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_backward_with: a %s call after %s deferred ones (ddp `%s`): either all are "
                        "weighted between two reductions, or none", s->weighted ? "weighted" : "plain",
                        d->deferred_weighted ? "weighted" : "plain", d->name);
    }
    if (s->weighted && d->options.mean_over_contributors) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_backward_weighted: ddp `%s` averages over contributors, which has no "
                        "weighted form", d->name);
    }
    if (s->loss != NULL && s->tape == NULL) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_backward: a loss, but no tape");
    }
    if (s->loss != NULL && s->loss->context != c) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_backward: the loss belongs to another context than the model");
    }
    return MU_OK;
}

/* Of a sharded optimiser, which takes from this rank's gradients its own part alone. */
static mu_status check_sharing(const mu_ddp *d)
{
    const mui_store *st = d->store;
    if (st->sharded_over != NULL && st->sharded_over != d->group) {
        return mui_fail(d->context, MU_ERR_STATE, "ddp `%s` reduces over another group than the one over which the model's "
                        "optimiser is sharded", d->name);
    }
    if (st->sharded_over != NULL && d->replicas_differ) {
        return mui_fail(d->context, MU_ERR_STATE, "ddp `%s`: replicas that differ between averages (local SGD) cannot have a "
                        "sharded optimiser", d->name);
    }
    return MU_OK;
}

/* Whether nobody needs whole gradients: another wrapper of the tree, or the first reduction's new buckets, would move
 * what was scattered to where it is not looked for. */
static bool scatters(const mu_ddp *d)
{
    return d->store->sharded_over == d->group && d->store->wrappers == 1 && d->planned;
}

static mu_status prepare(mu_ddp *d, step *s)
{
    mu_status status = check_call(d, s);
    status = status == MU_OK ? check_sharing(d) : status;
    if (status != MU_OK) {
        return status;
    }
    note_identity(d, s);
    if (d->any_pending && (s->earlier == 0 || s->updates != d->pending_updates)) {
        mui_ddp_warn_absent(d);
    }
    status = put_aside(d, s);
    if (status != MU_OK) {
        return status;
    }
    if (s->loss != NULL) {
        return mui_backward_mark(s->tape, s->loss, d->store);
    }
    for (int64_t i = 0; i < d->member_count; i++) {
        d->members[i].parameter->absence = (mui_absence){.kind = MU_NO_LOSS};
    }
    return MU_OK;
}

/* With weight 0 it has no part in the step: the mean of an empty batch is not a number. */
static bool loss_is_bad(const mu_ddp *d, const step *s)
{
    bool counts = !s->weighted || s->samples > 0;
    float x = counts && d->options.nonfinite != MU_NONFINITE_KEEP ? mu_tensor_item(s->loss) : 0;
    if (!isfinite(x)) {
        mui_log(d->context, MU_LOG_WARN, "ddp `%s`: the loss of rank %d is %g", d->name, mu_group_rank(d->group),
                (double)x);
    }
    return !isfinite(x);
}

/* A loss that is not finite may have gradients that are: they mean nothing, but nobody would notice. Where they are not
 * finite either, what all ranks are told names them. */
static mu_status judge_loss(mu_ddp *d, step *s)
{
    bool finite = !mui_reducer_launched_bad(d->reducer);
    if (!loss_is_bad(d, s)) {
        return MU_OK;
    }
    for (int64_t i = 0; finite && i < d->member_count; i++) {
        const mui_member *m = &d->members[i];
        finite = m->parameter->grad_state == MUI_GRAD_NONE || mui_reducer_on_its_way(d->reducer, i) ||
                 mui_all_finite(slice(d->store->grads, m), MU_F32, m->parameter->capacity);
    }
    if (!finite) {
        return MU_OK;
    }
    if (d->options.nonfinite == MU_NONFINITE_ERROR) {
        return mui_fail(d->context, MU_ERR_STATE, "ddp `%s`: the loss of rank %d is not finite", d->name,
                        mu_group_rank(d->group));
    }
    s->reason = "its loss is not finite";
    return MU_SKIPPED;
}

static void run_backward(mu_ddp *d, step *s)
{
    mui_store *st = d->store;
    mui_reduction how = {.weighted = s->weighted,
                         .samples = s->samples + d->deferred_samples,
                         .agreement = s->agreement,
                         .steps = s->steps,
                         .updates = s->updates,
                         .note = s->note,
                         .look = d->options.nonfinite != MU_NONFINITE_KEEP,
                         .scatter = scatters(d),
                         .hold = s->loss != NULL && mui_backward_collectives(s->tape) > 0,
                         .abandon = s->reason};
    expect(d, s);
    mui_reducer_begin(d->reducer, &how, d->slice_states);
    mui_work(d->context, mui_reducer_text(d->reducer));
    if (s->reason != NULL || s->loss == NULL) {
        return;
    }
    st->ready = became_ready;
    st->ready_user = d;
    mu_status status = mui_backward_run(s->tape, s->loss, s->weighted ? (float)s->samples : 1.0F, st);
    st->ready = NULL;
    status = status == MU_OK ? judge_loss(d, s) : status;
    if (status == MU_SKIPPED && s->reason == NULL) {
        s->reason = mui_tape_skipped(s->tape); /* another rank abandoned while this one was at a collective with it */
    } else if (status != MU_OK) {
        fail_here(d, s, status);
    }
    if (status != MU_OK) {
        mui_reducer_abandon(d->reducer, s->reason);
        return;
    }
    /* Whatever was expected and did not come: what the slab holds decides. */
    for (int64_t i = 0; i < d->member_count; i++) {
        mui_reducer_ready(d->reducer, i, d->members[i].parameter->grad_state != MUI_GRAD_NONE);
    }
}

static mu_status skipped(mu_ddp *d)
{
    d->skipped++;
    snprintf(d->skip_text, sizeof(d->skip_text), "%s", mui_reducer_skip_text(d->reducer));
    mui_log(d->context, mu_group_rank(d->group) == 0 ? MU_LOG_WARN : MU_LOG_INFO, "ddp `%s`: step skipped: %s", d->name,
            mui_reducer_skip_text(d->reducer));
    return MU_SKIPPED;
}

/* Times of the reduction that has just been waited for. */
static void note_times(mu_ddp *d, double forward, double local)
{
    const mui_bucket_times *at = mui_reducer_times(d->reducer);
    double first = at[0].launched, last = at[d->bucket_count - 1].reduced;
    double until = last < local ? last : local;
    d->last = (mu_ddp_times){.forward = forward,
                             .backward = local - d->called,
                             .communication = last > first ? last - first : 0,
                             .overlapped = until > first ? until - first : 0,
                             .exposed = d->wait_seconds};
    d->last_rank = mui_reducer_last_rank(d->reducer, &d->last_rank_seconds);
}

static void add_times(mu_ddp *d)
{
    d->sum.forward += d->last.forward;
    d->sum.backward += d->last.backward;
    d->sum.communication += d->last.communication;
    d->sum.overlapped += d->last.overlapped;
    d->sum.exposed += d->last.exposed;
}

/* What was deferred has been brought in, or is gone. */
static void forget_deferred(mu_ddp *d)
{
    d->deferred = d->deferred_samples = 0;
    d->deferred_weighted = false;
}

/* Gradients that were cleared take what was deferred with them. */
static void note_clears(mu_ddp *d, const mui_store *st)
{
    if (st != NULL && st->clears != d->deferred_clears) {
        d->deferred_clears = st->clears;
        d->deferred_failed[0] = '\0';
        forget_deferred(d);
    }
}

/* All buckets have arrived, or will not. */
static mu_status conclude(mu_ddp *d, step *s, mu_status reduced, mu_status buffers)
{
    if (reduced < 0 || buffers < 0) {
        give_back(d, s);
        return mui_ddp_break(d, reduced < 0 ? reduced : buffers);
    }
    if (reduced == MU_SKIPPED) {
        give_back(d, s);
        return skipped(d);
    }
    if (s->weighted && mui_reducer_total_samples(d->reducer) == 0) {
        give_back(d, s);
        return mui_fail(d->context, MU_ERR_ARG, "mu_ddp_backward_weighted: the ranks' samples sum up to 0 (ddp `%s`)",
                        d->name);
    }
    if (mui_reducer_first_bad(d->reducer) >= 0) {
        give_back(d, s);
        d->skipped++;
        snprintf(d->skip_text, sizeof(d->skip_text), "a gradient was not finite in %.150s", mui_reducer_text(d->reducer));
        return mui_ddp_not_finite(d);
    }
    mui_ddp_note_absent(d);
    mu_status status = mui_ddp_judge_absent(d, s->updates);
    if (status != MU_OK) {
        give_back(d, s);
        return status;
    }
    keep_reduced(d);
    if (mui_reducer_scatters(d->reducer) || s->earlier == 0) {
        d->store->scattered_version = mui_reducer_scatters(d->reducer) ? d->store->version : 0;
    }
    mui_ddp_written_agreed(d);
    forget_deferred(d);
    d->reductions++;
    add_times(d);
    if (!d->planned) {
        status = mui_ddp_plan(d);
    }
    if (status == MU_OK && d->options.check_every > 0 && d->reductions % (uint64_t)d->options.check_every == 0) {
        status = mu_ddp_check(d);
    }
    return status;
}

static mu_status reduce(mu_ddp *d, step *s)
{
    double begin = mui_now(), began = s->loss != NULL ? mui_tape_began(s->tape) : 0;
    double forward = began > 0 ? begin - (began > d->ended ? began : d->ended) : 0;
    d->called = begin;
    mu_status status = mui_ddp_follow(d);
    if (status != MU_OK) {
        return status;
    }
    s->agreement = MUI_HASH_START;
    note_clears(d, d->store);
    if (s->reason == NULL && d->deferred_failed[0] != '\0') {
        s->reason = d->deferred_failed;
    }
    if (s->reason == NULL) {
        status = prepare(d, s);
        if (status != MU_OK) {
            fail_here(d, s, status);
        }
    }
    run_backward(d, s);
    mui_timer timer;
    mui_timer_start(&timer, d->context, MUI_KIND_ALL_REDUCE_WAIT);
    int64_t traced = mui_trace_began(d->context);
    double local = mui_now();
    d->buckets_early = mui_reducer_launched(d->reducer);
    mui_reducer_launch_rest(d->reducer);
    mui_buffer_requests buffers;
    mui_ddp_buffers_start(d, s->reason != NULL || d->options.nonfinite != MU_NONFINITE_KEEP, &buffers);
    mui_ddp_work(d, "waiting for the others' gradients");
    mu_status reduced = mui_reducer_wait(d->reducer);
    mu_status averaged = mui_ddp_buffers_finish(d, &buffers);
    d->wait_seconds = mui_now() - local;
    mui_trace_ended(d->context, MUI_TRACE_WAIT, "wait for gradients", traced, 0);
    mui_timer_stop(&timer, 0, 0);
    mui_ddp_work(d, NULL);
    if (reduced == MU_OK) {
        note_times(d, forward, local);
    }
    status = conclude(d, s, reduced, averaged);
    d->ended = mui_now();
    d->backward_seconds = d->ended - begin;
    return status;
}

/* An error this rank brings along, from a failed forward for example, must not keep it from the collectives: it is put
 * aside, the step abandoned on its behalf, and put back. */
static mu_status call(mu_ddp *d, step *s)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = d->context;
    mui_aside_put(c, &s->failure);
    mu_status status;
    if (d->broken != MU_OK) {
        status = mui_fail(c, d->broken, "%s", d->broken_text);
    } else {
        if (s->failure.status != MU_OK && s->reason == NULL) {
            s->local = s->failure.status;
            s->reason = s->failure.message;
        }
        if (s->reason == NULL && s->tape != NULL) {
            s->reason = mui_tape_skipped(s->tape); /* in forward */
        }
        status = reduce(d, s);
    }
    mui_aside_restore(c, &s->failure);
    return s->local != MU_OK ? s->local : status;
}

mu_status mu_ddp_backward(mu_ddp *d, mu_tape *t, mu_tensor *loss)
{
    step s = {.tape = t, .loss = loss};
    return call(d, &s);
}

mu_status mu_ddp_backward_weighted(mu_ddp *d, mu_tape *t, mu_tensor *loss, int64_t samples)
{
    step s = {.tape = t, .loss = loss, .weighted = true, .samples = samples};
    return call(d, &s);
}

/* Backward alone. The store is taken as it is now: gradients move along when the next reduction follows the tree. */
static mu_status run_deferred(mu_ddp *d, step *s)
{
    mui_store *st = mui_store_of(d->root);
    if (st == NULL) {
        return mu_context_status(d->context);
    }
    if (d->deferred == 0) {
        d->deferred_weighted = s->weighted;
    }
    mu_status status = check_call(d, s);
    if (status != MU_OK || s->loss == NULL) {
        return status;
    }
    if (loss_is_bad(d, s)) {
        return d->options.nonfinite == MU_NONFINITE_ERROR
                   ? mui_fail(d->context, MU_ERR_STATE, "ddp `%s`: the loss of a deferred backward is not finite", d->name)
                   : MU_SKIPPED;
    }
    status = mui_backward_mark(s->tape, s->loss, st);
    return status == MU_OK ? mui_backward_run(s->tape, s->loss, s->weighted ? (float)s->samples : 1.0F, NULL) : status;
}

static mu_status defer(mu_ddp *d, step *s)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = d->context;
    mui_source *source = (mui_source *)d->root;
    note_clears(d, source->built(source));
    mu_status status = mui_failed(c)           ? mu_context_status(c)
                       : d->broken != MU_OK    ? mui_fail(c, d->broken, "%s", d->broken_text)
                                               : run_deferred(d, s);
    d->deferred++; /* also when it failed: the others have counted theirs */
    d->deferred_samples += s->weighted && status == MU_OK ? s->samples : 0;
    if (status != MU_OK && d->deferred_failed[0] == '\0') {
        snprintf(d->deferred_failed, sizeof(d->deferred_failed), "a deferred backward failed (%.100s): clear gradients",
                 status == MU_SKIPPED ? "its loss was not finite, or another rank abandoned it" : mu_context_message(c));
    }
    return status;
}

mu_status mu_ddp_backward_with(mu_ddp *d, mu_tape *t, mu_tensor *loss, const mu_ddp_backward_options *options)
{
    mu_ddp_backward_options o = options != NULL ? *options : (mu_ddp_backward_options){0};
    step s = {.tape = t, .loss = loss, .weighted = o.weighted, .samples = o.weighted ? o.samples : 0};
    return o.defer ? defer(d, &s) : call(d, &s);
}

mu_status mu_ddp_abandon(mu_ddp *d, const char *reason)
{
    step s = {.reason = reason != NULL ? reason : "no reason given"};
    return call(d, &s);
}
