/* Pooling. */
#include "tape/op_rows.h"

#include <string.h>

typedef struct pool_attr {
    mui_pool2d_shape shape;
    const mui_layout *y;
} pool_attr;

static mu_status pool_backward(mui_backward *b, mui_node *n)
{
    const pool_attr *a = n->attr;
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    const void *dy = mui_grad_in(b, n, a->y);
    void *dx = dy != NULL ? mui_grad_put(b, n, 0, a->shape.x) : NULL;
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    if (mui_dims_elements(n->out->dims) == 0) {
        memset(dx, 0, mui_bytes_as(n->in[0]->dims, n->in[0]->dtype, a->shape.x));
        return MU_OK;
    }
    return mui_pool2d_backward(mui_backward_engine(b), &a->shape, dy, n->saved_count > 0 ? n->saved[0]->data : NULL, dx);
}

static bool pool_shape_of(mu_tape *t, const char *name, const mu_tensor *x, int kh, int kw, const mu_pool2d_options *o,
                          mui_pool2d_shape *s)
{
    char xt[MUI_DIMS_TEXT];
    if (x->dims.ndim != 4) {
        mui_op_fail(t, MU_ERR_SHAPE, name, "input %s: (N, C, H, W) was expected", mui_dims_text(x->dims, xt));
        return false;
    }
    int kernel[2] = {kh, kw};
    int64_t out[2];
    for (int i = 0; i < 2; i++) {
        if (kernel[i] < 1 || o->stride[i] < 0 || o->padding[i] < 0 || o->padding[i] > kernel[i] / 2) {
            mui_op_fail(t, MU_ERR_ARG, name,
                        "kernel %d, stride %d, padding %d: a kernel of at least 1, a stride that is not negative, and "
                        "padding of at most half the kernel were expected",
                        kernel[i], o->stride[i], o->padding[i]);
            return false;
        }
        s->stride[i] = o->stride[i] > 0 ? o->stride[i] : kernel[i];
        s->pad[i] = o->padding[i];
        int64_t in = x->dims.dim[2 + i], room = in + 2 * s->pad[i] - kernel[i];
        out[i] = room < 0 || in == 0 ? 0 : room / s->stride[i] + 1;
        if (out[i] == 0) {
            mui_op_fail(t, MU_ERR_SHAPE, name, "input %s, padding included, is smaller than the %dx%d kernel",
                        mui_dims_text(x->dims, xt), kh, kw);
            return false;
        }
    }
    s->n = x->dims.dim[0], s->c = x->dims.dim[1], s->ih = x->dims.dim[2], s->iw = x->dims.dim[3];
    s->kh = kh, s->kw = kw, s->oh = out[0], s->ow = out[1];
    s->x = x->layout;
    s->bf16 = mui_is_bf16(x);
    return true;
}

static mu_tensor *pool(mu_tape *t, const mui_op *op, mui_pool_kind kind, mu_tensor *x, int kh, int kw,
                       const mu_pool2d_options *options)
{
    static const mu_pool2d_options defaults;
    pool_attr a;
    memset(&a, 0, sizeof(a)); /* with its padding: the shape is a cache key */
    if (!pool_shape_of(t, op->name, x, kh, kw, options != NULL ? options : &defaults, &a.shape)) {
        return NULL;
    }
    mui_pool2d_shape *s = &a.shape;
    s->kind = kind;
    mu_dims out = MU_DIMS(s->n, s->c, s->oh, s->ow);
    bool empty = mui_dims_elements(out) == 0;
    mui_engine *e = mui_tape_engine(t);
    mu_tensor *in = mui_in_layout(t, x, x->layout);
    a.y = empty ? NULL : mui_pool2d_out_layout(e, s);
    mu_tensor *y = in != NULL ? mui_tensor_new(t, out, x->dtype, a.y) : NULL;
    if (y == NULL) {
        return NULL;
    }
    mui_storage *workspace = NULL;
    size_t bytes = empty ? 0 : mui_pool2d_workspace_bytes(e, s);
    if (bytes > 0) {
        workspace = mui_storage_new(mui_tape_pool(t), bytes);
        if (workspace == NULL) {
            return NULL;
        }
    }
    if (!empty && mui_pool2d_forward(e, s, in->data, y->data, workspace != NULL ? workspace->data : NULL) != MU_OK) {
        mui_storage_release(workspace);
        return NULL;
    }
    return mui_record(t, op, y, &in, 1, &a, sizeof(a), &workspace, workspace != NULL ? 1 : 0);
}

mu_tensor *mu_max_pool2d(mu_tape *t, mu_tensor *x, int kernel_h, int kernel_w, const mu_pool2d_options *options)
{
    return mui_either_bad(t, "max_pool2d", &x, 1)
               ? NULL
               : pool(t, &mui_op_max_pool2d, MUI_POOL_MAX, x, kernel_h, kernel_w, options);
}

mu_tensor *mu_avg_pool2d(mu_tape *t, mu_tensor *x, int kernel_h, int kernel_w, const mu_pool2d_options *options)
{
    bool exclude = options != NULL && options->count_exclude_pad;
    return mui_either_bad(t, "avg_pool2d", &x, 1) ? NULL
                                                  : pool(t, &mui_op_avg_pool2d,
                                                         exclude ? MUI_POOL_AVG_EXCLUDE_PAD : MUI_POOL_AVG, x, kernel_h,
                                                         kernel_w, options);
}

static mu_tensor *whole(mu_tape *t, const mui_op *op, const char *name, mui_pool_kind kind, mu_tensor *x)
{
    char xt[MUI_DIMS_TEXT];
    if (mui_either_bad(t, name, &x, 1)) {
        return NULL;
    }
    if (x->dims.ndim != 4 || x->dims.dim[2] < 1 || x->dims.dim[3] < 1 || x->dims.dim[2] > INT32_MAX ||
        x->dims.dim[3] > INT32_MAX) {
        return mui_op_fail(t, MU_ERR_SHAPE, name, "input %s: (N, C, H, W) with at least one pixel was expected",
                           mui_dims_text(x->dims, xt));
    }
    return pool(t, op, kind, x, (int)x->dims.dim[2], (int)x->dims.dim[3], NULL);
}

mu_tensor *mu_global_avg_pool2d(mu_tape *t, mu_tensor *x)
{
    return whole(t, &mui_op_avg_pool2d, "global_avg_pool2d", MUI_POOL_AVG, x);
}

mu_tensor *mu_global_max_pool2d(mu_tape *t, mu_tensor *x)
{
    return whole(t, &mui_op_max_pool2d, "global_max_pool2d", MUI_POOL_MAX, x);
}

/* Inputs and windows for both kinds; global pooling when kernel is 0. */
static bool window(mu_tape *t, int i, uint64_t seed, mu_tensor **x, int *kh, int *kw, mu_pool2d_options *o)
{
    *o = (mu_pool2d_options){0};
    *kh = *kw = 2;
    switch (i) {
    case 0: *x = mui_sample_leaf(t, MU_DIMS(2, 3, 4, 4), seed); return true;
    case 1: *x = mui_sample_leaf(t, MU_DIMS(1, 1, 1, 1), seed), *kh = *kw = 1; return true;
    case 2:
        *x = mui_sample_leaf(t, MU_DIMS(1, 5, 5, 6), seed);
        *kh = *kw = 3;
        *o = (mu_pool2d_options){.stride = {2, 1}, .padding = {1, 1}};
        return true;
    case 3: *x = mui_sample_leaf(t, MU_DIMS(0, 2, 4, 4), seed); return true;
    case 4:
        *x = mu_permute(t, mui_sample_leaf(t, MU_DIMS(1, 4, 4, 3), seed), MU_DIMS(0, 3, 1, 2));
        *o = (mu_pool2d_options){.padding = {1, 0}, .stride = {1, 2}, .count_exclude_pad = true};
        return true;
    case 5: *x = mui_sample_leaf(t, MU_DIMS(2, 3, 3, 5), seed), *kh = *kw = 0; return true;
    default: return false;
    }
}

static mu_tensor *max_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = NULL;
    mu_pool2d_options o;
    int kh = 0, kw = 0;
    if (!window(t, i, seed, &x, &kh, &kw, &o)) {
        return NULL;
    }
    return kh == 0 ? mu_global_max_pool2d(t, x) : mu_max_pool2d(t, x, kh, kw, &o);
}

static mu_tensor *avg_sample(mu_tape *t, int i, uint64_t seed)
{
    mu_tensor *x = NULL;
    mu_pool2d_options o;
    int kh = 0, kw = 0;
    if (!window(t, i, seed, &x, &kh, &kw, &o)) {
        return NULL;
    }
    return kh == 0 ? mu_global_avg_pool2d(t, x) : mu_avg_pool2d(t, x, kh, kw, &o);
}

const mui_op mui_op_max_pool2d = {"max_pool2d", pool_backward, max_sample, 0, false};
const mui_op mui_op_avg_pool2d = {"avg_pool2d", pool_backward, avg_sample, 0, false};
