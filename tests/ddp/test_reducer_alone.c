/* The reducer for other front ends, driven like one: no tape, no tensors, arrays of float and double. What a rank has,
 * in what order it comes, and what goes wrong are drawn from (step, rank), so every rank knows what the others did and
 * works out the mean by itself. */
#include "rig.h"

#include "ddp/reducer_alone.h"

enum { PARAMS = 14, STEPS = 36, MOST = 300 };

static int64_t count_of(int64_t i)
{
    return i == 5 ? 0 : 1 + i * i * 7 % MOST;
}

static mu_dtype type_of(int64_t i)
{
    return i % 3 == 1 ? MU_F64 : MU_F32;
}

static double value(int n, int rank, int64_t i, int64_t k)
{
    return (double)((int)(mix((uint64_t)(n * 77 + rank) * 131 + (uint64_t)(i * 1009 + k)) % 401) - 200);
}

static int64_t samples_of(int n, int rank)
{
    return (int64_t)(mix((uint64_t)(n * 31 + rank)) % 1000) + (rank == 0);
}

/* 0 to 2 come everywhere, 7 nowhere, 8 on rank 0 only, others on some ranks. All in the first step, but for 7. */
static bool has(int n, int rank, int64_t i)
{
    return i != 7 && (n == 0 || i < 3 || (i == 8 ? rank == 0 : mix((uint64_t)(n * 1000 + rank * 50) + (uint64_t)i) % 3 != 0));
}

/* Announced, but does not come. */
static bool fails_to_come(int n, int rank, int64_t i)
{
    return n > 0 && i >= 3 && mix((uint64_t)(n * 3000 + rank * 70) + (uint64_t)i) % 7 == 0;
}

typedef enum trouble {
    NONE = 0,
    AT_BEGIN,   /* from here on one rank gives up or errs, in these ways */
    ON_THE_WAY,
    TWICE,
    UNEXPECTED,
    OUT_OF_RANGE,
    BEGIN_AGAIN,
    SAMPLES,
    OWN_ERROR,
    INFINITE, /* a value */
    NO_SAMPLES, /* on all ranks */
    TROUBLES
} trouble;

typedef struct setup {
    size_t cap;
    bool weighted, slab, troubles, keep_plan;
} setup;

static trouble trouble_of(const setup *s, int n)
{
    trouble t = s->troubles && n > 0 && n % 3 > 0 ? (trouble)((n - n / 3) % TROUBLES) : NONE;
    return (t == SAMPLES || t == NO_SAMPLES) && !s->weighted ? NONE : t;
}

typedef struct front {
    mu_reducer *r;
    mu_group *g;
    const setup *s;
    int rank, size;
    double *own[PARAMS]; /* memory of the front end's, large enough for either type */
    double before[PARAMS][MOST];
} front;

static void *memory(front *f, int64_t i)
{
    return mu_reducer_memory(f->r, i);
}

static double element(const void *p, mu_dtype type, int64_t k)
{
    return type == MU_F64 ? ((const double *)p)[k] : (double)((const float *)p)[k];
}

static void set(void *p, mu_dtype type, int64_t k, double x)
{
    if (type == MU_F64) {
        ((double *)p)[k] = x;
    } else {
        ((float *)p)[k] = (float)x;
    }
}

static void open_front(front *f)
{
    mu_reducer_parameter p[PARAMS];
    static const char *const names[PARAMS] = {"w0", "w1", "w2", "w3", "w4", "empty", "w6", "never", "w8", "w9",
                                              "w10", "w11", "w12", "w13"};
    for (int64_t i = 0; i < PARAMS; i++) {
        bool slab = f->s->slab && i % 2 == 0;
        f->own[i] = calloc(MOST + 1, sizeof(double));
        p[i] = (mu_reducer_parameter){names[i], count_of(i), type_of(i), slab ? NULL : f->own[i]};
    }
    mu_reducer_options o = {.name = "solver", .bucket_bytes = f->s->cap, .first_bucket_bytes = f->s->cap / 2,
                            .nonfinite = MU_NONFINITE_SKIP, .keep_plan = f->s->keep_plan};
    f->r = mu_reducer_new(f->g, p, PARAMS, &o);
    CHECK(f->r != NULL, "new: %s", mu_context_message(f->g->context));
}

static void close_front(front *f)
{
    mu_reducer_free(f->r);
    for (int i = 0; i < PARAMS; i++) {
        free(f->own[i]);
    }
}

/* One wrong turn, in the middle of a step. The status that finish has to return on this rank. */
static mu_status go_wrong(front *f, trouble t, int64_t done)
{
    mu_status s = MU_OK, want = MU_ERR_STATE;
    switch (t) {
    case ON_THE_WAY: CHECK(mu_reducer_abandon(f->r, "a test") == MU_OK, "abandon"); return MU_SKIPPED;
    case TWICE: s = mu_reducer_ready(f->r, done); break;
    case UNEXPECTED: s = mu_reducer_ready(f->r, 7); break;
    case OUT_OF_RANGE:
        want = MU_ERR_ARG;
        s = mu_reducer_ready(f->r, PARAMS);
        break;
    case BEGIN_AGAIN: s = mu_reducer_begin(f->r, NULL); break;
    case OWN_ERROR: return mui_fail(f->g->context, MU_ERR_DEVICE, "the solver diverged");
    default: return MU_OK;
    }
    CHECK(s == want, "trouble %d: %s", (int)t, mu_context_message(f->g->context));
    if (t == TWICE || t == BEGIN_AGAIN) {
        mu_context_clear(f->g->context); /* does not undo it */
    }
    return want;
}

/* Runs a step; returns what finish has to return here. */
static mu_status deliver(front *f, int n)
{
    const setup *s = f->s;
    trouble t = trouble_of(s, n);
    bool mine = f->rank == n % f->size, expected[PARAMS];
    mu_status want = MU_OK;
    for (int64_t i = 0; i < PARAMS; i++) {
        expected[i] = has(n, f->rank, i) || (i != 7 && fails_to_come(n, f->rank, i));
        for (int64_t k = 0; k < count_of(i); k++) {
            f->before[i][k] = value(n, 99, i, k); /* what must stay where nobody has it */
            set(memory(f, i), type_of(i), k, f->before[i][k]);
        }
    }
    mu_reducer_step step = {.weighted = s->weighted, .samples = t == NO_SAMPLES ? 0 : samples_of(n, f->rank),
                            .expected = n % 2 == 0 && n > 0 ? expected : NULL};
    step.expected = t == UNEXPECTED ? expected : step.expected;
    if (mine && t == AT_BEGIN) {
        step.abandon = "from the start";
        want = MU_SKIPPED;
    }
    if (mine && t == SAMPLES) {
        step.samples = -1;
        want = MU_ERR_ARG;
    }
    CHECK(mu_reducer_begin(f->r, &step) == (want == MU_ERR_ARG ? want : MU_OK), "begin");
    int64_t start = (int64_t)(mix((uint64_t)(n + f->rank)) % PARAMS), came = 0, last = -1;
    for (int64_t k = 0; k < PARAMS; k++) {
        int64_t i = (start + k * 5) % PARAMS;
        if (!has(n, f->rank, i) || fails_to_come(n, f->rank, i)) {
            continue;
        }
        for (int64_t e = 0; e < count_of(i); e++) {
            bool spoilt = t == INFINITE && mine && came == 0 && e == 0;
            set(memory(f, i), type_of(i), e, spoilt ? (double)INFINITY : value(n, f->rank, i, e));
        }
        mu_status r = mu_reducer_ready(f->r, i);
        CHECK(r == MU_OK || want < 0, "ready: %s", mu_context_message(f->g->context));
        came++;
        last = i;
        if (mine && came == 3 && want == MU_OK) {
            want = go_wrong(f, t, last);
        }
        nap_randomly((uint64_t)(n * 100 + f->rank * 10 + k), 10);
    }
    CHECK(came >= 3, "the test draws too little");
    bool all_skip = t != NONE && t != NO_SAMPLES && !(t == INFINITE && s->weighted && samples_of(n, n % f->size) == 0);
    return want != MU_OK ? want : t == NO_SAMPLES ? MU_ERR_ARG : all_skip ? MU_SKIPPED : MU_OK;
}

static bool came_on(int n, int rank, int64_t i)
{
    return has(n, rank, i) && !fails_to_come(n, rank, i);
}

static void check_result(front *f, int n)
{
    double total = 0;
    for (int r = 0; r < f->size; r++) {
        total += f->s->weighted ? (double)samples_of(n, r) : 1.0;
    }
    CHECK(mu_reducer_total_samples(f->r) == (f->s->weighted ? (int64_t)total : 0), "total of samples");
    int64_t absent = 0, nowhere = 0;
    for (int64_t i = 0; i < PARAMS; i++) {
        int present = 0;
        for (int r = 0; r < f->size; r++) {
            present += came_on(n, r, i);
            CHECK(mu_reducer_present(f->r, i, r) == came_on(n, r, i), "step %d: %d on rank %d", n, (int)i, r);
        }
        CHECK(mu_reducer_ranks(f->r, i) == present, "parameter %d: %d ranks", (int)i, present);
        absent += present < f->size;
        nowhere += present == 0;
        bool own = memory(f, i) == (void *)f->own[i];
        for (int64_t k = 0; k < count_of(i); k++) {
            double want = 0, got = element(memory(f, i), type_of(i), k);
            for (int r = 0; r < f->size; r++) {
                double w = f->s->weighted ? (double)samples_of(n, r) : 1.0;
                want += came_on(n, r, i) ? value(n, r, i, k) * w : 0.0;
            }
            want = present > 0 ? want / total : own ? f->before[i][k] : got;
            double tolerance = type_of(i) == MU_F64 ? 1e-13 : 1e-6;
            CHECK(fabs(got - want) <= tolerance * 200 * f->size, "step %d: parameter %d: %.17g, want %.17g", n, (int)i,
                  got, want);
        }
    }
    mu_reducer_report report = mu_reducer_get_report(f->r);
    CHECK(report.absent == absent && report.nowhere == nowhere, "report: %d absent, %d nowhere", (int)report.absent,
          (int)report.nowhere);
}

/* Own memory, and what is present of the slab, are the same bits everywhere. */
static void check_ranks(front *f, mu_status s)
{
    double all[8 * MOST], bits[MOST] = {0};
    for (int64_t i = 0; i < PARAMS; i++) {
        if (s != MU_OK || mu_reducer_ranks(f->r, i) == 0) {
            continue;
        }
        memcpy(bits, memory(f, i), (size_t)count_of(i) * mu_dtype_bytes(type_of(i)));
        CHECK(mu_all_gather(f->g, bits, all, sizeof(bits)) == MU_OK, "gather");
        for (int r = 1; r < f->size; r++) {
            CHECK(memcmp(all, all + r * MOST, sizeof(bits)) == 0, "rank %d is not equal to rank 0", r);
        }
    }
}

static void reduce_many(mu_group *g, int rank, int size, void *arg)
{
    front f = {.g = g, .s = arg, .rank = rank, .size = size};
    open_front(&f);
    int through = 0;
    uint64_t allocations = 0;
    for (int n = 0; n < STEPS && f.r != NULL; n++) {
        if (n == 3) {
            allocations = g->context->allocations;
        }
        mu_status want = deliver(&f, n), got = mu_reducer_finish(f.r);
        CHECK(got == want, "step %d, trouble %d, rank %d: %d, want %d: %s", n, (int)trouble_of(f.s, n), rank, (int)got,
              (int)want, mu_context_message(g->context));
        CHECK(mu_context_status(g->context) == (want < 0 ? want : MU_OK), "%s", mu_context_message(g->context));
        mu_context_clear(g->context);
        if (got == MU_OK) {
            check_result(&f, n);
            through++;
        } else {
            for (int64_t i = 0; i < PARAMS; i++) {
                for (int64_t k = 0; k < count_of(i) && memory(&f, i) == (void *)f.own[i]; k++) {
                    double x = element(f.own[i], type_of(i), k);
                    CHECK(x == f.before[i][k] || (x == value(n, rank, i, k) && has(n, rank, i)) || isinf(x),
                          "step %d was skipped, but changed parameter %d", n, (int)i);
                }
            }
        }
        check_ranks(&f, got);
    }
    CHECK(f.s->troubles || g->context->allocations == allocations, "steps allocate");
    CHECK(mu_reducer_get_report(f.r).reductions == (uint64_t)through, "reductions");
    CHECK(f.s->troubles ? through > 8 && through < STEPS : through == STEPS, "%d went through", through);
    close_front(&f);
}

static void all_sizes(setup s)
{
    for (int size = 1; size <= 4; size++) {
        assert_int_equal(run_threads(size, reduce_many, &s, NULL, true), 0);
    }
    assert_int_equal(run_processes(3, reduce_many, &s, NULL, true), 0);
}

static void means_and_participation(void **state)
{
    (void)state;
    for (size_t cap = 2; cap <= 1 << 20; cap *= 512) {
        for (int k = 0; k < 4; k++) {
            all_sizes((setup){.cap = cap, .weighted = k % 2 == 1, .slab = k < 2, .keep_plan = k == 3});
        }
    }
}

static void whatever_goes_wrong(void **state)
{
    (void)state;
    for (size_t cap = 2; cap <= 1 << 20; cap *= 1 << 18) {
        all_sizes((setup){.cap = cap, .weighted = true, .slab = true, .troubles = true});
        all_sizes((setup){.cap = cap, .troubles = true});
    }
}

/* -- calls without a reduction ------------------------------------------------------------------------------------ */
static void expect_error(mu_context *c, mu_status got, mu_status want, const char *text)
{
    CHECK(got == want && strstr(mu_context_message(c), text) != NULL, "%d `%s`, want %d `%s`", (int)got,
          mu_context_message(c), (int)want, text);
    mu_context_clear(c);
}

static void out_of_order(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    float x[3] = {(float)rank, 1, 2};
    mu_reducer_parameter p = {"x", 3, MU_F32, x};
    mu_reducer *r = mu_reducer_new(g, &p, 1, NULL);
    CHECK(mu_reducer_memory(r, 0) == x && mu_reducer_memory(r, 1) == NULL && mu_reducer_memory(r, -1) == NULL, "memory");
    if (rank == 0) {
        expect_error(c, mu_reducer_ready(r, 0), MU_ERR_STATE, "mu_reducer_ready before mu_reducer_begin");
        expect_error(c, mu_reducer_finish(r), MU_ERR_STATE, "mu_reducer_finish before mu_reducer_begin");
        expect_error(c, mu_reducer_abandon(r, "?"), MU_ERR_STATE, "mu_reducer_abandon before mu_reducer_begin");
    }
    for (int n = 0; n < 3; n++) {
        x[0] = (float)rank;
        CHECK(mu_reducer_begin(r, NULL) == MU_OK && mu_reducer_ready(r, 0) == MU_OK, "%s", mu_context_message(c));
        CHECK(mu_reducer_finish(r) == MU_OK && x[0] == (float)(size - 1) / 2, "%s", mu_context_message(c));
    }
    char text[600];
    CHECK(mu_reducer_print_report(r, text, sizeof(text)) > 20 && strstr(text, "3 reductions") != NULL, "%s", text);
    CHECK(mu_reducer_begin(NULL, NULL) == MU_ERR_ARG && mu_reducer_ready(NULL, 0) == MU_ERR_ARG &&
              mu_reducer_finish(NULL) == MU_ERR_ARG && mu_reducer_abandon(NULL, NULL) == MU_ERR_ARG &&
              mu_reducer_ranks(NULL, 0) == 0 && !mu_reducer_present(r, 0, size) && mu_reducer_ranks(r, 1) == 0 &&
              mu_reducer_ready_order(NULL, NULL, 0) == 0 && mu_reducer_print_report(NULL, NULL, 0) == 0 &&
              mu_reducer_new(NULL, &p, 1, NULL) == NULL && mu_reducer_total_samples(NULL) == 0,
          "NULL");
    mu_reducer_free(NULL);
    mu_reducer_free(r);
}

static void wrong_calls_outside(void **state)
{
    (void)state;
    assert_int_equal(run_threads(1, out_of_order, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, out_of_order, NULL, NULL, true), 0);
    assert_int_equal(run_processes(2, out_of_order, NULL, NULL, true), 0);
}

/* -- the order in which buckets go out ---------------------------------------------------------------------------- */
static void planned(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    enum { N = 6 };
    mu_reducer_parameter p[N];
    const char *names[N] = {"a", "b", "c", "d", "e", "f"};
    for (int i = 0; i < N; i++) {
        p[i] = (mu_reducer_parameter){names[i], 32, i % 2 == 0 ? MU_F32 : MU_F64, NULL};
    }
    mu_reducer *r = mu_reducer_new(g, p, N, &(mu_reducer_options){.bucket_bytes = 1, .first_bucket_bytes = 1});
    static const int64_t order[N] = {3, 0, 5, 1, 4, 2};
    for (int n = 0; n < 3; n++) {
        CHECK(mu_reducer_begin(r, NULL) == MU_OK, "begin");
        for (int k = 0; k < N; k++) {
            /* Other ranks have another order in the first step; rank 0's is what counts. */
            CHECK(mu_reducer_ready(r, n == 0 && rank > 0 ? k : order[k]) == MU_OK, "ready");
            int64_t launched = mui_reducer_launched(r->core);
            CHECK(n == 0 || launched == (k < N - 1 ? k + 1 : N - 1), "%d launched after %d", (int)launched, k);
        }
        CHECK(mu_reducer_finish(r) == MU_OK, "%s", mu_context_message(g->context));
        mu_reducer_report report = mu_reducer_get_report(r);
        CHECK(report.buckets == N && report.parameters == N && report.absent == 0, "%d buckets", (int)report.buckets);
        CHECK(n == 0 || report.buckets_early == N - 1, "step %d: %d early", n, (int)report.buckets_early);
        int64_t got[N] = {0};
        CHECK(mu_reducer_ready_order(r, got, 2) == N && got[2] == 0, "room");
        CHECK(mu_reducer_ready_order(r, got, N) == N, "ready order");
        CHECK(memcmp(got, order, sizeof(order)) == 0 || (n == 0 && rank > 0), "ready order");
    }
    mu_reducer_free(r);
}

static void plan_follows_rank_0(void **state)
{
    (void)state;
    assert_int_equal(run_threads(1, planned, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, planned, NULL, NULL, true), 0);
}

/* -- ranks that contradict each other ------------------------------------------------------------------------------ */
static void different(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    const char *what = arg;
    mu_context *c = g->context;
    mu_reducer_parameter p[3] = {{"a", 4, MU_F32, NULL}, {"b", 5, MU_F64, NULL}, {"c", 6, MU_F32, NULL}};
    mu_reducer_options o = {.name = "R"};
    int64_t n = 3;
    bool odd = rank == 1;
    const char *text = "parameter `b`";
    if (strcmp(what, "name") == 0) {
        p[1].name = odd ? "bb" : "b";
    } else if (strcmp(what, "count") == 0) {
        p[1].count = odd ? 55 : 5;
    } else if (strcmp(what, "type") == 0) {
        p[1].dtype = odd ? MU_F32 : MU_F64;
    } else if (strcmp(what, "order") == 0) {
        mu_reducer_parameter b = p[1];
        p[1] = odd ? p[2] : b;
        p[2] = odd ? b : p[2];
    } else if (strcmp(what, "number") == 0) {
        n = odd ? 2 : 3;
        text = "rank 1 has nothing";
    } else {
        o.bucket_bytes = odd ? 77 : 0;
        text = "buckets of 77 bytes";
    }
    CHECK(mu_reducer_new(g, p, n, &o) == NULL && mu_context_status(c) == MU_ERR_COMM, "%s: went through", what);
    expect_error(c, MU_ERR_COMM, MU_ERR_COMM, text);
    /* All ranks know, so the group is still good. */
    CHECK(mu_barrier(g) == MU_OK, "%s", mu_context_message(c));
}

static void unusable(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_reducer_parameter p = {"a", rank == 1 ? -1 : 4, MU_F32, NULL};
    CHECK(mu_reducer_new(g, &p, 1, NULL) == NULL, "went through");
    expect_error(g->context, mu_context_status(g->context), rank == 1 ? MU_ERR_ARG : MU_ERR_PEER, "-1 elements");
}

/* One rank weights, one begins a reduction of another reducer, one runs something else altogether. */
static void elsewhere(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    const char *what = arg;
    mu_reducer_parameter p = {"a", 4, MU_F32, NULL};
    mu_reducer *r = mu_reducer_new(g, &p, 1, &(mu_reducer_options){.name = "R"});
    mu_reducer *other = mu_reducer_new(g, &p, 1, &(mu_reducer_options){.name = "S"});
    const char *text = "reducer `S`";
    mu_status s;
    if (strcmp(what, "barrier") == 0 && rank == 1) {
        text = "a barrier";
        s = mu_barrier(g);
    } else {
        bool odd = strcmp(what, "weighted") == 0 && rank == 1;
        text = strcmp(what, "weighted") == 0 ? "weighted reduction 1" : text;
        text = strcmp(what, "barrier") == 0 ? "a barrier" : text;
        mu_reducer *mine = rank == 1 && strcmp(what, "other") == 0 ? other : r;
        CHECK(mu_reducer_begin(mine, &(mu_reducer_step){.weighted = odd, .samples = 2}) == MU_OK, "begin");
        s = mu_reducer_finish(mine);
        CHECK(strstr(mu_context_message(c), "reduction 1 (reducer `R`)") != NULL, "%s", mu_context_message(c));
        expect_error(c, s, MU_ERR_COMM, text);
        /* Broken, and says so, however often. */
        expect_error(c, mu_reducer_begin(mine, NULL), MU_ERR_COMM, "cannot go on");
        expect_error(c, mu_reducer_finish(mine), MU_ERR_COMM, "cannot go on");
        return;
    }
    expect_error(c, s, MU_ERR_COMM, text);
}

static void contradictions(void **state)
{
    (void)state;
    static const char *const differences[] = {"name", "count", "type", "order", "number", "options"};
    for (int i = 0; i < 6; i++) {
        assert_int_equal(run_threads(2 + i % 2, different, (void *)(uintptr_t)differences[i], NULL, true), 0);
    }
    assert_int_equal(run_threads(3, unusable, NULL, NULL, false), 0);
    static const char *const places[] = {"weighted", "other", "barrier"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(run_threads(2, elsewhere, (void *)(uintptr_t)places[i], NULL, false), 0);
    }
}

/* -- out of memory: at every allocation of one rank ---------------------------------------------------------------- */
typedef struct hunger {
    int at;
    bool over; /* there are not so many allocations */
} hunger;

static void starving(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    hunger *h = arg;
    int at = h->at;
    float x[40] = {0};
    mu_reducer_parameter p[2] = {{"a", 40, MU_F32, x}, {"b", 5, MU_F64, NULL}};
    c->fail_after = rank == size - 1 ? at : -1;
    mu_reducer *r = mu_reducer_new(g, p, 2, NULL);
    mu_status s = mu_context_status(c);
    if (r != NULL) {
        CHECK(mu_reducer_begin(r, NULL) == MU_OK && mu_reducer_ready(r, 1) == MU_OK, "%s", mu_context_message(c));
        CHECK(mu_reducer_ready(r, 0) == MU_OK, "%s", mu_context_message(c));
        s = mu_reducer_finish(r);
    }
    bool hit = at >= 0 && c->fail_after < 0;
    c->fail_after = -1;
    mu_status want = rank == size - 1 ? MU_ERR_NOMEM : MU_ERR_PEER;
    CHECK(s == MU_OK || s == want, "allocation %d: %d, %s", at, (int)s, mu_context_message(c));
    if (rank == size - 1 && hit) {
        CHECK(s == MU_ERR_NOMEM, "allocation %d failed, and nobody said so: %d", at, (int)s);
    }
    if (rank == size - 1) {
        h->over = !hit;
    }
    mu_context_clear(c);
}

static void out_of_memory(void **state)
{
    (void)state;
    int tried = 0;
    for (hunger h = {0}; !h.over && tried < 500; tried++) {
        h.at = tried;
        assert_int_equal(run_threads(1, starving, &h, NULL, false), 0);
    }
    assert_true(tried > 20 && tried < 500);
    for (int i = 0; i < tried; i += 3) {
        hunger h = {.at = i};
        assert_int_equal(run_threads(2, starving, &h, NULL, false), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(means_and_participation), cmocka_unit_test(whatever_goes_wrong),
        cmocka_unit_test(wrong_calls_outside),     cmocka_unit_test(plan_follows_rank_0),
        cmocka_unit_test(contradictions),          cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
