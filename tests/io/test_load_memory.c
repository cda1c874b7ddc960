/* What a load may take and leave: memory beyond the model's, damage that shows late, memory that runs out on one rank. */
#define _GNU_SOURCE
#include "io/io_common.h"
#include "base/context.h"
#include "io/filemap.h"
#include "io/zip_reader.h"
#include "kern/engine.h"
#include "tensor/tensor.h"
#include <muster/muster.h>

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif

static mu_context *context(uint64_t seed)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = seed});
}

static mu_module *network(mu_context *c)
{
    mu_module *m = mu_sequential(c);
    assert_int_equal(mu_sequential_append(m, mu_conv2d_layer(c, 3, 16, 3, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_batch_norm_layer(c, 16, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_conv2d_layer(c, 16, 32, 3, NULL)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_flatten_layer(c)), MU_OK);
    assert_int_equal(mu_sequential_append(m, mu_linear(c, 128, 5, NULL)), MU_OK);
    return m;
}

/* After it, weights may be in layouts of the kernels' own. */
static void use(mu_context *c, mu_module *m)
{
    mu_tape *t = mu_tape_new(c, NULL);
    float x[2 * 108];
    for (int i = 0; i < 216; i++) {
        x[i] = (float)(i % 13) / 13;
    }
    mu_forward(t, m, mu_tensor_from(t, MU_DIMS(2, 3, 6, 6), x));
    assert_int_equal(mu_context_status(c), MU_OK);
    mu_tape_free(t);
}

static uint64_t hash_of(mu_module *m)
{
    uint64_t h = 0;
    assert_true(io_hash(m, &h));
    return h;
}

/* -- the peak ------------------------------------------------------------------------------------------------------- */

static const char *const names[] = {"memory.zip", "memory.legacy", "memory.safetensors", "memory.training"};
enum { ROWS = 1024, LAYERS = 24, SLACK = 24 << 20 }; /* a model of 96 MiB in tensors of 4 MiB */

static mu_module *large(mu_context *c)
{
    mu_module *m = mu_sequential(c);
    for (int i = 0; i < LAYERS; i++) {
        assert_int_equal(mu_sequential_append(m, mu_linear(c, ROWS, ROWS, NULL)), MU_OK);
    }
    return m;
}

static size_t status_bytes(const char *field)
{
    char line[256];
    size_t kb = 0;
    FILE *f = fopen("/proc/self/status", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, field, strlen(field)) == 0) {
            kb = strtoull(line + strlen(field), NULL, 10);
        }
    }
    fclose(f);
    return kb << 10;
}

static void write_large(void)
{
    mu_context *c = context(1);
    mu_module *m = large(c);
    static const mu_file_format formats[] = {MU_FORMAT_TORCH, MU_FORMAT_LEGACY, MU_FORMAT_SAFETENSORS};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(mu_save(m, names[i], &(mu_save_options){.format = formats[i]}), MU_OK);
    }
    assert_int_equal(mu_training_save(&(mu_training){.model = m}, names[3]), MU_OK);
    mu_context_close(c);
}

/* In a process of its own: a model, then no more than SLACK beyond what it has, first of all that it may ask for, then of
 * what is resident, the file's pages too. */
static int load_within_bounds(int file)
{
    mu_context *c = context(2);
    mu_training t = {.model = large(c)};
    (void)hash_of(t.model); /* the parameters get their memory */
    int fd = open("/proc/self/clear_refs", O_WRONLY);
    if (fd < 0 || write(fd, "5", 1) != 1) { /* the peak is from now on */
        return 3;
    }
    close(fd);
    size_t resident = status_bytes("VmRSS:");
    struct rlimit limit = {status_bytes("VmData:") + SLACK, RLIM_INFINITY};
    if (setrlimit(RLIMIT_DATA, &limit) != 0) {
        return 3;
    }
    mu_status s = file == 3 ? mu_training_load(&t, names[file], NULL) : mu_load(t.model, names[file], NULL, NULL);
    if (s != MU_OK) {
        fprintf(stderr, "%s\n", mu_context_message(c));
        return 1;
    }
    size_t more = status_bytes("VmHWM:") - resident;
    fprintf(stderr, "%s: %zu kB beyond the model\n", names[file], more >> 10);
    return more > SLACK ? 2 : 0;
}

static void test_peak(void **state)
{
    (void)state;
#ifdef SANITIZED
    skip(); /* shadow memory hides what is asked here */
#endif
    write_large();
    for (int file = 0; file < 4; file++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            _exit(load_within_bounds(file));
        }
        int how = 0;
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_true(WIFEXITED(how));
        assert_int_equal(WEXITSTATUS(how), 0);
    }
    assert_int_equal(system("rm memory.*"), 0);
}

/* -- damage --------------------------------------------------------------------------------------------------------- */

static void flip(const char *path, uint64_t at)
{
    int fd = open(path, O_RDWR);
    unsigned char b = 0;
    assert_int_equal(pread(fd, &b, 1, (off_t)at), 1);
    b ^= 0x10;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)at), 1);
    close(fd);
}

/* Offsets of a byte in each tensor's data; returns how many. */
static int data_bytes(const char *path, uint64_t out[20])
{
    mu_context *c = context(9);
    mui_filemap map;
    mui_zip z;
    int n = 0;
    assert_int_equal(mui_filemap_open(c, path, &map), MU_OK);
    assert_int_equal(mui_zip_open(c, path, map.data, map.bytes, NULL, &z), MU_OK);
    for (size_t i = 0; i < z.count; i++) {
        if (strstr(z.members[i].name, "/data/") != NULL && z.members[i].bytes > 0 && n < 20) {
            out[n++] = z.members[i].offset + z.members[i].packed / 2;
        }
    }
    mui_zip_close(&z);
    mui_filemap_close(&map);
    mu_context_close(c);
    return n;
}

/* One wrong bit in any tensor, so also in the last: an error, and no bit of the model has changed. */
static void test_damage(void **state)
{
    (void)state;
    mu_context *c = context(1);
    mu_module *m = network(c);
    uint64_t want = hash_of(m), at[20];
    assert_int_equal(mu_save(m, "damage.pt", NULL), MU_OK);
    /* the same, deflated: the members' data cannot be used where they are */
    assert_int_equal(system("python3 -c \"import zipfile as z\ni = z.ZipFile('damage.pt')\no = z.ZipFile('packed.pt', 'w', "
                            "z.ZIP_DEFLATED)\n[o.writestr(n, i.read(n)) for n in i.namelist()]\no.close()\""),
                     0);
    for (int kind = 0; kind < 4; kind++) {
        const char *path = kind % 2 == 0 ? "damage.pt" : "packed.pt";
        mu_context *d = context(2);
        mu_module *b = network(d);
        if (kind >= 2) {
            use(d, b);
        }
        uint64_t before = hash_of(b);
        assert_true(before != want);
        int n = data_bytes(path, at);
        assert_int_equal(n, 11);
        for (int i = 0; i < n; i++) {
            flip(path, at[i]);
            assert_int_equal(mu_load(b, path, NULL, NULL), MU_ERR_FORMAT);
            assert_non_null(strstr(mu_context_message(d), "is damaged"));
            mu_context_clear(d);
            assert_true(hash_of(b) == before);
            flip(path, at[i]);
        }
        assert_int_equal(mu_load(b, path, NULL, NULL), MU_OK);
        assert_true(hash_of(b) == want);
        mu_context_close(d);
    }
    mu_context_close(c);
    assert_int_equal(system("rm damage.pt packed.pt"), 0);
}

/* -- a kernel that fails -------------------------------------------------------------------------------------------- */

typedef mu_status (*reorder_fn)(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src,
                                const mui_layout *to, float *dst);
static _Thread_local reorder_fn real_reorder;
static _Thread_local int reorders_left;

/* As the real one, until it has written into that many layouts. */
static mu_status failing_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src,
                                 const mui_layout *to, float *dst)
{
    if (to != NULL && reorders_left-- == 0) {
        return mui_fail(e->context, MU_ERR_DEVICE, "the device is broken");
    }
    return real_reorder(e, dims, from, src, to, dst);
}

static void break_after(mu_context *c, int reorders)
{
    mui_engine *e = mui_engine_of(c);
    real_reorder = e->k.reorder != failing_reorder ? e->k.reorder : real_reorder;
    reorders_left = reorders;
    e->k.reorder = failing_reorder;
}

static bool any_layout(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    (void)name;
    (void)p;
    *(int *)user += value->layout != NULL;
    return true;
}

/* What is written before a tensor refuses goes back, the optimiser too. */
static void test_device(void **state)
{
    (void)state;
    mu_context *c = context(1), *d = context(2);
    mu_module *m = network(c), *b = network(d);
    mu_training t = {.model = m, .optimizer = mu_adam(m, 0.1f, NULL)};
    mu_training u = {.model = b, .optimizer = mu_adam(b, 0.1f, NULL)};
    int layouts = 0;
    use(c, m);
    use(d, b);
    uint64_t want = hash_of(m), before = hash_of(b);
    assert_int_equal(mu_save(m, "device.pt", NULL), MU_OK);
    assert_int_equal(mu_training_save(&t, "device.train"), MU_OK);
    assert_int_equal(mu_module_each_state(b, any_layout, &layouts), MU_OK);
    if (layouts == 0) {
        skip(); /* kernels without layouts of their own: nothing can fail */
    }
    for (int training = 0; training < 2; training++) {
        for (int i = 0; i < layouts; i++) {
            break_after(d, i);
            assert_int_equal(training ? mu_training_load(&u, "device.train", NULL) : mu_load(b, "device.pt", NULL, NULL),
                             MU_ERR_DEVICE);
            break_after(d, 1000);
            mu_context_clear(d);
            assert_true(hash_of(b) == before);
        }
    }
    assert_int_equal(mu_load(b, "device.pt", NULL, NULL), MU_OK);
    assert_true(hash_of(b) == want);
    mu_context_close(d);
    mu_context_close(c);
    assert_int_equal(system("rm device.pt device.train"), 0);
}

/* -- groups ----------------------------------------------------------------------------------------------------------- */

enum { RANKS = 3 };

typedef struct rank {
    mu_thread_world *world;
    int number;
    bool used;          /* its weights are laid out, those of others perhaps not */
    int64_t fail_after; /* -1: memory suffices */
    int break_after;    /* reorders; -1: none fails */
    mu_status status;
    uint64_t before, after;
} rank;

static void *run_rank(void *arg)
{
    rank *r = arg;
    mu_context *c = context((uint64_t)r->number + 10);
    mu_group *g = mu_group_threads(c, r->world, r->number);
    mu_module *m = network(c);
    if (r->used) {
        use(c, m);
    }
    r->before = hash_of(m);
    assert_int_equal(mu_barrier(g), MU_OK); /* a group's first call takes memory, and cannot tell the others of a lack */
    if (r->break_after >= 0) {
        break_after(c, r->break_after);
    }
    c->fail_after = r->fail_after;
    r->status = mu_load(m, "group.pt", &(mu_load_options){.group = g}, NULL);
    c->fail_after = -1;
    reorders_left = -1;
    if (r->status == MU_OK) {
        r->status = mu_barrier(g);
    }
    mu_context_clear(c);
    r->after = hash_of(m);
    mu_context_close(c);
    return NULL;
}

static void run_ranks(rank *ranks, int used, int failing, int64_t fail_after, int breaks)
{
    mu_thread_world *w = mu_thread_world_new(RANKS, &(mu_group_options){.timeout_seconds = 30});
    pthread_t threads[RANKS];
    assert_non_null(w);
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.world = w, .number = i, .used = (used >> i & 1) != 0,
                          .fail_after = i == failing ? fail_after : -1,
                          .break_after = i == failing ? breaks : -1};
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
    }
    mu_thread_world_free(w);
}

/* Each allocation on each rank fails once, with weights laid out on all ranks, some or none: every rank gets the error,
 * and every model is bit for bit what it was. */
static void test_group(void **state)
{
    (void)state;
    rank ranks[RANKS];
    mu_context *c = context(1);
    mu_module *m = network(c);
    uint64_t want = hash_of(m);
    assert_int_equal(mu_save(m, "group.pt", NULL), MU_OK);
    for (int kind = 0; kind < 3; kind++) {
        int used = kind == 0 ? 0 : kind == 1 ? 7 : 2, failing = kind == 0 ? 1 : kind == 1 ? 0 : 2;
        for (int64_t i = 0;; i++) {
            run_ranks(ranks, used, failing, i, -1);
            bool good = ranks[0].status == MU_OK;
            for (int r = 0; r < RANKS; r++) {
                assert_int_equal(ranks[r].status, good ? MU_OK : MU_ERR_NOMEM);
                assert_true(ranks[r].after == (good ? want : ranks[r].before));
                assert_true(ranks[r].before != want);
            }
            if (good) {
                assert_true(i > 8);
                break;
            }
        }
    }
    /* One rank's kernel fails, at its first or second tensor, while the others write theirs, laid out or not. */
    for (int i = 0; i < 9; i++) {
        run_ranks(ranks, i % 3 == 1 ? 1 << i / 3 : 7, i / 3, -1, i % 3 / 2);
        mu_status s = ranks[0].status;
        assert_true(s == MU_ERR_DEVICE || s == MU_OK); /* kernels may have no layouts, or one */
        for (int r = 0; r < RANKS; r++) {
            assert_int_equal(ranks[r].status, s);
            assert_true(ranks[r].after == (s == MU_OK ? want : ranks[r].before));
        }
    }
    mu_context_close(c);
    unlink("group.pt");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_peak),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_group),
    };
    return cmocka_run_group_tests(tests, io_enter_folder, io_leave_folder);
}
