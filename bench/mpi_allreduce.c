/* The twin of `muster bench allreduce --json` over MPI: MPI_Allreduce in place of float sums, in huge pages where the
 * system gives them. Built and started by peers.py with each MPI that is installed.
 *
 *     mpirun -n 2 mpi_allreduce BYTES:ITERATIONS...
 */
#define _GNU_SOURCE
#include <mpi.h>

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float *huge_buffer(size_t bytes)
{
    size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    float *p = aligned_alloc(HUGE_PAGE, whole);
    if (p == NULL) {
        fprintf(stderr, "mpi_allreduce: out of memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    madvise(p, whole, MADV_HUGEPAGE); /* advice: where it is refused the pages are small */
    return p;
}

static void sum(float *x, size_t count)
{
    MPI_Allreduce(MPI_IN_PLACE, x, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void check_sum(float *x, size_t count, int size)
{
    for (size_t i = 0; i < count; i++) {
        x[i] = 1;
    }
    sum(x, count);
    for (size_t i = 0; i < count; i++) {
        if (x[i] != (float)size) {
            fprintf(stderr, "mpi_allreduce: a wrong sum\n");
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        x[i] = 0; /* sums of nothing but zeros do not grow */
    }
}

/* Prints one row of the JSON, on rank 0. */
static void measure(size_t bytes, int iterations, int rank, int size, const char *before)
{
    size_t count = bytes / sizeof(float);
    float *x = huge_buffer(bytes);
    double *us = calloc((size_t)iterations, sizeof(*us));
    if (us == NULL) {
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    check_sum(x, count, size);
    int warm_up = iterations / 5 + 2;
    for (int i = -warm_up; i < iterations; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        sum(x, count);
        if (i >= 0) {
            us[i] = 1e6 * (MPI_Wtime() - begun);
        }
    }
    qsort(us, (size_t)iterations, sizeof(*us), by_value);
    int last = iterations - 1;
    double median = 0.5 * (us[last / 2] + us[iterations / 2]);
    if (rank == 0) {
        printf("%s{\"bytes\":%zu,\"us\":{\"median\":%.3f,\"min\":%.3f,\"p10\":%.3f,\"p90\":%.3f},\"algbw_gb_s\":%.4f}", before,
               bytes, median, us[0], us[last / 10], us[last - last / 10], (double)bytes / median / 1e3);
    }
    free(us);
    free(x);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank == 0) {
        printf("{\"ranks\":%d,\"rows\":[", size);
    }
    for (int i = 1; i < argc; i++) {
        size_t bytes = 0;
        int iterations = 0;
        if (sscanf(argv[i], "%zu:%d", &bytes, &iterations) != 2 || bytes < sizeof(float) || iterations < 1) {
            fprintf(stderr, "mpi_allreduce: %s is not BYTES:ITERATIONS\n", argv[i]);
            MPI_Abort(MPI_COMM_WORLD, 2);
        }
        measure(bytes, iterations, rank, size, i > 1 ? "," : "");
    }
    if (rank == 0) {
        printf("]}\n");
    }
    MPI_Finalize();
    return 0;
}
