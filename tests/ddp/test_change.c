/* The model changes after it was wrapped: on all ranks alike, which is followed, and on one rank only, which is named.
 */
#include "rig.h"

static mu_module *new_head(mu_context *c, int64_t n)
{
    mu_module *head = mu_module_new(c, "Head", NULL);
    mu_module_parameter(head, "w", MU_DIMS(n), (mu_init){MU_INIT_NORMAL, 1.0F});
    return head;
}

/* What is done to the model before step 2. */
typedef enum change { REPLACE, ADD, REMOVE, FREEZE, UNFREEZE, NOTHING } change;
static const char *const names[] = {"head replaced", "module added", "module removed", "frozen", "unfrozen", "nothing"};

static void apply(mu_module *m, change what)
{
    mu_context *c = mu_module_context(m);
    mu_status s = MU_OK;
    switch (what) {
    case REPLACE: s = mu_module_replace(m, "head", new_head(c, 11)); break;
    case ADD: s = mu_module_add(m, "more", new_head(c, 4)); break;
    case REMOVE: s = mu_module_remove(m, "head"); break;
    case FREEZE: s = mu_module_freeze(m, "b", NULL); break;
    case UNFREEZE: s = mu_module_unfreeze(m, "d", NULL); break;
    case NOTHING: break;
    }
    CHECK(s == MU_OK, "%s: %s", names[what], mu_context_message(c));
}

static mu_tensor *loss_after(mu_tape *t, mu_module *m, change what, bool changed, uint64_t key)
{
    const char *used = !changed          ? "a b c d head.w head.v"
                       : what == REPLACE ? "a b c d head.w"
                       : what == ADD     ? "a b c d head.w head.v more.w"
                       : what == REMOVE  ? "a b c d"
                                         : "a b c d head.w head.v";
    return terms(t, m, used, key);
}

typedef struct plan {
    change what;
    bool before; /* wrapping, instead of between steps */
    size_t bucket;
} plan;

static void change_on_all(mu_group *g, int rank, int size, void *arg)
{
    const plan *p = arg;
    mu_context *c = g->context, *oc = quiet_context();
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = toy(c), *om = toy(oc);
    if (p->what == UNFREEZE) {
        CHECK(mu_module_freeze(m, "d", NULL) == MU_OK && mu_module_freeze(om, "d", NULL) == MU_OK, "freeze");
    }
    if (p->before) {
        apply(m, p->what);
        apply(om, p->what);
    }
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = p->bucket, .first_bucket_bytes = p->bucket});
    CHECK(d != NULL, "%s", mu_context_message(c));
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    for (int step = 0; step < 5 && d != NULL; step++) {
        bool changed = p->before || step >= 2;
        if (!p->before && step == 2) {
            apply(m, p->what);
            apply(om, p->what);
        }
        /* As a program would: a store is rebuilt at the first forward. */
        CHECK(mui_store_of(m) != NULL && mui_store_of(om) != NULL, "%s", mu_context_message(c));
        mu_tape_reset(t);
        mu_tape_reset(ot);
        mu_status s = mu_ddp_backward(d, t, loss_after(t, m, p->what, changed, (uint64_t)(step * 100 + rank)));
        CHECK(s == MU_OK, "%s, step %d: %d %s", names[p->what], step, (int)s, mu_context_message(c));
        mu_tensor *sum = NULL;
        for (int r = 0; r < size; r++) {
            mu_tensor *x =
                mu_scale(ot, loss_after(ot, om, p->what, changed, (uint64_t)(step * 100 + r)), 1.0F / (float)size);
            sum = sum == NULL ? x : mu_add(ot, sum, x);
        }
        CHECK(mu_backward(ot, sum) == MU_OK, "oracle: %s", mu_context_message(oc));
        check_oracle(m, om, 1e-5, names[p->what]);
        check_replicas(g, m, names[p->what]);
        toy_optimizer_step(m, 0.1F);
        toy_optimizer_step(om, 0.1F);
    }
    int want = rank == 0 && !p->before && p->what != NOTHING ? 1 : 0;
    CHECK(l.warnings == want, "%s: %d lines, the last: %s", names[p->what], l.warnings, l.last);
    CHECK(want == 0 || strstr(l.last, "the model changed after wrapping") != NULL, "%s", l.last);
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

static void changes_on_all_ranks_are_followed(void **state)
{
    (void)state;
    for (int what = REPLACE; what <= NOTHING; what++) {
        for (int before = 0; before < 2; before++) {
            for (size_t bucket = 1; bucket <= 1 << 20; bucket <<= 20) {
                plan p = {(change)what, before, bucket};
                for (int size = 1; size <= 3; size++) {
                    assert_int_equal(run_threads(size, change_on_all, &p, NULL, true), 0);
                }
            }
        }
    }
    plan p = {REPLACE, false, 1};
    assert_int_equal(run_processes(2, change_on_all, &p, NULL, true), 0);
}

/* One rank only: everybody gets the same error, at once. */
static void change_on_one(mu_group *g, int rank, int size, void *arg)
{
    change what = *(change *)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    if (what == UNFREEZE) {
        CHECK(mu_module_freeze(m, "d", NULL) == MU_OK, "freeze");
    }
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    bool mine = rank == size - 1;
    if (mine) {
        apply(m, what);
    }
    CHECK(mui_store_of(m) != NULL, "%s", mu_context_message(c));
    mu_status s = mu_ddp_backward(d, t, loss_after(t, m, what, mine, (uint64_t)rank));
    CHECK(s == MU_ERR_COMM, "%s: %d %s", names[what], (int)s, mu_context_message(c));
    char who[32];
    snprintf(who, sizeof(who), "rank %d", size - 1);
    const char *text = mu_context_message(c);
    CHECK(strstr(text, who) != NULL && strstr(text, "changed model") != NULL, "%s: %s", names[what], text);
}

/* Both changed, differently. */
static void change_unlike(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_module_replace(m, "head", new_head(c, rank == 1 ? 10 : 12)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mui_store_of(m) != NULL, "%s", mu_context_message(c));
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a head.w", 1)) == MU_ERR_COMM, "%s", mu_context_message(c));
    const char *text = mu_context_message(c);
    CHECK(strstr(text, "rank 0 has parameter `head.w` (12,)") != NULL &&
              strstr(text, "rank 1 has parameter `head.w` (10,)") != NULL,
          "%s", text);
    /* They can still come together. */
    mu_context_clear(c);
    CHECK(mu_module_replace(m, "head", new_head(c, 12)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mui_store_of(m) != NULL, "%s", mu_context_message(c));
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a head.w", 1)) == MU_OK, "%s", mu_context_message(c));
    check_replicas(g, m, "after a difference");
}

static void changes_on_one_rank_are_named(void **state)
{
    (void)state;
    for (int what = REPLACE; what < NOTHING; what++) {
        change w = (change)what;
        assert_int_equal(run_threads(2, change_on_one, &w, &(mu_group_options){.timeout_seconds = 10}, false), 0);
        assert_int_equal(run_threads(3, change_on_one, &w, &(mu_group_options){.timeout_seconds = 10}, false), 0);
    }
    assert_int_equal(run_threads(3, change_unlike, NULL, NULL, false), 0);
}

/* New parameters with other values on a rank: all take rank 0's, and the step computed with others is skipped. */
static void other_values(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", 1)) == MU_OK, "%s", mu_context_message(c));
    toy_optimizer_step(m, 0.1F);
    c->seed = (uint64_t)rank + 5;
    CHECK(mu_module_replace(m, "head", new_head(c, 9)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mui_store_of(m) != NULL, "%s", mu_context_message(c));
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a head.w", 1)) == MU_SKIPPED, "%s", mu_context_message(c));
    check_replicas(g, m, "other values");
    CHECK(mu_parameter_grad(mu_module_get_parameter(m, "a")) == NULL, "a gradient was left");
    CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a head.w", 1)) == MU_OK, "%s", mu_context_message(c));
    check_replicas(g, m, "the step after");
}

/* Frozen and unfrozen in every step: told once, right each time. */
static void back_and_forth(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.absent = MU_ABSENT_QUIET});
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 6; step++) {
        mu_status s = step % 2 == 0 ? mu_module_freeze(m, "b", NULL) : mu_module_unfreeze(m, "b", NULL);
        CHECK(s == MU_OK && mui_store_of(m) != NULL, "%s", mu_context_message(c));
        mu_tape_reset(t);
        CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c", (uint64_t)(step * 10 + rank))) == MU_OK, "%s",
              mu_context_message(c));
        CHECK((mu_parameter_grad(mu_module_get_parameter(m, "b")) != NULL) == (step % 2 == 1), "step %d", step);
        check_replicas(g, m, "back and forth");
        toy_optimizer_step(m, 0.1F);
    }
    CHECK(l.warnings == (rank == 0), "%d lines, the last: %s", l.warnings, l.last);
}

static void new_values_come_from_rank_0(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, back_and_forth, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, other_values, NULL, NULL, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(changes_on_all_ranks_are_followed),
        cmocka_unit_test(changes_on_one_rank_are_named),
        cmocka_unit_test(new_values_come_from_rank_0),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
