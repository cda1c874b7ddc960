/* What mixed precision is for besides speed: the values that a step keeps for backward take half the room. (Scratch memory
 * of the kernels is not in it: the emulation of bfloat16 has more than native kernels.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <muster/muster.h>
#include <stdint.h>

/* Large enough for the activations to outweigh the weights. */
enum { BATCH = 16, SIDE = 112 };

static size_t peak(bool bf16)
{
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    mu_module *net = mu_model(c, "resnet18", &(mu_model_options){.classes = 10, .in_channels = 3, .side = SIDE});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = bf16});
    const int64_t labels[BATCH] = {1, 2, 3};
    size_t first = 0;
    for (int step = 0; step < 2; step++) {
        mu_tape_reset(t);
        mu_tensor *y = mu_forward(t, net, mu_tensor_zeros(t, MU_DIMS(BATCH, 3, SIDE, SIDE)));
        assert_int_equal(mu_tensor_dtype(y), bf16 ? MU_BF16 : MU_F32);
        assert_int_equal(mu_backward(t, mu_cross_entropy(t, y, mu_tensor_from_i64(t, MU_DIMS(BATCH), labels))), MU_OK);
        assert_true(step == 0 || mu_tape_peak_bytes(t) == first);
        first = mu_tape_peak_bytes(t);
    }
    assert_int_equal(mu_context_close(c), MU_OK);
    return first;
}

static void half(void **state)
{
    (void)state;
    /* Beside the activations there is the input as it came; nobody keeps rounded weights (11.7 million: 22 MB). */
    size_t input = (size_t)BATCH * 3 * SIDE * SIDE * 4, narrow = peak(true), wide = peak(false);
    print_message("%zu of %zu bytes\n", narrow, wide);
    assert_true(narrow < wide / 2 + 2 * input);
    assert_true(narrow < wide * 3 / 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(half)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
