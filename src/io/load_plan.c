/* Planning a load: what of the file goes where. */
#include "io/load_plan.h"
#include "base/alloc.h"
#include "io/load_convert.h"
#include "io/load_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define SHOWN 3 /* names of each kind in a message; the report has all */

typedef struct name_list {
    mui_text brief, full;
    int64_t count;
} name_list;

static void list_add(name_list *l, const char *name, const char *what)
{
    l->count++;
    if (l->count <= SHOWN) {
        mui_text_add(&l->brief, "%s%.300s%s", l->count > 1 ? ", " : "", name, what);
    }
    mui_text_add(&l->full, "  %s%s\n", name, what);
}

typedef struct verdict {
    name_list missing, unexpected, mismatched, converted;
} verdict;

static void verdict_init(verdict *v, mu_context *c)
{
    name_list *lists[4] = {&v->missing, &v->unexpected, &v->mismatched, &v->converted};
    for (int i = 0; i < 4; i++) {
        lists[i]->count = 0;
        mui_text_init(&lists[i]->brief, c);
        mui_text_init(&lists[i]->full, c);
    }
}

static void verdict_free(verdict *v)
{
    name_list *lists[4] = {&v->missing, &v->unexpected, &v->mismatched, &v->converted};
    for (int i = 0; i < 4; i++) {
        mui_text_free(&lists[i]->brief);
        mui_text_free(&lists[i]->full);
    }
}

mu_status mui_plan_open(mu_context *c, mu_module *root, mui_plan *out)
{
    *out = (mui_plan){.context = c};
    mui_text_init(&out->text, c);
    mu_status s = mui_states_list(c, root, &out->states);
    if (s != MU_OK) {
        return s;
    }
    out->items = mui_calloc(c, out->states.count, sizeof(*out->items));
    if (out->items == NULL) {
        mui_states_free(&out->states);
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < out->states.count; i++) {
        out->items[i].entry = SIZE_MAX;
    }
    return MU_OK;
}

void mui_plan_close(mui_plan *p)
{
    mui_text_free(&p->text);
    mui_plan_drop_data(p);
    mui_free(p->context, p->items);
    mui_states_free(&p->states);
    *p = (mui_plan){0};
}

/* -- planning ----------------------------------------------------------------------------------------------------- */

static mu_status assign(mui_plan *p, mu_checkpoint_file *k, const mui_match *m, verdict *v)
{
    char name[MUI_MATCH_NAME];
    for (size_t i = m->first; i < m->end; i++) {
        if (!mui_match_name(k, m, i, name)) {
            continue;
        }
        const mui_state *x = mui_states_find(&p->states, name);
        if (x == NULL) {
            list_add(&v->unexpected, k->tree.entries[i].name, "");
            continue;
        }
        mui_plan_item *item = &p->items[x - p->states.items];
        if (item->entry != SIZE_MAX) {
            return mui_fail(p->context, MU_ERR_FORMAT, "%s: both '%s' and '%s' would be loaded into %s", k->path,
                            k->tree.entries[item->entry].name, k->tree.entries[i].name, name);
        }
        item->entry = i;
    }
    return MU_OK;
}

/* Version of the state of the module at path, from the dict's _metadata; 0 when it is not told. */
static int64_t module_version(const mui_match *m, const char *path, size_t path_bytes)
{
    if (m->dict == NULL || m->dict->kind != MUI_OBJECT) {
        return 0;
    }
    char key[MUI_MATCH_NAME];
    const char *before = m->rename == MUI_RENAME_REMOVE ? m->prefix : "";
    snprintf(key, sizeof(key), "%s%.*s", before, (int)path_bytes, path);
    mui_value *module = mui_dict_get(mui_dict_get(m->dict->object->state, "_metadata"), key);
    mui_value *version = mui_dict_get(module, "version");
    return version != NULL && version->kind == MUI_INT ? version->i : 0;
}

/* Files from before PyTorch 0.4.1 have no num_batches_tracked; torch fills in 0 unless the file says version 2. */
static bool may_be_missing(const mui_state *x, const mui_match *m)
{
    static const char name[] = "num_batches_tracked";
    size_t n = strlen(x->name), k = sizeof(name) - 1;
    if (x->parameter != NULL || n < k || strcmp(x->name + n - k, name) != 0 || (n > k && x->name[n - k - 1] != '.')) {
        return false;
    }
    return module_version(m, x->name, n > k ? n - k - 1 : 0) < 2;
}

/* A dict may hold something else under a name that should be a tensor; torch refuses that even when not strict. */
static mu_status check_not_other(const mu_checkpoint_file *k, const mui_match *m, const mui_state *x)
{
    char key[MUI_MATCH_NAME];
    snprintf(key, sizeof(key), "%s%s", m->rename == MUI_RENAME_REMOVE ? m->prefix : "", x->name);
    const mui_value *v = mui_dict_get(m->dict, key);
    if (v == NULL || v->kind == MUI_NONE || v->kind == MUI_OBJECT) {
        return MU_OK;
    }
    return mui_fail(k->context, MU_ERR_FORMAT, "%s: %s is a %s in the file, a tensor was expected", k->path, key,
                    mui_kind_name(v->kind));
}

static bool shapes_fit(const mui_file_tensor *t, mu_dims d)
{
    if (t->ndim == 1 && t->dim[0] == 1 && d.ndim == 0) {
        return true; /* scalars were of shape (1) before PyTorch 0.4 */
    }
    return t->ndim == d.ndim && memcmp(t->dim, d.dim, (size_t)d.ndim * sizeof(d.dim[0])) == 0;
}

static void shape_text(const mui_file_tensor *t, char *out, size_t bytes)
{
    size_t n = (size_t)snprintf(out, bytes, "(");
    for (int i = 0; i < t->ndim && n < bytes; i++) {
        n += (size_t)snprintf(out + n, bytes - n, "%s%" PRId64, i > 0 ? ", " : "", t->dim[i]);
    }
    if (n < bytes) {
        snprintf(out + n, bytes - n, t->ndim == 1 ? ",)" : ")");
    }
}

static mu_status compare(mui_plan *p, mu_checkpoint_file *k, size_t i, verdict *v)
{
    const mui_state *x = &p->states.items[i];
    mui_plan_item *item = &p->items[i];
    const mui_entry *e = &k->tree.entries[item->entry];
    const mui_file_tensor *t = e->tensor;
    char theirs[300], ours[MUI_DIMS_TEXT], what[600];
    if (!shapes_fit(t, x->value->dims)) {
        shape_text(t, theirs, sizeof(theirs));
        snprintf(what, sizeof(what), ": %s in the file, %s in the model", theirs, mui_dims_text(x->value->dims, ours));
        list_add(&v->mismatched, x->name, what);
        return MU_OK;
    }
    if (t->note != NULL || !t->dtype->exact || !mui_can_convert(t->dtype->carrier, x->value->dtype)) {
        return mui_fail(p->context, MU_ERR_UNSUPPORTED, "%s: tensor '%s' of %s cannot be loaded as %s%s%s", k->path,
                        e->name, t->dtype != NULL ? t->dtype->name : "unknown type", mu_dtype_name(x->value->dtype),
                        t->note != NULL ? ": it is " : "", t->note != NULL ? t->note : "");
    }
    if (t->dtype->carrier != x->value->dtype) {
        snprintf(what, sizeof(what), ": from %s to %s", t->dtype->name, mu_dtype_name(x->value->dtype));
        list_add(&v->converted, x->name, what);
    }
    item->take = true;
    return MU_OK;
}

static mu_status judge(mui_plan *p, mu_checkpoint_file *k, const mui_match *m, verdict *v)
{
    int checks = 0;
    for (size_t i = 0; i < p->states.count; i++) {
        mu_status s = MU_OK;
        if (p->items[i].entry != SIZE_MAX) {
            s = compare(p, k, i, v);
        } else if (may_be_missing(&p->states.items[i], m)) {
            p->items[i].take = true; /* and nothing to read: zero */
        } else {
            /* The search is linear in the dict, so only for the first few. */
            s = checks++ < 64 ? check_not_other(k, m, &p->states.items[i]) : MU_OK;
            list_add(&v->missing, p->states.items[i].name, "");
        }
        if (s != MU_OK) {
            return s;
        }
        p->loaded += p->items[i].take;
    }
    p->missing = v->missing.count;
    p->unexpected = v->unexpected.count;
    p->mismatched = v->mismatched.count;
    return MU_OK;
}

static void add_brief(mui_text *t, const char *what, const name_list *l)
{
    if (l->count > 0) {
        mui_text_add(t, "; %s: %s", what, mui_text_get(&l->brief));
        if (l->count > SHOWN) {
            mui_text_add(t, " and %" PRId64 " more", l->count - SHOWN);
        }
    }
}

static mu_status refuse(mui_plan *p, mu_checkpoint_file *k, const verdict *v)
{
    mui_text t;
    mui_text_init(&t, p->context);
    add_brief(&t, "missing in the file", &v->missing);
    add_brief(&t, "not in the model", &v->unexpected);
    add_brief(&t, "shapes differ", &v->mismatched);
    mu_status s = mui_fail(p->context, v->mismatched.count > 0 ? MU_ERR_SHAPE : MU_ERR_FORMAT,
                           "%s: does not fit the model (%" PRId64 " of %zu names do)%s", k->path, p->loaded,
                           p->states.count, mui_text_get(&t));
    mui_text_free(&t);
    return s;
}

static void add_section(mui_text *t, const char *what, const name_list *l)
{
    if (l->count > 0) {
        mui_text_add(t, "%s (%" PRId64 "):\n%s", what, l->count, mui_text_get(&l->full));
    }
}

static const char *rename_text(const mui_match *m)
{
    static const char *const texts[] = {"", " removed from the start of names", " put before names",
                                        " removed inside names"};
    return texts[m->rename];
}

static void write_report(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, const verdict *v)
{
    mui_text_add(&p->text, "%s: %s", k->path, mu_checkpoint_format(k));
    if (m->path[0] != '\0') {
        mui_text_add(&p->text, ", state dict \"%s\"", m->path);
    }
    if (m->rename != MUI_RENAME_NONE) {
        mui_text_add(&p->text, ", \"%s\"%s", m->prefix, rename_text(m));
        mui_log(p->context, MU_LOG_INFO, "%s: \"%s\"%s", k->path, m->prefix, rename_text(m));
    }
    mui_text_add(&p->text, "\nloaded %" PRId64 " of %zu\n", p->loaded, p->states.count);
    add_section(&p->text, "missing in the file", &v->missing);
    add_section(&p->text, "not in the model", &v->unexpected);
    add_section(&p->text, "shapes differ, left as they were", &v->mismatched);
    add_section(&p->text, "converted", &v->converted);
    if (2 * p->loaded < (int64_t)p->states.count) {
        mui_log(p->context, MU_LOG_WARN, "%s: only %" PRId64 " of the model's %zu tensors were in the file; not there: %s",
                k->path, p->loaded, p->states.count, mui_text_get(&v->missing.brief));
    }
}

static mu_status make(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o, verdict *v)
{
    mui_match m;
    mu_status s = mui_match_find(k, &p->states, o->key, &m);
    if (s == MU_OK) {
        s = assign(p, k, &m, v);
    }
    if (s == MU_OK) {
        s = judge(p, k, &m, v);
    }
    if (s != MU_OK) {
        return s;
    }
    bool refused = (p->mismatched > 0 && !o->skip_mismatched) || ((p->missing > 0 || p->unexpected > 0) && !o->not_strict);
    if (refused) {
        return refuse(p, k, v);
    }
    if (p->loaded == 0) {
        return mui_fail(p->context, MU_ERR_SHAPE, "%s: nothing can be loaded: no tensor has the model's shape; %s",
                        k->path, mui_text_get(&v->mismatched.brief));
    }
    if (m.rename == MUI_RENAME_REMOVE || m.rename == MUI_RENAME_REMOVE_ALL) {
        memcpy(p->removed, m.prefix, sizeof(p->removed));
    } else {
        memcpy(p->added, m.prefix, sizeof(p->added));
    }
    write_report(p, k, &m, v);
    return mu_context_status(p->context);
}

mu_status mui_plan_make(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o)
{
    verdict v;
    verdict_init(&v, p->context);
    mu_status s = make(p, k, o, &v);
    verdict_free(&v);
    return s;
}

mu_status mui_plan_report(const mui_plan *p, mu_load_report *out)
{
    mu_load_report r = {.loaded = p->loaded,
                        .missing = p->missing,
                        .unexpected = p->unexpected,
                        .mismatched = p->mismatched,
                        .prefix_removed = mui_keep_text(p->context, MUI_KEPT_REMOVED, p->removed),
                        .prefix_added = mui_keep_text(p->context, MUI_KEPT_ADDED, p->added),
                        .text = mui_keep_text(p->context, MUI_KEPT_REPORT, mui_text_get(&p->text))};
    if (r.prefix_removed == NULL || r.prefix_added == NULL || r.text == NULL) {
        return MU_ERR_NOMEM;
    }
    *out = r;
    return MU_OK;
}
