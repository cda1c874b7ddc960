/* The public calls of traces that record: the file's name, that all ranks open theirs, and their clocks. */
#include <muster/trace.h>

#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"
#include "base/trace.h"
#include "comm/clocks.h"
#include "comm/trace_env.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define KIND_TRACE 0x7472u

enum { EVENTS = 32768, EVENTS_MOST = 1 << 24 };

/* trace.json: trace.3.json. A leading dot of the name begins no extension. */
static char *name_of_rank(mu_context *c, const char *file, int rank)
{
    const char *slash = strrchr(file, '/'), *base = slash != NULL ? slash + 1 : file, *dot = strrchr(base, '.');
    size_t stem = dot != NULL && dot > base ? (size_t)(dot - file) : strlen(file);
    return mui_format(c, "%.*s.%d%s", (int)stem, file, rank, file + stem);
}

static mu_status check(mu_context *c, const char *file, const mu_trace_options *o)
{
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (c->trace != NULL) {
        return mui_fail(c, MU_ERR_STATE, "mu_trace_open: the context has a trace already (MUSTER_TRACE may have opened it)");
    }
    if (file == NULL || file[0] == '\0' || file[strlen(file) - 1] == '/' || strlen(file) > 4000) {
        return mui_fail(c, MU_ERR_ARG, "mu_trace_open: `%.100s` is no name of a file", file != NULL ? file : "");
    }
    if (o->buffer_events < 0 || o->buffer_events > EVENTS_MOST || !(o->flush_seconds >= 0) || !isfinite(o->flush_seconds)) {
        return mui_fail(c, MU_ERR_ARG, "mu_trace_open: room for %d events, %g seconds between writes; up to %d and not "
                        "below 0 were expected", o->buffer_events, o->flush_seconds, EVENTS_MOST);
    }
    return MU_OK;
}

/* The first rank that could not open its file, or -1: the same on all. */
static mu_status agree(mu_group *g, bool failed, int *who)
{
    mui_identity id = {.kind = KIND_TRACE};
    int64_t first = failed ? mu_group_rank(g) : INT64_MAX;
    snprintf(id.text, sizeof(id.text), "opening a trace (mu_trace_open, --trace, or MUSTER_TRACE in its environment)");
    mu_request *q = mui_all_reduce_start(g, &first, 1, MU_I64, MU_MIN, &id);
    mu_status s = q != NULL ? mu_request_wait(q) : mu_context_status(g->context);
    *who = first < INT64_MAX ? (int)first : -1;
    return s == MU_SKIPPED ? MU_ERR_COMM : s;
}

typedef struct greeting {
    uint64_t clock, run;
} greeting;

/* The run is rank 0's; a rank with rank 0's clock knows its offset, others measure, and so all of them have to. */
static mu_status greet(mu_group *g, mui_trace_head *head)
{
    greeting own = {head->clock, head->run}, *all = mui_calloc(g->context, (size_t)g->size, sizeof(*all));
    mu_status s = all != NULL ? mu_all_gather(g, &own, all, sizeof(own)) : MU_ERR_NOMEM;
    bool differ = false;
    for (int r = 0; r < g->size && s == MU_OK; r++) {
        differ = differ || all[r].clock != all[0].clock;
    }
    mui_clock_bounds b;
    if (s == MU_OK && differ && (s = mui_clock_compare(g, mui_trace_now, &b)) == MU_OK && all[0].clock != own.clock) {
        mui_clock_best(&b, &head->offset, &head->error);
    }
    head->run = s == MU_OK ? all[0].run : head->run;
    mui_free(g->context, all);
    return s;
}

static void destroy(void *object)
{
    (void)mui_trace_finish(object); /* the context has the error */
}

mu_status mu_trace_open(mu_context *c, mu_group *g, const char *file, const mu_trace_options *options)
{
    mu_trace_options o = options != NULL ? *options : (mu_trace_options){0};
    mu_status s = c != NULL ? check(c, file, &o) : MU_ERR_ARG;
    if (s != MU_OK) {
        return s;
    }
    int size = mu_group_size(g), failed = 0, who = -1;
    mui_trace_head head = {.rank = mu_group_rank(g), .size = size, .group = g != NULL ? mu_group_kind(g) : "self",
                           .clock = mui_clock_id()};
    head.run = mui_hash_u64(mui_hash_u64(head.clock, (uint64_t)getpid()), (uint64_t)mui_trace_now());
    char *path = name_of_rank(c, file, head.rank);
    mui_trace *t = path != NULL ? mui_trace_new(c, path, o.buffer_events > 0 ? o.buffer_events : EVENTS,
                                                o.flush_seconds > 0 ? o.flush_seconds : 1, &failed)
                                : NULL;
    s = size > 1 ? agree(g, t == NULL, &who) : MU_OK;
    if (t == NULL) {
        s = mui_fail(c, MU_ERR_IO, "trace %s: cannot be written: %s", path != NULL ? path : file, mui_errno_text(failed));
    } else if (s == MU_OK && who >= 0) {
        s = mui_fail(c, MU_ERR_IO, "trace %s: rank %d cannot write its own", path, who);
    }
    s = s == MU_OK && size > 1 ? greet(g, &head) : s;
    s = s == MU_OK ? mui_trace_start(t, &head) : s;
    mui_free(c, path);
    if (s != MU_OK) {
        if (t != NULL) {
            (void)mui_trace_finish(t);
        }
        return s;
    }
    return mui_context_own(c, t, destroy, MUI_OWN_LAST);
}

mu_status mu_trace_close(mu_context *c)
{
    if (c == NULL || c->trace == NULL) {
        return MU_OK;
    }
    mui_trace *t = c->trace;
    mui_context_disown(c, t);
    return mui_trace_finish(t);
}

void mu_trace_step(mu_context *c, int64_t step)
{
    if (c != NULL && c->trace != NULL) {
        mui_trace_step_to(c, step);
    }
}

void mu_trace_begin(mu_context *c, const char *name)
{
    if (c != NULL && c->trace != NULL) {
        mui_trace_push(c, name != NULL ? name : "");
    }
}

void mu_trace_end(mu_context *c)
{
    if (c != NULL && c->trace != NULL) {
        mui_trace_pop(c);
    }
}

mu_group *mui_trace_from_env(mu_context *c, mu_group *g)
{
    const char *file = mui_environment("MUSTER_TRACE");
    bool opens = g != NULL && file != NULL && c->trace == NULL;
    return opens && mu_trace_open(c, g, file, NULL) != MU_OK ? NULL : g;
}
