/* Groups whose ranks are processes. */
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
        assert_int_equal(run_processes(n, body_all_reduce, n == 2 ? (void *)&everything : &few, NULL, true), 0);
    }
}

static void many_in_flight(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_processes(n, body_in_flight, NULL, NULL, true), 0);
    }
    assert_int_equal(run_processes(7, body_in_flight, NULL, NULL, true), 0);
    assert_int_equal(run_processes(2, body_staged_in_flight, NULL, NULL, true), 0);
    assert_int_equal(run_processes(3, body_staged_in_flight, NULL, NULL, true), 0);
}

static void other_collectives(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_processes(n, body_others, NULL, NULL, true), 0);
    }
}

static void scattered_all_reduce(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_processes(n, body_scattered, NULL, NULL, true), 0);
    }
}

static void heap(void **state)
{
    (void)state;
    assert_int_equal(run_processes(3, body_heap, NULL, NULL, true), 0);
}

static void failures_are_the_same_everywhere(void **state)
{
    (void)state;
    assert_int_equal(run_failures(run_processes), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_reduce_is_exact),
        cmocka_unit_test(many_in_flight),
        cmocka_unit_test(other_collectives),
        cmocka_unit_test(scattered_all_reduce),
        cmocka_unit_test(heap),
        cmocka_unit_test(failures_are_the_same_everywhere),
    };
    return cmocka_run_group_tests_name("shm", tests, NULL, NULL);
}
