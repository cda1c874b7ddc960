/* The profile: calls, flops and bytes exact, times that do not count a moment twice. */
#include "base/os.h"
#include "base/profile.h"
#include "kern/bf16.h"
#include "kern/kern_util.h"

#include <muster/muster.h>
#include <pthread.h>

static mu_profile_row row_of(const mu_context *c, const char *kind)
{
    const mu_profile_row *rows = NULL;
    int n = mu_context_profile(c, &rows);
    for (int i = 0; i < n; i++) {
        if (strcmp(rows[i].kind, kind) == 0) {
            return rows[i];
        }
    }
    return (mu_profile_row){0};
}

static void without_the_option_there_is_none(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(NULL);
    float *x = random_floats(c, 64 * 64, 1);
    assert_int_equal(mui_gemm(mui_engine_of(c), false, false, 64, 64, 64, 1, x, 64, x, 64, 0, x, 64), MU_OK);
    const mu_profile_row *rows = (const mu_profile_row *)state;
    assert_int_equal(mu_context_profile(c, &rows), 0);
    assert_null(rows);
    mu_context_profile_reset(c);
    free_floats(c);
    mu_context_close(c);
    assert_int_equal(mu_context_profile(NULL, &rows), 0);
    mu_context_profile_reset(NULL);
}

static void kernels_are_counted(void **state)
{
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        mu_context *c = mu_context_open(&(mu_context_options){
            .profile = true, .kernels = kind == REFERENCE ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT});
        mui_engine *e = mui_engine_of(c);
        mui_conv2d_shape s;
        memset(&s, 0, sizeof(s));
        s.n = 32;
        s.ic = 256;
        s.oc = 128;
        s.ih = s.iw = s.oh = s.ow = 2; /* small enough for matrix products inside */
        s.kh = s.kw = 3;
        s.stride[0] = s.stride[1] = s.pad[0] = s.pad[1] = s.dilation[0] = s.dilation[1] = s.groups = 1;
        const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
        assert_non_null(p);
        float *x = dirty(c, MU_DIMS(32, 256, 2, 2), p->x), *w = random_floats(c, 256 * 128 * 9, 1),
              *y = dirty(c, MU_DIMS(32, 128, 2, 2), p->y);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(mui_conv2d_forward(e, p, x, w, NULL, y), MU_OK);
        }
        assert_int_equal(mui_gemm(e, false, true, 7, 8, 9, 1, x, 9, w, 9, 0, y, 8), MU_OK);
        mui_axpy(e, 100, 1, x, y);
        mui_axpy(NULL, 100, 1, x, y);
        mu_profile_row conv = row_of(c, "conv_forward"), gemm = row_of(c, "gemm"), flat = row_of(c, "elementwise");
        assert_int_equal(conv.calls, 3);
        assert_true(conv.flops == 3 * 2.0 * 32 * 128 * 4 * 256 * 9);
        assert_true(conv.seconds > 0);
        assert_int_equal(gemm.calls, 1); /* those within the convolution are the convolution's */
        assert_true(gemm.flops == 2.0 * 7 * 8 * 9);
        assert_true(gemm.bytes == 4.0 * (7 * 9 + 9 * 8 + 7 * 8));
        assert_int_equal(flat.calls, 1);
        assert_true(flat.bytes == 1200);
        mu_context_profile_reset(c);
        assert_int_equal(row_of(c, "gemm").calls, 0);
        free_floats(c);
        mu_context_close(c);
    }
}

/* What a bfloat16 kernel is made of is its own: flops once, bytes of what it was given. */
static void bf16_is_counted_as_it_is(void **state)
{
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        mu_context *c = mu_context_open(&(mu_context_options){
            .profile = true, .kernels = kind == REFERENCE ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT});
        mui_engine *e = mui_engine_of(c);
        mui_conv2d_shape s;
        memset(&s, 0, sizeof(s));
        s.n = 2;
        s.ic = s.oc = 16;
        s.ih = s.iw = s.oh = s.ow = 6;
        s.kh = s.kw = 3;
        s.stride[0] = s.stride[1] = s.pad[0] = s.pad[1] = s.dilation[0] = s.dilation[1] = s.groups = 1;
        s.bf16 = true;
        const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
        assert_non_null(p);
        enum { PIXELS = 2 * 16 * 36 };
        float *w = random_floats(c, 16 * 16 * 9, 1), *stat[4];
        uint16_t *x = (uint16_t *)floats(c, PIXELS), *y = (uint16_t *)floats(c, PIXELS); /* twice the room */
        for (int i = 0; i < 4; i++) {
            stat[i] = random_floats(c, 16, 2);
        }
        mui_bf16_round(16 * 16 * 4, w, x);
        assert_int_equal(mui_conv2d_forward(e, p, x, w, NULL, y), MU_OK);
        assert_int_equal(mui_conv2d_backward_data(e, p, y, w, x), MU_OK);
        assert_int_equal(mui_conv2d_backward_weights(e, p, x, y, w, NULL, true, false), MU_OK);
        mui_norm_shape n = {2, 16, 6, 6, p->y, false, 1e-5f, true};
        assert_int_equal(mui_batch_norm_forward(e, &n, x, NULL, NULL, y, stat[0], stat[1], NULL), MU_OK);
        assert_int_equal(mui_batch_norm_backward(e, &n, x, y, y, NULL, stat[0], stat[1], NULL, y, NULL, NULL, false), MU_OK);
        mui_pool2d_shape q = {2, 16, 6, 6, 3, 3, 2, 2, {2, 2}, {0, 0}, MUI_POOL_AVG, p->y, true};
        assert_int_equal(mui_pool2d_forward(e, &q, x, y, NULL), MU_OK);
        assert_int_equal(mui_pool2d_backward(e, &q, y, NULL, x), MU_OK);
        assert_int_equal(mui_bf16_gemm(e, false, true, 7, 8, 9, x, x, y), MU_OK);
        assert_int_equal(mui_bf16_linear(e, true, 7, 8, 9, x, w, stat[2], y), MU_OK);
        assert_int_equal(mui_bf16_gemm_f32(e, true, false, 7, 8, 9, x, x, w, false), MU_OK);
        mui_bf16_add(e, 10, x, x, y);
        const double conv_flops = 2.0 * 9 * PIXELS * 16, conv_bytes = 2.0 * 2 * PIXELS + 4.0 * 16 * 16 * 9;
        const struct {
            const char *kind;
            double calls, flops, bytes;
        } want[] = {{"conv_forward", 1, conv_flops, conv_bytes},
                    {"conv_backward_data", 1, conv_flops, conv_bytes},
                    {"conv_backward_weights", 1, conv_flops, conv_bytes},
                    {"batch_norm_forward", 1, 0, 2 * 2.0 * PIXELS},
                    {"batch_norm_backward", 1, 0, 3 * 2.0 * PIXELS},
                    {"pool_forward", 1, 0, 2.0 * (PIXELS + PIXELS / 4)},
                    {"pool_backward", 1, 0, 2.0 * (PIXELS + PIXELS / 4)},
                    {"gemm", 3, 3 * 2.0 * 7 * 8 * 9,
                     2.0 * (7 * 9 + 9 * 8 + 7 * 8) + 2.0 * (7 * 9 + 7 * 8) + 4.0 * 9 * 8 + 2.0 * (7 * 9 + 9 * 8) + 4.0 * 7 * 8},
                    {"elementwise", 1, 0, 60}};
        double flops = 0;
        for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
            mu_profile_row r = row_of(c, want[i].kind);
            flops += want[i].flops;
            if ((double)r.calls != want[i].calls || r.flops != want[i].flops || r.bytes != want[i].bytes) {
                fail_msg("%s: %llu calls, %.0f flops, %.0f bytes; not %.0f, %.0f, %.0f", want[i].kind,
                         (unsigned long long)r.calls, r.flops, r.bytes, want[i].calls, want[i].flops, want[i].bytes);
            }
        }
        mu_counters now;
        mu_context_counters(c, &now);
        assert_true((double)now.flops == flops);
        free_floats(c);
        mu_context_close(c);
    }
}

static void spin(double seconds)
{
    for (double until = mui_now() + seconds; mui_now() < until;) {
    }
}

static void no_moment_counts_twice(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.profile = true});
    mui_timer outer, part, reorder;
    double began = mui_now();
    mui_timer_start(&outer, c, MUI_KIND_CONV_BACKWARD_DATA);
    mui_timer_start(&part, c, MUI_KIND_GEMM);
    spin(0.002);
    mui_timer_stop(&part, 1, 1);
    mui_timer_start(&reorder, c, MUI_KIND_WEIGHT_REORDER);
    spin(0.004);
    mui_timer_stop(&reorder, 0, 64);
    mui_timer_stop(&outer, 10, 20);
    double whole = mui_now() - began;
    mu_profile_row conv = row_of(c, "conv_backward_data"), weight = row_of(c, "weight_reorder");
    assert_int_equal(row_of(c, "gemm").calls, 0);
    assert_int_equal(conv.calls, 1);
    assert_int_equal(weight.calls, 1);
    assert_true(conv.flops == 10 && conv.bytes == 20 && weight.bytes == 64);
    assert_true(weight.seconds >= 0.0039 && conv.seconds >= 0.0019);
    assert_true(conv.seconds + weight.seconds <= whole);
    mui_timer_start(&part, c, MUI_KIND_GEMM); /* the stack is empty again */
    mui_timer_stop(&part, 1, 1);
    assert_int_equal(row_of(c, "gemm").calls, 1);
    mu_context_close(c);
}

enum { THREADS = 4, ROUNDS = 1000 };
static void *work(void *context)
{
    for (int i = 0; i < ROUNDS; i++) {
        mui_timer t;
        mui_timer_start(&t, context, MUI_KIND_LOSS);
        mui_timer_stop(&t, 3, 5);
    }
    return NULL;
}

/* As replicas do. */
static void threads_add_up(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.profile = true});
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, work, c), 0);
    }
    row_of(c, "loss"); /* while they run */
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
    }
    mu_profile_row r = row_of(c, "loss");
    assert_int_equal(r.calls, THREADS * ROUNDS);
    assert_true(r.flops == 3.0 * THREADS * ROUNDS && r.bytes == 5.0 * THREADS * ROUNDS);
    mu_context_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_the_option_there_is_none), cmocka_unit_test(kernels_are_counted),
        cmocka_unit_test(bf16_is_counted_as_it_is),
        cmocka_unit_test(no_moment_counts_twice), cmocka_unit_test(threads_add_up)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
