/* Losses. Their gradients cost little beside the value, so forward computes both and backward only scales. */
#include "tape/op_rows.h"

/* saved[0]: d loss / d input, plain. */

/* Hands saved gradient times d loss over as the gradient of input i. */
static mu_status hand_over(mui_backward *b, mui_node *n, int input, float sign)
{
    if (!mui_wants_grad(b, n, input)) {
        return MU_OK;
    }
    const float *dy = mui_grad_in(b, n, NULL);
    if (dy == NULL) {
        return mui_backward_failed(n);
    }
    float factor = *dy * sign;
    mui_storage *s = n->saved[0];
    int64_t elements = mui_dims_elements(n->in[input]->dims);
    if (factor == 1.0f) {
        return mui_grad_give(b, n, input, s, NULL);
    }
    float *d = mui_grad_put(b, n, input, NULL);
    if (d == NULL) {
        return mui_backward_failed(n);
    }
    mui_unary_forward(mui_backward_engine(b), MUI_SCALE, elements, s->data, d, factor);
    return MU_OK;
}

/* Room for the gradient, or NULL when nobody will ask for it. */
static bool gradient_room(mu_tape *t, bool wanted, int64_t elements, mui_storage **s)
{
    *s = NULL;
    if (wanted) {
        *s = mui_storage_new(mui_tape_pool(t), ((size_t)elements + 1) * sizeof(float));
    }
    return !wanted || *s != NULL;
}

/* -- cross-entropy ---------------------------------------------------------------------------------------------- */

static mu_status cross_entropy_backward(mui_backward *b, mui_node *n)
{
    return hand_over(b, n, 0, 1.0f);
}

static bool cross_entropy_bad(mu_tape *t, mu_tensor *logits, mu_tensor *labels, const mu_cross_entropy_options *o)
{
    char lt[MUI_DIMS_TEXT], yt[MUI_DIMS_TEXT];
    mu_tensor *in[2] = {logits, labels};
    if (mui_inputs_bad(t, "cross_entropy", in, 2)) {
        return true;
    }
    if (logits->dtype != MU_F32 || labels->dtype != MU_I64) {
        mui_op_fail(t, MU_ERR_DTYPE, "cross_entropy", "logits are %s and labels %s: float32 and int64 were expected",
                    mu_dtype_name(logits->dtype), mu_dtype_name(labels->dtype));
        return true;
    }
    if (logits->dims.ndim != 2 || labels->dims.ndim != 1 || logits->dims.dim[0] != labels->dims.dim[0] ||
        logits->dims.dim[1] == 0) {
        mui_op_fail(t, MU_ERR_SHAPE, "cross_entropy", "logits %s and labels %s do not fit: (N, C) and (N) were expected",
                    mui_dims_text(logits->dims, lt), mui_dims_text(labels->dims, yt));
        return true;
    }
    if (!(o->label_smoothing >= 0.0f && o->label_smoothing < 1.0f)) {
        mui_op_fail(t, MU_ERR_ARG, "cross_entropy", "label smoothing is %g, and must be in [0, 1)",
                    (double)o->label_smoothing);
        return true;
    }
    return false;
}

mu_tensor *mu_cross_entropy_with(mu_tape *t, mu_tensor *logits, mu_tensor *labels,
                                 const mu_cross_entropy_options *options)
{
    static const mu_cross_entropy_options defaults;
    const mu_cross_entropy_options *o = options != NULL ? options : &defaults;
    if (logits != NULL && mui_is_bf16(logits) && mui_floats_bad(t, "cross_entropy", &logits, 1)) {
        return NULL;
    }
    if (cross_entropy_bad(t, logits, labels, o)) {
        return NULL;
    }
    int64_t ignore = o->ignore_class_0 ? 0 : o->ignore_index != 0 ? o->ignore_index : MU_IGNORE_INDEX_DEFAULT;
    int64_t rows = logits->dims.dim[0], cols = logits->dims.dim[1], bad = -1;
    mu_tensor *in[2] = {mui_in_layout(t, logits, NULL), mui_in_layout(t, labels, NULL)};
    mu_tensor *y = in[0] != NULL && in[1] != NULL ? mui_tensor_new(t, MU_SCALAR, MU_F32, NULL) : NULL;
    mui_storage *grad = NULL;
    if (y == NULL || !gradient_room(t, mui_will_record(t, in, 1), rows * cols, &grad)) {
        return NULL;
    }
    const int64_t *label = (const int64_t *)(const void *)in[1]->data;
    mui_cross_entropy(mui_tape_engine(t), rows, cols, mui_cfloats(in[0]), label, o->label_smoothing, ignore,
                      mui_floats(y), grad != NULL ? grad->data : NULL, &bad);
    if (bad >= 0) {
        mui_storage_release(grad);
        return mui_op_fail(t, MU_ERR_ARG, "cross_entropy", "label %lld of row %lld is not in [0, %lld)",
                           (long long)label[bad], (long long)bad, (long long)cols);
    }
    return mui_record(t, &mui_op_cross_entropy, y, in, 1, NULL, 0, &grad, grad != NULL ? 1 : 0);
}

mu_tensor *mu_cross_entropy(mu_tape *t, mu_tensor *logits, mu_tensor *labels)
{
    return mu_cross_entropy_with(t, logits, labels, NULL);
}

static mu_tensor *cross_entropy_sample(mu_tape *t, int i, uint64_t seed)
{
    static const int64_t labels[6] = {2, 0, -100, 1, 3, 0};
    mu_tensor *y = mu_tensor_from_i64(t, MU_DIMS(6), labels);
    switch (i) {
    case 0: return mu_cross_entropy(t, mui_sample_leaf(t, MU_DIMS(6, 4), seed), y);
    case 1: return mu_cross_entropy(t, mui_sample_leaf(t, MU_DIMS(1, 1), seed), mu_narrow(t, y, 0, 1, 1));
    case 2:
        return mu_cross_entropy_with(t, mui_sample_leaf(t, MU_DIMS(6, 5), seed), y,
                                     &(mu_cross_entropy_options){.label_smoothing = 0.2f});
    case 3:
        return mu_cross_entropy_with(t, mu_permute(t, mui_sample_leaf(t, MU_DIMS(4, 2), seed), MU_DIMS(1, 0)),
                                     mu_narrow(t, y, 0, 3, 2),
                                     &(mu_cross_entropy_options){.ignore_index = 3, .label_smoothing = 0.1f});
    case 4: /* class 0 does not count */
        return mu_cross_entropy_with(t, mui_sample_leaf(t, MU_DIMS(2, 3), seed), mu_narrow(t, y, 0, 0, 2),
                                     &(mu_cross_entropy_options){.ignore_class_0 = true});
    default: return NULL;
    }
}

const mui_op mui_op_cross_entropy = {"cross_entropy", cross_entropy_backward, cross_entropy_sample, 0, false};

/* -- losses of two equal shapes --------------------------------------------------------------------------------- */

typedef void (*pair_fn)(mui_engine *e, int64_t n, const float *x, const float *target, float *loss, float *grad);

static mu_tensor *pair_loss(mu_tape *t, const mui_op *op, pair_fn f, mu_tensor *x, mu_tensor *target, uint32_t reads)
{
    char xt[MUI_DIMS_TEXT], yt[MUI_DIMS_TEXT];
    mu_tensor *in[2] = {x, target};
    if (mui_floats_bad(t, op->name, in, 2)) {
        return NULL;
    }
    x = in[0], target = in[1];
    if (!mui_dims_equal(x->dims, target->dims)) {
        return mui_op_fail(t, MU_ERR_SHAPE, op->name, "%s and target %s are not equal", mui_dims_text(x->dims, xt),
                           mui_dims_text(target->dims, yt));
    }
    in[0] = mui_in_layout(t, x, NULL);
    in[1] = mui_in_layout(t, target, NULL);
    mu_tensor *y = in[0] != NULL && in[1] != NULL ? mui_tensor_new(t, MU_SCALAR, MU_F32, NULL) : NULL;
    int64_t n = mui_dims_elements(x->dims);
    mui_storage *grad = NULL;
    if (y == NULL || !gradient_room(t, mui_will_record(t, in, 2), n, &grad)) {
        return NULL;
    }
    f(mui_tape_engine(t), n, mui_cfloats(in[0]), mui_cfloats(in[1]), mui_floats(y), grad != NULL ? grad->data : NULL);
    return mui_record_reads(t, op, y, in, 2, NULL, 0, &grad, grad != NULL ? 1 : 0, reads);
}

static mu_status mse_backward(mui_backward *b, mui_node *n)
{
    mu_status s = hand_over(b, n, 0, 1.0f);
    return s == MU_OK ? hand_over(b, n, 1, -1.0f) : s;
}

mu_tensor *mu_mse_loss(mu_tape *t, mu_tensor *x, mu_tensor *target)
{
    return pair_loss(t, &mui_op_mse_loss, mui_mse, x, target, 0);
}

static mu_status bce_backward(mui_backward *b, mui_node *n)
{
    mu_status s = hand_over(b, n, 0, 1.0f);
    if (s != MU_OK || !mui_wants_grad(b, n, 1)) {
        return s;
    }
    /* d/d target of mean(log(1 + e^x) - target x) */
    const float *dy = mui_grad_in(b, n, NULL);
    float *d = dy != NULL ? mui_grad_put(b, n, 1, NULL) : NULL;
    if (d == NULL) {
        return mui_backward_failed(n);
    }
    int64_t elements = mui_dims_elements(n->in[1]->dims);
    mui_unary_forward(mui_backward_engine(b), MUI_SCALE, elements, mui_cfloats(n->in[0]), d, -*dy / (float)elements);
    return MU_OK;
}

mu_tensor *mu_bce_with_logits(mu_tape *t, mu_tensor *logits, mu_tensor *target)
{
    bool read = target != NULL && mui_tensor_wants_grad(target);
    return pair_loss(t, &mui_op_bce_with_logits, mui_bce_with_logits, logits, target, read ? MUI_READS_IN(0) : 0);
}

/* Plain, single, both from one tensor, non-contiguous, target without gradient. */
static mu_tensor *pair_sample(mu_tape *t, int i, uint64_t seed, mu_tensor *(*f)(mu_tape *, mu_tensor *, mu_tensor *))
{
    mu_tensor *x = NULL;
    switch (i) {
    case 0: return f(t, mui_sample_leaf(t, MU_DIMS(3, 4), seed), mui_sample_leaf(t, MU_DIMS(3, 4), seed + 1));
    case 1: return f(t, mui_sample_leaf(t, MU_SCALAR, seed), mui_sample_leaf(t, MU_SCALAR, seed + 1));
    case 2:
        return f(t, mu_permute(t, mui_sample_leaf(t, MU_DIMS(2, 5), seed), MU_DIMS(1, 0)),
                 mui_sample_constant(t, MU_DIMS(5, 2), seed + 1));
    case 3:
        x = mui_sample_leaf(t, MU_DIMS(4, 3), seed);
        return f(t, mu_narrow(t, x, 0, 0, 2), mu_narrow(t, x, 0, 2, 2));
    default: return NULL;
    }
}

static mu_tensor *mse_sample(mu_tape *t, int i, uint64_t seed)
{
    return pair_sample(t, i, seed, mu_mse_loss);
}

static mu_tensor *bce_sample(mu_tape *t, int i, uint64_t seed)
{
    return pair_sample(t, i, seed, mu_bce_with_logits);
}

const mui_op mui_op_mse_loss = {"mse_loss", mse_backward, mse_sample, 0, false};
const mui_op mui_op_bce_with_logits = {"bce_with_logits", bce_backward, bce_sample, MUI_READS_IN(0), false};
