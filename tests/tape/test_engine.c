/* What backward promises: read counts, completion, reasons, release, several backwards. */
#include "tape/fixture.h"

/* Numbers of mu_absence. */
enum { PRESENT = 0, NOT_READ, NOT_REACHED, DETACHED, FROZEN, NO_LOSS };

typedef struct ready_log {
    mu_parameter *seen[64];
    int count;
} ready_log;

static void note_ready(void *user, mu_parameter *p)
{
    ready_log *l = user;
    assert_int_equal(p->reads_left, 0);
    assert_int_equal(p->grad_state, MUI_GRAD_LOCAL);
    l->seen[l->count++] = p;
}

static int times_ready(const ready_log *l, const mu_parameter *p)
{
    int n = 0;
    for (int i = 0; i < l->count; i++) {
        n += l->seen[i] == p;
    }
    return n;
}

static void parameters_are_counted_and_ready_once(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(4, 4), 0), *b = add_parameter(&w, MU_DIMS(4), 0);
    mu_parameter *unused = add_parameter(&w, MU_DIMS(3), 0), *frozen = add_parameter(&w, MU_DIMS(4), 0);
    frozen->frozen = true;
    build(&w);
    ready_log log = {.count = 0};
    w.s->ready = note_ready;
    w.s->ready_user = &log;
    mu_tensor *x = input(&w, MU_DIMS(2, 4), 1);
    mu_tensor *h = mu_linear_op(w.t, x, &a->value, &b->value);
    h = mu_linear_op(w.t, h, &a->value, &frozen->value);
    h = mu_add(w.t, h, mu_mul(w.t, &b->value, &b->value));
    mu_tensor *loss = mu_sum(w.t, mu_matmul(w.t, h, mu_permute(w.t, &a->value, MU_DIMS(1, 0))));
    assert_int_equal(mui_backward_mark(w.t, loss, w.s), MU_OK);
    assert_int_equal(a->reads, 3);
    assert_int_equal(b->reads, 3);
    assert_int_equal(unused->reads, 0);
    assert_int_equal(frozen->reads, 0);
    assert_int_equal(unused->absence.kind, NOT_READ);
    assert_int_equal(frozen->absence.kind, FROZEN);
    assert_int_equal(a->absence.kind, PRESENT);
    assert_int_equal(mui_backward_run(w.t, loss, 1.0f, w.s), MU_OK);
    assert_int_equal(times_ready(&log, a), 1);
    assert_int_equal(times_ready(&log, b), 1);
    assert_int_equal(log.count, 2);
    assert_non_null(mu_parameter_grad(a));
    assert_null(mu_parameter_grad(unused));
    assert_null(mu_parameter_grad(frozen));
    mui_store_zero_grad(w.s);
    assert_null(mu_parameter_grad(a));
    /* A loss that no rank has: nothing to run, everybody absent. */
    assert_int_equal(mui_backward_mark(w.t, NULL, w.s), MU_OK);
    assert_int_equal(a->absence.kind, NO_LOSS);
    assert_int_equal(frozen->absence.kind, FROZEN);
    assert_int_equal(mui_backward_run(w.t, NULL, 1.0f, w.s), MU_OK);
    assert_null(mu_parameter_grad(a));
    close_world(&w);
}

static mu_tensor *in_module(world *w, const char *path, mu_tensor *x, mu_parameter *weight)
{
    size_t mark = 0;
    mui_path_push(w->c, path, &mark);
    mu_tensor *y = mu_linear_op(w->t, x, &weight->value, NULL);
    mui_path_pop(w->c, mark);
    return y;
}

static void reasons_are_told_apart(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *used = add_parameter(&w, MU_DIMS(4, 4), 0), *dead = add_parameter(&w, MU_DIMS(4, 4), 0);
    mu_parameter *cut = add_parameter(&w, MU_DIMS(4, 4), 0), *quiet = add_parameter(&w, MU_DIMS(4, 4), 0);
    mu_parameter *silent = add_parameter(&w, MU_DIMS(4, 4), 0), *both = add_parameter(&w, MU_DIMS(4, 4), 0);
    build(&w);
    mu_tensor *x = input(&w, MU_DIMS(2, 4), 1);
    mu_tensor *main_path = in_module(&w, "trunk", x, used);
    size_t mark = 0;
    mu_tensor *aux = in_module(&w, "aux.fc", x, dead); /* ends in aux.act, read by nobody */
    mui_path_push(w.c, "aux.act", &mark);
    aux = mu_relu(w.t, aux);
    mui_path_pop(w.c, mark);
    assert_non_null(aux);
    mu_tensor *target = mu_detach(w.t, mu_tanh(w.t, in_module(&w, "target", x, cut)));
    mu_no_grad_begin(w.t, "teacher");
    mu_tensor *teacher = in_module(&w, "net", x, quiet);
    mu_no_grad_begin(w.t, NULL);
    in_module(&w, "probe", x, silent);
    mu_no_grad_end(w.t);
    mu_no_grad_end(w.t);
    mu_tensor *dead_and_detached = in_module(&w, "first", x, both); /* dead here, detached on the way to the loss below */
    mu_tensor *again = mu_detach(w.t, in_module(&w, "second", x, both));
    assert_non_null(dead_and_detached);
    mu_tensor *loss = mu_mse_loss(w.t, main_path, mu_add(w.t, mu_scale(w.t, target, 2.0f), mu_add(w.t, teacher, again)));
    assert_int_equal(mui_backward_mark(w.t, loss, w.s), MU_OK);
    assert_int_equal(used->absence.kind, PRESENT);
    assert_int_equal(used->reads, 1);
    assert_int_equal(dead->absence.kind, NOT_REACHED);
    assert_string_equal(dead->absence.op, "linear");
    assert_string_equal(dead->absence.module, "aux.fc");
    assert_string_equal(dead->absence.end_op, "relu");
    assert_string_equal(dead->absence.end_module, "aux.act");
    assert_null(dead->absence.region);
    assert_int_equal(cut->absence.kind, DETACHED);
    assert_string_equal(cut->absence.module, "target");
    assert_string_equal(cut->absence.end_op, "detach");
    assert_null(cut->absence.region);
    assert_int_equal(quiet->absence.kind, DETACHED);
    assert_string_equal(quiet->absence.region, "teacher");
    assert_string_equal(quiet->absence.module, "net");
    assert_int_equal(silent->absence.kind, DETACHED);
    assert_string_equal(silent->absence.region, "");
    assert_int_equal(both->absence.kind, DETACHED);
    assert_string_equal(both->absence.module, "second");
    assert_int_equal(mui_backward_run(w.t, loss, 1.0f, w.s), MU_OK);
    assert_null(mu_parameter_grad(cut));
    /* A loss of nothing trainable: not an error, everybody is detached or not reached. */
    mu_tape_reset(w.t);
    loss = mu_sum(w.t, mu_detach(w.t, in_module(&w, "m", input(&w, MU_DIMS(2, 4), 1), used)));
    assert_int_equal(mui_backward_mark(w.t, loss, w.s), MU_OK);
    assert_int_equal(used->absence.kind, DETACHED);
    assert_int_equal(dead->absence.kind, NOT_READ);
    assert_int_equal(mui_backward_run(w.t, loss, 1.0f, w.s), MU_OK);
    close_world(&w);
}

static void memory_is_given_back(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(64, 64), 0);
    build(&w);
    mu_tensor *x = input(&w, MU_DIMS(128, 64), 1);
    mu_tensor *h = mu_linear_op(w.t, x, &a->value, NULL);
    mu_tensor *kept = mu_tensor_retain(w.t, mu_relu(w.t, h));
    mu_tensor *view = mu_reshape(w.t, kept, MU_DIMS(64, 128));
    mu_tensor *side = mu_scale(w.t, h, 3.0f); /* read by nobody */
    mu_tensor *loss = mu_mean(w.t, mu_tanh(w.t, view));
    size_t before = mu_tape_bytes(w.t);
    assert_int_equal(mu_backward(w.t, loss), MU_OK);
    assert_true(mu_tape_bytes(w.t) < before);
    float v[128 * 64];
    assert_int_equal(mu_tensor_read(kept, v, 128 * 64), MU_OK);
    assert_int_equal(mu_tensor_read(x, v, 128 * 64), MU_OK);
    assert_int_equal(mu_tensor_read(side, v, 128 * 64), MU_OK);
    assert_true(isfinite(mu_tensor_item(loss)));
    assert_int_equal(mu_context_status(w.c), MU_OK);
    assert_int_equal(mu_tensor_read(view, v, 128 * 64), MU_ERR_STATE);
    mu_context_clear(w.c);
    assert_null(mu_relu(w.t, view));
    assert_int_equal(mu_context_status(w.c), MU_ERR_STATE);
    mu_context_clear(w.c);
    assert_null(mu_tensor_keep(w.t, view));
    mu_context_clear(w.c);
    mu_tensor *out = mu_tensor_keep(w.t, kept);
    mu_tape_reset(w.t);
    assert_int_equal(mu_tape_bytes(w.t), 0);
    assert_int_equal(mu_tensor_read(out, v, 128 * 64), MU_OK);
    mu_tensor_free(out);
    close_world(&w);
}

/* Two losses over one trunk; returns the status of the second backward. */
static mu_status two_losses(world *w, mu_parameter *a, mu_tensor **first, mu_tensor **second)
{
    mu_tensor *h = mu_tanh(w->t, mu_linear_op(w->t, input(w, MU_DIMS(3, 4), 1), &a->value, NULL));
    *first = mu_sum(w->t, h);
    *second = mu_mean(w->t, mu_mul(w->t, h, h));
    assert_int_equal(mu_backward(w->t, *first), MU_OK);
    return mu_backward(w->t, *second);
}

static void second_backward_needs_retain_graph(void **state)
{
    (void)state;
    world w, r;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(4, 4), 0);
    build(&w);
    mu_tensor *first = NULL, *second = NULL;
    /* What the sum of both losses gives, and the first alone. */
    mu_tensor *h = mu_tanh(w.t, mu_linear_op(w.t, input(&w, MU_DIMS(3, 4), 1), &a->value, NULL));
    assert_int_equal(mu_backward(w.t, mu_add(w.t, mu_sum(w.t, h), mu_mean(w.t, mu_mul(w.t, h, h)))), MU_OK);
    mu_tensor *sum = mu_tensor_keep(w.t, mu_parameter_grad(a));
    mui_store_zero_grad(w.s);
    mu_tape_reset(w.t);
    h = mu_tanh(w.t, mu_linear_op(w.t, input(&w, MU_DIMS(3, 4), 1), &a->value, NULL));
    assert_int_equal(mu_backward(w.t, mu_sum(w.t, h)), MU_OK);
    mu_tensor *alone = mu_tensor_keep(w.t, mu_parameter_grad(a));
    mui_store_zero_grad(w.s);
    mu_tape_reset(w.t);
    assert_int_equal(two_losses(&w, a, &first, &second), MU_ERR_STATE);
    assert_non_null(strstr(mu_context_message(w.c), "retain_graph"));
    mu_context_clear(w.c);
    assert_close(mu_parameter_grad(a), alone, 0.0); /* nothing was changed */
    open_world(&r, NULL, &(mu_tape_options){.retain_graph = true});
    mu_parameter *b = add_parameter(&r, MU_DIMS(4, 4), 0);
    build(&r);
    assert_int_equal(two_losses(&r, b, &first, &second), MU_OK);
    assert_close(mu_parameter_grad(b), sum, 1e-6);
    assert_int_equal(mu_backward(r.t, first), MU_OK); /* the same again adds */
    mui_store_zero_grad(r.s);
    assert_int_equal(mu_backward(r.t, first), MU_OK);
    assert_close(mu_parameter_grad(b), alone, 1e-6);
    close_world(&r);
    close_world(&w);
}

static void disjoint_graphs_of_one_tape(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(4), 0), *b = add_parameter(&w, MU_DIMS(4), 0);
    build(&w);
    mu_tensor *x = mu_tensor_require_grad(w.t, input(&w, MU_DIMS(4), 1));
    mu_tensor *one = mu_sum(w.t, mu_mul(w.t, x, &a->value)), *two = mu_sum(w.t, mu_mul(w.t, x, &b->value));
    assert_int_equal(mu_backward(w.t, one), MU_OK);
    assert_close(mu_tensor_grad(x), &a->value, 0.0);
    assert_null(mu_parameter_grad(b));
    assert_int_equal(mu_backward(w.t, two), MU_OK);
    assert_close(mu_tensor_grad(x), &b->value, 0.0); /* of the last backward */
    assert_close(mu_parameter_grad(a), x, 0.0);
    assert_close(mu_parameter_grad(b), x, 0.0);
    /* A parameter's gradient adds up over backwards. */
    assert_int_equal(mu_backward(w.t, mu_sum(w.t, &a->value)), MU_OK);
    mu_tensor *ones = mu_tensor_from(w.t, MU_DIMS(4), (float[]){1, 1, 1, 1});
    assert_close(mu_parameter_grad(a), mu_add(w.t, x, ones), 1e-7);
    assert_null(mu_tensor_grad(x));
    close_world(&w);
}

static void losses_that_cannot_be(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(4), 0), *one = add_parameter(&w, MU_SCALAR, 0);
    build(&w);
    assert_int_equal(mu_backward(w.t, mu_relu(w.t, &a->value)), MU_ERR_SHAPE);
    assert_non_null(strstr(mu_context_message(w.c), "(4,)"));
    mu_context_clear(w.c);
    assert_int_equal(mu_backward(w.t, NULL), MU_ERR_ARG);
    mu_context_clear(w.c);
    mu_tape *other = mu_tape_new(w.c, &(mu_tape_options){.no_grad = true});
    assert_int_equal(mu_backward(other, mu_sum(other, &a->value)), MU_ERR_STATE);
    mu_context_clear(w.c);
    mu_tensor *foreign = mu_sum(other, &a->value);
    assert_int_equal(mu_backward(w.t, foreign), MU_ERR_ARG);
    mu_context_clear(w.c);
    assert_null(mu_add(w.t, foreign, foreign));
    assert_int_equal(mu_context_status(w.c), MU_ERR_ARG);
    mu_context_clear(w.c);
    mu_tape_free(other);
    /* The loss may be a parameter itself, or a leaf. */
    assert_int_equal(mui_backward_mark(w.t, &one->value, w.s), MU_OK);
    assert_int_equal(one->reads, 1);
    assert_int_equal(mui_backward_run(w.t, &one->value, 0.25f, w.s), MU_OK);
    assert_true(mu_tensor_item(mu_parameter_grad(one)) == 0.25f);
    mu_tensor *x = mu_tensor_require_grad(w.t, mu_tensor_from(w.t, MU_DIMS(1, 1), (float[]){3}));
    assert_int_equal(mu_backward(w.t, x), MU_OK);
    assert_true(mu_tensor_item(mu_tensor_grad(x)) == 1.0f);
    close_world(&w);
}

static void intermediate_gradients_can_be_asked_for(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_parameter *a = add_parameter(&w, MU_DIMS(4), 0);
    build(&w);
    mu_tensor *x = input(&w, MU_DIMS(4), 1);
    mu_tensor *h = mu_tensor_require_grad(w.t, mu_mul(w.t, &a->value, x));
    mu_tensor *y = mu_tensor_require_grad(w.t, mu_relu(w.t, h)); /* backward of relu would work in place */
    assert_int_equal(mu_backward(w.t, mu_sum(w.t, mu_scale(w.t, y, 2.0f))), MU_OK);
    float g[4], v[4], want[4];
    assert_int_equal(mu_tensor_read(mu_tensor_grad(y), g, 4), MU_OK);
    for (int i = 0; i < 4; i++) {
        assert_true(g[i] == 2.0f);
    }
    float *av = elements_of(&a->value), *xv = elements_of(x);
    assert_int_equal(mu_tensor_read(mu_tensor_grad(h), v, 4), MU_OK);
    for (int i = 0; i < 4; i++) {
        want[i] = av[i] * xv[i] > 0.0f ? 2.0f : 0.0f;
        assert_true(v[i] == want[i]);
    }
    free(av);
    free(xv);
    close_world(&w);
}

static void no_grad_records_nothing(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, &(mu_tape_options){.no_grad = true});
    mu_parameter *a = add_parameter(&w, MU_DIMS(4), 0);
    build(&w);
    mu_tensor *y = mu_relu(w.t, mu_scale(w.t, &a->value, 2.0f));
    assert_non_null(y);
    assert_int_equal(w.t->node_count, 0);
    mu_no_grad_end(w.t);
    assert_int_equal(mu_context_status(w.c), MU_ERR_STATE);
    close_world(&w);
    /* A region around a whole evaluation, one reset for each batch. */
    open_world(&w, NULL, NULL);
    a = add_parameter(&w, MU_DIMS(4), 0);
    build(&w);
    mu_no_grad_begin(w.t, "evaluation");
    for (int i = 0; i < 3; i++) {
        mu_tape_reset(w.t);
        assert_false(mu_relu(w.t, &a->value)->requires_grad);
        assert_string_equal(w.t->nodes[0]->region, "evaluation");
    }
    mu_no_grad_end(w.t);
    assert_true(mu_relu(w.t, &a->value)->requires_grad);
    assert_int_equal(mu_context_status(w.c), MU_OK);
    close_world(&w);
}

static void errors_say_where_and_what(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    size_t outer = 0, inner = 0;
    mui_path_push(w.c, "layer1", &outer);
    mui_path_push(w.c, "0.conv1", &inner);
    mu_tensor *x = mu_tensor_zeros(w.t, MU_DIMS(2, 3, 8, 8)), *k = mu_tensor_zeros(w.t, MU_DIMS(4, 5, 3, 3));
    assert_null(mu_relu(w.t, mu_conv2d(w.t, x, k, NULL, NULL)));
    mui_path_pop(w.c, inner);
    mui_path_pop(w.c, outer);
    assert_int_equal(w.c->here.path_len, 0);
    assert_int_equal(mu_context_status(w.c), MU_ERR_SHAPE);
    const char *m = mu_context_message(w.c);
    assert_non_null(strstr(m, "conv2d in layer1.0.conv1"));
    assert_non_null(strstr(m, "(2, 3, 8, 8)"));
    assert_non_null(strstr(m, "(4, 5, 3, 3)"));
    mu_context_clear(w.c);
    for (int i = 0; i < 200; i++) { /* a path longer than its buffer stays a string */
        mui_path_push(w.c, "module", &inner);
    }
    assert_int_equal(strlen(w.c->here.path), w.c->here.path_len);
    mui_path_pop(w.c, 0);
    mu_tensor *y = mu_tensor_from_i64(w.t, MU_DIMS(2), (int64_t[]){0, 7});
    assert_null(mu_cross_entropy(w.t, mu_tensor_zeros(w.t, MU_DIMS(2, 3)), y));
    assert_non_null(strstr(mu_context_message(w.c), "label 7 of row 1"));
    mu_context_clear(w.c);
    assert_null(mu_add(w.t, mu_tensor_zeros(w.t, MU_DIMS(2, 3)), mu_tensor_zeros(w.t, MU_DIMS(2, 4))));
    assert_int_equal(mu_context_status(w.c), MU_ERR_SHAPE);
    mu_context_clear(w.c);
    assert_null(mu_add(w.t, y, y));
    assert_int_equal(mu_context_status(w.c), MU_ERR_DTYPE);
    mu_context_clear(w.c);
    mu_tensor *one = mu_tensor_zeros(w.t, MU_DIMS(1, 3));
    assert_null(mu_batch_norm(w.t, one, NULL, NULL, NULL, NULL, NULL));
    assert_int_equal(mu_context_status(w.c), MU_ERR_SHAPE);
    close_world(&w);
}

static void dropout_repeats_by_step_position_and_rank(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    float a[200], b[200], c[200], d[200], e[200];
    float ones[200];
    for (int i = 0; i < 200; i++) {
        ones[i] = 1.0f;
    }
    mu_tape_set_step(w.t, 5);
    mu_tensor *x = mu_tensor_from(w.t, MU_DIMS(200), ones);
    assert_int_equal(mu_tensor_read(mu_dropout(w.t, x, 0.5f), a, 200), MU_OK);
    assert_int_equal(mu_tensor_read(mu_dropout(w.t, x, 0.5f), b, 200), MU_OK);
    mu_tape_reset(w.t);
    assert_int_equal(mu_tape_step(w.t), 6);
    x = mu_tensor_from(w.t, MU_DIMS(200), ones);
    assert_int_equal(mu_tensor_read(mu_dropout(w.t, x, 0.5f), c, 200), MU_OK);
    mu_tape_reset(w.t);
    mu_tape_set_step(w.t, 5);
    x = mu_tensor_from(w.t, MU_DIMS(200), ones);
    assert_int_equal(mu_tensor_read(mu_dropout(w.t, x, 0.5f), d, 200), MU_OK);
    mu_tape_reset(w.t);
    mu_tape_set_step(w.t, 5);
    w.c->rank = 1;
    x = mu_tensor_from(w.t, MU_DIMS(200), ones);
    assert_int_equal(mu_tensor_read(mu_dropout(w.t, x, 0.5f), e, 200), MU_OK);
    assert_memory_equal(a, d, sizeof(a));
    assert_memory_not_equal(a, b, sizeof(a));
    assert_memory_not_equal(a, c, sizeof(a));
    assert_memory_not_equal(a, e, sizeof(a));
    close_world(&w);
}

/* Convolution weights lie in the slab in the kernels' own layout; a second reader wants them plain. */
static void blocked_weights_get_plain_gradients_too(void **state)
{
    (void)state;
    world w[2];
    mu_tensor *grads[2];
    for (int k = 0; k < 2; k++) {
        open_world(&w[k],
                   &(mu_context_options){.kernels = k == 0 ? MU_KERNELS_DEFAULT : MU_KERNELS_REFERENCE, .seed = 1}, NULL);
        mu_parameter *weight = add_parameter(&w[k], MU_DIMS(17, 19, 3, 3), 1);
        build(&w[k]);
        mu_tensor *x = input(&w[k], MU_DIMS(2, 19, 8, 8), 4);
        mu_conv2d_options o = {.padding = {1, 1}};
        for (int order = 0; order < 2; order++) { /* plain contribution before and after the blocked one */
            mu_tensor *plain = mu_sum(w[k].t, mu_tanh(w[k].t, mu_reshape(w[k].t, &weight->value, MU_DIMS(17, -1))));
            mu_tensor *y = mu_mean(w[k].t, mu_tanh(w[k].t, mu_conv2d(w[k].t, x, &weight->value, NULL, &o)));
            if (order == 1) {
                plain = mu_sum(w[k].t, mu_tanh(w[k].t, mu_reshape(w[k].t, &weight->value, MU_DIMS(-1, 9))));
            }
            assert_int_equal(mu_backward(w[k].t, mu_add(w[k].t, plain, y)), MU_OK);
        }
        assert_padding_zero(&w[k]);
        grads[k] = mu_parameter_grad(weight);
    }
    assert_close(grads[0], grads[1], 2e-5);
    for (int k = 0; k < 2; k++) {
        close_world(&w[k]);
    }
}

/* Values written after they were converted are seen by the next operation. */
static void written_values_are_converted_anew(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    mu_tensor *x = mu_tensor_from(w.t, MU_DIMS(2, 3), (float[]){1, 2, 3, 4, 5, 6});
    mu_tensor *p = mu_permute(w.t, x, MU_DIMS(1, 0));
    assert_true(mu_tensor_item(mu_sum(w.t, p)) == 21.0f);
    assert_int_equal(mu_tensor_write(p, (float[]){0, 0, 0, 0, 0, 7}, 6), MU_OK);
    assert_true(mu_tensor_item(mu_sum(w.t, p)) == 7.0f);
    assert_true(mu_tensor_item(mu_narrow(w.t, mu_flatten(w.t, x, 0), 0, 5, 1)) == 7.0f);
    /* Also when the memory is written through another view of it, */
    assert_int_equal(mu_tensor_write(x, (float[]){1, 1, 1, 1, 1, 1}, 6), MU_OK);
    assert_true(mu_tensor_item(mu_sum(w.t, p)) == 6.0f);
    /* and when an optimiser changes a parameter behind a view of it. */
    mu_parameter *a = add_parameter(&w, MU_DIMS(2, 3), 0);
    build(&w);
    mu_tensor *view = mu_permute(w.t, &a->value, MU_DIMS(1, 0));
    mu_tensor *before = mu_tensor_keep(w.t, mu_sum(w.t, view));
    for (int i = 0; i < 6; i++) {
        w.s->values[a->offset + (size_t)i] += 1.0f;
    }
    assert_true(fabsf(mu_tensor_item(mu_sum(w.t, view)) - mu_tensor_item(before) - 6.0f) < 1e-5f);
    close_world(&w);
}

static void expect_error(world *w, const mu_tensor *y, mu_status s)
{
    assert_null(y);
    assert_int_equal(mu_context_status(w->c), s);
    mu_context_clear(w->c);
}

static void absurd_numbers_are_errors(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    build(&w);
    mu_tensor *x = input(&w, MU_DIMS(1, 2, 4, 4), 1), *k = input(&w, MU_DIMS(2, 2, 3, 3), 2);
    expect_error(&w, mu_conv2d(w.t, x, k, NULL, &(mu_conv2d_options){.padding = {INT32_MAX, INT32_MAX}}), MU_ERR_SHAPE);
    expect_error(&w, mu_narrow(w.t, x, 1, INT64_MAX, INT64_MAX), MU_ERR_SHAPE);
    expect_error(&w, mu_batch_norm(w.t, x, NULL, NULL, NULL, NULL, &(mu_batch_norm_options){.eps = NAN}), MU_ERR_ARG);
    expect_error(&w, mu_batch_norm(w.t, x, NULL, NULL, NULL, NULL, &(mu_batch_norm_options){.momentum = NAN}),
                 MU_ERR_ARG);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_are_counted_and_ready_once),
        cmocka_unit_test(reasons_are_told_apart),
        cmocka_unit_test(memory_is_given_back),
        cmocka_unit_test(second_backward_needs_retain_graph),
        cmocka_unit_test(disjoint_graphs_of_one_tape),
        cmocka_unit_test(losses_that_cannot_be),
        cmocka_unit_test(intermediate_gradients_can_be_asked_for),
        cmocka_unit_test(no_grad_records_nothing),
        cmocka_unit_test(errors_say_where_and_what),
        cmocka_unit_test(dropout_repeats_by_step_position_and_rank),
        cmocka_unit_test(blocked_weights_get_plain_gradients_too),
        cmocka_unit_test(written_values_are_converted_anew),
        cmocka_unit_test(absurd_numbers_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
