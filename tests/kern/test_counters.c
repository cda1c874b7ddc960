/* mu_context_counters: each kind of work is counted once, where it happens, and nothing else is. */
#include "kern/engine.h"
#include "kern/kern_util.h"

#include <muster/profile.h>

static mu_counters since(const mu_context *c, mu_counters *last)
{
    mu_counters now, d;
    mu_context_counters(c, &now);
    d = (mu_counters){now.allocations - last->allocations,
                      now.allocated_bytes - last->allocated_bytes,
                      now.layout_conversions - last->layout_conversions,
                      now.weight_conversions - last->weight_conversions,
                      now.converted_bytes - last->converted_bytes,
                      now.primitives - last->primitives,
                      now.flops - last->flops};
    *last = now;
    return d;
}

static void start_at_nothing(void **state)
{
    (void)state;
    mu_counters last, zero = {0};
    mu_context *c = mu_context_open(NULL);
    mu_context_counters(c, &last);
    assert_memory_equal(&last, &zero, sizeof(zero));
    float *x = floats(c, 1000);
    mu_counters d = since(c, &last);
    assert_true(d.allocations >= 1 && d.allocated_bytes >= 1000 * sizeof(float));
    assert_int_equal(d.primitives + d.layout_conversions + d.weight_conversions + d.converted_bytes, 0);
    (void)x;
    free_floats(c);
    d = since(c, &last);
    assert_memory_equal(&d, &zero, sizeof(zero)); /* giving back is no allocation, and takes none off */
    mu_context_close(c);
    mu_context_counters(NULL, &last);
    assert_memory_equal(&last, &zero, sizeof(zero));
}

static mui_conv2d_shape shape_of(void)
{
    mui_conv2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = 2;
    s.ic = 16;
    s.oc = 32;
    s.ih = s.iw = s.oh = s.ow = 6;
    s.kh = s.kw = 3;
    s.stride[0] = s.stride[1] = s.pad[0] = s.pad[1] = s.dilation[0] = s.dilation[1] = s.groups = 1;
    return s;
}

/* The plain kernels convert a weight that is stored otherwise in each of their directions: a known number. */
static void conversions_are_counted_once(void **state)
{
    mu_context *c = ((engines *)*state)->c[DEFAULT];
    mui_engine *e = ((engines *)*state)->e[DEFAULT];
    mui_conv2d_shape s = shape_of();
    mu_dims dims = MU_DIMS(32, 16, 3, 3);
    const mui_layout *l = mui_conv2d_weight_layout(e, dims, 1, 1);
    if (l == NULL) {
        print_message("no layout but plain on this machine: nothing to convert\n");
        skip();
    }
    mu_counters last;
    float *w = random_floats(c, 32 * 16 * 9, 1), *stored = dirty(c, dims, l), *x = random_floats(c, 2 * 16 * 36, 2),
          *y = random_floats(c, 2 * 32 * 36, 3);
    mu_context_counters(c, &last);
    assert_int_equal(mui_reorder(e, dims, NULL, w, l, stored), MU_OK);
    mu_counters d = since(c, &last);
    assert_int_equal(d.layout_conversions, 1);
    assert_int_equal(d.weight_conversions, 0); /* a value like another: it is no kernel that wants it */
    assert_int_equal(d.converted_bytes, mui_layout_bytes(l));
    assert_int_equal(d.primitives, 1);
    assert_int_equal(mui_reorder(e, dims, l, stored, l, stored), MU_OK); /* no change */
    d = since(c, &last);
    assert_int_equal(d.layout_conversions + d.converted_bytes + d.primitives + d.allocations, 0);

    const mui_conv2d_plan *p = mui_ref_conv2d_plan(e, &s, l);
    assert_non_null(p);
    assert_int_equal(mui_conv2d_forward(e, p, x, stored, NULL, y), MU_OK);
    assert_int_equal(mui_conv2d_backward_data(e, p, y, stored, x), MU_OK);
    assert_int_equal(mui_conv2d_backward_weights(e, p, x, y, stored, NULL, true, false), MU_OK);
    d = since(c, &last);
    assert_int_equal(d.weight_conversions, 3);
    assert_int_equal(d.layout_conversions, 0);
    assert_int_equal(d.converted_bytes, 2 * 32 * 16 * 9 * sizeof(float) + mui_layout_bytes(l));
    free_floats(c);
}

/* Of what was asked for, whatever the kernel multiplies: where convolutions are matrix products inside, those are no more
 * than the convolution; and as the profile's rows have them. */
static void flops_are_those_of_the_shapes(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2 * KINDS; kind++) {
        mu_context *c = mu_context_open(&(mu_context_options){
            .profile = kind >= KINDS, .kernels = kind % KINDS == REFERENCE ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT});
        mui_engine *e = mui_engine_of(c);
        mui_conv2d_shape s = shape_of();
        uint64_t expected = 0;
        for (int small = 0; small < 2; small++) {
            if (small) { /* as products: 2x2, many images and channels */
                s.n = 32;
                s.ic = s.oc = 128;
                s.ih = s.iw = s.oh = s.ow = 2;
            }
            const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
            assert_non_null(p);
            mu_dims in = MU_DIMS(s.n, s.ic, s.ih, s.iw), out = MU_DIMS(s.n, s.oc, s.oh, s.ow);
            float *w = random_floats(c, s.oc * s.ic * 9, 1), *x = dirty(c, in, p->x), *y = dirty(c, out, p->y);
            assert_int_equal(mui_conv2d_forward(e, p, x, w, NULL, y), MU_OK);
            assert_int_equal(mui_conv2d_backward_data(e, p, y, w, x), MU_OK);
            assert_int_equal(mui_conv2d_backward_weights(e, p, x, y, w, NULL, true, false), MU_OK);
            expected += 3 * 2 * 9 * (uint64_t)(s.n * s.oc * s.oh * s.ow * s.ic);
        }
        float *a = random_floats(c, 72, 1);
        assert_int_equal(mui_gemm(e, false, true, 7, 8, 9, 1, a, 9, a, 9, 0, floats(c, 56), 8), MU_OK);
        expected += 2 * 7 * 8 * 9;
        mu_counters now;
        mu_context_counters(c, &now);
        assert_int_equal(now.flops, expected);
        const mu_profile_row *rows;
        double sum = 0;
        for (int i = mu_context_profile(c, &rows) - 1; i >= 0; i--) {
            sum += rows[i].flops;
        }
        assert_true(sum == (kind >= KINDS ? (double)expected : 0));
        free_floats(c);
        mu_context_close(c);
    }
}

/* A kernel is made at its first call, and never again. */
static void primitives_are_made_once(void **state)
{
    mu_context *c = ((engines *)*state)->c[DEFAULT];
    mui_engine *e = ((engines *)*state)->e[DEFAULT];
    mui_conv2d_shape s = shape_of();
    s.n = 3; /* of this test alone */
    mu_counters last;
    mu_context_counters(c, &last);
    for (int round = 0; round < 2; round++) {
        const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
        assert_non_null(p);
        float *w = random_floats(c, 32 * 16 * 9, 1), *x = dirty(c, MU_DIMS(3, 16, 6, 6), p->x),
              *y = dirty(c, MU_DIMS(3, 32, 6, 6), p->y);
        assert_int_equal(mui_conv2d_forward(e, p, x, w, NULL, y), MU_OK);
        assert_int_equal(mui_conv2d_backward_data(e, p, y, w, x), MU_OK);
        mu_counters d = since(c, &last);
        assert_true(round == 0 ? (d.primitives >= 2) == (e->dnnl != NULL) : d.primitives == 0);
        free_floats(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(start_at_nothing),
                                       cmocka_unit_test(conversions_are_counted_once),
                                       cmocka_unit_test(flops_are_those_of_the_shapes),
                                       cmocka_unit_test(primitives_are_made_once)};
    return cmocka_run_group_tests(tests, engines_open, engines_close);
}
