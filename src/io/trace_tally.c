/* Counts and overlap. Buckets of a reduction are compared with backward when the next reduction begins: a rank writes a
 * backward before the buckets that it hid, and these before anything of the next one. */
#include "io/trace_tally.h"
#include "base/alloc.h"
#include "base/rng.h"

#include <stdlib.h>
#include <string.h>

enum { KINDS_NAMED = 64, BEGUN_MOST = 4096, BACKWARD_MOST = 4096, BUCKETS_MOST = 1 << 16 };

mui_tally_rank *mui_tally_rank_of(mui_tally *t, int64_t number)
{
    if (t->last < t->count && t->ranks[t->last].rank.rank == number) {
        return &t->ranks[t->last];
    }
    size_t low = 0, high = t->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (t->ranks[middle].rank.rank < number) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    t->last = low;
    if (low < t->count && t->ranks[low].rank.rank == number) {
        return &t->ranks[low];
    }
    if (!MUI_GROW(t->context, t->ranks, t->count, t->capacity)) {
        return NULL;
    }
    memmove(&t->ranks[low + 1], &t->ranks[low], (t->count - low) * sizeof(*t->ranks));
    t->count++;
    t->ranks[low] = (mui_tally_rank){.rank = {.rank = number, .whole = true}};
    return &t->ranks[low];
}

/* -- intervals ---------------------------------------------------------------------------------------------------- */
static int by_start(const void *a, const void *b)
{
    const mui_interval *x = a, *y = b;
    return (x->from > y->from) - (x->from < y->from);
}

/* Sorted, those that touch as one. */
static void unite(mui_intervals *v)
{
    size_t n = 0;
    if (v->count == 0) {
        return;
    }
    qsort(v->items, v->count, sizeof(*v->items), by_start);
    for (size_t i = 1; i < v->count; i++) {
        if (v->items[i].from > v->items[n].to) {
            v->items[++n] = v->items[i];
        } else if (v->items[i].to > v->items[n].to) {
            v->items[n].to = v->items[i].to;
        }
    }
    v->count = n + 1;
}

static double seconds(int64_t ns)
{
    return (double)ns * 1e-9;
}

/* The buckets of one reduction are complete. Backwards that ended before the last of them will meet no others. */
static void settle(mui_tally_rank *r)
{
    mui_intervals *b = &r->buckets, *w = &r->backward;
    if (b->count == 0) {
        return;
    }
    unite(b);
    unite(w);
    size_t k = 0;
    for (size_t i = 0; i < b->count; i++) {
        r->rank.communication += seconds(b->items[i].to - b->items[i].from);
        while (k < w->count && w->items[k].to <= b->items[i].from) {
            k++;
        }
        for (size_t j = k; j < w->count && w->items[j].from < b->items[i].to; j++) {
            int64_t from = w->items[j].from > b->items[i].from ? w->items[j].from : b->items[i].from;
            int64_t to = w->items[j].to < b->items[i].to ? w->items[j].to : b->items[i].to;
            r->rank.hidden += seconds(to - from);
        }
    }
    size_t left = 0;
    for (size_t j = 0; j < w->count; j++) {
        if (w->items[j].to > b->items[b->count - 1].to) {
            w->items[left++] = w->items[j];
        }
    }
    w->count = left;
    b->count = 0;
}

static mu_status append(mu_context *c, mui_intervals *v, int64_t from, int64_t to)
{
    if (!MUI_GROW(c, v->items, v->count, v->capacity)) {
        return MU_ERR_NOMEM;
    }
    v->items[v->count++] = (mui_interval){from, to > from ? to : from};
    return MU_OK;
}

/* -- events ------------------------------------------------------------------------------------------------------- */
static const char *text_of(const json_t *object, const char *key)
{
    const char *s = json_string_value(json_object_get(object, key));
    return s != NULL ? s : "";
}

static mu_trace_kind *kind_of(mui_tally *t, const char *name)
{
    for (int i = 0; i < t->kind_count; i++) {
        if (strcmp(t->kinds[i].name, name) == 0) {
            return &t->kinds[i];
        }
    }
    if (t->kind_count > KINDS_NAMED) {
        return &t->kinds[KINDS_NAMED]; /* it holds the others */
    }
    char *copy = mui_strdup(t->context, t->kind_count == KINDS_NAMED ? "(others)" : name);
    if (copy == NULL) {
        return NULL;
    }
    t->kinds[t->kind_count] = (mu_trace_kind){.name = copy};
    return &t->kinds[t->kind_count++];
}

static uint64_t identity_of(const json_t *e, const char *category)
{
    const json_t *id = json_object_get(e, "id");
    id = id != NULL ? id : json_object_get(json_object_get(e, "id2"), "local");
    uint64_t h = mui_hash_string(MUI_HASH_START, category);
    return json_is_integer(id) ? mui_hash_u64(h, (uint64_t)json_integer_value(id))
                               : mui_hash_string(h, json_string_value(id) != NULL ? json_string_value(id) : "");
}

static mu_status begin_async(mui_tally *t, mui_tally_rank *r, const json_t *e, const char *category, int64_t at)
{
    if (strcmp(category, "all_reduce") == 0) {
        const json_t *args = json_object_get(e, "args");
        uint64_t which = mui_hash_u64(mui_hash_string(MUI_HASH_START, text_of(args, "ddp")),
                                      (uint64_t)json_integer_value(json_object_get(args, "reduction")));
        if (which != r->reduction || r->buckets.count >= BUCKETS_MOST) {
            settle(r);
        }
        r->reduction = which;
    }
    if (r->begun_count >= BEGUN_MOST) { /* the oldest has no end */
        memmove(r->begun, r->begun + 1, --r->begun_count * sizeof(*r->begun));
    }
    if (!MUI_GROW(t->context, r->begun, r->begun_count, r->begun_capacity)) {
        return MU_ERR_NOMEM;
    }
    r->begun[r->begun_count++] = (mui_begun){identity_of(e, category), at};
    return MU_OK;
}

static mu_status end_async(mui_tally *t, mui_tally_rank *r, const json_t *e, const char *category, int64_t at,
                           mu_trace_kind *kind)
{
    uint64_t identity = identity_of(e, category);
    for (size_t i = r->begun_count; i-- > 0;) {
        if (r->begun[i].identity != identity) {
            continue;
        }
        int64_t from = r->begun[i].at;
        memmove(&r->begun[i], &r->begun[i + 1], (--r->begun_count - i) * sizeof(*r->begun));
        kind->seconds += at > from ? seconds(at - from) : 0;
        return strcmp(category, "all_reduce") == 0 ? append(t->context, &r->buckets, from, at) : MU_OK;
    }
    return MU_OK; /* its beginning was not recorded */
}

/* A slice of a rank of ours. */
static mu_status add_slice(mui_tally *t, mui_tally_rank *r, const char *category, int64_t at, int64_t took)
{
    if (strcmp(category, "step") == 0) {
        r->rank.steps++;
        r->rank.step_seconds += seconds(took);
    } else if (strcmp(category, "wait") == 0) {
        r->rank.waiting += seconds(took);
    } else if (strcmp(category, "backward") == 0) {
        if (r->backward.count >= BACKWARD_MOST) { /* with no reduction after them */
            r->backward.count = 0;
        }
        return append(t->context, &r->backward, at, at + took);
    }
    return MU_OK;
}

mu_status mui_tally_add(mui_tally *t, mui_tally_rank *rank, const json_t *event, int64_t at, int64_t took)
{
    const char *category = text_of(event, "cat"), *phase = text_of(event, "ph");
    mu_trace_kind *kind = kind_of(t, category);
    if (kind == NULL) {
        return MU_ERR_NOMEM;
    }
    bool ends = strcmp(phase, "e") == 0, slice = strcmp(phase, "X") == 0;
    if (!ends && strcmp(phase, "E") != 0) {
        kind->events++;
        t->events++;
        if (rank != NULL) {
            rank->rank.events++;
        }
    }
    kind->seconds += slice ? seconds(took) : 0;
    if (rank == NULL) {
        return MU_OK;
    }
    return slice                      ? add_slice(t, rank, category, at, took)
           : strcmp(phase, "b") == 0 ? begin_async(t, rank, event, category, at)
           : ends                    ? end_async(t, rank, event, category, at, kind)
                                     : MU_OK;
}

/* -- the end ------------------------------------------------------------------------------------------------------ */
mu_trace_summary *mui_tally_finish(mui_tally *t)
{
    size_t names = 0, kinds = (size_t)t->kind_count * sizeof(mu_trace_kind), ranks = t->count * sizeof(mu_trace_rank);
    for (int i = 0; i < t->kind_count; i++) {
        names += strlen(t->kinds[i].name) + 1;
    }
    mu_trace_summary *s = mui_alloc(t->context, sizeof(*s) + kinds + ranks + names);
    if (s == NULL) {
        return NULL;
    }
    mu_trace_rank *rank = (mu_trace_rank *)(void *)(s + 1);
    mu_trace_kind *kind = (mu_trace_kind *)(void *)(rank + t->count);
    char *text = (char *)(kind + t->kind_count);
    *s = (mu_trace_summary){.events = t->events, .kinds = kind, .kind_count = t->kind_count, .ranks = rank,
                            .rank_count = (int)t->count};
    for (size_t i = 0; i < t->count; i++) {
        settle(&t->ranks[i]);
        rank[i] = t->ranks[i].rank;
    }
    for (int i = 0; i < t->kind_count; i++) {
        size_t n = strlen(t->kinds[i].name) + 1;
        kind[i] = t->kinds[i];
        kind[i].name = memcpy(text, t->kinds[i].name, n);
        text += n;
    }
    return s;
}

void mui_tally_free(mui_tally *t)
{
    for (size_t i = 0; i < t->count; i++) {
        mui_free(t->context, t->ranks[i].file);
        mui_free(t->context, t->ranks[i].begun);
        mui_free(t->context, t->ranks[i].backward.items);
        mui_free(t->context, t->ranks[i].buckets.items);
    }
    mui_free(t->context, t->ranks);
    for (int i = 0; i < t->kind_count; i++) {
        mui_free(t->context, (char *)t->kinds[i].name);
    }
}
