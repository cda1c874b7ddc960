/* Taps of a convolution: which outputs each reaches, and from where. For kernels of our own. */
#ifndef MUI_TAPS_H
#define MUI_TAPS_H

#include "kern/kern.h"

/* Outputs [first, last) for which o * stride - pad + k * dilation lies in [0, in). */
typedef struct mui_range {
    int64_t first, last;
} mui_range;

static inline mui_range mui_range_inside(int64_t in, int64_t out, int64_t stride, int64_t pad, int64_t offset)
{
    int64_t low = pad - offset; /* o * stride >= low */
    int64_t high = in - 1 + pad - offset;
    mui_range r = {low <= 0 ? 0 : (low + stride - 1) / stride, high < 0 ? 0 : high / stride + 1};
    r.last = r.last > out ? out : r.last;
    r.first = r.first > r.last ? r.last : r.first;
    return r;
}

/* One tap (r, q) of one pair of planes: which rows and columns of the output it reaches. */
typedef struct mui_tap {
    mui_range rows, columns;
    int64_t row_shift, column_shift; /* input = output * stride + shift */
} mui_tap;

static inline mui_tap mui_tap_of(const mui_conv2d_shape *s, int64_t r, int64_t q)
{
    mui_tap t = {.rows = mui_range_inside(s->ih, s->oh, s->stride[0], s->pad[0], r * s->dilation[0]),
             .columns = mui_range_inside(s->iw, s->ow, s->stride[1], s->pad[1], q * s->dilation[1]),
             .row_shift = r * s->dilation[0] - s->pad[0],
             .column_shift = q * s->dilation[1] - s->pad[1]};
    return t;
}

#endif
