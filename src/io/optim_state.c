/* Reads torch.optim's state_dict into staging: settings group by group, state parameter by parameter. */
#include "base/alloc.h"
#include "io/load_convert.h"
#include "io/optim_find.h"
#include "io/optim_match.h"
#include "io/optim_settings.h"
#include "io/training_state.h"

#include <string.h>

/* A tensor of the state dict, as float32, into out. */
static mu_status read_tensor(mu_checkpoint_file *k, const char *what, const char *parameter, const mui_value *v,
                             mu_dims dims, float *out)
{
    char problem[MUI_PROBLEM_BYTES] = "no tensor";
    mui_axes axes;
    mui_file_tensor t;
    if (v == NULL || !mui_tensor_of(k, v, &axes, &t, problem) || t.dtype == NULL || t.note != NULL) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: optimiser state '%s' of %s: %s", k->path, what, parameter,
                        problem);
    }
    if (!mui_shape_is(&t, dims)) {
        return mui_fail(k->context, MU_ERR_SHAPE, "%s: optimiser state '%s' of %s has another shape than the parameter",
                        k->path, what, parameter);
    }
    if (!t.dtype->exact || !mui_can_convert(t.dtype->carrier, MU_F32)) {
        return mui_fail(k->context, MU_ERR_DTYPE, "%s: optimiser state '%s' of %s is of %s", k->path, what, parameter,
                        t.dtype->name);
    }
    return mui_tensor_load_as(k, what, &t, MU_F32, out);
}

/* Adam's step: a float32 scalar since PyTorch 1.12, an int before. */
static mu_status read_step(mu_checkpoint_file *k, const char *parameter, const mui_value *v, int64_t *out)
{
    float step = 0;
    if (v != NULL && v->kind == MUI_INT) {
        *out = v->i;
        return v->i >= 0 ? MU_OK
                         : mui_fail(k->context, MU_ERR_FORMAT, "%s: the step of %s is negative", k->path, parameter);
    }
    if (v != NULL && v->kind == MUI_FLOAT) {
        step = (float)v->f;
    } else {
        mu_status s = read_tensor(k, "step", parameter, v, MU_SCALAR, &step);
        if (s != MU_OK) {
            return s;
        }
    }
    if (!(step >= 0 && step < 1e18f)) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the step of %s is not a count", k->path, parameter);
    }
    *out = (int64_t)step;
    return MU_OK;
}

/* State that ours does not keep would be lost, and the run would go on as another one. */
static mu_status check_names(mui_training_state *s, mu_checkpoint_file *k, const char *parameter, const mui_value *state)
{
    static const char *const known[2][4] = {{"momentum_buffer", "step", NULL}, {"step", "exp_avg", "exp_avg_sq", NULL}};
    const char *const *names = known[mui_optimizer_kind_of(s->optimizer) != MUI_OPTIMIZER_SGD];
    const mui_seq *items = NULL;
    if (!mui_dict_items(state, &items)) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the optimiser's state of %s is no dict", k->path, parameter);
    }
    for (size_t i = 0; i + 1 < items->count; i += 2) {
        const mui_value *key = items->items[i];
        bool found = key->kind != MUI_STR || items->items[i + 1]->kind == MUI_NONE;
        for (int n = 0; names[n] != NULL && !found; n++) {
            found = mui_text_is(key, names[n]);
        }
        if (!found) {
            return mui_fail(k->context, MU_ERR_UNSUPPORTED,
                            "%s: the optimiser's state of %s has '%.*s', which Muster's optimiser does not keep%s", k->path,
                            parameter, (int)(key->text.bytes < 60 ? key->text.bytes : 60), key->text.data,
                            mui_text_is(key, "max_exp_avg_sq") ? " (it is of amsgrad)" : "");
        }
    }
    return MU_OK;
}

static mu_status read_parameter(mui_training_state *s, mu_checkpoint_file *k, int64_t i, const mui_value *state)
{
    mui_optimizer_entry e = mui_optimizer_get(s->optimizer, i);
    mu_dims dims = e.parameter->value.dims;
    float *to = s->floats + s->offsets[i];
    bool sgd = mui_optimizer_kind_of(s->optimizer) == MUI_OPTIMIZER_SGD;
    const mui_seq *items = NULL;
    mu_status r = check_names(s, k, e.parameter->name, state);
    if (r != MU_OK || (mui_dict_items(state, &items) && items->count == 0)) {
        return r; /* PyTorch's state of a parameter comes to be when it is asked for */
    }
    s->progress[i] = (mui_training_progress){1, s->numbers.optimizer_steps};
    if (!sgd) {
        r = read_step(k, e.parameter->name, mui_dict_get(state, "step"), &s->progress[i].step);
    }
    for (int n = 0; n < s->states && r == MU_OK; n++) {
        const char *name = mui_optimizer_state_name(s->optimizer, n);
        const mui_value *v = mui_dict_get(state, name);
        if (sgd && (v == NULL || v->kind == MUI_NONE)) {
            s->progress[i] = (mui_training_progress){0, 0}; /* SGD without momentum so far */
            return MU_OK;
        }
        r = read_tensor(k, name, e.parameter->name, v, dims, to);
        to += mui_dims_elements(dims);
    }
    return r;
}

/* Adam counts its own steps; where the file counts none, they are the run's. */
static void count_steps(mui_training_state *s)
{
    int64_t most = 0;
    for (int64_t i = 0; i < s->parameters; i++) {
        most = s->progress[i].has_state && s->progress[i].step > most ? s->progress[i].step : most;
    }
    s->numbers.optimizer_steps = s->numbers.optimizer_steps == 0 ? most : s->numbers.optimizer_steps;
    s->numbers.step = s->numbers.step == 0 ? most : s->numbers.step;
}

/* The factors that schedules go by, from the rates the groups had at first, else from those they have. A rate of 0, as
 * a warm-up may begin with, tells nothing. */
static mu_status set_factors(mui_training_state *s, mu_checkpoint_file *k, const mui_value **groups)
{
    const mui_value *first = groups[0];
    double base = s->settings[0].lr, base_initial = 0;
    for (int g = 1; first == NULL && g < s->groups; g++) { /* patterns name every parameter: the default group is empty */
        if (groups[g] != NULL && s->settings[g].lr_factor > 0) {
            base = s->settings[g].lr / s->settings[g].lr_factor;
            s->settings[0].lr = base;
            return MU_OK;
        }
    }
    mu_status r = mui_optim_initial_lr(k, first, &base_initial);
    for (int g = 1; g < s->groups && r == MU_OK; g++) {
        double initial = 0, lr = s->settings[g].lr;
        if (groups[g] == NULL) {
            s->settings[g].lr = base * s->settings[g].lr_factor;
            continue;
        }
        r = mui_optim_initial_lr(k, groups[g], &initial);
        bool by_initial = initial > 0 && base_initial > 0;
        double factor = by_initial ? initial / base_initial : base > 0 ? lr / base : s->settings[g].lr_factor;
        if ((float)(s->settings[g].lr_factor) != (float)factor) {
            s->settings[g].lr_factor = factor;
        }
    }
    return r;
}

static mu_status read_groups(mui_training_state *s, mu_checkpoint_file *k, const mui_optim_match *m)
{
    mui_optimizer_kind kind = mui_optimizer_kind_of(s->optimizer);
    mu_status r = MU_OK;
    for (int g = 0; g < s->groups && r == MU_OK; g++) {
        if (m->groups[g] != NULL) {
            r = mui_optim_read_settings(k, m->groups[g], kind, s->file_settings, &s->settings[g]);
        }
    }
    return r == MU_OK ? set_factors(s, k, m->groups) : r;
}

static mu_status check_kinds(mui_training_state *s, mu_checkpoint_file *k, const mui_value *dict)
{
    const mui_value *named = mui_dict_get(k->pickle.value, "optimizer_kind"), *groups = mui_dict_get(dict, "param_groups");
    mu_status r = MU_OK;
    /* More groups than parameters are an error of their own, and no work. */
    for (size_t g = 0; groups != NULL && g < groups->seq.count && g <= (size_t)s->parameters && r == MU_OK; g++) {
        r = mui_optim_check_kind(k, groups->seq.items[g], named, mui_optimizer_kind_of(s->optimizer));
    }
    return r;
}

/* Files of Muster's own say how many steps the optimiser has made. */
static mu_status read_steps(mui_training_state *s, mu_checkpoint_file *k)
{
    const mui_value *v = mui_dict_get(k->pickle.value, "optimizer_steps");
    if (v != NULL && (v->kind != MUI_INT || v->i < 0)) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: \"optimizer_steps\" is not a count", k->path);
    }
    s->numbers.optimizer_steps = v != NULL ? v->i : s->numbers.optimizer_steps;
    return MU_OK;
}

mu_status mui_optim_state_read(mui_training_state *s, mu_checkpoint_file *k, const int64_t *order)
{
    const mui_value *dict = NULL;
    mui_optim_match m = {mui_calloc(s->context, (size_t)s->parameters, sizeof(*m.states)),
                         mui_calloc(s->context, (size_t)s->groups, sizeof(*m.groups))};
    mu_status r = m.states != NULL && m.groups != NULL ? MU_OK : MU_ERR_NOMEM;
    r = r == MU_OK ? mui_optim_find(k, s->optimizer_key, &dict) : r;
    r = r == MU_OK ? check_kinds(s, k, dict) : r;
    r = r == MU_OK ? mui_optim_match_find(k, s->optimizer, dict, order, &m) : r;
    r = r == MU_OK ? read_groups(s, k, &m) : r;
    r = r == MU_OK ? read_steps(s, k) : r;
    for (int64_t i = 0; i < s->parameters && r == MU_OK; i++) {
        r = m.states[i] != NULL ? read_parameter(s, k, i, m.states[i]) : MU_OK;
    }
    if (r == MU_OK) {
        count_steps(s);
    }
    mui_free(s->context, m.states);
    mui_free(s->context, m.groups);
    return r;
}
