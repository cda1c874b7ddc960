/* Floor 0: errors, ownership, arenas, random numbers. */
#include "base/alloc.h"
#include "base/arena.h"
#include "base/glob.h"
#include "base/rng.h"
#include "base/text.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static mu_context *quiet(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
}

static void first_error_wins(void **state)
{
    (void)state;
    mu_context *c = quiet();
    assert_int_equal(mui_fail(c, MU_ERR_SHAPE, "first %d", 1), MU_ERR_SHAPE);
    assert_int_equal(mui_fail(c, MU_ERR_IO, "second"), MU_ERR_IO);
    assert_int_equal(mu_context_status(c), MU_ERR_SHAPE);
    assert_string_equal(mu_context_message(c), "first 1");
    mu_context_clear(c);
    assert_int_equal(mu_context_status(c), MU_OK);
    assert_int_equal(mu_context_close(c), MU_OK);
}

static char order_seen[8];
static void note(void *object)
{
    strncat(order_seen, object, sizeof(order_seen) - strlen(order_seen) - 1);
}

static void owned_are_destroyed_by_order_then_newest_first(void **state)
{
    (void)state;
    mu_context *c = quiet();
    order_seen[0] = '\0';
    assert_int_equal(mui_context_own(c, "g", note, MUI_OWN_GROUP), MU_OK);
    assert_int_equal(mui_context_own(c, "a", note, MUI_OWN_DEFAULT), MU_OK);
    assert_int_equal(mui_context_own(c, "b", note, MUI_OWN_DEFAULT), MU_OK);
    char x[] = "x";
    assert_int_equal(mui_context_own(c, x, note, MUI_OWN_FIRST), MU_OK);
    mui_context_disown(c, x);
    mu_context_close(c);
    assert_string_equal(order_seen, "bag");
}

static void arena_reuses_its_blocks(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_arena a;
    mui_arena_init(&a, c);
    for (int round = 0; round < 3; round++) {
        uint64_t before = c->allocations;
        for (size_t i = 0; i < 500; i++) {
            char *p = mui_arena_alloc(&a, 100 + i);
            assert_non_null(p);
            assert_int_equal((uintptr_t)p % 16, 0);
            memset(p, 1, 100 + i);
        }
        if (round > 0) {
            assert_int_equal(c->allocations, before);
        }
        mui_arena_reset(&a);
    }
    a.limit_bytes = 1000;
    assert_null(mui_arena_alloc(&a, 2000));
    assert_int_equal(mu_context_status(c), MU_ERR_LIMIT);
    mui_arena_free(&a);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void allocation_failures_are_raised(void **state)
{
    (void)state;
    mu_context *c = quiet();
    c->fail_after = 0;
    assert_null(mui_alloc(c, 10));
    assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
    mu_context_clear(c);
    assert_null(mui_calloc(c, SIZE_MAX / 2, 3));
    assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
    mu_context_close(c);
}

/* Known answers from the Random123 distribution's kat_vectors. */
static void philox_matches_its_authors(void **state)
{
    (void)state;
    uint32_t out[4];
    mui_philox(0, 0, 0, out);
    assert_int_equal(out[0], 0x6627e8d5u);
    assert_int_equal(out[3], 0x9b00dbd8u);
    mui_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX, out);
    assert_int_equal(out[0], 0x408f276du);
    assert_int_equal(out[1], 0x41c83b0eu);
    assert_int_equal(out[3], 0x6d5451fdu);
}

static void draws_have_their_distribution(void **state)
{
    (void)state;
    mui_rng r;
    mui_rng_init(&r, 7, 1);
    double sum = 0, squares = 0;
    int counts[5] = {0};
    const int n = 200000;
    for (int i = 0; i < n; i++) {
        float v = mui_rng_normal(&r);
        sum += v;
        squares += (double)v * v;
        counts[mui_rng_below(&r, 5)]++;
        float u = mui_rng_uniform(&r);
        assert_true(u >= 0 && u < 1);
    }
    assert_true(fabs(sum / n) < 0.01);
    assert_true(fabs(squares / n - 1) < 0.02);
    for (int i = 0; i < 5; i++) {
        assert_true(fabs(counts[i] - n / 5.0) < 5 * sqrt(n / 5.0));
    }
}

static void text_grows_and_survives_failure(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_text t;
    mui_text_init(&t, c);
    assert_string_equal(mui_text_get(&t), "");
    for (int i = 0; i < 100; i++) {
        mui_text_add(&t, "%d,", i);
    }
    assert_int_equal(t.length, 290);
    c->fail_after = 0;
    for (int i = 0; i < 100; i++) {
        mui_text_add(&t, "%d,", i);
    }
    assert_true(t.failed);
    assert_string_equal(mui_text_get(&t), "");
    mui_text_free(&t);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void globs(void **state)
{
    (void)state;
    assert_true(mui_glob_match("layer1.*", "layer1.0.conv1.weight"));
    assert_true(mui_glob_match("*.bias", "fc.bias"));
    assert_false(mui_glob_match("fc", "fc.bias"));
}

static int threads_with(const char *variable, int option)
{
    assert_int_equal(variable != NULL ? setenv("OMP_NUM_THREADS", variable, 1) : unsetenv("OMP_NUM_THREADS"), 0);
    mu_context *c = mu_context_open(&(mu_context_options){.threads = option});
    int threads = mu_context_threads(c);
    assert_int_equal(mu_context_close(c), MU_OK);
    return threads;
}

static void threads_are_the_options_or_the_environments(void **state)
{
    (void)state;
    assert_int_equal(threads_with(NULL, 0), 1);
    assert_int_equal(threads_with("3", 0), 3);
    assert_int_equal(threads_with("4,2", 0), 4);
    assert_int_equal(threads_with("3", 2), 2);
    assert_int_equal(threads_with("-2", 0), 1);
    assert_int_equal(threads_with("many", 0), 1);
}

/* What a program has in hand when mu_context_open could not make a context. */
static void no_context_is_out_of_memory(void **state)
{
    (void)state;
    mu_context_clear(NULL);
    assert_int_equal(mu_context_status(NULL), MU_ERR_NOMEM);
    assert_string_equal(mu_context_message(NULL), "out of memory");
    assert_int_equal(mu_context_rank(NULL), 0);
    assert_int_equal(mu_context_size(NULL), 1);
    assert_int_equal(mu_context_threads(NULL), 1);
    assert_int_equal(mu_complain(NULL, MU_ERR_NOMEM), MU_ERR_NOMEM);
    assert_int_equal(mu_context_close(NULL), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_error_wins),
        cmocka_unit_test(owned_are_destroyed_by_order_then_newest_first),
        cmocka_unit_test(arena_reuses_its_blocks),
        cmocka_unit_test(allocation_failures_are_raised),
        cmocka_unit_test(philox_matches_its_authors),
        cmocka_unit_test(draws_have_their_distribution),
        cmocka_unit_test(text_grows_and_survives_failure),
        cmocka_unit_test(globs),
        cmocka_unit_test(threads_are_the_options_or_the_environments),
        cmocka_unit_test(no_context_is_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
