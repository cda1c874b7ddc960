/* The loader: the same batches with any number of threads and ranks, resuming, closing at any moment, errors in
 * threads, augmentation, and no allocation in a steady epoch. Below the tape; loader_next.c is tested at the end. */
#define _GNU_SOURCE
#include "base/rng.h"
#include "data/data_files.h"
#include "data/loader.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

/* A user's set whose sample says which it is; some samples can be made to fail. */
typedef struct source {
    int64_t bad_from, bad_to; /* these samples fail */
    int calls, destroyed;
    useconds_t pause;
} source;

static mu_status get(void *user, int64_t i, float *x, int64_t *label)
{
    source *s = user;
    __atomic_fetch_add(&s->calls, 1, __ATOMIC_RELAXED);
    if (s->pause != 0) {
        usleep(s->pause); /* stands for slow decoding, not for synchronisation */
    }
    if (i >= s->bad_from && i < __atomic_load_n(&s->bad_to, __ATOMIC_RELAXED)) {
        return MU_ERR_FORMAT;
    }
    for (int k = 0; k < 3 * 6 * 5; k++) {
        x[k] = (float)(i * 100 + k);
    }
    *label = i % 10;
    return MU_OK;
}

static void destroy(void *user)
{
    ((source *)user)->destroyed++;
}

static mu_dataset *numbers(mu_context *c, int64_t count, source *s)
{
    return mu_dataset_new(c, &(mu_dataset_source){
        .count = count, .dims = MU_DIMS(3, 6, 5), .classes = 10, .get = get, .destroy = destroy, .user = s});
}

static mu_context *quiet(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 3});
}

/* Mixes what the rest of the epoch gives into one number. */
static uint64_t rest_of_epoch(mu_loader *l, int64_t *samples)
{
    uint64_t h = MUI_HASH_START;
    mui_loaded b;
    while (mui_loader_take(l, &b)) {
        h = mui_hash_bytes(h, b.x, (size_t)(b.samples * l->dataset->elements) * sizeof(float));
        h = mui_hash_bytes(h, b.y, (size_t)b.samples * sizeof(int64_t));
        h = mui_hash_bytes(h, b.indices, (size_t)b.samples * sizeof(int64_t));
        h = mui_hash_u64(h, (uint64_t)b.total_samples);
        *samples += b.samples;
    }
    return h;
}

static const mu_loader_options augmented = {
    .batch = 7, .shuffle = true, .crop_padding = 2, .flip = true, .mean = {0.1f, 0.2f, 0.3f}, .std = {0.5f, 2, 3}};

static uint64_t run(int64_t count, int threads, int prefetch, int batch, int64_t epoch, int64_t first, bool in_memory)
{
    mu_context *c = quiet();
    source s = {0};
    char dir[64] = "";
    mu_dataset *d;
    mu_loader_options o = augmented;
    if (in_memory) {
        make_dir(dir);
        write_idx_set(dir, "train", (uint32_t)count, 6, 5, 10);
        d = mu_idx_dataset(c, dir, NULL);
        o.mean[1] = o.mean[2] = o.std[1] = o.std[2] = 0;
    } else {
        d = numbers(c, count, &s);
    }
    o.threads = threads;
    o.prefetch = prefetch;
    o.batch = batch;
    mu_loader *l = mu_loader_open(d, &o);
    assert_non_null(l);
    assert_int_equal(mu_loader_rewind(l, epoch, first), MU_OK);
    int64_t samples = 0;
    uint64_t h = rest_of_epoch(l, &samples);
    assert_int_equal(samples, count - first * batch > 0 ? count - first * batch : 0);
    assert_int_equal(mu_context_close(c), MU_OK);
    assert_int_equal(s.destroyed, in_memory ? 0 : 1);
    if (in_memory) {
        remove_dir(dir);
    }
    return h;
}

static void threads_do_not_matter(void **state)
{
    (void)state;
    for (int in_memory = 0; in_memory < 2; in_memory++) {
        uint64_t want = run(250, -1, 0, 7, 4, 0, in_memory);
        assert_true(want != run(250, -1, 0, 7, 5, 0, in_memory)); /* the epoch does */
        const int threads[] = {1, 2, 3, 8}, prefetch[] = {1, 2, 5};
        for (int t = 0; t < 4; t++) {
            for (int p = 0; p < 3; p++) {
                assert_true(run(250, threads[t], prefetch[p], 7, 4, 0, in_memory) == want);
            }
        }
        assert_true(run(5, 3, 2, 64, 0, 0, in_memory) == run(5, -1, 0, 64, 0, 0, in_memory));
    }
}

/* Ranks together see what one rank with the larger batch sees, augmentation included. */
static void ranks_do_not_matter(void **state)
{
    (void)state;
    enum { RANKS = 3, B = 5, COUNT = 98 };
    mu_context *c = quiet();
    source s = {0};
    mu_dataset *d = numbers(c, COUNT, &s);
    mu_loader_options o = augmented;
    o.batch = B * RANKS;
    mu_loader *one = mu_loader_open(d, &o), *many[RANKS];
    o.batch = B;
    o.threads = 2;
    for (int r = 0; r < RANKS; r++) {
        o.shard = (mu_shard){r, RANKS};
        many[r] = mu_loader_open(d, &o);
        assert_int_equal(mu_loader_rewind(many[r], 1, 0), MU_OK);
        assert_int_equal(mu_loader_steps(many[r]), mu_loader_steps(one));
    }
    assert_int_equal(mu_loader_rewind(one, 1, 0), MU_OK);
    mui_loaded whole, part;
    while (mui_loader_take(one, &whole)) {
        int64_t at = 0;
        assert_int_equal(whole.samples, whole.total_samples);
        for (int r = 0; r < RANKS; r++) {
            assert_true(mui_loader_take(many[r], &part));
            assert_int_equal(part.total_samples, whole.samples);
            assert_true(at + part.samples <= whole.samples);
            assert_memory_equal(part.indices, whole.indices + at, (size_t)part.samples * sizeof(int64_t));
            assert_memory_equal(part.y, whole.y + at, (size_t)part.samples * sizeof(int64_t));
            assert_memory_equal(part.x, whole.x + at * 90, (size_t)part.samples * 90 * sizeof(float));
            at += part.samples;
        }
        assert_int_equal(at, whole.samples);
    }
    for (int r = 0; r < RANKS; r++) {
        assert_false(mui_loader_take(many[r], &part));
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void a_rank_may_have_nothing(void **state)
{
    (void)state;
    mu_context *c = quiet();
    source s = {0};
    mu_dataset *d = numbers(c, 10, &s); /* 4 ranks x 2, then 2: ranks 2 and 3 have none in step 1 */
    for (int threads = -1; threads < 3; threads += 2) {
        mu_loader *l = mu_loader_open(
            d, &(mu_loader_options){.batch = 2, .shard = {3, 4}, .threads = threads, .prefetch = 1});
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            mui_loaded b;
            assert_int_equal(mu_loader_rewind(l, epoch, 0), MU_OK);
            assert_true(mui_loader_take(l, &b));
            assert_int_equal(b.samples, 2);
            assert_int_equal(b.indices[0], 6);
            assert_true(mui_loader_take(l, &b));
            assert_int_equal(b.samples, 0);
            assert_int_equal(b.total_samples, 2);
            assert_false(mui_loader_take(l, &b));
            assert_false(mui_loader_take(l, &b));
        }
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void an_epoch_resumes_anywhere(void **state)
{
    (void)state;
    mu_context *c = quiet();
    source s = {0};
    mu_loader_options o = augmented;
    o.threads = 2;
    mu_loader *l = mu_loader_open(numbers(c, 100, &s), &o);
    int64_t steps = mu_loader_steps(l), ignored = 0;
    assert_int_equal(steps, 15);
    for (int64_t first = 0; first <= steps; first++) {
        /* Unbroken up to first, then the rest; against another loader that starts there. */
        mui_loaded b;
        assert_int_equal(mu_loader_rewind(l, 6, 0), MU_OK);
        for (int64_t i = 0; i < first; i++) {
            assert_true(mui_loader_take(l, &b));
        }
        assert_true(rest_of_epoch(l, &ignored) == run(100, 1, 2, 7, 6, first, false));
    }
    /* From the middle of one epoch into the middle of another. */
    mui_loaded b;
    for (int i = 0; i < 50; i++) {
        assert_int_equal(mu_loader_rewind(l, i % 3, i % 7), MU_OK);
        for (int k = 0; k < i % 4; k++) {
            assert_true(mui_loader_take(l, &b));
        }
    }
    assert_int_equal(mu_loader_rewind(l, 9, 3), MU_OK);
    assert_true(rest_of_epoch(l, &ignored) == run(100, -1, 2, 7, 9, 3, false));
    assert_int_equal(mu_loader_rewind(l, 0, steps + 1), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_loader_rewind(l, -1, 0), MU_ERR_ARG);
    mu_context_close(c);
}

static void an_epoch_goes_on_from_any_sample(void **state)
{
    (void)state;
    mu_context *c = quiet();
    source s = {0};
    mu_loader_options o = augmented;
    o.threads = 2;
    mu_loader *l = mu_loader_open(numbers(c, 100, &s), &o);
    mui_loaded b;
    assert_int_equal(mu_loader_position(l), 0);
    assert_int_equal(mu_loader_steps_left(l), 0);
    for (int64_t first = 0; first <= 100; first += 3) {
        int64_t steps = 0, left = (100 - first + 6) / 7, position = first;
        assert_int_equal(mu_loader_seek(l, 4, first), MU_OK);
        assert_int_equal(mu_loader_steps_left(l), left);
        while (mui_loader_take(l, &b)) {
            for (int64_t i = 0; i < b.samples; i++) {
                assert_int_equal(b.indices[i], mui_sampler_index(&l->sampler, position + i));
            }
            position += b.samples;
            steps++;
            assert_int_equal(mu_loader_position(l), position);
            assert_int_equal(mu_loader_steps_left(l), left - steps);
        }
        assert_int_equal(position, 100);
        assert_int_equal(steps, left);
    }
    /* The next epoch is whole again. */
    int64_t ignored = 0;
    assert_int_equal(mu_loader_rewind(l, 5, 0), MU_OK);
    assert_true(rest_of_epoch(l, &ignored) == run(100, 1, 2, 7, 5, 0, false));
    assert_int_equal(mu_loader_seek(l, 0, 101), MU_ERR_ARG);
    assert_non_null(strstr(mu_context_message(c), "a loader of 100 samples cannot be set to epoch 0, sample 101"));
    mu_context_clear(c);
    assert_int_equal(mu_loader_seek(l, 0, -1), MU_ERR_ARG);
    assert_int_equal(mu_loader_position(NULL), 0);
    assert_int_equal(mu_loader_steps_left(NULL), 0);
    mu_context_close(c);
}

static void it_closes_at_any_moment(void **state)
{
    (void)state;
    for (int taken = -1; taken < 12; taken++) {
        for (int threads = 1; threads <= 4; threads += 3) {
            mu_context *c = quiet();
            source s = {.pause = 300};
            mu_loader_options o = augmented;
            o.threads = threads;
            o.prefetch = 3;
            mu_loader *l = mu_loader_open(numbers(c, 70, &s), &o);
            if (taken >= 0) {
                assert_int_equal(mu_loader_rewind(l, 0, 0), MU_OK);
            }
            mui_loaded b;
            for (int i = 0; i < taken; i++) {
                assert_int_equal(mui_loader_take(l, &b), i < 10);
            }
            if (taken % 2 == 0) {
                mu_loader_close(l); /* else the context does */
            }
            assert_int_equal(mu_context_close(c), MU_OK);
            assert_int_equal(s.destroyed, 1);
            assert_true(s.calls <= 70);
        }
    }
    mu_loader_close(NULL);
}

/* A sample that cannot be read stops the epoch when its batch's turn comes, not before, for any number of threads. */
static void an_error_comes_when_its_batch_does(void **state)
{
    (void)state;
    for (int threads = -1; threads <= 4; threads++) {
        mu_context *c = quiet();
        source s = {.bad_from = 31, .bad_to = 35};
        mu_loader *l = mu_loader_open(numbers(c, 100, &s), &(mu_loader_options){
            .batch = 10, .threads = threads, .prefetch = 6});
        mui_loaded b;
        assert_int_equal(mu_loader_rewind(l, 0, 0), MU_OK);
        for (int i = 0; i < 3; i++) {
            assert_true(mui_loader_take(l, &b));
            assert_int_equal(b.indices[0], 10 * i);
            assert_int_equal(mu_context_status(c), MU_OK);
        }
        assert_false(mui_loader_take(l, &b));
        assert_int_equal(mu_context_status(c), MU_ERR_FORMAT);
        assert_string_equal(mu_context_message(c), "sample 31: the data set's get returned \"format\"");
        assert_false(mui_loader_take(l, &b)); /* sticky */
        if (threads % 2 == 0) { /* else it closes with the error inside */
            mu_context_clear(c);
            assert_false(mui_loader_take(l, &b));
            assert_int_equal(mu_context_status(c), MU_ERR_STATE);
            mu_context_clear(c);
            __atomic_store_n(&s.bad_to, 0, __ATOMIC_RELAXED); /* threads are still loading ahead */
            int64_t samples = 0;
            assert_int_equal(mu_loader_rewind(l, 0, 3), MU_OK);
            rest_of_epoch(l, &samples);
            assert_int_equal(samples, 70);
        }
        mu_context_close(c);
    }
}

static void misuse_is_an_error(void **state)
{
    (void)state;
    static const struct {
        mu_loader_options o;
        const char *part;
    } bad[] = {
        {{.batch = -1}, "batch is -1"},
        {{.shard = {2, 2}}, "rank 2 of 2"},
        {{.shard = {-1, 2}}, "rank -1 of 2"},
        {{.shard = {0, -2}}, "rank 0 of -2"},
        {{.prefetch = -3}, "prefetch is -3"},
        {{.threads = 100000}, "threads is 100000"},
        {{.crop_padding = -1}, "crop_padding is -1"},
        {{.std = {-1}}, "std"},
        {{.mean = {0, 0, 0, 1}}, "channel 3, but samples have 3"},
        {{.remainder = (mu_remainder)5}, "remainder is 5"},
        {{.batch = 11, .remainder = MU_REMAINDER_DROP}, "no full batch of 11"},
    };
    mu_context *c = quiet();
    source s = {0};
    mu_dataset *d = numbers(c, 10, &s);
    uint64_t live = c->live_allocations;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_null(mu_loader_open(d, &bad[i].o));
        if (strstr(mu_context_message(c), bad[i].part) == NULL) {
            fail_msg("expected \"%s\" in: %s", bad[i].part, mu_context_message(c));
        }
        assert_int_equal(c->live_allocations, live);
        mu_context_clear(c);
    }
    mu_dataset *flat = mu_dataset_new(c, &(mu_dataset_source){
        .count = 3, .dims = MU_DIMS(90), .get = get, .destroy = destroy, .user = &s});
    assert_non_null(flat);
    assert_null(mu_loader_open(flat, &(mu_loader_options){.flip = true}));
    assert_int_equal(mu_context_status(c), MU_ERR_SHAPE);
    mu_context_clear(c);
    mu_loader *l = mu_loader_open(d, NULL);
    mui_loaded b;
    assert_false(mui_loader_take(l, &b));
    assert_int_equal(mu_context_status(c), MU_ERR_STATE);
    assert_int_not_equal(mu_loader_rewind(l, 0, 0), MU_OK);
    mu_context_clear(c);
    assert_null(mu_loader_open(NULL, NULL));
    assert_int_equal(mu_loader_steps(NULL), 0);
    /* Whoever's fault it is, the user's data is destroyed once. */
    int before = s.destroyed;
    assert_null(mu_dataset_new(c, &(mu_dataset_source){.count = 0, .get = get, .destroy = destroy, .user = &s}));
    assert_int_equal(s.destroyed, before + 1);
    assert_null(mu_dataset_new(c, &(mu_dataset_source){ /* the context has an error already */
        .count = 1, .dims = MU_DIMS(90), .get = get, .destroy = destroy, .user = &s}));
    assert_int_equal(s.destroyed, before + 2);
    mu_context_clear(c);
    assert_null(mu_dataset_new(c, &(mu_dataset_source){
        .count = 1, .dims = MU_DIMS(2, 0), .get = get, .destroy = destroy, .user = &s}));
    assert_int_equal(mu_context_status(c), MU_ERR_SHAPE);
    assert_int_equal(s.destroyed, before + 3);
    mu_context_close(c);
}

static void a_steady_epoch_allocates_nothing(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    make_sub(dir, "a");
    write_idx_set(dir, "train", 200, 28, 28, 10);
    for (int i = 0; i < 6; i++) {
        char name[32];
        uint8_t *p = picture(40 + i, 50 - i, (unsigned)i);
        snprintf(name, sizeof(name), "a/%d.jpg", i);
        write_jpeg(in_dir(dir, name), p, 40 + i, 50 - i, 90);
        free(p);
    }
    mu_context *c = quiet();
    source s = {0};
    mu_dataset *sets[] = {mu_idx_dataset(c, dir, NULL), numbers(c, 100, &s),
                          mu_image_folder(c, dir, &(mu_dataset_options){.side = 16})};
    for (int i = 0; i < 3; i++) {
        mu_loader *l = mu_loader_open(sets[i], &(mu_loader_options){
            /* One thread for images, for then it is known to have seen them all after one epoch. */
            .batch = 4, .shuffle = true, .threads = i == 2 ? 1 : 2, .crop_padding = 2, .flip = true});
        assert_non_null(l);
        uint64_t before = c->allocations;
        int64_t samples = 0;
        for (int epoch = 0; epoch < 5; epoch++) {
            if (epoch == 1 && i == 2) {
                assert_true(c->allocations > before); /* so the count sees the threads' memory */
                before = c->allocations;
            }
            assert_int_equal(mu_loader_rewind(l, epoch, 0), MU_OK);
            rest_of_epoch(l, &samples);
        }
        assert_int_equal(c->allocations, before);
        mu_loader_close(l);
    }
    assert_int_equal(mu_context_close(c), MU_OK);
    remove_dir(dir);
}

/* -- augmentation ------------------------------------------------------------------------------------------------- */
/* The slow way: pad, cut, mirror, normalise, one after the other. */
static void slowly(const float *in, mui_draw draw, int p, const float *mean, const float *std, float *out)
{
    for (int ch = 0; ch < 3; ch++) {
        for (int y = 0; y < 6; y++) {
            for (int x = 0; x < 5; x++) {
                int from_x = (draw.mirror ? 4 - x : x) + draw.left - p, from_y = y + draw.top - p;
                bool inside = from_x >= 0 && from_x < 5 && from_y >= 0 && from_y < 6;
                float v = inside ? in[(ch * 6 + from_y) * 5 + from_x] : 0;
                out[(ch * 6 + y) * 5 + x] = (v - mean[ch]) / std[ch];
            }
        }
    }
}

static void augmentation_is_what_it_says(void **state)
{
    (void)state;
    mu_context *c = quiet();
    for (int p = 0; p < 9; p++) {
        mu_loader_options o = augmented;
        o.crop_padding = p;
        mui_augment a;
        assert_int_equal(mui_augment_init(&a, c, MU_DIMS(3, 6, 5), &o), MU_OK);
        uint8_t bytes[90];
        float floats[90], scaled[90], want[90], got[90];
        for (int k = 0; k < 90; k++) {
            bytes[k] = (uint8_t)(k * 11 + 1);
            floats[k] = (float)(k * k);
            scaled[k] = (float)bytes[k] / 255.0f;
        }
        for (int top = 0; top <= 2 * p; top++) {
            for (int left = 0; left <= 2 * p; left++) {
                mui_draw draw = {top, left, (top + left) % 2 == 1};
                slowly(floats, draw, p, o.mean, o.std, want);
                mui_augment_floats(&a, draw, floats, got);
                assert_memory_equal(got, want, sizeof(got));
                slowly(scaled, draw, p, o.mean, o.std, want);
                mui_augment_bytes(&a, draw, bytes, got);
                assert_memory_equal(got, want, sizeof(got));
            }
        }
    }
    mu_context_close(c);
}

static void draws_are_uniform_and_keyed(void **state)
{
    (void)state;
    mu_context *c = quiet();
    mu_loader_options o = {.crop_padding = 1, .flip = true, .seed = 8};
    mui_augment a;
    assert_int_equal(mui_augment_init(&a, c, MU_DIMS(3, 6, 5), &o), MU_OK);
    int tally[3][3][2] = {{{0}}}, same = 0;
    for (int64_t i = 0; i < 18000; i++) {
        mui_draw d = mui_augment_draw(&a, 3, i), again = mui_augment_draw(&a, 3, i), other = mui_augment_draw(&a, 4, i);
        assert_true(d.top == again.top && d.left == again.left && d.mirror == again.mirror);
        same += d.top == other.top && d.left == other.left && d.mirror == other.mirror;
        tally[d.top][d.left][d.mirror]++;
    }
    assert_in_range(same, 850, 1150); /* one in 18 by chance */
    for (int i = 0; i < 18; i++) {
        assert_in_range(tally[i / 6][i / 2 % 3][i % 2], 850, 1150);
    }
    o.flip = false;
    mui_augment plain;
    assert_int_equal(mui_augment_init(&plain, c, MU_DIMS(3, 6, 5), &o), MU_OK);
    for (int64_t i = 0; i < 100; i++) {
        mui_draw d = mui_augment_draw(&plain, 3, i), with = mui_augment_draw(&a, 3, i);
        assert_true(!d.mirror && d.top == with.top && d.left == with.left);
    }
    mu_context_close(c);
}

/* -- onto the tape ------------------------------------------------------------------------------------------------ */
static void batches_become_tensors(void **state)
{
    (void)state;
    mu_context *c = quiet();
    source s = {.bad_from = 95, .bad_to = 96};
    mu_dataset *d = numbers(c, 97, &s);
    mu_loader_options o = {.batch = 6, .shard = {1, 3}, .threads = 2};
    mu_loader *l = mu_loader_open(d, &o);
    mu_tape *t = mu_tape_new(c, NULL);
    mu_batch b;
    float *x = malloc(6 * 90 * sizeof(float));
    int64_t y[6], steps = 0;
    assert_int_equal(mu_loader_rewind(l, 0, 0), MU_OK);
    while (mu_tape_reset(t), mu_loader_next(l, t, &b)) {
        mu_dims dims = mu_tensor_dims(b.x);
        bool last = steps == 5; /* 97 = 5 * 18 + 7: 3, 2, 2 */
        assert_int_equal(b.samples, last ? 2 : 6);
        assert_int_equal(b.total_samples, last ? 7 : 18);
        assert_int_equal(b.indices[0], last ? 93 : steps * 18 + 6);
        assert_true(dims.ndim == 4 && dims.dim[0] == b.samples && dims.dim[1] == 3 && dims.dim[2] == 6 &&
                    dims.dim[3] == 5);
        assert_int_equal(mu_tensor_dtype(b.y), MU_I64);
        assert_int_equal(mu_tensor_read(b.x, x, b.samples * 90), MU_OK);
        assert_int_equal(mu_tensor_read_i64(b.y, y, b.samples), MU_OK);
        for (int64_t i = 0; i < b.samples; i++) {
            assert_int_equal(y[i], b.indices[i] % 10);
            assert_true(x[i * 90 + 89] == (float)(b.indices[i] * 100 + 89));
        }
        steps++;
    }
    assert_int_equal(steps, 6);
    assert_int_equal(mu_context_status(c), MU_OK);

    /* Nothing for this rank, then the end; and an error. */
    o = (mu_loader_options){.batch = 48, .shard = {1, 2}};
    l = mu_loader_open(d, &o);
    assert_int_equal(mu_loader_rewind(l, 0, 1), MU_OK);
    assert_true(mu_loader_next(l, t, &b)); /* one sample is left, rank 0's */
    assert_true(b.x == NULL && b.y == NULL && b.samples == 0 && b.total_samples == 1);
    assert_false(mu_loader_next(l, t, &b));
    assert_int_equal(mu_context_status(c), MU_OK);
    assert_int_equal(mu_loader_rewind(l, 0, 0), MU_OK);
    assert_false(mu_loader_next(l, t, &b));
    assert_int_equal(mu_context_status(c), MU_ERR_FORMAT);
    mu_context_clear(c);
    assert_false(mu_loader_next(l, NULL, &b));
    assert_int_equal(mu_context_status(c), MU_ERR_ARG);
    assert_false(mu_loader_next(NULL, t, &b));
    free(x);
    mu_context_close(c);
}

static void a_batch_may_be_larger_than_everything(void **state)
{
    (void)state;
    source s = {0};
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    mu_dataset *d = mu_dataset_new(c, &(mu_dataset_source){.count = 5, .dims = MU_DIMS(3, 6, 5), .classes = 10,
                                                           .get = get, .destroy = destroy, .user = &s});
    for (int size = 1; size <= 2; size++) {
        mu_loader *l = mu_loader_open(d, &(mu_loader_options){.batch = INT32_MAX, .shard = {0, size}});
        assert_non_null(l);
        assert_int_equal(mu_loader_steps(l), 1);
        assert_int_equal(mu_loader_rewind(l, 0, 0), MU_OK);
        mui_loaded b;
        assert_true(mui_loader_take(l, &b));
        assert_int_equal(b.samples, size == 1 ? 5 : 3);
        mu_loader_close(l);
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(ranks_do_not_matter),
        cmocka_unit_test(a_rank_may_have_nothing),
        cmocka_unit_test(an_epoch_resumes_anywhere),
        cmocka_unit_test(an_epoch_goes_on_from_any_sample),
        cmocka_unit_test(it_closes_at_any_moment),
        cmocka_unit_test(an_error_comes_when_its_batch_does),
        cmocka_unit_test(misuse_is_an_error),
        cmocka_unit_test(a_steady_epoch_allocates_nothing),
        cmocka_unit_test(augmentation_is_what_it_says),
        cmocka_unit_test(draws_are_uniform_and_keyed),
        cmocka_unit_test(batches_become_tensors),
        cmocka_unit_test(a_batch_may_be_larger_than_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
