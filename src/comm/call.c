/* The queue of calls: posting, progress, completion in order. */
#include "base/alloc.h"
#include "base/os.h"
#include "comm/local.h"

#include <string.h>

static mui_call *make_call(mui_local *g)
{
    mui_call *call = mui_calloc(g->base.context, 1, sizeof(*call));
    if (call != NULL) {
        call->next_all = g->all_calls;
        g->all_calls = call;
    }
    return call;
}

mu_status mui_calls_reserve(mui_local *g, size_t count)
{
    size_t have = 0;
    for (const mui_call *call = g->all_calls; call != NULL; call = call->next_all) {
        have++;
    }
    for (; have < count; have++) {
        mui_call *call = make_call(g);
        if (call == NULL) {
            return MU_ERR_NOMEM;
        }
        call->next = g->free_calls;
        g->free_calls = call;
    }
    return MU_OK;
}

static mui_call *take_call(mui_local *g)
{
    mui_call *call = g->free_calls;
    if (call != NULL) {
        g->free_calls = call->next;
        mui_call *next_all = call->next_all;
        memset(call, 0, sizeof(*call));
        call->next_all = next_all;
    } else {
        call = make_call(g);
        if (call == NULL) {
            return NULL;
        }
    }
    call->base.group = &g->base;
    return call;
}

void mui_calls_free(mui_local *g)
{
    while (g->all_calls != NULL) {
        mui_call *call = g->all_calls;
        g->all_calls = call->next_all;
        mui_free(g->base.context, call);
    }
}

/* A slot may be reused when all ranks have completed the call it held. */
static bool slot_is_free(mui_local *g)
{
    if (g->posted < g->all_completed + MUI_SLOTS) {
        return true;
    }
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < g->base.size; r++) {
        /* Pairs with the release in pop_finished. */
        uint64_t n = __atomic_load_n(&mui_block_of(g, r)->completed, __ATOMIC_ACQUIRE);
        least = n < least ? n : least;
    }
    g->all_completed = least;
    return g->posted < least + MUI_SLOTS;
}

static void post(mui_local *g, mui_call *call)
{
    mui_slot *s = mui_slot_of(g, g->base.rank, call->base.number);
    mui_post_fill(s, &call->spec, call->identified ? &call->identity : NULL, g->base.size);
    s->offset = mui_call_offset(g, call);
    __atomic_store_n(&s->stage, 0, __ATOMIC_RELAXED); /* read only after posted */
    __atomic_store_n(&g->me->calls, call->base.number + 1, __ATOMIC_RELAXED);
    /* Pairs with the acquire in mui_call_lacks; seq_cst with `sleeping`. */
    __atomic_store_n(&s->posted, call->base.number + 1, __ATOMIC_SEQ_CST);
    call->state = MUI_POSTED;
    call->seen = 0;
    g->posted++;
    mui_wake_others(g);
}

bool mui_call_lacks(const mui_local *g, const mui_call *call, int q)
{
    if (call->state == MUI_QUEUED) {
        return __atomic_load_n(&mui_block_of(g, q)->completed, __ATOMIC_ACQUIRE) + MUI_SLOTS <= call->base.number;
    }
    const mui_slot *s = mui_slot_of(g, q, call->base.number);
    if (call->state == MUI_POSTED) {
        return __atomic_load_n(&s->posted, __ATOMIC_ACQUIRE) != call->base.number + 1;
    }
    return call->state == MUI_MOVING && __atomic_load_n(&s->stage, __ATOMIC_ACQUIRE) < call->stage;
}

/* Whether all ranks have done what the call waits for. Seq_cst loads, since a rank about to sleep asks too. */
static bool all_there(mui_local *g, mui_call *call)
{
    while (call->seen < g->base.size) {
        mui_slot *s = mui_slot_of(g, call->seen, call->base.number);
        bool there = call->state == MUI_POSTED
                         ? __atomic_load_n(&s->posted, __ATOMIC_SEQ_CST) == call->base.number + 1
                         : __atomic_load_n(&s->stage, __ATOMIC_SEQ_CST) >= call->stage;
        if (!there) {
            return false;
        }
        call->seen++;
    }
    return true;
}

/* As far as it goes without waiting, at most one step of work. True when something moved. */
static bool advance(mui_local *g, mui_call *call)
{
    if (call->state == MUI_QUEUED) {
        if (!slot_is_free(g)) {
            return false;
        }
        post(g, call);
        (void)advance(g, call);
        return true;
    }
    if (call->state == MUI_POSTED) {
        if (!all_there(g, call)) {
            return false;
        }
        char text[MUI_BROKEN_BYTES];
        mui_posts posts = mui_posts_of(g, call);
        call->status = mui_verdict_of(&posts, &call->verdict, text);
        if (call->status < 0) {
            mui_local_break(g, call->status, text);
            return true;
        }
        call->state = call->status == MU_SKIPPED ? MUI_FINISHED : MUI_MOVING;
        if (call->state == MUI_FINISHED) {
            return true;
        }
        mui_transfer_plan(g, call);
    } else if (call->state != MUI_MOVING || !all_there(g, call)) {
        return false;
    }
    if (call->stage < call->stages) {
        if (!call->direct && call != g->first) {
            return false; /* one call at a time has the staging space */
        }
        mui_transfer_step(g, call);
        call->stage++;
        call->seen = 0;
        /* Pairs with the loads in all_there and mui_call_lacks. */
        __atomic_store_n(&mui_slot_of(g, g->base.rank, call->base.number)->stage, call->stage, __ATOMIC_SEQ_CST);
        mui_wake_others(g);
        return true;
    }
    mui_transfer_finish(g, call);
    call->state = MUI_FINISHED;
    return true;
}

static bool pop_finished(mui_local *g)
{
    bool popped = false;
    while (g->first != NULL && g->first->state == MUI_FINISHED) {
        mui_call *call = g->first;
        g->first = call->next;
        call->next = NULL;
        call->state = MUI_REPORTABLE;
        g->completed++;
        if (g->stall.warned == call->base.number + 1) {
            mui_stall_over(g);
        }
        popped = true;
    }
    if (g->first == NULL) {
        g->last = NULL;
    }
    if (popped) {
        /* Pairs with the acquire in slot_is_free; seq_cst since a peer with a full queue may sleep for it. */
        __atomic_store_n(&g->me->completed, g->completed, __ATOMIC_SEQ_CST);
        if (g->completed % (MUI_SLOTS / 2) == 0) {
            mui_wake_others(g);
        }
    }
    return popped;
}

bool mui_local_progress(mui_local *g)
{
    bool moved = false;
    for (mui_call *call = g->first, *next; call != NULL && g->base.broken == MU_OK; call = next) {
        next = call->next;
        moved = advance(g, call) || moved;
        if (call->state == MUI_QUEUED || call->state == MUI_POSTED) {
            break; /* who has not posted this one has not posted later ones */
        }
    }
    moved = pop_finished(g) || moved;
    g->moves += moved;
    return moved;
}

void mui_call_fail_all(mui_local *g, mu_status status)
{
    while (g->first != NULL) {
        mui_call *call = g->first;
        g->first = call->next;
        call->next = NULL;
        /* What was complete stays so. */
        call->status = call->state == MUI_FINISHED ? call->status : status;
        call->state = MUI_REPORTABLE;
    }
    g->last = NULL;
}

static mu_status broken(mui_local *g)
{
    return mui_fail(g->base.context, g->base.broken, "%s", g->base.broken_text);
}

mui_call *mui_call_start(mui_local *g, const mui_call_spec *spec)
{
    /* First what is in flight: a call that all ranks can complete completes whatever came after. */
    (void)mui_local_progress(g);
    if (g->base.broken == MU_OK && __atomic_load_n(&g->region.control->abort_state, __ATOMIC_ACQUIRE) == 2) {
        (void)mui_local_break(g, MU_ERR_PEER, "the group was aborted");
    }
    if (g->base.broken != MU_OK) {
        (void)broken(g);
        return NULL;
    }
    mui_call *call = take_call(g);
    if (call == NULL) {
        return NULL;
    }
    call->spec = *spec;
    call->spec.identity = NULL;
    if (spec->identity != NULL) {
        call->identity = *spec->identity;
        call->identity.text[MUI_IDENTITY_TEXT - 1] = '\0';
        call->identified = true;
    }
    call->base.number = g->base.calls++;
    if (g->last != NULL) {
        g->last->next = call;
    } else {
        g->first = call;
    }
    g->last = call;
    (void)mui_local_progress(g);
    /* Progress stops at the first call that others are late for; what this rank has brought is to be seen all the
     * same. */
    if (call->state == MUI_QUEUED && g->posted == call->base.number && slot_is_free(g)) {
        post(g, call);
    }
    return call;
}

static mu_status report(mui_local *g, mui_call *call)
{
    mu_status s = call->status;
    if (s < 0) {
        s = broken(g);
    } else if (s == MU_SKIPPED) {
        memcpy(g->base.skip_text, call->verdict.skip_text, sizeof(call->verdict.skip_text));
        g->base.skip_within = call->verdict.skip_within;
    }
    g->base.last_rank = call->verdict.last_rank;
    g->base.last_seconds = call->verdict.last_seconds;
    call->next = g->free_calls;
    g->free_calls = call;
    return s;
}

mu_status mui_local_test(mu_request *r, bool *done)
{
    mui_local *g = (mui_local *)r->group;
    mui_call *call = (mui_call *)r;
    if (mui_local_progress(g)) {
        call->polled = 0;
    }
    if (call->state != MUI_REPORTABLE) {
        double now = mui_now();
        call->polled = call->polled > 0 ? call->polled : now;
        if (now - g->last_look >= 0.02) {
            (void)mui_look_around(g, call->polled);
        }
    }
    *done = call->state == MUI_REPORTABLE;
    return *done ? report(g, call) : MU_OK;
}

mu_status mui_local_wait(mu_request *r)
{
    mui_local *g = (mui_local *)r->group;
    mui_call *call = (mui_call *)r;
    mui_patience p = {0};
    while (call->state != MUI_REPORTABLE) {
        if (mui_local_progress(g)) {
            p.turns = 0;
        } else {
            mui_patience_step(g, &p);
        }
    }
    return report(g, call);
}

mu_status mui_local_run(mui_local *g, const mui_call_spec *spec)
{
    mui_call *call = mui_call_start(g, spec);
    if (call == NULL) {
        return g->base.broken != MU_OK ? g->base.broken : MU_ERR_NOMEM;
    }
    return mui_local_wait(&call->base);
}
