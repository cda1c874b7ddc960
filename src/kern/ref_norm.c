/* Batch normalisation in plain C, on plain images. Statistics are summed in double, in a fixed order. Blocked layouts
 * are converted: this is the oracle and the fallback, not the fast path. */
#include "kern/engine.h"

#include <math.h>
#include <string.h>

static mu_dims dims_of(const mui_norm_shape *s)
{
    return MU_DIMS(s->n, s->c, s->h, s->w);
}

/* Result memory: the caller's where the layout is plain, else scratch that finish() converts. */
static float *start(mui_engine *e, const mui_norm_shape *s, float *out)
{
    return s->layout == NULL ? out : mui_engine_scratch(e, MUI_SCRATCH_DX, mui_bytes_in_layout(dims_of(s), NULL));
}

static mu_status finish(mui_engine *e, const mui_norm_shape *s, const float *plain, float *out)
{
    return s->layout == NULL ? MU_OK : mui_reorder(e, dims_of(s), NULL, plain, s->layout, out);
}

static void normalise(const mui_norm_shape *s, const float *x, const float *gamma, const float *beta,
                      const float *mean, const float *var, float *y)
{
    int64_t plane = s->h * s->w;
    for (int64_t i = 0; i < s->n * s->c; i++) {
        int64_t k = i % s->c;
        float scale = (gamma != NULL ? gamma[k] : 1.0f) / sqrtf(var[k] + s->eps);
        float m = mean[k], shift = beta != NULL ? beta[k] : 0.0f;
        const float *in = x + i * plane;
        float *out = y + i * plane;
        for (int64_t j = 0; j < plane; j++) {
            float v = (in[j] - m) * scale + shift;
            out[j] = s->relu && v < 0.0f ? 0.0f : v;
        }
    }
}

static void statistics(const mui_norm_shape *s, const float *x, float *mean, float *var)
{
    int64_t plane = s->h * s->w;
    double count = (double)(s->n * plane);
    for (int64_t k = 0; k < s->c; k++) {
        double sum = 0, squares = 0;
        for (int64_t n = 0; n < s->n; n++) {
            const float *in = x + (n * s->c + k) * plane;
            for (int64_t j = 0; j < plane; j++) {
                sum += in[j];
            }
        }
        double m = sum / count;
        for (int64_t n = 0; n < s->n; n++) {
            const float *in = x + (n * s->c + k) * plane;
            for (int64_t j = 0; j < plane; j++) {
                squares += (in[j] - m) * (in[j] - m);
            }
        }
        mean[k] = (float)m;
        var[k] = (float)(squares / count);
    }
}

mu_status mui_ref_norm_forward(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                               const float *beta, void *y, float *mean, float *var, void *mask)
{
    (void)mask;
    const float *in = mui_to_plain(e, dims_of(s), s->layout, x, MUI_SCRATCH_X);
    float *out = start(e, s, y);
    if (in == NULL || out == NULL) {
        return MU_ERR_NOMEM;
    }
    statistics(s, in, mean, var);
    normalise(s, in, gamma, beta, mean, var, out);
    return finish(e, s, out, y);
}

mu_status mui_ref_norm_forward_eval(mui_engine *e, const mui_norm_shape *s, const void *x, const float *gamma,
                                    const float *beta, const float *mean, const float *var, void *y)
{
    const float *in = mui_to_plain(e, dims_of(s), s->layout, x, MUI_SCRATCH_X);
    float *out = start(e, s, y);
    if (in == NULL || out == NULL) {
        return MU_ERR_NOMEM;
    }
    normalise(s, in, gamma, beta, mean, var, out);
    return finish(e, s, out, y);
}

/* One channel's sums of dy and dy * (x - mean), dy masked where y is not positive. */
static void channel_sums(const mui_norm_shape *s, int64_t k, const float *x, const float *y, const float *dy,
                         double mean, double *sum, double *dot)
{
    int64_t plane = s->h * s->w;
    *sum = *dot = 0;
    for (int64_t n = 0; n < s->n; n++) {
        int64_t at = (n * s->c + k) * plane;
        for (int64_t j = at; j < at + plane; j++) {
            double g = s->relu && !(y[j] > 0.0f) ? 0.0 : dy[j];
            *sum += g;
            *dot += g * (x[j] - mean);
        }
    }
}

mu_status mui_ref_norm_backward(mui_engine *e, const mui_norm_shape *s, const void *x, const void *y, const void *dy,
                                const float *gamma, const float *mean, const float *var, const void *mask, void *dx,
                                float *dgamma, float *dbeta, bool accumulate, bool evaluate)
{
    (void)mask;
    const float *in = mui_to_plain(e, dims_of(s), s->layout, x, MUI_SCRATCH_X);
    const float *grad = mui_to_plain(e, dims_of(s), s->layout, dy, MUI_SCRATCH_DX);
    const float *result = s->relu ? mui_to_plain(e, dims_of(s), s->layout, y, MUI_SCRATCH_Y) : NULL;
    float *out = start(e, s, dx); /* with a layout: the memory of grad, in place */
    if (in == NULL || grad == NULL || out == NULL || (s->relu && result == NULL)) {
        return MU_ERR_NOMEM;
    }
    int64_t plane = s->h * s->w;
    double count = (double)(s->n * plane);
    for (int64_t k = 0; k < s->c; k++) {
        double sum = 0, dot = 0, inverse = 1.0 / sqrt((double)var[k] + s->eps);
        channel_sums(s, k, in, result, grad, mean[k], &sum, &dot);
        double scale = (gamma != NULL ? gamma[k] : 1.0) * inverse;
        double shift = evaluate ? 0 : sum / count, slope = evaluate ? 0 : dot / count * inverse * inverse;
        for (int64_t n = 0; n < s->n; n++) {
            int64_t at = (n * s->c + k) * plane;
            for (int64_t j = at; j < at + plane; j++) {
                double g = s->relu && !(result[j] > 0.0f) ? 0.0 : grad[j];
                out[j] = (float)(scale * (g - shift - slope * (in[j] - (double)mean[k])));
            }
        }
        if (dgamma != NULL) {
            dgamma[k] = (float)(dot * inverse) + (accumulate ? dgamma[k] : 0.0f);
        }
        if (dbeta != NULL) {
            dbeta[k] = (float)sum + (accumulate ? dbeta[k] : 0.0f);
        }
    }
    return finish(e, s, out, dx);
}
