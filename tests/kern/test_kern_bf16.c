/* Kernels of bfloat16 against float64: emulated on both backends, and oneDNN's own where the CPU has AVX-512; elsewhere that
 * part is skipped, and said so. Allowed is one rounding of each result to bfloat16, and the rounding of float32 sums, by the
 * sizes of their terms: what any correct kernel keeps, and none that rounds on the way. */
#include "kern/bf16.h"
#include "kern/engine.h"
#include "kern/kern_util.h"

typedef struct rig {
    mu_context *c;
    mui_engine *e;
    const char *name;
    double worst; /* error of a float32 result or a rounded one, of what is allowed */
    bool native;
} rig;
enum { EMULATED_REFERENCE, EMULATED, NATIVE, RIGS };

/* false: there are no such kernels here. */
static bool rig_open(rig *r, int which)
{
    static const char *const names[RIGS] = {"emulated in plain C", "emulated", "native"};
    r->c = mu_context_open(&(mu_context_options){
        .kernels = which == EMULATED_REFERENCE ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT, .threads = 1});
    r->e = mui_engine_of(r->c);
    assert_non_null(r->e);
    r->name = names[which];
    r->native = which == NATIVE;
    r->worst = 0;
    if (which == NATIVE && !r->e->k.bf16) {
        mu_context_close(r->c);
        return false;
    }
    r->e->k.bf16 = which == NATIVE;
    return true;
}

static void rig_close(rig *r, const char *what)
{
    /* The emulation's memory tells whether it had a part in it. */
    bool helped = r->e->scratch[MUI_SCRATCH_BF16_X] != NULL || r->e->scratch[MUI_SCRATCH_BF16_Y] != NULL;
    print_message("%s, %s%s: at most %.2f of what is allowed\n", what, r->name, r->native && helped ? " but for a part" : "",
                  r->worst);
    free_floats(r->c);
    assert_int_equal(mu_context_close(r->c), MU_OK);
}

/* -- data ----------------------------------------------------------------------------------------------------------- */
static float *rounded(mu_context *c, int64_t n, uint64_t seed)
{
    float *x = random_floats(c, n, seed);
    mui_bf16_coarsen(n, x, x);
    return x;
}

static int64_t room(mu_dims dims, const mui_layout *layout)
{
    return (int64_t)(mui_bytes_in_layout(dims, layout) / sizeof(float));
}

/* plain, of values that bfloat16 has, in that layout; NULL: dirty memory. */
static uint16_t *narrow(const rig *r, mu_dims dims, const mui_layout *layout, const float *plain)
{
    float *wide = dirty(r->c, dims, layout);
    uint16_t *x = (uint16_t *)floats(r->c, room(dims, layout));
    if (plain != NULL && count_of(dims) > 0) {
        assert_int_equal(mui_reorder(r->e, dims, NULL, plain, layout, wide), MU_OK);
    }
    mui_bf16_round(room(dims, layout), wide, x);
    return x;
}

/* And back; padding must be zero. */
static float *widened(const rig *r, const char *what, mu_dims dims, const mui_layout *layout, const uint16_t *x)
{
    float *wide = floats(r->c, room(dims, layout));
    mui_bf16_widen(room(dims, layout), x, wide);
    assert_padding_zero(what, r->e, r->c, dims, layout, wide);
    return from_layout(r->e, r->c, dims, layout, wide);
}

/* A sum in float64, and that of its terms' sizes. */
typedef struct sum {
    double v, size;
} sum;

static sum *sums(mu_context *c, int64_t n)
{
    sum *s = (sum *)(void *)floats(c, n * 4 + 1);
    memset(s, 0, (size_t)n * sizeof(*s));
    return s;
}

static void add(sum *s, double term)
{
    s->v += term;
    s->size += fabs(term);
}

static void within(rig *r, const char *what, const float *got, const sum *want, int64_t n, double roundings, double terms)
{
    for (int64_t i = 0; i < n; i++) {
        double allowed = roundings * 0x1p-8 * (roundings > 1 ? want[i].size : fabs(want[i].v)) + (terms + 4) * 0x1p-23 * want[i].size;
        double off = fabs((double)got[i] - want[i].v);
        if (!(off <= allowed)) {
            fail_msg("%s, %s: element %lld is %.9g, float64 has %.9g, allowed is %.3g", r->name, what, (long long)i,
                     (double)got[i], want[i].v, allowed);
        }
        r->worst = allowed > 0 ? fmax(r->worst, off / allowed) : r->worst;
    }
}

/* -- convolution ---------------------------------------------------------------------------------------------------- */
typedef struct conv_case {
    int64_t n, ic, ih, iw, oc, kh, kw, stride, pad, dilation, groups;
    bool bias, stored; /* stored: the weight in the layout that parameters have */
} conv_case;
static const conv_case convs[] = {
    {2, 64, 7, 7, 64, 3, 3, 1, 1, 1, 1, false, true},   {2, 32, 9, 9, 64, 3, 3, 2, 1, 1, 1, true, true},
    {2, 64, 6, 6, 128, 1, 1, 2, 0, 1, 1, false, true},  {2, 64, 6, 6, 32, 1, 1, 1, 0, 1, 1, true, false},
    {2, 3, 20, 20, 32, 7, 7, 2, 3, 1, 1, false, true},  {3, 1, 14, 14, 32, 3, 3, 1, 1, 1, 1, true, true},
    {2, 3, 16, 16, 16, 3, 3, 1, 1, 1, 1, false, true},  {2, 16, 16, 16, 16, 3, 3, 1, 1, 1, 1, false, true},
    {2, 6, 7, 5, 4, 2, 3, 1, 0, 1, 2, true, true},      {3, 17, 6, 6, 19, 3, 3, 1, 1, 1, 1, true, false},
    {2, 32, 9, 9, 32, 3, 3, 1, 1, 1, 32, false, true},  {1, 16, 11, 11, 32, 3, 3, 1, 2, 2, 1, false, true},
    {16, 64, 2, 2, 64, 3, 3, 1, 1, 1, 1, false, true},  {8, 64, 1, 1, 64, 3, 3, 1, 1, 1, 1, true, true},
    {0, 16, 8, 8, 16, 3, 3, 1, 1, 1, 1, true, true},
};

typedef struct conv_truth {
    sum *y, *dx, *dw, *db;
    int64_t terms; /* of the longest sum */
} conv_truth;

static mui_conv2d_shape shape_of(const conv_case *k)
{
    mui_conv2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = k->n, s.ic = k->ic, s.ih = k->ih, s.iw = k->iw, s.oc = k->oc, s.kh = k->kh, s.kw = k->kw;
    s.stride[0] = s.stride[1] = k->stride;
    s.pad[0] = s.pad[1] = k->pad;
    s.dilation[0] = s.dilation[1] = k->dilation;
    s.groups = k->groups;
    s.oh = (k->ih + 2 * k->pad - k->dilation * (k->kh - 1) - 1) / k->stride + 1;
    s.ow = (k->iw + 2 * k->pad - k->dilation * (k->kw - 1) - 1) / k->stride + 1;
    s.bias = k->bias;
    s.bf16 = true;
    return s;
}

/* One output element's share in everything. */
static void conv_element(const mui_conv2d_shape *s, const conv_truth *t, int64_t n, int64_t k, int64_t i, int64_t j,
                         const float *x, const float *w, const float *dy)
{
    int64_t ic = s->ic / s->groups, first = k / (s->oc / s->groups) * ic, o = ((n * s->oc + k) * s->oh + i) * s->ow + j;
    for (int64_t c = 0; c < ic; c++) {
        for (int64_t a = 0; a < s->kh; a++) {
            for (int64_t b = 0; b < s->kw; b++) {
                int64_t h = i * s->stride[0] - s->pad[0] + a * s->dilation[0];
                int64_t v = j * s->stride[1] - s->pad[1] + b * s->dilation[1];
                if (h < 0 || h >= s->ih || v < 0 || v >= s->iw) {
                    continue;
                }
                int64_t at = ((n * s->ic + first + c) * s->ih + h) * s->iw + v, tap = ((k * ic + c) * s->kh + a) * s->kw + b;
                add(&t->y[o], (double)x[at] * (double)w[tap]);
                add(&t->dx[at], (double)dy[o] * (double)w[tap]);
                add(&t->dw[tap], (double)dy[o] * (double)x[at]);
            }
        }
    }
    add(&t->db[k], (double)dy[o]);
}

static conv_truth conv_define(mu_context *c, const mui_conv2d_shape *s, const float *x, const float *w, const float *bias,
                              const float *dy)
{
    int64_t taps = s->ic / s->groups * s->kh * s->kw, out = s->n * s->oc * s->oh * s->ow;
    conv_truth t = {sums(c, out), sums(c, s->n * s->ic * s->ih * s->iw), sums(c, s->oc * taps), sums(c, s->oc), 0};
    for (int64_t o = 0; o < out; o++) {
        int64_t k = o / (s->oh * s->ow) % s->oc;
        if (bias != NULL) {
            add(&t.y[o], (double)bias[k]);
        }
        conv_element(s, &t, o / (s->oc * s->oh * s->ow), k, o / s->ow % s->oh, o % s->ow, x, w, dy);
    }
    int64_t deep = s->oc / s->groups * s->kh * s->kw, wide = s->n * s->oh * s->ow;
    t.terms = taps > deep ? taps : deep;
    t.terms = t.terms > wide ? t.terms : wide;
    return t;
}

static void check_conv(rig *r, const conv_case *k)
{
    mui_conv2d_shape s = shape_of(k);
    mu_dims xd = MU_DIMS(s.n, s.ic, s.ih, s.iw), yd = MU_DIMS(s.n, s.oc, s.oh, s.ow),
            wd = MU_DIMS(s.oc, s.ic / s.groups, s.kh, s.kw);
    const mui_layout *stored = k->stored ? mui_conv2d_weight_layout(r->e, wd, s.groups, s.stride[0]) : NULL;
    const mui_conv2d_plan *p = mui_conv2d_plan_get(r->e, &s, stored);
    assert_non_null(p);
    float *px = rounded(r->c, count_of(xd), 1), *pdy = rounded(r->c, count_of(yd), 2);
    float *w = random_floats(r->c, count_of(wd), 3), *b = random_floats(r->c, s.oc, 4); /* no bfloat16: rounded inside */
    float *rw = rounded(r->c, count_of(wd), 3), *rb = rounded(r->c, s.oc, 4);
    conv_truth t = conv_define(r->c, &s, px, rw, s.bias ? rb : NULL, pdy);
    uint16_t *x = narrow(r, xd, p->x, px), *dy = narrow(r, yd, p->y, pdy), *y = narrow(r, yd, p->y, NULL),
             *dx = narrow(r, xd, p->x, NULL);
    float *in = p->w != NULL ? to_layout(r->e, r->c, wd, p->w, w) : w, *dw = dirty(r->c, wd, p->w), *db = floats(r->c, s.oc);
    const float *bias = s.bias ? b : NULL;
    double terms = (double)t.terms;
    assert_int_equal(mui_conv2d_forward(r->e, p, x, in, bias, y), MU_OK);
    within(r, "y", widened(r, "y", yd, p->y, y), t.y, count_of(yd), 1, terms);
    assert_int_equal(mui_conv2d_backward_data(r->e, p, dy, in, dx), MU_OK);
    within(r, "dx", widened(r, "dx", xd, p->x, dx), t.dx, count_of(xd), 1, terms);
    for (int round = 1; round <= 2; round++) { /* overwrites, adds */
        assert_int_equal(mui_conv2d_backward_weights(r->e, p, x, dy, dw, s.bias ? db : NULL, round == 2, round == 2), MU_OK);
        for (int64_t i = 0; round == 2 && i < count_of(wd); i++) {
            t.dw[i] = (sum){2 * t.dw[i].v, 2 * t.dw[i].size};
        }
        for (int64_t i = 0; round == 2 && i < s.oc; i++) {
            t.db[i] = (sum){2 * t.db[i].v, 2 * t.db[i].size};
        }
        assert_padding_zero("dw", r->e, r->c, wd, p->w, dw);
        within(r, "dw", from_layout(r->e, r->c, wd, p->w, dw), t.dw, count_of(wd), 0, terms);
        within(r, "db", db, t.db, s.bias ? s.oc : 0, 0, terms);
    }
}

static void run_convs(int which)
{
    for (size_t i = 0; i < sizeof(convs) / sizeof(convs[0]); i++) {
        rig r;
        char what[100];
        const conv_case *k = &convs[i];
        if (!rig_open(&r, which)) {
            skip();
        }
        snprintf(what, sizeof(what), "convolution (%d, %d, %d, %d) to %d by %dx%d", (int)k->n, (int)k->ic, (int)k->ih,
                 (int)k->iw, (int)k->oc, (int)k->kh, (int)k->kw);
        check_conv(&r, k);
        /* The shapes that networks are made of must not be left to the emulation. */
        bool usual = k->groups == 1 && k->ic % 16 == 0 && k->n > 0;
        assert_true(!r.native || !usual || r.e->scratch[MUI_SCRATCH_BF16_X] == NULL);
        rig_close(&r, what);
    }
}

/* -- batch norm ----------------------------------------------------------------------------------------------------- */
typedef struct norm_case {
    int64_t n, c, h, w, block; /* block: of mui_image_layout, 1 is plain */
} norm_case;
static const norm_case norms[] = {
    {3, 32, 5, 5, 16}, {2, 17, 4, 3, 16}, {2, 16, 4, 4, MUI_CHANNELS_LAST}, {2, 5, 3, 3, 1}, {9, 24, 1, 1, 1}, {0, 16, 2, 2, 16},
};

typedef struct norm_work {
    float *x, *dy, *gamma, *beta, *mean, *var, *dgamma, *dbeta;
    uint16_t *nx, *ndy, *y, *dx;
    void *mask;
} norm_work;

static double at_eps(double var)
{
    return 1 / sqrt(var + 1e-3);
}

static void check_forward(rig *r, const mui_norm_shape *s, const norm_work *k, bool evaluate)
{
    int64_t plane = s->h * s->w, total = s->n * s->c * plane, m = s->n * plane;
    sum *y = sums(r->c, total), *mean = sums(r->c, s->c), *var = sums(r->c, s->c);
    for (int64_t i = 0; i < total; i++) {
        add(&mean[i / plane % s->c], (double)k->x[i] / (double)m);
    }
    for (int64_t i = 0; i < total; i++) {
        int64_t c = i / plane % s->c;
        double d = (double)k->x[i] - (evaluate ? (double)k->mean[c] : mean[c].v);
        add(&var[c], d * d / (double)m);
        var[c].size += fabs(d) * mean[c].size / (double)m;
    }
    if (!evaluate && total > 0) {
        within(r, "mean", k->mean, mean, s->c, 0, (double)m);
        within(r, "variance", k->var, var, s->c, 0, (double)m);
    }
    for (int64_t i = 0; i < total; i++) {
        int64_t c = i / plane % s->c;
        double scale = (double)k->gamma[c] * at_eps((double)k->var[c]);
        y[i].v = ((double)k->x[i] - (double)k->mean[c]) * scale + (double)k->beta[c];
        y[i].v = s->relu ? fmax(y[i].v, 0) : y[i].v;
        y[i].size = (fabs((double)k->x[i]) + fabs((double)k->mean[c])) * fabs(scale) + fabs((double)k->beta[c]);
    }
    within(r, "y", widened(r, "y", MU_DIMS(s->n, s->c, s->h, s->w), s->layout, k->y), y, total, 1, 8);
}

/* Given what forward let through. */
static void check_backward(rig *r, const mui_norm_shape *s, const norm_work *k, bool evaluate, int round)
{
    mu_dims dims = MU_DIMS(s->n, s->c, s->h, s->w);
    int64_t plane = s->h * s->w, total = s->n * s->c * plane, m = s->n * plane;
    const float *y = widened(r, "y", dims, s->layout, k->y);
    sum *dgamma = sums(r->c, s->c), *dbeta = sums(r->c, s->c), *dx = sums(r->c, total);
    for (int64_t i = 0; i < total; i++) {
        int64_t c = i / plane % s->c;
        double g = s->relu && !(y[i] > 0) ? 0 : (double)k->dy[i];
        double hat = ((double)k->x[i] - (double)k->mean[c]) * at_eps((double)k->var[c]);
        add(&dbeta[c], g);
        add(&dgamma[c], g * hat);
    }
    for (int64_t i = 0; i < total; i++) {
        int64_t c = i / plane % s->c;
        double g = s->relu && !(y[i] > 0) ? 0 : (double)k->dy[i], inverse = at_eps((double)k->var[c]);
        double scale = (double)k->gamma[c] * inverse, hat = ((double)k->x[i] - (double)k->mean[c]) * inverse;
        add(&dx[i], g * scale);
        if (!evaluate) {
            dx[i].v -= scale * (dbeta[c].v + hat * dgamma[c].v) / (double)m;
            dx[i].size += fabs(scale) * (dbeta[c].size + fabs(hat) * dgamma[c].size) / (double)m;
        }
    }
    within(r, "dx", widened(r, "dx", dims, s->layout, round == 1 ? k->dx : k->ndy), dx, total, 1, (double)m);
    for (int64_t c = 0; c < s->c; c++) {
        dgamma[c] = (sum){round * dgamma[c].v, round * dgamma[c].size};
        dbeta[c] = (sum){round * dbeta[c].v, round * dbeta[c].size};
    }
    within(r, "dgamma", k->dgamma, dgamma, s->c, 0, (double)m + 4);
    within(r, "dbeta", k->dbeta, dbeta, s->c, 0, (double)m);
}

static void check_norm(rig *r, const norm_case *k, bool relu, bool evaluate)
{
    mu_dims dims = MU_DIMS(k->n, k->c, k->h, k->w);
    const mui_layout *layout = NULL;
    if (!mui_image_layout(r->e, dims, k->block, &layout)) {
        layout = NULL; /* plain C knows no other */
    }
    mui_norm_shape s = {k->n, k->c, k->h, k->w, layout, relu, 1e-3f, true};
    norm_work d = {rounded(r->c, count_of(dims), 1), rounded(r->c, count_of(dims), 2), random_floats(r->c, k->c, 3),
                   random_floats(r->c, k->c, 4), random_floats(r->c, k->c, 5), random_floats(r->c, k->c, 6),
                   floats(r->c, k->c), floats(r->c, k->c), NULL, NULL, NULL, NULL, NULL};
    d.nx = narrow(r, dims, layout, d.x);
    d.ndy = narrow(r, dims, layout, d.dy);
    d.y = narrow(r, dims, layout, NULL);
    d.dx = narrow(r, dims, layout, NULL);
    for (int64_t i = 0; i < k->c; i++) {
        d.var[i] = fabsf(d.var[i]) + 0.5F;
    }
    size_t mask_bytes = evaluate ? 0 : mui_batch_norm_mask_bytes(r->e, &s);
    d.mask = floats(r->c, (int64_t)(mask_bytes + 3) / 4);
    assert_int_equal(evaluate ? mui_batch_norm_forward_eval(r->e, &s, d.nx, d.gamma, d.beta, d.mean, d.var, d.y)
                              : mui_batch_norm_forward(r->e, &s, d.nx, d.gamma, d.beta, d.y, d.mean, d.var, d.mask),
                     MU_OK);
    check_forward(r, &s, &d, evaluate);
    for (int round = 1; round <= 2; round++) { /* the second in place, adding */
        uint16_t *out = round == 1 ? d.dx : d.ndy;
        assert_int_equal(evaluate ? mui_batch_norm_backward_eval(r->e, &s, d.nx, d.y, d.ndy, d.gamma, d.mean, d.var, out,
                                                                 d.dgamma, d.dbeta, round == 2)
                                  : mui_batch_norm_backward(r->e, &s, d.nx, mask_bytes == 0 ? d.y : NULL, d.ndy, d.gamma,
                                                            d.mean, d.var, d.mask, out, d.dgamma, d.dbeta, round == 2),
                         MU_OK);
        check_backward(r, &s, &d, evaluate, round);
    }
}

static void run_norms(int which)
{
    for (size_t i = 0; i < sizeof(norms) / sizeof(norms[0]); i++) {
        rig r;
        if (!rig_open(&r, which)) {
            skip();
        }
        for (int flags = 0; flags < 4; flags++) {
            check_norm(&r, &norms[i], (flags & 1) != 0, (flags & 2) != 0);
        }
        assert_true(!r.native || norms[i].c % 16 != 0 || r.e->scratch[MUI_SCRATCH_BF16_X] == NULL);
        rig_close(&r, "batch norm");
    }
}

/* -- pooling -------------------------------------------------------------------------------------------------------- */
typedef struct pool_case {
    int64_t n, c, h, w, kernel, stride, pad, block;
} pool_case;
static const pool_case pools[] = {
    {2, 32, 8, 8, 2, 2, 0, 16}, {2, 17, 7, 9, 3, 2, 1, 16}, {2, 16, 6, 6, 6, 6, 0, 16}, {2, 6, 7, 5, 3, 1, 1, 1},
    {2, 16, 7, 7, 3, 2, 1, MUI_CHANNELS_LAST}, {0, 16, 4, 4, 2, 2, 0, 16},
};

/* Windows may overlap: each adds to dx, where native kernels have bfloat16 for the sum. */
static void check_pool(rig *r, const pool_case *k, mui_pool_kind kind)
{
    mu_dims xd = MU_DIMS(k->n, k->c, k->h, k->w);
    mui_pool2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = k->n, s.c = k->c, s.ih = k->h, s.iw = k->w, s.kh = s.kw = k->kernel, s.kind = kind, s.bf16 = true;
    s.stride[0] = s.stride[1] = k->stride;
    s.pad[0] = s.pad[1] = k->pad;
    s.oh = (k->h + 2 * k->pad - k->kernel) / k->stride + 1;
    s.ow = (k->w + 2 * k->pad - k->kernel) / k->stride + 1;
    if (!mui_image_layout(r->e, xd, k->block, &s.x)) {
        s.x = NULL;
    }
    const mui_layout *l = k->n > 0 ? mui_pool2d_out_layout(r->e, &s) : NULL;
    mu_dims yd = MU_DIMS(s.n, s.c, s.oh, s.ow);
    float *x = rounded(r->c, count_of(xd), 1), *dy = rounded(r->c, count_of(yd), 2);
    sum *y = sums(r->c, count_of(yd)), *dx = sums(r->c, count_of(xd));
    for (int64_t o = 0; o < count_of(yd); o++) {
        int64_t plane = o / (s.oh * s.ow) * s.ih * s.iw, top = o / s.ow % s.oh * k->stride - k->pad,
                left = o % s.ow * k->stride - k->pad, best = -1, real = 0;
        for (int pass = 0; pass < 2; pass++) {
            double by = kind == MUI_POOL_AVG ? (double)(k->kernel * k->kernel) : (double)real;
            for (int64_t i = top < 0 ? 0 : top; i < top + k->kernel && i < s.ih; i++) {
                for (int64_t j = left < 0 ? 0 : left; j < left + k->kernel && j < s.iw; j++) {
                    int64_t at = plane + i * s.iw + j;
                    if (pass == 0) {
                        best = best < 0 || x[at] > x[best] ? at : best;
                        real++;
                    } else if (kind != MUI_POOL_MAX) {
                        add(&y[o], (double)x[at] / by);
                        add(&dx[at], (double)dy[o] / by);
                    }
                }
            }
        }
        if (kind == MUI_POOL_MAX) {
            y[o] = (sum){(double)x[best], 0};
            add(&dx[best], (double)dy[o]);
        }
    }
    uint16_t *nx = narrow(r, xd, s.x, x), *ny = narrow(r, yd, l, NULL), *ndx = narrow(r, xd, s.x, NULL);
    void *workspace = floats(r->c, (int64_t)(mui_pool2d_workspace_bytes(r->e, &s) + 3) / 4);
    assert_int_equal(mui_pool2d_forward(r->e, &s, nx, ny, workspace), MU_OK);
    float *got = widened(r, "pooled", yd, l, ny);
    within(r, "y", got, y, count_of(yd), kind != MUI_POOL_MAX ? 1 : 0, (double)(k->kernel * k->kernel));
    assert_int_equal(mui_pool2d_backward(r->e, &s, narrow(r, yd, l, dy), workspace, ndx), MU_OK);
    int64_t across = (k->kernel + k->stride - 1) / k->stride;
    within(r, "dx", widened(r, "dx", xd, s.x, ndx), dx, count_of(xd), r->native ? (double)(across * across) : 1,
           (double)(k->kernel * k->kernel));
}

static void run_pools(int which)
{
    static const mui_pool_kind kinds[] = {MUI_POOL_MAX, MUI_POOL_AVG, MUI_POOL_AVG_EXCLUDE_PAD};
    for (size_t i = 0; i < sizeof(pools) / sizeof(pools[0]); i++) {
        rig r;
        if (!rig_open(&r, which)) {
            skip();
        }
        for (int kind = 0; kind < 3; kind++) {
            check_pool(&r, &pools[i], kinds[kind]);
        }
        assert_true(!r.native || pools[i].block != 16 || r.e->scratch[MUI_SCRATCH_BF16_X] == NULL);
        rig_close(&r, "pooling");
    }
}

/* -- matrix products ------------------------------------------------------------------------------------------------ */
static const int64_t products[][3] = {{64, 128, 96}, {7, 10, 33}, {1, 1, 1}, {17, 3, 256}, {5, 4, 0}, {0, 3, 2}};

static void check_product(rig *r, const int64_t *size, bool trans_a, bool trans_b)
{
    int64_t m = size[0], n = size[1], k = size[2];
    float *a = rounded(r->c, m * k, 1), *b = rounded(r->c, k * n, 2), *w = random_floats(r->c, k * n, 2);
    float *bias = random_floats(r->c, n, 3), *rb = rounded(r->c, n, 3), *wide = dirty(r->c, MU_DIMS(m, n), NULL);
    sum *c = sums(r->c, m * n);
    for (int64_t i = 0; i < m * n; i++) {
        for (int64_t j = 0; j < k; j++) {
            int64_t row = i / n, column = i % n;
            add(&c[i], (double)a[trans_a ? j * m + row : row * k + j] * (double)b[trans_b ? column * k + j : j * n + column]);
        }
    }
    uint16_t *na = narrow(r, MU_DIMS(m * k), NULL, a), *nb = narrow(r, MU_DIMS(k * n), NULL, b),
             *out = narrow(r, MU_DIMS(m, n), NULL, NULL);
    mu_dims dims = MU_DIMS(m, n);
    assert_int_equal(mui_bf16_gemm(r->e, trans_a, trans_b, m, n, k, na, nb, out), MU_OK);
    within(r, "product", widened(r, "product", dims, NULL, out), c, m * n, 1, (double)k);
    if (!trans_a) {
        assert_int_equal(mui_bf16_linear(r->e, trans_b, m, n, k, na, w, NULL, out), MU_OK);
        within(r, "linear", widened(r, "linear", dims, NULL, out), c, m * n, 1, (double)k);
    }
    for (int round = 1; round <= 2; round++) {
        assert_int_equal(mui_bf16_gemm_f32(r->e, trans_a, trans_b, m, n, k, na, nb, wide, round == 2), MU_OK);
        for (int64_t i = 0; round == 2 && i < m * n; i++) {
            c[i] = (sum){2 * c[i].v, 2 * c[i].size};
        }
        within(r, "float32", wide, c, m * n, 0, (double)k);
    }
    for (int64_t i = 0; i < m * n; i++) {
        c[i] = (sum){c[i].v / 2 + (double)rb[i % n], c[i].size / 2 + fabs((double)rb[i % n])};
    }
    if (!trans_a) {
        assert_int_equal(mui_bf16_linear(r->e, trans_b, m, n, k, na, w, bias, out), MU_OK);
        within(r, "linear with bias", widened(r, "linear", dims, NULL, out), c, m * n, 1, (double)k);
    }
}

static void run_products(int which)
{
    for (size_t i = 0; i < sizeof(products) / sizeof(products[0]); i++) {
        rig r;
        if (!rig_open(&r, which)) {
            skip();
        }
        for (int trans = 0; trans < 4; trans++) {
            check_product(&r, products[i], (trans & 1) != 0, (trans & 2) != 0);
        }
        assert_true(!r.native || products[i][2] == 0 || r.e->scratch[MUI_SCRATCH_BF16_X] == NULL);
        rig_close(&r, "matrix product");
    }
}

/* -- conversions ---------------------------------------------------------------------------------------------------- */
/* Exact there and back, with zero padding, by way of other blocks. */
static void run_conversions(int which)
{
    static const int64_t blocks[] = {16, 8, 4, MUI_CHANNELS_LAST, 1};
    rig r;
    if (!rig_open(&r, which)) {
        skip();
    }
    mu_dims dims = MU_DIMS(2, 19, 3, 5);
    float *x = rounded(r.c, count_of(dims), 1);
    for (int i = 0; i < 5; i++) {
        for (int j = 0; j < 5; j++) {
            const mui_layout *from, *to;
            if (i == j || !mui_image_layout(r.e, dims, blocks[i], &from) || !mui_image_layout(r.e, dims, blocks[j], &to)) {
                continue;
            }
            uint16_t *a = narrow(&r, dims, from, x), *b = narrow(&r, dims, to, NULL);
            assert_int_equal(mui_bf16_reorder(r.e, dims, from, a, to, b), MU_OK);
            assert_same_bits("converted", widened(&r, "converted", dims, to, b), x, (size_t)count_of(dims) * sizeof(*x));
        }
    }
    assert_true(!r.native || r.e->scratch[MUI_SCRATCH_BF16_X] == NULL);
    rig_close(&r, "conversions");
}

#define OF(kind)                                                                                                       \
    static void kind##_emulated(void **state)                                                                         \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        run_##kind(EMULATED_REFERENCE);                                                                                \
        run_##kind(EMULATED);                                                                                          \
    }                                                                                                                  \
    static void kind##_native(void **state)                                                                           \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        run_##kind(NATIVE);                                                                                            \
    }
OF(convs)
OF(norms)
OF(pools)
OF(products)
OF(conversions)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(convs_emulated),       cmocka_unit_test(convs_native),    cmocka_unit_test(norms_emulated),
        cmocka_unit_test(norms_native),         cmocka_unit_test(pools_emulated),  cmocka_unit_test(pools_native),
        cmocka_unit_test(products_emulated),    cmocka_unit_test(products_native), cmocka_unit_test(conversions_emulated),
        cmocka_unit_test(conversions_native),
    };
    rig r;
    if (rig_open(&r, NATIVE)) {
        rig_close(&r, "native kernels are checked");
    } else {
        print_message("this CPU has no AVX-512, or this build no oneDNN: native kernels are not checked\n");
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
