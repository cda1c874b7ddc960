/* Ranks that stop at a known place: what the others say about them. And ranks that differ in what they have done. */
#include "stuck.h"

#include <muster/hooks.h>

/* -- ranks that stop ----------------------------------------------------------------------------------------------- */
typedef struct stop_case {
    const char *name;
    stop_place place;
    int layer;
    bool own_buckets; /* for each parameter; else one for all */
    const char *says[4];
} stop_case;

static const stop_case stop_cases[] = {
    {"forward",
     IN_FORWARD,
     2,
     true,
     {"after reduction 1 (ddp `Net`), forward, layer2, for 0.",
      "it had delivered 0 of 6 buckets of reduction 2; 6 of 6 parameters are missing: "
      "layer5.w, layer4.w, layer3.w, layer2.w, layer1.w and 1 more"}},
    {"backward",
     IN_BACKWARD,
     2,
     true,
     {"last seen: reduction 2 (ddp `Net`), backward, layer2",
      "it had delivered 3 of 6 buckets of reduction 2; 3 of 6 parameters are missing: layer2.w, layer1.w, layer0.w"}},
    {"backward, one bucket",
     IN_BACKWARD,
     2,
     false,
     {"last seen: reduction 2 (ddp `Net`), backward, layer2",
      "it had delivered 0 of 1 buckets of reduction 2; 6 of 6 parameters are missing: layer5.w, layer4.w, layer3.w, "
      "layer2.w, layer1.w "
      "and 1 more"}},
    {"between steps", BEFORE_FORWARD, 0, true, {"last seen: after reduction 1 (ddp `Net`)", "6 of 6 parameters"}},
    {"the last parameter",
     IN_BACKWARD,
     0,
     true,
     {"it had delivered 5 of 6 buckets of reduction 2; 1 of 6 parameters are missing: layer0.w"}},
};

static void stay_away(void *arg)
{
    sleep_for(*(double *)arg);
}

/* The victim stays away for longer than the others wait: they say where it was, and it learns that it was given up. */
static void stop_there(mu_group *g, int rank, int size, void *arg)
{
    const stop_case *k = arg;
    mu_context *c = g->context;
    double seconds = 1.0;
    int victim = size - 1;
    walker w = {0};
    if (rank == victim) {
        w = (walker){.place = k->place, .stop_step = 2, .stop_layer = k->layer, .stop = stay_away, .arg = &seconds};
    }
    mu_module *net = net_new(c, &w);
    size_t bytes = k->own_buckets ? 1 : 1 << 20;
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = bytes, .first_bucket_bytes = bytes});
    mu_optimizer *o = mu_sgd(net, 0.01F, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_status s = MU_OK;
    double begin = 0;
    for (int step = 0; step < 4 && s == MU_OK; step++) {
        begin = mui_now();
        s = mu_ddp_backward(d, t, net_loss(t, net, &w, rank));
        s = s == MU_OK ? mu_optimizer_step(o) : s;
    }
    const char *text = mu_context_message(c);
    CHECK(s == MU_ERR_TIMEOUT && w.step == 2, "%s: %d in step %d: %s", k->name, (int)s, w.step, text);
    CHECK(mui_now() - begin < 5, "%s: took %g s", k->name, mui_now() - begin);
    char who[32];
    snprintf(who, sizeof(who), "missing rank %d (", victim);
    CHECK(strstr(text, who) != NULL, "%s: `%s`", k->name, text);
    for (int i = 0; i < 4 && k->says[i] != NULL; i++) {
        CHECK(strstr(text, k->says[i]) != NULL, "%s: `%s` is not in `%s`", k->name, k->says[i], text);
    }
}

static void a_rank_that_stops_is_found_where_it_is(void **state)
{
    (void)state;
    const mu_group_options o = {.timeout_seconds = 0.4, .arena_bytes = 1 << 20};
    for (size_t i = 0; i < sizeof(stop_cases) / sizeof(*stop_cases); i++) {
        assert_int_equal(run_threads(2 + (int)i % 2, stop_there, (void *)&stop_cases[i], &o, false), 0);
    }
    assert_int_equal(run_processes(3, stop_there, (void *)&stop_cases[1], &o, false), 0);
}

/* A loader that gets nothing, and a hook that does not return. */
typedef struct slow_source {
    bool slow;
} slow_source;

static mu_status slow_get(void *user, int64_t i, float *x, int64_t *label)
{
    const slow_source *s = user;
    *x = (float)i;
    *label = 0;
    if (s->slow && i == 1) {
        sleep_for(1.0);
    }
    return MU_OK;
}

static mu_status slow_hook(void *user, mu_bucket *bucket)
{
    if (*(bool *)user && bucket->reduction == 2 && bucket->index == 1) {
        sleep_for(1.0);
    }
    return mu_bucket_all_reduce(bucket);
}

static void wait_for_data_or_a_hook(mu_group *g, int rank, int size, void *arg)
{
    bool hook = *(bool *)arg, slow = rank == 1;
    mu_context *c = g->context;
    walker w = {0};
    slow_source source = {slow && !hook};
    (void)size;
    mu_module *net = net_new(c, &w);
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = 1, .first_bucket_bytes = 1});
    bool slow_in_hook = slow && hook;
    CHECK(!hook || mu_ddp_set_hook(d, "slow", slow_hook, &slow_in_hook) == MU_OK, "%s", mu_context_message(c));
    mu_dataset *data = mu_dataset_new(
        c, &(mu_dataset_source){.count = 4, .dims = MU_DIMS(1), .classes = 1, .get = slow_get, .user = &source});
    mu_loader *l = mu_loader_open(data, &(mu_loader_options){.batch = 1});
    mu_tape *t = mu_tape_new(c, NULL);
    mu_batch b;
    mu_status s = mu_loader_rewind(l, 0, 0);
    while (s == MU_OK && mu_loader_next(l, t, &b)) {
        s = mu_ddp_backward(d, t, net_loss(t, net, &w, rank));
        s = s == MU_OK ? mu_module_zero_grad(net) : s;
    }
    const char *text = mu_context_message(c);
    CHECK(s == MU_ERR_TIMEOUT && strstr(text, "missing rank 1 (") != NULL, "%d %s", (int)s, text);
    CHECK(strstr(text, hook ? "last seen: reduction 2 (ddp `Net`), hook `slow`, in it at bucket 2 of 6, for 0."
                            : ", waiting for its loader, for 0.") != NULL,
          "%s", text);
    /* Its worker may still be in slow_get, with `source` of this frame. */
    mu_loader_close(l);
}

static void loaders_and_hooks_are_places_too(void **state)
{
    (void)state;
    const mu_group_options o = {.timeout_seconds = 0.4, .arena_bytes = 1 << 20};
    for (int i = 0; i < 2; i++) {
        bool hook = i == 1;
        assert_int_equal(run_threads(2, wait_for_data_or_a_hook, &hook, &o, false), 0);
    }
}

/* -- ranks that come late ------------------------------------------------------------------------------------------ */
typedef struct heard {
    int count;
    char text[4][2048];
} heard;

static void listen(void *user, mu_log_level level, const char *message)
{
    heard *h = user;
    if (level == MU_LOG_WARN && h->count < 4) {
        snprintf(h->text[h->count++], sizeof(h->text[0]), "%s", message);
    }
}

static void come_late(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    double seconds = 0.8;
    walker w = {0};
    heard h = {0};
    if (rank == 1) {
        w = (walker){.place = IN_BACKWARD, .stop_step = 2, .stop_layer = 3, .stop = stay_away, .arg = &seconds};
    }
    c->log_level = MU_LOG_WARN;
    c->log = listen;
    c->log_user = &h;
    mu_module *net = net_new(c, &w);
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = 1, .first_bucket_bytes = 1});
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 4; step++) {
        CHECK(mu_module_zero_grad(net) == MU_OK, "zero");
        CHECK(mu_ddp_backward(d, t, net_loss(t, net, &w, rank)) == MU_OK, "%s", mu_context_message(c));
    }
    check_replicas(g, net, "late");
    if (rank != 1) {
        double late = 0;
        CHECK(h.count == 2, "%d warnings: `%s` `%s` `%s`", h.count, h.text[0], h.text[1], h.text[2]);
        CHECK(
            strncmp(h.text[0], "waiting for ", 12) == 0 && strstr(h.text[0], "missing rank 1 (") != NULL &&
                strstr(h.text[0], "reduction 2 (ddp `Net`), backward, layer3") != NULL &&
                strstr(h.text[0],
                       "; it has delivered 2 of 6 buckets of reduction 2; 4 of 6 parameters are missing: layer3.w, ") !=
                    NULL,
            "`%s`", h.text[0]);
        CHECK(sscanf(h.text[1], "rank 1 came after %lf s", &late) == 1 && late > 0.5 && late < 5, "`%s`", h.text[1]);
    }
    CHECK(size == 2 || h.count <= 2, "%d", h.count);
    c->log = NULL;
    c->log_level = MU_LOG_QUIET;
}

static void a_late_rank_is_told_twice(void **state)
{
    (void)state;
    const mu_group_options o = {.timeout_seconds = 30, .warn_seconds = 0.2, .arena_bytes = 1 << 20};
    assert_int_equal(run_threads(2, come_late, NULL, &o, true), 0);
    assert_int_equal(run_processes(3, come_late, NULL, &o, true), 0);
}

/* -- ranks that end ------------------------------------------------------------------------------------------------ */
typedef enum ending { RETURNS, FAILS, EXITS, ABORTS, FAULTS, ENDINGS } ending;
typedef struct end_case {
    ending ending;
    int victim;
} end_case;

static void end_here(mu_group *g, int rank, int size, void *arg)
{
    const end_case *k = arg;
    mu_context *c = g->context;
    walker w = {0};
    mu_module *net = net_new(c, &w);
    mu_ddp *d = mu_ddp_wrap(net, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_status s = MU_OK;
    (void)size;
    for (int step = 0; step < 5 && s == MU_OK; step++) {
        if (rank == k->victim && step == 2) {
            switch (k->ending) {
            case RETURNS: return;
            case FAILS: mui_fail(c, MU_ERR_IO, "the disk is gone"); return;
            case EXITS: exit(0);
            case ABORTS: signal(SIGABRT, SIG_DFL); abort();
            default: signal(SIGSEGV, SIG_DFL); raise(SIGSEGV);
            }
        }
        s = mu_ddp_backward(d, t, net_loss(t, net, &w, rank));
        s = s == MU_OK ? mu_module_zero_grad(net) : s;
    }
    const char *text = mu_context_message(c);
    char want[256];
    CHECK(s == MU_ERR_PEER && w.step == 3, "%d in step %d: %s", (int)s, w.step, text);
    if (k->ending == FAILS) {
        snprintf(want, sizeof(want), "rank %d failed: the disk is gone", k->victim);
        CHECK(strcmp(text, want) == 0, "`%s` is not `%s`", text, want);
        return;
    }
    snprintf(want, sizeof(want), "rank %d (", k->victim);
    CHECK(strncmp(text, want, strlen(want)) == 0, "`%s` does not begin with `%s`", text, want);
    CHECK(strstr(text, "last seen: after reduction 2 (ddp `Net`)") != NULL, "`%s`", text);
    if (k->ending == RETURNS) {
        int waiting = -1;
        const char *closed = strstr(text, "closed the group while rank ");
        CHECK(closed != NULL && sscanf(closed, "closed the group while rank %d", &waiting) == 1 &&
                  waiting != k->victim &&
                  strstr(text, " waits at reduction 3 (ddp `Net`); a rank that has no batch left takes part in a "
                               "reduction with loss NULL") != NULL,
              "`%s`", text);
    } else {
        CHECK(strstr(text, ") died: its process ended without closing the group, while rank ") != NULL, "`%s`", text);
        CHECK(strstr(text, " waits at reduction 3 (ddp `Net`); it had delivered 0 of 1 buckets of reduction 3; 6 of 6 "
                           "parameters are missing: layer5.w, ") != NULL,
              "`%s`", text);
    }
}

static void a_rank_that_ends_is_named(void **state)
{
    (void)state;
    const mu_group_options o = {.timeout_seconds = 30, .arena_bytes = 1 << 20};
    for (int size = 2; size <= 3; size++) {
        for (int e = 0; e < ENDINGS; e++) {
            end_case k = {(ending)e, e % size};
            if (k.ending <= FAILS) {
                assert_int_equal(run_threads(size, end_here, &k, &o, false), 0);
            }
            int bad = run_processes(size, end_here, &k, &o, false);
            assert_int_equal(bad, k.ending > EXITS); /* the victim itself */
        }
    }
}

/* -- ranks that have done something else --------------------------------------------------------------------------- */
typedef enum odd_one { LEAVES_OUT_ONE, REDUCES_ALONE, STEPS_TWICE, STEPS_A_PART, FORGETS_A_STEP, ODD_ONES } odd_one;

typedef struct trainer {
    mu_module *net;
    mu_ddp *d;
    mu_optimizer *whole, *part;
    mu_tape *t;
    walker w;
} trainer;

/* A step of one rank that does it differently from the others. */
static mu_status odd_step(trainer *r, int rank, odd_one odd)
{
    mu_status s = MU_OK;
    switch (odd) {
    case REDUCES_ALONE: s = mu_backward(r->t, net_loss(r->t, r->net, &r->w, rank)); break;
    case LEAVES_OUT_ONE: return MU_OK;
    default: s = mu_ddp_backward(r->d, r->t, net_loss(r->t, r->net, &r->w, rank));
    }
    mu_optimizer_keep_grad(r->whole, odd == STEPS_TWICE);
    if (s == MU_OK && odd == STEPS_TWICE) {
        s = mu_optimizer_step(r->whole);
    }
    if (s == MU_OK && odd == STEPS_A_PART) {
        s = mu_optimizer_step(r->part);
    }
    mu_optimizer_keep_grad(r->whole, false);
    if (odd == FORGETS_A_STEP) {
        return s == MU_OK ? mu_module_zero_grad(r->net) : s;
    }
    return s == MU_OK ? mu_optimizer_step(r->whole) : s;
}

static void step_oddly(mu_group *g, int rank, int size, void *arg)
{
    odd_one odd = *(odd_one *)arg;
    mu_context *c = g->context;
    trainer r = {.t = mu_tape_new(c, NULL)};
    r.net = net_new(c, &r.w);
    r.d = mu_ddp_wrap(r.net, g, NULL);
    r.whole = mu_adam(r.net, 0.01F, NULL);
    r.part = mu_sgd(mu_module_get(r.net, "layer2"), 0.01F, NULL);
    mu_optimizer_keep_grad(r.part, true);
    mu_status s = MU_OK;
    for (int step = 0; step < 6 && s == MU_OK; step++) {
        if (rank == size - 1 && step == 3) {
            s = odd_step(&r, rank, odd);
            continue;
        }
        s = mu_ddp_backward(r.d, r.t, net_loss(r.t, r.net, &r.w, rank));
        s = s == MU_OK ? mu_optimizer_step(r.whole) : s;
    }
    static const struct {
        int reduction;
        const char *says;
    } wants[ODD_ONES] = {[REDUCES_ALONE] = {4, "after 3 and 4 optimiser steps"},
                         [STEPS_TWICE] = {5, "after 4 and 5 optimiser steps"},
                         [STEPS_A_PART] = {5, "after 4 and 5 optimiser steps"},
                         [FORGETS_A_STEP] = {5, "after 4 and 3 optimiser steps"}};
    const char *text = mu_context_message(c);
    if (odd == LEAVES_OUT_ONE) { /* the same as if its data had been other data: it is missed at the end */
        CHECK(rank == size - 1
                  ? s == MU_OK
                  : s == MU_ERR_PEER && strstr(text, "last seen: after reduction 5 (ddp `Net`)) closed") != NULL,
              "%d %s", (int)s, text);
        return;
    }
    char want[200];
    snprintf(want, sizeof(want), "rank 0 is at reduction %d (ddp `Net`), rank %d at reduction %d (ddp `Net`), but %s",
             wants[odd].reduction, size - 1, wants[odd].reduction, wants[odd].says);
    CHECK(s == MU_ERR_COMM && strstr(text, want) != NULL, "%d: `%s` is not in `%s`", (int)s, want, text);
    CHECK(size == 2 || strstr(text, "; like rank 0: 1") != NULL, "%s", text);
}

/* Ranks that share the optimiser's work and tell each other the values have equal replicas, if different counts: they
 * say so with a check. A checkpoint that all load makes them equal as well. */
static void step_in_turns(mu_group *g, int rank, int size, void *arg)
{
    bool checks = *(bool *)arg;
    mu_context *c = g->context;
    walker w = {0};
    mu_module *net = net_new(c, &w);
    mu_ddp *d = mu_ddp_wrap(net, g, NULL);
    mu_optimizer *o[LAYERS];
    mu_tape *t = mu_tape_new(c, NULL);
    mu_status s = MU_OK;
    for (int i = 0; i < LAYERS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "layer%d", i);
        o[i] = mu_sgd(mu_module_get(net, name), 0.01F, NULL);
    }
    for (int step = 0; step < 3 && s == MU_OK; step++) {
        s = mu_ddp_backward(d, t, net_loss(t, net, &w, rank));
        for (int i = 0; i < LAYERS && s == MU_OK; i++) {
            char name[32];
            float x[RIG_MOST];
            snprintf(name, sizeof(name), "layer%d.w", i);
            mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(net, name));
            s = i % size == rank || i == 0 ? mu_optimizer_step(o[i]) : MU_OK;
            s = s == MU_OK ? mu_tensor_read(v, x, 7 + i) : s;
            s = s == MU_OK ? mu_broadcast(g, x, (size_t)(7 + i) * sizeof(float), i % size) : s;
            s = s == MU_OK ? mu_tensor_write(v, x, 7 + i) : s;
        }
        s = s == MU_OK ? mu_module_zero_grad(net) : s;
        s = s == MU_OK && checks ? mu_ddp_check(d) : s;
    }
    if (checks) {
        CHECK(s == MU_OK, "%d %s", (int)s, mu_context_message(c));
    } else {
        CHECK(s == MU_ERR_COMM && strstr(mu_context_message(c), ", but after optimiser steps that updated ") != NULL,
              "%d %s", (int)s, mu_context_message(c));
    }
}

static void load_in_between(mu_group *g, int rank, int size, void *arg)
{
    const char *path = arg;
    mu_context *c = g->context;
    walker w = {0};
    mu_module *net = net_new(c, &w);
    mu_ddp *d = mu_ddp_wrap(net, g, NULL);
    mu_optimizer *o = mu_sgd(net, 0.01F, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_status s = rank == 0 ? mu_save(net, path, NULL) : MU_OK;
    s = s == MU_OK ? mu_barrier(g) : s;
    s = s == MU_OK ? mu_ddp_backward(d, t, net_loss(t, net, &w, rank)) : s;
    mu_optimizer_keep_grad(o, true);
    for (int k = 0; k <= rank && s == MU_OK; k++) { /* different steps, all thrown away by loading */
        s = mu_optimizer_step(o);
    }
    mu_optimizer_keep_grad(o, false);
    s = s == MU_OK ? mu_load(net, path, NULL, NULL) : s;
    for (int step = 0; step < 2 && s == MU_OK; step++) {
        s = mu_module_zero_grad(net);
        s = s == MU_OK ? mu_ddp_backward(d, t, net_loss(t, net, &w, rank)) : s;
        s = s == MU_OK ? mu_optimizer_step(o) : s;
    }
    CHECK(s == MU_OK && mu_ddp_check(d) == MU_OK, "%d %s", (int)s, mu_context_message(c));
    (void)size;
}

static void equal_replicas_are_counted_anew(void **state)
{
    (void)state;
    char path[64];
    snprintf(path, sizeof(path), "/tmp/muster-missing-%d.pth", (int)getpid());
    for (int size = 2; size <= 3; size++) {
        for (int checks = 0; checks < 2; checks++) {
            bool b = checks;
            assert_int_equal(run_threads(size, step_in_turns, &b, NULL, checks), 0);
        }
        assert_int_equal(run_threads(size, load_in_between, path, NULL, true), 0);
    }
    unlink(path);
}

static void optimiser_steps_are_part_of_the_identity(void **state)
{
    (void)state;
    const mu_group_options o = {.timeout_seconds = 30, .arena_bytes = 1 << 20};
    for (int odd = 0; odd < ODD_ONES; odd++) {
        for (int size = 2; size <= 3; size++) {
            odd_one which = (odd_one)odd;
            assert_int_equal(run_threads(size, step_oddly, &which, &o, false), 0);
            assert_int_equal(run_processes(size, step_oddly, &which, &o, false), 0);
        }
    }
}

/* -- ranks that are somewhere else --------------------------------------------------------------------------------- */
typedef enum elsewhere { ONE_BEHIND, AT_A_BARRIER, AT_ITS_OWN_SUM, AT_A_WRAP, NO_WRAP, ELSEWHERE } elsewhere;

static void be_elsewhere(mu_group *g, int rank, int size, void *arg)
{
    elsewhere where = *(elsewhere *)arg;
    mu_context *c = g->context;
    bool here = rank == size - 1;
    walker wg = {0}, wd = {0};
    mu_module *gen = net_new(c, &wg), *dis = net_new(c, &wd);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_ddp *a = mu_ddp_wrap(gen, g, &(mu_ddp_options){.name = "G"});
    mu_status s = a != NULL ? mu_ddp_backward(a, t, net_loss(t, gen, &wg, rank)) : mu_context_status(c);
    double begin = mui_now();
    if (here && where == NO_WRAP) {
        s = mu_ddp_backward(a, t, net_loss(t, gen, &wg, rank));
    } else if (where == NO_WRAP || !here || where == ONE_BEHIND) {
        mu_ddp *b = mu_ddp_wrap(dis, g, &(mu_ddp_options){.name = "D"});
        s = b != NULL ? MU_OK : mu_context_status(c);
        for (int step = 0; step < 2 && s == MU_OK; step++) { /* D, then G; the odd one leaves out a D */
            s = here && step == 0 ? MU_OK : mu_ddp_backward(b, t, net_loss(t, dis, &wd, rank));
            s = s == MU_OK ? mu_ddp_backward(a, t, net_loss(t, gen, &wg, rank)) : s;
        }
    } else if (where == AT_A_BARRIER) {
        s = mu_barrier(g);
    } else if (where == AT_ITS_OWN_SUM) {
        float x = 1;
        s = mu_all_reduce(g, &x, 1, MU_F32, MU_SUM);
    } else {
        s = mu_ddp_wrap(dis, g, &(mu_ddp_options){.name = "E"}) != NULL ? MU_OK : mu_context_status(c);
    }
    static const char *const says[ELSEWHERE][2] = {
        {"rank 0 is at reduction 1 (ddp `D`), rank ", " at reduction 2 (ddp `G`)"},
        {"rank 0 is at mu_ddp_wrap (ddp `D`), rank ", " at a barrier"},
        {"rank 0 is at mu_ddp_wrap (ddp `D`), rank ", " at an all-reduce (sum) of 1 float32"},
        {"rank 0 is at mu_ddp_wrap (ddp `D`), rank ", " at mu_ddp_wrap (ddp `E`)"},
        {"rank 0 is at mu_ddp_wrap (ddp `D`), rank ", " at reduction 2 (ddp `G`)"}};
    char want[160];
    snprintf(want, sizeof(want), "%s%d%s", says[where][0], size - 1, says[where][1]);
    CHECK(s == MU_ERR_COMM && strstr(mu_context_message(c), want) != NULL, "%d: `%s` is not in `%s`", (int)s, want,
          mu_context_message(c));
    CHECK(mui_now() - begin < 5, "took %g s", mui_now() - begin);
}

static void ranks_at_different_calls_say_both(void **state)
{
    (void)state;
    for (int i = 0; i < ELSEWHERE; i++) {
        for (int size = 2; size <= 3; size++) {
            elsewhere where = (elsewhere)i;
            assert_int_equal(run_threads(size, be_elsewhere, &where, NULL, false), 0);
            assert_int_equal(run_processes(size, be_elsewhere, &where, NULL, false), 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_stops_is_found_where_it_is),
        cmocka_unit_test(loaders_and_hooks_are_places_too),
        cmocka_unit_test(a_late_rank_is_told_twice),
        cmocka_unit_test(a_rank_that_ends_is_named),
        cmocka_unit_test(optimiser_steps_are_part_of_the_identity),
        cmocka_unit_test(equal_replicas_are_counted_anew),
        cmocka_unit_test(ranks_at_different_calls_say_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
