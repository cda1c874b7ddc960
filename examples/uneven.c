/* Uneven data: every rank has another number of samples, so the last batches are smaller, and some ranks run out while
 * others go on. A rank without a batch gives no loss and the others do not notice; weighting by samples makes the
 * gradient exactly that of the whole batch. Rank 0 trains the same network alone, on everybody's samples, to show it.
 *     muster run -n 3 -- ./uneven */
#include <muster/muster.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 4, BATCH = 10, EPOCHS = 30 };

static int samples_of(int rank)
{
    return 25 + 17 * rank; /* 25, 42, 59, ... */
}

/* Sample i of a rank: numbers that depend on nothing else. */
static void sample(int rank, int i, float *x, float *y)
{
    unsigned state = 977u * (unsigned)rank + 31u * (unsigned)i + 1u;
    for (int k = 0; k < IN; k++) {
        state = state * 1664525u + 1013904223u;
        x[k] = (float)(state >> 8) / (float)(1 << 23) - 1.0f;
    }
    *y = x[0] * x[1] + x[2];
}

/* Samples of a rank's batch number b; 0 when it has run out. */
static int batch(int rank, int b, float *x, float *y)
{
    int n = 0;
    for (int i = b * BATCH; i < (b + 1) * BATCH && i < samples_of(rank); i++, n++) {
        sample(rank, i, x + n * IN, y + n);
    }
    return n;
}

static mu_tensor *loss_of(mu_tape *t, mu_module *net, int n, const float *x, const float *y)
{
    mu_tensor *out = mu_forward(t, net, mu_tensor_from(t, MU_DIMS(n, IN), x));
    return mu_mse_loss(t, out, mu_tensor_from(t, MU_DIMS(n, 1), y));
}

static mu_module *network(mu_context *c)
{
    return mu_mlp(c, IN, (int64_t[]){32}, 1, 1);
}

/* One process, the union of the ranks' batches in each step. Returns its loss of the last step. */
static float alone(mu_context *c, mu_module *net, int ranks, int batches)
{
    mu_optimizer *sgd = mu_sgd(net, 0.1f, &(mu_sgd_options){.momentum = 0.9f});
    mu_tape *t = mu_tape_new(c, NULL);
    float *x = malloc(sizeof(float) * (size_t)(ranks * BATCH * IN)), *y = malloc(sizeof(float) * (size_t)(ranks * BATCH));
    float last = 0;
    for (int step = 0; x != NULL && y != NULL && step < EPOCHS * batches; step++) {
        int n = 0;
        for (int r = 0; r < ranks; r++) {
            n += batch(r, step % batches, x + n * IN, y + n);
        }
        mu_tape_reset(t);
        mu_tensor *loss = loss_of(t, net, n, x, y);
        last = mu_tensor_item(loss);
        MU_OR_DIE(c, mu_backward(t, loss));
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    free(x);
    free(y);
    return last;
}

typedef struct comparison {
    mu_module *other;
    double difference, length;
} comparison;
static bool compare(void *user, const char *name, mu_parameter *p)
{
    comparison *k = user;
    mu_tensor *a = mu_parameter_tensor(p), *b = mu_parameter_tensor(mu_module_get_parameter(k->other, name));
    int64_t n = mu_tensor_elements(a);
    float *x = malloc(2 * (size_t)n * sizeof(float));
    bool ok = x != NULL && mu_tensor_read(a, x, n) == MU_OK && mu_tensor_read(b, x + n, n) == MU_OK;
    for (int64_t i = 0; ok && i < n; i++) {
        k->difference += pow((double)x[i] - (double)x[n + i], 2);
        k->length += pow((double)x[n + i], 2);
    }
    free(x);
    return ok;
}

int main(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 6});
    mu_group *world = mu_group_from_env(c);
    int rank = mu_context_rank(c), ranks = mu_context_size(c);
    int batches = (samples_of(ranks - 1) + BATCH - 1) / BATCH; /* of the rank that has most */

    mu_module *net = network(c);
    mu_ddp *ddp = mu_ddp_wrap(net, world, NULL);
    mu_optimizer *sgd = mu_sgd(net, 0.1f, &(mu_sgd_options){.momentum = 0.9f});
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));
    int empty = 0;
    for (int step = 0; step < EPOCHS * batches; step++) {
        float x[BATCH * IN], y[BATCH];
        int n = batch(rank, step % batches, x, y);
        empty += n == 0;
        mu_tape_reset(t);
        mu_tensor *loss = n > 0 ? loss_of(t, net, n, x, y) : NULL;
        MU_OR_DIE(c, mu_ddp_backward_weighted(ddp, t, loss, n));
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    MU_OR_DIE(c, mu_ddp_check(ddp));
    printf("rank %d: %d samples, without a batch in %d of %d steps\n", rank, samples_of(rank), empty, EPOCHS * batches);
    fflush(stdout);

    bool same = true;
    if (rank == 0) { /* nobody waits for it: training alone is no collective */
        mu_context *own = mu_context_open(&(mu_context_options){.seed = 6});
        mu_module *one = network(own);
        float loss = alone(own, one, ranks, batches);
        comparison k = {.other = one};
        MU_OR_DIE(c, mu_module_each_parameter(net, compare, &k));
        double off = sqrt(k.difference / k.length);
        printf("one process on all samples ends with loss %.5f; the %d ranks' weights differ from its own by %.1e\n",
               (double)loss, ranks, off);
        same = mu_context_close(own) == MU_OK && off < 1e-4;
    }
    return mu_context_close(c) == MU_OK && same ? 0 : 1;
}
