/* Every row of the op table: gradients of every sample against central finite differences, with the plain C kernels
 * and with the default ones. */
#include "base/alloc.h"
#include "base/rng.h"
#include "tape/tape_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define STEP 4e-3f
#define MAX_ELEMENTS 4096

/* The result as one number: a fixed random combination of its elements, in double. */
static double combine(const mu_tensor *y)
{
    static float v[MAX_ELEMENTS];
    int64_t n = mu_tensor_elements(y);
    assert_true(n <= MAX_ELEMENTS);
    assert_int_equal(mu_tensor_read(y, v, n), MU_OK);
    mui_rng r;
    mui_rng_init(&r, 99, 0);
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)v[i] * (double)(mui_rng_uniform(&r) - 0.4f);
    }
    return sum;
}

/* The same as an operation on the tape. */
static mu_tensor *combined(mu_tape *t, mu_tensor *y)
{
    mu_tensor *w = mu_tensor_zeros(t, mu_tensor_dims(y));
    assert_non_null(w);
    mui_rng r;
    mui_rng_init(&r, 99, 0);
    for (int64_t i = 0; i < mu_tensor_elements(y); i++) {
        ((float *)(void *)w->data)[i] = mui_rng_uniform(&r) - 0.4f;
    }
    return mu_sum(t, mu_mul(t, y, w));
}

static double value_at(mu_tape *t, const mui_op *op, int sample, int64_t leaf, int64_t element, float delta)
{
    uint64_t step = mu_tape_step(t);
    mu_tape_reset(t);
    mu_tape_set_step(t, step); /* random operations draw the same again */
    t->nudge.leaf = leaf;
    t->nudge.element = element;
    t->nudge.delta = delta;
    mu_tensor *y = op->sample(t, sample, 7);
    t->nudge.leaf = -1;
    assert_non_null(y);
    return combine(y);
}

typedef struct leaf_grad {
    int64_t elements;
    bool present;
    float *grad;
} leaf_grad;

/* Leaves in the order in which the sample made them. */
static int64_t collect(mu_tape *t, leaf_grad *out, int64_t max)
{
    int64_t n = 0;
    mu_tensor *leaves[16];
    for (mu_tensor *x = t->tensors; x != NULL; x = x->next) {
        if (x->wants_own_grad) {
            assert_true(n < max);
            leaves[n++] = x;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        mu_tensor *x = leaves[n - 1 - i], *g = mu_tensor_grad(x);
        out[i] = (leaf_grad){.elements = mu_tensor_elements(x), .present = g != NULL};
        out[i].grad = calloc((size_t)out[i].elements + 1, sizeof(float));
        if (g != NULL) {
            assert_true(mui_dims_equal(mu_tensor_dims(g), mu_tensor_dims(x)));
            assert_int_equal(mu_tensor_read(g, out[i].grad, out[i].elements), MU_OK);
        }
    }
    return n;
}

static void check_sample(mu_tape *t, const mui_op *op, int sample)
{
    leaf_grad g[16];
    mu_tape_reset(t);
    mu_tensor *y = op->sample(t, sample, 7);
    assert_non_null(y);
    mu_status s = mu_backward(t, combined(t, y));
    if (s != MU_OK) {
        fail_msg("%s sample %d: %s", op->name, sample, mu_context_message(t->context));
    }
    int64_t leaves = collect(t, g, 16);
    assert_true(leaves > 0);
    for (int64_t l = 0; l < leaves; l++) {
        if (op->backward == NULL) {
            assert_false(g[l].present);
        } else {
            assert_true(g[l].present);
        }
        for (int64_t e = 0; e < g[l].elements && op->backward != NULL; e++) {
            double up = value_at(t, op, sample, l, e, STEP), down = value_at(t, op, sample, l, e, -STEP);
            double want = (up - down) / (2.0 * (double)STEP), got = (double)g[l].grad[e];
            if (!(fabs(want - got) <= 4e-3 * (1.0 + fabs(want)))) {
                fail_msg("%s sample %d, input %d element %d: gradient %.6g, finite difference %.6g", op->name, sample,
                         (int)l, (int)e, got, want);
            }
        }
        free(g[l].grad);
    }
}

static void check_all(mu_kernel_choice kernels)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 3, .kernels = kernels});
    mu_tape *t = mu_tape_new(c, NULL);
    assert_non_null(t);
    int rows = 0;
    for (const mui_op *const *op = mui_ops(); *op != NULL; op++, rows++) {
        int samples = 0;
        for (;; samples++) {
            mu_tape_reset(t);
            mu_tensor *y = (*op)->sample(t, samples, 7);
            if (mu_context_status(c) != MU_OK) {
                fail_msg("%s sample %d: %s", (*op)->name, samples, mu_context_message(c));
            }
            if (y == NULL) {
                break;
            }
            check_sample(t, *op, samples);
        }
        if (samples == 0) {
            fail_msg("op %s has no sample", (*op)->name);
        }
    }
    assert_true(rows >= 30);
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void finite_differences_with_reference_kernels(void **state)
{
    (void)state;
    check_all(MU_KERNELS_REFERENCE);
}

static void finite_differences_with_default_kernels(void **state)
{
    (void)state;
    check_all(MU_KERNELS_DEFAULT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finite_differences_with_reference_kernels),
        cmocka_unit_test(finite_differences_with_default_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
