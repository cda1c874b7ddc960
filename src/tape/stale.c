/* Values that changed between forward and backward: the gradient would be of no function at all, so it is an error. */
#include "tape/parallel_frame.h"

#include <stdio.h>

static uint64_t last_write(const mu_tensor *x)
{
    x = x->view_of != NULL ? x->view_of : x;
    const mu_parameter *p = x->parameter;
    return p != NULL && p->stepped > x->written ? p->stepped : x->written;
}

static mu_status is_stale(mu_tape *t, const mui_node *n, int input, bool again)
{
    const mu_tensor *x = again ? mui_base_of(n->in[input]) : n->in[input], *base = x->view_of != NULL ? x->view_of : x;
    const mu_parameter *p = base->parameter;
    char what[400], dims[MUI_DIMS_TEXT];
    if (p != NULL) {
        snprintf(what, sizeof(what), "parameter `%s`", mu_parameter_name(p));
    } else {
        snprintf(what, sizeof(what), "its input %d, of shape %s,", input, mui_dims_text(x->dims, dims));
    }
    return mui_fail(t->context, MU_ERR_STATE,
                    "backward of %s%s%s: %s was modified in place after forward had read it, by %s, and %s needs the "
                    "value of then: run all backwards of a forward before its values change, or forward again",
                    n->op->name, n->module[0] != '\0' ? " in " : "", n->module, what,
                    p != NULL && p->stepped > p->value.written ? "an optimiser's step, a wrap or an average"
                                                               : "mu_tensor_write or a load",
                    again ? "running the checkpointed segment again" : "its gradient");
}

mu_status mui_check_values(mu_tape *t)
{
    for (size_t i = 0; i < t->node_count; i++) {
        const mui_node *n = t->nodes[i];
        /* A dropped segment computes with everything that it reads, also where the gradient does not need it. */
        bool again = n->segment != NULL && !n->segment->live && n->leads_to_loss;
        if (!n->reaches_loss && !again) {
            continue;
        }
        if (!again && n->op == &mui_op_parallel) {
            mu_status inside = mui_parallel_check(n);
            if (inside != MU_OK) {
                return inside;
            }
        }
        for (int k = 0; k < n->in_count; k++) {
            bool read = again || (k < 31 && (n->reads & MUI_READS_IN(k)) != 0);
            if (read && last_write(again ? mui_base_of(n->in[k]) : n->in[k]) > n->recorded) {
                return is_stale(t, n, k, again);
            }
        }
    }
    return MU_OK;
}
