/* PyTorch numbers parameters group by group in the order in which the program gave them, and has no names before 2.6.
 * So ways to line up are tried, the likeliest first: the file's names; the order of the file's model, then ours; all
 * parameters, then those that are trained; groups in their order, then in any other that fits alone. A way fits when
 * the counts are equal and every state has its parameter's shape. */
#include "io/optim_match.h"
#include "base/alloc.h"
#include "io/load_convert.h"
#include "io/name_table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Places of parameters, group by group. Of the file: position in keys and states. Of ours: members. */
typedef struct theirs {
    const mui_value **groups;
    size_t *starts; /* count + 1 */
    size_t count, parameters;
    const mui_value **states;
} theirs;

typedef struct ours {
    int *groups;
    size_t *starts;
    size_t count;
    int64_t *members;
} ours;

typedef struct matching {
    mu_checkpoint_file *k;
    mu_context *context;
    mu_optimizer *optimizer;
    int64_t parameters;
    theirs theirs;
    ours ours;
    size_t *partner; /* our group for each of theirs */
    int64_t orphans; /* states of parameters that no group has */
} matching;

typedef struct key_place {
    int64_t key;
    size_t place;
} key_place;

static int by_key(const void *a, const void *b)
{
    const key_place *x = a, *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

/* -- the file's side ------------------------------------------------------------------------------------------------ */

static mu_status count_theirs(matching *m, const mui_value *list)
{
    theirs *t = &m->theirs;
    t->groups = mui_calloc(m->context, list->seq.count, sizeof(*t->groups));
    t->starts = mui_calloc(m->context, list->seq.count + 1, sizeof(*t->starts));
    if (t->groups == NULL || t->starts == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t g = 0; g < list->seq.count; g++) {
        const mui_value *params = mui_dict_get(list->seq.items[g], "params");
        if (!mui_is_sequence(params)) {
            return mui_fail(m->context, MU_ERR_FORMAT, "%s: group %zu of the file's optimiser has no list \"params\"",
                            m->k->path, g);
        }
        /* The same list may be shared by many groups: without this a small file could ask for much work. */
        if (params->seq.count > (size_t)m->parameters) {
            return mui_fail(m->context, MU_ERR_FORMAT,
                            "%s: group %zu of the file's optimiser has %zu parameters, this optimiser has %" PRId64
                            " in all",
                            m->k->path, g, params->seq.count, m->parameters);
        }
        if (params->seq.count > 0) { /* groups without parameters mean nothing */
            t->groups[t->count++] = list->seq.items[g];
            t->parameters += params->seq.count;
            t->starts[t->count] = t->parameters;
        }
        if (t->parameters > (size_t)m->parameters) {
            return mui_fail(m->context, MU_ERR_FORMAT,
                            "%s: the file's optimiser has %zu parameters or more, this one has %" PRId64, m->k->path,
                            t->parameters, m->parameters);
        }
    }
    return MU_OK;
}

/* Numbers or object ids to places. */
static mu_status sort_keys(matching *m, key_place *keys)
{
    const theirs *t = &m->theirs;
    for (size_t g = 0; g < t->count; g++) {
        const mui_value *params = mui_dict_get(t->groups[g], "params");
        for (size_t j = 0; j < params->seq.count; j++) {
            if (params->seq.items[j]->kind != MUI_INT) {
                return mui_fail(m->context, MU_ERR_FORMAT, "%s: the optimiser's parameters are not numbers", m->k->path);
            }
            keys[t->starts[g] + j] = (key_place){params->seq.items[j]->i, t->starts[g] + j};
        }
    }
    if (t->parameters > 0) {
        qsort(keys, t->parameters, sizeof(*keys), by_key);
    }
    for (size_t i = 1; i < t->parameters; i++) {
        if (keys[i].key == keys[i - 1].key) {
            return mui_fail(m->context, MU_ERR_FORMAT, "%s: the optimiser has parameter %" PRId64 " twice", m->k->path,
                            keys[i].key);
        }
    }
    return MU_OK;
}

static mu_status find_states(matching *m, const mui_value *dict, const key_place *keys)
{
    const mui_seq *items = NULL;
    if (!mui_dict_items(mui_dict_get(dict, "state"), &items)) {
        return mui_fail(m->context, MU_ERR_FORMAT, "%s: the optimiser has no \"state\"", m->k->path);
    }
    for (size_t i = 0; i + 1 < items->count; i += 2) {
        key_place wanted = {.key = items->items[i]->i};
        const key_place *found = items->items[i]->kind == MUI_INT && m->theirs.parameters > 0
                                     ? bsearch(&wanted, keys, m->theirs.parameters, sizeof(*keys), by_key)
                                     : NULL;
        if (found != NULL) {
            m->theirs.states[found->place] = items->items[i + 1];
        } else {
            m->orphans++;
        }
    }
    return MU_OK;
}

/* -- ways to line up ------------------------------------------------------------------------------------------------ */

static void line_up(matching *m, const int64_t *order, bool trainable_only)
{
    ours *u = &m->ours;
    size_t at = 0;
    u->count = 0;
    for (int g = 0; g < mui_optimizer_groups(m->optimizer); g++) {
        size_t before = at;
        for (int64_t n = 0; n < m->parameters; n++) {
            int64_t i = order != NULL ? order[n] : n;
            mui_optimizer_entry e = mui_optimizer_get(m->optimizer, i);
            if (e.group == g && !(trainable_only && e.parameter->frozen)) {
                u->members[at++] = i;
            }
        }
        if (at > before) {
            u->groups[u->count++] = g;
            u->starts[u->count] = at;
        }
    }
}

/* Shape of any state tensor that is no scalar; a state without tells nothing. */
static bool shape_fits(matching *m, const mui_value *state, int64_t parameter)
{
    char problem[MUI_PROBLEM_BYTES];
    mui_axes axes;
    mui_file_tensor t;
    const mui_value *v = NULL;
    for (int n = 0; n < 2 && v == NULL; n++) {
        v = mui_dict_get(state, mui_optimizer_state_name(m->optimizer, n));
    }
    if (v == NULL || !mui_tensor_of(m->k, v, &axes, &t, problem)) {
        return true; /* the reader of states says what is wrong with it */
    }
    return mui_shape_is(&t, mui_optimizer_get(m->optimizer, parameter).parameter->value.dims);
}

/* g: of theirs, h: of ours. */
static bool groups_fit(matching *m, size_t g, size_t h)
{
    size_t from = m->theirs.starts[g], at = m->ours.starts[h];
    size_t count = m->theirs.starts[g + 1] - from;
    bool fit = m->ours.starts[h + 1] - at == count;
    for (size_t j = 0; j < count && fit; j++) {
        fit = shape_fits(m, m->theirs.states[from + j], m->ours.members[at + j]);
    }
    return fit;
}

static bool in_order(matching *m)
{
    bool fit = m->theirs.count == m->ours.count;
    for (size_t g = 0; g < m->theirs.count && fit; g++) {
        m->partner[g] = g;
        fit = groups_fit(m, g, g);
    }
    return fit;
}

/* Each group fits exactly one of ours, and no two the same. */
static bool in_another_order(matching *m)
{
    size_t fitting = 0;
    if (m->theirs.count != m->ours.count || m->theirs.count > 64) {
        return false;
    }
    for (size_t g = 0; g < m->theirs.count; g++) {
        fitting = 0;
        for (size_t h = 0; h < m->ours.count; h++) {
            if (groups_fit(m, g, h)) {
                fitting++;
                m->partner[g] = h;
            }
        }
        for (size_t f = 0; f < g; f++) {
            fitting += m->partner[f] == m->partner[g];
        }
        if (fitting != 1) {
            return false;
        }
    }
    if (m->theirs.count > 1) {
        mui_log(m->context, MU_LOG_INFO, "%s: the file's optimiser has its parameter groups in another order",
                m->k->path);
    }
    return true;
}

static bool try_orders(matching *m, const int64_t *order)
{
    for (int way = 0; way < 8; way++) { /* groups in order first, then all parameters, then the file's order */
        bool ours_order = (way & 1) != 0, trainable_only = (way & 2) != 0, permuted = (way & 4) != 0;
        if (ours_order && order == NULL) {
            continue; /* the same as before */
        }
        line_up(m, ours_order ? NULL : order, trainable_only);
        if (permuted ? in_another_order(m) : in_order(m)) {
            return true;
        }
    }
    return false;
}

/* Nothing fitted: what is wrong with the likeliest way. */
static mu_status explain(matching *m, const int64_t *order)
{
    const theirs *t = &m->theirs;
    const ours *u = &m->ours;
    line_up(m, order, false);
    if (t->count != u->count) {
        return mui_fail(m->context, MU_ERR_FORMAT, "%s: the file's optimiser has %zu parameter groups, this one has %zu",
                        m->k->path, t->count, u->count);
    }
    for (size_t g = 0; g < t->count; g++) {
        size_t given = t->starts[g + 1] - t->starts[g], wanted = u->starts[g + 1] - u->starts[g];
        if (given != wanted) {
            return mui_fail(m->context, MU_ERR_FORMAT,
                            "%s: group %zu of the file's optimiser has %zu parameters, this one's has %zu", m->k->path,
                            g, given, wanted);
        }
    }
    for (size_t j = 0; j < t->parameters; j++) {
        if (!shape_fits(m, t->states[j], u->members[j])) {
            return mui_fail(m->context, MU_ERR_SHAPE,
                            "%s: the state of the file's optimiser for its parameter number %zu has another shape than %s",
                            m->k->path, j, mui_optimizer_get(m->optimizer, u->members[j]).parameter->name);
        }
    }
    return mui_fail(m->context, MU_ERR_FORMAT, "%s: the file's optimiser does not fit this one", m->k->path);
}

/* -- by name -------------------------------------------------------------------------------------------------------- */

typedef struct name_place {
    const char *name;
    int64_t parameter;
} name_place;

static int by_name(const void *a, const void *b)
{
    const name_place *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static const name_place *find_name(const name_place *names, int64_t count, mui_slice name)
{
    char text[1024];
    if (name.bytes >= sizeof(text) || count == 0) {
        return NULL;
    }
    memcpy(text, name.data, name.bytes);
    text[name.bytes] = '\0';
    for (const char *at = text;;) {
        name_place wanted = {.name = at};
        const name_place *found = bsearch(&wanted, names, (size_t)count, sizeof(*names), by_name);
        int w = mui_wrapper_at(at);
        if (found != NULL || w < 0) {
            return found;
        }
        at += strlen(mui_wrappers[w]);
    }
}

/* Gives each place its parameter (members, in their order) and each group the one of ours that all its parameters are
 * in. */
static bool assign_names(matching *m, const name_place *names, bool *used)
{
    const theirs *t = &m->theirs;
    ours *u = &m->ours;
    for (size_t g = 0; g < t->count; g++) {
        const mui_value *list = mui_dict_get(t->groups[g], "param_names");
        size_t count = t->starts[g + 1] - t->starts[g];
        int group = -1;
        if (!mui_is_sequence(list) || list->seq.count != count) {
            return false;
        }
        for (size_t j = 0; j < count; j++) {
            const mui_value *v = list->seq.items[j];
            const name_place *found = v->kind == MUI_STR ? find_name(names, m->parameters, v->text) : NULL;
            if (found == NULL || used[found->parameter]) {
                return false;
            }
            int in = mui_optimizer_get(m->optimizer, found->parameter).group;
            if ((group >= 0 && in != group) || !shape_fits(m, t->states[t->starts[g] + j], found->parameter)) {
                return false;
            }
            group = in;
            used[found->parameter] = true;
            u->members[t->starts[g] + j] = found->parameter;
        }
        u->groups[g] = group;
        for (size_t f = 0; f < g; f++) {
            if (u->groups[f] == group) {
                return false;
            }
        }
        u->starts[g + 1] = t->starts[g + 1];
        m->partner[g] = g;
    }
    u->count = t->count;
    for (int64_t i = 0; i < m->parameters; i++) {
        if (!used[i] && !mui_optimizer_get(m->optimizer, i).parameter->frozen) {
            return false;
        }
    }
    return true;
}

static mu_status try_names(matching *m, bool *fit)
{
    *fit = false;
    if (m->theirs.count == 0 || m->theirs.count > (size_t)mui_optimizer_groups(m->optimizer) ||
        mui_dict_get(m->theirs.groups[0], "param_names") == NULL) {
        return MU_OK;
    }
    name_place *names = mui_calloc(m->context, (size_t)m->parameters, sizeof(*names));
    bool *used = mui_calloc(m->context, (size_t)m->parameters, sizeof(*used));
    if (names != NULL && used != NULL) {
        for (int64_t i = 0; i < m->parameters; i++) {
            names[i] = (name_place){mui_optimizer_get(m->optimizer, i).parameter->name, i};
        }
        qsort(names, (size_t)m->parameters, sizeof(*names), by_name);
        *fit = assign_names(m, names, used);
    }
    mu_status s = names != NULL && used != NULL ? MU_OK : MU_ERR_NOMEM;
    mui_free(m->context, names);
    mui_free(m->context, used);
    return s;
}

/* -- all ------------------------------------------------------------------------------------------------------------ */

static mu_status open_matching(matching *m)
{
    size_t groups = (size_t)mui_optimizer_groups(m->optimizer), n = (size_t)m->parameters;
    m->theirs.states = mui_calloc(m->context, n, sizeof(*m->theirs.states));
    m->ours.groups = mui_calloc(m->context, groups, sizeof(*m->ours.groups));
    m->ours.starts = mui_calloc(m->context, groups + 1, sizeof(*m->ours.starts));
    m->ours.members = mui_calloc(m->context, n, sizeof(*m->ours.members));
    bool all = m->theirs.states != NULL && m->ours.groups != NULL && m->ours.starts != NULL && m->ours.members != NULL;
    return all ? MU_OK : MU_ERR_NOMEM;
}

static void close_matching(matching *m)
{
    mui_free(m->context, m->theirs.groups);
    mui_free(m->context, m->theirs.starts);
    mui_free(m->context, m->theirs.states);
    mui_free(m->context, m->ours.groups);
    mui_free(m->context, m->ours.starts);
    mui_free(m->context, m->ours.members);
    mui_free(m->context, m->partner);
}

static mu_status match(matching *m, const mui_value *dict, const int64_t *order)
{
    const mui_value *list = mui_dict_get(dict, "param_groups");
    if (!mui_is_sequence(list)) {
        return mui_fail(m->context, MU_ERR_FORMAT, "%s: the optimiser has no \"param_groups\"", m->k->path);
    }
    mu_status s = open_matching(m);
    s = s == MU_OK ? count_theirs(m, list) : s;
    key_place *keys = s == MU_OK ? mui_calloc(m->context, m->theirs.parameters, sizeof(*keys)) : NULL;
    m->partner = s == MU_OK ? mui_calloc(m->context, m->theirs.count, sizeof(*m->partner)) : NULL;
    s = s == MU_OK && (keys == NULL || m->partner == NULL) ? MU_ERR_NOMEM : s;
    s = s == MU_OK ? sort_keys(m, keys) : s;
    s = s == MU_OK ? find_states(m, dict, keys) : s;
    mui_free(m->context, keys);
    bool fit = false;
    s = s == MU_OK ? try_names(m, &fit) : s;
    if (s == MU_OK && !fit && !try_orders(m, order)) {
        return explain(m, order);
    }
    if (s == MU_OK && m->orphans > 0) {
        return mui_fail(m->context, MU_ERR_FORMAT, "%s: the optimiser has state for %" PRId64
                        " parameters that no group has", m->k->path, m->orphans);
    }
    return s;
}

mu_status mui_optim_match_find(mu_checkpoint_file *k, mu_optimizer *o, const mui_value *dict, const int64_t *order,
                               const mui_optim_match *out)
{
    matching m = {.k = k, .context = k->context, .optimizer = o, .parameters = mui_optimizer_count(o)};
    mu_status s = match(&m, dict, order);
    for (size_t g = 0; s == MU_OK && g < m.theirs.count; g++) {
        size_t h = m.partner[g], from = m.theirs.starts[g], at = m.ours.starts[h];
        out->groups[m.ours.groups[h]] = m.theirs.groups[g];
        for (size_t j = 0; from + j < m.theirs.starts[g + 1]; j++) {
            out->states[m.ours.members[at + j]] = m.theirs.states[from + j];
        }
    }
    close_matching(&m);
    return s;
}
