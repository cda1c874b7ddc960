/* Rows in which the model is not on all ranks what it was: changed before or after wrapping, loaded, built differently.
 */
#include "patterns.h"

static const mu_init normal = {MU_INIT_NORMAL, 1.0F};

/* -- replace, add, remove, freeze, unfreeze ----------------------------------------------------------------------- */
enum { HEAD, BLOCK, ADDED, REMOVED, FROZEN, UNFROZEN, TOGGLED };

static mu_module *toy_head(mu_context *c, int64_t n)
{
    mu_module *head = mu_module_new(c, "Head", NULL);
    mu_module_parameter(head, "w", MU_DIMS(n), normal);
    return head;
}

/* On toy or heads. */
static void change(world *w, side *s, int what, int step)
{
    mu_context *c = s->c;
    mu_module *m = s->m[0];
    const char *some = w->net ? "two.*" : "b";
    switch (what) {
    case HEAD:
        OK(w, mu_module_replace(m, w->net ? "two" : "head", w->net ? mu_linear(c, 8, 4, NULL) : toy_head(c, 11)));
        break;
    case BLOCK:
        OK(w, mu_module_replace(m, w->net ? "trunk" : "head", w->net ? mu_linear(c, 6, 8, NULL) : toy_head(c, 7)));
        break;
    case ADDED: OK(w, mu_module_add(m, "more", w->net ? mu_linear(c, 8, 2, NULL) : toy_head(c, 4))); break;
    case REMOVED: OK(w, mu_module_remove(m, w->net ? "two" : "head")); break;
    case FROZEN: OK(w, mu_module_freeze(m, some, NULL)); break;
    case UNFROZEN: OK(w, mu_module_unfreeze(m, some, NULL)); break;
    case TOGGLED: OK(w, step % 2 == 0 ? mu_module_freeze(m, some, NULL) : mu_module_unfreeze(m, some, NULL)); break;
    }
    CHECK(mui_store_of(m) != NULL, "%s: %s", w->row->name, mu_context_message(c));
}

/* Whatever there is. */
static mu_tensor *existing(side *s, place *p)
{
    mu_module *m = s->m[0];
    uint64_t k = place_key(p);
    if (mu_module_get(m, "trunk") == NULL) {
        return terms(s->t, m,
                     mu_module_get(m, "head") == NULL               ? "a b c d"
                     : mu_module_get(m, "more") != NULL             ? "a b c d head.w more.w"
                     : mu_module_get_parameter(m, "head.v") == NULL ? "a b c d head.w"
                                                                    : "a b c d head.w head.v",
                     k);
    }
    mu_tensor *x = trunk_of(s, k), *sum = head_loss(s, "one", x, k);
    if (mu_module_get(m, "two") != NULL) {
        sum = mu_add(s->t, sum, head_loss(s, "two", x, k));
    }
    return mu_module_get(m, "more") == NULL ? sum : mu_add(s->t, sum, head_loss(s, "more", x, k));
}

/* Before step 2, or in every step, on all ranks; momentum of the others goes on, as it does in the oracle. */
static void changed_between_steps(world *w)
{
    for (int step = 0; step < STEPS + 1; step++) {
        if (step == 2 || w->row->arg == TOGGLED) {
            BOTH(s)
            {
                change(w, s, w->row->arg, step);
            }
        }
        good_step(w, step, existing);
    }
    check_values(w, 0);
}

/* Right after wrapping, before any step. */
static void changed_after_wrapping(world *w)
{
    BOTH(s)
    {
        change(w, s, w->row->arg, 0);
    }
    for (int step = 0; step < STEPS; step++) {
        good_step(w, step, existing);
    }
    check_values(w, 0);
}

static void changed_before_wrapping(world *w)
{
    (w->net ? build_heads : build_toy)(&w->me);
    (w->net ? build_heads : build_toy)(&w->one);
    BOTH(s)
    {
        change(w, s, w->row->arg, 0);
        s->o[0] = mu_sgd(s->m[0], 0.1F, &(mu_sgd_options){.momentum = 0.5F});
    }
    w->d[0] = wrap(w, w->me.m[0]);
    for (int step = 0; step < STEPS; step++) {
        good_step(w, step, existing);
    }
    check_values(w, 0);
}

/* Every rank drew its own values for the new head: all take rank 0's, the step that used others is skipped. */
static void replaced_with_other_values(world *w)
{
    good_step(w, 0, existing);
    w->me.c->seed = (uint64_t)(DEFAULT_SEED + 7 * w->rank);
    BOTH(s)
    {
        change(w, s, HEAD, 1);
    }
    begin_step(w, 1);
    mu_status s = rank_reduce(w, 0, existing, 0);
    CHECK(s == (w->size > 1 ? MU_SKIPPED : MU_OK), "%d: %s", (int)s, mu_context_message(w->me.c));
    if (s == MU_OK) {
        OK(w, mu_module_zero_grad(w->me.m[0]));
    }
    for (int step = 2; step < STEPS; step++) {
        good_step(w, step, existing);
    }
    check_values(w, 0);
}

static void changed_on_one_rank(world *w)
{
    good_step(w, 0, existing);
    if (w->rank == w->size - 1) {
        change(w, &w->me, w->row->arg, 0);
    }
    begin_step(w, 1);
    char who[32];
    snprintf(who, sizeof(who), "rank %d at ", w->size - 1);
    mu_status s = rank_reduce(w, 0, existing, 0);
    expect_error(w, s, MU_ERR_COMM, "rank 0 is at reduction 2", who, "of a changed model", NULL);
}

/* As an average of weights would be put in. */
static void written_on_all(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        if (step == 2) {
            float x[5] = {1, -2, 3, -4, 5};
            BOTH(s)
            {
                OK(w, mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(s->m[0], "a")), x, 5));
            }
        }
        good_step(w, step, all_terms);
    }
    check_values(w, 0);
}

static void written_in_another_shape(world *w)
{
    good_step(w, 0, all_terms);
    float x[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    mu_status s = mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(w->me.m[0], "a")), x, 9);
    CHECK(s < 0, "9 elements were taken for 5");
    mu_context_clear(w->me.c);
    good_step(w, 1, all_terms);
    check_values(w, 0);
}

/* -- checkpoints -------------------------------------------------------------------------------------------------- */
/* A file with the values of another network of this kind, trained for ten classes elsewhere. */
static void write_pretrained(world *w, const char *path, int64_t classes, const char *prefix)
{
    mu_context *c = quiet_context();
    c->seed = 77;
    OK(w, mu_save(residual(c, classes), path, &(mu_save_options){.prefix = prefix}));
    CHECK(mu_context_close(c) == MU_OK, "pretrained");
}

static void load(world *w, side *s, const char *path, const mu_load_options *o, int64_t skipped)
{
    mu_load_report r;
    OK(w, mu_load(s->m[0], path, o, &r));
    CHECK(mu_context_status(s->c) == MU_OK, "%s: %s", w->row->name, mu_context_message(s->c));
    CHECK(r.loaded > 0 && r.mismatched == skipped, "%s: %d loaded, %d mismatched: %s", w->row->name, (int)r.loaded,
          (int)r.mismatched, r.text);
}

static void wrap_residual(world *w)
{
    w->d[0] = wrap(w, w->me.m[0]);
    CHECK(w->d[0] != NULL, "%s: %s", w->row->name, mu_context_message(w->me.c));
    BOTH(s)
    {
        s->o[0] = mu_sgd(s->m[0], 0.05F, &(mu_sgd_options){.momentum = 0.9F});
    }
}

/* The first report that started Muster: a pretrained network whose head is replaced, loaded with strict=False from a
 * file written by a wrapped model (module.), wrapped, trained. */
enum { ALL_TRAINED = 1, HEAD_TRAINED = 2, REPLACED_AFTER_LOAD = 4 };
static void fine_tune(world *w)
{
    char path[96];
    own_file(w, path);
    write_pretrained(w, path, 10, "module.");
    BOTH(s)
    {
        bool after = w->row->arg & REPLACED_AFTER_LOAD;
        s->m[0] = residual(s->c, 10);
        if (!after) {
            OK(w, mu_module_replace(s->m[0], "fc", mu_linear(s->c, 8, 3, NULL)));
        }
        mu_load_report r;
        OK(w, mu_load(s->m[0], path, &(mu_load_options){.not_strict = true, .skip_mismatched = true}, &r));
        CHECK(strcmp(r.prefix_removed, "module.") == 0 && r.loaded == (after ? 20 : 18) &&
                  r.mismatched == (after ? 0 : 2),
              "%d loaded, %d mismatched, prefix `%s`: %s", (int)r.loaded, (int)r.mismatched, r.prefix_removed, r.text);
        if (after) {
            OK(w, mu_module_replace(s->m[0], "fc", mu_linear(s->c, 8, 3, NULL)));
        }
        if (w->row->arg & HEAD_TRAINED) {
            OK(w, mu_module_freeze(s->m[0], "*", NULL));
            OK(w, mu_module_unfreeze(s->m[0], "fc.*", NULL));
        }
    }
    unlink(path);
    wrap_residual(w);
    for (int step = 0; step < STEPS; step++) {
        good_step(w, step, residual_loss);
    }
    check_values(w, 0);
}

/* Before wrapping, on all ranks, on rank 0 or on another only: rank 0's values are what counts. */
enum { ON_ALL, ON_FIRST, ON_LAST };
static bool loads(const world *w, const side *s)
{
    int who = w->row->arg;
    return who == ON_ALL || (who == ON_FIRST ? s->oracle || w->rank == 0 : !s->oracle && w->rank == w->size - 1);
}

static void loaded_before_wrapping(world *w)
{
    char path[96];
    own_file(w, path);
    write_pretrained(w, path, 3, NULL);
    BOTH(s)
    {
        s->m[0] = residual(s->c, 3);
        if (loads(w, s)) {
            load(w, s, path, NULL, 0);
        }
    }
    unlink(path);
    wrap_residual(w);
    for (int step = 0; step < STEPS; step++) {
        good_step(w, step, residual_loss);
    }
    check_values(w, 0);
}

/* After some steps, on all ranks, or read by rank 0 and given to the others. */
static void loaded_after_wrapping(world *w)
{
    char path[96];
    own_file(w, path);
    write_pretrained(w, path, 3, NULL);
    good_step(w, 0, residual_loss);
    load(w, &w->me, path, &(mu_load_options){.group = w->row->arg == ON_FIRST ? w->g : NULL}, 0);
    load(w, &w->one, path, NULL, 0);
    unlink(path);
    for (int step = 1; step < STEPS; step++) {
        good_step(w, step, residual_loss);
    }
    check_values(w, 0);
}

static void loaded_on_one_rank(world *w)
{
    int steps = w->row->arg;
    for (int step = 0; step < steps; step++) {
        good_step(w, step, residual_loss);
    }
    if (w->rank == w->size - 1) {
        char path[96];
        own_file(w, path);
        write_pretrained(w, path, 3, NULL);
        load(w, &w->me, path, NULL, 0);
        unlink(path);
    }
    begin_step(w, steps);
    char who[64], text[100];
    snprintf(who, sizeof(who), "rank %d at reduction %d", w->size - 1, steps + 1);
    snprintf(text, sizeof(text), "after %d optimiser steps and 0 since it loaded a file", steps);
    expect_error(w, rank_reduce(w, 0, residual_loss, 0), MU_ERR_COMM, "rank 0 is at", who, text, NULL);
}

/* Nothing but a comparison can see that. */
static void written_on_one_rank(world *w)
{
    good_step(w, 0, all_terms);
    float x[5] = {1, -2, 3, -4, 5};
    if (w->rank == w->size - 1) {
        OK(w, mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(w->me.m[0], "a")), x, 5));
    }
    begin_step(w, 1);
    char who[64];
    snprintf(who, sizeof(who), "rank %d at reduction 2", w->size - 1);
    expect_error(w, rank_reduce(w, 0, all_terms, 0), MU_ERR_COMM, who, "written: `a`", NULL);
}

/* -- construction ------------------------------------------------------------------------------------------------- */
enum { COUNT, SHAPE, DTYPE, ORDER, TRAINABLE, NAME };

static mu_module *odd_model(mu_context *c, int kind, bool odd)
{
    mu_module *m = mu_module_new(c, "Net", NULL);
    const char *first = kind == ORDER && odd ? "q" : "p", *second = kind == ORDER && odd ? "p" : "q";
    mu_module_parameter(m, kind == NAME && odd ? "r" : first, MU_DIMS(4), normal);
    mu_module_parameter(m, second, MU_DIMS(kind == SHAPE && odd ? 5 : 4), normal);
    mu_module_buffer(m, "seen", MU_DIMS(2), kind == DTYPE && odd ? MU_I64 : MU_F32, 0);
    if (kind == COUNT && odd) {
        mu_module_parameter(m, "more", MU_DIMS(4), normal);
    }
    if (kind == TRAINABLE) {
        CHECK(mu_module_freeze(m, odd ? "p" : "q", NULL) == MU_OK, "freeze");
    }
    return m;
}

static void built_differently(world *w)
{
    static const char *const zeros[] = {"rank 0 has buffer `seen` (2,)",
                                        "rank 0 has parameter `q` (4,)",
                                        "rank 0 has buffer `seen` (2,) float32",
                                        "rank 0 has parameter `p` (4,)",
                                        "rank 0 has parameter `p` (4,) float32, trainable",
                                        "rank 0 has parameter `p` (4,)"};
    static const char *const others[] = {"has parameter `more` (4,)",
                                         "has parameter `q` (5,)",
                                         "has buffer `seen` (2,) int64",
                                         "has parameter `q` (4,)",
                                         "has parameter `p` (4,) float32, frozen",
                                         "has parameter `r` (4,)"};
    mu_module *m = odd_model(w->me.c, w->row->arg, w->rank == w->size - 1);
    char who[100];
    snprintf(who, sizeof(who), "rank %d %s", w->size - 1, others[w->row->arg]);
    mu_ddp *d = wrap(w, m);
    CHECK(d == NULL, "%s: was wrapped", w->row->name);
    expect_error(w, d == NULL ? MU_ERR_COMM : MU_OK, MU_ERR_COMM, zeros[w->row->arg], who, NULL);
}

static void options_differ(world *w)
{
    mu_module *m = toy(w->me.c);
    mu_ddp *d = mu_ddp_wrap(m, w->g, &(mu_ddp_options){.absent = w->rank == 0 ? MU_ABSENT_QUIET : MU_ABSENT_ERROR});
    CHECK(d == NULL, "%s: was wrapped", w->row->name);
    expect_error(w, d == NULL ? MU_ERR_COMM : MU_OK, MU_ERR_COMM, "absent policy", "rank 0 has", "rank 1 has", NULL);
}

static const row list[] = {
    {.line = 16,
     .name = "module replaced between steps",
     .plain = "SILENT wrong, error a step late",
     .unused = "SILENT wrong",
     .fixed = "SILENT wrong",
     .run = changed_between_steps,
     .arg = HEAD,
     .loss = existing,
     .net = existing},
    {.line = 16,
     .name = "module replaced right after wrapping",
     .plain = "SILENT wrong, error a step late",
     .unused = "SILENT wrong",
     .fixed = "SILENT wrong",
     .run = changed_after_wrapping,
     .arg = BLOCK,
     .loss = existing,
     .net = existing},
    {.line = 16,
     .name = "module replaced on one rank only",
     .plain = "SILENT wrong, error a step late",
     .unused = "SILENT wrong",
     .fixed = "SILENT wrong",
     .error = "of a changed model",
     .run = changed_on_one_rank,
     .arg = HEAD,
     .loss = existing,
     .net = existing},
    {.line = 17,
     .name = "module added after wrapping",
     .plain = "SILENT wrong",
     .run = changed_between_steps,
     .arg = ADDED,
     .loss = existing,
     .net = existing},
    {.line = 17,
     .name = "module added on one rank only",
     .plain = "SILENT wrong",
     .error = "of a changed model",
     .run = changed_on_one_rank,
     .arg = ADDED,
     .loss = existing,
     .net = existing},
    {.line = 18,
     .name = "values of a parameter overwritten on all ranks (.data replaced)",
     .plain = "right",
     .run = written_on_all,
     .loss = all_terms},
    {.line = 18,
     .name = "values of another shape written",
     .plain = "internal error",
     .note = "the write is refused",
     .run = written_in_another_shape,
     .loss = all_terms},
    {.line = 19,
     .name = "frozen after wrapping",
     .plain = "SILENT wrong, error a step late",
     .unused = "right",
     .fixed = "error a step late",
     .run = changed_between_steps,
     .arg = FROZEN,
     .loss = existing,
     .net = existing},
    {.line = 19,
     .name = "frozen and unfrozen in turn",
     .plain = "error a step late",
     .unused = "right",
     .fixed = "error a step late",
     .run = changed_between_steps,
     .arg = TOGGLED,
     .loss = existing,
     .net = existing},
    {.line = 19,
     .name = "frozen on one rank only",
     .plain = "error a step late",
     .error = "of a changed model",
     .run = changed_on_one_rank,
     .arg = FROZEN,
     .loss = existing,
     .net = existing},
    {.line = 20,
     .name = "unfrozen after wrapping",
     .plain = "SILENT wrong",
     .run = changed_between_steps,
     .arg = UNFROZEN,
     .frozen = "*b*",
     .loss = existing},
    {.line = 20,
     .name = "unfrozen on one rank only",
     .plain = "SILENT wrong",
     .error = "of a changed model",
     .run = changed_on_one_rank,
     .arg = UNFROZEN,
     .frozen = "*b*",
     .loss = existing},
    {.line = 47,
     .name = "construction: another number of parameters",
     .plain = "error on all ranks",
     .error = "the ranks' models differ",
     .run = built_differently,
     .arg = COUNT,
     .unwrapped = true},
    {.line = 47,
     .name = "construction: another shape",
     .plain = "error there, others hang",
     .error = "the ranks' models differ",
     .run = built_differently,
     .arg = SHAPE,
     .unwrapped = true},
    {.line = 48,
     .name = "construction: another dtype",
     .plain = "SILENT garbage, or a crash",
     .error = "the ranks' models differ",
     .note = "(of a buffer: parameters are float32)",
     .run = built_differently,
     .arg = DTYPE,
     .unwrapped = true},
    {.line = 49,
     .name = "construction: another order of registration",
     .plain = "SILENT exchanged",
     .error = "the ranks' models differ",
     .run = built_differently,
     .arg = ORDER,
     .unwrapped = true},
    {.line = 50,
     .name = "construction: other parameters require gradients",
     .plain = "SILENT mixed",
     .error = "the ranks' models differ",
     .run = built_differently,
     .arg = TRAINABLE,
     .unwrapped = true},
    {.line = 51,
     .name = "checkpoint loaded on one rank after wrapping",
     .plain = "SILENT, for ever",
     .error = "optimiser steps and 0 since it loaded a file",
     .run = loaded_on_one_rank,
     .build = build_residual,
     .arg = 0,
     .tolerance = 1e-4},
    {.line = 51,
     .name = "checkpoint loaded on one rank between steps",
     .plain = "SILENT, for ever",
     .error = "optimiser steps and 0 since it loaded a file",
     .run = loaded_on_one_rank,
     .build = build_residual,
     .arg = 2,
     .tolerance = 1e-4},
    {.name = "values of a parameter overwritten on one rank",
     .plain = "SILENT, for ever",
     .error = "with values of 1 parameters written",
     .run = written_on_one_rank,
     .loss = all_terms},
    {.name = "construction: another name",
     .plain = "not noticed",
     .error = "the ranks' models differ",
     .run = built_differently,
     .arg = NAME,
     .unwrapped = true},
    {.name = "construction: other options",
     .plain = "not noticed",
     .error = "the ranks' models differ",
     .run = options_differ,
     .unwrapped = true},
    {.name = "head replaced before wrapping",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .run = changed_before_wrapping,
     .arg = HEAD,
     .unwrapped = true,
     .loss = existing,
     .net = existing},
    {.name = "some frozen before wrapping",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .run = changed_before_wrapping,
     .arg = FROZEN,
     .unwrapped = true,
     .loss = existing,
     .net = existing},
    {.name = "module removed between steps",
     .plain = "SILENT wrong, error a step late",
     .unused = "right",
     .fixed = "error a step late",
     .run = changed_between_steps,
     .arg = REMOVED,
     .loss = existing,
     .net = existing},
    {.name = "module removed on one rank only",
     .plain = "error a step late",
     .error = "of a changed model",
     .run = changed_on_one_rank,
     .arg = REMOVED,
     .loss = existing,
     .net = existing},
    {.name = "head replaced, each rank with values of its own",
     .plain = "SILENT wrong",
     .unused = "SILENT wrong",
     .fixed = "SILENT wrong",
     .note = "rank 0's values; one step skipped on all ranks",
     .run = replaced_with_other_values,
     .loss = existing,
     .net = existing},
    {.name = "pretrained, fc replaced, strict=False, `module.` keys, wrapped, trained",
     .plain = "SILENT: nothing is loaded",
     .run = fine_tune,
     .arg = ALL_TRAINED,
     .unwrapped = true,
     .tolerance = 1e-4},
    {.name = "the same, only the new fc trained",
     .plain = "SILENT: nothing is loaded",
     .run = fine_tune,
     .arg = HEAD_TRAINED,
     .unwrapped = true,
     .tolerance = 1e-4},
    {.name = "the same, fc replaced after loading",
     .plain = "SILENT: nothing is loaded",
     .run = fine_tune,
     .arg = ALL_TRAINED | REPLACED_AFTER_LOAD,
     .unwrapped = true,
     .tolerance = 1e-4},
    {.name = "checkpoint loaded before wrapping, on all ranks",
     .plain = "right",
     .run = loaded_before_wrapping,
     .arg = ON_ALL,
     .unwrapped = true,
     .tolerance = 1e-4},
    {.name = "checkpoint loaded before wrapping, on rank 0 only",
     .plain = "right",
     .run = loaded_before_wrapping,
     .arg = ON_FIRST,
     .unwrapped = true,
     .tolerance = 1e-4},
    {.name = "checkpoint loaded before wrapping, on another rank only",
     .plain = "right",
     .note = "rank 0's values count",
     .run = loaded_before_wrapping,
     .arg = ON_LAST,
     .unwrapped = true,
     .least_ranks = 2,
     .tolerance = 1e-4},
    {.name = "checkpoint loaded after wrapping, on all ranks",
     .plain = "right",
     .run = loaded_after_wrapping,
     .arg = ON_ALL,
     .build = build_residual,
     .tolerance = 1e-4},
    {.name = "checkpoint loaded after wrapping, by rank 0 for all",
     .plain = "not offered",
     .run = loaded_after_wrapping,
     .arg = ON_FIRST,
     .build = build_residual,
     .tolerance = 1e-4},
};
const rows change_rows = {list, sizeof(list) / sizeof(list[0])};
