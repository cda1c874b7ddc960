/* Ready-made hooks: their definitions recomputed from every rank's own gradients, replicas equal, and a rank that fails
 * or gives up in between. */
#include "kern/bf16_rounding.h"
#include "rig.h"

#include "tensor/tensor.h"

/* What rank r's loss reads in step n. */
static const char *reads(int n, int rank)
{
    static const char *const sets[] = {"a b c head.w head.v", "head.v c a", "b d", "a b c", ""};
    return n == 0 ? sets[0] : sets[mix((uint64_t)(n * 7 + rank)) % 5];
}

static mu_status step(mu_ddp *d, mu_tape *t, mu_module *m, int n, int rank, bool weighted)
{
    mu_tape_reset(t);
    mu_tensor *loss = terms(t, m, reads(n, rank), (uint64_t)(n * 100 + rank));
    return weighted ? mu_ddp_backward_weighted(d, t, loss, 3 + rank * n) : mu_ddp_backward(d, t, loss);
}

/* This rank's own gradients of that step, and all ranks' of it: size times count floats. */
static float *everybodys(mu_group *g, mu_module *alone, int n, int rank, int64_t *count)
{
    mu_tape *t = mu_tape_new(g->context, NULL);
    mu_tensor *loss = terms(t, alone, reads(n, rank), (uint64_t)(n * 100 + rank));
    CHECK(loss == NULL || mu_backward(t, loss) == MU_OK, "oracle");
    snapshot s = snap(alone);
    float *all = malloc((size_t)mu_group_size(g) * (size_t)s.count * sizeof(float));
    CHECK(mu_all_gather(g, s.grads, all, (size_t)s.count * sizeof(float)) == MU_OK, "gather");
    *count = s.count;
    snap_free(&s);
    mu_tape_free(t);
    CHECK(mu_module_zero_grad(alone) == MU_OK, "zero_grad");
    return all;
}

static void bf16_defined(mu_group *g, int rank, int size, void *arg)
{
    bool weighted = arg != NULL;
    mu_context *c = g->context;
    mu_module *m = toy(c), *alone = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = 64, .absent = MU_ABSENT_QUIET});
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_set_bf16(d) == MU_OK, "set");
    int rounded = 0;
    for (int n = 0; n < 10; n++) {
        int64_t count;
        float *all = everybodys(g, alone, n, rank, &count);
        int total = 0;
        for (int r = 0; r < size; r++) {
            total += 3 + r * n;
        }
        CHECK(step(d, t, m, n, rank, weighted) == MU_OK, "%s", mu_context_message(c));
        check_replicas(g, m, "bf16");
        snapshot s = snap(m);
        for (int64_t i = 0; i < count; i++) {
            float sum = 0, plain = 0;
            for (int r = 0; r < size; r++) {
                float x = all[r * count + i], part = weighted ? x * (float)(3 + r * n) / (float)total : x / (float)size;
                sum = r == 0 ? to_bf16(part) : sum + to_bf16(part);
                plain += part;
            }
            rounded += sum != plain;
            CHECK(s.grads[i] == sum || (s.grads[i] == 0.0F && sum == 0.0F), "step %d, element %d: %.9g, not %.9g", n,
                  (int)i, (double)s.grads[i], (double)sum);
        }
        snap_free(&s);
        free(all);
        toy_optimizer_step(m, 0.1F);
        /* Both models hold rank 0's values, and take the same steps. */
        snapshot now = snap(m);
        int64_t at = 0;
        for (int64_t i = 0; i < now.param_count; i++) {
            mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(alone, now.names[i]));
            CHECK(mu_tensor_write(v, now.values + at, now.start[i + 1] - at) == MU_OK, "write");
            at = now.start[i + 1];
        }
        snap_free(&now);
    }
    CHECK(rounded > 20, "only %d elements were rounded", rounded);
}

static void bf16(void **state)
{
    (void)state;
    for (int weighted = 0; weighted < 2; weighted++) {
        for (int size = 1; size <= 3; size++) {
            assert_int_equal(run_threads(size, bf16_defined, weighted ? "weighted" : NULL, NULL, true), 0);
        }
        assert_int_equal(run_processes(2, bf16_defined, weighted ? "weighted" : NULL, NULL, true), 0);
    }
}

/* A bucket of several pieces, and values that are not numbers. */
static void bf16_large(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    enum { N = 600000 };
    mu_context *c = g->context;
    mu_module *m = mu_module_new(c, "Large", NULL);
    mu_module_parameter(m, "w", MU_DIMS(N), (mu_init){MU_INIT_NORMAL, 1.0F});
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    CHECK(mu_ddp_set_bf16(d) == MU_OK, "set");
    mu_tape *t = mu_tape_new(c, NULL);
    float *x = malloc(N * sizeof(float)), *got = malloc(N * sizeof(float));
    for (int i = 0; i < N; i++) {
        x[i] = (float)(i % 1000) + 0.37F * (float)(rank + 1);
    }
    x[3] = rank == size - 1 ? NAN : 1.0F;
    x[4] = rank == 0 ? INFINITY : 1.0F;
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(m, "w"));
    mu_tensor *loss = mu_sum(t, mu_mul(t, w, mu_tensor_from(t, MU_DIMS(N), x)));
    CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "w")), got, N) == MU_OK, "read");
    int wrong = 0;
    for (int i = 5; i < N; i++) {
        float sum = 0;
        for (int r = 0; r < size; r++) {
            sum += to_bf16(((float)(i % 1000) + 0.37F * (float)(r + 1)) / (float)size);
        }
        wrong += got[i] != sum;
    }
    CHECK(wrong == 0 && isnan(got[3]) && isinf(got[4]), "%d wrong, %g, %g", wrong, (double)got[3], (double)got[4]);
    free(x);
    free(got);
}

static void bf16_pieces(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, bf16_large, NULL, NULL, true), 0);
    assert_int_equal(run_processes(2, bf16_large, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16),
        cmocka_unit_test(bf16_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
