/* Values that change by other hands than an optimiser's: between forward and backward, on one rank only, unlike on the
 * ranks; and what changes nothing for the others: evaluation on one rank, losses that are not finite. */
#include "rig.h"

#include <muster/checkpoint.h>
#include <muster/hooks.h>
#include <muster/optim.h>
#include <unistd.h>

static const char all[] = "a b c d head.w head.v";

static uint64_t key_of(int step, int rank)
{
    return (uint64_t)(step * 1009 + rank * 13 + 1);
}

typedef struct pair {
    mu_context *c, *oc;
    mu_module *m, *om;
    mu_ddp *d;
    mu_optimizer *sgd, *osgd;
    mu_tape *t, *ot;
    mu_group *g;
    int rank, size, step;
} pair;

static pair open_pair(mu_group *g, const mu_ddp_options *o)
{
    pair p = {.c = g->context, .oc = quiet_context(), .g = g, .rank = mu_group_rank(g), .size = mu_group_size(g)};
    p.m = toy(p.c);
    p.om = toy(p.oc);
    p.d = mu_ddp_wrap(p.m, g, o);
    p.t = mu_tape_new(p.c, NULL);
    p.ot = mu_tape_new(p.oc, NULL);
    p.sgd = mu_sgd(p.m, 0.1F, &(mu_sgd_options){.momentum = 0.9F});
    p.osgd = mu_sgd(p.om, 0.1F, &(mu_sgd_options){.momentum = 0.9F});
    CHECK(p.d != NULL && p.sgd != NULL && p.osgd != NULL, "%s", mu_context_message(p.c));
    return p;
}

static void close_pair(pair *p)
{
    CHECK(mu_context_close(p->oc) == MU_OK, "oracle's context");
}

static void good_step(pair *p, const char *what)
{
    mu_tape_reset(p->t);
    mu_tape_reset(p->ot);
    mu_status s = mu_ddp_backward(p->d, p->t, terms(p->t, p->m, all, key_of(p->step, p->rank)));
    CHECK(s == MU_OK, "%s: step %d: %d %s", what, p->step, (int)s, mu_context_message(p->c));
    oracle_of_terms(p->ot, p->om, all, key_of(p->step, 0), key_of(0, 1) - key_of(0, 0), p->size);
    check_oracle(p->m, p->om, 1e-5, what);
    check_replicas(p->g, p->m, what);
    CHECK(mu_optimizer_step(p->sgd) == MU_OK && mu_optimizer_step(p->osgd) == MU_OK, "%s", mu_context_message(p->c));
    p->step++;
}

static mu_status write_c(mu_module *m, float x)
{
    return mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(m, "c")), &x, 1);
}

/* -- between forward and backward ---------------------------------------------------------------------------------- */
static void stepped_before_backward(mu_group *g, int rank, int size, void *arg)
{
    bool everywhere = *(bool *)arg;
    pair p = open_pair(g, NULL);
    good_step(&p, "before");
    good_step(&p, "before");
    /* The optimiser steps on all ranks; one rank's (or every rank's) loss was computed before it. */
    CHECK(mu_ddp_backward(p.d, p.t, NULL) == MU_OK, "nothing");
    mu_tape_reset(p.t);
    mu_status s = mu_ddp_backward(p.d, p.t, terms(p.t, p.m, all, key_of(p.step, rank)));
    CHECK(s == MU_OK, "%s", mu_context_message(p.c));
    mu_tape_reset(p.t);
    mu_tensor *old = terms(p.t, p.m, all, 7);
    CHECK(mu_optimizer_step(p.sgd) == MU_OK, "step");
    bool mine = everywhere || rank == size - 1;
    s = mu_ddp_backward(p.d, p.t, mine ? old : terms(p.t, p.m, all, 7));
    CHECK(s == (mine ? MU_ERR_STATE : MU_SKIPPED), "rank %d: %d %s", rank, (int)s, mu_context_message(p.c));
    CHECK(!mine || (strstr(mu_context_message(p.c), "backward of mul: parameter `") != NULL &&
                    strstr(mu_context_message(p.c), "an optimiser's step") != NULL), "%s", mu_context_message(p.c));
    CHECK(mine || mu_context_status(p.c) == MU_OK, "%s", mu_context_message(p.c));
    mu_context_clear(p.c);
    mu_tape_reset(p.t);
    CHECK(mu_parameter_grad(mu_module_get_parameter(p.m, "a")) == NULL, "a gradient was left");
    s = mu_ddp_backward(p.d, p.t, terms(p.t, p.m, all, 7));
    CHECK(s == MU_OK, "forward again: %s", mu_context_message(p.c));
    check_replicas(g, p.m, "after");
    close_pair(&p);
}

/* The wrap gives rank 0's values to all: a loss from before means nothing on ranks that had others. */
static void computed_before_the_wrap(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    bool alike = *(bool *)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mui_store_of(m) != NULL && (alike || write_c(m, (float)rank) == MU_OK), "%s", mu_context_message(c));
    mu_tensor *loss = terms(t, m, all, key_of(0, rank));
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_status s = mu_ddp_backward(d, t, loss);
    CHECK(alike ? s == MU_OK : s == (rank == 0 ? MU_SKIPPED : MU_ERR_STATE), "rank %d: %d %s", rank, (int)s,
          mu_context_message(c));
    mu_context_clear(c);
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, all, key_of(1, rank))) == MU_OK, "%s", mu_context_message(c));
    check_replicas(g, m, "after");
}

static void values_that_changed_before_backward(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        bool yes = k == 1;
        for (int size = 2; size <= 3; size++) {
            assert_int_equal(run_threads(size, stepped_before_backward, &yes, NULL, true), 0);
            assert_int_equal(run_threads(size, computed_before_the_wrap, &yes, NULL, true), 0);
            assert_int_equal(run_processes(size, stepped_before_backward, &yes, NULL, true), 0);
            assert_int_equal(run_processes(size, computed_before_the_wrap, &yes, NULL, true), 0);
        }
    }
}

/* -- written after the wrap ---------------------------------------------------------------------------------------- */
static void written_alike(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    (void)size;
    (void)arg;
    pair p = open_pair(g, NULL);
    good_step(&p, "before");
    for (int k = 0; k < 3; k++) {
        CHECK(write_c(p.m, 2 + (float)k) == MU_OK && write_c(p.om, 2 + (float)k) == MU_OK, "write");
        good_step(&p, "written alike");
        good_step(&p, "after it");
    }
    CHECK(mu_ddp_check(p.d) == MU_OK, "%s", mu_context_message(p.c));
    close_pair(&p);
}

static void written_unlike(mu_group *g, int rank, int size, void *arg)
{
    bool on_all = *(bool *)arg;
    pair p = open_pair(g, NULL);
    good_step(&p, "before");
    CHECK(mu_module_freeze(p.m, "d", NULL) == MU_OK, "freeze");
    CHECK(mu_ddp_backward(p.d, p.t, NULL) == MU_OK, "a change that is followed: %s", mu_context_message(p.c));
    if (on_all) {
        CHECK(write_c(p.m, (float)rank) == MU_OK, "write");
    } else if (rank == size - 1) { /* a frozen one */
        float x[33] = {1};
        CHECK(mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(p.m, "d")), x, 33) == MU_OK, "write");
    }
    mu_tape_reset(p.t);
    mu_status s = mu_ddp_backward(p.d, p.t, terms(p.t, p.m, "a b c", 3));
    CHECK(s == MU_ERR_COMM && strstr(mu_context_message(p.c), "with values of 1 parameters written") != NULL, "%d %s",
          (int)s, mu_context_message(p.c));
    mu_context_clear(p.c);
    close_pair(&p);
}

/* Skipped steps do not forget it. */
static void written_before_a_skipped_step(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    pair p = open_pair(g, NULL);
    good_step(&p, "before");
    if (rank == 0) {
        CHECK(write_c(p.m, 9) == MU_OK, "write");
    }
    mu_status s = rank == size - 1 ? mu_ddp_abandon(p.d, "bad batch") : mu_ddp_backward(p.d, p.t, NULL);
    if (s == MU_SKIPPED) {
        s = mu_ddp_backward(p.d, p.t, NULL);
    }
    CHECK(s == MU_ERR_COMM, "%d %s", (int)s, mu_context_message(p.c));
    mu_context_clear(p.c);
    close_pair(&p);
}

/* Every rank loads a file, but not the same. */
static void loaded_unlike(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    bool unlike = *(bool *)arg;
    pair p = open_pair(g, NULL);
    char path[96];
    snprintf(path, sizeof(path), "/tmp/muster-written-%d-%d.pt", (int)getpid(), rank);
    CHECK(write_c(p.om, unlike ? (float)rank : 5) == MU_OK && mu_save(p.om, path, NULL) == MU_OK, "%s",
          mu_context_message(p.oc));
    CHECK(mu_load(p.m, path, NULL, NULL) == MU_OK, "%s", mu_context_message(p.c));
    unlink(path);
    if (unlike) {
        mu_status s = mu_ddp_backward(p.d, p.t, terms(p.t, p.m, all, 3));
        CHECK(s == MU_ERR_COMM && strstr(mu_context_message(p.c), "with values of 6 parameters written") != NULL, "%d %s",
              (int)s, mu_context_message(p.c));
        mu_context_clear(p.c);
    } else {
        good_step(&p, "loaded alike");
    }
    close_pair(&p);
}

/* Written unlike, then averaged; and replicas that differ on purpose. */
static void averaged(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    pair p = open_pair(g, NULL);
    good_step(&p, "before");
    CHECK(write_c(p.m, (float)rank) == MU_OK && write_c(p.om, (float)(size - 1) / 2) == MU_OK, "write");
    mu_tape_reset(p.t);
    mu_tensor *loss = terms(p.t, p.m, all, 3);
    CHECK(mu_ddp_average_parameters(p.d) == MU_OK, "%s", mu_context_message(p.c));
    CHECK(mu_backward(p.t, loss) == MU_ERR_STATE, "averaged since forward");
    mu_context_clear(p.c);
    good_step(&p, "averaged");
    CHECK(mu_local_sgd_new(p.d, NULL) != NULL, "%s", mu_context_message(p.c));
    for (int k = 0; k < 3; k++) {
        mu_tape_reset(p.t);
        CHECK(mu_ddp_backward(p.d, p.t, terms(p.t, p.m, all, key_of(k, rank))) == MU_OK, "%s", mu_context_message(p.c));
        toy_optimizer_step(p.m, 0.1F);
    }
    close_pair(&p);
}

static void values_written_after_the_wrap(void **state)
{
    (void)state;
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, written_alike, NULL, NULL, true), 0);
        assert_int_equal(run_processes(size, written_alike, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, averaged, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, written_before_a_skipped_step, NULL, NULL, false), 0);
        for (int k = 0; k < 2; k++) {
            bool on_all = k == 1;
            assert_int_equal(run_threads(size, loaded_unlike, &on_all, NULL, k == 0), 0);
            assert_int_equal(run_processes(size, loaded_unlike, &on_all, NULL, k == 0), 0);
            assert_int_equal(run_threads(size, written_unlike, &on_all, NULL, false), 0);
            assert_int_equal(run_processes(size, written_unlike, &on_all, NULL, false), 0);
        }
    }
}

/* -- evaluation on one rank ---------------------------------------------------------------------------------- */
static void one_rank_evaluates(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    pair p = open_pair(g, NULL);
    mu_tape *et = mu_tape_new(p.c, &(mu_tape_options){.no_grad = true});
    good_step(&p, "before");
    for (int k = 0; k < 3; k++) {
        if (rank == (k == 2 ? 0 : size - 1)) {
            mu_module_train(p.m, false);
            for (int batch = 0; batch < 5; batch++) {
                mu_tape_reset(et);
                mu_tensor *loss = terms(et, p.m, all, (uint64_t)batch + 100);
                CHECK(loss != NULL && isfinite(mu_tensor_item(loss)), "%s", mu_context_message(p.c));
            }
            mu_module_train(p.m, true);
        }
        good_step(&p, "one rank evaluated");
    }
    CHECK(mu_ddp_check(p.d) == MU_OK, "%s", mu_context_message(p.c));
    close_pair(&p);
}

static void evaluation_on_one_rank(void **state)
{
    (void)state;
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, one_rank_evaluates, NULL, NULL, true), 0);
        assert_int_equal(run_processes(size, one_rank_evaluates, NULL, NULL, true), 0);
    }
}

/* -- losses that are not finite, with gradients that are --------------------------------------------------------- */
typedef struct bad {
    mu_nonfinite_policy policy;
    bool deferred;
} bad;

static void bad_loss(mu_group *g, int rank, int size, void *arg)
{
    const bad *b = arg;
    pair p = open_pair(g, &(mu_ddp_options){.nonfinite = b->policy});
    good_step(&p, "before");
    mu_tape_reset(p.t);
    bool mine = rank == size - 1, error = b->policy == MU_NONFINITE_ERROR;
    float x = mine ? NAN : 0;
    mu_tensor *loss = mu_add(p.t, terms(p.t, p.m, all, 3), mu_tensor_from(p.t, MU_SCALAR, &x));
    mu_status s = mu_ddp_backward_with(p.d, p.t, loss, &(mu_ddp_backward_options){.defer = b->deferred});
    if (b->deferred) {
        CHECK(s == (!mine ? MU_OK : error ? MU_ERR_STATE : MU_SKIPPED), "rank %d: %d", rank, (int)s);
        mu_context_clear(p.c);
        s = mu_ddp_backward(p.d, p.t, NULL);
        CHECK(s == MU_SKIPPED, "rank %d: %d %s", rank, (int)s, mu_context_message(p.c));
        CHECK(mu_module_zero_grad(p.m) == MU_OK, "clear");
    } else {
        CHECK(s == (error && mine ? MU_ERR_STATE : MU_SKIPPED), "rank %d: %d %s", rank, (int)s,
              mu_context_message(p.c));
        char who[48];
        snprintf(who, sizeof(who), "the loss of rank %d is not finite", size - 1);
        CHECK(!(error && mine) || strstr(mu_context_message(p.c), who) != NULL, "%s", mu_context_message(p.c));
        mu_context_clear(p.c);
        CHECK(mu_parameter_grad(mu_module_get_parameter(p.m, "a")) == NULL, "a gradient was left");
    }
    good_step(&p, "after");
    close_pair(&p);
}

static void losses_that_are_not_finite(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        bad b = {.policy = k % 2 == 0 ? MU_NONFINITE_SKIP : MU_NONFINITE_ERROR, .deferred = k / 2 != 0};
        for (int size = 2; size <= 3; size++) {
            assert_int_equal(run_threads(size, bad_loss, &b, NULL, true), 0);
        }
        assert_int_equal(run_processes(2, bad_loss, &b, NULL, true), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_that_changed_before_backward), cmocka_unit_test(values_written_after_the_wrap),
        cmocka_unit_test(evaluation_on_one_rank),              cmocka_unit_test(losses_that_are_not_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
