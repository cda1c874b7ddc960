/* Are the replicas equal? By hash; where they are not, by the hash of each parameter and buffer. */
#include "base/alloc.h"
#include "base/rng.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

/* Eight bytes at a time: this runs over the whole model. */
uint64_t mui_hash_floats(uint64_t h, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 2 <= n; i += 2) {
        uint64_t w;
        memcpy(&w, x + i, sizeof(w));
        h = (h ^ w) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    if (i < n) {
        uint32_t w;
        memcpy(&w, x + i, sizeof(w));
        h = (h ^ w) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static size_t item_count(const mu_ddp *d)
{
    return (size_t)(d->store->count + d->store->buffer_count + d->counter_count);
}

static void hash_items(const mu_ddp *d, uint64_t *out)
{
    const mui_store *s = d->store;
    size_t k = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        out[k++] = mui_hash_floats(MUI_HASH_START, s->values + p->offset, p->capacity);
    }
    for (int64_t i = 0; i < s->buffer_count; i++) {
        const mu_tensor *b = s->buffers[i];
        out[k++] = mui_hash_floats(MUI_HASH_START, (const float *)b->data, (size_t)mui_dims_elements(b->dims));
    }
    for (int64_t i = 0; i < d->counter_count; i++) {
        const mu_tensor *b = d->counters[i];
        out[k++] = mui_hash_bytes(MUI_HASH_START, b->data, (size_t)mui_dims_elements(b->dims) * sizeof(int64_t));
    }
}

static const char *item_name(const mu_ddp *d, size_t i)
{
    size_t params = (size_t)d->store->count, buffers = (size_t)d->store->buffer_count;
    return i < params             ? d->store->parameters[i]->name
           : i < params + buffers ? d->store->buffer_names[i - params]
                                  : "a counter of batches (an integer buffer)";
}

/* all: hashes of every item, rank after rank. */
static mu_status name_first(mu_ddp *d, const uint64_t *all, size_t n)
{
    size_t size = (size_t)mu_group_size(d->group), items = 0;
    int64_t first = -1;
    for (size_t i = 0; i < n; i++) {
        bool differs = false;
        for (size_t r = 1; r < size; r++) {
            differs = differs || all[r * n + i] != all[i];
        }
        items += differs;
        first = differs && first < 0 ? (int64_t)i : first;
    }
    if (first < 0) {
        return mui_fail(d->context, MU_ERR_INTERNAL, "ddp `%s`: replicas differ, but in no parameter", d->name);
    }
    mui_text ranks;
    mui_text_init(&ranks, d->context);
    for (size_t r = 1; r < size; r++) {
        if (all[r * n + (size_t)first] != all[first]) {
            mui_text_add(&ranks, "%s%zu", ranks.length > 0 ? ", " : "", r);
        }
    }
    mu_status s = mui_fail(
        d->context, MU_ERR_COMM,
        "ddp `%s`: replicas differ after %llu reductions: `%s` is not the same on rank %s as on rank 0 "
        "(%zu of %zu parameters and buffers differ)",
        d->name, (unsigned long long)d->reductions, item_name(d, (size_t)first), mui_text_get(&ranks), items, n);
    mui_text_free(&ranks);
    return s;
}

static mu_status compare_items(mu_ddp *d)
{
    mu_context *c = d->context;
    size_t n = item_count(d), size = (size_t)mu_group_size(d->group);
    uint64_t *all = mui_calloc(c, n * (size + 1), sizeof(*all)); /* gathered, then the own */
    if (all == NULL) {
        return mui_ddp_desert(d, MU_ERR_NOMEM);
    }
    uint64_t *own = all + n * size;
    hash_items(d, own);
    uint64_t total = mui_hash_bytes(MUI_HASH_START, own, n * sizeof(*own));
    mu_status s = mu_all_gather(d->group, &total, all, sizeof(total));
    bool equal = true;
    for (size_t r = 1; r < size; r++) {
        equal = equal && all[r] == all[0];
    }
    if (s == MU_OK && !equal) {
        s = mu_all_gather(d->group, own, all, n * sizeof(*own));
        s = s == MU_OK ? name_first(d, all, n) : mui_ddp_break(d, s);
    } else if (s < 0) {
        s = mui_ddp_break(d, s);
    }
    mui_free(c, all);
    return s;
}

mu_status mu_ddp_check(mu_ddp *d)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    if (d->broken != MU_OK) {
        return mui_fail(d->context, d->broken, "%s", d->broken_text);
    }
    mui_aside aside;
    mui_aside_put(d->context, &aside);
    mu_status s = mui_ddp_follow(d);
    if (s >= 0) {
        char text[MUI_IDENTITY_TEXT];
        snprintf(text, sizeof(text), "mu_ddp_check after reduction %llu (ddp `%.80s`)",
                 (unsigned long long)mui_reducer_sequence(d->reducer) - 1, d->name);
        s = mui_ddp_gate(d, MUI_KIND_CHECK, text);
    }
    if (s == MU_OK) {
        s = compare_items(d);
    }
    if (s == MU_OK) {
        mui_ddp_count_anew(d);
    }
    mui_ddp_work(d, NULL);
    mui_aside_restore(d->context, &aside);
    return aside.status != MU_OK ? aside.status : s;
}
