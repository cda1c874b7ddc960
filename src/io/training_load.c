/* mu_training_load: the model by mu_load's plan, the optimiser and the numbers beside it, all or nothing on all ranks. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "io/agree.h"
#include "io/load_plan.h"
#include "io/load_report.h"
#include "io/training_state.h"

#include <string.h>

static mu_status read_file(mui_plan *p, mui_training_state *t, const char *path)
{
    mu_checkpoint_file *k = mu_checkpoint_open(p->context, path);
    if (k == NULL) {
        return mu_context_status(p->context);
    }
    mu_status s = MU_OK;
    if (mui_dict_get(k->pickle.value, "model") == NULL) {
        s = mui_fail(p->context, MU_ERR_FORMAT, "%s: no training checkpoint: \"model\" is missing (to start from its "
                                                "weights alone, load it with mu_load)",
                     path);
    }
    s = s == MU_OK ? mui_training_state_read(t, k) : s;
    s = s == MU_OK ? mui_plan_make(p, k, &(mu_load_options){.key = "model"}) : s;
    if (s != MU_OK) {
        mu_checkpoint_close(k);
        return s;
    }
    return mui_plan_verify(p, k);
}

/* Numbers, then the note, then the optimiser's state. */
static mu_status share_state(mui_training_state *t, mu_group *g)
{
    if (!mui_is_shared(g)) {
        return MU_OK;
    }
    int64_t sizes[3] = {t->parameters, t->floats_count, t->note != NULL ? (int64_t)strlen(t->note) : 0};
    mu_status s = mui_share(t->context, g, sizes, sizeof(sizes));
    s = s == MU_OK ? mui_share(t->context, g, &t->numbers, sizeof(t->numbers)) : s;
    if (s != MU_OK) {
        return s;
    }
    if (sizes[0] != t->parameters || sizes[1] != t->floats_count) {
        s = mui_fail(t->context, MU_ERR_COMM, "the optimiser of rank %d has other state than that of rank 0",
                     mu_group_rank(g));
    }
    if (s == MU_OK && t->note == NULL && t->numbers.has_note) {
        t->note = mui_calloc(t->context, (size_t)sizes[2] + 1, 1);
        s = t->note != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    s = mui_agree(t->context, g, s);
    if (s == MU_OK && t->numbers.has_note) {
        s = mui_share(t->context, g, t->note, (size_t)sizes[2]);
    }
    s = s == MU_OK ? mui_share(t->context, g, t->progress, (size_t)t->parameters * sizeof(*t->progress)) : s;
    return s == MU_OK ? mui_share(t->context, g, t->floats, (size_t)t->floats_count * sizeof(*t->floats)) : s;
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

static mu_status apply(mui_plan *p, mui_training_state *t, mu_training *out, mu_group *g)
{
    mui_snapshot snapshot = {0};
    const char *note = NULL;
    mu_status s = mui_plan_prepare(p, g);
    if (s != MU_OK) {
        return s;
    }
    s = mui_snapshot_take(&p->states, p->fragile, out->model, t->optimizer, &snapshot);
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
        out->seed = t->numbers.seed;
        out->note = note;
    }
    return s;
}

mu_status mu_training_load(mu_training *state, const char *path, mu_group *group)
{
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
    s = mui_agree(c, group, s == MU_OK ? mui_training_state_open(c, state->optimizer, &training) : s);
    if (s == MU_OK) {
        mui_place before = mui_go(c, MUI_READING, path);
        s = mui_is_reader(group) ? read_file(&plan, &training, path) : MU_OK;
        mui_go(c, before.stage, before.path);
        s = mui_agree(c, group, s);
    }
    s = s == MU_OK ? mui_plan_share(&plan, group) : s;
    s = s == MU_OK ? share_state(&training, group) : s;
    s = s == MU_OK ? apply(&plan, &training, state, group) : s;
    mui_training_state_close(&training);
    mui_plan_close(&plan);
    return s;
}
