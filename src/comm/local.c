/* Groups of ranks on one machine: opening, closing, and the shared heap. */
#include "comm/local.h"
#include "base/alloc.h"
#include "base/os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

mu_status mui_group_settings(mu_context *c, const mu_group_options *options, mu_group_options *out)
{
    *out = options != NULL ? *options : (mu_group_options){0};
    if (!(out->timeout_seconds >= 0.0) || !(out->warn_seconds >= 0.0)) {
        return mui_fail(c, MU_ERR_ARG, "a group's timeout_seconds (%g) and warn_seconds (%g) must not be negative",
                        out->timeout_seconds, out->warn_seconds);
    }
    if (out->engine < MU_GROUP_AUTO || out->engine > MU_GROUP_MPI) {
        return mui_fail(c, MU_ERR_ARG, "a group's engine is %d, which is none of MU_GROUP_AUTO, MU_GROUP_SHM, MU_GROUP_MPI",
                        (int)out->engine);
    }
    const char *text = getenv("MUSTER_TIMEOUT");
    if (out->timeout_seconds == 0.0 && text != NULL && text[0] != '\0') {
        char *end = NULL;
        double seconds = strtod(text, &end);
        if (*end != '\0' || !(seconds > 0.0)) {
            return mui_fail(c, MU_ERR_ARG, "MUSTER_TIMEOUT is `%s`, not a number of seconds", text);
        }
        out->timeout_seconds = seconds;
    }
    out->timeout_seconds = out->timeout_seconds > 0.0 ? out->timeout_seconds : 600.0;
    out->warn_seconds = out->warn_seconds > 0.0 ? out->warn_seconds : 10.0;
    out->arena_bytes = mui_arena_bytes(out->arena_bytes);
    return MU_OK;
}

/* -- the shared heap: first fit over a list that is the same on all ranks ---------------------------------------- */
static size_t heap_take(mui_local *g, size_t bytes) /* offset, or 0: no room. Needs room for one more block. */
{
    for (size_t i = 0; i < g->block_count; i++) {
        mui_block *b = &g->blocks[i];
        if (b->used || b->bytes < bytes) {
            continue;
        }
        if (b->bytes > bytes) {
            memmove(b + 2, b + 1, (g->block_count - i - 1) * sizeof(*b));
            b[1] = (mui_block){.offset = b->offset + bytes, .bytes = b->bytes - bytes};
            b->bytes = bytes;
            g->block_count++;
        }
        b->used = true;
        return b->offset;
    }
    return 0;
}

static bool heap_give_back(mui_local *g, size_t offset)
{
    for (size_t i = 0; i < g->block_count; i++) {
        if (!g->blocks[i].used || g->blocks[i].offset != offset) {
            continue;
        }
        g->blocks[i].used = false;
        size_t first = i > 0 && !g->blocks[i - 1].used ? i - 1 : i;
        size_t last = i + 1 < g->block_count && !g->blocks[i + 1].used ? i + 1 : i;
        for (size_t k = first + 1; k <= last; k++) {
            g->blocks[first].bytes += g->blocks[k].bytes;
        }
        memmove(&g->blocks[first + 1], &g->blocks[last + 1], (g->block_count - last - 1) * sizeof(*g->blocks));
        g->block_count -= last - first;
        return true;
    }
    return false;
}

static void *alloc_shared(mu_group *base, size_t bytes)
{
    mui_local *g = (mui_local *)base;
    mui_call_spec spec = {.kind = MUI_ALLOC, .count = bytes};
    size_t rounded = 0;
    if (!mui_size_add(bytes > 0 ? bytes : 1, 63, &rounded)) {
        mui_fail(base->context, MU_ERR_NOMEM, "mu_group_alloc of %zu bytes", bytes);
        return NULL;
    }
    rounded = rounded / 64 * 64;
    /* Whatever can fail on this rank alone comes before the agreement. */
    if (!MUI_GROW(base->context, g->blocks, g->block_count, g->block_capacity) || mui_local_run(g, &spec) != MU_OK) {
        return NULL;
    }
    size_t offset = heap_take(g, rounded);
    if (offset == 0) {
        mui_fail(base->context, MU_ERR_NOMEM,
                 "no room for %zu bytes in the group's memory of %zu bytes for each rank (mu_group_options.arena_bytes)",
                 bytes, g->region.arena_bytes - MUI_STAGING_BYTES);
        return NULL;
    }
    char *p = mui_region_arena(&g->region, base->rank) + offset;
    size_t end = offset + rounded;
    if (offset < g->fresh) {
        memset(p, 0, (end < g->fresh ? end : g->fresh) - offset);
    }
    g->fresh = g->fresh > end ? g->fresh : end;
    if (end > g->populated) {
        size_t from = g->populated;
        g->populated = (end + MUI_HUGE_BYTES - 1) / MUI_HUGE_BYTES * MUI_HUGE_BYTES;
        mui_region_populate(&g->region, base->rank, from, g->populated, true);
        /* All ranks grow alike. Others map the pages once their owner has made them. */
        if (mui_local_run(g, &spec) != MU_OK) {
            return NULL;
        }
        for (int r = 0; r < base->size && g->pidfds != NULL; r++) {
            if (r != base->rank) {
                mui_region_populate(&g->region, r, from, g->populated, false);
            }
        }
    }
    return p;
}

static void free_shared(mu_group *base, void *p)
{
    mui_local *g = (mui_local *)base;
    if (p == NULL || base->broken != MU_OK) {
        return; /* the whole region goes when the group closes */
    }
    size_t offset = (size_t)((char *)p - mui_region_arena(&g->region, base->rank));
    mui_call_spec spec = {.kind = MUI_FREE, .count = offset};
    if (mui_local_run(g, &spec) == MU_OK && !heap_give_back(g, offset)) {
        mui_fail(base->context, MU_ERR_ARG, "mu_group_free of memory that is not from mu_group_alloc");
    }
}

/* -- the table --------------------------------------------------------------------------------------------------- */
static mu_request *start_all_reduce(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op,
                                    const mui_identity *identity)
{
    mui_call_spec spec = {.kind = MUI_ALL_REDUCE, .count = (uint64_t)count, .type = type, .op = op, .in = data,
                          .out = data, .identity = identity};
    mui_call *call = mui_call_start((mui_local *)g, &spec);
    return call != NULL ? &call->base : NULL;
}

static mu_status broadcast(mu_group *g, void *data, size_t bytes, int root)
{
    mui_call_spec spec = {.kind = MUI_BROADCAST, .count = bytes, .root = root, .in = data, .out = data};
    return mui_local_run((mui_local *)g, &spec);
}

static mu_status all_gather(mu_group *g, const void *in, void *out, size_t bytes)
{
    mui_call_spec spec = {.kind = MUI_ALL_GATHER, .count = bytes, .in = in, .out = out};
    return mui_local_run((mui_local *)g, &spec);
}

static mu_status reduce_scatter(mu_group *g, const void *in, void *out, int64_t count, mu_dtype type, mu_reduce_op op)
{
    mui_call_spec spec = {.kind = MUI_REDUCE_SCATTER, .count = (uint64_t)count, .type = type, .op = op, .in = in,
                          .out = out};
    return mui_local_run((mui_local *)g, &spec);
}

static mu_status barrier(mu_group *g)
{
    mui_call_spec spec = {.kind = MUI_BARRIER};
    return mui_local_run((mui_local *)g, &spec);
}

static mu_status reserve(mu_group *g, size_t requests)
{
    return mui_calls_reserve((mui_local *)g, requests);
}

static void set_phase(mu_group *g, const char *phase)
{
    mui_board_write(&((mui_local *)g)->me->phase, 0, phase);
}

static void give_up(mu_group *base, const char *reason)
{
    char text[MUI_BROKEN_BYTES];
    snprintf(text, sizeof(text), "rank %d gave up: %s", base->rank, reason);
    mui_local_give_up((mui_local *)base, MU_ERR_PEER, text);
}

static void release(mui_local *g)
{
    mu_context *c = g->base.context;
    mui_beacon_remove(c, &g->beacon);
    for (int r = 0; r < g->base.size && g->pidfds != NULL; r++) {
        if (g->pidfds[r] >= 0) {
            close(g->pidfds[r]);
        }
    }
    mui_free(c, g->pidfds);
    mui_calls_free(g);
    mui_free(c, g->blocks);
    if (g->own_region) {
        mui_region_free(&g->region);
    }
    mui_free(c, g);
}

static void close_local(mu_group *base)
{
    mui_local *g = (mui_local *)base;
    mu_status s = mu_context_status(base->context);
    if (s < 0 && base->broken == MU_OK) {
        char text[MUI_BROKEN_BYTES];
        snprintf(text, sizeof(text), "rank %d failed: %.400s", base->rank, mu_context_message(base->context));
        mui_local_give_up(g, MU_ERR_PEER, text);
    }
    /* Pairs with the acquires in patience.c: who sees that it left sees all it did. */
    __atomic_store_n(&g->me->state, MUI_LEFT, __ATOMIC_SEQ_CST);
    mui_wake_others(g);
    release(g);
}

#define LOCAL_OPS(kind)                                                                                                \
    {                                                                                                                  \
        .name = (kind), .all_reduce_start = start_all_reduce, .test = mui_local_test, .wait = mui_local_wait,          \
        .broadcast = broadcast, .all_gather = all_gather, .reduce_scatter = reduce_scatter, .barrier = barrier,        \
        .alloc = alloc_shared, .free = free_shared, .reserve = reserve, .set_phase = set_phase, .abort = give_up,        \
        .close = close_local                                                                                           \
    }
const mui_group_ops mui_self_ops = LOCAL_OPS("self");
const mui_group_ops mui_threads_ops = LOCAL_OPS("threads");
const mui_group_ops mui_shm_ops = LOCAL_OPS("shm");

static void destroy(void *group)
{
    mu_group *g = group;
    g->ops->close(g);
}

static mui_local *build(mu_context *c, const mui_group_ops *ops, int rank, mui_region region, bool own_region,
                        int *pidfds, const mu_group_options *options)
{
    mui_local *g = mui_calloc(c, 1, sizeof(*g));
    if (g == NULL) {
        return NULL;
    }
    g->base = (mu_group){.ops = ops, .context = c, .rank = rank, .size = region.size,
                         .timeout_seconds = options->timeout_seconds, .warn_seconds = options->warn_seconds};
    g->region = region;
    g->own_region = own_region;
    g->pidfds = pidfds;
    g->oversubscribed = region.size > mui_cores();
    g->me = mui_block_of(g, rank);
    g->fresh = g->populated = MUI_STAGING_BYTES;
    if (!MUI_GROW(c, g->blocks, g->block_count, g->block_capacity)) {
        mui_free(c, g);
        return NULL;
    }
    g->blocks[g->block_count++] =
        (mui_block){.offset = MUI_STAGING_BYTES, .bytes = region.arena_bytes - MUI_STAGING_BYTES};
    return g;
}

mu_group *mui_local_open(mu_context *c, const mui_group_ops *ops, int rank, mui_region region, bool own_region,
                         int *pidfds, const mu_group_options *options)
{
    mui_local *g = build(c, ops, rank, region, own_region, pidfds, options);
    if (g == NULL) {
        for (int r = 0; r < region.size && pidfds != NULL; r++) {
            if (pidfds[r] >= 0) {
                close(pidfds[r]);
            }
        }
        mui_free(c, pidfds);
        if (own_region) {
            mui_region_free(&region);
        }
        return NULL;
    }
    uint32_t was = MUI_ABSENT;
    if (!__atomic_compare_exchange_n(&g->me->state, &was, MUI_JOINED, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
        mui_fail(c, MU_ERR_ARG, "rank %d of this group of %d has already joined", rank, region.size);
        release(g);
        return NULL;
    }
    if (region.size > 1) {
        mui_region_populate(&g->region, rank, 0, MUI_STAGING_BYTES, true);
        g->beacon.beacon = &g->me->beacon;
        mui_beacon_add(c, &g->beacon);
    }
    if (mui_context_own(c, g, destroy, MUI_OWN_GROUP) != MU_OK) {
        return NULL; /* destroyed: the others learn why */
    }
    if (region.size > 1 && c->size == 1) {
        c->rank = rank;
        c->size = region.size;
    }
    return &g->base;
}
