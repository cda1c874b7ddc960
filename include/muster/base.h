/* Status codes, the context, and logging: what every other header needs.
 *
 * A context is one rank's world: it owns every module, optimiser, loader, group and tape made from it, and carries
 * that rank's first error. There is no mutable global state: N ranks may be N threads with N contexts. */
#ifndef MUSTER_BASE_H
#define MUSTER_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MU_API __attribute__((visibility("default")))
#define MU_MUST_USE __attribute__((warn_unused_result))
#define MU_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define MU_API
#define MU_MUST_USE
#define MU_PRINTF(fmt, args)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* 0 is success, positive an outcome that is not an error, negative an error. */
typedef enum mu_status {
    MU_OK = 0,
    MU_SKIPPED = 1,           /* a rank abandoned this step; nothing was changed, all ranks are in step */
    MU_ERR_NOMEM = -1,        /* out of memory */
    MU_ERR_ARG = -2,          /* a bad argument, option or environment variable */
    MU_ERR_SHAPE = -3,        /* shapes do not fit together */
    MU_ERR_DTYPE = -4,        /* element types do not fit together */
    MU_ERR_STATE = -5,        /* the call is not allowed now */
    MU_ERR_IO = -6,           /* the operating system failed to read or write */
    MU_ERR_FORMAT = -7,       /* a file's content is not what its format demands */
    MU_ERR_UNSUPPORTED = -8,  /* valid, but not something this build can do */
    MU_ERR_TIMEOUT = -9,      /* a peer did not come in time */
    MU_ERR_PEER = -10,        /* a peer failed or died; the message names it */
    MU_ERR_COMM = -11,        /* ranks contradict each other, or the transport failed */
    MU_ERR_DEVICE = -12,      /* a compute library failed */
    MU_ERR_LIMIT = -13,       /* a configured limit was passed */
    MU_ERR_INTERNAL = -14     /* a broken invariant: please report it */
} mu_status;

/* Short fixed name, e.g. "shape"; never NULL. */
MU_API const char *mu_status_name(mu_status s);

/* "0.1.0" */
MU_API const char *mu_version(void);

typedef enum mu_log_level {
    MU_LOG_DEFAULT = 0, /* as an option: warnings and errors */
    MU_LOG_QUIET,       /* nothing */
    MU_LOG_ERROR,
    MU_LOG_WARN,
    MU_LOG_INFO,
    MU_LOG_DEBUG
} mu_log_level;

/* Receives one message, without newline. May be called from loader threads and those of replicas; must not call back into
 * Muster. */
typedef void (*mu_log_fn)(void *user, mu_log_level level, const char *message);

typedef enum mu_kernel_choice {
    MU_KERNELS_DEFAULT = 0, /* oneDNN where it has the operation, plain C elsewhere */
    MU_KERNELS_REFERENCE    /* plain C only: slow, simple, the oracle of the tests */
} mu_kernel_choice;

typedef struct mu_context mu_context;

typedef struct mu_context_options {
    uint64_t seed;            /* of initial values, shuffling, augmentation, dropout; 0 is a seed like another */
    int threads;              /* compute threads of this rank; 0: OMP_NUM_THREADS if set, else 1. A process may fork at any
                                 time (not within a call); the child uses contexts that it opens itself, not the parent's */
    mu_kernel_choice kernels; /* which kernels compute */
    bool no_winograd;         /* never use Winograd convolutions, which have 4 (64 channels) to 11 times (512) the
                                 rounding error of direct ones */
    bool profile;             /* time every kernel, see muster/profile.h */
    mu_log_level log_level;   /* messages above this level are dropped; 0: MU_LOG_WARN */
    mu_log_fn log;            /* NULL: one line each to stderr, with rank when there is a group */
    void *log_user;           /* first argument of log */
} mu_context_options;

/* Opens a context; options may be NULL. NULL only when memory ran out. Close with mu_context_close. */
MU_API mu_context *mu_context_open(const mu_context_options *options);

/* Frees everything made from the context, groups last, and returns the status it ended with. NULL is MU_OK. */
MU_API mu_status mu_context_close(mu_context *c);

/* First error since opening or the last clear; MU_OK if none. Builders are sticky: after an error they return NULL,
 * so one check after a chain of calls is enough. */
MU_API mu_status mu_context_status(const mu_context *c);

/* Message of that error, "" if none. Valid until the next clear or close. */
MU_API const char *mu_context_message(const mu_context *c);

/* Forgets the error, so that work can go on. */
MU_API void mu_context_clear(mu_context *c);

/* This rank's number and the number of ranks, set by the first group with more than one rank; 0 and 1 before. */
MU_API int mu_context_rank(const mu_context *c);
MU_API int mu_context_size(const mu_context *c);

/* Compute threads of this rank: those of the options, or of OMP_NUM_THREADS; at least 1, also for NULL. */
MU_API int mu_context_threads(const mu_context *c);
/* Async-signal-safe, for a handler of SIGTERM: whatever of this context waits for other ranks says who is missing within 0.2
 * s, and no longer only after a group's warn_seconds. When a rank dies, Open MPI's mpirun sends the others SIGTERM, and
 * SIGKILL a second later: without this nobody would hear what the dead rank was doing. */
MU_API void mu_context_warn_soon(mu_context *c);

/* Prints the context's error to stderr as "muster: ...". Returns s, for use in an expression. */
MU_API mu_status mu_complain(const mu_context *c, mu_status s);

/* For short programs: ends the process with status 1 after printing the message when the call failed. */
#define MU_OR_DIE(c, call)                                                                                             \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            mu_die(c);                                                                                                 \
        }                                                                                                              \
    } while (0)
/* Prints the context's error and exits with status 1. The only call that ends a process; the library never uses it. */
MU_API void mu_die(const mu_context *c);

/* What a context has done since it was opened, in counts: the same in every run, unlike times. Take two readings and
 * subtract. In a step from the third of its shape on, allocations and primitives stay where they are, and conversions
 * are those the model needs every time. */
typedef struct mu_counters {
    uint64_t allocations;        /* blocks of memory asked of malloc; a group's region, reserved once, is none */
    uint64_t allocated_bytes;    /* their sizes; what was given back is not taken off */
    uint64_t layout_conversions; /* tensors copied from one memory layout into another: activations, gradients, values */
    uint64_t weight_conversions; /* the same of a convolution's weight or its gradient, within a kernel that wants another */
    uint64_t converted_bytes;    /* size of the copies of both kinds */
    uint64_t primitives;         /* oneDNN kernels made */
    uint64_t flops;              /* of convolutions and matrix products, as counted from shapes: padding counts */
} mu_counters;

/* Replicas of mu_data_parallel and threads of loaders count with their context; what they do while this reads may or may
 * not be in it. What oneDNN allocates inside its calls is not counted. c NULL: all 0. */
MU_API void mu_context_counters(const mu_context *c, mu_counters *out);

#ifdef __cplusplus
}
#endif
#endif
