/* One simulated rank: the reducer over the group of MPI, with pauses in the place of computation. Under smpirun; see
 * scale.py, which writes layouts and platforms.
 *
 *     scale LAYOUT FORWARD BACKWARD BUCKET FIRST STEPS [check]
 *
 * LAYOUT has a line for each parameter, in registration order: name, elements, and its share of the backward pass.
 * FORWARD and BACKWARD are seconds, BUCKET and FIRST bytes. With `check`, gradients have values, means are compared with
 * what they should be, and the group is closed. Without, ranks share their large blocks of memory, which SMPI then does not
 * copy, so that values mean nothing; and the simulation ends after the last step: closing a group sends a farewell from
 * each rank to each.
 *
 * The library is the one that everybody links: what it asks of the operating system goes to the simulator by the
 * linker's --wrap, as smpicc would have it by macros. Rank 0 prints a line of JSON. */
#include <muster/muster.h>

#include <mpi.h>
#include <smpi/smpi_helpers_internal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* -- what the library asks of the system ----------------------------------------------------------------------------- */
int __wrap_clock_gettime(clockid_t clock, struct timespec *t);
int __wrap_clock_gettime(clockid_t clock, struct timespec *t)
{
    return smpi_clock_gettime(clock, t);
}

int __wrap_nanosleep(const struct timespec *t, struct timespec *left);
int __wrap_nanosleep(const struct timespec *t, struct timespec *left)
{
    return smpi_nanosleep(t, left);
}

/* Large blocks of one size are one block for all ranks, which SMPI does not copy since it calls it shared; kept. Ranks are
 * one thread. */
enum { FOLD_BYTES = 4 << 20, FOLDS = 64 };
static struct fold {
    size_t bytes;
    void *block;
} folds[FOLDS];
static bool folding;

void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    for (int i = 0; i < FOLDS && folding && bytes >= FOLD_BYTES; i++) {
        if (folds[i].block == NULL) {
            folds[i] = (struct fold){bytes, smpi_shared_malloc(bytes, __FILE__, __LINE__)};
        }
        if (folds[i].bytes == bytes) {
            return folds[i].block;
        }
    }
    return __real_aligned_alloc(alignment, bytes);
}

void __real_free(void *p);
void __wrap_free(void *p);
void __wrap_free(void *p)
{
    for (int i = 0; i < FOLDS && folds[i].block != NULL; i++) {
        if (folds[i].block == p && p != NULL) {
            return;
        }
    }
    __real_free(p);
}

/* -- the rank -------------------------------------------------------------------------------------------------------- */
enum { MOST = 1000, NAME = 80 };

typedef struct layout {
    int count;
    char name[MOST][NAME];
    mu_reducer_parameter parameter[MOST];
    double share[MOST];
} layout;

static void fail(const char *what)
{
    fprintf(stderr, "scale: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static layout *read_layout(const char *file)
{
    FILE *f = fopen(file, "r");
    layout *l = calloc(1, sizeof(*l));
    long long count;
    if (f == NULL || l == NULL) {
        fail("cannot read the layout");
        return NULL;
    }
    while (l->count < MOST && fscanf(f, "%79s %lld %lf", l->name[l->count], &count, &l->share[l->count]) == 3) {
        l->parameter[l->count] = (mu_reducer_parameter){.name = l->name[l->count], .count = count, .dtype = MU_F32};
        l->count++;
    }
    fclose(f);
    return l;
}

static void compute(double seconds)
{
    long long ns = (long long)(seconds * 1e9);
    nanosleep(&(struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}, NULL);
}

/* Small whole numbers: sums are exact. */
static void fill(float *x, int64_t count, int i, int value)
{
    for (int64_t k = 0; k < count; k++) {
        x[k] = (float)((i + k) % 7 + value);
    }
}

static void check(const layout *l, mu_reducer *r, int ranks)
{
    for (int i = 0; i < l->count; i++) {
        const float *x = mu_reducer_memory(r, i);
        for (int64_t k = 0; k < l->parameter[i].count; k++) {
            float sum = (float)(ranks * ((i + k) % 7) + ranks * (ranks - 1) / 2);
            if (x[k] != sum / (float)ranks || mu_reducer_ranks(r, i) != ranks) {
                fail("a wrong mean");
            }
        }
    }
}

static mu_status step(mu_context *c, const layout *l, mu_reducer *r, double forward, double backward, int checked)
{
    compute(forward);
    MU_OR_DIE(c, mu_reducer_begin(r, NULL));
    for (int i = l->count; i-- > 0;) {
        compute(backward * l->share[i]);
        if (checked >= 0) {
            fill(mu_reducer_memory(r, i), l->parameter[i].count, i, checked);
        }
        (void)mu_reducer_ready(r, i);
    }
    return mu_reducer_finish(r);
}

__attribute__((visibility("default"))) int main(int argc, char **argv);
int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 7) {
        fail("LAYOUT FORWARD BACKWARD BUCKET FIRST STEPS [check] were expected");
    }
    double forward = atof(argv[2]), backward = atof(argv[3]), exposed = 0, begun = 0;
    int steps = atoi(argv[6]), checked = argc > 7;
    folding = !checked;
    layout *l = read_layout(argv[1]);
    MPI_Comm world = MPI_COMM_WORLD;
    mu_context *c = mu_context_open(NULL);
    /* Longer than any step: whoever waits need not tell the others. */
    mu_group *g = mu_group_from_mpi_comm(c, &world, &(mu_group_options){.timeout_seconds = 1e6, .warn_seconds = 1e5});
    mu_reducer *r = mu_reducer_new(g, l->parameter, l->count,
                                   &(mu_reducer_options){.bucket_bytes = (size_t)atoll(argv[4]),
                                                         .first_bucket_bytes = (size_t)atoll(argv[5]), .keep_plan = true});
    MU_OR_DIE(c, mu_context_status(c));
    MPI_Barrier(MPI_COMM_WORLD);
    begun = MPI_Wtime();
    for (int n = 0; n < steps; n++) {
        MU_OR_DIE(c, step(c, l, r, forward, backward, checked ? rank : -1));
        exposed += mu_reducer_get_report(r).wait_seconds;
        if (checked) {
            check(l, r, ranks);
        }
    }
    double mine[2] = {MPI_Wtime() - begun, exposed}, all[2];
    MPI_Allreduce(mine, all, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0) {
        mu_reducer_report report = mu_reducer_get_report(r);
        printf("{\"ranks\":%d,\"step\":%.9f,\"exposed\":%.9f,\"bytes\":%zu,\"buckets\":%lld,\"buckets_early\":%lld}\n", ranks,
               all[0] / steps, all[1] / steps, report.bytes, (long long)report.buckets, (long long)report.buckets_early);
        fflush(stdout);
    }
    if (!checked) {
        MPI_Barrier(MPI_COMM_WORLD);
        _exit(0);
    }
    free(l);
    int code = mu_context_close(c) == MU_OK ? 0 : 1;
    MPI_Finalize();
    return code;
}
