/* mu_module_checkpoint: networks of the zoo with and without it are the same but for memory. */
#include "base/context.h"
#include "tape/store.h"
#include <muster/layers.h>
#include <muster/optim.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct copy {
    float *floats;
    int64_t count, params;
} copy;

static void add_floats(copy *c, mu_tensor *x)
{
    int64_t n = mu_tensor_elements(x);
    c->floats = realloc(c->floats, (size_t)(c->count + n + 1) * sizeof(float));
    if (mu_tensor_dtype(x) == MU_I64) {
        int64_t v = 0;
        assert_int_equal(n, 1);
        assert_int_equal(mu_tensor_read_i64(x, &v, 1), MU_OK);
        c->floats[c->count] = (float)v;
    } else {
        assert_int_equal(mu_tensor_read(x, c->floats + c->count, n), MU_OK);
    }
    c->count += n;
}

static bool note_state(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    copy *c = user;
    (void)name;
    add_floats(c, value);
    if (p != NULL) {
        assert_non_null(mu_parameter_grad(p));
        add_floats(c, mu_parameter_grad(p));
        c->params++;
    }
    return true;
}

typedef struct run {
    const char *model, *picked, *within; /* picked NULL: none */
    int64_t expected;                    /* modules that are picked */
    int side, batch, steps;
    bool evaluate_meanwhile;             /* in evaluation mode while backward runs */
} run;

/* Trains, and gives values, gradients and buffers at the end, and the peak. */
static size_t train(const run *r, bool checkpoints, copy *out, uint64_t *late_allocations)
{
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 4});
    mu_module *m = mu_model(c, r->model, &(mu_model_options){.classes = 10, .side = r->side});
    mu_tape *t = mu_tape_new(c, NULL);
    mu_optimizer *o = mu_sgd(m, 0.05F, &(mu_sgd_options){.momentum = 0.9F});
    int64_t count = 0;
    if (checkpoints) {
        assert_int_equal(mu_module_checkpoint(m, r->picked, true, &count), MU_OK);
        assert_int_equal(count, r->expected);
        assert_int_equal(r->within != NULL ? mu_module_checkpoint(m, r->within, true, NULL) : MU_OK, MU_OK);
    }
    int64_t n = (int64_t)r->batch * 3 * r->side * r->side;
    float *x = calloc((size_t)n, sizeof(float));
    int64_t labels[64];
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)((i * 7919) % 257) / 128.0F - 1.0F;
    }
    for (int i = 0; i < r->batch; i++) {
        labels[i] = i % 10;
    }
    uint64_t before = 0;
    for (int step = 0; step < r->steps; step++) {
        before = step == 2 ? c->allocations : before;
        mu_tape_reset(t);
        assert_int_equal(mu_module_zero_grad(m), MU_OK);
        mu_tensor *in = mu_tensor_from(t, MU_DIMS(r->batch, 3, r->side, r->side), x);
        mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, m, in), mu_tensor_from_i64(t, MU_DIMS(r->batch), labels));
        mu_module_train(m, !r->evaluate_meanwhile);
        if (mu_backward(t, loss) != MU_OK) {
            fail_msg("%s: %s", r->model, mu_context_message(c));
        }
        mu_module_train(m, true);
        *late_allocations = c->allocations - before;
        if (step == r->steps - 1) {
            assert_int_equal(mu_module_each_state(m, note_state, out), MU_OK); /* the update clears gradients */
        }
        assert_int_equal(mu_optimizer_step(o), MU_OK);
    }
    size_t peak = mu_tape_peak_bytes(t);
    free(x);
    assert_int_equal(mu_context_close(c), MU_OK);
    return peak;
}

static void compare(const run *r, double most)
{
    copy a = {0}, b = {0};
    uint64_t late = 0;
    size_t without = train(r, false, &a, &late), with = train(r, true, &b, &late);
    print_message("%s, batch %d of %dx%d, \"%s\": peak %zu KiB without, %zu KiB with\n", r->model, r->batch, r->side,
                  r->side, r->picked, without >> 10, with >> 10);
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.floats, b.floats, (size_t)a.count * sizeof(float));
    assert_int_equal(late, 0);
    assert_true((double)with <= most * (double)without);
    free(a.floats);
    free(b.floats);
}

static void test_resnet20(void **state)
{
    (void)state;
    compare(&(run){"resnet20", "layer?.?", NULL, 9, 16, 8, 4, false}, 0.5);
    compare(&(run){"resnet20", "layer*", NULL, 3, 16, 8, 4, true}, 1);
    compare(&(run){"resnet20", "layer?", "layer1.?", 3, 16, 8, 4, false}, 1); /* within each other */
    compare(&(run){"resnet20", "*.bn?", NULL, 18, 16, 4, 4, true}, 1.5); /* no longer fused with relu */
}

static void test_others(void **state)
{
    (void)state;
    compare(&(run){"resnet18", "layer?.?", NULL, 8, 32, 4, 3, false}, 1);
    compare(&(run){"cnn", "*", NULL, 5, 16, 4, 4, false}, 1);
    compare(&(run){"mlp", "*", NULL, 5, 8, 4, 4, false}, 1.5);
}

static mu_tensor *dropping(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self;
    x = mu_forward(t, mu_module_get(m, "drop"), mu_tanh(t, mu_forward(t, mu_module_get(m, "lin"), x)));
    return mu_forward(t, mu_module_get(m, "norm"), x);
}

/* Dropout's draws and batch norm's statistics, with the call instead of the switch, the module running twice. */
static void test_dropout_and_statistics(void **state)
{
    (void)state;
    float grads[2][36], stats[2][6];
    int64_t batches[2];
    for (int k = 0; k < 2; k++) {
        mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 9});
        mu_module *m = mu_module_new(c, "Drop", &(mu_module_options){.forward = dropping});
        assert_int_equal(mu_module_add(m, "lin", mu_linear(c, 6, 6, NULL)), MU_OK);
        assert_int_equal(mu_module_add(m, "drop", mu_dropout_layer(c, 0.5F)), MU_OK);
        assert_int_equal(mu_module_add(m, "norm", mu_batch_norm_layer(c, 6, &(mu_batch_norm_options){.momentum = -1})), MU_OK);
        mu_tape *t = mu_tape_new(c, NULL);
        float v[30];
        for (int i = 0; i < 30; i++) {
            v[i] = (float)(i * 37 % 19) / 10.0F;
        }
        mu_tensor *x = mu_tensor_from(t, MU_DIMS(5, 6), v), *y = x;
        for (int i = 0; i < 2; i++) {
            y = k == 0 ? mu_forward(t, m, y) : mu_checkpoint_forward(t, m, y);
        }
        mu_module_train(m, false); /* the statistics that its evaluation read must be those of then */
        y = k == 0 ? mu_forward(t, m, y) : mu_checkpoint_forward(t, m, y);
        mu_module_train(m, true);
        y = k == 0 ? mu_forward(t, m, y) : mu_checkpoint_forward(t, m, y);
        assert_int_equal(mu_backward(t, mu_sum(t, mu_mul(t, y, mu_tanh(t, y)))), MU_OK);
        assert_int_equal(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "lin.weight")), grads[k], 36), MU_OK);
        assert_int_equal(mu_tensor_read(mu_module_get_buffer(m, "norm.running_mean"), stats[k], 6), MU_OK);
        assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(m, "norm.num_batches_tracked"), &batches[k], 1), MU_OK);
        assert_int_equal(mu_context_close(c), MU_OK);
    }
    assert_memory_equal(grads[0], grads[1], sizeof(grads[0]));
    assert_memory_equal(stats[0], stats[1], sizeof(stats[0]));
    assert_int_equal(batches[0], 3);
    assert_int_equal(batches[1], 3);
}

typedef struct grads {
    float *floats;
    int64_t count, absent;
} grads;

static bool note_grad(void *user, const char *name, mu_parameter *p)
{
    grads *g = user;
    mu_tensor *x = mu_parameter_grad(p);
    (void)name;
    g->absent += x == NULL;
    if (x != NULL) {
        int64_t n = mu_tensor_elements(x);
        g->floats = realloc(g->floats, (size_t)(g->count + n + 1) * sizeof(float));
        assert_int_equal(mu_tensor_read(x, g->floats + g->count, n), MU_OK);
        g->count += n;
    }
    return true;
}

/* More is frozen between forward and backward: as without checkpoints, although the tree is laid out anew. */
static void test_freezing_meanwhile(void **state)
{
    (void)state;
    static const char *const before[] = {"layer1*", "bn1*", "*conv1*"}, *const after[] = {"layer2*", "*conv2*", "*"};
    for (int i = 0; i < 9; i++) {
        grads g[2] = {{0}, {0}};
        for (int k = 0; k < 2; k++) {
            mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 4});
            mu_module *m = mu_model(c, "resnet20", NULL);
            mu_tape *t = mu_tape_new(c, NULL);
            assert_int_equal(k == 1 ? mu_module_checkpoint(m, "layer?.?", true, NULL) : MU_OK, MU_OK);
            assert_int_equal(mu_module_freeze(m, before[i / 3], NULL), MU_OK);
            mu_tensor *x = mu_tensor_zeros(t, MU_DIMS(2, 3, 8, 8));
            float v[2 * 3 * 8 * 8];
            for (int e = 0; e < 2 * 3 * 8 * 8; e++) {
                v[e] = (float)(e * 37 % 101) / 50.0F - 1.0F;
            }
            assert_int_equal(mu_tensor_write(x, v, 2 * 3 * 8 * 8), MU_OK);
            x = mu_tensor_require_grad(t, x);
            mu_tensor *y = mu_forward(t, m, x), *loss = mu_sum(t, mu_mul(t, y, y));
            assert_int_equal(mu_module_freeze(m, after[i % 3], NULL), MU_OK);
            if (mu_backward(t, loss) != MU_OK) {
                fail_msg("%d, %d: %s", i, k, mu_context_message(c));
            }
            assert_int_equal(mu_module_each_parameter(m, note_grad, &g[k]), MU_OK);
            g[k].floats = realloc(g[k].floats, (size_t)(g[k].count + 2 * 3 * 8 * 8) * sizeof(float));
            assert_int_equal(mu_tensor_read(mu_tensor_grad(x), g[k].floats + g[k].count, 2 * 3 * 8 * 8), MU_OK);
            g[k].count += 2 * 3 * 8 * 8;
            assert_int_equal(mu_context_close(c), MU_OK);
        }
        assert_int_equal(g[0].count, g[1].count);
        assert_int_equal(g[0].absent, g[1].absent);
        assert_memory_equal(g[0].floats, g[1].floats, (size_t)g[0].count * sizeof(float));
        free(g[0].floats);
        free(g[1].floats);
    }
}

static void test_patterns(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    mu_module *m = mu_model(c, "resnet20", NULL);
    int64_t count = -1;
    assert_int_equal(mu_module_checkpoint(m, "layer9*", true, &count), MU_ERR_ARG);
    assert_non_null(strstr(mu_context_message(c), "no module of the"));
    mu_context_clear(c);
    assert_int_equal(mu_module_checkpoint(m, NULL, true, &count), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_module_checkpoint(NULL, "*", true, &count), MU_ERR_ARG);
    assert_int_equal(count, -1);
    assert_int_equal(mu_module_checkpoint(m, "layer2.*", true, &count), MU_OK);
    assert_int_equal(count, 3);
    assert_int_equal(mu_module_checkpoint(m, "*", true, NULL), MU_OK);
    assert_int_equal(mu_module_checkpoint(m, "*", false, &count), MU_OK);
    assert_null(mu_checkpoint_forward(NULL, m, NULL));
    mu_context_clear(c);
    assert_int_equal(mu_context_close(c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resnet20),
        cmocka_unit_test(test_others),
        cmocka_unit_test(test_dropout_and_statistics),
        cmocka_unit_test(test_freezing_meanwhile),
        cmocka_unit_test(test_patterns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
