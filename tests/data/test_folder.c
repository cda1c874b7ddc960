/* Image folders: scanning, every kind of PNG and JPEG, resizing, bad and hostile files, skip_bad. compare_images.py
 * holds the same against Pillow and torchvision. */
#define _GNU_SOURCE
#include "data/data_files.h"
#include "data/loader.h"

#include <setjmp.h>
#include <spng.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <turbojpeg.h>
#include <unistd.h>
#include <cmocka.h>

static char log_text[4096];

static void note(void *user, mu_log_level level, const char *message)
{
    (void)user;
    (void)level;
    size_t used = strlen(log_text);
    snprintf(log_text + used, sizeof(log_text) - used, "%s\n", message);
}

static mu_context *quiet(void)
{
    log_text[0] = '\0';
    return mu_context_open(&(mu_context_options){.log = note, .log_level = MU_LOG_INFO});
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

static void put_jpeg(const char *path, int width, int height, unsigned salt)
{
    uint8_t *p = picture(width, height, salt);
    write_jpeg(path, p, width, height, 92);
    free(p);
}

static void classes_and_files_are_sorted_by_bytes(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    make_sub(dir, "b");
    make_sub(dir, "B");
    make_sub(dir, "a a");
    make_sub(dir, ".hidden");
    make_sub(in_dir(dir, "b"), "nested.jpg");
    const char *files[] = {"b/2.jpg", "b/10.JPEG", "B/x.Jpg", "a a/y.jpeg", "b/.z.jpg", ".hidden/q.jpg"};
    for (unsigned i = 0; i < 6; i++) {
        put_jpeg(in_dir(dir, files[i]), 20, 20, i);
    }
    write_bytes(in_dir(dir, "b/readme.txt"), "no image", 8);
    write_bytes(in_dir(dir, "README"), "no class", 8);
    mu_context *c = quiet();
    mu_dataset *d = mu_image_folder(c, dir, &(mu_dataset_options){.side = 8});
    assert_non_null(d);
    assert_int_equal(mu_dataset_count(d), 4);
    assert_int_equal(mu_dataset_classes(d), 3);
    assert_string_equal(mu_dataset_class_name(d, 0), "B");
    assert_string_equal(mu_dataset_class_name(d, 1), "a a");
    assert_string_equal(mu_dataset_class_name(d, 2), "b");
    const char *order[] = {"/B/x.Jpg", "/a a/y.jpeg", "/b/10.JPEG", "/b/2.jpg"};
    for (int i = 0; i < 4; i++) {
        char name[512];
        mui_dataset_sample_name(d, i, name, sizeof(name));
        assert_string_equal(name + strlen(dir), order[i]);
    }
    assert_non_null(strstr(log_text, "1 files are not .jpg, .jpeg or .png"));
    mu_dataset *two = mu_image_folder(c, dir, &(mu_dataset_options){.side = 8, .first_classes = 2});
    assert_int_equal(mu_dataset_count(two), 2);
    assert_int_equal(mu_dataset_classes(two), 2);
    assert_int_equal(mu_context_close(c), MU_OK);
    remove_dir(dir);
}

static void splits_share_the_training_classes(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    const char *folders[] = {"train", "train/x", "train/y", "train/z", "val", "val/y", "val/z"};
    for (int i = 0; i < 7; i++) {
        make_sub(dir, folders[i]);
    }
    const char *files[] = {"train/x/1.jpg", "train/y/1.jpg", "train/z/1.jpg", "val/y/7.jpg", "val/z/8.jpg"};
    for (unsigned i = 0; i < 5; i++) {
        put_jpeg(in_dir(dir, files[i]), 9, 9, i);
    }
    mu_context *c = quiet();
    mu_dataset_options o = {.side = 4, .split = MU_SPLIT_TEST};
    mu_dataset *test = mu_image_folder(c, dir, &o), *train = mu_image_folder(c, dir, NULL);
    assert_int_equal(mu_dataset_count(train), 3);
    assert_int_equal(mu_dataset_count(test), 2);
    assert_int_equal(mu_dataset_classes(test), 3); /* also the class it has no image of */
    float x[3 * 4 * 4];
    int64_t label = -1;
    assert_int_equal(mu_dataset_get(test, 0, x, &label), MU_OK);
    assert_int_equal(label, 1); /* y, as in training */
    assert_int_equal(mu_context_close(c), MU_OK);

    c = quiet();
    make_sub(dir, "val/unknown");
    fails_with(c, mu_image_folder(c, dir, &o), MU_ERR_FORMAT, "val/unknown: a class that the training images do not");
    make_sub(dir, "train/empty");
    fails_with(c, mu_image_folder(c, dir, NULL), MU_ERR_FORMAT, "train/empty: class folder without images");
    mu_context_close(c);
    remove_dir(dir);
}

static void folders_that_are_none(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    mu_context *c = quiet();
    fails_with(c, mu_image_folder(c, in_dir(dir, "absent"), NULL), MU_ERR_IO, "absent: cannot open");
    fails_with(c, mu_image_folder(c, NULL, NULL), MU_ERR_ARG, "needs a directory");
    fails_with(c, mu_image_folder(c, dir, NULL), MU_ERR_FORMAT, "no class folders");
    make_sub(dir, "a");
    write_bytes(in_dir(dir, "a/x.txt"), "", 0);
    fails_with(c, mu_image_folder(c, dir, NULL), MU_ERR_FORMAT, "/a: class folder without images (1 files");
    mu_context_close(c);
    /* Whatever allocation fails: an error, and nothing leaks. */
    put_jpeg(in_dir(dir, "a/1.jpg"), 9, 9, 0);
    mu_dataset *d = NULL;
    for (int64_t n = 0; d == NULL; n++) {
        assert_true(n < 200);
        c = quiet();
        c->fail_after = n;
        d = mu_image_folder(c, dir, &(mu_dataset_options){.skip_bad = true});
        if (d == NULL) {
            assert_int_equal(mu_context_status(c), MU_ERR_NOMEM);
            assert_int_equal(c->live_allocations, 0);
        }
        mu_context_close(c);
    }
    remove_dir(dir);
}

/* What becomes of one file, as bytes (channels, side, side). */
static mu_status read_one(const char *path, int side, int channels, uint8_t *out, mui_trouble *t)
{
    mu_context *c = quiet();
    mui_scratch s = {.context = c};
    mui_image image;
    const uint8_t *fitted = NULL;
    size_t bytes = 0;
    mu_status status = mui_image_read_file(&s, path, &bytes, t);
    status = status != MU_OK ? status : mui_image_decode(&s, s.file.data, bytes, channels, &image, t);
    status = status != MU_OK ? status : mui_image_fit(&s, &image, side, &fitted, t);
    if (status == MU_OK) {
        memcpy(out, fitted, (size_t)channels * (size_t)side * (size_t)side);
    }
    mui_scratch_free(&s);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
    return status;
}

/* A 4 x 4 PNG of every kind, its pixel k from the value k * 16 + 5; expects (r, g, b) of pixel 9. */
static void one_png(const char *path, const void *data, size_t bytes, int color, int depth, int r, int g, int b)
{
    uint8_t out[48];
    mui_trouble t = {MU_OK, ""};
    write_png(path, data, bytes, 4, 4, color, depth);
    if (read_one(path, 4, 3, out, &t) != MU_OK) {
        fail_msg("colour type %d, %d bits: %s", color, depth, t.text);
    }
    assert_int_equal(out[9], r);
    assert_int_equal(out[16 + 9], g);
    assert_int_equal(out[32 + 9], b);
    assert_int_equal(read_one(path, 4, 1, out, &t), MU_OK);
    assert_int_equal(out[9], (19595 * r + 38470 * g + 7471 * b + 32768) >> 16);
}

static void every_kind_of_png(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    const char *path = strdup(in_dir(dir, "x.png"));
    uint8_t grey[16], rgb[48], rgba[64], ga[32], bits[4] = {0xa5, 0xa5, 0x5a, 0xa5};
    uint16_t grey16[16], rgb16[48];
    for (int k = 0; k < 16; k++) {
        uint8_t v = (uint8_t)(k * 16 + 5);
        grey[k] = ga[2 * k] = v;
        ga[2 * k + 1] = (uint8_t)(k * 3);
        grey16[k] = (uint16_t)(v << 8 | 0x7f);
        for (int j = 0; j < 3; j++) {
            rgb[3 * k + j] = rgba[4 * k + j] = (uint8_t)(v + j);
            rgb16[3 * k + j] = (uint16_t)((v + j) << 8 | 0x11);
        }
        rgba[4 * k + 3] = (uint8_t)(k * 2); /* nearly transparent, and dropped */
    }
    one_png(path, grey, 16, SPNG_COLOR_TYPE_GRAYSCALE, 8, 149, 149, 149);
    one_png(path, rgb, 48, SPNG_COLOR_TYPE_TRUECOLOR, 8, 149, 150, 151);
    one_png(path, rgba, 64, SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 8, 149, 150, 151);
    one_png(path, ga, 32, SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 8, 149, 149, 149);
    one_png(path, grey, 16, SPNG_COLOR_TYPE_INDEXED, 8, 149, 255 - 149, (149 * 3) & 255);
    one_png(path, grey16, 32, SPNG_COLOR_TYPE_GRAYSCALE, 16, 149, 149, 149);
    one_png(path, rgb16, 96, SPNG_COLOR_TYPE_TRUECOLOR, 16, 149, 150, 151);
    one_png(path, bits, 4, SPNG_COLOR_TYPE_GRAYSCALE, 1, 255, 255, 255); /* row 2 is 0101: pixel 9 is 1 */
    /* Interlaced: the same pixels as without. */
    uint8_t *p = picture(21, 13, 5), plain[3 * 13 * 13], woven[3 * 13 * 13];
    png_kind kind = {21, 13, SPNG_COLOR_TYPE_TRUECOLOR, 8, false};
    mui_trouble t = {MU_OK, ""};
    write_png_as(path, p, 21 * 13 * 3, &kind);
    assert_int_equal(read_one(path, 13, 3, plain, &t), MU_OK);
    kind.interlaced = true;
    write_png_as(path, p, 21 * 13 * 3, &kind);
    assert_int_equal(read_one(path, 13, 3, woven, &t), MU_OK);
    assert_memory_equal(plain, woven, sizeof(plain));
    free(p);
    free((char *)path);
    remove_dir(dir);
}

static void resizing_keeps_what_it_should(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    uint8_t out[3 * 64 * 64];
    mui_trouble t = {MU_OK, ""};
    const char *path = strdup(in_dir(dir, "x.png"));
    /* Same size: the pixels themselves. */
    uint8_t *p = picture(64, 64, 3);
    write_png(path, p, 64 * 64 * 3, 64, 64, SPNG_COLOR_TYPE_TRUECOLOR, 8);
    assert_int_equal(read_one(path, 64, 3, out, &t), MU_OK);
    for (int i = 0; i < 64 * 64 * 3; i++) {
        assert_int_equal(out[i % 3 * 4096 + i / 3], p[i]);
    }
    free(p);
    /* Wider, same height: the middle. */
    p = picture(97, 64, 3); /* excess 33: half is 16.5, to even 16 */
    write_png(path, p, 97 * 64 * 3, 97, 64, SPNG_COLOR_TYPE_TRUECOLOR, 8);
    assert_int_equal(read_one(path, 64, 3, out, &t), MU_OK);
    for (int y = 0; y < 64; y++) {
        for (int x = 0; x < 64; x++) {
            assert_int_equal(out[y * 64 + x], p[(y * 97 + x + 16) * 3]);
        }
    }
    free(p);
    /* One colour stays one colour, at any pair of sizes. */
    static const int sizes[] = {1, 2, 3, 31, 64, 65, 300};
    for (int i = 0; i < 7; i++) {
        for (int j = 0; j < 7; j++) {
            int w = sizes[i], h = sizes[j];
            p = malloc((size_t)w * (size_t)h);
            memset(p, 201, (size_t)w * (size_t)h);
            write_png(path, p, (size_t)w * (size_t)h, (uint32_t)w, (uint32_t)h, SPNG_COLOR_TYPE_GRAYSCALE, 8);
            free(p);
            for (int side = 1; side <= 64; side = side * 3 + 1) {
                assert_int_equal(read_one(path, side, 1, out, &t), MU_OK);
                for (int k = 0; k < side * side; k++) {
                    assert_int_equal(out[k], 201);
                }
            }
        }
    }
    free((char *)path);
    remove_dir(dir);
}

static void bad(const char *path, const void *data, size_t bytes, mu_status want, const char *part)
{
    uint8_t out[3 * 8 * 8];
    mui_trouble t = {MU_OK, ""};
    write_bytes(path, data, bytes);
    mu_status s = read_one(path, 8, 3, out, &t);
    if (s != want || strstr(t.text, part) == NULL) {
        fail_msg("%zu bytes: expected %s with \"%s\", got %s: %s", bytes, mu_status_name(want), part, mu_status_name(s),
                 t.text);
    }
}

static void bad_images_are_refused(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    const char *path = strdup(in_dir(dir, "x.jpg"));
    size_t jpeg_bytes = 0, png_bytes = 0;
    put_jpeg(path, 60, 50, 1);
    uint8_t *jpeg = slurp(path, &jpeg_bytes);
    uint8_t *p = picture(60, 50, 1);
    write_png(path, p, 60 * 50 * 3, 60, 50, SPNG_COLOR_TYPE_TRUECOLOR, 8);
    uint8_t *png = slurp(path, &png_bytes), out[3 * 8 * 8];
    free(p);
    mui_trouble t = {MU_OK, ""};
    assert_int_equal(read_one(path, 8, 3, out, &t), MU_OK); /* a PNG named .jpg is a PNG */

    bad(path, "", 0, MU_ERR_FORMAT, "neither JPEG nor PNG: 0 bytes");
    bad(path, "GIF89a..", 8, MU_ERR_FORMAT, "neither JPEG nor PNG: 8 bytes, starting with 47 49 46 38");
    for (size_t cut = 3; cut < jpeg_bytes - 2; cut++) { /* up to the end marker itself */
        bad(path, jpeg, cut, MU_ERR_FORMAT, "JPEG");
    }
    for (size_t cut = 8; cut < png_bytes - 4; cut++) { /* only the checksum of the empty end chunk may lack */
        bad(path, png, cut, MU_ERR_FORMAT, "PNG");
    }
    png[png_bytes / 2] ^= 0x10;
    bad(path, png, png_bytes, MU_ERR_FORMAT, "damaged PNG");
    png[png_bytes / 2] ^= 0x10;
    /* The size of the frame, behind ff c0, length and precision: 65500 x 65500, which libjpeg allows. */
    for (size_t i = 2; i + 9 < jpeg_bytes; i++) {
        if (jpeg[i] == 0xff && jpeg[i + 1] == 0xc0) {
            uint8_t kept[4];
            memcpy(kept, jpeg + i + 5, 4);
            memcpy(jpeg + i + 5, (const uint8_t[]){0xff, 0xdc, 0xff, 0xdc}, 4);
            bad(path, jpeg, jpeg_bytes, MU_ERR_LIMIT, "65500 x 65500");
            jpeg[i + 6] = jpeg[i + 5] = 0; /* height 0 */
            bad(path, jpeg, jpeg_bytes, MU_ERR_FORMAT, "JPEG");
            memcpy(jpeg + i + 5, kept, 4);
            break;
        }
    }
    unlink(path);
    assert_int_equal(read_one(path, 8, 3, out, &t), MU_ERR_IO);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    assert_int_equal(read_one(path, 8, 3, out, &t), MU_ERR_IO);
    assert_string_equal(t.text, "not a regular file");
    free(jpeg);
    free(png);
    free((char *)path);
    remove_dir(dir);
}

/* Stray bytes between segments are harmless; but libturbojpeg reports what fails after them as the same warning. */
static void what_follows_a_harmless_warning_is_seen(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    const char *path = strdup(in_dir(dir, "x.jpg"));
    size_t bytes = 0, frame = 2;
    uint8_t clean[3 * 8 * 8], out[3 * 8 * 8];
    mui_trouble t = {MU_OK, ""};
    put_jpeg(path, 60, 50, 1);
    assert_int_equal(read_one(path, 8, 3, clean, &t), MU_OK);
    uint8_t *jpeg = slurp(path, &bytes), *stray = malloc(bytes + 3);
    while (jpeg[frame] != 0xff || jpeg[frame + 1] != 0xc0) {
        frame++;
    }
    memcpy(stray, jpeg, frame);
    memset(stray + frame, 0x42, 3);
    memcpy(stray + frame + 3, jpeg + frame, bytes - frame);
    write_bytes(path, stray, bytes + 3);
    assert_int_equal(read_one(path, 8, 3, out, &t), MU_OK);
    assert_memory_equal(out, clean, sizeof(out));
    for (size_t cut = bytes / 2; cut < bytes + 1; cut += 7) {
        bad(path, stray, cut, MU_ERR_FORMAT, "damaged JPEG");
    }
    static const uint8_t sampling[3] = {0x31, 0x21, 0x11}; /* 3 to 2: libjpeg cannot, and decodes nothing */
    for (int i = 0; i < 3; i++) {
        stray[frame + 3 + 11 + 3 * (size_t)i] = sampling[i];
    }
    bad(path, stray, bytes + 3, MU_ERR_FORMAT, "Fractional sampling");
    free(jpeg);
    free(stray);
    free((char *)path);
    remove_dir(dir);
}

/* A JPEG without its own Huffman tables must not be read with those of the image before it. */
static void images_do_not_depend_on_earlier_ones(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    const char *path = strdup(in_dir(dir, "x.jpg"));
    size_t bytes = 0;
    unsigned long other_bytes = 0;
    put_jpeg(path, 60, 50, 1);
    uint8_t *bare = slurp(path, &bytes);
    for (size_t i = 2; i + 3 < bytes && bare[i + 1] != 0xda;) {
        size_t length = 2 + ((size_t)bare[i + 2] << 8 | bare[i + 3]);
        if (bare[i + 1] == 0xc4) { /* a Huffman table: taken out */
            memmove(bare + i, bare + i + length, bytes - i - length);
            bytes -= length;
        } else {
            i += length;
        }
    }
    /* The image before it is progressive, so its tables are made to measure. */
    uint8_t *p = picture(60, 50, 2), *other = NULL;
    tjhandle h = tjInitCompress();
    assert_int_equal(
        tjCompress2(h, p, 60, 0, 50, TJPF_RGB, &other, &other_bytes, TJSAMP_420, 50, TJFLAG_PROGRESSIVE), 0);
    tjDestroy(h);
    free(p);
    mu_context *c = quiet();
    mui_scratch fresh = {.context = c}, used = {.context = c};
    mui_trouble t = {MU_OK, ""};
    mui_image a = {NULL, 0, 0, 0}, b = {NULL, 0, 0, 0};
    mu_status first = mui_image_decode(&fresh, bare, bytes, 3, &a, &t);
    assert_int_equal(mui_image_decode(&used, other, other_bytes, 3, &b, &t), MU_OK);
    assert_int_equal(mui_image_decode(&used, bare, bytes, 3, &b, &t), first);
    if (first == MU_OK) {
        assert_memory_equal(a.data, b.data, 60 * 50 * 3);
    }
    mui_scratch_free(&fresh);
    mui_scratch_free(&used);
    mu_context_close(c);
    free(bare);
    tjFree(other);
    free((char *)path);
    remove_dir(dir);
}

/* PNG headers with a right checksum and a wrong size. */
static void hostile_png_headers_are_refused(void **state)
{
    (void)state;
    char dir[64];
    make_dir(dir);
    const char *path = strdup(in_dir(dir, "x.png"));
    static const struct {
        uint32_t width, height;
        mu_status status;
        const char *part;
    } cases[] = {
        {65500, 65500, MU_ERR_LIMIT, "65500 x 65500"},
        {100000, 1, MU_ERR_LIMIT, "100000 x 1"},
        {2000000000, 1, MU_ERR_FORMAT, "PNG"},
        {10000, 10000, MU_ERR_FORMAT, "claims 10000 x 10000 pixels, more than its"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint8_t px[3] = {1, 2, 3};
        write_png(path, px, 3, 1, 1, SPNG_COLOR_TYPE_TRUECOLOR, 8);
        size_t bytes = 0;
        uint8_t *png = slurp(path, &bytes);
        uint32_t crc = 0xffffffffu;
        for (int k = 0; k < 4; k++) {
            png[16 + k] = (uint8_t)(cases[i].width >> (24 - 8 * k));
            png[20 + k] = (uint8_t)(cases[i].height >> (24 - 8 * k));
        }
        for (int k = 12; k < 29; k++) { /* CRC-32 of the chunk's name and data */
            crc ^= png[k];
            for (int bit = 0; bit < 8; bit++) {
                crc = crc & 1 ? crc >> 1 ^ 0xedb88320u : crc >> 1;
            }
        }
        for (int k = 0; k < 4; k++) {
            png[29 + k] = (uint8_t)(~crc >> (24 - 8 * k));
        }
        bad(path, png, bytes, cases[i].status, cases[i].part);
        free(png);
    }
    free((char *)path);
    remove_dir(dir);
}

static void make_mixed(char dir[64])
{
    make_dir(dir);
    make_sub(dir, "a");
    make_sub(dir, "b");
    for (int i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof(name), "%c/%02d.jpg", i < 10 ? 'a' : 'b', i);
        put_jpeg(in_dir(dir, name), 20 + i, 30, (unsigned)i);
        if (i % 7 == 3 || i == 12 || i == 13) { /* 3, 10, 12, 13, 17 */
            size_t bytes = 0;
            uint8_t *data = slurp(in_dir(dir, name), &bytes);
            write_bytes(in_dir(dir, name), data, bytes / 2);
            free(data);
        }
    }
}

static void a_bad_image_stops_or_is_left_out(void **state)
{
    (void)state;
    char dir[64];
    make_mixed(dir);
    for (int threads = -1; threads < 4; threads++) {
        mu_context *c = quiet();
        mu_dataset_options o = {.side = 16, .skip_bad = true};
        mu_dataset *d = mu_image_folder(c, dir, &o);
        mu_loader *l = mu_loader_open(d, &(mu_loader_options){.batch = 2, .threads = threads, .prefetch = 3});
        float *want = malloc(3 * 16 * 16 * sizeof(float));
        for (int epoch = 0; epoch < 2; epoch++) {
            mui_loaded b;
            int64_t good = 0, steps = 0;
            assert_int_equal(mu_loader_rewind(l, epoch, 0), MU_OK);
            while (mui_loader_take(l, &b)) {
                assert_int_equal(b.total_samples, 2); /* as planned */
                assert_int_equal(b.samples, steps == 6 ? 0 : 2 - (steps == 1 || steps == 5 || steps == 8));
                for (int64_t i = 0; i < b.samples; i++) {
                    int64_t label = -1;
                    assert_int_equal(mu_dataset_get(d, b.indices[i], want, &label), MU_OK);
                    assert_int_equal(label, b.y[i]);
                    assert_memory_equal(want, b.x + i * 768, 768 * sizeof(float));
                }
                good += b.samples;
                steps++;
            }
            assert_int_equal(good, 15);
            assert_int_equal(steps, 10);
            assert_int_equal(mu_dataset_bad(d), 5); /* counted once, however often it is met */
        }
        free(want);
        const char *first = strstr(log_text, "/a/03.jpg: damaged JPEG");
        assert_non_null(first);
        assert_non_null(strstr(first, "left out (1 so far)"));
        assert_null(strstr(first + 1, "/a/03.jpg"));
        assert_int_equal(mu_context_close(c), MU_OK);

        c = quiet();
        o.skip_bad = false;
        d = mu_image_folder(c, dir, &o);
        l = mu_loader_open(d, &(mu_loader_options){.batch = 2, .threads = threads, .prefetch = 3});
        mui_loaded b;
        assert_int_equal(mu_loader_rewind(l, 0, 0), MU_OK);
        assert_true(mui_loader_take(l, &b));
        assert_false(mui_loader_take(l, &b));
        assert_int_equal(mu_context_status(c), MU_ERR_FORMAT);
        assert_non_null(strstr(mu_context_message(c), "/a/03.jpg: damaged JPEG: "));
        assert_int_equal(mu_dataset_bad(d), 0);
        mu_context_close(c);
    }
    remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes_and_files_are_sorted_by_bytes),
        cmocka_unit_test(splits_share_the_training_classes),
        cmocka_unit_test(folders_that_are_none),
        cmocka_unit_test(every_kind_of_png),
        cmocka_unit_test(resizing_keeps_what_it_should),
        cmocka_unit_test(bad_images_are_refused),
        cmocka_unit_test(what_follows_a_harmless_warning_is_seen),
        cmocka_unit_test(images_do_not_depend_on_earlier_ones),
        cmocka_unit_test(hostile_png_headers_are_refused),
        cmocka_unit_test(a_bad_image_stops_or_is_left_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
