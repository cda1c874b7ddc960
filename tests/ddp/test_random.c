/* Random graphs: each rank's loss of each reduction is drawn anew, from views, products, broadcasts, detached and
 * no-grad parts, joined or layered branches over a random subset of the parameters, or there is none at all. Random
 * numbers of reductions before a step, weights, micro-steps without communication, now and then a rank that fails, and
 * between steps changes of the tree: freezing, unfreezing, modules replaced, added and removed. Against one process that differentiates the mean of
 * all ranks' losses. Seeds are fixed, so a failure names the one to run again. */
#include "rig.h"

enum { RANDOM_STEPS = 6, LEAVES = 8 };

typedef struct dice {
    uint64_t state;
} dice;
static int roll(dice *d, int sides)
{
    d->state++;
    return (int)(mix(d->state) % (uint64_t)sides);
}
static dice dice_of(uint64_t seed, int a, int b, int rank)
{
    uint64_t s = mix(seed);
    s = mix(s ^ (uint64_t)(a * 7919 + 1));
    s = mix(s ^ (uint64_t)(b * 104729 + 3));
    return (dice){mix(s ^ (uint64_t)(rank * 15485863 + 5)) << 8};
}

/* Three blocks of (4, 6) weights with a bias each, and a scalar-like gain at the root. */
static mu_module *block(mu_context *c)
{
    const mu_init normal = {MU_INIT_NORMAL, 0.5F};
    mu_module *b = mu_module_new(c, "Block", NULL);
    mu_module_parameter(b, "w", MU_DIMS(4, 6), normal);
    mu_module_parameter(b, "v", MU_DIMS(6), normal);
    return b;
}
static mu_module *random_model(mu_context *c)
{
    const mu_init normal = {MU_INIT_NORMAL, 0.5F};
    mu_module *m = mu_module_new(c, "Random", NULL);
    mu_module_parameter(m, "gain", MU_DIMS(1), normal);
    mu_module_parameter(m, "row", MU_DIMS(1, 6), normal);
    bool added = true;
    for (int i = 0; i < 3; i++) {
        char name[4] = {'b', (char)('0' + i), '\0'};
        added = mu_module_add(m, name, block(c)) == MU_OK && added;
    }
    /* The first block's weights under a second name: one parameter, two modules. */
    mu_module *b2 = mu_module_get(m, "b2");
    added = mu_module_share(b2, "tied", mu_module_get_parameter(m, "b0.w")) == MU_OK && added;
    return added ? m : NULL;
}

static mu_tensor *value_of(mu_module *m, const char *name)
{
    mu_parameter *p = mu_module_get_parameter(m, name);
    return p != NULL ? mu_parameter_tensor(p) : NULL;
}
static mu_tensor *noise(mu_tape *t, dice *d, mu_dims dims)
{
    float x[RIG_MOST];
    for (int i = 0; i < RIG_MOST; i++) {
        x[i] = (float)(roll(d, 2001) - 1000) / 1000.0F;
    }
    return mu_tensor_from(t, dims, x);
}

/* A (4, 6) tensor out of some parameter, often through a view of it. What is not there is a constant. */
static mu_tensor *leaf(mu_tape *t, mu_module *m, dice *d)
{
    static const char *const wide[] = {"b0.w", "b1.w", "b2.w", "b2.tied", "b3.w"};
    static const char *const narrow[] = {"b0.v", "b1.v", "b2.v", "b3.v"};
    mu_tensor *x = NULL, *zero = mu_tensor_zeros(t, MU_DIMS(4, 6));
    int kind = roll(d, LEAVES), which = roll(d, 60);
    if (kind < 3) {
        x = value_of(m, wide[which % 5]);
    } else if (kind < 5) {
        x = value_of(m, narrow[which % 4]);
    } else if (kind == 5) {
        x = value_of(m, "row");
    } else if (kind == 6) {
        x = value_of(m, "gain");
    }
    if (x == NULL) {
        return noise(t, d, MU_DIMS(4, 6));
    }
    if (kind >= 3) {
        return mu_add(t, zero, x);
    }
    switch (roll(d, 5)) {
    case 0: /* two halves, the other way round */
        return mu_concat(t, (mu_tensor *[]){mu_narrow(t, x, 1, 2, 4), mu_narrow(t, x, 1, 0, 2)}, 2, 1);
    case 1: /* transposed and back in another shape */
        return mu_reshape(t, mu_permute(t, x, MU_DIMS(1, 0)), MU_DIMS(4, 6));
    case 2: /* one row for all */
        return mu_add(t, zero, mu_narrow(t, x, 0, roll(d, 4), 1));
    case 3: /* the same parameter twice */
        return mu_mul(t, x, x);
    default: return x;
    }
}

static mu_tensor *branch(mu_tape *t, mu_module *m, dice *d)
{
    mu_tensor *x = leaf(t, m, d);
    for (int depth = roll(d, 4); depth > 0; depth--) {
        bool quiet = roll(d, 6) == 0;
        if (quiet) {
            mu_no_grad_begin(t, "quiet");
        }
        mu_tensor *y = roll(d, 3) == 0 ? x : leaf(t, m, d);
        if (quiet) {
            y = mu_tanh(t, y);
            mu_no_grad_end(t);
        }
        switch (roll(d, 7)) {
        case 0: x = mu_add(t, x, y); break;
        case 1: x = mu_mul(t, mu_tanh(t, x), y); break;
        case 2: x = mu_linear_op(t, mu_matmul(t, x, mu_permute(t, y, MU_DIMS(1, 0))), noise(t, d, MU_DIMS(6, 4)), NULL); break;
        case 3: x = mu_sub(t, y, mu_sigmoid(t, x)); break;
        case 4: x = mu_add(t, x, mu_detach(t, y)); break;
        case 5: x = mu_mul(t, mu_softmax(t, x), y); break;
        default: x = mu_add_relu(t, x, y); break;
        }
    }
    return x;
}

/* The loss of one rank in one reduction; NULL: it has none. */
static mu_tensor *random_loss(mu_tape *t, mu_module *m, dice d)
{
    if (roll(&d, 7) == 0) {
        return NULL;
    }
    mu_tensor *sum = NULL;
    for (int n = 1 + roll(&d, 3); n > 0; n--) {
        mu_tensor *x = branch(t, m, &d);
        if (roll(&d, 5) == 0) {
            (void)branch(t, m, &d); /* nothing uses it */
        }
        x = roll(&d, 2) == 0 ? mu_mse_loss(t, x, noise(t, &d, MU_DIMS(4, 6)))
                             : mu_mean(t, mu_mul(t, x, noise(t, &d, MU_DIMS(4, 6))));
        sum = sum == NULL ? x : mu_add(t, sum, x);
    }
    return sum;
}

/* The same change in every replica and in the oracle. */
static void change(mu_context *c, mu_module *m, dice d)
{
    mu_status s = MU_OK;
    switch (roll(&d, 8)) {
    case 0: s = mu_module_freeze(m, roll(&d, 2) ? "b0.*" : "*.v", NULL); break;
    case 1: s = mu_module_freeze(m, "row", NULL); break;
    case 2: s = mu_module_unfreeze(m, "*", NULL); break;
    case 3: s = mu_module_replace(m, "b1", block(c)); break;
    case 4: s = mu_module_get(m, "b3") == NULL ? mu_module_add(m, "b3", block(c)) : mu_module_remove(m, "b3"); break;
    default: break;
    }
    CHECK(s == MU_OK, "change: %s", mu_context_message(c));
}

typedef struct random_job {
    uint64_t seed;
} random_job;

static mu_optimizer *optimizer_of(mu_module *m, uint64_t seed)
{
    return seed % 2 == 0 ? mu_sgd(m, 0.05F, &(mu_sgd_options){.momentum = 0.9F, .weight_decay = 0.01F})
                         : mu_sgd(m, 0.05F, NULL);
}

/* A reduction that one rank cannot make: it gives up, its forward fails, or its loss is none. Nothing may change. */
static void one_failure(mu_ddp *d, mu_tape *t, mu_module *m, const dice *each, int rank, int size, dice how)
{
    int bad = roll(&how, size), why = roll(&how, 3);
    dice mine = {each[rank].state ^ 0xaaaa};
    mu_tensor *loss = random_loss(t, m, mine);
    if (rank != bad) {
        CHECK(mu_ddp_backward(d, t, loss) == MU_SKIPPED, "rank %d failed, why %d", bad, why);
        return;
    }
    mu_context *c = mu_module_context(m);
    mu_status s;
    if (why == 0) {
        s = mu_ddp_abandon(d, "drawn at random");
        CHECK(s == MU_SKIPPED, "abandon: %s", mu_status_name(s));
    } else if (why == 1) {
        loss = mu_add(t, mu_tensor_zeros(t, MU_DIMS(2)), mu_tensor_zeros(t, MU_DIMS(3)));
        s = mu_ddp_backward(d, t, loss);
        CHECK(s == MU_ERR_SHAPE && mu_context_status(c) == s, "failed forward: %s", mu_status_name(s));
    } else {
        s = mu_ddp_backward(d, t, mu_tensor_zeros(t, MU_DIMS(2, 2)));
        CHECK(s == MU_ERR_SHAPE && mu_context_status(c) == s, "no loss: %s", mu_status_name(s));
    }
    mu_context_clear(c);
}

/* One reduction on this rank, and the whole of it in the oracle. */
static void one_reduction(mu_ddp *d, mu_tape *t, mu_module *m, mu_tape *ot, mu_module *om, const dice *each, int rank,
                          int size, dice how, bool first)
{
    bool weighted = roll(&how, 3) == 0;
    int64_t samples[8], total = 0;
    for (int r = 0; r < size; r++) {
        samples[r] = weighted ? roll(&how, 6) : 1;
        total += samples[r];
    }
    if (total == 0) {
        total = samples[0] = 1;
    }
    /* Some ranks leave a gradient of their own first. Not on top of reduced ones, where all would have to. */
    bool micro = first && roll(&how, 3) == 0;
    for (int r = 0; r < size; r++) {
        dice before = {each[r].state ^ 0x5555};
        bool has = micro && roll(&how, 2) == 0;
        for (int where = 0; has && where < 2; where++) {
            if (where == 0 && r != rank) {
                continue;
            }
            mu_tape *at = where == 0 ? t : ot;
            mu_tensor *loss = random_loss(at, where == 0 ? m : om, before);
            if (loss != NULL) {
                loss = where == 0 ? loss : mu_scale(at, loss, (float)((double)samples[r] / (double)total));
                mu_status s = mu_backward(at, loss);
                CHECK(s == MU_OK, "micro-step: %s", mu_status_name(s));
            }
        }
    }
    mu_tensor *loss = random_loss(t, m, each[rank]);
    mu_status s = weighted ? mu_ddp_backward_weighted(d, t, loss, samples[rank]) : mu_ddp_backward(d, t, loss);
    CHECK(s == MU_OK, "reduction: %s", mu_status_name(s));
    mu_tensor *sum = NULL;
    for (int r = 0; r < size; r++) {
        mu_tensor *x = random_loss(ot, om, each[r]);
        if (x != NULL) {
            x = mu_scale(ot, x, (float)((double)samples[r] / (double)total));
            sum = sum == NULL ? x : mu_add(ot, sum, x);
        }
    }
    s = sum != NULL ? mu_backward(ot, sum) : MU_OK;
    CHECK(s == MU_OK, "oracle: %s", mu_status_name(s));
}

static void run_random(mu_group *g, int rank, int size, void *arg)
{
    const random_job *j = arg;
    mu_context *c = g->context, *oc = quiet_context();
    mu_module *m = random_model(c), *om = random_model(oc);
    size_t bucket = j->seed % 3 == 0 ? 1 : j->seed % 3 == 1 ? 128 : 1 << 20;
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = bucket, .first_bucket_bytes = bucket,
                                                    .absent = MU_ABSENT_QUIET, .check_every = 3});
    mu_tape *t = mu_tape_new(c, NULL), *ot = mu_tape_new(oc, NULL);
    mu_optimizer *o = optimizer_of(m, j->seed), *oo = optimizer_of(om, j->seed);
    char what[64];
    for (int step = 0; step < RANDOM_STEPS; step++) {
        mu_tape_reset(t);
        mu_tape_reset(ot);
        dice of_step = dice_of(j->seed, step, 99, 0);
        if (step > 0) {
            change(c, m, of_step);
            change(oc, om, of_step);
        }
        of_step.state += 50;
        int passes = 1 + roll(&of_step, 3);
        for (int pass = 0; pass < passes; pass++) {
            dice each[8];
            for (int r = 0; r < size; r++) {
                each[r] = dice_of(j->seed, step, pass, r);
            }
            dice failure = dice_of(j->seed, step, pass, 33);
            if (roll(&failure, 5) == 0) {
                one_failure(d, t, m, each, rank, size, failure);
            }
            one_reduction(d, t, m, ot, om, each, rank, size, dice_of(j->seed, step, pass, 77), pass == 0);
            snprintf(what, sizeof(what), "seed %d of %d ranks, step %d, pass %d", (int)j->seed, size, step, pass);
            CHECK(mu_context_status(c) == MU_OK && mu_context_status(oc) == MU_OK, "%s: %s; %s", what,
                  mu_context_message(c), mu_context_message(oc));
            check_close(m, om, 1e-4, 0.02, what);
            check_replicas(g, m, what);
        }
        if (roll(&of_step, 3) == 0) {
            mu_status s = mu_clip_grad_norm(m, 0.5F, NULL), os = mu_clip_grad_norm(om, 0.5F, NULL);
            CHECK(s == MU_OK && os == MU_OK, "%s: clip", what);
        }
        mu_status s = mu_optimizer_step(o), os = mu_optimizer_step(oo);
        CHECK(s == MU_OK && os == MU_OK, "%s: step", what);
        check_close(m, om, 1e-4, 0.02, what);
        check_replicas(g, m, what);
    }
    CHECK(mu_ddp_check(d) == MU_OK, "%s: check", what);
    CHECK(mu_context_close(oc) == MU_OK, "oracle's context");
}

static void random_graphs_are_reduced_right(void **state)
{
    (void)state;
    static const mu_group_options patient = {.timeout_seconds = 60, .arena_bytes = 1 << 22};
    const char *first = getenv("RANDOM_SEED"), *number = getenv("RANDOM_RUNS");
    int from = first != NULL ? atoi(first) : 1, runs = number != NULL ? atoi(number) : 64, bad = 0;
    for (int i = from; i < from + runs; i++) {
        random_job j = {(uint64_t)i};
        bad += run_threads(1 + i % 4, run_random, &j, &patient, true) > 0;
    }
    assert_int_equal(bad, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_graphs_are_reduced_right)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
