/* Optimisers that share their state over ranks against ones that do not, bit for bit, over random models and random
 * courses of training; what their state takes; checkpoints; what is refused. Under mpirun: the same over MPI. */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "comm/mpi_ranks.h"
#include "rig.h"

#include "optim/optimizer.h"
#include <muster/checkpoint.h>
#include <muster/hooks.h>
#include <muster/layers.h>
#include <muster/optim.h>
#include <sys/stat.h>

enum { PLAIN, SHARED, MODELS };
enum { SGD, MOMENTUM, NESTEROV, ADAM, ADAMW, KINDS };
enum { PARAMS = 7 };

/* Sizes from a single number to several blocks of the norm's, so that slices end anywhere. */
static mu_module *random_model(mu_context *c, uint64_t seed)
{
    mu_module *m = mu_module_new(c, "Random", NULL);
    for (uint64_t i = 0; i < PARAMS; i++) {
        char name[8];
        snprintf(name, sizeof(name), "p%d", (int)i);
        uint64_t draw = mix(seed * 100 + i);
        int64_t n = 1 + (int64_t)(mix(draw) % (draw % 3 == 0 ? 20 : draw % 3 == 1 ? 700 : 6000));
        mu_module_parameter(m, name, MU_DIMS(n), (mu_init){MU_INIT_NORMAL, 1.0F});
    }
    return m;
}

static mu_optimizer *make(mu_module *m, int kind, mu_group *shard)
{
    switch (kind) {
    case SGD: return mu_sgd(m, 0.1F, &(mu_sgd_options){.weight_decay = 0.01F, .shard = shard});
    case MOMENTUM: return mu_sgd(m, 0.1F, &(mu_sgd_options){.momentum = 0.9F, .dampening = 0.1F, .shard = shard});
    case NESTEROV:
        return mu_sgd(m, 0.1F, &(mu_sgd_options){.momentum = 0.8F, .nesterov = true, .weight_decay = 0.1F, .shard = shard});
    case ADAM: return mu_adam(m, 0.05F, &(mu_adam_options){.weight_decay = 0.1F, .shard = shard});
    default: return mu_adamw(m, 0.05F, &(mu_adam_options){.shard = shard});
    }
}

/* Of the parameters whose bits are set. */
static mu_tensor *loss_of(mu_tape *t, mu_module *m, uint64_t which, uint64_t key)
{
    mu_tensor *sum = NULL;
    for (int i = 0; i < PARAMS; i++) {
        char name[8];
        snprintf(name, sizeof(name), "p%d", i);
        mu_parameter *p = mu_module_get_parameter(m, name);
        if (p == NULL || (which >> i & 1) == 0) {
            continue;
        }
        mu_tensor *v = mu_parameter_tensor(p);
        int64_t n = mu_tensor_elements(v);
        float *x = malloc((size_t)n * sizeof(float));
        for (int64_t k = 0; k < n; k++) {
            /* Some gradients are 0, others -0. */
            x[k] = k % 17 == 3 ? 0 : (float)(mix(key * 7919 + (uint64_t)i * 31 + (uint64_t)k) % 2001) / 1000.0F - 1.0F;
        }
        mu_tensor *y = mu_sum(t, mu_mul(t, mu_mul(t, v, v), mu_tensor_from(t, mu_tensor_dims(v), x)));
        free(x);
        sum = sum == NULL ? y : mu_add(t, sum, y);
    }
    return sum;
}

/* Two replicas of the same model on every rank: one with an optimiser of the usual kind, and one that shares. */
typedef struct pair {
    mu_group *g;
    mu_tape *t;
    mu_module *m[MODELS];
    mu_ddp *d[MODELS];
    mu_optimizer *o[MODELS];
} pair;

static pair pair_new(mu_group *g, uint64_t seed, int kind, const mu_ddp_options *options)
{
    mu_context *c = g->context;
    pair p = {.g = g, .t = mu_tape_new(c, NULL)};
    for (int k = 0; k < MODELS; k++) {
        p.m[k] = random_model(c, seed);
        if (seed % 2 == 0) { /* before it is wrapped, or after */
            p.o[k] = make(p.m[k], kind, k == SHARED ? g : NULL);
        }
        mu_ddp_options o = options != NULL ? *options : (mu_ddp_options){0};
        o.bucket_bytes = o.bucket_bytes > 0 ? o.bucket_bytes : seed % 3 == 0 ? 4000 : 30000;
        o.first_bucket_bytes = 300;
        o.absent = MU_ABSENT_QUIET;
        p.d[k] = mu_ddp_wrap(p.m[k], g, &o);
        if (seed % 2 != 0) {
            p.o[k] = make(p.m[k], kind, k == SHARED ? g : NULL);
        }
    }
    CHECK(p.o[SHARED] != NULL && p.d[SHARED] != NULL, "pair: %s", mu_context_message(c));
    return p;
}

static void pair_free(pair *p)
{
    for (int k = 0; k < MODELS; k++) {
        mu_optimizer_free(p->o[k]);
        mu_ddp_free(p->d[k]);
    }
    mu_tape_free(p->t);
}

static void check_values(pair *p, const char *what)
{
    snapshot a = snap(p->m[PLAIN]), b = snap(p->m[SHARED]);
    CHECK(a.count == b.count && memcmp(a.values, b.values, (size_t)a.count * sizeof(float)) == 0,
          "rank %d of %d, %s: the values differ", mu_group_rank(p->g), mu_group_size(p->g), what);
    snap_free(&a);
    snap_free(&b);
}

/* Collective. */
static void check_states(pair *p, const char *what)
{
    int64_t n = mui_optimizer_count(p->o[PLAIN]);
    CHECK(n == mui_optimizer_count(p->o[SHARED]), "%s", what);
    CHECK(mui_optimizer_settle(p->o[SHARED], "a test", MU_OK) == MU_OK, "settle");
    for (int64_t i = 0; i < n; i++) {
        mui_optimizer_entry a = mui_optimizer_get(p->o[PLAIN], i), b = mui_optimizer_get(p->o[SHARED], i);
        CHECK(a.has_state == b.has_state && a.step == b.step, "%s: progress of %s", what, a.parameter->name);
        int64_t e = mu_tensor_elements(mu_parameter_tensor(a.parameter));
        float *x = malloc((size_t)e * 2 * sizeof(float));
        for (int k = 0; k < mui_optimizer_states(p->o[PLAIN]); k++) {
            CHECK(mui_optimizer_read_state(p->o[PLAIN], i, k, x, e) == MU_OK &&
                      mui_optimizer_read_state(p->o[SHARED], i, k, x + e, e) == MU_OK, "read");
            CHECK(memcmp(x, x + e, (size_t)e * sizeof(float)) == 0, "%s: state %d of %s", what, k, a.parameter->name);
        }
        free(x);
    }
}

/* What a step of the course is; the same on all ranks but for what their losses reach. */
typedef struct event {
    uint64_t draw;
    bool weighted, clip, twice, deferred, abandoned, cleared, freeze, replace;
} event;

static event event_of(uint64_t seed, uint64_t step)
{
    uint64_t d = mix(seed * 1000 + step);
    return (event){d, d % 5 == 0, d % 3 == 0, d % 7 == 1, d % 7 == 2, d % 11 == 3, d % 13 == 4, d % 4 == 1, d % 17 == 2};
}

static void change(pair *p, const event *e, uint64_t step)
{
    for (int k = 0; k < MODELS; k++) {
        if (e->freeze) {
            bool frozen = e->draw >> 20 & 1;
            CHECK((frozen ? mu_module_freeze(p->m[k], "p2", NULL) : mu_module_unfreeze(p->m[k], "p2", NULL)) == MU_OK, "freeze");
        }
        if (e->replace) {
            char name[24];
            snprintf(name, sizeof(name), "extra%d", (int)step);
            mu_module *extra = mu_module_new(p->g->context, "Extra", NULL);
            mu_module_parameter(extra, "w", MU_DIMS(1 + (int64_t)(e->draw >> 30 & 127)), (mu_init){MU_INIT_NORMAL, 1.0F});
            CHECK(mu_module_add(p->m[k], name, extra) == MU_OK, "add");
        }
    }
}

/* One reduction of one of the two. */
static mu_status reduce(pair *p, int k, const event *e, uint64_t key, bool defer)
{
    int rank = mu_group_rank(p->g);
    uint64_t mine = mix(key * 64 + (uint64_t)rank), which = (mine | mix(mine)) & (e->draw >> 8 | 1);
    mu_tensor *loss = mine % 6 == 0 ? NULL : loss_of(p->t, p->m[k], which, mine);
    return mu_ddp_backward_with(p->d[k], p->t, loss, &(mu_ddp_backward_options){
                                    .weighted = e->weighted, .samples = 1 + (int64_t)(mine % 9), .defer = defer});
}

static void train_step(pair *p, uint64_t seed, uint64_t step)
{
    event e = event_of(seed, step);
    float norms[MODELS] = {0};
    char what[64];
    snprintf(what, sizeof(what), "course %d, step %d", (int)seed, (int)step);
    change(p, &e, step);
    for (int k = 0; k < MODELS; k++) {
        uint64_t key = seed * 100000 + step * 10;
        mu_tape_reset(p->t);
        if (e.deferred) {
            CHECK(reduce(p, k, &e, key + 1, true) == MU_OK, "%s: deferred", what);
        }
        mu_status s = e.abandoned && mu_group_rank(p->g) == 0 ? mu_ddp_abandon(p->d[k], "a test") : reduce(p, k, &e, key, false);
        CHECK(s == (e.abandoned ? MU_SKIPPED : MU_OK), "%s: %d %s", what, (int)s, mu_context_message(p->g->context));
        if (e.twice) {
            CHECK(reduce(p, k, &e, key + 2, false) == MU_OK, "%s: once more", what);
        }
        if (e.abandoned || e.cleared) {
            CHECK(mu_module_zero_grad(p->m[k]) == MU_OK, "%s: clear", what);
        }
        if (e.clip) {
            CHECK(mu_clip_grad_norm(p->m[k], 0.5F, &norms[k]) == MU_OK, "%s: clip", what);
        }
        mu_optimizer_set_lr(p->o[k], 0.1F / (float)(step + 1));
        CHECK(mu_optimizer_step(p->o[k]) == MU_OK, "%s: %s", what, mu_context_message(p->g->context));
    }
    CHECK(memcmp(&norms[PLAIN], &norms[SHARED], sizeof(float)) == 0, "%s: norms %.9g and %.9g", what, (double)norms[PLAIN],
          (double)norms[SHARED]);
    check_values(p, what);
}

typedef struct course {
    uint64_t seed;
    int kind, steps;
} course;

static void body_course(mu_group *g, int rank, int size, void *arg)
{
    const course *c = arg;
    pair p = pair_new(g, c->seed, c->kind, NULL);
    (void)rank;
    if (c->seed % 3 == 1) {
        for (int k = 0; k < MODELS; k++) {
            CHECK(mu_optimizer_add_group(p.o[k], &(mu_param_group){.pattern = "p[13]", .lr_factor = 0.5F, .weight_decay = 0.2F}) ==
                      MU_OK, "group");
        }
    }
    for (int step = 0; step < c->steps; step++) {
        train_step(&p, c->seed, (uint64_t)step);
        if (step % 4 == 3) {
            check_states(&p, "state");
        }
    }
    CHECK(mu_ddp_check(p.d[SHARED]) == MU_OK, "%s", mu_context_message(g->context));
    for (int k = 0; k < MODELS; k++) {
        mu_ddp_report r = mu_ddp_get_report(p.d[k]);
        int ranks = k == SHARED ? size : 1;
        CHECK(mu_optimizer_ranks(p.o[k]) == ranks && r.optimizer_ranks == ranks, "ranks");
        CHECK(r.optimizer_bytes == (int64_t)mu_optimizer_state_bytes(p.o[k]), "%d bytes of state", (int)r.optimizer_bytes);
    }
    pair_free(&p);
}

static void same_bits(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        for (uint64_t seed = 1; seed <= KINDS; seed++) {
            course c = {seed + 10 * (uint64_t)n, (int)((seed + (uint64_t)n) % KINDS), 9};
            assert_int_equal(run_threads(n, body_course, &c, NULL, true), 0);
        }
    }
}

static mu_counters counters(const mu_context *c)
{
    mu_counters n;
    mu_context_counters(c, &n);
    return n;
}

/* -- what it takes, and what it saves ----------------------------------------------------------------------------- */
static void body_memory(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    mu_context *c = g->context;
    mu_module *m[MODELS];
    int64_t bytes[MODELS];
    (void)arg;
    for (int k = 0; k < MODELS; k++) {
        m[k] = mu_sequential(c);
        CHECK(mu_module_add(m[k], "a", mu_linear(c, 300, 1000, NULL)) == MU_OK &&
                  mu_module_add(m[k], "b", mu_linear(c, 1000, 10, NULL)) == MU_OK, "model");
        CHECK(mu_ddp_wrap(m[k], g, NULL) != NULL, "wrap");
        int64_t before = (int64_t)counters(c).allocated_bytes;
        mu_optimizer *o = mu_adam(m[k], 0.1F, &(mu_adam_options){.shard = k == SHARED ? g : NULL});
        bytes[k] = (int64_t)counters(c).allocated_bytes - before;
        int64_t state = (int64_t)mu_optimizer_state_bytes(o), all = mu_module_parameter_elements(m[k]) * 2 * (int64_t)sizeof(float);
        CHECK(state >= all / (k == SHARED ? size : 1), "%d bytes of state of %d", (int)state, (int)all);
        CHECK(bytes[k] >= state && bytes[k] < state + 8192, "%d bytes taken for %d of state", (int)bytes[k], (int)state);
    }
    CHECK(bytes[SHARED] < bytes[PLAIN] / size + 8192, "%d bytes shared by %d, %d alone", (int)bytes[SHARED], size,
          (int)bytes[PLAIN]);
}

static void state_takes_a_share(void **state)
{
    (void)state;
    for (int n = 2; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_memory, NULL, NULL, true), 0);
    }
}

/* From the second reduction on, a rank has the mean in its own part only; gathering completes it. */
static void body_scatter(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    pair p = pair_new(g, 5, MOMENTUM, NULL);
    for (uint64_t step = 0; step < 3; step++) {
        for (int k = 0; k < MODELS; k++) {
            mu_tape_reset(p.t);
            mu_tensor *loss = loss_of(p.t, p.m[k], 127, step * 10 + (uint64_t)rank);
            CHECK(mu_ddp_backward(p.d[k], p.t, loss) == MU_OK, "backward");
        }
        mu_ddp_report r = mu_ddp_get_report(p.d[SHARED]);
        snapshot a = snap(p.m[PLAIN]), b = snap(p.m[SHARED]);
        bool whole = memcmp(a.grads, b.grads, (size_t)a.count * sizeof(float)) == 0;
        CHECK(r.scattered == (step > 0) && whole == !r.scattered, "step %d: scattered %d, whole %d", (int)step, r.scattered, whole);
        CHECK(!mu_ddp_get_report(p.d[PLAIN]).scattered, "the other one's");
        CHECK(r.optimizer_bytes == (int64_t)mu_optimizer_state_bytes(p.o[SHARED]) && r.optimizer_ranks == size, "report");
        snap_free(&b);
        CHECK(mu_ddp_gather_gradients(p.d[SHARED]) == MU_OK, "gather");
        b = snap(p.m[SHARED]);
        CHECK(memcmp(a.grads, b.grads, (size_t)a.count * sizeof(float)) == 0, "step %d: gathered", (int)step);
        snap_free(&a);
        snap_free(&b);
        for (int k = 0; k < MODELS; k++) {
            CHECK(mu_optimizer_step(p.o[k]) == MU_OK, "step");
        }
        check_values(&p, "scatter");
    }
    check_states(&p, "scatter");
    pair_free(&p);
}

static void gradients_are_scattered(void **state)
{
    (void)state;
    for (int n = 2; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_scatter, NULL, NULL, true), 0);
    }
}

/* Another wrapper of the same tree, a hook, gradients that are not finite: what is not scattered, or looked at, is right. */
static void body_odd(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    pair p = pair_new(g, 8, MOMENTUM, &(mu_ddp_options){.nonfinite = MU_NONFINITE_SKIP});
    for (uint64_t step = 0; step < 12; step++) {
        for (int k = 0; k < MODELS; k++) {
            bool skipped = step >= 2 && step < 9;
            mu_tape_reset(p.t);
            mu_tensor *loss = loss_of(p.t, p.m[k], 127, step * 10 + (uint64_t)rank);
            if (skipped) { /* each rank's part of one parameter is finite, their sum is not, and few ranks have it */
                loss = mu_add(p.t, loss, mu_scale(p.t, loss_of(p.t, p.m[k], (uint64_t)1 << (step - 2), step), 1.5e38F));
            }
            mu_status s = mu_ddp_backward(p.d[k], p.t, loss);
            CHECK(skipped ? s == MU_SKIPPED : s == MU_OK, "step %d: %d", (int)step, (int)s);
            CHECK(skipped || mu_optimizer_step(p.o[k]) == MU_OK, "step: %s", mu_context_message(g->context));
            CHECK(step != 10 || mu_ddp_set_bf16(p.d[k]) == MU_OK, "hook");
        }
        check_values(&p, "odd");
    }
    CHECK(!mu_ddp_get_report(p.d[SHARED]).scattered, "with a hook");
    pair_free(&p);
    p = pair_new(g, 9, ADAMW, NULL);
    mu_ddp *second[MODELS];
    for (int k = 0; k < MODELS; k++) {
        second[k] = mu_ddp_wrap(p.m[k], g, &(mu_ddp_options){.name = "second", .bucket_bytes = 2000});
        CHECK(second[k] != NULL, "wrap");
    }
    for (uint64_t step = 0; step < 6; step++) {
        for (int k = 0; k < MODELS; k++) {
            mu_tape_reset(p.t);
            CHECK(mu_ddp_backward(p.d[k], p.t, loss_of(p.t, p.m[k], 15, step * 10 + (uint64_t)rank)) == MU_OK, "first: %s",
                  mu_context_message(g->context));
            /* Where the first one is used alone, nothing is scattered either: the second may come next. */
            CHECK(step < 3 || mu_ddp_backward(second[k], p.t, loss_of(p.t, p.m[k], 120, step * 10 + 5 + (uint64_t)rank)) == MU_OK, "second: %s",
                  mu_context_message(g->context));
            CHECK(mu_optimizer_step(p.o[k]) == MU_OK, "step: %s", mu_context_message(g->context));
        }
        check_values(&p, "two wrappers");
    }
    pair_free(&p);
}

static void odd_ways(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, body_odd, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, body_odd, NULL, NULL, true), 0);
}

/* -- checkpoints -------------------------------------------------------------------------------------------------- */
static char folder[] = "/tmp/test-sharded-XXXXXX";

typedef struct files {
    char plain[64], shared[64];
    int kind;
} files;

static bool equal_files(const char *a, const char *b)
{
    FILE *f = fopen(a, "rb"), *h = fopen(b, "rb");
    bool equal = f != NULL && h != NULL;
    for (int x = 0, y = 0; equal && x != EOF;) {
        x = getc(f);
        y = getc(h);
        equal = x == y;
    }
    if (f != NULL) {
        fclose(f);
    }
    if (h != NULL) {
        fclose(h);
    }
    return equal;
}

/* The same file, bit for bit. */
static void body_save(mu_group *g, int rank, int size, void *arg)
{
    const files *f = arg;
    (void)size;
    pair p = pair_new(g, 20, f->kind, NULL);
    for (uint64_t step = 0; step < 5; step++) {
        train_step(&p, 20, step);
    }
    mu_training t[MODELS];
    for (int k = 0; k < MODELS; k++) {
        t[k] = (mu_training){.model = p.m[k], .optimizer = p.o[k], .epoch = 2, .step = 5, .seed = 3};
        if (k == SHARED || rank == 0) {
            CHECK(mu_optimizer_save(p.o[k], k == SHARED ? f->shared : f->plain, NULL) == MU_OK, "%s", mu_context_message(g->context));
        }
    }
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    CHECK(rank > 0 || equal_files(f->plain, f->shared), "files of optimisers differ");
    for (int k = 0; k < MODELS; k++) {
        if (k == SHARED || rank == 0) {
            CHECK(mu_training_save(&t[k], k == SHARED ? f->shared : f->plain) == MU_OK, "%s", mu_context_message(g->context));
        }
    }
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    CHECK(rank > 0 || equal_files(f->plain, f->shared), "training files differ");
    /* What cannot be written is an error on all ranks, and nobody waits. */
    CHECK(mu_training_save(&t[SHARED], "/nowhere/at/all") == MU_ERR_IO, "%s", mu_context_message(g->context));
    CHECK(strstr(mu_context_message(g->context), "/nowhere/at/all") != NULL, "%s", mu_context_message(g->context));
    mu_context_clear(g->context);
    pair_free(&p);
}

/* On any number of ranks, from what ranks without sharing wrote. */
static void body_load(mu_group *g, int rank, int size, void *arg)
{
    const files *f = arg;
    (void)rank;
    (void)size;
    pair p = pair_new(g, 20, f->kind, NULL);
    for (int k = 0; k < MODELS; k++) {
        mu_training t = {.model = p.m[k], .optimizer = p.o[k]};
        CHECK(mu_training_load(&t, f->plain, g) == MU_OK, "%s", mu_context_message(g->context));
        CHECK(t.step == 5 && mu_optimizer_steps(p.o[k]) == 5, "numbers");
    }
    check_states(&p, "loaded");
    for (uint64_t step = 0; step < 4; step++) {
        train_step(&p, 50, step);
    }
    for (int k = 0; k < MODELS; k++) { /* the optimiser alone, in the middle of a run */
        mu_optimizer_load_options o = {.group = g};
        CHECK(mu_optimizer_load(p.o[k], f->plain, &o) == MU_OK, "%s", mu_context_message(g->context));
    }
    check_states(&p, "loaded again");
    train_step(&p, 50, 5);
    pair_free(&p);
}

/* A load for which one rank lacks memory, anywhere on its way, leaves the state of all ranks as it was. */
static void body_load_fails(mu_group *g, int rank, int size, void *arg)
{
    const files *f = arg;
    (void)size;
    pair p = pair_new(g, 20, f->kind, NULL);
    train_step(&p, 20, 0);
    train_step(&p, 20, 1);
    mu_optimizer_load_options o = {.group = g};
    bool done = false;
    for (int i = 0; i < 400 && !done; i++) {
        g->context->fail_after = rank == 1 ? i : -1;
        mu_status s = mu_optimizer_load(p.o[SHARED], f->plain, &o);
        g->context->fail_after = -1;
        done = s == MU_OK;
        CHECK(done || s == MU_ERR_NOMEM, "allocation %d: %d %s", i, (int)s, mu_context_message(g->context));
        mu_context_clear(g->context);
        if (!done) {
            check_states(&p, "a load that failed");
        }
    }
    CHECK(done, "it never succeeds");
    pair_free(&p);
}

static void checkpoints(void **state)
{
    (void)state;
    char plain[64], shared[64];
    assert_non_null(mkdtemp(folder));
    snprintf(plain, sizeof(plain), "%s/plain", folder);
    snprintf(shared, sizeof(shared), "%s/shared", folder);
    assert_true(mkdir(plain, 0700) == 0 && mkdir(shared, 0700) == 0);
    static const int kinds[] = {MOMENTUM, ADAMW, SGD};
    for (int i = 0; i < 3; i++) {
        files f = {.kind = kinds[i]};
        /* A zip has its file's name in it. */
        snprintf(f.plain, sizeof(f.plain), "%s/plain/state.pt", folder);
        snprintf(f.shared, sizeof(f.shared), "%s/shared/state.pt", folder);
        assert_int_equal(run_threads(3, body_save, &f, NULL, true), 0);
        for (int n = 1; n <= 4; n++) {
            assert_int_equal(run_threads(n, body_load, &f, NULL, true), 0);
        }
        assert_int_equal(run_threads(2, body_load_fails, &f, NULL, true), 0);
        unlink(f.plain);
        unlink(f.shared);
    }
    assert_true(rmdir(plain) == 0 && rmdir(shared) == 0 && rmdir(folder) == 0);
}

/* -- what is refused ---------------------------------------------------------------------------------------------- */
static void expect(mu_group *g, mu_status got, mu_status want, const char *part)
{
    const char *message = mu_context_message(g->context);
    CHECK(got == want && strstr(message, part) != NULL, "rank %d: %d, \"%s\" and not \"%s\"", mu_group_rank(g), (int)got, message,
          part);
    mu_context_clear(g->context);
}

/* Errors of which all ranks come out together, and go on. */
static void body_refused(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    pair p = pair_new(g, 30, MOMENTUM, NULL);
    CHECK(mu_sgd(p.m[SHARED], 0.1F, NULL) == NULL, "a second one");
    expect(g, mu_context_status(g->context), MU_ERR_STATE, "shares its state over another group");
    CHECK(mu_sgd(p.m[PLAIN], 0.1F, &(mu_sgd_options){.shard = g}) == NULL, "a second one");
    expect(g, mu_context_status(g->context), MU_ERR_STATE, "does not share its state");
    /* One rank alone has gradients that nobody reduced. */
    CHECK(mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 3, (uint64_t)rank)) == MU_OK, "reduce");
    if (rank == 1) {
        CHECK(mu_backward(p.t, loss_of(p.t, p.m[SHARED], 1, 4)) == MU_OK, "backward");
    }
    expect(g, mu_optimizer_step(p.o[SHARED]), rank == 1 ? MU_ERR_STATE : MU_ERR_PEER, "`p0` has parts that no reduction");
    expect(g, mu_clip_grad_norm(p.m[SHARED], 1, NULL), rank == 1 ? MU_ERR_STATE : MU_ERR_PEER, "`p0` is not the whole outcome");
    expect(g, mu_ddp_gather_gradients(p.d[SHARED]), MU_ERR_STATE, "rank 1 has added to the gradient of `p0`");
    CHECK(mu_module_zero_grad(p.m[SHARED]) == MU_OK, "clear");
    /* Of a model that changed meanwhile, nobody knows any more who has which part. */
    for (int i = 0; i < 2; i++) {
        CHECK(mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 127, (uint64_t)rank)) == MU_OK, "reduce");
        CHECK(i > 0 || mu_optimizer_step(p.o[SHARED]) == MU_OK, "step");
    }
    mu_module *extra = mu_module_new(g->context, "Extra", NULL);
    mu_module_parameter(extra, "w", MU_DIMS(3), (mu_init){MU_INIT_NORMAL, 1.0F});
    CHECK(mu_module_add(p.m[SHARED], "extra", extra) == MU_OK, "add");
    expect(g, mu_optimizer_step(p.o[SHARED]), MU_ERR_STATE, "changed between a reduction and the step");
    expect(g, mu_clip_grad_norm(p.m[SHARED], 1, NULL), MU_ERR_STATE, "is not the whole outcome");
    expect(g, mu_ddp_backward(p.d[SHARED], p.t, NULL), MU_ERR_STATE, "waited for the step");
    CHECK(mu_module_zero_grad(p.m[SHARED]) == MU_OK, "clear");
    CHECK(mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 127, (uint64_t)rank)) == MU_OK &&
              mu_optimizer_step(p.o[SHARED]) == MU_OK, "goes on: %s", mu_context_message(g->context));
    /* Replicas that differ cannot have it. */
    mu_local_sgd *l = mu_local_sgd_new(p.d[SHARED], &(mu_local_sgd_options){.start = 0});
    CHECK(l != NULL, "local SGD");
    expect(g, mu_ddp_backward(p.d[SHARED], p.t, NULL), MU_ERR_STATE, "local SGD");
    pair_free(&p);
    mu_local_sgd_free(l);
}

/* Ranks that contradict each other, or do not come. way: what rank 1 does instead. */
enum { OTHER_LR, NO_STEP, SAVES_ALONE, DOES_NOT_COME, OTHER_KIND, FREES, WAYS };
static void body_contradicts(mu_group *g, int rank, int size, void *arg)
{
    int way = *(const int *)arg;
    (void)size;
    if (way == OTHER_KIND) {
        CHECK(make(random_model(g->context, 1), rank == 1 ? ADAM : ADAMW, g) == NULL, "made");
        expect(g, mu_context_status(g->context), MU_ERR_COMM, "sharded optimiser Adam");
        return;
    }
    pair p = pair_new(g, 31, ADAM, NULL);
    CHECK(mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 127, (uint64_t)rank)) == MU_OK, "reduce");
    if (way == FREES) { /* one rank alone wants whole gradients now */
        CHECK(mu_optimizer_step(p.o[SHARED]) == MU_OK, "step");
        if (rank == 1) {
            mu_optimizer_free(p.o[SHARED]);
        }
        expect(g, mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 127, 1)), MU_ERR_COMM, "scattered reduction 2");
    } else if (rank != 1) {
        mu_status s = mu_optimizer_step(p.o[SHARED]);
        if (way == DOES_NOT_COME) {
            CHECK(s == MU_ERR_PEER || s == MU_ERR_TIMEOUT, "%d", (int)s);
            expect(g, s, s, "rank 1");
        } else {
            expect(g, s, MU_ERR_COMM, way == OTHER_LR ? "lr 0.25" : way == NO_STEP ? "reduction 2" : "mu_optimizer_save");
        }
    } else if (way == OTHER_LR) {
        mu_optimizer_set_lr(p.o[SHARED], 0.25F);
        expect(g, mu_optimizer_step(p.o[SHARED]), MU_ERR_COMM, "step 1 of the sharded optimiser");
    } else if (way == NO_STEP) {
        expect(g, mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 127, 1)), MU_ERR_COMM, "step 1 of the sharded");
    } else if (way == SAVES_ALONE) {
        expect(g, mu_optimizer_save(p.o[SHARED], "/tmp/never-written", NULL), MU_ERR_COMM, "for which all ranks are needed");
    }
}

/* The optimiser over one group, the ddp over another. */
static void body_two_groups(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_group *other = mu_group_threads(g->context, arg, rank);
    mu_module *m = random_model(g->context, 3);
    mu_optimizer *o = make(m, ADAM, other);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    CHECK(o != NULL && d != NULL, "%s", mu_context_message(g->context));
    expect(g, mu_ddp_backward(d, NULL, NULL), MU_ERR_STATE, "over another group than the one over which");
}

static void refused(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, body_refused, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, body_refused, NULL, NULL, true), 0);
    mu_thread_world *w = mu_thread_world_new(2, NULL);
    assert_int_equal(run_threads(2, body_two_groups, w, NULL, true), 0);
    mu_thread_world_free(w);
    for (int way = 0; way < WAYS; way++) {
        assert_int_equal(run_threads(3, body_contradicts, &way, &(mu_group_options){.timeout_seconds = 1}, false), 0);
    }
}

/* -- steady steps ------------------------------------------------------------------------------------------------- */
static void body_steady(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    pair p = pair_new(g, 41, NESTEROV, NULL);
    int64_t before = 0;
    for (uint64_t step = 0; step < 8; step++) {
        before = step == 4 ? (int64_t)counters(g->context).allocations : before;
        mu_tape_reset(p.t);
        CHECK(mu_ddp_backward(p.d[SHARED], p.t, loss_of(p.t, p.m[SHARED], 127, (uint64_t)rank)) == MU_OK &&
                  mu_clip_grad_norm(p.m[SHARED], 1, NULL) == MU_OK && mu_optimizer_step(p.o[SHARED]) == MU_OK, "step");
    }
    int64_t taken = (int64_t)counters(g->context).allocations - before;
    CHECK(taken == 0, "%d allocations in four steps", (int)taken);
    pair_free(&p);
}

static void steady_steps_take_no_memory(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, body_steady, NULL, NULL, true), 0);
}

static void over_mpi(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        course c = {seed + 60, (int)seed + 1, 8};
        assert_int_equal(run_mpi(mpi_world(), body_course, &c, NULL, true), 0);
    }
    mpi_round_bytes = 4096;
    course c = {70, ADAMW, 6};
    assert_int_equal(run_mpi(mpi_world(), body_course, &c, NULL, true), 0);
    assert_int_equal(run_mpi(mpi_world(), body_scatter, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(state_takes_a_share),
        cmocka_unit_test(gradients_are_scattered),
        cmocka_unit_test(odd_ways),
        cmocka_unit_test(checkpoints),
        cmocka_unit_test(refused),
        cmocka_unit_test(steady_steps_take_no_memory),
    };
    const struct CMUnitTest mpi[] = {cmocka_unit_test(over_mpi)};
    int bad = mpi_world() > 0 ? cmocka_run_group_tests(mpi, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
    mpi_end();
    return bad;
}
