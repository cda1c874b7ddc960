/* Dicts, and the edges of every kind of value. */
#include "io/tree_items.h"

#include <string.h>

/* -- dicts -------------------------------------------------------------------------------------------------------- */

static bool is_dict_class(const mui_value *g)
{
    return mui_global_is(g, "collections", "OrderedDict") || mui_global_is(g, "collections", "defaultdict") ||
           mui_global_is(g, "collections", "Counter");
}

bool mui_dict_items(const mui_value *v, const mui_seq **items)
{
    if (v != NULL && v->kind == MUI_DICT) {
        *items = &v->seq;
        return true;
    }
    if (v != NULL && v->kind == MUI_OBJECT && is_dict_class(v->object->callable)) {
        *items = &v->object->pairs;
        return true;
    }
    return false;
}

mui_value *mui_dict_get(const mui_value *dict, const char *key)
{
    const mui_seq *items = NULL;
    if (!mui_dict_items(dict, &items)) {
        return NULL;
    }
    for (size_t i = items->count / 2; i-- > 0;) {
        if (mui_text_is(items->items[2 * i], key)) {
            return items->items[2 * i + 1];
        }
    }
    return NULL;
}

/* -- what a value holds ------------------------------------------------------------------------------------------- */

bool mui_add_edge(const mui_meaning *w, mui_tree_node *n, mui_edge e)
{
    if (n->count == n->capacity) {
        size_t capacity = n->capacity < 4 ? 4 : n->capacity * 2;
        mui_edge *edges = mui_arena_calloc(w->arena, capacity, sizeof(*edges));
        if (edges == NULL) {
            return false;
        }
        if (n->count > 0) {
            memcpy(edges, n->edges, n->count * sizeof(*edges));
        }
        n->edges = edges;
        n->capacity = capacity;
    }
    n->edges[n->count++] = e;
    return true;
}

bool mui_is_branching(const mui_value *v)
{
    return v->kind == MUI_TUPLE || v->kind == MUI_LIST || v->kind == MUI_SET || v->kind == MUI_DICT ||
           v->kind == MUI_OBJECT || v->kind == MUI_PERSISTENT;
}

/* Room for the edges that every step-th value from first on will make: grown arrays would waste as much again. */
static bool reserve_edges(const mui_meaning *w, mui_tree_node *n, const mui_seq *s, size_t first, size_t step)
{
    size_t more = 0;
    for (size_t i = first; i < s->count; i += step) {
        more += mui_is_branching(s->items[i]);
    }
    if (more == 0 || n->count > 0) {
        return true;
    }
    n->edges = mui_arena_calloc(w->arena, more, sizeof(*n->edges));
    n->capacity = n->edges != NULL ? more : 0;
    return n->edges != NULL;
}

static bool add_items(const mui_meaning *w, mui_tree_node *n, const mui_seq *s)
{
    *w->work += s->count;
    if (!reserve_edges(w, n, s, 0, 1)) {
        return false;
    }
    for (size_t i = 0; i < s->count; i++) {
        if (mui_is_branching(s->items[i]) &&
            !mui_add_edge(w, n, (mui_edge){.kind = MUI_BY_INDEX, .index = i, .child = s->items[i]})) {
            return false;
        }
    }
    return true;
}

static bool add_pairs(const mui_meaning *w, mui_tree_node *n, const mui_seq *s)
{
    *w->work += s->count;
    n->items += s->count / 2;
    if (!reserve_edges(w, n, s, 1, 2)) {
        return false;
    }
    for (size_t i = 0; i + 1 < s->count; i += 2) {
        if (mui_is_branching(s->items[i + 1]) &&
            !mui_add_edge(w, n, (mui_edge){.kind = MUI_BY_KEY, .key = s->items[i], .child = s->items[i + 1]})) {
            return false;
        }
    }
    return true;
}

/* OrderedDict([[key, value], ...]), as Python 2 wrote it, and Counter({...}). */
static bool add_initial_pairs(const mui_meaning *w, mui_tree_node *n, const mui_value *args)
{
    const mui_value *from = args->seq.count > 0 ? args->seq.items[args->seq.count - 1] : NULL;
    const mui_seq *items = NULL;
    if (mui_dict_items(from, &items)) {
        return add_pairs(w, n, items);
    }
    if (from == NULL || from->kind != MUI_LIST) {
        return true;
    }
    *w->work += from->seq.count;
    n->items += from->seq.count;
    for (size_t i = 0; i < from->seq.count; i++) {
        const mui_value *pair = from->seq.items[i];
        if (mui_is_sequence(pair) && pair->seq.count == 2 &&
            mui_is_branching(pair->seq.items[1]) &&
            !mui_add_edge(w, n, (mui_edge){.kind = MUI_BY_KEY, .key = pair->seq.items[0], .child = pair->seq.items[1]})) {
            return false;
        }
    }
    return true;
}

/* Buffers whose names are in _non_persistent_buffers_set are not part of the state_dict. */
static bool is_non_persistent(const mui_value *set, const mui_value *key)
{
    for (size_t i = 0; key->kind == MUI_STR && i < set->seq.count && i < 1024; i++) {
        const mui_value *v = set->seq.items[i];
        if (v->kind == MUI_STR && v->text.bytes == key->text.bytes &&
            memcmp(v->text.data, key->text.data, key->text.bytes) == 0) {
            return true;
        }
    }
    return false;
}

/* A pickled torch.nn.Module, of whatever class: its own parameters, then buffers, then children. */
static bool add_module(const mui_meaning *w, mui_tree_node *n, const mui_value *state)
{
    static const char *const parts[3] = {"_parameters", "_buffers", "_modules"};
    const mui_value *skip = mui_dict_get(state, "_non_persistent_buffers_set");
    /* A set is SET under protocol 4 and set([...]) before. */
    if (skip != NULL && skip->kind == MUI_OBJECT && skip->object->args->seq.count == 1) {
        skip = skip->object->args->seq.items[0];
    }
    for (int i = 0; i < 3; i++) {
        const mui_seq *items = NULL;
        if (!mui_dict_items(mui_dict_get(state, parts[i]), &items)) {
            continue;
        }
        *w->work += items->count; /* many modules may share it */
        for (size_t j = 0; j + 1 < items->count; j += 2) {
            mui_value *key = items->items[j], *child = items->items[j + 1];
            bool skipped = i == 1 && skip != NULL && (skip->kind == MUI_SET || skip->kind == MUI_LIST) &&
                           is_non_persistent(skip, key);
            mui_edge e = {.kind = MUI_BY_KEY, .role = i == 0 ? MUI_PARAMETER : i == 1 ? MUI_BUFFER : MUI_NO_ROLE,
                          .key = key, .child = child};
            if (mui_is_branching(child) && !skipped && !mui_add_edge(w, n, e)) {
                return false;
            }
        }
    }
    return true;
}

/* What torch.optim.Optimizer.state_dict() gives, or a pickled optimiser's state. */
static bool is_optimizer(const mui_value *dict)
{
    return mui_dict_get(dict, "param_groups") != NULL && mui_dict_get(dict, "state") != NULL;
}

static bool add_object(const mui_meaning *w, mui_tree_node *n, const mui_object *o)
{
    if (is_dict_class(o->callable)) {
        n->dict = true;
        n->kind = MUI_BRANCH_DICT;
        return add_initial_pairs(w, n, o->args) && add_pairs(w, n, &o->pairs);
    }
    const mui_seq *state_items = NULL, *ignored = NULL;
    *w->work += mui_dict_items(o->state, &state_items) ? 4 * state_items->count : 0;
    if (mui_dict_items(mui_dict_get(o->state, "_modules"), &ignored) &&
        mui_dict_items(mui_dict_get(o->state, "_parameters"), &ignored)) {
        n->dict = true;
        n->kind = MUI_BRANCH_MODULE;
        return add_module(w, n, o->state);
    }
    const mui_value *c = o->callable;
    if (c->kind == MUI_PERSISTENT) {
        c = w->refs[c->number].class_value;
    }
    n->class_name = c != NULL && c->kind == MUI_GLOBAL ? c : NULL;
    if (o->state != NULL && o->state->kind == MUI_DICT) {
        n->dict = true;
        n->kind = is_optimizer(o->state) ? MUI_BRANCH_OPTIMIZER : MUI_BRANCH_OBJECT;
        if (!add_pairs(w, n, &o->state->seq)) {
            return false;
        }
    } else if (o->state != NULL && mui_is_branching(o->state) &&
               !mui_add_edge(w, n, (mui_edge){.kind = MUI_THROUGH, .child = o->state})) {
        return false;
    }
    return add_pairs(w, n, &o->pairs) && add_items(w, n, &o->appended) && add_items(w, n, &o->args->seq);
}

bool mui_add_items_of(const mui_meaning *w, mui_tree_node *n, mui_value *v)
{
    if (v->kind == MUI_DICT) {
        n->dict = true;
        n->kind = is_optimizer(v) ? MUI_BRANCH_OPTIMIZER : MUI_BRANCH_DICT;
        return add_pairs(w, n, &v->seq);
    }
    if (v->kind == MUI_OBJECT) {
        bool good = add_object(w, n, v->object);
        n->kind = n->kind == MUI_BRANCH_DICT && is_optimizer(v) ? MUI_BRANCH_OPTIMIZER : n->kind;
        return good;
    }
    return v->kind == MUI_PERSISTENT || add_items(w, n, &v->seq);
}
