/* Convolution in plain C: the oracle, and what serves shapes that oneDNN leaves. Rows are the unit of work, so that the
 * compiler vectorises where the stride is 1. Images are plain; the weight may be stored in a backend's layout. */
#include "kern/engine.h"
#include "base/alloc.h"
#include "kern/taps.h"

#include <string.h>

static mu_dims weight_dims(const mui_conv2d_shape *s)
{
    return MU_DIMS(s->oc, s->ic / s->groups, s->kh, s->kw);
}

static void plane_forward(const mui_conv2d_shape *s, mui_tap t, const float *x, float w, float *y)
{
    for (int64_t i = t.rows.first; i < t.rows.last; i++) {
        const float *in = x + (i * s->stride[0] + t.row_shift) * s->iw;
        float *out = y + i * s->ow;
        for (int64_t j = t.columns.first; j < t.columns.last; j++) {
            out[j] += w * in[j * s->stride[1] + t.column_shift];
        }
    }
}

static void plane_backward(const mui_conv2d_shape *s, mui_tap t, const float *dy, float w, float *dx)
{
    for (int64_t i = t.rows.first; i < t.rows.last; i++) {
        const float *out = dy + i * s->ow;
        float *in = dx + (i * s->stride[0] + t.row_shift) * s->iw;
        for (int64_t j = t.columns.first; j < t.columns.last; j++) {
            in[j * s->stride[1] + t.column_shift] += w * out[j];
        }
    }
}

static double plane_weight(const mui_conv2d_shape *s, mui_tap t, const float *x, const float *dy)
{
    double sum = 0;
    for (int64_t i = t.rows.first; i < t.rows.last; i++) {
        const float *in = x + (i * s->stride[0] + t.row_shift) * s->iw;
        const float *out = dy + i * s->ow;
        for (int64_t j = t.columns.first; j < t.columns.last; j++) {
            sum += (double)out[j] * in[j * s->stride[1] + t.column_shift];
        }
    }
    return sum;
}

static mu_status forward(mui_engine *e, const mui_conv2d_plan *p, const void *images, const float *w,
                         const float *bias, void *result)
{
    const mui_conv2d_shape *s = &p->shape;
    const float *x = images;
    float *y = result;
    if (s->n == 0 || s->oh == 0 || s->ow == 0) {
        return MU_OK;
    }
    w = mui_to_plain(e, weight_dims(s), p->w, w, MUI_SCRATCH_W);
    if (w == NULL && s->ic > 0) {
        return MU_ERR_NOMEM;
    }
    int64_t ic = s->ic / s->groups, oc = s->oc / s->groups, in_plane = s->ih * s->iw, out_plane = s->oh * s->ow;
    for (int64_t n = 0; n < s->n; n++) {
        for (int64_t k = 0; k < s->oc; k++) {
            float *out = y + (n * s->oc + k) * out_plane;
            mui_fill(out, out_plane, bias != NULL ? bias[k] : 0.0f);
            for (int64_t c = 0; c < ic; c++) {
                const float *in = x + (n * s->ic + k / oc * ic + c) * in_plane;
                const float *taps = w + (k * ic + c) * s->kh * s->kw;
                for (int64_t r = 0; r < s->kh * s->kw; r++) {
                    plane_forward(s, mui_tap_of(s, r / s->kw, r % s->kw), in, taps[r], out);
                }
            }
        }
    }
    return MU_OK;
}

static mu_status backward_data(mui_engine *e, const mui_conv2d_plan *p, const void *gradient, const float *w,
                               void *result)
{
    const mui_conv2d_shape *s = &p->shape;
    const float *dy = gradient;
    float *dx = result;
    int64_t ic = s->ic / s->groups, oc = s->oc / s->groups, in_plane = s->ih * s->iw, out_plane = s->oh * s->ow;
    mui_fill(dx, s->n * s->ic * in_plane, 0.0f);
    if (s->n == 0 || s->ic == 0 || s->oc == 0 || out_plane == 0) {
        return MU_OK;
    }
    w = mui_to_plain(e, weight_dims(s), p->w, w, MUI_SCRATCH_W);
    if (w == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t n = 0; n < s->n; n++) {
        for (int64_t k = 0; k < s->oc; k++) {
            const float *out = dy + (n * s->oc + k) * out_plane;
            for (int64_t c = 0; c < ic; c++) {
                float *in = dx + (n * s->ic + k / oc * ic + c) * in_plane;
                const float *taps = w + (k * ic + c) * s->kh * s->kw;
                for (int64_t r = 0; r < s->kh * s->kw; r++) {
                    plane_backward(s, mui_tap_of(s, r / s->kw, r % s->kw), out, taps[r], in);
                }
            }
        }
    }
    return MU_OK;
}

static void weight_gradient(const mui_conv2d_shape *s, const float *x, const float *dy, float *dw, bool accumulate)
{
    int64_t ic = s->ic / s->groups, oc = s->oc / s->groups, in_plane = s->ih * s->iw, out_plane = s->oh * s->ow;
    for (int64_t k = 0; k < s->oc; k++) {
        for (int64_t c = 0; c < ic; c++) {
            for (int64_t r = 0; r < s->kh * s->kw; r++) {
                mui_tap t = mui_tap_of(s, r / s->kw, r % s->kw);
                double sum = 0;
                for (int64_t n = 0; n < s->n; n++) {
                    sum += plane_weight(s, t, x + (n * s->ic + k / oc * ic + c) * in_plane,
                                        dy + (n * s->oc + k) * out_plane);
                }
                float *d = &dw[(k * ic + c) * s->kh * s->kw + r];
                *d = accumulate ? *d + (float)sum : (float)sum;
            }
        }
    }
}

static void bias_gradient(const mui_conv2d_shape *s, const float *dy, float *db, bool accumulate)
{
    int64_t plane = s->oh * s->ow;
    for (int64_t k = 0; k < s->oc; k++) {
        double sum = 0;
        for (int64_t n = 0; n < s->n; n++) {
            const float *p = dy + (n * s->oc + k) * plane;
            for (int64_t i = 0; i < plane; i++) {
                sum += p[i];
            }
        }
        db[k] = accumulate ? db[k] + (float)sum : (float)sum;
    }
}

static mu_status backward_weights(mui_engine *e, const mui_conv2d_plan *p, const void *x, const void *dy,
                                  float *dw, float *db, bool accumulate_w, bool accumulate_b)
{
    const mui_conv2d_shape *s = &p->shape;
    mu_dims dims = weight_dims(s);
    if (db != NULL) {
        bias_gradient(s, dy, db, accumulate_b);
    }
    if (dw == NULL || mui_bytes_in_layout(dims, p->w) == 0) {
        return MU_OK;
    }
    if (p->w == NULL) {
        weight_gradient(s, x, dy, dw, accumulate_w);
        return MU_OK;
    }
    /* Computed plain, then turned into the stored layout, then added there. */
    size_t plain_bytes = mui_bytes_in_layout(dims, NULL), stored_bytes = mui_layout_bytes(p->w);
    float *plain = mui_engine_scratch(e, MUI_SCRATCH_W, plain_bytes);
    float *stored = accumulate_w ? mui_engine_scratch(e, MUI_SCRATCH_DW, stored_bytes) : dw;
    if (plain == NULL || stored == NULL) {
        return MU_ERR_NOMEM;
    }
    weight_gradient(s, x, dy, plain, false);
    mu_status st = mui_reorder_as(e, MUI_CONVERT_WEIGHT, dims, NULL, plain, p->w, stored);
    if (st == MU_OK && accumulate_w) {
        mui_axpy(e, (int64_t)(stored_bytes / sizeof(float)), 1.0f, stored, dw);
    }
    return st;
}

const mui_conv2d_plan *mui_ref_conv2d_plan(mui_engine *e, const mui_conv2d_shape *shape, const mui_layout *w)
{
    mui_conv2d_impl *impl = mui_engine_keep(e, sizeof(*impl));
    if (impl == NULL) {
        return NULL;
    }
    impl->plan.shape = *shape;
    impl->plan.w = w;
    impl->forward = forward;
    impl->backward_data = backward_data;
    impl->backward_weights = backward_weights;
    return &impl->plan;
}
