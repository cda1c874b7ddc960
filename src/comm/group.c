/* The public calls: arguments are checked here, then the group's table does the work. */
#include "comm/group.h"
#include "base/alloc.h"
#include "base/trace.h"
#include "comm/reduce.h"

#include <string.h>

int mu_group_rank(const mu_group *g)
{
    return g != NULL ? g->rank : 0;
}

int mu_group_size(const mu_group *g)
{
    return g != NULL ? g->size : 1;
}

mu_shard mu_group_shard(const mu_group *g)
{
    return (mu_shard){.rank = mu_group_rank(g), .size = mu_group_size(g)};
}

const char *mu_group_kind(const mu_group *g)
{
    return g != NULL ? g->ops->name : "none";
}

void mu_group_abort(mu_group *g, const char *reason)
{
    if (g != NULL) {
        g->ops->abort(g, reason != NULL ? reason : "no reason given");
    }
}

void mu_group_set_phase(mu_group *g, const char *phase)
{
    if (g != NULL) {
        g->ops->set_phase(g, phase != NULL ? phase : "");
    }
}

void *mu_group_alloc(mu_group *g, size_t bytes)
{
    return g != NULL ? g->ops->alloc(g, bytes) : NULL;
}

void mu_group_free(mu_group *g, void *p)
{
    if (g != NULL) {
        g->ops->free(g, p);
    }
}

const char *mui_group_skip_text(const mu_group *g)
{
    return g->skip_text;
}

/* -- arguments --------------------------------------------------------------------------------------------------- */
/* times: how many such stretches there are in all. */
static mu_status check_reducible(mu_group *g, const char *who, const void *data, int64_t count, int times,
                                 mu_dtype type, mu_reduce_op op)
{
    size_t size = mui_reducible_bytes(type), bytes;
    if (size == 0) {
        return mui_fail(g->context, MU_ERR_DTYPE, "%s: element type %d; float32, float64, int32 or int64 was expected",
                        who, (int)type);
    }
    if (op < MU_SUM || op > MU_MIN) {
        return mui_fail(g->context, MU_ERR_ARG, "%s: unknown operation %d", who, (int)op);
    }
    if (op == MU_MEAN && type != MU_F32 && type != MU_F64) {
        return mui_fail(g->context, MU_ERR_DTYPE, "%s: there is no mean of %s", who, mui_reducible_name(type));
    }
    if (count < 0 || !mui_size_mul((size_t)count, size * (size_t)times, &bytes) || bytes > PTRDIFF_MAX) {
        return mui_fail(g->context, MU_ERR_ARG, "%s: %lld elements", who, (long long)count);
    }
    if (data == NULL && count > 0) {
        return mui_fail(g->context, MU_ERR_ARG, "%s: no data for %lld elements", who, (long long)count);
    }
    return MU_OK;
}

static mu_status no_group(void)
{
    return MU_ERR_ARG; /* whoever failed to make the group has said why */
}

/* A collective that blocked, in the trace. */
static mu_status traced_as(mu_group *g, const char *name, int64_t began, size_t bytes, mu_status s)
{
    mui_trace_ended(g->context, MUI_TRACE_COLLECTIVE, name, began, (int64_t)bytes);
    return s;
}

/* -- collectives ------------------------------------------------------------------------------------------------- */
mu_request *mui_all_reduce_start(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op,
                                 const mui_identity *identity)
{
    if (g == NULL || check_reducible(g, "all-reduce", data, count, 1, type, op) != MU_OK) {
        return NULL;
    }
    return g->ops->all_reduce_start(g, data, count, type, op, identity);
}

mu_request *mu_all_reduce_start(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op)
{
    return mui_all_reduce_start(g, data, count, type, op, NULL);
}

mu_status mu_request_test(mu_request *r, bool *done)
{
    if (r == NULL) {
        return MU_ERR_ARG; /* the call that returned NULL has raised why */
    }
    if (done == NULL) {
        return mui_fail(r->group->context, MU_ERR_ARG, "mu_request_test without a place for its answer");
    }
    return r->group->ops->test(r, done);
}

mu_status mu_request_wait(mu_request *r)
{
    if (r == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = r->group->context;
    int64_t traced = mui_trace_began(c);
    mu_status s = r->group->ops->wait(r); /* frees it */
    mui_trace_ended(c, MUI_TRACE_COLLECTIVE, "wait for a request", traced, 0);
    return s;
}

mu_status mu_all_reduce(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op)
{
    if (g == NULL) {
        return no_group();
    }
    mu_status s = check_reducible(g, "all-reduce", data, count, 1, type, op);
    if (s != MU_OK) {
        return s;
    }
    int64_t traced = mui_trace_began(g->context);
    mu_request *r = g->ops->all_reduce_start(g, data, count, type, op, NULL);
    if (r == NULL) {
        return g->broken != MU_OK ? g->broken : MU_ERR_NOMEM;
    }
    s = g->ops->wait(r);
    return traced_as(g, "all_reduce", traced, (size_t)count * mui_reducible_bytes(type), s);
}

mu_status mu_broadcast(mu_group *g, void *data, size_t bytes, int root)
{
    if (g == NULL) {
        return no_group();
    }
    if (root < 0 || root >= g->size) {
        return mui_fail(g->context, MU_ERR_ARG, "broadcast: root %d in a group of %d", root, g->size);
    }
    if ((data == NULL && bytes > 0) || bytes > PTRDIFF_MAX) {
        return mui_fail(g->context, MU_ERR_ARG, "broadcast: no data for %zu bytes", bytes);
    }
    int64_t traced = mui_trace_began(g->context);
    return traced_as(g, "broadcast", traced, bytes, g->ops->broadcast(g, data, bytes, root));
}

mu_status mu_all_gather(mu_group *g, const void *in, void *out, size_t bytes)
{
    if (g == NULL) {
        return no_group();
    }
    size_t total;
    if (((in == NULL || out == NULL) && bytes > 0) || !mui_size_mul(bytes, (size_t)g->size, &total) ||
        total > PTRDIFF_MAX) {
        return mui_fail(g->context, MU_ERR_ARG, "all-gather: no data for %zu bytes", bytes);
    }
    int64_t traced = mui_trace_began(g->context);
    return traced_as(g, "all_gather", traced, bytes, g->ops->all_gather(g, in, out, bytes));
}

mu_status mu_reduce_scatter(mu_group *g, const void *in, void *out, int64_t count, mu_dtype type, mu_reduce_op op)
{
    if (g == NULL) {
        return no_group();
    }
    mu_status s = check_reducible(g, "reduce-scatter", in, count, g->size, type, op);
    if (s != MU_OK) {
        return s;
    }
    if (out == NULL && count > 0) {
        return mui_fail(g->context, MU_ERR_ARG, "reduce-scatter: nowhere to put %lld elements", (long long)count);
    }
    /* Others read `in` while this rank writes `out`: only this rank's own slice is read by nobody else. */
    size_t slice = (size_t)count * mui_reducible_bytes(type);
    uintptr_t from = (uintptr_t)in, to = (uintptr_t)out, own = from + slice * (size_t)g->rank;
    if (to != own && to < from + slice * (size_t)g->size && from < to + slice) {
        return mui_fail(g->context, MU_ERR_ARG, "reduce-scatter: out lies in `in`, but is not this rank's slice of it");
    }
    int64_t traced = mui_trace_began(g->context);
    return traced_as(g, "reduce_scatter", traced, slice * (size_t)g->size,
                     g->ops->reduce_scatter(g, in, out, count, type, op));
}

mu_status mu_barrier(mu_group *g)
{
    if (g == NULL) {
        return no_group();
    }
    int64_t traced = mui_trace_began(g->context);
    return traced_as(g, "barrier", traced, 0, g->ops->barrier(g));
}
