/* Flat kernels of bfloat16: a bfloat16 is the upper half of a float32, so widening is a shift and rounding an addition.
 * Loops and timers are apart: the loops are compiled once for each vector width. */
#include "kern/bf16.h"
#include "kern/engine.h"
#include "kern/share.h"
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

/* Of one form, for the rows below: b is not read by relu. */
typedef void (*loop)(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y);

MUI_CLONES static void relu(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    (void)b;
    for (int64_t i = 0; i < n; i++) {
        y[i] = widened(a[i]) < 0.0f ? 0 : a[i]; /* NaN stays */
    }
}

MUI_CLONES static void relu_backward(int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = widened(a[i]) > 0.0f ? b[i] : 0;
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

/* -- in parts, see share.h -------------------------------------------------------------------------------------- */
typedef struct flat_args {
    loop f;
    const uint16_t *a, *b;
    uint16_t *y;
} flat_args;

static void part(void *args, int64_t from, int64_t to)
{
    const flat_args *f = args;
    f->f(to - from, f->a + from, f->b + from, f->y + from);
}

/* Of so many arrays. b may be a where it is not read. */
static void run(mui_engine *e, loop f, int arrays, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    mui_split(e, n, part, &(flat_args){f, a, b, y});
    mui_timer_stop(&t, 0, (double)arrays * (double)n * (double)sizeof(*y));
}

void mui_bf16_relu(mui_engine *e, int64_t n, const uint16_t *x, uint16_t *y)
{
    run(e, relu, 2, n, x, x, y);
}

void mui_bf16_relu_backward(mui_engine *e, int64_t n, const uint16_t *y, const uint16_t *dy, uint16_t *dx)
{
    run(e, relu_backward, 3, n, y, dy, dx);
}

void mui_bf16_add(mui_engine *e, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    run(e, add, 3, n, a, b, y);
}

void mui_bf16_add_relu(mui_engine *e, int64_t n, const uint16_t *a, const uint16_t *b, uint16_t *y)
{
    run(e, add_relu, 3, n, a, b, y);
}

typedef struct cast_args {
    const float *wide_from;
    const uint16_t *from;
    float *wide_to;
    uint16_t *to;
} cast_args;

static void narrow_part(void *args, int64_t from, int64_t to)
{
    const cast_args *f = args;
    mui_bf16_round(to - from, f->wide_from + from, f->to + from);
}

static void widen_part(void *args, int64_t from, int64_t to)
{
    const cast_args *f = args;
    mui_bf16_widen(to - from, f->from + from, f->wide_to + from);
}

void mui_bf16_cast(mui_engine *e, int64_t n, const void *from, void *to, bool narrow)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_COPY);
    if (narrow) {
        mui_split(e, n, narrow_part, &(cast_args){.wide_from = from, .to = to});
    } else {
        mui_split(e, n, widen_part, &(cast_args){.from = from, .wide_to = to});
    }
    mui_timer_stop(&t, 0, (double)n * (double)(sizeof(float) + sizeof(uint16_t)));
}
