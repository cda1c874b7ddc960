/* Flat kernels over n floats: activations and their gradients, sums of two, dropout. Plain loops that the compiler
 * vectorises; one element's result depends on nothing but its own inputs. */
#include "kern/engine.h"
#include "kern/fast_math.h"
#include "kern/philox_lanes.h"
#include "kern/share.h"

#define INV_SQRT2 0.707106781f
#define INV_SQRT_2PI 0.398942280f

static inline float relu_of(float x)
{
    return x < 0.0f ? 0.0f : x; /* NaN stays */
}

static inline float gelu_of(float x)
{
    return 0.5f * x * (1.0f + mui_erff(x * INV_SQRT2));
}

static inline float gelu_slope(float x)
{
    return 0.5f * (1.0f + mui_erff(x * INV_SQRT2)) + x * INV_SQRT_2PI * mui_expf(-0.5f * x * x);
}

static inline float softplus_of(float x)
{
    float soft = mui_log1pf_positive(mui_expf(x > 20.0f ? 20.0f : x));
    return x > 20.0f ? x : soft;
}

#define FORWARD(name, expression)                                                                                      \
    MUI_CLONES static void name(int64_t n, const float *x, float *y, float a)                                          \
    {                                                                                                                  \
        (void)a;                                                                                                       \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            float v = x[i];                                                                                            \
            y[i] = (expression);                                                                                       \
        }                                                                                                              \
    }
FORWARD(relu_forward, relu_of(v))
FORWARD(leaky_forward, v > 0.0f ? v : v * a)
FORWARD(sigmoid_forward, mui_sigmoidf(v))
FORWARD(tanh_forward, mui_tanhf(v))
FORWARD(gelu_forward, gelu_of(v))
FORWARD(softplus_forward, softplus_of(v))
FORWARD(scale_forward, v * a)

/* `s` is what the gradient needs: x, or y, or nothing (then dy, unread). */
#define BACKWARD(name, expression)                                                                                     \
    MUI_CLONES static void name(int64_t n, const float *s, const float *dy, float *dx, float a, bool accumulate)       \
    {                                                                                                                  \
        (void)a, (void)s;                                                                                              \
        if (accumulate) {                                                                                              \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                float v = s[i], g = dy[i];                                                                             \
                (void)v;                                                                                               \
                dx[i] += (expression);                                                                                 \
            }                                                                                                          \
        } else {                                                                                                       \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                float v = s[i], g = dy[i];                                                                             \
                (void)v;                                                                                               \
                dx[i] = (expression);                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }
BACKWARD(relu_backward, v > 0.0f ? g : 0.0f)
BACKWARD(leaky_backward, v > 0.0f ? g : g * a)
BACKWARD(sigmoid_backward, g * ((1.0f - v) * v))
BACKWARD(tanh_backward, g * (1.0f - v * v))
BACKWARD(gelu_backward, g * gelu_slope(v))
BACKWARD(softplus_backward, v > 20.0f ? g : g * mui_sigmoidf(v))
BACKWARD(scale_backward, g * a)

/* One row for each operation. */
typedef struct unary_row {
    void (*forward)(int64_t n, const float *x, float *y, float a);
    void (*backward)(int64_t n, const float *s, const float *dy, float *dx, float a, bool accumulate);
    bool keeps_zero, needs_input, needs_output;
} unary_row;

static const unary_row rows[MUI_UNARY_COUNT] = {
    [MUI_RELU] = {relu_forward, relu_backward, true, false, true},
    [MUI_LEAKY_RELU] = {leaky_forward, leaky_backward, true, true, false},
    [MUI_SIGMOID] = {sigmoid_forward, sigmoid_backward, false, false, true},
    [MUI_TANH] = {tanh_forward, tanh_backward, true, false, true},
    [MUI_GELU] = {gelu_forward, gelu_backward, true, true, false},
    [MUI_SOFTPLUS] = {softplus_forward, softplus_backward, false, true, false},
    [MUI_SCALE] = {scale_forward, scale_backward, true, false, false},
};

bool mui_unary_keeps_zero(mui_unary op)
{
    return rows[op].keeps_zero;
}

bool mui_unary_needs_input(mui_unary op)
{
    return rows[op].needs_input;
}

bool mui_unary_needs_output(mui_unary op)
{
    return rows[op].needs_output;
}

/* -- in parts, see share.h -------------------------------------------------------------------------------------- */
typedef struct flat_args {
    const unary_row *row;
    const float *x, *y;
    float *out, a;
    bool accumulate;
} flat_args;

static void unary_forward_part(void *args, int64_t from, int64_t to)
{
    const flat_args *f = args;
    f->row->forward(to - from, f->x + from, f->out + from, f->a);
}

static void unary_backward_part(void *args, int64_t from, int64_t to)
{
    const flat_args *f = args;
    f->row->backward(to - from, f->x + from, f->y + from, f->out + from, f->a, f->accumulate);
}

void mui_unary_forward(mui_engine *e, mui_unary op, int64_t n, const float *x, float *y, float a)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    mui_split(e, n, unary_forward_part, &(flat_args){.row = &rows[op], .x = x, .out = y, .a = a});
    mui_timer_stop(&t, 0, mui_float_bytes(2 * n));
}

void mui_unary_backward(mui_engine *e, mui_unary op, int64_t n, const float *x, const float *y, const float *dy,
                        float *dx, float a, bool accumulate)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    const float *s = rows[op].needs_input ? x : rows[op].needs_output ? y : dy;
    mui_split(e, n, unary_backward_part,
              &(flat_args){.row = &rows[op], .x = s, .y = dy, .out = dx, .a = a, .accumulate = accumulate});
    mui_timer_stop(&t, 0, mui_float_bytes((s == dy ? 2 : 3) * n));
}

MUI_CLONES static void add_relu(int64_t n, const float *a, const float *b, float *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = relu_of(a[i] + b[i]);
    }
}

static void add_relu_part(void *args, int64_t from, int64_t to)
{
    const flat_args *f = args;
    add_relu(to - from, f->x + from, f->y + from, f->out + from);
}

void mui_add_relu_forward(mui_engine *e, int64_t n, const float *a, const float *b, float *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    mui_split(e, n, add_relu_part, &(flat_args){.x = a, .y = b, .out = y});
    mui_timer_stop(&t, 0, mui_float_bytes(3 * n));
}

MUI_CLONES void mui_fill(float *y, int64_t n, float value)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = value;
    }
}

MUI_CLONES static void axpy(int64_t n, float a, const float *x, float *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] += a * x[i];
    }
}

static void axpy_part(void *args, int64_t from, int64_t to)
{
    const flat_args *f = args;
    axpy(to - from, f->a, f->x + from, f->out + from);
}

void mui_axpy(mui_engine *e, int64_t n, float a, const float *x, float *y)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    mui_split(e, n, axpy_part, &(flat_args){.x = x, .out = y, .a = a});
    mui_timer_stop(&t, 0, mui_float_bytes(3 * n));
}

/* -- dropout ---------------------------------------------------------------------------------------------------- */
typedef struct dropout_args {
    const float *x;
    float *y, p;
    uint64_t key, stream;
} dropout_args;

/* from is a multiple of 4 * MUI_LANES. */
MUI_CLONES static void dropout(int64_t from, int64_t n, const float *x, float *y, float p, uint64_t key,
                               uint64_t stream)
{
    float scale = 1.0f / (1.0f - p);
    for (int64_t at = from; at < n; at += 4 * MUI_LANES) {
        uint32_t bits[4][MUI_LANES];
        mui_philox_lanes(key, stream, (uint64_t)(at / 4), bits);
        float draw[4 * MUI_LANES];
        for (int j = 0; j < MUI_LANES; j++) {
            for (int w = 0; w < 4; w++) {
                draw[4 * j + w] = (float)(int32_t)(bits[w][j] >> 8) * 0x1p-24f;
            }
        }
        int64_t count = n - at < 4 * MUI_LANES ? n - at : 4 * MUI_LANES;
        for (int64_t i = 0; i < count; i++) {
            float kept = x[at + i] * scale;
            y[at + i] = draw[i] >= p ? kept : 0.0f;
        }
    }
}

static void dropout_part(void *args, int64_t from, int64_t to)
{
    const dropout_args *d = args;
    dropout(from, to, d->x, d->y, d->p, d->key, d->stream);
}

void mui_dropout(mui_engine *e, int64_t n, const float *x, float *y, float p, uint64_t key, uint64_t stream)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    mui_split(e, n, dropout_part, &(dropout_args){.x = x, .y = y, .p = p, .key = key, .stream = stream});
    mui_timer_stop(&t, 0, mui_float_bytes(2 * n));
}
