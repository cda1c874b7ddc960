/* Optimisers over changing trees, on parts of trees, and what io sees of them. Arithmetic: optim_oracle.py. */
#include "base/context.h"
#include "base/rng.h"
#include "optim/optimizer.h"
#include "tape/store.h"
#include <muster/layers.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

static mu_context *quiet(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 2});
    assert_non_null(c);
    return c;
}

static void expect(mu_context *c, mu_status s, const char *part)
{
    assert_int_equal(mu_context_status(c), s);
    if (strstr(mu_context_message(c), part) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", part, mu_context_message(c));
    }
    mu_context_clear(c);
}

/* Conv, batch norm, head: blocked layouts where the kernels have them. */
static mu_module *net(mu_context *c)
{
    mu_module *m = mu_sequential(c);
    assert_int_equal(mu_module_add(m, "conv", mu_conv2d_layer(c, 16, 16, 3, &(mu_conv_options){.padding = 1})), MU_OK);
    assert_int_equal(mu_module_add(m, "bn", mu_batch_norm_layer(c, 16, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, "fc", mu_linear(c, 16, 3, NULL)), MU_OK);
    return m;
}

#define MOST 2304
static mu_parameter *param(mu_module *m, const char *path)
{
    mu_parameter *p = mu_module_get_parameter(m, path);
    assert_non_null(p);
    return p;
}

/* A gradient of step for the parameter, the same in every run; none when it should have none. */
static void give_gradient(mu_parameter *p, uint64_t step, bool present)
{
    static float g[MOST];
    int64_t n = mu_tensor_elements(&p->value);
    p->grad_state = MUI_GRAD_NONE;
    if (!present) {
        return;
    }
    mui_rng r;
    mui_rng_init(&r, step, mui_hash_string(MUI_HASH_START, p->name));
    for (int64_t i = 0; i < n; i++) {
        g[i] = mui_rng_normal(&r);
    }
    assert_int_equal(mui_tensor_set_raw(&p->grad_view, g, (size_t)n * sizeof(float)), MU_OK);
    p->grad_state = MUI_GRAD_LOCAL;
}

static void steps(mu_module *m, mu_optimizer *o, uint64_t from, uint64_t to)
{
    for (uint64_t step = from; step < to; step++) {
        mui_store *s = mui_store_of(m);
        assert_non_null(s);
        for (int64_t i = 0; i < s->count; i++) {
            give_gradient(s->parameters[i], step, !s->parameters[i]->frozen && (step + (uint64_t)i) % 5 != 0);
        }
        assert_int_equal(mu_optimizer_step(o), MU_OK);
    }
}

static void read_value(mu_module *m, const char *path, float *out)
{
    mu_parameter *p = param(m, path);
    assert_int_equal(mu_tensor_read(&p->value, out, mu_tensor_elements(&p->value)), MU_OK);
}

static mu_optimizer *adam_or_sgd(mu_module *m, bool adam)
{
    return adam ? mu_adam(m, 0.01f, NULL) : mu_sgd(m, 0.01f, &(mu_sgd_options){.momentum = 0.9f});
}

/* Parameters that stay go on as if nothing had happened, bit for bit; new ones start at zero. Also over a change of
 * the slabs' order, as the reducer makes it. */
static void state_survives_changes_of_the_tree(void **state)
{
    (void)state;
    for (int adam = 0; adam < 2; adam++) {
        mu_context *c = quiet(), *d = quiet();
        mu_module *m = net(c), *plain = net(d);
        mu_optimizer *o = adam_or_sgd(m, adam), *p = adam_or_sgd(plain, adam);
        steps(m, o, 0, 12);
        assert_int_equal(mu_module_replace(m, "fc", mu_linear(c, 16, 3, NULL)), MU_OK);
        steps(m, o, 12, 18);
        mui_store *s = mui_store_of(m);
        const int64_t order[] = {2, 0, 1, 5, 4, 3}, cut[] = {2, 4};
        const size_t tails[] = {5, 0};
        assert_int_equal(s->count, 6);
        assert_int_equal(mui_store_relayout(s, order, cut, tails, 2), MU_OK);
        steps(m, o, 18, 24);
        steps(plain, p, 0, 24);
        static float a[MOST], b[MOST];
        read_value(m, "conv.weight", a);
        read_value(plain, "conv.weight", b);
        assert_memory_equal(a, b, sizeof(a));
        read_value(m, "bn.bias", a);
        read_value(plain, "bn.bias", b);
        assert_memory_equal(a, b, 16 * sizeof(float));
        /* The new head equals one that was trained from its start, without a history. */
        mu_context *e = quiet();
        mu_module *late = net(e);
        mu_optimizer *q = adam_or_sgd(late, adam);
        steps(late, q, 12, 24);
        read_value(m, "fc.weight", a);
        read_value(late, "fc.weight", b);
        assert_memory_equal(a, b, 48 * sizeof(float));
        read_value(plain, "fc.weight", b);
        assert_memory_not_equal(a, b, 48 * sizeof(float));
        assert_int_equal(mu_optimizer_steps(o), 24);
        assert_int_equal(mu_context_close(c), MU_OK);
        assert_int_equal(mu_context_close(d), MU_OK);
        assert_int_equal(mu_context_close(e), MU_OK);
    }
}

static void frozen_and_absent_are_untouched(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_module *m = net(c);
    mu_optimizer *o = mu_adamw(m, 0.1f, &(mu_adam_options){.weight_decay = 0.5f});
    static float before[MOST], after[MOST];
    assert_int_equal(mu_module_freeze(m, "conv.*", NULL), MU_OK);
    read_value(m, "conv.weight", before);
    steps(m, o, 0, 4);
    read_value(m, "conv.weight", after);
    assert_memory_equal(before, after, sizeof(before));
    /* No gradient: no decay either. */
    read_value(m, "fc.weight", before);
    give_gradient(param(m, "fc.weight"), 0, false);
    give_gradient(param(m, "fc.bias"), 9, true);
    assert_int_equal(mu_optimizer_step(o), MU_OK);
    read_value(m, "fc.weight", after);
    assert_memory_equal(before, after, 48 * sizeof(float));
    assert_null(mu_parameter_grad(param(m, "fc.bias")));
    mu_optimizer_keep_grad(o, true);
    give_gradient(param(m, "fc.bias"), 9, true);
    assert_int_equal(mu_optimizer_step(o), MU_OK);
    assert_non_null(mu_parameter_grad(param(m, "fc.bias")));
    assert_int_equal(mu_context_close(c), MU_OK);
}

/* Two optimisers, one for each part of a tree. */
static void a_part_of_a_tree(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_module *m = net(c);
    mu_optimizer *head = mu_sgd(mu_module_get(m, "fc"), 0.1f, &(mu_sgd_options){.momentum = 0.9f});
    static float before[MOST], after[MOST];
    read_value(m, "conv.weight", before);
    give_gradient(param(m, "conv.weight"), 1, true);
    give_gradient(param(m, "fc.weight"), 1, true);
    float fc[48], fc_after[48];
    read_value(m, "fc.weight", fc);
    assert_int_equal(mu_optimizer_step(head), MU_OK);
    read_value(m, "conv.weight", after);
    assert_memory_equal(before, after, sizeof(before));
    assert_non_null(mu_parameter_grad(param(m, "conv.weight"))); /* another optimiser's */
    read_value(m, "fc.weight", fc_after);
    assert_memory_not_equal(fc, fc_after, sizeof(fc));
    assert_int_equal(mui_optimizer_count(head), 2);
    assert_string_equal(mui_optimizer_get(head, 0).parameter->name, "fc.weight");
    assert_int_equal(mu_context_close(c), MU_OK);
}

/* An optimiser of a network that becomes part of a bigger one. */
static void the_root_may_get_a_parent(void **state)
{
    (void)state;
    mu_context *c = quiet(), *d = quiet();
    mu_module *m = net(c), *plain = net(d);
    mu_optimizer *o = adam_or_sgd(m, false), *p = adam_or_sgd(plain, false);
    steps(m, o, 0, 3);
    mu_module *whole = mu_sequential(c);
    assert_int_equal(mu_module_add(whole, "m", m), MU_OK);
    assert_int_equal(mu_module_add(whole, "more", mu_linear(c, 3, 3, NULL)), MU_OK);
    steps(plain, p, 0, 3);
    assert_int_equal(mui_optimizer_count(o), 6);
    give_gradient(param(plain, "fc.bias"), 8, true);
    give_gradient(param(m, "fc.bias"), 8, true); /* another name now, so other numbers: copy them */
    float g[3], a[3], b[3];
    assert_int_equal(mu_tensor_read(mu_parameter_grad(param(plain, "fc.bias")), g, 3), MU_OK);
    assert_int_equal(mu_tensor_write(mu_parameter_grad(param(m, "fc.bias")), g, 3), MU_OK);
    assert_int_equal(mu_optimizer_step(o), MU_OK);
    assert_int_equal(mu_optimizer_step(p), MU_OK);
    read_value(m, "fc.bias", a);
    read_value(plain, "fc.bias", b);
    assert_memory_equal(a, b, sizeof(a));
    assert_int_equal(mu_context_close(c), MU_OK);
    assert_int_equal(mu_context_close(d), MU_OK);
}

static void state_can_be_carried_by_hand(void **state)
{
    (void)state;
    mu_context *c = quiet(), *d = quiet();
    mu_module *m = net(c), *n = net(d);
    mu_optimizer *o = mu_adam(m, 0.01f, NULL), *p = mu_adam(n, 0.01f, NULL);
    assert_int_equal(mu_module_freeze(m, "bn.weight", NULL), MU_OK);
    steps(m, o, 0, 7);
    assert_int_equal(mui_optimizer_count(o), 6);
    assert_int_equal(mui_optimizer_count(p), 6);
    assert_int_equal(mui_optimizer_states(o), 2);
    assert_string_equal(mui_optimizer_state_name(o, 1), "exp_avg_sq");
    static float x[MOST];
    for (int64_t i = 0; i < 6; i++) {
        mui_optimizer_entry e = mui_optimizer_get(o, i);
        int64_t elements = mu_tensor_elements(&e.parameter->value);
        assert_int_equal(e.has_state, i != 2);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(mui_optimizer_read_state(o, i, k, x, elements), MU_OK);
            assert_int_equal(mui_optimizer_write_state(p, i, k, x, elements), MU_OK);
        }
        mui_optimizer_set_progress(p, i, e.has_state, e.step);
        assert_int_equal(mu_tensor_read(&e.parameter->value, x, elements), MU_OK);
        assert_int_equal(mu_tensor_write(&mui_optimizer_get(p, i).parameter->value, x, elements), MU_OK);
    }
    mui_optimizer_set_steps(p, 7);
    assert_int_equal(mui_optimizer_read_state(o, 0, 0, x, 5), MU_ERR_ARG);
    mu_context_clear(c);
    steps(m, o, 7, 10);
    assert_int_equal(mu_module_freeze(n, "bn.weight", NULL), MU_OK);
    steps(n, p, 7, 10);
    static float y[MOST];
    read_value(m, "conv.weight", x);
    read_value(n, "conv.weight", y);
    assert_memory_equal(x, y, sizeof(x));
    assert_int_equal(mu_optimizer_steps(o), mu_optimizer_steps(p));
    assert_int_equal(mu_context_close(c), MU_OK);
    assert_int_equal(mu_context_close(d), MU_OK);
}

static void clipping(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_module *m = net(c);
    float g[3] = {3, 0, 4}, norm = 0, got[3];
    give_gradient(param(m, "fc.bias"), 0, true);
    assert_int_equal(mu_tensor_write(mu_parameter_grad(param(m, "fc.bias")), g, 3), MU_OK);
    assert_int_equal(mu_clip_grad_norm(m, 10, &norm), MU_OK);
    assert_float_equal(norm, 5, 1e-6);
    assert_int_equal(mu_tensor_read(mu_parameter_grad(param(m, "fc.bias")), got, 3), MU_OK);
    assert_memory_equal(g, got, sizeof(g));
    assert_int_equal(mu_clip_grad_norm(m, 1, &norm), MU_OK);
    assert_int_equal(mu_tensor_read(mu_parameter_grad(param(m, "fc.bias")), got, 3), MU_OK);
    assert_float_equal(got[2], 0.8, 1e-5);
    g[1] = INFINITY;
    assert_int_equal(mu_tensor_write(mu_parameter_grad(param(m, "fc.bias")), g, 3), MU_OK);
    assert_int_equal(mu_clip_grad_norm(m, 1, &norm), MU_ERR_STATE);
    expect(c, MU_ERR_STATE, "fc.bias");
    assert_int_equal(mu_tensor_read(mu_parameter_grad(param(m, "fc.bias")), got, 3), MU_OK);
    assert_float_equal(got[2], 4, 0);
    assert_float_equal(norm, 5, 1e-5); /* of the last call that succeeded */
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void bad_options(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_module *m = net(c);
    assert_null(mu_sgd(m, -1, NULL));
    expect(c, MU_ERR_ARG, "lr -1");
    assert_null(mu_sgd(m, 1, &(mu_sgd_options){.nesterov = true}));
    expect(c, MU_ERR_ARG, "Nesterov");
    assert_null(mu_adam(m, 1, &(mu_adam_options){.beta1 = 1}));
    expect(c, MU_ERR_ARG, "betas 1");
    assert_null(mu_adam(m, NAN, NULL));
    mu_context_clear(c);
    mu_optimizer *o = mu_sgd(m, 1, NULL);
    assert_int_equal(mu_optimizer_add_group(o, &(mu_param_group){.pattern = "nope.*"}), MU_ERR_ARG);
    expect(c, MU_ERR_ARG, "\"nope.*\"");
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void steps_allocate_nothing(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_module *m = net(c);
    mu_optimizer *o = mu_adam(m, 0.01f, NULL);
    steps(m, o, 0, 2);
    uint64_t before = c->allocations;
    steps(m, o, 2, 5);
    assert_int_equal(mu_clip_grad_norm(m, 1, NULL), MU_OK);
    assert_int_equal(c->allocations, before);
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    bool done = false;
    for (int64_t k = 0; !done; k++) {
        mu_context *c = quiet();
        mu_module *m = net(c);
        assert_non_null(m);
        c->fail_after = k;
        mu_optimizer *o = mu_adam(m, 0.01f, NULL);
        done = o != NULL && mu_optimizer_add_group(o, &(mu_param_group){.pattern = "*.bias"}) == MU_OK &&
               mu_module_remove(m, "bn") == MU_OK && mu_optimizer_step(o) == MU_OK;
        assert_int_equal(mu_context_status(c), done ? MU_OK : MU_ERR_NOMEM); /* no error is left by what succeeded */
        assert_true(!done || k > 10);
        mu_context_clear(c);
        assert_int_equal(mu_context_close(c), MU_OK);
    }
}

static void rates_that_cannot_be(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_optimizer *o = mu_sgd(net(c), 0.5f, NULL);
    const float bad[] = {NAN, INFINITY, -1};
    for (int i = 0; i < 3; i++) {
        mu_optimizer_set_lr(o, bad[i]);
        expect(c, MU_ERR_ARG, "learning rate");
        assert_true(mu_optimizer_lr(o) == 0.5f);
    }
    mu_schedule s = {.kind = MU_SCHEDULE_CONSTANT, .lr = 1, .warmup_steps = 4};
    assert_true(mu_schedule_lr(&s, -3) == mu_schedule_lr(&s, 0));
    s = (mu_schedule){.kind = MU_SCHEDULE_STEP, .lr = 1, .step_size = 2};
    assert_true(mu_schedule_lr(&s, -5) == 1);
    assert_int_equal(mu_context_close(c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(state_survives_changes_of_the_tree),
        cmocka_unit_test(frozen_and_absent_are_untouched),
        cmocka_unit_test(a_part_of_a_tree),
        cmocka_unit_test(the_root_may_get_a_parent),
        cmocka_unit_test(state_can_be_carried_by_hand),
        cmocka_unit_test(clipping),
        cmocka_unit_test(bad_options),
        cmocka_unit_test(steps_allocate_nothing),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(rates_that_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
