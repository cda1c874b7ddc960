/* Which rank gets which sample when: properties over a grid of sizes, and the rule of data.h itself. */
#include "data/sampler.h"

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

static mui_sampler make(mu_context *c, int64_t count, int batch, int rank, int size, mu_remainder remainder,
                        bool shuffle)
{
    mui_sampler s;
    mu_loader_options o = {
        .batch = batch, .shard = {rank, size}, .remainder = remainder, .shuffle = shuffle, .seed = 5};
    assert_int_equal(mui_sampler_init(&s, c, count, &o), MU_OK);
    mui_sampler_epoch(&s, 2);
    return s;
}

static const int64_t counts[] = {1, 2, 5, 7, 16, 17, 31, 64, 100};
static const int batches[] = {1, 2, 3, 8, 40};
#define COUNTS (sizeof(counts) / sizeof(counts[0]))
#define BATCHES (sizeof(batches) / sizeof(batches[0]))

/* All ranks' parts of step s, in rank order, must be one rank's part with the batch times size. */
static void compare_with_one_rank(mu_context *c, int64_t count, int batch, int size, mu_remainder remainder)
{
    mui_sampler one = make(c, count, batch * size, 0, 1, MU_REMAINDER_DEFAULT, true);
    int *seen = calloc((size_t)count, sizeof(*seen));
    int64_t steps = -1, shortest = INT64_MAX, longest = 0;
    for (int rank = 0; rank < size; rank++) {
        mui_sampler s = make(c, count, batch, rank, size, remainder, true);
        assert_true(steps == -1 || s.steps == steps); /* all ranks have as many */
        steps = s.steps;
        int64_t mine = 0;
        for (int64_t step = 0; step < s.steps; step++) {
            mui_part part = mui_sampler_slice(&s, step), whole = mui_sampler_slice(&one, step);
            assert_true(part.count >= 0 && part.count <= batch);
            assert_true(part.total >= 1 && part.total <= (int64_t)batch * size);
            mine += part.count;
            if (remainder == MU_REMAINDER_DEFAULT) {
                assert_int_equal(part.total, whole.count);
                if (part.total == (int64_t)batch * size) {
                    assert_int_equal(part.first, whole.first + (int64_t)rank * batch);
                }
            }
            for (int64_t i = 0; i < part.count; i++) {
                int64_t index = mui_sampler_index(&s, part.first + i);
                assert_true(index >= 0 && index < count);
                seen[index]++;
                /* The same permutation at the same position, for any number of ranks. */
                assert_int_equal(index, mui_sampler_index(&one, part.first + i));
            }
        }
        shortest = mine < shortest ? mine : shortest;
        longest = mine > longest ? mine : longest;
        mui_sampler_free(&s, c);
    }
    if (remainder == MU_REMAINDER_DEFAULT) {
        assert_int_equal(steps, one.steps);
        for (int64_t i = 0; i < count; i++) {
            assert_int_equal(seen[i], 1);
        }
        assert_true(longest - shortest <= 1);
    } else {
        assert_int_equal(longest, shortest);
        int64_t total = 0;
        for (int64_t i = 0; i < count; i++) {
            total += seen[i];
            assert_true(remainder == MU_REMAINDER_DROP ? seen[i] <= 1 : seen[i] >= 1);
        }
        int64_t want = remainder == MU_REMAINDER_DROP ? count / ((int64_t)batch * size) * batch * size
                                                      : (count + size - 1) / size * size;
        assert_int_equal(total, want);
    }
    free(seen);
    mui_sampler_free(&one, c);
}

static void every_sample_once_and_as_with_one_rank(void **state)
{
    (void)state;
    mu_context *c = quiet();
    for (size_t n = 0; n < COUNTS; n++) {
        for (size_t b = 0; b < BATCHES; b++) {
            for (int size = 1; size <= 7; size++) {
                compare_with_one_rank(c, counts[n], batches[b], size, MU_REMAINDER_DEFAULT);
            }
        }
    }
    mu_context_close(c);
}

static void wrapping_and_dropping_make_ranks_equal(void **state)
{
    (void)state;
    mu_context *c = quiet();
    for (size_t n = 0; n < COUNTS; n++) {
        for (size_t b = 0; b < BATCHES; b++) {
            for (int size = 1; size <= 7; size++) {
                compare_with_one_rank(c, counts[n], batches[b], size, MU_REMAINDER_WRAP);
                if (counts[n] >= (int64_t)batches[b] * size) {
                    compare_with_one_rank(c, counts[n], batches[b], size, MU_REMAINDER_DROP);
                }
            }
        }
    }
    mui_sampler s;
    mu_loader_options o = {.batch = 8, .shard = {0, 4}, .remainder = MU_REMAINDER_DROP};
    assert_int_equal(mui_sampler_init(&s, c, 31, &o), MU_ERR_ARG);
    assert_non_null(strstr(mu_context_message(c), "31 samples make no full batch of 8 on 4 ranks"));
    mu_context_clear(c);
    o.remainder = (mu_remainder)9;
    assert_int_equal(mui_sampler_init(&s, c, 31, &o), MU_ERR_ARG);
    mu_context_close(c);
}

static void the_last_batch_is_cut_evenly(void **state)
{
    (void)state;
    mu_context *c = quiet();
    const int64_t first[3] = {12, 14, 15}, count[3] = {2, 1, 1}; /* 16 = 3 ranks x 4 + 4 */
    for (int rank = 0; rank < 3; rank++) {
        mui_sampler s = make(c, 16, 4, rank, 3, MU_REMAINDER_DEFAULT, false);
        mui_part part = mui_sampler_slice(&s, 1);
        assert_int_equal(part.first, first[rank]);
        assert_int_equal(part.count, count[rank]);
        assert_int_equal(part.total, 4);
        assert_int_equal(mui_sampler_index(&s, part.first), first[rank]);
    }
    mu_context_close(c);
}

/* An epoch begun by some ranks and gone on with by others, twice: no sample comes twice and none is left out. */
static void other_ranks_go_on_with_an_epoch(void **state)
{
    (void)state;
    mu_context *c = quiet();
    static const struct {
        int size, batch;
    } shapes[] = {{1, 3}, {2, 4}, {3, 4}, {3, 1}, {4, 6}, {5, 20}};
    enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]), COUNT = 97 };
    for (int turn = 0; turn < SHAPES * SHAPES * 8; turn++) {
        mu_remainder remainder = turn % 2 == 0 ? MU_REMAINDER_DEFAULT : MU_REMAINDER_WRAP;
        int seen[COUNT] = {0}, total = 0, shape = turn % SHAPES;
        int64_t samples = 0;
        for (int leg = 0; leg < 3; leg++, shape = (shape + turn / SHAPES + leg) % SHAPES) {
            int size = shapes[shape].size;
            int64_t before = 0, stop = -1, steps = 0;
            for (int rank = 0; rank < size; rank++) {
                mui_sampler s = make(c, COUNT, shapes[shape].batch, rank, size, remainder, true);
                int64_t step = mui_sampler_seek(&s, samples);
                assert_true(rank == 0 || steps == s.end);
                steps = s.end;
                stop = leg == 2 ? s.end : step + turn % 3 < s.end ? step + turn % 3 : s.end;
                before = samples;
                for (; step < stop; step++) {
                    mui_part part = mui_sampler_slice(&s, step);
                    assert_true(part.count >= 0 && part.count <= shapes[shape].batch);
                    assert_true(rank > 0 || part.first == before); /* runs follow each other without a gap */
                    before += part.total;
                    for (int64_t i = 0; i < part.count; i++) {
                        seen[mui_sampler_index(&s, part.first + i)]++;
                        total++;
                    }
                }
                mui_sampler_free(&s, c);
            }
            samples = before;
        }
        for (int i = 0; i < COUNT; i++) {
            assert_true(remainder == MU_REMAINDER_DEFAULT ? seen[i] == 1 : seen[i] >= 1);
        }
        assert_in_range(total, COUNT, COUNT + 5);
    }
    /* Dropping: whole batches only, from wherever it begins. */
    mui_sampler s = make(c, COUNT, 10, 0, 2, MU_REMAINDER_DROP, true);
    assert_int_equal(mui_sampler_seek(&s, 12), 0);
    assert_int_equal(s.end, 4);
    assert_int_equal(mui_sampler_slice(&s, 3).first, 72);
    assert_int_equal(mui_sampler_seek(&s, 80), 4);
    assert_int_equal(mui_sampler_seek(&s, 78), 3); /* 19 are left */
    assert_int_equal(s.end, 3);
    mui_sampler_free(&s, c);
    mu_context_close(c);
}

static void orders_differ_by_epoch_and_seed_and_are_uniform(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_sampler a = make(c, 1000, 10, 0, 1, MU_REMAINDER_DEFAULT, true);
    mui_sampler b = make(c, 1000, 10, 0, 1, MU_REMAINDER_DEFAULT, true);
    assert_memory_equal(a.order, b.order, 1000 * sizeof(int64_t));
    mui_sampler_epoch(&b, 3);
    assert_memory_not_equal(a.order, b.order, 1000 * sizeof(int64_t));
    mui_sampler_epoch(&b, 2); /* whatever came before */
    assert_memory_equal(a.order, b.order, 1000 * sizeof(int64_t));
    b.seed = 6;
    mui_sampler_epoch(&b, 2);
    assert_memory_not_equal(a.order, b.order, 1000 * sizeof(int64_t));
    mui_sampler_free(&a, c);
    mui_sampler_free(&b, c);
    /* All 24 orders of four: 24000 epochs, 1000 each expected, deviation 31. */
    mui_sampler s = make(c, 4, 1, 0, 1, MU_REMAINDER_DEFAULT, true);
    int tally[256] = {0}, distinct = 0;
    for (int64_t epoch = 0; epoch < 24000; epoch++) {
        mui_sampler_epoch(&s, epoch);
        tally[s.order[0] * 64 + s.order[1] * 16 + s.order[2] * 4 + s.order[3]]++;
    }
    for (int i = 0; i < 256; i++) {
        if (tally[i] > 0) {
            distinct++;
            assert_in_range(tally[i], 840, 1160);
        }
    }
    assert_int_equal(distinct, 24);
    mui_sampler_free(&s, c);
    mu_context_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_sample_once_and_as_with_one_rank),
        cmocka_unit_test(wrapping_and_dropping_make_ranks_equal),
        cmocka_unit_test(the_last_batch_is_cut_evenly),
        cmocka_unit_test(other_ranks_go_on_with_an_epoch),
        cmocka_unit_test(orders_differ_by_epoch_and_seed_and_are_uniform),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
