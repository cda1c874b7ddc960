/* Subsampling between zero channels against its definition, in every layout of images, forward and backward. */
#include "kern_util.h"

static const mui_subsample_shape shapes[] = {
    {.n = 2, .c = 16, .h = 6, .w = 6, .step = 2, .before = 8, .after = 8},
    {.n = 1, .c = 32, .h = 5, .w = 7, .step = 2, .before = 16, .after = 16},
    {.n = 2, .c = 20, .h = 7, .w = 4, .step = 3, .before = 10, .after = 10}, /* blocks half full, pads within them */
    {.n = 3, .c = 3, .h = 5, .w = 5, .step = 2, .before = 1, .after = 2},
    {.n = 2, .c = 24, .h = 3, .w = 2, .step = 1, .before = 0, .after = 5},
    {.n = 2, .c = 8, .h = 2, .w = 2, .step = 2, .before = 4, .after = 4}, /* to 1x1 */
    {.n = 2, .c = 40, .h = 4, .w = 9, .step = 2, .before = 3, .after = 0},
};

static mu_dims dims_of(const mui_subsample_shape *s, bool out)
{
    return out ? MU_DIMS(s->n, s->before + s->c + s->after, (s->h + s->step - 1) / s->step, (s->w + s->step - 1) / s->step)
               : MU_DIMS(s->n, s->c, s->h, s->w);
}

/* y from x, or x += y, plain. */
static void truth(const mui_subsample_shape *s, float *x, float *y, bool back)
{
    mu_dims d = dims_of(s, true);
    if (!back) {
        memset(y, 0, (size_t)count_of(d) * sizeof(float));
    }
    for (int64_t n = 0; n < s->n; n++) {
        for (int64_t c = 0; c < s->c; c++) {
            for (int64_t i = 0; i < d.dim[2]; i++) {
                for (int64_t j = 0; j < d.dim[3]; j++) {
                    float *at_x = x + ((n * s->c + c) * s->h + i * s->step) * s->w + j * s->step;
                    float *at_y = y + ((n * d.dim[1] + s->before + c) * d.dim[2] + i) * d.dim[3] + j;
                    *(back ? at_x : at_y) = back ? *at_x + *at_y : *at_x;
                }
            }
        }
    }
}

static void check(mui_engine *e, mu_context *c, mui_subsample_shape s, const char *what)
{
    mu_dims in = dims_of(&s, false), out = dims_of(&s, true);
    const mui_subsample_plan *p = mui_subsample_plan_get(e, &s);
    assert_non_null(p);
    assert_ptr_equal(p, mui_subsample_plan_get(e, &s));
    assert_ptr_equal(p->x, s.x); /* no conversion */
    size_t bytes_in = mui_bytes_in_layout(in, NULL), bytes_out = mui_bytes_in_layout(out, NULL);
    float *x = random_floats(c, count_of(in), 1), *want_y = floats(c, count_of(out));
    truth(&s, x, want_y, false);
    float *y = dirty(c, out, p->y);
    mui_subsample_forward(e, p, to_layout(e, c, in, p->x, x), y);
    assert_same_bits(what, want_y, from_layout(e, c, out, p->y, y), bytes_out);
    assert_padding_zero(what, e, c, out, p->y, y);

    float *dy = random_floats(c, count_of(out), 2), *first = random_floats(c, count_of(in), 3);
    float *given = to_layout(e, c, out, p->y, dy), *sum = to_layout(e, c, in, p->x, first), *dx = dirty(c, in, p->x);
    mui_subsample_backward(e, p, given, dx, false);
    mui_subsample_backward(e, p, given, sum, true);
    float *zero = floats(c, count_of(in));
    memset(zero, 0, bytes_in);
    truth(&s, zero, dy, true);
    truth(&s, first, dy, true);
    assert_same_bits(what, zero, from_layout(e, c, in, p->x, dx), bytes_in);
    assert_same_bits(what, first, from_layout(e, c, in, p->x, sum), bytes_in);
    assert_padding_zero(what, e, c, in, p->x, dx);
    assert_padding_zero(what, e, c, in, p->x, sum);
    free_floats(c);
}

static void every_layout(void **state)
{
    engines *both = *state;
    static const int64_t blocks[] = {1, 4, 8, 16, MUI_CHANNELS_LAST};
    for (int kind = 0; kind < KINDS; kind++) {
        mui_engine *e = both->e[kind];
        bool has = mui_conv2d_weight_layout(e, MU_DIMS(32, 32, 3, 3), 1, 1) != NULL;
        int blocked = 0;
        for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
            for (size_t b = 0; b < sizeof(blocks) / sizeof(blocks[0]); b++) {
                mui_subsample_shape s = shapes[i];
                char what[96];
                if (!mui_image_layout(e, dims_of(&s, false), blocks[b], &s.x)) {
                    assert_false(has);
                    continue;
                }
                snprintf(what, sizeof(what), "shape %zu, layout %s", i, mui_layout_name(s.x));
                check(e, both->c[kind], s, what);
                blocked += s.x != NULL;
            }
        }
        assert_true(blocked >= (has ? 28 : 0));
    }
}

/* A layout that is none of images' has no like: plain then, and the caller converts. */
static void other_layouts(void **state)
{
    engines *both = *state;
    mui_engine *e = both->e[DEFAULT];
    mu_dims dims = MU_DIMS(16, 32, 4, 4);
    mui_subsample_shape s = {16, 32, 4, 4, 2, 16, 16, mui_conv2d_weight_layout(e, dims, 1, 1)};
    const mui_subsample_plan *p = mui_subsample_plan_get(e, &s);
    assert_non_null(p);
    assert_null(p->x);
    assert_null(p->y);
    assert_int_equal(p->block, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_layout), cmocka_unit_test(other_layouts)};
    return cmocka_run_group_tests(tests, engines_open, engines_close);
}
