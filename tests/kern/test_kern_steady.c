/* After warm-up a kernel takes no memory: nothing from the library's heap, and from malloc at large only what oneDNN takes
 * and gives back inside one call and has no interface to avoid: a few small nodes for its list of arguments, and the
 * packing buffers of dnnl_sgemm (glibc keeps both, so they cost no system call). */
#include "kern/kern_util.h"

/* Counted by standing in for glibc's malloc in this program; not with sanitizers, which do that themselves. */
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS 1
#endif
static size_t calls, largest, bytes_taken;

#ifdef COUNTS
extern void *__libc_malloc(size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
static void count(size_t bytes)
{
    calls++;
    bytes_taken += bytes;
    largest = bytes > largest ? bytes : largest;
}

#define EXPORT __attribute__((visibility("default"))) /* oneDNN must see them */
EXPORT void *malloc(size_t bytes)
{
    count(bytes);
    return __libc_malloc(bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes)
{
    count(bytes);
    return __libc_memalign(alignment, bytes);
}

EXPORT int posix_memalign(void **p, size_t alignment, size_t bytes)
{
    count(bytes);
    *p = __libc_memalign(alignment, bytes);
    return *p == NULL ? 12 : 0;
}
#endif

typedef struct work {
    mui_engine *e;
    const mui_conv2d_plan *conv, *winograd, *odd;
    float *x, *w, *y, *big_w, *odd_x, *odd_w, *odd_y, *small[6];
    void *mask, *workspace;
    mui_norm_shape norm;
    mui_pool2d_shape pool, average;
} work;

static const mui_conv2d_plan *plan(mui_engine *e, int64_t ic, int64_t oc, bool bias)
{
    mui_conv2d_shape s;
    memset(&s, 0, sizeof(s));
    s.n = 4;
    s.ic = ic;
    s.oc = oc;
    s.ih = s.iw = s.oh = s.ow = 14;
    s.kh = s.kw = 3;
    s.stride[0] = s.stride[1] = s.pad[0] = s.pad[1] = s.dilation[0] = s.dilation[1] = s.groups = 1;
    s.bias = bias;
    return mui_conv2d_plan_get(e, &s, mui_conv2d_weight_layout(e, MU_DIMS(oc, ic, 3, 3), 1, 1));
}

static void conv_step(work *k, const mui_conv2d_plan *p, float *x, float *w, float *y)
{
    assert_int_equal(mui_conv2d_forward(k->e, p, x, w, p->shape.bias ? k->small[0] : NULL, y), MU_OK);
    assert_int_equal(mui_conv2d_backward_data(k->e, p, y, w, x), MU_OK);
    assert_int_equal(mui_conv2d_backward_weights(k->e, p, x, y, w, p->shape.bias ? k->small[1] : NULL, false, false),
                     MU_OK);
    assert_int_equal(mui_conv2d_backward_weights(k->e, p, x, y, w, p->shape.bias ? k->small[1] : NULL, true, true),
                     MU_OK);
}

static void conv_kernels(work *k)
{
    conv_step(k, k->conv, k->x, k->w, k->y);
    conv_step(k, k->winograd, k->x, k->big_w, k->y);
    conv_step(k, k->odd, k->odd_x, k->odd_w, k->odd_y);
}

static void norm_kernels(work *k)
{
    float **s = k->small;
    assert_int_equal(mui_batch_norm_forward(k->e, &k->norm, k->x, s[0], s[1], k->y, s[2], s[3], k->mask), MU_OK);
    assert_int_equal(mui_batch_norm_backward(k->e, &k->norm, k->x, k->y, k->y, s[0], s[2], s[3], k->mask, k->y, s[4],
                                             s[5], true), MU_OK);
    assert_int_equal(mui_batch_norm_forward_eval(k->e, &k->norm, k->x, s[0], NULL, s[2], s[3], k->y), MU_OK);
    assert_int_equal(mui_batch_norm_backward_eval(k->e, &k->norm, k->x, k->y, k->y, s[0], s[2], s[3], k->y, s[4], s[5],
                                                  false), MU_OK);
}

static void pool_kernels(work *k)
{
    assert_int_equal(mui_pool2d_forward(k->e, &k->pool, k->x, k->y, k->workspace), MU_OK);
    assert_int_equal(mui_pool2d_backward(k->e, &k->pool, k->y, k->workspace, k->x), MU_OK);
    assert_int_equal(mui_pool2d_forward(k->e, &k->average, k->x, k->y, NULL), MU_OK);
    assert_int_equal(mui_pool2d_backward(k->e, &k->average, k->y, NULL, k->x), MU_OK);
    assert_int_equal(mui_reorder(k->e, MU_DIMS(4, 64, 14, 14), k->norm.layout, k->x, NULL, k->y), MU_OK);
}

static void product_kernels(work *k)
{
    for (int t = 0; t < 4; t++) {
        assert_int_equal(mui_gemm(k->e, t & 1, t & 2, 64, 64, 64, 1, k->x, 64, k->w, 64, 0, k->y, 64), MU_OK);
        assert_int_equal(mui_gemm(k->e, t & 1, t & 2, 64, 10, 32, 1, k->x, 64, k->w, 64, 1, k->y, 64), MU_OK);
    }
}

enum { NODE = 512, PACKED = 128 * 1024 };

static void hold(const char *name, work *k, mu_context *c, void (*kernels)(work *), size_t allowed)
{
    kernels(k);
    kernels(k);
    uint64_t ours = c->allocations;
    calls = largest = bytes_taken = 0;
    for (int i = 0; i < 10; i++) {
        kernels(k);
    }
    size_t n = calls, most = largest, sum = bytes_taken;
    print_message("%s: 10 rounds made %zu calls of malloc, %zu bytes in all, %zu at most\n", name, n, sum, most);
    assert_int_equal(c->allocations, ours);
    assert_true(most <= (c->kernels == MU_KERNELS_REFERENCE ? 0 : allowed));
}

static void nothing_is_taken(void **state)
{
    engines *both = *state;
    for (int kind = 0; kind < KINDS; kind++) {
        mu_context *c = both->c[kind];
        mui_engine *e = both->e[kind];
        work k = {.e = e};
        calls = 0;
        k.conv = plan(e, 16, 32, true);
        k.winograd = plan(e, 64, 64, false);
        k.odd = plan(e, 17, 5, true);
#ifdef COUNTS
        assert_true(calls > 0); /* the counting works: plans do take memory */
#endif
        int64_t n = 4 * 64 * 14 * 14;
        k.x = random_floats(c, n, 1);
        k.y = random_floats(c, n, 2);
        k.odd_x = to_layout(e, c, MU_DIMS(4, 17, 14, 14), k.odd->x, k.x);
        k.odd_y = to_layout(e, c, MU_DIMS(4, 5, 14, 14), k.odd->y, k.x);
        k.w = random_floats(c, 64 * 64 * 9, 3);
        k.big_w = random_floats(c, 64 * 64 * 9, 4);
        k.odd_w = to_layout(e, c, MU_DIMS(5, 17, 3, 3), k.odd->w, k.big_w);
        for (int i = 0; i < 6; i++) {
            k.small[i] = random_floats(c, 64, 5);
            for (int j = 0; j < 64; j++) {
                k.small[i][j] = fabsf(k.small[i][j]) + 0.1f;
            }
        }
        k.norm = (mui_norm_shape){4, 64, 14, 14, k.winograd->y, true, 1e-5f, false};
        k.pool = (mui_pool2d_shape){4, 64, 14, 14, 7, 7, 2, 2, {2, 2}, {0, 0}, MUI_POOL_MAX, k.winograd->y, false};
        k.average = k.pool;
        k.average.kind = MUI_POOL_AVG;
        k.mask = floats(c, (int64_t)mui_batch_norm_mask_bytes(e, &k.norm) / 4 + 1);
        k.workspace = floats(c, (int64_t)mui_pool2d_workspace_bytes(e, &k.pool) / 4 + 1);
        hold("convolution", &k, c, conv_kernels, NODE);
        hold("batch norm", &k, c, norm_kernels, NODE);
        hold("pooling and reorder", &k, c, pool_kernels, NODE);
        hold("matrix product", &k, c, product_kernels, PACKED);
        free_floats(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_is_taken)};
    return cmocka_run_group_tests(tests, engines_open, engines_close);
}
