/* Gradients that come in pieces: deferred backwards, plain ones between reductions, on all ranks or on some, weighted or
 * not; always what one process gets from the (weighted) mean of all losses. */
#include "rig.h"

#include <pthread.h>

enum { STEPS = 12, MOST_CALLS = 6 };

typedef struct drill {
    bool weighted, experts;
    size_t bucket;
} drill;

/* What a rank does in call `call` of a step: which parameters its loss reads, "" for no loss. */
static const char *reads(int step, int call, int rank)
{
    static const char *const sets[] = {"a b c d head.w head.v", "a", "b c", "", "head.w", "d head.v a", "c"};
    return sets[mix((uint64_t)(step * 1000 + call * 10 + rank)) % 7];
}

typedef enum what { REDUCE, DEFER, ALONE } what;

/* The same on all ranks but for ALONE, which some make and others leave out. */
static what kind_of(const drill *j, int step, int call, int calls)
{
    uint64_t dice = mix((uint64_t)(step * 77 + call)) % 4;
    return call == calls - 1 || dice == 0 ? REDUCE : dice < 3 || j->weighted || j->experts ? DEFER : ALONE;
}

static bool leaves_out(int step, int call, int rank)
{
    return mix((uint64_t)(step * 31 + call * 7 + rank)) % 2 == 0;
}

static int64_t samples_of(int step, int call, int rank)
{
    return (int64_t)(mix((uint64_t)(step * 13 + call * 5 + rank * 3)) % 5);
}

static uint64_t key_of(int step, int call, int rank)
{
    return (uint64_t)(step * 100 + call * 10 + rank + 1);
}

/* The calls since the last reduction, on one process. */
static void oracle(mu_tape *ot, mu_module *om, const drill *j, int step, int first, int last, int calls, int size)
{
    double total = 0;
    for (int call = first; call <= last; call++) {
        for (int r = 0; r < size; r++) {
            total += (double)samples_of(step, call, r);
        }
    }
    mu_tensor *sum = NULL;
    for (int call = first; call <= last; call++) {
        for (int r = 0; r < size; r++) {
            if (reads(step, call, r)[0] == '\0' || (kind_of(j, step, call, calls) == ALONE && leaves_out(step, call, r))) {
                continue;
            }
            double share = j->weighted ? (double)samples_of(step, call, r) / total : 1.0 / size;
            mu_tensor *loss = mu_scale(ot, terms(ot, om, reads(step, call, r), key_of(step, call, r)), (float)share);
            sum = sum == NULL ? loss : mu_add(ot, sum, loss);
        }
    }
    if (sum != NULL) {
        CHECK(mu_backward(ot, sum) == MU_OK, "oracle");
    }
}

static void in_pieces(mu_group *g, int rank, int size, void *arg)
{
    const drill *j = arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = toy(c), *om = toy(oc);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = j->bucket, .first_bucket_bytes = j->bucket});
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    for (int step = 0; step < STEPS; step++) {
        int calls = 1 + (int)(mix((uint64_t)step) % MOST_CALLS), first = 0;
        for (int call = 0; call < calls; call++) {
            what k = kind_of(j, step, call, calls);
            const char *names = reads(step, call, rank);
            mu_tape_reset(t);
            mu_tape_reset(ot);
            mu_tensor *loss = names[0] != '\0' ? terms(t, m, names, key_of(step, call, rank)) : NULL;
            mu_status s = MU_OK;
            if (k != ALONE) {
                mu_ddp_backward_options o = {.weighted = j->weighted, .samples = samples_of(step, call, rank),
                                             .defer = k == DEFER};
                s = mu_ddp_backward_with(d, t, loss, &o);
            } else if (loss != NULL && !leaves_out(step, call, rank)) {
                s = mu_backward(t, loss);
            }
            double total = 0;
            for (int r = 0; r < size; r++) {
                for (int e = first; e <= call; e++) {
                    total += (double)samples_of(step, e, r);
                }
            }
            if (j->weighted && k == REDUCE && total == 0) {
                CHECK(s == MU_ERR_ARG, "no samples: %d", (int)s);
                mu_context_clear(c);
                first = call + 1;
                CHECK(mu_module_zero_grad(m) == MU_OK && mu_module_zero_grad(om) == MU_OK, "clear");
                continue;
            }
            CHECK(s == MU_OK, "step %d, call %d: %s", step, call, mu_context_message(c));
            if (k == REDUCE) {
                oracle(ot, om, j, step, first, call, calls, size);
                check_close(m, om, 3e-5, 0.1, "in pieces");
                check_replicas(g, m, "in pieces");
                first = call + 1;
            }
        }
        toy_optimizer_step(m, 0.05F);
        toy_optimizer_step(om, 0.05F);
    }
    CHECK(mu_ddp_check(d) == MU_OK, "check: %s", mu_context_message(c));
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

static const mu_group_options patient = {.timeout_seconds = 60, .arena_bytes = 1 << 22};

static void pieces_add_up(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        drill j = {.weighted = k % 2 != 0, .bucket = k / 2 != 0 ? 1 : 1 << 20};
        for (int size = 1; size <= 4; size++) {
            assert_int_equal(run_threads(size, in_pieces, &j, &patient, true), 0);
        }
        assert_int_equal(run_processes(2, in_pieces, &j, &patient, true), 0);
        assert_int_equal(run_processes(3, in_pieces, &j, &patient, true), 0);
    }
}

/* The parameter is itself the loss, on one rank, on top of its reduced gradient: no operation reads it. */
static void parameter_is_the_loss(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = toy(c), *om = toy(oc);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    mu_tensor *own = mu_parameter_tensor(mu_module_get_parameter(om, "c"));
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a c", 1)) == MU_OK, "%s", mu_context_message(c));
    if (rank == size - 1) {
        CHECK(mu_backward(t, mu_parameter_tensor(mu_module_get_parameter(m, "c"))) == MU_OK, "%s", mu_context_message(c));
    }
    CHECK(mu_ddp_backward(d, t, terms(t, m, "b", 2)) == MU_OK, "%s", mu_context_message(c));
    mu_tensor *sum = mu_add(ot, terms(ot, om, "a c", 1), terms(ot, om, "b", 2));
    CHECK(mu_backward(ot, mu_add(ot, sum, mu_scale(ot, mu_sum(ot, own), 1.0F / (float)size))) == MU_OK, "oracle");
    check_oracle(m, om, 1e-5, "a parameter that is the loss");
    check_replicas(g, m, "a parameter that is the loss");
    mu_context_close(oc);
}

static void a_loss_without_operations(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, parameter_is_the_loss, NULL, &patient, true), 0);
    }
}

/* -- contradictions ---------------------------------------------------------------------------------------------- */
static void one_defers(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "net"});
    mu_tape *t = mu_tape_new(c, NULL);
    mu_status s = mu_ddp_backward_with(d, t, terms(t, m, "a b", 1), &(mu_ddp_backward_options){.defer = rank == 1});
    s = rank == 1 && s == MU_OK ? mu_ddp_backward(d, t, terms(t, m, "a b", 2)) : s;
    CHECK(s == MU_ERR_COMM && strstr(mu_context_message(c), "after 1 deferred") != NULL &&
          strstr(mu_context_message(c), "rank 0") != NULL && strstr(mu_context_message(c), "rank 1") != NULL,
          "%d %s", (int)s, mu_context_message(c));
}

static void kinds_mixed(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward_with(d, t, terms(t, m, "a b", 1), &(mu_ddp_backward_options){.defer = true}) == MU_OK, "defer");
    mu_status s = mu_ddp_backward_weighted(d, t, terms(t, m, "a b", 2), 3);
    CHECK(s == MU_ERR_ARG, "rank %d: %d %s", rank, (int)s, mu_context_message(c));
    mu_context_clear(c);
    s = mu_ddp_backward(d, t, NULL); /* what was deferred is still there */
    CHECK(s == MU_OK && mu_parameter_grad(mu_module_get_parameter(m, "a")) != NULL, "%s", mu_context_message(c));
    check_replicas(g, m, "kinds");
}

/* Rank 1's deferred backward fails: skipped everywhere until gradients are cleared, then right. */
static void deferral_fails(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = toy(c), *om = toy(oc);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    const mu_ddp_backward_options later = {.defer = true};
    mu_tensor *loss = terms(t, m, "a b c", 1);
    mu_status s = mu_ddp_backward_with(d, t, rank == 1 ? mu_add(t, loss, mu_tensor_zeros(t, MU_DIMS(2))) : loss, &later);
    CHECK(rank == 1 ? s == MU_ERR_SHAPE : s == MU_OK, "rank %d: %d", rank, (int)s);
    mu_context_clear(c);
    for (int k = 0; k < 2; k++) {
        s = mu_ddp_backward(d, t, terms(t, m, "a b", 2));
        CHECK(s == MU_SKIPPED && mu_context_status(c) == MU_OK, "rank %d: %d %s", rank, (int)s, mu_context_message(c));
    }
    CHECK(mu_module_zero_grad(m) == MU_OK, "clear");
    s = mu_ddp_backward(d, t, terms(t, m, "a d", (uint64_t)rank + 1));
    CHECK(s == MU_OK, "%s", mu_context_message(c));
    oracle_of_terms(ot, om, "a d", 1, 1, size);
    check_oracle(m, om, 1e-5, "after a deferral that failed");
    check_replicas(g, m, "after a deferral that failed");
    mu_context_close(oc);
}

static void contradictions_and_failures(void **state)
{
    (void)state;
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, one_defers, NULL, &patient, false), 0);
        assert_int_equal(run_processes(size, one_defers, NULL, &patient, false), 0);
        assert_int_equal(run_threads(size, kinds_mixed, NULL, &patient, true), 0);
        assert_int_equal(run_threads(size, deferral_fails, NULL, &patient, true), 0);
        assert_int_equal(run_processes(size, deferral_fails, NULL, &patient, true), 0);
    }
}

/* Every allocation of a step with all kinds of backwards fails once on rank 1; the others are skipped or go on, nobody
 * waits, and afterwards a whole step is right. */
static void memory_runs_out(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context, *oc = quiet_context();
    for (int64_t n = 0; n < 40; n++) {
        mu_module *m = toy(c), *om = toy(oc);
        mu_ddp *d = mu_ddp_wrap(m, g, NULL);
        mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
        CHECK(d != NULL, "wrap");
        for (int k = 0; k < 2; k++) { /* the plan is made; a failure there ends the group, as documented */
            CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d", 3)) == MU_OK, "first");
            mu_tape_reset(t);
        }
        const mu_ddp_backward_options later = {.defer = true};
        c->fail_after = rank == 1 ? n : -1;
        mu_status s = mu_ddp_backward_with(d, t, terms(t, m, "a b head.w", 5), &later); /* mixed: on reduced gradients */
        c->fail_after = -1;
        CHECK(s == MU_OK || (rank == 1 && s == MU_ERR_NOMEM), "deferred: %d %s", (int)s, mu_context_message(c));
        mu_context_clear(c);
        s = mu_ddp_backward(d, t, terms(t, m, "c", 6));
        CHECK(s == MU_OK || s == MU_SKIPPED, "reduction: %d %s", (int)s, mu_context_message(c));
        if (s == MU_OK) { /* the same on all ranks; else gradients are each rank's own */
            check_replicas(g, m, "after all");
        }
        CHECK(mu_module_zero_grad(m) == MU_OK, "clear");
        CHECK(mu_ddp_backward(d, t, terms(t, m, "a b", (uint64_t)rank)) == MU_OK, "%s", mu_context_message(c));
        oracle_of_terms(ot, om, "a b", 0, 1, size);
        check_oracle(m, om, 1e-5, "after memory ran out");
        mu_ddp_free(d);
        mu_tape_free(t);
        mu_tape_free(ot);
    }
    mu_context_close(oc);
}

static void out_of_memory_anywhere(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, memory_runs_out, NULL, &patient, true), 0);
}

/* -- experts ------------------------------------------------------------------------------------------------------ */
static void mean_of_contributors(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = toy(c), *om = toy(oc);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.mean_over_contributors = true});
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    static const char *const names[] = {"a", "b", "c", "d", "head.w", "head.v"};
    for (int step = 0; step < 5; step++) {
        mu_tape_reset(t);
        mu_tape_reset(ot);
        mu_tensor *loss = NULL, *sum = NULL;
        for (int p = 0; p < 6; p++) {
            int who = 0;
            for (int r = 0; r < size; r++) {
                who += mix((uint64_t)(step * 50 + p * 7 + r)) % 3 > 0;
            }
            for (int r = 0; r < size; r++) {
                if (mix((uint64_t)(step * 50 + p * 7 + r)) % 3 > 0) {
                    mu_tensor *x = mu_scale(ot, term(ot, om, names[p], key_of(step, p, r)), 1.0F / (float)who);
                    sum = sum == NULL ? x : mu_add(ot, sum, x);
                    if (r == rank) {
                        x = term(t, m, names[p], key_of(step, p, r));
                        loss = loss == NULL ? x : mu_add(t, loss, x);
                    }
                }
            }
        }
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
        CHECK(sum == NULL || mu_backward(ot, sum) == MU_OK, "oracle");
        check_oracle(m, om, 1e-5, "contributors");
        check_replicas(g, m, "contributors");
        toy_optimizer_step(m, 0.1F);
        toy_optimizer_step(om, 0.1F);
    }
    mu_context_close(oc);
}

static void contributors_only(void **state)
{
    (void)state;
    for (int size = 1; size <= 4; size++) {
        assert_int_equal(run_threads(size, mean_of_contributors, NULL, &patient, true), 0);
    }
    assert_int_equal(run_processes(3, mean_of_contributors, NULL, &patient, true), 0);
}

/* -- an optimiser that steps too early --------------------------------------------------------------------------- */
typedef struct said {
    int count;
    char text[400];
} said;
static void listen(void *user, mu_log_level level, const char *message)
{
    said *s = user;
    if (level == MU_LOG_WARN && strstr(message, "no reduction brought together") != NULL) {
        s->count++;
        snprintf(s->text, sizeof(s->text), "%s", message);
    }
}

static mu_thread_world *early_world;
static void *steps_early(void *arg)
{
    int rank = *(int *)arg;
    said s = {0};
    mu_context *c = mu_context_open(&(mu_context_options){.log = listen, .log_user = &s});
    mu_group *g = mu_group_threads(c, early_world, rank);
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_optimizer *sgd = mu_sgd(m, 0.1F, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", 1)) == MU_OK && mu_optimizer_step(sgd) == MU_OK, "step");
    CHECK(s.count == 0, "a false alarm: %s", s.text);
    for (int k = 0; k < 3; k++) {
        mu_tape_reset(t);
        CHECK(mu_backward(t, terms(t, m, "b head.w", (uint64_t)rank)) == MU_OK && mu_optimizer_step(sgd) == MU_OK, "step");
    }
    char who[32];
    snprintf(who, sizeof(who), "rank %d of 2", rank);
    CHECK(s.count == 1 && strstr(s.text, who) != NULL && strstr(s.text, "2 parameters") != NULL &&
          strstr(s.text, "b, head.w") != NULL, "%d times: %s", s.count, s.text);
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    mu_context_close(c);
    return NULL;
}

static void steps_on_local_gradients_are_told_once(void **state)
{
    (void)state;
    pthread_t thread[2];
    int rank[2] = {0, 1};
    early_world = mu_thread_world_new(2, &patient);
    for (int r = 0; r < 2; r++) {
        pthread_create(&thread[r], NULL, steps_early, &rank[r]);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(thread[r], NULL);
    }
    mu_thread_world_free(early_world);
    assert_int_equal(failures, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_add_up), cmocka_unit_test(a_loss_without_operations), cmocka_unit_test(contradictions_and_failures),
        cmocka_unit_test(out_of_memory_anywhere), cmocka_unit_test(contributors_only),
        cmocka_unit_test(steps_on_local_gradients_are_told_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
