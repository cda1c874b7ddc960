/* Data sets in memory: IDX and CIFAR, good files and bad ones. Fashion-MNIST itself is compared with Python's reading
 * in compare_fashion.py. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "data/data_files.h"
#include "data/dataset.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static mu_context *quiet(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
}

static void shut(mu_context *c, bool failed)
{
    assert_int_equal(mu_context_status(c) != MU_OK, failed);
    mu_context_close(c);
}

static void fails_with(mu_context *c, mu_dataset *d, mu_status s, const char *part)
{
    assert_null(d);
    if (mu_context_status(c) != s || strstr(mu_context_message(c), part) == NULL) {
        fail_msg("expected %s with \"%s\", got %s: %s", mu_status_name(s), part, mu_status_name(mu_context_status(c)),
                 mu_context_message(c));
    }
    assert_int_equal(c->live_allocations, 0);
    mu_context_clear(c);
}

static void idx_is_read_as_written(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    write_idx_set(dir, "train", 11, 4, 3, 5);
    mu_context *c = quiet();
    mu_dataset *d = mu_idx_dataset(c, dir, NULL);
    assert_non_null(d);
    assert_int_equal(mu_dataset_count(d), 11);
    assert_int_equal(mu_dataset_classes(d), 5);
    assert_string_equal(mu_dataset_class_name(d, 0), "");
    mu_dims dims = mu_dataset_dims(d);
    assert_int_equal(dims.ndim, 3);
    assert_int_equal(dims.dim[0] * 100 + dims.dim[1] * 10 + dims.dim[2], 143);
    for (int i = 0; i < 11; i++) {
        float x[12];
        int64_t label = -1;
        assert_int_equal(mu_dataset_get(d, i, x, &label), MU_OK);
        assert_int_equal(label, i % 5);
        for (int k = 0; k < 12; k++) {
            assert_true(x[k] == (float)(uint8_t)((i * 12 + k) * 7) / 255.0f);
        }
    }
    float x[12];
    int64_t label = 0;
    assert_int_equal(mu_dataset_get(d, 11, x, &label), MU_ERR_ARG);
    shut(c, true);
    remove_dir(dir);
}

static void idx_gz_and_plain_agree(void **state)
{
    (void)state;
    char dir[64], gz[64];
    make_dir(dir);
    make_dir(gz);
    write_idx_set(dir, "t10k", 300, 28, 28, 10);
    const char *names[] = {"t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};
    for (int i = 0; i < 2; i++) {
        char name[64];
        size_t bytes = 0;
        uint8_t *data = slurp(in_dir(dir, names[i]), &bytes);
        snprintf(name, sizeof(name), "%s.gz", names[i]);
        write_gz(in_dir(gz, name), data, bytes);
        free(data);
    }
    mu_context *c = quiet();
    mu_dataset_options o = {.split = MU_SPLIT_TEST};
    mu_dataset *a = mu_idx_dataset(c, dir, &o), *b = mu_idx_dataset(c, gz, &o);
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(a->count, b->count);
    assert_memory_equal(a->pixels, b->pixels, (size_t)a->count * 784);
    assert_memory_equal(a->labels, b->labels, (size_t)a->count);
    shut(c, false);
    remove_dir(dir);
    remove_dir(gz);
}

static void first_classes_keeps_order(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    write_idx_set(dir, "train", 20, 2, 2, 10);
    mu_context *c = quiet();
    mu_dataset *d = mu_idx_dataset(c, dir, &(mu_dataset_options){.first_classes = 3});
    assert_non_null(d);
    assert_int_equal(mu_dataset_count(d), 6);
    assert_int_equal(mu_dataset_classes(d), 3);
    const int from[6] = {0, 1, 2, 10, 11, 12};
    for (int i = 0; i < 6; i++) {
        float x[4];
        int64_t label = -1;
        assert_int_equal(mu_dataset_get(d, i, x, &label), MU_OK);
        assert_int_equal(label, i % 3);
        assert_true(x[0] == (float)(uint8_t)(from[i] * 4 * 7) / 255.0f);
    }
    mu_dataset *all = mu_idx_dataset(c, dir, &(mu_dataset_options){.first_classes = 30});
    assert_int_equal(mu_dataset_count(all), 20);
    assert_int_equal(mu_dataset_classes(all), 10);
    shut(c, false);
    remove_dir(dir);
}

/* Writes images made by hand beside good labels, and expects that error. */
static void bad_images(const char *dir, const void *data, size_t bytes, bool gz, mu_status s, const char *part)
{
    const char *name = gz ? "train-images-idx3-ubyte.gz" : "train-images-idx3-ubyte";
    write_bytes(in_dir(dir, name), data, bytes);
    mu_context *c = quiet();
    fails_with(c, mu_idx_dataset(c, dir, NULL), s, part);
    unlink(in_dir(dir, name));
    mu_context_close(c);
}

static void bad_idx_files_are_named(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    write_idx_set(dir, "train", 6, 5, 4, 3);
    size_t bytes = 0, zipped_bytes = 0;
    uint8_t *good = slurp(in_dir(dir, "train-images-idx3-ubyte"), &bytes);
    write_gz(in_dir(dir, "x.gz"), good, bytes);
    uint8_t *zipped = slurp(in_dir(dir, "x.gz"), &zipped_bytes);
    unlink(in_dir(dir, "train-images-idx3-ubyte"));
    uint8_t *bad = malloc(bytes + 1);

    mu_context *c = quiet();
    fails_with(c, mu_idx_dataset(c, dir, NULL), MU_ERR_IO, "neither train-images-idx3-ubyte nor");
    fails_with(c, mu_idx_dataset(c, "/nonexistent/dir", NULL), MU_ERR_IO, "/nonexistent/dir");
    mu_context_close(c);

    bad_images(dir, "", 0, false, MU_ERR_FORMAT, "0 bytes, fewer than the 16");
    bad_images(dir, good, 11, false, MU_ERR_FORMAT, "11 bytes, fewer than the 16");
    bad_images(dir, good, bytes - 1, false, MU_ERR_FORMAT, "cut: 119 bytes after its header, which asks for 120");
    memcpy(bad, good, bytes);
    bad[bytes] = 0;
    bad_images(dir, bad, bytes + 1, false, MU_ERR_FORMAT, "goes on after the 120 bytes");
    bad[2] = 0x0d;
    bad_images(dir, bad, bytes, false, MU_ERR_FORMAT, "starts with 00 00 0d 03");
    bad[2] = 8;
    bad[3] = 1;
    bad_images(dir, bad, bytes, false, MU_ERR_FORMAT, "starts with 00 00 08 01");
    memcpy(bad, good, bytes);
    memset(bad + 4, 0xff, 12);
    bad_images(dir, bad, bytes, false, MU_ERR_FORMAT, "dimension 1 is 4294967295");
    memcpy(bad + 4, (const uint8_t[]){0xff, 0xff, 0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff}, 12);
    bad_images(dir, bad, bytes, false, MU_ERR_LIMIT, "more than the limit");
    /* Claims 4 GiB, holds 120 bytes: refused without asking for the memory. */
    memcpy(bad + 4, (const uint8_t[]){0x00, 0x40, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0x20}, 12);
    bad_images(dir, bad, bytes, false, MU_ERR_FORMAT, "cut: 120 bytes");
    memcpy(bad, good, bytes);
    memset(bad + 4, 0, 4);
    bad_images(dir, bad, bytes, false, MU_ERR_FORMAT, "dimension 0 is 0");
    memcpy(bad, good, bytes);
    bad[7] = 5; /* five images, six labels */
    bad_images(dir, bad, 16 + 100, false, MU_ERR_FORMAT, "5 images but 6 labels");

    for (size_t cut = 1; cut < zipped_bytes; cut++) { /* wherever a gzip file is cut, it is noticed */
        bad_images(dir, zipped, cut, true, MU_ERR_FORMAT, "train-images-idx3-ubyte.gz");
    }
    zipped[zipped_bytes - 5] ^= 1; /* its checksum */
    bad_images(dir, zipped, zipped_bytes, true, MU_ERR_FORMAT, "damaged or cut gzip file");
    assert_int_equal(mkdir(in_dir(dir, "train-images-idx3-ubyte"), 0700), 0);
    c = quiet();
    fails_with(c, mu_idx_dataset(c, dir, NULL), MU_ERR_IO, "cannot read");
    mu_context_close(c);
    free(good);
    free(bad);
    free(zipped);
    remove_dir(dir);
}

static void options_are_checked(void **state)
{
    (void)state;
    mu_context *c = quiet();
    fails_with(c, mu_idx_dataset(c, "/tmp", &(mu_dataset_options){.first_classes = -1}), MU_ERR_ARG, "first_classes");
    fails_with(c, mu_idx_dataset(c, "/tmp", &(mu_dataset_options){.split = (mu_split)7}), MU_ERR_ARG, "split is 7");
    fails_with(c, mu_image_folder(c, "/tmp", &(mu_dataset_options){.side = 100000}), MU_ERR_ARG, "side is 100000");
    fails_with(c, mu_image_folder(c, "/tmp", &(mu_dataset_options){.channels = 2}), MU_ERR_ARG, "channels is 2");
    fails_with(c, mu_dataset_open(c, "mnist:/tmp", NULL), MU_ERR_ARG, "mnist:/tmp");
    fails_with(c, mu_dataset_open(c, "idx:", NULL), MU_ERR_ARG, "expected idx:DIR");
    fails_with(c, mu_dataset_open(c, NULL, NULL), MU_ERR_ARG, "expected idx:DIR");
    fails_with(c, mu_dataset_open(c, "cifar:/nonexistent", NULL), MU_ERR_IO, "neither");
    mu_context_close(c);
}

static void write_cifar(const char *path, int records, int label_bytes, int classes, unsigned salt)
{
    size_t record = (size_t)label_bytes + 3072;
    uint8_t *data = malloc((size_t)records * record);
    for (int i = 0; i < records; i++) {
        uint8_t *p = data + (size_t)i * record;
        for (size_t k = 0; k < record; k++) {
            p[k] = (uint8_t)(k * 5 + (size_t)i * 3 + salt);
        }
        p[0] = (uint8_t)(i % 20);
        p[label_bytes - 1] = (uint8_t)((i * 7 + (int)salt) % classes);
    }
    write_bytes(path, data, (size_t)records * record);
    free(data);
}

static void cifar10_joins_its_batches(void **state)
{
    (void)state;
    char dir[64], name[32];
    make_dir(dir);
    for (int b = 1; b <= 5; b++) {
        snprintf(name, sizeof(name), "data_batch_%d.bin", b);
        write_cifar(in_dir(dir, name), 3 + b, 1, 10, (unsigned)b);
    }
    write_bytes(in_dir(dir, "batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\njj\n\n", 22);
    mu_context *c = quiet();
    char spec[80];
    snprintf(spec, sizeof(spec), "cifar:%s", dir);
    mu_dataset *d = mu_dataset_open(c, spec, NULL);
    assert_non_null(d);
    assert_int_equal(mu_dataset_count(d), 4 + 5 + 6 + 7 + 8);
    assert_int_equal(mu_dataset_classes(d), 10);
    assert_string_equal(mu_dataset_class_name(d, 9), "jj");
    assert_string_equal(mu_dataset_class_name(d, 10), "");
    float *x = malloc(3072 * sizeof(float));
    int64_t label = -1;
    assert_int_equal(mu_dataset_get(d, 4 + 2, x, &label), MU_OK); /* record 2 of batch 2 */
    assert_int_equal(label, (2 * 7 + 2) % 10);
    assert_true(x[100] == (float)(uint8_t)(101 * 5 + 2 * 3 + 2) / 255.0f);
    free(x);
    shut(c, false);

    c = quiet();
    fails_with(c, mu_cifar_dataset(c, dir, &(mu_dataset_options){.split = MU_SPLIT_TEST}), MU_ERR_IO, "test_batch.bin");
    write_bytes(in_dir(dir, "batches.meta.txt"), "a\nb\n", 4);
    fails_with(c, mu_cifar_dataset(c, dir, NULL), MU_ERR_FORMAT, "names 2 classes; expected 10");
    unlink(in_dir(dir, "batches.meta.txt"));
    write_cifar(in_dir(dir, "train.bin"), 2, 2, 100, 0);
    fails_with(c, mu_cifar_dataset(c, dir, NULL), MU_ERR_ARG, "both");
    unlink(in_dir(dir, "train.bin"));
    write_bytes(in_dir(dir, "data_batch_3.bin"), "", 0);
    fails_with(c, mu_cifar_dataset(c, dir, NULL), MU_ERR_FORMAT, "data_batch_3.bin: 0 bytes");
    write_cifar(in_dir(dir, "data_batch_3.bin"), 1, 2, 10, 0); /* one byte too many for CIFAR-10 */
    fails_with(c, mu_cifar_dataset(c, dir, NULL), MU_ERR_FORMAT, "3074 bytes, not a multiple of the 3073");
    write_cifar(in_dir(dir, "data_batch_3.bin"), 4, 1, 200, 10);
    fails_with(c, mu_cifar_dataset(c, dir, NULL), MU_ERR_FORMAT, "record 0 has label 10");
    unlink(in_dir(dir, "data_batch_3.bin"));
    fails_with(c, mu_cifar_dataset(c, dir, NULL), MU_ERR_IO, "data_batch_3.bin");
    mu_context_close(c);
    remove_dir(dir);
}

static void cifar100_takes_fine_labels(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    write_cifar(in_dir(dir, "test.bin"), 15, 2, 100, 3);
    mu_context *c = quiet();
    mu_dataset *d = mu_cifar_dataset(c, dir, &(mu_dataset_options){.split = MU_SPLIT_TEST, .first_classes = 50});
    assert_non_null(d);
    assert_int_equal(mu_dataset_classes(d), 50);
    assert_int_equal(mu_dataset_count(d), 8); /* labels 3, 10, ... 52 of 101: those below 50 */
    assert_int_equal(d->labels[1], 10);
    shut(c, false);
    remove_dir(dir);
}

/* Whatever allocation fails: an error, and nothing leaks. */
static void every_allocation_may_fail(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    write_idx_set(dir, "train", 6, 5, 4, 3);
    write_cifar(in_dir(dir, "test_batch.bin"), 3, 1, 10, 0);
    for (int kind = 0; kind < 2; kind++) {
        mu_dataset *d = NULL;
        for (int64_t n = 0; d == NULL; n++) {
            assert_true(n < 100);
            mu_context *c = quiet();
            c->fail_after = n;
            d = kind == 0 ? mu_idx_dataset(c, dir, NULL)
                          : mu_cifar_dataset(c, dir, &(mu_dataset_options){.split = MU_SPLIT_TEST});
            if (d == NULL) {
                assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
                assert_int_equal(c->live_allocations, 0);
            } else {
                assert_true(n > 3);
            }
            mu_context_close(c);
        }
    }
    remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(idx_is_read_as_written),
        cmocka_unit_test(idx_gz_and_plain_agree),
        cmocka_unit_test(first_classes_keeps_order),
        cmocka_unit_test(bad_idx_files_are_named),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(cifar10_joins_its_batches),
        cmocka_unit_test(cifar100_takes_fine_labels),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
