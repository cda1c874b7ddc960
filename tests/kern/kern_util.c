#include "kern/kern_util.h"

static struct {
    mu_context *c;
    void *p;
} blocks[20000];
static size_t block_count;

int engines_open(void **state)
{
    static engines both;
    mu_kernel_choice choice[KINDS] = {MU_KERNELS_REFERENCE, MU_KERNELS_DEFAULT};
    for (int i = 0; i < KINDS; i++) {
        both.c[i] = mu_context_open(&(mu_context_options){.kernels = choice[i], .threads = 1});
        both.e[i] = mui_engine_of(both.c[i]);
        if (both.e[i] == NULL) {
            return -1;
        }
    }
    *state = &both;
    return 0;
}

int engines_close(void **state)
{
    engines *both = *state;
    for (size_t i = 0; i < block_count; i++) {
        mui_free(blocks[i].c, blocks[i].p);
    }
    block_count = 0;
    int failed = 0;
    for (int i = 0; i < KINDS; i++) {
        failed |= mu_context_close(both->c[i]) != MU_OK;
    }
    return failed ? -1 : 0;
}

float *floats(mu_context *c, int64_t n)
{
    float *p = mui_alloc(c, (size_t)n * sizeof(float));
    assert_non_null(p);
    assert_true(block_count < sizeof(blocks) / sizeof(*blocks));
    blocks[block_count].c = c;
    blocks[block_count++].p = p;
    return p;
}

void free_floats(mu_context *c)
{
    size_t left = 0;
    for (size_t i = 0; i < block_count; i++) {
        if (blocks[i].c == c) {
            mui_free(c, blocks[i].p);
        } else {
            blocks[left++] = blocks[i];
        }
    }
    block_count = left;
}

float *random_floats(mu_context *c, int64_t n, uint64_t seed)
{
    float *p = floats(c, n);
    mui_rng r;
    mui_rng_init(&r, seed, 99);
    for (int64_t i = 0; i < n; i++) {
        p[i] = mui_rng_normal(&r);
    }
    return p;
}

void assert_close(const char *what, const float *a, const double *b, int64_t n, double bound, double scale)
{
    for (int64_t i = 0; i < n; i++) {
        bool both_nan = isnan(a[i]) && isnan(b[i]);
        if (!both_nan && a[i] != b[i] && !(fabs(a[i] - b[i]) <= bound * (scale + fabs(b[i])))) {
            fail_msg("%s: element %lld is %.9g, expected %.9g (bound %g, scale %g)", what, (long long)i, (double)a[i],
                     b[i], bound, scale);
        }
    }
}

void assert_close_f(const char *what, const float *a, const float *b, int64_t n, double bound, double scale)
{
    for (int64_t i = 0; i < n; i++) {
        double wanted = b[i];
        if (isnan(a[i]) != isnan(b[i]) || !(isnan(a[i]) || fabs(a[i] - wanted) <= bound * (scale + fabs(wanted)))) {
            fail_msg("%s: element %lld is %.9g, expected %.9g", what, (long long)i, (double)a[i], wanted);
        }
    }
}

void assert_same_bits(const char *what, const void *a, const void *b, size_t bytes)
{
    if (bytes > 0 && memcmp(a, b, bytes) != 0) {
        fail_msg("%s: not the same bits", what);
    }
}

int64_t count_of(mu_dims dims)
{
    int64_t n = 1;
    for (int i = 0; i < dims.ndim; i++) {
        n *= dims.dim[i];
    }
    return n;
}

float *to_layout(mui_engine *e, mu_context *c, mu_dims dims, const mui_layout *layout, const float *plain)
{
    float *p = dirty(c, dims, layout);
    assert_int_equal(mui_reorder(e, dims, NULL, plain, layout, p), MU_OK);
    return p;
}

float *from_layout(mui_engine *e, mu_context *c, mu_dims dims, const mui_layout *layout, const float *data)
{
    float *p = floats(c, count_of(dims));
    assert_int_equal(mui_reorder(e, dims, layout, data, NULL, p), MU_OK);
    return p;
}

float *dirty(mu_context *c, mu_dims dims, const mui_layout *layout)
{
    size_t bytes = mui_bytes_in_layout(dims, layout);
    float *p = floats(c, (int64_t)(bytes / sizeof(float)));
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        p[i] = 1e30f;
    }
    return p;
}

void assert_padding_zero(const char *what, mui_engine *e, mu_context *c, mu_dims dims, const mui_layout *layout,
                         const float *data)
{
    if (!mui_layout_padded(layout)) {
        return;
    }
    /* Through plain and back gives the same elements and zero padding. */
    float *plain = from_layout(e, c, dims, layout, data);
    float *again = to_layout(e, c, dims, layout, plain);
    for (size_t i = 0; i < mui_layout_bytes(layout) / sizeof(float); i++) {
        if (!(data[i] == again[i] || (isnan(data[i]) && isnan(again[i])))) {
            fail_msg("%s: float %zu of layout %s is %g where the padding must be zero", what, i,
                     mui_layout_name(layout), (double)data[i]);
        }
    }
}
