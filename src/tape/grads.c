/* Where gradients go: slab slices of parameters, shared or own memory of everything else.
 *
 * A tensor's gradient so far is grad_storage in grad_layout; it may be shared with the gradients of other tensors (add
 * passes its own on to both operands), so it is only ever changed by who holds the one reference. */
#include "tape/tape_state.h"
#include "base/alloc.h"
#include "kern/bf16.h"

#include <string.h>

mui_engine *mui_backward_engine(mui_backward *b)
{
    return b->tape->engine;
}

bool mui_backward_retains(const mui_backward *b)
{
    return b->tape->options.retain_graph;
}

bool mui_wants_grad(const mui_backward *b, const mui_node *n, int input)
{
    (void)b;
    return mui_tensor_wants_grad(n->in[input]);
}

static float *floats_of(const mui_storage *s)
{
    return s->data;
}

static mui_storage *new_storage(mui_backward *b, mu_dims dims, mu_dtype dtype, const mui_layout *layout)
{
    size_t bytes = mui_bytes_as(dims, dtype, layout);
    return mui_storage_new(b->tape->pool, bytes > 0 ? bytes : 1);
}

/* Takes the reference; on failure it is released at once. */
static bool add_temp(mui_backward *b, mui_storage *s)
{
    if (!MUI_GROW(b->tape->context, b->temps, b->temp_count, b->temp_capacity)) {
        mui_storage_release(s);
        return false;
    }
    b->temps[b->temp_count++] = s;
    return true;
}

static bool was_given(const mui_backward *b, const mu_tensor *target)
{
    for (size_t i = 0; i < b->given_count; i++) {
        if (b->given[i] == target) {
            return true;
        }
    }
    return false;
}

static bool note_given(mui_backward *b, mu_tensor *target)
{
    if (!MUI_GROW(b->tape->context, b->given, b->given_count, b->given_capacity)) {
        return false;
    }
    b->given[b->given_count++] = target;
    return true;
}

/* Takes the reference, also on failure. */
static bool add_pending(mui_backward *b, mu_tensor *target, mui_storage *s, const mui_layout *layout)
{
    if (!MUI_GROW(b->tape->context, b->pending, b->pending_count, b->pending_capacity)) {
        mui_storage_release(s);
        return false;
    }
    b->pending[b->pending_count++] = (mui_pending){target, s, layout};
    return true;
}

/* A converted copy with a reference for the caller. */
static mui_storage *converted(mui_backward *b, mu_dims dims, mu_dtype dtype, const mui_storage *s,
                              const mui_layout *from, const mui_layout *to)
{
    mui_storage *d = new_storage(b, dims, dtype, to);
    if (d != NULL && mui_dims_elements(dims) > 0 &&
        mui_tensor_reorder(b->tape->engine, dims, dtype, from, s->data, to, d->data) != MU_OK) {
        mui_storage_release(d);
        return NULL;
    }
    return d;
}

static float *slice_of(const mu_parameter *p)
{
    return p->store->grads + p->offset;
}

static mu_status add_to_parameter(mui_backward *b, mu_parameter *p, mui_storage *s, const mui_layout *layout)
{
    mu_dims dims = p->value.dims;
    bool first = p->grad_state == MUI_GRAD_NONE;
    int64_t floats = mui_floats_in_layout(dims, p->value.layout);
    if (mui_dims_elements(dims) == 0) {
        mui_grad_came(p);
        return MU_OK;
    }
    if (first && layout != p->value.layout) {
        mu_status r = mui_reorder(b->tape->engine, dims, layout, floats_of(s), p->value.layout, slice_of(p));
        if (r == MU_OK) {
            mui_grad_came(p);
        }
        return r;
    }
    mui_storage *own = NULL;
    if (layout != p->value.layout) {
        own = converted(b, dims, MU_F32, s, layout, p->value.layout);
        if (own == NULL) {
            return mu_context_status(b->tape->context);
        }
        s = own;
    }
    if (first) {
        memcpy(slice_of(p), s->data, (size_t)floats * sizeof(float));
    } else {
        mui_axpy(b->tape->engine, floats, 1.0f, floats_of(s), slice_of(p));
    }
    mui_storage_release(own);
    mui_grad_came(p);
    return MU_OK;
}

/* to = a + b; to may be a. */
static void sum_into(mui_backward *b, mu_dtype dtype, int64_t n, const mui_storage *a, const mui_storage *c,
                     mui_storage *to)
{
    if (dtype == MU_BF16) {
        mui_bf16_add(b->tape->engine, n, a->data, c->data, to->data);
    } else if (to == a) {
        mui_axpy(b->tape->engine, n, 1.0f, floats_of(c), floats_of(to));
    } else {
        int64_t one = 1;
        mui_binary_forward(b->tape->engine, MUI_ADD, MU_DIMS(n), floats_of(a), &one, floats_of(c), &one, floats_of(to));
    }
}

mu_status mui_grads_add(mui_backward *b, mu_tensor *target, mui_storage *s, const mui_layout *layout)
{
    if (target->parameter != NULL) {
        return add_to_parameter(b, mui_own_of(b->tape, target->parameter), s, layout);
    }
    if (target->grad_storage == NULL) {
        mui_storage_keep(s);
        target->grad_storage = s;
        target->grad_layout = layout;
        return MU_OK;
    }
    mui_storage *own = NULL, *old = target->grad_storage;
    int64_t floats = mui_floats_in_layout(target->dims, target->grad_layout);
    if (layout != target->grad_layout) {
        own = converted(b, target->dims, target->dtype, s, layout, target->grad_layout);
        if (own == NULL) {
            return mu_context_status(b->tape->context);
        }
        s = own;
    }
    if (old->refs == 1) {
        sum_into(b, target->dtype, floats, old, s, old);
        mui_storage_release(own);
        return MU_OK;
    }
    /* Somebody else reads the old sum, or it is the memory of the new contribution: the new sum needs its own. */
    mui_storage *sum = own != NULL ? own : new_storage(b, target->dims, target->dtype, target->grad_layout);
    if (sum == NULL) {
        return MU_ERR_NOMEM;
    }
    sum_into(b, target->dtype, floats, sum == own ? sum : old, sum == own ? old : s, sum);
    target->grad_storage = sum;
    mui_storage_release(old);
    return MU_OK;
}

const void *mui_grad_in(mui_backward *b, mui_node *n, const mui_layout *layout)
{
    mu_tensor *out = n->out;
    if (out->grad_layout != layout) {
        mui_storage *s = converted(b, out->dims, out->dtype, out->grad_storage, out->grad_layout, layout);
        if (s == NULL) {
            return NULL;
        }
        mui_storage *old = out->grad_storage;
        out->grad_storage = s;
        out->grad_layout = layout;
        if (!add_temp(b, old)) {
            return NULL;
        }
    }
    return out->grad_storage->data;
}

void *mui_grad_put(mui_backward *b, mui_node *n, int input, const mui_layout *layout)
{
    mu_tensor *target = mui_base_of(n->in[input]);
    mui_storage *s = NULL;
    if (target->parameter != NULL) {
        mu_parameter *p = mui_own_of(b->tape, target->parameter);
        if (p->grad_state == MUI_GRAD_NONE && layout == p->value.layout && !was_given(b, target)) {
            mui_grad_came(p);
            return note_given(b, target) ? slice_of(p) : NULL;
        }
    } else if (target->grad_storage == NULL && !was_given(b, target)) {
        s = new_storage(b, target->dims, target->dtype, layout);
        if (s == NULL || !note_given(b, target)) {
            mui_storage_release(s);
            return NULL;
        }
        target->grad_storage = s;
        target->grad_layout = layout;
        return s->data;
    }
    s = new_storage(b, target->dims, target->dtype, layout);
    return s != NULL && add_pending(b, target, s, layout) ? s->data : NULL;
}

void *mui_grad_out(mui_backward *b, mui_node *n, int input, const mui_layout *layout, bool *accumulate)
{
    mu_tensor *target = mui_base_of(n->in[input]);
    *accumulate = false;
    if (!was_given(b, target)) {
        mu_parameter *p = mui_own_of(b->tape, target->parameter);
        bool have = p != NULL ? p->grad_state != MUI_GRAD_NONE && layout == p->value.layout
                              : target->grad_storage != NULL && target->grad_storage->refs == 1 &&
                                    target->grad_layout == layout;
        if (have) {
            *accumulate = true;
            if (p != NULL) {
                mui_grad_came(p);
            }
            return !note_given(b, target) ? NULL : p != NULL ? slice_of(p) : floats_of(target->grad_storage);
        }
    }
    return mui_grad_put(b, n, input, layout);
}

mu_status mui_grad_give(mui_backward *b, mui_node *n, int input, mui_storage *s, const mui_layout *layout)
{
    mu_tensor *target = mui_base_of(n->in[input]);
    if (was_given(b, target)) {
        mui_storage_keep(s);
        return add_pending(b, target, s, layout) ? MU_OK : MU_ERR_NOMEM;
    }
    return mui_grads_add(b, target, s, layout);
}

mu_status mui_grad_pass(mui_backward *b, mui_node *n, int input)
{
    if (!mui_wants_grad(b, n, input)) {
        return MU_OK;
    }
    mu_tensor *out = n->out;
    if (!mui_dims_equal(mui_base_of(n->in[input])->dims, out->dims) && mui_grad_in(b, n, NULL) == NULL) {
        return mu_context_status(b->tape->context);
    }
    return mui_grad_give(b, n, input, out->grad_storage, out->grad_layout);
}

void *mui_grad_remake(mui_backward *b, mui_node *n, const mui_layout *layout, const void **dy)
{
    *dy = mui_grad_in(b, n, layout);
    mui_storage *old = n->out->grad_storage;
    if (*dy == NULL || old->refs == 1) {
        return *dy != NULL ? old->data : NULL;
    }
    mui_storage *s = new_storage(b, n->out->dims, n->out->dtype, layout);
    if (s == NULL) {
        return NULL;
    }
    n->out->grad_storage = s;
    return add_temp(b, old) ? s->data : NULL;
}

float *mui_grad_scratch(mui_backward *b, size_t floats)
{
    size_t bytes = 0;
    if (!mui_size_mul(floats + 1, sizeof(float), &bytes)) {
        mui_fail(b->tape->context, MU_ERR_NOMEM, "out of memory: %zu floats were asked for", floats);
        return NULL;
    }
    mui_storage *s = mui_storage_new(b->tape->pool, bytes);
    return s != NULL && add_temp(b, s) ? floats_of(s) : NULL;
}

mu_status mui_grads_settle(mui_backward *b)
{
    mu_status s = MU_OK;
    b->given_count = 0;
    for (size_t i = 0; i < b->pending_count && s == MU_OK; i++) {
        mui_pending *p = &b->pending[i];
        s = mui_grads_add(b, p->target, p->storage, p->layout);
    }
    mui_grads_drop(b);
    return s;
}

void mui_grads_drop(mui_backward *b)
{
    for (size_t i = 0; i < b->pending_count; i++) {
        mui_storage_release(b->pending[i].storage);
    }
    for (size_t i = 0; i < b->temp_count; i++) {
        mui_storage_release(b->temps[i]);
    }
    b->pending_count = b->temp_count = b->given_count = 0;
}
