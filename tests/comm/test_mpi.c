/* Groups over MPI: the bodies that threads and processes run, under mpirun. Started in another way it has nothing to do,
 * which is an error. */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "collectives.h"
#include "failures.h"
#include "mpi_ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static void started_by_mpirun(void **state)
{
    (void)state;
    assert_true(mpi_world() > 0);
}

static void all_reduce_is_exact(void **state)
{
    (void)state;
    int64_t few = 65537, all = 600001;
    assert_int_equal(run_mpi(mpi_world(), body_all_reduce, mpi_world() == 2 ? &all : &few, NULL, true), 0);
    static const size_t rounds[] = {64, 4096, 65536};
    for (size_t i = 0; i < 3; i++) {
        mpi_round_bytes = rounds[i];
        few = (int64_t)(rounds[i] * 3 / 2);
        assert_int_equal(run_mpi(mpi_world(), body_all_reduce, &few, NULL, true), 0);
    }
    mpi_round_bytes = 0;
}

static void many_in_flight(void **state)
{
    (void)state;
    assert_int_equal(run_mpi(mpi_world(), body_in_flight, NULL, NULL, true), 0);
    assert_int_equal(run_mpi(mpi_world(), body_staged_in_flight, NULL, NULL, true), 0);
    mpi_round_bytes = 8192;
    assert_int_equal(run_mpi(mpi_world(), body_in_flight, NULL, NULL, true), 0);
    mpi_round_bytes = 0;
}

static void other_collectives(void **state)
{
    (void)state;
    size_t few = 100001, fewer = 4096;
    assert_int_equal(run_mpi(mpi_world(), body_others, mpi_world() == 2 ? NULL : &few, NULL, true), 0);
    mpi_round_bytes = 512;
    assert_int_equal(run_mpi(mpi_world(), body_others, &fewer, NULL, true), 0);
    mpi_round_bytes = 16384;
    assert_int_equal(run_mpi(mpi_world(), body_others, &few, NULL, true), 0);
    mpi_round_bytes = 0;
}

static void scattered_all_reduce(void **state)
{
    (void)state;
    int64_t few = 64, some = 1000;
    assert_int_equal(run_mpi(mpi_world(), body_scattered, mpi_world() == 2 ? NULL : &some, NULL, true), 0);
    mpi_round_bytes = 512;
    assert_int_equal(run_mpi(mpi_world(), body_scattered, &few, NULL, true), 0);
    mpi_round_bytes = 65536;
    assert_int_equal(run_mpi(mpi_world(), body_scattered, &some, NULL, true), 0);
    mpi_round_bytes = 0;
}

static void heap(void **state)
{
    (void)state;
    assert_int_equal(run_mpi(mpi_world(), body_heap, NULL, NULL, true), 0);
}

static void failures_are_the_same_everywhere(void **state)
{
    (void)state;
    assert_int_equal(run_failures(run_mpi), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(started_by_mpirun),
        cmocka_unit_test(all_reduce_is_exact),
        cmocka_unit_test(many_in_flight),
        cmocka_unit_test(other_collectives),
        cmocka_unit_test(scattered_all_reduce),
        cmocka_unit_test(heap),
        cmocka_unit_test(failures_are_the_same_everywhere),
    };
    int bad = cmocka_run_group_tests_name("mpi", tests, NULL, NULL);
    mpi_end();
    return bad;
}
