/* What a user could say when few names match: of all starts of names in the file, and of all in the model, the one
 * without which the most names are alike. */
#include "base/alloc.h"
#include "io/load_match.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STARTS 64 /* different ones that are counted; in the order of names */
#define MAX_DEPTH 16

typedef struct tally {
    const char *name[MAX_STARTS]; /* whose start it is */
    size_t bytes[MAX_STARTS];
    int64_t count[MAX_STARTS];
    int used;
} tally;

static void count_start(tally *t, const char *name, size_t bytes)
{
    for (int i = t->used; i-- > 0;) { /* the last is the likeliest */
        if (t->bytes[i] == bytes && memcmp(t->name[i], name, bytes) == 0) {
            t->count[i]++;
            return;
        }
    }
    if (t->used < MAX_STARTS) {
        t->name[t->used] = name;
        t->bytes[t->used] = bytes;
        t->count[t->used++] = 1;
    }
}

static int most(const tally *t)
{
    int best = -1;
    for (int i = 0; i < t->used; i++) {
        best = best < 0 || t->count[i] > t->count[best] ? i : best;
    }
    return best;
}

static void count_file(const mu_checkpoint_file *k, const mui_name_table *model, tally *t)
{
    for (size_t i = 0; i < k->tree.count; i++) {
        const char *name = k->tree.entries[i].plain, *dot = strchr(name, '.');
        for (int depth = 0; dot != NULL && depth < MAX_DEPTH; depth++, dot = strchr(dot + 1, '.')) {
            if (mui_name_table_find(model, "", dot + 1) != SIZE_MAX) {
                count_start(t, name, (size_t)(dot - name));
            }
        }
    }
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* names: of the dict in the file, sorted. */
static void count_model(const mui_states *s, const char **names, size_t n, tally *t)
{
    for (size_t i = 0; i < s->count; i++) {
        const char *name = s->items[i].name, *dot = strchr(name, '.');
        for (int depth = 0; dot != NULL && depth < MAX_DEPTH; depth++, dot = strchr(dot + 1, '.')) {
            const char *rest = dot + 1;
            if (bsearch(&rest, names, n, sizeof(*names), by_text) != NULL) {
                count_start(t, name, (size_t)(dot + 1 - name));
            }
        }
    }
}

static const char **sorted_names(const mu_checkpoint_file *k, const mui_match *m, size_t *n)
{
    mu_state_dict d = m->end > m->first || k->dict_count == 0
                          ? (mu_state_dict){m->path, (int64_t)m->first, (int64_t)(m->end - m->first)}
                          : k->dicts[0];
    const char **names = mui_calloc(k->context, (size_t)d.count, sizeof(*names));
    *n = 0;
    for (int64_t i = d.first; names != NULL && i < d.first + d.count; i++) {
        const char *name = mu_checkpoint_name_in(k, &d, i);
        if (name != NULL) {
            names[(*n)++] = name;
        }
    }
    if (*n > 0) {
        qsort(names, *n, sizeof(*names), by_text);
    }
    return names;
}

void mui_match_hint(const mu_checkpoint_file *k, const mui_states *s, const mu_load_options *o, const mui_match *m,
                    char *out, size_t out_bytes)
{
    tally below = {.used = 0}, above = {.used = 0};
    mui_name_table model = {0};
    size_t n = 0;
    out[0] = '\0';
    if (mui_name_table_make(s, 0, &model) != MU_OK) {
        return;
    }
    count_file(k, &model, &below);
    mui_name_table_free(&model);
    const char **names = sorted_names(k, m, &n);
    if (n > 0) {
        count_model(s, names, n, &above);
    }
    int b = most(&below), a = most(&above);
    if (b >= 0 && below.count[b] > m->matched && (a < 0 || below.count[b] >= above.count[a]) && below.bytes[b] < 256) {
        snprintf(out, out_bytes, "; %" PRId64 " names would fit below \"%.*s\": give that as key", below.count[b],
                 (int)below.bytes[b], below.name[b]);
    } else if (a >= 0 && above.count[a] > m->matched && above.bytes[a] < 256 &&
               memchr(above.name[a], '\\', above.bytes[a]) == NULL) {
        snprintf(out, out_bytes, "; %" PRId64 " names would fit with \"%.*s\" before them: rename \"^=%.*s\"",
                 above.count[a], (int)above.bytes[a], above.name[a], (int)above.bytes[a], above.name[a]);
    } else if (o->exact_names && m->matched == 0) {
        snprintf(out, out_bytes, "; names were taken exactly as they are");
    }
    mui_free(k->context, names);
}
