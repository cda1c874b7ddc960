/* Steps that do not go as planned: abandoned, failed half way, deferred, on a changed model, out of order. After each,
 * all ranks are in step: the next reduction is right. */
#include "rig.h"

#include "base/alloc.h"
#include "ddp/reducer.h"
#include "tape/op.h"

static mu_tensor *loss_of(mu_tape *t, mu_module *m, int step, int rank)
{
    return terms(t, m, "a b c d head.w head.v", (uint64_t)(step * 1009 + rank * 13 + 1));
}

typedef struct rig {
    mu_context *c, *oc;
    mu_module *m, *om;
    mu_ddp *d;
    mu_tape *t, *ot;
    mu_group *g;
    int rank, size, step;
} rig;

static rig rig_open(mu_group *g, const mu_ddp_options *options)
{
    rig r = {.c = g->context, .oc = quiet_context(), .g = g, .rank = mu_group_rank(g), .size = mu_group_size(g)};
    r.m = toy(r.c);
    r.om = toy(r.oc);
    r.d = mu_ddp_wrap(r.m, g, options);
    r.t = mu_tape_new(r.c, NULL);
    r.ot = mu_tape_new(r.oc, NULL);
    CHECK(r.d != NULL && r.ot != NULL, "rig: %s", mu_context_message(r.c));
    return r;
}

static void oracle_backward(rig *r)
{
    oracle_of_terms(r->ot, r->om, "a b c d head.w head.v", (uint64_t)(r->step * 1009 + 1), 13, r->size);
}

/* A usual step, checked. */
static void good_step(rig *r, const char *what)
{
    mu_tape_reset(r->t);
    mu_tape_reset(r->ot);
    mu_status s = mu_ddp_backward(r->d, r->t, loss_of(r->t, r->m, r->step, r->rank));
    CHECK(s == MU_OK, "%s: step %d: %s", what, r->step, mu_context_message(r->c));
    oracle_backward(r);
    check_oracle(r->m, r->om, 1e-5, what);
    check_replicas(r->g, r->m, what);
    toy_optimizer_step(r->m, 0.1F);
    toy_optimizer_step(r->om, 0.1F);
    r->step++;
}

static void rig_close(rig *r)
{
    CHECK(mu_context_close(r->oc) == MU_OK, "oracle's context");
}

/* -- an operation whose backward fails on request ----------------------------------------------------------------- */
static mu_status fuse_backward(mui_backward *b, mui_node *n)
{
    return *(const bool *)n->attr ? mui_fail(n->out->context, MU_ERR_DEVICE, "the fuse blew") : mui_grad_pass(b, n, 0);
}
static const mui_op fuse_op = {.name = "fuse", .backward = fuse_backward};
static mu_tensor *fuse(mu_tape *t, mu_tensor *x, bool blows)
{
    mu_tensor *y = mui_tensor_view(t, x, x->dims, x->stride, 0);
    return mui_record(t, &fuse_op, y, &x, 1, &blows, sizeof(blows), NULL, 0);
}

/* Terms after the fuse run backward first: with a bucket for each parameter, some are reduced when it blows; with it on
 * an input all gradients are complete. */
static mu_tensor *fused_loss(rig *r, int step, bool on_input, bool blows)
{
    uint64_t key = (uint64_t)(step * 1009 + r->rank * 13 + 1);
    if (on_input) {
        mu_tensor *x = fuse(r->t, mu_tensor_require_grad(r->t, mu_tensor_zeros(r->t, MU_SCALAR)), blows);
        return mu_add(r->t, x, terms(r->t, r->m, "a b c d head.w head.v", key));
    }
    mu_tensor *early = fuse(r->t, terms(r->t, r->m, "a b c", key), blows);
    return mu_add(r->t, early, terms(r->t, r->m, "d head.w head.v", key + 3));
}

static void check_unchanged(const snapshot *before, mu_module *m, const char *what)
{
    snapshot after = snap(m);
    CHECK(memcmp(before->has, after.has, sizeof(after.has)) == 0, "%s: which gradients there are changed", what);
    CHECK(memcmp(before->grads, after.grads, (size_t)after.count * sizeof(float)) == 0, "%s: gradients changed", what);
    CHECK(memcmp(before->values, after.values, (size_t)after.count * sizeof(float)) == 0, "%s: values changed", what);
    snap_free(&after);
}

static void fail_in_the_middle(mu_group *g, int rank, int size, void *arg)
{
    rig r = rig_open(g, arg);
    good_step(&r, "before");
    for (int bad = 0; bad < size; bad++) {
        for (int k = 0; k < 6; k++) {
            int earlier = k % 3;
            /* Without gradients, with reduced ones, with this rank's own. */
            mu_tape_reset(r.t);
            if (earlier == 1) {
                CHECK(mu_ddp_backward(r.d, r.t, loss_of(r.t, r.m, 99, rank)) == MU_OK, "%s", mu_context_message(r.c));
            } else if (earlier == 2) {
                CHECK(mu_backward(r.t, terms(r.t, r.m, rank == 0 ? "a b" : "b d", 5)) == MU_OK, "%s",
                      mu_context_message(r.c));
            }
            snapshot before = snap(r.m);
            mu_tape_reset(r.t);
            mu_status s = mu_ddp_backward(r.d, r.t, fused_loss(&r, 7, k >= 3, rank == bad));
            CHECK(s == (rank == bad ? MU_ERR_DEVICE : MU_SKIPPED), "rank %d of %d: %d %s", rank, size, (int)s,
                  mu_context_message(r.c));
            CHECK(mu_context_status(r.c) == (rank == bad ? MU_ERR_DEVICE : MU_OK), "%s", mu_context_message(r.c));
            mu_context_clear(r.c);
            check_unchanged(&before, r.m, "failed half way");
            snap_free(&before);
            CHECK(mu_module_zero_grad(r.m) == MU_OK, "zero");
            good_step(&r, "after a failure");
        }
    }
    CHECK(mu_ddp_get_report(r.d).reductions >= (uint64_t)(3 * size), "reductions");
    rig_close(&r);
}

static void abandon_from_each(mu_group *g, int rank, int size, void *arg)
{
    rig r = rig_open(g, arg);
    for (int bad = 0; bad < size; bad++) {
        for (int kind = 0; kind < 3; kind++) {
            mu_tape_reset(r.t);
            mu_tensor *loss = loss_of(r.t, r.m, 50, rank);
            mu_status s, want = MU_SKIPPED;
            if (rank != bad) {
                s = kind == 2 ? mu_ddp_backward_weighted(r.d, r.t, loss, 3) : mu_ddp_backward(r.d, r.t, loss);
            } else if (kind == 0) {
                s = mu_ddp_abandon(r.d, "the loss is not finite");
            } else if (kind == 1) { /* the forward failed: NULL and an error */
                want = mui_fail(r.c, MU_ERR_SHAPE, "shapes do not fit");
                s = mu_ddp_backward(r.d, r.t, NULL);
            } else {
                want = MU_ERR_ARG;
                s = mu_ddp_backward_weighted(r.d, r.t, loss, -1);
            }
            CHECK(s == want, "rank %d, bad %d, kind %d: %d %s", rank, bad, kind, (int)s, mu_context_message(r.c));
            CHECK(mu_context_status(r.c) == (want < 0 ? want : MU_OK), "%s", mu_context_message(r.c));
            mu_context_clear(r.c);
            CHECK(mu_parameter_grad(mu_module_get_parameter(r.m, "a")) == NULL, "a gradient was left");
            good_step(&r, "after an abandoned step");
        }
    }
    rig_close(&r);
}

static void skipped_steps_leave_no_trace(void **state)
{
    (void)state;
    static const mu_ddp_options own_buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1};
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, fail_in_the_middle, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, fail_in_the_middle, (void *)&own_buckets, NULL, true), 0);
        if (size > 1) {
            assert_int_equal(run_threads(size, abandon_from_each, NULL, NULL, true), 0);
            assert_int_equal(run_threads(size, abandon_from_each, (void *)&own_buckets, NULL, true), 0);
        }
    }
    assert_int_equal(run_processes(2, fail_in_the_middle, (void *)&own_buckets, NULL, true), 0);
    assert_int_equal(run_processes(2, abandon_from_each, NULL, NULL, true), 0);
}

/* -- out of memory ------------------------------------------------------------------------------------------------ */
typedef struct shortage {
    int at;
    bool first;     /* the shortage is in the first reduction, which also plans the buckets */
    int outcome[4]; /* not reached, skipped, peer told */
} shortage;

/* By the rank that ran out alone: the struct is shared by all. */
static void note_outcome(shortage *sh, int rank, int which)
{
    if (rank == 1) {
        sh->outcome[which]++;
    }
}

static void run_out_of_memory(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    shortage *sh = arg;
    rig r = rig_open(g, &(mu_ddp_options){.bucket_bytes = 100, .first_bucket_bytes = 100, .absent = MU_ABSENT_QUIET});
    if (!sh->first) {
        good_step(&r, "before");
    }
    /* New tapes have to get all their memory again. */
    mu_tape *t = mu_tape_new(r.c, NULL);
    mu_tensor *loss = loss_of(t, r.m, 3, rank);
    if (rank == 1) {
        r.c->fail_after = sh->at;
    }
    mu_status s = mu_ddp_backward(r.d, t, loss);
    bool ran_out = rank == 1 && r.c->fail_after < 0;
    r.c->fail_after = -1;
    int64_t all[32], own = s;
    mu_context_clear(r.c);
    if (mu_all_gather(g, &own, all, sizeof(own)) != MU_OK) {
        /* Memory of the group itself ran out: broken for all, at once. */
        CHECK(s == (rank == 1 ? MU_ERR_NOMEM : MU_ERR_PEER), "at %d, rank %d: %d", sh->at, rank, (int)s);
        note_outcome(sh, rank, 2);
        mu_context_clear(r.c);
    } else if (all[1] == MU_ERR_NOMEM) {
        CHECK(s == (rank == 1 ? MU_ERR_NOMEM : MU_SKIPPED), "at %d, rank %d: %d", sh->at, rank, (int)s);
        note_outcome(sh, rank, 1);
        mu_tape_reset(t);
        good_step(&r, "after a shortage");
    } else {
        CHECK(s == MU_OK && !ran_out, "at %d, rank %d: %d", sh->at, rank, (int)s);
        note_outcome(sh, rank, 0);
    }
    rig_close(&r);
}

static void out_of_memory_in_a_step(void **state)
{
    (void)state;
    for (int first = 0; first < 2; first++) {
        shortage sh = {.first = first};
        for (sh.at = 0; sh.outcome[0] == 0; sh.at++) {
            assert_int_equal(run_threads(3, run_out_of_memory, &sh, &(mu_group_options){.timeout_seconds = 20}, false),
                             0);
            assert_true(sh.at < 1000);
        }
        printf("out of memory at %d places of %s reduction: %d steps skipped by all, %d groups ended\n", sh.at - 1,
               first ? "the first" : "a later", sh.outcome[1], sh.outcome[2]);
        assert_true(sh.outcome[1] > 0);
    }
}

/* -- accumulation and deferring ----------------------------------------------------------------------------------- */
static void defer(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    rig r = rig_open(g, arg);
    for (int step = 0; step < 3; step++) {
        /* Two backwards of this rank alone, then one with all: the sum of three, averaged. */
        for (int micro = 0; micro < 3; micro++) {
            mu_tape_reset(r.t);
            mu_tape_reset(r.ot);
            r.step = step * 3 + micro;
            mu_tensor *loss = loss_of(r.t, r.m, r.step, rank);
            mu_status s = micro < 2 ? mu_backward(r.t, loss) : mu_ddp_backward(r.d, r.t, loss);
            CHECK(s == MU_OK, "%s", mu_context_message(r.c));
            oracle_backward(&r);
        }
        check_oracle(r.m, r.om, 1e-5, "deferred");
        check_replicas(g, r.m, "deferred");
        toy_optimizer_step(r.m, 0.1F);
        toy_optimizer_step(r.om, 0.1F);
    }
    /* Weighted: what waits here has this call's weight. */
    mu_tape_reset(r.t);
    mu_tape_reset(r.ot);
    CHECK(mu_backward(r.t, loss_of(r.t, r.m, 90, rank)) == MU_OK, "%s", mu_context_message(r.c));
    CHECK(mu_ddp_backward_weighted(r.d, r.t, loss_of(r.t, r.m, 91, rank), 4) == MU_OK, "%s", mu_context_message(r.c));
    r.step = 90;
    oracle_backward(&r);
    r.step = 91;
    oracle_backward(&r);
    check_oracle(r.m, r.om, 1e-5, "deferred and weighted");
    rig_close(&r);
}

/* One rank forgets its earlier gradients. */
static void forget(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    rig r = rig_open(g, NULL);
    CHECK(mu_ddp_backward(r.d, r.t, loss_of(r.t, r.m, 0, rank)) == MU_OK, "%s", mu_context_message(r.c));
    if (rank == 1) {
        CHECK(mu_module_zero_grad(r.m) == MU_OK, "zero");
    }
    CHECK(mu_ddp_backward(r.d, r.t, loss_of(r.t, r.m, 1, rank)) == MU_ERR_COMM, "not noticed");
    CHECK(strstr(mu_context_message(r.c), "reduction 2 (ddp `Toy`) adding to 6 gradients") != NULL, "%s",
          mu_context_message(r.c));
    mu_context_clear(r.c);
    CHECK(mu_ddp_backward(r.d, r.t, NULL) == MU_ERR_COMM, "a broken ddp stays so");
    rig_close(&r);
}

static void without_samples(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    rig r = rig_open(g, NULL);
    CHECK(mu_ddp_backward_weighted(r.d, r.t, loss_of(r.t, r.m, 0, rank), 0) == MU_ERR_ARG, "total 0");
    CHECK(mu_context_status(r.c) == MU_ERR_ARG, "%s", mu_context_message(r.c));
    mu_context_clear(r.c);
    good_step(&r, "after a total of 0");
    rig_close(&r);
}

static void gradients_add_up(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, defer, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, without_samples, NULL, NULL, true), 0);
    }
    assert_int_equal(run_threads(3, forget, NULL, NULL, false), 0);
}

/* -- ranks that contradict each other ------------------------------------------------------------------------------ */
static void swap_models(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    const char *const *names = arg;
    mu_context *c = g->context;
    mu_module *gen = toy(c), *dis = toy(c);
    mu_ddp *dg = mu_ddp_wrap(gen, g, &(mu_ddp_options){.name = names[0]});
    mu_ddp *dd = mu_ddp_wrap(dis, g, &(mu_ddp_options){.name = names[1]});
    mu_tape *t = mu_tape_new(c, NULL);
    mu_tensor *lg = loss_of(t, gen, 0, rank), *ld = loss_of(t, dis, 0, rank);
    CHECK(mu_ddp_backward(rank == 1 ? dd : dg, t, rank == 1 ? ld : lg) == MU_ERR_COMM, "%s", mu_context_message(c));
    const char *text = mu_context_message(c);
    CHECK(strstr(text, names[2]) != NULL && strstr(text, names[3]) != NULL, "%s", text);
}

static void other_form(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    rig r = rig_open(g, NULL);
    mu_tensor *loss = loss_of(r.t, r.m, 0, rank);
    mu_status s = rank == 0 ? mu_ddp_backward(r.d, r.t, loss) : mu_ddp_backward_weighted(r.d, r.t, loss, 5);
    CHECK(s == MU_ERR_COMM, "%d", (int)s);
    CHECK(strstr(mu_context_message(r.c), "weighted reduction 1") != NULL, "%s", mu_context_message(r.c));
    rig_close(&r);
}

static void check_instead(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    rig r = rig_open(g, NULL);
    mu_status s = rank == 0 ? mu_ddp_check(r.d) : mu_ddp_backward(r.d, r.t, loss_of(r.t, r.m, 0, rank));
    CHECK(s == MU_ERR_COMM, "%d", (int)s);
    CHECK(strstr(mu_context_message(r.c), "mu_ddp_check") != NULL &&
              strstr(mu_context_message(r.c), "reduction 1") != NULL,
          "%s", mu_context_message(r.c));
    rig_close(&r);
}

/* A rank that returns early. */
static void leave(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    rig r = rig_open(g, NULL);
    good_step(&r, "before");
    if (rank != 1) {
        mu_status s = mu_ddp_backward(r.d, r.t, loss_of(r.t, r.m, 1, rank));
        CHECK(s == MU_ERR_PEER, "%d", (int)s);
        CHECK(strstr(mu_context_message(r.c), "rank 1") != NULL, "%s", mu_context_message(r.c));
        CHECK(mu_parameter_grad(mu_module_get_parameter(r.m, "a")) == NULL, "gradients were not given back");
    }
    rig_close(&r);
}

static void contradictions_are_errors_on_all_ranks(void **state)
{
    (void)state;
    const char *named[] = {"G", "D", "reduction 1 (ddp `G`)", "reduction 1 (ddp `D`)"};
    const char *unnamed[] = {NULL, NULL, "reduction 1 (ddp `Toy`)", "reduction 1 (ddp `Toy 2`)"};
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, swap_models, named, NULL, false), 0);
        assert_int_equal(run_threads(size, swap_models, unnamed, NULL, false), 0);
        assert_int_equal(run_threads(size, other_form, NULL, NULL, false), 0);
        assert_int_equal(run_threads(size, check_instead, NULL, NULL, false), 0);
        assert_int_equal(run_threads(size, leave, NULL, NULL, false), 0);
    }
    assert_int_equal(run_processes(2, swap_models, named, NULL, false), 0);
    assert_int_equal(run_processes(2, leave, NULL, NULL, false), 0);
}

/* -- replicas ----------------------------------------------------------------------------------------------------- */
static void differ(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    rig r = rig_open(g, &(mu_ddp_options){.check_every = 2});
    good_step(&r, "before");
    CHECK(mu_ddp_backward(r.d, r.t, NULL) == MU_OK, "the second, checked: %s", mu_context_message(r.c));
    CHECK(mu_ddp_backward(r.d, r.t, NULL) == MU_OK, "the third: %s", mu_context_message(r.c));
    if (rank == size - 1) {
        *(float *)(void *)mu_parameter_tensor(mu_module_get_parameter(r.m, "c"))->data = 5; /* behind everybody's back */
    }
    mu_status s = mu_ddp_backward(r.d, r.t, loss_of(r.t, r.m, 1, rank)); /* the fourth: checks */
    CHECK(s == MU_ERR_COMM, "%d %s", (int)s, mu_context_message(r.c));
    char who[64];
    snprintf(who, sizeof(who), "`c` is not the same on rank %d", size - 1);
    CHECK(strstr(mu_context_message(r.c), who) != NULL, "%s", mu_context_message(r.c));
    mu_context_clear(r.c);
    CHECK(mu_ddp_check(r.d) == MU_ERR_COMM, "by call");
    rig_close(&r);
}

/* What is in the buffers after (un)successful reductions. */
static void buffers(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    bool rank0 = *(bool *)arg;
    mu_module *m = toy(c);
    mu_tensor *stat = mu_module_buffer(m, "stat", MU_DIMS(4), MU_F32, 0);
    mu_tensor *seen = mu_module_buffer(m, "seen", MU_SCALAR, MU_I64, 0);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.buffers_from_rank0 = rank0});
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(d != NULL && seen != NULL, "%s", mu_context_message(c));
    for (int step = 0; step < 3; step++) {
        mu_tape_reset(t);
        const float alike = 11184814.0F; /* three times it, in float, is not three times it */
        float x[4] = {(float)(rank + step), (float)(rank * rank), 1, alike};
        bool bad = step == 1 && rank == size - 1;
        x[2] = bad ? NAN : 1;
        CHECK(mu_tensor_write(stat, x, 4) == MU_OK, "write");
        *(int64_t *)seen->data = 10 * step + (rank0 ? 0 : rank); /* as a forward would count */
        mu_status s = bad ? mu_ddp_abandon(d, "bad batch") : mu_ddp_backward(d, t, loss_of(t, m, step, rank));
        CHECK(s == (step == 1 ? MU_SKIPPED : MU_OK), "%s", mu_context_message(c));
        double mean = 0, squares = 0;
        for (int r = 0; r < size; r++) {
            mean += (double)(r + step) / size;
            squares += (double)(r * r) / size;
        }
        CHECK(mu_tensor_read(stat, x, 4) == MU_OK, "read");
        CHECK(x[3] == alike, "step %d: equal values moved to %.9g", step, (double)x[3]);
        CHECK(fabs((double)x[0] - (rank0 ? step : mean)) < 1e-6 && fabs((double)x[1] - (rank0 ? 0 : squares)) < 1e-6,
              "step %d: %g %g", step, (double)x[0], (double)x[1]);
        CHECK(x[2] == 1, "what is not finite does not spread: %g", (double)x[2]);
        int64_t n = 0;
        CHECK(mu_tensor_read_i64(seen, &n, 1) == MU_OK && n == 10 * step + (rank0 ? 0 : size - 1), "counter: %d",
              (int)n);
        CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    }
}

static void replicas_are_equal_and_checked(void **state)
{
    (void)state;
    for (int size = 2; size <= 4; size++) {
        assert_int_equal(run_threads(size, differ, NULL, NULL, false), 0);
        for (int rank0 = 0; rank0 < 2; rank0++) {
            bool b = rank0;
            assert_int_equal(run_threads(size, buffers, &b, NULL, true), 0);
        }
    }
    bool b = false;
    assert_int_equal(run_processes(2, buffers, &b, NULL, true), 0);
}

/* -- two models, two reductions in a step ----------------------------------------------------------------------------
 */
static void gan(mu_group *g, int rank, int size, void *arg)
{
    bool freezes = *(bool *)arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *gen = toy(c), *dis = toy(c), *ogen = toy(oc), *odis = toy(oc);
    mu_ddp *dg = mu_ddp_wrap(gen, g, NULL), *dd = mu_ddp_wrap(dis, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    for (int step = 0; step < 3; step++) {
        /* Discriminator: sees the generator's output, detached. */
        mu_tape_reset(t);
        mu_tape_reset(ot);
        mu_tensor *sum = NULL;
        uint64_t key = (uint64_t)step * 100 + 1;
        for (int r = -1; r < size; r++) {
            mu_tape *tt = r < 0 ? t : ot;
            uint64_t k = key + (uint64_t)(r < 0 ? rank : r) * 7;
            mu_tensor *fake = mu_detach(tt, terms(tt, r < 0 ? gen : ogen, "a b", k));
            mu_tensor *loss = mu_mul(tt, fake, terms(tt, r < 0 ? dis : odis, "c d", k + 3));
            if (r < 0) {
                CHECK(mu_ddp_backward(dd, t, loss) == MU_OK, "%s", mu_context_message(c));
            } else {
                loss = mu_scale(ot, loss, 1.0F / (float)size);
                sum = sum == NULL ? loss : mu_add(ot, sum, loss);
            }
        }
        CHECK(mu_backward(ot, sum) == MU_OK, "oracle");
        check_oracle(dis, odis, 1e-5, "discriminator");
        toy_optimizer_step(dis, 0.1F);
        toy_optimizer_step(odis, 0.1F);
        /* Generator: through the discriminator, which collects a gradient nobody wants unless it is frozen. */
        if (freezes) {
            CHECK(mu_module_freeze(dis, "*", NULL) == MU_OK && mu_module_freeze(odis, "*", NULL) == MU_OK, "freeze");
        }
        mu_tape_reset(t);
        mu_tape_reset(ot);
        sum = NULL;
        for (int r = -1; r < size; r++) {
            mu_tape *tt = r < 0 ? t : ot;
            uint64_t k = key + 50 + (uint64_t)(r < 0 ? rank : r) * 7;
            mu_tensor *loss =
                mu_mul(tt, terms(tt, r < 0 ? gen : ogen, "a b head.w", k), terms(tt, r < 0 ? dis : odis, "c d", k + 3));
            if (r < 0) {
                CHECK(mu_ddp_backward(dg, t, loss) == MU_OK, "%s", mu_context_message(c));
            } else {
                loss = mu_scale(ot, loss, 1.0F / (float)size);
                sum = sum == NULL ? loss : mu_add(ot, sum, loss);
            }
        }
        CHECK(mu_backward(ot, sum) == MU_OK, "oracle");
        check_oracle(gen, ogen, 1e-5, "generator");
        toy_optimizer_step(gen, 0.1F);
        toy_optimizer_step(ogen, 0.1F);
        if (freezes) {
            CHECK(mu_module_unfreeze(dis, "*", NULL) == MU_OK && mu_module_unfreeze(odis, "*", NULL) == MU_OK,
                  "unfreeze");
        }
        CHECK(mu_module_zero_grad(dis) == MU_OK && mu_module_zero_grad(odis) == MU_OK, "zero");
        check_replicas(g, gen, "generator");
        check_replicas(g, dis, "discriminator");
    }
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

static void two_models(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        for (int freezes = 0; freezes < 2; freezes++) {
            bool b = freezes;
            assert_int_equal(run_threads(size, gan, &b, NULL, true), 0);
        }
    }
}

/* -- values that are not finite ---------------------------------------------------------------------------------------
 */
static void not_finite(mu_group *g, int rank, int size, void *arg)
{
    mu_nonfinite_policy policy = *(mu_nonfinite_policy *)arg;
    rig r = rig_open(g, &(mu_ddp_options){.nonfinite = policy, .bucket_bytes = 1, .first_bucket_bytes = 1});
    good_step(&r, "before");
    for (int overflows = 0; overflows < 2; overflows++) {
        mu_tape_reset(r.t);
        mu_tensor *d = mu_parameter_tensor(mu_module_get_parameter(r.m, "d"));
        bool mine = overflows || rank == size - 1;
        /* 0, with a gradient of 3e38 or of infinity. */
        mu_tensor *zero = mu_scale(r.t, mu_sub(r.t, d, mu_detach(r.t, d)), mine ? (overflows ? 1 : 1e38F) : 1);
        mu_tensor *loss = mu_add(r.t, loss_of(r.t, r.m, 3, rank), mu_sum(r.t, mu_scale(r.t, zero, mine ? 3e38F : 1)));
        mu_status s = mu_ddp_backward(r.d, r.t, loss);
        CHECK(s == (policy == MU_NONFINITE_ERROR ? MU_ERR_STATE : MU_SKIPPED), "%d %s", (int)s,
              mu_context_message(r.c));
        char who[64];
        snprintf(who, sizeof(who), "`d` is not finite on rank %d in reduction 2", size - 1);
        CHECK(policy != MU_NONFINITE_ERROR ||
                  strstr(mu_context_message(r.c), overflows ? "`d` is not finite only after" : who) != NULL,
              "%s", mu_context_message(r.c));
        mu_context_clear(r.c);
        CHECK(mu_parameter_grad(mu_module_get_parameter(r.m, "a")) == NULL, "a gradient was left");
        good_step(&r, "after");
    }
    rig_close(&r);
}

static void gradients_that_are_not_finite(void **state)
{
    (void)state;
    for (int p = MU_NONFINITE_SKIP; p <= MU_NONFINITE_ERROR; p++) {
        mu_nonfinite_policy policy = (mu_nonfinite_policy)p;
        assert_int_equal(run_threads(2, not_finite, &policy, NULL, true), 0);
        assert_int_equal(run_threads(3, not_finite, &policy, NULL, true), 0);
    }
}

/* -- cost -----------------------------------------------------------------------------------------------------------
 */
static void steady(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    rig r = rig_open(g, arg);
    uint64_t allocations = 0;
    for (int step = 0; step < 12; step++) {
        mu_tape_reset(r.t);
        mu_tensor *loss = step % 2 == 0 || rank > 0 ? terms(r.t, r.m, "a b c d", (uint64_t)step) : NULL;
        uint64_t before = r.c->allocations;
        CHECK(mu_ddp_backward(r.d, r.t, loss) == MU_OK, "%s", mu_context_message(r.c));
        allocations += step >= 6 ? r.c->allocations - before : 0;
        CHECK(mu_module_zero_grad(r.m) == MU_OK, "zero");
        CHECK(mu_ddp_get_report(r.d).absent_count >= 2, "absent ones are there, and cost nothing");
    }
    CHECK(allocations == 0, "%d allocations in steady steps", (int)allocations);
    rig_close(&r);
}

/* Buckets go out while backward runs, in the order in which gradients became ready in the first reduction. */
static void overlap(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    rig r = rig_open(g, &(mu_ddp_options){.bucket_bytes = 1, .first_bucket_bytes = 1});
    for (int step = 0; step < 3; step++) {
        mu_tape_reset(r.t);
        /* Backward meets `a` last: in reverse registration order it is last too, `b` is not. */
        mu_tensor *first = fuse(r.t, terms(r.t, r.m, "head.v b head.w", 7 + (uint64_t)rank), false);
        bool blows = step == 2;
        first = fuse(r.t, first, blows && rank == 0);
        mu_status s = mu_ddp_backward(r.d, r.t, mu_add(r.t, first, terms(r.t, r.m, "a c d", 9 + (uint64_t)rank)));
        CHECK(s == (!blows ? MU_OK : rank == 0 ? MU_ERR_DEVICE : MU_SKIPPED), "step %d: %d", step, (int)s);
        mu_context_clear(r.c);
        mu_ddp_report report = mu_ddp_get_report(r.d);
        /* When the fuse blows, the three terms behind it have been reduced, thanks to the new order. */
        int want = blows && rank == 0 ? 3 : 5; /* the last one waits for the end */
        CHECK(report.buckets == 6 && report.buckets_early == want, "step %d: %d of %d buckets early", step,
              report.buckets_early, report.buckets);
        CHECK(mu_module_zero_grad(r.m) == MU_OK, "zero");
    }
    rig_close(&r);
}

static void buckets_go_out_during_backward(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, overlap, NULL, NULL, true), 0);
    }
}

/* -- trees ------------------------------------------------------------------------------------------------------------
 */
static mu_module *tied(mu_context *c)
{
    mu_module *m = toy(c);
    return mu_module_share(m, "e", mu_module_get_parameter(m, "head.w")) == MU_OK ? m : NULL;
}

/* Tied weights; and two wrappers of one module, used in turn. */
static void tied_and_wrapped_twice(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = tied(c), *om = tied(oc);
    mu_ddp *d[2] = {mu_ddp_wrap(m, g, NULL), mu_ddp_wrap(m, g, NULL)};
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    CHECK(m != NULL && d[0] != NULL && d[1] != NULL, "%s", mu_context_message(c));
    for (int step = 0; step < 6; step++) {
        mu_tape_reset(t);
        mu_tape_reset(ot);
        mu_tensor *sum = NULL;
        for (int r = 0; r < size; r++) {
            mu_tensor *x = terms(ot, om, r == 0 ? "e head.w a" : "e b", (uint64_t)(step * 50 + r));
            x = mu_scale(ot, x, 1.0F / (float)size);
            sum = sum == NULL ? x : mu_add(ot, sum, x);
        }
        CHECK(mu_backward(ot, sum) == MU_OK, "oracle");
        mu_tensor *loss = terms(t, m, rank == 0 ? "e head.w a" : "e b", (uint64_t)(step * 50 + rank));
        CHECK(mu_ddp_backward(d[step % 2], t, loss) == MU_OK, "%s", mu_context_message(c));
        check_oracle(m, om, 1e-5, "tied");
        check_replicas(g, m, "tied");
        toy_optimizer_step(m, 0.1F);
        toy_optimizer_step(om, 0.1F);
    }
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

/* Only a part of the tree is wrapped: the rest is each rank's own. */
static void part_of_a_tree(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(mu_module_get(m, "head"), g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(d != NULL, "%s", mu_context_message(c));
    for (int step = 0; step < 3; step++) {
        mu_tape_reset(t);
        mu_tensor *a = mu_parameter_tensor(mu_module_get_parameter(m, "a")),
                  *v = mu_parameter_tensor(mu_module_get_parameter(m, "head.v"));
        float scale = (float)(rank + 1), got[5];
        mu_tensor *loss = mu_scale(t, mu_add(t, mu_sum(t, a), mu_sum(t, v)), scale);
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
        CHECK(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "a")), got, 5) == MU_OK && got[3] == scale,
              "a stays local: %g", (double)got[3]);
        CHECK(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "head.v")), got, 2) == MU_OK &&
                  fabs((double)got[0] - (size + 1) / 2.0) < 1e-6,
              "head.v is the mean: %g", (double)got[0]);
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
}

static void trees(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, tied_and_wrapped_twice, NULL, NULL, true), 0);
        assert_int_equal(run_threads(size, part_of_a_tree, NULL, NULL, true), 0);
    }
}

static void a_steady_step_allocates_nothing(void **state)
{
    (void)state;
    static const mu_ddp_options own_buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1};
    assert_int_equal(run_threads(1, steady, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, steady, NULL, NULL, true), 0);
    assert_int_equal(run_threads(2, steady, (void *)&own_buckets, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(skipped_steps_leave_no_trace),
        cmocka_unit_test(out_of_memory_in_a_step),
        cmocka_unit_test(gradients_add_up),
        cmocka_unit_test(contradictions_are_errors_on_all_ranks),
        cmocka_unit_test(replicas_are_equal_and_checked),
        cmocka_unit_test(two_models),
        cmocka_unit_test(gradients_that_are_not_finite),
        cmocka_unit_test(buckets_go_out_during_backward),
        cmocka_unit_test(trees),
        cmocka_unit_test(a_steady_step_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
