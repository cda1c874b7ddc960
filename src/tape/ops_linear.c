/* Linear and matrix product. */
#include "tape/op_rows.h"

/* -- linear ----------------------------------------------------------------------------------------------------- */

static int64_t last_dim(const mu_tensor *x)
{
    return x->dims.dim[x->dims.ndim - 1];
}

static int64_t rows_of(const mu_tensor *x)
{
    mu_dims d = x->dims;
    d.ndim--;
    return mui_dims_elements(d);
}

/* db (+)= column sums of dy (rows, cols). */
static void sum_rows(mui_engine *e, int64_t rows, int64_t cols, const float *dy, float *db, bool accumulate)
{
    if (!accumulate) {
        mui_fill(db, cols, 0.0f);
    }
    int64_t from[2] = {cols, 1}, to[2] = {0, 1};
    mui_add_strided(e, MU_DIMS(rows, cols), dy, from, db, to);
}

static mu_status linear_backward_bf16(mui_backward *b, mui_node *n, const uint16_t *dy)
{
    mu_tensor *x = n->in[0], *w = n->in[1];
    int64_t rows = rows_of(x), in = w->dims.dim[1], out = w->dims.dim[0];
    mui_engine *e = mui_backward_engine(b);
    mu_status s = MU_OK;
    bool add = false;
    if (mui_wants_grad(b, n, 1)) {
        float *dw = mui_grad_out(b, n, 1, NULL, &add);
        s = dw == NULL ? mui_backward_failed(n)
                       : mui_bf16_gemm_f32(e, true, false, out, in, rows, dy, mui_cbf16(x), dw, add);
    }
    if (s == MU_OK && n->in_count > 2 && mui_wants_grad(b, n, 2)) {
        float *wide = mui_grad_scratch(b, (size_t)(rows * out)), *db = mui_grad_out(b, n, 2, NULL, &add);
        if (db == NULL || wide == NULL) {
            return mui_backward_failed(n);
        }
        mui_bf16_cast(e, rows * out, dy, wide, false);
        sum_rows(e, rows, out, wide, db, add);
    }
    if (s == MU_OK && mui_wants_grad(b, n, 0)) {
        uint16_t *dx = mui_grad_put(b, n, 0, NULL);
        s = dx == NULL ? mui_backward_failed(n)
                       : mui_bf16_linear(e, false, rows, in, out, dy, mui_cfloats(w), NULL, dx);
    }
    return s;
}

static mu_status linear_backward(mui_backward *b, mui_node *n)
{
    mu_tensor *x = n->in[0], *w = n->in[1];
    int64_t rows = rows_of(x), in = w->dims.dim[1], out = w->dims.dim[0];
    mui_engine *e = mui_backward_engine(b);
    const float *dy = mui_grad_in(b, n, NULL);
    mu_status s = dy != NULL ? MU_OK : mui_backward_failed(n);
    bool add = false;
    if (s == MU_OK && mui_is_bf16(n->out)) {
        return linear_backward_bf16(b, n, (const uint16_t *)(const void *)dy);
    }
    if (s == MU_OK && mui_wants_grad(b, n, 1)) {
        float *dw = mui_grad_out(b, n, 1, NULL, &add);
        s = dw == NULL ? mui_backward_failed(n)
                       : mui_gemm(e, true, false, out, in, rows, 1.0f, dy, out, mui_cfloats(x), in,
                                  add ? 1.0f : 0.0f, dw, in);
    }
    if (s == MU_OK && n->in_count > 2 && mui_wants_grad(b, n, 2)) {
        float *db = mui_grad_out(b, n, 2, NULL, &add);
        if (db == NULL) {
            return mui_backward_failed(n);
        }
        sum_rows(e, rows, out, dy, db, add);
    }
    if (s == MU_OK && mui_wants_grad(b, n, 0)) {
        float *dx = mui_grad_out(b, n, 0, NULL, &add);
        s = dx == NULL ? mui_backward_failed(n)
                       : mui_gemm(e, false, false, rows, in, out, 1.0f, dy, out, mui_cfloats(w), in, add ? 1.0f : 0.0f,
                                  dx, in);
    }
    return s;
}

mu_tensor *mu_linear_op(mu_tape *t, mu_tensor *x, mu_tensor *weight, mu_tensor *bias)
{
    mu_tensor *in[3] = {x, weight, bias};
    int count = bias != NULL ? 3 : 2;
    if (mui_matrix_bad(t, "linear", in, count, 1)) {
        return NULL;
    }
    bool bf16 = mui_is_bf16(in[0]);
    char xt[MUI_DIMS_TEXT], wt[MUI_DIMS_TEXT], bt[MUI_DIMS_TEXT];
    if (x->dims.ndim < 1 || weight->dims.ndim != 2 || last_dim(x) != weight->dims.dim[1]) {
        return mui_op_fail(t, MU_ERR_SHAPE, "linear",
                           "input %s and weight %s do not fit: (..., in) and (out, in) were expected",
                           mui_dims_text(x->dims, xt), mui_dims_text(weight->dims, wt));
    }
    int64_t rows = rows_of(x), k = weight->dims.dim[1], out = weight->dims.dim[0];
    if (bias != NULL && (bias->dims.ndim != 1 || bias->dims.dim[0] != out)) {
        return mui_op_fail(t, MU_ERR_SHAPE, "linear", "bias %s does not fit weight %s: one value per output",
                           mui_dims_text(bias->dims, bt), mui_dims_text(weight->dims, wt));
    }
    mu_dims dims = x->dims;
    dims.dim[dims.ndim - 1] = out;
    for (int i = 0; i < count; i++) {
        in[i] = mui_in_layout(t, in[i], NULL);
        if (in[i] == NULL) {
            return NULL;
        }
    }
    mu_tensor *y = mui_tensor_new(t, dims, in[0]->dtype, NULL);
    if (y == NULL) {
        return NULL;
    }
    mui_engine *e = mui_tape_engine(t);
    uint32_t reads = (mui_tensor_wants_grad(weight) ? MUI_READS_IN(0) : 0) |
                     (mui_tensor_wants_grad(x) ? MUI_READS_IN(1) : 0);
    if (bf16) {
        mu_status s = mui_bf16_linear(e, true, rows, out, k, mui_cbf16(in[0]), mui_cfloats(in[1]),
                                      bias != NULL ? mui_cfloats(in[2]) : NULL, mui_bf16(y));
        return s == MU_OK ? mui_record_reads(t, &mui_op_linear, y, in, count, NULL, 0, NULL, 0, reads) : NULL;
    }
    if (bias != NULL) {
        int64_t from[2] = {0, 1}, to[2] = {out, 1};
        mui_copy_strided(e, MU_DIMS(rows, out), sizeof(float), in[2]->data, from, y->data, to);
    }
    if (mui_gemm(e, false, true, rows, out, k, 1.0f, mui_cfloats(in[0]), k, mui_cfloats(in[1]), k,
                 bias != NULL ? 1.0f : 0.0f, mui_floats(y), out) != MU_OK) {
        return NULL;
    }
    return mui_record_reads(t, &mui_op_linear, y, in, count, NULL, 0, NULL, 0, reads);
}

static mu_tensor *linear_sample(mu_tape *t, int i, uint64_t seed)
{
    switch (i) {
    case 0:
        return mu_linear_op(t, mui_sample_leaf(t, MU_DIMS(3, 5), seed), mui_sample_leaf(t, MU_DIMS(4, 5), seed + 1),
                            mui_sample_leaf(t, MU_DIMS(4), seed + 2));
    case 1:
        return mu_linear_op(t, mui_sample_leaf(t, MU_DIMS(2, 3, 1), seed), mui_sample_leaf(t, MU_DIMS(1, 1), seed + 1),
                            NULL);
    case 2: /* transposed input and weight */
        return mu_linear_op(t, mu_permute(t, mui_sample_leaf(t, MU_DIMS(5, 3), seed), MU_DIMS(1, 0)),
                            mu_permute(t, mui_sample_leaf(t, MU_DIMS(5, 2), seed + 1), MU_DIMS(1, 0)),
                            mui_sample_leaf(t, MU_DIMS(2), seed + 2));
    case 3:
        return mu_linear_op(t, mui_sample_leaf(t, MU_DIMS(0, 5), seed), mui_sample_leaf(t, MU_DIMS(4, 5), seed + 1),
                            mui_sample_leaf(t, MU_DIMS(4), seed + 2));
    case 4:
        return mu_linear_op(t, mui_sample_leaf(t, MU_DIMS(7), seed), mui_sample_leaf(t, MU_DIMS(3, 7), seed + 1),
                            mui_sample_leaf(t, MU_DIMS(3), seed + 2));
    case 5:
        return mu_linear_op(t, mui_sample_leaf(t, MU_DIMS(2, 0), seed), mui_sample_leaf(t, MU_DIMS(3, 0), seed + 1),
                            mui_sample_leaf(t, MU_DIMS(3), seed + 2));
    default: return NULL;
    }
}

const mui_op mui_op_linear = {"linear", linear_backward, linear_sample, MUI_READS_IN(0) | MUI_READS_IN(1), false};

/* -- matmul ----------------------------------------------------------------------------------------------------- */

static mu_status matmul_backward_bf16(mui_backward *b, mui_node *n, const uint16_t *dy)
{
    mu_tensor *x = n->in[0], *z = n->in[1];
    int64_t rows = x->dims.dim[0], inner = x->dims.dim[1], cols = z->dims.dim[1];
    mui_engine *e = mui_backward_engine(b);
    mu_status s = MU_OK;
    if (mui_wants_grad(b, n, 0)) {
        uint16_t *dx = mui_grad_put(b, n, 0, NULL);
        s = dx == NULL ? mui_backward_failed(n)
                       : mui_bf16_gemm(e, false, true, rows, inner, cols, dy, mui_cbf16(z), dx);
    }
    if (s == MU_OK && mui_wants_grad(b, n, 1)) {
        uint16_t *dz = mui_grad_put(b, n, 1, NULL);
        s = dz == NULL ? mui_backward_failed(n)
                       : mui_bf16_gemm(e, true, false, inner, cols, rows, mui_cbf16(x), dy, dz);
    }
    return s;
}

static mu_status matmul_backward(mui_backward *b, mui_node *n)
{
    mu_tensor *x = n->in[0], *z = n->in[1];
    int64_t rows = x->dims.dim[0], inner = x->dims.dim[1], cols = z->dims.dim[1];
    mui_engine *e = mui_backward_engine(b);
    const float *dy = mui_grad_in(b, n, NULL);
    mu_status s = dy != NULL ? MU_OK : mui_backward_failed(n);
    bool add = false;
    if (s == MU_OK && mui_is_bf16(n->out)) {
        return matmul_backward_bf16(b, n, (const uint16_t *)(const void *)dy);
    }
    if (s == MU_OK && mui_wants_grad(b, n, 0)) {
        float *dx = mui_grad_out(b, n, 0, NULL, &add);
        s = dx == NULL ? mui_backward_failed(n)
                       : mui_gemm(e, false, true, rows, inner, cols, 1.0f, dy, cols, mui_cfloats(z), cols,
                                  add ? 1.0f : 0.0f, dx, inner);
    }
    if (s == MU_OK && mui_wants_grad(b, n, 1)) {
        float *dz = mui_grad_out(b, n, 1, NULL, &add);
        s = dz == NULL ? mui_backward_failed(n)
                       : mui_gemm(e, true, false, inner, cols, rows, 1.0f, mui_cfloats(x), inner, dy, cols,
                                  add ? 1.0f : 0.0f, dz, cols);
    }
    return s;
}

mu_tensor *mu_matmul(mu_tape *t, mu_tensor *a, mu_tensor *b)
{
    mu_tensor *in[2] = {a, b};
    if (mui_matrix_bad(t, "matmul", in, 2, 2)) {
        return NULL;
    }
    a = in[0], b = in[1];
    char at[MUI_DIMS_TEXT], bt[MUI_DIMS_TEXT];
    if (a->dims.ndim != 2 || b->dims.ndim != 2 || a->dims.dim[1] != b->dims.dim[0]) {
        return mui_op_fail(t, MU_ERR_SHAPE, "matmul", "%s and %s do not fit: (M, K) and (K, N) were expected",
                           mui_dims_text(a->dims, at), mui_dims_text(b->dims, bt));
    }
    in[0] = mui_in_layout(t, a, NULL);
    in[1] = mui_in_layout(t, b, NULL);
    mu_dims dims = MU_DIMS(a->dims.dim[0], b->dims.dim[1]);
    mu_tensor *y = in[0] != NULL && in[1] != NULL ? mui_tensor_new(t, dims, a->dtype, NULL) : NULL;
    uint32_t reads =
        (mui_tensor_wants_grad(b) ? MUI_READS_IN(0) : 0) | (mui_tensor_wants_grad(a) ? MUI_READS_IN(1) : 0);
    if (y != NULL && mui_is_bf16(y)) {
        mu_status s = mui_bf16_gemm(mui_tape_engine(t), false, false, dims.dim[0], dims.dim[1], a->dims.dim[1],
                                    mui_cbf16(in[0]), mui_cbf16(in[1]), mui_bf16(y));
        return s == MU_OK ? mui_record_reads(t, &mui_op_matmul, y, in, 2, NULL, 0, NULL, 0, reads) : NULL;
    }
    if (y == NULL || mui_gemm(mui_tape_engine(t), false, false, dims.dim[0], dims.dim[1], a->dims.dim[1], 1.0f,
                              mui_cfloats(in[0]), a->dims.dim[1], mui_cfloats(in[1]), dims.dim[1], 0.0f, mui_floats(y),
                              dims.dim[1]) != MU_OK) {
        return NULL;
    }
    return mui_record_reads(t, &mui_op_matmul, y, in, 2, NULL, 0, NULL, 0, reads);
}

static mu_tensor *matmul_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = NULL;
    switch (i) {
    case 0:
        return mu_matmul(t, mui_sample_leaf(t, MU_DIMS(3, 4), seed), mui_sample_leaf(t, MU_DIMS(4, 5), seed + 1));
    case 1:
        return mu_matmul(t, mui_sample_leaf(t, MU_DIMS(1, 1), seed), mui_sample_leaf(t, MU_DIMS(1, 1), seed + 1));
    case 2: /* both operands the same tensor */
        x = mui_sample_leaf(t, MU_DIMS(3, 3), seed);
        return mu_matmul(t, x, x);
    case 3:
        return mu_matmul(t, mui_sample_leaf(t, MU_DIMS(2, 0), seed), mui_sample_leaf(t, MU_DIMS(0, 3), seed + 1));
    case 4: /* a tensor and its transpose */
        x = mui_sample_leaf(t, MU_DIMS(2, 3), seed);
        return mu_matmul(t, x, mu_permute(t, x, MU_DIMS(1, 0)));
    default: return NULL;
    }
}

const mui_op mui_op_matmul = {"matmul", matmul_backward, matmul_sample, MUI_READS_IN(0) | MUI_READS_IN(1), false};
