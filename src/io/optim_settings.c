/* Reads settings of param_groups. PyTorch's versions have added names over the years: what is missing has its meaning of
 * then, what changes only speed (foreach, fused, capturable, differentiable) is not looked at. */
#include "io/optim_settings.h"
#include "io/load_convert.h"

#include <string.h>

mu_status mui_optim_number(mu_checkpoint_file *k, const mui_value *v, double *out, bool *found)
{
    char problem[MUI_PROBLEM_BYTES];
    mui_axes axes;
    mui_file_tensor t;
    *found = true;
    if (v != NULL && (v->kind == MUI_FLOAT || v->kind == MUI_INT || v->kind == MUI_BOOL)) {
        *out = v->kind == MUI_FLOAT ? v->f : v->kind == MUI_INT ? (double)v->i : (double)v->truth;
        return MU_OK;
    }
    *found = false;
    if (v == NULL || !mui_tensor_of(k, v, &axes, &t, problem) || t.note != NULL || t.ndim > 1 ||
        (t.ndim == 1 && t.dim[0] != 1) || t.dtype == NULL || !t.dtype->exact ||
        (t.dtype->carrier != MU_F64 && !mui_can_convert(t.dtype->carrier, MU_F32))) {
        return MU_OK;
    }
    float f = 0;
    bool whole = t.dtype->carrier == MU_F64;
    mu_status s = mui_tensor_load_as(k, "a setting", &t, whole ? MU_F64 : MU_F32, whole ? (void *)out : &f);
    if (s == MU_OK && !whole) {
        *out = (double)f;
    }
    *found = s == MU_OK;
    return s;
}

static bool is_true(const mui_value *v)
{
    return v != NULL && ((v->kind == MUI_BOOL && v->truth) || (v->kind == MUI_INT && v->i != 0));
}

/* Settings that only one of PyTorch's optimisers has. */
static const char *other_kind(const mu_checkpoint_file *k, const mui_value *group)
{
    static const char *const table[][2] = {{"lambd", "ASGD"},      {"rho", "Adadelta"},       {"lr_decay", "Adagrad"},
                                           {"etas", "Rprop"},      {"max_iter", "LBFGS"},     {"centered", "RMSprop"},
                                           {"momentum_decay", "NAdam"}, {"beta2_decay", "Adafactor"}};
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (mui_dict_get(group, table[i][0]) != NULL) {
            return table[i][1];
        }
    }
    /* Adam has had amsgrad since PyTorch 0.4, when there was neither a zip format nor an RAdam. */
    bool adam = mui_dict_get(group, "betas") != NULL;
    if (adam && k->format == MUI_FILE_TORCH_ZIP && mui_dict_get(group, "amsgrad") == NULL) {
        return "Adamax, RAdam or one that is not PyTorch's";
    }
    if (!adam && mui_dict_get(group, "momentum") == NULL) {
        return "none of PyTorch's that is known here";
    }
    return NULL;
}

mu_status mui_optim_check_kind(mu_checkpoint_file *k, const mui_value *group, const mui_value *named,
                               mui_optimizer_kind ours)
{
    const char *other = other_kind(k, group);
    if (other != NULL) {
        return mui_fail(k->context, MU_ERR_UNSUPPORTED, "%s: the file's optimiser is %s, this one is %s", k->path, other,
                        mui_optimizer_kind_name(ours));
    }
    if (named != NULL && named->kind == MUI_STR && !mui_text_is(named, mui_optimizer_kind_name(ours))) {
        return mui_fail(k->context, MU_ERR_STATE, "%s: the file's optimiser is %.*s, this one is %s", k->path,
                        (int)(named->text.bytes < 40 ? named->text.bytes : 40), named->text.data, mui_optimizer_kind_name(ours));
    }
    bool adam = mui_dict_get(group, "betas") != NULL;
    if (adam != (ours != MUI_OPTIMIZER_SGD)) {
        return mui_fail(k->context, MU_ERR_STATE, "%s: the file's optimiser is %s, this one is %s", k->path,
                        adam ? "an Adam" : "SGD", mui_optimizer_kind_name(ours));
    }
    const mui_value *decoupled = mui_dict_get(group, "decoupled_weight_decay");
    if (adam && decoupled != NULL && decoupled->kind == MUI_BOOL && decoupled->truth != (ours == MUI_OPTIMIZER_ADAMW)) {
        return mui_fail(k->context, MU_ERR_STATE, "%s: the file's optimiser is %s, this one is %s", k->path,
                        decoupled->truth ? "AdamW" : "Adam", mui_optimizer_kind_name(ours));
    }
    static const char *const flags[] = {"amsgrad", "maximize"};
    for (int i = 0; i < 2; i++) {
        if (is_true(mui_dict_get(group, flags[i]))) {
            return mui_fail(k->context, MU_ERR_UNSUPPORTED,
                            "%s: the file's optimiser was made with %s=True, which Muster's %s does not have", k->path,
                            flags[i], mui_optimizer_kind_name(ours));
        }
    }
    return MU_OK;
}

/* nesterov travels as a number. */
static mu_status settle(mu_checkpoint_file *k, const char *name, const mui_value *v, bool take, double *ours)
{
    double theirs = 0;
    bool found = false;
    mu_status s = mui_optim_number(k, v, &theirs, &found);
    if (s != MU_OK || !found) {
        if (s == MU_OK && v != NULL && v->kind != MUI_NONE) {
            mui_log(k->context, MU_LOG_WARN, "%s: %s is no number in the file, goes on as %g", k->path, name, *ours);
        }
        return s;
    }
    if (take) {
        *ours = theirs;
    } else if ((float)theirs != (float)*ours) {
        mui_log(k->context, MU_LOG_WARN, "%s: %s was %g in the file, goes on as %g", k->path, name, theirs, *ours);
    }
    return MU_OK;
}

mu_status mui_optim_read_settings(mu_checkpoint_file *k, const mui_value *group, mui_optimizer_kind kind, bool take,
                                  mui_settings *ours)
{
    bool sgd = kind == MUI_OPTIMIZER_SGD;
    const mui_value *betas = mui_dict_get(group, "betas");
    bool pair = mui_is_sequence(betas) && betas->seq.count == 2;
    double nesterov = ours->nesterov;
    struct {
        const char *name;
        const mui_value *v;
        double *ours;
        bool applies, take;
    } rows[] = {
        {"lr", mui_dict_get(group, "lr"), &ours->lr, true, true},
        {"weight_decay", mui_dict_get(group, "weight_decay"), &ours->weight_decay, true, take},
        {"momentum", mui_dict_get(group, "momentum"), &ours->momentum, sgd, take},
        {"dampening", mui_dict_get(group, "dampening"), &ours->dampening, sgd, take},
        {"nesterov", mui_dict_get(group, "nesterov"), &nesterov, sgd, take},
        {"beta1", pair ? betas->seq.items[0] : NULL, &ours->beta1, !sgd, take},
        {"beta2", pair ? betas->seq.items[1] : NULL, &ours->beta2, !sgd, take},
        {"eps", mui_dict_get(group, "eps"), &ours->eps, !sgd, take},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        mu_status s = rows[i].applies ? settle(k, rows[i].name, rows[i].v, rows[i].take, rows[i].ours) : MU_OK;
        if (s != MU_OK) {
            return s;
        }
    }
    ours->nesterov = nesterov != 0;
    const char *problem = mui_settings_problem(kind, ours);
    if (problem != NULL) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the optimiser's setting %s is out of range", k->path, problem);
    }
    return MU_OK;
}

mu_status mui_optim_initial_lr(mu_checkpoint_file *k, const mui_value *group, double *out)
{
    bool found = false;
    *out = 0;
    mu_status s = mui_optim_number(k, mui_dict_get(group, "initial_lr"), out, &found);
    *out = found && *out > 0 && *out < 1e30 ? *out : 0;
    return s;
}
