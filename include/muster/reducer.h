/* The reducer alone, for front ends that are not Muster's: a solver, a Fortran program, another language's tape. It knows
 * parameters as names, numbers of elements, an element type and the memory of their gradients, and gives every rank the
 * mean over ranks, bit for bit the same, while the front end still computes.
 *
 *     mu_reducer_parameter p[2] = {{"net.w", 4096, MU_F32, w_grad}, {"net.b", 64, MU_F64, b_grad}};
 *     mu_reducer *r = mu_reducer_new(group, p, 2, NULL);
 *     for (each step) {
 *         mu_reducer_begin(r, NULL);
 *         fill b_grad; mu_reducer_ready(r, 1);       buckets travel as soon as all of theirs are ready,
 *         fill w_grad; mu_reducer_ready(r, 0);       so: last layer first
 *         mu_status s = mu_reducer_finish(r);        MU_OK: w_grad and b_grad are the means
 *         ...
 *     }
 *
 * A parameter that is not ready when a rank finishes is absent there: it counts as zero in the mean. One that no rank
 * had is left as it was, and mu_reducer_ranks says 0: the optimiser should not touch it. Ranks need not have the same
 * parameters in a step, nor in the same order.
 *
 * Every begin is followed by one finish, whatever went wrong in between and whatever begin and ready returned: then all
 * ranks stay in step. So their results need not be looked at. */
#ifndef MUSTER_REDUCER_H
#define MUSTER_REDUCER_H

#include <muster/ddp.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_reducer mu_reducer;

typedef struct mu_reducer_parameter {
    const char *name; /* copied */
    int64_t count;    /* elements, >= 0 */
    mu_dtype dtype;   /* of the gradient: MU_F32 or MU_F64 */
    void *memory;     /* the gradient's, valid as long as the reducer. NULL: the reducer has it, see mu_reducer_memory */
} mu_reducer_parameter;

typedef struct mu_reducer_options {
    const char *name;          /* in messages; NULL: "reducer". Copied */
    size_t bucket_bytes;       /* 0: 25 MiB */
    size_t first_bucket_bytes; /* the bucket launched first; 0: 1 MiB */
    mu_nonfinite_policy nonfinite;
    bool keep_plan;            /* buckets stay in the reverse order of the parameters. Default: in that in which they became
                                * ready on rank 0 in the first reduction */
} mu_reducer_options;

/* Collective, blocks. Compares options, names, counts, types and order on all ranks: MU_ERR_COMM on all of them, naming
 * the first difference. The number of parameters is at least 1. Owned by the context; NULL on error. */
MU_API mu_reducer *mu_reducer_new(mu_group *g, const mu_reducer_parameter *parameters, int64_t count,
                                  const mu_reducer_options *options);
/* Collective, between reductions: the group gets its memory back. Not needed before the context is closed. */
MU_API void mu_reducer_free(mu_reducer *r);

/* Of a parameter that was given without memory: where its gradient is, 64-byte aligned, in the group's memory, so that
 * nothing is copied; else the memory that was given. NULL: no such parameter. The first mu_reducer_finish that returns
 * MU_OK may move it (with its content) unless keep_plan is set. In a step in which this rank is without the parameter
 * the content is overwritten; after MU_SKIPPED or an error it means nothing. */
MU_API void *mu_reducer_memory(mu_reducer *r, int64_t i);

typedef struct mu_reducer_step {
    bool weighted;        /* the mean is weighted by samples, on all ranks. The reducer multiplies and divides */
    int64_t samples;      /* of this rank, 0 to 2^24; a sum of 0 is MU_ERR_ARG on all ranks */
    const bool *expected; /* for each parameter, whether this rank will have it; NULL: all. Buckets do not wait for what
                           * is not expected. Copied */
    const char *abandon;  /* this rank cannot take part, and why: every rank gets MU_SKIPPED. Copied */
} mu_reducer_step;

/* Collective; does not block. step may be NULL. */
MU_API mu_status mu_reducer_begin(mu_reducer *r, const mu_reducer_step *step);
/* Gradient i is complete. Its memory is read here (weighted and the reducer's own: multiplied), not later. Local; does
 * not block. An i that is out of range, was not expected, or is ready already: MU_ERR_ARG or MU_ERR_STATE, here and from
 * finish; the others get MU_SKIPPED. */
MU_API mu_status mu_reducer_ready(mu_reducer *r, int64_t i);
/* Between begin and finish: this rank gives the step up, and every rank's finish returns MU_SKIPPED. */
MU_API mu_status mu_reducer_abandon(mu_reducer *r, const char *reason);
/* Collective, blocks. MU_OK: every gradient that a rank had is the mean, on all ranks. MU_SKIPPED: a rank gave up, or the
 * non-finite policy says so; memory of the front end's is untouched. An error of this rank's own, in a call since begin or
 * left in the context by anything else, is returned here, and MU_SKIPPED on the others. MU_ERR_COMM, naming both sides:
 * ranks at different reductions or calls. MU_ERR_PEER, MU_ERR_TIMEOUT: a rank failed or did not come. After these three
 * r is broken: every call says so. */
MU_API mu_status mu_reducer_finish(mu_reducer *r) MU_MUST_USE;

/* Of the last reduction that finished with MU_OK, the same on all ranks. */
MU_API int mu_reducer_ranks(const mu_reducer *r, int64_t i); /* how many had parameter i */
MU_API bool mu_reducer_present(const mu_reducer *r, int64_t i, int rank);
MU_API int64_t mu_reducer_total_samples(const mu_reducer *r); /* 0 when not weighted */
/* In which order this rank's parameters became ready; writes up to `room` of them (out may be NULL) and returns how many
 * there are. */
MU_API int64_t mu_reducer_ready_order(const mu_reducer *r, int64_t *out, int64_t room);

typedef struct mu_reducer_report {
    uint64_t reductions;   /* that finished with MU_OK */
    int64_t parameters;
    int64_t absent;        /* of them, those that at least one rank lacked in the last one */
    int64_t nowhere;       /* those that no rank had */
    int64_t buckets;
    int64_t buckets_early; /* launched before this rank called finish; the last bucket never is */
    size_t bytes;          /* of all buckets, what travels beside gradients included */
    double seconds;        /* from begin to the end of finish */
    double wait_seconds;   /* of it, in finish */
} mu_reducer_report;
MU_API mu_reducer_report mu_reducer_get_report(const mu_reducer *r);
/* The same as text, with the name and ranks of each absent parameter; as snprintf. */
MU_API size_t mu_reducer_print_report(const mu_reducer *r, char *out, size_t size);

#ifdef __cplusplus
}
#endif
#endif
