/* Synchronised batch norm against one process's batch norm on all ranks' samples: outputs, gradients, running statistics,
 * training; uneven and empty batches; ranks that fail or go elsewhere. */
#include "rig.h"

enum { SIDE = 4, CHANNELS = 3, CLASSES = 4, STEPS = 6, MOST = 9 };

typedef struct shape_of_test {
    const char *name;
    bool images, relu_fused, frozen, cumulative, empty, plain_mean;
} shape_of_test;

static int samples_of(const shape_of_test *s, int step, int rank)
{
    return s->plain_mean ? 3 : s->empty && (step + rank) % 3 == 1 ? 0 : 4 + (step * 5 + rank * 3) % (MOST - 3);
}

/* conv (or linear), norm, relu, linear over a pool (or none), norm. */
static mu_module *network(mu_context *c, const shape_of_test *s)
{
    mu_module *net = mu_sequential(c);
    mu_batch_norm_options o = {.momentum = s->cumulative ? -1.0F : 0.2F, .relu = s->relu_fused};
    mu_status ok = MU_OK;
    if (s->images) {
        ok = ok == MU_OK ? mu_module_add(net, "first", mu_conv2d_layer(c, CHANNELS, 5, 3, &(mu_conv_options){.padding = 1})) : ok;
    } else {
        ok = ok == MU_OK ? mu_module_add(net, "first", mu_linear(c, CHANNELS, 5, NULL)) : ok;
    }
    ok = ok == MU_OK ? mu_module_add(net, "norm", mu_batch_norm_layer(c, 5, &o)) : ok;
    ok = ok == MU_OK ? mu_module_add(net, "relu", mu_relu_layer(c)) : ok;
    if (s->images) {
        ok = ok == MU_OK ? mu_module_add(net, "pool", mu_global_avg_pool2d_layer(c)) : ok;
        ok = ok == MU_OK ? mu_module_add(net, "flatten", mu_flatten_layer(c)) : ok;
    }
    ok = ok == MU_OK ? mu_module_add(net, "fc", mu_linear(c, 5, CLASSES, NULL)) : ok;
    ok = ok == MU_OK ? mu_module_add(net, "last", mu_batch_norm_layer(c, CLASSES, NULL)) : ok;
    CHECK(ok == MU_OK, "network: %s", mu_context_message(c));
    if (s->frozen) {
        CHECK(mu_module_freeze(net, "norm.*", NULL) == MU_OK, "freeze");
    }
    return net;
}

static int64_t values(const shape_of_test *s)
{
    return s->images ? CHANNELS * SIDE * SIDE : CHANNELS;
}

/* Samples of one rank and step, from numbers that depend on nothing else; returns how many. */
static int draw(const shape_of_test *s, int step, int rank, float *x, float *y)
{
    int n = samples_of(s, step, rank);
    for (int i = 0; i < n; i++) {
        uint64_t key = (uint64_t)(step * 1000 + rank * 50 + i) * 977 + 1;
        for (int64_t k = 0; k < values(s); k++) {
            x[i * values(s) + k] = (float)(mix(key + (uint64_t)k) % 2001) / 500.0F - 1.0F;
        }
        for (int k = 0; k < CLASSES; k++) {
            y[i * CLASSES + k] = (float)(mix(key + 900 + (uint64_t)k) % 2001) / 1000.0F;
        }
    }
    return n;
}

static mu_tensor *loss_of(mu_tape *t, mu_module *net, const shape_of_test *s, int n, const float *x, const float *y)
{
    mu_tensor *in = mu_tensor_from(t, s->images ? MU_DIMS(n, CHANNELS, SIDE, SIDE) : MU_DIMS(n, CHANNELS), x);
    return mu_mse_loss(t, mu_forward(t, net, in), mu_tensor_from(t, MU_DIMS(n, CLASSES), y));
}

static void check_buffer(mu_module *m, mu_module *oracle, const char *name, const char *what)
{
    mu_tensor *a = mu_module_get_buffer(m, name), *b = mu_module_get_buffer(oracle, name);
    float x[16], y[16];
    int64_t n = mu_tensor_elements(a);
    CHECK(mu_tensor_read(a, x, n) == MU_OK && mu_tensor_read(b, y, n) == MU_OK, "%s: read", name);
    for (int64_t i = 0; i < n; i++) {
        CHECK(fabsf(x[i] - y[i]) <= 2e-6F * (1 + fabsf(y[i])), "%s: %s[%lld] is %g, the oracle's %g", what, name,
              (long long)i, (double)x[i], (double)y[i]);
    }
}

static void check_buffers(mu_group *g, mu_module *m, mu_module *oracle, const char *what)
{
    static const char *const names[] = {"norm.running_mean", "norm.running_var", "last.running_mean", "last.running_var"};
    for (int i = 0; i < 4; i++) {
        check_buffer(m, oracle, names[i], what);
        float own[16] = {0}, all[16 * 8];
        CHECK(mu_tensor_read(mu_module_get_buffer(m, names[i]), own, mu_tensor_elements(mu_module_get_buffer(m, names[i]))) ==
                  MU_OK && mu_all_gather(g, own, all, sizeof(own)) == MU_OK, "gather");
        for (int r = 1; r < mu_group_size(g); r++) {
            CHECK(memcmp(all, all + 16 * r, sizeof(own)) == 0, "%s: %s of rank %d differs", what, names[i], r);
        }
    }
}

static void as_one_process(mu_group *g, int rank, int size, void *arg)
{
    const shape_of_test *s = arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *net = network(c, s), *one = network(oc, s);
    int64_t converted = 0;
    CHECK(mu_sync_batch_norm_convert(net, g, &converted) == MU_OK && converted == 2, "converted %lld", (long long)converted);
    /* The mean of nothing is not a number, and with weight 0 nobody's concern. */
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.nonfinite = s->empty ? MU_NONFINITE_ERROR : MU_NONFINITE_KEEP});
    mu_optimizer *sgd = mu_sgd(net, 0.05F, NULL), *sgd1 = mu_sgd(one, 0.05F, NULL);
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    float x[8 * MOST * CHANNELS * SIDE * SIDE], y[8 * MOST * CLASSES];
    for (int step = 0; step < STEPS; step++) {
        mu_tape_reset(t);
        mu_tape_reset(ot);
        int n = draw(s, step, rank, x, y);
        mu_tensor *loss = loss_of(t, net, s, n, x, y);
        CHECK(loss != NULL, "%s, step %d: %s", s->name, step, mu_context_message(c));
        mu_status r = s->plain_mean ? mu_ddp_backward(d, t, loss) : mu_ddp_backward_weighted(d, t, loss, n);
        CHECK(r == MU_OK, "%s, step %d: %s", s->name, step, mu_context_message(c));
        int total = 0;
        for (int q = 0; q < size; q++) {
            total += draw(s, step, q, x + total * values(s), y + total * CLASSES);
        }
        CHECK(mu_backward(ot, loss_of(ot, one, s, total, x, y)) == MU_OK, "oracle: %s", mu_context_message(oc));
        check_close(net, one, 3e-5, 0.5, s->name); /* a bias before a norm has no gradient but rounding */
        check_replicas(g, net, s->name);
        check_buffers(g, net, one, s->name);
        CHECK(mu_optimizer_step(sgd) == MU_OK && mu_optimizer_step(sgd1) == MU_OK, "step");
    }
    CHECK(mu_ddp_check(d) == MU_OK, "check: %s", mu_context_message(c));

    /* Evaluation is no collective: one rank alone does it. */
    if (rank == size - 1) {
        mu_module_train(net, false);
        mu_tape_reset(t);
        (void)draw(s, 0, 0, x, y);
        CHECK(loss_of(t, net, s, 1, x, y) != NULL, "evaluation: %s", mu_context_message(c));
        mu_module_train(net, true);
    }
    char text[400];
    mu_module_print(net, text, sizeof(text));
    CHECK(strstr(text, "SyncBatchNorm(5") != NULL, "printed as %s", text);
    CHECK(mu_sync_batch_norm_convert(net, NULL, NULL) == MU_OK, "back");
    mu_module_print(net, text, sizeof(text));
    CHECK(strstr(text, "Sync") == NULL && strstr(text, "BatchNorm2d(5") != NULL, "printed as %s", text);
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

static const mu_group_options patient = {.timeout_seconds = 60, .arena_bytes = 1 << 22};

static void equals_one_process(void **state)
{
    (void)state;
    static shape_of_test tests[] = {
        {.name = "images, plain", .images = true, .relu_fused = false, .plain_mean = false},
        {.name = "images, relu in one pass", .images = true, .relu_fused = true},
        {.name = "rows"},
        {.name = "plain mean", .images = true, .plain_mean = true},
        {.name = "frozen weights", .images = true, .frozen = true},
        {.name = "cumulative", .cumulative = true},
        {.name = "empty batches", .images = true, .empty = true},
        {.name = "empty rows", .empty = true},
    };
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        for (int size = 1; size <= 4; size++) {
            if (tests[i].empty && size < 2) {
                continue; /* a batch of nobody */
            }
            assert_int_equal(run_threads(size, as_one_process, &tests[i], &patient, true), 0);
        }
        assert_int_equal(run_processes(2, as_one_process, &tests[i], &patient, true), 0);
        assert_int_equal(run_processes(3, as_one_process, &tests[i], &patient, true), 0);
    }
}

/* -- ranks that cannot go on ------------------------------------------------------------------------------------- */
typedef struct failure {
    int place; /* 0: before the first norm, 1: between them, 2: after the last, 3: in backward */
    bool says; /* calls mu_ddp_abandon; else brings its error to mu_ddp_backward */
    int other; /* where rank 2 fails in the same step if it gets there; -1: nowhere */
} failure;

/* Rank 1 fails at that place in one step; the steps after it are as if nothing had been. */
static void one_fails(mu_group *g, int rank, int size, void *arg)
{
    const failure *f = arg;
    static const shape_of_test shape = {.name = "fails", .plain_mean = true};
    mu_context *c = g->context;
    mu_module *net = network(c, &shape);
    CHECK(mu_sync_batch_norm_convert(net, g, NULL) == MU_OK, "convert");
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = 1, .first_bucket_bytes = 1});
    mu_tape *t = mu_tape_new(c, NULL);
    float x[MOST * CHANNELS], y[MOST * CLASSES];
    for (int step = 0; step < 5; step++) {
        bool bad = step == (f->place == 3 || f->other == 3 ? 0 : 2), victim = bad && rank == 1;
        int place = !bad ? -1 : rank == 1 ? f->place : rank == 2 ? f->other : -1;
        mu_tape_reset(t);
        int n = draw(&shape, step, rank, x, y);
        mu_tensor *h = mu_tensor_from(t, MU_DIMS(n, CHANNELS), x);
        static const char *const order[] = {"first", "norm", "relu", "fc", "last"};
        for (int k = 0; k < 5; k++) {
            if (h != NULL && ((place == 0 && k == 0) || (place == 1 && k == 3))) {
                h = mu_linear_op(t, h, h, NULL); /* shapes do not fit: an error of this rank */
                break;
            }
            h = mu_forward(t, mu_module_get(net, order[k]), h);
        }
        if (h != NULL && place == 2) {
            h = mu_linear_op(t, h, mu_tensor_zeros(t, MU_DIMS(2, 99)), NULL);
        }
        mu_tensor *loss = h != NULL ? mu_mse_loss(t, h, mu_tensor_from(t, MU_DIMS(n, CLASSES), y)) : NULL;
        bool failed = mu_context_status(c) < 0;
        if (loss != NULL && place == 3) {
            failed = true;
            c->fail_after = 0; /* the first allocation of the first backward */
            c->fail_forever = true;
        }
        mu_status s;
        if (victim && f->says) {
            failed = false;
            mu_context_clear(c);
            s = mu_ddp_abandon(d, "the test says so");
        } else {
            s = mu_ddp_backward(d, t, loss);
        }
        c->fail_after = -1;
        c->fail_forever = false;
        if (!bad) {
            CHECK(s == MU_OK && mu_context_status(c) == MU_OK, "place %d, step %d: %d %s", f->place, step, (int)s,
                  mu_context_message(c));
        } else if (failed) {
            CHECK(s < 0 && mu_context_status(c) == s, "place %d: the failing rank got %d", f->place, (int)s);
            mu_context_clear(c);
        } else {
            CHECK(s == MU_SKIPPED && mu_context_status(c) == MU_OK, "place %d, rank %d: %d %s", f->place, rank, (int)s,
                  mu_context_message(c));
        }
        check_replicas(g, net, "after a failure");
        toy_optimizer_step(net, 0.05F);
    }
    (void)size;
}

static void a_rank_that_fails_is_skipped_over(void **state)
{
    (void)state;
    for (int place = 0; place < 4; place++) {
        for (int says = 0; says < 2 && !(says && place == 3); says++) {
            failure f = {place, says, -1};
            for (int size = 2; size <= 4; size++) {
                assert_int_equal(run_threads(size, one_fails, &f, &patient, true), 0);
            }
            assert_int_equal(run_processes(3, one_fails, &f, &patient, true), 0);
        }
    }
}

static void two_ranks_that_fail_are_skipped_over(void **state)
{
    (void)state;
    for (int place = 0; place < 4; place++) {
        for (int other = 0; other < 4; other++) {
            failure f = {place, place == 1, other};
            for (int size = 3; size <= 4; size++) {
                assert_int_equal(run_threads(size, one_fails, &f, &patient, true), 0);
            }
            if (place != other) {
                assert_int_equal(run_processes(4, one_fails, &f, &patient, true), 0);
            }
        }
    }
}

typedef struct shortage {
    int64_t at;
    bool first;     /* in the first step, when reducers and groups still get their memory */
    int outcome[3]; /* of rank 1: none, skipped by all, group ended */
} shortage;

/* Rank 1 runs out of memory at one allocation of a whole step, forward and backward. */
static void out_of_memory(mu_group *g, int rank, int size, void *arg)
{
    shortage *sh = arg;
    static const shape_of_test shape = {.name = "out of memory", .images = true, .plain_mean = true};
    mu_context *c = g->context;
    mu_module *net = network(c, &shape);
    CHECK(mu_sync_batch_norm_convert(net, g, NULL) == MU_OK, "convert");
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = 100, .first_bucket_bytes = 100});
    float x[MOST * CHANNELS * SIDE * SIDE], y[MOST * CLASSES];
    for (int step = sh->first ? 1 : 0; step < 3; step++) {
        mu_tape *t = mu_tape_new(c, NULL); /* has to get all its memory again */
        int n = draw(&shape, step, rank, x, y);
        c->fail_after = step == 1 && rank == 1 ? sh->at : -1;
        mu_status s = mu_ddp_backward(d, t, loss_of(t, net, &shape, n, x, y));
        bool ran_out = step == 1 && rank == 1 && c->fail_after < 0;
        c->fail_after = -1;
        mu_context_clear(c);
        int64_t all[8], own = ran_out ? 1 : 0;
        if (mu_all_gather(g, &own, all, sizeof(own)) != MU_OK) {
            /* The group's own memory, or that of the bucket plan made after the first reduction, which was right. */
            CHECK(step == 1 && (rank == 1 ? s == MU_ERR_NOMEM : s == MU_ERR_PEER || (sh->first && s == MU_OK)),
                  "at %d, rank %d: %d %s", (int)sh->at, rank, (int)s, mu_context_message(c));
            if (rank == 1) {
                sh->outcome[2]++;
            }
            mu_context_clear(c);
            mu_tape_free(t);
            return;
        }
        CHECK(s == (all[1] == 0 ? MU_OK : rank == 1 ? MU_ERR_NOMEM : MU_SKIPPED), "at %d, step %d, rank %d: %d",
              (int)sh->at, step, rank, (int)s);
        if (step == 1 && rank == 1) {
            sh->outcome[ran_out]++;
        }
        check_replicas(g, net, "after a shortage");
        toy_optimizer_step(net, 0.05F);
        mu_tape_free(t);
    }
    (void)size;
}

static void out_of_memory_in_a_step(void **state)
{
    (void)state;
    for (int first = 0; first < 2; first++) {
        shortage sh = {.first = first};
        for (; sh.outcome[0] == 0; sh.at++) {
            assert_int_equal(run_threads(3, out_of_memory, &sh, &patient, false), 0);
            assert_true(sh.at < 1000);
        }
        printf("out of memory at %d places of %s step: %d skipped by all, %d groups ended\n", (int)sh.at - 1,
               first ? "the first" : "a later", sh.outcome[1], sh.outcome[2]);
        assert_true(sh.outcome[1] > 0);
    }
}

/* Rank 1 has no batch and goes straight to the reduction, or has one value in all. */
static void elsewhere(mu_group *g, int rank, int size, void *arg)
{
    static const shape_of_test shape = {.name = "elsewhere", .plain_mean = true};
    (void)arg;
    (void)size;
    mu_context *c = g->context;
    mu_module *net = network(c, &shape);
    CHECK(mu_sync_batch_norm_convert(net, g, NULL) == MU_OK, "convert");
    mu_ddp *d = mu_ddp_wrap(net, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    float x[MOST * CHANNELS], y[MOST * CLASSES];
    int n = draw(&shape, 0, rank, x, y);
    mu_status s = mu_ddp_backward(d, t, rank == 1 ? NULL : loss_of(t, net, &shape, n, x, y));
    CHECK(s == MU_ERR_COMM && strstr(mu_context_message(c), "synchronised batch norm `norm`") != NULL &&
          strstr(mu_context_message(c), "reduction 1") != NULL && strstr(mu_context_message(c), "empty batch") != NULL,
          "%d %s", (int)s, mu_context_message(c));
}

static void one_value(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    mu_context *c = g->context;
    mu_tape *t = mu_tape_new(c, NULL);
    mu_tensor *x = mu_tensor_zeros(t, MU_DIMS(rank == 0 ? 1 : 0, CHANNELS));
    CHECK(mu_sync_batch_norm(t, x, NULL, NULL, NULL, NULL, g, NULL) == NULL && mu_context_status(c) == MU_ERR_SHAPE,
          "%s", mu_context_message(c));
}

static void contradictions_are_named(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, elsewhere, NULL, &patient, false), 0);
    assert_int_equal(run_processes(3, elsewhere, NULL, &patient, false), 0);
    assert_int_equal(run_threads(3, one_value, NULL, &patient, false), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(equals_one_process),
                                       cmocka_unit_test(a_rank_that_fails_is_skipped_over),
                                       cmocka_unit_test(two_ranks_that_fail_are_skipped_over),
                                       cmocka_unit_test(out_of_memory_in_a_step),
                                       cmocka_unit_test(contradictions_are_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
