/* The module tree: names, order, memory over changes, freezing, printing, failures. */
#include "base/context.h"
#include "tape/store.h"
#include <muster/layers.h>
#include <muster/optim.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static mu_context *quiet(uint64_t seed)
{
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = seed});
    assert_non_null(c);
    return c;
}

static void close_ok(mu_context *c)
{
    if (mu_context_status(c) != MU_OK) {
        print_error("%s\n", mu_context_message(c));
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void expect(mu_context *c, mu_status s, const char *part)
{
    assert_int_equal(mu_context_status(c), s);
    if (strstr(mu_context_message(c), part) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", part, mu_context_message(c));
    }
    mu_context_clear(c);
}

typedef struct names {
    char text[4000];
    int count;
} names;

static bool note_state(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    names *n = user;
    char part[200];
    snprintf(part, sizeof(part), "%s%s%s%lld ", name, p == NULL ? "=" : ":", mu_tensor_dtype(value) == MU_I64 ? "i" : "",
             (long long)mu_tensor_elements(value));
    strncat(n->text, part, sizeof(n->text) - strlen(n->text) - 1);
    n->count++;
    return true;
}

static bool note_parameter(void *user, const char *name, mu_parameter *p)
{
    names *n = user;
    (void)p;
    strncat(n->text, name, sizeof(n->text) - strlen(n->text) - 1);
    strncat(n->text, " ", sizeof(n->text) - strlen(n->text) - 1);
    n->count++;
    return true;
}

static names states(mu_module *m)
{
    names n = {0};
    assert_int_equal(mu_module_each_state(m, note_state, &n), MU_OK);
    return n;
}

/* fc1 (2 -> 3), norm (3), head (3 -> 2) */
static mu_module *small(mu_context *c)
{
    mu_module *m = mu_sequential(c);
    assert_int_equal(mu_module_add(m, "fc1", mu_linear(c, 2, 3, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, "norm", mu_batch_norm_layer(c, 3, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, "head", mu_linear(c, 3, 2, &(mu_linear_options){.no_bias = true})), MU_OK);
    return m;
}

static void read_parameter(mu_module *m, const char *path, float *out, int64_t n)
{
    mu_parameter *p = mu_module_get_parameter(m, path);
    assert_non_null(p);
    assert_int_equal(mu_tensor_read(mu_parameter_tensor(p), out, n), MU_OK);
}

static void write_parameter(mu_module *m, const char *path, const float *in, int64_t n)
{
    mu_parameter *p = mu_module_get_parameter(m, path);
    assert_non_null(p);
    assert_int_equal(mu_tensor_write(mu_parameter_tensor(p), in, n), MU_OK);
}

static void state_dict_order_is_pytorchs(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    names n = states(m);
    assert_string_equal(n.text, "fc1.weight:6 fc1.bias:3 norm.weight:3 norm.bias:3 norm.running_mean=3 "
                                "norm.running_var=3 norm.num_batches_tracked=i1 head.weight:6 ");
    n = states(mu_module_get(m, "norm"));
    assert_string_equal(n.text,
                        "weight:3 bias:3 running_mean=3 running_var=3 num_batches_tracked=i1 ");
    assert_int_equal(mu_module_parameter_elements(m), 21);
    assert_string_equal(mu_parameter_name(mu_module_get_parameter(m, "head.weight")), "head.weight");
    assert_null(mu_module_get_parameter(m, "head.bias"));
    assert_null(mu_module_get_parameter(m, "nowhere.weight"));
    assert_null(mu_module_get(m, "fc1."));
    assert_null(mu_module_get(m, ".fc1"));
    float one[3];
    assert_int_equal(mu_tensor_read(mu_module_get_buffer(m, "norm.running_var"), one, 3), MU_OK);
    assert_float_equal(one[2], 1, 0);
    close_ok(c);
}

static void names_are_checked(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    assert_int_equal(mu_module_add(m, "fc1", mu_identity_layer(c)), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "\"fc1\" is taken");
    assert_int_equal(mu_module_add(m, "a.b", mu_identity_layer(c)), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "\"a.b\" is not a name");
    assert_int_equal(mu_module_add(m, "", mu_identity_layer(c)), MU_ERR_ARG);
    mu_context_clear(c);
    assert_null(mu_module_parameter(mu_module_get(m, "fc1"), "bias", MU_DIMS(1), (mu_init){0}));
    expect(c, MU_ERR_ARG, "\"bias\" is taken");
    assert_null(mu_module_buffer(m, "b", MU_DIMS(1), MU_F64, 0));
    expect(c, MU_ERR_DTYPE, "float64");
    assert_int_equal(mu_module_add(m, "again", mu_module_get(m, "fc1")), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "has a parent already");
    assert_int_equal(mu_module_add(mu_module_get(m, "fc1"), "up", m), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "below itself");
    assert_int_equal(mu_module_replace(m, "nope", mu_identity_layer(c)), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "\"nope\"");
    assert_int_equal(mu_module_remove(m, ""), MU_ERR_ARG);
    mu_context_clear(c);
    close_ok(c);
}

/* Building is sticky: after a failure nothing crashes, and the first message stays. */
static void building_is_sticky(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = mu_sequential(c);
    assert_int_not_equal(mu_module_add(m, "bad", mu_linear(c, 0, 1, NULL)), MU_OK);
    assert_null(mu_linear(c, 1, 1, NULL));
    assert_null(mu_sgd(m, 0.1f, NULL));
    expect(c, MU_ERR_ARG, "linear layer: 0 inputs");
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void initial_values_depend_on_seed_and_path_only(void **state)
{
    (void)state;
    float a[6], b[6], other[6];
    mu_context *c = quiet(7), *d = quiet(7), *e = quiet(8);
    read_parameter(small(c), "fc1.weight", a, 6);
    mu_module *m = mu_sequential(d); /* made in another order, after other modules */
    mu_module *head = mu_linear(d, 3, 2, &(mu_linear_options){.no_bias = true});
    mu_linear(d, 9, 9, NULL);
    assert_int_equal(mu_module_add(m, "fc1", mu_linear(d, 2, 3, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, "head", head), MU_OK);
    read_parameter(m, "fc1.weight", b, 6);
    assert_memory_equal(a, b, sizeof(a));
    read_parameter(m, "head.weight", b, 6);
    assert_memory_not_equal(a, b, sizeof(a));
    read_parameter(small(e), "fc1.weight", other, 6);
    assert_memory_not_equal(a, other, sizeof(a));
    close_ok(c);
    close_ok(d);
    close_ok(e);
}

static void moments(mu_module *m, const char *path, double *mean, double *deviation, double *most)
{
    int64_t n = mu_tensor_elements(mu_parameter_tensor(mu_module_get_parameter(m, path)));
    float *x = malloc((size_t)n * sizeof(*x));
    read_parameter(m, path, x, n);
    double sum = 0, squares = 0;
    *most = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i];
        squares += (double)x[i] * x[i];
        *most = fmax(*most, fabs((double)x[i]));
    }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
    free(x);
}

static void initial_values_have_pytorchs_distribution(void **state)
{
    (void)state;
    mu_context *c = quiet(3);
    mu_module *m = mu_sequential(c);
    mu_conv_options in = {.init = {MU_INIT_KAIMING_NORMAL_IN, 0}}, out = {.init = {MU_INIT_KAIMING_NORMAL, 0}};
    assert_int_equal(mu_sequential_append(m, mu_linear(c, 400, 100, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_conv2d_layer(c, 32, 64, 3, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_conv2d_layer(c, 32, 64, 3, &in)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_conv2d_layer(c, 32, 64, 3, &out)), MU_OK);
    double mean, deviation, most;
    moments(m, "0.weight", &mean, &deviation, &most); /* uniform in 1/sqrt(400) */
    assert_true(fabs(mean) < 0.001 && fabs(deviation / (0.05 / sqrt(3)) - 1) < 0.02 && most <= 0.05 && most > 0.0499);
    moments(m, "0.bias", &mean, &deviation, &most);
    assert_true(most <= 0.05 && most > 0.045);
    moments(m, "1.weight", &mean, &deviation, &most);
    assert_true(most <= 1 / sqrt(288) && most > 0.99 / sqrt(288) && fabs(deviation * sqrt(3 * 288) - 1) < 0.02);
    moments(m, "2.weight", &mean, &deviation, &most);
    assert_true(fabs(deviation / sqrt(2.0 / 288) - 1) < 0.02 && most > 3 * deviation);
    moments(m, "3.weight", &mean, &deviation, &most);
    assert_true(fabs(deviation / sqrt(2.0 / 576) - 1) < 0.02 && most > 3 * deviation);
    close_ok(c);
}

static int destroyed;
static void count_destroy(void *self)
{
    (void)self;
    destroyed++;
}

static void values_survive_changes_of_the_tree(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    float w[6] = {1, 2, 3, 4, 5, 6}, got[6], stats[3] = {7, 8, 9};
    write_parameter(m, "fc1.weight", w, 6);
    assert_int_equal(mu_tensor_write(mu_module_get_buffer(m, "norm.running_mean"), stats, 3), MU_OK);
    destroyed = 0;
    mu_module *fresh = mu_module_new(c, "Fresh", &(mu_module_options){.destroy = count_destroy});
    mu_parameter *extra = mu_module_parameter(fresh, "scale", MU_DIMS(4), (mu_init){MU_INIT_CONSTANT, 2.5f});
    assert_non_null(extra);
    assert_int_equal(mu_module_replace(m, "head", fresh), MU_OK);
    read_parameter(m, "head.scale", got, 4);
    assert_float_equal(got[3], 2.5, 0);
    read_parameter(m, "fc1.weight", got, 6);
    assert_memory_equal(got, w, sizeof(w));
    assert_int_equal(mu_tensor_read(mu_module_get_buffer(m, "norm.running_mean"), got, 3), MU_OK);
    assert_memory_equal(got, stats, sizeof(stats));
    assert_null(mu_module_get_parameter(m, "head.weight"));
    assert_int_equal(mu_module_remove(m, "head"), MU_OK);
    assert_int_equal(destroyed, 1);
    assert_int_equal(mu_module_add(m, "more", mu_linear(c, 3, 3, NULL)), MU_OK);
    names n = states(m);
    assert_string_equal(n.text, "fc1.weight:6 fc1.bias:3 norm.weight:3 norm.bias:3 norm.running_mean=3 "
                                "norm.running_var=3 norm.num_batches_tracked=i1 more.weight:9 more.bias:3 ");
    read_parameter(m, "fc1.weight", got, 6);
    assert_memory_equal(got, w, sizeof(w));
    close_ok(c);
}

/* A backbone is loaded, then becomes part of something bigger: before and after that has been used itself. */
static void former_roots_keep_their_values(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *backbone = small(c), *second = small(c), *whole = mu_sequential(c);
    float w[6] = {1, 2, 3, 4, 5, 6}, v[6] = {6, 5, 4, 3, 2, 1}, got[6], stats[3] = {7, 8, 9};
    write_parameter(backbone, "head.weight", w, 6);
    assert_int_equal(mu_tensor_write(mu_module_get_buffer(backbone, "norm.running_mean"), stats, 3), MU_OK);
    assert_int_equal(mu_module_remove(backbone, "fc1"), MU_OK); /* leaves graves, which move too */
    assert_int_equal(mu_module_add(whole, "backbone", backbone), MU_OK);
    assert_int_equal(mu_module_add(whole, "fc", mu_linear(c, 2, 2, NULL)), MU_OK);
    read_parameter(whole, "backbone.head.weight", got, 6);
    assert_memory_equal(got, w, sizeof(w));
    assert_string_equal(mu_parameter_name(mu_module_get_parameter(backbone, "head.weight")), "backbone.head.weight");
    write_parameter(second, "head.weight", v, 6);
    assert_int_equal(mu_module_remove(second, "fc1"), MU_OK);
    assert_int_equal(mu_module_replace(whole, "fc", second), MU_OK); /* both have been used */
    read_parameter(whole, "fc.head.weight", got, 6);
    assert_memory_equal(got, v, sizeof(v));
    read_parameter(whole, "backbone.head.weight", got, 6);
    assert_memory_equal(got, w, sizeof(w));
    assert_int_equal(mu_tensor_read(mu_module_get_buffer(whole, "backbone.norm.running_mean"), got, 3), MU_OK);
    assert_memory_equal(got, stats, sizeof(stats));
    /* With an optimiser of its own, state would be lost: refused, and the module stays usable. */
    mu_module *third = small(c);
    assert_non_null(mu_sgd(third, 0.1f, &(mu_sgd_options){.momentum = 0.9f}));
    assert_int_equal(mu_module_add(whole, "third", third), MU_ERR_STATE);
    expect(c, MU_ERR_STATE, "has an optimiser");
    assert_int_equal(states(third).count, 8);
    close_ok(c);
}

static void shared_parameters_are_one(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = mu_sequential(c), *a = mu_linear(c, 2, 2, NULL);
    mu_module *b = mu_module_new(c, "Tied", NULL);
    assert_int_equal(mu_module_add(m, "a", a), MU_OK);
    assert_int_equal(mu_module_add(m, "b", b), MU_OK);
    assert_int_equal(mu_module_share(b, "weight", mu_module_get_parameter(m, "a.weight")), MU_OK);
    assert_string_equal(states(m).text, "a.weight:4 a.bias:2 b.weight:4 ");
    names n = {0};
    assert_int_equal(mu_module_each_parameter(m, note_parameter, &n), MU_OK);
    assert_string_equal(n.text, "a.weight a.bias ");
    assert_int_equal(mu_module_parameter_elements(m), 6);
    assert_ptr_equal(mu_module_get_parameter(m, "b.weight"), mu_module_get_parameter(m, "a.weight"));
    int64_t count = 0;
    assert_int_equal(mu_module_freeze(m, "b.*", &count), MU_OK);
    assert_int_equal(count, 1);
    assert_false(mu_parameter_trainable(mu_module_get_parameter(m, "a.weight")));
    /* It outlives its first holder, and takes the other name. */
    float w[4] = {1, 2, 3, 4}, got[4];
    write_parameter(m, "a.weight", w, 4);
    assert_int_equal(mu_module_remove(m, "a"), MU_OK);
    read_parameter(m, "b.weight", got, 4);
    assert_memory_equal(got, w, sizeof(w));
    assert_string_equal(mu_parameter_name(mu_module_get_parameter(m, "b.weight")), "b.weight");
    /* Two trees cannot both hold it. */
    mu_module *foreign = mu_module_new(c, "Foreign", NULL);
    assert_int_equal(mu_module_share(foreign, "w", mu_module_get_parameter(m, "b.weight")), MU_OK);
    assert_int_equal(mu_module_each_parameter(foreign, note_parameter, &n), MU_ERR_STATE);
    expect(c, MU_ERR_STATE, "shared with another tree");
    close_ok(c);
}

static void freezing_by_pattern(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    int64_t count = 0;
    assert_int_equal(mu_module_freeze(m, "*", &count), MU_OK);
    assert_int_equal(count, 5);
    assert_int_equal(mu_module_unfreeze(m, "*.bias", &count), MU_OK);
    assert_int_equal(count, 2);
    assert_true(mu_parameter_trainable(mu_module_get_parameter(m, "fc1.bias")));
    assert_false(mu_parameter_trainable(mu_module_get_parameter(m, "fc1.weight")));
    assert_int_equal(mu_module_unfreeze(mu_module_get(m, "fc1"), "weight", &count), MU_OK); /* relative to it */
    assert_true(mu_parameter_trainable(mu_module_get_parameter(m, "fc1.weight")));
    count = 77;
    assert_int_equal(mu_module_freeze(m, "layer9.*", &count), MU_ERR_ARG);
    assert_int_equal(count, 77);
    expect(c, MU_ERR_ARG, "matches \"layer9.*\"");
    close_ok(c);
}

static void training_flags_reach_below(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    assert_true(mu_module_is_training(mu_module_get(m, "norm")));
    mu_module_train(m, false);
    assert_false(mu_module_is_training(mu_module_get(m, "norm")));
    mu_module_train(mu_module_get(m, "norm"), true);
    assert_true(mu_module_is_training(mu_module_get(m, "norm")));
    assert_false(mu_module_is_training(m));
    close_ok(c);
}

static void printing_is_pythons(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    assert_int_equal(mu_module_add(m, "inner", mu_sequential(c)), MU_OK);
    assert_int_equal(mu_sequential_append(mu_module_get(m, "inner"), mu_dropout_layer(c, 0.5f)), MU_OK);
    assert_int_equal(mu_sequential_append(mu_module_get(m, "inner"), mu_relu_layer(c)), MU_OK);
    const char *want = "Sequential(\n"
                       "  (fc1): Linear(in_features=2, out_features=3, bias=True)\n"
                       "  (norm): BatchNorm2d(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)\n"
                       "  (head): Linear(in_features=3, out_features=2, bias=False)\n"
                       "  (inner): Sequential(\n"
                       "    (0): Dropout(p=0.5, inplace=False)\n"
                       "    (1): ReLU()\n"
                       "  )\n"
                       ")";
    char out[1000], few[12];
    assert_int_equal(mu_module_print(m, out, sizeof(out)), strlen(want));
    assert_string_equal(out, want);
    assert_int_equal(mu_module_print(m, few, sizeof(few)), strlen(want));
    assert_string_equal(few, "Sequential(");
    assert_int_equal(mu_module_print(m, NULL, 0), strlen(want));
    close_ok(c);
}

/* -- running ---------------------------------------------------------------------------------------------------- */
static mu_tensor *note_path(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self;
    (void)t;
    mu_context *c = mu_module_context(m);
    print_message("in \"%s\"\n", c->here.path);
    check_expected_ptr(c->here.path);
    return x;
}

static mu_tensor *calls_grandchild(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_forward(t, mu_module_get(self, "list.0"), x);
}

static void paths_name_the_module(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = mu_module_new(c, "Net", &(mu_module_options){.forward = calls_grandchild});
    mu_module *list = mu_sequential(c);
    assert_int_equal(mu_module_add(m, "list", list), MU_OK);
    assert_int_equal(mu_sequential_append(list, mu_module_new(c, "Probe", &(mu_module_options){.forward = note_path})),
                     MU_OK);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_tensor *x = mu_tensor_zeros(t, MU_DIMS(2, 2));
    expect_string(note_path, c->here.path, "list.0");
    assert_ptr_equal(mu_forward(t, m, x), x);
    assert_string_equal(c->here.path, "");
    /* An error inside names the path. */
    assert_int_equal(mu_module_replace(m, "list.0", mu_linear(c, 5, 1, NULL)), MU_OK);
    assert_null(mu_forward(t, m, x));
    expect(c, MU_ERR_SHAPE, "list.0");
    assert_null(mu_forward(t, mu_module_get(m, "missing"), x));
    expect(c, MU_ERR_ARG, "module is NULL");
    close_ok(c);
}

static void batch_norm_counts_and_follows_its_mode(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *bn = mu_batch_norm_layer(c, 1, &(mu_batch_norm_options){.momentum = -1});
    mu_tape *t = mu_tape_new(c, NULL);
    const float first[4] = {0, 2, 0, 2}, second[4] = {4, 6, 4, 6};
    int64_t batches = -1;
    float mean = 0;
    assert_non_null(mu_forward(t, bn, mu_tensor_from(t, MU_DIMS(4, 1), first)));
    assert_non_null(mu_forward(t, bn, mu_tensor_from(t, MU_DIMS(4, 1), second)));
    assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(bn, "num_batches_tracked"), &batches, 1), MU_OK);
    assert_int_equal(batches, 2);
    assert_int_equal(mu_tensor_read(mu_module_get_buffer(bn, "running_mean"), &mean, 1), MU_OK);
    assert_float_equal(mean, 3, 1e-6); /* the average of 1 and 5 */
    mu_module_train(bn, false);
    float y[4];
    assert_int_equal(mu_tensor_read(mu_forward(t, bn, mu_tensor_from(t, MU_DIMS(4, 1), first)), y, 4), MU_OK);
    assert_true(y[0] < 0 && y[1] < 0); /* 0 and 2 lie below the running mean */
    assert_int_equal(mu_tensor_read_i64(mu_module_get_buffer(bn, "num_batches_tracked"), &batches, 1), MU_OK);
    assert_int_equal(batches, 2);
    close_ok(c);
}

static void gradients_and_clearing(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = mu_mlp(c, 2, (int64_t[]){3}, 1, 2);
    mu_tape *t = mu_tape_new(c, NULL);
    const float x[4] = {1, 2, 3, 4};
    const int64_t y[2] = {0, 1};
    assert_int_equal(mu_module_freeze(m, "0.bias", NULL), MU_OK);
    mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 2), x)),
                                       mu_tensor_from_i64(t, MU_DIMS(2), y));
    assert_int_equal(mu_backward(t, loss), MU_OK);
    assert_non_null(mu_parameter_grad(mu_module_get_parameter(m, "2.weight")));
    assert_null(mu_parameter_grad(mu_module_get_parameter(m, "0.bias")));
    assert_int_equal(mu_module_zero_grad(mu_module_get(m, "2")), MU_OK);
    assert_null(mu_parameter_grad(mu_module_get_parameter(m, "2.weight")));
    assert_non_null(mu_parameter_grad(mu_module_get_parameter(m, "0.weight")));
    assert_int_equal(mu_module_zero_grad(m), MU_OK);
    assert_null(mu_parameter_grad(mu_module_get_parameter(m, "0.weight")));
    close_ok(c);
}

static void heads_are_known_and_replaced(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    for (const char *const *name = mu_model_names(); *name != NULL; name++) {
        mu_module *m = mu_model(c, *name, &(mu_model_options){.classes = 7});
        assert_non_null(m);
        const char *head = mu_model_head(m);
        assert_non_null(head);
        char path[40];
        snprintf(path, sizeof(path), "%s.bias", head);
        assert_int_equal(mu_tensor_elements(mu_parameter_tensor(mu_module_get_parameter(m, path))), 7);
        assert_int_equal(mu_model_replace_head(m, 4), MU_OK);
        assert_int_equal(mu_tensor_elements(mu_parameter_tensor(mu_module_get_parameter(m, path))), 4);
    }
    assert_null(mu_model(c, "resnet19", NULL));
    expect(c, MU_ERR_ARG, "there is no model \"resnet19\"; there are resnet20,");
    assert_int_equal(mu_model_replace_head(mu_sequential(c), 3), MU_ERR_ARG);
    mu_context_clear(c);
    assert_null(mu_resnet_cifar(c, 21, NULL));
    expect(c, MU_ERR_ARG, "depth 21");
    close_ok(c);
}

/* An optimiser on a module that is replaced gets an error, not freed memory. */
static void users_of_removed_modules_get_errors(void **state)
{
    (void)state;
    mu_context *c = quiet(1);
    mu_module *m = small(c);
    mu_optimizer *o = mu_sgd(mu_module_get(m, "head"), 0.1f, &(mu_sgd_options){.momentum = 0.9f});
    assert_non_null(o);
    assert_int_equal(mu_module_replace(m, "head", mu_linear(c, 3, 5, NULL)), MU_OK);
    assert_int_equal(states(m).count, 9);
    assert_int_equal(mu_optimizer_step(o), MU_ERR_STATE);
    expect(c, MU_ERR_STATE, "removed from its tree");
    mu_optimizer_free(o);
    close_ok(c);
}

/* -- failures --------------------------------------------------------------------------------------------------- */
/* Builds, uses and changes a tree; false when something failed. */
static bool build_and_change(mu_context *c)
{
    mu_module *m = mu_sequential(c), *b = mu_small_cnn(c, 1, 4, 2), *whole = mu_sequential(c);
    names n = {0};
    return mu_module_add(m, "fc", mu_linear(c, 2, 3, NULL)) == MU_OK &&
           mu_module_add(m, "bn", mu_batch_norm_layer(c, 3, NULL)) == MU_OK &&
           mu_module_each_parameter(b, note_parameter, &n) == MU_OK &&
           mu_module_each_state(m, note_state, &n) == MU_OK && mu_module_freeze(m, "fc.*", NULL) == MU_OK &&
           mu_adam(m, 0.1f, NULL) != NULL && mu_model_replace_head(b, 3) == MU_OK &&
           mu_module_add(whole, "a", m) == MU_OK && mu_module_each_state(whole, note_state, &n) == MU_OK &&
           mu_module_add(whole, "b", b) == MU_OK && mu_module_remove(whole, "a.bn") == MU_OK &&
           mu_module_each_state(whole, note_state, &n) == MU_OK && mu_module_print(whole, NULL, 0) > 100;
}

static bool build_resnets(mu_context *c)
{
    return mu_resnet_cifar(c, 20, NULL) != NULL && mu_resnet(c, 50, NULL) != NULL;
}

static void fail_each(bool (*build)(mu_context *c), int64_t step)
{
    mu_context *c = quiet(1);
    assert_true(build(c));
    int64_t all = (int64_t)c->allocations;
    close_ok(c);
    assert_true(all > 100);
    for (int64_t k = 0; k < all; k += step) {
        c = quiet(1);
        c->fail_after = k;
        bool done = build(c);
        if (!done) {
            assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
        }
        assert_int_equal(mu_context_close(c), done ? MU_OK : MU_ERR_NOMEM);
    }
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    fail_each(build_and_change, 1);
    fail_each(build_resnets, 41);
}

static mu_tensor *calls_itself(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_forward(t, self, x);
}

/* self left NULL is the module itself: easily called by mistake. */
static void a_forward_that_calls_itself_is_an_error(void **state)
{
    (void)state;
    mu_context *c = quiet(0);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_module *m = mu_module_new(c, "Loop", &(mu_module_options){.forward = calls_itself});
    mu_module_parameter(m, "p", MU_DIMS(2), (mu_init){0});
    for (int i = 0; i < 2; i++) {
        assert_null(mu_forward(t, m, mu_tensor_zeros(t, MU_DIMS(2))));
        expect(c, MU_ERR_LIMIT, "call itself");
        mu_module *root = mu_sequential(c);
        assert_int_equal(mu_module_add(root, "below", m), MU_OK);
        m = root;
    }
    close_ok(c);
}

static void absurd_arguments_are_errors(void **state)
{
    (void)state;
    mu_context *c = quiet(0);
    mu_module *m = mu_linear(c, 2, 2, NULL);
    assert_int_equal(mu_module_each_parameter(m, NULL, NULL), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "NULL");
    assert_int_equal(mu_module_each_state(m, NULL, NULL), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "NULL");
    assert_true(mu_module_print(m, NULL, 10) > 10);
    assert_null(mu_small_cnn(c, 1, INT32_MAX - 3, 2)); /* 64 * (side / 4)^2 is 2^64 */
    expect(c, MU_ERR_ARG, "side 2147483644");
    assert_null(mu_model(c, "mlp", &(mu_model_options){.side = INT32_MAX, .in_channels = INT32_MAX}));
    expect(c, MU_ERR_ARG, "side 2147483647");
    assert_null(mu_batch_norm_layer(c, 4, &(mu_batch_norm_options){.momentum = 7}));
    expect(c, MU_ERR_ARG, "momentum 7");
    close_ok(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(state_dict_order_is_pytorchs),
        cmocka_unit_test(names_are_checked),
        cmocka_unit_test(building_is_sticky),
        cmocka_unit_test(initial_values_depend_on_seed_and_path_only),
        cmocka_unit_test(initial_values_have_pytorchs_distribution),
        cmocka_unit_test(values_survive_changes_of_the_tree),
        cmocka_unit_test(former_roots_keep_their_values),
        cmocka_unit_test(shared_parameters_are_one),
        cmocka_unit_test(freezing_by_pattern),
        cmocka_unit_test(training_flags_reach_below),
        cmocka_unit_test(printing_is_pythons),
        cmocka_unit_test(paths_name_the_module),
        cmocka_unit_test(batch_norm_counts_and_follows_its_mode),
        cmocka_unit_test(gradients_and_clearing),
        cmocka_unit_test(heads_are_known_and_replaced),
        cmocka_unit_test(users_of_removed_modules_get_errors),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(absurd_arguments_are_errors),
        cmocka_unit_test(a_forward_that_calls_itself_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
