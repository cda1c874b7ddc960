/* MNIST's IDX files: a magic number, big-endian dimensions, bytes. */
#define _GNU_SOURCE
#include "data/idx.h"
#include "base/alloc.h"
#include "base/os.h"
#include "data/dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#define FIRST_CHUNK_BYTES ((size_t)1 << 20)
#define MAX_IMAGE_SIDE 65536

/* Reads up to bytes; fewer only at the end of the file. A cut or damaged gzip stream is an error. */
static mu_status read_some(mu_context *c, const char *name, gzFile f, uint8_t *out, size_t bytes, size_t *got)
{
    size_t used = 0;
    while (used < bytes) {
        size_t want = bytes - used < ((size_t)1 << 30) ? bytes - used : (size_t)1 << 30;
        int n = gzread(f, out + used, (unsigned)want);
        int code = Z_OK;
        const char *text = gzerror(f, &code);
        if (n < 0 || (code != Z_OK && code != Z_STREAM_END)) {
            if (code == Z_ERRNO) {
                return mui_fail(c, MU_ERR_IO, "%s: cannot read: %s", name, mui_errno_text(errno));
            }
            return mui_fail(c, code == Z_MEM_ERROR ? MU_ERR_NOMEM : MU_ERR_FORMAT, "%s: damaged or cut gzip file: %s",
                            name, text);
        }
        if (n == 0) {
            break;
        }
        used += (size_t)n;
    }
    *got = used;
    return MU_OK;
}

static int64_t big_endian(const uint8_t *p)
{
    return (int64_t)p[0] << 24 | (int64_t)p[1] << 16 | (int64_t)p[2] << 8 | (int64_t)p[3];
}

static mu_status read_header(mu_context *c, const char *name, gzFile f, int ndim, mui_idx *out, size_t *bytes)
{
    uint8_t head[4 + 4 * MUI_IDX_MAX_DIMS];
    size_t want = 4 + 4 * (size_t)ndim, got = 0;
    mu_status s = read_some(c, name, f, head, want, &got);
    if (s != MU_OK) {
        return s;
    }
    if (got >= 4 && (head[0] != 0 || head[1] != 0 || head[2] != 0x08 || head[3] != ndim)) {
        return mui_fail(c, MU_ERR_FORMAT,
                        "%s: starts with %02x %02x %02x %02x; an IDX file of bytes in %d dimension%s starts with "
                        "00 00 08 %02x", name, head[0], head[1], head[2], head[3], ndim, ndim == 1 ? "" : "s",
                        (unsigned)ndim);
    }
    if (got < want) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: %zu bytes, fewer than the %zu of its header", name, got, want);
    }
    size_t total = 1;
    for (int i = 0; i < ndim; i++) {
        out->dim[i] = big_endian(head + 4 + 4 * i);
        if (out->dim[i] == 0 || (i > 0 && out->dim[i] > MAX_IMAGE_SIDE)) {
            return mui_fail(c, MU_ERR_FORMAT, "%s: dimension %d is %" PRId64 "; expected 1 to %" PRId64, name, i,
                            out->dim[i], i > 0 ? (int64_t)MAX_IMAGE_SIDE : (int64_t)UINT32_MAX);
        }
        if (!mui_size_mul(total, (size_t)out->dim[i], &total) || total > MUI_IDX_MAX_BYTES) {
            return mui_fail(c, MU_ERR_LIMIT, "%s: its header asks for more than the limit of %zu bytes", name,
                            MUI_IDX_MAX_BYTES);
        }
    }
    *bytes = total;
    return MU_OK;
}

static mu_status read_body(mu_context *c, const char *name, gzFile f, size_t bytes, uint8_t **out)
{
    uint8_t *data = NULL, extra;
    size_t used = 0, capacity = 0;
    while (used < bytes) {
        size_t next = capacity == 0 ? FIRST_CHUNK_BYTES : capacity * 2;
        capacity = next < bytes ? next : bytes;
        uint8_t *more = mui_realloc(c, data, capacity);
        if (more == NULL) {
            mui_free(c, data);
            return MU_ERR_NOMEM;
        }
        data = more;
        size_t got = 0;
        mu_status s = read_some(c, name, f, data + used, capacity - used, &got);
        used += got;
        if (s == MU_OK && used < capacity) {
            s = mui_fail(c, MU_ERR_FORMAT, "%s: cut: %zu bytes after its header, which asks for %zu", name, used,
                         bytes);
        }
        if (s != MU_OK) {
            mui_free(c, data);
            return s;
        }
    }
    size_t got = 0;
    mu_status s = read_some(c, name, f, &extra, 1, &got); /* for gzip, this also checks its checksum */
    if (s == MU_OK && got != 0) {
        s = mui_fail(c, MU_ERR_FORMAT, "%s: goes on after the %zu bytes that its header asks for", name, bytes);
    }
    if (s != MU_OK) {
        mui_free(c, data);
        return s;
    }
    *out = data;
    return MU_OK;
}

mu_status mui_idx_read(mu_context *c, const char *name, int fd, int ndim, mui_idx *out)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* gzclose closes what it was given */
    gzFile f = copy >= 0 ? gzdopen(copy, "rb") : NULL;
    if (f == NULL) {
        if (copy >= 0) {
            close(copy);
        }
        return mui_fail(c, copy >= 0 ? MU_ERR_NOMEM : MU_ERR_IO, "%s: cannot start reading", name);
    }
    gzbuffer(f, 1u << 18);
    mui_idx idx = {{0}, NULL};
    size_t bytes = 0;
    mu_status s = read_header(c, name, f, ndim, &idx, &bytes);
    s = s != MU_OK ? s : read_body(c, name, f, bytes, &idx.data);
    gzclose_r(f);
    if (s == MU_OK) {
        *out = idx;
    }
    return s;
}

/* Opens dir/name or dir/name.gz; *path (mui_free) is the one found. */
static int open_either(mu_context *c, const char *dir, const char *name, char **path)
{
    for (int gz = 0; gz < 2; gz++) {
        char *p = mui_format(c, "%s/%s%s", dir, name, gz ? ".gz" : "");
        if (p == NULL) {
            return -1;
        }
        int fd = open(p, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd >= 0) {
            *path = p;
            return fd;
        }
        if (errno != ENOENT && errno != ENOTDIR) {
            mui_fail(c, MU_ERR_IO, "%s: cannot open: %s", p, mui_errno_text(errno));
            mui_free(c, p);
            return -1;
        }
        mui_free(c, p);
    }
    mui_fail(c, MU_ERR_IO, "%s: has neither %s nor %s.gz", dir, name, name);
    return -1;
}

static mu_status read_one(mu_context *c, const char *dir, const char *name, int ndim, mui_idx *out)
{
    char *path = NULL;
    int fd = open_either(c, dir, name, &path);
    if (fd < 0) {
        return mu_context_status(c);
    }
    mu_status s = mui_idx_read(c, path, fd, ndim, out);
    close(fd);
    mui_free(c, path);
    return s;
}

mu_dataset *mu_idx_dataset(mu_context *c, const char *dir, const mu_dataset_options *options)
{
    mu_dataset_options o;
    if (mui_failed(c) || !mui_dataset_options(c, options, &o)) {
        return NULL;
    }
    if (dir == NULL) {
        mui_fail(c, MU_ERR_ARG, "an IDX data set needs a directory");
        return NULL;
    }
    bool test = o.split == MU_SPLIT_TEST;
    mui_idx images = {{0}, NULL}, labels = {{0}, NULL};
    mu_dataset *d = mui_dataset_make(c, &mui_bytes_kind);
    if (d == NULL) {
        return NULL;
    }
    if (read_one(c, dir, test ? "t10k-images-idx3-ubyte" : "train-images-idx3-ubyte", 3, &images) != MU_OK) {
        goto destroy;
    }
    d->pixels = images.data;
    if (read_one(c, dir, test ? "t10k-labels-idx1-ubyte" : "train-labels-idx1-ubyte", 1, &labels) != MU_OK) {
        goto destroy;
    }
    d->labels = labels.data;
    if (images.dim[0] != labels.dim[0]) {
        mui_fail(c, MU_ERR_FORMAT, "%s: %" PRId64 " images but %" PRId64 " labels", dir, images.dim[0], labels.dim[0]);
        goto destroy;
    }
    d->count = images.dim[0];
    d->dims = MU_DIMS(1, images.dim[1], images.dim[2]);
    d->elements = images.dim[1] * images.dim[2];
    for (int64_t i = 0; i < d->count; i++) {
        d->classes = d->labels[i] >= d->classes ? d->labels[i] + 1 : d->classes;
    }
    if (mui_dataset_filter(d, o.first_classes, dir) != MU_OK) {
        goto destroy;
    }
    return mui_dataset_finish(d);
destroy:
    mui_dataset_destroy(d);
    return NULL;
}
