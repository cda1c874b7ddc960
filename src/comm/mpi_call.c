/* Calls over MPI: posting, verdict, completion in order. The queue is that of call.c, with descriptors that MPI gathers
 * in the place of posts in shared memory. */
#define _DEFAULT_SOURCE
#include "base/alloc.h"
#include "base/os.h"
#include "comm/mpi_group.h"
#include "comm/naming.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define SPIN_SECONDS 50e-6
#define CROWDED_SPIN_SECONDS 2e-6
/* Of a wait; from then on it sleeps in between. A scheduler may give the core back to whoever yields it. */
#define YIELD_SECONDS 20e-3
#define CROWDED_YIELD_SECONDS 100e-6
#define NAP_NANOSECONDS 50000L
#define LOOK_SECONDS 0.02

/* -- memory of calls ----------------------------------------------------------------------------------------------- */
static mui_mpi_call *make_call(mui_mpi *g)
{
    mui_mpi_call *call = mui_calloc(g->base.context, 1, sizeof(*call));
    if (call == NULL) {
        return NULL;
    }
    call->own = mui_calloc(g->base.context, (size_t)g->base.size + 1, sizeof(*call->own));
    if (call->own == NULL) {
        mui_free(g->base.context, call);
        return NULL;
    }
    call->next_all = g->all_calls;
    g->all_calls = call;
    return call;
}

mu_status mui_mpi_reserve(mui_mpi *g, size_t count)
{
    size_t have = 0;
    for (const mui_mpi_call *call = g->all_calls; call != NULL; call = call->next_all) {
        have++;
    }
    for (; have < count; have++) {
        mui_mpi_call *call = make_call(g);
        if (call == NULL) {
            return MU_ERR_NOMEM;
        }
        call->next = g->free_calls;
        g->free_calls = call;
    }
    return MU_OK;
}

static mui_mpi_call *take_call(mui_mpi *g)
{
    mui_mpi_call *call = g->free_calls;
    if (call != NULL) {
        g->free_calls = call->next;
        mui_mpi_call keep = *call;
        memset(call, 0, sizeof(*call));
        call->next_all = keep.next_all;
        call->own = keep.own;
    } else {
        call = make_call(g);
        if (call == NULL) {
            return NULL;
        }
    }
    call->base.group = &g->base;
    return call;
}

void mui_mpi_calls_free(mui_mpi *g)
{
    while (g->all_calls != NULL) {
        mui_mpi_call *call = g->all_calls;
        g->all_calls = call->next_all;
        mui_free(g->base.context, call->own);
        mui_free(g->base.context, call);
    }
}

/* -- progress ------------------------------------------------------------------------------------------------------ */
void mui_mpi_failed(mui_mpi *g, const char *what, int code)
{
    char why[512] = "", text[MUI_BROKEN_BYTES];
    g->mpi->error(code, why, sizeof(why));
    snprintf(text, sizeof(text), "%s on rank %d: %s: %s", g->mpi->name, g->base.rank, what, why);
    mui_mpi_give_up(g, MU_ERR_COMM, text);
}

static bool room_to_post(const mui_mpi *g)
{
    return g->posted < g->headers_number + MUI_MPI_GATHERS;
}

static void post(mui_mpi *g, mui_mpi_call *call)
{
    mui_mpi_header *h = call->own;
    memset(h, 0, sizeof(*h));
    mui_post_fill(&h->slot, &call->spec, call->identified ? &call->identity : NULL, g->base.size);
    h->slot.posted_at -= g->clock_offset;
    h->failed = call->no_memory;
    mui_place_text(&g->phase, &g->beacon, h->seen, sizeof(h->seen));
    call->state = MUI_MPI_POSTED;
    g->posted++;
    int code = g->mpi->gather(g->port, h, (int)sizeof(*h), h + 1, &call->request);
    if (code != 0) {
        mui_mpi_failed(g, "gathering descriptors", code);
        return;
    }
    call->gathering = true;
}

static bool post_queued(mui_mpi *g)
{
    bool posted = false;
    while (g->first_queued != NULL && g->base.broken == MU_OK && room_to_post(g)) {
        mui_mpi_call *call = g->first_queued;
        g->first_queued = call->next;
        post(g, call);
        posted = true;
    }
    return posted;
}

/* All descriptors are here. */
static void judge(mui_mpi *g, mui_mpi_call *call)
{
    char text[MUI_BROKEN_BYTES];
    mui_posts posts = {&call->own[1].slot, sizeof(*call->own), g->base.size};
    call->status = mui_verdict_of(&posts, &call->verdict, text);
    if (call->status < 0) {
        mui_mpi_give_up(g, call->status, text);
        return;
    }
    for (int r = 0; r < g->base.size; r++) {
        call->no_memory = call->no_memory || call->own[1 + r].failed != 0;
    }
    call->state = MUI_MPI_FINISHED;
    if (call->status == MU_OK) {
        mui_mpi_plan(g, call);
        if (call->rounds == 0) {
            mui_finish_inline(&posts, &call->spec, g->base.rank, g->in);
        } else {
            call->state = MUI_MPI_MOVING;
        }
    }
    /* Kept for messages about where ranks were last seen. */
    mui_mpi_header *old = g->headers;
    g->headers = call->own;
    g->headers_number = call->base.number + 1;
    call->own = old;
}

static bool collect(mui_mpi *g, mui_mpi_call *call)
{
    bool done = false;
    int code = g->mpi->test(&call->request, &done);
    if (code != 0) {
        call->gathering = false;
        mui_mpi_failed(g, "gathering descriptors", code);
        return true;
    }
    if (done) {
        call->gathering = false;
        judge(g, call);
    }
    return done;
}

static bool pop_finished(mui_mpi *g)
{
    bool popped = false;
    while (g->first != NULL && g->first->state == MUI_MPI_FINISHED) {
        mui_mpi_call *call = g->first;
        g->first = call->next;
        call->next = NULL;
        call->state = MUI_MPI_REPORTABLE;
        g->completed++;
        if (g->warned == call->base.number + 1) {
            mui_mpi_stall_over(g);
        }
        popped = true;
    }
    if (g->first == NULL) {
        g->last = NULL;
    }
    return popped;
}

bool mui_mpi_progress(mui_mpi *g)
{
    bool moved = false, starting = true;
    if (g->base.broken != MU_OK) {
        return false;
    }
    moved = mui_mpi_advance_rounds(g);
    for (mui_mpi_call *call = g->first; call != NULL && g->base.broken == MU_OK; call = call->next) {
        if (call->state == MUI_MPI_POSTED) {
            moved = collect(g, call) || moved;
        }
        if (call->state <= MUI_MPI_POSTED || g->base.broken != MU_OK) {
            break; /* who has not posted this one has not posted later ones */
        }
        /* Rounds start in one order on all ranks: all of a call's before those of the next. */
        if (starting && call->state == MUI_MPI_MOVING) {
            uint64_t before = call->started;
            starting = mui_mpi_start_rounds(g, call);
            moved = moved || call->started != before;
        }
    }
    if (g->base.broken == MU_OK) {
        moved = pop_finished(g) || moved;
        moved = post_queued(g) || moved;
        mui_mpi_listen(g);
        mui_mpi_check_doom(g);
    }
    g->moves += moved;
    return moved;
}

void mui_mpi_fail_all(mui_mpi *g, mu_status status)
{
    while (g->first != NULL) {
        mui_mpi_call *call = g->first;
        g->first = call->next;
        call->next = NULL;
        /* What was complete stays so. */
        call->status = call->state == MUI_MPI_FINISHED ? call->status : status;
        call->state = MUI_MPI_REPORTABLE;
    }
    g->last = g->first_queued = NULL;
}

bool mui_mpi_drained(mui_mpi *g)
{
    bool busy = false, done;
    for (mui_mpi_call *call = g->all_calls; call != NULL; call = call->next_all) {
        if (call->gathering) {
            done = false;
            call->gathering = g->mpi->test(&call->request, &done) == 0 && !done;
            busy = busy || call->gathering;
        }
    }
    for (int i = 0; i < MUI_MPI_ROUNDS; i++) {
        mui_mpi_round *r = &g->rounds[i];
        if (r->state == MUI_ROUND_SCATTERING || r->state == MUI_ROUND_SHARING) {
            done = false;
            r->state = g->mpi->test(&r->request, &done) == 0 && !done ? r->state : MUI_ROUND_FREE;
            busy = busy || r->state != MUI_ROUND_FREE;
        }
    }
    return !busy;
}

/* -- starting and waiting ------------------------------------------------------------------------------------------ */
static mu_status broken(mui_mpi *g)
{
    return mui_fail(g->base.context, g->base.broken, "%s", g->base.broken_text);
}

static mui_mpi_call *start(mui_mpi *g, const mui_call_spec *spec, bool no_memory)
{
    /* First what is in flight: a call that all ranks can complete completes whatever came after. */
    (void)mui_mpi_progress(g);
    mui_mpi_call *call = g->base.broken == MU_OK ? take_call(g) : NULL;
    if (g->base.broken != MU_OK) {
        (void)broken(g);
        return NULL;
    }
    if (call == NULL) {
        return NULL;
    }
    call->spec = *spec;
    call->spec.identity = NULL;
    call->no_memory = no_memory;
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
    g->first_queued = g->first_queued != NULL ? g->first_queued : call;
    (void)mui_mpi_progress(g);
    return call;
}

mui_mpi_call *mui_mpi_start(mui_mpi *g, const mui_call_spec *spec)
{
    return start(g, spec, false);
}

static mu_status report(mui_mpi *g, mui_mpi_call *call)
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

mu_status mui_mpi_test(mu_request *r, bool *done)
{
    mui_mpi *g = (mui_mpi *)r->group;
    mui_mpi_call *call = (mui_mpi_call *)r;
    if (mui_mpi_progress(g)) {
        call->polled = 0;
    }
    if (call->state != MUI_MPI_REPORTABLE) {
        double now = mui_now();
        call->polled = call->polled > 0 ? call->polled : now;
        if (now - g->last_look >= LOOK_SECONDS) {
            (void)mui_mpi_look(g, call->polled);
        }
    }
    *done = call->state == MUI_MPI_REPORTABLE;
    return *done ? report(g, call) : MU_OK;
}

/* With a core for each rank, spinning for a moment is fastest; else whoever spins keeps the awaited rank from running. */
void mui_mpi_pause(const mui_mpi *g, double waited)
{
    if (g->mpi->idle != NULL) {
        g->mpi->idle(g->port);
        return;
    }
    if (waited < (g->oversubscribed ? CROWDED_SPIN_SECONDS : SPIN_SECONDS)) {
        return; /* asking MPI takes some time by itself */
    }
    if (waited < (g->oversubscribed ? CROWDED_YIELD_SECONDS : YIELD_SECONDS)) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = NAP_NANOSECONDS}, NULL);
    }
}

mu_status mui_mpi_wait(mu_request *r)
{
    mui_mpi *g = (mui_mpi *)r->group;
    mui_mpi_call *call = (mui_mpi_call *)r;
    double since = 0;
    while (call->state != MUI_MPI_REPORTABLE) {
        if (mui_mpi_progress(g)) {
            since = 0;
            continue;
        }
        double now = mui_now();
        since = since > 0 ? since : now;
        if (now - g->last_look >= LOOK_SECONDS) {
            (void)mui_mpi_look(g, since);
        }
        mui_mpi_pause(g, now - since);
    }
    return report(g, call);
}

mu_status mui_mpi_run_alloc(mui_mpi *g, const mui_call_spec *spec, bool *no_memory)
{
    mui_mpi_call *call = start(g, spec, *no_memory);
    if (call == NULL) {
        return g->base.broken != MU_OK ? g->base.broken : MU_ERR_NOMEM;
    }
    mu_status s = mui_mpi_wait(&call->base);
    *no_memory = call->no_memory; /* free again, but as it was left */
    return s;
}

mu_status mui_mpi_run(mui_mpi *g, const mui_call_spec *spec)
{
    bool no_memory = false;
    return mui_mpi_run_alloc(g, spec, &no_memory);
}
