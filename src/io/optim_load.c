/* mu_optimizer_load. */
#include "base/beacon.h"
#include "comm/agree.h"
#include "io/training_state.h"

static mu_status read_file(mui_training_state *t, const char *path, const mu_checkpoint_options *file)
{
    mu_checkpoint_file *k = mu_checkpoint_open_with(t->context, path, file);
    if (k == NULL) {
        return mu_context_status(t->context);
    }
    t->numbers.optimizer_steps = 0; /* what the file does not tell, the optimiser's own count does not tell either */
    mu_status s = mui_optim_state_read(t, k, NULL);
    mu_checkpoint_close(k);
    return s;
}

/* A rank that fails makes all of them go back to what they had. */
static mu_status apply(mui_training_state *t, mu_group *g)
{
    const mui_states none = {.context = t->context};
    mui_snapshot snapshot = {0};
    mu_status s = mui_optimizer_settle(t->optimizer, "loading (for which all ranks are needed)", MU_OK);
    s = mui_agree(t->context, g, s == MU_OK ? mui_snapshot_take(&none, NULL, t->optimizer, &snapshot) : s);
    if (s == MU_OK) {
        s = mui_agree(t->context, g, mui_training_state_apply(t));
        if (s != MU_OK) {
            mui_snapshot_restore(&snapshot);
        }
    }
    mui_snapshot_free(&snapshot);
    return s;
}

mu_status mu_optimizer_load(mu_optimizer *optimizer, const char *path, const mu_optimizer_load_options *options)
{
    static const mu_optimizer_load_options defaults;
    const mu_optimizer_load_options *o = options != NULL ? options : &defaults;
    if (optimizer == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "mu_optimizer_load: the optimiser is NULL");
    }
    mu_context *c = mui_optimizer_context(optimizer);
    mui_training_state state = {0};
    mu_status s = mu_context_status(c);
    if (s == MU_OK && (path == NULL || path[0] == '\0')) {
        s = mui_fail(c, MU_ERR_ARG, "mu_optimizer_load: no path");
    }
    s = s == MU_OK ? mui_training_state_open(c, optimizer, o->key, o->file_settings, &state) : s;
    s = mui_agree(c, o->group, s);
    if (s == MU_OK) {
        mui_place before = mui_go(c, MUI_READING, path);
        s = mui_is_reader(o->group) ? read_file(&state, path, o->file) : MU_OK;
        mui_go(c, before.stage, before.path);
        s = mui_agree(c, o->group, s);
    }
    s = s == MU_OK ? mui_training_state_share(&state, o->group) : s;
    s = s == MU_OK ? apply(&state, o->group) : s;
    mui_training_state_close(&state);
    return s;
}
