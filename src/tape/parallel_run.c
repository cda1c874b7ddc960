/* What replicas leave behind: gradients, summed in their order, and late notes. */
#include "tape/parallel_frame.h"
#include "base/alloc.h"
#include "base/profile.h"

#include <string.h>

/* -- late notes ------------------------------------------------------------------------------------------------- */
bool mui_tape_defer(mu_tape *t, const mui_late *late)
{
    if (!t->replica) {
        return false;
    }
    int64_t n = mui_dims_elements(late->target->dims);
    float *copy = late->value != NULL ? mui_arena_alloc(&t->arena, (size_t)n * sizeof(float)) : NULL;
    if ((late->value != NULL && copy == NULL) ||
        !MUI_GROW(t->context, t->late, t->late_count, t->late_capacity)) {
        return true;
    }
    for (int64_t i = 0; copy != NULL && i < n; i++) {
        copy[i] = late->value[i] * late->scale;
    }
    t->late[t->late_count] = *late;
    t->late[t->late_count++].value = copy;
    return true;
}

/* The same replica-for-replica note: at the same place, unless replicas went different ways. Taken, its target is NULL. */
static mui_late *counterpart(mu_tape *t, size_t at, const mu_tensor *target)
{
    if (at < t->late_count && t->late[at].target == target) {
        return &t->late[at];
    }
    for (size_t i = 0; i < t->late_count; i++) {
        if (t->late[i].target == target) {
            return &t->late[i];
        }
    }
    return NULL;
}

static void settle_one(mui_frame *f, int first, size_t at)
{
    const mui_late one = f->replicas[first].tape->late[at];
    if (one.value == NULL) {
        ((int64_t *)(void *)one.target->data)[0] += one.add;
    }
    double weight = 0;
    int64_t n = mui_dims_elements(one.target->dims);
    float *to = (float *)(void *)one.target->data;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; pass == 1 && one.value != NULL && i < n; i++) {
            to[i] *= 1.0f - one.momentum;
        }
        for (int r = first; r < f->used; r++) {
            mui_late *l = counterpart(f->replicas[r].tape, at, one.target);
            if (l == NULL) {
                continue;
            }
            if (pass == 0) {
                weight += l->weight;
                continue;
            }
            float share = one.value != NULL ? (float)(one.momentum * (l->weight / weight)) : 0;
            for (int64_t i = 0; one.value != NULL && i < n; i++) {
                to[i] += share * l->value[i];
            }
            l->target = NULL;
        }
    }
    mui_tensor_touch(one.target);
}

void mui_frame_settle(mui_frame *f)
{
    for (int r = 0; r < f->used; r++) {
        const mu_tape *t = f->replicas[r].tape;
        for (size_t i = 0; i < t->late_count; i++) {
            if (t->late[i].target != NULL) {
                settle_one(f, r, i);
            }
        }
    }
}

/* -- backward --------------------------------------------------------------------------------------------------- */
/* Memory for the gradients of what the result depends on. */
static mu_status give_memory(mu_tape *t)
{
    mui_shadows *s = &t->shadows;
    size_t floats = 0;
    for (int64_t i = 0; i < s->store.count; i++) {
        mu_parameter *q = s->store.parameters[i];
        q->grad_state = MUI_GRAD_NONE;
        q->offset = floats;
        floats += q->reads > 0 ? q->capacity : 0;
    }
    s->slab = mui_storage_new(t->pool, floats > 0 ? floats * sizeof(float) : 1);
    s->store.grads = s->slab != NULL ? s->slab->data : NULL;
    return s->slab != NULL ? MU_OK : MU_ERR_NOMEM;
}

static void backward_one(void *user, int i)
{
    mui_frame *f = user;
    mui_replica *r = &f->replicas[i];
    mu_tape *t = r->tape;
    mu_tensor *y = mui_base_of(r->y);
    size_t bytes = (size_t)(f->row * r->y_rows) * sizeof(float);
    if (mui_mark(t, y, &t->shadows.store) != MU_OK || give_memory(t) != MU_OK) {
        return;
    }
    mui_storage *g = mui_storage_new(t->pool, bytes > 0 ? bytes : 1);
    if (g == NULL) {
        return;
    }
    if (bytes > 0) {
        memcpy(g->data, f->dy + f->row * r->y_first, bytes);
    }
    mu_status s = mui_run_from(t, y, g, NULL, &t->shadows.store);
    mui_storage_release(g);
    if (s != MU_OK) {
        mui_fail(t->context, s, "its backward failed"); /* unless it said why */
    }
}

/* The replica's gradient of p, or NULL. */
static const float *gradient_of(const mui_replica *r, const mu_parameter *p)
{
    const mui_shadows *s = &r->tape->shadows;
    const mu_parameter *q = mui_shadow_of(s, p);
    return q != NULL && q->grad_state != MUI_GRAD_NONE ? s->store.grads + q->offset : NULL;
}

/* Elements from <= i < to of one parameter, the replicas' in their order: block by block, so that a sum is written once. */
static void add_range(const mui_frame *f, const mui_added *s, int64_t from, int64_t to)
{
    enum { BLOCK = 4096 };
    for (int64_t at = from; at < to; at += BLOCK) {
        int64_t n = to - at < BLOCK ? to - at : BLOCK;
        bool add = s->accumulate;
        for (int r = 0; r < f->used; r++) {
            const float *g = gradient_of(&f->replicas[r], s->parameter);
            if (g != NULL && add) {
                mui_axpy(NULL, n, 1.0f, g + at, s->to + at);
            } else if (g != NULL) {
                memcpy(s->to + at, g + at, (size_t)n * sizeof(float));
            }
            add = add || g != NULL;
        }
    }
}

/* Its part of all parameters, laid end to end. */
static void add_one(void *user, int i)
{
    const mui_frame *f = user;
    int64_t from = f->sum_floats / f->used * i, to = i < f->used - 1 ? f->sum_floats / f->used * (i + 1) : f->sum_floats;
    int64_t at = 0;
    for (int k = 0; k < f->sum_count; k++) {
        const mui_added *s = &f->sums[k];
        int64_t first = from > at ? from - at : 0, end = to - at < s->floats ? to - at : s->floats;
        add_range(f, s, first, end);
        at += s->floats;
    }
}

/* The gradients of what the node reads but x: every replica's thread adds a part, the result is the same for any cut. */
static mu_status add_parameters(mui_backward *b, mui_node *n, mui_frame *f, int first)
{
    f->sums = mui_arena_alloc(&b->tape->arena, (size_t)(n->in_count + 1) * sizeof(*f->sums));
    f->sum_count = 0;
    f->sum_floats = 0;
    for (int k = first; f->sums != NULL && k < n->in_count; k++) {
        const mu_parameter *p = n->in[k]->parameter;
        bool came = false;
        for (int r = 0; r < f->used && !came; r++) {
            came = gradient_of(&f->replicas[r], p) != NULL;
        }
        if (!came || !mui_wants_grad(b, n, k)) {
            continue;
        }
        mui_added *s = &f->sums[f->sum_count++];
        s->parameter = p;
        s->floats = mui_floats_in_layout(p->value.dims, p->value.layout);
        s->to = mui_grad_out(b, n, k, p->value.layout, &s->accumulate);
        f->sum_floats += s->floats;
        if (s->to == NULL) {
            return mu_context_status(f->context);
        }
    }
    if (f->sums == NULL) {
        return MU_ERR_NOMEM;
    }
    mui_timer t;
    mui_timer_start(&t, f->context, MUI_KIND_ELEMENTWISE);
    mu_status s = mui_frame_run(f, add_one, n->module);
    mui_timer_stop(&t, 0, (double)f->sum_floats * (double)sizeof(float) * (f->used + 1));
    return s;
}

static mu_status add_input(mui_backward *b, mui_node *n, mui_frame *f)
{
    bool accumulate = false;
    float *dx = mui_grad_out(b, n, 0, NULL, &accumulate);
    if (dx == NULL) {
        return mu_context_status(f->context);
    }
    int64_t at = 0;
    for (int i = 0; i < f->used; i++) {
        const mui_replica *r = &f->replicas[i];
        const mu_tensor *g = r->x->grad;
        int64_t floats = mui_dims_elements(r->x->dims);
        const float *from = g != NULL ? (const float *)(const void *)g->data : NULL;
        if (g != NULL && g->layout != NULL) {
            float *plain = mui_grad_scratch(b, (size_t)floats);
            if (plain == NULL || mui_reorder(mui_backward_engine(b), g->dims, g->layout, from, NULL, plain) != MU_OK) {
                return mu_context_status(f->context);
            }
            from = plain;
        }
        if (from == NULL && !accumulate && floats > 0) {
            memset(dx + at, 0, (size_t)floats * sizeof(float));
        } else if (from != NULL && accumulate) {
            mui_axpy(mui_backward_engine(b), floats, 1.0f, from, dx + at);
        } else if (from != NULL && floats > 0) {
            memcpy(dx + at, from, (size_t)floats * sizeof(float));
        }
        at += floats;
    }
    return MU_OK;
}

static mu_status parallel_backward(mui_backward *b, mui_node *n)
{
    const mui_parallel_attr *a = n->attr;
    mui_frame *f = a->frame;
    if (f == NULL || f->owner == NULL) {
        return mui_fail(n->out->context, MU_ERR_STATE, "backward comes to a data_parallel module that has been freed");
    }
    f->dy = mui_grad_in(b, n, NULL);
    if (f->dy == NULL) {
        return mu_context_status(f->context);
    }
    int64_t rows = n->out->dims.dim[0];
    f->row = rows > 0 ? mui_dims_elements(n->out->dims) / rows : 0;
    mu_status s = mui_frame_run(f, backward_one, n->module);
    if (s == MU_OK && a->has_x && mui_wants_grad(b, n, 0)) {
        s = add_input(b, n, f);
    }
    if (s == MU_OK) {
        s = add_parameters(b, n, f, a->has_x);
    }
    for (int i = 0; i < f->used; i++) {
        mui_shadows *all = &f->replicas[i].tape->shadows;
        mui_storage_release(all->slab);
        all->slab = NULL;
    }
    if (f->brief) {
        mui_frame_release(f);
    }
    return s;
}

mu_status mui_parallel_check(const mui_node *n)
{
    const mui_frame *f = ((const mui_parallel_attr *)n->attr)->frame;
    for (int i = 0; f != NULL && i < f->used; i++) {
        mu_status s = mui_check_values(f->replicas[i].tape);
        if (s != MU_OK) {
            return s;
        }
    }
    return MU_OK;
}

const mui_op mui_op_parallel = {.name = "data_parallel", .backward = parallel_backward};
