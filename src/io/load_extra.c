/* Versions, other values, ties. */
#include "io/load_extra.h"
#include "base/alloc.h"
#include "io/load_convert.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- versions ----------------------------------------------------------------------------------------------------- */

typedef struct mui_version {
    mui_slice path;
    int64_t version;
} mui_version;

static int by_path(const void *a, const void *b)
{
    return mui_slice_compare(((const mui_version *)a)->path, ((const mui_version *)b)->path);
}

static const char counter[] = "num_batches_tracked";
enum { FIRST_WITH_COUNTER = 2 }; /* version of batch norms */

/* Marks the state that the counter of the file's module at this path goes to. */
static mu_status mark_tracked(const mui_plan *p, const mu_checkpoint_file *k, mui_match *m, mui_slice path, bool *tracked)
{
    char name[MUI_MAX_NAME_BYTES + 1];
    if (path.bytes + sizeof(counter) >= sizeof(name)) {
        return MU_OK; /* longer than names are */
    }
    snprintf(name, sizeof(name), "%.*s%s%s", (int)path.bytes, path.data, path.bytes > 0 ? "." : "", counter);
    const mui_state *x = mui_match_state(m, k->path, name);
    if (x != NULL) {
        tracked[x - p->states.items] = true;
    }
    return mu_context_status(p->context);
}

mu_status mui_versions_read(const mui_plan *p, const mu_checkpoint_file *k, mui_match *m, mui_versions *out)
{
    mu_context *c = p->context;
    const mui_value *dict = m->dict;
    const mui_seq *items = NULL;
    *out = (mui_versions){.context = c, .tracked = mui_calloc(c, p->states.count, sizeof(*out->tracked))};
    if (out->tracked == NULL) {
        return MU_ERR_NOMEM;
    }
    if (dict == NULL || dict->kind != MUI_OBJECT || !mui_dict_items(mui_dict_get(dict->object->state, "_metadata"), &items)) {
        return MU_OK;
    }
    out->items = mui_calloc(c, items->count / 2, sizeof(*out->items));
    mu_status s = out->items != NULL ? MU_OK : MU_ERR_NOMEM;
    for (size_t i = 0; i + 1 < items->count && s == MU_OK; i += 2) {
        const mui_value *key = items->items[i], *version = mui_dict_get(items->items[i + 1], "version");
        if (key->kind == MUI_STR && version != NULL && version->kind == MUI_INT) {
            out->items[out->count++] = (mui_version){key->text, version->i};
            s = version->i >= FIRST_WITH_COUNTER ? mark_tracked(p, k, m, key->text, out->tracked) : MU_OK;
        }
    }
    if (out->count > 0) {
        qsort(out->items, out->count, sizeof(*out->items), by_path);
    }
    return s;
}

void mui_versions_free(mui_versions *v)
{
    if (v->context != NULL) {
        mui_free(v->context, v->items);
        mui_free(v->context, v->tracked);
    }
    *v = (mui_versions){0};
}

/* 0 when it is not told. */
static int64_t version_of(const mui_versions *v, const char *path, size_t bytes)
{
    mui_version key = {.path = {path, bytes}};
    const mui_version *found = v->count > 0 ? bsearch(&key, v->items, v->count, sizeof(key), by_path) : NULL;
    return found != NULL ? found->version : 0;
}

/* Bytes of the path of the module whose state this is. */
static size_t module_bytes(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL ? (size_t)(dot - name) : 0;
}

/* The file's name for a state of the same module; states of a module follow each other. NULL: the file has none. */
static const char *sibling(const mui_plan *p, const mui_match *m, size_t i)
{
    const char *name = p->states.items[i].name;
    size_t n = module_bytes(name);
    for (int step = -1; step <= 1; step += 2) {
        for (size_t j = i; j < p->states.count; j += (size_t)step) { /* wraps to SIZE_MAX at the start */
            const char *other = p->states.items[j].name;
            if (module_bytes(other) != n || memcmp(other, name, n) != 0) {
                break;
            }
            if (p->items[j].entry != SIZE_MAX) {
                return m->own[p->items[j].entry - m->first];
            }
        }
    }
    return NULL;
}

bool mui_may_be_missing(const mui_plan *p, const mui_match *m, const mui_versions *v, size_t i)
{
    const mui_state *x = &p->states.items[i];
    size_t n = module_bytes(x->name);
    if (x->parameter != NULL || strcmp(x->name + n + (n > 0), counter) != 0) {
        return false;
    }
    const char *theirs = sibling(p, m, i);
    return theirs != NULL ? version_of(v, theirs, module_bytes(theirs)) < FIRST_WITH_COUNTER : !v->tracked[i];
}

/* -- values that are no tensors ----------------------------------------------------------------------------------- */

mu_status mui_others_list(mui_plan *p, const mu_checkpoint_file *k, mui_match *m, mui_verdict *v)
{
    const mui_seq *items = NULL;
    if (!mui_dict_items(m->dict, &items)) {
        return MU_OK;
    }
    for (size_t i = 0; i + 1 < items->count; i += 2) {
        const mui_value *key = items->items[i], *value = items->items[i + 1];
        char name[MUI_MAX_NAME_BYTES + 1], what[64];
        if (key->kind != MUI_STR || key->text.bytes >= sizeof(name) || mui_holds_tensors(value)) {
            continue;
        }
        memcpy(name, key->text.data, key->text.bytes);
        name[key->text.bytes] = '\0';
        const mui_state *x = mui_match_state(m, k->path, name);
        if (mui_failed(p->context)) {
            return mu_context_status(p->context);
        }
        if (x != NULL && p->items[x - p->states.items].entry == SIZE_MAX) {
            return mui_fail(p->context, MU_ERR_FORMAT, "%s: %s is a %s in the file, a tensor was expected", k->path, name,
                            mui_kind_name(value->kind));
        }
        snprintf(what, sizeof(what), ": a %s, no tensor", mui_kind_name(value->kind));
        mui_list_add(&v->unexpected, name, what);
    }
    return MU_OK;
}

/* -- ties --------------------------------------------------------------------------------------------------------- */

/* Elements of entry e as the model's type; NULL with the error raised. */
static void *read_as(mui_plan *p, mu_checkpoint_file *k, const mui_entry *e, const mu_tensor *t)
{
    void *out = mui_alloc(p->context, (size_t)mui_dims_elements(t->dims) * mu_dtype_bytes(t->dtype));
    if (out != NULL && mui_tensor_load_as(k, e->name, e->tensor, t->dtype, out) != MU_OK) {
        mui_free(p->context, out);
        return NULL;
    }
    return out;
}

static bool tied_in_file(const mui_tree *t, size_t a, size_t b)
{
    size_t x = t->entries[a].tied_to != SIZE_MAX ? t->entries[a].tied_to : a;
    size_t y = t->entries[b].tied_to != SIZE_MAX ? t->entries[b].tied_to : b;
    return x == y && t->entries[a].tensor->dtype == t->entries[b].tensor->dtype;
}

/* first and second are states of one value, both in the file. */
static mu_status check_tie(mui_plan *p, mu_checkpoint_file *k, size_t first, size_t second, bool not_strict)
{
    const mui_entry *a = &k->tree.entries[p->items[first].entry], *b = &k->tree.entries[p->items[second].entry];
    const mu_tensor *t = p->states.items[first].value;
    if (tied_in_file(&k->tree, p->items[first].entry, p->items[second].entry)) {
        p->items[second].take = false;
        return MU_OK;
    }
    void *x = read_as(p, k, a, t), *y = x != NULL ? read_as(p, k, b, t) : NULL;
    mu_status s = y != NULL ? MU_OK : mu_context_status(p->context);
    if (y != NULL) {
        bool same = memcmp(x, y, (size_t)mui_dims_elements(t->dims) * mu_dtype_bytes(t->dtype)) == 0;
        if (!same && !not_strict) {
            s = mui_fail(p->context, MU_ERR_FORMAT,
                         "%s: %s and %s are one parameter in the model, but '%s' and '%s' differ in the file", k->path,
                         p->states.items[first].name, p->states.items[second].name, a->name, b->name);
        } else if (!same) {
            mui_log(p->context, MU_LOG_WARN, "%s: %s and %s are one parameter in the model; '%s' and '%s' differ in the "
                                             "file, and the last is taken",
                    k->path, p->states.items[first].name, p->states.items[second].name, a->name, b->name);
        }
        p->items[same ? second : first].take = false;
    }
    mui_free(p->context, x);
    mui_free(p->context, y);
    return s;
}

mu_status mui_ties_check(mui_plan *p, mu_checkpoint_file *k, bool not_strict)
{
    mu_status s = MU_OK;
    size_t *taken = mui_calloc(p->context, p->states.count, sizeof(*taken)); /* of each value, one state that is read */
    if (taken == NULL) {
        return MU_ERR_NOMEM;
    }
    memset(taken, 0xff, p->states.count * sizeof(*taken));
    for (size_t i = 0; i < p->states.count && s == MU_OK; i++) {
        size_t *one = &taken[p->states.items[i].same_as];
        if (!p->items[i].take || p->items[i].entry == SIZE_MAX) {
            continue;
        }
        if (*one != SIZE_MAX) {
            s = check_tie(p, k, *one, i, not_strict);
        }
        *one = p->items[i].take || *one == SIZE_MAX ? i : *one;
    }
    mui_free(p->context, taken);
    return s;
}
