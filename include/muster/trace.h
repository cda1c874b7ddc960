/* Traces: what a rank did and when, as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing show.
 *
 * Each rank writes a file of its own while it works. Without a trace, nothing of it costs more than one comparison. */
#ifndef MUSTER_TRACE_H
#define MUSTER_TRACE_H

#include <muster/group.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_trace_options {
    int buffer_events;    /* room between the rank and the thread that writes, 64 bytes each; 0: 32768. When it is full,
                             events are dropped and counted: a slow disk never holds training up */
    double flush_seconds; /* what a killed process loses at most; 0: 1 */
} mu_trace_options;

/* Begins a trace of the context into file, with this rank's number before its extension: trace.json becomes
 * trace.0.json. Collective over g (NULL: one rank, not collective): ranks that do not share a clock find out, in some
 * rounds of small messages, how theirs differ. options may be NULL. On all ranks MU_ERR_IO if one cannot write its
 * file. MU_ERR_STATE where the context has a trace already.
 *
 * With MUSTER_TRACE in the environment of all ranks, mu_group_from_env, mu_group_from_mpi_comm and their variants do this by
 * themselves, unless the context has a trace. */
MU_API mu_status mu_trace_open(mu_context *c, mu_group *g, const char *file, const mu_trace_options *options) MU_MUST_USE;
/* Ends it and closes the file; so does closing the context, after its groups. Not collective. MU_OK without a trace; MU_ERR_IO
 * if not all of it could be written. */
MU_API mu_status mu_trace_close(mu_context *c) MU_MUST_USE;

/* The rest: without a trace nothing happens. For the thread that uses the context. */

/* As torch.profiler's step(): the step before ends, this one begins; negative: it only ends. A program that never says so
 * has steps all the same: from one mu_tape_reset of its first tape to the next. */
MU_API void mu_trace_step(mu_context *c, int64_t step);
/* As torch.profiler's record_function: a span of the program's own around what happens in between. Spans nest. The name is
 * kept until the trace ends, so use few different ones. */
MU_API void mu_trace_begin(mu_context *c, const char *name);
MU_API void mu_trace_end(mu_context *c);

#ifdef __cplusplus
}
#endif
#endif
