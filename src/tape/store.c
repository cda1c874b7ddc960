/* Building and freeing stores, optimiser slabs, gradients' memory; what users see of a parameter. */
#include "tape/store.h"
#include "base/alloc.h"
#include "dev/pages.h"
#include "tape/slabs.h"

#include <string.h>

#define ALIGN_FLOATS ((size_t)16)

const char *mu_parameter_name(const mu_parameter *p)
{
    return p != NULL && p->name != NULL ? p->name : "";
}

mu_tensor *mu_parameter_tensor(mu_parameter *p)
{
    return p != NULL ? &p->value : NULL;
}

bool mu_parameter_trainable(const mu_parameter *p)
{
    return p != NULL && !p->frozen;
}

mu_tensor *mu_parameter_grad(mu_parameter *p)
{
    return p != NULL && p->store != NULL && p->grad_state != MUI_GRAD_NONE ? &p->grad_view : NULL;
}

/* -- building --------------------------------------------------------------------------------------------------- */

/* A store under construction: complete, but parameters and buffers do not know it yet. */
typedef struct draft {
    mui_store *store;
    mui_placement place;
    const mui_layout **layouts;
    size_t *capacities;
    size_t *buffer_offsets;
} draft;

static void free_draft(mu_context *c, draft *d)
{
    mui_store *s = d->store;
    if (s != NULL) {
        mui_placement_free(s, &d->place);
        for (int64_t i = 0; s->buffer_names != NULL && i < s->buffer_count; i++) {
            mui_free(c, s->buffer_names[i]);
        }
        mui_pages_free(c, s->buffer_slab);
        mui_free(c, s->slabs);
        mui_free(c, s->parameters);
        mui_free(c, s->buffers);
        mui_free(c, s->buffer_names);
        mui_free(c, s);
    }
    mui_free(c, d->layouts);
    mui_free(c, d->capacities);
    mui_free(c, d->buffer_offsets);
}

static mu_status choose_layouts(mu_context *c, draft *d)
{
    mui_engine *e = mui_engine_of(c);
    if (e == NULL) {
        return mu_context_status(c);
    }
    for (int64_t i = 0; i < d->store->count; i++) {
        const mu_parameter *p = d->store->parameters[i];
        size_t bytes = 0;
        mu_status s = mui_dims_check(c, p->value.dims, MU_F32, &bytes);
        if (s != MU_OK) {
            return s;
        }
        if (p->conv_groups > 0 && p->value.dims.ndim == 4 && bytes > 0) {
            d->layouts[i] = mui_conv2d_weight_layout(e, p->value.dims, p->conv_groups, p->conv_stride);
            bytes = mui_bytes_in_layout(p->value.dims, d->layouts[i]);
        }
        d->capacities[i] = (bytes / sizeof(float) + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    }
    return MU_OK;
}

static mu_status place_buffers(mu_context *c, draft *d, const char *const *names)
{
    mui_store *s = d->store;
    size_t at = 0;
    for (int64_t i = 0; i < s->buffer_count; i++) {
        size_t bytes = 0;
        mu_status r = mui_dims_check(c, s->buffers[i]->dims, MU_F32, &bytes);
        if (r != MU_OK) {
            return r;
        }
        d->buffer_offsets[i] = at;
        at += (bytes / sizeof(float) + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
        s->buffer_names[i] = mui_strdup(c, names[i]);
        if (s->buffer_names[i] == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    s->buffer_floats = at;
    s->buffer_slab = mui_slab_memory(c, at);
    return s->buffer_slab != NULL ? MU_OK : MU_ERR_NOMEM;
}

/* Values from wherever they are, gradients and state from old. */
static mu_status copy_contents(mu_context *c, draft *d, const mui_store *old)
{
    mui_store *s = d->store;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        float *to = d->place.values + d->place.offsets[i];
        const float *from = (const float *)(const void *)p->value.data;
        if (p->initialised && from != NULL && mui_dims_elements(p->value.dims) > 0) {
            if (p->value.layout == d->layouts[i]) {
                memcpy(to, from, mui_bytes_in_layout(p->value.dims, d->layouts[i]));
            } else {
                mu_status r = mui_reorder(mui_engine_of(c), p->value.dims, p->value.layout, from, d->layouts[i], to);
                if (r != MU_OK) {
                    return r;
                }
            }
        }
        if (old == NULL || p->store != old) {
            continue;
        }
        size_t bytes = p->capacity * sizeof(float);
        if (p->grad_state != MUI_GRAD_NONE) {
            memcpy(d->place.grads + d->place.offsets[i], old->grads + p->offset, bytes);
        }
        for (size_t k = 0; k < s->slab_count; k++) {
            memcpy(d->place.states[k] + d->place.offsets[i], old->slabs[k]->data + p->offset, bytes);
        }
    }
    for (int64_t i = 0; i < s->buffer_count; i++) {
        const mu_tensor *b = s->buffers[i];
        if (b->data != NULL) {
            memcpy(s->buffer_slab + d->buffer_offsets[i], b->data,
                   (size_t)mui_dims_elements(b->dims) * sizeof(float));
        }
    }
    return MU_OK;
}

static mu_status fill_draft(mu_context *c, draft *d, mu_parameter *const *parameters, mu_tensor *const *buffers,
                            const char *const *names, const mui_store *old)
{
    mui_store *s = d->store;
    s->parameters = mui_calloc(c, (size_t)s->count + 1, sizeof(*s->parameters));
    s->buffers = mui_calloc(c, (size_t)s->buffer_count + 1, sizeof(*s->buffers));
    s->buffer_names = mui_calloc(c, (size_t)s->buffer_count + 1, sizeof(*s->buffer_names));
    d->layouts = mui_calloc(c, (size_t)s->count + 1, sizeof(*d->layouts));
    d->capacities = mui_calloc(c, (size_t)s->count + 1, sizeof(*d->capacities));
    d->buffer_offsets = mui_calloc(c, (size_t)s->buffer_count + 1, sizeof(*d->buffer_offsets));
    if (s->parameters == NULL || s->buffers == NULL || s->buffer_names == NULL || d->layouts == NULL ||
        d->capacities == NULL || d->buffer_offsets == NULL) {
        return MU_ERR_NOMEM;
    }
    if (s->count > 0) {
        memcpy(s->parameters, parameters, (size_t)s->count * sizeof(*parameters));
    }
    if (s->buffer_count > 0) {
        memcpy(s->buffers, buffers, (size_t)s->buffer_count * sizeof(*buffers));
    }
    if (old != NULL && old->slab_count > 0) {
        s->slabs = mui_calloc(c, old->slab_count, sizeof(*s->slabs));
        if (s->slabs == NULL) {
            return MU_ERR_NOMEM;
        }
        memcpy(s->slabs, old->slabs, old->slab_count * sizeof(*s->slabs));
        s->slab_count = s->slab_capacity = old->slab_count;
    }
    mu_status r = choose_layouts(c, d);
    r = r == MU_OK ? place_buffers(c, d, names) : r;
    r = r == MU_OK ? mui_placement_init(c, &d->place, d->capacities, s->count, NULL, NULL, NULL, 0) : r;
    r = r == MU_OK ? mui_placement_slabs(s, &d->place) : r;
    return r == MU_OK ? copy_contents(c, d, old) : r;
}

static void lose_memory(mu_parameter *p)
{
    p->store = NULL;
    p->value.data = NULL;
    p->grad_view.data = NULL;
    p->grad_state = MUI_GRAD_NONE;
}

static bool in_slab(const void *p, const float *slab, size_t floats)
{
    return p != NULL && slab != NULL && (uintptr_t)p >= (uintptr_t)slab && (uintptr_t)p < (uintptr_t)(slab + floats);
}

static void lose_buffers(mui_store *s)
{
    for (int64_t i = 0; i < s->buffer_count; i++) {
        if (in_slab(s->buffers[i]->data, s->buffer_slab, s->buffer_floats)) {
            s->buffers[i]->data = NULL;
        }
    }
}

/* Everything of the store but its optimiser slabs. */
static void free_body(mui_store *s)
{
    mu_context *c = s->context;
    for (int64_t i = 0; i < s->buffer_count; i++) {
        mui_free(c, s->buffer_names[i]);
    }
    mui_grads_memory_free(s, s->grads);
    mui_pages_free(c, s->values);
    mui_pages_free(c, s->old_values);
    mui_pages_free(c, s->buffer_slab);
    mui_free(c, s->parameters);
    mui_free(c, s->buffers);
    mui_free(c, s->buffer_names);
    mui_free(c, s->order);
    mui_free(c, s->buckets);
    mui_free(c, s->slabs);
    mui_free(c, s->square_sums);
    mui_free(c, s);
}

static void commit(draft *d, mui_store *old)
{
    mui_store *s = d->store;
    s->order = d->place.order;
    s->buckets = d->place.buckets;
    s->bucket_count = d->place.bucket_count;
    s->floats = d->place.floats;
    s->values = d->place.values;
    s->grads = d->place.grads;
    for (int64_t i = 0; i < s->count; i++) {
        mu_parameter *p = s->parameters[i];
        if (p->store != old || old == NULL) {
            p->grad_state = MUI_GRAD_NONE;
        }
        p->store = s;
        p->index = i;
        p->offset = d->place.offsets[i];
        p->capacity = d->capacities[i];
        p->value.layout = d->layouts[i];
        mui_store_point(s, i);
    }
    for (int64_t i = 0; i < s->buffer_count; i++) {
        s->buffers[i]->context = s->context;
        s->buffers[i]->data = (char *)(s->buffer_slab + d->buffer_offsets[i]);
        mui_strides_plain(s->buffers[i]->dims, s->buffers[i]->stride);
    }
    if (old != NULL) {
        for (int64_t i = 0; i < old->count; i++) {
            if (old->parameters[i]->store == old) {
                lose_memory(old->parameters[i]);
            }
        }
        lose_buffers(old);
        for (size_t k = 0; k < s->slab_count; k++) {
            mui_pages_free(s->context, s->slabs[k]->data);
            s->slabs[k]->data = d->place.states[k];
        }
        s->old_values = old->values;
        old->values = NULL;
        free_body(old);
    }
    /* What the store has taken over. */
    d->place.order = NULL;
    d->place.buckets = NULL;
    d->place.values = d->place.grads = NULL;
    d->place.state_count = 0;
    mui_placement_free(s, &d->place);
    d->store = NULL;
}

mui_store *mui_store_build(mu_context *c, mu_parameter *const *parameters, int64_t count, mu_tensor *const *buffers,
                           const char *const *buffer_names, int64_t buffer_count, mui_store *old)
{
    draft d = {.store = mui_calloc(c, 1, sizeof(*d.store))};
    mui_store *s = d.store;
    if (s == NULL) {
        return NULL;
    }
    s->context = c;
    s->count = count;
    s->buffer_count = buffer_count;
    s->version = 1;
    if (old != NULL) {
        s->version = old->version + 1;
        s->reduced = old->reduced;
        s->clears = old->clears;
        s->reduced_over = old->reduced_over;
        s->wrappers = old->wrappers;
        s->sharded_over = old->sharded_over;
        s->sharding = old->sharding;
        s->stepping = old->stepping;
        s->shared_bytes = old->shared_bytes;
        s->scattered_version = old->scattered_version;
        s->grads_alloc = old->grads_alloc;
        s->grads_free = old->grads_free;
        s->grads_user = old->grads_user;
    }
    bool filled = fill_draft(c, &d, parameters, buffers, buffer_names, old) == MU_OK;
    if (filled) {
        commit(&d, old);
        s->layout_hash = mui_store_hash(s);
    }
    free_draft(c, &d);
    return filled ? s : NULL;
}

void mui_store_free(mui_store *s)
{
    if (s == NULL) {
        return;
    }
    for (int64_t i = 0; i < s->count; i++) {
        if (s->parameters[i]->store == s) {
            lose_memory(s->parameters[i]);
        }
    }
    lose_buffers(s);
    for (size_t k = 0; k < s->slab_count; k++) {
        mui_pages_free(s->context, s->slabs[k]->data);
        mui_free(s->context, s->slabs[k]);
    }
    free_body(s);
}

/* -- slabs and gradients ---------------------------------------------------------------------------------------- */

mui_slab *mui_store_add_slab(mui_store *s)
{
    mui_slab *slab = mui_calloc(s->context, 1, sizeof(*slab));
    if (slab == NULL) {
        return NULL;
    }
    slab->is_state = true;
    slab->data = mui_slab_memory(s->context, s->floats);
    if (slab->data == NULL || !MUI_GROW(s->context, s->slabs, s->slab_count, s->slab_capacity)) {
        mui_pages_free(s->context, slab->data);
        mui_free(s->context, slab);
        return NULL;
    }
    s->slabs[s->slab_count++] = slab;
    return slab;
}

void mui_store_remove_slab(mui_store *s, mui_slab *slab)
{
    for (size_t k = 0; k < s->slab_count; k++) {
        if (s->slabs[k] == slab) {
            memmove(&s->slabs[k], &s->slabs[k + 1], (s->slab_count - k - 1) * sizeof(s->slabs[0]));
            s->slab_count--;
            mui_pages_free(s->context, slab->data);
            mui_free(s->context, slab);
            return;
        }
    }
}

mu_status mui_store_set_grad_memory(mui_store *s, void *(*alloc)(void *user, size_t bytes),
                                    void (*free_fn)(void *user, void *p), void *user)
{
    mui_store next = *s;
    next.grads_alloc = alloc;
    next.grads_free = free_fn;
    next.grads_user = user;
    float *grads = mui_grads_memory(&next, s->floats);
    if (grads == NULL) {
        return mui_failed(s->context) ? mu_context_status(s->context) : MU_ERR_NOMEM;
    }
    memcpy(grads, s->grads, s->floats * sizeof(float));
    mui_grads_memory_free(s, s->grads);
    *s = next;
    s->grads = grads;
    for (int64_t i = 0; i < s->count; i++) {
        mui_store_point(s, i);
    }
    return MU_OK;
}

void mui_store_zero_grad(mui_store *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        s->parameters[i]->grad_state = MUI_GRAD_NONE;
    }
    s->clears++;
}
