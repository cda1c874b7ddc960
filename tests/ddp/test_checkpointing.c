/* Checkpointed segments under ddp, beyond the pattern table: reports, synchronised batch norm, a rank that fails while
 * it recomputes. The same steps without segments are the oracle, bit for bit. */
#include "rig.h"

enum { STEPS = 6, FEATURES = 6, WIDTH = 5, CLASSES = 3 };

typedef struct setting {
    const char *name;
    bool sync, tiny, some_ranks, without_loss;
    bool defer, weighted; /* two calls deferred, then one that reduces */
} setting;

/* linear, norm, tanh, dropout, and a branch whose parameters lead nowhere. */
static mu_tensor *block_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *y = mu_forward(t, mu_module_get(self, "norm"), mu_forward(t, mu_module_get(self, "lin"), x));
    mu_forward(t, mu_module_get(self, "lost"), y);
    return mu_forward(t, mu_module_get(self, "drop"), mu_tanh(t, y));
}

static mu_module *block(mu_context *c, int64_t in)
{
    mu_module *m = mu_module_new(c, "Block", &(mu_module_options){.forward = block_forward});
    mu_status s = mu_module_add(m, "lin", mu_linear(c, in, WIDTH, NULL));
    s = s == MU_OK ? mu_module_add(m, "norm", mu_batch_norm_layer(c, WIDTH, NULL)) : s;
    s = s == MU_OK ? mu_module_add(m, "lost", mu_linear(c, WIDTH, 2, NULL)) : s;
    s = s == MU_OK ? mu_module_add(m, "drop", mu_dropout_layer(c, 0.3F)) : s;
    return s == MU_OK ? m : NULL;
}

static mu_module *network(mu_context *c, mu_group *sync)
{
    mu_module *m = mu_sequential(c);
    mu_status s = mu_module_add(m, "first", block(c, FEATURES));
    s = s == MU_OK ? mu_module_add(m, "second", block(c, WIDTH)) : s;
    s = s == MU_OK ? mu_module_add(m, "head", mu_linear(c, WIDTH, CLASSES, NULL)) : s;
    s = s == MU_OK && sync != NULL ? mu_sync_batch_norm_convert(m, sync, NULL) : s;
    return s == MU_OK ? m : NULL;
}

/* One of two runs of the same steps. */
typedef struct run {
    mu_module *m;
    mu_ddp *d;
    mu_tape *t;
    mu_optimizer *o;
} run;

static run open_run(mu_group *g, const setting *s, bool segments)
{
    mu_context *c = g->context;
    run r = {.m = network(c, s->sync ? g : NULL)};
    mu_ddp_options o = {.absent = MU_ABSENT_QUIET, .bucket_bytes = s->tiny ? 1 : 0, .first_bucket_bytes = s->tiny ? 1 : 0};
    if (segments) {
        CHECK(mu_module_checkpoint(r.m, "*", true, NULL) == MU_OK, "%s", mu_context_message(c));
        CHECK(mu_module_checkpoint(r.m, "first.norm", true, NULL) == MU_OK, "%s", mu_context_message(c));
    }
    r.d = mu_ddp_wrap(r.m, g, &o);
    r.t = mu_tape_new(c, NULL);
    r.o = mu_sgd(r.m, 0.1F, NULL);
    CHECK(r.d != NULL && r.t != NULL && r.o != NULL, "%s: %s", s->name, mu_context_message(c));
    return r;
}

static mu_tensor *loss_of(run *r, const setting *s, int step, int rank)
{
    int n = 3 + (step + rank) % 3;
    float x[6 * FEATURES];
    int64_t labels[6];
    for (int i = 0; i < n * FEATURES; i++) {
        x[i] = (float)(mix((uint64_t)(step * 1000 + rank * 100 + i)) % 2001) / 1000.0F - 1.0F;
    }
    for (int i = 0; i < n; i++) {
        labels[i] = (step + rank + i) % CLASSES;
    }
    mu_tape_reset(r->t);
    if (s->without_loss && (step + rank) % 3 == 0) {
        return NULL;
    }
    mu_tensor *y = mu_forward(r->t, r->m, mu_tensor_from(r->t, MU_DIMS(n, FEATURES), x));
    return mu_cross_entropy(r->t, y, mu_tensor_from_i64(r->t, MU_DIMS(n), labels));
}

static bool same(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static void compare(run *a, run *b, const setting *s, int step)
{
    snapshot x = snap(a->m), y = snap(b->m);
    CHECK(x.count == y.count && memcmp(x.values, y.values, (size_t)x.count * sizeof(float)) == 0 &&
              memcmp(x.grads, y.grads, (size_t)x.count * sizeof(float)) == 0 && memcmp(x.has, y.has, sizeof(x.has)) == 0,
          "%s, step %d: gradients or values are not those without segments", s->name, step);
    snap_free(&x);
    snap_free(&y);
    static const char *const buffers[] = {"first.norm.running_var", "second.norm.running_mean"};
    for (int i = 0; i < 2; i++) {
        float u[WIDTH], v[WIDTH];
        CHECK(mu_tensor_read(mu_module_get_buffer(a->m, buffers[i]), u, WIDTH) == MU_OK &&
                  mu_tensor_read(mu_module_get_buffer(b->m, buffers[i]), v, WIDTH) == MU_OK &&
                  memcmp(u, v, sizeof(u)) == 0, "%s, step %d: %s differs", s->name, step, buffers[i]);
    }
    mu_ddp_report p = mu_ddp_get_report(a->d), q = mu_ddp_get_report(b->d);
    CHECK(p.absent_count == q.absent_count, "%s, step %d: %d absent, %d with segments", s->name, step,
          (int)p.absent_count, (int)q.absent_count);
    for (int64_t i = 0; i < p.absent_count && i < q.absent_count; i++) {
        const mu_absent *u = &p.absent[i], *v = &q.absent[i];
        CHECK(strcmp(u->name, v->name) == 0 && u->here == v->here && same(u->op, v->op) && same(u->module, v->module) &&
                  same(u->end_op, v->end_op) && same(u->end_module, v->end_module),
              "%s, step %d: %s is absent as %d (%s in %s), with segments %s as %d (%s in %s)", s->name, step, u->name,
              (int)u->here, u->op, u->module, v->name, (int)v->here, v->op, v->module);
    }
}

static mu_status reduce(run *r, const setting *s, int step, int rank, bool later)
{
    mu_tensor *loss = loss_of(r, s, step, rank);
    int64_t samples = s->weighted ? 3 + (step + rank) % 3 : 0;
    mu_ddp_backward_options o = {.weighted = s->weighted, .samples = samples, .defer = later};
    return s->defer ? mu_ddp_backward_with(r->d, r->t, loss, &o) : mu_ddp_backward(r->d, r->t, loss);
}

static void steps_with_and_without(mu_group *g, int rank, int size, void *arg)
{
    const setting *s = arg;
    run plain = open_run(g, s, false), with = open_run(g, s, !s->some_ranks || rank % 2 == 0);
    for (int step = 0; step < STEPS; step++) {
        bool later = s->defer && step % 3 != 2;
        mu_status a = reduce(&plain, s, step, rank, later), b = reduce(&with, s, step, rank, later);
        CHECK(a == MU_OK && b == MU_OK, "%s, step %d: %d %d %s", s->name, step, (int)a, (int)b,
              mu_context_message(g->context));
        compare(&plain, &with, s, step);
        if (later) {
            continue; /* gradients are each rank's own */
        }
        check_replicas(g, with.m, s->name);
        CHECK(mu_optimizer_step(plain.o) == MU_OK && mu_optimizer_step(with.o) == MU_OK, "step");
    }
    (void)size;
}

/* -- a recompute that fails ------------------------------------------------------------------------------------- */
typedef struct fragile {
    mu_module *inner;
    int runs, fail_at; /* run that fails, from 1; 0: none */
} fragile;

static mu_tensor *fragile_forward(void *self, mu_tape *t, mu_tensor *x)
{
    fragile *f = self;
    mu_tensor *y = mu_forward(t, f->inner, x);
    if (++f->runs == f->fail_at) {
        mui_fail(mu_module_context(f->inner), MU_ERR_DEVICE, "the recompute fails");
        return NULL;
    }
    return y;
}

static void one_rank_fails(mu_group *g, int rank, int size, void *arg)
{
    const setting *s = arg;
    run r = open_run(g, s, false);
    fragile f = {.inner = mu_module_get(r.m, "second")};
    for (int step = 0; step < 4; step++) {
        bool bad = step == 1 || step == 2; /* after another segment delivered its gradients, and before */
        float x[3 * FEATURES];
        for (int i = 0; i < 3 * FEATURES; i++) {
            x[i] = (float)((i * 31 + step + rank) % 17) / 10.0F;
        }
        mu_tape_reset(r.t);
        f = (fragile){.inner = mu_module_get(r.m, "second"), .fail_at = bad && rank == size - 1 ? 2 : 0};
        fragile first = {.inner = mu_module_get(r.m, "first"), .fail_at = step == 2 ? f.fail_at : 0};
        f.fail_at = step == 2 ? 0 : f.fail_at;
        mu_tensor *y = mu_checkpoint(r.t, fragile_forward, &first, mu_tensor_from(r.t, MU_DIMS(3, FEATURES), x));
        y = mu_forward(r.t, mu_module_get(r.m, "head"), mu_checkpoint(r.t, fragile_forward, &f, y));
        mu_status got = mu_ddp_backward(r.d, r.t, mu_mean(r.t, mu_mul(r.t, y, y)));
        mu_status want = !bad ? MU_OK : rank == size - 1 ? MU_ERR_DEVICE : MU_SKIPPED;
        CHECK(got == want, "%s, step %d: %d, %d was expected: %s", s->name, step, (int)got, (int)want,
              mu_context_message(g->context));
        CHECK(!bad || mu_parameter_grad(mu_module_get_parameter(r.m, "head.weight")) == NULL, "gradients of a skipped step");
        CHECK(bad || (f.runs == 2 && first.runs == 2), "runs: %d %d", f.runs, first.runs);
        mu_context_clear(g->context);
        check_replicas(g, r.m, s->name);
        CHECK(mu_optimizer_step(r.o) == MU_OK, "step");
    }
}

/* A recompute that fails in a deferred call, after which gradients hold a part of it: skipped everywhere
 * until they are cleared, then right. */
static void deferred_call_fails(mu_group *g, int rank, int size, void *arg)
{
    const setting *s = arg;
    run r = open_run(g, s, false);
    for (int step = 0; step < 6; step++) {
        bool later = step % 3 != 2, bad = step == 1 && rank == size - 1;
        float x[3 * FEATURES];
        for (int i = 0; i < 3 * FEATURES; i++) {
            x[i] = (float)((i * 31 + step + rank) % 17) / 10.0F;
        }
        mu_tape_reset(r.t);
        fragile first = {.inner = mu_module_get(r.m, "first"), .fail_at = bad ? 2 : 0};
        mu_tensor *y = mu_checkpoint(r.t, fragile_forward, &first, mu_tensor_from(r.t, MU_DIMS(3, FEATURES), x));
        y = mu_forward(r.t, mu_module_get(r.m, "head"), mu_checkpoint_forward(r.t, mu_module_get(r.m, "second"), y));
        mu_status got = mu_ddp_backward_with(r.d, r.t, mu_mean(r.t, mu_mul(r.t, y, y)),
                                             &(mu_ddp_backward_options){.defer = later});
        mu_status want = bad ? MU_ERR_DEVICE : step == 2 ? MU_SKIPPED : MU_OK;
        CHECK(got == want, "%s, step %d: %d, %d was expected: %s", s->name, step, (int)got, (int)want,
              mu_context_message(g->context));
        mu_context_clear(g->context);
        if (!later) { /* after a skip the gradients are still each rank's own: cleared, not applied */
            CHECK(step == 2 || mu_optimizer_step(r.o) == MU_OK, "step");
            CHECK(mu_module_zero_grad(r.m) == MU_OK, "zero_grad");
            check_replicas(g, r.m, s->name);
        }
    }
}

static void everywhere(rank_fn fn, const setting *s)
{
    for (int size = 2; size <= 3; size++) {
        setting copy = *s;
        assert_int_equal(run_threads(size, fn, &copy, NULL, true), 0);
        assert_int_equal(run_processes(size, fn, &copy, NULL, true), 0);
    }
}

static void test_as_without(void **state)
{
    (void)state;
    static const setting all[] = {
        {.name = "plain"},
        {.name = "tiny buckets", .tiny = true},
        {.name = "on some ranks", .some_ranks = true, .tiny = true},
        {.name = "ranks without loss", .without_loss = true},
        {.name = "synchronised norm", .sync = true},
        {.name = "synchronised norm, on some ranks", .sync = true, .some_ranks = true, .tiny = true},
        {.name = "deferred", .defer = true, .tiny = true},
        {.name = "deferred, ranks without loss", .defer = true, .without_loss = true},
        {.name = "deferred and weighted, on some ranks", .defer = true, .weighted = true, .some_ranks = true},
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        everywhere(steps_with_and_without, &all[i]);
    }
}

static void test_failing_recompute(void **state)
{
    (void)state;
    everywhere(one_rank_fails, &(setting){.name = "one bucket"});
    everywhere(one_rank_fails, &(setting){.name = "tiny buckets", .tiny = true});
    everywhere(deferred_call_fails, &(setting){.name = "deferred"});
    everywhere(deferred_call_fails, &(setting){.name = "deferred, tiny buckets", .tiny = true});
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_as_without), cmocka_unit_test(test_failing_recompute)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
