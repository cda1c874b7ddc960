/* Flat kernels of bfloat16: a bfloat16 is the upper half of a float32, so widening is a shift and rounding an addition. */
#include "kern/bf16.h"
#include "kern/fast_math.h"

#include <string.h>

static inline float widened(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof(y));
    return y;
}

/* To nearest, ties to even; a NaN stays one. Without branches, so that loops vectorise. */
static inline uint16_t rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
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

MUI_CLONES void mui_bf16_relu(int64_t n, const uint16_t *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = widened(x[i]) < 0.0f ? 0 : x[i]; /* NaN stays */
    }
}

MUI_CLONES void mui_bf16_relu_backward(int64_t n, const uint16_t *y, const uint16_t *dy, uint16_t *dx)
{
    for (int64_t i = 0; i < n; i++) {
        dx[i] = widened(y[i]) > 0.0f ? dy[i] : 0;
    }
}

MUI_CLONES void mui_bf16_add(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = rounded(widened(a[i]) + widened(b[i]));
    }
}

MUI_CLONES void mui_bf16_add_relu(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = widened(a[i]) + widened(b[i]);
        y[i] = rounded(sum < 0.0f ? 0.0f : sum);
    }
}
