/* The tape's life, tensors that enter and leave it, no-grad regions. Not for: recording (record.c), differentiating
 * (mark.c, backward.c). */
#include "tape/tape_state.h"
#include "base/alloc.h"
#include "base/trace.h"
#include "kern/bf16.h"

#include <stdio.h>
#include <string.h>

static void destroy(void *object)
{
    mu_tape *t = object;
    mu_context *c = t->context;
    t->segment = NULL;
    mu_tape_reset(t);
    if (c->trace != NULL) {
        mui_trace_tape_gone(c, t);
    }
    mui_arena_free(&t->arena);
    mui_free(c, t->nodes);
    mui_free(c, t->regions);
    mui_free(c, t->segments);
    mui_free(c, t->made);
    mui_free(c, t->memories);
    mui_free(c, t->backward.pending);
    mui_free(c, t->backward.given);
    mui_free(c, t->backward.temps);
    mui_free(c, t->late);
    mui_pool_free(t->pool);
    mui_free(c, t);
}

mu_tape *mui_tape_make(mu_context *c, mui_engine *e)
{
    mu_tape *t = e != NULL ? mui_calloc(c, 1, sizeof(*t)) : NULL;
    if (t == NULL) {
        return NULL;
    }
    t->context = c;
    t->engine = e;
    t->backward.tape = t;
    t->nudge.leaf = -1;
    mui_arena_init(&t->arena, c);
    t->pool = mui_pool_new(c);
    if (t->pool == NULL) {
        destroy(t);
        return NULL;
    }
    return t;
}

mu_tape *mu_tape_new(mu_context *c, const mu_tape_options *options)
{
    mu_tape *t = mui_failed(c) ? NULL : mui_tape_make(c, mui_engine_of(c));
    if (t == NULL) {
        return NULL;
    }
    t->options = options != NULL ? *options : (mu_tape_options){0};
    if (t->options.bf16) {
        mui_bf16_warn(t->engine);
    }
    return mui_context_own(c, t, destroy, MUI_OWN_FIRST) == MU_OK ? t : NULL;
}

const char *mui_tape_skipped(const mu_tape *t)
{
    return t->skipped[0] != '\0' ? t->skipped : NULL;
}

void mu_tape_reset(mu_tape *t)
{
    if (t == NULL) {
        return;
    }
    if (t->segment != NULL) {
        mui_fail(t->context, MU_ERR_STATE, "mu_tape_reset within the function of a checkpointed segment: not done");
        return;
    }
    while (t->attached != NULL) {
        mui_attachment *a = t->attached;
        t->attached = a->next;
        a->reset(a->self);
    }
    if (t->has_shadows) {
        mui_storage_release(t->shadows.slab);
        t->shadows.slab = NULL;
        t->has_shadows = false;
    }
    t->late_count = 0;
    mui_grads_drop(&t->backward);
    for (size_t i = 0; i < t->node_count; i++) {
        mui_node *n = t->nodes[i];
        for (int k = 0; k < n->saved_count; k++) {
            mui_storage_release(n->saved[k]);
        }
    }
    for (mu_tensor *x = t->tensors; x != NULL; x = x->next) {
        mui_storage_release(x->storage);
        mui_storage_release(x->grad_storage);
    }
    if (t->context->trace != NULL && !t->replica && !t->options.no_grad) {
        mui_trace_tape(t->context, t, t->node_count > 0);
    }
    t->node_count = 0;
    t->segment_count = t->made_count = t->memory_count = 0;
    t->live = NULL;
    t->tensors = NULL;
    for (size_t i = 0; i < t->region_count; i++) {
        t->regions[i].copy = NULL;
    }
    t->draws = 0;
    t->began = 0;
    t->group_calls = 0;
    t->skipped[0] = '\0';
    t->sample_leaves = 0;
    t->step++;
    t->module = NULL;
    t->marked = NULL;
    t->is_marked = false;
    mui_arena_reset(&t->arena);
}

double mui_tape_began(const mu_tape *t)
{
    return t != NULL ? t->began : 0;
}

void mu_tape_free(mu_tape *t)
{
    if (t != NULL) {
        mui_context_disown(t->context, t);
        destroy(t);
    }
}

void mu_tape_set_step(mu_tape *t, uint64_t step)
{
    if (t != NULL) {
        t->step = step;
    }
}

uint64_t mu_tape_step(const mu_tape *t)
{
    return t != NULL ? t->step : 0;
}

size_t mu_tape_bytes(const mu_tape *t)
{
    return t != NULL ? mui_pool_live_bytes(t->pool) : 0;
}

size_t mu_tape_peak_bytes(const mu_tape *t)
{
    return t != NULL ? mui_pool_peak_bytes(t->pool) : 0;
}

/* -- tensors in and out ----------------------------------------------------------------------------------------- */

static mu_tensor *from(mu_tape *t, mu_dims dims, mu_dtype dtype, const void *data)
{
    if (t == NULL || mui_failed(t->context)) {
        return NULL;
    }
    mu_tensor *x = mui_tensor_new(t, dims, dtype, NULL);
    if (x == NULL) {
        return NULL;
    }
    size_t bytes = (size_t)mui_dims_elements(dims) * mu_dtype_bytes(dtype);
    if (bytes > 0 && data != NULL) {
        memcpy(x->data, data, bytes);
    } else if (bytes > 0) {
        memset(x->data, 0, bytes);
    }
    return x;
}

mu_tensor *mu_tensor_from(mu_tape *t, mu_dims dims, const float *data)
{
    return from(t, dims, MU_F32, data);
}

mu_tensor *mu_tensor_from_i64(mu_tape *t, mu_dims dims, const int64_t *data)
{
    return from(t, dims, MU_I64, data);
}

mu_tensor *mu_tensor_zeros(mu_tape *t, mu_dims dims)
{
    return from(t, dims, MU_F32, NULL);
}

mu_tensor *mu_tensor_require_grad(mu_tape *t, mu_tensor *x)
{
    if (mui_inputs_bad(t, "require_grad", &x, 1)) {
        return NULL;
    }
    if (x->tape == NULL) {
        mui_fail(t->context, MU_ERR_ARG,
                 "mu_tensor_require_grad: the tensor does not belong to the tape; parameters have gradients anyway");
        return NULL;
    }
    if (x->dtype != MU_F32) {
        mui_fail(t->context, MU_ERR_DTYPE, "mu_tensor_require_grad: only float32 tensors have gradients, not %s",
                 mu_dtype_name(x->dtype));
        return NULL;
    }
    x->requires_grad = true;
    x->wants_own_grad = true;
    return x;
}

mu_tensor *mu_tensor_grad(const mu_tensor *x)
{
    return x != NULL ? x->grad : NULL;
}

mu_tensor *mu_tensor_retain(mu_tape *t, mu_tensor *x)
{
    if (mui_inputs_bad(t, "retain", &x, 1)) {
        return NULL;
    }
    x->retained = true;
    return x;
}

static void free_kept(void *object)
{
    mu_tensor *x = object;
    mui_free(x->context, x);
}

mu_tensor *mu_tensor_keep(mu_tape *t, const mu_tensor *x)
{
    if (t == NULL || x == NULL || mui_failed(t->context)) {
        return NULL;
    }
    size_t head = (sizeof(*x) + 63) / 64 * 64, bytes = 0, total = 0;
    if (mui_dims_check(t->context, x->dims, x->dtype, &bytes) != MU_OK) {
        return NULL;
    }
    if (!mui_size_add(head, bytes, &total)) {
        mui_fail(t->context, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    mu_tensor *kept = mui_alloc(t->context, total);
    if (kept == NULL) {
        return NULL;
    }
    *kept = (mu_tensor){.context = t->context, .dtype = x->dtype, .dims = x->dims, .kept = true};
    mui_strides_plain(x->dims, kept->stride);
    kept->data = (char *)kept + head;
    if (mui_tensor_get_raw(x, kept->data, bytes) != MU_OK) {
        mui_free(t->context, kept);
        return NULL;
    }
    return mui_context_own(t->context, kept, free_kept, MUI_OWN_DEFAULT) == MU_OK ? kept : NULL;
}

void mu_tensor_free(mu_tensor *kept)
{
    if (kept != NULL && kept->kept) {
        mui_context_disown(kept->context, kept);
        free_kept(kept);
    }
}

/* -- regions and module paths ----------------------------------------------------------------------------------- */

void mu_no_grad_begin(mu_tape *t, const char *name)
{
    if (t == NULL) {
        return;
    }
    if (MUI_GROW(t->context, t->regions, t->region_count, t->region_capacity)) {
        mui_region *r = &t->regions[t->region_count++];
        r->copy = NULL;
        snprintf(r->name, sizeof(r->name), "%s", name != NULL ? name : "");
    }
}

void mu_no_grad_end(mu_tape *t)
{
    if (t == NULL) {
        return;
    }
    if (t->region_count > t->region_base) {
        t->region_count--;
    } else if (!mui_failed(t->context)) {
        mui_fail(t->context, MU_ERR_STATE, "mu_no_grad_end without mu_no_grad_begin");
    }
}

void mui_path_push(mu_context *c, const char *name, size_t *mark)
{
    mui_here *here = mui_here_of(c);
    *mark = here->path_len;
    size_t room = sizeof(here->path) - here->path_len;
    if (name[0] == '\0') {
        return;
    }
    int written = snprintf(here->path + here->path_len, room, "%s%s", here->path_len > 0 ? "." : "", name);
    if (written > 0) {
        here->path_len += (size_t)written < room ? (size_t)written : room - 1;
    }
}

void mui_path_pop(mu_context *c, size_t mark)
{
    mui_here *here = mui_here_of(c);
    here->path_len = mark;
    here->path[mark] = '\0';
}
