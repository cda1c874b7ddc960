/* Writes good IDX files, images and traces into FOLDER/idx, FOLDER/image and FOLDER/trace, in the form that fuzz_idx,
 * fuzz_image and fuzz_trace take. */
#define _GNU_SOURCE
#include "data/data_files.h"

#include <spng.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *root;

/* The file at path, with the target's own first bytes put before it; the file goes. */
static void keep(const char *path, const char *name, const void *head, size_t head_bytes)
{
    size_t bytes = 0;
    uint8_t *data = slurp(path, &bytes), *whole = malloc(head_bytes + bytes);
    memcpy(whole, head, head_bytes);
    memcpy(whole + head_bytes, data, bytes);
    write_bytes(in_dir(root, name), whole, head_bytes + bytes);
    free(data);
    free(whole);
    unlink(path);
}

static void idx_seeds(const char *path)
{
    for (int ndim = 1; ndim <= 3; ndim++) {
        uint32_t dim[3] = {7, 5, 3};
        size_t body = ndim == 1 ? 7 : ndim == 2 ? 35 : 105, bytes = 0;
        uint8_t *data = idx_bytes(ndim, dim, body, 1, &bytes), head = (uint8_t)(ndim - 1);
        char name[32];
        write_bytes(path, data, bytes);
        snprintf(name, sizeof(name), "idx/%d", ndim);
        keep(path, name, &head, 1);
        write_gz(path, data, bytes);
        snprintf(name, sizeof(name), "idx/%d.gz", ndim);
        keep(path, name, &head, 1);
        free(data);
    }
}

static void image_seeds(const char *path)
{
    static const png_kind kinds[] = {
        {19, 14, SPNG_COLOR_TYPE_TRUECOLOR, 8, false},   {19, 14, SPNG_COLOR_TYPE_TRUECOLOR, 8, true},
        {19, 14, SPNG_COLOR_TYPE_GRAYSCALE, 8, false},   {19, 14, SPNG_COLOR_TYPE_GRAYSCALE, 2, true},
        {19, 14, SPNG_COLOR_TYPE_INDEXED, 8, false},     {19, 14, SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 8, false},
        {9, 14, SPNG_COLOR_TYPE_TRUECOLOR, 16, false},   {19, 14, SPNG_COLOR_TYPE_GRAYSCALE_ALPHA, 16, false},
    };
    static const int samples[7] = {1, 0, 3, 1, 2, 0, 4};
    uint8_t *p = picture(40, 40, 2);
    char name[32];
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        const png_kind *k = &kinds[i];
        size_t row = ((size_t)k->width * (size_t)(samples[k->color_type] * k->bit_depth) + 7) / 8;
        write_png_as(path, p, row * k->height, k);
        snprintf(name, sizeof(name), "image/%zu.png", i);
        keep(path, name, (const uint8_t[]){(uint8_t)(7 * i + 3), (uint8_t)i}, 2);
    }
    for (int i = 0; i < 4; i++) {
        write_jpeg(path, p, 40 - 9 * i, 7 + 11 * i, 40 + 15 * i);
        snprintf(name, sizeof(name), "image/%d.jpg", i);
        keep(path, name, (const uint8_t[]){(uint8_t)(15 * i), (uint8_t)i}, 2);
    }
    free(p);
}

static void trace_seeds(void)
{
    static const char *const seeds[] = {
        "[\n{\"ph\":\"M\",\"pid\":1,\"tid\":0,\"name\":\"muster_trace\",\"args\":{\"version\":1,\"rank\":1,\"ranks\":2,"
        "\"run\":\"a\",\"offset_ns\":-5000000100,\"offset_error_ns\":900}},\n"
        "{\"ph\":\"X\",\"pid\":1,\"ts\":78821601385.591,\"cat\":\"backward\",\"tid\":0,\"dur\":191.930,\"name\":\"backward\"},\n"
        "{\"ph\":\"b\",\"pid\":1,\"ts\":78821601400.1,\"cat\":\"all_reduce\",\"tid\":0,\"id\":\"1.1\",\"name\":\"r\",\"args\":"
        "{\"ddp\":\"n\",\"reduction\":1,\"bucket\":0,\"bytes\":8}},\n"
        "{\"ph\":\"e\",\"pid\":1,\"ts\":78821601700.1,\"cat\":\"all_reduce\",\"tid\":0,\"id\":\"1.1\",\"name\":\"r\"},\n"
        "{\"ph\":\"M\",\"pid\":1,\"tid\":0,\"name\":\"muster_dropped\",\"args\":{\"events\":3}}\n]\n",
        "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{\"ph\":\"X\",\"pid\":2,\"ts\":-1e3,\"dur\":2,\"args\":{\"ts\":[1,{}]}},"
        "{\"ph\":\"i\",\"ts\":5.25,\"pid\":\"x\"}],\"n\":[\"\\\"\"]}",
    };
    for (int i = 0; i < 2; i++) {
        char name[32];
        snprintf(name, sizeof(name), "trace/%d.json", i);
        write_bytes(in_dir(root, name), (const uint8_t *)seeds[i], strlen(seeds[i]));
    }
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_seeds FOLDER\n");
        return 2;
    }
    root = argv[1];
    /* There already, from an earlier run: just as good. */
    mkdir(root, 0700);
    mkdir(in_dir(root, "idx"), 0700);
    mkdir(in_dir(root, "image"), 0700);
    mkdir(in_dir(root, "trace"), 0700);
    char path[512];
    snprintf(path, sizeof(path), "%s/next", root);
    trace_seeds();
    idx_seeds(path);
    image_seeds(path);
    return 0;
}
