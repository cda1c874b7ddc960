/* Subsampling between zero channels: the shortcut without parameters of the CIFAR ResNets ("option A"). */
#include "tape/op_rows.h"

typedef struct subsample_attr {
    mu_dims in;               /* (N, C, H, W) */
    mu_dims kept;             /* (N, C, ceil(H/step), ceil(W/step)) */
    int64_t stride_in[4];     /* of the kept elements in a plain input */
    int64_t stride_out[4];    /* and in a plain output */
    int64_t offset_out;       /* of the first of them there */
} subsample_attr;

static mu_status subsample_backward(mui_backward *b, mui_node *n)
{
    const subsample_attr *a = n->attr;
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    const float *dy = mui_grad_in(b, n, NULL);
    bool accumulate = false;
    float *dx = dy != NULL ? mui_grad_out(b, n, 0, NULL, &accumulate) : NULL;
    if (dx == NULL) {
        return MU_ERR_NOMEM;
    }
    if (!accumulate) {
        mui_fill(dx, mui_dims_elements(a->in), 0);
    }
    mui_add_strided(mui_backward_engine(b), a->kept, dy + a->offset_out, a->stride_out, dx, a->stride_in);
    return MU_OK;
}

static mu_tensor *subsample_sample(mu_tape *t, int i, uint64_t seed)
{
    static const int64_t shapes[][5] = {{2, 4, 6, 6, 2}, {1, 3, 5, 7, 2}, {2, 2, 4, 4, 1}};
    if (i < 0 || i >= (int)(sizeof(shapes) / sizeof(shapes[0]))) {
        return NULL;
    }
    const int64_t *s = shapes[i];
    mu_tensor *x = mui_sample_leaf(t, MU_DIMS(s[0], s[1], s[2], s[3]), seed);
    return mui_subsample_pad(t, x, s[4], 2, 1);
}

const mui_op mui_op_subsample = {
    .name = "subsample_pad", .backward = subsample_backward, .sample = subsample_sample};

mu_tensor *mui_subsample_pad(mu_tape *t, mu_tensor *x, int64_t step, int64_t before, int64_t after)
{
    if (mui_inputs_bad(t, "subsample_pad", &x, 1)) {
        return NULL;
    }
    if (x->dims.ndim != 4 || step < 1 || before < 0 || after < 0) {
        char text[MUI_DIMS_TEXT];
        return mui_op_fail(t, MU_ERR_SHAPE, "subsample_pad",
                           "input %s, step %lld, %lld and %lld channels of zeros; images have 4 dimensions",
                           mui_dims_text(x->dims, text), (long long)step, (long long)before, (long long)after);
    }
    const int64_t *d = x->dims.dim;
    int64_t h = (d[2] + step - 1) / step, w = (d[3] + step - 1) / step, c = before + d[1] + after;
    subsample_attr a = {.in = x->dims,
                        .kept = MU_DIMS(d[0], d[1], h, w),
                        .stride_in = {d[1] * d[2] * d[3], d[2] * d[3], step * d[3], step},
                        .stride_out = {c * h * w, h * w, w, 1},
                        .offset_out = before * h * w};
    mu_tensor *plain = mui_in_layout(t, x, NULL);
    mu_tensor *y = plain != NULL ? mui_tensor_new(t, MU_DIMS(d[0], c, h, w), MU_F32, NULL) : NULL;
    if (y == NULL) {
        return NULL;
    }
    mui_fill((float *)y->data, mui_dims_elements(y->dims), 0);
    mui_copy_strided(mui_tape_engine(t), a.kept, sizeof(float), plain->data, a.stride_in,
                     (float *)y->data + a.offset_out, a.stride_out);
    return mui_record(t, &mui_op_subsample, y, &plain, 1, &a, sizeof(a), NULL, 0);
}
