/* What can be wrong with a load on a group, of threads and of processes: every rank gets the same error in the same
 * words, no bit of any model changes, and the group goes on. Allocations and kernels that fail: test_load_memory.c. */
#include "io/io_common.h"
#include "../comm/ranks.h"
#include "comm/group.h"
#include "io/filemap.h"
#include "io/zip_reader.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

enum { MOST_RANKS = 3 };

static uint64_t saved; /* hash of what the good file has */

static mu_module *network(mu_context *c, int classes)
{
    mu_module *m = mu_sequential(c);
    CHECK(mu_sequential_append(m, mu_conv2d_layer(c, 3, 16, 3, NULL)) == MU_OK &&
              mu_sequential_append(m, mu_batch_norm_layer(c, 16, NULL)) == MU_OK &&
              mu_sequential_append(m, mu_flatten_layer(c)) == MU_OK &&
              mu_sequential_append(m, mu_linear(c, 256, classes, NULL)) == MU_OK,
          "%s", mu_context_message(c));
    return m;
}

static uint64_t hash_of(mu_module *m)
{
    uint64_t h = 0;
    CHECK(io_hash(m, &h), "hash");
    return h;
}

/* -- a load that fails ---------------------------------------------------------------------------------------------- */

typedef struct trial {
    const char *what;
    const char *path, *path_of_others; /* of rank 0, and of the others where it is another */
    int classes, odd_classes;          /* odd_classes: of the last rank's model, where it is another */
    mu_load_options options;
    mu_status status;
    const char *word; /* in the message */
} trial;

static const char *const bad_regex[] = {"conv(=x", NULL}, *const no_rule[] = {"no equals sign", NULL};
static const char *const breaking[] = {"^=elsewhere.", NULL};

static const trial trials[] = {
    {"no file", "nowhere.pt", NULL, 5, 0, {0}, MU_ERR_IO, "nowhere.pt"},
    {"no file for rank 0, but for the others", "nowhere.pt", "good.pt", 5, 0, {0}, MU_ERR_IO, "nowhere.pt"},
    {"no path on rank 0", "", "good.pt", 5, 0, {0}, MU_ERR_ARG, "no path"},
    {"no path on the others", "good.pt", "", 5, 0, {0}, MU_ERR_ARG, "no path"},
    {"no checkpoint", "junk.pt", NULL, 5, 0, {0}, MU_ERR_FORMAT, "junk.pt"},
    {"damage in the last tensor", "damaged.pt", NULL, 5, 0, {0}, MU_ERR_FORMAT, "is damaged"},
    {"other shapes", "good.pt", NULL, 7, 0, {0}, MU_ERR_SHAPE, "3.weight: (5, 256) in the file, (7, 256) in the model"},
    {"other shapes, not strict", "good.pt", NULL, 7, 0, {.not_strict = true}, MU_ERR_SHAPE, "3.weight"},
    {"missing names", "little.pt", NULL, 5, 0, {0}, MU_ERR_FORMAT, "missing in the file: 1.weight"},
    {"no match", "other.pt", NULL, 5, 0, {.not_strict = true}, MU_ERR_FORMAT, "none of the model's 9 names is in the file"},
    {"a rename after which nothing matches", "good.pt", NULL, 5, 0, {.rename = breaking}, MU_ERR_FORMAT, "none of the model's"},
    {"no regular expression", "good.pt", NULL, 5, 0, {.rename = bad_regex}, MU_ERR_ARG, "is no regular expression"},
    {"no rule", "good.pt", NULL, 5, 0, {.rename = no_rule}, MU_ERR_ARG, "FROM=TO was expected"},
    {"no such key", "good.pt", NULL, 5, 0, {.key = "ema"}, MU_ERR_ARG, "ema"},
    {"a limit", "good.pt", NULL, 5, 0, {.file = &(mu_checkpoint_options){.max_members = 2}}, MU_ERR_LIMIT, "members"},
    {"another model on the last rank", "good.pt", NULL, 5, 6, {0}, MU_ERR_COMM, "rank"},
};

/* With values of its own on each rank, also in a buffer. */
static mu_module *own_network(mu_context *c, int rank, int classes)
{
    c->seed = (uint64_t)rank + 3;
    mu_module *m = network(c, classes);
    float mean[16] = {0.5f, (float)rank};
    CHECK(mu_tensor_write(mu_module_get_buffer(m, "1.running_mean"), mean, 16) == MU_OK, "%s", mu_context_message(c));
    return m;
}

typedef struct outcome {
    int64_t status;
    uint64_t before, after;
    char message[600];
} outcome;

/* What came out on all ranks is gathered by the group that has just failed; then it adds up, and loads what is good. */
static void body_fails(mu_group *g, int rank, int size, void *arg)
{
    const trial *t = arg;
    mu_context *c = g->context;
    mu_module *m = own_network(c, rank, t->odd_classes > 0 && rank == size - 1 ? t->odd_classes : t->classes);
    mu_load_options o = t->options;
    outcome mine = {.before = hash_of(m)}, all[MOST_RANKS];
    mu_load_report report = {.loaded = -7};
    o.group = g;
    mine.status = mu_load(m, rank > 0 && t->path_of_others != NULL ? t->path_of_others : t->path, &o, &report);
    snprintf(mine.message, sizeof(mine.message), "%s", mu_context_message(c));
    CHECK(mine.status == t->status, "%s: rank %d of %d: %d, not %d: %s", t->what, rank, size, (int)mine.status, t->status,
          mine.message);
    CHECK(mu_context_status(c) == t->status, "%s: the context has %d", t->what, mu_context_status(c));
    CHECK(strstr(mine.message, t->word) != NULL, "%s: no '%s' in: %s", t->what, t->word, mine.message);
    CHECK(report.loaded == -7, "%s: a report was written", t->what);
    mu_context_clear(c);
    mine.after = hash_of(m);
    CHECK(mine.after == mine.before, "%s: rank %d's model has changed", t->what, rank);
    CHECK(mu_all_gather(g, &mine, all, sizeof(mine)) == MU_OK, "%s: gather: %s", t->what, mu_context_message(c));
    for (int i = 0; i < size; i++) {
        CHECK(all[i].status == all[0].status, "%s: status of rank %d", t->what, i);
        CHECK(strcmp(all[i].message, all[0].message) == 0, "%s: '%s' and '%s'", t->what, all[i].message, all[0].message);
        CHECK(i == 0 || all[i].before != all[0].before, "%s: ranks began alike, which proves nothing", t->what);
    }
    int64_t sum = rank + 1;
    CHECK(mu_all_reduce(g, &sum, 1, MU_I64, MU_SUM) == MU_OK && sum == size * (size + 1) / 2, "%s: all-reduce: %s",
          t->what, mu_context_message(c));
    m = own_network(c, rank, 5);
    CHECK(mu_load(m, "good.pt", &(mu_load_options){.group = g}, NULL) == MU_OK && hash_of(m) == saved,
          "%s: the good file afterwards: %s", t->what, mu_context_message(c));
}

typedef int (*run_fn)(int size, rank_fn fn, void *arg, const mu_group_options *options, bool clean);
static const run_fn kinds[] = {run_threads, run_processes};

static void fails_alike(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(trials) / sizeof(trials[0]); i++) {
        for (int kind = 0; kind < 2; kind++) {
            for (int size = 2; size <= MOST_RANKS; size++) {
                trial t = trials[i];
                assert_int_equal(kinds[kind](size, body_fails, &t, &(mu_group_options){.timeout_seconds = 60}, true), 0);
            }
        }
    }
}

/* -- a load that works ---------------------------------------------------------------------------------------------- */

/* Only rank 0 reads: the others may have no such file at all, or one that is no checkpoint. */
static void body_one_reads(mu_group *g, int rank, int size, void *arg)
{
    static const char *const paths[] = {"good.pt", "nowhere/good.pt", "junk.pt"};
    mu_context *c = g->context;
    mu_module *m = own_network(c, rank, 5);
    mu_load_report r = {.text = ""};
    (void)size;
    (void)arg;
    CHECK(hash_of(m) != saved, "rank %d has the file's values already", rank);
    CHECK(mu_load(m, paths[rank], &(mu_load_options){.group = g}, &r) == MU_OK, "rank %d: %s", rank, mu_context_message(c));
    CHECK(hash_of(m) == saved, "rank %d has other values than the file", rank);
    CHECK(r.loaded == 9 && r.elements_loaded == r.elements && strncmp(r.text, "good.pt: ", 9) == 0, "rank %d: %s", rank,
          r.text);
    CHECK(mu_barrier(g) == MU_OK, "%s", mu_context_message(c));
}

static void one_reads(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        for (int size = 2; size <= MOST_RANKS; size++) {
            assert_int_equal(kinds[kind](size, body_one_reads, NULL, &(mu_group_options){.timeout_seconds = 60}, true), 0);
        }
    }
}

/* -- files ---------------------------------------------------------------------------------------------------------- */

/* One wrong bit in the data of the last tensor. */
static void damage_last(mu_context *c, const char *path)
{
    mui_filemap map;
    mui_zip z;
    uint64_t at = 0;
    unsigned char b = 0;
    assert_int_equal(mui_filemap_open(c, path, &map), MU_OK);
    assert_int_equal(mui_zip_open(c, path, map.data, map.bytes, NULL, &z), MU_OK);
    for (size_t i = 0; i < z.count; i++) {
        at = strstr(z.members[i].name, "/data/") != NULL ? z.members[i].offset + z.members[i].packed / 2 : at;
    }
    mui_zip_close(&z);
    mui_filemap_close(&map);
    int fd = open(path, O_RDWR);
    assert_true(at > 0 && pread(fd, &b, 1, (off_t)at) == 1);
    b ^= 0x10;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)at), 1);
    close(fd);
}

static int make_files(void **state)
{
    static char folder[] = "/tmp/muster-groups-XXXXXX";
    *state = folder;
    if (mkdtemp(folder) == NULL || chdir(folder) != 0) {
        return -1;
    }
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 77});
    mu_module *m = network(c, 5), *little = mu_sequential(c), *other = mu_module_new(c, "Other", NULL);
    saved = hash_of(m);
    bool good = mu_save(m, "good.pt", NULL) == MU_OK && mu_save(m, "damaged.pt", NULL) == MU_OK;
    damage_last(c, "damaged.pt");
    good = good && mu_sequential_append(little, mu_conv2d_layer(c, 3, 16, 3, NULL)) == MU_OK;
    good = good && mu_save(little, "little.pt", NULL) == MU_OK;
    good = good && mu_module_add(other, "fc", mu_linear(c, 4, 4, NULL)) == MU_OK && mu_save(other, "other.pt", NULL) == MU_OK;
    FILE *f = fopen("junk.pt", "w");
    good = good && f != NULL && fputs("no checkpoint at all", f) > 0 && fclose(f) == 0;
    return mu_context_close(c) == MU_OK && good ? 0 : -1;
}

static int remove_files(void **state)
{
    static const char *const files[] = {"good.pt", "damaged.pt", "little.pt", "other.pt", "junk.pt"};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        unlink(files[i]);
    }
    return chdir("/") == 0 && rmdir(*state) == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(fails_alike), cmocka_unit_test(one_reads)};
    return cmocka_run_group_tests_name("load_groups", tests, make_files, remove_files);
}
