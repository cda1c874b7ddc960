/* Element by element with one operand: activations, scale, dropout, detach. */
#include "tape/op_rows.h"

#include <math.h>

typedef struct unary_attr {
    mui_unary kind;
    float a;
} unary_attr;

static mu_status unary_backward(mui_backward *b, mui_node *n)
{
    const unary_attr *at = n->attr;
    const mui_layout *layout = n->out->layout;
    const void *dy = NULL;
    void *dx = mui_grad_remake(b, n, layout, &dy);
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    if (mui_is_bf16(n->out)) {
        mui_bf16_relu_backward(mui_backward_engine(b), mui_floats_in_layout(n->out->dims, layout), mui_cbf16(n->out), dy, dx);
        return mui_grad_pass(b, n, 0);
    }
    const float *x = mui_unary_needs_input(at->kind) ? mui_cfloats(n->in[0]) : NULL;
    const float *y = mui_unary_needs_output(at->kind) ? mui_cfloats(n->out) : NULL;
    mui_unary_backward(mui_backward_engine(b), at->kind, mui_floats_in_layout(n->out->dims, layout), x, y, dy, dx, at->a,
                       false);
    return mui_grad_pass(b, n, 0);
}

static mu_tensor *unary(mu_tape *t, const mui_op *op, mui_unary kind, mu_tensor *x, float a)
{
    if (kind == MUI_RELU ? mui_either_bad(t, op->name, &x, 1) : mui_floats_bad(t, op->name, &x, 1)) {
        return NULL;
    }
    /* Padding must stay zero, so what makes something of nothing runs on the plain form. */
    bool flat = x->layout != NULL && (mui_unary_keeps_zero(kind) || !mui_layout_padded(x->layout));
    mu_tensor *in = mui_in_layout(t, x, flat ? x->layout : NULL);
    mu_tensor *y = in != NULL ? mui_tensor_new(t, x->dims, x->dtype, in->layout) : NULL;
    if (y == NULL) {
        return NULL;
    }
    int64_t elements = mui_floats_in_layout(x->dims, in->layout);
    if (mui_is_bf16(x)) { /* relu, all others were given float32 */
        mui_bf16_relu(mui_tape_engine(t), elements, mui_cbf16(in), mui_bf16(y));
    } else {
        mui_unary_forward(mui_tape_engine(t), kind, elements, mui_cfloats(in), mui_floats(y), a);
    }
    unary_attr at = {kind, a};
    uint32_t reads = (mui_unary_needs_input(kind) ? MUI_READS_IN(0) : 0) |
                     (mui_unary_needs_output(kind) ? MUI_READS_OUT : 0);
    return mui_record_reads(t, op, y, &in, 1, &at, sizeof(at), NULL, 0, reads);
}

mu_tensor *mu_relu(mu_tape *t, mu_tensor *x)
{
    return unary(t, &mui_op_relu, MUI_RELU, x, 0.0f);
}

mu_tensor *mu_leaky_relu(mu_tape *t, mu_tensor *x, float slope)
{
    return unary(t, &mui_op_leaky_relu, MUI_LEAKY_RELU, x, slope);
}

mu_tensor *mu_sigmoid(mu_tape *t, mu_tensor *x)
{
    return unary(t, &mui_op_sigmoid, MUI_SIGMOID, x, 0.0f);
}

mu_tensor *mu_tanh(mu_tape *t, mu_tensor *x)
{
    return unary(t, &mui_op_tanh, MUI_TANH, x, 0.0f);
}

mu_tensor *mu_gelu(mu_tape *t, mu_tensor *x)
{
    return unary(t, &mui_op_gelu, MUI_GELU, x, 0.0f);
}

mu_tensor *mu_softplus(mu_tape *t, mu_tensor *x)
{
    return unary(t, &mui_op_softplus, MUI_SOFTPLUS, x, 0.0f);
}

mu_tensor *mu_scale(mu_tape *t, mu_tensor *x, float factor)
{
    return unary(t, &mui_op_scale, MUI_SCALE, x, factor);
}

/* Inputs for any operation of one operand: plain, scalar, empty, single, odd, transposed, narrowed. */
static mu_tensor *any_input(mu_tape *t, int i, uint64_t seed)
{
    switch (i) {
    case 0: return mui_sample_leaf(t, MU_DIMS(3, 4), seed);
    case 1: return mui_sample_leaf(t, MU_SCALAR, seed);
    case 2: return mui_sample_leaf(t, MU_DIMS(0, 3), seed);
    case 3: return mui_sample_leaf(t, MU_DIMS(1, 7, 3, 1), seed);
    case 4: return mu_permute(t, mui_sample_leaf(t, MU_DIMS(5, 3), seed), MU_DIMS(1, 0));
    case 5: return mu_narrow(t, mui_sample_leaf(t, MU_DIMS(3, 6), seed), 1, 1, 4);
    default: return NULL;
    }
}

static mu_tensor *relu_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_relu(t, x) : NULL;
}

static mu_tensor *leaky_relu_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_leaky_relu(t, x, i == 3 ? -0.5f : 0.1f) : NULL;
}

static mu_tensor *sigmoid_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_sigmoid(t, x) : NULL;
}

static mu_tensor *tanh_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_tanh(t, x) : NULL;
}

static mu_tensor *gelu_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_gelu(t, x) : NULL;
}

static mu_tensor *softplus_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_softplus(t, i == 3 ? mu_scale(t, x, 30.0f) : x) : NULL; /* also beyond the threshold */
}

static mu_tensor *scale_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_scale(t, x, -1.5f) : NULL;
}

const mui_op mui_op_relu = {"relu", unary_backward, relu_sample, MUI_READS_OUT, false};
const mui_op mui_op_leaky_relu = {"leaky_relu", unary_backward, leaky_relu_sample, MUI_READS_IN(0), false};
const mui_op mui_op_sigmoid = {"sigmoid", unary_backward, sigmoid_sample, MUI_READS_OUT, false};
const mui_op mui_op_tanh = {"tanh", unary_backward, tanh_sample, MUI_READS_OUT, false};
const mui_op mui_op_gelu = {"gelu", unary_backward, gelu_sample, MUI_READS_IN(0), false};
const mui_op mui_op_softplus = {"softplus", unary_backward, softplus_sample, MUI_READS_IN(0), false};
const mui_op mui_op_scale = {"scale", unary_backward, scale_sample, 0, false};

/* -- dropout ---------------------------------------------------------------------------------------------------- */

typedef struct dropout_attr {
    uint64_t key, stream;
    float p;
} dropout_attr;

static mu_status drop(mui_engine *e, mu_dtype dtype, int64_t n, const void *x, void *y, const dropout_attr *a)
{
    if (dtype == MU_BF16) {
        return mui_bf16_dropout(e, n, x, y, a->p, a->key, a->stream);
    }
    mui_dropout(e, n, x, y, a->p, a->key, a->stream);
    return MU_OK;
}

static mu_status dropout_backward(mui_backward *b, mui_node *n)
{
    const dropout_attr *a = n->attr;
    const mui_layout *layout = n->out->layout;
    const void *dy = NULL;
    void *dx = mui_grad_remake(b, n, layout, &dy);
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    mu_status s = drop(mui_backward_engine(b), n->out->dtype, mui_floats_in_layout(n->out->dims, layout), dy, dx, a);
    return s == MU_OK ? mui_grad_pass(b, n, 0) : s;
}

mu_tensor *mu_dropout(mu_tape *t, mu_tensor *x, float p)
{
    if (mui_either_bad(t, "dropout", &x, 1)) {
        return NULL;
    }
    if (!(p >= 0.0f && p < 1.0f)) {
        return mui_op_fail(t, MU_ERR_ARG, "dropout", "p is %g, and must be in [0, 1)", (double)p);
    }
    mu_tensor *in = mui_in_layout(t, x, x->layout);
    mu_tensor *y = in != NULL ? mui_tensor_new(t, x->dims, x->dtype, in->layout) : NULL;
    if (y == NULL) {
        return NULL;
    }
    dropout_attr a = {.p = p};
    mui_tape_draw(t, &a.key, &a.stream);
    if (drop(mui_tape_engine(t), x->dtype, mui_floats_in_layout(x->dims, in->layout), in->data, y->data, &a) != MU_OK) {
        return NULL;
    }
    return mui_record(t, &mui_op_dropout, y, &in, 1, &a, sizeof(a), NULL, 0);
}

static mu_tensor *dropout_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_dropout(t, x, i == 0 ? 0.0f : 0.4f) : NULL;
}

const mui_op mui_op_dropout = {"dropout", dropout_backward, dropout_sample, 0, false};

/* -- detach ----------------------------------------------------------------------------------------------------- */

mu_tensor *mu_detach(mu_tape *t, mu_tensor *x)
{
    if (mui_inputs_bad(t, "detach", &x, 1)) {
        return NULL;
    }
    mu_tensor *y = mui_tensor_view(t, x, x->dims, x->stride, 0);
    return mui_record(t, &mui_op_detach, y, &x, 1, NULL, 0, NULL, 0);
}

static mu_tensor *detach_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = any_input(t, i, seed);
    return x != NULL ? mu_detach(t, x) : NULL;
}

/* No backward: the table's one row whose result never has a gradient. */
const mui_op mui_op_detach = {"detach", NULL, detach_sample, 0, false};
