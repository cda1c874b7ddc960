/* Recording what a context does, for mu_trace_open. Records go into a ring of fixed size; a thread of the trace's own turns
 * them into JSON and writes it (trace_write.c). Not for: reading traces (io), clocks of other ranks (comm). */
#ifndef MUI_TRACE_H
#define MUI_TRACE_H

#include "base/beacon.h"

/* Categories of events, in the order of their names in trace.c. */
typedef enum mui_trace_kind {
    MUI_TRACE_STEP,
    MUI_TRACE_DATA,
    MUI_TRACE_FORWARD,
    MUI_TRACE_FORWARD_MODULE,
    MUI_TRACE_BACKWARD,
    MUI_TRACE_BACKWARD_MODULE,
    MUI_TRACE_BUCKET,     /* from ready to reduced; within it, MUI_TRACE_ALL_REDUCE */
    MUI_TRACE_ALL_REDUCE, /* from launched to reduced */
    MUI_TRACE_PROGRESS,   /* a rank's own share of a reduction's work, in the middle of its backward */
    MUI_TRACE_WAIT,
    MUI_TRACE_HOOK,
    MUI_TRACE_COLLECTIVE,
    MUI_TRACE_OPTIMIZER,
    MUI_TRACE_CHECKPOINT,
    MUI_TRACE_USER,
    MUI_TRACE_KIND_COUNT
} mui_trace_kind;
const char *mui_trace_kind_name(mui_trace_kind k);

typedef struct mui_trace mui_trace;

/* What stands at the head of the file. */
typedef struct mui_trace_head {
    int rank, size;
    const char *group;     /* its kind */
    uint64_t clock, run;   /* alike for ranks that share a clock, for ranks of one run */
    int64_t offset, error; /* nanoseconds; rank 0's clock is this rank's plus offset, to within error */
} mui_trace_head;

/* Makes one that writes to path, which is created now. NULL: *failed is errno, nothing is raised. */
mui_trace *mui_trace_new(mu_context *c, const char *path, int events, double flush_seconds, int *failed);
/* Writes the head and starts: from now on the context records. MU_ERR_NOMEM and the like are raised. */
mu_status mui_trace_start(mui_trace *t, const mui_trace_head *head) MU_MUST_USE;
/* Ends, writes the rest, frees; raises MU_ERR_IO if not all was written. Also of one that was not started. */
mu_status mui_trace_finish(mui_trace *t);

/* Nanoseconds of CLOCK_MONOTONIC. */
int64_t mui_trace_now(void);

/* -- recording: only where the context has a trace ------------------------------------------------------------------ */
/* The calling thread went to another place. */
void mui_trace_move(mu_context *c, mui_here *here, mui_stage stage, const char *path);
/* A thread that was bound is done: nothing of it stays open. */
void mui_trace_settle(mu_context *c);
void mui_trace_span(mu_context *c, mui_trace_kind kind, const char *name, int64_t began, int64_t bytes);
void mui_trace_step_to(mu_context *c, int64_t step);
/* A tape that records begins anew; worked: it had recorded something. */
void mui_trace_tape(mu_context *c, const void *tape, bool worked);
void mui_trace_tape_gone(mu_context *c, const void *tape);
void mui_trace_push(mu_context *c, const char *name);
void mui_trace_pop(mu_context *c);

typedef struct mui_trace_bucket {
    const char *who; /* name of the ddp or reducer */
    uint64_t reduction;
    int64_t index, bytes;
    double ready, launched, reduced; /* mui_now */
} mui_trace_bucket;
void mui_trace_add_bucket(mu_context *c, const mui_trace_bucket *b);

/* A span of the calling thread, around what does not change the place:
 *     int64_t began = mui_trace_began(c);
 *     ...
 *     mui_trace_ended(c, MUI_TRACE_WAIT, "wait", began, 0); */
static inline int64_t mui_trace_began(const mu_context *c)
{
    return c->trace != NULL ? mui_trace_now() : 0;
}
static inline void mui_trace_ended(mu_context *c, mui_trace_kind kind, const char *name, int64_t began, int64_t bytes)
{
    if (c->trace != NULL && began > 0) {
        mui_trace_span(c, kind, name, began, bytes);
    }
}

#endif
