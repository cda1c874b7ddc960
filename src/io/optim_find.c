/* Looks through the outer containers of a file, breadth first and within a budget: nobody keeps an optimiser deep. */
#include "io/optim_find.h"
#include "base/alloc.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_DEPTH = 3, MOST_PLACES = 2048, MOST_FOUND = 16, PATH_BYTES = 160, BUDGET = 1000000 };

typedef struct place {
    const mui_value *value;
    int depth;
    char path[PATH_BYTES];
} place;

typedef struct search {
    place *places; /* a queue of containers; those found stay in it */
    size_t count;
    size_t found[MOST_FOUND];
    size_t found_count;
    int64_t budget;
    bool pickled_object; /* an optimiser itself, not its state_dict */
} search;

static bool has_both(const mui_value *v)
{
    const mui_seq *items = NULL;
    return mui_is_sequence(mui_dict_get(v, "param_groups")) && mui_dict_items(mui_dict_get(v, "state"), &items);
}

static void child_path(const place *parent, const mui_value *key, size_t index, char *out)
{
    const char *dot = parent->path[0] != '\0' ? "." : "";
    if (key == NULL) {
        snprintf(out, PATH_BYTES, "%.*s[%zu]", PATH_BYTES - 32, parent->path, index);
    } else if (key->kind == MUI_STR) {
        snprintf(out, PATH_BYTES, "%.*s%s%.*s", PATH_BYTES / 2, parent->path, dot,
                 (int)(key->text.bytes < PATH_BYTES ? key->text.bytes : PATH_BYTES), key->text.data);
    } else {
        snprintf(out, PATH_BYTES, "%.*s%s%" PRId64, PATH_BYTES - 32, parent->path, dot,
                 key->kind == MUI_INT ? key->i : (int64_t)index);
    }
}

static void visit(search *s, size_t parent, const mui_value *key, size_t index, const mui_value *v)
{
    const mui_seq *items = NULL;
    const mui_object *o = v->kind == MUI_OBJECT ? v->object : NULL;
    bool dict = mui_dict_items(v, &items);
    s->budget -= 1 + (dict ? (int64_t)items->count : 0);
    if (!dict && o != NULL && o->state != NULL && has_both(o->state)) {
        s->pickled_object = true;
    }
    if ((!dict && !mui_is_sequence(v)) || s->count == MOST_PLACES || s->budget < 0) {
        return;
    }
    place p = {.value = v};
    if (parent != SIZE_MAX) {
        p.depth = s->places[parent].depth + 1;
        child_path(&s->places[parent], key, index, p.path);
    }
    s->places[s->count] = p;
    if (!dict || !has_both(v)) {
        s->count += p.depth < MOST_DEPTH;
        return;
    }
    for (size_t i = 0; i < s->found_count; i++) {
        if (s->places[s->found[i]].value == v) {
            return; /* one dict under two names */
        }
    }
    if (s->found_count < MOST_FOUND) {
        s->found[s->found_count++] = s->count++;
    }
}

static void expand(search *s, size_t at)
{
    const mui_value *v = s->places[at].value;
    const mui_seq *items = NULL;
    for (size_t i = 0; i < s->found_count; i++) {
        if (s->found[i] == at) {
            return;
        }
    }
    if (mui_dict_items(v, &items)) {
        for (size_t i = 0; i + 1 < items->count && s->budget > 0; i += 2) {
            visit(s, at, items->items[i], i / 2, items->items[i + 1]);
        }
        return;
    }
    for (size_t i = 0; i < v->seq.count && s->budget > 0; i++) {
        visit(s, at, NULL, i, v->seq.items[i]);
    }
}

static mu_status several(mu_checkpoint_file *k, const search *s, const char *key)
{
    mui_text t;
    mui_text_init(&t, k->context);
    for (size_t i = 0; i < s->found_count; i++) {
        const place *p = &s->places[s->found[i]];
        const mui_value *groups = mui_dict_get(p->value, "param_groups");
        size_t parameters = 0;
        for (size_t g = 0; g < groups->seq.count && g < 1000; g++) {
            const mui_value *list = mui_dict_get(groups->seq.items[g], "params");
            parameters += mui_is_sequence(list) ? list->seq.count : 0;
        }
        mui_text_add(&t, "%s\"%s\" (%zu parameters)", i > 0 ? ", " : "", p->path, parameters);
    }
    mu_status r = key != NULL ? mui_fail(k->context, MU_ERR_FORMAT, "%s: no optimiser's state under \"%s\"; there is %s",
                                         k->path, key, mui_text_get(&t))
                              : mui_fail(k->context, MU_ERR_FORMAT,
                                         "%s: the state of several optimisers; say by its key which: %s", k->path,
                                         mui_text_get(&t));
    mui_text_free(&t);
    return r;
}

static mu_status judge(mu_checkpoint_file *k, const search *s, const char *key, const mui_value **out)
{
    if (s->found_count == 0) {
        return mui_fail(k->context, MU_ERR_FORMAT,
                        "%s: no training checkpoint: no optimiser's state_dict (a dict with \"state\" and "
                        "\"param_groups\") is in it%s (for weights alone: --from, in C mu_load)",
                        k->path, s->pickled_object ? ", but a whole pickled optimiser, which cannot be used" : "");
    }
    for (size_t i = 0; i < s->found_count; i++) {
        const place *p = &s->places[s->found[i]];
        if (key != NULL ? strcmp(p->path, key) == 0 : s->found_count == 1) {
            *out = p->value;
            return MU_OK;
        }
    }
    return several(k, s, key);
}

mu_status mui_optim_find(mu_checkpoint_file *k, const char *key, const mui_value **out)
{
    search s = {.budget = BUDGET};
    s.places = mui_alloc(k->context, (MOST_PLACES + 1) * sizeof(*s.places));
    if (s.places == NULL) {
        return MU_ERR_NOMEM;
    }
    if (k->pickle.value != NULL) {
        visit(&s, SIZE_MAX, NULL, 0, k->pickle.value);
    }
    for (size_t i = 0; i < s.count; i++) {
        expand(&s, i);
    }
    mu_status r = judge(k, &s, key, out);
    mui_free(k->context, s.places);
    return r;
}
