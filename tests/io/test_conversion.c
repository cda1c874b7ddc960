/* Conversion from C: its report, and memory that runs out at any allocation of a save or a conversion: the old file stays,
 * nothing leaks and nothing is left beside it. */
#include "io/io_common.h"
#include "base/alloc.h"

#include <muster/muster.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const mu_file_format formats[] = {MU_FORMAT_TORCH, MU_FORMAT_LEGACY, MU_FORMAT_SAFETENSORS};
enum { FORMATS = 3 };

static void quiet(void *user, mu_log_level level, const char *message)
{
    (void)user;
    (void)level;
    (void)message;
}

/* Two linear layers of one weight, and batch norm. */
static mu_module *network(mu_context *c)
{
    mu_module *m = mu_module_new(c, "Net", NULL), *b = mu_module_new(c, "Linear", NULL);
    MU_OR_DIE(c, mu_module_add(m, "a", mu_linear(c, 4, 4, NULL)));
    MU_OR_DIE(c, mu_module_add(m, "b", b));
    MU_OR_DIE(c, mu_module_share(b, "weight", mu_module_get_parameter(m, "a.weight")));
    MU_OR_DIE(c, mu_module_add(m, "norm", mu_batch_norm_layer(c, 4, NULL)));
    return m;
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static bool is_text(const char *path, const char *text)
{
    char have[64] = "";
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n = fread(have, 1, sizeof(have) - 1, f);
    fclose(f);
    return n == strlen(text) && memcmp(have, text, n) == 0;
}

static void test_report(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log = quiet});
    mu_module *m = network(c);
    assert_int_equal(mu_save(m, "in.pt", NULL), MU_OK);
    for (int f = 0; f < FORMATS; f++) {
        mu_checkpoint_file *k = mu_checkpoint_open(c, "in.pt");
        const char *rename[] = {"^norm=bn", NULL};
        mu_convert_options o = {.format = formats[f], .rename = rename, .prefix = "x.", .change_dtype = true, .dtype = MU_BF16};
        mu_convert_report r;
        assert_int_equal(mu_checkpoint_convert(k, "out", &o, &r), MU_OK);
        assert_int_equal(r.written, 8);
        assert_int_equal(r.converted, 7); /* not num_batches_tracked */
        assert_int_equal(r.renamed, 8);
        assert_int_equal(r.tied, 1);
        assert_int_equal(r.separated, 0);
        assert_int_equal(r.left_out, 0);
        assert_non_null(strstr(r.text, "tied: x.b.weight to x.a.weight\n"));
        mu_checkpoint_close(k);
        k = mu_checkpoint_open(c, "out");
        assert_int_equal(mu_checkpoint_count(k), 8);
        mu_checkpoint_close(k);
        /* what cannot be */
        k = mu_checkpoint_open(c, "in.pt");
        o.dtype = MU_I64;
        assert_int_equal(mu_checkpoint_convert(k, "out", &o, &r), MU_ERR_ARG);
        mu_context_clear(c);
        assert_int_equal(mu_checkpoint_convert(k, "", NULL, NULL), MU_ERR_ARG);
        mu_context_clear(c);
        assert_int_equal(mu_checkpoint_convert(NULL, "out", NULL, NULL), MU_ERR_ARG);
        assert_int_equal(mu_checkpoint_convert(k, "out", &(mu_convert_options){.format = (mu_file_format)7}, NULL), MU_ERR_ARG);
        mu_context_clear(c);
    }
    assert_int_equal(mu_context_close(c), MU_OK);
    unlink("in.pt");
    unlink("out");
}

/* attempt: 0 saves, 1 converts. Returns the number of allocations that failed before it worked. */
static int run_out(int attempt, mu_file_format format)
{
    int n = 0;
    for (;; n++) {
        mu_context *c = mu_context_open(&(mu_context_options){.log = quiet});
        mu_module *m = network(c);
        MU_OR_DIE(c, mu_save(m, "in", &(mu_save_options){.format = format}));
        mu_checkpoint_file *k = mu_checkpoint_open(c, "in");
        assert_non_null(k);
        write_text("out", "old");
        const char *rename[] = {"norm=bn", NULL};
        mu_convert_options o = {.format = format, .rename = rename, .change_dtype = true, .dtype = MU_F16};
        mu_convert_report r;
        int before = io_entries(".");
        uint64_t live = c->live_allocations;
        c->fail_after = n;
        mu_status s = attempt == 0 ? mu_save(m, "out", &(mu_save_options){.format = format})
                                   : mu_checkpoint_convert(k, "out", &o, &r);
        c->fail_after = -1;
        assert_int_equal(io_entries("."), before);
        assert_int_equal(is_text("out", "old"), s != MU_OK);
        assert_true(s == MU_OK || s == MU_ERR_NOMEM);
        /* A conversion may leave the context its text and what holds it. */
        assert_true(c->live_allocations - live <= (attempt == 0 ? 0 : 2));
        mu_context_clear(c);
        mu_context_close(c);
        if (s == MU_OK) {
            return n;
        }
        assert_true(n < 100000);
    }
}

static void test_memory(void **state)
{
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        assert_true(run_out(0, formats[f]) > 10);
        assert_true(run_out(1, formats[f]) > 20);
    }
    unlink("in");
    unlink("out");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_report),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, io_enter_folder, io_leave_folder);
}
