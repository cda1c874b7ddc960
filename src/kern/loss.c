/* Reductions, softmax and losses over plain rows. `omp simd` lets sums run in vector lanes: their order is fixed by the
 * compiled code, so results repeat bit for bit on CPUs of one kind, whatever the alignment (see CMakeLists.txt). */
#include "kern/engine.h"
#include "kern/fast_math.h"

#include <string.h>

MUI_CLONES static double sum_of(int64_t n, const float *x)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += x[i];
    }
    return sum;
}

double mui_sum(mui_engine *e, int64_t n, const float *x)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_SUM);
    double sum = sum_of(n, x);
    mui_timer_stop(&t, 0, mui_float_bytes(n));
    return sum;
}

/* A float's square is exact in double, so only the order of the sum decides its bits; whether the compiler makes a fused
 * multiply-add of it does not. */
static inline double line_squares(const float *x)
{
    double q[MUI_SQUARES_LINE / 2];
    for (int j = 0; j < 8; j++) {
        q[j] = (double)x[j] * x[j] + (double)x[j + 8] * x[j + 8];
    }
    for (int j = 0; j < 4; j++) {
        q[j] += q[j + 4];
    }
    return (q[0] + q[2]) + (q[1] + q[3]);
}

MUI_CLONES static double block_squares(int64_t lines, const float *x)
{
    double line[MUI_SQUARES_BLOCK], sum = 0;
    for (int64_t i = 0; i < lines; i++) {
        line[i] = line_squares(x + i * MUI_SQUARES_LINE);
    }
    for (int64_t i = 0; i < lines; i++) {
        sum += line[i];
    }
    return sum;
}

double mui_sum_squares(int64_t n, const float *x)
{
    double sum = 0;
    int64_t lines = n / MUI_SQUARES_LINE, at = 0;
    for (; at + MUI_SQUARES_BLOCK <= lines; at += MUI_SQUARES_BLOCK) {
        sum += block_squares(MUI_SQUARES_BLOCK, x + at * MUI_SQUARES_LINE);
    }
    if (at * MUI_SQUARES_LINE < n) {
        float last[MUI_SQUARES_BLOCK * MUI_SQUARES_LINE] = {0};
        int64_t left = n - at * MUI_SQUARES_LINE;
        memcpy(last, x + at * MUI_SQUARES_LINE, (size_t)left * sizeof(float));
        sum += block_squares((left + MUI_SQUARES_LINE - 1) / MUI_SQUARES_LINE, last);
    }
    return sum;
}

/* -- softmax ---------------------------------------------------------------------------------------------------- */
static inline float row_max(int64_t n, const float *x)
{
    float m = -INFINITY;
#pragma omp simd reduction(max : m)
    for (int64_t i = 0; i < n; i++) {
        m = x[i] > m ? x[i] : m;
    }
    return m; /* NaN is not seen here but makes the sum of exponentials one */
}

/* y = e^(x - m); returns the sum. y may equal x. */
static inline float row_exp(int64_t n, const float *x, float m, float *y)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        float v = mui_expf(x[i] - m);
        y[i] = v;
        sum += v;
    }
    return sum;
}

/* Sum of e^(x - m), x left alone. */
static inline float row_exp_sum(int64_t n, const float *x, float m)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += mui_expf(x[i] - m);
    }
    return sum;
}

MUI_CLONES static void softmax_row(int64_t n, const float *x, float *y)
{
    float sum = row_exp(n, x, row_max(n, x), y), inverse = 1.0f / sum;
    for (int64_t i = 0; i < n; i++) {
        y[i] *= inverse;
    }
}

MUI_CLONES static void log_softmax_row(int64_t n, const float *x, float *y)
{
    float m = row_max(n, x), log_sum = logf(row_exp_sum(n, x, m));
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] - m - log_sum;
    }
}

void mui_softmax_forward(mui_engine *e, int64_t rows, int64_t cols, const float *x, float *y, bool log)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_LOSS);
    for (int64_t r = 0; r < rows; r++) {
        (log ? log_softmax_row : softmax_row)(cols, x + r * cols, y + r * cols);
    }
    mui_timer_stop(&t, 0, mui_float_bytes(2 * rows * cols));
}

MUI_CLONES static float dot_row(int64_t n, const float *a, const float *b)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

MUI_CLONES static void softmax_backward_row(int64_t n, const float *y, const float *dy, float *dx)
{
    float dot = dot_row(n, y, dy);
    for (int64_t i = 0; i < n; i++) {
        dx[i] = y[i] * (dy[i] - dot);
    }
}

MUI_CLONES static void log_softmax_backward_row(int64_t n, const float *y, const float *dy, float *dx)
{
    float sum = (float)sum_of(n, dy);
    for (int64_t i = 0; i < n; i++) {
        dx[i] = dy[i] - mui_expf(y[i]) * sum;
    }
}

void mui_softmax_backward(mui_engine *e, int64_t rows, int64_t cols, const float *y, const float *dy, float *dx,
                          bool log)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_LOSS);
    for (int64_t r = 0; r < rows; r++) {
        (log ? log_softmax_backward_row : softmax_backward_row)(cols, y + r * cols, dy + r * cols, dx + r * cols);
    }
    mui_timer_stop(&t, 0, mui_float_bytes(3 * rows * cols));
}

/* -- losses ----------------------------------------------------------------------------------------------------- */
/* One row's loss; grad (may be NULL) gets softmax * scale - targets * scale. */
MUI_CLONES static double cross_entropy_row(int64_t n, const float *x, int64_t label, float smoothing, float scale,
                                           float *grad)
{
    float m = row_max(n, x);
    float sum = grad != NULL ? row_exp(n, x, m, grad) : row_exp_sum(n, x, m);
    double lse = (double)m + log((double)sum);
    double loss = (1.0 - smoothing) * (lse - x[label]);
    if (smoothing > 0.0f) {
        loss += smoothing * (lse - sum_of(n, x) / (double)n);
    }
    if (grad != NULL) {
        float factor = scale / sum, flat = smoothing / (float)n * scale;
        for (int64_t i = 0; i < n; i++) {
            grad[i] = grad[i] * factor - flat;
        }
        grad[label] -= (1.0f - smoothing) * scale;
    }
    return loss;
}

void mui_cross_entropy(mui_engine *e, int64_t rows, int64_t cols, const float *logits, const int64_t *labels,
                       float smoothing, int64_t ignore, float *loss, float *grad, int64_t *bad_row)
{
    int64_t counted = 0;
    *bad_row = -1;
    for (int64_t r = 0; r < rows; r++) {
        if (labels[r] == ignore) {
            continue;
        }
        if (labels[r] < 0 || labels[r] >= cols) {
            *bad_row = r;
            return;
        }
        counted++;
    }
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_LOSS);
    double sum = 0;
    float scale = counted > 0 ? 1.0f / (float)counted : 0.0f;
    for (int64_t r = 0; r < rows; r++) {
        float *g = grad != NULL ? grad + r * cols : NULL;
        if (labels[r] != ignore) {
            sum += cross_entropy_row(cols, logits + r * cols, labels[r], smoothing, scale, g);
        } else if (g != NULL) {
            memset(g, 0, (size_t)cols * sizeof(float));
        }
    }
    *loss = counted > 0 ? (float)(sum / (double)counted) : NAN;
    mui_timer_stop(&t, 0, mui_float_bytes((grad != NULL ? 2 : 1) * rows * cols));
}

MUI_CLONES static double mse_part(int64_t n, const float *x, const float *target, float scale, float *grad)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        double d = x[i] - target[i];
        sum += d * d;
    }
    for (int64_t i = 0; grad != NULL && i < n; i++) {
        grad[i] = (x[i] - target[i]) * scale;
    }
    return sum;
}

void mui_mse(mui_engine *e, int64_t n, const float *x, const float *target, float *loss, float *grad)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_LOSS);
    *loss = n > 0 ? (float)(mse_part(n, x, target, 2.0f / (float)n, grad) / (double)n) : NAN;
    mui_timer_stop(&t, 0, mui_float_bytes((grad != NULL ? 3 : 2) * n));
}

/* max(x, 0) - x t + log(1 + e^-|x|): never overflows. */
static inline float bce_of(float x, float t)
{
    return (x > 0.0f ? x : 0.0f) - x * t + mui_log1pf_positive(mui_expf(-fabsf(x)));
}

MUI_CLONES static double bce_part(int64_t n, const float *x, const float *target, float scale, float *grad)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += bce_of(x[i], target[i]);
    }
    for (int64_t i = 0; grad != NULL && i < n; i++) {
        grad[i] = (mui_sigmoidf(x[i]) - target[i]) * scale;
    }
    return sum;
}

void mui_bce_with_logits(mui_engine *e, int64_t n, const float *x, const float *target, float *loss, float *grad)
{
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_LOSS);
    *loss = n > 0 ? (float)(bce_part(n, x, target, 1.0f / (float)n, grad) / (double)n) : NAN;
    mui_timer_stop(&t, 0, mui_float_bytes((grad != NULL ? 3 : 2) * n));
}
