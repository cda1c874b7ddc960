/* Ten steps of ResNet-20 on 1, 2 and 4 ranks, as threads and as processes, on the same global batch.
 *
 * Batch norm uses the statistics of what it is given, so the global batch is cut into 4 fixed shards: a rank of N runs
 * a forward for each of its 4/N shards and one reduction over the mean of their losses. All runs then compute the same
 * function, and differ only in the order of sums. */
#include "rig.h"

#include <muster/layers.h>
#include <muster/optim.h>
#include <sys/mman.h>

enum { SHARDS = 4, IMAGES = 8, SIDE = 28, STEPS = 10, FLOATS = 1 << 19 };

typedef struct result {
    int64_t count, param_count;
    int64_t start[257];
    float losses[STEPS]; /* of rank 0's shards */
    float values[FLOATS];
} result;

static mu_tensor *shard_loss(mu_tape *t, mu_module *net, int step, int shard)
{
    static const int64_t pixels = SIDE * SIDE;
    float *x = malloc(sizeof(float) * (size_t)(IMAGES * pixels));
    int64_t y[IMAGES];
    for (int i = 0; i < IMAGES; i++) {
        uint64_t id = (uint64_t)((step * SHARDS + shard) * IMAGES + i);
        y[i] = (int64_t)(mix(id) % 10);
        for (int64_t k = 0; k < pixels; k++) {
            x[i * pixels + k] = (float)(mix(id * 1000003 + (uint64_t)k) % 2001) / 1000.0F - 1.0F + 0.1F * (float)y[i];
        }
    }
    mu_tensor *in = mu_tensor_from(t, MU_DIMS(IMAGES, 1, SIDE, SIDE), x);
    free(x);
    return mu_cross_entropy(t, mu_forward(t, net, in), mu_tensor_from_i64(t, MU_DIMS(IMAGES), y));
}

static void train(mu_group *g, int rank, int size, void *arg)
{
    result *out = arg;
    mu_context *c = g->context;
    mu_module *net = mu_resnet_cifar(c, 20, &(mu_resnet_options){.in_channels = 1});
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = 200000, .first_bucket_bytes = 20000});
    mu_optimizer *sgd = mu_sgd(net, 0.05F, &(mu_sgd_options){.momentum = 0.9F, .weight_decay = 1e-4F});
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(d != NULL && sgd != NULL && t != NULL, "set-up: %s", mu_context_message(c));
    for (int step = 0; step < STEPS && mu_context_status(c) == MU_OK; step++) {
        mu_tape_reset(t);
        mu_tensor *sum = NULL;
        for (int shard = rank * (SHARDS / size); shard < (rank + 1) * (SHARDS / size); shard++) {
            mu_tensor *loss = shard_loss(t, net, step, shard);
            sum = sum == NULL ? loss : mu_add(t, sum, loss);
        }
        mu_tensor *loss = mu_scale(t, sum, (float)size / SHARDS);
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "step %d: %s", step, mu_context_message(c));
        if (rank == 0) {
            out->losses[step] = mu_tensor_item(loss);
        }
        check_replicas(g, net, "before the step");
        CHECK(mu_optimizer_step(sgd) == MU_OK, "step %d: %s", step, mu_context_message(c));
    }
    CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    CHECK(size == 1 || mu_ddp_get_report(d).buckets > 3, "%d buckets", mu_ddp_get_report(d).buckets);
    check_replicas(g, net, "at the end");
    if (rank == 0) {
        snapshot s = snap(net);
        CHECK(s.count <= FLOATS, "%d floats", (int)s.count);
        out->count = s.count;
        out->param_count = s.param_count;
        memcpy(out->start, s.start, sizeof(s.start));
        memcpy(out->values, s.values, (size_t)s.count * sizeof(float));
        snap_free(&s);
    }
}

/* Largest difference of a parameter relative to its norm. */
static double distance(const result *a, const result *b)
{
    double worst = 0;
    for (int64_t i = 0; i < b->param_count; i++) {
        double diff = 0, norm = 0;
        for (int64_t k = b->start[i]; k < b->start[i + 1]; k++) {
            diff += pow((double)a->values[k] - (double)b->values[k], 2);
            norm += pow((double)b->values[k], 2);
        }
        double far = norm > 0 ? sqrt(diff / norm) : diff > 0 ? INFINITY : 0;
        worst = far > worst ? far : worst;
    }
    return worst;
}

static void n_ranks_equal_one(void **state)
{
    (void)state;
    static const struct {
        int size;
        bool processes;
    } runs[] = {{1, false}, {2, false}, {4, false}, {2, true}, {4, true}};
    enum { RUNS = sizeof(runs) / sizeof(runs[0]) };
    /* Shared with children, which are the ranks of the shm runs. */
    result *r = mmap(NULL, sizeof(result) * RUNS * 2, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(r != MAP_FAILED);
    for (int i = 0; i < RUNS; i++) {
        for (int again = 0; again < 2; again++) {
            result *out = &r[i * 2 + again];
            int bad = runs[i].processes ? run_processes(runs[i].size, train, out, NULL, true)
                                        : run_threads(runs[i].size, train, out, NULL, true);
            assert_int_equal(bad, 0);
            assert_int_equal(out->count, r[0].count);
        }
        double far = distance(&r[i * 2], &r[0]);
        bool same = memcmp(&r[i * 2], &r[i * 2 + 1], sizeof(result)) == 0;
        printf("%d %-9s  largest relative difference of a parameter %.2g, the same run again %s\n", runs[i].size,
               runs[i].processes ? "processes" : "threads", far, same ? "bitwise equal" : "DIFFERENT");
        assert_true(far <= 1e-5);
        assert_true(same);
        assert_true(r[i * 2].losses[0] > 1 && isfinite(r[i * 2].losses[STEPS - 1]));
    }
    /* Threads and shared memory run the same sums. */
    assert_int_equal(memcmp(r[2].values, r[6].values, (size_t)r[0].count * sizeof(float)), 0);
    assert_int_equal(memcmp(r[4].values, r[8].values, (size_t)r[0].count * sizeof(float)), 0);
    munmap(r, sizeof(result) * RUNS * 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(n_ranks_equal_one)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
