/* Every step-th row and column of images, between channels of zeros, in any layout that keeps channels in blocks: runs of
 * channels that lie together on both sides are moved as they are, so that neither side is converted. */
#include "kern/engine.h"

#include <string.h>

/* Where element (n, c, h, w) lies, in floats: n * image + c / block * plane + h * row + w * block + c % block. */
typedef struct form {
    int64_t block, image, plane, row;
} form;

static form form_of(int64_t block, int64_t c, int64_t h, int64_t w)
{
    int64_t b = block == MUI_CHANNELS_LAST ? c : block;
    return (form){.block = b, .image = (c + b - 1) / b * h * w * b, .plane = h * w * b, .row = w * b};
}

static int64_t ceil_of(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

static mu_dims dims_in(const mui_subsample_shape *s)
{
    return MU_DIMS(s->n, s->c, s->h, s->w);
}

static mu_dims dims_out(const mui_subsample_shape *s)
{
    return MU_DIMS(s->n, s->before + s->c + s->after, ceil_of(s->h, s->step), ceil_of(s->w, s->step));
}

bool mui_image_layout(mui_engine *e, mu_dims dims, int64_t block, const mui_layout **out)
{
    *out = NULL;
    return block == 1 || (e->k.image_layout != NULL && mui_elements(dims) > 0 &&
                          e->k.image_layout(e, dims, block, out));
}

const mui_subsample_plan *mui_subsample_plan_get(mui_engine *e, const mui_subsample_shape *s)
{
    static const int64_t blocks[] = {16, 8, 4, MUI_CHANNELS_LAST}; /* 16 channels last are a block of 16 */
    mui_key key = {{MUI_KEY_SUBSAMPLE, (uint64_t)s->n, (uint64_t)s->c, (uint64_t)s->h, (uint64_t)s->w, (uint64_t)s->step,
                    (uint64_t)s->before, (uint64_t)s->after, (uint64_t)(uintptr_t)s->x}};
    mui_subsample_plan *p = mui_cache_find(&e->cache, &key);
    if (p != NULL) {
        return p;
    }
    p = mui_engine_keep(e, sizeof(*p));
    if (p == NULL) {
        return NULL;
    }
    *p = (mui_subsample_plan){.shape = *s, .block = 1};
    for (size_t i = 0; s->x != NULL && i < sizeof(blocks) / sizeof(blocks[0]); i++) {
        const mui_layout *x = NULL, *y = NULL;
        if (mui_image_layout(e, dims_in(s), blocks[i], &x) && x == s->x &&
            mui_image_layout(e, dims_out(s), blocks[i], &y)) {
            p->block = blocks[i];
            p->x = x;
            p->y = y;
            break;
        }
    }
    return mui_cache_put(e, &e->cache, &key, p) ? p : NULL;
}

/* n runs of so many floats, one after the other at these distances. Called with constants: each becomes a loop of its
 * own. */
static inline void move(bool add, int64_t run, int64_t n, const float *restrict from, int64_t from_step,
                        float *restrict to, int64_t to_step)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < run; k++) {
            float v = from[i * from_step + k];
            to[i * to_step + k] = add ? to[i * to_step + k] + v : v;
        }
    }
}

static inline void move_runs(bool add, int64_t run, int64_t n, const float *from, int64_t from_step, float *to,
                             int64_t to_step)
{
    switch (run) {
    case 1: move(add, 1, n, from, from_step, to, to_step); break;
    case 8: move(add, 8, n, from, from_step, to, to_step); break;
    case 16: move(add, 16, n, from, from_step, to, to_step); break;
    default: move(add, run, n, from, from_step, to, to_step); break;
    }
}

/* y from x, or back: x with what lies at its place in y added. */
static void each_row(const mui_subsample_plan *p, const float *from, float *to, bool back)
{
    const mui_subsample_shape *s = &p->shape;
    mu_dims out = dims_out(s);
    int64_t oh = out.dim[2], ow = out.dim[3];
    form x = form_of(p->block, s->c, s->h, s->w), y = form_of(p->block, out.dim[1], oh, ow);
    int64_t run = 0;
    for (int64_t n = 0; n < s->n; n++) {
        for (int64_t c = 0; c < s->c; c += run) {
            int64_t at = c + s->before, left = x.block - c % x.block, room = y.block - at % y.block;
            run = left < room ? left : room;
            run = run < s->c - c ? run : s->c - c;
            int64_t in = n * x.image + c / x.block * x.plane + c % x.block;
            int64_t to_y = n * y.image + at / y.block * y.plane + at % y.block;
            for (int64_t i = 0; i < oh; i++, in += s->step * x.row, to_y += y.row) {
                if (back) {
                    move_runs(true, run, ow, from + to_y, y.block, to + in, s->step * x.block);
                } else {
                    move_runs(false, run, ow, from + in, s->step * x.block, to + to_y, y.block);
                }
            }
        }
    }
}

static int64_t floats_of(mu_dims dims, const mui_layout *layout)
{
    return (int64_t)(mui_bytes_in_layout(dims, layout) / sizeof(float));
}

void mui_subsample_forward(mui_engine *e, const mui_subsample_plan *p, const float *x, float *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_COPY);
    mui_fill(y, floats_of(dims_out(&p->shape), p->y), 0.0f);
    if (mui_elements(dims_in(&p->shape)) > 0) {
        each_row(p, x, y, false);
    }
    mui_timer_stop(&t, 0, 2 * mui_float_bytes(mui_elements(dims_out(&p->shape))));
}

void mui_subsample_backward(mui_engine *e, const mui_subsample_plan *p, const float *dy, float *dx, bool accumulate)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_COPY);
    if (!accumulate) {
        mui_fill(dx, floats_of(dims_in(&p->shape), p->x), 0.0f);
    }
    if (mui_elements(dims_in(&p->shape)) > 0) {
        each_row(p, dy, dx, true);
    }
    mui_timer_stop(&t, 0, mui_float_bytes(mui_elements(dims_in(&p->shape))) +
                              mui_float_bytes(mui_elements(dims_out(&p->shape))));
}
