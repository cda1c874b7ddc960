/* Matrix product in plain C, row by row of the result in a fixed order. */
#include "kern/engine.h"

static void scale_row(int64_t n, float beta, float *c)
{
    for (int64_t j = 0; j < n; j++) {
        c[j] = beta == 0.0f ? 0.0f : beta * c[j]; /* beta 0 never reads C: it may hold NaN */
    }
}

mu_status mui_ref_gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                       const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    (void)e;
    for (int64_t i = 0; i < m; i++) {
        float *row = c + i * ldc;
        scale_row(n, beta, row);
        if (trans_b) {
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t l = 0; l < k; l++) {
                    sum += (double)a[trans_a ? l * lda + i : i * lda + l] * b[j * ldb + l];
                }
                row[j] += alpha * (float)sum;
            }
        } else {
            for (int64_t l = 0; l < k; l++) {
                float f = alpha * a[trans_a ? l * lda + i : i * lda + l];
                const float *other = b + l * ldb;
                for (int64_t j = 0; j < n; j++) {
                    row[j] += f * other[j];
                }
            }
        }
    }
    return MU_OK;
}
