/* Replicas in mixed precision: bit for bit equal on every rank, and what is reduced is float32. */
#include "rig.h"

enum { CLASSES = 5, SIDE = 8 };

static mu_tensor *loss_of(mu_tape *t, mu_module *m, int step, int rank)
{
    int n = 2 + (step + rank) % 3;
    float x[4 * 3 * SIDE * SIDE];
    int64_t labels[4];
    for (int i = 0; i < n * 3 * SIDE * SIDE; i++) {
        x[i] = (float)(mix((uint64_t)(step * 100000 + rank * 10000 + i)) % 2001) / 1000.0F - 1.0F;
    }
    for (int i = 0; i < n; i++) {
        labels[i] = (step + rank + i) % CLASSES;
    }
    mu_tensor *y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(n, 3, SIDE, SIDE), x));
    CHECK(y == NULL || mu_tensor_dtype(y) == MU_BF16, "logits are %s", mu_dtype_name(mu_tensor_dtype(y)));
    return mu_cross_entropy(t, y, mu_tensor_from_i64(t, MU_DIMS(n), labels));
}

static mu_module *network(mu_context *c)
{
    return mu_model(c, "resnet20", &(mu_model_options){.classes = CLASSES, .in_channels = 3, .side = SIDE});
}

static void equal(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    mu_module *m = network(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = true});
    mu_optimizer *o = mu_sgd(m, 0.05F, &(mu_sgd_options){.momentum = 0.9F});
    CHECK(d != NULL && o != NULL, "%s", mu_context_message(c));
    CHECK(arg == NULL || mu_ddp_set_bf16(d) == MU_OK, "set");
    for (int step = 0; step < 4; step++) {
        mu_tape_reset(t);
        CHECK(mu_ddp_backward(d, t, loss_of(t, m, step, rank)) == MU_OK, "%s", mu_context_message(c));
        CHECK(mu_optimizer_step(o) == MU_OK, "%s", mu_context_message(c));
        check_replicas(g, m, "bf16");
    }
    CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    (void)size;
}

/* One rank's reduction is its own gradient; the mean of two is that of both, to float32's rounding. */
static void is_the_mean(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = network(c), *alone = network(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = true});
    CHECK(mu_backward(t, loss_of(t, alone, 0, rank)) == MU_OK, "alone");
    snapshot own = snap(alone);
    float *all = malloc((size_t)size * (size_t)own.count * sizeof(float));
    CHECK(mu_all_gather(g, own.grads, all, (size_t)own.count * sizeof(float)) == MU_OK, "gather");
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, loss_of(t, m, 0, rank)) == MU_OK, "%s", mu_context_message(c));
    snapshot s = snap(m);
    int fine = 0;
    for (int64_t i = 0; i < own.count; i++) {
        double sum = 0, most = 0;
        for (int r = 0; r < size; r++) {
            double one = (double)all[(int64_t)r * own.count + i];
            sum += one / size;
            most = fmax(most, fabs(one));
        }
        CHECK(fabs((double)s.grads[i] - sum) <= size * 0x1p-23 * most, "element %lld: %.9g, mean %.9g", (long long)i,
              (double)s.grads[i], sum);
        uint32_t bits;
        memcpy(&bits, &s.grads[i], sizeof(bits));
        fine += (bits & 0xffff) != 0;
    }
    CHECK(fine > own.count / 2, "gradients of parameters are not float32");
    snap_free(&own);
    snap_free(&s);
    free(all);
}

static void replicas(void **state)
{
    (void)state;
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, equal, NULL, NULL, true), 0);
        assert_int_equal(run_processes(size, equal, NULL, NULL, true), 0);
    }
    assert_int_equal(run_threads(2, equal, "reduced in bfloat16 too", NULL, true), 0);
}

static void mean(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, is_the_mean, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(replicas), cmocka_unit_test(mean)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
