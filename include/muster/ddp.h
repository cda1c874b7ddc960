/* Synchronous data parallelism: one replica per rank, gradients averaged while backward runs.
 *
 * A reduction is a call. Any loss graph on any rank gives the gradients that one process would compute from the mean
 * of the ranks' losses, bit-identical on all ranks, with no flag. */
#ifndef MUSTER_DDP_H
#define MUSTER_DDP_H

#include <muster/group.h>
#include <muster/module.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_ddp mu_ddp;

typedef enum mu_absent_policy {
    MU_ABSENT_DEFAULT = 0, /* one warning on rank 0 when a parameter is first left out: absent on every rank from one
                            * optimiser step to the next. Told when the next reduction begins, or at mu_ddp_free */
    MU_ABSENT_QUIET,
    MU_ABSENT_ERROR,       /* in each reduction by itself: MU_ERR_STATE on all ranks, naming parameters and reasons */
    MU_ABSENT_ERROR_ANY    /* the same already where one rank lacks a parameter, as PyTorch's default does */
} mu_absent_policy;

/* What a reduction does about gradients that are not finite (NaN or infinite) on some rank, or whose sum is not. */
typedef enum mu_nonfinite_policy {
    MU_NONFINITE_KEEP = 0, /* nothing: they reach every rank, as in PyTorch */
    MU_NONFINITE_SKIP,     /* MU_SKIPPED on all ranks, gradients untouched; parameter and ranks are logged */
    MU_NONFINITE_ERROR     /* MU_ERR_STATE on all ranks, naming parameter and ranks */
} mu_nonfinite_policy;

typedef struct mu_ddp_options {
    const char *name;         /* in messages; NULL: the module's kind. Copied */
    size_t bucket_bytes;      /* 0: 25 MiB */
    size_t first_bucket_bytes;/* the bucket launched first; 0: 1 MiB */
    mu_absent_policy absent;
    mu_nonfinite_policy nonfinite;
    bool buffers_from_rank0;  /* float buffers take rank 0's values (PyTorch's way); default: the mean over ranks */
    bool mean_over_contributors; /* each parameter's gradient is the mean over the ranks whose loss reached it, for
                               mixtures of experts; default: over all ranks, those without counting as zero. Weighted
                               calls are then MU_ERR_ARG */
    int check_every;          /* mu_ddp_check every so many reductions; 0: never */
} mu_ddp_options;

/* Collective, blocks. Compares names, shapes, dtypes, order, trainable sets and options on all ranks (MU_ERR_COMM on all
 * of them, naming the first difference), gives every rank the values and buffers of rank 0, and moves gradients into
 * the group's memory. The tree may change afterwards, on all ranks alike: the next reduction follows it. root may be
 * part of a tree: then only its parameters are reduced. Owned by the context. */
MU_API mu_ddp *mu_ddp_wrap(mu_module *root, mu_group *g, const mu_ddp_options *options);
MU_API void mu_ddp_free(mu_ddp *d); /* not collective */

/* Collective, blocks until every gradient is the mean over ranks. loss (one element) may be NULL: this rank has
 * nothing to add and contributes zeros. Parameters that no rank's loss reached keep no gradient. Called again before
 * the optimiser steps, it adds. Gradients that mu_backward left on this rank count as part of its contribution: so
 * micro-steps are accumulated without communication, on top of what an earlier reduction left too.
 * Float buffers become the mean over ranks (or rank 0's), integer ones the largest.
 * An error of this rank's own, before the call (a failed forward) or in it, is returned here, and MU_SKIPPED on the
 * others; gradients are as before the call on all of them, and the next reduction is in step. MU_SKIPPED also when the
 * model changed and ranks had computed this step with different values of new parameters.
 * MU_ERR_COMM on all ranks, naming both sides: ranks at different reductions, models or calls. MU_ERR_PEER,
 * MU_ERR_TIMEOUT: a rank failed or did not come. After these three d is broken. */
MU_API mu_status mu_ddp_backward(mu_ddp *d, mu_tape *t, mu_tensor *loss) MU_MUST_USE;
/* The same with the mean weighted by each rank's samples (>= 0, up to 2^24; a sum of 0 is MU_ERR_ARG on all ranks):
 * with mean losses per rank, ragged batches give exactly the gradient of the whole batch. What mu_backward left has
 * this call's weight. */
MU_API mu_status mu_ddp_backward_weighted(mu_ddp *d, mu_tape *t, mu_tensor *loss, int64_t samples) MU_MUST_USE;

typedef struct mu_ddp_backward_options {
    bool weighted;   /* by samples, as mu_ddp_backward_weighted */
    int64_t samples; /* of this call; not used when it is not weighted */
    /* In the place of PyTorch's no_sync, but of the call, not of the forward: not collective, no communication. The
     * gradients stay this rank's own, and the next call that does not defer brings them in, also with loss NULL. */
    bool defer;
} mu_ddp_backward_options;
/* Without defer: collective, blocks, and returns what mu_ddp_backward does; NULL options are that. With defer: local;
 * errors are this rank's own. Deferred calls may have loss NULL too; all ranks make equally many of them between two
 * reductions, else the next reduction is MU_ERR_COMM on all ranks, naming both sides. Weighted ones are brought in by a
 * weighted call (a plain one is MU_ERR_ARG): the mean is then over the samples of all of them (at most 2^24 on a rank).
 * mu_backward, which knows no weight, is not to be mixed with them. After a deferred call that failed, gradients hold a
 * part of it: reductions are skipped on all ranks, with that reason, until they are cleared. */
MU_API mu_status mu_ddp_backward_with(mu_ddp *d, mu_tape *t, mu_tensor *loss,
                                      const mu_ddp_backward_options *options) MU_MUST_USE;
/* Collective, in the place of a reduction on the rank that cannot do it: every rank returns MU_SKIPPED, gradients
 * untouched. reason is for the others' log. */
MU_API mu_status mu_ddp_abandon(mu_ddp *d, const char *reason) MU_MUST_USE;
/* Collective. Makes gradients whole on all ranks for reading, after reductions for an optimiser that shares its state
 * (mu_sgd_options.shard); else there is nothing to do. MU_ERR_STATE on all ranks where one has added to a gradient since. */
MU_API mu_status mu_ddp_gather_gradients(mu_ddp *d) MU_MUST_USE;
/* Collective. Compares all parameters and buffers bit for bit over the ranks; MU_ERR_COMM on all ranks, naming the
 * first that differs. */
MU_API mu_status mu_ddp_check(mu_ddp *d) MU_MUST_USE;

typedef enum mu_absence {
    MU_PRESENT = 0,
    MU_NOT_READ,     /* no operation of this step read it */
    MU_NOT_REACHED,  /* it was read, but nothing that leads to the loss uses the result */
    MU_DETACHED,     /* every path to the loss passes a detach or a no-grad region */
    MU_FROZEN,
    MU_NO_LOSS       /* this rank had no loss */
} mu_absence;

typedef struct mu_absent {
    const char *name;     /* of the parameter */
    mu_absence here;      /* why it is absent on this rank; MU_PRESENT if only others lack it */
    int ranks_present;    /* how many ranks contributed */
    uint64_t ranks;       /* which of the first 64, a bit each */
    int64_t index;        /* as in mu_ddp_parameter */
    const char *op;         /* the operation that read it, or NULL */
    const char *module;     /* path of the module in which it was read, or NULL */
    const char *end_op;     /* not reached: the last operation of the dead path; detached: what cut it; else NULL */
    const char *end_module; /* path of the module of that */
    const char *region;     /* detached in a no-grad region: its name ("" when it has none); else NULL */
} mu_absent;

/* Seconds. */
typedef struct mu_ddp_times {
    double forward;       /* from the tape's first operation (or the last reduction's end, if later) to the call */
    double backward;      /* of this rank alone */
    double communication; /* from the launch of the first bucket until the last one was reduced */
    double overlapped;    /* the part of communication during this rank's backward */
    double exposed;       /* waiting after this rank's backward */
} mu_ddp_times;

typedef struct mu_ddp_report {
    const char *name, *group; /* of the ddp; the group's kind */
    int rank, ranks;
    uint64_t reductions;      /* finished so far, skipped ones not counted */
    uint64_t skipped;         /* reductions that every rank skipped */
    const char *skip_reason;  /* of the last one: the rank and why; "" */
    int64_t parameters, frozen; /* trainable ones, and others */
    int64_t optimizer_bytes;  /* of state that this rank keeps, of all optimisers of the tree */
    int optimizer_ranks;      /* that share the state: 1: each has all of it */
    bool scattered;           /* in the last reduction each rank got its own part of the gradients alone */
    int64_t bytes;            /* that a rank brings to one reduction, gradients and what travels with them */
    int buckets;
    bool rebuilt;             /* they follow the order in which gradients became ready */
    int buckets_early;        /* of the last reduction: launched before local backward had finished */
    const mu_absent *absent;  /* of the last reduction, parameters that at least one rank lacked; frozen ones not */
    int64_t absent_count;
    double backward_seconds;  /* of the last reduction: all of it */
    double wait_seconds;      /* of it, after local backward had finished: exposed communication */
    mu_ddp_times last, average; /* of the last reduction, and over all of them */
    double overlap;           /* of the last reduction: overlapped / communication, 0 to 1 */
    int last_rank;            /* whose last bucket came last in the last reduction; the same on all ranks */
    double last_rank_seconds; /* how long after that of the rank before it */
} mu_ddp_report;
/* Local. Valid until the next call on d. */
MU_API mu_ddp_report mu_ddp_get_report(mu_ddp *d);

/* Participation, over all reductions since the parameter was there in this tree. */
typedef struct mu_ddp_parameter {
    const char *name;
    int64_t index;       /* PyTorch's: its place among trainable parameters in registration order; -1: frozen */
    int64_t bytes;
    int64_t bucket;      /* -1: frozen */
    int64_t ready;       /* its place in the ready order of the last reduction on this rank; -1: it did not come */
    uint64_t reductions; /* that could have had it */
    uint64_t here;       /* to which this rank contributed a gradient of it */
    uint64_t anywhere;   /* to which some rank did; 0: it never received a gradient */
    uint64_t ranks;      /* that contributed in the last reduction, of the first 64, a bit each */
    uint64_t ranks_ever; /* that ever did */
} mu_ddp_parameter;
/* Local; in registration order, frozen ones among them. Valid until the next call on d; NULL (and *count 0) if there is
 * no memory. */
MU_API const mu_ddp_parameter *mu_ddp_report_parameters(mu_ddp *d, int64_t *count);

typedef struct mu_ddp_bucket {
    int64_t bytes;         /* gradients, and what travels with them */
    int64_t parameters;
    /* Of the last reduction, in seconds since the call: gradients complete on this rank, launched, and seen here to be
     * reduced. All 0 before the first reduction with this plan. */
    double ready, launched, reduced;
} mu_ddp_bucket;
/* Local; in launch order. Valid until the next call on d. */
MU_API const mu_ddp_bucket *mu_ddp_report_buckets(mu_ddp *d, int64_t *count);

/* All of it as text, and as JSON (docs/report.md is its schema); as snprintf. */
MU_API size_t mu_ddp_print_report(mu_ddp *d, char *out, size_t size);
MU_API size_t mu_ddp_report_json(mu_ddp *d, char *out, size_t size);

#ifdef __cplusplus
}
#endif
#endif
