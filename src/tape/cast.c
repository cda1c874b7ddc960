/* Between float32 and bfloat16: the operation that a tape with bf16 records where an operation's operands are of the other
 * type. */
#include "tape/op_rows.h"

static mu_status cast_backward(mui_backward *b, mui_node *n)
{
    const mui_layout *layout = n->out->layout;
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    const void *dy = mui_grad_in(b, n, layout);
    void *dx = dy != NULL ? mui_grad_put(b, n, 0, layout) : NULL;
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    mui_bf16_cast(mui_backward_engine(b), mui_floats_in_layout(n->out->dims, layout), dy, dx, mui_is_bf16(n->in[0]));
    return MU_OK;
}

mu_tensor *mui_cast(mu_tape *t, mu_tensor *x, mu_dtype to)
{
    if (x == NULL || x->dtype == to) {
        return x;
    }
    if (mui_inputs_bad(t, "cast", &x, 1)) {
        return NULL;
    }
    mu_tensor *in = mui_in_layout(t, x, x->layout);
    mu_tensor *y = in != NULL ? mui_tensor_new(t, x->dims, to, in->layout) : NULL;
    if (y == NULL) {
        return NULL;
    }
    mui_bf16_cast(mui_tape_engine(t), mui_floats_in_layout(x->dims, in->layout), in->data, y->data, mui_is_bf16(y));
    return mui_record(t, &mui_op_cast, y, &in, 1, NULL, 0, NULL, 0);
}

/* No sample, and not in the table: finite differences are smaller than bfloat16's steps. tests/tape/test_bf16.c has it. */
const mui_op mui_op_cast = {"cast", cast_backward, NULL, 0, false};
