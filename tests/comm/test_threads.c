/* Groups whose ranks are threads, and the group of one. */
#include "collectives.h"
#include "failures.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static const int64_t everything = 600001;

static void all_reduce_is_exact(void **state)
{
    (void)state;
    int64_t few = 65537;
    for (int n = 1; n <= 8; n++) {
        assert_int_equal(run_threads(n, body_all_reduce, n == 2 ? (void *)&everything : &few, NULL, true), 0);
    }
}

static void many_in_flight(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_in_flight, NULL, NULL, true), 0);
    }
    assert_int_equal(run_threads(7, body_in_flight, NULL, NULL, true), 0);
}

static void other_collectives(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_others, NULL, NULL, true), 0);
    }
}

static void heap(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, body_heap, NULL, NULL, true), 0);
}

static void alone(void **state)
{
    (void)state;
    mu_context *c = quiet_context();
    mu_group *g = mu_group_self(c);
    assert_non_null(g);
    assert_string_equal(mu_group_kind(g), "self");
    int before = failures;
    body_all_reduce(g, 0, 1, (void *)&everything);
    body_in_flight(g, 0, 1, NULL);
    body_others(g, 0, 1, NULL);
    body_heap(g, 0, 1, NULL);
    assert_int_equal(failures, before);
    assert_int_equal(mu_context_size(c), 1);
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void failures_are_the_same_everywhere(void **state)
{
    (void)state;
    assert_int_equal(run_failures(run_threads), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_reduce_is_exact),
        cmocka_unit_test(many_in_flight),
        cmocka_unit_test(other_collectives),
        cmocka_unit_test(heap),
        cmocka_unit_test(failures_are_the_same_everywhere),
        cmocka_unit_test(alone),
    };
    return cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
