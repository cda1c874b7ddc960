/* A name of the file and one of the model belong together when they are alike without the wrappers. Where several on
 * either side are alike, they are told apart only if the file's have the same wrappers more than the model's, each in
 * its place: "a.module.model.w", "a.module.w" and "a.model.w", "a.w". */
#include "io/name_trial.h"
#include "base/alloc.h"

#include <string.h>

#define MAX_ALIKE 16

mu_status mui_trial_open(const mui_states *s, size_t names, mui_trial *out)
{
    mui_trial t = {.states = s};
    mu_context *c = s->context;
    mu_status status = mui_name_table_make(s, 0, &t.tables[0]);
    if (status != MU_OK) {
        return status;
    }
    size_t slots = t.tables[0].mask + 1; /* of all tables: they hold the same number of states */
    t.stamps = mui_calloc(c, slots, sizeof(*t.stamps));
    t.heads = mui_calloc(c, slots, sizeof(*t.heads));
    t.slots = mui_calloc(c, slots, sizeof(*t.slots));
    t.next = mui_calloc(c, names, sizeof(*t.next));
    t.pairs = mui_calloc(c, names, sizeof(*t.pairs));
    if (t.stamps == NULL || t.heads == NULL || t.slots == NULL || t.next == NULL || t.pairs == NULL) {
        mui_trial_close(&t);
        return MU_ERR_NOMEM;
    }
    *out = t;
    return MU_OK;
}

void mui_trial_close(mui_trial *t)
{
    if (t->states == NULL) {
        return;
    }
    mu_context *c = t->states->context;
    for (int i = 0; i < 1 << MUI_WRAPPERS; i++) {
        mui_name_table_free(&t->tables[i]);
    }
    mui_free(c, t->stamps);
    mui_free(c, t->heads);
    mui_free(c, t->slots);
    mui_free(c, t->next);
    mui_free(c, t->pairs);
    *t = (mui_trial){0};
}

const char *mui_renaming_read(const mui_renaming *r, const char *name, const char **before)
{
    size_t n = strlen(r->prefix);
    *before = r->start == MUI_START_ADDED ? r->prefix : "";
    return r->start == MUI_START_REMOVED && strncmp(name, r->prefix, n) == 0 ? name + n : name;
}

static int wrappers_of(const char *name)
{
    int counts[MUI_WRAPPERS] = {0}, n = 0;
    mui_wrappers_in(name, counts);
    for (int i = 0; i < MUI_WRAPPERS; i++) {
        n += counts[i];
    }
    return n;
}

typedef struct alike {
    size_t index;
    int wrappers;
} alike;

/* By number of wrappers; false when two have the same. */
static bool put_in_order(alike *a, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        alike x = a[i];
        size_t j = i;
        for (; j > 0 && a[j - 1].wrappers > x.wrappers; j--) {
            a[j] = a[j - 1];
        }
        a[j] = x;
    }
    for (size_t i = 1; i < n; i++) {
        if (a[i].wrappers == a[i - 1].wrappers) {
            return false;
        }
    }
    return true;
}

/* Pairs the names with the states of one slot; returns how many. */
static int64_t pair(mui_trial *t, const mui_name_table *table, const char *const *names, size_t slot)
{
    alike files[MAX_ALIKE], models[MAX_ALIKE];
    size_t f = 0, m = 0;
    bool fits = true;
    for (size_t i = t->heads[slot]; i != SIZE_MAX; i = t->next[i]) {
        t->pairs[i] = SIZE_MAX;
        if (f < MAX_ALIKE) {
            files[f++] = (alike){i, 0};
        } else {
            fits = false;
        }
    }
    for (size_t i = table->slots[slot]; i != SIZE_MAX && m < MAX_ALIKE; i = table->next[i]) {
        fits = fits && (m + 1 < MAX_ALIKE || table->next[i] == SIZE_MAX);
        models[m++] = (alike){i, 0};
    }
    if (f == 1 && m == 1) {
        t->pairs[files[0].index] = models[0].index;
        return 1;
    }
    for (size_t i = 0; i < f; i++) {
        files[i].wrappers = wrappers_of(names[files[i].index]);
    }
    for (size_t i = 0; i < m; i++) {
        models[i].wrappers = wrappers_of(t->states->items[models[i].index].name);
    }
    fits = fits && f == m && put_in_order(files, f) && put_in_order(models, m);
    for (size_t i = 1; i < f && fits; i++) {
        fits = files[i].wrappers - models[i].wrappers == files[0].wrappers - models[0].wrappers;
    }
    if (!fits) {
        if (t->clash[0] == SIZE_MAX) {
            /* in the file's order, whatever the list's */
            size_t last = f - 1;
            t->clash[0] = files[0].index < files[last].index ? files[0].index : files[last].index;
            t->clash[1] = files[0].index < files[last].index ? files[last].index : files[0].index;
            t->unclear = m > 1;
        }
        return table->dropped == 0; /* it is found, only too often */
    }
    for (size_t i = 0; i < f; i++) {
        t->pairs[files[i].index] = models[i].index;
    }
    return (int64_t)f;
}

int64_t mui_trial_run(mui_trial *t, const mui_renaming *r, const char *const *names, size_t n)
{
    mui_name_table *table = &t->tables[r->dropped];
    if (table->states == NULL && mui_name_table_make(t->states, r->dropped, table) != MU_OK) {
        return -1;
    }
    t->number++;
    t->slot_count = 0;
    t->clash[0] = t->clash[1] = SIZE_MAX;
    t->unclear = false;
    for (size_t i = 0; i < n; i++) {
        const char *before = "", *name = names[i] != NULL ? mui_renaming_read(r, names[i], &before) : NULL;
        size_t slot = name != NULL ? mui_name_table_find(table, before, name) : SIZE_MAX;
        t->pairs[i] = SIZE_MAX;
        if (slot == SIZE_MAX) {
            continue;
        }
        if (t->stamps[slot] != t->number) {
            t->stamps[slot] = t->number;
            t->heads[slot] = SIZE_MAX;
            t->slots[t->slot_count++] = slot;
        }
        t->next[i] = t->heads[slot];
        t->heads[slot] = i;
    }
    int64_t matched = 0;
    for (size_t i = 0; i < t->slot_count; i++) {
        matched += pair(t, table, names, t->slots[i]);
    }
    return matched;
}
