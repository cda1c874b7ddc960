/* The table of a group over MPI, and the public ways to make one from a program's own communicator. */
#include "comm/mpi_group.h"
#include "comm/trace_env.h"
#include "base/alloc.h"
#include "comm/local.h"
#include "dev/pages.h"

#include <stdio.h>
#include <string.h>

/* -- memory -------------------------------------------------------------------------------------------------------- */
static mui_mpi_block *take_block(mui_mpi *g, size_t bytes)
{
    mu_context *c = g->base.context;
    size_t rounded = 0;
    if (!mui_size_add(bytes > 0 ? bytes : 1, 63, &rounded) || rounded / 64 * 64 > g->memory_bytes - g->memory_used) {
        mui_fail(c, MU_ERR_NOMEM,
                 "no room for %zu bytes in the group's memory of %zu bytes for each rank (mu_group_options.arena_bytes)",
                 bytes, g->memory_bytes);
        return NULL;
    }
    rounded = rounded / 64 * 64;
    mui_mpi_block *b = mui_calloc(c, 1, sizeof(*b));
    char *data = b != NULL ? mui_pages_alloc(c, rounded) : NULL;
    if (data == NULL) {
        mui_free(c, b);
        return NULL;
    }
    memset(data, 0, rounded);
    *b = (mui_mpi_block){.data = data, .bytes = rounded};
    return b;
}

static void *alloc_shared(mu_group *base, size_t bytes)
{
    mui_mpi *g = (mui_mpi *)base;
    mui_call_spec spec = {.kind = MUI_ALLOC, .count = bytes};
    /* Whether this rank has the memory comes before the agreement: then all have it, or none. */
    mui_mpi_block *b = base->broken == MU_OK ? take_block(g, bytes) : NULL;
    bool no_memory = b == NULL;
    if (mui_mpi_run_alloc(g, &spec, &no_memory) != MU_OK || no_memory) {
        if (base->broken == MU_OK && b != NULL) {
            mui_fail(base->context, MU_ERR_NOMEM, "no memory for %zu bytes of the group on another rank", bytes);
        }
        if (b != NULL) {
            mui_pages_free(base->context, b->data);
            mui_free(base->context, b);
        }
        return NULL;
    }
    b->offset = g->heap_end;
    g->heap_end += b->bytes;
    g->memory_used += b->bytes;
    b->next = g->blocks;
    g->blocks = b;
    return b->data;
}

static void free_shared(mu_group *base, void *p)
{
    mui_mpi *g = (mui_mpi *)base;
    if (p == NULL || base->broken != MU_OK) {
        return; /* MPI may have it still; it goes when the group closes, or stays */
    }
    mui_mpi_block **at = &g->blocks;
    while (*at != NULL && (*at)->data != p) {
        at = &(*at)->next;
    }
    mui_call_spec spec = {.kind = MUI_FREE, .count = *at != NULL ? (*at)->offset : UINT64_MAX};
    if (mui_mpi_run(g, &spec) != MU_OK) {
        return;
    }
    mui_mpi_block *b = *at;
    if (b == NULL) {
        mui_fail(base->context, MU_ERR_ARG, "mu_group_free of memory that is not from mu_group_alloc");
        return;
    }
    *at = b->next;
    g->memory_used -= b->bytes;
    mui_pages_free(base->context, b->data);
    mui_free(base->context, b);
}

/* -- the table ----------------------------------------------------------------------------------------------------- */
static mu_request *start_all_reduce(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op,
                                    const mui_identity *identity)
{
    mui_call_spec spec = {.kind = MUI_ALL_REDUCE, .count = (uint64_t)count, .type = type, .op = op, .in = data,
                          .out = data, .identity = identity};
    mui_mpi_call *call = mui_mpi_start((mui_mpi *)g, &spec);
    return call != NULL ? &call->base : NULL;
}

static mu_status broadcast(mu_group *g, void *data, size_t bytes, int root)
{
    mui_call_spec spec = {.kind = MUI_BROADCAST, .count = bytes, .root = root, .in = data, .out = data};
    return mui_mpi_run((mui_mpi *)g, &spec);
}

static mu_status all_gather(mu_group *g, const void *in, void *out, size_t bytes)
{
    mui_call_spec spec = {.kind = MUI_ALL_GATHER, .count = bytes, .in = in, .out = out};
    return mui_mpi_run((mui_mpi *)g, &spec);
}

static mu_status reduce_scatter(mu_group *g, const void *in, void *out, int64_t count, mu_dtype type, mu_reduce_op op)
{
    mui_call_spec spec = {.kind = MUI_REDUCE_SCATTER, .count = (uint64_t)count, .type = type, .op = op, .in = in,
                          .out = out};
    return mui_mpi_run((mui_mpi *)g, &spec);
}

static mu_status barrier(mu_group *g)
{
    mui_call_spec spec = {.kind = MUI_BARRIER};
    return mui_mpi_run((mui_mpi *)g, &spec);
}

static mu_status reserve(mu_group *g, size_t requests)
{
    return mui_mpi_reserve((mui_mpi *)g, requests);
}

static void set_phase(mu_group *g, const char *phase)
{
    mui_board_write(&((mui_mpi *)g)->phase, 0, phase);
}

static void give_up(mu_group *base, const char *reason)
{
    char text[MUI_BROKEN_BYTES];
    snprintf(text, sizeof(text), "rank %d gave up: %s", base->rank, reason);
    mui_mpi_give_up((mui_mpi *)base, MU_ERR_PEER, text);
}

static void close_group(mu_group *base)
{
    mui_mpi *g = (mui_mpi *)base;
    if (mu_context_status(base->context) < 0 && base->broken == MU_OK) {
        char text[MUI_BROKEN_BYTES];
        snprintf(text, sizeof(text), "rank %d failed: %.400s", base->rank, mu_context_message(base->context));
        mui_mpi_give_up(g, MU_ERR_PEER, text);
    }
    bool whole = mui_mpi_leave(g);
    mui_mpi_release(g, whole);
}

const mui_group_ops mui_mpi_ops = {
    .name = "mpi",
    .all_reduce_start = start_all_reduce,
    .test = mui_mpi_test,
    .wait = mui_mpi_wait,
    .broadcast = broadcast,
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .barrier = barrier,
    .alloc = alloc_shared,
    .free = free_shared,
    .reserve = reserve,
    .set_phase = set_phase,
    .abort = give_up,
    .close = close_group,
};

/* -- from a communicator ------------------------------------------------------------------------------------------- */
static mu_group *from_communicator(mu_context *c, const void *comm, const int *fortran, const mu_group_options *options)
{
    mu_group_options settled;
    if (mui_failed(c) || mui_group_settings(c, options, &settled) != MU_OK) {
        return NULL;
    }
    if (comm == NULL && fortran == NULL) {
        mui_fail(c, MU_ERR_ARG, "mu_group_from_mpi_comm without a communicator; the address of an MPI_Comm was expected");
        return NULL;
    }
    if (settled.engine == MU_GROUP_SHM) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "a group from a communicator is over MPI, but its options ask for shared memory");
        return NULL;
    }
    return mui_trace_from_env(c, mui_mpi_open(c, comm, fortran, &settled));
}

mu_group *mu_group_from_mpi_comm(mu_context *c, const void *comm, const mu_group_options *options)
{
    return from_communicator(c, comm, NULL, options);
}

mu_group *mu_group_from_mpi_fint(mu_context *c, int fcomm, const mu_group_options *options)
{
    return from_communicator(c, NULL, &fcomm, options);
}
