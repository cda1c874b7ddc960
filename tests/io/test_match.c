/* Matching names: random wrappers on random trees, clashes, ties, warnings, many names. */
#include "io/io_common.h"
#include "base/alloc.h"
#include "base/context.h"
#include "io/load_match.h"
#include <muster/muster.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static char warnings[4000];

static void keep_warnings(void *user, mu_log_level level, const char *message)
{
    (void)user;
    if (level == MU_LOG_WARN) {
        snprintf(warnings + strlen(warnings), sizeof(warnings) - strlen(warnings), "%s\n", message);
    }
}

static mu_context *context(uint64_t seed)
{
    warnings[0] = '\0';
    return mu_context_open(&(mu_context_options){.log = keep_warnings, .seed = seed});
}

static uint64_t random_state;

static int draw(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static mu_module *within(mu_context *c, const char *name, mu_module *child)
{
    mu_module *m = mu_module_new(c, "Wrapper", NULL);
    assert_int_equal(mu_module_add(m, name, child), MU_OK);
    return m;
}

/* A tree drawn from `shape`; wrappers around its parts are drawn from random_state when there are kinds of them. Its own
 * parts may be called like wrappers. */
static mu_module *tree(mu_context *c, uint64_t *shape, int depth, const char *const *kinds, int kind_count)
{
    static const char *const own[] = {"fc", "conv", "model", "layer1", "net"};
    mu_module *m;
    *shape = *shape * 6364136223846793005u + 1442695040888963407u;
    int branches = depth == 0 ? 3 : (int)((*shape >> 40) % 3);
    if (branches == 0 || depth == 3) {
        m = mu_linear(c, 2, 2, NULL);
    } else {
        m = mu_module_new(c, "Node", NULL);
        int first = (int)((*shape >> 50) % 5);
        for (int i = 0; i < branches; i++) {
            assert_int_equal(mu_module_add(m, own[(first + i) % 5], tree(c, shape, depth + 1, kinds, kind_count)), MU_OK);
        }
    }
    for (int i = 0; i < 2 && kind_count > 0 && draw(3) == 0; i++) {
        m = within(c, kinds[draw(kind_count)], m);
    }
    return m;
}

typedef struct values {
    float x[4000];
    int64_t n;
} values;

static bool add_values(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    values *v = user;
    int64_t n = mu_tensor_elements(value);
    (void)name;
    (void)p;
    assert_true(v->n + n <= 4000);
    assert_int_equal(mu_tensor_read(value, v->x + v->n, n), MU_OK);
    v->n += n;
    return true;
}

static bool same_values(mu_module *a, mu_module *b)
{
    static values x, y;
    x.n = y.n = 0;
    assert_int_equal(mu_module_each_state(a, add_values, &x), MU_OK);
    assert_int_equal(mu_module_each_state(b, add_values, &y), MU_OK);
    return x.n == y.n && memcmp(x.x, y.x, (size_t)x.n * sizeof(float)) == 0;
}

/* What distributed training and compilation wrap, at any depth, is found; a model's own "model" and "net" are kept. */
static void test_random_nesting(void **state)
{
    (void)state;
    static const char *const kinds[] = {"module", "_orig_mod"};
    for (uint64_t seed = 0; seed < 150; seed++) {
        mu_context *c = context(seed), *d = context(seed + 1000);
        uint64_t shape[2] = {seed * 77, seed * 77};
        random_state = seed;
        mu_module *plain = tree(c, &shape[0], 0, NULL, 0), *wrapped = tree(d, &shape[1], 0, kinds, 2);
        mu_load_report r;
        /* the file is wrapped, then the model; then both, differently */
        assert_false(same_values(plain, wrapped));
        assert_int_equal(mu_save(wrapped, "nested.pt", NULL), MU_OK);
        assert_int_equal(mu_load(plain, "nested.pt", NULL, &r), MU_OK);
        assert_true(same_values(plain, wrapped));
        assert_int_equal(r.elements_loaded, r.elements);
        mu_context *e = context(seed + 2000);
        shape[1] = seed * 77;
        mu_module *other = tree(e, &shape[1], 0, kinds, 2);
        assert_int_equal(mu_load(other, "nested.pt", NULL, &r), MU_OK);
        assert_true(same_values(other, wrapped));
        mu_context_close(e);
        e = context(seed + 3000);
        shape[1] = seed * 77;
        other = tree(e, &shape[1], 0, NULL, 0);
        assert_int_equal(mu_save(other, "nested.pt", NULL), MU_OK);
        assert_int_equal(mu_load(wrapped, "nested.pt", NULL, &r), MU_OK);
        assert_true(same_values(other, wrapped));
        mu_context_close(e);
        mu_context_close(d);
        mu_context_close(c);
    }
    unlink("nested.pt");
}

static mu_module *two(mu_context *c, const char *a, const char *b)
{
    mu_module *m = mu_module_new(c, "Two", NULL);
    assert_int_equal(mu_module_add(m, a, mu_linear(c, 2, 2, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, b, mu_linear(c, 30, 30, NULL)), MU_OK);
    return m;
}

/* Removed at the start and inside, with another one on the model's side; told in the report. */
static void test_combined(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *a = within(c, "module", two(c, "x", "y")), *b = within(d, "model", two(d, "x", "y"));
    mu_load_report r;
    assert_int_equal(mu_save(a, "combined.pt", NULL), MU_OK);
    assert_int_equal(mu_load(b, "combined.pt", NULL, &r), MU_OK);
    assert_true(same_values(a, b));
    assert_string_equal(r.prefix_removed, "module.");
    assert_string_equal(r.prefix_added, "model.");
    assert_int_equal(r.renamed, 4);
    assert_non_null(strstr(r.text, "\"module.\" removed inside names, \"model.\" put inside names"));
    assert_int_equal(mu_load(b, "combined.pt", &(mu_load_options){.exact_names = true}, &r), MU_ERR_FORMAT);
    mu_context_clear(d);
    assert_int_equal(mu_load(b, "combined.pt", &(mu_load_options){.exact_names = true,
                             .rename = (const char *const[]){"^module=model", NULL}}, &r), MU_OK);
    assert_non_null(strstr(r.text, "model.x.weight: module.x.weight in the file"));
    assert_int_equal(mu_load(b, "combined.pt", &(mu_load_options){.rename = (const char *const[]){"^module\\.x=lost", NULL}},
                             NULL), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(d), "not in the model: module.x.weight (renamed lost.weight), "));
    assert_non_null(strstr(mu_context_message(d), ". To load what fits: --not-strict (in C: not_strict)"));
    mu_context_clear(d);
    mu_context_close(d);
    mu_context_close(c);
    unlink("combined.pt");
}

static void test_clashes(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *m = two(d, "x", "y"), *file = mu_module_new(c, "File", NULL);
    assert_int_equal(mu_module_add(m, "z", mu_linear(d, 2, 2, NULL)), MU_OK);
    /* module.x and x.module, the others only as y.module and z.module: which x? */
    assert_int_equal(mu_module_add(file, "x", within(c, "module", mu_linear(c, 2, 2, NULL))), MU_OK);
    assert_int_equal(mu_module_add(file, "module", within(c, "x", mu_linear(c, 2, 2, NULL))), MU_OK);
    assert_int_equal(mu_module_add(file, "y", within(c, "module", mu_linear(c, 30, 30, NULL))), MU_OK);
    assert_int_equal(mu_module_add(file, "z", within(c, "module", mu_linear(c, 2, 2, NULL))), MU_OK);
    assert_int_equal(mu_save(file, "clash.pt", NULL), MU_OK);
    assert_int_equal(mu_load(m, "clash.pt", &(mu_load_options){.not_strict = true}, NULL), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(d), "both 'x.module.weight' and 'module.x.weight' would be loaded into x.weight"));
    mu_context_clear(d);
    /* model.* and net.* both fit */
    m = two(d, "x", "y");
    mu_module *pair = mu_module_new(c, "Pair", NULL);
    assert_int_equal(mu_module_add(pair, "model", two(c, "x", "y")), MU_OK);
    assert_int_equal(mu_module_add(pair, "net", two(c, "x", "y")), MU_OK);
    assert_int_equal(mu_save(pair, "clash.pt", NULL), MU_OK);
    assert_int_equal(mu_load(m, "clash.pt", &(mu_load_options){.not_strict = true}, NULL), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(d), "both with \"net.\" before them (4) and with \"model.\" (4)"));
    mu_context_clear(d);
    assert_int_equal(mu_load(m, "clash.pt", &(mu_load_options){.key = "model"}, NULL), MU_OK);
    /* a rule that makes one of two */
    const char *const rules[] = {"^(model|net)\\.=", NULL};
    assert_int_equal(mu_load(m, "clash.pt", &(mu_load_options){.rename = rules, .not_strict = true}, NULL), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(d), "renaming makes both 'model.x.bias' and 'net.x.bias' into 'x.bias'"));
    mu_context_close(d);
    mu_context_close(c);
    unlink("clash.pt");
}

static void test_little(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *m = two(d, "x", "y"), *file = mu_module_new(c, "File", NULL);
    mu_load_report r;
    /* half of the names, but few of the elements; the rest lies below another name */
    assert_int_equal(mu_module_add(file, "x", mu_linear(c, 2, 2, NULL)), MU_OK);
    assert_int_equal(mu_module_add(file, "enc", two(c, "x", "y")), MU_OK);
    assert_int_equal(mu_module_add(file, "module", within(c, "q", mu_linear(c, 2, 2, NULL))), MU_OK);
    assert_int_equal(mu_save(file, "little.pt", NULL), MU_OK);
    warnings[0] = '\0';
    assert_int_equal(mu_load(m, "little.pt", &(mu_load_options){.not_strict = true,
                             .rename = (const char *const[]){"gamma=weight", NULL}}, &r), MU_OK);
    assert_string_equal(r.prefix_removed, ""); /* it would match no more */
    assert_int_equal(r.elements, 936);
    assert_int_equal(r.elements_loaded, 6);
    assert_non_null(strstr(warnings, "little.pt: only 6 of the model's 936 elements (2 of 4 tensors) were loaded; missing: "
                                     "y.weight, y.bias; 4 names would fit below \"enc\": give that as key"));
    assert_non_null(strstr(warnings, "little.pt: rename 'gamma=weight' matched no name"));
    assert_int_equal(mu_load(m, "little.pt", &(mu_load_options){.key = "enc"}, &r), MU_OK);
    /* the model's names have something before them */
    mu_context *e = context(3);
    mu_module *deep = within(e, "backbone", two(e, "x", "y"));
    assert_int_equal(mu_save(m, "little.pt", NULL), MU_OK);
    assert_int_equal(mu_load(deep, "little.pt", &(mu_load_options){.not_strict = true}, &r), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(e), "rename \"^=backbone.\""));
    mu_context_clear(e);
    assert_int_equal(mu_load(deep, "little.pt", &(mu_load_options){.rename = (const char *const[]){"^=backbone.", NULL}}, &r),
                     MU_OK);
    assert_true(same_values(deep, m));
    mu_context_close(e);
    mu_context_close(d);
    mu_context_close(c);
    unlink("little.pt");
}

/* Of renamings that match as many names the mildest is taken, and told: at the start before inside, though not all match. */
static void test_mildest(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *file = mu_module_new(c, "File", NULL), *m = two(d, "x", "y");
    const mu_load_options loose = {.not_strict = true};
    mu_load_report r;
    assert_int_equal(mu_module_add(file, "module", within(c, "y", mu_linear(c, 30, 30, NULL))), MU_OK);
    assert_int_equal(mu_module_add(file, "z", mu_linear(c, 2, 2, NULL)), MU_OK);
    assert_int_equal(mu_save(file, "mild.pt", NULL), MU_OK);
    assert_int_equal(mu_load(m, "mild.pt", &loose, &r), MU_OK);
    assert_int_equal(r.loaded, 2);
    assert_string_equal(r.prefix_removed, "module.");
    assert_non_null(strstr(r.text, ", \"module.\" removed from the start of names\n"));
    assert_null(strstr(r.text, "inside"));
    /* the other way round */
    m = within(d, "net", two(d, "x", "y"));
    assert_int_equal(mu_save(two(c, "x", "z"), "mild.pt", NULL), MU_OK);
    assert_int_equal(mu_load(m, "mild.pt", &loose, &r), MU_OK);
    assert_int_equal(r.loaded, 2);
    assert_string_equal(r.prefix_added, "net.");
    assert_non_null(strstr(r.text, ", \"net.\" put before names\n"));
    assert_null(strstr(r.text, "inside"));
    mu_context_close(d);
    mu_context_close(c);
    unlink("mild.pt");
}

static void test_buffers_only(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *file = mu_module_new(c, "File", NULL), *m = mu_module_new(d, "Model", NULL);
    assert_int_equal(mu_module_add(file, "bn", mu_batch_norm_layer(c, 3, NULL)), MU_OK);
    assert_int_equal(mu_save(file, "buffers.pt", NULL), MU_OK);
    assert_int_equal(mu_module_add(m, "bn", mu_batch_norm_layer(d, 3, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, "fc", mu_linear(d, 9, 9, NULL)), MU_OK);
    const char *const rules[] = {"(weight|bias)$=\\1_old", NULL};
    assert_int_equal(mu_load(m, "buffers.pt", &(mu_load_options){.not_strict = true, .rename = rules}, NULL), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(d), "none of the model's 4 parameters is in the file"));
    mu_context_close(d);
    mu_context_close(c);
    unlink("buffers.pt");
}

static mu_module *tied(mu_context *c, bool share)
{
    mu_module *m = mu_module_new(c, "Tied", NULL), *b = mu_module_new(c, "Head", NULL);
    assert_int_equal(mu_module_add(m, "a", mu_linear(c, 3, 3, NULL)), MU_OK);
    assert_int_equal(mu_module_add(m, "b", b), MU_OK);
    if (share) {
        assert_int_equal(mu_module_share(b, "weight", mu_module_get_parameter(m, "a.weight")), MU_OK);
    } else {
        assert_non_null(mu_module_parameter(b, "weight", MU_DIMS(3, 3), (mu_init){.kind = MU_INIT_UNIFORM, .value = 1}));
    }
    return m;
}

static void test_ties(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *m = tied(d, true), *untied = tied(c, false);
    mu_load_report r;
    /* one of two names */
    mu_module *one = within(c, "a", mu_linear(c, 3, 3, NULL));
    assert_int_equal(mu_save(one, "tied.pt", NULL), MU_OK);
    assert_int_equal(mu_load(m, "tied.pt", NULL, &r), MU_OK);
    assert_int_equal(r.loaded, 3);
    assert_int_equal(r.elements, 12);
    assert_int_equal(r.elements_loaded, 12);
    assert_non_null(strstr(r.text, "tied to what was loaded (1):\n  b.weight"));
    /* both, and they differ */
    assert_int_equal(mu_save(untied, "tied.pt", NULL), MU_OK);
    assert_int_equal(mu_load(m, "tied.pt", NULL, &r), MU_ERR_FORMAT);
    assert_non_null(strstr(mu_context_message(d), "a.weight and b.weight are one parameter in the model"));
    mu_context_clear(d);
    warnings[0] = '\0';
    assert_int_equal(mu_load(m, "tied.pt", &(mu_load_options){.not_strict = true}, &r), MU_OK);
    assert_non_null(strstr(warnings, "the last is taken"));
    float x[9], y[9];
    assert_int_equal(mu_tensor_read(mu_parameter_tensor(mu_module_get_parameter(m, "a.weight")), x, 9), MU_OK);
    assert_int_equal(mu_tensor_read(mu_parameter_tensor(mu_module_get_parameter(untied, "b.weight")), y, 9), MU_OK);
    assert_memory_equal(x, y, sizeof(x));
    mu_context_close(d);
    mu_context_close(c);
    unlink("tied.pt");
}

/* Processor time of matching one of 6 dicts of n names each, where every renaming has to be tried on most of them. */
static double match_many(size_t n)
{
    enum { DICTS = 6 };
    mu_context *c = context(1);
    int64_t axis = 0;
    mui_file_tensor t = {.ndim = 1, .dim = &axis, .stride = &axis};
    mui_state *items = mui_calloc(c, n, sizeof(*items));
    mui_entry *entries = mui_calloc(c, n * DICTS, sizeof(*entries));
    char(*names)[96] = calloc(n * (DICTS + 1), sizeof(*names));
    mui_branch branches[DICTS];
    static const char *const before[DICTS] = {"net.model.", "_orig_mod.module.", "ema.", "module.net.", "model._orig_mod.", "x."};
    assert_true(items != NULL && entries != NULL && names != NULL);
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof(names[i]), "encoder.layers.%zu.attention.weight", i);
        items[i] = (mui_state){.name = names[i], .same_as = i};
    }
    for (size_t d = 0; d < DICTS; d++) {
        static char paths[DICTS][8];
        snprintf(paths[d], sizeof(paths[d]), "d%zu", d);
        branches[d] = (mui_branch){.path = paths[d], .plain = paths[d], .first = d * n, .end = (d + 1) * n};
        for (size_t i = 0; i < n; i++) {
            char *name = names[(d + 1) * n + i];
            /* the fourth is the model's, wrapped inside too; the others lack a name each second time */
            snprintf(name, sizeof(names[0]), "d%zu.%sencoder.%slayers.%zu.attention.weight%s", d, before[d],
                     i % 3 == 0 ? "module." : "", i, d != 3 && i % 2 == 0 ? "_g" : d == 3 ? "" : "_v");
            entries[d * n + i] = (mui_entry){.name = name, .plain = name, .tensor = &t, .tied_to = SIZE_MAX};
        }
    }
    mui_states s = {.context = c, .items = items, .count = n};
    mu_checkpoint_file k = {.context = c, .path = "many", .tree = {.context = c, .entries = entries,
                            .count = n * DICTS, .branches = branches, .branch_count = DICTS}};
    mui_match m;
    clock_t start = clock();
    assert_int_equal(mui_match_find(&k, &s, &(mu_load_options){.key = NULL}, &m), MU_OK);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    assert_int_equal(m.matched, n);
    assert_string_equal(m.path, "d3");
    assert_string_equal(m.removed, "module.net.");
    mui_match_free(&m);
    mui_free(c, items);
    mui_free(c, entries);
    free(names);
    assert_int_equal(mu_context_close(c), MU_OK);
    return seconds;
}

/* Four times the names take about four times the time, on any machine; every pair of names would take sixteen. The best
 * of a few tries each, since others use the machine too. */
static void test_many_names(void **state)
{
    (void)state;
    double few = 1e9, many = 1e9;
    for (int i = 0; i < 6 && (i < 2 || many > 9 * few); i++) {
        double a = match_many(5000), b = match_many(20000);
        few = a < few ? a : few;
        many = b < many ? b : many;
    }
    print_message("6 dicts of 5,000 names: %.4f s, of 20,000: %.4f s\n", few, many);
    assert_true(many <= 9 * few);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_nesting), cmocka_unit_test(test_combined),     cmocka_unit_test(test_clashes),
        cmocka_unit_test(test_little),         cmocka_unit_test(test_buffers_only), cmocka_unit_test(test_ties),
        cmocka_unit_test(test_mildest),        cmocka_unit_test(test_many_names),
    };
    return cmocka_run_group_tests(tests, io_enter_folder, io_leave_folder);
}
