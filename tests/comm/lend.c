/* A program with an MPI of its own, which it lends to Muster: groups from communicators, C's and Fortran's, and what is
 * refused. Run by mpirun with 3 ranks; argument: the level of thread support to initialise MPI with. */
#include <muster/muster.h>

#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            failures++;                                                                                                \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
        }                                                                                                              \
    } while (0)

static mu_context *quiet(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
}

static void refused(mu_context *c, const mu_group *g, mu_status status, const char *says)
{
    CHECK(g == NULL);
    CHECK(mu_context_status(c) == status);
    if (strstr(mu_context_message(c), says) == NULL) {
        failures++;
        fprintf(stderr, "`%s` is not in `%s`\n", says, mu_context_message(c));
    }
    mu_context_clear(c);
}

/* The mean over the group, while the program has a receive of its own open for anything on the same communicator. */
static void use(MPI_Comm comm, bool fortran)
{
    int rank, size, got = -1, sent;
    MPI_Request any;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    MPI_Irecv(&got, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &any);
    mu_context *c = quiet();
    mu_group *g = fortran ? mu_group_from_mpi_fint(c, MPI_Comm_c2f(comm), NULL) : mu_group_from_mpi_comm(c, &comm, NULL);
    CHECK(g != NULL && strcmp(mu_group_kind(g), "mpi") == 0);
    CHECK(mu_group_rank(g) == rank && mu_group_size(g) == size && mu_context_size(c) == size);
    enum { N = 100000 };
    float *x = malloc(N * sizeof(*x));
    for (int i = 0; i < N; i++) {
        x[i] = (float)(rank + 1);
    }
    CHECK(mu_all_reduce(g, x, N, MU_F32, MU_SUM) == MU_OK);
    for (int i = 0; i < N; i++) {
        if (x[i] != (float)(size * (size + 1) / 2)) {
            CHECK(false);
            break;
        }
    }
    free(x);
    sent = 100 + rank;
    MPI_Send(&sent, 1, MPI_INT, (rank + 1) % size, 5, comm);
    MPI_Status status;
    MPI_Wait(&any, &status);
    CHECK(status.MPI_TAG == 5 && got == 100 + (rank + size - 1) % size);
    CHECK(mu_context_close(c) == MU_OK);
}

static void refusals(void)
{
    mu_context *c = quiet();
    MPI_Comm none = MPI_COMM_NULL, world = MPI_COMM_WORLD;
    refused(c, mu_group_from_mpi_comm(c, NULL, NULL), MU_ERR_ARG, "without a communicator");
    refused(c, mu_group_from_mpi_comm(c, &none, NULL), MU_ERR_UNSUPPORTED, "MPI_COMM_NULL");
    refused(c, mu_group_from_mpi_comm(c, &world, &(mu_group_options){.engine = MU_GROUP_SHM}), MU_ERR_UNSUPPORTED,
            "shared memory");
    refused(c, mu_group_from_mpi_comm(c, &world, &(mu_group_options){.engine = (mu_group_engine)7}), MU_ERR_ARG,
            "engine is 7");
    CHECK(mu_context_close(c) == MU_OK);
}

static void *from_another_thread(void *unused)
{
    (void)unused;
    mu_context *c = quiet();
    MPI_Comm world = MPI_COMM_WORLD;
    refused(c, mu_group_from_mpi_comm(c, &world, NULL), MU_ERR_UNSUPPORTED, "MPI_THREAD_FUNNELED");
    CHECK(mu_context_close(c) == MU_OK);
    return NULL;
}

int main(int argc, char **argv)
{
    int level = argc > 1 && strcmp(argv[1], "single") == 0 ? MPI_THREAD_SINGLE : MPI_THREAD_FUNNELED, provided, rank, all;
    MPI_Init_thread(&argc, &argv, level, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (level == MPI_THREAD_SINGLE && provided == MPI_THREAD_SINGLE) {
        mu_context *c = quiet();
        MPI_Comm world = MPI_COMM_WORLD;
        refused(c, mu_group_from_mpi_comm(c, &world, NULL), MU_ERR_UNSUPPORTED, "MPI_THREAD_SINGLE");
        CHECK(mu_context_close(c) == MU_OK);
    } else {
        MPI_Comm pair;
        pthread_t thread;
        refusals();
        use(MPI_COMM_WORLD, false);
        use(MPI_COMM_WORLD, true);
        /* Two groups at a time, of other ranks each. */
        MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &pair);
        use(pair, false);
        MPI_Comm_free(&pair);
        if (provided == MPI_THREAD_FUNNELED && pthread_create(&thread, NULL, from_another_thread, NULL) == 0) {
            pthread_join(thread, NULL);
        }
        use(MPI_COMM_WORLD, false);
    }
    MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return all == 0 ? 0 : 1;
}
