/* mu_training_load: the model by mu_load's plan, the optimiser and the numbers beside it, all or nothing on all ranks. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "comm/agree.h"
#include "io/load_plan.h"
#include "io/load_report.h"
#include "io/optim_find.h"
#include "io/training_state.h"

#include <stdlib.h>
#include <string.h>

typedef struct parameter_place {
    const mu_parameter *parameter;
    size_t entry;  /* of the file */
    int64_t index; /* of the optimiser's parameter; -1: not found there */
} parameter_place;

static int by_parameter(const void *a, const void *b)
{
    const parameter_place *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->parameter, q = (uintptr_t)y->parameter;
    return p != q ? (p < q ? -1 : 1) : x->entry < y->entry ? -1 : x->entry > y->entry;
}

static int by_entry(const void *a, const void *b)
{
    const parameter_place *x = a, *y = b;
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

/* The optimiser's parameters in the order in which the file's state dict has them, a tied one where it is first: that of
 * model.parameters() in PyTorch. *known false: some are not in the file. */
static mu_status file_order(const mui_plan *p, mu_optimizer *o, int64_t parameters, int64_t *order, bool *known)
{
    size_t n = 0;
    parameter_place *places = mui_calloc(p->context, p->states.count + (size_t)parameters, sizeof(*places));
    if (places == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < p->states.count; i++) {
        if (p->states.items[i].parameter != NULL && p->items[i].entry != SIZE_MAX) {
            places[n++] = (parameter_place){p->states.items[i].parameter, p->items[i].entry, -1};
        }
    }
    qsort(places, n, sizeof(*places), by_parameter);
    *known = true;
    parameter_place *chosen = places + p->states.count;
    for (int64_t i = 0; i < parameters && *known; i++) {
        const mu_parameter *wanted = mui_optimizer_get(o, i).parameter;
        size_t from = 0, to = n; /* the first place of it */
        while (from < to) {
            size_t middle = from + (to - from) / 2;
            bool before = (uintptr_t)places[middle].parameter < (uintptr_t)wanted;
            from = before ? middle + 1 : from;
            to = before ? to : middle;
        }
        *known = from < n && places[from].parameter == wanted;
        chosen[i] = *known ? (parameter_place){wanted, places[from].entry, i} : (parameter_place){0};
    }
    if (*known && parameters > 0) {
        qsort(chosen, (size_t)parameters, sizeof(*chosen), by_entry);
        for (int64_t i = 0; i < parameters; i++) {
            order[i] = chosen[i].index;
        }
    }
    mui_free(p->context, places);
    return MU_OK;
}

static mu_status read_optimizer(mui_plan *p, mui_training_state *t, mu_checkpoint_file *k)
{
    bool known = false;
    int64_t *order = mui_calloc(p->context, (size_t)t->parameters, sizeof(*order));
    mu_status s = order != NULL ? file_order(p, t->optimizer, t->parameters, order, &known) : MU_ERR_NOMEM;
    s = s == MU_OK ? mui_optim_state_read(t, k, known ? order : NULL) : s;
    mui_free(p->context, order);
    return s;
}

/* The model's key when none is given: "model" where the file has a dict of that name. */
static const char *model_key(const mu_checkpoint_file *k, const char *given)
{
    for (size_t i = 0; given == NULL && i < k->tree.branch_count; i++) {
        if (strcmp(k->tree.branches[i].path, "model") == 0) {
            return "model";
        }
    }
    return given;
}

static mu_status read_file(mui_plan *p, mui_training_state *t, const char *path, const mu_load_options *given)
{
    mu_load_options o = *given;
    mu_checkpoint_file *k = mu_checkpoint_open_with(p->context, path, given->file);
    const mui_value *found = NULL;
    if (k == NULL) {
        return mu_context_status(p->context);
    }
    o.key = model_key(k, o.key);
    /* First whether it is a training file at all: what else would be wrong with another one helps nobody. */
    mu_status s = t->optimizer != NULL ? mui_optim_find(k, t->optimizer_key, &found) : MU_OK;
    s = s == MU_OK ? mui_training_numbers_read(t, k) : s;
    s = s == MU_OK ? mui_plan_make(p, k, &o) : s;
    s = s == MU_OK && t->optimizer != NULL ? read_optimizer(p, t, k) : s;
    if (s != MU_OK) {
        mu_checkpoint_close(k);
        return s;
    }
    return mui_plan_verify(p, k);
}

/* The optimiser first: like a tensor that a kernel has laid out its state may refuse to be written, and goes back. */
static mu_status write_all(mui_plan *p, mui_training_state *t, mu_group *g, mui_snapshot *snapshot)
{
    mu_status s = mui_agree(p->context, g, mui_training_state_apply(t));
    s = s == MU_OK ? mui_plan_write_laid_out(p, g) : s;
    if (s != MU_OK) {
        mui_snapshot_restore(snapshot);
        return s;
    }
    return mui_plan_write_plain(p, g);
}

static mu_status apply(mui_plan *p, mui_training_state *t, mu_training *out, mu_group *g, mu_load_report *report)
{
    mui_snapshot snapshot = {0};
    mu_load_report filled = {0};
    const char *note = NULL;
    mu_status s = mui_plan_prepare(p, g);
    s = s == MU_OK ? mui_agree(p->context, g, mui_optimizer_settle(t->optimizer, "loading (for which all ranks are needed)", s))
                   : s;
    if (s != MU_OK) {
        return s;
    }
    s = mui_snapshot_take(&p->states, p->fragile, t->optimizer, &snapshot);
    s = s == MU_OK ? mui_plan_report(p, &filled) : s;
    if (s == MU_OK && t->note != NULL) {
        note = mui_keep_text(p->context, MUI_KEPT_NOTE, t->note);
        s = note != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    s = mui_agree(p->context, g, s);
    s = s == MU_OK ? write_all(p, t, g, &snapshot) : s;
    mui_snapshot_free(&snapshot);
    if (s == MU_OK) {
        out->epoch = t->numbers.epoch;
        out->step_in_epoch = t->numbers.step_in_epoch;
        out->step = t->numbers.step;
        out->samples_in_epoch = t->numbers.samples_in_epoch;
        out->seed = t->numbers.seed;
        out->note = note;
        if (report != NULL) {
            *report = filled;
        }
    }
    return s;
}

mu_status mu_training_load_with(mu_training *state, const char *path, const mu_training_options *options,
                                mu_load_report *report)
{
    static const mu_training_options defaults;
    const mu_training_options *o = options != NULL ? options : &defaults;
    mu_group *group = o->model.group;
    if (state == NULL || state->model == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = mu_module_context(state->model);
    mui_plan plan = {0};
    mui_training_state training = {0};
    mu_status s = mu_context_status(c);
    if (s == MU_OK && (path == NULL || path[0] == '\0')) {
        s = mui_fail(c, MU_ERR_ARG, "mu_training_load: no path");
    }
    s = s == MU_OK ? mui_plan_open(c, state->model, &plan) : s;
    s = s == MU_OK ? mui_training_state_open(c, state->optimizer, o->optimizer_key, o->file_settings, &training) : s;
    training.numbers.seed = state->seed;
    s = mui_agree(c, group, s);
    if (s == MU_OK) {
        mui_place before = mui_go(c, MUI_READING, path);
        s = mui_is_reader(group) ? read_file(&plan, &training, path, &o->model) : MU_OK;
        mui_go(c, before.stage, before.path);
        s = mui_agree(c, group, s);
    }
    s = s == MU_OK ? mui_plan_share(&plan, group) : s;
    s = s == MU_OK ? mui_training_state_share(&training, group) : s;
    s = s == MU_OK ? apply(&plan, &training, state, group, report) : s;
    mui_training_state_close(&training);
    mui_plan_close(&plan);
    return s;
}

mu_status mu_training_load(mu_training *state, const char *path, mu_group *group)
{
    return mu_training_load_with(state, path, &(mu_training_options){.model = {.group = group}}, NULL);
}
