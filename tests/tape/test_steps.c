/* Many steps: no allocation after warm-up, no growth, and every failed allocation is survived. */
#include "tape/count_malloc.h"
#include "tape/fixture.h"

/* A small residual network with every kind of op that a step of training has. */
static void make_net(world *w)
{
    add_parameter(w, MU_DIMS(16, 3, 3, 3), 1);
    add_parameter(w, MU_DIMS(16), 0);
    add_parameter(w, MU_DIMS(16), 0);
    add_parameter(w, MU_DIMS(16, 16, 3, 3), 1);
    add_parameter(w, MU_DIMS(16), 0);
    add_parameter(w, MU_DIMS(16), 0);
    add_parameter(w, MU_DIMS(5, 20), 0);
    add_parameter(w, MU_DIMS(5), 0);
    add_parameter(w, MU_DIMS(16, 1), 0);
}

static mu_tensor *run_net(world *w, mu_tensor *x, mu_tensor *labels)
{
    mu_tape *t = w->t;
    mu_parameter *p = w->p;
    mu_conv2d_options same = {.padding = {1, 1}};
    mu_batch_norm_options relu = {.relu = true};
    mu_tensor *h = mu_conv2d(t, x, &p[0].value, NULL, &same);
    h = mu_batch_norm(t, h, &p[1].value, &p[2].value, NULL, NULL, &relu);
    h = mu_max_pool2d(t, h, 2, 2, NULL);
    mu_tensor *k = mu_conv2d(t, h, &p[3].value, NULL, &same);
    k = mu_batch_norm(t, k, &p[4].value, &p[5].value, NULL, NULL, NULL);
    h = mu_add_relu(t, k, h);
    h = mu_dropout(t, h, 0.2f);
    mu_no_grad_begin(t, "statistics");
    mu_tensor *seen = mu_mean(t, h);
    mu_no_grad_end(t);
    h = mu_flatten(t, mu_global_avg_pool2d(t, h), 1);
    mu_tensor *parts[2] = {mu_tanh(t, h), mu_narrow(t, mu_gelu(t, h), 1, 2, 4)};
    h = mu_concat(t, parts, 2, 1);
    h = mu_linear_op(t, h, &p[6].value, &p[7].value);
    mu_tensor *loss = mu_cross_entropy(t, h, labels);
    loss = mu_add(t, loss, mu_scale(t, mu_sum(t, mu_mul(t, &p[8].value, &p[8].value)), 0.01f));
    return mu_sub(t, loss, mu_detach(t, mu_scale(t, seen, 0.0f)));
}

static mu_status step(world *w)
{
    mu_tape_reset(w->t);
    mu_tape_set_step(w->t, 3);
    float x[4 * 3 * 8 * 8];
    for (size_t i = 0; i < sizeof(x) / sizeof(x[0]); i++) {
        x[i] = (float)(i * 37 % 101) / 50.0f - 1.0f;
    }
    int64_t labels[4] = {0, 4, 2, -100};
    mu_tensor *in = mu_tensor_from(w->t, MU_DIMS(4, 3, 8, 8), x);
    mu_tensor *y = mu_tensor_from_i64(w->t, MU_DIMS(4), labels);
    mu_tensor *loss = run_net(w, in, y);
    if (loss == NULL) {
        return mu_context_status(w->c);
    }
    mui_store_zero_grad(w->s);
    mu_status s = mui_backward_mark(w->t, loss, w->s);
    return s == MU_OK ? mui_backward_run(w->t, loss, 1.0f, w->s) : s;
}

static void steady(mu_kernel_choice kernels, bool bf16)
{
    world w;
    open_world(&w, &(mu_context_options){.kernels = kernels, .seed = 2, .log_level = MU_LOG_QUIET},
               &(mu_tape_options){.bf16 = bf16});
    make_net(&w);
    build(&w);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(step(&w), MU_OK);
    }
    uint64_t before = w.c->allocations;
    long mallocs = malloc_calls;
    size_t peak = mu_tape_peak_bytes(w.t), held = mui_pool_held_bytes(w.t->pool);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(step(&w), MU_OK);
    }
    assert_int_equal(w.c->allocations, before);
    assert_int_equal(malloc_calls, mallocs);
    assert_int_equal(mu_tape_peak_bytes(w.t), peak);
    assert_int_equal(mui_pool_held_bytes(w.t->pool), held);
    assert_padding_zero(&w);
    for (int i = 0; i < w.count; i++) {
        assert_non_null(mu_parameter_grad(&w.p[i]));
    }
    close_world(&w);
}

static void a_steady_step_allocates_nothing(void **state)
{
    (void)state;
#if COUNTS_MALLOC
    long before = malloc_calls;
    void *volatile p = malloc(10);
    free(p);
    assert_int_equal(malloc_calls, before + 1); /* the counter counts */
#endif
    steady(MU_KERNELS_REFERENCE, false);
    steady(MU_KERNELS_REFERENCE, true);
    steady(MU_KERNELS_DEFAULT, false);
    steady(MU_KERNELS_DEFAULT, true);
}

/* Gradients of all parameters in one vector. */
static size_t gather(world *w, float *out)
{
    size_t n = 0;
    for (int i = 0; i < w->count; i++) {
        mu_tensor *g = mu_parameter_grad(&w->p[i]);
        assert_non_null(g);
        assert_int_equal(mu_tensor_read(g, out + n, mu_tensor_elements(g)), MU_OK);
        n += (size_t)mu_tensor_elements(g);
    }
    return n;
}

/* From opening the tape to the gradients of the second step, with the k-th allocation failing; true when none failed
 * any more. Then, without a failure, everything must come out right. */
static bool survives(mu_kernel_choice kernels, int64_t k, bool forever, const float *want, size_t count)
{
    world w;
    memset(&w, 0, sizeof(w));
    w.c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 2, .kernels = kernels});
    make_net(&w);
    w.c->fail_after = k;
    w.c->fail_forever = forever;
    w.t = mu_tape_new(w.c, NULL);
    w.s = w.t != NULL ? mui_store_build(w.c, w.list, w.count, NULL, NULL, 0, NULL) : NULL;
    mu_status s = w.s != NULL ? MU_OK : mu_context_status(w.c);
    if (s == MU_OK) {
        for (int i = 0; i < w.count && s == MU_OK; i++) {
            s = write_random(&w.p[i].value, 100 + (uint64_t)i);
            w.p[i].initialised = s == MU_OK;
        }
        s = s == MU_OK ? step(&w) : s;
    }
    bool failed = w.c->fail_after < 0 || (forever && w.c->fail_after == 0);
    failed = failed && s != MU_OK;
    if (failed) {
        assert_int_equal(s, MU_ERR_NOMEM);
        assert_int_equal(mu_context_status(w.c), MU_ERR_NOMEM);
    } else {
        assert_int_equal(s, MU_OK);
    }
    w.c->fail_after = -1;
    w.c->fail_forever = false;
    mu_context_clear(w.c);
    w.t = w.t != NULL ? w.t : mu_tape_new(w.c, NULL);
    assert_non_null(w.t);
    build(&w);
    assert_int_equal(step(&w), MU_OK);
    static float got[8192];
    assert_int_equal(gather(&w, got), count);
    assert_memory_equal(got, want, count * sizeof(float));
    close_world(&w);
    return !failed;
}

static void fail_each(mu_kernel_choice kernels)
{
    static float want[8192];
    world w;
    open_world(&w, &(mu_context_options){.seed = 2, .kernels = kernels}, NULL);
    make_net(&w);
    build(&w);
    assert_int_equal(step(&w), MU_OK);
    size_t count = gather(&w, want);
    uint64_t allocations = w.c->allocations;
    close_world(&w);
    long live = malloc_live;
    int64_t k = 0;
    while (!survives(kernels, k, k % 2 == 1, want, count)) {
        k++;
        assert_true((uint64_t)k <= allocations);
        if (kernels == MU_KERNELS_REFERENCE) { /* oneDNN keeps a cache of its own */
            assert_int_equal(malloc_live, live);
        }
    }
    assert_true(k > 40);
}

static void every_failed_allocation_is_survived(void **state)
{
    (void)state;
    fail_each(MU_KERNELS_REFERENCE);
    fail_each(MU_KERNELS_DEFAULT);
}

/* The same graph with other sizes in between: what was got for one is used for the other. */
static void peak_does_not_grow_with_steps(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(32, 32), 0);
    build(&w);
    size_t peak = 0;
    uint64_t allocations = 0;
    for (int i = 0; i < 12; i++) {
        mu_tape_reset(w.t);
        mu_tensor *h = mu_tensor_zeros(w.t, MU_DIMS(i % 2 == 0 ? 64 : 17, 32));
        for (int k = 0; k < 6; k++) {
            h = mu_relu(w.t, mu_linear_op(w.t, h, &a->value, NULL));
        }
        assert_int_equal(mu_backward(w.t, mu_mean(w.t, h)), MU_OK);
        if (i == 3) {
            peak = mu_tape_peak_bytes(w.t);
            allocations = w.c->allocations;
        }
    }
    assert_int_equal(mu_tape_peak_bytes(w.t), peak);
    assert_int_equal(w.c->allocations, allocations);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_steady_step_allocates_nothing),
        cmocka_unit_test(every_failed_allocation_is_survived),
        cmocka_unit_test(peak_does_not_grow_with_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
