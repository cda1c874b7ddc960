/* How data moves over MPI once all ranks agree on a call: in rounds of a few megabytes.
 *
 * A round of an all-reduce scatters slices to the ranks that reduce them, reduces this rank's own, and shares the result
 * in place. A reduce-scatter has the first half of that, as has the scattered part of an all-reduce (mui_identity), an
 * all-gather and a broadcast the second. Several rounds are
 * under way together, so one is scattered while another is shared; each channel gets them in the order in which they
 * were started, which is the same on all ranks. */
#include "comm/mpi_group.h"
#include "comm/reduce.h"
#include "dev/pages.h"

#include <limits.h>
#include <string.h>

static size_t element(const mui_mpi_call *call)
{
    bool reduces = call->spec.kind == MUI_ALL_REDUCE || call->spec.kind == MUI_REDUCE_SCATTER;
    return reduces ? mui_reducible_bytes(call->spec.type) : 1;
}

/* Bytes of each rank's result that one round carries: where every rank has a part of its own, all of them must fit. */
static size_t unit_for(const mui_mpi *g, bool parts)
{
    size_t unit = g->round_bytes / (parts ? (size_t)g->base.size : 1) / 64 * 64;
    return unit > 0 ? unit : 64;
}

static size_t unit_of(const mui_mpi *g, const mui_mpi_call *call)
{
    return unit_for(g, call->spec.kind == MUI_ALL_GATHER || call->spec.kind == MUI_REDUCE_SCATTER);
}

/* A round that ends with the reduction: nobody else needs its result. */
static bool ends_reduced(const mui_mpi_round *r)
{
    return r->call->spec.kind == MUI_REDUCE_SCATTER || r->index < r->call->slice_rounds;
}

/* Where the round's part of the result begins; of a scattered part, within each slice. */
static size_t start_of(const mui_mpi *g, const mui_mpi_round *r)
{
    const mui_mpi_call *call = r->call;
    return r->index < call->slice_rounds
               ? (size_t)r->index * unit_for(g, true)
               : call->slice_bytes * (size_t)g->base.size + (size_t)(r->index - call->slice_rounds) * unit_of(g, call);
}

static size_t bytes_of(const mui_mpi *g, const mui_mpi_round *r)
{
    const mui_mpi_call *call = r->call;
    bool slice = r->index < call->slice_rounds;
    size_t unit = slice ? unit_for(g, true) : unit_of(g, call);
    size_t left = (slice ? call->slice_bytes : mui_spec_bytes(&call->spec)) - start_of(g, r);
    return left < unit ? left : unit;
}

static uint64_t rounds_for(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit;
}

void mui_mpi_plan(const mui_mpi *g, mui_mpi_call *call)
{
    const mui_call_spec *s = &call->spec;
    size_t bytes = mui_spec_bytes(s);
    if (mui_spec_brings(s, g->base.size) <= MUI_INLINE_BYTES || g->base.size == 1) {
        call->rounds = 0; /* it has travelled in the descriptors */
        return;
    }
    if (s->kind == MUI_ALL_REDUCE && call->identified) {
        call->slice_bytes =
            (size_t)mui_scattered(&call->identity, g->base.size, s->type) * element(call) / (size_t)g->base.size;
        call->slice_rounds = rounds_for(call->slice_bytes, unit_for(g, true));
    }
    call->rounds =
        call->slice_rounds + rounds_for(bytes - call->slice_bytes * (size_t)g->base.size, unit_of(g, call));
}

/* Memory that belongs to the group, which MPI may have for as long as it likes. */
static bool is_ours(const mui_mpi *g, const void *data, size_t bytes)
{
    uintptr_t p = (uintptr_t)data;
    for (const mui_mpi_block *b = g->blocks; b != NULL; b = b->next) {
        uintptr_t from = (uintptr_t)b->data;
        if (p >= from && p - from <= b->bytes && bytes <= b->bytes - (p - from)) {
            return true;
        }
    }
    return false;
}

/* Room for what comes from others, and behind it for a copy of what is not ours: never at one address, not even where
 * nothing comes, since Open MPI takes equal buffers for MPI_IN_PLACE. */
static bool make_room(mui_mpi *g, mui_mpi_round *r, size_t incoming, size_t copied)
{
    size_t first = incoming / 64 * 64 + 64, need = first + copied;
    g->scratch_wanted = need > g->scratch_wanted ? need : g->scratch_wanted;
    if (r->scratch_bytes < g->scratch_wanted) { /* all rounds alike: after some, none allocates any more */
        mui_pages_free(g->base.context, r->scratch);
        r->scratch_bytes = 0;
        r->scratch = mui_pages_alloc(g->base.context, g->scratch_wanted);
        if (r->scratch == NULL) {
            mui_mpi_give_up(g, MU_ERR_NOMEM, "out of memory for a round of MPI");
            return false;
        }
        r->scratch_bytes = g->scratch_wanted;
    }
    r->stage = r->scratch + first;
    return true;
}

static void same_places(const mui_mpi *g, int *counts, int *places, size_t bytes)
{
    for (int q = 0; q < g->base.size; q++) {
        counts[q] = (int)bytes;
        places[q] = (int)((size_t)q * bytes);
    }
}

/* -- the beginning of a round -------------------------------------------------------------------------------------- */
static void scatter(mui_mpi *g, mui_mpi_round *r)
{
    int code = g->mpi->scatter(g->port, r->base, r->counts, r->places, r->scratch, r->got_counts, r->got_places,
                               &r->request);
    r->state = MUI_ROUND_SCATTERING;
    if (code != 0) {
        r->state = MUI_ROUND_FREE;
        mui_mpi_failed(g, "scattering slices", code);
    }
}

static void begin_all_reduce(mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    size_t each = element(r->call), bytes = bytes_of(g, r), at = start_of(g, r);
    int64_t n = (int64_t)(bytes / each), from, count;
    for (int q = 0; q < g->base.size; q++) {
        mui_reduce_slice(n, g->base.size, q, each, &from, &count);
        r->counts[q] = (int)((size_t)count * each);
        r->places[q] = (int)((size_t)from * each);
    }
    size_t own = (size_t)r->counts[g->base.rank];
    same_places(g, r->got_counts, r->got_places, own);
    bool ours = is_ours(g, (char *)s->out + at, bytes);
    if (!make_room(g, r, own * (size_t)g->base.size, ours ? 0 : bytes)) {
        return;
    }
    r->base = ours ? (char *)s->out + at : r->stage;
    if (!ours) {
        memcpy(r->stage, (const char *)s->in + at, bytes);
    }
    scatter(g, r);
}

static void begin_reduce_scatter(mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    size_t bytes = bytes_of(g, r), all = bytes * (size_t)g->base.size, whole = mui_spec_bytes(s);
    if (!make_room(g, r, all, all)) {
        return;
    }
    same_places(g, r->counts, r->places, bytes);
    same_places(g, r->got_counts, r->got_places, bytes);
    r->base = r->stage;
    for (int q = 0; q < g->base.size; q++) {
        memcpy(r->stage + (size_t)q * bytes, (const char *)s->in + (size_t)q * whole + start_of(g, r), bytes);
    }
    scatter(g, r);
}

/* As a reduce-scatter, but in place. */
static void begin_slices(mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    size_t slice = r->call->slice_bytes, bytes = bytes_of(g, r), all = bytes * (size_t)g->base.size;
    size_t whole = slice * (size_t)g->base.size;
    bool ours = is_ours(g, s->out, whole) && whole <= INT_MAX; /* places are ints */
    if (!make_room(g, r, all, ours ? 0 : all)) {
        return;
    }
    same_places(g, r->counts, r->places, bytes);
    same_places(g, r->got_counts, r->got_places, bytes);
    r->base = ours ? s->out : r->stage;
    for (int q = 0; q < g->base.size; q++) {
        size_t from = (size_t)q * slice + start_of(g, r);
        if (ours) {
            r->places[q] = (int)from;
        } else {
            memcpy(r->stage + (size_t)q * bytes, (const char *)s->in + from, bytes);
        }
    }
    scatter(g, r);
}

static void begin_all_gather(mui_mpi *g, mui_mpi_round *r)
{
    size_t bytes = bytes_of(g, r);
    if (!make_room(g, r, 0, bytes * (size_t)g->base.size)) {
        return;
    }
    same_places(g, r->counts, r->places, bytes);
    r->base = r->stage;
    memcpy(r->stage + (size_t)g->base.rank * bytes, (const char *)r->call->spec.in + start_of(g, r), bytes);
    r->state = MUI_ROUND_TO_SHARE;
}

static void begin_broadcast(mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    size_t bytes = bytes_of(g, r), at = start_of(g, r);
    bool ours = is_ours(g, (char *)s->out + at, bytes);
    if (!make_room(g, r, 0, ours ? 0 : bytes)) {
        return;
    }
    r->base = ours ? (char *)s->out + at : r->stage;
    if (!ours && g->base.rank == s->root) {
        memcpy(r->stage, (const char *)s->in + at, bytes);
    }
    r->state = MUI_ROUND_TO_SHARE;
}

bool mui_mpi_start_rounds(mui_mpi *g, mui_mpi_call *call)
{
    while (call->started < call->rounds && g->base.broken == MU_OK) {
        mui_mpi_round *r = &g->rounds[g->rounds_started % MUI_MPI_ROUNDS];
        if (r->state != MUI_ROUND_FREE) {
            return false;
        }
        r->call = call;
        r->index = call->started++;
        g->rounds_started++;
        switch (call->spec.kind) {
        case MUI_ALL_REDUCE: r->index < call->slice_rounds ? begin_slices(g, r) : begin_all_reduce(g, r); break;
        case MUI_REDUCE_SCATTER: begin_reduce_scatter(g, r); break;
        case MUI_ALL_GATHER: begin_all_gather(g, r); break;
        case MUI_BROADCAST: begin_broadcast(g, r); break;
        case MUI_BARRIER:
        case MUI_ALLOC:
        case MUI_FREE: break; /* have no rounds */
        }
    }
    return call->started == call->rounds;
}

/* -- the rest of it ------------------------------------------------------------------------------------------------ */
/* The slices of all ranks are here. */
static void reduce(const mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    size_t own = (size_t)r->got_counts[0];
    bool slice = s->kind == MUI_ALL_REDUCE && ends_reduced(r);
    void *out = slice                        ? (char *)s->out + (size_t)g->base.rank * r->call->slice_bytes + start_of(g, r)
                : s->kind == MUI_ALL_REDUCE ? r->base + r->places[g->base.rank]
                                             : (char *)s->out + start_of(g, r);
    for (int q = 0; q < g->base.size; q++) {
        g->in[q] = r->scratch + r->got_places[q];
    }
    mui_reduce(s->type, s->op, g->base.size, g->in, 1, &out, (int64_t)(own / element(r->call)));
    r->state = MUI_ROUND_TO_SHARE;
}

static void end_round(const mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    size_t bytes = bytes_of(g, r), at = start_of(g, r), whole = mui_spec_bytes(s);
    if (s->kind == MUI_ALL_GATHER) {
        for (int q = 0; q < g->base.size; q++) {
            memcpy((char *)s->out + (size_t)q * whole + at, r->stage + (size_t)q * bytes, bytes);
        }
    } else if (r->base == r->stage && !ends_reduced(r) && (s->kind == MUI_ALL_REDUCE || (s->kind == MUI_BROADCAST && s->root != g->base.rank))) {
        memcpy((char *)s->out + at, r->stage, bytes);
    }
    r->state = MUI_ROUND_FREE;
    if (++r->call->ended == r->call->rounds) {
        r->call->state = MUI_MPI_FINISHED;
    }
}

static void share(mui_mpi *g, mui_mpi_round *r)
{
    const mui_call_spec *s = &r->call->spec;
    int code = 0;
    g->rounds_shared++;
    if (ends_reduced(r)) {
        end_round(g, r);
        return;
    }
    r->state = MUI_ROUND_SHARING;
    code = s->kind == MUI_BROADCAST
               ? g->mpi->broadcast(g->port, r->base, (int)bytes_of(g, r), s->root, &r->request)
               : g->mpi->share(g->port, r->base, r->counts, r->places, &r->request);
    if (code != 0) {
        r->state = MUI_ROUND_FREE;
        mui_mpi_failed(g, "sharing results", code);
    }
}

/* As far as it goes without waiting; true when something moved. number: of the round, of all that were started. */
static bool advance(mui_mpi *g, mui_mpi_round *r, uint64_t number)
{
    if (r->state == MUI_ROUND_TO_SHARE) {
        if (g->rounds_shared != number) {
            return false;
        }
        share(g, r);
        return true;
    }
    bool done = false;
    int code = g->mpi->test(&r->request, &done);
    if (code != 0) {
        r->state = MUI_ROUND_FREE;
        mui_mpi_failed(g, "moving data", code);
        return true;
    }
    if (done && r->state == MUI_ROUND_SCATTERING) {
        reduce(g, r);
        if (g->rounds_shared == number) {
            share(g, r);
        }
    } else if (done) {
        end_round(g, r);
    }
    return done;
}

bool mui_mpi_advance_rounds(mui_mpi *g)
{
    bool moved = false;
    uint64_t number = g->rounds_started > MUI_MPI_ROUNDS ? g->rounds_started - MUI_MPI_ROUNDS : 0;
    for (; number < g->rounds_started && g->base.broken == MU_OK; number++) {
        mui_mpi_round *r = &g->rounds[number % MUI_MPI_ROUNDS];
        if (r->state != MUI_ROUND_FREE) {
            moved = advance(g, r, number) || moved;
        }
    }
    return moved;
}
