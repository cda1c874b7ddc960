/* Reads torch.optim's state_dict and the numbers beside it. Errors are as torch's load_state_dict has them: counts of
 * groups and of their parameters must agree; states are matched by number, or by old Python object ids in the order of
 * param_groups. */
#include "io/training_state.h"
#include "base/alloc.h"
#include "io/load_convert.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t floats_of(const mui_training_state *s, int64_t parameter)
{
    return mui_dims_elements(mui_optimizer_get(s->optimizer, parameter).parameter->value.dims) *
           mui_optimizer_states(s->optimizer);
}

mu_status mui_training_state_open(mu_context *c, mu_optimizer *o, mui_training_state *out)
{
    *out = (mui_training_state){.context = c, .optimizer = o};
    if (o == NULL) {
        return MU_OK;
    }
    out->parameters = mui_optimizer_count(o);
    if (out->parameters < 0) {
        return mu_context_status(c);
    }
    out->offsets = mui_calloc(c, (size_t)out->parameters, sizeof(*out->offsets));
    for (int64_t i = 0; out->offsets != NULL && i < out->parameters; i++) {
        out->offsets[i] = out->floats_count;
        out->floats_count += floats_of(out, i);
    }
    out->progress = mui_calloc(c, (size_t)out->parameters, sizeof(*out->progress));
    out->floats = mui_calloc(c, (size_t)out->floats_count, sizeof(*out->floats));
    if (out->offsets == NULL || out->progress == NULL || out->floats == NULL) {
        mui_training_state_close(out);
        return MU_ERR_NOMEM;
    }
    return MU_OK;
}

void mui_training_state_close(mui_training_state *s)
{
    mui_free(s->context, s->progress);
    mui_free(s->context, s->floats);
    mui_free(s->context, s->offsets);
    mui_free(s->context, s->note);
    *s = (mui_training_state){0};
}

/* -- the numbers -------------------------------------------------------------------------------------------------- */

static mu_status read_number(mu_checkpoint_file *k, const char *key, bool required, int64_t *out)
{
    const mui_value *v = mui_dict_get(k->pickle.value, key);
    if (v == NULL && !required) {
        return MU_OK;
    }
    if (v == NULL || v->kind != MUI_INT || v->i < 0) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: no training checkpoint: \"%s\" is %s", k->path, key,
                        v == NULL ? "missing" : "not a count");
    }
    *out = v->i;
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

static mu_status read_numbers(mui_training_state *s, mu_checkpoint_file *k)
{
    mui_training_numbers *n = &s->numbers;
    mu_status r = read_number(k, "epoch", true, &n->epoch);
    r = r == MU_OK ? read_number(k, "step_in_epoch", false, &n->step_in_epoch) : r;
    r = r == MU_OK ? read_number(k, "step", false, &n->step) : r;
    n->optimizer_steps = n->step;
    r = r == MU_OK ? read_number(k, "optimizer_steps", false, &n->optimizer_steps) : r;
    const mui_value *seed = mui_dict_get(k->pickle.value, "seed"), *note = mui_dict_get(k->pickle.value, "note");
    if (r == MU_OK && seed != NULL && !read_seed(seed, &n->seed)) {
        r = mui_fail(k->context, MU_ERR_FORMAT, "%s: \"seed\" is not a number of 64 bits", k->path);
    }
    n->has_note = note != NULL && note->kind == MUI_STR;
    if (r == MU_OK && n->has_note) {
        s->note = mui_strndup(s->context, note->text.data, note->text.bytes);
        r = s->note != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    return r;
}

/* -- the optimiser ------------------------------------------------------------------------------------------------ */

typedef struct key_place {
    int64_t key;       /* as state has it */
    int64_t parameter; /* of ours */
} key_place;

static int by_key(const void *a, const void *b)
{
    const key_place *x = a, *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

/* What state's keys stand for: param_groups list them group by group, in the order of the group's parameters. */
static mu_status map_keys(mui_training_state *s, mu_checkpoint_file *k, const mui_value *groups, key_place *map)
{
    int64_t n = 0;
    int count = mui_optimizer_groups(s->optimizer);
    if (groups == NULL || groups->kind != MUI_LIST || groups->seq.count != (size_t)count) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the file's optimiser has %zu parameter groups, this one has %d",
                        k->path, groups != NULL && groups->kind == MUI_LIST ? groups->seq.count : (size_t)0, count);
    }
    for (int g = 0; g < count; g++) {
        const mui_value *params = mui_dict_get(groups->seq.items[g], "params");
        size_t taken = 0, given = params != NULL && params->kind == MUI_LIST ? params->seq.count : 0;
        for (int64_t i = 0; i < s->parameters; i++) {
            if (mui_optimizer_get(s->optimizer, i).group != g) {
                continue;
            }
            if (taken < given && params->seq.items[taken]->kind == MUI_INT) {
                map[n++] = (key_place){params->seq.items[taken]->i, i};
            }
            taken++;
        }
        if (taken != given) {
            return mui_fail(k->context, MU_ERR_FORMAT,
                            "%s: group %d of the file's optimiser has %zu parameters, this one's has %zu", k->path, g,
                            given, taken);
        }
    }
    if (n != s->parameters) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the optimiser's parameters are not numbers", k->path);
    }
    if (n > 0) {
        qsort(map, (size_t)n, sizeof(*map), by_key);
    }
    return MU_OK;
}

/* A tensor of the state dict, as float32, into out. */
static mu_status read_tensor(mu_checkpoint_file *k, const char *what, const char *parameter, const mui_value *v,
                             mu_dims dims, float *out)
{
    char problem[256] = "no tensor";
    mui_file_tensor t;
    mui_value *inner = NULL;
    mui_meaning meaning = {.context = k->context, .path = k->path, .refs = k->refs};
    int64_t elements = mui_dims_elements(dims);
    if (v == NULL || mui_tensor_read(&meaning, v, &t, &inner, problem, sizeof(problem)) != MUI_IS_TENSOR) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: optimiser state '%s' of %s: %s", k->path, what, parameter,
                        problem);
    }
    if (t.ndim != dims.ndim || memcmp(t.dim, dims.dim, (size_t)dims.ndim * sizeof(dims.dim[0])) != 0) {
        return mui_fail(k->context, MU_ERR_SHAPE, "%s: optimiser state '%s' of %s has another shape than the parameter",
                        k->path, what, parameter);
    }
    size_t bytes = 0;
    mu_status s = mui_tensor_bytes(k, what, &t, &bytes);
    if (s == MU_OK && (!t.dtype->exact || !mui_can_convert(t.dtype->carrier, MU_F32))) {
        s = mui_fail(k->context, MU_ERR_DTYPE, "%s: optimiser state '%s' of %s is of %s", k->path, what, parameter,
                     t.dtype->name);
    }
    void *as_stored = s == MU_OK ? mui_alloc(k->context, bytes) : NULL;
    s = s == MU_OK && as_stored == NULL ? MU_ERR_NOMEM : s;
    s = s == MU_OK ? mui_tensor_load(k, what, &t, as_stored) : s;
    s = s == MU_OK ? mui_convert(k->context, t.dtype->carrier, MU_F32, elements, as_stored, out) : s;
    mui_free(k->context, as_stored);
    return s;
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

static mu_status read_parameter(mui_training_state *s, mu_checkpoint_file *k, int64_t i, const mui_value *state)
{
    mui_optimizer_entry e = mui_optimizer_get(s->optimizer, i);
    mu_dims dims = e.parameter->value.dims;
    float *to = s->floats + s->offsets[i];
    mu_status r = MU_OK;
    s->progress[i] = (mui_training_progress){1, s->numbers.optimizer_steps};
    if (mui_optimizer_kind_of(s->optimizer) != MUI_OPTIMIZER_SGD) {
        r = read_step(k, e.parameter->name, mui_dict_get(state, "step"), &s->progress[i].step);
    }
    for (int n = 0; n < mui_optimizer_states(s->optimizer) && r == MU_OK; n++) {
        const char *name = mui_optimizer_state_name(s->optimizer, n);
        const mui_value *v = mui_dict_get(state, name);
        if (n == 0 && mui_optimizer_kind_of(s->optimizer) == MUI_OPTIMIZER_SGD && (v == NULL || v->kind == MUI_NONE)) {
            s->progress[i] = (mui_training_progress){0, 0}; /* SGD without momentum so far */
            return MU_OK;
        }
        r = read_tensor(k, name, e.parameter->name, v, dims, to);
        to += mui_dims_elements(dims);
    }
    return r;
}

static mu_status check_kind(mui_training_state *s, mu_checkpoint_file *k, const mui_value *groups)
{
    static const char *const kinds[] = {"SGD", "Adam", "AdamW"};
    mui_optimizer_kind ours = mui_optimizer_kind_of(s->optimizer);
    const mui_value *named = mui_dict_get(k->pickle.value, "optimizer_kind");
    const mui_value *first = groups != NULL && groups->kind == MUI_LIST && groups->seq.count > 0 ? groups->seq.items[0]
                                                                                                : NULL;
    bool adam = mui_dict_get(first, "betas") != NULL;
    if (named != NULL && named->kind == MUI_STR && !mui_text_is(named, kinds[ours])) {
        return mui_fail(k->context, MU_ERR_STATE, "%s: the file's optimiser is %.*s, this one is %s", k->path,
                        (int)(named->text.bytes < 40 ? named->text.bytes : 40), named->text.data, kinds[ours]);
    }
    if (first != NULL && adam != (ours != MUI_OPTIMIZER_SGD)) {
        return mui_fail(k->context, MU_ERR_STATE, "%s: the file's optimiser is %s, this one is %s", k->path,
                        adam ? "an Adam" : "not an Adam", kinds[ours]);
    }
    return MU_OK;
}

static bool number_of(const mui_value *v, double *out)
{
    *out = v == NULL ? 0 : v->kind == MUI_FLOAT ? v->f : v->kind == MUI_INT ? (double)v->i : 0;
    return v != NULL && (v->kind == MUI_FLOAT || v->kind == MUI_INT);
}

/* Settings stay those of the program; where the file's differ, that is said. The learning rate is taken over. */
static void compare_settings(mui_training_state *s, mu_checkpoint_file *k, const mui_value *groups)
{
    for (int g = 0; g < mui_optimizer_groups(s->optimizer); g++) {
        const mui_value *theirs = groups->seq.items[g], *betas = mui_dict_get(theirs, "betas");
        mui_optimizer_group ours = mui_optimizer_get_group(s->optimizer, g);
        bool sgd = mui_optimizer_kind_of(s->optimizer) == MUI_OPTIMIZER_SGD;
        bool pair = betas != NULL && betas->kind == MUI_TUPLE && betas->seq.count == 2;
        const struct {
            const char *name;
            const mui_value *v;
            float ours;
            bool applies;
        } rows[] = {
            {"weight_decay", mui_dict_get(theirs, "weight_decay"), ours.weight_decay, true},
            {"momentum", mui_dict_get(theirs, "momentum"), ours.momentum, sgd},
            {"dampening", mui_dict_get(theirs, "dampening"), ours.dampening, sgd},
            {"beta1", pair ? betas->seq.items[0] : NULL, ours.beta1, !sgd},
            {"beta2", pair ? betas->seq.items[1] : NULL, ours.beta2, !sgd},
            {"eps", mui_dict_get(theirs, "eps"), ours.eps, !sgd},
        };
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            double v = 0;
            if (rows[i].applies && number_of(rows[i].v, &v) && (float)v != rows[i].ours) {
                mui_log(k->context, MU_LOG_WARN, "%s: %s was %g in the file, goes on as %g", k->path, rows[i].name, v,
                        (double)rows[i].ours);
            }
        }
        double lr = 0;
        if (g == 0 && number_of(mui_dict_get(theirs, "lr"), &lr)) {
            s->numbers.lr = (float)lr;
        }
    }
}

static mu_status read_states(mui_training_state *s, mu_checkpoint_file *k, const mui_value *state, const key_place *map)
{
    const mui_seq *items = NULL;
    if (!mui_dict_items(state, &items)) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the optimiser has no \"state\"", k->path);
    }
    for (size_t i = 0; i + 1 < items->count; i += 2) {
        key_place wanted = {.key = items->items[i]->i};
        const key_place *found = items->items[i]->kind == MUI_INT && s->parameters > 0
                                     ? bsearch(&wanted, map, (size_t)s->parameters, sizeof(*map), by_key)
                                     : NULL;
        if (found == NULL) {
            return mui_fail(k->context, MU_ERR_FORMAT, "%s: the optimiser has state for a parameter that no group has",
                            k->path);
        }
        mu_status r = read_parameter(s, k, found->parameter, items->items[i + 1]);
        if (r != MU_OK) {
            return r;
        }
    }
    return MU_OK;
}

static mu_status read_optimizer(mui_training_state *s, mu_checkpoint_file *k)
{
    const mui_value *o = mui_dict_get(k->pickle.value, "optimizer");
    const mui_value *groups = mui_dict_get(o, "param_groups");
    if (o == NULL) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: no training checkpoint: \"optimizer\" is missing", k->path);
    }
    mu_status r = check_kind(s, k, groups);
    key_place *map = r == MU_OK ? mui_calloc(s->context, (size_t)s->parameters, sizeof(*map)) : NULL;
    r = r == MU_OK && map == NULL ? MU_ERR_NOMEM : r;
    r = r == MU_OK ? map_keys(s, k, groups, map) : r;
    if (r == MU_OK) {
        compare_settings(s, k, groups);
        r = read_states(s, k, mui_dict_get(o, "state"), map);
    }
    mui_free(s->context, map);
    return r;
}

mu_status mui_training_state_read(mui_training_state *s, mu_checkpoint_file *k)
{
    s->numbers.lr = s->optimizer != NULL ? mu_optimizer_lr(s->optimizer) : 0;
    mu_status r = read_numbers(s, k);
    return r == MU_OK && s->optimizer != NULL ? read_optimizer(s, k) : r;
}

mu_status mui_training_state_apply(const mui_training_state *s)
{
    const float *from = s->floats;
    for (int64_t i = 0; i < s->parameters; i++) {
        int64_t elements = mui_dims_elements(mui_optimizer_get(s->optimizer, i).parameter->value.dims);
        mui_optimizer_set_progress(s->optimizer, i, s->progress[i].has_state != 0, s->progress[i].step);
        for (int n = 0; n < mui_optimizer_states(s->optimizer); n++, from += elements) {
            mu_status r = s->progress[i].has_state
                              ? mui_optimizer_write_state(s->optimizer, i, n, from, elements)
                              : MU_OK;
            if (r != MU_OK) {
                return r;
            }
        }
    }
    if (s->optimizer != NULL) {
        mui_optimizer_set_steps(s->optimizer, s->numbers.optimizer_steps);
        mu_optimizer_set_lr(s->optimizer, s->numbers.lr);
    }
    return MU_OK;
}
