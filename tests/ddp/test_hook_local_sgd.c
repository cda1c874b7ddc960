/* Local SGD: the steps of all ranks recomputed; when replicas are equal, and when they are not; ranks that do not agree. */
#include "rig.h"

enum { STEPS = 14, VALUES = RIG_MOST };
static const float LR = 0.2F;

static const char *reads(int n, int rank)
{
    static const char *const sets[] = {"a b c head.w head.v", "head.v c a", "b d", "a b c", ""};
    return n == 0 ? sets[0] : sets[mix((uint64_t)(n * 7 + rank)) % 5];
}

typedef struct how {
    int64_t start, period;
    bool weighted, give_up;
} how;

/* Sets a model's values, in the order of a snapshot. */
static void put(mu_module *m, const float *values)
{
    snapshot s = snap(m);
    for (int64_t i = 0; i < s.param_count; i++) {
        mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(m, s.names[i]));
        CHECK(mu_tensor_write(v, values + s.start[i], s.start[i + 1] - s.start[i]) == MU_OK, "write");
    }
    snap_free(&s);
}

static int samples_of(int n, int rank)
{
    return (n + rank) % 4 == 3 && rank > 0 ? 0 : 3 + rank;
}

/* What this rank has after step n, worked out on `alone` with nothing but an all-gather. */
static void oracle_step(mu_group *g, mu_module *alone, int n, int rank, int size, const how *h)
{
    mu_tape *t = mu_tape_new(g->context, NULL);
    mu_tensor *loss = terms(t, alone, reads(n, rank), (uint64_t)(n * 100 + rank));
    CHECK(loss == NULL || mu_backward(t, loss) == MU_OK, "oracle");
    mu_tape_free(t);
    snapshot s = snap(alone);
    size_t count = (size_t)s.count, total = 0;
    float *all = malloc(count * (size_t)size * sizeof(float));
    CHECK(mu_all_gather(g, s.grads, all, count * sizeof(float)) == MU_OK, "gather");
    for (int r = 0; r < size; r++) {
        total += (size_t)samples_of(n, r);
    }
    for (size_t i = 0; i < count; i++) {
        double x = 0;
        for (int r = 0; r < size; r++) {
            double w = h->weighted ? (double)samples_of(n, r) / (double)total : 1.0 / size;
            x += (double)all[(size_t)r * count + i] * w;
        }
        if (n >= h->start) {
            x = h->weighted && samples_of(n, rank) == 0 ? 0 : (double)s.grads[i];
        }
        s.values[i] -= LR * (float)x;
    }
    if (n >= h->start && (n - h->start) % h->period == 0) {
        CHECK(mu_all_gather(g, s.values, all, count * sizeof(float)) == MU_OK, "gather");
        for (size_t i = 0; i < count; i++) {
            double x = 0;
            for (int r = 0; r < size; r++) {
                x += (double)all[(size_t)r * count + i] / size;
            }
            s.values[i] = (float)x;
        }
    }
    put(alone, s.values);
    CHECK(mu_module_zero_grad(alone) == MU_OK, "zero_grad");
    free(all);
    snap_free(&s);
}

static void steps(mu_group *g, int rank, int size, void *arg)
{
    const how *h = arg;
    mu_context *c = g->context;
    mu_module *m = toy(c), *alone = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.absent = MU_ABSENT_QUIET, .bucket_bytes = 1});
    mu_local_sgd *l = mu_local_sgd_new(d, &(mu_local_sgd_options){h->start, h->period});
    mu_optimizer *o = mu_sgd(m, LR, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    snapshot first = snap(m);
    put(alone, first.values);
    snap_free(&first);
    int64_t period = h->period > 0 ? h->period : 4;
    how full = *h;
    full.period = period;
    for (int n = 0; n < STEPS; n++) {
        mu_tape_reset(t);
        if (h->give_up && n % 3 == 2) {
            CHECK(mu_ddp_abandon(d, "test") == MU_SKIPPED, "%s", mu_context_message(c));
        }
        mu_tensor *loss = terms(t, m, reads(n, rank), (uint64_t)(n * 100 + rank));
        mu_status s = h->weighted ? mu_ddp_backward_weighted(d, t, loss, samples_of(n, rank)) : mu_ddp_backward(d, t, loss);
        CHECK(s == MU_OK, "step %d: %s", n, mu_context_message(c));
        CHECK(mu_optimizer_step(o) == MU_OK && mu_module_zero_grad(m) == MU_OK, "%s", mu_context_message(c));
        bool averaged = false;
        CHECK(mu_local_sgd_step(l, n % 2 ? NULL : &averaged) == MU_OK, "%s", mu_context_message(c));
        bool due = n >= h->start && (n - h->start) % period == 0;
        CHECK(n % 2 || averaged == due, "step %d: averaged is %d", n, (int)averaged);
        oracle_step(g, alone, n, rank, size, &full);
        check_oracle(m, alone, 1e-5, "local SGD");
        mu_status equal = mu_ddp_check(d);
        mu_context_clear(c);
        if (n <= h->start || due) {
            CHECK(equal == MU_OK, "replicas differ after step %d", n);
        } else if (size > 1 && period == 4 && (n - h->start) % 4 == 3) {
            CHECK(equal == MU_ERR_COMM, "replicas are equal after step %d", n);
        }
    }
    CHECK(mu_ddp_average_parameters(d) == MU_OK && mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    mu_ddp_free(d);
    mu_local_sgd_free(l);
}

static void definition(void **state)
{
    (void)state;
    const how all[] = {{0, 0, false, false}, {3, 4, false, true}, {2, 1, true, false}, {1, 4, true, true}};
    for (int i = 0; i < 4; i++) {
        how h = all[i];
        for (int size = 1; size <= 3; size++) {
            assert_int_equal(run_threads(size, steps, &h, NULL, true), 0);
        }
        assert_int_equal(run_processes(2 + i % 2, steps, &h, NULL, true), 0);
    }
}

/* Rank 0 forgets to call mu_local_sgd_step: nobody hangs, all are told. */
static void forgets(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "D", .absent = MU_ABSENT_QUIET});
    mu_local_sgd *l = mu_local_sgd_new(d, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b", (uint64_t)rank)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_module_zero_grad(m) == MU_OK, "zero_grad");
    mu_tape_reset(t);
    mu_status s = rank > 0 ? mu_local_sgd_step(l, NULL) : mu_ddp_backward(d, t, terms(t, m, "a b", 3));
    CHECK(s == MU_ERR_COMM, "rank %d: %s", rank, mu_status_name(s));
    CHECK(strstr(mu_context_message(c), "mu_ddp_average_parameters") != NULL, "%s", mu_context_message(c));
    mu_context_clear(c);
    CHECK(mu_ddp_average_parameters(d) == MU_ERR_COMM, "the ddp is broken");
    mu_context_clear(c);
}

/* A rank that leaves with an error: the others' averaging ends with its reason. */
static void leaves(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_ddp *d = mu_ddp_wrap(toy(c), g, NULL);
    if (rank == size - 1) {
        mui_fail(c, MU_ERR_IO, "the disk is full");
        return; /* the context is closed with this error */
    }
    CHECK(mu_ddp_average_parameters(d) == MU_ERR_PEER, "status");
    CHECK(strstr(mu_context_message(c), "the disk is full") != NULL, "%s", mu_context_message(c));
    mu_context_clear(c);
}

static void differ(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    CHECK(mu_local_sgd_new(d, &(mu_local_sgd_options){.period = 2 + rank}) != NULL, "set");
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a", 1)) == MU_ERR_COMM, "status");
    CHECK(strstr(mu_context_message(c), "local SGD(from 0, every 3)") != NULL, "%s", mu_context_message(c));
    mu_context_clear(c);
}

static void disagreeing(void **state)
{
    (void)state;
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, forgets, NULL, NULL, false), 0);
        assert_int_equal(run_processes(size, forgets, NULL, NULL, false), 0);
        assert_int_equal(run_threads(size, leaves, NULL, NULL, false), 0);
        assert_int_equal(run_threads(size, differ, NULL, NULL, false), 0);
    }
}

static void arguments(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_ddp *d = mu_ddp_wrap(toy(c), g, NULL), *e = mu_ddp_wrap(toy(c), g, &(mu_ddp_options){.check_every = 3});
    CHECK(mu_local_sgd_new(NULL, NULL) == NULL && mu_local_sgd_step(NULL, NULL) == MU_ERR_ARG, "NULL");
    CHECK(mu_ddp_average_parameters(NULL) == MU_ERR_ARG, "NULL");
    CHECK(mu_local_sgd_new(e, NULL) == NULL && mu_context_status(c) == MU_ERR_ARG, "check_every");
    mu_context_clear(c);
    CHECK(mu_local_sgd_new(d, &(mu_local_sgd_options){.start = -1}) == NULL, "start");
    mu_context_clear(c);
    mu_local_sgd_free(NULL);
    c->fail_after = 0;
    CHECK(mu_local_sgd_new(d, NULL) == NULL, "no memory");
    c->fail_after = -1;
    mu_context_clear(c);
    CHECK(mu_ddp_average_parameters(d) == MU_OK, "%s", mu_context_message(c));
}

static void bad_arguments(void **state)
{
    (void)state;
    assert_int_equal(run_threads(1, arguments, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(definition),
        cmocka_unit_test(disagreeing),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
