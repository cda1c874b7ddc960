/* What is said about ranks that a call waits for, of a group made up for it: rank 1 looks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "comm/missing_words.h"

#include <inttypes.h>
#include <stdio.h>

static unsigned late; /* bit r: of rank r */

static bool lacks(const mu_group *g, const mu_request *call, int rank)
{
    assert_ptr_equal(call->group, g);
    return (late >> rank & 1u) != 0;
}

static void name(const mu_group *g, int rank, char *out, size_t size)
{
    (void)g;
    snprintf(out, size, "rank %d (here)", rank);
}

static uint64_t calls(const mu_group *g, int rank)
{
    (void)g;
    return (uint64_t)rank + 10;
}

static void lack(void *user, int rank, uint64_t started, mui_lack why, char *out, size_t size)
{
    (void)user;
    if (rank != 3) {
        snprintf(out, size, "no x of %" PRIu64 " (%d)", started, (int)why);
    }
}

static void check(unsigned who, bool knows, int count, const char *list, const char *description)
{
    mu_group g = {.rank = 1, .size = 6, .lack = knows ? lack : NULL};
    mu_request call = {.group = &g};
    mui_missing m = {&g, &call, lacks, name, calls};
    char out[200];
    late = who;
    assert_int_equal(mui_missing_list(&m, out, sizeof(out)), count);
    assert_string_equal(out, list);
    assert_int_equal(mui_missing_describe(&m, MUI_LACK_DEAD, out, sizeof(out)), count);
    assert_string_equal(out, description);
}

static void ranks_are_named(void **state)
{
    (void)state;
    check(0, true, 0, "rank", "");
    check(1u << 2, false, 1, "rank 2", "rank 2 (here)");
    check(1u << 2 | 1u << 1, true, 1, "rank 2", "rank 2 (here); no x of 12 (1)"); /* who looks is not missing */
    check(1u << 0 | 1u << 3, true, 2, "ranks 0, 3", "rank 0 (here); no x of 10 (1), and rank 3 (here)");
    check(63, true, 5, "ranks 0, 2, 3, 4, 5",
          "rank 0 (here); no x of 10 (1), and rank 2 (here); no x of 12 (1), and 3 more");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks_are_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
