/* Flat, strided and row kernels, matrix products, losses and updates, against libm and loops in double. */
#include "kern/kern_util.h"

#include <float.h>

static double exact(mui_unary op, double x, double a)
{
    switch (op) {
    case MUI_RELU: return x > 0 ? x : 0;
    case MUI_LEAKY_RELU: return x > 0 ? x : a * x;
    case MUI_SIGMOID: return 1 / (1 + exp(-x));
    case MUI_TANH: return tanh(x);
    case MUI_GELU: return 0.5 * x * erfc(-x * 0.70710678118654752);
    case MUI_SOFTPLUS: return x > 20 ? x : log1p(exp(x));
    case MUI_SCALE: return a * x;
    default: return NAN;
    }
}

static double exact_slope(mui_unary op, double x, double a)
{
    double s = 1 / (1 + exp(-x)), t = tanh(x);
    switch (op) {
    case MUI_RELU: return x > 0;
    case MUI_LEAKY_RELU: return x > 0 ? 1 : a;
    case MUI_SIGMOID: return s * (1 - s);
    case MUI_TANH: return 1 - t * t;
    case MUI_GELU: return 0.5 * erfc(-x * 0.70710678118654752) + x * exp(-0.5 * x * x) * 0.3989422804014327;
    case MUI_SOFTPLUS: return x > 20 ? 1 : s;
    case MUI_SCALE: return a;
    default: return NAN;
    }
}

/* Every size of loop tail, values over the whole range, special values, in place, adding. */
static void unary_operations(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    enum { N = 40037 };
    float *x = floats(c, N), *y = floats(c, N), *dy = random_floats(c, N, 3), *dx = floats(c, N), *z = floats(c, N);
    float a = 0.2f;
    for (int i = 0; i < N; i++) {
        x[i] = (float)(i - N / 2) * 0.006f;
        x[i] = i % 3 == 0 ? x[i] * 0.01f : x[i];
    }
    for (int op = 0; op < MUI_UNARY_COUNT; op++) {
        /* In units of the last place of values around 1 absolutely, and relatively where no cancellation is meant. */
        double scale = op == MUI_GELU ? 1 : op == MUI_TANH || op == MUI_SIGMOID || op == MUI_SOFTPLUS ? 1e-30 : 0;
        mui_unary_forward(e, op, N, x, y, a);
        double *want = (double *)floats(c, 2 * N), *slope = (double *)floats(c, 2 * N);
        for (int i = 0; i < N; i++) {
            want[i] = exact(op, x[i], a);
            slope[i] = exact_slope(op, x[i], a) * dy[i];
        }
        assert_close("unary", y, want, N, 4e-7, scale);
        bool in = mui_unary_needs_input(op), out = mui_unary_needs_output(op);
        mui_unary_backward(e, op, N, in ? x : NULL, out ? y : NULL, dy, dx, a, false);
        assert_close("unary slope", dx, slope, N, 4e-7, 1);
        memcpy(z, dx, sizeof(*z) * N);
        mui_unary_backward(e, op, N, in ? x : NULL, out ? y : NULL, dy, z, a, true);
        for (int i = 0; i < N; i++) {
            assert_true(fabsf(z[i] - 2 * dx[i]) <= 2e-7f * fabsf(z[i]));
        }
        memcpy(z, dy, sizeof(*z) * N);
        mui_unary_backward(e, op, N, in ? x : NULL, out ? y : NULL, z, z, a, false);
        assert_same_bits("in place", z, dx, sizeof(*z) * N);
        for (int n = 0; n < 70; n++) {
            memcpy(z, x + 100, sizeof(*z) * 100);
            mui_unary_forward(e, op, n, z, z, a);
            assert_same_bits("any length", z, y + 100, sizeof(*z) * (size_t)n);
            assert_same_bits("beyond", z + n, x + 100 + n, sizeof(*z) * (size_t)(100 - n));
        }
        float zero = 0, image = 1;
        mui_unary_forward(e, op, 1, &zero, &image, a);
        assert_int_equal(mui_unary_keeps_zero(op), image == 0);
        float special[3] = {NAN, INFINITY, -INFINITY}, got[3];
        mui_unary_forward(e, op, 3, special, got, a);
        assert_true(isnan(got[0]));
        assert_true(got[1] == (float)(op == MUI_SIGMOID || op == MUI_TANH ? 1 : INFINITY));
        assert_true(op == MUI_GELU || got[2] == (float)exact(op, -INFINITY, a));
        free_floats(NULL);
    }
    free_floats(c);
}

static void flat_sums(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    enum { N = 1003 };
    float *a = random_floats(c, N, 1), *b = random_floats(c, N, 2), *y = floats(c, N + 1);
    mui_add_relu_forward(e, N, a, b, y);
    double sum = 0, squares = 0;
    for (int i = 0; i < N; i++) {
        assert_true(y[i] == (a[i] + b[i] > 0 ? a[i] + b[i] : 0));
        sum += a[i];
        squares += (double)a[i] * a[i];
    }
    assert_true(fabs(mui_sum(e, N, a) - sum) < 1e-11);
    assert_true(fabs(mui_sum_squares(N, a) - squares) < 1e-10);
    assert_true(mui_sum(e, 0, a) == 0);
    y[N] = 5;
    mui_fill(y, N, 3);
    mui_axpy(e, N, 2, a, y);
    mui_scale_inplace(N, y, 0.5f);
    for (int i = 0; i < N; i++) {
        assert_true(fabsf(y[i] - (3 + 2 * a[i]) * 0.5f) < 1e-6f);
    }
    assert_true(y[N] == 5);
    free_floats(c);
}

static void dropout_draws_philox(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    const float ps[] = {0, 0.3f, 0.5f, 1};
    const int64_t sizes[] = {0, 1, 3, 64, 65, 1003};
    uint32_t first[4];
    mui_philox(0x123456789abcdefu, 77, 0, first);
    for (int i = 0; i < 25; i++) {
        /* The last p is a draw itself: that element is kept. */
        float p = i == 24 ? (float)(first[1] >> 8) * 0x1p-24f : ps[i % 4];
        int64_t n = i == 24 ? 9 : sizes[i / 4];
        float *x = random_floats(c, n, 1), *y = floats(c, n);
        mui_dropout(e, n, x, y, p, 0x123456789abcdefu, 77);
        for (int64_t k = 0; k < n; k++) {
            uint32_t bits[4];
            mui_philox(0x123456789abcdefu, 77, (uint64_t)(k / 4), bits);
            bool keep = (float)(bits[k % 4] >> 8) * 0x1p-24f >= p;
            assert_true(y[k] == (keep ? x[k] * (1 / (1 - p)) : 0));
        }
        mui_dropout(e, n, x, x, p, 0x123456789abcdefu, 77);
        assert_same_bits("dropout in place", x, y, (size_t)n * sizeof(float));
    }
    free_floats(c);
}

/* The generator's own normals, one after the other, are the definition. A million of them have radii down to 2^-10 in both
 * directions, and angles near every quarter turn. */
static void many_normals(void **state)
{
    (void)state;
    const int64_t sizes[] = {0, 1, 2, 127, 128, 129, 1000003};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        int64_t n = sizes[i];
        float *y = malloc((size_t)(n + 1) * sizeof(*y));
        y[n] = 77;
        mui_normal(n, y, 0.5f, 0x123456789abcdefu, 77);
        assert_true(y[n] == 77);
        mui_rng r;
        mui_rng_init(&r, 0x123456789abcdefu, 77);
        double worst = 0;
        for (int64_t k = 0; k < n; k++) {
            double want = 0.5 * (double)mui_rng_normal(&r);
            worst = fmax(worst, fabs((double)y[k] - want) / (fabs(want) + 1));
        }
        print_message("%lld normals: within %.2g\n", (long long)n, worst);
        assert_true(worst < 3e-7);
        free(y);
    }
}

/* -- strided ---------------------------------------------------------------------------------------------------- */
static int64_t offset_of(mu_dims dims, const int64_t *stride, int64_t index)
{
    int64_t at = 0;
    for (int d = dims.ndim - 1; d >= 0; d--) {
        at += index % dims.dim[d] * stride[d];
        index /= dims.dim[d];
    }
    return at;
}

static void strided_operations(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    static const struct {
        mu_dims dims;
        int64_t a[4], b[4];
    } cases[] = {
        {{.ndim = 0}, {0}, {0}},
        {{1, {7}}, {1}, {0}},
        {{2, {5, 6}}, {6, 1}, {0, 1}},
        {{2, {5, 6}}, {6, 1}, {1, 0}},
        {{2, {5, 6}}, {1, 5}, {0, 0}},
        {{3, {4, 3, 5}}, {15, 5, 1}, {5, 0, 1}},
        {{4, {2, 3, 4, 5}}, {60, 20, 5, 1}, {0, 1, 0, 0}},
        {{4, {2, 3, 4, 5}}, {60, 1, 15, 3}, {3, 1, 0, 6}},
        {{3, {4, 0, 5}}, {15, 5, 1}, {5, 0, 1}},
        {{3, {1, 1, 9}}, {100, 100, 2}, {0, 0, 3}},
    };
    float *a = random_floats(c, 256, 1), *b = random_floats(c, 256, 2), *y = floats(c, 256), *z = floats(c, 256);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        mu_dims d = cases[i].dims;
        for (int op = 0; op < 3; op++) {
            mui_binary_forward(e, op, d, a, cases[i].a, b, cases[i].b, y);
            for (int64_t k = 0; k < count_of(d); k++) {
                float p = a[offset_of(d, cases[i].a, k)], q = b[offset_of(d, cases[i].b, k)];
                assert_true(y[k] == (op == MUI_ADD ? p + q : op == MUI_SUB ? p - q : p * q));
            }
        }
        /* Sum from a to where b points. */
        double *want = (double *)floats(c, 512);
        for (int k = 0; k < 256; k++) {
            want[k] = b[k];
            z[k] = b[k];
        }
        for (int64_t k = 0; k < count_of(d); k++) {
            want[offset_of(d, cases[i].b, k)] += a[offset_of(d, cases[i].a, k)];
        }
        mui_add_strided(e, d, a, cases[i].a, z, cases[i].b);
        assert_close("add_strided", z, want, 256, 1e-6, 10);
        /* Copies of every size of element, there by a's strides and back. */
        for (size_t bytes = 1; bytes <= 16; bytes *= 2) {
            char from[256 * 16], there[256 * 16], back[256 * 16];
            for (size_t k = 0; k < sizeof(from); k++) {
                from[k] = (char)(k * 7 + k / 256);
            }
            int64_t plain[4], n = 1;
            for (int k = d.ndim - 1; k >= 0; k--) {
                plain[k] = n;
                n *= d.dim[k];
            }
            memset(there, 0, sizeof(there));
            memset(back, 0, sizeof(back));
            mui_copy_strided(e, d, bytes, from, plain, there, cases[i].a);
            for (int64_t k = 0; k < n; k++) {
                assert_memory_equal(from + (size_t)k * bytes,
                                    there + (size_t)offset_of(d, cases[i].a, k) * bytes, bytes);
            }
            mui_copy_strided(e, d, bytes, there, cases[i].a, back, plain);
            assert_same_bits("copied back", from, back, (size_t)n * bytes);
        }
    }
    free_floats(c);
}

/* -- matrix product --------------------------------------------------------------------------------------------- */
static void products(void **state)
{
    engines *both = *state;
    static const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 7},  {64, 10, 64}, {64, 256, 784}, {0, 5, 3}, {5, 0, 3},
                                       {5, 3, 0}, {1, 100, 9}, {33, 1, 50},  {17, 31, 129}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
        for (int flags = 0; flags < 24; flags++) {
            bool ta = flags & 1, tb = flags & 2;
            float beta = flags / 8 == 0 ? 0 : flags / 8 == 1 ? 1 : -0.5f, alpha = flags & 4 ? 1 : 0.25f;
            int64_t lda = (ta ? m : k) + 2, ldb = (tb ? k : n) + 3, ldc = n + 1;
            for (int kind = 0; kind < KINDS; kind++) {
                mu_context *c = both->c[kind];
                float *a = random_floats(c, (ta ? k : m) * lda, 1), *b = random_floats(c, (tb ? n : k) * ldb, 2);
                float *r = random_floats(c, m * ldc, 3), *before = floats(c, m * ldc);
                if (beta == 0) {
                    mui_fill(r, m * ldc, NAN);
                }
                memcpy(before, r, (size_t)(m * ldc) * sizeof(float));
                assert_int_equal(mui_gemm(both->e[kind], ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, r, ldc), MU_OK);
                for (int64_t p = 0; p < m; p++) {
                    for (int64_t q = 0; q < n; q++) {
                        double sum = 0;
                        for (int64_t l = 0; l < k; l++) {
                            sum += (double)a[ta ? l * lda + p : p * lda + l] * b[tb ? q * ldb + l : l * ldb + q];
                        }
                        sum = alpha * sum + (beta == 0 ? 0 : (double)beta * before[p * ldc + q]);
                        assert_close("gemm", &r[p * ldc + q], &sum, 1, 1e-6, sqrt((double)k) * 4);
                    }
                    assert_same_bits("gap", &r[p * ldc + n], &before[p * ldc + n], sizeof(float));
                }
                free_floats(c);
            }
        }
    }
}

/* -- softmax and losses ----------------------------------------------------------------------------------------- */
static void softmax(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    static const int64_t cols[] = {1, 2, 10, 16, 17, 100, 1000};
    for (size_t i = 0; i < sizeof(cols) / sizeof(*cols); i++) {
        int64_t n = cols[i], rows = 5;
        float *x = random_floats(c, rows * n, 1), *y = floats(c, rows * n), *dy = random_floats(c, rows * n, 2),
              *dx = floats(c, rows * n);
        for (int64_t k = 0; k < n; k++) {
            x[k] *= 100;
            x[n + k] += 1e4f;
        }
        for (int log_form = 0; log_form < 2; log_form++) {
            mui_softmax_forward(e, rows, n, x, y, log_form);
            mui_softmax_backward(e, rows, n, y, dy, dx, log_form);
            for (int64_t r = 0; r < rows; r++) {
                double m = -1e300, sum = 0, dot = 0, sum_dy = 0;
                for (int64_t k = 0; k < n; k++) {
                    m = fmax(m, x[r * n + k]);
                }
                for (int64_t k = 0; k < n; k++) {
                    sum += exp(x[r * n + k] - m);
                }
                for (int64_t k = 0; k < n; k++) {
                    double p = exp(x[r * n + k] - m) / sum, lp = x[r * n + k] - m - log(sum);
                    assert_close("softmax", &y[r * n + k], log_form ? &lp : &p, 1, 1e-6, log_form ? 1 : 1e-30);
                    dot += p * dy[r * n + k];
                    sum_dy += dy[r * n + k];
                }
                for (int64_t k = 0; k < n; k++) {
                    double p = exp(x[r * n + k] - m) / sum;
                    double want = log_form ? dy[r * n + k] - p * sum_dy : p * (dy[r * n + k] - dot);
                    assert_close("softmax dx", &dx[r * n + k], &want, 1, 2e-6, log_form ? sqrt((double)n) : 4);
                }
            }
        }
        free_floats(c);
    }
    mui_softmax_forward(e, 0, 10, NULL, NULL, false);
}

static void cross_entropy(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    static const int64_t cols[] = {1, 2, 10, 17, 1000};
    for (int i = 0; i < 30; i++) {
        int64_t n = cols[i % 5], rows = 7, bad = 9, labels[7];
        float smoothing = i % 2 ? 0.1f : 0, loss = 0;
        float *x = random_floats(c, rows * n, (uint64_t)i), *grad = floats(c, rows * n);
        int64_t counted = 0;
        for (int64_t r = 0; r < rows; r++) {
            labels[r] = (i % 3 == 0 && r % 2 == 0) || i % 3 == 2 ? -100 : r * 5 % n;
            counted += labels[r] != -100;
        }
        mui_cross_entropy(e, rows, n, x, labels, smoothing, -100, &loss, grad, &bad);
        assert_int_equal(bad, -1);
        double total = 0;
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0, mean = 0;
            for (int64_t k = 0; k < n; k++) {
                sum += exp(x[r * n + k]);
                mean += x[r * n + k] / (double)n;
            }
            for (int64_t k = 0; k < n; k++) {
                double target = smoothing / (double)n + (k == labels[r] ? 1 - smoothing : 0);
                double want = labels[r] == -100 ? 0 : (exp(x[r * n + k]) / sum - target) / (double)counted;
                assert_close("d cross entropy", &grad[r * n + k], &want, 1, 1e-6, 1);
            }
            if (labels[r] != -100) {
                total += (1 - smoothing) * (log(sum) - x[r * n + labels[r]]) + smoothing * (log(sum) - mean);
            }
        }
        total /= (double)counted; /* NaN when nothing counts */
        assert_close("cross entropy", &loss, &total, 1, 1e-6, 1);
        float alone = 0;
        mui_cross_entropy(e, rows, n, x, labels, smoothing, -100, &alone, NULL, &bad);
        assert_true(isnan(loss) ? isnan(alone) : fabsf(alone - loss) <= 2e-7f * fabsf(loss));
        free_floats(c);
    }
    int64_t labels[3] = {0, 3, -1}, bad = -1;
    float loss = 42, grad[9] = {42}, x[9] = {0};
    mui_cross_entropy(e, 3, 3, x, labels, 0, -100, &loss, grad, &bad);
    assert_true(bad == 1 && loss == 42 && grad[0] == 42);
    labels[1] = 2;
    mui_cross_entropy(e, 3, 3, x, labels, 0, -100, &loss, grad, &bad);
    assert_int_equal(bad, 2);
    x[4] = NAN;
    mui_cross_entropy(e, 2, 3, x, labels, 0, -100, &loss, grad, &bad);
    assert_true(isnan(loss));
}

static void mean_losses(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    static const int64_t sizes[] = {0, 1, 15, 16, 1001};
    for (int i = 0; i < 5; i++) {
        int64_t n = sizes[i];
        float *x = random_floats(c, n, 1), *t = random_floats(c, n, 2), *grad = floats(c, n), loss[2], alone[2];
        double mse = 0, bce = 0;
        for (int64_t k = 0; k < n; k++) {
            x[k] *= k % 10 == 0 ? 40 : 1;
            double d = (double)x[k] - t[k];
            mse += d * d / (double)n;
            bce += (fmax(x[k], 0) - (double)x[k] * t[k] + log1p(exp(-fabs(x[k])))) / (double)n;
        }
        mse = n == 0 ? NAN : mse;
        bce = n == 0 ? NAN : bce;
        mui_mse(e, n, x, t, &alone[0], NULL);
        mui_bce_with_logits(e, n, x, t, &alone[1], NULL);
        mui_mse(e, n, x, t, &loss[0], grad);
        for (int64_t k = 0; k < n; k++) {
            double want = 2 * ((double)x[k] - t[k]) / (double)n;
            assert_close("d mse", &grad[k], &want, 1, 5e-7, 1e-3);
        }
        mui_bce_with_logits(e, n, x, t, &loss[1], grad);
        for (int64_t k = 0; k < n; k++) {
            double want = (1 / (1 + exp(-x[k])) - t[k]) / (double)n;
            assert_close("d bce", &grad[k], &want, 1, 1e-6, 1 / (double)n);
        }
        assert_close("mse", &loss[0], &mse, 1, 1e-6, 0);
        assert_close("bce", &loss[1], &bce, 1, 1e-6, 0);
        assert_same_bits("without gradient", loss, alone, sizeof(loss));
        free_floats(c);
    }
}

/* -- layouts ---------------------------------------------------------------------------------------------------- */
static void layouts(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_context *c = both->c[DEFAULT];
    assert_string_equal(mui_layout_name(NULL), "plain");
    assert_false(mui_layout_padded(NULL));
    assert_int_equal(mui_bytes_in_layout(MU_DIMS(2, 3), NULL), 24);
    mu_dims a = MU_DIMS(32, 16, 3, 3), b = MU_DIMS(64, 16, 3, 3);
    const mui_layout *la = mui_conv2d_weight_layout(e, a, 1, 1), *lb = mui_conv2d_weight_layout(e, b, 1, 1);
    assert_null(mui_conv2d_weight_layout(both->e[REFERENCE], a, 1, 1));
    if (la != NULL) {
        assert_ptr_not_equal(la, lb);
        float *x = random_floats(c, count_of(a), 1), *y = to_layout(e, c, a, la, x);
        assert_same_bits("there and back", x, from_layout(e, c, a, la, y), mui_bytes_in_layout(a, NULL));
        assert_true(memcmp(x, y, mui_bytes_in_layout(a, NULL)) != 0);
        /* A layout of another shape is a broken invariant, not silence. */
        assert_int_equal(mui_reorder(e, b, la, x, NULL, y), MU_ERR_INTERNAL);
        mu_context_clear(c);
    }
    free_floats(c);
}

static int sink_calls;
static void sink(void *user, mu_log_level level, const char *message)
{
    (void)user, (void)level, (void)message;
    sink_calls++;
}

/* Each allocation in turn fails: an error, no crash, nothing leaked. */
static void out_of_memory(void **state)
{
    (void)state;
    bool finished = false;
    for (int64_t n = 0; n < 200 && !finished; n++) {
        mu_context *c = mu_context_open(&(mu_context_options){.log = sink, .threads = 1});
        float x[16 * 16] = {0}, w[16 * 16 * 9] = {0}, y[16 * 16], dw[16 * 16 * 9];
        c->fail_after = n;
        mui_engine *e = mui_engine_of(c);
        if (e != NULL) {
            mui_conv2d_shape s;
            memset(&s, 0, sizeof(s));
            s.n = s.groups = s.stride[0] = s.stride[1] = s.dilation[0] = s.dilation[1] = s.pad[0] = s.pad[1] = 1;
            s.ic = s.oc = 16;
            s.ih = s.iw = s.oh = s.ow = 4;
            s.kh = s.kw = 3;
            const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
            finished = p != NULL && mui_conv2d_forward(e, p, x, w, NULL, y) == MU_OK &&
                       mui_conv2d_backward_weights(e, p, x, y, dw, NULL, true, false) == MU_OK;
        }
        assert_true(finished || mu_context_status(c) == MU_ERR_NOMEM);
        finished = finished && mu_context_status(c) == MU_OK;
        mu_context_close(c);
    }
    assert_true(finished);
    assert_true(sink_calls > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unary_operations), cmocka_unit_test(flat_sums),     cmocka_unit_test(dropout_draws_philox),
        cmocka_unit_test(many_normals),
        cmocka_unit_test(strided_operations), cmocka_unit_test(products),    cmocka_unit_test(softmax),
        cmocka_unit_test(cross_entropy),    cmocka_unit_test(mean_losses),   cmocka_unit_test(layouts),
        cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, engines_open, engines_close);
}
