/* What the networks of the zoo give back in forward: the results of norms that only an addition or a max pool reads. */
#include "base/context.h"
#include "tape/store.h"
#include <muster/layers.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define BATCH 4

typedef struct gradients {
    float *floats;
    int64_t count;
} gradients;

static bool note(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    gradients *g = user;
    (void)name;
    (void)value;
    if (p != NULL) {
        mu_tensor *x = mu_parameter_grad(p);
        assert_non_null(x);
        int64_t n = mu_tensor_elements(x);
        g->floats = realloc(g->floats, (size_t)(g->count + n) * sizeof(float));
        assert_int_equal(mu_tensor_read(x, g->floats + g->count, n), MU_OK);
        g->count += n;
    }
    return true;
}

/* Bytes of the tape between forward and backward. */
static size_t held(const char *model, int side, bool training, bool retain, gradients *g)
{
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 4});
    mu_module *m = mu_model(c, model, &(mu_model_options){.classes = 10, .side = side});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.retain_graph = retain});
    mu_module_train(m, training);
    int64_t n = (int64_t)BATCH * 3 * side * side;
    float *x = calloc((size_t)n, sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)((i * 7919) % 257) / 128.0F - 1.0F;
    }
    mu_tensor *y = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(BATCH, 3, side, side), x));
    mu_tensor *loss = mu_cross_entropy(t, y, mu_tensor_from_i64(t, MU_DIMS(BATCH), (int64_t[BATCH]){3, 1, 4, 1}));
    size_t bytes = mu_tape_bytes(t);
    if (mu_backward(t, loss) != MU_OK) {
        fail_msg("%s: %s", model, mu_context_message(c));
    }
    assert_int_equal(mu_module_each_state(m, note, g), MU_OK);
    free(x);
    assert_int_equal(mu_context_close(c), MU_OK);
    return bytes;
}

static void gives_back(const char *model, int side, size_t floats)
{
    gradients a = {0}, b = {0};
    size_t all = held(model, side, true, true, &a), less = held(model, side, true, false, &b), bytes = BATCH * floats * sizeof(float);
    print_message("%s: %zu KiB with all, %zu KiB less\n", model, all >> 10, (all - less) >> 10);
    assert_in_range(all - less, bytes, bytes + bytes / 8);
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.floats, b.floats, (size_t)a.count * sizeof(float));
    free(a.floats);
    free(b.floats);
}

static void results_of_norms(void **state)
{
    (void)state;
    /* The stem's, then per stage the blocks' last norms and, from the second on, one shortcut's. */
    size_t stem = 64 * 32 * 32, stages = 2 * 64 * 16 * 16 + 3 * (128 * 8 * 8 + 256 * 4 * 4 + 512 * 2 * 2);
    gives_back("resnet18", 64, stem + stages);
    gives_back("resnet20", 32, 3 * (16 * 32 * 32 + 32 * 16 * 16 + 64 * 8 * 8));
}

/* With the running statistics, an activation after a norm is an operation of its own, whose backward reads its result. */
static void not_what_backward_reads(void **state)
{
    (void)state;
    gradients a = {0}, b = {0};
    held("resnet18", 32, false, true, &a);
    held("resnet18", 32, false, false, &b);
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.floats, b.floats, (size_t)a.count * sizeof(float));
    free(a.floats);
    free(b.floats);
}

static mu_tensor *noting_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor **seen = self;
    *seen = mu_add(t, x, x);
    return *seen;
}

/* What a user's module made in a norm's place may be read by the user after the network has run. */
static void not_a_users(void **state)
{
    (void)state;
    static const char *const paths[] = {"layer1.0.bn2", "layer2.0.downsample", "layer2.0.downsample.1"};
    for (int k = 0; k < 3; k++) {
        mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 4});
        mu_module *m = mu_model(c, "resnet18", &(mu_model_options){.classes = 10, .side = 32});
        mu_tensor *seen = NULL;
        mu_module *noting = mu_module_new(c, "Noting", &(mu_module_options){.forward = noting_forward, .self = &seen});
        if (k == 1) { /* with a child of a norm's name and kind, which is not what gave the result */
            mu_module *whole = mu_sequential(c);
            assert_int_equal(mu_sequential_append(whole, mu_conv2d_layer(c, 64, 128, 1, &(mu_conv_options){.stride = 2})), MU_OK);
            assert_int_equal(mu_sequential_append(whole, mu_batch_norm_layer(c, 128, NULL)), MU_OK);
            assert_int_equal(mu_sequential_append(whole, noting), MU_OK);
            noting = whole;
        }
        assert_int_equal(mu_module_replace(m, paths[k], noting), MU_OK);
        mu_tape *t = mu_tape_new(c, NULL);
        float *x = calloc(3 * 32 * 32 * 2, sizeof(float)), most = 0.0F;
        x[5] = 1.0F;
        assert_non_null(mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 3, 32, 32), x)));
        assert_non_null(seen);
        float *all = calloc((size_t)mu_tensor_elements(seen), sizeof(float));
        assert_int_equal(mu_tensor_read(seen, all, mu_tensor_elements(seen)), MU_OK);
        for (int64_t i = 0; i < mu_tensor_elements(seen); i++) {
            most = fabsf(all[i]) > most ? fabsf(all[i]) : most;
        }
        assert_true(most > 0.0F);
        free(all);
        free(x);
        assert_int_equal(mu_context_close(c), MU_OK);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_of_norms),
        cmocka_unit_test(not_what_backward_reads),
        cmocka_unit_test(not_a_users),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
