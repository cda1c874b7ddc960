/* Runs one function as the ranks of an mpirun: every process of it makes the same calls of run_mpi in the same order. */
#ifndef TEST_MPI_RANKS_H
#define TEST_MPI_RANKS_H

#include "comm/mpi_group.h"
#include "ranks.h"

#include <dlfcn.h>

/* Ranks of the mpirun that started this program; 0: it was started in another way. */
static inline int mpi_world(void)
{
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    size = size != NULL ? size : getenv("PMI_SIZE");
    return size != NULL ? atoi(size) : 0;
}

/* Of the groups that run_mpi makes; 0: what Muster takes. Small ones give many rounds to small arrays. */
static size_t mpi_round_bytes;

/* What goes wrong on this rank. Nothing when size is not this mpirun's. */
static inline int run_mpi(int size, rank_fn fn, void *arg, const mu_group_options *options, bool clean)
{
    if (size != mpi_world()) {
        return 0;
    }
    int before = failures;
    mu_group_options o = options != NULL ? *options : (mu_group_options){.timeout_seconds = 60};
    o.engine = MU_GROUP_MPI;
    mu_context *c = quiet_context();
    mu_group *g = mu_group_from_env_with(c, &o);
    CHECK(g != NULL, "join: %s", mu_context_message(c));
    CHECK(strcmp(mu_group_kind(g), "mpi") == 0 && mu_group_size(g) == size, "%s of %d", mu_group_kind(g), mu_group_size(g));
    if (g != NULL) {
        ((mui_mpi *)g)->round_bytes = mpi_round_bytes > 0 ? mpi_round_bytes : ((mui_mpi *)g)->round_bytes;
        fn(g, mu_group_rank(g), size, arg);
    }
    CHECK(!clean || mu_context_status(c) == MU_OK, "rank %d: %s", mu_group_rank(g), mu_context_message(c));
    mu_context_close(c);
    return failures - before;
}

/* Muster does not finalise MPI after a group of it broke; here all ranks are known to be alive and idle. */
static inline void mpi_end(void)
{
    int (*finalize)(void) = NULL;
    *(void **)(void *)&finalize = mpi_world() > 0 ? dlsym(RTLD_DEFAULT, "MPI_Finalize") : NULL;
    if (finalize != NULL) {
        finalize();
    }
}

#endif
