/* Training patterns: each on 1 to 4 ranks as threads and on 2 as processes, with a bucket for each parameter and one
 * bucket for all, against one process that differentiates the mean of the ranks' losses. Prints the table.
 *
 * Rows of the table of PyTorch's outcomes that are about Python objects have no meaning here and are left out: custom
 * output objects, deepcopy and pickling of the wrapper, hooks on outputs, calling module.module, `.data` replaced. */
#include "rig.h"

enum { STEPS = 4 };

/* Where a loss is asked for; kept is the rank's own from pass to pass of one step. */
typedef struct place {
    int step, pass, rank, size;
    mu_tensor *kept[2];
} place;

typedef struct pattern {
    const char *name, *pytorch;
    mu_tensor *(*loss)(mu_tape *t, mu_module *m, place *p);
    int64_t (*samples)(const place *p); /* NULL: the plain mean over ranks */
    int passes;                         /* reductions in a step; 0: 1 */
    bool retain;                        /* several backwards over one graph */
    const char *frozen;
} pattern;

static uint64_t key(const place *p)
{
    return (uint64_t)(p->step * 10007 + p->pass * 101 + p->rank * 11 + 1);
}

static mu_tensor *all_used(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, "a b c d head.w head.v", key(p));
}
static mu_tensor *unused_on_all(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, "a b c d head.w", key(p));
}
static mu_tensor *unused_on_last(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, p->rank == p->size - 1 ? "a b c d" : "a b c d head.w head.v", key(p));
}
static mu_tensor *unused_in_turn(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, (p->step + p->rank) % 2 == 0 ? "a b c" : "b c d head.w head.v", key(p));
}
static mu_tensor *disjoint(mu_tape *t, mu_module *m, place *p)
{
    static const char *const sets[] = {"a head.w", "b", "c d", "head.v"};
    return terms(t, m, sets[p->rank % 4], key(p));
}
static mu_tensor *disjoint_shifting(mu_tape *t, mu_module *m, place *p)
{
    static const char *const sets[] = {"a head.w", "b", "c d", "head.v"};
    return terms(t, m, sets[(p->rank + p->step) % 4], key(p));
}
static mu_tensor *used_later(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, p->step < 2 ? "a b d" : "a b c d head.w head.v", key(p));
}
static mu_tensor *unused_later(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, p->step >= 2 ? "a b d" : "a b c d head.w head.v", key(p));
}
static mu_tensor *used_twice(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, p->rank == 1 ? "a b c a d" : "a b a c d a head.w head.v b", key(p));
}
static mu_tensor *two_forwards(mu_tape *t, mu_module *m, place *p)
{
    return mu_add(t, terms(t, m, "a b c d head.w head.v", key(p)), terms(t, m, "a b c d head.w head.v", key(p) + 50));
}
static mu_tensor *two_forwards_disjoint(mu_tape *t, mu_module *m, place *p)
{
    return mu_add(t, terms(t, m, "a b c", key(p)), terms(t, m, "d head.w head.v", key(p) + 50));
}
static mu_tensor *same_loss_again(mu_tape *t, mu_module *m, place *p)
{
    if (p->pass == 0) {
        p->kept[0] = terms(t, m, "a b c d head.w head.v", key(p));
    }
    return p->kept[0];
}
static mu_tensor *feature(mu_tape *t, mu_module *m, place *p)
{
    return mu_mul(t, mu_parameter_tensor(mu_module_get_parameter(m, "a")),
                  mu_mul(t, term(t, m, "b", key(p)), term(t, m, "d", key(p) + 1)));
}
static mu_tensor *trunk_two_heads(mu_tape *t, mu_module *m, place *p)
{
    if (p->pass == 0) {
        p->kept[0] = feature(t, m, p);
    }
    mu_tensor *head = term(t, m, p->pass == 0 ? "head.w" : "head.v", key(p) + 7);
    return mu_mean(t, mu_mul(t, p->kept[0], head));
}
static mu_tensor *losses_disjoint(mu_tape *t, mu_module *m, place *p)
{
    /* The other way round on odd ranks would pair different losses; the sum is the same. */
    return terms(t, m, (p->pass + p->rank) % 2 == 0 ? "a b c" : "d head.w head.v", key(p));
}
static mu_tensor *feature_then_final(mu_tape *t, mu_module *m, place *p)
{
    if (p->pass == 0) {
        p->kept[0] = feature(t, m, p);
        return mu_mean(t, p->kept[0]);
    }
    return mu_mean(t, mu_mul(t, p->kept[0], mu_add(t, term(t, m, "head.w", key(p)), term(t, m, "head.v", key(p)))));
}
static mu_tensor *final_then_feature(mu_tape *t, mu_module *m, place *p)
{
    if (p->pass == 1) {
        return mu_mean(t, p->kept[0]);
    }
    p->kept[0] = feature(t, m, p);
    return mu_mean(t, mu_mul(t, p->kept[0], mu_add(t, term(t, m, "head.w", key(p)), term(t, m, "head.v", key(p)))));
}
static mu_tensor *feature_then_final_anew(mu_tape *t, mu_module *m, place *p)
{
    mu_tensor *f = feature(t, m, p);
    return p->pass == 0 ? mu_mean(t, f) : mu_mean(t, mu_mul(t, f, term(t, m, "head.w", key(p))));
}
static mu_tensor *constant_on_one(mu_tape *t, mu_module *m, place *p)
{
    return p->rank == 1 ? mu_mean(t, mu_tensor_zeros(t, MU_DIMS(3))) : all_used(t, m, p);
}
static mu_tensor *null_on_one(mu_tape *t, mu_module *m, place *p)
{
    return p->rank == 1 ? NULL : unused_on_all(t, m, p);
}
static mu_tensor *null_on_first(mu_tape *t, mu_module *m, place *p)
{
    return p->rank == 0 && p->step < 2 ? NULL : all_used(t, m, p);
}
static mu_tensor *null_on_all(mu_tape *t, mu_module *m, place *p)
{
    return p->step == 1 ? NULL : all_used(t, m, p);
}
static mu_tensor *uneven(mu_tape *t, mu_module *m, place *p)
{
    return p->step > p->rank ? NULL : all_used(t, m, p);
}
static mu_tensor *zero_auxiliary(mu_tape *t, mu_module *m, place *p)
{
    mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(m, "head.v"));
    mu_tensor *zero = mu_scale(t, mu_mean(t, mu_softplus(t, mu_scale(t, v, -1.0F))), 0.0F);
    return mu_add(t, terms(t, m, "a b c d head.w", key(p)), zero);
}
static mu_tensor *detached(mu_tape *t, mu_module *m, place *p)
{
    mu_tensor *x = term(t, m, "head.v", key(p));
    return mu_add(t, terms(t, m, "a b c d head.w", key(p)), p->rank == 1 ? x : mu_detach(t, x));
}
static mu_tensor *no_grad_region(mu_tape *t, mu_module *m, place *p)
{
    mu_no_grad_begin(t, "teacher");
    mu_tensor *x = terms(t, m, "head.w head.v", key(p));
    mu_no_grad_end(t);
    return mu_mul(t, terms(t, m, "a b c d", key(p)), x);
}
static mu_tensor *other_order(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, p->rank % 2 == 0 ? "a b c d head.w head.v" : "head.v head.w d c b a", key(p));
}
static mu_tensor *result_unused(mu_tape *t, mu_module *m, place *p)
{
    (void)terms(t, m, "head.w head.v", key(p)); /* an output that does not enter the loss */
    return terms(t, m, p->rank == 0 ? "a b c d" : "a b c d head.w", key(p));
}
static mu_tensor *experts(mu_tape *t, mu_module *m, place *p)
{
    static const char *const expert[] = {"b", "d", "head.w", "head.v"};
    char names[64];
    snprintf(names, sizeof(names), "a c %s", expert[mix(key(p)) % 4]);
    return terms(t, m, names, key(p));
}
static mu_tensor *reshaped(mu_tape *t, mu_module *m, place *p)
{
    mu_tensor *b = mu_reshape(t, mu_parameter_tensor(mu_module_get_parameter(m, "b")), MU_DIMS(12));
    return mu_add(t, mu_mean(t, mu_mul(t, b, b)), terms(t, m, "a c d head.w head.v", key(p)));
}
static mu_tensor *parameter_as_loss(mu_tape *t, mu_module *m, place *p)
{
    return p->rank == 0 ? mu_parameter_tensor(mu_module_get_parameter(m, "c")) : all_used(t, m, p);
}
static mu_tensor *one_of_two_tasks(mu_tape *t, mu_module *m, place *p)
{
    return terms(t, m, p->step % 2 == 0 ? "a b head.w" : "a b head.w c d head.v", key(p));
}
static int64_t ragged(const place *p)
{
    return 1 + (p->step * 7 + p->rank * 5) % 9;
}
static int64_t one_empty(const place *p)
{
    return p->rank == 1 ? 0 : 3 + p->step;
}
static int64_t large(const place *p)
{
    return (1 << 24) - p->rank * 4097 - p->step;
}

static const pattern patterns[] = {
    {"all used", "right", all_used, 0, 0, 0, 0},
    {"unused on all ranks", "SILENT local gradients, then error a step late", unused_on_all, 0, 0, 0, 0},
    {"unused on one rank", "error a step late there, others hang", unused_on_last, 0, 0, 0, 0},
    {"unused on different ranks in turn", "error a step late, hang", unused_in_turn, 0, 0, 0, 0},
    {"ranks use disjoint sets", "error a step late", disjoint, 0, 0, 0, 0},
    {"disjoint sets that shift", "error a step late", disjoint_shifting, 0, 0, 0, 0},
    {"used later", "error a step late", used_later, 0, 0, 0, 0},
    {"unused later", "local gradients, then error", unused_later, 0, 0, 0, 0},
    {"used several times in one graph", "right", used_twice, 0, 0, 0, 0},
    {"two forwards, one backward", "right", two_forwards, 0, 0, 0, 0},
    {"two forwards, disjoint parameters, one backward", "right; with the flag error", two_forwards_disjoint, 0, 0, 0,
     0},
    {"two forwards, two backwards", "SILENT wrong", all_used, 0, 2, 0, 0},
    {"one forward, two backwards", "SILENT wrong", same_loss_again, 0, 2, true, 0},
    {"shared trunk, two losses, two backwards", "error, with the flag SILENT wrong", trunk_two_heads, 0, 2, true, 0},
    {"two losses over disjoint parameters", "right; with the flag error", losses_disjoint, 0, 2, 0, 0},
    {"loss on a feature, then on the output", "error, with the flag SILENT wrong", feature_then_final, 0, 2, true, 0},
    {"loss on the output, then on a feature", "error, with the flag SILENT wrong", final_then_feature, 0, 2, true, 0},
    {"the same with two forwards", "error, with the flag SILENT wrong", feature_then_final_anew, 0, 2, 0, 0},
    {"loss of one rank without parameters", "hang", constant_on_one, 0, 0, 0, 0},
    {"no loss on one rank", "hang", null_on_one, 0, 0, 0, 0},
    {"no loss on rank 0 at first", "hang", null_on_first, 0, 0, 0, 0},
    {"no loss on any rank", "right (nothing happens)", null_on_all, 0, 0, 0, 0},
    {"uneven numbers of batches", "hang at the end", uneven, 0, 0, 0, 0},
    {"auxiliary loss times zero", "right, decays the parameter", zero_auxiliary, 0, 0, 0, 0},
    {"detached on all ranks but one", "error a step late", detached, 0, 0, 0, 0},
    {"read in a no-grad region", "error a step late", no_grad_region, 0, 0, 0, 0},
    {"other order of use on ranks", "right", other_order, 0, 0, 0, 0},
    {"output that does not enter the loss", "error a step late", result_unused, 0, 0, 0, 0},
    {"experts chosen by the batch", "error a step late, hang", experts, 0, 0, 0, 0},
    {"parameter read through a view", "right", reshaped, 0, 0, 0, 0},
    {"parameter that is the loss", "right", parameter_as_loss, 0, 0, 0, 0},
    {"one task's loss left out now and then", "error a step late", one_of_two_tasks, 0, 0, 0, 0},
    {"frozen before wrapping", "right", all_used, 0, 0, 0, "head.*"},
    {"accumulation over three backwards", "right", unused_in_turn, 0, 3, 0, 0},
    {"ragged batches, weighted by samples", "not offered", all_used, ragged, 0, 0, 0},
    {"the same, unused in turn", "not offered", unused_in_turn, ragged, 0, 0, 0},
    {"weighted, one rank without samples", "not offered", null_on_one, one_empty, 0, 0, 0},
    {"weighted by large counts, accumulated", "not offered", all_used, large, 2, 0, 0},
};

typedef struct job {
    const pattern *p;
    size_t bucket;
} job;

static void oracle_pass(mu_tape *t, mu_module *m, const pattern *p, place *at)
{
    double total = 0;
    for (int r = 0; r < at->size; r++) {
        total += p->samples != NULL ? (double)p->samples(&at[r]) : 1.0;
    }
    mu_tensor *sum = NULL;
    for (int r = 0; r < at->size; r++) {
        double weight = p->samples != NULL ? (double)p->samples(&at[r]) : 1.0;
        mu_tensor *loss = p->loss(t, m, &at[r]);
        if (loss != NULL) {
            loss = mu_scale(t, loss, (float)(weight / total));
            sum = sum == NULL ? loss : mu_add(t, sum, loss);
        }
    }
    if (sum != NULL) {
        mu_status s = mu_backward(t, sum);
        CHECK(s == MU_OK, "oracle: %s", mu_status_name(s));
    }
}

static void run_pattern(mu_group *g, int rank, int size, void *arg)
{
    const job *j = arg;
    const pattern *p = j->p;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = toy(c), *om = toy(oc);
    mui_store_of(m);
    float mine[5] = {(float)rank, 1, 2, 3, 4};
    if (rank > 0) { /* wrapping has to put that right */
        CHECK(mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(m, "a")), mine, 5) == MU_OK, "write");
    }
    if (p->frozen != NULL) {
        CHECK(mu_module_freeze(m, p->frozen, NULL) == MU_OK && mu_module_freeze(om, p->frozen, NULL) == MU_OK,
              "freeze");
    }
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = j->bucket, .first_bucket_bytes = j->bucket});
    CHECK(d != NULL, "%s: wrap: %s", p->name, mu_context_message(c));
    mu_tape_options o = {.retain_graph = p->retain};
    mu_tape *t = mu_tape_new(c, &o), *ot = mu_tape_new(oc, &o);
    place at[8] = {0};
    for (int step = 0; d != NULL && step < STEPS; step++) {
        mu_tape_reset(t);
        mu_tape_reset(ot);
        place own = {0};
        for (int pass = 0; pass < (p->passes > 0 ? p->passes : 1); pass++) {
            own = (place){step, pass, rank, size, {own.kept[0], own.kept[1]}};
            for (int r = 0; r < size; r++) {
                at[r] = (place){step, pass, r, size, {at[r].kept[0], at[r].kept[1]}};
            }
            mu_tensor *loss = p->loss(t, m, &own);
            mu_status s = p->samples != NULL ? mu_ddp_backward_weighted(d, t, loss, p->samples(&own))
                                             : mu_ddp_backward(d, t, loss);
            CHECK(s == MU_OK, "%s, step %d: %s", p->name, step, mu_context_message(c));
            oracle_pass(ot, om, p, at);
        }
        check_oracle(m, om, 1e-5, p->name);
        check_replicas(g, m, p->name);
        toy_optimizer_step(m, 0.1F);
        toy_optimizer_step(om, 0.1F);
    }
    check_oracle(m, om, 1e-5, p->name);
    CHECK(d == NULL || mu_ddp_check(d) == MU_OK, "%s: check: %s", p->name, mu_context_message(c));
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

static void every_pattern_is_right(void **state)
{
    (void)state;
    static const mu_group_options patient = {.timeout_seconds = 60, .arena_bytes = 1 << 22};
    size_t count = sizeof(patterns) / sizeof(patterns[0]), right = 0;
    printf("%-50s %-48s %s\n", "pattern", "PyTorch 1.13's DistributedDataParallel", "Muster");
    for (size_t i = 0; i < count; i++) {
        int bad = 0, runs = 0;
        for (int large = 0; large < 2; large++) {
            job j = {&patterns[i], large ? (size_t)1 << 20 : 1};
            for (int size = 1; size <= 4; size++, runs++) {
                bad += run_threads(size, run_pattern, &j, &patient, true) > 0;
            }
            bad += run_processes(2 + large, run_pattern, &j, &patient, true) > 0;
            runs++;
        }
        char outcome[64];
        snprintf(outcome, sizeof(outcome), bad == 0 ? "right" : "WRONG in %d of %d", bad, runs);
        printf("%-50s %-48s %s\n", patterns[i].name, patterns[i].pytorch, outcome);
        fflush(stdout);
        right += bad == 0;
    }
    printf("%zu of %zu patterns right\n", right, count);
    assert_int_equal(right, count);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_pattern_is_right)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
