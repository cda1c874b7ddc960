/* Marking: what the loss depends on, how often it reads each parameter, and why it does not reach the others.
 *
 * Two kinds of dependence are told apart. A node reaches the loss when a gradient arrives at it; it leads to the loss
 * when the loss depends on its value, also through a detach or a no-grad region. */
#include "tape/tape_state.h"

/* The numbers of mu_absence in <muster/ddp.h>, a header of a floor above. */
enum { PRESENT = 0, NOT_READ, NOT_REACHED, DETACHED, FROZEN, NO_LOSS };

static mu_status check_loss(mu_tape *t, mu_tensor *loss)
{
    mu_context *c = t->context;
    char text[MUI_DIMS_TEXT];
    if (t->segment != NULL) {
        return mui_fail(c, MU_ERR_STATE, "backward within the function of a checkpointed segment");
    }
    if (t->options.no_grad) {
        return mui_fail(c, MU_ERR_STATE, "backward on a tape that was opened with no_grad: nothing was recorded");
    }
    if (mui_inputs_bad(t, "backward", &loss, 1)) {
        return mu_context_status(c);
    }
    if (loss->dtype != MU_F32 || mui_dims_elements(loss->dims) != 1) {
        return mui_fail(c, MU_ERR_SHAPE,
                        "backward starts from a loss of one float32 element, not from %s of shape %s: reduce it with "
                        "mu_mean or mu_sum",
                        mu_dtype_name(loss->dtype), mui_dims_text(loss->dims, text));
    }
    return MU_OK;
}

/* Whether backward can run n although it ran it before. Values may happen to be there still, since others need them,
 * but would go while this backward runs: only what needs none (add, reshape) can run again. */
static bool can_run_again(const mui_node *n)
{
    return n->saved_count == 0 && n->reads == 0;
}

static void clear_marks(mu_tape *t, mui_store *s)
{
    for (mu_tensor *x = t->tensors; x != NULL; x = x->next) {
        x->reaching = 0;
    }
    for (size_t i = 0; i < t->node_count; i++) {
        mui_node *n = t->nodes[i];
        n->reaches_loss = n->leads_to_loss = false;
        n->next = n->cut = n->end = NULL;
        for (int k = 0; k < n->in_count; k++) {
            mu_parameter *p = mui_own_of(t, mui_base_of(n->in[k])->parameter);
            if (p != NULL) {
                p->reads = p->reads_left = 0;
            }
        }
    }
    for (int64_t i = 0; s != NULL && i < s->count; i++) {
        s->parameters[i]->reads = s->parameters[i]->reads_left = 0;
        s->parameters[i]->absence = (mui_absence){0};
    }
}

static mu_status count_read(mu_tape *t, mu_parameter *p)
{
    if (p->store == NULL) {
        return mui_fail(t->context, MU_ERR_STATE, "parameter %s has no memory: its module was taken out of its tree",
                        p->name != NULL ? p->name : "without name");
    }
    p->reads++;
    p->reads_left++;
    t->adds_to_reduced = t->adds_to_reduced || p->grad_state == MUI_GRAD_REDUCED;
    return MU_OK;
}

static mu_status visit_reaching(mu_tape *t, mui_node *n)
{
    if (n->done && !can_run_again(n)) {
        return mui_fail(t->context, MU_ERR_STATE,
                        "backward needs values of %s%s%s that an earlier backward gave back: run one backward over the "
                        "sum of the losses, or open the tape with retain_graph",
                        n->op->name, n->module[0] != '\0' ? " in " : "", n->module);
    }
    for (int k = 0; k < n->in_count; k++) {
        mu_tensor *base = mui_base_of(n->in[k]);
        mui_node *maker = mui_maker_of(base);
        if (n->counted) {
            /* As mui_record counts consumers: the copy and what it is a copy of; nothing of the context. */
            if (base->tape != NULL) { /* others are not even written to: replicas share them */
                base->reaching++;
            }
            if (n->in[k] != base) {
                n->in[k]->reaching++;
            }
        }
        if (maker != NULL) {
            maker->reaches_loss = true;
        }
        if (base->parameter != NULL && !base->parameter->frozen) {
            mu_status s = count_read(t, mui_own_of(t, base->parameter));
            if (s != MU_OK) {
                return s;
            }
        }
    }
    return MU_OK;
}

static mu_status visit(mu_tape *t, mu_tensor *loss)
{
    if (loss->node == NULL) {
        mu_parameter *p = mui_own_of(t, loss->parameter);
        return p != NULL && !p->frozen ? count_read(t, p) : MU_OK;
    }
    loss->node->leads_to_loss = true;
    loss->node->reaches_loss = mui_maker_of(loss) != NULL;
    for (size_t i = (size_t)loss->node->index + 1; i-- > 0;) {
        mui_node *n = t->nodes[i];
        if (n->reaches_loss) {
            t->collectives += n->op->collective;
            mu_status s = visit_reaching(t, n);
            if (s != MU_OK) {
                return s;
            }
        }
        for (int k = 0; n->leads_to_loss && k < n->in_count; k++) {
            mui_node *maker = mui_base_of(n->in[k])->node;
            if (maker != NULL) {
                maker->leads_to_loss = true;
            }
        }
    }
    return MU_OK;
}

/* For each node: where its result goes next, where it is first cut off, where it ends. */
static void trace_paths(mu_tape *t)
{
    for (size_t i = 0; i < t->node_count; i++) {
        mui_node *m = t->nodes[i];
        for (int k = 0; k < m->in_count; k++) {
            mui_node *n = mui_base_of(m->in[k])->node;
            if (n != NULL && n != m && (n->next == NULL || (m->leads_to_loss && !n->next->leads_to_loss))) {
                n->next = m;
            }
        }
    }
    for (size_t i = t->node_count; i-- > 0;) {
        mui_node *n = t->nodes[i];
        n->cut = n->light ? n : n->next != NULL ? n->next->cut : NULL;
        n->end = n->next != NULL ? n->next->end : n;
    }
}

/* within: what read it inside of `reader`, or NULL. */
static void explain(mui_absence *a, const mui_node *reader, const mui_within *within)
{
    const mui_node *last = reader->cut != NULL ? reader->cut : reader->end;
    *a = (mui_absence){.kind = reader->cut != NULL ? DETACHED : NOT_REACHED,
                       .op = within != NULL ? within->op : reader->op->name,
                       .module = within != NULL ? within->module : reader->module,
                       .end_op = last->op->name,
                       .end_module = last->module,
                       .region = reader->cut != NULL ? reader->cut->region : NULL};
}

/* Whether p is absent and n, a reader of it, explains that better than what is known. */
static bool asks(const mu_parameter *p, const mui_store *s, const mui_node *n)
{
    if (p == NULL || p->store != s || p->reads > 0 || p->frozen) {
        return false;
    }
    /* Of several reads, one on a way to the loss says most: a detach there is what the user looks for. */
    return p->absence.kind == PRESENT || (n->leads_to_loss && p->absence.kind == NOT_REACHED);
}

static void find_reasons(mu_tape *t, mui_store *s)
{
    trace_paths(t);
    for (size_t i = 0; i < t->node_count; i++) {
        mui_node *n = t->nodes[i];
        for (int k = 0; k < n->in_count; k++) {
            mu_parameter *p = mui_own_of(t, mui_base_of(n->in[k])->parameter);
            if (n->within == NULL && asks(p, s, n)) {
                explain(&p->absence, n, NULL);
            }
        }
        for (size_t k = 0; k < n->within_count; k++) {
            const mui_within *w = &n->within[k];
            if (!asks(w->parameter, s, n)) {
                continue;
            }
            if (w->absence != NULL) {
                w->parameter->absence = *w->absence;
            } else {
                explain(&w->parameter->absence, n, w);
            }
        }
    }
}

int64_t mui_backward_collectives(const mu_tape *t)
{
    return t->collectives;
}

mu_status mui_backward_mark(mu_tape *t, mu_tensor *loss, mui_store *s)
{
    if (t == NULL) {
        return MU_ERR_ARG;
    }
    if (mui_failed(t->context)) {
        return mu_context_status(t->context);
    }
    if (t->replica) {
        return mui_fail(t->context, MU_ERR_STATE, "backward within a replica's forward: run it on the gathered output");
    }
    mu_status r = loss != NULL ? check_loss(t, loss) : MU_OK;
    return r == MU_OK ? mui_mark(t, loss, s) : r;
}

mu_status mui_mark(mu_tape *t, mu_tensor *loss, mui_store *s)
{
    t->is_marked = false;
    t->collectives = 0;
    t->adds_to_reduced = false;
    clear_marks(t, s);
    mu_status r = loss != NULL ? visit(t, loss) : MU_OK;
    r = r == MU_OK && loss != NULL ? mui_check_values(t) : r;
    if (r != MU_OK) {
        return r;
    }
    bool some_absent = false;
    for (int64_t i = 0; s != NULL && i < s->count; i++) {
        some_absent = some_absent || (s->parameters[i]->reads == 0 && !s->parameters[i]->frozen);
    }
    if (some_absent && loss != NULL) {
        find_reasons(t, s);
    }
    for (int64_t i = 0; s != NULL && i < s->count; i++) {
        mu_parameter *p = s->parameters[i];
        if (p->reads == 0 && (p->frozen || p->absence.kind == PRESENT)) {
            p->absence.kind = p->frozen ? FROZEN : loss == NULL ? NO_LOSS : NOT_READ;
        }
    }
    t->marked = loss;
    t->is_marked = true;
    return MU_OK;
}
