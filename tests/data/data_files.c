/* Writers of small data sets. */
#define _GNU_SOURCE
#include "data/data_files.h"

#include <ftw.h>
#include <math.h>
#include <spng.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <turbojpeg.h>
#include <unistd.h>
#include <zlib.h>

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "test set-up failed: %s\n", what);
        abort();
    }
}

void make_dir(char out[64])
{
    const char *base = getenv("TMPDIR");
    int n = snprintf(out, 64, "%s/muster-data-XXXXXX", base != NULL && strlen(base) < 40 ? base : "/tmp");
    must(n < 64 && mkdtemp(out) != NULL, out);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)st;
    (void)type;
    (void)f;
    return remove(path);
}

void remove_dir(const char *dir)
{
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

const char *in_dir(const char *dir, const char *name)
{
    static char buffers[4][512];
    static unsigned next;
    char *b = buffers[next++ % 4];
    snprintf(b, sizeof(buffers[0]), "%s/%s", dir, name);
    return b;
}

void make_sub(const char *dir, const char *name)
{
    must(mkdir(in_dir(dir, name), 0700) == 0, name);
}

void write_bytes(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    must(f != NULL && fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0, path);
}

void write_gz(const char *path, const void *data, size_t bytes)
{
    gzFile f = gzopen(path, "wb");
    must(f != NULL && gzwrite(f, data, (unsigned)bytes) == (int)bytes && gzclose(f) == Z_OK, path);
}

uint8_t *slurp(const char *path, size_t *bytes)
{
    FILE *f = fopen(path, "rb");
    must(f != NULL && fseek(f, 0, SEEK_END) == 0, path);
    *bytes = (size_t)ftell(f);
    rewind(f);
    uint8_t *data = malloc(*bytes + 1);
    must(data != NULL && fread(data, 1, *bytes, f) == *bytes, path);
    fclose(f);
    return data;
}

uint8_t *idx_bytes(int ndim, const uint32_t *dim, size_t body, unsigned salt, size_t *bytes)
{
    size_t head = 4 + 4 * (size_t)ndim;
    uint8_t *data = malloc(head + body);
    must(data != NULL, "memory");
    memcpy(data, (const uint8_t[]){0, 0, 8, (uint8_t)ndim}, 4);
    for (int i = 0; i < ndim; i++) {
        for (int j = 0; j < 4; j++) {
            data[4 + 4 * i + j] = (uint8_t)(dim[i] >> (24 - 8 * j));
        }
    }
    for (size_t i = 0; i < body; i++) {
        data[head + i] = (uint8_t)(i * 7 + salt);
    }
    *bytes = head + body;
    return data;
}

void write_idx_set(const char *dir, const char *prefix, uint32_t count, uint32_t h, uint32_t w, int classes)
{
    char name[64];
    size_t bytes = 0;
    uint8_t *images = idx_bytes(3, (const uint32_t[]){count, h, w}, (size_t)count * h * w, 0, &bytes);
    snprintf(name, sizeof(name), "%s-images-idx3-ubyte", prefix);
    write_bytes(in_dir(dir, name), images, bytes);
    free(images);
    uint8_t *labels = idx_bytes(1, &count, count, 0, &bytes);
    for (uint32_t i = 0; i < count; i++) {
        labels[8 + i] = (uint8_t)(i % (uint32_t)classes);
    }
    snprintf(name, sizeof(name), "%s-labels-idx1-ubyte", prefix);
    write_bytes(in_dir(dir, name), labels, bytes);
    free(labels);
}

void write_jpeg(const char *path, const uint8_t *rgb, int width, int height, int quality)
{
    tjhandle h = tjInitCompress();
    unsigned char *out = NULL;
    unsigned long bytes = 0;
    must(h != NULL && tjCompress2(h, rgb, width, 0, height, TJPF_RGB, &out, &bytes, TJSAMP_420, quality, 0) == 0, path);
    write_bytes(path, out, bytes);
    tjFree(out);
    tjDestroy(h);
}

void write_png(const char *path, const void *data, size_t bytes, uint32_t width, uint32_t height, int color_type,
               int bit_depth)
{
    write_png_as(path, data, bytes,
                 &(png_kind){.width = width, .height = height, .color_type = color_type, .bit_depth = bit_depth});
}

void write_png_as(const char *path, const void *data, size_t bytes, const png_kind *kind)
{
    spng_ctx *c = spng_ctx_new(SPNG_CTX_ENCODER);
    struct spng_ihdr head = {.width = kind->width,
                             .height = kind->height,
                             .bit_depth = (uint8_t)kind->bit_depth,
                             .color_type = (uint8_t)kind->color_type,
                             .interlace_method = kind->interlaced};
    struct spng_plte palette = {.n_entries = 256};
    for (int i = 0; i < 256; i++) {
        palette.entries[i] =
            (struct spng_plte_entry){(uint8_t)i, (uint8_t)(255 - i), (uint8_t)(i * 3), 255};
    }
    must(spng_set_option(c, SPNG_ENCODE_TO_BUFFER, 1) == 0 && spng_set_ihdr(c, &head) == 0, path);
    if (kind->color_type == SPNG_COLOR_TYPE_INDEXED) {
        must(spng_set_plte(c, &palette) == 0, path);
    }
    must(spng_encode_image(c, data, bytes, SPNG_FMT_PNG, SPNG_ENCODE_FINALIZE) == 0, path);
    int error = 0;
    size_t length = 0;
    void *png = spng_get_png_buffer(c, &length, &error);
    must(png != NULL && error == 0, path);
    write_bytes(path, png, length);
    free(png);
    spng_ctx_free(c);
}

uint8_t *picture(int width, int height, unsigned salt)
{
    uint8_t *p = malloc((size_t)width * (size_t)height * 3);
    must(p != NULL, "memory");
    for (int y = 0; y < height; y++) {
        for (int x = 0; x < width; x++) {
            uint8_t *px = p + ((size_t)y * (size_t)width + (size_t)x) * 3;
            px[0] = (uint8_t)(127.5 + 120 * sin(0.11 * x + salt));
            px[1] = (uint8_t)(127.5 + 120 * sin(0.07 * y + 0.05 * x + 2 * salt));
            px[2] = (uint8_t)((x + y + (int)salt * 31) & 255);
        }
    }
    return p;
}
