/* What must go wrong in one way on all ranks: contradictions, abandonments, aborts, leavers, time. Bodies of ranks. */
#ifndef TEST_FAILURES_H
#define TEST_FAILURES_H

#include "base/os.h"
#include "comm/group.h"
#include "ranks.h"

static inline mui_identity identity(uint32_t kind, uint64_t sequence, uint64_t hash, const char *text)
{
    mui_identity id = {.kind = kind, .sequence = sequence, .hash = hash};
    snprintf(id.text, sizeof(id.text), "%s", text);
    return id;
}

static inline mu_status reduce_as(mu_group *g, float *data, int64_t n, const mui_identity *id)
{
    return mu_request_wait(mui_all_reduce_start(g, data, n, MU_F32, MU_MEAN, id));
}

/* The error must be this one, and stay, at once and for every call. */
static inline void expect_broken(mu_group *g, mu_status want, const char *message)
{
    const char *said = mu_context_message(g->context);
    CHECK(mu_context_status(g->context) == want, "status %d: %s", mu_context_status(g->context), said);
    CHECK(strstr(said, message) != NULL, "`%s` is not in `%s`", message, said);
    char first[1024];
    snprintf(first, sizeof(first), "%s", said);
    mu_context_clear(g->context);
    float x[2] = {1, 2};
    double before = mui_now();
    CHECK(mu_barrier(g) == want, "sticky barrier");
    CHECK(strcmp(first, mu_context_message(g->context)) == 0, "`%s` became `%s`", first,
          mu_context_message(g->context));
    CHECK(mu_all_reduce(g, x, 2, MU_F32, MU_SUM) == want, "sticky all-reduce");
    CHECK(mu_broadcast(g, x, 8, 0) == want, "sticky broadcast");
    CHECK(mu_all_reduce_start(g, x, 2, MU_F32, MU_SUM) == NULL, "sticky start");
    CHECK(mu_group_alloc(g, 100) == NULL, "sticky alloc");
    CHECK(mui_now() - before < 0.5, "a broken group must not wait");
}

static inline void body_other_sequence(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    float x[100] = {0};
    mui_identity d = identity(1, 17, 5, "reduction 17 (ddp `D`)"), e = identity(1, 18, 6, "reduction 18 (ddp `G`)");
    CHECK(reduce_as(g, x, 100, &d) == MU_OK, "agreed");
    x[0] = (float)rank;
    CHECK(reduce_as(g, x, 100, rank == size - 1 ? &e : &d) == MU_ERR_COMM, "contradiction");
    CHECK(x[0] == (float)rank, "data must be untouched");
    char want[256];
    snprintf(want, sizeof(want), "rank 0 is at reduction 17 (ddp `D`), rank %d at reduction 18 (ddp `G`)", size - 1);
    expect_broken(g, MU_ERR_COMM, want);
}

static inline void body_same_text(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    float x[8] = {0};
    mui_identity d = identity(1, 3, rank == 0 ? 0xaa : 0xbb, "reduction 3 (ddp `net`)");
    CHECK(reduce_as(g, x, 8, &d) == MU_ERR_COMM, "contradiction");
    expect_broken(g, MU_ERR_COMM,
                  "rank 0 is at reduction 3 (ddp `net`), rank 1 at reduction 3 (ddp `net`), but with different layouts "
                  "or arguments (hashes 00000000000000aa and 00000000000000bb)");
}

static inline void body_other_call(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    float x[100000] = {0};
    if (rank == 0) {
        CHECK(mu_barrier(g) == MU_ERR_COMM, "barrier");
    } else {
        CHECK(mu_all_reduce(g, x, 100000, MU_F32, MU_SUM) == MU_ERR_COMM, "all-reduce");
    }
    expect_broken(g, MU_ERR_COMM, "rank 0 is at a barrier, rank 1 at an all-reduce (sum) of 100000 float32");
}

static inline void body_other_count(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    float *x = calloc(100001, sizeof(*x));
    mu_request *a = mu_all_reduce_start(g, x, 50000, MU_F32, MU_SUM), *b, *c;
    b = mu_all_reduce_start(g, x + 50000, rank == size - 1 ? 7 : 8, MU_F32, MU_SUM);
    c = b != NULL ? mu_all_reduce_start(g, x + 60000, 8, MU_F32, MU_SUM) : NULL;
    /* The first is agreed on, and may or may not complete; those after it must not. */
    mu_status s = mu_request_wait(a);
    CHECK(s == MU_OK || s == MU_ERR_COMM, "first");
    CHECK(b == NULL || mu_request_wait(b) == MU_ERR_COMM, "second");
    CHECK(c == NULL || mu_request_wait(c) == MU_ERR_COMM, "third");
    char want[256];
    snprintf(want, sizeof(want), "rank 0 is at an all-reduce (sum) of 8 float32, rank %d at an all-reduce (sum) of 7",
             size - 1);
    expect_broken(g, MU_ERR_COMM, want);
    free(x);
}

static inline void body_other_alloc(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    CHECK(mu_group_alloc(g, rank == 0 ? 100 : 200) == NULL, "alloc");
    expect_broken(g, MU_ERR_COMM, "rank 0 is at mu_group_alloc of 100 bytes, rank 1 at mu_group_alloc of 200 bytes");
}

/* A skipped step changes nothing, and the next one works; many times, with any rank, in and out of the arena. */
static inline void body_abandon(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    float *shared = mu_group_alloc(g, sizeof(float) * 5000), own[100];
    for (int step = 0; step < 100; step++) {
        int who = (int)(mix((uint64_t)step) % (uint64_t)(size + 1)); /* size: nobody */
        int64_t n = step % 2 == 0 ? 5000 : 100;
        float *x = step % 3 == 0 && n == 100 ? own : shared;
        for (int64_t i = 0; i < n; i++) {
            x[i] = (float)(rank + 1);
        }
        char text[64];
        snprintf(text, sizeof(text), "non-finite loss in step %d", step);
        mui_identity id = rank == who ? identity(MUI_KIND_ABANDON, 0, 0, text) : identity(1, (uint64_t)step, 9, "step");
        nap_randomly((uint64_t)(step * 16 + rank), 100);
        mu_status s = rank == who ? reduce_as(g, NULL, 0, &id) : reduce_as(g, x, n, &id);
        CHECK(s == (who < size ? MU_SKIPPED : MU_OK), "step %d: status %d", step, s);
        if (who < size) {
            char want[96];
            snprintf(want, sizeof(want), "rank %d: %s", who, text);
            CHECK(strcmp(mui_group_skip_text(g), want) == 0, "`%s`", mui_group_skip_text(g));
        }
        float mean = (float)(size + 1) / 2.0f, expected = who < size ? (float)(rank + 1) : mean;
        for (int64_t i = 0; i < n; i++) {
            if (x[i] != expected) {
                CHECK(false, "step %d, element %lld: %g", step, (long long)i, (double)x[i]);
                break;
            }
        }
    }
}

/* Whoever is not in a reduction must not take it for done. */
static inline void body_abandon_barrier(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    mui_identity id = identity(MUI_KIND_ABANDON + 1, 0, 0, "abandons reduction 4");
    mu_status s = rank == 1 ? reduce_as(g, NULL, 0, &id) : mu_barrier(g);
    CHECK(s == MU_ERR_COMM, "status %d", s);
    expect_broken(g, MU_ERR_COMM, "rank 0 is at a barrier, rank 1 at abandons reduction 4");
}

static inline void body_abort(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    if (rank == 1) {
        nap_randomly(99, 30000);
        mu_group_abort(g, "the disk is full");
        CHECK(mu_barrier(g) == MU_ERR_PEER, "own barrier");
    } else {
        float *x = calloc(1000, sizeof(*x));
        CHECK(mu_all_reduce(g, x, 1000, MU_F32, MU_SUM) == MU_ERR_PEER, "all-reduce");
        free(x);
    }
    expect_broken(g, MU_ERR_PEER, "rank 1 gave up: the disk is full");
}

static inline void body_failing_close(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    if (rank == 1) {
        CHECK(mui_fail(g->context, MU_ERR_SHAPE, "linear wants 3 inputs, got 4") == MU_ERR_SHAPE, "raise");
        return;
    }
    CHECK(mu_barrier(g) == MU_ERR_PEER, "barrier");
    expect_broken(g, MU_ERR_PEER, "rank 1 failed: linear wants 3 inputs, got 4");
}

static inline void body_leaver(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    mu_group_set_phase(g, "the end");
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    if (rank != 1) {
        CHECK(mu_barrier(g) == MU_ERR_PEER, "barrier");
        expect_broken(g, MU_ERR_PEER, "closed the group while rank");
        CHECK(strstr(g->broken_text, "last seen: the end)") != NULL, "%s", g->broken_text);
    }
}

/* One rank is late: the others warn, give up, and it learns of that when it comes. The warning is seen by the log. */
static inline void body_late(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    if (rank == 1) {
        mu_group_set_phase(g, "step 12, forward, layer1.0");
    }
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    double before = mui_now();
    if (rank == 1) {
        while (mui_now() - before < 2.2) {
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        }
    }
    CHECK(mu_barrier(g) == MU_ERR_TIMEOUT, "late barrier");
    CHECK(mui_now() - before < 5, "took %g s", mui_now() - before);
    expect_broken(g, MU_ERR_TIMEOUT, "missing rank 1 (");
    CHECK(strstr(g->broken_text, "last seen: step 12, forward, layer1.0") != NULL, "%s", g->broken_text);
}

/* The same with a rank that only ever tests. */
static inline void body_late_tester(mu_group *g, int rank, int size, void *arg)
{
    (void)size, (void)arg;
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    if (rank == 1) {
        double before = mui_now();
        while (mui_now() - before < 2.2) {
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        }
        CHECK(mu_barrier(g) == MU_ERR_TIMEOUT, "late barrier");
        return;
    }
    float x = 1;
    mu_request *r = mu_all_reduce_start(g, &x, 1, MU_F32, MU_SUM);
    bool done = false;
    mu_status s = MU_OK;
    while (s == MU_OK && !done) {
        s = mu_request_test(r, &done);
    }
    CHECK(s == MU_ERR_TIMEOUT && done, "status %d", s);
    expect_broken(g, MU_ERR_TIMEOUT, "missing rank 1 (");
}

/* Bad arguments are this rank's error alone; the group stays whole. */
static inline void body_arguments(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    float x[64] = {0};
    mu_context *c = g->context;
    CHECK(mu_all_reduce(g, x, 4, MU_F16, MU_SUM) == MU_ERR_DTYPE, "f16");
    CHECK(mu_all_reduce(g, x, 4, MU_I32, MU_MEAN) == MU_ERR_DTYPE, "mean of integers");
    CHECK(mu_all_reduce(g, x, -1, MU_F32, MU_SUM) == MU_ERR_ARG, "count");
    CHECK(mu_all_reduce(g, x, INT64_MAX, MU_F32, MU_SUM) == MU_ERR_ARG, "overflow");
    CHECK(mu_all_reduce(g, NULL, 1, MU_F32, MU_SUM) == MU_ERR_ARG, "no data");
    CHECK(mu_all_reduce(g, x, 1, MU_F32, (mu_reduce_op)9) == MU_ERR_ARG, "op");
    CHECK(mu_broadcast(g, x, 1, size) == MU_ERR_ARG, "root");
    CHECK(mu_all_gather(g, x, x, SIZE_MAX) == MU_ERR_ARG, "all-gather");
    CHECK(mu_reduce_scatter(g, x, x + 1, 2, MU_F32, MU_SUM) == MU_ERR_ARG, "overlap");
    CHECK(mu_request_wait(NULL) == MU_ERR_ARG, "no request");
    CHECK(mu_context_status(c) == MU_ERR_DTYPE, "first error");
    mu_context_clear(c);
    x[0] = (float)rank;
    CHECK(mu_all_reduce(g, x, 1, MU_F32, MU_MAX) == MU_OK && x[0] == (float)(size - 1), "still whole");
    CHECK(mu_group_alloc(g, SIZE_MAX / 4) == NULL && mu_context_status(c) == MU_ERR_NOMEM, "too much memory");
    mu_context_clear(c);
    CHECK(mu_barrier(g) == MU_OK, "still whole");
}

static const struct failure_case {
    const char *name;
    rank_fn fn;
    int least, most;
    bool clean;
} failure_cases[] = {
    {"another reduction", body_other_sequence, 2, 4, false}, {"the same text", body_same_text, 2, 3, false},
    {"another call", body_other_call, 2, 3, false},          {"another count", body_other_count, 2, 4, false},
    {"another size", body_other_alloc, 2, 2, false},         {"abandon", body_abandon, 1, 5, true},
    {"abandon and barrier", body_abandon_barrier, 2, 3, false}, {"abort", body_abort, 2, 4, false},
    {"failing close", body_failing_close, 2, 4, false},      {"leaver", body_leaver, 2, 4, false},
    {"late", body_late, 2, 3, false},                        {"late, testing", body_late_tester, 2, 2, false},
    {"arguments", body_arguments, 1, 3, true},
};

static inline int run_failures(int (*run)(int, rank_fn, void *, const mu_group_options *, bool))
{
    int bad = 0;
    for (size_t i = 0; i < sizeof(failure_cases) / sizeof(*failure_cases); i++) {
        const struct failure_case *f = &failure_cases[i];
        bool late = f->fn == body_late || f->fn == body_late_tester;
        mu_group_options o = {.timeout_seconds = late ? 1.0 : 20.0, .arena_bytes = 16 << 20};
        for (int n = f->least; n <= f->most; n++) {
            int wrong = run(n, f->fn, NULL, &o, f->clean);
            if (wrong != 0) {
                fprintf(stderr, "%s, %d ranks: %d wrong\n", f->name, n, wrong);
            }
            bad += wrong;
        }
    }
    return bad;
}

#endif
