/* Who is absent, why, and how often that is said. */
#include "rig.h"

static const mu_absent *find(mu_ddp_report r, const char *name)
{
    for (int64_t i = 0; i < r.absent_count; i++) {
        if (strcmp(r.absent[i].name, name) == 0) {
            return &r.absent[i];
        }
    }
    static const mu_absent none;
    return &none;
}

/* A module with a forward, so that reports can name where a parameter was read. */
static mu_tensor *head_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(self, "w"));
    return mu_sigmoid(t, mu_add(t, x, mu_mean(t, w)));
}
static mu_module *net(mu_context *c)
{
    const mu_init normal = {MU_INIT_NORMAL, 1.0F};
    mu_module *m = mu_module_new(c, "Net", NULL);
    mu_module_parameter(m, "trunk", MU_DIMS(4), normal);
    static const char *const heads[] = {"used", "idle", "cut", "quiet", "dead"};
    for (int i = 0; i < 5; i++) {
        mu_module *h = mu_module_new(c, "Head", &(mu_module_options){.forward = head_forward});
        mu_module_parameter(h, "w", MU_DIMS(3), normal);
        mu_module_parameter(h, "spare", MU_DIMS(3), normal);
        CHECK(mu_module_add(m, heads[i], h) == MU_OK, "add");
    }
    return m;
}

/* used: in the loss. idle: not called. cut: detached. quiet: in a no-grad region. dead: called, result dropped. */
static mu_tensor *net_loss(mu_tape *t, mu_module *m)
{
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(m, "trunk")), *x = mu_mean(t, mu_mul(t, w, w));
    mu_tensor *y = mu_forward(t, mu_module_get(m, "used"), x);
    (void)mu_tanh(t, mu_forward(t, mu_module_get(m, "dead"), x));
    mu_tensor *cut = mu_detach(t, mu_forward(t, mu_module_get(m, "cut"), x));
    mu_no_grad_begin(t, "teacher");
    mu_tensor *quiet = mu_forward(t, mu_module_get(m, "quiet"), x);
    mu_no_grad_end(t);
    return mu_add(t, mu_add(t, y, cut), quiet);
}

static bool is(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static void reasons(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = net(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    CHECK(d != NULL, "%s", mu_context_message(c));
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 4; step++) {
        mu_tape_reset(t);
        CHECK(mu_ddp_backward(d, t, net_loss(t, m)) == MU_OK, "%s", mu_context_message(c));
        mu_tape_reset(t); /* the report outlives the tape's strings */
        mu_ddp_report r = mu_ddp_get_report(d);
        CHECK(r.absent_count == 9 && r.reductions == (uint64_t)step + 1 && r.buckets > 0, "%d absent",
              (int)r.absent_count);
        const mu_absent *a = find(r, "idle.w");
        CHECK(a->here == MU_NOT_READ && a->ranks_present == 0 && a->op == NULL, "idle: %d", (int)a->here);
        a = find(r, "used.spare");
        CHECK(a->here == MU_NOT_READ, "spare: %d", (int)a->here);
        a = find(r, "dead.w");
        CHECK(a->here == MU_NOT_REACHED && is(a->op, "mean") && is(a->module, "dead") && is(a->end_op, "tanh") &&
                  is(a->end_module, "") && a->region == NULL,
              "dead: %d %s %s %s %s", (int)a->here, a->op, a->module, a->end_op, a->end_module);
        a = find(r, "cut.w");
        CHECK(a->here == MU_DETACHED && is(a->op, "mean") && is(a->module, "cut") && is(a->end_op, "detach") &&
                  a->region == NULL,
              "cut: %d %s %s %s", (int)a->here, a->op, a->module, a->end_op);
        a = find(r, "quiet.w");
        CHECK(a->here == MU_DETACHED && is(a->module, "quiet") && is(a->region, "teacher"), "quiet: %d %s %s",
              (int)a->here, a->module, a->region);
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
    CHECK(l.warnings == (rank == 0), "%d warnings, the last: %s", l.warnings, l.last);
    if (rank == 0) {
        CHECK(strstr(l.last, "9 of 11 parameters did not receive a gradient on any rank") != NULL &&
                  strstr(l.last, "idle.{") != NULL && strstr(l.last, "not read by any operation") != NULL &&
                  strstr(l.last, "the no-grad region teacher") != NULL && strstr(l.last, "detach") != NULL &&
                  strstr(l.last, "the path ends at tanh in the root") != NULL,
              "%s", l.last);
    }
    /* The same through the loop people write. */
    (void)size;
    CHECK(mu_ddp_backward(d, t, net_loss(t, m)) == MU_OK, "%s", mu_context_message(c));
    snapshot s = snap(m);
    int without = 0;
    for (int64_t i = 0; i < s.param_count; i++) {
        without += !s.has[i];
    }
    CHECK(without == 9, "%d parameters without gradient", without);
    snap_free(&s);
}

/* Present on some ranks: counted and listed, no warning. */
static void elsewhere(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "net"});
    mu_tape *t = mu_tape_new(c, NULL);
    mu_tensor *loss = rank == size - 1 ? NULL : terms(t, m, rank == 0 ? "a b c d head.w head.v" : "a b c d head.w", 3);
    CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
    mu_ddp_report r = mu_ddp_get_report(d);
    CHECK(r.absent_count == 6, "%d absent somewhere", (int)r.absent_count);
    const mu_absent *v = find(r, "head.v"), *a = find(r, "a");
    CHECK(v->ranks_present == 1 && a->ranks_present == size - 1, "%d %d", v->ranks_present, a->ranks_present);
    CHECK(v->here == (rank == 0 ? MU_PRESENT : rank == size - 1 ? MU_NO_LOSS : MU_NOT_READ), "v: %d", (int)v->here);
    CHECK(a->here == (rank == size - 1 ? MU_NO_LOSS : MU_PRESENT), "a: %d", (int)a->here);
    char text[4096], small[10];
    size_t n = mu_ddp_print_report(d, text, sizeof(text));
    CHECK(n == strlen(text) && mu_ddp_print_report(d, small, sizeof(small)) == n && strlen(small) == 9, "%zu", n);
    CHECK(strstr(text, "head.v: on rank 0 (1 of ") != NULL && strstr(text, "ddp `net`: 1 reductions over ") != NULL,
          "%s", text);
    CHECK(l.warnings == 0, "%s", l.last);
}

/* A set that changes: each parameter is told of once. */
static void told_once(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_absent_policy policy = *(mu_absent_policy *)arg;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.absent = policy});
    mu_tape *t = mu_tape_new(c, NULL);
    static const char *const used[] = {"a b c d head.w head.v", "a b c d", "a b c d head.w",
                                       "a b c head.v",          "a b c d", "a b"};
    /* Of what a reduction left out, once the next one begins. */
    static const int warnings[] = {0, 0, 1, 1, 2, 2};
    for (int step = 0; step < 6; step++) {
        mu_tape_reset(t);
        CHECK(mu_ddp_backward(d, t, terms(t, m, used[step], 3)) == MU_OK, "%s", mu_context_message(c));
        int want = rank == 0 && policy == MU_ABSENT_DEFAULT ? warnings[step] : 0;
        CHECK(l.warnings == want, "step %d: %d warnings, the last: %s", step, l.warnings, l.last);
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
    mu_ddp_free(d);
    CHECK(l.warnings == (rank == 0 && policy == MU_ABSENT_DEFAULT ? 3 : 0), "%d at the end", l.warnings);
    CHECK(rank > 0 || policy != MU_ABSENT_DEFAULT || strstr(l.last, ": c: not read") != NULL, "only what is new: %s",
          l.last);
}

static void strict(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.absent = MU_ABSENT_ERROR});
    mu_tape *t = mu_tape_new(c, NULL);
    /* Present somewhere is enough. */
    CHECK(mu_ddp_backward(d, t, terms(t, m, rank == 0 ? "a b c d" : "head.w head.v", 3)) == MU_OK, "%s",
          mu_context_message(c));
    CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w", 3)) == MU_ERR_STATE, "%s", mu_context_message(c));
    const char *text = mu_context_message(c);
    CHECK(strstr(text, "here, 1 of 6 parameters did not receive a gradient on any rank in reduction 2") != NULL &&
              strstr(text, "head.v: not read") != NULL &&
              strstr(text, "(parameter indices 5): ") != NULL &&
              strncmp(text,
                      "Expected to have finished reduction in the prior iteration before starting a new one", 84) == 0,
          "%s", text);
    mu_context_clear(c);
    CHECK(mu_parameter_grad(mu_module_get_parameter(m, "a")) == NULL, "a gradient was left");
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", 3)) == MU_OK, "%s", mu_context_message(c));
}

static void every_absence_has_its_reason(void **state)
{
    (void)state;
    for (int size = 1; size <= 3; size++) {
        assert_int_equal(run_threads(size, reasons, NULL, NULL, true), 0);
    }
    assert_int_equal(run_processes(2, reasons, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, elsewhere, NULL, NULL, true), 0);
    assert_int_equal(run_threads(4, elsewhere, NULL, NULL, true), 0);
}

static void policies(void **state)
{
    (void)state;
    for (int p = MU_ABSENT_DEFAULT; p <= MU_ABSENT_QUIET; p++) {
        mu_absent_policy policy = (mu_absent_policy)p;
        assert_int_equal(run_threads(2, told_once, &policy, NULL, true), 0);
    }
    assert_int_equal(run_threads(2, strict, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, strict, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_absence_has_its_reason),
        cmocka_unit_test(policies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
