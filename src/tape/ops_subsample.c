/* Subsampling between zero channels: the shortcut without parameters of the CIFAR ResNets ("option A"). Works in the
 * layout that the input has. */
#include "tape/op_rows.h"

static mu_status subsample_backward(mui_backward *b, mui_node *n)
{
    const mui_subsample_plan *const *plan = n->attr, *p = *plan;
    if (!mui_wants_grad(b, n, 0)) {
        return MU_OK;
    }
    const float *dy = mui_grad_in(b, n, p->y);
    bool accumulate = false;
    float *dx = dy != NULL ? mui_grad_out(b, n, 0, p->x, &accumulate) : NULL;
    if (dx == NULL) {
        return mui_backward_failed(n);
    }
    mui_subsample_backward(mui_backward_engine(b), p, dy, dx, accumulate);
    return MU_OK;
}

static mu_tensor *subsample_sample(mu_tape *t, int i, uint64_t seed)
{
    static const int64_t shapes[][5] = {{2, 4, 6, 6, 2}, {1, 3, 5, 7, 2}, {2, 2, 4, 4, 1}, {1, 2, 5, 7, 2}, {1, 1, 4, 3, 3}};
    if (i < 0 || i >= (int)(sizeof(shapes) / sizeof(shapes[0]))) {
        return NULL;
    }
    const int64_t *s = shapes[i];
    mu_tensor *x = mui_sample_leaf(t, MU_DIMS(s[0], s[1], s[2], s[3]), seed);
    if (i < 3) {
        return mui_subsample_pad(t, x, s[4], 2, 1);
    }
    /* In the layout of a convolution's result, which is read once more, so that backward adds. */
    mu_tensor *w = mui_sample_constant(t, MU_DIMS(i == 3 ? 16 : 20, s[1], 1, 1), seed + 1);
    mu_tensor *y = mu_conv2d(t, x, w, NULL, NULL), *more = mui_subsample_pad(t, y, s[4], 10, 10);
    return mu_add(t, more, mui_subsample_pad(t, y, s[4], 12, 8));
}

const mui_op mui_op_subsample = {
    .name = "subsample_pad", .backward = subsample_backward, .sample = subsample_sample};

mu_tensor *mui_subsample_pad(mu_tape *t, mu_tensor *x, int64_t step, int64_t before, int64_t after)
{
    if (mui_either_bad(t, "subsample_pad", &x, 1)) {
        return NULL;
    }
    if (x->dims.ndim != 4 || step < 1 || before < 0 || after < 0) {
        char text[MUI_DIMS_TEXT];
        return mui_op_fail(t, MU_ERR_SHAPE, "subsample_pad",
                           "input %s, step %lld, %lld and %lld channels of zeros; images have 4 dimensions",
                           mui_dims_text(x->dims, text), (long long)step, (long long)before, (long long)after);
    }
    if (mui_is_bf16(x)) { /* moves values only: nothing is lost on the way */
        mu_tensor *wide = mui_subsample_pad(t, mui_cast(t, x, MU_F32), step, before, after);
        return wide != NULL ? mui_cast(t, wide, MU_BF16) : NULL;
    }
    const int64_t *d = x->dims.dim;
    mui_subsample_shape s = {d[0], d[1], d[2], d[3], step, before, after, x->layout};
    mui_engine *e = mui_tape_engine(t);
    const mui_subsample_plan *p = mui_subsample_plan_get(e, &s);
    mu_dims out = MU_DIMS(d[0], before + d[1] + after, (d[2] + step - 1) / step, (d[3] + step - 1) / step);
    mu_tensor *in = p != NULL ? mui_in_layout(t, x, p->x) : NULL;
    mu_tensor *y = in != NULL ? mui_tensor_new(t, out, MU_F32, p->y) : NULL;
    if (y == NULL) {
        return NULL;
    }
    mui_subsample_forward(e, p, mui_cfloats(in), mui_floats(y));
    return mui_record(t, &mui_op_subsample, y, &in, 1, &p, sizeof(p), NULL, 0);
}
