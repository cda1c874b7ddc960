/* Convolutions of small maps as matrix products, one for each tap, over images stored (N, H, W, C) and weights stored
 * (KH, KW, IC, OC). On a map of 1x1 a 3x3 kernel has one tap that meets anything but padding, on 2x2 four ninths of them
 * do, on 7x7 four fifths; direct kernels multiply most of the padding all the same, and oneDNN has no vector code at all
 * for the weights' gradient of maps below 3x3. The products are called as the backend has them, not through mui_gemm: their
 * flops and time are the convolution's. */
#include "kern/tap_conv.h"
#include "kern/taps.h"

#include <string.h>

bool mui_taps_pay(const mui_conv2d_shape *s, bool weights)
{
    if (s->groups != 1 || s->kh * s->kw == 1 || s->ic < 128 || s->oc < 128) {
        return false;
    }
    return weights ? s->oh * s->ow <= 64 : s->oh * s->ow <= 4 && s->n >= 32;
}

static int64_t span(mui_range r)
{
    return r.last - r.first;
}

/* -- one pair of positions at a time: rows are images ------------------------------------------------------------ */
/* One output position (i, j) and one tap that reaches it. */
typedef struct meeting {
    const mui_conv2d_shape *s;
    int64_t tap, in, out; /* of the kernel, of the input's and the output's positions */
} meeting;

/* Calls fn with each meeting, outputs in order and their taps in order. */
static mu_status each_meeting(mui_engine *e, const mui_conv2d_shape *s,
                              mu_status (*fn)(mui_engine *e, const meeting *m, const float *a, const float *w, float *b),
                              const float *a, const float *w, float *b)
{
    for (int64_t at = 0; at < s->oh * s->ow; at++) {
        int64_t i = at / s->ow, j = at % s->ow;
        for (int64_t k = 0; k < s->kh * s->kw; k++) {
            mui_tap t = mui_tap_of(s, k / s->kw, k % s->kw);
            if (i < t.rows.first || i >= t.rows.last || j < t.columns.first || j >= t.columns.last) {
                continue;
            }
            int64_t in = (i * s->stride[0] + t.row_shift) * s->iw + j * s->stride[1] + t.column_shift;
            mu_status st = fn(e, &(meeting){s, k, in, at}, a, w, b);
            if (st != MU_OK) {
                return st;
            }
        }
    }
    return MU_OK;
}

static mu_status meet_forward(mui_engine *e, const meeting *m, const float *x, const float *w, float *y)
{
    const mui_conv2d_shape *s = m->s;
    return e->k.gemm(e, false, false, s->n, s->oc, s->ic, 1.0f, x + m->in * s->ic, s->ih * s->iw * s->ic,
                     w + m->tap * s->ic * s->oc, s->oc, 1.0f, y + m->out * s->oc, s->oh * s->ow * s->oc);
}

static mu_status meet_backward(mui_engine *e, const meeting *m, const float *dy, const float *w, float *dx)
{
    const mui_conv2d_shape *s = m->s;
    return e->k.gemm(e, false, true, s->n, s->ic, s->oc, 1.0f, dy + m->out * s->oc, s->oh * s->ow * s->oc,
                     w + m->tap * s->ic * s->oc, s->oc, 1.0f, dx + m->in * s->ic, s->ih * s->iw * s->ic);
}

mu_status mui_tap_forward(mui_engine *e, const mui_conv2d_shape *s, const float *x, const float *w, const float *bias,
                          float *y)
{
    size_t row = (size_t)s->oc * sizeof(float);
    for (int64_t i = 0; i < s->n * s->oh * s->ow; i++) {
        if (bias != NULL) {
            memcpy(y + i * s->oc, bias, row);
        } else {
            memset(y + i * s->oc, 0, row);
        }
    }
    return each_meeting(e, s, meet_forward, x, w, y);
}

mu_status mui_tap_backward_data(mui_engine *e, const mui_conv2d_shape *s, const float *dy, const float *w, float *dx)
{
    mui_fill(dx, s->n * s->ih * s->iw * s->ic, 0.0f);
    return each_meeting(e, s, meet_backward, dy, w, dx);
}

/* -- one tap at a time: rows are all positions that it reaches ---------------------------------------------------- */
/* Collects the rows of a tap: inputs (step > 1: with gaps) or outputs. Returns where they lie: from itself when they are
 * all there is, in order. */
static const float *collect(const mui_conv2d_shape *s, const mui_tap *t, bool input, const float *from, float *to)
{
    int64_t c = input ? s->ic : s->oc, h = input ? s->ih : s->oh, w = input ? s->iw : s->ow;
    int64_t row_step = input ? s->stride[0] : 1, step = input ? s->stride[1] : 1;
    int64_t row_shift = input ? t->row_shift : 0, shift = input ? t->column_shift : 0;
    if (row_step == 1 && step == 1 && span(t->rows) == h && span(t->columns) == w) {
        return from;
    }
    float *out = to;
    for (int64_t n = 0; n < s->n; n++) {
        for (int64_t i = t->rows.first; i < t->rows.last; i++) {
            const float *row = from + ((n * h + i * row_step + row_shift) * w + shift) * c;
            int64_t run = step == 1 ? span(t->columns) : 1;
            for (int64_t j = t->columns.first; j < t->columns.last; j += run) {
                memcpy(out, row + j * step * c, (size_t)(run * c) * sizeof(float));
                out += run * c;
            }
        }
    }
    return to;
}

static void bias_gradient(const mui_conv2d_shape *s, const float *dy, float *db)
{
    mui_fill(db, s->oc, 0.0f);
    for (int64_t i = 0; i < s->n * s->oh * s->ow; i++) {
        mui_axpy(NULL, s->oc, 1.0f, dy + i * s->oc, db);
    }
}

mu_status mui_tap_backward_weights(mui_engine *e, const mui_conv2d_shape *s, const float *x, const float *dy, float *dw,
                                   float *db)
{
    int64_t most = s->n * s->oh * s->ow;
    /* oneDNN's scratchpad is free here: no primitive runs before the rows were used, and products take none. */
    float *rows = mui_engine_scratch(e, MUI_SCRATCH_BACKEND, (size_t)(most * (s->ic + s->oc)) * sizeof(float));
    if (rows == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t k = 0; k < s->kh * s->kw; k++) {
        mui_tap t = mui_tap_of(s, k / s->kw, k % s->kw);
        float *d = dw + k * s->ic * s->oc;
        int64_t count = s->n * span(t.rows) * span(t.columns);
        if (count == 0) {
            mui_fill(d, s->ic * s->oc, 0.0f);
            continue;
        }
        const float *a = collect(s, &t, true, x, rows), *b = collect(s, &t, false, dy, rows + most * s->ic);
        mu_status st = e->k.gemm(e, true, false, s->ic, s->oc, count, 1.0f, a, s->ic, b, s->oc, 0.0f, d, s->oc);
        if (st != MU_OK) {
            return st;
        }
    }
    if (db != NULL) {
        bias_gradient(s, dy, db);
    }
    return MU_OK;
}
