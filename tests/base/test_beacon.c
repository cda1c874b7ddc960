/* What a rank is doing: texts read while they are written, by threads, and places that are left again. */
#include "base/beacon.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static mui_board shared;
static int stop; /* atomic */

/* Texts of one letter and of its own length: a mixture of two would show. */
static void *write_letters(void *arg)
{
    (void)arg;
    for (unsigned i = 0; __atomic_load_n(&stop, __ATOMIC_RELAXED) == 0; i++) {
        char text[MUI_BOARD_BYTES + 40];
        size_t n = (size_t)(i * 7 % 220) + 1;
        memset(text, 'a' + (int)(i % 26), n);
        text[n] = '\0';
        mui_board_write(&shared, i % 26, text);
        for (int pause = 0; pause < 3000 && __atomic_load_n(&stop, __ATOMIC_SEQ_CST) == 0;) {
            pause++; /* no rank writes without doing anything in between */
        }
    }
    return NULL;
}

static void a_text_is_read_whole(void **state)
{
    (void)state;
    pthread_t writer;
    char text[MUI_BOARD_BYTES];
    uint32_t stage = 1;
    mui_board_read(&shared, &stage, text);
    assert_string_equal(text, "");
    assert_int_equal(stage, 0);
    assert_int_equal(pthread_create(&writer, NULL, write_letters, NULL), 0);
    uint32_t turn = 0;
    int mixed = 0, changes = 0, reads = 0;
    for (; reads < 200000 || changes < 1000; reads++) {
        mui_board_read(&shared, &stage, text);
        size_t n = strlen(text);
        assert_true(n < MUI_BOARD_BYTES);
        bool whole = n == 0 || stage == (uint32_t)(text[0] - 'a');
        for (size_t k = 1; k < n; k++) {
            whole = whole && text[k] == text[0];
        }
        mixed += !whole;
        changes += turn != mui_board_turn(&shared);
        turn = mui_board_turn(&shared);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(writer, NULL);
    /* A writer whose core is taken away in the middle is not waited for. Without the lock it is one read in fifty. */
    assert_true(mixed <= reads / 1000);
}

/* The lock of a writer that died half way does not keep the next one, nor a reader. */
static void a_dead_writer_is_survived(void **state)
{
    (void)state;
    mui_board b = {0};
    char text[MUI_BOARD_BYTES];
    mui_board_write(&b, 1, "before");
    b.turn |= 1;
    mui_board_read(&b, NULL, text);
    assert_string_equal(text, "before");
    mui_board_write(&b, 2, "after");
    assert_int_equal(b.turn % 2, 0);
    mui_board_read(&b, NULL, text);
    assert_string_equal(text, "after");
}

static void expect_place(const mui_beacon *b, uint32_t want, const char *path)
{
    char text[MUI_BOARD_BYTES];
    uint32_t stage;
    mui_board_read(&b->place, &stage, text);
    assert_int_equal(stage, want);
    assert_string_equal(text, path);
}

static void places_are_left_again(void **state)
{
    (void)state;
    static mui_beacon one, two;
    mui_beacon_link first = {.beacon = &one}, second = {.beacon = &two};
    mu_context *c = mu_context_open(NULL);
    mui_go(c, MUI_LOADER, NULL); /* nobody looks */
    mui_go(c, MUI_ELSEWHERE, NULL);
    mui_beacon_add(c, &first);
    mui_beacon_add(c, &second);
    mui_work(c, "reduction 7");
    mui_place outer = mui_go(c, MUI_BACKWARD, "layer3");
    mui_place inner = mui_go(c, MUI_FORWARD, "layer2.conv1"); /* recomputed */
    expect_place(&one, MUI_FORWARD, "layer2.conv1");
    expect_place(&two, MUI_FORWARD, "layer2.conv1");
    mui_go(c, inner.stage, inner.path);
    expect_place(&one, MUI_BACKWARD, "layer3");
    mui_beacon_remove(c, &first);
    mui_go(c, outer.stage, outer.path);
    expect_place(&two, MUI_ELSEWHERE, "");
    expect_place(&one, MUI_BACKWARD, "layer3");
    mui_beacon_remove(c, &first); /* again: nothing happens */
    mui_beacon_remove(c, &second);
    assert_null(c->beacons);
    char text[MUI_BOARD_BYTES];
    mui_board_read(&one.work, NULL, text);
    assert_string_equal(text, "reduction 7");
    assert_string_equal(mui_stage_name(MUI_OPTIMISER), "the optimiser's step");
    assert_string_equal(mui_stage_name(12345), "");
    assert_int_equal(mu_context_close(c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_is_read_whole),
        cmocka_unit_test(a_dead_writer_is_survived),
        cmocka_unit_test(places_are_left_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
