/* PowerSGD: every step recomputed in double for all ranks from the definition; what is sent and what is left out make
 * the gradient; failures and steps that are given up. */
#include "rig.h"

enum { PARAMS = 4, MOST = 300, RANKS = 4, R = 9 };

static const struct {
    const char *name;
    mu_dims dims;
    int rows, columns;
} shapes[PARAMS] = {
    {"a", {.ndim = 1, .dim = {17}}, 0, 0},
    {"w", {.ndim = 2, .dim = {12, 9}}, 12, 9},
    {"k", {.ndim = 4, .dim = {8, 3, 2, 3}}, 8, 18},
    {"e", {.ndim = 2, .dim = {10, 2}}, 10, 2}, /* not worth it at rank 1, rate 2 */
};

static int elements(int i)
{
    return shapes[i].rows > 0 ? shapes[i].rows * shapes[i].columns : 17;
}

static mu_module *model(mu_context *c)
{
    mu_module *m = mu_module_new(c, "Matrices", NULL);
    for (int i = 0; i < PARAMS; i++) {
        mu_module_parameter(m, shapes[i].name, shapes[i].dims, (mu_init){MU_INIT_NORMAL, 1.0F});
    }
    return m;
}

/* In step n some ranks lack a parameter, sometimes all of them do. */
static bool present(int n, int rank, int i)
{
    return n == 0 || (mix((uint64_t)(n * 13 + i)) % 5 != 0 && mix((uint64_t)(n * 100 + rank * 10 + i)) % 4 != 0);
}

/* The gradient that rank has of parameter i in step n. */
static float entry(int n, int rank, int i, int j)
{
    uint64_t common = mix((uint64_t)(n * 1000 + i * 100000 + j)), own = mix(common + (uint64_t)rank + 1);
    return (float)(common % 2001) / 500.0F - 2.0F + (float)(own % 1001) / 1000.0F;
}

static mu_tensor *loss_of(mu_tape *t, mu_module *m, int n, int rank)
{
    mu_tensor *sum = NULL;
    for (int i = 0; i < PARAMS; i++) {
        float x[MOST];
        for (int j = 0; j < elements(i); j++) {
            x[j] = entry(n, rank, i, j);
        }
        if (present(n, rank, i)) {
            mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(m, shapes[i].name));
            mu_tensor *y = mu_sum(t, mu_mul(t, v, mu_tensor_from(t, mu_tensor_dims(v), x)));
            sum = sum == NULL ? y : mu_add(t, sum, y);
        }
    }
    return sum;
}

static void first_q(void *user, const char *name, int64_t columns, int64_t rank, float *q)
{
    for (int64_t j = 0; j < columns * rank; j++) {
        q[j] = (float)(mix((uint64_t)j * 7 + (uint64_t)name[0]) % 1999) / 1000.0F - 1.0F;
    }
    *(int *)user += 1;
}

/* The definition, in double, for all ranks. */
typedef struct sim {
    double residual[RANKS][MOST], q[MOST], p[MOST], out[MOST];
    bool warm;
} sim;

static void gram_schmidt(double *a, int n, int r)
{
    for (int k = 0; k < r; k++) {
        double norm = 0;
        for (int j = 0; j < n; j++) {
            norm += a[j * r + k] * a[j * r + k];
        }
        for (int j = 0; j < n; j++) {
            a[j * r + k] /= sqrt(norm);
        }
        for (int l = k + 1; l < r; l++) {
            double dot = 0;
            for (int j = 0; j < n; j++) {
                dot += a[j * r + k] * a[j * r + l];
            }
            for (int j = 0; j < n; j++) {
                a[j * r + l] -= dot * a[j * r + k];
            }
        }
    }
}

static void sim_step(sim *s, int i, int n, int size, int r, const double *weight)
{
    int rows = shapes[i].rows, columns = shapes[i].columns, calls = 0;
    float q[MOST];
    double m[RANKS][MOST];
    if (!s->warm) {
        first_q(&calls, shapes[i].name, columns, r, q);
        for (int j = 0; j < columns * r; j++) {
            s->q[j] = (double)q[j];
        }
        s->warm = true;
    }
    gram_schmidt(s->q, columns, r);
    memset(s->p, 0, sizeof(s->p));
    for (int k = 0; k < size; k++) {
        for (int j = 0; j < rows * columns; j++) {
            m[k][j] = (present(n, k, i) ? (double)entry(n, k, i, j) * weight[k] * size : 0) + s->residual[k][j];
            for (int l = 0; l < r; l++) {
                s->p[j / columns * r + l] += m[k][j] * s->q[j % columns * r + l];
            }
        }
    }
    gram_schmidt(s->p, rows, r);
    memset(s->q, 0, sizeof(s->q));
    for (int k = 0; k < size; k++) {
        for (int j = 0; j < rows * columns; j++) {
            for (int l = 0; l < r; l++) {
                s->q[j % columns * r + l] += m[k][j] * s->p[j / columns * r + l] / size;
            }
        }
    }
    for (int j = 0; j < rows * columns; j++) {
        s->out[j] = 0;
        for (int l = 0; l < r; l++) {
            s->out[j] += s->p[j / columns * r + l] * s->q[j % columns * r + l];
        }
        for (int k = 0; k < size; k++) {
            s->residual[k][j] = m[k][j] - s->out[j];
        }
    }
}

typedef struct how {
    int rank;
    bool weighted, give_up;
    size_t bytes;
} how;

/* One parameter of one step, against the definition. before: its residual; NULL: it had none. */
static void compare(mu_module *m, const mu_powersgd *ps, int i, int n, int me, int size, const how *h, sim *s,
                    const double *weight)
{
    int ranks = 0;
    for (int k = 0; k < size; k++) {
        ranks += present(n, k, i);
    }
    mu_tensor *g = mu_parameter_grad(mu_module_get_parameter(m, shapes[i].name));
    CHECK((g != NULL) == (ranks > 0), "step %d: %s", n, shapes[i].name);
    if (g == NULL || ranks == 0) {
        return;
    }
    float got[MOST];
    CHECK(mu_tensor_read(g, got, elements(i)) == MU_OK, "read");
    int r = h->rank < shapes[i].columns ? h->rank : shapes[i].columns;
    bool compressed = shapes[i].rows > 0 && (shapes[i].rows + shapes[i].columns) * r * 2 < elements(i);
    int64_t kept = -1;
    const float *residual = mu_powersgd_residual(ps, shapes[i].name, &kept);
    CHECK((residual != NULL) == compressed && kept == (compressed ? elements(i) : 0), "residual of %s", shapes[i].name);
    if (!compressed) {
        for (int j = 0; j < elements(i); j++) {
            float sum = 0, total = 0;
            for (int k = 0; k < size; k++) {
                float x = present(n, k, i) ? entry(n, k, i, j) : 0.0F;
                sum += h->weighted ? x * (float)(3 + k) : x;
                total += h->weighted ? (float)(3 + k) : 1.0F;
            }
            float want = h->weighted ? sum * (1.0F / total) : sum / total;
            CHECK(got[j] == want, "step %d: %s[%d] is %.9g, not %.9g", n, shapes[i].name, j, (double)got[j], (double)want);
        }
        return;
    }
    double off = 0, norm = 0, left = 0;
    sim_step(s, i, n, size, r, weight);
    for (int j = 0; j < elements(i) && residual != NULL; j++) {
        off += pow((double)got[j] - s->out[j], 2);
        norm += pow(s->out[j], 2);
        left += pow((double)residual[j] - s->residual[me][j], 2);
    }
    CHECK(off <= 1e-8 * norm && left <= 1e-8 * norm, "step %d: %s is off by %g, its residual by %g", n, shapes[i].name,
          sqrt(off / norm), sqrt(left / norm));
}

static void defined(mu_group *g, int rank, int size, void *arg)
{
    const how *h = arg;
    mu_context *c = g->context;
    mu_module *m = model(c);
    int drawn = 0, compressed = 0;
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = h->bytes, .first_bucket_bytes = h->bytes,
                                                    .absent = MU_ABSENT_QUIET});
    mu_powersgd *ps = mu_powersgd_new(d, &(mu_powersgd_options){.rank = h->rank, .plain_reductions = -1,
                                                                .q_init = first_q, .q_user = &drawn});
    mu_tape *t = mu_tape_new(c, NULL);
    sim *sims = calloc(PARAMS, sizeof(*sims));
    double weight[RANKS], total = 0;
    for (int k = 0; k < size; k++) {
        weight[k] = h->weighted ? 3 + k : 1;
        total += weight[k];
    }
    for (int k = 0; k < size; k++) {
        weight[k] /= total;
    }
    for (int n = 0; n < 12; n++) {
        mu_tape_reset(t);
        if (h->give_up && n % 3 == 1) {
            CHECK(mu_ddp_abandon(d, "test") == MU_SKIPPED, "%s", mu_context_message(c));
        }
        mu_tensor *loss = loss_of(t, m, n, rank);
        mu_status s = h->weighted ? mu_ddp_backward_weighted(d, t, loss, 3 + rank) : mu_ddp_backward(d, t, loss);
        CHECK(s == MU_OK, "step %d: %s", n, mu_context_message(c));
        check_replicas(g, m, "PowerSGD");
        for (int i = 0; i < PARAMS; i++) {
            compare(m, ps, i, n, rank, size, h, &sims[i], weight);
        }
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero_grad");
        compressed += (int)mu_powersgd_get_stats(ps).compressed;
        if (n % 4 == 2) { /* buckets cut anew without a parameter, and with it */
            int64_t count;
            CHECK(mu_module_freeze(m, "w", &count) == MU_OK && count == 1 && mu_ddp_check(d) == MU_OK, "freeze");
            CHECK(mu_module_unfreeze(m, "w", &count) == MU_OK && count == 1, "unfreeze");
        }
    }
    CHECK(mu_powersgd_get_stats(ps).reductions == 12, "reductions");
    CHECK(drawn == 2 && compressed >= 8, "%d drawn, %d compressed", drawn, compressed);
    free(sims);
}

static void definition(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        for (int v = 0; v < 8; v++) {
            how h = {.rank = 1 + v % 2, .weighted = (v & 2) != 0, .give_up = (v & 4) != 0, .bytes = v % 2 ? 1 : 1 << 20};
            assert_int_equal(run_threads(size, defined, &h, NULL, true), 0);
            if (size > 1 && v < 4) {
                assert_int_equal(run_processes(size, defined, &h, NULL, true), 0);
            }
        }
    }
}

/* With all columns nothing is left out; the first reductions are plain. */
static void whole(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    mu_module *m = model(c), *other = model(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.absent = MU_ABSENT_QUIET});
    mu_ddp *e = mu_ddp_wrap(other, g, &(mu_ddp_options){.name = "E", .absent = MU_ABSENT_QUIET});
    mu_powersgd *ps = mu_powersgd_new(d, &(mu_powersgd_options){.rank = 50, .min_compression_rate = 0.001,
                                                                .plain_reductions = 4, .seed = 5,
                                                                .no_warm_start = arg != NULL, .epsilon = 0});
    mu_tape *t = mu_tape_new(c, NULL);
    int compressed = 0;
    for (int n = 0; n < 10; n++) {
        mu_tape_reset(t);
        CHECK(mu_ddp_backward(d, t, loss_of(t, m, n, rank)) == MU_OK, "%s", mu_context_message(c));
        mu_tape_reset(t);
        CHECK(mu_ddp_backward(e, t, loss_of(t, other, n, rank)) == MU_OK, "%s", mu_context_message(c));
        check_replicas(g, m, "full rank");
        check_oracle(m, other, n < 4 ? 0 : 2e-5, "full rank");
        mu_powersgd_stats s = mu_powersgd_get_stats(ps);
        CHECK(s.reductions == (uint64_t)n + 1 && (n >= 4 || s.compressed == 0), "%d compressed", (int)s.compressed);
        compressed += (int)s.compressed;
        CHECK(mu_module_zero_grad(m) == MU_OK && mu_module_zero_grad(other) == MU_OK, "zero_grad");
    }
    CHECK(compressed > 6, "%d compressed", compressed);
    (void)size;
}

static void full_rank(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, whole, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, whole, "drawn anew", NULL, true), 0);
    }
    assert_int_equal(run_processes(2, whole, NULL, NULL, true), 0);
}

/* Convolution weights as the kernels have them are compressed as the matrices they are: with all columns nothing is lost,
 * biases are the same to the bit. */
static int in_own_order; /* parameters that were not row-major, on all ranks */

static mu_module *convolutions(mu_context *c)
{
    mu_module *m = mu_module_new(c, "Convolutions", NULL);
    const mu_conv_options o = {.padding = 1};
    CHECK(mu_module_add(m, "first", mu_conv2d_layer(c, 3, 32, 3, &o)) == MU_OK, "add");
    CHECK(mu_module_add(m, "second", mu_conv2d_layer(c, 32, 32, 3, &o)) == MU_OK, "add");
    CHECK(mu_module_add(m, "third", mu_conv2d_layer(c, 32, 5, 1, &o)) == MU_OK, "add");
    return m;
}

static void convolve(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    enum { N = 2 * 3 * 8 * 8 };
    bool all = arg != NULL;
    mu_context *c = g->context;
    mu_module *m = convolutions(c), *other = convolutions(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL), *e = mu_ddp_wrap(other, g, &(mu_ddp_options){.name = "E"});
    snapshot values = snap(m);
    for (int64_t i = 0; i < values.param_count; i++) {
        mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(other, values.names[i]));
        CHECK(mu_tensor_write(v, values.values + values.start[i], values.start[i + 1] - values.start[i]) == MU_OK, "write");
    }
    mu_powersgd *ps = mu_powersgd_new(d, &(mu_powersgd_options){.plain_reductions = -1, .rank = all ? 99 : 1,
                                                                .min_compression_rate = all ? 0.001 : 0});
    mu_tape *t = mu_tape_new(c, NULL);
    for (int n = 0; n < 3; n++) {
        float x[N];
        for (int i = 0; i < N; i++) {
            x[i] = (float)(mix((uint64_t)(i + N * (n * 10 + rank))) % 1000) / 500.0F - 1.0F;
        }
        for (int k = 0; k < 2; k++) {
            mu_tape_reset(t);
            mu_tensor *y = mu_forward(t, k ? other : m, mu_tensor_from(t, MU_DIMS(2, 3, 8, 8), x));
            CHECK(mu_ddp_backward(k ? e : d, t, mu_mean(t, mu_mul(t, y, y))) == MU_OK, "%s", mu_context_message(c));
        }
        check_replicas(g, m, "convolutions");
        snapshot a = snap(m), b = snap(other);
        for (int64_t i = 0; i < a.param_count; i++) {
            mu_parameter *p = mu_module_get_parameter(m, a.names[i]);
            size_t bytes = (size_t)(a.start[i + 1] - a.start[i]) * sizeof(float);
            bool equal = memcmp(a.grads + a.start[i], b.grads + b.start[i], bytes) == 0;
            bool plain = mui_tensor_is_plain(&p->grad_view), matrix = a.start[i + 1] - a.start[i] > 100;
            CHECK((mu_powersgd_residual(ps, a.names[i], NULL) != NULL) == matrix, "%s", a.names[i]);
            CHECK(equal == !matrix, "%s: equal %d, plain %d", a.names[i], (int)equal, (int)plain);
            __atomic_fetch_add(&in_own_order, !plain, __ATOMIC_RELAXED);
        }
        if (all) {
            check_oracle(m, other, 2e-5, "all columns");
        }
        snap_free(&a);
        snap_free(&b);
        CHECK(mu_module_zero_grad(m) == MU_OK && mu_module_zero_grad(other) == MU_OK, "zero_grad");
    }
    snap_free(&values);
}

static void stored_order(void **state)
{
    (void)state;
    in_own_order = 0;
    assert_int_equal(run_threads(2, convolve, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, convolve, "all columns", NULL, true), 0);
    assert_int_equal(run_processes(2, convolve, "all columns", NULL, true), 0);
    printf("%d parameters were in an order of the kernels'\n", in_own_order);
}

/* Gradients of zeros, of one direction only, and not finite ones: later steps are as good as ever. */
static void odd_values(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    mu_module *m = mu_module_new(c, "One", NULL);
    mu_module_parameter(m, "w", MU_DIMS(20, 20), (mu_init){MU_INIT_NORMAL, 1.0F});
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_powersgd *ps = mu_powersgd_new(d, &(mu_powersgd_options){.rank = 3, .plain_reductions = -1,
                                                                .epsilon = arg != NULL ? 1e-8 : 0});
    mu_tape *t = mu_tape_new(c, NULL);
    for (int n = 0; n < 8; n++) {
        float x[400], got[400];
        for (int j = 0; j < 400; j++) {
            float one = (float)(j / 20 + 1) * (float)(j % 20 - 7) / 100.0F * (float)(rank + 1);
            x[j] = n == 1 || n == 4 ? 0.0F : one;
        }
        x[5] = n == 4 && rank == 0 ? INFINITY : x[5];
        mu_tape_reset(t);
        mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(m, "w"));
        CHECK(mu_ddp_backward(d, t, mu_sum(t, mu_mul(t, w, mu_tensor_from(t, MU_DIMS(20, 20), x)))) == MU_OK, "%s",
              mu_context_message(c));
        CHECK(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "w")), got, 400) == MU_OK, "read");
        float scale = n == 1 ? 0 : (float)(size + 1) / 2, worst = 0;
        for (int j = 0; j < 400; j++) {
            float want = (float)(j / 20 + 1) * (float)(j % 20 - 7) / 100.0F * scale, off = fabsf(got[j] - want);
            worst = off > worst || isnan(off) ? off : worst;
        }
        CHECK((n == 4) == isnan(worst) || (n == 4 && isinf(worst)), "step %d: off by %g", n, (double)worst);
        CHECK(n == 4 || worst < 1e-4F, "step %d: off by %g", n, (double)worst);
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero_grad");
    }
    mu_ddp_free(d);
    mu_powersgd_free(ps);
}

static void odd(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, odd_values, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, odd_values, "epsilon", NULL, true), 0);
    }
}

/* The last rank runs out of memory at its k-th allocation from the second step on. */
static int met[2]; /* peers that were told of the hook; runs in which all was well */

static void runs_out(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    mu_module *m = model(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.absent = MU_ABSENT_QUIET, .bucket_bytes = 600});
    CHECK(mu_powersgd_new(d, &(mu_powersgd_options){.plain_reductions = 1}) != NULL, "set");
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, loss_of(t, m, 0, rank)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_module_zero_grad(m) == MU_OK, "zero_grad");
    mu_tape_reset(t);
    mu_tensor *loss = loss_of(t, m, 0, rank);
    if (rank == size - 1) {
        c->fail_after = *(int *)arg;
    }
    mu_status s = mu_ddp_backward(d, t, loss);
    c->fail_after = -1;
    if (s == MU_OK) {
        __atomic_fetch_add(&met[1], 1, __ATOMIC_RELAXED);
    } else if (rank == size - 1) {
        CHECK(s == MU_ERR_NOMEM, "%s: %s", mu_status_name(s), mu_context_message(c));
    } else {
        CHECK(s == MU_SKIPPED || s == MU_ERR_PEER, "%s: %s", mu_status_name(s), mu_context_message(c));
        if (strstr(mu_context_message(c), "hook `PowerSGD(rank 1") != NULL) {
            __atomic_fetch_add(&met[0], 1, __ATOMIC_RELAXED);
        }
    }
    mu_context_clear(c);
}

static void failing(void **state)
{
    (void)state;
    met[0] = met[1] = 0;
    for (int k = 0; k < 60; k++) {
        assert_int_equal(run_threads(2, runs_out, &k, NULL, false), 0);
    }
    assert_true(met[0] >= 5 && met[1] >= 2);
}

static void differ(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    mu_module *m = model(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_powersgd_options o = {.rank = 1 + (arg == NULL ? rank : 0), .seed = arg != NULL ? (uint64_t)rank : 0};
    CHECK(mu_powersgd_new(d, &o) != NULL, "set");
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, loss_of(t, m, 0, rank)) == MU_ERR_COMM, "status");
    CHECK(strstr(mu_context_message(c), "PowerSGD(rank 1") != NULL, "%s", mu_context_message(c));
    mu_context_clear(c);
}

static void other_options(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, differ, NULL, NULL, false), 0);
    assert_int_equal(run_threads(2, differ, "seed", NULL, false), 0);
}

static void arguments(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_ddp *d = mu_ddp_wrap(model(c), g, NULL);
    CHECK(mu_powersgd_new(NULL, NULL) == NULL && mu_ddp_set_bf16(NULL) == MU_ERR_ARG, "no ddp");
    const mu_powersgd_options bad[] = {{.rank = -1}, {.min_compression_rate = -1.0}, {.epsilon = NAN}};
    for (int i = 0; i < 3; i++) {
        CHECK(mu_powersgd_new(d, &bad[i]) == NULL && mu_context_status(c) == MU_ERR_ARG, "options %d", i);
        mu_context_clear(c);
    }
    mu_powersgd *ps = mu_powersgd_new(d, NULL);
    int64_t n = 7;
    CHECK(ps != NULL && mu_powersgd_residual(ps, "w", &n) == NULL && n == 0, "nothing yet");
    CHECK(mu_powersgd_residual(NULL, "w", NULL) == NULL && mu_powersgd_residual(ps, NULL, NULL) == NULL, "NULL");
    CHECK(mu_powersgd_get_stats(NULL).reductions == 0, "no state");
    mu_powersgd_free(NULL);
    CHECK(mu_ddp_set_hook(d, NULL, NULL, NULL) == MU_OK, "reset");
    mu_powersgd_free(ps);
}

static void bad_arguments(void **state)
{
    (void)state;
    assert_int_equal(run_threads(1, arguments, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(definition), cmocka_unit_test(full_rank),     cmocka_unit_test(odd),
        cmocka_unit_test(stored_order), cmocka_unit_test(failing),    cmocka_unit_test(other_options), cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
