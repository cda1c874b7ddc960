/* Sum, mean, and softmax over the last dimension. */
#include "tape/op_rows.h"

#include <math.h>

/* -- sum and mean ----------------------------------------------------------------------------------------------- */

static mu_status spread(mui_backward *b, mui_node *n, float factor)
{
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    /* Every element gets the same: plain where blocks are padded, since padding must stay zero. */
    const mu_tensor *x = n->in[0];
    const mui_layout *layout = mui_layout_padded(x->layout) ? NULL : x->layout;
    const float *dy = mui_grad_in(b, n, NULL);
    float *dx = dy != NULL ? mui_grad_put(b, n, 0, layout) : NULL;
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    mui_fill(dx, mui_floats_in_layout(x->dims, layout), *dy * factor);
    return MU_OK;
}

static mu_status sum_backward(mui_backward *b, mui_node *n)
{
    return spread(b, n, 1.0f);
}

static mu_status mean_backward(mui_backward *b, mui_node *n)
{
    return spread(b, n, (float)(1.0 / (double)mui_dims_elements(n->in[0]->dims)));
}

static mu_tensor *total(mu_tape *t, const mui_op *op, mu_tensor *x, bool mean)
{
    if (mui_floats_bad(t, op->name, &x, 1)) {
        return NULL;
    }
    mu_tensor *in = mui_in_layout(t, x, x->layout);
    mu_tensor *y = in != NULL ? mui_tensor_new(t, MU_SCALAR, MU_F32, NULL) : NULL;
    if (y == NULL) {
        return NULL;
    }
    double sum = mui_sum(mui_tape_engine(t), mui_floats_in_layout(x->dims, in->layout), mui_cfloats(in));
    mui_floats(y)[0] = (float)(mean ? sum / (double)mui_dims_elements(x->dims) : sum);
    return mui_record(t, op, y, &in, 1, NULL, 0, NULL, 0);
}

mu_tensor *mu_sum(mu_tape *t, mu_tensor *x)
{
    return total(t, &mui_op_sum, x, false);
}

mu_tensor *mu_mean(mu_tape *t, mu_tensor *x)
{
    return total(t, &mui_op_mean, x, true);
}

static mu_tensor *total_sample(mu_tape *t, int i, uint64_t seed, mu_tensor *(*f)(mu_tape *t, mu_tensor *x))
{
    switch (i) {
    case 0: return f(t, mui_sample_leaf(t, MU_DIMS(3, 4), seed));
    case 1: return f(t, mui_sample_leaf(t, MU_SCALAR, seed));
    case 2: return f(t, mu_permute(t, mui_sample_leaf(t, MU_DIMS(3, 5), seed), MU_DIMS(1, 0)));
    case 3: return f == mu_sum ? f(t, mui_sample_leaf(t, MU_DIMS(2, 0), seed)) : NULL;
    default: return NULL;
    }
}

static mu_tensor *sum_sample(mu_tape *t, int i, uint64_t seed)
{
    return total_sample(t, i, seed, mu_sum);
}

static mu_tensor *mean_sample(mu_tape *t, int i, uint64_t seed)
{
    return total_sample(t, i, seed, mu_mean);
}

const mui_op mui_op_sum = {"sum", sum_backward, sum_sample, 0, false};
const mui_op mui_op_mean = {"mean", mean_backward, mean_sample, 0, false};

/* -- softmax ---------------------------------------------------------------------------------------------------- */

static void rows_and_cols(const mu_tensor *x, int64_t *rows, int64_t *cols)
{
    *cols = x->dims.ndim > 0 ? x->dims.dim[x->dims.ndim - 1] : 1;
    mu_dims outer = x->dims;
    outer.ndim = outer.ndim > 0 ? outer.ndim - 1 : 0;
    *rows = mui_dims_elements(outer);
}

static mu_status softmax_backward(mui_backward *b, mui_node *n, bool log)
{
    const float *dy = mui_wants_grad(b, n, 0) ? mui_grad_in(b, n, NULL) : NULL;
    float *dx = dy != NULL ? mui_grad_put(b, n, 0, NULL) : NULL;
    if (dx == NULL) {
        return mui_wants_grad(b, n, 0) ? mui_backward_failed(n) : MU_OK;
    }
    int64_t rows = 0, cols = 0;
    rows_and_cols(n->out, &rows, &cols);
    mui_softmax_backward(mui_backward_engine(b), rows, cols, mui_cfloats(n->out), dy, dx, log);
    return MU_OK;
}

static mu_status plain_softmax_backward(mui_backward *b, mui_node *n)
{
    return softmax_backward(b, n, false);
}

static mu_status log_softmax_backward(mui_backward *b, mui_node *n)
{
    return softmax_backward(b, n, true);
}

static mu_tensor *softmax(mu_tape *t, const mui_op *op, mu_tensor *x, bool log)
{
    if (mui_floats_bad(t, op->name, &x, 1)) {
        return NULL;
    }
    mu_tensor *in = mui_in_layout(t, x, NULL);
    mu_tensor *y = in != NULL ? mui_tensor_new(t, x->dims, MU_F32, NULL) : NULL;
    if (y == NULL) {
        return NULL;
    }
    int64_t rows = 0, cols = 0;
    rows_and_cols(x, &rows, &cols);
    mui_softmax_forward(mui_tape_engine(t), rows, cols, mui_cfloats(in), mui_floats(y), log);
    return mui_record(t, op, y, &in, 1, NULL, 0, NULL, 0);
}

mu_tensor *mu_softmax(mu_tape *t, mu_tensor *x)
{
    return softmax(t, &mui_op_softmax, x, false);
}

mu_tensor *mu_log_softmax(mu_tape *t, mu_tensor *x)
{
    return softmax(t, &mui_op_log_softmax, x, true);
}

static mu_tensor *softmax_input(mu_tape *t, int i, uint64_t seed)
{
    switch (i) {
    case 0: return mui_sample_leaf(t, MU_DIMS(3, 5), seed);
    case 1: return mui_sample_leaf(t, MU_DIMS(2, 1), seed);
    case 2: return mui_sample_leaf(t, MU_DIMS(0, 4), seed);
    case 3: return mu_permute(t, mui_sample_leaf(t, MU_DIMS(4, 2, 3), seed), MU_DIMS(1, 2, 0));
    case 4: return mui_sample_leaf(t, MU_SCALAR, seed);
    case 5: return mui_sample_leaf(t, MU_DIMS(2, 0), seed);
    default: return NULL;
    }
}

static mu_tensor *softmax_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = softmax_input(t, i, seed);
    return x != NULL ? mu_softmax(t, x) : NULL;
}

static mu_tensor *log_softmax_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = softmax_input(t, i, seed);
    return x != NULL ? mu_log_softmax(t, x) : NULL;
}

const mui_op mui_op_softmax = {"softmax", plain_softmax_backward, softmax_sample, MUI_READS_OUT, false};
const mui_op mui_op_log_softmax = {"log_softmax", log_softmax_backward, log_softmax_sample, MUI_READS_OUT, false};
