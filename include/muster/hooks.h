/* Communication hooks: a function of yours brings the gradients of a bucket together, in the place of the built-in
 * all-reduce: to compress them, to average over fewer ranks, to count bytes, to do nothing.
 *
 * Who takes part, the identity of a reduction, abandoned steps and values that are not finite are seen to before any
 * hook is called, with a few bytes for each bucket: a hook runs only in a reduction that all ranks go through with.
 * Hooks run one after the other, bucket by bucket in the same order on all ranks, when backward has finished. */
#ifndef MUSTER_HOOKS_H
#define MUSTER_HOOKS_H

#include <muster/ddp.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One parameter's part of a bucket. */
typedef struct mu_bucket_parameter {
    const char *name;
    int64_t offset;   /* of its first element in the bucket's data */
    int64_t elements; /* of its shape */
    int64_t room;     /* floats from offset on that are its own, padding included */
    mu_dims dims;
    bool row_major;   /* elements lie in the order of dims at offset; else in an order of the kernels' within room */
    bool here;        /* this rank has a gradient for it: else its part of data is zeros */
    int ranks;        /* that have one; the same on all ranks. 0: what the hook leaves here is not used */
} mu_bucket_parameter;

/* Valid while the hook runs. Everything but data, here and samples is the same on all ranks. */
typedef struct mu_bucket {
    mu_group *group;
    const char *ddp;    /* name of the wrapper */
    uint64_t reduction; /* number of this reduction, from 1 */
    uint64_t layout;    /* goes up when the buckets are cut anew: state kept for a bucket is then of another one. It
                         * does so after the first reduction, and when the model changed */
    int64_t index, count; /* this bucket of so many */
    bool is_last;
    float *data;          /* this rank's gradients, not divided by anything; in the group's memory */
    int64_t elements;     /* of data; padding is zero, and has to be zero afterwards */
    const mu_bucket_parameter *parameters;
    int64_t parameter_count;
    bool weighted;         /* data has been multiplied by this rank's samples */
    int64_t samples;       /* of this rank when weighted, else 0 */
    int64_t total_samples; /* of all ranks when weighted, else 0 */
    double divisor;        /* the number of ranks; when weighted, total_samples */
} mu_bucket;

/* Leaves in data, on every rank the same to the bit, what the gradient of the step is to be: the sum of all ranks' data
 * divided by divisor, or something close to it. May call collectives on the group, blocking or not, the same ones on
 * all ranks; those it starts it also waits for. Anything but MU_OK, or an error left in the context, means that this
 * rank cannot go on: the group is aborted, the other ranks get MU_ERR_PEER with the reason. */
typedef mu_status (*mu_bucket_hook)(void *user, mu_bucket *bucket);

/* From the next reduction on; local, but all ranks have to set a hook of the same name (any text but "", for messages;
 * copied): ranks that differ get MU_ERR_COMM naming both. hook NULL: back to the built-in all-reduce. Not from within a
 * hook. user stays the caller's, and is not touched after the hook was reset or d freed. */
MU_API mu_status mu_ddp_set_hook(mu_ddp *d, const char *name, mu_bucket_hook hook, void *user) MU_MUST_USE;

/* What the built-in path does, for hooks that do something else only sometimes: data becomes the mean (weighted when
 * the reduction is), bit for bit what it would be without a hook. Collective. */
MU_API mu_status mu_bucket_all_reduce(mu_bucket *bucket) MU_MUST_USE;

/* -- Ready-made hooks. All ranks set the same one with the same options, else MU_ERR_COMM naming both. -- */

/* bfloat16: each rank divides its data by divisor, rounds to bfloat16 (nearest, ties to even; NaN stays NaN) and sends
 * that, half the bytes. Every rank adds what all sent in rank order in float32, which is the gradient: not rounded to
 * bfloat16 again. */
MU_API mu_status mu_ddp_set_bf16(mu_ddp *d) MU_MUST_USE;

/* PowerSGD (Vogels et al. 2019): a gradient of rows by columns (the first dimension by all others) travels as two
 * matrices P and Q of `rank` columns. Per parameter, as PyTorch's powerSGD_hook:
 *   M = gradient (times ranks / divisor) + residual of the last step;  P = M Q, summed over ranks, orthogonalised;
 *   Q = M' P, mean over ranks;  gradient = P Q';  residual = M - P Q', of this rank alone.
 * Parameters that this would not shrink (fewer than two dimensions, rate) go through a plain all-reduce together: the
 * same bits as without a hook. State is kept per parameter by name: it survives buckets that are cut anew. */
typedef struct mu_powersgd mu_powersgd;

/* Fills the first Q of a parameter: columns times rank numbers, row-major. The same numbers on all ranks. */
typedef void (*mu_powersgd_q)(void *user, const char *name, int64_t columns, int64_t rank, float *q);

typedef struct mu_powersgd_options {
    int rank;                  /* 0: 1. At most the smaller side of a matrix */
    int64_t plain_reductions;  /* reductions with plain all-reduce first; 0: 1000, below 0: none */
    double min_compression_rate; /* compressed where (rows + columns) * rank * this < rows * columns; 0: 2 */
    bool no_error_feedback;    /* forget what a step left out */
    bool no_warm_start;        /* draw Q anew in each reduction instead of keeping the last one */
    double epsilon;            /* added to the norms that columns are divided by */
    uint64_t seed;             /* of Q, with the parameter's name */
    mu_powersgd_q q_init;      /* NULL: normal numbers from seed */
    void *q_user;
} mu_powersgd_options;

/* Sets it as d's hook. Owned by the context; for one ddp. NULL on error. */
MU_API mu_powersgd *mu_powersgd_new(mu_ddp *d, const mu_powersgd_options *options);
/* Before the context closes, when the hook has been reset or d freed. NULL is allowed. */
MU_API void mu_powersgd_free(mu_powersgd *p);

typedef struct mu_powersgd_stats {
    uint64_t reductions;      /* with this hook, plain ones among them */
    int64_t compressed, plain; /* parameters of the last reduction that was not plain */
    int64_t elements, sent;    /* of its gradients; and floats that a rank sent for them */
} mu_powersgd_stats;
MU_API mu_powersgd_stats mu_powersgd_get_stats(const mu_powersgd *p);
/* What this rank still owes of a parameter, row-major, until the next reduction. NULL: nothing is kept for it. */
MU_API const float *mu_powersgd_residual(const mu_powersgd *p, const char *name, int64_t *elements);

/* Local SGD with periodic averaging (PyTorch's post_localSGD_hook with a PeriodicModelAverager). For the first
 * `start` optimiser steps gradients are all-reduced as without a hook; then each rank keeps the gradient of its own loss
 * and steps with it, and parameters become the mean over ranks after the first such step and every `period` steps from
 * there on. In between replicas differ, and mu_ddp_check says so. */
typedef struct mu_local_sgd mu_local_sgd;

typedef struct mu_local_sgd_options {
    int64_t start; /* optimiser steps with all-reduced gradients; 0: none */
    int64_t period; /* 0: 4 */
} mu_local_sgd_options;

/* Sets it as d's hook, which must not have check_every. Owned by the context. NULL on error. */
MU_API mu_local_sgd *mu_local_sgd_new(mu_ddp *d, const mu_local_sgd_options *options);
/* Before the context closes, when the hook has been reset or d freed. NULL is allowed. */
MU_API void mu_local_sgd_free(mu_local_sgd *l);
/* After each step of the optimiser, on all ranks; collective when it averages, which *averaged (NULL is allowed) tells. */
MU_API mu_status mu_local_sgd_step(mu_local_sgd *l, bool *averaged) MU_MUST_USE;

/* Collective, with or without a hook: trainable parameters become the mean over ranks, in rank order, the same bits on
 * all. Not between a forward and its backward. Optimiser state stays each rank's own. */
MU_API mu_status mu_ddp_average_parameters(mu_ddp *d) MU_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
