/* Rows about the course of a training: steps left out, failed, deferred, uneven; what optimisers make of them. */
#include "patterns.h"

static mu_tensor *main_loss(side *s, place *p)
{
    return mu_module_get(s->m[0], "trunk") != NULL ? heads_loss(s, "one two three", place_key(p)) : all_terms(s, p);
}
static mu_tensor *in_turn(side *s, place *p)
{
    return terms(s->t, s->m[0], (p->step + p->pass + p->rank) % 2 == 0 ? "a b c" : "b c d head.w", place_key(p));
}

/* -- accumulation ------------------------------------------------------------------------------------------------- */
enum { BY_DEFERRAL, BY_BACKWARD };
static void deferred(world *w)
{
    loss_fn loss = w->net ? w->row->net : w->row->loss;
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        (w->row->arg == BY_BACKWARD ? accumulate : defer)(w, 0, loss, 0);
        (w->row->arg == BY_BACKWARD ? accumulate : defer)(w, 0, loss, 1);
        reduce(w, 0, loss, 2);
        check(w, 0);
        update(w, 0);
    }
    check_values(w, 0);
}

/* "d" is used in a deferred micro-step only, head.v there and on one rank only, "a" nowhere. */
static mu_tensor *early_only(side *s, place *p)
{
    return terms(s->t, s->m[0], p->pass == 2 ? "b c" : p->rank == p->size - 1 ? "b d head.v" : "b c d", place_key(p));
}

/* Rank 1 takes the first half of a step for a micro-step, the others for all of it. */
static void one_defers(world *w)
{
    begin_step(w, 0);
    if (w->rank == 1) {
        OK(w, mu_ddp_backward_with(w->d[0], w->me.t, main_loss(&w->me, &w->mine),
                                   &(mu_ddp_backward_options){.defer = true}));
    }
    expect_error(w, rank_reduce(w, 0, main_loss, 0), MU_ERR_COMM, "rank 0 is at", "rank 1", "after 1 deferred", NULL);
}

/* -- steps left out ----------------------------------------------------------------------------------------------- */
/* Rank 1 cannot go on in step 1, in a way of each row: the others are told, and the next steps are right. */
enum { ABANDONS, FAILS_FORWARD, OUT_OF_MEMORY, FAILS_BACKWARD };
static mu_status one_fails(world *w, int how, bool mine)
{
    mu_context *c = w->me.c;
    if (how == FAILS_BACKWARD) {
        mu_tensor *x = main_loss(&w->me, &w->mine);
        return mu_ddp_backward(w->d[0], w->me.t, fuse(w->me.t, x, mine));
    }
    if (!mine) {
        return rank_reduce(w, 0, main_loss, 0);
    }
    if (how == ABANDONS) {
        return mu_ddp_abandon(w->d[0], "the batch is broken");
    }
    if (how == OUT_OF_MEMORY) {
        mu_tape *t = mu_tape_new(c, NULL); /* has to get all its memory */
        c->fail_after = 1;
        mu_tensor *x = terms(t, w->me.m[0], "a b c", 1);
        c->fail_after = -1;
        CHECK(x == NULL, "%s: there was memory", w->row->name);
        mu_status s = mu_ddp_backward(w->d[0], t, x);
        mu_tape_free(t);
        return s;
    }
    mu_tensor *x = mu_add(w->me.t, mu_tensor_zeros(w->me.t, MU_DIMS(2)), mu_tensor_zeros(w->me.t, MU_DIMS(3)));
    return mu_ddp_backward(w->d[0], w->me.t, x);
}

static void one_rank_fails(world *w)
{
    static const mu_status own[] = {MU_SKIPPED, MU_ERR_SHAPE, MU_ERR_NOMEM, MU_ERR_DEVICE};
    for (int step = 0; step < STEPS; step++) {
        if (step != 1) {
            good_step(w, step, main_loss);
            continue;
        }
        begin_step(w, step);
        bool mine = w->rank == 1;
        mu_status want = mine ? own[w->row->arg] : MU_SKIPPED, s = one_fails(w, w->row->arg, mine);
        CHECK(s == want, "%s: %d, expected %d: %s", w->row->name, (int)s, (int)want, mu_context_message(w->me.c));
        mu_context_clear(w->me.c);
        check(w, 0); /* nobody has a gradient */
    }
    check_values(w, 0);
}

/* Rank 1 leaves out all of step 1 and goes on with its next batch. Reductions pair by number: it is a batch ahead from
 * then on, which is as good a mean as any, on replicas that stay equal; and it is missed at the end. */
static mu_tensor *a_batch_ahead(side *s, place *p)
{
    place q = *p;
    q.step += p->rank == 1 && p->step >= 1;
    return main_loss(s, &q);
}
static void one_rank_is_ahead(world *w)
{
    for (int step = 0; step < STEPS - 1; step++) {
        good_step(w, step, a_batch_ahead);
    }
    check_values(w, 0);
    begin_step(w, STEPS - 1);
    if (w->rank != 1) { /* which has no batch left, and leaves */
        mu_status s = rank_reduce(w, 0, main_loss, 0);
        CHECK(s == MU_ERR_PEER && strstr(mu_context_message(w->me.c), "rank 1") != NULL, "%d: %s", (int)s,
              mu_context_message(w->me.c));
        mu_context_clear(w->me.c);
    }
}

/* Rank 1 reduces nothing in step 1, but its optimiser steps on what it has. */
static void one_rank_steps_alone(world *w)
{
    good_step(w, 0, main_loss);
    if (w->rank == 1) {
        begin_step(w, 1);
        OK(w, mu_backward(w->me.t, main_loss(&w->me, &w->mine)));
        OK(w, mu_optimizer_step(w->me.o[0]));
    }
    begin_step(w, 1 + (w->rank == 1));
    expect_error(w, rank_reduce(w, 0, main_loss, 0), MU_ERR_COMM, "rank 0 is at reduction 2", "rank 1 at reduction 2",
                 NULL);
}

static void all_leave_out(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        if (step != 1) {
            good_step(w, step, main_loss);
        }
    }
    check_values(w, 0);
}

static void extra_forward(world *w)
{
    mu_tape *t = mu_tape_new(w->me.c, &(mu_tape_options){.no_grad = true}), *own = w->me.t;
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        place p = w->mine;
        p.pass = 5;
        for (int i = 0; i <= w->rank; i++) {
            if (w->row->arg == 0) {
                CHECK(main_loss(&w->me, &p) != NULL, "forward");
            } else {
                w->me.t = t;
                CHECK(main_loss(&w->me, &p) != NULL, "no-grad forward");
                w->me.t = own;
                mu_tape_reset(t);
            }
        }
        reduce(w, 0, main_loss, 0);
        check(w, 0);
        update(w, 0);
    }
    check_values(w, 0);
}

/* An evaluation between steps, on rank 0 only. */
static void evaluation_on_one_rank(world *w)
{
    mu_tape *t = mu_tape_new(w->me.c, &(mu_tape_options){.no_grad = true}), *own = w->me.t;
    for (int step = 0; step < STEPS; step++) {
        good_step(w, step, residual_loss);
        if (w->rank == 0) {
            mu_module_train(w->me.m[0], false);
            w->me.t = t;
            for (int i = 0; i < 3; i++) {
                place p = {.step = 50 + i, .size = w->size};
                float x = 0;
                CHECK(mu_tensor_read(residual_loss(&w->me, &p), &x, 1) == MU_OK && isfinite(x), "evaluation");
                mu_tape_reset(t);
            }
            w->me.t = own;
            mu_module_train(w->me.m[0], true);
        }
    }
    check_values(w, 0);
}

static void backward_fails_on_all(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        if (step != 1) {
            good_step(w, step, main_loss);
            continue;
        }
        begin_step(w, step);
        mu_tensor *x = fuse(w->me.t, main_loss(&w->me, &w->mine), true);
        mu_status s = mu_ddp_backward(w->d[0], w->me.t, x);
        CHECK(s == MU_ERR_DEVICE, "%d: %s", (int)s, mu_context_message(w->me.c));
        mu_context_clear(w->me.c);
        check(w, 0);
    }
    check_values(w, 0);
}

/* -- values that are not finite ----------------------------------------------------------------------------------- */
static mu_tensor *nan_on_last(side *s, place *p)
{
    mu_tensor *c = mu_parameter_tensor(mu_module_get_parameter(s->m[0], "c"));
    mu_tensor *bad = mu_scale(s->t, mu_sum(s->t, c), p->rank == p->size - 1 ? NAN : 1.0F);
    return mu_add(s->t, all_terms(s, p), bad);
}

static void nan_is_kept(world *w)
{
    good_step(w, 0, all_terms);
    begin_step(w, 1);
    OK(w, rank_reduce(w, 0, nan_on_last, 0));
    float c = 0, a[5];
    mu_module *m = w->me.m[0];
    CHECK(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "c")), &c, 1) == MU_OK && isnan(c), "%g",
          (double)c);
    CHECK(mu_tensor_read(mu_parameter_grad(mu_module_get_parameter(m, "a")), a, 5) == MU_OK && isfinite(a[0]), "%g",
          (double)a[0]);
    OK(w, mu_module_zero_grad(m));
    for (int step = 2; step < STEPS; step++) {
        good_step(w, step, all_terms);
    }
    check_values(w, 0);
}

static void nan_is_skipped(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        if (step != 1) {
            good_step(w, step, all_terms);
            continue;
        }
        begin_step(w, step);
        CHECK(rank_reduce(w, 0, nan_on_last, 0) == MU_SKIPPED, "%s", mu_context_message(w->me.c));
        check(w, 0);
    }
    check_values(w, 0);
}

static void nan_is_an_error(world *w)
{
    good_step(w, 0, all_terms);
    begin_step(w, 1);
    char who[64];
    snprintf(who, sizeof(who), "`c` is not finite on rank %d", w->size - 1);
    expect_error(w, rank_reduce(w, 0, nan_on_last, 0), MU_ERR_STATE, who, "reduction 2", NULL);
    good_step(w, 2, all_terms); /* and all are in step */
    check_values(w, 0);
}

/* -- uneven data -------------------------------------------------------------------------------------------------- */
/* Rank r has r + 1 batches. */
static mu_tensor *uneven(side *s, place *p)
{
    return p->step > p->rank ? NULL : main_loss(s, p);
}
static mu_tensor *none_on_one(side *s, place *p)
{
    return p->rank == p->size - 1 && p->size > 1 ? NULL : main_loss(s, p);
}
static mu_tensor *none_on_all(side *s, place *p)
{
    return p->step == 1 ? NULL : main_loss(s, p);
}

static int64_t ragged(const place *p)
{
    return 1 + (p->step * 7 + p->rank * 5) % 9;
}

/* -- optimisers --------------------------------------------------------------------------------------------------- */
/* head.v is used by nobody, d on rank 0 only. */
static mu_tensor *decay_loss(side *s, place *p)
{
    return terms(s->t, s->m[0], p->rank == 0 ? "a b c d head.w" : "a b c head.w", place_key(p));
}
static mu_tensor *decay_heads(side *s, place *p)
{
    return heads_loss(s, p->rank == 0 ? "one two" : "one", place_key(p));
}
static void weight_decay(world *w)
{
    const char *unused = w->net ? "three.weight" : "head.v", *elsewhere = w->net ? "two.weight" : "d";
    loss_fn loss = w->net ? decay_heads : decay_loss;
    float before[64], after[64], was[64];
    mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(w->me.m[0], unused));
    mu_tensor *d = mu_parameter_tensor(mu_module_get_parameter(w->me.m[0], elsewhere));
    int64_t n = mu_tensor_elements(v);
    OK(w, mu_tensor_read(v, before, n));
    OK(w, mu_tensor_read(d, was, mu_tensor_elements(d)));
    for (int step = 0; step < STEPS; step++) {
        good_step(w, step, loss); /* the oracle decays what the mean of the losses reaches */
        OK(w, mu_tensor_read(v, after, n));
        CHECK(memcmp(before, after, (size_t)n * sizeof(float)) == 0, "%s: decayed", unused);
    }
    OK(w, mu_tensor_read(d, after, mu_tensor_elements(d)));
    CHECK(memcmp(was, after, (size_t)mu_tensor_elements(d) * sizeof(float)) != 0, "%s: did not change", elsewhere);
    check(w, 0);
    check_values(w, 0);
}

static void build_mlp_adam(side *s)
{
    build_mlp(s);
    s->o[0] = mu_adam(s->m[0], 0.01F, NULL);
}
static void adam(world *w)
{
    for (int step = 0; step < 20; step++) {
        good_step(w, step, mlp_loss);
    }
    check_replicas(w->g, w->me.m[0], w->row->name);
    check_values(w, 0);
}

/* -- who is without gradient -------------------------------------------------------------------------------------- */
typedef struct listing {
    char text[512];
} listing;
static bool list_one(void *user, const char *name, mu_parameter *p)
{
    listing *l = user;
    size_t n = strlen(l->text);
    if (mu_parameter_grad(p) == NULL) {
        snprintf(l->text + n, sizeof(l->text) - n, "%s ", name);
    }
    return true;
}
static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The loop that everybody writes after backward, and the same from the report, which also says why. */
static void listed(world *w)
{
    for (int step = 0; step < 2; step++) {
        begin_step(w, step);
        reduce(w, 0, decay_heads, 0);
        check(w, 0);
        listing loop = {""}, report = {""};
        OK(w, mu_module_each_parameter(w->me.m[0], list_one, &loop));
        mu_ddp_report r = mu_ddp_get_report(w->d[0]);
        const char *names[32];
        size_t n = 0;
        bool elsewhere = false;
        for (int64_t i = 0; i < r.absent_count && n < 32; i++) {
            const mu_absent *a = &r.absent[i];
            if (a->ranks_present == 0) {
                CHECK(a->here == MU_NOT_READ, "%s: %d", a->name, (int)a->here);
                names[n++] = a->name;
            }
            elsewhere = elsewhere || (strcmp(a->name, "two.bias") == 0 && a->ranks_present == 1);
        }
        qsort(names, n, sizeof(names[0]), by_name);
        for (size_t i = 0; i < n; i++) {
            size_t k = strlen(report.text);
            snprintf(report.text + k, sizeof(report.text) - k, "%s ", names[i]);
        }
        CHECK(strcmp(loop.text, "three.weight ") == 0 && strcmp(report.text, loop.text) == 0, "loop: %s report: %s",
              loop.text, report.text);
        CHECK(elsewhere == (w->size > 1), "two.bias");
        update(w, 0);
    }
    check_values(w, 0);
}

static void absent_is_an_error(world *w)
{
    begin_step(w, 0);
    expect_error(w, rank_reduce(w, 0, decay_heads, 0), MU_ERR_STATE, "1 of 7 parameters did not receive a gradient",
                 "three.weight", "Expected to have finished reduction in the prior iteration", NULL);
    OK(w, mu_module_zero_grad(w->me.m[0]));
    good_step(w, 1, main_loss);
    check_values(w, 0);
}

static const row list[] = {
    {.line = 21,
     .name = "accumulation over three backwards",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .loss = in_turn,
     .net = main_loss,
     .passes = 3},
    {.line = 21,
     .name = "accumulation, two of three deferred (no_sync)",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .run = deferred,
     .loss = in_turn,
     .net = main_loss},
    {.line = 22,
     .name = "forward in no_sync, backward outside",
     .plain = "SILENT: not synchronised",
     .none = "deferral is of the backward call, not of the forward"},
    {.line = 23,
     .name = "forward outside, backward in no_sync",
     .plain = "synchronised after all",
     .none = "deferral is of the backward call, not of the forward"},
    {.line = 24,
     .name = "used in a deferred micro-step only",
     .plain = "right",
     .unused = "SILENT wrong",
     .run = deferred,
     .loss = early_only},
    {.name = "accumulation, two of three by mu_backward",
     .plain = "right",
     .run = deferred,
     .arg = BY_BACKWARD,
     .loss = in_turn,
     .net = main_loss},
    {.line = 25,
     .name = "deferred (no_sync) on one rank only",
     .plain = "SILENT wrong, later hang",
     .error = "after 1 deferred",
     .run = one_defers,
     .least_ranks = 2,
     .loss = main_loss,
     .net = main_loss},
    {.line = 28,
     .name = "one rank leaves out a batch and goes on",
     .plain = "SILENT off by one, then hang",
     .unused = "SILENT off by one",
     .note = "it is a batch ahead; the others are told at the end",
     .run = one_rank_is_ahead,
     .least_ranks = 2,
     .loss = main_loss,
     .net = main_loss},
    {.line = 28,
     .name = "one rank leaves out a reduction, its optimiser steps",
     .plain = "SILENT off by one, then hang",
     .unused = "SILENT off by one",
     .error = "after 1 and 2 optimiser steps",
     .run = one_rank_steps_alone,
     .loss = main_loss,
     .net = main_loss},
    {.line = 28,
     .name = "one rank abandons a step",
     .plain = "SILENT off by one, then hang",
     .unused = "SILENT off by one",
     .note = "the step is skipped on all ranks",
     .run = one_rank_fails,
     .arg = ABANDONS,
     .least_ranks = 2,
     .loss = main_loss,
     .net = main_loss},
    {.line = 28,
     .name = "one rank's forward fails, and is caught",
     .plain = "SILENT off by one, then hang",
     .unused = "SILENT off by one",
     .note = "error there, the step is skipped on all ranks",
     .run = one_rank_fails,
     .arg = FAILS_FORWARD,
     .least_ranks = 2,
     .loss = main_loss,
     .net = main_loss},
    {.line = 28,
     .name = "one rank runs out of memory, and goes on",
     .plain = "SILENT off by one, then hang",
     .unused = "SILENT off by one",
     .note = "error there, the step is skipped on all ranks",
     .run = one_rank_fails,
     .arg = OUT_OF_MEMORY,
     .least_ranks = 2,
     .loss = main_loss},
    {.line = 29,
     .name = "all leave out the same backward",
     .plain = "right",
     .unused = "right",
     .run = all_leave_out,
     .loss = main_loss,
     .net = main_loss},
    {.line = 29,
     .name = "extra forwards without backward, as many as the rank",
     .plain = "right",
     .unused = "right",
     .run = extra_forward,
     .arg = 0,
     .loss = main_loss,
     .net = main_loss},
    {.line = 29,
     .name = "no-grad forwards in between",
     .plain = "right",
     .unused = "right",
     .run = extra_forward,
     .arg = 1,
     .loss = main_loss,
     .net = main_loss},
    {.line = 30,
     .name = "error in backward on all ranks, caught",
     .plain = "error for ever after",
     .note = "the error where it is, then all go on",
     .run = backward_fails_on_all,
     .loss = main_loss,
     .net = main_loss},
    {.line = 31,
     .name = "NaN on one rank, kept (default)",
     .plain = "NaN everywhere, no message",
     .note = "NaN everywhere, as in one process",
     .run = nan_is_kept,
     .loss = all_terms,
     .least_ranks = 2},
    {.line = 31,
     .name = "NaN on one rank, policy skip",
     .plain = "not offered",
     .note = "the step is skipped on all ranks",
     .run = nan_is_skipped,
     .loss = all_terms,
     .options = {.nonfinite = MU_NONFINITE_SKIP}},
    {.line = 31,
     .name = "NaN on one rank, policy error",
     .plain = "not offered",
     .error = "is not finite on rank",
     .note = "then all go on",
     .run = nan_is_an_error,
     .loss = all_terms,
     .options = {.nonfinite = MU_NONFINITE_ERROR}},
    {.line = 45, .name = "uneven numbers of batches", .plain = "hang at the end", .loss = uneven, .net = uneven},
    {.line = 52,
     .name = "weight decay: unused on some ranks decays alike, on all ranks not",
     .plain = "right, unless zeroed to zeros",
     .run = weight_decay,
     .loss = decay_loss,
     .net = decay_heads,
     .decay = 0.1F},
    {.line = 54,
     .name = "20 steps of Adam with different data",
     .plain = "right, bit for bit",
     .run = adam,
     .build = build_mlp_adam,
     .loss = mlp_loss,
     .tolerance = 1e-3},
    {.name = "error in backward on one rank",
     .plain = "SILENT off by one, or hang",
     .note = "error there, the step is skipped on all ranks",
     .run = one_rank_fails,
     .arg = FAILS_BACKWARD,
     .least_ranks = 2,
     .loss = main_loss,
     .net = main_loss},
    {.name = "a rank without any batch in the epoch", .plain = "others hang", .loss = none_on_one, .net = none_on_one},
    {.name = "ragged batches, weighted, two of three by mu_backward",
     .plain = "not offered",
     .run = deferred,
     .arg = BY_BACKWARD,
     .loss = in_turn,
     .net = main_loss,
     .samples = ragged,
     .tolerance = 3e-5}, /* c is one number, a sum of larger ones that cancel */
    {.name = "no rank has a batch in a step",
     .plain = "right (nothing happens)",
     .loss = none_on_all,
     .net = none_on_all},
    {.name = "evaluation on one rank only in between",
     .plain = "mispaired collectives, abort",
     .run = evaluation_on_one_rank,
     .build = build_residual,
     .loss = residual_loss,
     .tolerance = 1e-4},
    {.name = "the loop that lists parameters without gradient, and the report",
     .plain = "SILENT: none is listed",
     .unused = "right",
     .run = listed,
     .net = decay_heads},
    {.name = "unused on all ranks, policy error",
     .plain = "error a step late",
     .error = "did not receive a gradient on any rank",
     .note = "then all go on",
     .run = absent_is_an_error,
     .net = decay_heads,
     .options = {.absent = MU_ABSENT_ERROR}},
};
const rows step_rows = {list, sizeof(list) / sizeof(list[0])};
