/* Batch normalisation and pooling against their definitions in double, on plain and blocked layouts. */
#include "kern/kern_util.h"

/* A layout that convolutions of this engine give to images of this shape; NULL: plain is all there is. */
static const mui_layout *blocked(mui_engine *e, int64_t n, int64_t ch, int64_t h, int64_t w)
{
    mui_conv2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = n;
    s.ic = 16;
    s.oc = ch;
    s.ih = s.oh = h;
    s.iw = s.ow = w;
    s.kh = s.kw = 3;
    s.stride[0] = s.stride[1] = s.pad[0] = s.pad[1] = s.dilation[0] = s.dilation[1] = s.groups = 1;
    const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
    assert_non_null(p);
    return p->y;
}

typedef struct norm_case {
    int64_t n, c, h, w;
} norm_case;
static const norm_case norm_cases[] = {{2, 16, 7, 7}, {3, 32, 4, 5}, {2, 17, 5, 5}, {4, 3, 6, 6},   {2, 1, 9, 9},
                                       {8, 5, 1, 1},  {33, 64, 1, 1}, {1, 64, 3, 3}, {2, 40, 2, 2}, {0, 16, 4, 4},
                                       {1, 16, 1, 1}, {2, 100, 1, 1}};

/* The definition, forward and backward; gamma, beta may be NULL. var is given when evaluating. */
typedef struct norm_truth {
    double *y, *dx, *mean, *var, *dgamma, *dbeta;
} norm_truth;

static norm_truth define(mu_context *c, const norm_case *k, const float *x, const float *gamma, const float *beta,
                         const float *dy, bool relu, float eps, const float *mean, const float *var)
{
    int64_t total = k->n * k->c * k->h * k->w, plane = k->h * k->w, m = k->n * plane;
    norm_truth t = {(double *)floats(c, 2 * total), (double *)floats(c, 2 * total), (double *)floats(c, 2 * k->c),
                    (double *)floats(c, 2 * k->c),  (double *)floats(c, 2 * k->c),  (double *)floats(c, 2 * k->c)};
    for (int64_t ch = 0; ch < k->c; ch++) {
        double mu = 0, v = 0, sum = 0, dot = 0;
        for (int64_t i = 0; i < total; i++) {
            mu += i / plane % k->c == ch ? x[i] / (double)m : 0;
        }
        for (int64_t i = 0; i < total; i++) {
            v += i / plane % k->c == ch ? (x[i] - mu) * (x[i] - mu) / (double)m : 0;
        }
        mu = mean != NULL ? mean[ch] : mu;
        v = var != NULL ? var[ch] : v;
        double inverse = 1 / sqrt(v + eps), g = gamma != NULL ? gamma[ch] : 1;
        for (int64_t i = 0; i < total; i++) {
            if (i / plane % k->c == ch) {
                t.y[i] = (x[i] - mu) * inverse * g + (beta != NULL ? beta[ch] : 0);
                double d = relu && t.y[i] <= 0 ? 0 : dy[i];
                t.y[i] = relu && t.y[i] < 0 ? 0 : t.y[i];
                sum += d;
                dot += d * (x[i] - mu) * inverse;
                t.dx[i] = d;
            }
        }
        for (int64_t i = 0; i < total; i++) {
            if (i / plane % k->c == ch) {
                double through = mean != NULL ? 0 : (sum + (x[i] - mu) * inverse * dot) / (double)m;
                t.dx[i] = g * inverse * (t.dx[i] - through);
            }
        }
        t.mean[ch] = mu;
        t.var[ch] = v;
        t.dgamma[ch] = dot;
        t.dbeta[ch] = sum;
    }
    return t;
}

typedef struct norm_data {
    float *x, *dy, *gamma, *beta;
} norm_data;

static void check_norm(mui_engine *e, mu_context *c, const norm_case *k, const mui_layout *layout, bool relu,
                       bool affine, bool evaluate)
{
    int64_t total = k->n * k->c * k->h * k->w;
    mu_dims dims = MU_DIMS(k->n, k->c, k->h, k->w);
    mui_norm_shape s = {k->n, k->c, k->h, k->w, layout, relu, 1e-3f, false};
    norm_data d = {random_floats(c, total, 5), random_floats(c, total, 6), NULL, NULL};
    if (affine) {
        d.gamma = random_floats(c, k->c, 7);
        d.beta = random_floats(c, k->c, 8);
    }
    float *mean = floats(c, k->c), *var = floats(c, k->c), *dgamma = random_floats(c, k->c, 9),
          *dbeta = random_floats(c, k->c, 10);
    for (int64_t i = 0; i < k->c; i++) {
        mean[i] = 0.1f * (float)i;
        var[i] = 1.0f + 0.01f * (float)i;
    }
    norm_truth t = define(c, k, d.x, d.gamma, d.beta, d.dy, relu, s.eps, evaluate ? mean : NULL, evaluate ? var : NULL);
    float *x = to_layout(e, c, dims, layout, d.x), *dy = to_layout(e, c, dims, layout, d.dy), *y = dirty(c, dims, layout);
    float *dx = dirty(c, dims, layout);
    size_t mask_bytes = evaluate ? 0 : mui_batch_norm_mask_bytes(e, &s);
    void *mask = floats(c, (int64_t)(mask_bytes + 3) / 4);
    if (evaluate) {
        assert_int_equal(mui_batch_norm_forward_eval(e, &s, x, d.gamma, d.beta, mean, var, y), MU_OK);
    } else {
        assert_int_equal(mui_batch_norm_forward(e, &s, x, d.gamma, d.beta, y, mean, var, mask), MU_OK);
        assert_close("mean", mean, t.mean, total > 0 ? k->c : 0, 1e-5, 0.1);
        assert_close("var", var, t.var, total > 0 ? k->c : 0, 1e-5, 0.1);
        for (int64_t i = 0; i < k->c && total == 0; i++) {
            assert_true(mean[i] == 0 && var[i] == 0);
        }
    }
    assert_close("norm y", from_layout(e, c, dims, layout, y), t.y, total, 1e-5, 4);
    assert_padding_zero("norm y", e, c, dims, layout, y);
    /* Twice: out of place overwriting, then in place adding. */
    for (int round = 0; round < 2; round++) {
        float *out = round == 0 ? dx : dy;
        mu_status st = evaluate ? mui_batch_norm_backward_eval(e, &s, x, y, dy, d.gamma, mean, var, out, dgamma, dbeta,
                                                               round == 1)
                                : mui_batch_norm_backward(e, &s, x, mask_bytes == 0 ? y : NULL, dy, d.gamma, mean, var,
                                                          mask, out, dgamma, dbeta, round == 1);
        assert_int_equal(st, MU_OK);
        assert_close("norm dx", from_layout(e, c, dims, layout, out), t.dx, total, 1e-4, 4);
        assert_padding_zero("norm dx", e, c, dims, layout, out);
        for (int64_t i = 0; i < k->c; i++) {
            t.dgamma[i] *= round + 1;
            t.dbeta[i] *= round + 1;
        }
        double scale = sqrt((double)(k->n * k->h * k->w)) + 1;
        assert_close("dgamma", dgamma, t.dgamma, k->c, 1e-5, 2 * scale);
        assert_close("dbeta", dbeta, t.dbeta, k->c, 1e-5, 2 * scale);
    }
    assert_same_bits("in place", dx, dy, mui_bytes_in_layout(dims, layout));
}

static void norms(void **state)
{
    engines *both = *state;
    for (size_t i = 0; i < sizeof(norm_cases) / sizeof(*norm_cases); i++) {
        const norm_case *k = &norm_cases[i];
        for (int flags = 0; flags < 16; flags++) {
            for (int kind = 0; kind < KINDS; kind++) {
                mui_engine *e = both->e[kind];
                bool plain = (flags & 8) == 0;
                const mui_layout *layout = plain || k->n == 0 ? NULL : blocked(e, k->n, k->c, k->h, k->w);
                if (plain || layout != NULL) {
                    check_norm(e, both->c[kind], k, layout, flags & 1, flags & 2, flags & 4);
                }
                free_floats(both->c[kind]);
            }
        }
    }
}

/* Statistics are written where they belong and nowhere else, whatever the padding. */
static void statistics_stay_in_bounds(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    const mui_layout *layout = blocked(e, 2, 17, 5, 5);
    mui_norm_shape s = {2, 17, 5, 5, layout, true, 1e-5f, false};
    mu_dims dims = MU_DIMS(2, 17, 5, 5);
    float *x = to_layout(e, c, dims, layout, random_floats(c, count_of(dims), 1)), *y = dirty(c, dims, layout);
    float *small[4];
    for (int i = 0; i < 4; i++) {
        small[i] = dirty(c, MU_DIMS(64), NULL);
    }
    void *mask = floats(c, (int64_t)mui_batch_norm_mask_bytes(e, &s) / 4 + 1);
    assert_int_equal(mui_batch_norm_forward(e, &s, x, NULL, NULL, y, small[0], small[1], mask), MU_OK);
    assert_int_equal(mui_batch_norm_backward(e, &s, x, y, y, NULL, small[0], small[1], mask, y, small[2], small[3],
                                             false), MU_OK);
    for (int i = 0; i < 4; i++) {
        for (int j = 17; j < 64; j++) {
            assert_true(small[i][j] == 1e30f);
        }
    }
    free_floats(c);
}

/* -- pooling ---------------------------------------------------------------------------------------------------- */
typedef struct pool_case {
    int64_t n, c, ih, iw, kh, kw, sh, sw, ph, pw;
} pool_case;
static const pool_case pool_cases[] = {
    {2, 16, 8, 8, 2, 2, 2, 2, 0, 0}, {2, 64, 15, 15, 3, 3, 2, 2, 1, 1}, {2, 17, 9, 7, 3, 2, 2, 1, 1, 0},
    {3, 3, 7, 7, 7, 7, 1, 1, 0, 0},  {1, 1, 5, 5, 3, 3, 1, 1, 1, 1},     {2, 32, 7, 7, 7, 7, 7, 7, 0, 0},
    {2, 5, 9, 9, 2, 2, 3, 3, 0, 0},  {1, 16, 1, 1, 1, 1, 1, 1, 0, 0},    {0, 16, 8, 8, 2, 2, 2, 2, 0, 0},
    {4, 64, 4, 4, 4, 4, 4, 4, 0, 0}, {1, 16, 20, 20, 5, 5, 2, 2, 2, 2},
};

static void check_pool(mui_engine *e, mu_context *c, const pool_case *k, mui_pool_kind kind, bool use_blocked)
{
    int64_t oh = (k->ih + 2 * k->ph - k->kh) / k->sh + 1, ow = (k->iw + 2 * k->pw - k->kw) / k->sw + 1;
    mui_pool2d_shape s;
    memset(&s, 0, sizeof(s));
    s = (mui_pool2d_shape){k->n, k->c, k->ih, k->iw, oh, ow, k->kh, k->kw, {k->sh, k->sw}, {k->ph, k->pw}, kind, NULL, false};
    s.x = use_blocked && k->n > 0 ? blocked(e, k->n, k->c, k->ih, k->iw) : NULL;
    mu_dims in = MU_DIMS(k->n, k->c, k->ih, k->iw), out = MU_DIMS(k->n, k->c, oh, ow);
    float *plain = random_floats(c, count_of(in), 11), *plain_dy = random_floats(c, count_of(out), 12);
    double *y = (double *)floats(c, 2 * count_of(out)), *dx = (double *)floats(c, 2 * count_of(in));
    memset(dx, 0, (size_t)count_of(in) * sizeof(double));
    for (int64_t o = 0; o < count_of(out); o++) {
        int64_t p = o / (oh * ow), i = o / ow % oh * k->sh - k->ph, j = o % ow * k->sw - k->pw, best = -1, real = 0;
        double sum = 0;
        for (int pass = 0; pass < 2; pass++) {
            double share = kind == MUI_POOL_AVG ? (double)(k->kh * k->kw) : (double)real;
            for (int64_t q = 0; q < k->kh * k->kw; q++) {
                int64_t a = i + q / k->kw, b = j + q % k->kw, at = (p * k->ih + a) * k->iw + b;
                if (a < 0 || a >= k->ih || b < 0 || b >= k->iw) {
                    continue;
                }
                if (pass == 0) {
                    real++;
                    sum += plain[at];
                    best = best < 0 || plain[at] > plain[best] ? at : best;
                } else if (kind != MUI_POOL_MAX) {
                    dx[at] += plain_dy[o] / share;
                }
            }
        }
        y[o] = kind == MUI_POOL_MAX ? plain[best] : sum / (kind == MUI_POOL_AVG ? (double)(k->kh * k->kw) : (double)real);
        if (kind == MUI_POOL_MAX) {
            dx[best] += plain_dy[o];
        }
    }
    const mui_layout *ly = mui_pool2d_out_layout(e, &s);
    float *x = to_layout(e, c, in, s.x, plain), *dy = to_layout(e, c, out, ly, plain_dy), *got = dirty(c, out, ly);
    float *gx = dirty(c, in, s.x);
    void *workspace = floats(c, (int64_t)mui_pool2d_workspace_bytes(e, &s) / 4 + 1);
    assert_int_equal(mui_pool2d_forward(e, &s, x, got, workspace), MU_OK);
    assert_close("pool y", from_layout(e, c, out, ly, got), y, count_of(out), 1e-6, 4);
    assert_padding_zero("pool y", e, c, out, ly, got);
    assert_int_equal(mui_pool2d_backward(e, &s, dy, workspace, gx), MU_OK);
    assert_close("pool dx", from_layout(e, c, in, s.x, gx), dx, count_of(in), 1e-6, 4);
    assert_padding_zero("pool dx", e, c, in, s.x, gx);
    /* Without a workspace: no backward is meant. */
    float *again = dirty(c, out, ly);
    assert_int_equal(mui_pool2d_forward(e, &s, x, again, NULL), MU_OK);
    assert_same_bits("pool y without workspace", got, again, mui_bytes_in_layout(out, ly));
}

static void pools(void **state)
{
    engines *both = *state;
    for (size_t i = 0; i < sizeof(pool_cases) / sizeof(*pool_cases); i++) {
        for (int kind = 0; kind < KINDS; kind++) {
            for (int flags = 0; flags < 6; flags++) {
                check_pool(both->e[kind], both->c[kind], &pool_cases[i], (mui_pool_kind)(flags / 2), flags % 2);
                free_floats(both->c[kind]);
            }
        }
    }
}

/* The first of equal maxima gets the gradient, as in PyTorch; both kinds of kernels agree on NaN. */
static void max_pool_ties(void **state)
{
    engines *both = *state;
    for (int kind = 0; kind < KINDS; kind++) {
        mui_engine *e = both->e[kind];
        mui_pool2d_shape s = {1, 16, 2, 2, 1, 1, 2, 2, {2, 2}, {0, 0}, MUI_POOL_MAX, NULL, false};
        float *x = floats(both->c[kind], 64), *dx = floats(both->c[kind], 64), y[16], dy[16];
        for (int i = 0; i < 64; i++) {
            x[i] = 1;
            dy[i % 16] = 2;
        }
        void *workspace = floats(both->c[kind], (int64_t)mui_pool2d_workspace_bytes(e, &s) / 4 + 1);
        assert_null(mui_pool2d_out_layout(e, &s));
        assert_int_equal(mui_pool2d_forward(e, &s, x, y, workspace), MU_OK);
        assert_int_equal(mui_pool2d_backward(e, &s, dy, workspace, dx), MU_OK);
        for (int i = 0; i < 64; i++) {
            assert_true(dx[i] == (i % 4 == 0 ? 2 : 0));
        }
        free_floats(both->c[kind]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms),
        cmocka_unit_test(statistics_stay_in_bounds),
        cmocka_unit_test(pools),
        cmocka_unit_test(max_pool_ties),
    };
    return cmocka_run_group_tests(tests, engines_open, engines_close);
}
