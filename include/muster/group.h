/* Groups of ranks and their collectives.
 *
 * "Collective": every rank of the group must call it, in the same order with matching arguments. Ranks that contradict
 * each other get the same MU_ERR_COMM on all ranks, naming both sides; when a rank dies or does not come within the
 * timeout, the others get MU_ERR_PEER or MU_ERR_TIMEOUT naming it and what it was last seen doing. After an error a
 * group is broken: every later collective on it returns the same error at once. Results are bit-identical on all ranks:
 * elements are reduced in rank order. */
#ifndef MUSTER_GROUP_H
#define MUSTER_GROUP_H

#include <muster/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_group mu_group;
typedef struct mu_request mu_request;

/* Which part of a whole a rank has: mu_group_shard of its group. */
typedef struct mu_shard {
    int rank;
    int size; /* 0: 1 */
} mu_shard;

/* What carries the bytes of a group of processes. */
typedef enum mu_group_engine {
    MU_GROUP_AUTO = 0, /* what MUSTER_GROUP says (auto, shm or mpi), else shared memory where all ranks are on one machine */
    MU_GROUP_SHM,      /* shared memory of one machine */
    MU_GROUP_MPI       /* MPI (Open MPI or MPICH), by a plug-in that is loaded when it is wanted */
} mu_group_engine;

typedef struct mu_group_options {
    double timeout_seconds; /* of every wait; 0: MUSTER_TIMEOUT if set, else 600 */
    double warn_seconds;    /* a wait this long is logged once, naming who is missing, and so is its end; 0: 10 */
    size_t arena_bytes;     /* shared memory each rank may use, reserved but not touched; over MPI, what mu_group_alloc may
                               hand out on each rank. 0: a quarter of RAM */
    mu_group_engine engine; /* of mu_group_from_env */
} mu_group_options;

/* A group of one. Owned by the context, as all groups. */
MU_API mu_group *mu_group_self(mu_context *c);
/* The group this process was started in. RANK and WORLD_SIZE (muster run, torchrun), or else what Open MPI, MPICH or
 * srun (or MVAPICH2, Intel MPI, jsrun, PALS, Flux) set: shared memory where all ranks are on this machine, else MPI, unless
 * an engine is asked for; nothing set: a group of one. Contradicting or incomplete variables: MU_ERR_ARG naming them; an
 * engine that this machine or launcher does not have: MU_ERR_UNSUPPORTED. Blocks until all ranks have come. Collective
 * over the processes.
 *
 * MPI is initialised when it is not yet, with MPI_THREAD_SERIALIZED, and then finalised when the process exits, unless a
 * group broke or is still open: MPI has no way to end an operation that a rank does not come to. A process that exits with
 * 0 all the same then calls MPI_Abort, so that its launcher does not take the job for done. */
MU_API mu_group *mu_group_from_env(mu_context *c);
MU_API mu_group *mu_group_from_env_with(mu_context *c, const mu_group_options *options);
/* Ranks as processes of one machine that agree on a name (1 to 64 of [A-Za-z0-9._-]) and on their numbers. Blocks
 * until all have come. */
MU_API mu_group *mu_group_shm(mu_context *c, const char *name, int rank, int size, const mu_group_options *options);

/* The ranks of a communicator of the program's own MPI, which it has initialised, and finalises after the context is
 * closed: comm points at an MPI_Comm (&comm), fcomm is a Fortran communicator or an MPI_Comm_c2f. The group works on
 * duplicates, so the program may use comm as it likes. Needs MPI_THREAD_FUNNELED (the context belongs to the thread that
 * initialised MPI) or more, never MPI_THREAD_MULTIPLE: with MPI_THREAD_SERIALIZED no other thread may be in MPI while
 * this one is in a call of Muster's. Less: MU_ERR_UNSUPPORTED. Collective over comm, blocks until all ranks have come.
 *
 * Of any MPI group: closing the context waits until the other ranks close theirs, for timeout_seconds at most. After an
 * error of the group some operations of MPI may stay without an end: MPI_Abort then, in place of MPI_Finalize. */
MU_API mu_group *mu_group_from_mpi_comm(mu_context *c, const void *comm, const mu_group_options *options);
MU_API mu_group *mu_group_from_mpi_fint(mu_context *c, int fcomm, const mu_group_options *options);

/* Ranks as threads of one process: make one world, then each thread opens its own context and joins. */
typedef struct mu_thread_world mu_thread_world;
MU_API mu_thread_world *mu_thread_world_new(int size, const mu_group_options *options); /* NULL: no memory, bad size */
MU_API void mu_thread_world_free(mu_thread_world *w); /* after all its groups are closed */
MU_API mu_group *mu_group_threads(mu_context *c, mu_thread_world *w, int rank);

MU_API int mu_group_rank(const mu_group *g);
MU_API int mu_group_size(const mu_group *g);
MU_API mu_shard mu_group_shard(const mu_group *g);
MU_API const char *mu_group_kind(const mu_group *g); /* "self", "threads", "shm", "mpi" */
/* Not collective: tells the others that this rank cannot go on; they get MU_ERR_PEER with reason. Closing a context
 * that has an error does the same. */
MU_API void mu_group_abort(mu_group *g, const char *reason);
/* For messages about a rank that does not come: what this rank is doing now, e.g. "step 12 of epoch 3". Copied; cheap.
 * The reduction, forward or backward and the module are known anyway, and are added to it. */
MU_API void mu_group_set_phase(mu_group *g, const char *phase);

/* Memory that collectives use as it is, where they must copy other memory first (shared memory: all ranks reach it; MPI:
 * it stays valid whatever happens to the group). Collective: all ranks ask for the same size.
 * 64-byte aligned, zeroed; belongs to the group until free or close. */
MU_API void *mu_group_alloc(mu_group *g, size_t bytes);
MU_API void mu_group_free(mu_group *g, void *p); /* collective, in the same order on all ranks */

typedef enum mu_reduce_op { MU_SUM = 0, MU_MEAN, MU_MAX, MU_MIN } mu_reduce_op;

/* All collective and blocking; count is in elements. dtypes: MU_F32, MU_F64, MU_I64, MU_I32 (no MU_MEAN for integers). */
MU_API mu_status mu_all_reduce(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op) MU_MUST_USE;
MU_API mu_status mu_broadcast(mu_group *g, void *data, size_t bytes, int root) MU_MUST_USE;
/* in: bytes of this rank; out: size times bytes, in rank order. in may be out's own slice. */
MU_API mu_status mu_all_gather(mu_group *g, const void *in, void *out, size_t bytes) MU_MUST_USE;
/* in: size times count elements; out: count, the reduced slice of this rank. */
MU_API mu_status mu_reduce_scatter(mu_group *g, const void *in, void *out, int64_t count, mu_dtype type,
                                   mu_reduce_op op) MU_MUST_USE;
MU_API mu_status mu_barrier(mu_group *g) MU_MUST_USE;

/* Non-blocking form: data must stay untouched until the request is done. Requests complete in the order they were
 * started. Progress is made inside start, test and wait only. NULL on error. */
MU_API mu_request *mu_all_reduce_start(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op);
/* *done tells whether it is complete, or has failed. A completed or failed request is freed by the call that reported
 * it; one that is never waited for goes when the group closes. */
MU_API mu_status mu_request_test(mu_request *r, bool *done) MU_MUST_USE;
MU_API mu_status mu_request_wait(mu_request *r) MU_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
