/* Values that change between forward and backward: an error where backward reads them, and only there. */
#include "tape/fixture.h"

#include <muster/tape.h>

/* Parameters: 0 weight (4, 3), 1 bias (4), 2 a vector of 4. */
static void open_net(world *w, bool retain)
{
    open_world(w, NULL, &(mu_tape_options){.retain_graph = retain});
    add_parameter(w, MU_DIMS(4, 3), 0);
    add_parameter(w, MU_DIMS(4), 0);
    add_parameter(w, MU_DIMS(4), 0);
    build(w);
}

static mu_tensor *net(world *w, mu_tensor *x)
{
    mu_tensor *y = mu_linear_op(w->t, x, &w->p[0].value, &w->p[1].value);
    return mu_sum(w->t, mu_mul(w->t, mu_tanh(w->t, y), mu_reshape(w->t, &w->p[2].value, MU_DIMS(1, 4))));
}

/* x needs a gradient, or the linear operation does not need its weight. */
static mu_tensor *wanted(world *w)
{
    return mu_tensor_require_grad(w->t, input(w, MU_DIMS(2, 3), 9));
}

static void check_error(world *w, mu_status s, const char *op, const char *what)
{
    assert_int_equal(s, MU_ERR_STATE);
    const char *m = mu_context_message(w->c);
    if (strstr(m, op) == NULL || strstr(m, what) == NULL || strstr(m, "modified in place") == NULL) {
        fail_msg("%s", m);
    }
    for (int i = 0; i < w->count; i++) { /* found before anything was added */
        assert_null(mu_parameter_grad(&w->p[i]));
    }
    mu_context_clear(w->c);
}

static void written_parameters(void **state)
{
    (void)state;
    static const struct {
        int which; /* parameter written between forward and backward; -1: x */
        bool grad; /* x wants one */
        const char *op, *what; /* NULL: no error */
    } rows[] = {
        {0, true, "backward of linear", "parameter `p0`"}, {0, false, NULL, NULL}, {1, true, NULL, NULL},
        {2, true, "backward of mul", "parameter `p2`"} /* through a view */, {-1, true, "backward of linear", "its input 0"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        world w;
        open_net(&w, false);
        mu_tensor *x = rows[i].grad ? wanted(&w) : input(&w, MU_DIMS(2, 3), 9);
        mu_tensor *loss = net(&w, x);
        fill_random(rows[i].which < 0 ? x : &w.p[rows[i].which].value, 77);
        mu_status s = mu_backward(w.t, loss);
        if (rows[i].op == NULL) {
            assert_int_equal(s, MU_OK);
        } else {
            check_error(&w, s, rows[i].op, rows[i].what);
            assert_int_equal(mu_backward(w.t, net(&w, x)), MU_OK); /* forward again */
        }
        close_world(&w);
    }
}

static void before_forward_is_fine(void **state)
{
    (void)state;
    world w;
    open_net(&w, true);
    for (int k = 0; k < 3; k++) {
        fill_random(&w.p[0].value, 50 + (uint64_t)k);
        mu_tensor *loss = net(&w, wanted(&w));
        assert_int_equal(mu_backward(w.t, loss), MU_OK);
        assert_int_equal(mu_backward(w.t, loss), MU_OK); /* retained */
        if (k == 1) {
            fill_random(&w.p[0].value, 90);
            mui_store_zero_grad(w.s);
            check_error(&w, mu_backward(w.t, loss), "backward of linear", "`p0`");
        }
    }
    close_world(&w);
}

/* Memory moves, values stay. */
static void relayouts_change_nothing(void **state)
{
    (void)state;
    world w;
    open_net(&w, false);
    mu_tensor *loss = net(&w, wanted(&w));
    int64_t order[3] = {1, 2, 0}, counts[2] = {1, 2};
    size_t tails[2] = {3, 0};
    assert_int_equal(mui_store_relayout(w.s, order, counts, tails, 2), MU_OK);
    assert_int_equal(mu_backward(w.t, loss), MU_OK);
    /* Rebuilt with one more parameter. */
    loss = net(&w, wanted(&w));
    add_parameter(&w, MU_DIMS(2), 0);
    w.s = mui_store_build(w.c, w.list, w.count, NULL, NULL, 0, w.s);
    assert_non_null(w.s);
    assert_int_equal(mu_backward(w.t, loss), MU_OK);
    /* And without the one that forward read. */
    loss = net(&w, wanted(&w));
    w.s = mui_store_build(w.c, w.list, 2, NULL, NULL, 0, w.s);
    assert_non_null(w.s);
    assert_int_equal(mu_backward(w.t, loss), MU_ERR_STATE);
    if (strstr(mu_context_message(w.c), "parameter p2 has no memory: its module was taken out of its tree") == NULL) {
        fail_msg("%s", mu_context_message(w.c));
    }
    mu_context_clear(w.c);
    close_world(&w);
}

/* A dropped segment computes again with what it read, also with what the gradient does not need: the bias. */
static mu_tensor *part(void *self, mu_tape *t, mu_tensor *x)
{
    (void)t;
    return net(self, x);
}
static void checkpointed_segments(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        world w;
        open_net(&w, false);
        mu_tensor *loss = mu_checkpoint(w.t, part, &w, wanted(&w));
        fill_random(&w.p[which].value, 77);
        char name[8];
        snprintf(name, sizeof(name), "`p%d`", which);
        check_error(&w, mu_backward(w.t, loss), "running the checkpointed segment again", name);
        mu_tape_reset(w.t);
        assert_int_equal(mu_backward(w.t, mu_checkpoint(w.t, part, &w, wanted(&w))), MU_OK);
        close_world(&w);
    }
}

/* What a no-grad region or a dead end read does not matter. */
static void reads_that_lead_nowhere(void **state)
{
    (void)state;
    world w;
    open_net(&w, false);
    mu_tensor *dead = net(&w, wanted(&w));
    assert_non_null(dead);
    mu_no_grad_begin(w.t, "statistics");
    mu_tensor *seen = net(&w, wanted(&w));
    mu_no_grad_end(w.t);
    fill_random(&w.p[0].value, 77);
    assert_int_equal(mu_backward(w.t, mu_add(w.t, net(&w, wanted(&w)), seen)), MU_OK);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_parameters),    cmocka_unit_test(before_forward_is_fine),
        cmocka_unit_test(relayouts_change_nothing), cmocka_unit_test(checkpointed_segments),
        cmocka_unit_test(reads_that_lead_nowhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
