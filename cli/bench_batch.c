/* The batch of `muster bench step`: from a checkpoint's tensors x and y, so that another framework can train on the same,
 * or made up. */
#include "bench_batch.h"
#include "commands.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t find(const mu_checkpoint_file *k, const char *name)
{
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        if (strcmp(mu_checkpoint_get(k, i).name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static bool is_shape(mu_dims a, mu_dims b)
{
    return a.ndim == b.ndim && memcmp(a.dim, b.dim, (size_t)a.ndim * sizeof(a.dim[0])) == 0;
}

int bench_batch_check(bench *b, const char *path, int ranks, mu_dims dims)
{
    mu_checkpoint_file *k = mu_checkpoint_open(b->c, path);
    if (k == NULL) {
        return bench_close(b, CLI_FAILED, true);
    }
    int64_t x = find(k, "x"), y = find(k, "y");
    dims.dim[0] *= ranks;
    if (x >= 0 && y >= 0 && mu_checkpoint_get(k, x).dtype == MU_F32 && is_shape(mu_checkpoint_get(k, x).dims, dims) &&
        mu_checkpoint_get(k, y).dtype == MU_I64 && is_shape(mu_checkpoint_get(k, y).dims, MU_DIMS(dims.dim[0]))) {
        mu_checkpoint_close(k);
        return -1;
    }
    bench_close(b, CLI_USAGE, true);
    return cli_fail(b->command, CLI_USAGE,
                    "--batch-from %s: tensors x, float32 of (%lld, %lld, %lld, %lld), and y, int64 of (%lld), were expected",
                    path, (long long)dims.dim[0], (long long)dims.dim[1], (long long)dims.dim[2], (long long)dims.dim[3],
                    (long long)dims.dim[0]);
}

static bool read_part(mu_checkpoint_file *k, int rank, int size, float *x, int64_t elements, int64_t *y, int64_t count)
{
    size_t x_bytes = (size_t)elements * sizeof(*x), y_bytes = (size_t)count * sizeof(*y), all = (size_t)size;
    char *whole = malloc(all * (x_bytes > y_bytes ? x_bytes : y_bytes));
    bool ok = whole != NULL && mu_checkpoint_read(k, find(k, "x"), whole, all * x_bytes) >= 0;
    if (ok) {
        memcpy(x, whole + (size_t)rank * x_bytes, x_bytes);
        ok = mu_checkpoint_read(k, find(k, "y"), whole, all * y_bytes) >= 0;
    }
    if (ok) {
        memcpy(y, whole + (size_t)rank * y_bytes, y_bytes);
    }
    free(whole);
    return ok;
}

/* Knuth's MMIX generator: the high bits are good enough for a benchmark's pixels. */
static double uniform(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / (double)((uint64_t)1 << 53);
}

static void make_up(int rank, float *x, int64_t elements, int64_t *y, int64_t count, int64_t classes)
{
    uint64_t state = 1 + (uint64_t)rank;
    for (int64_t i = 0; i < elements; i++) {
        x[i] = (float)(sqrt(12.0) * (uniform(&state) - 0.5)); /* variance 1 */
    }
    for (int64_t i = 0; i < count; i++) {
        y[i] = (int64_t)(uniform(&state) * (double)classes);
    }
}

bool bench_batch_make(bench *b, const char *path, mu_dims dims, int64_t classes, bench_batch *out)
{
    int64_t count = dims.dim[0], elements = count * dims.dim[1] * dims.dim[2] * dims.dim[3];
    float *x = malloc((size_t)elements * sizeof(*x));
    int64_t *y = malloc((size_t)count * sizeof(*y));
    mu_checkpoint_file *k = path != NULL ? mu_checkpoint_open(b->c, path) : NULL;
    bool ok = x != NULL && y != NULL && (path == NULL || k != NULL);
    if (ok && path != NULL) {
        ok = read_part(k, b->rank, b->size, x, elements, y, count);
    } else if (ok) {
        make_up(b->rank, x, elements, y, count, classes);
    }
    mu_checkpoint_close(k);
    if (ok) {
        mu_tape *t = mu_tape_new(b->c, &(mu_tape_options){.no_grad = true});
        *out = (bench_batch){.x = mu_tensor_keep(t, mu_tensor_from(t, dims, x)),
                             .y = mu_tensor_keep(t, mu_tensor_from_i64(t, MU_DIMS(count), y))};
        ok = out->x != NULL && out->y != NULL;
        mu_tape_free(t);
    }
    free(x);
    free(y);
    return ok;
}
