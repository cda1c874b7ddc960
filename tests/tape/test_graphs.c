/* Random graphs: values read many times, parameters used over and over, views of views, blocked layouts in between.
 * The gradient that backward gives must predict how the loss changes along it, whatever the kernels. */
#include "tape/fixture.h"

#define GRAPHS 1000
#define NODES 18

static int pick(mui_rng *r, int n)
{
    return (int)mui_rng_below(r, (uint64_t)n);
}

/* All values are (2, 6, 4, 4), so that any can be combined with any. */
static mu_tensor *grow(world *w, mui_rng *r, mu_tensor *a, mu_tensor *b)
{
    mu_tape *t = w->t;
    mu_dims image = MU_DIMS(2, 6, 4, 4);
    mu_tensor *parts[2];
    switch (pick(r, 15)) {
    case 0: return mu_add(t, a, b);
    case 1: return mu_sub(t, a, b);
    case 2: return mu_scale(t, mu_mul(t, a, b), 0.5f);
    case 3: return mu_tanh(t, a);
    case 4: return mu_sigmoid(t, a);
    case 5: return mu_conv2d(t, a, &w->p[0].value, &w->p[1].value, &(mu_conv2d_options){.padding = {1, 1}});
    case 6: return mu_conv2d(t, a, &w->p[2].value, NULL, NULL);
    case 7: return mu_batch_norm(t, a, &w->p[3].value, &w->p[1].value, NULL, NULL, NULL);
    case 8: /* the last dimensions swapped: a view that is not contiguous */
        return mu_permute(t, a, MU_DIMS(0, 1, 3, 2));
    case 9:
        parts[0] = mu_narrow(t, a, 1, 3, 3);
        parts[1] = mu_narrow(t, b, 1, 1, 3);
        return mu_concat(t, parts, 2, 1);
    case 10: return mu_reshape(t, mu_linear_op(t, mu_reshape(t, a, MU_DIMS(2, 24, 4)), &w->p[4].value, NULL), image);
    case 11: return mu_add(t, mu_avg_pool2d(t, a, 3, 3, &(mu_pool2d_options){.stride = {1, 1}, .padding = {1, 1}}), b);
    case 12: return mu_mul(t, a, mu_global_avg_pool2d(t, b));
    case 13: return mu_mul(t, a, mu_reshape(t, mu_narrow(t, &w->p[2].value, 0, 0, 1), MU_DIMS(6, 1, 1)));
    default: return mu_gelu(t, a);
    }
}

/* The same graph each time for the same seed. Some values end nowhere, on purpose. */
static mu_tensor *graph(world *w, uint64_t seed)
{
    mui_rng r;
    mui_rng_init(&r, seed, 1);
    mu_tensor *v[NODES + 1];
    v[0] = input(w, MU_DIMS(2, 6, 4, 4), seed);
    for (int i = 1; i <= NODES; i++) {
        v[i] = grow(w, &r, v[pick(&r, i)], v[i > 3 ? i - 1 - pick(&r, 3) : 0]);
        if (v[i] == NULL) {
            fail_msg("graph %d: %s", (int)seed, mu_context_message(w->c));
        }
    }
    mu_tensor *loss = mu_add(w->t, mu_mean(w->t, mu_mul(w->t, v[NODES], v[NODES - 1])),
                             mu_scale(w->t, mu_sum(w->t, v[NODES - 2]), 0.01f));
    return mu_add(w->t, loss, mu_mse_loss(w->t, v[NODES], v[NODES - 3]));
}

static void make_parameters(world *w)
{
    add_parameter(w, MU_DIMS(6, 6, 3, 3), 1);
    add_parameter(w, MU_DIMS(6), 0);
    add_parameter(w, MU_DIMS(6, 6, 1, 1), 1);
    add_parameter(w, MU_DIMS(6), 0);
    add_parameter(w, MU_DIMS(4, 4), 0);
    build(w);
    for (int i = 0; i < w->count; i++) { /* small weights keep long products tame */
        float *v = elements_of(&w->p[i].value);
        for (int64_t k = 0; k < mu_tensor_elements(&w->p[i].value); k++) {
            v[k] *= 0.4f;
        }
        assert_int_equal(mu_tensor_write(&w->p[i].value, v, mu_tensor_elements(&w->p[i].value)), MU_OK);
        free(v);
    }
}

static double loss_along(world *w, uint64_t seed, float *const *at, float *const *dir, double h)
{
    for (int i = 0; i < w->count; i++) {
        int64_t n = mu_tensor_elements(&w->p[i].value);
        float v[512];
        for (int64_t k = 0; k < n; k++) {
            v[k] = (float)((double)at[i][k] + h * (double)dir[i][k]);
        }
        assert_int_equal(mu_tensor_write(&w->p[i].value, v, n), MU_OK);
    }
    mu_tape_reset(w->t);
    return (double)mu_tensor_item(graph(w, seed));
}

/* Gradients into grads (zeros where absent); checks them against the loss along their own direction. */
static void check_graph(world *w, uint64_t seed, float **grads)
{
    float *at[MAX_PARAMETERS];
    double norm2 = 0.0;
    mu_tape_reset(w->t);
    mui_store_zero_grad(w->s);
    mu_tensor *loss = graph(w, seed);
    assert_int_equal(mui_backward_mark(w->t, loss, w->s), MU_OK);
    assert_int_equal(mui_backward_run(w->t, loss, 1.0f, w->s), MU_OK);
    for (int i = 0; i < w->count; i++) {
        mu_parameter *p = &w->p[i];
        mu_tensor *g = mu_parameter_grad(p);
        assert_int_equal(g != NULL, p->reads > 0);
        assert_int_equal(p->reads_left, 0);
        at[i] = elements_of(&p->value);
        grads[i] = g != NULL ? elements_of(g) : calloc((size_t)mu_tensor_elements(&p->value), sizeof(float));
        for (int64_t k = 0; k < mu_tensor_elements(&p->value); k++) {
            norm2 += (double)grads[i][k] * (double)grads[i][k];
        }
    }
    assert_padding_zero(w);
    if (norm2 > 1e-6) {
        double h = 2e-3 / sqrt(norm2);
        double slope = (loss_along(w, seed, at, grads, h) - loss_along(w, seed, at, grads, -h)) / (2.0 * h);
        double noise = 4e-7 * (1.0 + fabs(loss_along(w, seed, at, grads, 0.0))) / h;
        if (!(fabs(slope - norm2) <= 0.02 * norm2 + noise)) {
            fail_msg("graph %d: the gradient promises a slope of %g, found %g", (int)seed, norm2, slope);
        }
    }
    for (int i = 0; i < w->count; i++) {
        free(at[i]);
    }
}

static void gradients_of_random_graphs(void **state)
{
    (void)state;
    world w[2];
    for (int k = 0; k < 2; k++) {
        open_world(&w[k], &(mu_context_options){.kernels = k == 0 ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT}, NULL);
        make_parameters(&w[k]);
    }
    for (uint64_t seed = 0; seed < GRAPHS; seed++) {
        float *grads[2][MAX_PARAMETERS];
        for (int k = 0; k < 2; k++) {
            check_graph(&w[k], seed, grads[k]);
        }
        double scale = 1e-6;
        for (int i = 0; i < w[0].count; i++) {
            for (int64_t e = 0; e < mu_tensor_elements(&w[0].p[i].value); e++) {
                scale = fmax(scale, fabs((double)grads[0][i][e]));
            }
        }
        for (int i = 0; i < w[0].count; i++) {
            for (int64_t e = 0; e < mu_tensor_elements(&w[0].p[i].value); e++) {
                if (!(fabs((double)grads[0][i][e] - (double)grads[1][i][e]) <= 2e-3 * scale)) {
                    fail_msg("graph %d, parameter %d, element %d: %g and %g", (int)seed, i, (int)e,
                             (double)grads[0][i][e], (double)grads[1][i][e]);
                }
            }
            free(grads[0][i]);
            free(grads[1][i]);
        }
    }
    for (int k = 0; k < 2; k++) {
        assert_int_equal(mu_context_status(w[k].c), MU_OK);
        close_world(&w[k]);
    }
}

/* With a retained graph a second backward finds everything as the first did. */
static void retained_graphs_run_twice(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, &(mu_tape_options){.retain_graph = true});
    make_parameters(&w);
    for (uint64_t seed = 0; seed < 200; seed++) {
        mu_tensor *once[MAX_PARAMETERS] = {NULL};
        mu_tape_reset(w.t);
        mui_store_zero_grad(w.s);
        mu_tensor *loss = graph(&w, seed);
        assert_int_equal(mu_backward(w.t, loss), MU_OK);
        for (int i = 0; i < w.count; i++) {
            mu_tensor *g = mu_parameter_grad(&w.p[i]);
            once[i] = g != NULL ? mu_tensor_keep(w.t, g) : NULL;
        }
        size_t bytes = mu_tape_bytes(w.t);
        mui_store_zero_grad(w.s);
        assert_int_equal(mu_backward(w.t, loss), MU_OK);
        assert_int_equal(mu_tape_bytes(w.t), bytes); /* gradients of intermediate values are not kept */
        for (int i = 0; i < w.count; i++) {
            if (once[i] != NULL) {
                assert_close(mu_parameter_grad(&w.p[i]), once[i], 0.0);
                mu_tensor_free(once[i]);
            } else {
                assert_null(mu_parameter_grad(&w.p[i]));
            }
        }
    }
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(retained_graphs_run_twice),
        cmocka_unit_test(gradients_of_random_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
