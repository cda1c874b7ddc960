/* The numbers of a training checkpoint, its staged optimiser state on its way to the ranks and into the optimiser. */
#include "io/training_state.h"
#include "base/alloc.h"
#include "comm/agree.h"
#include "io/optim_settings.h"

#include <string.h>

mu_status mui_training_state_open(mu_context *c, mu_optimizer *o, const char *optimizer_key, bool file_settings,
                                  mui_training_state *out)
{
    *out = (mui_training_state){
        .context = c, .optimizer = o, .optimizer_key = optimizer_key, .file_settings = file_settings};
    if (o == NULL) {
        return MU_OK;
    }
    out->parameters = mui_optimizer_count(o);
    if (out->parameters < 0) {
        return mu_context_status(c);
    }
    out->groups = mui_optimizer_groups(o);
    /* The file's settings may be the first with a momentum. */
    out->states = file_settings && mui_optimizer_kind_of(o) == MUI_OPTIMIZER_SGD ? 1 : mui_optimizer_states(o);
    out->offsets = mui_calloc(c, (size_t)out->parameters, sizeof(*out->offsets));
    for (int64_t i = 0; out->offsets != NULL && i < out->parameters; i++) {
        out->offsets[i] = out->floats_count;
        out->floats_count += mui_dims_elements(mui_optimizer_get(o, i).parameter->value.dims) * out->states;
    }
    out->progress = mui_calloc(c, (size_t)out->parameters, sizeof(*out->progress));
    out->settings = mui_calloc(c, (size_t)out->groups, sizeof(*out->settings));
    out->floats = mui_calloc(c, (size_t)out->floats_count, sizeof(*out->floats));
    if (out->offsets == NULL || out->progress == NULL || out->settings == NULL || out->floats == NULL) {
        mui_training_state_close(out);
        return MU_ERR_NOMEM;
    }
    for (int g = 0; g < out->groups; g++) {
        out->settings[g] = mui_optimizer_get_settings(o, g);
    }
    out->numbers.optimizer_steps = mu_optimizer_steps(o);
    return MU_OK;
}

void mui_training_state_close(mui_training_state *s)
{
    mui_free(s->context, s->progress);
    mui_free(s->context, s->settings);
    mui_free(s->context, s->floats);
    mui_free(s->context, s->offsets);
    mui_free(s->context, s->note);
    *s = (mui_training_state){0};
}

/* -- the numbers -------------------------------------------------------------------------------------------------- */

/* A count under the first of these keys that is there, or 0. Files of Muster's own are taken at their word; in others a
 * name may mean anything. */
static mu_status read_count(mu_checkpoint_file *k, bool own, const char *const *keys, int64_t *out, bool *found)
{
    *out = 0;
    *found = false;
    for (int i = 0; keys[i] != NULL; i++) {
        const mui_value *v = mui_dict_get(k->pickle.value, keys[i]);
        double d = -1;
        bool number = false;
        if (v == NULL) {
            continue;
        }
        mu_status s = v->kind == MUI_BOOL ? MU_OK : mui_optim_number(k, v, &d, &number);
        if (s != MU_OK) {
            return s;
        }
        if (number && d >= 0 && d < 9e18 && d == (double)(int64_t)d) {
            *out = v->kind == MUI_INT ? v->i : (int64_t)d;
            *found = true;
            return MU_OK;
        }
        if (own) {
            return mui_fail(k->context, MU_ERR_FORMAT, "%s: no training checkpoint: \"%s\" is not a count", k->path,
                            keys[i]);
        }
        mui_log(k->context, MU_LOG_WARN, "%s: \"%s\" is not a count and is not used", k->path, keys[i]);
    }
    return MU_OK;
}

/* Up to 64 bits, unsigned: beyond 63 a pickle keeps nine bytes. */
static bool read_seed(const mui_value *v, uint64_t *out)
{
    if (v != NULL && v->kind == MUI_INT && v->i >= 0) {
        *out = (uint64_t)v->i;
        return true;
    }
    if (v == NULL || v->kind != MUI_BIGINT || v->text.bytes != 9 || v->text.data[8] != 0) {
        return false;
    }
    *out = 0;
    for (int i = 7; i >= 0; i--) {
        *out = *out << 8 | (unsigned char)v->text.data[i];
    }
    return true;
}

mu_status mui_training_numbers_read(mui_training_state *s, mu_checkpoint_file *k)
{
    static const char *const epoch[] = {"epoch", NULL}, *const in_epoch[] = {"step_in_epoch", NULL},
                             *const samples[] = {"samples_in_epoch", NULL},
                             *const step[] = {"step", "global_step", NULL};
    mui_training_numbers *n = &s->numbers;
    bool own = mui_dict_get(k->pickle.value, "optimizer_kind") != NULL, epoch_found, step_found, found;
    mu_status r = read_count(k, own, epoch, &n->epoch, &epoch_found);
    r = r == MU_OK ? read_count(k, own, in_epoch, &n->step_in_epoch, &found) : r;
    r = r == MU_OK ? read_count(k, own, step, &n->step, &step_found) : r;
    r = r == MU_OK ? read_count(k, own, samples, &n->samples_in_epoch, &found) : r;
    if (r != MU_OK) {
        return r;
    }
    n->samples_in_epoch = found ? n->samples_in_epoch : -1;
    n->optimizer_steps = n->step;
    if (!epoch_found) {
        mui_log(k->context, MU_LOG_WARN, "%s: it does not say which epoch was reached (\"epoch\"): 0 is taken", k->path);
    }
    const mui_value *seed = mui_dict_get(k->pickle.value, "seed"), *note = mui_dict_get(k->pickle.value, "note");
    if (seed != NULL && !read_seed(seed, &n->seed) && own) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: \"seed\" is not a number of 64 bits", k->path);
    }
    n->has_note = note != NULL && note->kind == MUI_STR;
    if (n->has_note) {
        s->note = mui_strndup(s->context, note->text.data, note->text.bytes);
        r = s->note != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    return r;
}

/* -- to the ranks and into the optimiser -------------------------------------------------------------------------- */

/* Numbers, then the note, then the optimiser's state. */
mu_status mui_training_state_share(mui_training_state *t, mu_group *g)
{
    if (!mui_is_shared(g)) {
        return MU_OK;
    }
    int64_t sizes[4] = {t->parameters, t->floats_count, t->groups, t->note != NULL ? (int64_t)strlen(t->note) : 0};
    mu_status s = mui_share(g, sizes, sizeof(sizes));
    s = s == MU_OK ? mui_share(g, &t->numbers, sizeof(t->numbers)) : s;
    if (s != MU_OK) {
        return s;
    }
    if (sizes[0] != t->parameters || sizes[1] != t->floats_count || sizes[2] != t->groups) {
        s = mui_fail(t->context, MU_ERR_COMM, "the optimiser of rank %d has other state than that of rank 0",
                     mu_group_rank(g));
    }
    if (s == MU_OK && t->note == NULL && t->numbers.has_note) {
        t->note = mui_calloc(t->context, (size_t)sizes[3] + 1, 1);
        s = t->note != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    s = mui_agree(t->context, g, s);
    if (s == MU_OK && t->numbers.has_note) {
        s = mui_share(g, t->note, (size_t)sizes[3]);
    }
    s = s == MU_OK ? mui_share(g, t->progress, (size_t)t->parameters * sizeof(*t->progress)) : s;
    s = s == MU_OK ? mui_share(g, t->settings, (size_t)t->groups * sizeof(*t->settings)) : s;
    return s == MU_OK ? mui_share(g, t->floats, (size_t)t->floats_count * sizeof(*t->floats)) : s;
}

mu_status mui_training_state_apply(const mui_training_state *s)
{
    mu_status r = MU_OK;
    for (int g = 0; g < s->groups && r == MU_OK; g++) {
        r = mui_optimizer_set_settings(s->optimizer, g, &s->settings[g]);
    }
    for (int64_t i = 0; i < s->parameters && r == MU_OK; i++) {
        int64_t elements = mui_dims_elements(mui_optimizer_get(s->optimizer, i).parameter->value.dims);
        const float *from = s->floats + s->offsets[i];
        mui_optimizer_set_progress(s->optimizer, i, s->progress[i].has_state != 0, s->progress[i].step);
        int states = s->progress[i].has_state != 0 ? mui_optimizer_states(s->optimizer) : 0;
        for (int n = 0; n < states && n < s->states && r == MU_OK; n++, from += elements) {
            r = mui_optimizer_write_state(s->optimizer, i, n, from, elements);
        }
    }
    if (s->optimizer != NULL && r == MU_OK) {
        mui_optimizer_set_steps(s->optimizer, s->numbers.optimizer_steps);
    }
    return r;
}
