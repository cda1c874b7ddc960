/* Views and joins: reshape, flatten, permute, narrow, concat. */
#include "tape/op_rows.h"

#include <string.h>

/* -- reshape ---------------------------------------------------------------------------------------------------- */

static mu_status reshape_backward(mui_backward *b, mui_node *n)
{
    return mui_grad_pass(b, n, 0);
}

mu_tensor *mu_reshape(mu_tape *t, mu_tensor *x, mu_dims dims)
{
    if (mui_inputs_bad(t, "reshape", &x, 1)) {
        return NULL;
    }
    char from[MUI_DIMS_TEXT], to[MUI_DIMS_TEXT];
    int64_t have = mui_dims_elements(x->dims), known = 1;
    int open = -1;
    bool ok = dims.ndim >= 0 && dims.ndim <= MU_MAX_DIMS;
    for (int i = 0; ok && i < dims.ndim; i++) {
        if (dims.dim[i] == -1 && open < 0) {
            open = i;
        } else {
            ok = dims.dim[i] >= 0 && !__builtin_mul_overflow(known, dims.dim[i], &known);
        }
    }
    mu_dims asked = dims;
    if (ok && open >= 0) {
        ok = known > 0 && have % known == 0;
        dims.dim[open] = ok ? have / known : 0;
    } else {
        ok = ok && known == have;
    }
    if (!ok) {
        asked.ndim = asked.ndim < 0 ? 0 : asked.ndim > MU_MAX_DIMS ? MU_MAX_DIMS : asked.ndim;
        return mui_op_fail(t, MU_ERR_SHAPE, "reshape", "%s of %lld elements cannot become %s",
                           mui_dims_text(x->dims, from), (long long)have, mui_dims_text(asked, to));
    }
    mu_tensor *in = mui_in_layout(t, x, NULL);
    mu_tensor *y = in != NULL ? mui_tensor_view(t, in, dims, NULL, 0) : NULL;
    return mui_record(t, &mui_op_reshape, y, &in, 1, NULL, 0, NULL, 0);
}

mu_tensor *mu_flatten(mu_tape *t, mu_tensor *x, int start)
{
    if (mui_inputs_bad(t, "flatten", &x, 1)) {
        return NULL;
    }
    int ndim = x->dims.ndim, first = start < 0 ? start + ndim : start;
    if (ndim == 0 && (start == 0 || start == -1)) {
        return mu_reshape(t, x, MU_DIMS(1));
    }
    if (first < 0 || first >= ndim) {
        return mui_op_fail(t, MU_ERR_ARG, "flatten", "there is no dimension %d among %d", start, ndim);
    }
    mu_dims dims = x->dims;
    for (int i = first + 1; i < ndim; i++) {
        dims.dim[first] *= dims.dim[i];
    }
    dims.ndim = first + 1;
    return mu_reshape(t, x, dims);
}

static mu_tensor *reshape_sample(mu_tape *t, int i, uint64_t seed)
{
    switch (i) {
    case 0: return mu_reshape(t, mui_sample_leaf(t, MU_DIMS(3, 4), seed), MU_DIMS(2, -1));
    case 1: return mu_reshape(t, mui_sample_leaf(t, MU_SCALAR, seed), MU_DIMS(1, 1));
    case 2: return mu_reshape(t, mui_sample_leaf(t, MU_DIMS(0, 4), seed), MU_DIMS(4, 0, 2));
    case 3: /* of a transposed tensor: a copy */
        return mu_reshape(t, mu_permute(t, mui_sample_leaf(t, MU_DIMS(3, 4), seed), MU_DIMS(1, 0)), MU_DIMS(12));
    case 4: return mu_flatten(t, mui_sample_leaf(t, MU_DIMS(2, 3, 1, 2), seed), 1);
    case 5: return mu_flatten(t, mui_sample_leaf(t, MU_DIMS(2, 3, 2), seed), -2);
    default: return NULL;
    }
}

const mui_op mui_op_reshape = {"reshape", reshape_backward, reshape_sample, 0, false};

/* Any type goes; bfloat16 of a tape's own is cast to float32, in place. */
static bool any_bad(mu_tape *t, const char *op, mu_tensor **in, int count)
{
    if (mui_inputs_bad(t, op, in, count)) {
        return true;
    }
    for (int i = 0; i < count; i++) {
        if (mui_is_bf16(in[i]) && in[i]->tape != NULL) {
            in[i] = mui_cast(t, in[i], MU_F32);
        }
        if (in[i] == NULL) {
            return true;
        }
    }
    return false;
}

/* -- permute ---------------------------------------------------------------------------------------------------- */

static mu_status permute_backward(mui_backward *b, mui_node *n)
{
    const mu_dims *order = n->attr;
    const float *dy = mui_wants_grad(b, n, 0) ? mui_grad_in(b, n, NULL) : NULL;
    float *dx = dy != NULL ? mui_grad_put(b, n, 0, NULL) : NULL;
    if (dx == NULL) {
        return mui_wants_grad(b, n, 0) ? mui_backward_failed(n) : MU_OK;
    }
    int64_t own[MU_MAX_DIMS], from[MU_MAX_DIMS], to[MU_MAX_DIMS];
    mui_strides_plain(n->in[0]->dims, own);
    mui_strides_plain(n->out->dims, from);
    for (int i = 0; i < order->ndim; i++) {
        to[i] = own[order->dim[i]];
    }
    mui_copy_strided(mui_backward_engine(b), n->out->dims, sizeof(float), dy, from, dx, to);
    return MU_OK;
}

/* Views read strides, so a blocked tensor is made plain first; any strides will do. */
static mu_tensor *strided(mu_tape *t, mu_tensor *x)
{
    return x->layout != NULL ? mui_in_layout(t, x, NULL) : x;
}

mu_tensor *mu_permute(mu_tape *t, mu_tensor *x, mu_dims order)
{
    if (any_bad(t, "permute", &x, 1)) {
        return NULL;
    }
    char xt[MUI_DIMS_TEXT], ot[MUI_DIMS_TEXT];
    bool ok = order.ndim == x->dims.ndim;
    unsigned seen = 0;
    for (int i = 0; ok && i < order.ndim; i++) {
        ok = order.dim[i] >= 0 && order.dim[i] < order.ndim && (seen >> order.dim[i] & 1u) == 0;
        seen |= ok ? 1u << order.dim[i] : 0;
    }
    if (!ok) {
        order.ndim = order.ndim < 0 ? 0 : order.ndim > MU_MAX_DIMS ? MU_MAX_DIMS : order.ndim;
        return mui_op_fail(t, MU_ERR_SHAPE, "permute", "%s is not an order of the dimensions of %s",
                           mui_dims_text(order, ot), mui_dims_text(x->dims, xt));
    }
    mu_tensor *in = strided(t, x);
    if (in == NULL) {
        return NULL;
    }
    mu_dims dims = {.ndim = order.ndim};
    int64_t stride[MU_MAX_DIMS] = {0};
    for (int i = 0; i < order.ndim; i++) {
        dims.dim[i] = in->dims.dim[order.dim[i]];
        stride[i] = in->stride[order.dim[i]];
    }
    mu_tensor *y = mui_tensor_view(t, in, dims, stride, 0);
    return mui_record(t, &mui_op_permute, y, &in, 1, &order, sizeof(order), NULL, 0);
}

static mu_tensor *permute_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = NULL;
    switch (i) {
    case 0: return mu_permute(t, mui_sample_leaf(t, MU_DIMS(2, 3, 4), seed), MU_DIMS(2, 0, 1));
    case 1: return mu_permute(t, mui_sample_leaf(t, MU_SCALAR, seed), MU_SCALAR);
    case 2: return mu_permute(t, mui_sample_leaf(t, MU_DIMS(0, 3), seed), MU_DIMS(1, 0));
    case 3: /* of a view of a view */
        x = mu_permute(t, mui_sample_leaf(t, MU_DIMS(4, 3), seed), MU_DIMS(1, 0));
        return mu_permute(t, mu_narrow(t, x, 1, 1, 2), MU_DIMS(1, 0));
    default: return NULL;
    }
}

const mui_op mui_op_permute = {"permute", permute_backward, permute_sample, 0, false};

/* -- narrow ----------------------------------------------------------------------------------------------------- */

typedef struct narrow_attr {
    int dim;
    int64_t start;
} narrow_attr;

static mu_status narrow_backward(mui_backward *b, mui_node *n)
{
    const narrow_attr *a = n->attr;
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    bool add = false;
    const float *dy = mui_grad_in(b, n, NULL);
    float *dx = dy != NULL ? mui_grad_out(b, n, 0, NULL, &add) : NULL;
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    if (!add) {
        mui_fill(dx, mui_dims_elements(n->in[0]->dims), 0.0f);
    }
    if (mui_dims_elements(n->out->dims) == 0) {
        return MU_OK;
    }
    int64_t from[MU_MAX_DIMS], to[MU_MAX_DIMS];
    mui_strides_plain(n->out->dims, from);
    mui_strides_plain(n->in[0]->dims, to);
    mui_add_strided(mui_backward_engine(b), n->out->dims, dy, from, dx + a->start * to[a->dim], to);
    return MU_OK;
}

mu_tensor *mu_narrow(mu_tape *t, mu_tensor *x, int dim, int64_t start, int64_t length)
{
    if (any_bad(t, "narrow", &x, 1)) {
        return NULL;
    }
    char xt[MUI_DIMS_TEXT];
    int d = dim < 0 ? dim + x->dims.ndim : dim;
    if (d < 0 || d >= x->dims.ndim || start < 0 || length < 0 || start > x->dims.dim[d] ||
        length > x->dims.dim[d] - start) {
        return mui_op_fail(t, MU_ERR_SHAPE, "narrow", "%s has no %lld elements from %lld on along dimension %d",
                           mui_dims_text(x->dims, xt), (long long)length, (long long)start, dim);
    }
    mu_tensor *in = strided(t, x);
    if (in == NULL) {
        return NULL;
    }
    mu_dims dims = in->dims;
    dims.dim[d] = length;
    narrow_attr a = {d, start};
    int64_t offset = mui_dims_elements(dims) > 0 ? start * in->stride[d] : 0;
    mu_tensor *y = mui_tensor_view(t, in, dims, in->stride, offset);
    return mui_record(t, &mui_op_narrow, y, &in, 1, &a, sizeof(a), NULL, 0);
}

static mu_tensor *narrow_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = NULL;
    switch (i) {
    case 0: return mu_narrow(t, mui_sample_leaf(t, MU_DIMS(3, 5), seed), 1, 2, 2);
    case 1: return mu_narrow(t, mui_sample_leaf(t, MU_DIMS(1), seed), 0, 0, 1);
    case 2: return mu_narrow(t, mui_sample_leaf(t, MU_DIMS(3, 2), seed), -2, 1, 0);
    case 3: return mu_narrow(t, mu_permute(t, mui_sample_leaf(t, MU_DIMS(3, 4), seed), MU_DIMS(1, 0)), 0, 1, 3);
    case 4: /* two overlapping parts of one tensor */
        x = mui_sample_leaf(t, MU_DIMS(4, 3), seed);
        return mu_add(t, mu_narrow(t, x, 0, 0, 3), mu_narrow(t, x, 0, 1, 3));
    default: return NULL;
    }
}

const mui_op mui_op_narrow = {"narrow", narrow_backward, narrow_sample, 0, false};

/* -- concat ----------------------------------------------------------------------------------------------------- */

static mu_status concat_backward(mui_backward *b, mui_node *n)
{
    int dim = *(const int *)n->attr;
    const float *dy = mui_grad_in(b, n, NULL);
    if (dy == NULL) {
        return mui_backward_failed(n);
    }
    int64_t from[MU_MAX_DIMS], to[MU_MAX_DIMS], at = 0;
    mui_strides_plain(n->out->dims, from);
    for (int i = 0; i < n->in_count; i++) {
        mu_dims dims = n->in[i]->dims;
        if (mui_wants_grad(b, n, i)) {
            float *d = mui_grad_put(b, n, i, NULL);
            if (d == NULL) {
                return mui_backward_failed(n);
            }
            mui_strides_plain(dims, to);
            if (mui_dims_elements(dims) > 0) {
                mui_copy_strided(mui_backward_engine(b), dims, sizeof(float), dy + at * from[dim], from, d, to);
            }
        }
        at += dims.dim[dim];
    }
    return MU_OK;
}

static bool concat_dims(mu_tape *t, mu_tensor *const *parts, int count, int dim, mu_dims *out)
{
    char at[MUI_DIMS_TEXT], bt[MUI_DIMS_TEXT];
    *out = parts[0]->dims;
    for (int i = 1; i < count; i++) {
        mu_dims d = parts[i]->dims;
        bool fits = d.ndim == out->ndim;
        if (fits) {
            d.dim[dim] = out->dim[dim];
            fits = mui_dims_equal(d, *out);
        }
        if (!fits || parts[i]->dtype != parts[0]->dtype) {
            mui_op_fail(t, MU_ERR_SHAPE, "concat", "part %d, %s, does not fit the first, %s: equal but for dimension %d",
                        i, mui_dims_text(parts[i]->dims, at), mui_dims_text(parts[0]->dims, bt), dim);
            return false;
        }
        out->dim[dim] += parts[i]->dims.dim[dim];
    }
    return true;
}

mu_tensor *mu_concat(mu_tape *t, mu_tensor *const *parts, int count, int dim)
{
    if (t == NULL || mui_failed(mui_tape_context(t))) {
        return NULL;
    }
    if (count < 1 || parts == NULL) {
        return mui_op_fail(t, MU_ERR_ARG, "concat", "there is nothing to join");
    }
    mu_tensor **in = mui_arena_alloc(mui_tape_arena(t), (size_t)count * sizeof(*in));
    if (in == NULL) {
        return NULL;
    }
    memcpy(in, parts, (size_t)count * sizeof(*in));
    if (any_bad(t, "concat", in, count)) {
        return NULL;
    }
    parts = in;
    int d = dim < 0 ? dim + parts[0]->dims.ndim : dim;
    mu_dims out;
    if (d < 0 || d >= parts[0]->dims.ndim) {
        return mui_op_fail(t, MU_ERR_ARG, "concat", "there is no dimension %d among %d", dim, parts[0]->dims.ndim);
    }
    if (!concat_dims(t, parts, count, d, &out)) {
        return NULL;
    }
    mu_tensor *y = mui_tensor_new(t, out, parts[0]->dtype, NULL);
    int64_t at = 0;
    for (int i = 0; i < count && y != NULL; i++) {
        in[i] = strided(t, parts[i]);
        if (in[i] == NULL) {
            return NULL;
        }
        size_t bytes = mu_dtype_bytes(y->dtype);
        if (mui_dims_elements(in[i]->dims) > 0) {
            mui_copy_strided(mui_tape_engine(t), in[i]->dims, bytes, in[i]->data, in[i]->stride,
                             y->data + at * y->stride[d] * (int64_t)bytes, y->stride);
        }
        at += in[i]->dims.dim[d];
    }
    return mui_record(t, &mui_op_concat, y, in, count, &d, sizeof(d), NULL, 0);
}

static mu_tensor *concat_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *p[3];
    switch (i) {
    case 0:
        p[0] = mui_sample_leaf(t, MU_DIMS(2, 3), seed);
        p[1] = mui_sample_leaf(t, MU_DIMS(2, 1), seed + 1);
        p[2] = mui_sample_leaf(t, MU_DIMS(2, 2), seed + 2);
        return mu_concat(t, p, 3, -1);
    case 1: p[0] = mui_sample_leaf(t, MU_DIMS(1), seed); return mu_concat(t, p, 1, 0);
    case 2:
        p[0] = mui_sample_leaf(t, MU_DIMS(0, 3), seed);
        p[1] = mu_permute(t, mui_sample_leaf(t, MU_DIMS(3, 2), seed + 1), MU_DIMS(1, 0));
        return mu_concat(t, p, 2, 0);
    case 3: /* one tensor twice */
        p[0] = p[1] = mui_sample_leaf(t, MU_DIMS(2, 2, 3), seed);
        return mu_concat(t, p, 2, 1);
    default: return NULL;
    }
}

const mui_op mui_op_concat = {"concat", concat_backward, concat_sample, 0, false};
