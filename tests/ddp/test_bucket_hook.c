/* Communication hooks: a hook that does what the built-in path does gives the same bits; a hook runs only in reductions
 * that all ranks go through with; one that fails on a rank leaves nobody waiting. */
#include "rig.h"

typedef struct counts {
    int calls, buckets;
    int64_t parameters, present;
    uint64_t layout;
    int fail_at; /* this call fails; 0: none */
    bool silent; /* ... with a status only */
    mu_ddp *d;
} counts;

static void note(counts *n, const mu_bucket *b)
{
    n->calls++;
    n->buckets = (int)b->count;
    n->layout = b->layout;
    CHECK(b->index >= 0 && b->index < b->count && b->is_last == (b->index == b->count - 1), "index");
    int64_t at = 0;
    for (int64_t i = 0; i < b->parameter_count; i++) {
        const mu_bucket_parameter *p = &b->parameters[i];
        CHECK(p->offset == at && p->room >= p->elements && p->elements > 0, "place of %s", p->name);
        CHECK(p->ranks >= (int)p->here && p->ranks <= mu_group_size(b->group), "ranks of %s", p->name);
        CHECK(p->row_major && p->dims.ndim >= 1, "shape of %s", p->name);
        float sum = 0;
        for (int64_t k = 0; k < p->room; k++) {
            sum += p->here && k < p->elements ? 0.0F : fabsf(b->data[at + k]);
        }
        CHECK(sum == 0.0F, "%s: padding, or a part that this rank does not have", p->name);
        at += p->room;
        n->parameters++;
        n->present += p->ranks > 0;
    }
    CHECK(at == b->elements, "elements");
    CHECK(b->divisor == (b->weighted ? (double)b->total_samples : (double)mu_group_size(b->group)), "divisor");
}

static mu_status plain(void *user, mu_bucket *b)
{
    note(user, b);
    return mu_bucket_all_reduce(b);
}

/* The same by hand: all-gather, then the sum in rank order. */
static mu_status by_hand(void *user, mu_bucket *b)
{
    note(user, b);
    size_t size = (size_t)mu_group_size(b->group), n = (size_t)b->elements;
    float *all = malloc(size * n * sizeof(float));
    mu_status s = mu_all_gather(b->group, b->data, all, n * sizeof(float));
    for (size_t i = 0; i < n && s == MU_OK; i++) {
        float sum = all[i];
        for (size_t r = 1; r < size; r++) {
            sum += all[r * n + i];
        }
        b->data[i] = b->weighted ? sum * (1.0F / (float)b->total_samples) : sum / (float)size;
    }
    free(all);
    return s;
}

static mu_status noop(void *user, mu_bucket *b)
{
    note(user, b);
    return MU_OK;
}

static mu_status fails(void *user, mu_bucket *b)
{
    counts *n = user;
    note(n, b);
    if (n->calls == n->fail_at) {
        return n->silent ? MU_SKIPPED : MU_ERR_LIMIT;
    }
    return b->index % 2 == 0 ? mu_bucket_all_reduce(b) : MU_OK;
}

/* What rank r's loss reads in step n: all, some, "d" nowhere, nothing. */
static const char *reads(int n, int rank)
{
    static const char *const sets[] = {"a b c head.w head.v", "head.v c a", "b", "a b c", ""};
    return n == 0 ? sets[0] : sets[mix((uint64_t)(n * 7 + rank)) % 5];
}

static mu_status step(mu_ddp *d, mu_tape *t, mu_module *m, int n, int rank, bool weighted)
{
    mu_tape_reset(t);
    mu_tensor *loss = terms(t, m, reads(n, rank), (uint64_t)(n * 100 + rank));
    return weighted ? mu_ddp_backward_weighted(d, t, loss, 3 + rank * n) : mu_ddp_backward(d, t, loss);
}

static void equal_bits(mu_module *a, mu_module *b, const char *what)
{
    snapshot x = snap(a), y = snap(b);
    CHECK(x.count == y.count && memcmp(x.grads, y.grads, (size_t)x.count * sizeof(float)) == 0, "%s: gradients", what);
    CHECK(memcmp(x.values, y.values, (size_t)x.count * sizeof(float)) == 0, "%s: values", what);
    CHECK(memcmp(x.has, y.has, sizeof(x.has)) == 0, "%s: who has a gradient", what);
    snap_free(&x);
    snap_free(&y);
}

typedef struct setup {
    size_t bytes;
    mu_bucket_hook hook;
    bool weighted;
} setup;

static void like_built_in(mu_group *g, int rank, int size, void *arg)
{
    const setup *s = arg;
    mu_context *c = g->context;
    mu_module *m = toy(c), *other = toy(c);
    mu_ddp_options o = {.name = "built in", .bucket_bytes = s->bytes, .first_bucket_bytes = s->bytes,
                        .nonfinite = s->weighted ? MU_NONFINITE_ERROR : MU_NONFINITE_KEEP,
                        .absent = MU_ABSENT_QUIET};
    mu_ddp *d = mu_ddp_wrap(m, g, &o);
    o.name = "hooked";
    mu_ddp *e = mu_ddp_wrap(other, g, &o);
    mu_tape *t = mu_tape_new(c, NULL), *u = mu_tape_new(c, NULL);
    counts n = {0};
    CHECK(mu_ddp_set_hook(e, "own", s->hook, &n) == MU_OK, "set");
    for (int i = 0; i < 12; i++) {
        CHECK(step(d, t, m, i, rank, s->weighted) == MU_OK, "step %d: %s", i, mu_context_message(c));
        CHECK(step(e, u, other, i, rank, s->weighted) == MU_OK, "step %d: %s", i, mu_context_message(c));
        check_replicas(g, other, "hooked");
        equal_bits(m, other, "against the built-in path");
        if (i % 3 != 1) { /* else the next one adds */
            toy_optimizer_step(m, 0.1F);
            toy_optimizer_step(other, 0.1F);
        }
        if (i == 8) {
            CHECK(n.calls == 9 * n.buckets && n.parameters == 9 * RIG_PARAMS, "%d calls", n.calls);
            CHECK(n.present > 9 && n.present < 9 * RIG_PARAMS && n.layout >= 1, "%d present", (int)n.present);
            CHECK(n.buckets == (s->bytes == 1 ? RIG_PARAMS : 1), "%d buckets", n.buckets);
            CHECK(mu_ddp_set_hook(e, NULL, NULL, NULL) == MU_OK, "reset");
        }
    }
    CHECK(n.calls == 9 * n.buckets, "called after it was reset");
    (void)size;
}

static void same_as_built_in(void **state)
{
    (void)state;
    for (int weighted = 0; weighted < 2; weighted++) {
        for (size_t bytes = 1; bytes <= 1 << 20; bytes <<= 20) {
            setup s = {bytes, weighted ? by_hand : plain, weighted};
            for (int size = 1; size <= 4; size++) {
                assert_int_equal(run_threads(size, like_built_in, &s, NULL, true), 0);
            }
            s.hook = weighted ? plain : by_hand;
            assert_int_equal(run_processes(3, like_built_in, &s, NULL, true), 0);
        }
    }
}

/* Gradients stay what each rank had, and participation is known all the same. */
static void stays_local(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c), *alone = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = 1, .absent = MU_ABSENT_QUIET});
    mu_tape *t = mu_tape_new(c, NULL), *u = mu_tape_new(c, NULL);
    counts n = {0};
    CHECK(mu_ddp_set_hook(d, "noop", noop, &n) == MU_OK, "set");
    /* "a" on all ranks, "b" on rank 0 only. */
    const char *mine = rank == 0 ? "a b" : "a";
    CHECK(mu_ddp_backward(d, t, terms(t, m, mine, (uint64_t)rank)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_backward(u, terms(u, alone, mine, (uint64_t)rank)) == MU_OK, "oracle");
    snapshot a = snap(m), b = snap(alone);
    CHECK(memcmp(a.grads, b.grads, (size_t)a.count * sizeof(float)) == 0, "gradients are not the local ones");
    for (int64_t i = 0; i < a.param_count; i++) {
        bool has = strcmp(a.names[i], "a") == 0 || strcmp(a.names[i], "b") == 0;
        CHECK(a.has[i] == has, "%s", a.names[i]);
    }
    mu_ddp_report report = mu_ddp_get_report(d);
    CHECK(report.absent_count == (size > 1 ? 5 : 4), "%d absent", (int)report.absent_count);
    snap_free(&a);
    snap_free(&b);
}

static void no_communication(void **state)
{
    (void)state;
    assert_int_equal(run_threads(1, stays_local, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, stays_local, NULL, NULL, true), 0);
    assert_int_equal(run_processes(2, stays_local, NULL, NULL, true), 0);
}

/* The last rank's hook fails at its third bucket. */
static void one_fails(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "D", .bucket_bytes = 1, .first_bucket_bytes = 1});
    mu_tape *t = mu_tape_new(c, NULL);
    const counts *how = arg;
    counts n = {.fail_at = rank == size - 1 ? how->fail_at : 0, .silent = how->silent};
    CHECK(mu_ddp_set_hook(d, "brittle", fails, &n) == MU_OK, "set");
    mu_status s = mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", 1));
    mu_status want = rank < size - 1 ? MU_ERR_PEER : how->silent ? MU_ERR_STATE : MU_ERR_LIMIT;
    CHECK(s == want, "rank %d: %s, %s", rank, mu_status_name(s), mu_context_message(c));
    CHECK(strstr(mu_context_message(c), "hook `brittle` failed") != NULL, "%s", mu_context_message(c));
    mu_context_clear(c);
    CHECK(step(d, t, m, 1, rank, false) < 0, "the ddp is broken");
    /* Gradients are as before the call. */
    snapshot a = snap(m);
    for (int64_t i = 0; i < a.param_count; i++) {
        CHECK(!a.has[i], "%s has a gradient", a.names[i]);
    }
    snap_free(&a);
    mu_context_clear(c);
}

static void failing(void **state)
{
    (void)state;
    for (int silent = 0; silent < 2; silent++) {
        for (int at = 1; at <= RIG_PARAMS; at++) {
            counts how = {.fail_at = at, .silent = silent};
            assert_int_equal(run_threads(1 + at % 3, one_fails, &how, NULL, false), 0);
        }
        counts last = {.fail_at = RIG_PARAMS, .silent = silent};
        assert_int_equal(run_processes(2, one_fails, &last, NULL, false), 0);
    }
}

/* Steps that are given up, or skipped for their values, call no hook and leave all in step. */
static void given_up(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c), *other = toy(c);
    mu_ddp_options o = {.name = "D", .bucket_bytes = 1, .nonfinite = MU_NONFINITE_SKIP, .absent = MU_ABSENT_QUIET};
    mu_ddp *d = mu_ddp_wrap(m, g, &o);
    o.name = "E";
    mu_ddp *e = mu_ddp_wrap(other, g, &o);
    mu_tape *t = mu_tape_new(c, NULL);
    counts n = {0};
    CHECK(mu_ddp_set_hook(e, "own", plain, &n) == MU_OK, "set");
    for (int i = 0; i < 9; i++) {
        int before = n.calls;
        if (i % 3 == 1) {
            mu_status s = rank == i % size ? mu_ddp_abandon(e, "test") : step(e, t, other, i, rank, false);
            CHECK(s == MU_SKIPPED, "status %d", (int)s);
        } else if (i % 3 == 2) {
            mu_tape_reset(t);
            mu_tensor *loss = terms(t, other, "a b c", 5);
            if (rank == size - 1) {
                loss = mu_mul(t, loss, mu_tensor_from(t, MU_SCALAR, &(float){INFINITY}));
            }
            CHECK(mu_ddp_backward(e, t, loss) == MU_SKIPPED, "a step with infinite gradients");
        }
        CHECK(n.calls == before, "a hook was called in a step that is skipped");
        if (i % 3 == 2) {
            CHECK(mu_ddp_backward_weighted(e, t, NULL, 0) == MU_ERR_ARG && n.calls == before, "no samples");
            mu_context_clear(c);
        }
        CHECK(step(e, t, other, i, rank, false) == MU_OK, "step %d: %s", i, mu_context_message(c));
        CHECK(n.calls > before, "not called");
        CHECK(step(d, t, m, i, rank, false) == MU_OK, "step %d: %s", i, mu_context_message(c));
        equal_bits(m, other, "after a skipped step");
        check_replicas(g, other, "hooked");
        toy_optimizer_step(m, 0.1F);
        toy_optimizer_step(other, 0.1F);
    }
}

static void skipped_steps(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, given_up, NULL, NULL, true), 0);
    }
    assert_int_equal(run_processes(2, given_up, NULL, NULL, true), 0);
}

static void differ(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    counts n = {0};
    const char *name = rank == 1 ? "two" : "one";
    if (rank == 1 || arg != NULL) {
        CHECK(mu_ddp_set_hook(d, name, plain, &n) == MU_OK, "set");
    }
    CHECK(step(d, t, m, 0, rank, false) == MU_ERR_COMM, "status");
    const char *text = mu_context_message(c);
    CHECK(strstr(text, "hook `two`") != NULL && (arg == NULL || strstr(text, "hook `one`") != NULL), "%s", text);
    CHECK(n.calls == 0, "called");
    mu_context_clear(c);
}

static void different_hooks(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, differ, NULL, NULL, false), 0);
    assert_int_equal(run_threads(3, differ, "both", NULL, false), 0);
}

static mu_status resets(void *user, mu_bucket *b)
{
    counts *n = user;
    CHECK(mu_ddp_set_hook(n->d, NULL, NULL, NULL) == MU_ERR_STATE, "reset from within a hook");
    mu_context_clear(b->group->context);
    return noop(user, b);
}

static void arguments(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    counts n = {.d = d};
    CHECK(mu_ddp_set_hook(NULL, "x", noop, NULL) == MU_ERR_ARG, "no ddp");
    CHECK(mu_bucket_all_reduce(NULL) == MU_ERR_ARG, "no bucket");
    CHECK(mu_ddp_set_hook(d, NULL, noop, NULL) == MU_ERR_ARG, "no name");
    mu_context_clear(c);
    CHECK(mu_ddp_set_hook(d, "", noop, NULL) == MU_ERR_ARG, "an empty name");
    mu_context_clear(c);
    CHECK(mu_ddp_set_hook(d, "resets", resets, &n) == MU_OK, "set");
    CHECK(step(d, t, m, 0, rank, false) == MU_OK && n.calls > 0, "%s", mu_context_message(c));
}

static void bad_arguments(void **state)
{
    (void)state;
    assert_int_equal(run_threads(1, arguments, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_as_built_in), cmocka_unit_test(no_communication), cmocka_unit_test(failing),
        cmocka_unit_test(skipped_steps),    cmocka_unit_test(different_hooks),  cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
