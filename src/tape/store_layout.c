/* Where parameters lie in the slabs: placing, moving, hashing. */
#include "base/alloc.h"
#include "base/rng.h"
#include "dev/pages.h"
#include "tape/slabs.h"

#include <string.h>

#define ALIGN_FLOATS ((size_t)16)

static size_t aligned(size_t floats)
{
    return (floats + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

float *mui_slab_memory(mu_context *c, size_t floats)
{
    size_t bytes = 0;
    if (!mui_size_mul(floats > 0 ? floats : ALIGN_FLOATS, sizeof(float), &bytes)) {
        mui_fail(c, MU_ERR_NOMEM, "out of memory: %zu floats were asked for", floats);
        return NULL;
    }
    float *slab = mui_pages_alloc(c, bytes);
    if (slab != NULL) {
        memset(slab, 0, bytes);
    }
    return slab;
}

float *mui_grads_memory(const mui_store *s, size_t floats)
{
    if (s->grads_alloc == NULL) {
        return mui_slab_memory(s->context, floats);
    }
    size_t bytes = 0;
    if (!mui_size_mul(floats > 0 ? floats : ALIGN_FLOATS, sizeof(float), &bytes)) {
        mui_fail(s->context, MU_ERR_NOMEM, "out of memory: %zu floats were asked for", floats);
        return NULL;
    }
    float *slab = s->grads_alloc(s->grads_user, bytes);
    if (slab == NULL) {
        mui_fail(s->context, MU_ERR_NOMEM, "no memory for %zu bytes of gradients", bytes);
        return NULL;
    }
    memset(slab, 0, bytes);
    return slab;
}

void mui_grads_memory_free(const mui_store *s, float *grads)
{
    if (grads == NULL) {
        return;
    }
    if (s->grads_alloc != NULL) {
        if (s->grads_free != NULL) {
            s->grads_free(s->grads_user, grads);
        }
    } else {
        mui_pages_free(s->context, grads);
    }
}

static mu_status check_plan(mu_context *c, const int64_t *order, int64_t count, const int64_t *bucket_params,
                            int64_t bucket_count, char *seen)
{
    for (int64_t k = 0; k < count; k++) {
        if (order[k] < 0 || order[k] >= count || seen[order[k]] != 0) {
            return mui_fail(c, MU_ERR_ARG, "the order of parameters is not a permutation: entry %lld is %lld",
                            (long long)k, (long long)order[k]);
        }
        seen[order[k]] = 1;
    }
    int64_t total = 0;
    for (int64_t b = 0; b < bucket_count; b++) {
        if (bucket_params[b] < 0 || bucket_params[b] > count - total) {
            return mui_fail(c, MU_ERR_ARG, "buckets hold more than the %lld parameters", (long long)count);
        }
        total += bucket_params[b];
    }
    if (total != count) {
        return mui_fail(c, MU_ERR_ARG, "buckets hold %lld of %lld parameters", (long long)total, (long long)count);
    }
    return MU_OK;
}

static mu_status place(mu_context *c, mui_placement *p, const size_t *capacities, const int64_t *bucket_params,
                       const size_t *tails)
{
    size_t at = 0;
    int64_t k = 0;
    for (int64_t b = 0; b < p->bucket_count; b++) {
        mui_bucket *bucket = &p->buckets[b];
        *bucket = (mui_bucket){.first = k, .count = bucket_params[b], .offset = at, .tail = tails[b]};
        for (int64_t i = 0; i < bucket->count; i++, k++) {
            p->offsets[p->order[k]] = at;
            if (!mui_size_add(at, capacities[p->order[k]], &at)) {
                return mui_fail(c, MU_ERR_NOMEM, "parameters are larger than memory can be");
            }
        }
        bucket->floats = at - bucket->offset;
        if (tails[b] > SIZE_MAX - at - ALIGN_FLOATS) {
            return mui_fail(c, MU_ERR_NOMEM, "buckets are larger than memory can be");
        }
        at = aligned(at + tails[b]);
    }
    p->floats = at;
    return MU_OK;
}

mu_status mui_placement_init(mu_context *c, mui_placement *p, const size_t *capacities, int64_t count,
                             const int64_t *order, const int64_t *bucket_params, const size_t *tails,
                             int64_t bucket_count)
{
    static const size_t no_tail = 0;
    *p = (mui_placement){.bucket_count = order != NULL ? bucket_count : 1};
    p->order = mui_calloc(c, (size_t)count + 1, sizeof(*p->order));
    p->offsets = mui_calloc(c, (size_t)count + 1, sizeof(*p->offsets));
    p->buckets = mui_calloc(c, (size_t)p->bucket_count + 1, sizeof(*p->buckets));
    char *seen = mui_calloc(c, (size_t)count + 1, 1);
    mu_status s = MU_ERR_NOMEM;
    if (p->order != NULL && p->offsets != NULL && p->buckets != NULL && seen != NULL) {
        s = MU_OK;
        for (int64_t k = 0; k < count; k++) {
            p->order[k] = order != NULL ? order[k] : count - 1 - k;
        }
        if (order != NULL) {
            s = check_plan(c, order, count, bucket_params, bucket_count, seen);
        } else {
            bucket_params = &count;
            tails = &no_tail;
        }
        s = s == MU_OK ? place(c, p, capacities, bucket_params, tails) : s;
    }
    mui_free(c, seen);
    return s;
}

mu_status mui_placement_slabs(const mui_store *s, mui_placement *p)
{
    mu_context *c = s->context;
    p->states = mui_calloc(c, s->slab_count + 1, sizeof(*p->states));
    p->state_count = p->states != NULL ? s->slab_count : 0;
    p->values = p->states != NULL ? mui_slab_memory(c, p->floats) : NULL;
    p->grads = p->values != NULL ? mui_grads_memory(s, p->floats) : NULL;
    bool all = p->grads != NULL;
    for (size_t k = 0; k < p->state_count && all; k++) {
        p->states[k] = mui_slab_memory(c, p->floats);
        all = p->states[k] != NULL;
    }
    return all ? MU_OK : mu_context_status(c) != MU_OK ? mu_context_status(c) : MU_ERR_NOMEM;
}

void mui_placement_free(const mui_store *s, mui_placement *p)
{
    mu_context *c = s->context;
    mui_grads_memory_free(s, p->grads);
    mui_pages_free(c, p->values);
    for (size_t k = 0; k < p->state_count; k++) {
        mui_pages_free(c, p->states[k]);
    }
    mui_free(c, p->states);
    mui_free(c, p->order);
    mui_free(c, p->offsets);
    mui_free(c, p->buckets);
    *p = (mui_placement){0};
}

void mui_store_point(mui_store *s, int64_t i)
{
    mu_parameter *p = s->parameters[i];
    p->value.data = (char *)(s->values + p->offset);
    p->grad_view.context = p->value.context = s->context;
    p->grad_view.dtype = p->value.dtype = MU_F32;
    p->grad_view.dims = p->value.dims;
    p->grad_view.layout = p->value.layout;
    p->grad_view.data = (char *)(s->grads + p->offset);
    mui_strides_plain(p->value.dims, p->value.stride);
    mui_strides_plain(p->value.dims, p->grad_view.stride);
    p->value.parameter = p;
}

uint64_t mui_store_hash(const mui_store *s)
{
    uint64_t h = mui_hash_u64(MUI_HASH_START, (uint64_t)s->count);
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        h = mui_hash_string(h, p->name != NULL ? p->name : "");
        h = mui_hash_u64(h, (uint64_t)p->value.dims.ndim);
        h = mui_hash_bytes(h, p->value.dims.dim, (size_t)p->value.dims.ndim * sizeof(p->value.dims.dim[0]));
        h = mui_hash_string(h, mu_dtype_name(p->value.dtype));
        h = mui_hash_string(h, mui_layout_name(p->value.layout));
        h = mui_hash_u64(h, p->frozen);
        h = mui_hash_u64(h, (uint64_t)s->order[i]);
    }
    for (int64_t b = 0; b < s->bucket_count; b++) {
        h = mui_hash_u64(h, (uint64_t)s->buckets[b].count);
        h = mui_hash_u64(h, s->buckets[b].tail);
    }
    for (int64_t i = 0; i < s->buffer_count; i++) {
        h = mui_hash_string(h, s->buffer_names[i]);
        h = mui_hash_bytes(h, s->buffers[i]->dims.dim,
                           (size_t)s->buffers[i]->dims.ndim * sizeof(s->buffers[i]->dims.dim[0]));
    }
    return h;
}

mu_status mui_store_relayout(mui_store *s, const int64_t *order, const int64_t *bucket_params, const size_t *tails,
                             int64_t bucket_count)
{
    mu_context *c = s->context;
    size_t *capacities = mui_calloc(c, (size_t)s->count + 1, sizeof(*capacities));
    if (capacities == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t i = 0; i < s->count; i++) {
        capacities[i] = s->parameters[i]->capacity;
    }
    mui_placement p;
    mu_status r = mui_placement_init(c, &p, capacities, s->count, order, bucket_params, tails, bucket_count);
    r = r == MU_OK ? mui_placement_slabs(s, &p) : r;
    mui_free(c, capacities);
    if (r != MU_OK) {
        mui_placement_free(s, &p);
        return r;
    }
    for (int64_t i = 0; i < s->count; i++) {
        mu_parameter *q = s->parameters[i];
        size_t bytes = q->capacity * sizeof(float);
        memcpy(p.values + p.offsets[i], s->values + q->offset, bytes);
        if (q->grad_state != MUI_GRAD_NONE) {
            memcpy(p.grads + p.offsets[i], s->grads + q->offset, bytes);
        }
        for (size_t k = 0; k < s->slab_count; k++) {
            memcpy(p.states[k] + p.offsets[i], s->slabs[k]->data + q->offset, bytes);
        }
        q->offset = p.offsets[i];
    }
    mui_pages_free(c, s->old_values);
    s->old_values = s->values;
    s->values = p.values;
    float *grads = s->grads;
    s->grads = p.grads;
    p.grads = grads; /* freed below with the rest of what is old */
    p.values = NULL;
    for (size_t k = 0; k < s->slab_count; k++) {
        float *data = s->slabs[k]->data;
        s->slabs[k]->data = p.states[k];
        p.states[k] = data;
    }
    int64_t *old_order = s->order;
    mui_bucket *old_buckets = s->buckets;
    s->order = p.order;
    s->buckets = p.buckets;
    s->bucket_count = p.bucket_count;
    s->floats = p.floats;
    p.order = old_order;
    p.buckets = old_buckets;
    mui_placement_free(s, &p);
    for (int64_t i = 0; i < s->count; i++) {
        mui_store_point(s, i);
    }
    s->version++;
    s->layout_hash = mui_store_hash(s);
    return MU_OK;
}
