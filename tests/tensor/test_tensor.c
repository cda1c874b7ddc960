/* Floors 1 and 3: the storage pool, shapes, element types, reading and writing any layout. */
#include "base/alloc.h"
#include "dev/pages.h"
#include "tensor/tensor.h"
#include <muster/tape.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static mu_context *quiet(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
}

static void pool_recycles_and_counts(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_pool *p = mui_pool_new(c);
    static const size_t sizes[] = {1, 256, 257, 4096, 5000, 100000, (size_t)3 << 20, ((size_t)5 << 20) + 12345};
    mui_storage *s[8];
    uint64_t allocations = 0;
    size_t peak = 0;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            int k = round % 2 == 0 ? i : 7 - i;
            s[k] = mui_storage_new(p, sizes[k]);
            assert_non_null(s[k]);
            assert_true(s[k]->capacity >= sizes[k]);
            assert_true(sizes[k] <= 256 || s[k]->capacity <= sizes[k] + sizes[k] / 8 + 64);
            assert_int_equal((uintptr_t)s[k]->data % 64, 0);
            memset(s[k]->data, round, sizes[k]);
        }
        size_t live = mui_pool_live_bytes(p);
        mui_storage_keep(s[3]);
        for (int i = 0; i < 8; i++) {
            mui_storage_release(s[i]);
        }
        assert_true(mui_pool_live_bytes(p) == s[3]->capacity);
        assert_true(((char *)s[3]->data)[0] == round);
        mui_storage_release(s[3]);
        assert_int_equal(mui_pool_live_bytes(p), 0);
        if (round == 0) {
            allocations = c->allocations;
            peak = mui_pool_peak_bytes(p);
            assert_true(peak == live);
        }
        assert_int_equal(c->allocations, allocations);
        assert_int_equal(mui_pool_peak_bytes(p), peak);
        /* Beyond what was in use at once: of small blocks, the rest of the 2 MiB that they are cut from. */
        assert_in_range(mui_pool_held_bytes(p), peak, peak + ((size_t)2 << 20));
    }
    char mine[8];
    mui_storage *w = mui_storage_wrap(p, mine, sizeof(mine));
    assert_ptr_equal(w->data, mine);
    mui_storage_release(w);
    mui_storage_release(NULL);
    assert_null(mui_storage_new(p, SIZE_MAX / 2));
    assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
    mui_pool_free(p);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void pages_are_aligned_and_freed(void **state)
{
    (void)state;
    mu_context *c = quiet();
    for (size_t bytes = 0; bytes < (size_t)9 << 20; bytes = bytes * 3 + 1000) {
        char *p = mui_pages_alloc(c, bytes);
        assert_int_equal((uintptr_t)p % (bytes >= (size_t)2 << 20 ? (size_t)2 << 20 : 64), 0);
        memset(p, 1, bytes);
        mui_pages_free(c, p);
    }
    mui_pages_free(c, NULL);
    assert_null(mui_pages_alloc(c, SIZE_MAX - 10));
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void shapes(void **state)
{
    (void)state;
    mu_context *c = quiet();
    char text[MUI_DIMS_TEXT];
    assert_string_equal(mui_dims_text(MU_SCALAR, text), "()");
    assert_string_equal(mui_dims_text(MU_DIMS(3), text), "(3,)");
    assert_string_equal(mui_dims_text(MU_DIMS(2, 0, 4), text), "(2, 0, 4)");
    mu_dims widest = {.ndim = 8};
    for (int i = 0; i < 8; i++) {
        widest.dim[i] = INT64_MIN;
    }
    assert_true(strlen(mui_dims_text(widest, text)) < MUI_DIMS_TEXT);
    assert_int_equal(mui_dims_elements(MU_SCALAR), 1);
    assert_int_equal(mui_dims_elements(MU_DIMS(2, 0)), 0);
    assert_true(mui_dims_equal(MU_DIMS(2, 3), MU_DIMS(2, 3)));
    assert_false(mui_dims_equal(MU_DIMS(2, 3), MU_DIMS(2)));
    size_t bytes = 99;
    assert_int_equal(mui_dims_check(c, MU_DIMS(3, 5), MU_F64, &bytes), MU_OK);
    assert_int_equal(bytes, 120);
    assert_int_equal(mui_dims_check(c, MU_DIMS(1, 0, 1 << 30), MU_F32, &bytes), MU_OK);
    assert_int_equal(bytes, 0);
    static const struct {
        mu_dims dims;
    } bad[] = {{{.ndim = 9}}, {{.ndim = -1}}, {{2, {3, -1}}}, {{2, {INT64_MAX, 2}}}, {{1, {INT64_MAX / 2}}},
               {{3, {INT64_MAX, INT64_MAX, 0}}}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(mui_dims_check(c, bad[i].dims, MU_F32, &bytes), MU_ERR_SHAPE);
        assert_int_equal(bytes, 0);
        mu_context_clear(c);
    }
    assert_string_equal(mu_dtype_name(MU_BF16), "bfloat16");
    assert_string_equal(mu_dtype_name(MU_DTYPE_COUNT), "unknown");
    assert_int_equal(mu_dtype_bytes(MU_C128), 16);
    assert_int_equal(mu_tensor_elements(NULL), 0);
    assert_true(isnan(mu_tensor_item(NULL)));
    mu_context_close(c);
}

static void halves_convert_exactly(void **state)
{
    (void)state;
    mu_context *c = quiet();
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint16_t h = (uint16_t)bits, back = 0;
        float f = 0.0f;
        assert_int_equal(mui_to_float(c, MU_F16, 1, &h, &f), MU_OK);
        int exponent = (h >> 10) & 31;
        double want = ldexp((double)((h & 1023) + (exponent > 0 ? 1024 : 0)), (exponent > 0 ? exponent : 1) - 25);
        if (exponent < 31) {
            assert_true((double)f == (h >> 15 ? -want : want));
        }
        assert_int_equal(mui_from_float(c, MU_F16, 1, &f, &back), MU_OK);
        assert_true(isnan(f) ? (back & 0x7fff) > 0x7c00 : back == h);
        assert_int_equal(mui_to_float(c, MU_BF16, 1, &h, &f), MU_OK);
        assert_int_equal(mui_from_float(c, MU_BF16, 1, &f, &back), MU_OK);
        assert_true(isnan(f) ? (back & 0x7fff) > 0x7f80 : back == h);
    }
    /* Between two halves: to the nearest, ties to even; large ones to infinity. */
    static const struct {
        float f;
        uint16_t h;
    } ties[] = {{1.0f + 0x1p-11f, 0x3c00}, {1.0f + 3 * 0x1p-11f, 0x3c02}, {1.0f + 0x1.2p-11f, 0x3c01}, {65519.0f, 0x7bff},
                {65520.0f, 0x7c00}, {-1e30f, 0xfc00}, {0x1p-25f, 0}, {0x1.2p-25f, 1}, {0x1p-14f - 0x1p-26f, 0x400}};
    for (size_t i = 0; i < sizeof(ties) / sizeof(ties[0]); i++) {
        uint16_t h = 0;
        assert_int_equal(mui_from_float(c, MU_F16, 1, &ties[i].f, &h), MU_OK);
        assert_int_equal(h, ties[i].h);
    }
    double d = 0.0;
    float f = 0.1f;
    assert_int_equal(mui_from_float(c, MU_F64, 1, &f, &d), MU_OK);
    assert_true(d == (double)0.1f);
    assert_int_equal(mui_to_float(c, MU_I64, 1, &d, &f), MU_ERR_DTYPE);
    mu_context_close(c);
}

static void any_layout_reads_and_writes_row_major(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mui_engine *e = mui_engine_of(c);
    float v[4 * 3], out[4 * 3], memory[4 * 6];
    for (int i = 0; i < 12; i++) {
        v[i] = (float)i;
    }
    /* Strided: 4 x 3, transposed and with gaps. */
    memset(memory, 0, sizeof(memory));
    mu_tensor x = {.context = c, .dtype = MU_F32, .dims = MU_DIMS(4, 3), .stride = {1, 8}, .data = (char *)memory};
    assert_false(mui_tensor_is_plain(&x));
    assert_int_equal(mu_tensor_write(&x, v, 12), MU_OK);
    assert_true(memory[8] == 1.0f && memory[1] == 3.0f && memory[4] == 0.0f);
    assert_int_equal(mu_tensor_read(&x, out, 12), MU_OK);
    assert_memory_equal(out, v, sizeof(v));
    assert_int_equal(mu_tensor_read(&x, out, 11), MU_ERR_SHAPE);
    mu_context_clear(c);
    /* Blocked, with channels that are no multiple of a block. */
    mu_dims dims = MU_DIMS(20, 5, 3, 3);
    const mui_layout *layout = mui_conv2d_weight_layout(e, dims, 1, 1);
    float *big = calloc(mui_bytes_in_layout(dims, layout), 1), *w = malloc(900 * sizeof(float)),
          *r = malloc(900 * sizeof(float));
    for (int i = 0; i < 900; i++) {
        w[i] = (float)i + 0.5f;
    }
    mu_tensor k = {.context = c, .dtype = MU_F32, .dims = dims, .layout = layout, .data = (char *)big};
    assert_int_equal(mu_tensor_write(&k, w, 900), MU_OK);
    assert_int_equal(mu_tensor_read(&k, r, 900), MU_OK);
    assert_memory_equal(r, w, 900 * sizeof(float));
    memset(r, 0, 900 * sizeof(float));
    assert_int_equal(mui_tensor_get_raw(&k, r, 3600), MU_OK);
    assert_memory_equal(r, w, 900 * sizeof(float));
    assert_int_equal(mui_tensor_get_raw(&k, r, 3601), MU_ERR_SHAPE);
    mu_context_clear(c);
    free(big);
    free(w);
    free(r);
    mu_context_close(c);
}

static void other_types(void **state)
{
    (void)state;
    mu_context *c = quiet();
    int8_t bytes[3] = {-1, 0, 127};
    mu_tensor i8 = {.context = c, .dtype = MU_I8, .dims = MU_DIMS(3), .stride = {1}, .data = (char *)bytes};
    int64_t wide[3];
    float f[3];
    assert_int_equal(mu_tensor_read_i64(&i8, wide, 3), MU_OK);
    assert_true(wide[0] == -1 && wide[2] == 127);
    assert_int_equal(mu_tensor_read(&i8, f, 3), MU_ERR_DTYPE);
    mu_context_clear(c);
    uint16_t halves[4] = {0x3c00, 0, 0xc000, 0x7c00};
    mu_tensor f16 = {.context = c, .dtype = MU_F16, .dims = MU_DIMS(2), .stride = {2}, .data = (char *)halves};
    assert_int_equal(mu_tensor_read(&f16, f, 2), MU_OK);
    assert_true(f[0] == 1.0f && f[1] == -2.0f);
    assert_int_equal(mu_tensor_write(&f16, (float[]){0.5f, 3.0f}, 2), MU_OK);
    assert_true(halves[0] == 0x3800 && halves[1] == 0 && halves[2] == 0x4200);
    assert_int_equal(mu_tensor_read_i64(&f16, wide, 2), MU_ERR_DTYPE);
    mu_context_clear(c);
    mu_tensor one = {.context = c, .dtype = MU_I8, .dims = MU_SCALAR, .data = (char *)bytes};
    assert_true(mu_tensor_item(&one) == -1.0f);
    assert_true(isnan(mu_tensor_item(&i8)));
    assert_int_equal(mu_context_status(c), MU_ERR_SHAPE);
    mu_context_close(c);
}

static void tape_tensors(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_tape *t = mu_tape_new(c, NULL);
    mu_tensor *zero = mu_tensor_from(t, MU_DIMS(2, 2), NULL), *empty = mu_tensor_zeros(t, MU_DIMS(3, 0));
    float v[4] = {1, 1, 1, 1};
    assert_int_equal(mu_tensor_read(zero, v, 4), MU_OK);
    assert_true(v[0] == 0.0f && v[3] == 0.0f);
    assert_int_equal(mu_tensor_read(empty, v, 0), MU_OK);
    assert_int_equal(mu_tensor_dim(empty, -1), 0);
    assert_int_equal(mu_tensor_dim(empty, -2), 3);
    assert_null(mu_tensor_zeros(t, MU_DIMS(-3)));
    assert_int_equal(mu_context_status(c), MU_ERR_SHAPE);
    assert_null(mu_tensor_zeros(t, MU_DIMS(3))); /* sticky */
    mu_context_clear(c);
    mu_tensor *labels = mu_tensor_from_i64(t, MU_DIMS(2), (int64_t[]){5, -6});
    mu_tensor *kept = mu_tensor_keep(t, labels);
    assert_null(mu_tensor_require_grad(t, labels));
    assert_int_equal(mu_context_status(c), MU_ERR_DTYPE);
    mu_context_clear(c);
    mu_tape_reset(t);
    int64_t i[2];
    assert_int_equal(mu_tensor_read_i64(kept, i, 2), MU_OK);
    assert_true(i[0] == 5 && i[1] == -6);
    mu_tape_free(t);
    assert_int_equal(mu_context_close(c), MU_OK); /* frees what was kept */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pool_recycles_and_counts),
        cmocka_unit_test(pages_are_aligned_and_freed),
        cmocka_unit_test(shapes),
        cmocka_unit_test(halves_convert_exactly),
        cmocka_unit_test(any_layout_reads_and_writes_row_major),
        cmocka_unit_test(other_types),
        cmocka_unit_test(tape_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
