/* How data moves once all ranks agree on a call.
 *
 * Three ways, chosen from what all ranks posted, hence the same on all:
 * - inline: small payloads lie in the slots; every rank computes the whole result for itself, no step at all;
 * - direct: the data lies in the arenas; one step, each rank reduces its slice from all and writes it to all;
 * - staged: through the halves of the arenas' staging space, one chunk per step. In step k a rank fetches chunk k - 2,
 *   reduces its slice of chunk k - 1 and brings chunk k, into the half that chunk k - 2 has left. */
#include "comm/local.h"
#include "comm/reduce.h"

#include <string.h>

static size_t element(const mui_call *call)
{
    bool reduces = call->spec.kind == MUI_ALL_REDUCE || call->spec.kind == MUI_REDUCE_SCATTER;
    return reduces ? mui_reducible_bytes(call->spec.type) : 1;
}

static size_t result_bytes(const mui_call *call)
{
    return mui_spec_bytes(&call->spec);
}

size_t mui_call_bytes(const mui_call *call)
{
    return mui_spec_brings(&call->spec, call->base.group->size);
}

uint64_t mui_call_offset(const mui_local *g, const mui_call *call)
{
    uintptr_t base = (uintptr_t)mui_region_arena(&g->region, g->base.rank), p = (uintptr_t)call->spec.in;
    size_t bytes = mui_call_bytes(call);
    bool inside = p >= base + MUI_STAGING_BYTES && p - base <= g->region.arena_bytes &&
                  bytes <= g->region.arena_bytes - (p - base);
    return inside ? p - base : MUI_OUTSIDE;
}

/* A peer's data in its arena; NULL when it is not there. */
static char *reach(const mui_local *g, const mui_call *call, int rank)
{
    uint64_t offset = mui_slot_of(g, rank, call->base.number)->offset;
    size_t bytes = mui_call_bytes(call);
    if (offset < MUI_STAGING_BYTES || offset > g->region.arena_bytes || bytes > g->region.arena_bytes - offset ||
        offset % element(call) != 0) {
        return NULL;
    }
    return mui_region_arena(&g->region, rank) + offset;
}

static char *staging(const mui_local *g, int rank, uint64_t chunk)
{
    return mui_region_arena(&g->region, rank) + (chunk % 2) * MUI_STAGING_HALF;
}

/* Bytes of each rank's result that one chunk carries: for reduce-scatter all slices of it must fit in a half. */
static size_t chunk_bytes(const mui_local *g, const mui_call *call)
{
    size_t parts = call->spec.kind == MUI_REDUCE_SCATTER ? (size_t)g->base.size : 1;
    return MUI_STAGING_HALF / parts / 64 * 64;
}

static size_t chunk_size(const mui_local *g, const mui_call *call, uint64_t k)
{
    size_t unit = chunk_bytes(g, call), left = result_bytes(call) - (size_t)k * unit;
    return left < unit ? left : unit;
}

/* Reduces this rank's slice of n elements that start at base(r) for each rank, into all of them. */
static void reduce_everywhere(const mui_local *g, const mui_call *call, char *const base[MUI_MAX_RANKS], int64_t n)
{
    size_t bytes = element(call);
    int64_t from, count;
    mui_reduce_slice(n, g->base.size, g->base.rank, bytes, &from, &count);
    const void *in[MUI_MAX_RANKS];
    void *out[MUI_MAX_RANKS];
    for (int r = 0; r < g->base.size; r++) {
        in[r] = out[r] = base[r] + (size_t)from * bytes;
    }
    mui_reduce(call->spec.type, call->spec.op, g->base.size, in, g->base.size, out, count);
}

/* Each rank's slice into its own memory, the rest into all. No rank writes what another reads. */
static void reduce_direct(const mui_local *g, const mui_call *call, char *base[MUI_MAX_RANKS])
{
    const mui_call_spec *s = &call->spec;
    int64_t scattered = call->identified ? (int64_t)mui_scattered(&call->identity, g->base.size, s->type) : 0;
    if (scattered > 0) {
        int64_t count = scattered / g->base.size;
        const void *in[MUI_MAX_RANKS];
        void *out = NULL;
        for (int r = 0; r < g->base.size; r++) {
            char *slice = base[r] + (size_t)(g->base.rank * count) * element(call);
            in[r] = slice;
            out = r == g->base.rank ? slice : out;
            base[r] += (size_t)scattered * element(call);
        }
        mui_reduce(s->type, s->op, g->base.size, in, 1, &out, count);
    }
    reduce_everywhere(g, call, base, (int64_t)s->count - scattered);
}

void mui_transfer_plan(const mui_local *g, mui_call *call)
{
    size_t bytes = mui_call_bytes(call);
    call->direct = true;
    call->stages = 0;
    if (bytes <= MUI_INLINE_BYTES || g->base.size == 1) {
        return;
    }
    if (call->spec.kind == MUI_BROADCAST) {
        call->direct = reach(g, call, call->spec.root) != NULL;
    } else {
        for (int r = 0; r < g->base.size; r++) {
            call->direct = call->direct && reach(g, call, r) != NULL;
        }
    }
    size_t unit = chunk_bytes(g, call);
    call->stages = call->direct ? 1 : (result_bytes(call) + unit - 1) / unit + 1;
}

static void step_direct(const mui_local *g, const mui_call *call)
{
    const mui_call_spec *s = &call->spec;
    size_t bytes = result_bytes(call);
    char *base[MUI_MAX_RANKS];
    for (int r = 0; r < g->base.size && s->kind != MUI_BROADCAST; r++) {
        base[r] = reach(g, call, r);
    }
    if (s->kind == MUI_ALL_REDUCE) {
        reduce_direct(g, call, base);
    } else if (s->kind == MUI_REDUCE_SCATTER) {
        const void *in[MUI_MAX_RANKS];
        void *out = s->out;
        for (int r = 0; r < g->base.size; r++) {
            in[r] = base[r] + (size_t)g->base.rank * bytes;
        }
        mui_reduce(s->type, s->op, g->base.size, in, 1, &out, (int64_t)s->count);
    } else if (s->kind == MUI_ALL_GATHER) {
        for (int r = 0; r < g->base.size; r++) {
            char *to = (char *)s->out + (size_t)r * bytes;
            if (to != base[r]) {
                memcpy(to, base[r], bytes);
            }
        }
    } else if (g->base.rank != s->root) {
        memcpy(s->out, reach(g, call, s->root), bytes);
    }
}

static void bring(const mui_local *g, const mui_call *call, uint64_t k)
{
    const mui_call_spec *s = &call->spec;
    size_t at = (size_t)k * chunk_bytes(g, call), bytes = chunk_size(g, call, k);
    char *to = staging(g, g->base.rank, k);
    const char *from = (const char *)s->in + at;
    if (s->kind == MUI_REDUCE_SCATTER) {
        for (int r = 0; r < g->base.size; r++) {
            memcpy(to + (size_t)r * bytes, from + (size_t)r * result_bytes(call), bytes);
        }
    } else if (s->kind != MUI_BROADCAST || g->base.rank == s->root) {
        memcpy(to, from, bytes);
    }
}

/* What the arrival of chunk k in all stagings allows. */
static void use(const mui_local *g, const mui_call *call, uint64_t k)
{
    const mui_call_spec *s = &call->spec;
    size_t at = (size_t)k * chunk_bytes(g, call), bytes = chunk_size(g, call, k);
    char *to = (char *)s->out + at, *base[MUI_MAX_RANKS];
    for (int r = 0; r < g->base.size; r++) {
        base[r] = staging(g, r, k);
    }
    if (s->kind == MUI_ALL_REDUCE) {
        reduce_everywhere(g, call, base, (int64_t)(bytes / element(call)));
    } else if (s->kind == MUI_REDUCE_SCATTER) {
        const void *in[MUI_MAX_RANKS];
        void *out = to;
        for (int r = 0; r < g->base.size; r++) {
            in[r] = base[r] + (size_t)g->base.rank * bytes;
        }
        mui_reduce(s->type, s->op, g->base.size, in, 1, &out, (int64_t)(bytes / element(call)));
    } else if (s->kind == MUI_ALL_GATHER) {
        for (int r = 0; r < g->base.size; r++) {
            memcpy(to + (size_t)r * result_bytes(call), base[r], bytes);
        }
    } else if (g->base.rank != s->root) {
        memcpy(to, base[s->root], bytes);
    }
}

static void fetch(const mui_local *g, const mui_call *call, uint64_t k)
{
    if (call->spec.kind == MUI_ALL_REDUCE) {
        memcpy((char *)call->spec.out + (size_t)k * chunk_bytes(g, call), staging(g, g->base.rank, k),
               chunk_size(g, call, k));
    }
}

void mui_transfer_step(const mui_local *g, mui_call *call)
{
    uint64_t k = call->stage, chunks = call->stages - 1;
    if (call->direct) {
        step_direct(g, call);
        return;
    }
    if (k >= 2) {
        fetch(g, call, k - 2);
    }
    if (k >= 1) {
        use(g, call, k - 1);
    }
    if (k < chunks) {
        bring(g, call, k);
    }
}

void mui_transfer_finish(const mui_local *g, mui_call *call)
{
    if (call->stages == 0) {
        const void *in[MUI_MAX_RANKS];
        mui_posts posts = mui_posts_of(g, call);
        mui_finish_inline(&posts, &call->spec, g->base.rank, in);
    } else if (!call->direct) {
        fetch(g, call, call->stages - 2);
    }
}
