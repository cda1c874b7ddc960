/* The heap under the pool: ranges lie apart, neighbours are joined, the best fit is taken, a repeated step asks for nothing. */
#include "base/context.h"
#include "base/rng.h"
#include "dev/heap.h"
#include <muster/tape.h>

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define MIB ((size_t)1 << 20)
#define MANY 40

static mu_context *quiet(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
}

static void ends(mu_context *c, mui_heap *h)
{
    mui_heap_free(h);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void holds(const char *data, size_t bytes, int value)
{
    for (size_t i = 0; i < bytes; i += 4093) {
        assert_int_equal(data[i], value);
    }
    assert_int_equal(data[bytes - 1], value);
}

/* Takes and gives in an order drawn from seed; all is given back at the end. */
static void churn(mui_heap *h, uint64_t seed)
{
    mui_range *r[MANY] = {0};
    size_t bytes[MANY];
    mui_rng rng;
    mui_rng_init(&rng, seed, 0);
    for (int k = 0; k < 1000; k++) {
        int i = (int)(mui_rng_below(&rng, MANY));
        if (r[i] != NULL) {
            holds(r[i]->data, bytes[i], i);
            mui_heap_give(h, r[i]);
            r[i] = NULL;
        } else {
            bytes[i] = 1 + mui_rng_below(&rng, 3 * MIB);
            r[i] = mui_heap_take(h, bytes[i]);
            assert_non_null(r[i]);
            assert_int_equal((uintptr_t)r[i]->data % 64, 0);
            assert_true(r[i]->bytes >= bytes[i]);
            memset(r[i]->data, i, bytes[i]);
        }
    }
    for (int i = 0; i < MANY; i++) {
        if (r[i] != NULL) {
            holds(r[i]->data, bytes[i], i);
            mui_heap_give(h, r[i]);
        }
    }
}

static void a_repeated_step_asks_for_nothing(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_heap *h = mui_heap_new(c);
    for (uint64_t seed = 1; seed <= 5; seed++) {
        mui_range *stays = mui_heap_take(h, 100000 * seed); /* between pieces of the step, for the rest of the test */
        assert_non_null(stays);
        churn(h, seed);
        uint64_t asked = c->allocations;
        size_t touched = mui_heap_touched(h);
        churn(h, seed);
        churn(h, seed);
        assert_int_equal(c->allocations, asked);
        assert_int_equal(mui_heap_touched(h), touched);
    }
    ends(c, h);
}

static void neighbours_are_joined(void **state)
{
    (void)state;
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    mu_context *c = quiet();
    mui_heap *h = mui_heap_new(c);
    const char *start = NULL;
    for (int k = 0; k < 6; k++) {
        mui_range *r[4];
        for (int i = 0; i < 4; i++) {
            r[i] = mui_heap_take(h, MIB);
            assert_non_null(r[i]);
        }
        start = start != NULL ? start : r[0]->data;
        for (int i = 0; i < 3; i++) {
            mui_heap_give(h, r[orders[k][i]]);
        }
        mui_range *all = mui_heap_take(h, 3 * MIB); /* fits before r[3] only if all three were joined */
        assert_ptr_equal(all->data, start);
        mui_heap_give(h, all);
        mui_heap_give(h, r[3]);
    }
    ends(c, h);
}

static void the_best_fit_is_taken(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_heap *h = mui_heap_new(c);
    static const size_t sizes[] = {5 * MIB, 1024, 3 * MIB, 1024, 4 * MIB, 1024, 3 * MIB, 1024};
    mui_range *r[8];
    for (int i = 0; i < 8; i++) {
        r[i] = mui_heap_take(h, sizes[i]);
    }
    char *first = r[2]->data, *whole = r[4]->data, *second = r[6]->data;
    for (int i = 0; i < 8; i += 2) {
        mui_heap_give(h, r[i]);
    }
    assert_ptr_equal(mui_heap_take(h, 2 * MIB)->data, first); /* of the two smallest that hold it, the lower */
    assert_ptr_equal(mui_heap_take(h, 2 * MIB)->data, second);
    assert_ptr_equal(mui_heap_take(h, 2 * MIB)->data, whole);
    ends(c, h);
}

static void larger_than_a_piece_and_too_large(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_heap *h = mui_heap_new(c);
    mui_range *r = mui_heap_take(h, 200 * MIB);
    assert_non_null(r);
    r->data[0] = r->data[200 * MIB - 1] = 1;
    mui_heap_give(h, r);
    uint64_t asked = c->allocations;
    assert_non_null(mui_heap_take(h, 150 * MIB));
    assert_non_null(mui_heap_take(h, 40 * MIB));
    assert_true(c->allocations <= asked + 2); /* headers of what was split off, no memory */
    assert_null(mui_heap_take(h, SIZE_MAX - 5));
    assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
    assert_null(mui_heap_take(h, SIZE_MAX / 2));
    assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
    ends(c, h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_repeated_step_asks_for_nothing),
        cmocka_unit_test(neighbours_are_joined),
        cmocka_unit_test(the_best_fit_is_taken),
        cmocka_unit_test(larger_than_a_piece_and_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
