/* Pooling in plain C on plain images. The workspace of max pooling holds, for each output, the winner's position in its
 * input plane as int32. The first of equal maxima wins, and NaN wins over numbers, as in PyTorch. */
#include "kern/engine.h"

static mu_dims in_dims(const mui_pool2d_shape *s)
{
    return MU_DIMS(s->n, s->c, s->ih, s->iw);
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The real elements of one window, and what an average divides by. */
typedef struct window {
    int64_t top, bottom, left, right;
    float divisor;
} window;

static window window_of(const mui_pool2d_shape *s, int64_t i, int64_t j)
{
    int64_t top = i * s->stride[0] - s->pad[0], left = j * s->stride[1] - s->pad[1];
    window v = {max64(top, 0), min64(top + s->kh, s->ih), max64(left, 0), min64(left + s->kw, s->iw), 0};
    int64_t real = max64(v.bottom - v.top, 0) * max64(v.right - v.left, 0);
    v.divisor = (float)(s->kind == MUI_POOL_AVG ? s->kh * s->kw : real);
    return v;
}

static void pool_max(const mui_pool2d_shape *s, window v, const float *x, float *y, int32_t *where)
{
    int64_t best = v.top * s->iw + v.left;
    for (int64_t i = v.top; i < v.bottom; i++) {
        for (int64_t j = v.left; j < v.right; j++) {
            float candidate = x[i * s->iw + j];
            if (candidate > x[best] || candidate != candidate) {
                best = i * s->iw + j;
            }
        }
    }
    *y = x[best];
    if (where != NULL) {
        *where = (int32_t)best;
    }
}

static void pool_average(const mui_pool2d_shape *s, window v, const float *x, float *y)
{
    double sum = 0;
    for (int64_t i = v.top; i < v.bottom; i++) {
        for (int64_t j = v.left; j < v.right; j++) {
            sum += x[i * s->iw + j];
        }
    }
    *y = v.divisor > 0 ? (float)(sum / v.divisor) : 0.0f;
}

size_t mui_ref_pool_workspace_bytes(mui_engine *e, const mui_pool2d_shape *s)
{
    (void)e;
    return (size_t)(s->n * s->c * s->oh * s->ow) * sizeof(int32_t);
}

mu_status mui_ref_pool_forward(mui_engine *e, const mui_pool2d_shape *s, const void *image, void *result, void *workspace)
{
    const float *x = mui_to_plain(e, in_dims(s), s->x, image, MUI_SCRATCH_X);
    float *y = result;
    if (x == NULL) {
        return MU_ERR_NOMEM;
    }
    int32_t *where = workspace;
    for (int64_t p = 0; p < s->n * s->c; p++) {
        for (int64_t o = 0; o < s->oh * s->ow; o++) {
            window v = window_of(s, o / s->ow, o % s->ow);
            int64_t at = p * s->oh * s->ow + o;
            if (s->kind == MUI_POOL_MAX) {
                pool_max(s, v, x + p * s->ih * s->iw, &y[at], where != NULL ? &where[at] : NULL);
            } else {
                pool_average(s, v, x + p * s->ih * s->iw, &y[at]);
            }
        }
    }
    return MU_OK;
}

static void spread_average(const mui_pool2d_shape *s, window v, float dy, float *dx)
{
    float share = v.divisor > 0 ? dy / v.divisor : 0.0f;
    for (int64_t i = v.top; i < v.bottom; i++) {
        for (int64_t j = v.left; j < v.right; j++) {
            dx[i * s->iw + j] += share;
        }
    }
}

mu_status mui_ref_pool_backward(mui_engine *e, const mui_pool2d_shape *s, const void *gradient, const void *workspace,
                                void *dx)
{
    const float *dy = gradient;
    const int32_t *where = workspace;
    size_t bytes = mui_bytes_in_layout(in_dims(s), NULL);
    float *out = s->x == NULL ? dx : mui_engine_scratch(e, MUI_SCRATCH_DX, bytes);
    if (out == NULL) {
        return MU_ERR_NOMEM;
    }
    mui_fill(out, (int64_t)(bytes / sizeof(float)), 0.0f);
    for (int64_t p = 0; p < s->n * s->c; p++) {
        float *plane = out + p * s->ih * s->iw;
        for (int64_t o = 0; o < s->oh * s->ow; o++) {
            int64_t at = p * s->oh * s->ow + o;
            if (s->kind == MUI_POOL_MAX) {
                plane[where[at]] += dy[at];
            } else {
                spread_average(s, window_of(s, o / s->ow, o % s->ow), dy[at], plane);
            }
        }
    }
    return s->x == NULL ? MU_OK : mui_reorder(e, in_dims(s), NULL, out, s->x, dx);
}
