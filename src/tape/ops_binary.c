/* Element by element with two operands. */
#include "tape/op_rows.h"

#include <string.h>

/* Operands of equal shape run flat in whatever layout they share; others broadcast on plain memory. */
typedef struct binary_attr {
    bool flat;
} binary_attr;

static bool broadcast(mu_dims a, mu_dims b, mu_dims *out)
{
    memset(out, 0, sizeof(*out));
    out->ndim = a.ndim > b.ndim ? a.ndim : b.ndim;
    for (int i = 1; i <= out->ndim; i++) {
        int64_t da = i <= a.ndim ? a.dim[a.ndim - i] : 1, db = i <= b.ndim ? b.dim[b.ndim - i] : 1;
        if (da != db && da != 1 && db != 1) {
            return false;
        }
        out->dim[out->ndim - i] = da == 1 ? db : da;
    }
    return true;
}

/* Strides of plain x read as if it had the larger shape. */
static void broadcast_strides(const mu_tensor *x, mu_dims out, int64_t *stride)
{
    int64_t own[MU_MAX_DIMS];
    mui_strides_plain(x->dims, own);
    for (int i = 0; i < out.ndim; i++) {
        int k = i - (out.ndim - x->dims.ndim);
        stride[i] = k >= 0 && x->dims.dim[k] != 1 ? own[k] : 0;
    }
}

/* The layout in which both are read, in bfloat16 when either type will do; false when they cannot be combined at all. */
static bool prepare(mu_tape *t, const char *name, bool either, mu_tensor **in, mu_dims *out, bool *flat)
{
    char at[MUI_DIMS_TEXT], bt[MUI_DIMS_TEXT];
    if (mui_either_bad(t, name, in, 2)) {
        return false;
    }
    *flat = mui_dims_equal(in[0]->dims, in[1]->dims);
    if ((!either || !*flat) && mui_floats_bad(t, name, in, 2)) {
        return false;
    }
    *out = in[0]->dims;
    if (!*flat && !broadcast(in[0]->dims, in[1]->dims, out)) {
        mui_op_fail(t, MU_ERR_SHAPE, name, "%s and %s do not broadcast", mui_dims_text(in[0]->dims, at),
                    mui_dims_text(in[1]->dims, bt));
        return false;
    }
    const mui_layout *layout = !*flat ? NULL : in[0]->layout != NULL ? in[0]->layout : in[1]->layout;
    in[0] = mui_in_layout(t, in[0], layout);
    in[1] = mui_in_layout(t, in[1], layout);
    return in[0] != NULL && in[1] != NULL;
}

static void apply(mui_engine *e, mui_binary op, mu_dims out, bool flat, const mu_tensor *a, const float *av,
                  const mu_tensor *b, const float *bv, float *y)
{
    int64_t sa[MU_MAX_DIMS] = {1}, sb[MU_MAX_DIMS] = {1};
    if (flat) {
        mui_binary_forward(e, op, MU_DIMS(mui_floats_in_layout(out, a->layout)), av, sa, bv, sb, y);
    } else {
        broadcast_strides(a, out, sa);
        broadcast_strides(b, out, sb);
        mui_binary_forward(e, op, out, av, sa, bv, sb, y);
    }
}

static mu_tensor *binary(mu_tape *t, const mui_op *op, mui_binary kind, mu_tensor *a, mu_tensor *b)
{
    mu_tensor *in[2] = {a, b};
    mu_dims out;
    binary_attr at = {false};
    if (!prepare(t, op->name, kind == MUI_ADD, in, &out, &at.flat)) {
        return NULL;
    }
    mu_tensor *y = mui_tensor_new(t, out, in[0]->dtype, in[0]->layout);
    if (y == NULL) {
        return NULL;
    }
    if (mui_is_bf16(y)) { /* an addition of equal shapes */
        mui_bf16_add(mui_tape_engine(t), mui_floats_in_layout(out, y->layout), mui_cbf16(in[0]), mui_cbf16(in[1]), mui_bf16(y));
    } else {
        apply(mui_tape_engine(t), kind, out, at.flat, in[0], mui_cfloats(in[0]), in[1], mui_cfloats(in[1]),
              mui_floats(y));
    }
    uint32_t reads = kind != MUI_MUL ? 0
                                     : (mui_tensor_wants_grad(b) ? MUI_READS_IN(0) : 0) |
                                           (mui_tensor_wants_grad(a) ? MUI_READS_IN(1) : 0);
    return mui_record_reads(t, op, y, in, 2, &at, sizeof(at), NULL, 0, reads);
}

/* Gradient of input i from g, which has the output's shape and is plain: summed over what was broadcast. */
static mu_status reduce_into(mui_backward *b, mui_node *n, int i, const float *g)
{
    bool add = false;
    float *d = mui_grad_out(b, n, i, NULL, &add);
    if (d == NULL) {
        return mui_backward_failed(n);
    }
    if (!add) {
        mui_fill(d, mui_dims_elements(n->in[i]->dims), 0.0f);
    }
    int64_t from[MU_MAX_DIMS], to[MU_MAX_DIMS];
    mui_strides_plain(n->out->dims, from);
    broadcast_strides(n->in[i], n->out->dims, to);
    mui_add_strided(mui_backward_engine(b), n->out->dims, g, from, d, to);
    return MU_OK;
}

static mu_status pass_or_reduce(mui_backward *b, mui_node *n, int i)
{
    if (!mui_wants_grad(b, n, i)) {
        return MU_OK;
    }
    if (mui_dims_equal(n->in[i]->dims, n->out->dims)) {
        return mui_grad_pass(b, n, i);
    }
    const float *dy = mui_grad_in(b, n, NULL);
    return dy != NULL ? reduce_into(b, n, i, dy) : mui_backward_failed(n);
}

static mu_status add_backward(mui_backward *b, mui_node *n)
{
    mu_status s = pass_or_reduce(b, n, 0);
    return s == MU_OK ? pass_or_reduce(b, n, 1) : s;
}

static mu_status sub_backward(mui_backward *b, mui_node *n)
{
    mu_status s = pass_or_reduce(b, n, 0);
    if (s != MU_OK || !mui_wants_grad(b, n, 1)) {
        return s;
    }
    const mui_layout *layout = n->out->layout;
    const void *dy = NULL;
    void *minus = mui_grad_remake(b, n, layout, &dy);
    if (minus == NULL) {
        return mui_backward_failed(n);
    }
    mui_unary_forward(mui_backward_engine(b), MUI_SCALE, mui_floats_in_layout(n->out->dims, layout), dy, minus, -1.0f);
    return pass_or_reduce(b, n, 1);
}

static mu_status mul_backward(mui_backward *b, mui_node *n)
{
    const binary_attr *a = n->attr;
    const mui_layout *layout = n->out->layout;
    const float *dy = mui_grad_in(b, n, layout);
    if (dy == NULL) {
        return mui_backward_failed(n);
    }
    for (int i = 0; i < 2; i++) {
        const mu_tensor *other = n->in[1 - i];
        if (!mui_wants_grad(b, n, i)) {
            continue;
        }
        bool whole = mui_dims_equal(n->in[i]->dims, n->out->dims);
        float *d = whole ? mui_grad_put(b, n, i, layout)
                         : mui_grad_scratch(b, (size_t)mui_dims_elements(n->out->dims));
        if (d == NULL) {
            return mui_backward_failed(n);
        }
        apply(mui_backward_engine(b), MUI_MUL, n->out->dims, a->flat, n->out, dy, other, mui_cfloats(other), d);
        mu_status s = whole ? MU_OK : reduce_into(b, n, i, d);
        if (s != MU_OK) {
            return s;
        }
    }
    return MU_OK;
}

mu_tensor *mu_add(mu_tape *t, mu_tensor *a, mu_tensor *b)
{
    return binary(t, &mui_op_add, MUI_ADD, a, b);
}

mu_tensor *mu_sub(mu_tape *t, mu_tensor *a, mu_tensor *b)
{
    return binary(t, &mui_op_sub, MUI_SUB, a, b);
}

mu_tensor *mu_mul(mu_tape *t, mu_tensor *a, mu_tensor *b)
{
    return binary(t, &mui_op_mul, MUI_MUL, a, b);
}

/* -- add and relu in one ---------------------------------------------------------------------------------------- */

static mu_status add_relu_backward(mui_backward *b, mui_node *n)
{
    const mui_layout *layout = n->out->layout;
    const void *dy = NULL;
    void *d = mui_grad_remake(b, n, layout, &dy);
    if (d == NULL) {
        return mui_backward_failed(n);
    }
    int64_t elements = mui_floats_in_layout(n->out->dims, layout);
    if (mui_is_bf16(n->out)) {
        mui_bf16_relu_backward(mui_backward_engine(b), elements, mui_cbf16(n->out), dy, d);
    } else {
        mui_unary_backward(mui_backward_engine(b), MUI_RELU, elements, NULL, mui_cfloats(n->out), dy, d, 0.0f, false);
    }
    mu_status s = mui_grad_pass(b, n, 0);
    return s == MU_OK ? mui_grad_pass(b, n, 1) : s;
}

mu_tensor *mu_add_relu(mu_tape *t, mu_tensor *a, mu_tensor *b)
{
    mu_tensor *in[2] = {a, b};
    mu_dims out;
    bool flat = false;
    char at[MUI_DIMS_TEXT], bt[MUI_DIMS_TEXT];
    if (!prepare(t, "add_relu", true, in, &out, &flat)) {
        return NULL;
    }
    if (!flat) {
        return mui_op_fail(t, MU_ERR_SHAPE, "add_relu", "%s and %s are not equal", mui_dims_text(a->dims, at),
                           mui_dims_text(b->dims, bt));
    }
    mu_tensor *y = mui_tensor_new(t, out, in[0]->dtype, in[0]->layout);
    if (y == NULL) {
        return NULL;
    }
    int64_t elements = mui_floats_in_layout(out, y->layout);
    if (mui_is_bf16(y)) {
        mui_bf16_add_relu(mui_tape_engine(t), elements, mui_cbf16(in[0]), mui_cbf16(in[1]), mui_bf16(y));
    } else {
        mui_add_relu_forward(mui_tape_engine(t), elements, mui_cfloats(in[0]), mui_cfloats(in[1]), mui_floats(y));
    }
    return mui_record(t, &mui_op_add_relu, y, in, 2, NULL, 0, NULL, 0);
}

/* -- samples ---------------------------------------------------------------------------------------------------- */

/* Pairs of operands: equal, broadcast on either side, scalar, empty, non-contiguous, and the same tensor twice. */
static bool operands(mu_tape *t, int i, uint64_t seed, mu_tensor **a, mu_tensor **b)
{
    switch (i) {
    case 0: *a = mui_sample_leaf(t, MU_DIMS(3, 4), seed), *b = mui_sample_leaf(t, MU_DIMS(3, 4), seed + 1); return true;
    case 1: *a = mui_sample_leaf(t, MU_SCALAR, seed), *b = mui_sample_leaf(t, MU_SCALAR, seed + 1); return true;
    case 2: *a = mui_sample_leaf(t, MU_DIMS(0, 2), seed), *b = mui_sample_leaf(t, MU_DIMS(0, 2), seed + 1); return true;
    case 3:
        *a = mu_permute(t, mui_sample_leaf(t, MU_DIMS(4, 3), seed), MU_DIMS(1, 0));
        *b = mu_narrow(t, mui_sample_leaf(t, MU_DIMS(3, 6), seed + 1), 1, 2, 4);
        return true;
    case 4: *a = *b = mui_sample_leaf(t, MU_DIMS(2, 3), seed); return true;
    case 5: *a = mui_sample_leaf(t, MU_DIMS(3, 4), seed), *b = mui_sample_leaf(t, MU_DIMS(4), seed + 1); return true;
    case 6:
        *a = mui_sample_leaf(t, MU_DIMS(2, 1, 3), seed);
        *b = mu_permute(t, mui_sample_leaf(t, MU_DIMS(1, 5), seed + 1), MU_DIMS(1, 0));
        return true;
    case 7: *a = mui_sample_leaf(t, MU_SCALAR, seed), *b = mui_sample_leaf(t, MU_DIMS(2, 3), seed + 1); return true;
    case 8: *a = mui_sample_leaf(t, MU_DIMS(0, 3), seed), *b = mui_sample_leaf(t, MU_DIMS(1, 3), seed + 1); return true;
    default: return false;
    }
}

static mu_tensor *add_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *a = NULL, *b = NULL;
    return operands(t, i, seed, &a, &b) ? mu_add(t, a, b) : NULL;
}

static mu_tensor *sub_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *a = NULL, *b = NULL;
    return operands(t, i, seed, &a, &b) ? mu_sub(t, a, b) : NULL;
}

static mu_tensor *mul_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *a = NULL, *b = NULL;
    return operands(t, i, seed, &a, &b) ? mu_mul(t, a, b) : NULL;
}

static mu_tensor *add_relu_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *a = NULL, *b = NULL;
    if (i >= 5 || !operands(t, i, seed, &a, &b)) {
        return NULL;
    }
    /* Far from the kink: the first operand decides the sign. */
    return mu_add_relu(t, a, a != b ? mu_scale(t, b, 0.02f) : b);
}

const mui_op mui_op_add = {"add", add_backward, add_sample, 0, false};
const mui_op mui_op_sub = {"sub", sub_backward, sub_sample, 0, false};
const mui_op mui_op_mul = {"mul", mul_backward, mul_sample, MUI_READS_IN(0) | MUI_READS_IN(1), false};
const mui_op mui_op_add_relu = {"add_relu", add_relu_backward, add_relu_sample, MUI_READS_OUT, false};
