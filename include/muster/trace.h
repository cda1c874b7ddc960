/* Traces: what a rank did and when, as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing show. docs/trace.md
 * describes the events.
 *
 * Each rank writes a file of its own while it works; `muster trace-merge`, or mu_trace_merge, puts them together on rank
 * 0's clock. Without a trace, nothing of it costs more than one comparison. */
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

/* -- reading them ------------------------------------------------------------------------------------------------- */
typedef struct mu_trace_kind {
    const char *name; /* category of the events, e.g. "backward"; "" for those without */
    int64_t events;   /* begun and ended counts once */
    double seconds;   /* their durations together; of several ranks, nested and overlapping ones each count in full */
} mu_trace_kind;

typedef struct mu_trace_rank {
    int64_t rank, events;
    int64_t steps;
    double step_seconds;  /* of all steps */
    double communication; /* seconds in which a bucket was being reduced: launched, and not yet seen to be done */
    double hidden;        /* of them, seconds within this rank's backward */
    double waiting;       /* seconds in which backward was over and others' gradients were not there */
    double offset;        /* seconds that were added to this rank's times; */
    double offset_error;  /* they are right to so many seconds */
    int64_t dropped;      /* events that found the buffer full */
    bool whole;           /* the file has its end: the rank closed its trace */
} mu_trace_rank;

typedef struct mu_trace_summary {
    int64_t events;
    const mu_trace_kind *kinds; /* in the order in which they first occur; at most 64, then "(others)" */
    int kind_count;
    const mu_trace_rank *ranks; /* in order of their numbers */
    int rank_count;
} mu_trace_summary;

/* Reads count traces and writes all their events into out (NULL: nowhere), with times on rank 0's clock; each event goes
 * through memory by itself, so files may be of any size. A file that ends in the middle, of a rank that was killed, is read up
 * to there. Also takes what was merged before, and other programs' traces in the same format, whose times are left alone.
 * NULL with an error: a file cannot be read (MU_ERR_IO), is no trace or damaged (MU_ERR_FORMAT, with the byte), or two
 * are of one rank or of different runs (MU_ERR_ARG); out is then left as it was. The summary belongs to the context. */
MU_API const mu_trace_summary *mu_trace_merge(mu_context *c, const char *const *files, int count, const char *out);

#ifdef __cplusplus
}
#endif
#endif
