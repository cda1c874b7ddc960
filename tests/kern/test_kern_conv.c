/* Convolution against loops in double, for both kinds of kernels, over shapes that hit every special case. */
#include "kern/kern_util.h"

#include <pthread.h>

typedef struct conv_case {
    int64_t n, ic, ih, iw, oc, kh, kw, sh, sw, ph, pw, dh, dw, groups;
    bool bias;
} conv_case;

static const conv_case cases[] = {
    /* first layers */
    {2, 1, 28, 28, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    {2, 3, 33, 31, 16, 7, 7, 2, 2, 3, 3, 1, 1, 1, true},
    {3, 1, 9, 9, 1, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, true},
    {1, 4, 12, 12, 20, 5, 5, 1, 1, 0, 0, 1, 1, 1, false},
    /* few input channels: tap by tap where oneDNN would multiply padding */
    {3, 1, 14, 11, 20, 5, 5, 1, 1, 2, 2, 1, 1, 1, true},
    {2, 1, 19, 17, 24, 3, 2, 2, 3, 1, 0, 2, 3, 1, true},
    {2, 2, 19, 17, 24, 3, 2, 2, 3, 1, 0, 1, 1, 1, true},
    {2, 4, 9, 12, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    {2, 1, 5, 4, 16, 3, 3, 1, 1, 2, 1, 1, 1, 1, true},
    {2, 2, 11, 9, 16, 2, 2, 3, 4, 1, 0, 1, 1, 1, false},
    /* inner layers */
    {2, 16, 14, 14, 32, 3, 3, 2, 2, 1, 1, 1, 1, 1, false},
    {2, 32, 7, 7, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {2, 16, 14, 14, 32, 1, 1, 2, 2, 0, 0, 1, 1, 1, false},
    {2, 64, 7, 7, 16, 1, 1, 1, 1, 0, 0, 1, 1, 1, true},
    {1, 32, 1, 1, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    {4, 64, 2, 2, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    /* Winograd's */
    {2, 64, 14, 14, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {1, 64, 7, 7, 80, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    {1, 128, 9, 5, 64, 3, 3, 1, 1, 0, 0, 1, 1, 1, false},
    /* odd channels */
    {2, 3, 8, 8, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {2, 5, 8, 8, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {2, 17, 9, 9, 17, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {1, 17, 6, 6, 5, 1, 1, 1, 1, 0, 0, 1, 1, 1, false},
    {2, 16, 6, 6, 10, 3, 3, 2, 2, 1, 1, 1, 1, 1, true},
    {2, 40, 6, 6, 24, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    /* asymmetric and dilated */
    {2, 16, 11, 13, 16, 3, 5, 2, 1, 1, 2, 1, 1, 1, true},
    {1, 3, 17, 9, 8, 5, 1, 1, 3, 2, 0, 1, 1, 1, true},
    {2, 16, 15, 15, 16, 3, 3, 1, 1, 2, 2, 2, 2, 1, false},
    {1, 5, 15, 12, 7, 3, 2, 2, 1, 1, 0, 3, 2, 1, true},
    {1, 16, 5, 5, 16, 3, 3, 1, 1, 3, 3, 1, 1, 1, false},
    {1, 2, 4, 4, 3, 4, 4, 3, 3, 0, 0, 1, 1, 1, true},
    /* grouped and depthwise */
    {2, 16, 8, 8, 16, 3, 3, 1, 1, 1, 1, 1, 1, 16, true},
    {2, 32, 9, 9, 32, 3, 3, 2, 2, 1, 1, 1, 1, 32, false},
    {1, 17, 9, 9, 17, 3, 3, 1, 1, 1, 1, 1, 1, 17, true},
    {2, 32, 8, 8, 32, 3, 3, 1, 1, 1, 1, 1, 1, 2, true},
    {2, 12, 8, 8, 18, 3, 3, 1, 1, 1, 1, 1, 1, 3, true},
    {2, 8, 7, 7, 16, 3, 3, 1, 1, 2, 2, 2, 2, 4, false},
    {2, 4, 6, 6, 12, 3, 3, 1, 1, 1, 1, 1, 1, 4, true},
    {2, 6, 6, 6, 6, 1, 1, 1, 1, 0, 0, 1, 1, 3, false},
    {1, 128, 5, 5, 128, 3, 3, 1, 1, 1, 1, 1, 1, 32, false},
    /* small maps: by matrix products, in all directions or for the weights' gradient alone */
    {32, 128, 1, 1, 128, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {32, 128, 2, 2, 144, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    {33, 128, 2, 3, 128, 3, 3, 2, 2, 1, 1, 1, 1, 1, true},
    {32, 128, 2, 2, 128, 2, 2, 2, 2, 1, 1, 1, 1, 1, true},
    {2, 128, 7, 6, 128, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {3, 130, 5, 6, 129, 3, 3, 2, 1, 1, 0, 1, 1, 1, true},
    {2, 128, 6, 6, 128, 3, 3, 1, 1, 2, 2, 2, 2, 1, false},
    {1, 128, 3, 3, 128, 3, 3, 1, 1, 3, 4, 3, 4, 1, true},
    /* nothing */
    {0, 3, 8, 8, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1, true},
    {0, 16, 8, 8, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1, false},
    {0, 16, 8, 8, 16, 3, 3, 1, 1, 1, 1, 1, 1, 16, true},
};

static mui_conv2d_shape shape_of(const conv_case *k)
{
    mui_conv2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = k->n;
    s.ic = k->ic;
    s.ih = k->ih;
    s.iw = k->iw;
    s.oc = k->oc;
    s.kh = k->kh;
    s.kw = k->kw;
    s.stride[0] = k->sh;
    s.stride[1] = k->sw;
    s.pad[0] = k->ph;
    s.pad[1] = k->pw;
    s.dilation[0] = k->dh;
    s.dilation[1] = k->dw;
    s.groups = k->groups;
    s.bias = k->bias;
    s.oh = (k->ih + 2 * k->ph - (k->kh - 1) * k->dh - 1) / k->sh + 1;
    s.ow = (k->iw + 2 * k->pw - (k->kw - 1) * k->dw - 1) / k->sw + 1;
    return s;
}

/* The definition. Each sum also has the sum of its terms' sizes, the scale of its rounding error. */
typedef struct truth {
    double *y, *dx, *dw, *db;
} truth;

static truth define(mu_context *c, const mui_conv2d_shape *s, const float *x, const float *w, const float *b,
                    const float *dy)
{
    int64_t ic = s->ic / s->groups, oc = s->oc / s->groups;
    int64_t ny = s->n * s->oc * s->oh * s->ow, nx = s->n * s->ic * s->ih * s->iw, nw = s->oc * ic * s->kh * s->kw;
    truth t = {(double *)floats(c, 2 * ny), (double *)floats(c, 2 * nx), (double *)floats(c, 2 * nw),
               (double *)floats(c, 2 * s->oc)};
    memset(t.dx, 0, (size_t)nx * sizeof(double));
    memset(t.dw, 0, (size_t)nw * sizeof(double));
    memset(t.db, 0, (size_t)s->oc * sizeof(double));
    for (int64_t o = 0; o < ny; o++) {
        int64_t j = o % s->ow, i = o / s->ow % s->oh, k = o / (s->ow * s->oh) % s->oc, n = o / (s->ow * s->oh * s->oc);
        double sum = b != NULL ? b[k] : 0;
        t.db[k] += dy[o];
        for (int64_t q = 0; q < ic * s->kh * s->kw; q++) {
            int64_t kw = q % s->kw, kh = q / s->kw % s->kh, ch = q / (s->kw * s->kh);
            int64_t ii = i * s->stride[0] - s->pad[0] + kh * s->dilation[0];
            int64_t jj = j * s->stride[1] - s->pad[1] + kw * s->dilation[1];
            if (ii < 0 || ii >= s->ih || jj < 0 || jj >= s->iw) {
                continue;
            }
            int64_t at = ((n * s->ic + k / oc * ic + ch) * s->ih + ii) * s->iw + jj, wt = k * ic * s->kh * s->kw + q;
            sum += (double)x[at] * w[wt];
            t.dx[at] += (double)dy[o] * w[wt];
            t.dw[wt] += (double)dy[o] * x[at];
        }
        t.y[o] = sum;
    }
    return t;
}

/* Every direction on one engine with the weight stored in layout `stored`, compared with the truth. */
static void check(mui_engine *e, mu_context *c, const mui_conv2d_shape *s, const mui_layout *stored, const float *x,
                  const float *w, const float *b, const float *dy, const truth *t, double bound)
{
    mu_dims dx = MU_DIMS(s->n, s->ic, s->ih, s->iw), dims_y = MU_DIMS(s->n, s->oc, s->oh, s->ow);
    mu_dims dims_w = MU_DIMS(s->oc, s->ic / s->groups, s->kh, s->kw);
    double sx = sqrt((double)(s->oc / s->groups * s->kh * s->kw)), sy = sqrt((double)(s->ic / s->groups * s->kh * s->kw));
    double sw = sqrt((double)(s->n * s->oh * s->ow));
    const mui_conv2d_plan *p = mui_conv2d_plan_get(e, s, stored);
    assert_non_null(p);
    assert_ptr_equal(p, mui_conv2d_plan_get(e, s, stored));
    assert_ptr_equal(p->w, stored);
    float *px = to_layout(e, c, dx, p->x, x), *pw = to_layout(e, c, dims_w, stored, w);
    float *pdy = to_layout(e, c, dims_y, p->y, dy), *y = dirty(c, dims_y, p->y), *gx = dirty(c, dx, p->x);
    float *gw = dirty(c, dims_w, stored), *gb = dirty(c, MU_DIMS(s->oc), NULL), *y2 = dirty(c, dims_y, p->y);

    assert_int_equal(mui_conv2d_forward(e, p, px, pw, b, y), MU_OK);
    assert_close("y", from_layout(e, c, dims_y, p->y, y), t->y, count_of(dims_y), bound, sy);
    assert_padding_zero("y", e, c, dims_y, p->y, y);
    assert_int_equal(mui_conv2d_backward_data(e, p, pdy, pw, gx), MU_OK);
    assert_close("dx", from_layout(e, c, dx, p->x, gx), t->dx, count_of(dx), bound, sx);
    assert_padding_zero("dx", e, c, dx, p->x, gx);
    assert_int_equal(mui_conv2d_backward_weights(e, p, px, pdy, gw, b != NULL ? gb : NULL, false, false), MU_OK);
    assert_close("dw", from_layout(e, c, dims_w, stored, gw), t->dw, count_of(dims_w), bound, sw);
    assert_padding_zero("dw", e, c, dims_w, stored, gw);
    if (b != NULL) {
        assert_close("db", gb, t->db, s->oc, bound, sw);
    }
    /* The same bits again, also after the other directions have used the scratch memory. */
    assert_int_equal(mui_conv2d_forward(e, p, px, pw, b, y2), MU_OK);
    assert_same_bits("y again", y, y2, mui_bytes_in_layout(dims_y, p->y));

    /* Adding once more doubles, in any mixture of flags. */
    float *twice = to_layout(e, c, dims_w, stored, from_layout(e, c, dims_w, stored, gw));
    float *gb2 = dirty(c, MU_DIMS(s->oc), NULL);
    assert_int_equal(mui_conv2d_backward_weights(e, p, px, pdy, twice, b != NULL ? gb2 : NULL, true, false), MU_OK);
    float *sum = from_layout(e, c, dims_w, stored, twice), *one = from_layout(e, c, dims_w, stored, gw);
    for (int64_t i = 0; i < count_of(dims_w); i++) {
        assert_true(sum[i] == one[i] + one[i]);
    }
    assert_padding_zero("2 dw", e, c, dims_w, stored, twice);
    if (b != NULL) {
        assert_same_bits("db", gb, gb2, (size_t)s->oc * sizeof(float));
        assert_int_equal(mui_conv2d_backward_weights(e, p, px, pdy, NULL, gb2, false, true), MU_OK);
        for (int64_t k = 0; k < s->oc; k++) {
            assert_true(gb2[k] == gb[k] + gb[k]);
        }
    }
}

static void all_shapes(void **state)
{
    engines *both = *state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        mui_conv2d_shape s = shape_of(&cases[i]);
        int64_t ic = s.ic / s.groups;
        for (int kind = 0; kind < KINDS; kind++) {
            mu_context *c = both->c[kind];
            float *x = random_floats(c, s.n * s.ic * s.ih * s.iw, 1), *w = random_floats(c, s.oc * ic * s.kh * s.kw, 2);
            float *b = s.bias ? random_floats(c, s.oc, 3) : NULL, *dy = random_floats(c, s.n * s.oc * s.oh * s.ow, 4);
            truth t = define(c, &s, x, w, b, dy);
            mu_dims dims_w = MU_DIMS(s.oc, ic, s.kh, s.kw);
            const mui_layout *best = mui_conv2d_weight_layout(both->e[kind], dims_w, s.groups, s.stride[0]);
            assert_ptr_equal(best, mui_conv2d_weight_layout(both->e[kind], dims_w, s.groups, s.stride[0]));
            print_message("case %zu, %s, weight %s\n", i, kind == REFERENCE ? "reference" : "default",
                          mui_layout_name(best));
            /* Winograd has a few times the rounding error of the direct sum. */
            check(both->e[kind], c, &s, NULL, x, w, b, dy, &t, 1e-5);
            if (best != NULL) {
                check(both->e[kind], c, &s, best, x, w, b, dy, &t, 1e-5);
            }
            free_floats(c);
        }
    }
}

static double error_of(const float *y, const double *want, int64_t n)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (y[i] - want[i]) * (y[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(error / size);
}

/* The same sums one term after the other in float: how far from the truth a direct sum of any order may be. */
static double error_one_by_one(const mui_conv2d_shape *s, const float *x, const float *w, const double *want)
{
    int64_t n = s->n * s->oc * s->oh * s->ow;
    float *y = calloc((size_t)n, sizeof(*y));
    assert_non_null(y);
    for (int64_t i = 0; i < n; i++) {
        int64_t ow = i % s->ow, oh = i / s->ow % s->oh, oc = i / (s->ow * s->oh) % s->oc, image = i / (s->ow * s->oh * s->oc);
        for (int64_t j = 0; j < s->ic * s->kh * s->kw; j++) {
            int64_t kw = j % s->kw, kh = j / s->kw % s->kh, ic = j / (s->kw * s->kh), ih = oh + kh - 1, iw = ow + kw - 1;
            if (ih >= 0 && ih < s->ih && iw >= 0 && iw < s->iw) {
                y[i] += x[((image * s->ic + ic) * s->ih + ih) * s->iw + iw] * w[oc * s->ic * s->kh * s->kw + j];
            }
        }
    }
    double error = error_of(y, want, n);
    free(y);
    return error;
}

/* Forbidden, the rounding error is that of direct sums; allowed, that of Winograd at most. */
static void winograd_is_a_choice(void **state)
{
    (void)state;
    conv_case k = {2, 64, 14, 14, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1, false};
    mui_conv2d_shape s = shape_of(&k);
    mu_dims dims_w = MU_DIMS(64, 64, 3, 3), dims_x = MU_DIMS(2, 64, 14, 14);
    for (int off = 0; off < 2; off++) {
        mu_context *c = mu_context_open(&(mu_context_options){.no_winograd = off == 1, .threads = 1});
        mui_engine *e = mui_engine_of(c);
        float *x = random_floats(c, count_of(dims_x), 1), *w = random_floats(c, count_of(dims_w), 2);
        truth t = define(c, &s, x, w, NULL, x);
        const mui_layout *best = mui_conv2d_weight_layout(e, dims_w, 1, 1);
        const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, best);
        float *out = dirty(c, dims_x, p->y);
        assert_int_equal(mui_conv2d_forward(e, p, to_layout(e, c, dims_x, p->x, x), to_layout(e, c, dims_w, best, w),
                                            NULL, out), MU_OK);
        double error = error_of(from_layout(e, c, dims_x, p->y, out), t.y, count_of(dims_x));
        double direct = error_one_by_one(&s, x, w, t.y);
        print_message("no_winograd %d: error %.2g; of one sum after the other %.2g\n", off, error, direct);
        assert_true(error < (off ? 1.1 * direct : 2e-6));
        free_floats(c);
        assert_int_equal(mu_context_close(c), MU_OK);
    }
}

/* Two ranks that are threads, each with its context, compute the same bits at the same time. */
typedef struct rank {
    pthread_t thread;
    float y[2 * 32 * 14 * 14];
    bool good;
} rank;

static void *run_rank(void *argument)
{
    rank *r = argument;
    mu_context *c = mu_context_open(&(mu_context_options){.threads = 1});
    mui_engine *e = mui_engine_of(c);
    conv_case k = {2, 16, 14, 14, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, false};
    mui_conv2d_shape s = shape_of(&k);
    mu_dims dx = MU_DIMS(2, 16, 14, 14), dy = MU_DIMS(2, 32, 14, 14);
    const mui_conv2d_plan *p = mui_conv2d_plan_get(e, &s, NULL);
    float *x = mui_calloc(c, 1, mui_bytes_in_layout(dx, p->x)), *y = mui_calloc(c, 1, mui_bytes_in_layout(dy, p->y));
    float *w = mui_calloc(c, 32 * 16 * 9, sizeof(float));
    for (int i = 0; i < 2 * 16 * 14 * 14; i++) {
        x[i] = (float)(i % 101) * 0.37f - 9;
    }
    for (int i = 0; i < 32 * 16 * 9; i++) {
        w[i] = (float)(i % 89) * 0.11f - 3;
    }
    r->good = true;
    for (int i = 0; i < 20; i++) {
        r->good = r->good && mui_conv2d_forward(e, p, x, w, NULL, y) == MU_OK &&
                  mui_conv2d_backward_weights(e, p, x, y, w, NULL, false, false) == MU_OK;
        for (int q = 0; q < 32 * 16 * 9; q++) {
            w[q] *= 1e-6f;
        }
    }
    r->good = r->good && mui_reorder(e, dy, p->y, y, NULL, r->y) == MU_OK;
    mui_free(c, x);
    mui_free(c, y);
    mui_free(c, w);
    r->good = mu_context_close(c) == MU_OK && r->good;
    return NULL;
}

static void ranks_may_be_threads(void **state)
{
    (void)state;
    static rank ranks[2];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(ranks[i].thread, NULL), 0);
        assert_true(ranks[i].good);
    }
    assert_same_bits("two ranks", ranks[0].y, ranks[1].y, sizeof(ranks[0].y));
    assert_true(ranks[0].y[5] != 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(winograd_is_a_choice),
        cmocka_unit_test(ranks_may_be_threads),
    };
    return cmocka_run_group_tests(tests, engines_open, engines_close);
}
