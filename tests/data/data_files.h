/* Files for the tests of data sets: a temporary folder, and writers of every format read there. */
#ifndef DATA_FILES_H
#define DATA_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A new folder under $TMPDIR or /tmp; free with remove_dir, which takes all that is in it. */
void make_dir(char out[64]);
void remove_dir(const char *dir);
/* dir/name; one of a few static buffers, for immediate use. */
const char *in_dir(const char *dir, const char *name);
void make_sub(const char *dir, const char *name);

void write_bytes(const char *path, const void *data, size_t bytes);
void write_gz(const char *path, const void *data, size_t bytes);
/* The file's content, malloc. */
uint8_t *slurp(const char *path, size_t *bytes);

/* An IDX file of bytes in memory, malloc: header of ndim dims, then `body` bytes of i * 7 + salt. */
uint8_t *idx_bytes(int ndim, const uint32_t *dim, size_t body, unsigned salt, size_t *bytes);
/* Four plain files of `count` images of h x w; label i is i % classes. */
void write_idx_set(const char *dir, const char *prefix, uint32_t count, uint32_t h, uint32_t w, int classes);

/* RGB or grey pixels, rows without gaps. */
void write_jpeg(const char *path, const uint8_t *rgb, int width, int height, int quality);
/* color_type and bit_depth as in the PNG standard; data as libspng's SPNG_FMT_PNG wants it. */
void write_png(const char *path, const void *data, size_t bytes, uint32_t width, uint32_t height, int color_type,
               int bit_depth);
typedef struct png_kind {
    uint32_t width, height;
    int color_type, bit_depth;
    bool interlaced;
} png_kind;
void write_png_as(const char *path, const void *data, size_t bytes, const png_kind *kind);
/* A smooth colour picture that depends on salt, (height, width, 3), malloc. */
uint8_t *picture(int width, int height, unsigned salt);

#endif
