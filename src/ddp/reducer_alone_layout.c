/* Where a mu_reducer's gradients lie: buckets of one element type each, in one slab of the group's memory. */
#include "base/alloc.h"
#include "base/rng.h"
#include "ddp/reducer_alone.h"

#include <stdlib.h>
#include <string.h>

enum { LINE = 64 }; /* alignment of slices and buckets, in bytes */
/* A layout while it is made. */
typedef struct draft {
    mui_slice *slices;
    mui_slice_bucket *buckets;
    int64_t *entry_of, *counts, *last, *chosen;
    size_t *bytes;
    int64_t filled, bucket_count;
    size_t slab_bytes;
} draft;

static void free_draft(mu_context *c, draft *d)
{
    mui_free(c, d->slices);
    mui_free(c, d->buckets);
    mui_free(c, d->entry_of);
    mui_free(c, d->counts);
    mui_free(c, d->last);
    mui_free(c, d->chosen);
    mui_free(c, d->bytes);
}

static mu_status make_draft(mu_context *c, draft *d, size_t n)
{
    d->slices = mui_calloc(c, n, sizeof(*d->slices));
    d->buckets = mui_calloc(c, n, sizeof(*d->buckets));
    d->entry_of = mui_calloc(c, n, sizeof(*d->entry_of));
    d->counts = mui_calloc(c, n, sizeof(*d->counts));
    d->last = mui_calloc(c, n, sizeof(*d->last));
    d->chosen = mui_calloc(c, n, sizeof(*d->chosen));
    d->bytes = mui_calloc(c, n, sizeof(*d->bytes));
    return d->slices == NULL || d->buckets == NULL || d->entry_of == NULL || d->counts == NULL || d->last == NULL ||
                   d->chosen == NULL || d->bytes == NULL
               ? MU_ERR_NOMEM
               : MU_OK;
}

/* A bucket before it has a place: which entries, of one type, and the position in the order of its last one. */
typedef struct cut {
    int64_t last, from, count; /* entries: chosen[from .. from + count) of its type */
    mu_dtype dtype;
} cut;

static int by_last(const void *a, const void *b)
{
    const cut *x = a, *y = b;
    return (x->last > y->last) - (x->last < y->last);
}

/* Cuts the entries of one type; chosen begins at `at`. Returns how many there are. */
static int64_t cut_type(mu_reducer *r, const int64_t *order, mu_dtype dtype, int64_t at, draft *d, cut *cuts)
{
    int64_t n = 0;
    for (int64_t k = 0; k < r->count; k++) {
        int64_t i = order != NULL ? order[k] : r->count - 1 - k;
        if (r->entries[i].dtype == dtype) {
            d->chosen[at + n] = i;
            d->last[at + n] = k;
            d->bytes[n++] = (r->entries[i].bytes + LINE - 1) / LINE * LINE;
        }
    }
    size_t cap = r->options.bucket_bytes > 0 ? r->options.bucket_bytes : MUI_BUCKET_BYTES;
    size_t first = r->options.first_bucket_bytes > 0 ? r->options.first_bucket_bytes : MUI_FIRST_BUCKET_BYTES;
    int64_t buckets = mui_reducer_plan(d->bytes, n, first, cap, d->counts), from = at;
    for (int64_t b = 0; b < buckets; b++) {
        cuts[d->bucket_count++] = (cut){d->last[from + d->counts[b] - 1], from, d->counts[b], dtype};
        from += d->counts[b];
    }
    return n;
}

/* Gives a bucket and its slices their places. False: sizes overflow. */
static bool place(mu_reducer *r, draft *d, const cut *k, int64_t index)
{
    size_t element = mu_dtype_bytes(k->dtype), at = d->slab_bytes;
    mui_slice_bucket *b = &d->buckets[index];
    *b = (mui_slice_bucket){.dtype = k->dtype, .first = d->filled, .count = k->count, .offset = at};
    for (int64_t j = 0; j < k->count; j++) {
        const mui_entry *e = &r->entries[d->chosen[k->from + j]];
        size_t padded = (e->bytes + LINE - 1) / LINE * LINE;
        d->entry_of[d->filled] = d->chosen[k->from + j];
        d->slices[d->filled++] = (mui_slice){.name = e->name,
                                             .offset = at,
                                             .elements = padded / element,
                                             .dims = {.ndim = 1, .dim = {e->count}},
                                             .row_major = true};
        if (!mui_size_add(at, padded, &at)) {
            return false;
        }
    }
    b->elements = (at - b->offset) / element;
    b->tail = mui_reducer_tail(r->group, k->count);
    size_t tail = (b->tail * element + LINE - 1) / LINE * LINE;
    return mui_size_add(at, tail, &d->slab_bytes);
}

/* Every rank has the same entries and order, so the same draft. */
static mu_status plan_buckets(mu_reducer *r, const int64_t *order, draft *d)
{
    cut *cuts = mui_calloc(r->context, (size_t)r->count, sizeof(*cuts));
    if (cuts == NULL) {
        return MU_ERR_NOMEM;
    }
    int64_t n = cut_type(r, order, MU_F32, 0, d, cuts);
    (void)cut_type(r, order, MU_F64, n, d, cuts);
    /* In the order in which they will be complete. */
    qsort(cuts, (size_t)d->bucket_count, sizeof(*cuts), by_last);
    bool fits = true;
    for (int64_t b = 0; b < d->bucket_count && fits; b++) {
        fits = place(r, d, &cuts[b], b);
    }
    mui_free(r->context, cuts);
    return fits ? MU_OK : mui_fail(r->context, MU_ERR_NOMEM, "reducer `%s`: the parameters' sizes overflow", r->name);
}

/* Moves into the draft, which holds the old layout afterwards. */
static void adopt(mu_reducer *r, draft *d, char *slab)
{
    for (int64_t k = 0; k < r->count; k++) {
        mui_entry *e = &r->entries[d->entry_of[k]];
        if (r->slab != NULL && e->memory == NULL && e->bytes > 0) {
            memcpy(slab + d->slices[k].offset, r->slab + e->offset, e->bytes);
        }
        e->slice = k;
        e->offset = d->slices[k].offset;
    }
    int64_t *old = r->entry_of;
    r->entry_of = d->entry_of;
    d->entry_of = old;
    r->slab = slab;
    r->slab_bytes = d->slab_bytes;
    r->bucket_count = d->bucket_count;
}

mu_status mui_alone_lay_out(mu_reducer *r, const int64_t *order)
{
    mu_context *c = r->context;
    draft d = {0};
    mu_status s = make_draft(c, &d, (size_t)r->count);
    s = s == MU_OK ? plan_buckets(r, order, &d) : s;
    char *slab = s == MU_OK ? mu_group_alloc(r->group, d.slab_bytes) : NULL;
    if (slab == NULL) {
        free_draft(c, &d);
        return s != MU_OK ? s : mu_context_status(c) != MU_OK ? mu_context_status(c) : MU_ERR_NOMEM;
    }
    uint64_t hash = MUI_HASH_START;
    for (int64_t k = 0; k < r->count; k++) {
        hash = mui_hash_u64(mui_hash_string(hash, d.slices[k].name), (uint64_t)d.slices[k].offset);
    }
    s = mui_reducer_layout(r->core, d.slices, r->count, d.buckets, d.bucket_count, slab, hash);
    if (s == MU_OK) {
        char *old = r->slab;
        adopt(r, &d, slab);
        mu_group_free(r->group, old);
        s = mu_context_status(c);
    }
    free_draft(c, &d);
    return s;
}

mu_status mui_alone_plan(mu_reducer *r)
{
    mu_context *c = r->context;
    int64_t filled = 0;
    bool rank0 = false;
    for (int64_t i = 0; i < r->count && !rank0; i++) {
        rank0 = mu_reducer_present(r, i, 0);
    }
    if (!rank0) {
        return MU_OK; /* its order says nothing */
    }
    int64_t *order = mui_calloc(c, (size_t)r->count, sizeof(*order));
    uint8_t *used = mui_calloc(c, (size_t)r->count, 1);
    mu_status s = order == NULL || used == NULL ? MU_ERR_NOMEM : MU_OK;
    for (int64_t k = 0; s == MU_OK && k < r->ready_count; k++) {
        order[filled++] = r->ready_order[k];
        used[r->ready_order[k]] = 1;
    }
    for (int64_t i = r->count; s == MU_OK && i-- > 0;) {
        if (!used[i]) {
            order[filled++] = i;
        }
    }
    s = s == MU_OK ? mu_broadcast(r->group, order, (size_t)r->count * sizeof(*order), 0) : s;
    s = s == MU_OK ? mui_alone_lay_out(r, order) : s;
    r->planned = s == MU_OK;
    mui_free(c, order);
    mui_free(c, used);
    return s;
}
