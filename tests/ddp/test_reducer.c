/* The reducer alone, without tape or tensors: parameters are slices of a slab that the test fills. Which of them a rank
 * has, in what order they come, and where a rank gives up are drawn from (reduction, rank); every rank can work out
 * what the others did, so each checks its own result. */
#include "rig.h"

#include "ddp/reducer.h"

enum { SLICES = 23, REDUCTIONS = 40 };

typedef struct setup {
    size_t cap; /* bytes of a bucket */
    bool weighted, giving_up;
} setup;

static size_t slice_floats(int64_t i)
{
    return (size_t)(16 * (1 + i * i % 7));
}

static bool has(int n, int rank, int64_t i)
{
    uint64_t x = mix((uint64_t)(n * 1000 + rank * 50) + (uint64_t)i);
    return i == 3 ? false : i == 4 ? rank == 0 : x % 3 != 0;
}

static float value(int n, int rank, int64_t i, size_t k)
{
    return (float)((int)(mix((uint64_t)(n * 77 + rank) * 131 + (uint64_t)i * 17 + k) % 401) - 200);
}

static int64_t samples_of(int n, int rank)
{
    return (int64_t)(mix((uint64_t)(n * 31 + rank)) % (1 << 24)) + (rank == 0);
}

/* The point at which a rank gives up: -1 never, 0 from the start, else after that many slices. */
static int gives_up(int n, int rank, int size)
{
    if (n % 3 == 2) {
        return -1;
    }
    return rank == n % size ? (int)(mix((uint64_t)n) % (SLICES + 1)) : -1;
}

typedef struct bench {
    mui_reducer *r;
    float *slab;
    mui_slice slices[SLICES];
    int64_t buckets;
} bench;

static void lay_out(mu_group *g, bench *b, const setup *s)
{
    mu_context *c = g->context;
    size_t bytes[SLICES], at = 0;
    int64_t counts[SLICES], first = 0;
    for (int64_t i = 0; i < SLICES; i++) {
        bytes[i] = slice_floats(i) * sizeof(float);
    }
    mui_slice_bucket buckets[SLICES];
    b->buckets = mui_reducer_plan(bytes, SLICES, s->cap / 2, s->cap, counts);
    for (int64_t k = 0; k < b->buckets; k++) {
        buckets[k] = (mui_slice_bucket){.first = first, .count = counts[k], .offset = at * sizeof(float)};
        for (int64_t i = 0; i < counts[k]; i++, first++) {
            b->slices[first] = (mui_slice){.name = "slice", .offset = at * sizeof(float), .elements = slice_floats(first)};
            at += slice_floats(first);
        }
        buckets[k].elements = at - buckets[k].offset / sizeof(float);
        buckets[k].tail = mui_reducer_tail(g, counts[k]);
        at = (at + buckets[k].tail + 15) / 16 * 16;
    }
    CHECK(first == SLICES, "the plan leaves slices out");
    b->slab = mu_group_alloc(g, at * sizeof(float));
    b->r = mui_reducer_new(c, g, "ddp", "bench", 1);
    CHECK(b->slab != NULL && b->r != NULL, "set-up: %s", mu_context_message(c));
    CHECK(mui_reducer_layout(b->r, b->slices, SLICES, buckets, b->buckets, b->slab, 42) == MU_OK, "layout");
}

static void deliver(bench *b, const setup *s, int n, int rank, int size)
{
    uint8_t states[SLICES];
    int stop = s->giving_up ? gives_up(n, rank, size) : -1, came = 0;
    for (int64_t i = 0; i < SLICES; i++) {
        states[i] = has(n, rank, i) ? (i % 5 == 0 ? MUI_SLICE_READY : MUI_SLICE_EXPECTED) : MUI_SLICE_ABSENT;
        for (size_t k = 0; k < b->slices[i].elements; k++) {
            float v = value(n, rank, i, k) * (s->weighted ? (float)samples_of(n, rank) : 1.0F);
            b->slab[b->slices[i].offset / sizeof(float) + k] = states[i] == MUI_SLICE_READY ? v : NAN; /* until it comes */
        }
    }
    mui_reduction how = {.weighted = s->weighted,
                         .samples = samples_of(n, rank),
                         .note = "",
                         .abandon = stop == 0 ? "from the start" : NULL};
    mui_reducer_begin(b->r, &how, states);
    int64_t order = (int64_t)(mix((uint64_t)(n + rank)) % SLICES);
    for (int64_t step = 0; step < SLICES && stop != 0; step++) {
        int64_t i = (order + step * 5) % SLICES;
        if (states[i] != MUI_SLICE_EXPECTED) {
            continue;
        }
        if (came++ == stop) {
            mui_reducer_abandon(b->r, "on the way");
            break;
        }
        for (size_t k = 0; k < b->slices[i].elements; k++) {
            b->slab[b->slices[i].offset / sizeof(float) + k] = value(n, rank, i, k) * (s->weighted ? (float)samples_of(n, rank) : 1.0F);
        }
        mui_reducer_ready(b->r, i, true);
        nap_randomly((uint64_t)(n * 100 + rank * 10) + (uint64_t)step, 20);
    }
    if (stop > 0 && came <= stop) {
        mui_reducer_abandon(b->r, "at the end"); /* the last bucket is still here */
    }
    mui_reducer_launch_rest(b->r);
}

static void check_result(bench *b, const setup *s, int n, int size)
{
    double total = 0;
    for (int r = 0; r < size; r++) {
        total += s->weighted ? (double)samples_of(n, r) : 1.0;
    }
    CHECK(mui_reducer_total_samples(b->r) == (int64_t)total || !s->weighted, "total of samples");
    for (int64_t i = 0; i < SLICES; i++) {
        int present = 0;
        for (int r = 0; r < size; r++) {
            present += has(n, r, i);
            CHECK(mui_reducer_on(b->r, i, r) == has(n, r, i), "slice %d on rank %d", (int)i, r);
        }
        CHECK(mui_reducer_ranks(b->r, i) == present, "slice %d: %d ranks", (int)i, present);
        for (size_t k = 0; k < b->slices[i].elements; k++) {
            double want = 0;
            for (int r = 0; r < size; r++) {
                want += has(n, r, i) ? value(n, r, i, k) * (s->weighted ? (double)samples_of(n, r) : 1.0) : 0.0;
            }
            double got = (double)b->slab[b->slices[i].offset / sizeof(float) + k];
            CHECK(fabs(got - want / total) <= 1e-6 * (double)(200 * size), "slice %d: %g, want %g", (int)i, got,
                  want / total);
        }
    }
}

static void reduce_many(mu_group *g, int rank, int size, void *arg)
{
    const setup *s = arg;
    bench b = {0};
    lay_out(g, &b, s);
    int skips = 0;
    for (int n = 0; n < REDUCTIONS; n++) {
        CHECK(mui_reducer_sequence(b.r) == (uint64_t)n + 1, "sequence");
        deliver(&b, s, n, rank, size);
        mu_status status = mui_reducer_wait(b.r);
        bool may_skip = false;
        for (int r = 0; s->giving_up && r < size; r++) {
            may_skip = may_skip || gives_up(n, r, size) >= 0;
        }
        if (status == MU_OK) {
            CHECK(!may_skip, "a rank gave up, but the reduction went through");
            check_result(&b, s, n, size);
        } else {
            CHECK(status == MU_SKIPPED && may_skip, "reduction %d: %s", n, mu_context_message(g->context));
            char who[32];
            snprintf(who, sizeof(who), "rank %d", n % size);
            CHECK(strstr(mui_reducer_skip_text(b.r), who) != NULL, "`%s` lacks %s", mui_reducer_skip_text(b.r), who);
            skips++;
        }
        int64_t all[32], own = status;
        CHECK(mu_all_gather(g, &own, all, sizeof(own)) == MU_OK, "gather");
        for (int r = 0; r < size; r++) {
            CHECK(all[r] == own, "rank %d has status %d, rank %d %d", rank, (int)own, r, (int)all[r]);
        }
    }
    CHECK(!s->giving_up || (skips > 5 && skips < REDUCTIONS), "%d skips", skips);
    mui_reducer_free(b.r);
}

static void means_and_participation(void **state)
{
    (void)state;
    for (int weighted = 0; weighted < 2; weighted++) {
        for (size_t cap = 1; cap <= 1 << 20; cap *= 1024) {
            setup s = {cap, weighted, false};
            for (int size = 1; size <= 4; size++) {
                assert_int_equal(run_threads(size, reduce_many, &s, NULL, true), 0);
            }
            assert_int_equal(run_processes(3, reduce_many, &s, NULL, true), 0);
        }
    }
    /* More ranks than one float's worth of participation bits. */
    setup s = {1024, false, false};
    assert_int_equal(run_threads(22, reduce_many, &s, &(mu_group_options){.arena_bytes = 1 << 20}, true), 0);
}

static void giving_up_keeps_all_in_step(void **state)
{
    (void)state;
    for (size_t cap = 1; cap <= 1 << 20; cap *= 1024) {
        setup s = {cap, false, true};
        for (int size = 1; size <= 4; size++) {
            assert_int_equal(run_threads(size, reduce_many, &s, NULL, true), 0);
        }
        assert_int_equal(run_processes(2, reduce_many, &s, NULL, true), 0);
    }
}

/* One rank is a reduction ahead: nobody gets data, everybody gets the same text. */
static void one_ahead(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    bench b = {0};
    setup s = {1 << 20, false, false};
    lay_out(g, &b, &s);
    uint8_t absent[SLICES] = {0};
    mui_reduction how = {.note = arg};
    if (rank == 1) {
        mui_reducer_free(b.r);
        b.r = mui_reducer_new(g->context, g, "ddp", "other", 1);
        mui_slice_bucket one = {MU_F32, 0, SLICES, 0, 16, mui_reducer_tail(g, SLICES)};
        for (int i = 0; i < SLICES; i++) {
            b.slices[i] = (mui_slice){.name = "slice", .offset = 0, .elements = 16};
        }
        CHECK(mui_reducer_layout(b.r, b.slices, SLICES, &one, 1, b.slab, 42) == MU_OK, "layout");
    }
    mui_reducer_begin(b.r, &how, absent);
    mui_reducer_launch_rest(b.r);
    CHECK(mui_reducer_wait(b.r) == MU_ERR_COMM, "status");
    const char *text = mu_context_message(g->context);
    CHECK(strstr(text, "reduction 1 (ddp `bench`)") != NULL && strstr(text, "reduction 1 (ddp `other`)") != NULL,
          "text: %s", text);
    mui_reducer_free(b.r);
}

static void contradictions_are_named(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, one_ahead, "", NULL, false), 0);
    assert_int_equal(run_threads(3, one_ahead, "", NULL, false), 0);
}

static void plans(void **state)
{
    (void)state;
    /* ddp-patterns.md, section 3: sizes in ready order, cap 2 MiB, first 1 MiB. */
    const size_t bytes[] = {28, 2400000, 200, 1600000, 40, 1200000, 800, 400};
    int64_t counts[8];
    assert_int_equal(mui_reducer_plan(bytes, 8, 1 << 20, 2 << 20, counts), 3);
    assert_int_equal(counts[0], 2);
    assert_int_equal(counts[1], 4);
    assert_int_equal(counts[2], 2);
    assert_int_equal(mui_reducer_plan(bytes, 8, 1, 1, counts), 8);
    assert_int_equal(mui_reducer_plan(bytes, 8, 1 << 30, 1 << 30, counts), 1);
    assert_int_equal(counts[0], 8);
    assert_int_equal(mui_reducer_plan(bytes, 0, 1, 1, counts), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans),
        cmocka_unit_test(means_and_participation),
        cmocka_unit_test(giving_up_keeps_all_in_step),
        cmocka_unit_test(contradictions_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
