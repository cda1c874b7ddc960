/* Running backward over a marked tape: nodes in reverse, values given back as they are no longer needed. */
#include "tape/tape_state.h"
#include "base/beacon.h"

#include <string.h>

static void complete(mu_parameter *p, mui_store *s)
{
    if (p->grad_state == MUI_GRAD_NONE) {
        /* Every operation that read it found nothing to add: the gradient is there, and it is zero. */
        memset(p->store->grads + p->offset, 0, p->capacity * sizeof(float));
    }
    mui_grad_came(p);
    if (s != NULL && p->store == s && s->ready != NULL) {
        s->ready(s->ready_user, p);
    }
}

void mui_release_if_idle(mu_tape *t, mu_tensor *x)
{
    bool intermediate = mui_maker_of(x) != NULL || x->alias_of != NULL;
    if (x->tape != NULL && intermediate && !x->retained && !x->released && x != t->marked && x->consumers == 0 &&
        x->needed == 0) {
        mui_tensor_release(x);
    }
}

static void retire(mu_tape *t, mui_node *n, mui_store *s)
{
    if (!t->options.retain_graph && !n->done) {
        n->done = true;
        n->counted = false;
        for (int k = 0; k < n->saved_count; k++) {
            mui_storage_release(n->saved[k]);
            n->saved[k] = NULL;
        }
        for (int k = 0; k < n->in_count; k++) {
            mu_tensor *x = n->in[k], *base = mui_base_of(x);
            if (x->tape != NULL) {
                x->consumers--;
                x->needed -= k < 31 && (n->reads & MUI_READS_IN(k)) != 0;
                mui_release_if_idle(t, x);
            }
            if (base != x && base->tape != NULL) {
                base->consumers--;
                mui_release_if_idle(t, base);
            }
        }
        n->out->needed -= (n->reads & MUI_READS_OUT) != 0;
        mui_release_if_idle(t, n->out);
    }
    for (int k = 0; k < n->in_count; k++) {
        mu_parameter *p = mui_own_of(t, mui_base_of(n->in[k])->parameter);
        if (p != NULL && p->reads_left > 0 && --p->reads_left == 0) {
            complete(p, s);
        }
    }
}

/* Makes the gradient that the user asked for a tensor of its own. The extra reference keeps operations from computing
 * in place on it. */
static mu_status show_grad(mu_tape *t, mu_tensor *x)
{
    mu_tensor *g = mui_arena_alloc(&t->arena, sizeof(*g));
    if (g == NULL) {
        return MU_ERR_NOMEM;
    }
    *g = (mu_tensor){.context = t->context, .tape = t, .dtype = x->dtype, .dims = x->dims, .layout = x->grad_layout,
                     .storage = x->grad_storage, .data = x->grad_storage->data};
    mui_strides_plain(g->dims, g->stride);
    mui_storage_keep(g->storage);
    g->next = t->tensors;
    t->tensors = g;
    x->grad = g;
    return MU_OK;
}

static mu_status run_node(mu_tape *t, mui_node *n)
{
    mu_tensor *out = n->out;
    mu_status s = MU_OK;
    if (out->grad_storage != NULL) {
        if (out->wants_own_grad) {
            s = show_grad(t, out);
        }
        s = s == MU_OK ? n->op->backward(&t->backward, n) : s;
        s = s == MU_OK ? mui_grads_settle(&t->backward) : s;
        mui_storage_release(out->grad_storage);
        out->grad_storage = NULL;
    }
    return s;
}

/* Before the first node runs: gradients of an earlier backward go, and values that no marked node will read. */
static void prepare(mu_tape *t)
{
    for (mu_tensor *x = t->tensors; x != NULL; x = x->next) {
        if (x->grad != NULL) {
            mui_storage_release(x->grad->storage);
            x->grad->storage = NULL;
            x->grad->data = NULL;
            x->grad->released = true;
            x->grad = NULL;
        }
        bool intermediate = mui_maker_of(x) != NULL || x->alias_of != NULL;
        if (!t->options.retain_graph && intermediate && !x->retained && !x->released && x != t->marked &&
            x->consumers > 0 && x->reaching == x->consumers && x->needed == 0) {
            mui_tensor_release(x);
        }
    }
}

static mu_status start(mu_tape *t, mu_tensor *loss, mui_storage *g, const mui_layout *layout, mui_store *s)
{
    mu_status r = MU_OK;
    if (mui_tensor_wants_grad(loss)) {
        r = mui_grads_add(&t->backward, loss, g, layout);
    }
    mu_parameter *p = mui_own_of(t, loss->parameter);
    if (r == MU_OK && p != NULL && p->reads_left > 0 && --p->reads_left == 0) {
        complete(p, s);
    }
    return r;
}

/* A gradient that a reduction left, and that this backward will add to: the mean is kept, so that what is added can be
 * told from it. Within a reduction its own parameters are never in this state. */
static mu_status keep_mean(mu_parameter *p)
{
    if (p == NULL || p->frozen || p->grad_state != MUI_GRAD_REDUCED) {
        return MU_OK;
    }
    mui_store *s = p->store;
    if (s->reduced == NULL && (s->reduced = mui_store_add_slab(s)) == NULL) {
        return MU_ERR_NOMEM;
    }
    memcpy(s->reduced->data + p->offset, s->grads + p->offset, p->capacity * sizeof(float));
    p->grad_state = MUI_GRAD_MIXED;
    return MU_OK;
}

static mu_status keep_means(mu_tape *t, mu_tensor *loss)
{
    mu_status r = keep_mean(loss->parameter);
    for (size_t i = 0; i < t->node_count && r == MU_OK; i++) {
        mui_node *n = t->nodes[i];
        for (int k = 0; n->reaches_loss && k < n->in_count && r == MU_OK; k++) {
            r = keep_mean(mui_base_of(n->in[k])->parameter);
        }
    }
    return r;
}

mu_status mui_backward_run(mu_tape *t, mu_tensor *loss, float seed, mui_store *s)
{
    mu_context *c = t->context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (!t->is_marked || t->marked != loss) {
        return mui_fail(c, MU_ERR_INTERNAL, "backward was not marked from this loss");
    }
    if (loss == NULL) {
        return MU_OK;
    }
    if (t->adds_to_reduced && keep_means(t, loss) != MU_OK) {
        return mu_context_status(c);
    }
    mui_storage *g = mui_storage_new(t->pool, sizeof(float));
    if (g == NULL) {
        return MU_ERR_NOMEM;
    }
    *(float *)g->data = seed;
    mu_status r = mui_run_from(t, loss, g, NULL, s);
    mui_storage_release(g);
    return r;
}

mu_status mui_run_from(mu_tape *t, mu_tensor *loss, mui_storage *g, const mui_layout *layout, mui_store *s)
{
    mu_context *c = t->context;
    prepare(t);
    mui_place before = mui_go(c, MUI_BACKWARD, NULL);
    const char *module = NULL; /* nodes of one module in a row share their path */
    mu_status r = start(t, loss, g, layout, s);
    mui_node *last = mui_maker_of(loss);
    for (size_t i = last != NULL ? (size_t)last->index + 1 : 0; i-- > 0 && r == MU_OK;) {
        mui_node *n = t->nodes[i];
        if (n->reaches_loss && n->segment != NULL && !n->segment->live && !n->done) {
            r = mui_segment_need(t, n);
            module = NULL;
        }
        if (r == MU_OK && n->reaches_loss) {
            if (n->module != module) {
                module = n->module;
                mui_go(c, MUI_BACKWARD, module);
            }
            r = run_node(t, n);
            if (r == MU_OK) {
                retire(t, n, s);
            }
        }
        mui_segment_behind(t, i);
    }
    mui_segment_behind(t, 0);
    for (mu_tensor *x = t->tensors; x != NULL; x = x->next) {
        if (x->grad_storage != NULL) {
            if (r == MU_OK && x->wants_own_grad) {
                r = show_grad(t, x);
            }
            mui_storage_release(x->grad_storage);
            x->grad_storage = NULL;
        }
    }
    mui_grads_drop(&t->backward);
    mui_go(c, before.stage, before.path);
    t->is_marked = false;
    /* What failed first (memory, say) rather than where it was noticed. */
    return r != MU_OK && mui_failed(c) ? mu_context_status(c) : r;
}

mu_status mu_backward(mu_tape *t, mu_tensor *loss)
{
    if (t == NULL) {
        return MU_ERR_ARG;
    }
    if (loss == NULL) {
        return mui_failed(t->context) ? mu_context_status(t->context)
                                      : mui_fail(t->context, MU_ERR_ARG, "mu_backward: the loss is NULL");
    }
    mu_status s = mui_backward_mark(t, loss, NULL);
    return s == MU_OK ? mui_backward_run(t, loss, 1.0f, NULL) : s;
}
