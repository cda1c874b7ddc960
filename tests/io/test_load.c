/* mu_load and mu_save from C: all-or-nothing under every failed allocation, groups of threads, atomic replacement. What
 * PyTorch has to say is in test_torch.py. */
#define _GNU_SOURCE
#include "io/io_common.h"
#include "base/alloc.h"
#include "base/context.h"
#include "io/zip_reader.h"
#include <muster/muster.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define RANKS 3

static void quiet(void *user, mu_log_level level, const char *message)
{
    (void)user;
    (void)level;
    (void)message;
}

static mu_context *context(uint64_t seed)
{
    return mu_context_open(&(mu_context_options){.log = quiet, .seed = seed});
}

/* conv, batch norm, linear: parameters in blocked layouts too, float and integer buffers. */
static mu_module *network(mu_context *c, int classes)
{
    mu_module *m = mu_sequential(c);
    assert_int_equal(mu_sequential_append(m, mu_conv2d_layer(c, 3, 16, 3, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_batch_norm_layer(c, 16, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_flatten_layer(c)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_linear(c, 256, classes, NULL)), MU_OK);
    return m;
}

static void step(mu_context *c, mu_module *m, mu_optimizer *o, int count)
{
    mu_tape *t = mu_tape_new(c, NULL);
    for (int s = 0; s < count; s++) {
        float x[2 * 108];
        int64_t y[2] = {s % 3, 1};
        for (int i = 0; i < 216; i++) {
            x[i] = (float)((i * 37 + s * 11) % 101 - 50) / 50;
        }
        mu_tape_reset(t);
        mu_tensor *out = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 3, 6, 6), x));
        assert_int_equal(mu_backward(t, mu_cross_entropy(t, out, mu_tensor_from_i64(t, MU_DIMS(2), y))), MU_OK);
        assert_int_equal(mu_optimizer_step(o), MU_OK);
    }
    mu_tape_free(t);
}

static uint64_t hash_of(mu_module *m)
{
    uint64_t h = 0;
    assert_true(io_hash(m, &h));
    return h;
}

static void test_round_trip(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *a = network(c, 5), *b = network(d, 5);
    mu_load_report r;
    assert_int_equal(mu_save(a, "round.pt", NULL), MU_OK);
    assert_int_not_equal(hash_of(a), hash_of(b));
    assert_int_equal(mu_load(b, "round.pt", NULL, &r), MU_OK);
    assert_int_equal(hash_of(a), hash_of(b));
    assert_int_equal(r.loaded, 9);
    assert_int_equal(r.missing + r.unexpected + r.mismatched, 0);
    assert_string_equal(r.prefix_removed, "");
    /* a head of another size: refused, or skipped and named */
    mu_context *e = context(3);
    mu_module *m = network(e, 7);
    uint64_t before = hash_of(m);
    assert_int_equal(mu_load(m, "round.pt", &(mu_load_options){.not_strict = true}, &r), MU_ERR_SHAPE);
    assert_non_null(strstr(mu_context_message(e), "3.weight: (5, 256) in the file, (7, 256) in the model"));
    assert_int_equal(hash_of(m), before);
    mu_context_clear(e);
    assert_int_equal(mu_load(m, "round.pt", &(mu_load_options){.not_strict = true, .skip_mismatched = true}, &r), MU_OK);
    assert_int_equal(r.loaded, 7);
    assert_int_equal(r.mismatched, 2);
    assert_non_null(strstr(r.text, "3.bias"));
    /* the model's own names have the prefix */
    mu_module *outer = mu_module_new(e, "Outer", NULL);
    assert_int_equal(mu_module_add(outer, "module", network(e, 5)), MU_OK);
    assert_int_equal(mu_load(outer, "round.pt", NULL, &r), MU_OK);
    assert_string_equal(r.prefix_added, "module.");
    assert_int_equal(mu_save(outer, "outer.pt", NULL), MU_OK);
    assert_int_equal(mu_load(b, "outer.pt", NULL, &r), MU_OK);
    assert_string_equal(r.prefix_removed, "module.");
    assert_int_equal(hash_of(a), hash_of(b));
    mu_context_close(e);
    mu_context_close(d);
    mu_context_close(c);
    unlink("round.pt");
    unlink("outer.pt");
}

static void use(const mu_training *t)
{
    step(mu_module_context(t->model), t->model, t->optimizer, 2);
}

/* Every allocation of a load fails once, then all from there on: an error each time, and not a bit has changed. */
static void test_no_memory(void **state)
{
    (void)state;
    mu_context *c = context(1);
    mu_training written = {.model = network(c, 5), .epoch = 3, .seed = 9, .note = "note"};
    written.optimizer = mu_adam(written.model, 0.01f, NULL);
    use(&written);
    assert_int_equal(mu_save(written.model, "memory.pt", NULL), MU_OK);
    assert_int_equal(mu_training_save(&written, "memory.train"), MU_OK);
    uint64_t want = hash_of(written.model);

    for (int kind = 0; kind < 4; kind++) { /* model or training, failing once or for ever */
        mu_context *d = context(2);
        mu_training t = {.model = network(d, 5)};
        t.optimizer = mu_adam(t.model, 0.01f, NULL);
        use(&t);
        uint64_t before = hash_of(t.model);
        assert_int_equal(mu_training_save(&t, "memory.before"), MU_OK);
        int64_t failures = 0;
        for (int64_t i = 0;; i++) {
            d->fail_forever = kind >= 2;
            d->fail_after = i;
            mu_status s = kind % 2 == 0 ? mu_load(t.model, "memory.pt", NULL, NULL)
                                        : mu_training_load(&t, "memory.train", NULL);
            d->fail_after = -1;
            if (s == MU_OK) {
                break;
            }
            failures++;
            assert_int_equal(s, MU_ERR_NOMEM);
            mu_context_clear(d);
            assert_int_equal(hash_of(t.model), before);
            assert_int_equal(t.epoch, 0);
        }
        assert_true(failures > 20);
        assert_int_equal(hash_of(t.model), want);
        mu_context_close(d);
        /* The optimiser too is as it was: the same file comes out after a failure near the end. */
        if (kind % 2 == 1) {
            mu_context *e = context(2);
            mu_training u = {.model = network(e, 5)};
            u.optimizer = mu_adam(u.model, 0.01f, NULL);
            use(&u);
            for (int64_t i = failures - 1; i >= 0; i--) {
                e->fail_forever = kind >= 2;
                e->fail_after = i;
                assert_int_equal(mu_training_load(&u, "memory.train", NULL), MU_ERR_NOMEM);
                e->fail_after = -1;
                mu_context_clear(e);
            }
            assert_int_equal(mu_training_save(&u, "memory.after"), MU_OK);
            assert_int_equal(system("unzip -p memory.before 'memory/data/*' > memory.x && "
                                    "unzip -p memory.after 'memory/data/*' > memory.y && cmp memory.x memory.y"),
                             0);
            mu_context_close(e);
        }
    }
    /* and saving: the old file stays, nothing else is left */
    uint64_t size_before = 0;
    struct stat st;
    assert_int_equal(stat("memory.pt", &st), 0);
    size_before = (uint64_t)st.st_size;
    for (int64_t i = 0;; i++) {
        c->fail_after = i;
        mu_status s = mu_training_save(&written, "memory.pt");
        c->fail_after = -1;
        if (s == MU_OK) {
            break;
        }
        assert_int_equal(s, MU_ERR_NOMEM);
        mu_context_clear(c);
        assert_int_equal(stat("memory.pt", &st), 0);
        if ((uint64_t)st.st_size != size_before) {
            break; /* only what follows the rename may fail with the new file in place */
        }
    }
    mu_context_close(c);
    assert_int_not_equal(system("ls memory.*.tmp.* 2>/dev/null"), 0);
    assert_int_equal(system("rm -f memory.*"), 0);
}

/* -- groups --------------------------------------------------------------------------------------------------------- */

typedef struct rank {
    mu_thread_world *world;
    int number;
    const char *path;
    bool training, other_model;
    mu_status status;
    char message[512];
    uint64_t before, after;
    int64_t loaded, epoch;
    char text[2000], note[64];
} rank;

static void *run_rank(void *arg)
{
    rank *r = arg;
    mu_context *c = context((uint64_t)r->number);
    mu_group *g = mu_group_threads(c, r->world, r->number);
    mu_module *m = network(c, r->other_model && r->number == 1 ? 6 : 5);
    mu_training t = {.model = m, .optimizer = mu_sgd(m, 0.1f, &(mu_sgd_options){.momentum = 0.9f})};
    mu_load_report report = {.text = ""};
    r->before = hash_of(m);
    r->status = r->training ? mu_training_load(&t, r->path, g)
                            : mu_load(m, r->path, &(mu_load_options){.group = g}, &report);
    snprintf(r->message, sizeof(r->message), "%s", mu_context_message(c));
    snprintf(r->text, sizeof(r->text), "%s", report.text);
    snprintf(r->note, sizeof(r->note), "%s", t.note != NULL ? t.note : "");
    r->loaded = report.loaded;
    r->epoch = t.epoch;
    if (r->status == MU_OK) {
        assert_int_equal(mu_barrier(g), MU_OK);
    }
    mu_context_clear(c);
    r->after = hash_of(m);
    mu_context_close(c);
    return NULL;
}

static void run_ranks(rank *ranks, const char *path, bool training, bool other_model)
{
    mu_thread_world *w = mu_thread_world_new(RANKS, &(mu_group_options){.timeout_seconds = 30});
    pthread_t threads[RANKS];
    assert_non_null(w);
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.world = w, .number = i, .path = path, .training = training, .other_model = other_model};
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
    }
    mu_thread_world_free(w);
}

static void test_group(void **state)
{
    (void)state;
    rank ranks[RANKS];
    mu_context *c = context(77);
    mu_module *m = network(c, 5);
    mu_training t = {.model = m, .optimizer = mu_sgd(m, 0.1f, &(mu_sgd_options){.momentum = 0.9f}), .epoch = 4,
                     .note = "kept"};
    use(&t);
    uint64_t want = hash_of(m);
    assert_int_equal(mu_save(m, "group.pt", &(mu_save_options){.prefix = "module."}), MU_OK);
    assert_int_equal(mu_training_save(&t, "group.train"), MU_OK);
    run_ranks(ranks, "group.pt", false, false);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].status, MU_OK);
        assert_true(ranks[i].after == want && ranks[i].loaded == 9);
        assert_string_equal(ranks[i].text, ranks[0].text);
        assert_non_null(strstr(ranks[i].text, "\"module.\" removed"));
    }
    run_ranks(ranks, "group.train", true, false);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].status, MU_OK);
        assert_true(ranks[i].after == want && ranks[i].epoch == 4);
        assert_string_equal(ranks[i].note, "kept");
    }
    /* an error of the reader, one that only rank 1 can see */
    for (int kind = 0; kind < 3; kind++) {
        run_ranks(ranks, kind == 0 ? "nowhere.pt" : "group.pt", kind == 2, kind == 1);
        for (int i = 0; i < RANKS; i++) {
            assert_int_equal(ranks[i].status, kind == 0 ? MU_ERR_IO : kind == 1 ? MU_ERR_COMM : MU_ERR_FORMAT);
            assert_string_equal(ranks[i].message, ranks[0].message);
            assert_true(ranks[i].before == ranks[i].after);
        }
        assert_non_null(strstr(ranks[2].message, kind == 0 ? "nowhere.pt" : kind == 1 ? "rank 1" : "training"));
    }
    mu_context_close(c);
    unlink("group.pt");
    unlink("group.train");
}

/* -- the disk --------------------------------------------------------------------------------------------------------- */

/* Loads path into a fresh model and says whether it is the one of want. */
static bool holds(const char *path, uint64_t want)
{
    mu_context *c = context(5);
    mu_module *m = network(c, 5);
    bool good = mu_load(m, path, NULL, NULL) == MU_OK && hash_of(m) == want;
    mu_context_close(c);
    return good;
}

static void test_full_disk(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *a = network(c, 5), *b = network(d, 5);
    uint64_t old = hash_of(a);
    assert_int_equal(mkdir("full", 0777), 0);
    assert_int_equal(mu_save(a, "full/m.pt", NULL), MU_OK);
    assert_int_equal(chmod("full/m.pt", 0640), 0);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit, before;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    for (rlim_t n = 0; n < 11000; n += 1000) {
        limit = (struct rlimit){n, before.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        mu_status s = mu_save(b, "full/m.pt", NULL);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_int_equal(s, MU_ERR_IO);
        assert_non_null(strstr(mu_context_message(d), "full/m.pt"));
        mu_context_clear(d);
        assert_int_equal(io_entries("full"), 1);
        assert_true(holds("full/m.pt", old));
    }
    assert_int_equal(mu_save(b, "full/m.pt", NULL), MU_OK);
    struct stat st;
    assert_int_equal(stat("full/m.pt", &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    assert_true(holds("full/m.pt", hash_of(b)));
    /* links are followed, other things than files refused */
    assert_int_equal(symlink("m.pt", "full/link.pt"), 0);
    assert_int_equal(mu_save(a, "full/link.pt", NULL), MU_OK);
    assert_true(holds("full/m.pt", old));
    assert_int_equal(lstat("full/link.pt", &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    static const char *const refused[] = {"full", "/dev/null", "nowhere/m.pt"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(mu_save(a, refused[i], NULL), MU_ERR_IO);
        mu_context_clear(c);
    }
    mu_context_close(c);
    mu_context_close(d);
    assert_int_equal(system("rm -r full"), 0);
}

/* A process that saves two models in turn is killed at random times: the file is always one of them, whole. */
static void test_kill(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *a = network(c, 5), *b = network(d, 5);
    uint64_t hash_a = hash_of(a), hash_b = hash_of(b);
    assert_int_equal(mkdir("kill", 0777), 0);
    assert_int_equal(mu_save(a, "kill/m.pt", NULL), MU_OK);
    int leftovers = 0;
    for (int i = 0; i < 25; i++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            for (;;) {
                if (mu_save(a, "kill/m.pt", NULL) != MU_OK || mu_save(b, "kill/m.pt", NULL) != MU_OK) {
                    _exit(1);
                }
            }
        }
        usleep((useconds_t)(2000 + i * 997));
        kill(child, SIGKILL);
        int how = 0;
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_true(WIFSIGNALED(how));
        assert_true(holds("kill/m.pt", hash_a) || holds("kill/m.pt", hash_b));
        leftovers = io_entries("kill") - 1;
    }
    assert_true(leftovers <= 25); /* at most one temporary file for each kill */
    mu_context_close(c);
    mu_context_close(d);
    assert_int_equal(system("rm -r kill"), 0);
}

/* What an argument error looks like, and that a failed context stays failed. */
static void test_arguments(void **state)
{
    (void)state;
    mu_context *c = context(1);
    mu_module *m = network(c, 5);
    assert_int_equal(mu_load(NULL, "x", NULL, NULL), MU_ERR_ARG);
    assert_int_equal(mu_save(NULL, "x", NULL), MU_ERR_ARG);
    assert_int_equal(mu_load(m, "", NULL, NULL), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_save(m, NULL, NULL), MU_ERR_ARG);
    assert_int_equal(mu_load(m, "x", NULL, NULL), MU_ERR_ARG);
    assert_null(mu_checkpoint_open(c, "x"));
    mu_context_clear(c);
    assert_null(mu_checkpoint_open(c, "nowhere"));
    assert_int_equal(mu_context_status(c), MU_ERR_IO);
    mu_context_clear(c);
    assert_int_equal(mu_save(m, "args.pt", NULL), MU_OK);
    mu_checkpoint_file *k = mu_checkpoint_open(c, "args.pt");
    assert_non_null(k);
    assert_string_equal(mu_checkpoint_format(k), "torch zip");
    assert_int_equal(mu_checkpoint_count(k), 9);
    assert_null(mu_checkpoint_globals(k)[0]);
    float bias[16];
    assert_int_equal(mu_checkpoint_read(k, 1, bias, sizeof(bias) - 4), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_checkpoint_read(k, 9, bias, sizeof(bias)), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_checkpoint_read(k, 1, bias, sizeof(bias)), MU_OK);
    assert_int_equal(mu_checkpoint_get(k, 1).dims.dim[0], 16);
    assert_non_null(mu_checkpoint_data(k, 1)); /* written aligned and stored: it is in the file as it is */
    assert_memory_equal(mu_checkpoint_data(k, 1), bias, sizeof(bias));
    assert_int_equal(mu_context_status(c), MU_OK);
    assert_null(mu_checkpoint_data(k, 9));
    assert_int_equal(mu_context_status(c), MU_ERR_ARG);
    mu_context_clear(c);
    assert_string_equal(mu_checkpoint_get(k, 9).name, "");
    assert_int_equal(mu_checkpoint_count(NULL), 0);
    assert_null(mu_checkpoint_globals(NULL)[0]);
    mu_context_close(c); /* closes the checkpoint too */
    unlink("args.pt");
}

static mu_module *named(mu_context *c, const char *name)
{
    mu_module *m = mu_sequential(c);
    assert_int_equal(mu_module_add(m, name, mu_linear(c, 2, 2, NULL)), MU_OK);
    return m;
}

/* What is saved can be loaded; what could not be is not saved, and the file there was stays. */
static void test_names(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    char longest[4084], longer[4101]; /* with ".weight" behind it, and "model." before it */
    memset(longest, 'x', sizeof(longest) - 1);
    memset(longer, 'x', sizeof(longer) - 1);
    longest[sizeof(longest) - 1] = longer[sizeof(longer) - 1] = '\0';
    mu_training t = {.model = named(c, longest)};
    assert_int_equal(mu_training_save(&t, "names.pt"), MU_OK);
    assert_int_equal(mu_training_load(&t, "names.pt", NULL), MU_OK);
    assert_int_equal(mu_save(named(c, longer), "names.pt", NULL), MU_ERR_LIMIT);
    mu_context_clear(c);
    assert_int_equal(mu_save(named(c, "a\xff"), "names.pt", NULL), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_save(named(c, "b"), "names.pt", &(mu_save_options){.prefix = "\x80."}), MU_ERR_ARG);
    mu_context_clear(c);
    t.note = "\xc3";
    assert_int_equal(mu_training_save(&t, "names.pt"), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_training_load(&t, "names.pt", NULL), MU_OK);
    assert_int_equal(mu_context_close(c), MU_OK);
    unlink("names.pt");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_no_memory), cmocka_unit_test(test_group),
        cmocka_unit_test(test_full_disk),  cmocka_unit_test(test_kill),      cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, io_enter_folder, io_leave_folder);
}
