/* Keeps and puts back the memory behind a model and its optimiser. */
#include "io/snapshot.h"
#include "base/alloc.h"

#include <string.h>

/* The memory of a state, whatever its layout: a parameter's slice, or a plain buffer. */
static size_t state_bytes(const mui_state *x)
{
    return x->parameter != NULL ? x->parameter->capacity * sizeof(float)
                                : (size_t)mui_dims_elements(x->value->dims) * mu_dtype_bytes(x->value->dtype);
}

static bool is_kept(const mui_snapshot *s, size_t i)
{
    return s->which[i] && s->states->items[i].value->data != NULL;
}

static void copy_own(mui_snapshot *s, bool keep)
{
    float *kept = s->slabs + s->slab_count * s->store->floats;
    for (int k = 0; k < 2; k++) {
        size_t now = 0, bytes = s->own_floats[k] * sizeof(float);
        float *state = mui_optimizer_own_state(s->optimizer, k, &now);
        if (bytes > 0) {
            memcpy(keep ? kept : state, keep ? state : kept, bytes);
        }
        kept += s->own_floats[k];
    }
}

static mu_status keep_optimizer(mui_snapshot *s)
{
    s->parameters = mui_optimizer_count(s->optimizer);
    s->store = s->parameters >= 0 ? mui_optimizer_store(s->optimizer) : NULL;
    if (s->store == NULL) {
        return mu_context_status(s->context);
    }
    size_t slab_bytes = s->store->floats * sizeof(float), all = 0;
    if (!mui_size_mul(slab_bytes, s->store->slab_count, &all)) {
        return MU_ERR_NOMEM;
    }
    for (int k = 0; k < 2; k++) {
        (void)mui_optimizer_own_state(s->optimizer, k, &s->own_floats[k]);
        all += s->own_floats[k] * sizeof(float);
    }
    s->slabs = mui_alloc(s->context, all);
    s->slab_count = s->store->slab_count;
    s->progress = mui_calloc(s->context, (size_t)s->parameters, sizeof(*s->progress));
    s->groups = mui_optimizer_groups(s->optimizer);
    s->settings = mui_calloc(s->context, (size_t)s->groups, sizeof(*s->settings));
    if (s->slabs == NULL || s->progress == NULL || s->settings == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int g = 0; g < s->groups; g++) {
        s->settings[g] = mui_optimizer_get_settings(s->optimizer, g);
    }
    for (size_t i = 0; i < s->store->slab_count; i++) {
        memcpy(s->slabs + i * s->store->floats, s->store->slabs[i]->data, slab_bytes);
    }
    copy_own(s, true);
    for (int64_t i = 0; i < s->parameters; i++) {
        s->progress[i] = mui_optimizer_get(s->optimizer, i);
    }
    s->steps = mu_optimizer_steps(s->optimizer);
    return MU_OK;
}

mu_status mui_snapshot_take(const mui_states *states, const bool *which, mu_optimizer *optimizer, mui_snapshot *out)
{
    mui_snapshot s = {.context = states->context, .states = states, .which = which, .optimizer = optimizer};
    size_t bytes = 0;
    for (size_t i = 0; i < states->count; i++) {
        const mu_tensor *t = states->items[i].value;
        if (which[i] && states->items[i].parameter == NULL && !mui_tensor_is_plain(t)) {
            return mui_fail(s.context, MU_ERR_INTERNAL, "buffer %s has a layout of its own", states->items[i].name);
        }
        bytes += is_kept(&s, i) ? state_bytes(&states->items[i]) : 0;
    }
    s.values = mui_alloc(s.context, bytes);
    mu_status status = s.values == NULL ? MU_ERR_NOMEM : optimizer != NULL ? keep_optimizer(&s) : MU_OK;
    if (status != MU_OK) {
        mui_snapshot_free(&s);
        return status;
    }
    char *at = s.values;
    for (size_t i = 0; i < states->count; i++) {
        if (is_kept(&s, i)) {
            memcpy(at, states->items[i].value->data, state_bytes(&states->items[i]));
            at += state_bytes(&states->items[i]);
        }
    }
    *out = s;
    return MU_OK;
}

void mui_snapshot_restore(mui_snapshot *s)
{
    const char *at = s->values;
    for (size_t i = 0; i < s->states->count; i++) {
        if (is_kept(s, i)) {
            memcpy(s->states->items[i].value->data, at, state_bytes(&s->states->items[i]));
            at += state_bytes(&s->states->items[i]);
        }
    }
    if (s->optimizer == NULL) {
        return;
    }
    for (int64_t i = 0; i < s->parameters; i++) { /* before the slabs: it may clear parts of them */
        mui_optimizer_set_progress(s->optimizer, i, s->progress[i].has_state, s->progress[i].step);
    }
    /* One that the load has added stays, unused: settings without momentum do not look at it. */
    for (size_t i = 0; i < s->slab_count; i++) {
        memcpy(s->store->slabs[i]->data, s->slabs + i * s->store->floats, s->store->floats * sizeof(float));
    }
    copy_own(s, false);
    mui_optimizer_set_steps(s->optimizer, s->steps);
    mui_optimizer_restore_settings(s->optimizer, s->settings);
}

void mui_snapshot_free(mui_snapshot *s)
{
    mui_free(s->context, s->values);
    mui_free(s->context, s->slabs);
    mui_free(s->context, s->progress);
    mui_free(s->context, s->settings);
    *s = (mui_snapshot){0};
}
