/* CIFAR's binary files: records of one label byte (CIFAR-100: coarse, then fine) and 3 x 32 x 32 bytes. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/os.h"
#include "data/dataset.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#define PIXELS ((size_t)3 * 32 * 32)
#define MAX_FILE_BYTES ((size_t)1 << 32)

typedef struct flavour {
    const char *train[6], *test[2]; /* NULL-terminated */
    const char *names;              /* one class name per line */
    size_t label_bytes;             /* the last of them counts */
    int classes;
} flavour;

static const flavour cifar10 = {
    {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin", NULL},
    {"test_batch.bin", NULL}, "batches.meta.txt", 1, 10};
static const flavour cifar100 = {{"train.bin", NULL}, {"test.bin", NULL}, "fine_label_names.txt", 2, 100};

static bool exists(mu_context *c, const char *dir, const char *name)
{
    char *path = mui_format(c, "%s/%s", dir, name);
    bool there = path != NULL && access(path, F_OK) == 0;
    mui_free(c, path);
    return there;
}

/* Appends the records of one file. */
static mu_status add_file(mu_dataset *d, const char *path, const flavour *f)
{
    mu_context *c = d->context;
    char *data = NULL;
    size_t bytes = 0, record = f->label_bytes + PIXELS;
    mu_status s = mui_read_file(c, path, MAX_FILE_BYTES, &data, &bytes);
    if (s != MU_OK) {
        return s;
    }
    if (bytes == 0 || bytes % record != 0) {
        s = mui_fail(c, MU_ERR_FORMAT, "%s: %zu bytes, not a multiple of the %zu bytes of a CIFAR-%d record", path,
                     bytes, record, f->classes);
        goto free_data;
    }
    size_t more = bytes / record, total = (size_t)d->count + more;
    uint8_t *pixels = mui_realloc(c, d->pixels, total * PIXELS);
    d->pixels = pixels != NULL ? pixels : d->pixels;
    uint8_t *labels = mui_realloc(c, d->labels, total);
    d->labels = labels != NULL ? labels : d->labels;
    if (pixels == NULL || labels == NULL) {
        s = MU_ERR_NOMEM;
        goto free_data;
    }
    for (size_t i = 0; i < more; i++) {
        const uint8_t *from = (const uint8_t *)data + i * record;
        uint8_t label = from[f->label_bytes - 1];
        if (label >= f->classes) {
            s = mui_fail(c, MU_ERR_FORMAT, "%s: record %zu has label %d; CIFAR-%d has 0 to %d", path, i, label,
                         f->classes, f->classes - 1);
            goto free_data;
        }
        labels[(size_t)d->count + i] = label;
        memcpy(pixels + ((size_t)d->count + i) * PIXELS, from + f->label_bytes, PIXELS);
    }
    d->count = (int64_t)total;
free_data:
    mui_free(c, data);
    return s;
}

/* Names of the classes, when the file is there: non-empty lines in order. */
static mu_status read_names(mu_dataset *d, const char *dir, const flavour *f)
{
    mu_context *c = d->context;
    if (!exists(c, dir, f->names)) {
        return mu_context_status(c);
    }
    char *path = mui_format(c, "%s/%s", dir, f->names), *text = NULL;
    size_t bytes = 0;
    mu_status s = path != NULL ? mui_read_file(c, path, (size_t)1 << 20, &text, &bytes) : MU_ERR_NOMEM;
    if (s != MU_OK) {
        goto free_path;
    }
    int count = 0;
    d->class_names = mui_calloc(c, (size_t)d->classes, sizeof(*d->class_names));
    s = d->class_names != NULL ? MU_OK : MU_ERR_NOMEM;
    char *rest = text;
    for (char *line; s == MU_OK && (line = strtok_r(rest, "\r\n", &rest)) != NULL; count++) {
        if (count < d->classes) {
            d->class_names[count] = mui_strdup(c, line);
            s = d->class_names[count] != NULL ? MU_OK : MU_ERR_NOMEM;
        }
    }
    if (s == MU_OK && count != d->classes) {
        s = mui_fail(c, MU_ERR_FORMAT, "%s: names %d classes; expected %d", path, count, d->classes);
    }
    mui_free(c, text);
free_path:
    mui_free(c, path);
    return s;
}

mu_dataset *mu_cifar_dataset(mu_context *c, const char *dir, const mu_dataset_options *options)
{
    mu_dataset_options o;
    if (mui_failed(c) || !mui_dataset_options(c, options, &o)) {
        return NULL;
    }
    if (dir == NULL) {
        mui_fail(c, MU_ERR_ARG, "a CIFAR data set needs a directory");
        return NULL;
    }
    bool test = o.split == MU_SPLIT_TEST;
    bool ten = exists(c, dir, test ? "test_batch.bin" : "data_batch_1.bin");
    bool hundred = exists(c, dir, test ? "test.bin" : "train.bin");
    if (ten == hundred) {
        mui_fail(c, ten ? MU_ERR_ARG : MU_ERR_IO, "%s: has %s CIFAR-10's %s %s CIFAR-100's %s", dir,
                 ten ? "both" : "neither", test ? "test_batch.bin" : "data_batch_1.bin", ten ? "and" : "nor",
                 test ? "test.bin" : "train.bin");
        return NULL;
    }
    const flavour *f = ten ? &cifar10 : &cifar100;
    mu_dataset *d = mui_dataset_make(c, &mui_bytes_kind);
    if (d == NULL) {
        return NULL;
    }
    d->classes = f->classes;
    d->dims = MU_DIMS(3, 32, 32);
    d->elements = (int64_t)PIXELS;
    for (const char *const *name = test ? f->test : f->train; *name != NULL; name++) {
        char *path = mui_format(c, "%s/%s", dir, *name);
        mu_status s = path != NULL ? add_file(d, path, f) : MU_ERR_NOMEM;
        mui_free(c, path);
        if (s != MU_OK) {
            goto destroy;
        }
    }
    if (read_names(d, dir, f) != MU_OK || mui_dataset_filter(d, o.first_classes, dir) != MU_OK) {
        goto destroy;
    }
    return mui_dataset_finish(d);
destroy:
    mui_dataset_destroy(d);
    return NULL;
}
