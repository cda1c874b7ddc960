/* The words for what a load found. */
#include "io/load_verdict.h"

#include <inttypes.h>
#include <string.h>

#define SHOWN 3 /* names of each kind in a message; the report has all */

void mui_list_add(mui_name_list *l, const char *name, const char *what)
{
    l->count++;
    if (l->count <= SHOWN) {
        mui_text_add(&l->brief, "%s%.300s%s", l->count > 1 ? ", " : "", name, what);
    }
    mui_text_add(&l->full, "  %s%s\n", name, what);
}

void mui_verdict_init(mui_verdict *v, mu_context *c)
{
    mui_name_list *lists[] = {&v->missing, &v->unexpected, &v->mismatched, &v->converted, &v->renamed, &v->tied};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        lists[i]->count = 0;
        mui_text_init(&lists[i]->brief, c);
        mui_text_init(&lists[i]->full, c);
    }
}

void mui_verdict_free(mui_verdict *v)
{
    mui_name_list *lists[] = {&v->missing, &v->unexpected, &v->mismatched, &v->converted, &v->renamed, &v->tied};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        mui_text_free(&lists[i]->brief);
        mui_text_free(&lists[i]->full);
    }
}

static void add_brief(mui_text *t, const char *what, const mui_name_list *l)
{
    if (l->count > 0) {
        mui_text_add(t, "; %s %s", what, mui_text_get(&l->brief));
        if (l->count > SHOWN) {
            mui_text_add(t, ", and %" PRId64 " more", l->count - SHOWN);
        }
    }
}

/* What would load the rest, as the command has it and as a program does. */
static void add_way_out(mui_text *t, const mui_verdict *v, const mu_load_options *o)
{
    bool names = v->missing.count + v->unexpected.count > 0 && !o->not_strict;
    bool shapes = v->mismatched.count > 0 && !o->skip_mismatched;
    mui_text_add(t, ". To load what fits: %s%s%s (in C: %s%s%s)", names ? "--not-strict" : "", names && shapes ? " " : "",
                 shapes ? "--ignore-mismatched" : "", names ? "not_strict" : "", names && shapes ? ", " : "",
                 shapes ? "skip_mismatched" : "");
}

mu_status mui_verdict_refuse(mui_plan *p, const mu_checkpoint_file *k, const mu_load_options *o, const mui_verdict *v)
{
    mui_text t;
    mui_text_init(&t, p->context);
    add_brief(&t, "missing in the file:", &v->missing);
    add_brief(&t, "not in the model:", &v->unexpected);
    add_brief(&t, "size mismatch for", &v->mismatched);
    add_way_out(&t, v, o);
    mu_status s = mui_fail(p->context, v->mismatched.count > 0 ? MU_ERR_SHAPE : MU_ERR_FORMAT,
                           "%s: does not fit the model (%" PRId64 " of %zu names do)%s", k->path, p->counts.loaded,
                           p->states.count, mui_text_get(&t));
    mui_text_free(&t);
    return s;
}

mu_status mui_verdict_weigh(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, const mu_load_options *o,
                            const mui_verdict *v)
{
    const mui_load_counts *n = &p->counts;
    int64_t parameters = 0, filled = 0;
    char hint[700];
    for (size_t i = 0; i < p->states.count; i++) {
        bool counts = p->states.items[i].parameter != NULL && mui_dims_elements(p->states.items[i].value->dims) > 0;
        parameters += counts;
        filled += counts && p->items[p->states.items[i].same_as].filled;
    }
    bool nothing = n->loaded == 0 || (n->elements > 0 && n->elements_loaded == 0);
    if (nothing && n->mismatched > 0) {
        return mui_fail(p->context, MU_ERR_SHAPE, "%s: nothing can be loaded: no tensor has the model's shape; %s",
                        k->path, mui_text_get(&v->mismatched.brief));
    }
    bool chance = parameters > 0 && filled == 0 && n->unexpected + n->mismatched > 0;
    if (!nothing && !chance && 2 * n->elements_loaded >= n->elements) {
        return MU_OK;
    }
    mui_match_hint(k, &p->states, o, m, hint, sizeof(hint));
    if (nothing || chance) {
        return mui_fail(p->context, MU_ERR_FORMAT,
                        "%s: none of the model's %" PRId64 " parameters is in the file, only %" PRId64
                        " of its buffers; missing: %s%s",
                        k->path, parameters, n->loaded, mui_text_get(&v->missing.brief), hint);
    }
    mui_log(p->context, MU_LOG_WARN,
            "%s: only %" PRId64 " of the model's %" PRId64 " elements (%" PRId64 " of %zu tensors) were loaded; %s: %s%s",
            k->path, n->elements_loaded, n->elements, n->loaded, p->states.count,
            v->missing.count > 0 ? "missing" : "of other shapes",
            mui_text_get(v->missing.count > 0 ? &v->missing.brief : &v->mismatched.brief), hint);
    return MU_OK;
}

static void add_section(mui_text *t, const char *what, const mui_name_list *l)
{
    if (l->count > 0) {
        mui_text_add(t, "%s (%" PRId64 "):\n%s", what, l->count, mui_text_get(&l->full));
    }
}

static void describe_renaming(const mui_match *m, mui_text *t)
{
    bool inside = m->renaming.dropped != 0;
    if (m->removed[0] != '\0') {
        mui_text_add(t, ", \"%s\" removed %s", m->removed, inside ? "inside names" : "from the start of names");
    }
    if (m->added[0] != '\0') {
        mui_text_add(t, ", \"%s\" put %s names", m->added, inside ? "inside" : "before");
    }
}

void mui_verdict_report(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, const mui_verdict *v)
{
    const mui_load_counts *n = &p->counts;
    mui_text what;
    mui_text_init(&what, p->context);
    describe_renaming(m, &what);
    if (what.length > 0) {
        mui_log(p->context, MU_LOG_INFO, "%s%s", k->path, mui_text_get(&what));
    }
    mui_text_add(&p->text, "%s: %s", k->path, mu_checkpoint_format(k));
    if (m->path[0] != '\0') {
        mui_text_add(&p->text, ", state dict \"%s\"", m->path);
    }
    mui_text_add(&p->text, "%s\nloaded %" PRId64 " of %zu tensors, %" PRId64 " of %" PRId64 " elements\n",
                 mui_text_get(&what), n->loaded, p->states.count, n->elements_loaded, n->elements);
    add_section(&p->text, "renamed", &v->renamed);
    add_section(&p->text, "missing in the file", &v->missing);
    add_section(&p->text, "missing, but tied to what was loaded", &v->tied);
    add_section(&p->text, "not in the model", &v->unexpected);
    add_section(&p->text, "shapes differ, left as they were", &v->mismatched);
    add_section(&p->text, "converted", &v->converted);
    mui_text_free(&what);
}
