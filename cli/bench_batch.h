/* The batch that `muster bench step` trains on, the same in each step. */
#ifndef MUSTER_CLI_BENCH_BATCH_H
#define MUSTER_CLI_BENCH_BATCH_H

#include "bench.h"

typedef struct bench_batch {
    mu_tensor *x; /* (batch, channels, side, side) */
    mu_tensor *y; /* (batch) of MU_I64 */
} bench_batch;

/* Checks that the file holds x and y for `ranks` such batches. Returns -1, or the exit code after a message; b is closed
 * then. */
int bench_batch_check(bench *b, const char *path, int ranks, mu_dims dims);
/* This rank's part of the file's x and y, or where path is NULL, numbers made up from its rank. The tensors are the
 * context's. False on error (in the context). */
bool bench_batch_make(bench *b, const char *path, mu_dims dims, int64_t classes, bench_batch *out);

#endif
