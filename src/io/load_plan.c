/* Planning a load: what of the file goes where. */
#include "io/load_plan.h"
#include "base/alloc.h"
#include "io/load_convert.h"
#include "io/load_extra.h"
#include "io/load_report.h"
#include "io/load_verdict.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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

static void assign(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, mui_verdict *v)
{
    for (size_t i = 0; i < m->end - m->first; i++) {
        if (m->own[i] == NULL) {
            continue;
        }
        if (m->state_of[i] == SIZE_MAX) {
            const char *name = k->tree.entries[m->first + i].name;
            char *renamed = strcmp(m->names[i], m->own[i]) != 0 ? mui_format(p->context, " (renamed %.300s)", m->names[i]) : NULL;
            mui_list_add(&v->unexpected, name, renamed != NULL ? renamed : "");
            mui_free(p->context, renamed);
        } else {
            p->items[m->state_of[i]].entry = m->first + i;
        }
    }
}

static bool shapes_fit(const mui_file_tensor *t, mu_dims d)
{
    if (t->ndim == 1 && t->dim[0] == 1 && d.ndim == 0) {
        return true; /* scalars were of shape (1) before PyTorch 0.4 */
    }
    return mui_shape_is(t, d);
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

static void note_renaming(mui_plan *p, const mui_match *m, size_t i, mui_verdict *v)
{
    size_t at = p->items[i].entry - m->first;
    char what[400];
    p->counts.renamed += strcmp(m->own[at], p->states.items[i].name) != 0;
    if (m->names[at] != m->own[at]) {
        snprintf(what, sizeof(what), ": %.300s in the file", m->own[at]);
        mui_list_add(&v->renamed, p->states.items[i].name, what);
    }
}

static mu_status compare(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, size_t i, mui_verdict *v)
{
    const mui_state *x = &p->states.items[i];
    mui_plan_item *item = &p->items[i];
    const mui_entry *e = &k->tree.entries[item->entry];
    const mui_file_tensor *t = e->tensor;
    char theirs[300], ours[MUI_DIMS_TEXT], what[600];
    if (!shapes_fit(t, x->value->dims)) {
        shape_text(t, theirs, sizeof(theirs));
        snprintf(what, sizeof(what), ": %s in the file, %s in the model", theirs, mui_dims_text(x->value->dims, ours));
        mui_list_add(&v->mismatched, x->name, what);
        return MU_OK;
    }
    if (t->note != NULL || !t->dtype->exact || !mui_can_convert(t->dtype->carrier, x->value->dtype)) {
        return mui_fail(p->context, MU_ERR_UNSUPPORTED, "%s: tensor '%s' of %s cannot be loaded as %s%s%s", k->path,
                        e->name, t->dtype != NULL ? t->dtype->name : "unknown type", mu_dtype_name(x->value->dtype),
                        t->note != NULL ? ": it is " : "", t->note != NULL ? t->note : "");
    }
    if (t->dtype->carrier != x->value->dtype) {
        snprintf(what, sizeof(what), ": from %s to %s", t->dtype->name, mu_dtype_name(x->value->dtype));
        mui_list_add(&v->converted, x->name, what);
    }
    note_renaming(p, m, i, v);
    item->take = true;
    p->items[x->same_as].filled = true;
    return MU_OK;
}

/* What is taken first; then a name that the file lacks is present if it is tied to one that is taken. */
static mu_status judge(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, const mui_versions *versions,
                       mui_verdict *v)
{
    mui_load_counts *n = &p->counts;
    mu_status s = MU_OK;
    for (size_t i = 0; i < p->states.count && s == MU_OK; i++) {
        if (p->items[i].entry != SIZE_MAX) {
            s = compare(p, k, m, i, v);
        } else if (mui_may_be_missing(p, m, versions, i)) {
            p->items[i].take = true; /* and nothing to read: zero */
            p->items[p->states.items[i].same_as].filled = true;
        }
        n->loaded += p->items[i].take;
    }
    for (size_t i = 0; i < p->states.count && s == MU_OK; i++) {
        const mui_state *x = &p->states.items[i];
        int64_t elements = x->same_as == i ? mui_dims_elements(x->value->dims) : 0;
        n->elements += elements;
        n->elements_loaded += p->items[i].filled ? elements : 0;
        if (p->items[i].entry == SIZE_MAX && !p->items[i].take) {
            bool tied = p->items[x->same_as].filled;
            mui_list_add(tied ? &v->tied : &v->missing, x->name, "");
            n->loaded += tied;
        }
    }
    n->missing = v->missing.count;
    n->unexpected = v->unexpected.count;
    n->mismatched = v->mismatched.count;
    n->converted = v->converted.count;
    return s;
}

static mu_status decide(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o, mui_match *m, mui_verdict *v)
{
    mui_versions versions;
    assign(p, k, m, v);
    mu_status s = mui_others_list(p, k, m, v);
    if (s == MU_OK) {
        s = mui_versions_read(p, k, m, &versions);
        s = s == MU_OK ? judge(p, k, m, &versions, v) : s;
        mui_versions_free(&versions);
    }
    if (s != MU_OK) {
        return s;
    }
    const mui_load_counts *n = &p->counts;
    if ((n->mismatched > 0 && !o->skip_mismatched) || ((n->missing > 0 || n->unexpected > 0) && !o->not_strict)) {
        return mui_verdict_refuse(p, k, o, v);
    }
    s = mui_verdict_weigh(p, k, m, o, v);
    s = s == MU_OK ? mui_ties_check(p, k, o->not_strict) : s;
    if (s == MU_OK) {
        memcpy(p->removed, m->removed, sizeof(p->removed));
        memcpy(p->added, m->added, sizeof(p->added));
        mui_verdict_report(p, k, m, v);
        s = mu_context_status(p->context);
    }
    return s;
}

static mu_status make(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o, mui_verdict *v)
{
    mui_match m;
    mu_status s = mui_match_find(k, &p->states, o, &m);
    if (s == MU_OK) {
        s = decide(p, k, o, &m, v);
        mui_match_free(&m);
    }
    return s;
}

mu_status mui_plan_make(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o)
{
    mui_verdict v;
    mui_verdict_init(&v, p->context);
    mu_status s = make(p, k, o, &v);
    mui_verdict_free(&v);
    return s;
}

mu_status mui_plan_report(const mui_plan *p, mu_load_report *out)
{
    const mui_load_counts *n = &p->counts;
    mu_load_report r = {.loaded = n->loaded,
                        .missing = n->missing,
                        .unexpected = n->unexpected,
                        .mismatched = n->mismatched,
                        .converted = n->converted,
                        .renamed = n->renamed,
                        .elements = n->elements,
                        .elements_loaded = n->elements_loaded,
                        .prefix_removed = mui_keep_text(p->context, MUI_KEPT_REMOVED, p->removed),
                        .prefix_added = mui_keep_text(p->context, MUI_KEPT_ADDED, p->added),
                        .text = mui_keep_text(p->context, MUI_KEPT_REPORT, mui_text_get(&p->text))};
    if (r.prefix_removed == NULL || r.prefix_added == NULL || r.text == NULL) {
        return MU_ERR_NOMEM;
    }
    *out = r;
    return MU_OK;
}
