/* Flat kernels of bfloat16: a bfloat16 is the upper half of a float32, so widening is a shift and rounding an addition.
 * Loops and timers are apart: the loops are compiled once for each vector width. */
#include "kern/bf16.h"
#include "kern/engine.h"
#include "kern/fast_math.h"

static inline float widened(uint16_t x)
{
    return mui_float_of_bits((uint32_t)x << 16);
}

/* To nearest, ties to even; a NaN stays one. Without branches, so that loops vectorise. */
static inline uint16_t rounded(float x)
{
    uint32_t bits = mui_bits_of_float(x);
    uint32_t near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : near);
}

MUI_CLONES void mui_bf16_widen(int64_t n, const uint16_t *x, float *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = widened(x[i]);
    }
}

MUI_CLONES void mui_bf16_round(int64_t n, const float *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = rounded(x[i]);
    }
}

MUI_CLONES void mui_bf16_coarsen(int64_t n, const float *x, float *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = widened(rounded(x[i]));
    }
}

MUI_CLONES static void relu(int64_t n, const uint16_t *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = widened(x[i]) < 0.0f ? 0 : x[i]; /* NaN stays */
    }
}

MUI_CLONES static void relu_backward(int64_t n, const uint16_t *y, const uint16_t *dy, uint16_t *dx)
{
    for (int64_t i = 0; i < n; i++) {
        dx[i] = widened(y[i]) > 0.0f ? dy[i] : 0;
    }
}

MUI_CLONES static void add(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = rounded(widened(a[i]) + widened(b[i]));
    }
}

MUI_CLONES static void add_relu(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = widened(a[i]) + widened(b[i]);
        y[i] = rounded(sum < 0.0f ? 0.0f : sum);
    }
}

/* Elements read and written, all bfloat16. */
static void stop(mui_timer *t, int64_t n)
{
    mui_timer_stop(t, 0, (double)n * (double)sizeof(uint16_t));
}

void mui_bf16_relu(mui_engine *e, int64_t n, const uint16_t *x, uint16_t *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    relu(n, x, y);
    stop(&t, 2 * n);
}

void mui_bf16_relu_backward(mui_engine *e, int64_t n, const uint16_t *y, const uint16_t *dy, uint16_t *dx)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    relu_backward(n, y, dy, dx);
    stop(&t, 3 * n);
}

void mui_bf16_add(mui_engine *e, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    add(n, a, b, y);
    stop(&t, 3 * n);
}

void mui_bf16_add_relu(mui_engine *e, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    add_relu(n, a, b, y);
    stop(&t, 3 * n);
}

void mui_bf16_cast(mui_engine *e, int64_t n, const void *from, void *to, bool narrow)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_COPY);
    if (narrow) {
        mui_bf16_round(n, from, to);
    } else {
        mui_bf16_widen(n, from, to);
    }
    mui_timer_stop(&t, 0, (double)n * (double)(sizeof(float) + sizeof(uint16_t)));
}
