/* PowerSGD's arithmetic. */
#include "ddp/hook_powersgd.h"

#include <math.h>
#include <string.h>

enum { LANES = 16 }; /* partial sums, so that compilers use vectors */

static float dot(const float *a, const float *b, int64_t n)
{
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += a[i + l] * b[i + l];
        }
    }
    float sum = 0;
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    for (int l = 0; l < LANES; l++) {
        sum += lane[l];
    }
    return sum;
}

static double dot_double(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)a[i] * (double)b[i];
    }
    return sum;
}

void mui_powersgd_p(const float *m, const float *q, float *p, int64_t rows, int64_t columns, int64_t rank)
{
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < rank; k++) {
            p[k * rows + i] = dot(m + i * columns, q + k * columns, columns);
        }
    }
}

void mui_powersgd_q(const float *m, const float *p, float *q, int64_t rows, int64_t columns, int64_t rank)
{
    memset(q, 0, (size_t)(columns * rank) * sizeof(*q));
    for (int64_t i = 0; i < rows; i++) {
        const float *row = m + i * columns;
        for (int64_t k = 0; k < rank; k++) {
            float x = p[k * rows + i], *out = q + k * columns;
            for (int64_t j = 0; j < columns; j++) {
                out[j] += x * row[j];
            }
        }
    }
}

void mui_powersgd_restore(float *m, const float *p, const float *q, int64_t rows, int64_t columns, int64_t rank)
{
    for (int64_t i = 0; i < rows; i++) {
        float *row = m + i * columns;
        for (int64_t j = 0; j < columns; j++) {
            row[j] = p[i] * q[j];
        }
        for (int64_t k = 1; k < rank; k++) {
            float x = p[k * rows + i];
            const float *in = q + k * columns;
            for (int64_t j = 0; j < columns; j++) {
                row[j] += x * in[j];
            }
        }
    }
}

static void divide(float *a, int64_t n, double epsilon)
{
    double norm = sqrt(dot_double(a, a, n)) + epsilon;
    for (int64_t i = 0; i < n && norm != 0; i++) {
        a[i] = (float)((double)a[i] / norm);
    }
}

static void remove_part(float *a, const float *unit, int64_t n)
{
    double x = dot_double(a, unit, n);
    for (int64_t i = 0; i < n; i++) {
        a[i] = (float)((double)a[i] - x * (double)unit[i]);
    }
}

/* Columns that depend on each other leave a small rest of rounding, which after division points anywhere: it is made
 * orthogonal once more, or P P' would not be a projection. */
void mui_powersgd_orthogonalise(float *a, int64_t n, int64_t rank, double epsilon)
{
    for (int64_t k = 0; k < rank; k++) {
        float *column = a + k * n;
        for (int64_t i = 0; i < k; i++) {
            remove_part(column, a + i * n, n);
        }
        divide(column, n, epsilon);
        for (int64_t i = 0; i < k; i++) {
            remove_part(column, a + i * n, n);
        }
        if (k > 0 && epsilon == 0) {
            divide(column, n, 0);
        }
    }
}

bool mui_powersgd_useless(const float *a, int64_t n, int64_t rank)
{
    for (int64_t k = 0; k < rank; k++) {
        double square = dot_double(a + k * n, a + k * n, n);
        if (!isfinite(square) || square <= 0) {
            return true;
        }
    }
    return false;
}
