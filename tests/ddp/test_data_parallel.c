/* Data parallelism within a process against the same module alone. */
#include "rig.h"

#include <muster/checkpoint.h>
#include <muster/data_parallel.h>
#include <muster/layers.h>
#include <muster/optim.h>

#include <stdlib.h>
#include <unistd.h>

static mu_context *open_quiet(uint64_t seed)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = seed, .log_level = MU_LOG_QUIET});
    assert_non_null(c);
    return c;
}

static void fine(mu_context *c)
{
    if (mu_context_status(c) != MU_OK) {
        fail_msg("%s", mu_context_message(c));
    }
}

static void close_fine(mu_context *c)
{
    fine(c);
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void expect(mu_context *c, mu_status s, const char *part)
{
    if (mu_context_status(c) != s || strstr(mu_context_message(c), part) == NULL) {
        fail_msg("status %d, \"%s\", not %d and \"%s\"", (int)mu_context_status(c), mu_context_message(c), (int)s, part);
    }
    mu_context_clear(c);
}

static mu_tensor *noise(mu_tape *t, mu_dims dims, uint64_t key)
{
    int64_t n = 1;
    for (int i = 0; i < dims.ndim; i++) {
        n *= dims.dim[i];
    }
    float *x = malloc(((size_t)n + 1) * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)(mix(key * 100000 + (uint64_t)i) % 2001) / 1000.0F - 1.0F;
    }
    mu_tensor *r = mu_tensor_from(t, dims, x);
    free(x);
    return r;
}

static mu_tensor *labels(mu_tape *t, int64_t n, uint64_t key, uint64_t classes)
{
    int64_t y[64];
    for (int64_t i = 0; i < n; i++) {
        y[i] = (int64_t)(mix(key * 777 + (uint64_t)i) % classes);
    }
    return mu_tensor_from_i64(t, MU_DIMS(n), y);
}

/* "mlp" or "cnn"; replicas 0: not wrapped. */
static mu_module *build(mu_context *c, const char *kind, int replicas)
{
    mu_module *m = strcmp(kind, "mlp") == 0 ? mu_mlp(c, 12, (const int64_t[]){9}, 1, 4) : mu_small_cnn(c, 2, 8, 4);
    return replicas == 0 ? m : mu_data_parallel(m, &(mu_data_parallel_options){replicas});
}

static mu_tensor *batch(mu_tape *t, const char *kind, int64_t n, uint64_t key)
{
    return noise(t, strcmp(kind, "mlp") == 0 ? MU_DIMS(n, 12) : MU_DIMS(n, 2, 8, 8), key);
}

static void close_to(const snapshot *a, const snapshot *b, const char *what)
{
    assert_int_equal(a->count, b->count);
    double dv = 0, dg = 0;
    float *d = malloc(2 * (size_t)a->count * sizeof(float));
    for (int64_t i = 0; i < a->count; i++) {
        d[i] = a->values[i] - b->values[i];
        d[a->count + i] = a->grads[i] - b->grads[i];
    }
    dv = length_of(d, a->count) / length_of(b->values, b->count);
    dg = length_of(d + a->count, a->count) / (length_of(b->grads, b->count) + 1e-20);
    free(d);
    if (dv > 2e-6 || dg > 2e-6) {
        fail_msg("%s: values off by %g, gradients by %g", what, dv, dg);
    }
}

static snapshot step_of(mu_module *m, mu_tape *t, const char *kind, int64_t n, uint64_t key)
{
    mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, m, batch(t, kind, n, key)), labels(t, n, key, 4));
    assert_int_equal(mu_backward(t, loss), MU_OK);
    snapshot s = snap(m);
    mu_tape_reset(t);
    return s;
}

static void equals_one(void **state)
{
    (void)state;
    static const char *const kinds[] = {"mlp", "cnn"};
    static const int64_t sizes[] = {8, 10, 2, 1, 7};
    for (int k = 0; k < 2; k++) {
        for (int replicas = 1; replicas <= 4; replicas++) {
            mu_context *c = open_quiet(3);
            mu_module *a = build(c, kinds[k], replicas), *b = build(c, kinds[k], 0);
            mu_optimizer *oa = mu_sgd(a, 0.05F, &(mu_sgd_options){.momentum = 0.9F});
            mu_optimizer *ob = mu_sgd(b, 0.05F, &(mu_sgd_options){.momentum = 0.9F});
            mu_tape *t = mu_tape_new(c, NULL);
            for (uint64_t step = 0; step < 10; step++) {
                int64_t n = sizes[step % 5];
                snapshot x = step_of(a, t, kinds[k], n, step), y = step_of(b, t, kinds[k], n, step);
                char what[64];
                snprintf(what, sizeof(what), "%s, %d replicas, step %d", kinds[k], replicas, (int)step);
                close_to(&x, &y, what);
                snap_free(&x);
                snap_free(&y);
                assert_int_equal(mu_optimizer_step(oa), MU_OK);
                assert_int_equal(mu_optimizer_step(ob), MU_OK);
            }
            close_fine(c);
        }
    }
}

/* Outputs and the input's gradient, empty batches, and a scalar of each replica. */
static mu_tensor *mean_forward(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    return mu_mean(t, x);
}

static void inputs_and_outputs(void **state)
{
    (void)state;
    mu_context *c = open_quiet(4);
    mu_module *a = build(c, "cnn", 3), *b = build(c, "cnn", 0);
    mu_tape *t = mu_tape_new(c, NULL);
    float got[2][5 * 4], dx[2][5 * 128];
    for (int i = 0; i < 2; i++) {
        mu_tensor *x = mu_tensor_require_grad(t, batch(t, "cnn", 5, 9));
        mu_tensor *y = mu_forward(t, i == 0 ? a : b, x);
        assert_int_equal(mu_tensor_read(y, got[i], 20), MU_OK);
        assert_int_equal(mu_backward(t, mu_mean(t, mu_mul(t, y, y))), MU_OK);
        assert_int_equal(mu_tensor_read(mu_tensor_grad(x), dx[i], 5 * 128), MU_OK);
        mu_tape_reset(t);
    }
    for (int i = 0; i < 20; i++) {
        assert_float_equal(got[0][i], got[1][i], 1e-5);
    }
    for (int i = 0; i < 5 * 128; i++) {
        assert_float_equal(dx[0][i], dx[1][i], 1e-6);
    }
    mu_tensor *none = mu_forward(t, a, batch(t, "cnn", 0, 1));
    assert_int_equal(mu_tensor_dim(none, 0), 0);
    assert_int_equal(mu_tensor_dim(none, 1), 4);
    mu_module *mean = mu_module_new(c, "Mean", &(mu_module_options){.forward = mean_forward});
    mean = mu_data_parallel(mean, &(mu_data_parallel_options){2});
    mu_tensor *y = mu_forward(t, mean, mu_tensor_from(t, MU_DIMS(3), (const float[]){1, 3, 7}));
    assert_int_equal(mu_tensor_dims(y).ndim, 1);
    float two[2];
    assert_int_equal(mu_tensor_read(y, two, 2), MU_OK);
    assert_float_equal(two[0], 2, 1e-6);
    assert_float_equal(two[1], 7, 1e-6);
    assert_null(mu_forward(t, mean, mu_tensor_zeros(t, MU_SCALAR)));
    expect(c, MU_ERR_SHAPE, "a scalar has no rows");
    close_fine(c);
}

/* -- layers with state ------------------------------------------------------------------------------------------ */
static void batch_norm(void **state)
{
    (void)state;
    mu_context *c = open_quiet(5);
    mu_module *m = mu_data_parallel(mu_batch_norm_layer(c, 2, NULL), &(mu_data_parallel_options){2});
    mu_tape *t = mu_tape_new(c, NULL);
    /* Parts of 3 and 2 rows. */
    const float x[10] = {1, 10, 2, 20, 6, 60, -4, 0, 8, 2};
    mu_tensor *y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(5, 2), x));
    fine(c);
    float out[10], mean[2], var[2];
    assert_int_equal(mu_tensor_read(y, out, 10), MU_OK);
    assert_float_equal(out[0] + out[2] + out[4], 0, 1e-5); /* each part by itself */
    assert_float_equal(out[6] + out[8], 0, 1e-5);
    assert_int_equal(mu_tensor_read(mu_module_get_buffer(m, "module.running_mean"), mean, 2), MU_OK);
    assert_int_equal(mu_tensor_read(mu_module_get_buffer(m, "module.running_var"), var, 2), MU_OK);
    assert_float_equal(mean[0], 0.1 * 13 / 5, 1e-6); /* the mean of the whole batch */
    assert_float_equal(mean[1], 0.1 * 92 / 5, 1e-5);
    assert_float_equal(var[0], 0.9 + 0.1 * (3 * 7 + 2 * 72) / 5.0, 1e-5); /* unbiased 7 and 72 */
    int64_t batches = 0;
    assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(m, "module.num_batches_tracked"), &batches, 1), MU_OK);
    assert_int_equal(batches, 1);
    mu_tape_reset(t);
    mu_module_train(m, false);
    mu_forward(t, m, mu_tensor_from(t, MU_DIMS(5, 2), x));
    assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(m, "module.num_batches_tracked"), &batches, 1), MU_OK);
    assert_int_equal(batches, 1);
    /* A replica of one row cannot be normalised: the error says which. */
    mu_module_train(m, true);
    assert_null(mu_forward(t, m, mu_tensor_from(t, MU_DIMS(3, 2), x)));
    expect(c, MU_ERR_SHAPE, "replica 1 of 2 (rows 2 to 2): batch_norm in module");
    assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(m, "module.num_batches_tracked"), &batches, 1), MU_OK);
    assert_int_equal(batches, 1);
    close_fine(c);
}

static void drop_once(float *out, uint64_t seed)
{
    mu_context *c = open_quiet(seed);
    mu_module *m = mu_data_parallel(mu_dropout_layer(c, 0.5F), &(mu_data_parallel_options){2});
    mu_tape *t = mu_tape_new(c, NULL);
    float ones[128];
    for (int i = 0; i < 128; i++) {
        ones[i] = 1;
    }
    for (int f = 0; f < 2; f++) {
        mu_tensor *y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 64), ones));
        assert_int_equal(mu_tensor_read(y, out + 128 * f, 128), MU_OK);
    }
    close_fine(c);
}

static void dropout(void **state)
{
    (void)state;
    float a[256], b[256];
    drop_once(a, 1);
    drop_once(b, 1);
    assert_memory_equal(a, b, sizeof(a));
    for (int i = 0; i < 4; i++) { /* two forwards of two replicas */
        for (int k = 0; k < i; k++) {
            assert_memory_not_equal(a + 64 * i, a + 64 * k, 64 * sizeof(float));
        }
    }
    drop_once(b, 2);
    assert_memory_not_equal(a, b, sizeof(a));
}

static void bitwise(void **state)
{
    (void)state;
    float *first = NULL;
    for (int run = 0; run < 5; run++) {
        mu_context *c = open_quiet(6);
        mu_module *m = build(c, "cnn", 3);
        mu_optimizer *o = mu_sgd(m, 0.1F, NULL);
        mu_tape *t = mu_tape_new(c, NULL);
        for (uint64_t step = 0; step < 3; step++) {
            snapshot s = step_of(m, t, "cnn", 8, step);
            snap_free(&s);
            assert_int_equal(mu_optimizer_step(o), MU_OK);
        }
        snapshot s = snap(m);
        if (first == NULL) {
            first = malloc((size_t)s.count * sizeof(float));
            memcpy(first, s.values, (size_t)s.count * sizeof(float));
        }
        assert_memory_equal(first, s.values, (size_t)s.count * sizeof(float));
        snap_free(&s);
        close_fine(c);
    }
    free(first);
}

/* Gradients of the sum of all outputs for these rows of a batch, added to what is there. */
static snapshot sum_of_rows(mu_module *m, mu_tape *t, int64_t first, int64_t rows)
{
    mu_tensor *x = mu_narrow(t, batch(t, "mlp", 7, 1), 0, first, rows);
    assert_int_equal(mu_backward(t, mu_sum(t, mu_forward(t, m, x))), MU_OK);
    snapshot s = snap(m);
    mu_tape_reset(t);
    return s;
}

/* ((g0 + g1) + g2) + g3, bit for bit, from parts that were computed alone; and the same added to a gradient. */
static void sums_keep_the_order(void **state)
{
    (void)state;
    for (int replicas = 2; replicas <= 4; replicas++) {
        mu_context *c = open_quiet(6);
        mu_module *m = build(c, "mlp", replicas), *alone = build(c, "mlp", 0);
        mu_tape *t = mu_tape_new(c, NULL);
        float expected[(12 + 1) * 9 + (9 + 1) * 4];
        int64_t chunk = (7 + replicas - 1) / replicas;
        for (int time = 0; time < 2; time++) {
            snapshot s = sum_of_rows(m, t, 0, 7);
            assert_int_equal(s.count, sizeof(expected) / sizeof(*expected));
            for (int64_t first = 0; first < 7; first += chunk) {
                assert_int_equal(mu_module_zero_grad(alone), MU_OK);
                snapshot part = sum_of_rows(alone, t, first, 7 - first < chunk ? 7 - first : chunk);
                for (int64_t i = 0; i < s.count; i++) {
                    expected[i] = time == 0 && first == 0 ? part.grads[i] : expected[i] + part.grads[i];
                }
                snap_free(&part);
            }
            assert_memory_equal(s.grads, expected, sizeof(expected));
            snap_free(&s);
        }
        close_fine(c);
    }
}

/* -- graphs ----------------------------------------------------------------------------------------------------- */
static void several_forwards(void **state)
{
    (void)state;
    for (int retain = 0; retain < 2; retain++) {
        mu_context *c = open_quiet(7);
        mu_module *a = build(c, "mlp", 3), *b = build(c, "mlp", 0);
        mu_tape *t = mu_tape_new(c, &(mu_tape_options){.retain_graph = retain == 1});
        for (int step = 0; step < 3; step++) {
            snapshot s[2];
            for (int i = 0; i < 2; i++) {
                mu_module *m = i == 0 ? a : b;
                mu_tensor *x = mu_forward(t, m, batch(t, "mlp", 6, 1)), *y = mu_forward(t, m, batch(t, "mlp", 7, 2));
                mu_tensor *l = mu_mean(t, mu_mul(t, x, x)), *k = mu_mean(t, mu_tanh(t, y));
                assert_int_equal(mu_backward(t, k), MU_OK);
                assert_int_equal(mu_backward(t, l), MU_OK);
                if (retain == 1) {
                    assert_int_equal(mu_backward(t, mu_add(t, l, k)), MU_OK);
                } else {
                    assert_int_equal(mu_backward(t, k), MU_ERR_STATE);
                    expect(c, MU_ERR_STATE, "an earlier backward gave back");
                }
                s[i] = snap(m);
                mu_tape_reset(t);
                assert_int_equal(mu_module_zero_grad(m), MU_OK);
            }
            close_to(&s[0], &s[1], "several forwards");
            snap_free(&s[0]);
            snap_free(&s[1]);
        }
        close_fine(c);
    }
}

/* Gradients with activation checkpointing inside and outside are those without, bit for bit. */
static void with_checkpointing(void **state)
{
    (void)state;
    snapshot first = {0};
    for (int way = 0; way < 4; way++) {
        mu_context *c = open_quiet(8);
        mu_module *m = mu_sequential(c), *inner = mu_sequential(c);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(mu_sequential_append(inner, mu_linear(c, 12, 12, NULL)), MU_OK);
            assert_int_equal(mu_sequential_append(inner, mu_batch_norm_layer(c, 12, NULL)), MU_OK);
            assert_int_equal(mu_sequential_append(inner, mu_dropout_layer(c, 0.3F)), MU_OK);
        }
        assert_int_equal(mu_sequential_append(m, mu_linear(c, 12, 12, NULL)), MU_OK);
        assert_int_equal(mu_sequential_append(m, mu_data_parallel(inner, &(mu_data_parallel_options){2})), MU_OK);
        assert_int_equal(mu_sequential_append(m, mu_linear(c, 12, 4, NULL)), MU_OK);
        static const char *const patterns[] = {NULL, "1.module.?", "1", "1.module"};
        if (patterns[way] != NULL) {
            assert_int_equal(mu_module_checkpoint(m, patterns[way], true, NULL), MU_OK);
        }
        mu_tape *t = mu_tape_new(c, NULL);
        snapshot s = {0};
        for (int step = 0; step < 2; step++) {
            snap_free(&s);
            s = step_of(m, t, "mlp", 9, 3);
        }
        int64_t batches = 0;
        assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(m, "1.module.1.num_batches_tracked"), &batches, 1),
                         MU_OK);
        assert_int_equal(batches, 2);
        if (way == 0) {
            first = s;
        } else {
            assert_memory_equal(first.grads, s.grads, (size_t)s.count * sizeof(float));
            snap_free(&s);
        }
        close_fine(c);
    }
    snap_free(&first);
}

static void steady_memory(void **state)
{
    (void)state;
    mu_context *c = open_quiet(9);
    mu_module *m = build(c, "cnn", 3);
    mu_optimizer *o = mu_sgd(m, 0.1F, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    uint64_t before = 0;
    for (uint64_t step = 0; step < 8; step++) {
        mu_tensor *y = mu_forward(t, m, batch(t, "cnn", 8, step));
        mu_tensor *z = mu_forward(t, m, batch(t, "cnn", 8, step));
        assert_int_equal(mu_backward(t, mu_cross_entropy(t, mu_add(t, y, z), labels(t, 8, step, 4))), MU_OK);
        assert_int_equal(mu_optimizer_step(o), MU_OK);
        mu_tape_reset(t);
        if (step >= 4) {
            assert_int_equal(c->allocations, before);
        }
        before = c->allocations;
    }
    close_fine(c);
}

/* -- custom modules, absences, failures -------------------------------------------------------------------------- */
static mu_tensor *head_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(self, "w"));
    return mu_sigmoid(t, mu_mul(t, x, w));
}

/* used: in the result. dead: its result is dropped. cut: detached. quiet: in a no-grad region. some: only where the first
 * element is negative. idle: never called. */
static mu_tensor *odd_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self;
    float values[64];
    if (mu_tensor_read(x, values, mu_tensor_elements(x)) != MU_OK) {
        return NULL;
    }
    mu_tensor *y = mu_forward(t, mu_module_get(m, "used"), x);
    (void)mu_tanh(t, mu_forward(t, mu_module_get(m, "dead"), x));
    y = mu_add(t, y, mu_detach(t, mu_forward(t, mu_module_get(m, "cut"), x)));
    mu_no_grad_begin(t, "teacher");
    mu_tensor *quiet = mu_forward(t, mu_module_get(m, "quiet"), x);
    mu_no_grad_end(t);
    y = mu_add(t, y, quiet);
    if (values[0] > 5) { /* fails in this replica */
        y = mu_forward(t, mu_module_get(m, "bad"), x);
    }
    return values[0] < 0 ? mu_add(t, y, mu_forward(t, mu_module_get(m, "some"), x)) : y;
}

static mu_module *odd(mu_context *c, int replicas)
{
    mu_module *m = mu_module_new(c, "Odd", &(mu_module_options){.forward = odd_forward});
    static const char *const heads[] = {"used", "dead", "cut", "quiet", "some", "idle"};
    for (int i = 0; i < 6; i++) {
        mu_module *h = mu_module_new(c, "Head", &(mu_module_options){.forward = head_forward});
        mu_module_parameter(h, "w", MU_DIMS(2), (mu_init){MU_INIT_NORMAL, 1.0F});
        CHECK(mu_module_add(m, heads[i], h) == MU_OK, "add");
    }
    CHECK(mu_module_add(m, "bad", mu_linear(c, 7, 7, NULL)) == MU_OK, "add");
    return replicas > 0 ? mu_data_parallel(m, &(mu_data_parallel_options){replicas}) : m;
}

static bool is(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static void check_absent(mu_ddp *d, const char *name, mu_absence why, const char *op, const char *module,
                         const char *end_op, const char *region)
{
    mu_ddp_report r = mu_ddp_get_report(d);
    for (int64_t i = 0; i < r.absent_count; i++) {
        const mu_absent *a = &r.absent[i];
        if (strcmp(a->name, name) == 0) {
            CHECK(a->here == why && is(a->op, op) && is(a->module, module) && is(a->end_op, end_op) &&
                      is(a->region, region),
                  "%s: %d %s in %s, end %s, region %s", name, (int)a->here, a->op, a->module, a->end_op, a->region);
            return;
        }
    }
    CHECK(false, "%s is not absent", name);
}

static void absences(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    c->log_level = MU_LOG_QUIET;
    mu_module *m = odd(c, 2);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_tensor *y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 2), (const float[]){1, 2, -3, 4}));
    CHECK(mu_ddp_backward(d, t, mu_mean(t, y)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_parameter_grad(mu_module_get_parameter(m, "module.used.w")) != NULL, "used");
    CHECK(mu_parameter_grad(mu_module_get_parameter(m, "module.some.w")) != NULL, "some");
    check_absent(d, "module.dead.w", MU_NOT_REACHED, "mul", "module.dead", "tanh", NULL);
    check_absent(d, "module.cut.w", MU_DETACHED, "mul", "module.cut", "detach", NULL);
    check_absent(d, "module.quiet.w", MU_DETACHED, "mul", "module.quiet", "mul", "teacher");
    check_absent(d, "module.idle.w", MU_NOT_READ, NULL, NULL, NULL, NULL);
    mu_tape_reset(t);
    CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    /* The branch of `some` taken by none; the result itself detached. */
    y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 2), (const float[]){1, 2, 3, 4}));
    mu_tensor *own = mu_mean(t, mu_parameter_tensor(mu_module_get_parameter(m, "module.idle.w")));
    CHECK(mu_ddp_backward(d, t, mu_add(t, own, mu_mean(t, mu_detach(t, y)))) == MU_OK, "%s", mu_context_message(c));
    check_absent(d, "module.some.w", MU_NOT_READ, NULL, NULL, NULL, NULL);
    check_absent(d, "module.used.w", MU_DETACHED, "mul", "module.used", "detach", NULL);
    check_absent(d, "module.dead.w", MU_NOT_REACHED, "mul", "module.dead", "tanh", NULL);
    CHECK(mu_parameter_grad(mu_module_get_parameter(m, "module.idle.w")) != NULL, "idle");
}

static void absent_reasons(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, absences, NULL, NULL, true), 0);
}

/* A gradient that only the second replica has is written, not added to what an earlier step left. */
static void first_has_none(void **state)
{
    (void)state;
    mu_context *c = open_quiet(6);
    mu_module *m = odd(c, 2);
    mu_tape *t = mu_tape_new(c, NULL);
    float grads[2][2];
    for (int time = 0; time < 2; time++) {
        mu_tensor *x = mu_tensor_from(t, MU_DIMS(2, 2), (const float[]){1, 2, -3, 4});
        assert_int_equal(mu_backward(t, mu_mean(t, mu_forward(t, m, x))), MU_OK);
        mu_tensor *g = mu_parameter_grad(mu_module_get_parameter(m, "module.some.w"));
        assert_int_equal(mu_tensor_read(g, grads[time], 2), MU_OK);
        assert_true(grads[time][0] != 0.0F);
        mu_tape_reset(t);
        assert_int_equal(mu_module_zero_grad(m), MU_OK);
    }
    assert_memory_equal(grads[0], grads[1], sizeof(grads[0]));
    close_fine(c);
}

static void one_replica_fails(void **state)
{
    (void)state;
    mu_context *c = open_quiet(10);
    mu_module *m = odd(c, 3);
    mu_tape *t = mu_tape_new(c, NULL);
    for (int i = 0; i < 20; i++) {
        assert_null(mu_forward(t, m, mu_tensor_from(t, MU_DIMS(3, 2), (const float[]){1, 2, 9, 1, 9, 1})));
        expect(c, MU_ERR_SHAPE, "data_parallel, replica 1 of 3 (rows 1 to 1): linear in module.bad: ");
        mu_tape_reset(t);
    }
    mu_tensor *y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(3, 2), (const float[]){1, 2, -1, 1, 1, 1}));
    assert_int_equal(mu_backward(t, mu_mean(t, y)), MU_OK);
    close_fine(c);
}

static mu_tensor *writes_buffer(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *b = mu_module_get_buffer(self, "b");
    return mu_tensor_write(b, (const float[]){1}, 1) == MU_OK ? mu_relu(t, x) : NULL;
}

static mu_tensor *runs_backward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(self, "w"));
    return mu_backward(t, mu_mean(t, w)) == MU_OK ? x : NULL;
}

static mu_tensor *rows_lost(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    return mu_tensor_dim(x, 0) == 1 ? mu_reshape(t, x, MU_DIMS(2, 1)) : x;
}

static mu_tensor *gives_null(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    (void)t;
    (void)x;
    return NULL;
}

static void refused(void **state)
{
    (void)state;
    mu_context *c = open_quiet(11);
    mu_tape *t = mu_tape_new(c, NULL);
    static const struct {
        mu_forward_fn forward;
        mu_status status;
        const char *part;
    } cases[] = {
        {writes_buffer, MU_ERR_STATE, "cannot write to a parameter or buffer"},
        {runs_backward, MU_ERR_STATE, "backward within a replica's forward"},
        {rows_lost, MU_ERR_SHAPE, "cannot be gathered along dimension 0"},
        {gives_null, MU_ERR_STATE, "replica 0 of 2 (rows 0 to 1): its forward returned NULL"},
    };
    for (int i = 0; i < 4; i++) {
        mu_module *m = mu_module_new(c, "Refused", &(mu_module_options){.forward = cases[i].forward});
        mu_module_buffer(m, "b", MU_DIMS(1), MU_F32, 0);
        mu_module_parameter(m, "w", MU_DIMS(1), (mu_init){0});
        m = mu_data_parallel(m, &(mu_data_parallel_options){2});
        fine(c);
        assert_null(mu_forward(t, m, mu_tensor_zeros(t, MU_DIMS(3, 2))));
        expect(c, cases[i].status, cases[i].part);
    }
    assert_null(mu_data_parallel(NULL, NULL));
    assert_null(mu_data_parallel(mu_relu_layer(c), &(mu_data_parallel_options){-1}));
    expect(c, MU_ERR_ARG, "-1 replicas");
    mu_module *root = mu_sequential(c), *child = mu_relu_layer(c);
    assert_int_equal(mu_sequential_append(root, child), MU_OK);
    assert_null(mu_data_parallel(child, NULL));
    expect(c, MU_ERR_ARG, "has a parent already");
    mu_module *plain = mu_data_parallel(mu_relu_layer(c), NULL);
    assert_string_equal(mu_module_kind(plain), "DataParallel");
    assert_non_null(mu_forward(t, plain, mu_tensor_zeros(t, MU_DIMS(4, 2))));
    close_fine(c);
}

/* Modes, freezing, and a parallel module below another. */
static void modes(void **state)
{
    (void)state;
    mu_context *c = open_quiet(12);
    mu_module *inner = build(c, "mlp", 2), *m = mu_data_parallel(inner, &(mu_data_parallel_options){2});
    mu_module *alone = build(c, "mlp", 0);
    mu_tape *t = mu_tape_new(c, NULL), *quiet = mu_tape_new(c, &(mu_tape_options){.no_grad = true});
    snapshot a = step_of(m, t, "mlp", 8, 1), b = step_of(alone, t, "mlp", 8, 1);
    close_to(&a, &b, "nested");
    snap_free(&a);
    snap_free(&b);
    assert_int_equal(mu_module_zero_grad(m), MU_OK);
    mu_module_train(m, false);
    for (int i = 0; i < 3; i++) {
        assert_non_null(mu_forward(quiet, m, batch(quiet, "mlp", 8, 1)));
        mu_tape_reset(quiet);
    }
    mu_module_train(m, true);
    assert_int_equal(mu_module_freeze(m, "*.0.*", NULL), MU_OK);
    a = step_of(m, t, "mlp", 8, 1);
    for (int64_t i = 0; i < a.param_count; i++) {
        assert_int_equal(a.has[i], strstr(a.names[i], ".0.") == NULL);
    }
    snap_free(&a);
    assert_int_equal(mu_module_freeze(m, "*", NULL), MU_OK);
    assert_int_equal(mu_module_zero_grad(m), MU_OK);
    mu_tensor *y = mu_forward(t, m, batch(t, "mlp", 8, 1));
    mu_no_grad_begin(t, NULL);
    assert_non_null(mu_forward(t, m, y = batch(t, "mlp", 8, 1)));
    mu_no_grad_end(t);
    close_fine(c);
}

/* A step of the optimiser between forward and backward. */
static void stale(void **state)
{
    (void)state;
    mu_context *c = open_quiet(16);
    mu_module *m = build(c, "mlp", 2);
    mu_optimizer *o = mu_sgd(m, 0.1F, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    snapshot s = step_of(m, t, "mlp", 4, 1);
    snap_free(&s);
    mu_tensor *loss = mu_mean(t, mu_forward(t, m, batch(t, "mlp", 4, 1)));
    assert_int_equal(mu_optimizer_step(o), MU_OK);
    assert_int_equal(mu_backward(t, loss), MU_ERR_STATE);
    expect(c, MU_ERR_STATE, "backward of linear in module.2: parameter `module.2.weight` was modified in place");
    assert_null(mu_parameter_grad(mu_module_get_parameter(m, "module.2.weight")));
    close_fine(c);
}

static void removed(void **state)
{
    (void)state;
    mu_context *c = open_quiet(13);
    mu_module *root = mu_sequential(c);
    assert_int_equal(mu_sequential_append(root, build(c, "mlp", 2)), MU_OK);
    mu_tape *t = mu_tape_new(c, NULL);
    for (int way = 0; way < 2; way++) {
        mu_tensor *loss = mu_mean(t, mu_forward(t, root, batch(t, "mlp", 4, 1)));
        fine(c);
        assert_int_equal(mu_module_replace(root, "0", build(c, "mlp", 3)), MU_OK);
        if (way == 1) {
            (void)loss; /* backward must not be run over what is gone; reset and close must do */
        }
        mu_tape_reset(t);
    }
    snapshot s = step_of(root, t, "mlp", 4, 2);
    snap_free(&s);
    mu_forward(t, root, batch(t, "mlp", 4, 1)); /* closed while a tape holds it */
    close_fine(c);
}

static void out_of_memory(void **state)
{
    (void)state;
    int failed = 0;
    for (int64_t at = 0, done = 0; done == 0; at += at < 60 ? 1 : 7) {
        mu_context *c = open_quiet(14);
        mu_module *m = mu_sequential(c);
        CHECK(mu_sequential_append(m, build(c, "cnn", 2)) == MU_OK, "build");
        CHECK(mu_sequential_append(m, mu_batch_norm_layer(c, 4, NULL)) == MU_OK, "build");
        mu_module_parameter(m, "spare", MU_DIMS(1), (mu_init){0});
        snapshot s = snap(m);
        snap_free(&s);
        mu_tape *t = mu_tape_new(c, NULL);
        mu_tensor *x = batch(t, "cnn", 4, 1), *y = labels(t, 4, 1, 4);
        fine(c);
        c->fail_after = at;
        mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, m, x), y);
        mu_status r = loss != NULL ? mu_backward(t, loss) : mu_context_status(c);
        done = c->fail_after >= 0;
        c->fail_after = -1;
        assert_true(done != 0 ? r == MU_OK : r == MU_ERR_NOMEM || r == MU_ERR_DEVICE || r == MU_OK);
        failed += r != MU_OK;
        mu_context_clear(c);
        mu_tape_reset(t);
        assert_int_equal(mu_module_zero_grad(m), MU_OK);
        s = step_of(m, t, "cnn", 4, 1);
        snap_free(&s);
        close_fine(c);
    }
    assert_true(failed > 50);
}

/* -- with ranks ------------------------------------------------------------------------------------------------- */
static void ranks_of_replicas(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    c->log_level = MU_LOG_QUIET;
    mu_module *m = build(c, "mlp", 2), *oracle = build(c, "mlp", 0);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = 64, .first_bucket_bytes = 64});
    CHECK(d != NULL, "%s", mu_context_message(c));
    mu_optimizer *o = mu_sgd(m, 0.1F, NULL), *p = mu_sgd(oracle, 0.1F, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    for (uint64_t step = 0; step < 5; step++) {
        uint64_t key = step * 10 + (uint64_t)rank;
        mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, m, batch(t, "mlp", 5, key)), labels(t, 5, key, 4));
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
        mu_tensor *sum = NULL;
        for (int r = 0; r < size; r++) {
            key = step * 10 + (uint64_t)r;
            loss = mu_cross_entropy(t, mu_forward(t, oracle, batch(t, "mlp", 5, key)), labels(t, 5, key, 4));
            sum = sum != NULL ? mu_add(t, sum, loss) : loss;
        }
        CHECK(mu_backward(t, mu_scale(t, sum, 1.0F / (float)size)) == MU_OK, "%s", mu_context_message(c));
        check_replicas(g, m, "ranks of replicas");
        check_oracle(m, oracle, 1e-5, "ranks of replicas");
        CHECK(mu_optimizer_step(o) == MU_OK && mu_optimizer_step(p) == MU_OK, "%s", mu_context_message(c));
        mu_tape_reset(t);
    }
}

static void within_ddp(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, ranks_of_replicas, NULL, NULL, true), 0);
    assert_int_equal(run_processes(2, ranks_of_replicas, NULL, NULL, true), 0);
}

/* The report that this project began with: wrap, load with strict=False, replace fc, train, save. */
static void seed_scenario(void **state)
{
    (void)state;
    char dir[] = "/tmp/muster_dp_XXXXXX", in[64], out[64], command[1200];
    assert_non_null(mkdtemp(dir));
    snprintf(in, sizeof(in), "%s/in.pth", dir);
    snprintf(out, sizeof(out), "%s/out.pth", dir);
    const char *python = getenv("MUSTER_PYTHON");
    assert_non_null(python);
    snprintf(command, sizeof(command),
             "%s -c \"import torch, torchvision; torch.manual_seed(1);"
             "m = torch.nn.DataParallel(torchvision.models.resnet18(num_classes=7)); sd = m.state_dict();"
             "sd['module.extra.weight'] = torch.zeros(2); torch.save(sd, '%s')\"",
             python, in);
    assert_int_equal(system(command), 0); // NOLINT(cert-env33-c)
    mu_context *c = open_quiet(15);
    mu_module *m = mu_data_parallel(mu_resnet(c, 18, &(mu_resnet_options){.classes = 7}), &(mu_data_parallel_options){2});
    mu_load_report report;
    assert_int_equal(mu_load(m, in, &(mu_load_options){.not_strict = true}, &report), MU_OK);
    assert_int_equal(report.missing, 0);
    assert_int_equal(report.unexpected, 1);
    assert_int_equal(report.loaded, 122);
    assert_string_equal(mu_model_head(m), "module.fc");
    assert_int_equal(mu_module_replace(m, "module.fc", mu_linear(c, 512, 4, NULL)), MU_OK);
    mu_optimizer *o = mu_sgd(m, 0.05F, &(mu_sgd_options){.momentum = 0.9F});
    mu_tape *t = mu_tape_new(c, NULL);
    snapshot before = snap(m);
    for (uint64_t step = 0; step < 2; step++) {
        mu_tensor *y = mu_forward(t, m, noise(t, MU_DIMS(5, 3, 32, 32), step));
        assert_int_equal(mu_backward(t, mu_cross_entropy(t, y, labels(t, 5, step, 4))), MU_OK);
        snapshot s = snap(m);
        for (int64_t i = 0; i < s.param_count; i++) {
            assert_true(s.has[i]);
            assert_memory_equal(s.names[i], "module.", 7);
        }
        snap_free(&s);
        assert_int_equal(mu_optimizer_step(o), MU_OK);
        mu_tape_reset(t);
    }
    snapshot after = snap(m);
    for (int64_t i = 0; i < after.param_count; i++) {
        size_t n = (size_t)(after.start[i + 1] - after.start[i]) * sizeof(float);
        assert_memory_not_equal(after.values + after.start[i], before.values + after.start[i], n);
    }
    snap_free(&before);
    snap_free(&after);
    assert_int_equal(mu_save(m, out, NULL), MU_OK);
    close_fine(c);
    snprintf(command, sizeof(command),
             "%s -c \"import torch, torchvision; m = torch.nn.DataParallel(torchvision.models.resnet18(num_classes=4));"
             "m.load_state_dict(torch.load('%s')); assert all(k.startswith('module.') for k in torch.load('%s'))\"",
             python, out, out);
    assert_int_equal(system(command), 0); // NOLINT(cert-env33-c)
    unlink(in);
    unlink(out);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_one),        cmocka_unit_test(inputs_and_outputs), cmocka_unit_test(batch_norm),
        cmocka_unit_test(dropout),           cmocka_unit_test(bitwise),            cmocka_unit_test(sums_keep_the_order),
        cmocka_unit_test(first_has_none),
        cmocka_unit_test(several_forwards),
        cmocka_unit_test(with_checkpointing), cmocka_unit_test(steady_memory),     cmocka_unit_test(absent_reasons),
        cmocka_unit_test(one_replica_fails), cmocka_unit_test(refused),            cmocka_unit_test(modes),
        cmocka_unit_test(stale),             cmocka_unit_test(removed),           cmocka_unit_test(out_of_memory),      cmocka_unit_test(within_ddp),
        cmocka_unit_test(seed_scenario),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
