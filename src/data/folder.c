/* A folder of class folders of images, decoded anew whenever a sample is read. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/arena.h"
#include "base/os.h"
#include "data/dataset.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

typedef struct entry {
    const char *file; /* name inside the class folder */
    int label;
} entry;

typedef struct folder {
    mui_arena names; /* of files */
    char *root;      /* the folder of class folders */
    entry *entries;  /* count of the data set */
    size_t capacity;
    int side, channels;
    int64_t others;  /* files that are no images by their names */
} folder;

typedef struct listing {
    char **names;
    size_t count, capacity;
} listing;

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void free_listing(mu_context *c, listing *l)
{
    for (size_t i = 0; i < l->count; i++) {
        mui_free(c, l->names[i]);
    }
    mui_free(c, l->names);
    *l = (listing){NULL, 0, 0};
}

static bool is_directory(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Names in a directory in byte order, hidden ones left out: its folders, or everything else. */
static mu_status list(mu_context *c, const char *path, bool folders, listing *out)
{
    DIR *dir = opendir(path);
    if (dir == NULL) {
        return mui_fail(c, MU_ERR_IO, "%s: cannot open: %s", path, mui_errno_text(errno));
    }
    listing l = {NULL, 0, 0};
    mu_status s = MU_OK;
    for (;;) {
        errno = 0;
        struct dirent *e = readdir(dir);
        if (e == NULL) {
            s = errno == 0 ? MU_OK : mui_fail(c, MU_ERR_IO, "%s: cannot read: %s", path, mui_errno_text(errno));
            break;
        }
        if (e->d_name[0] == '.') {
            continue;
        }
        bool is_folder = e->d_type == DT_DIR;
        if (e->d_type == DT_LNK || e->d_type == DT_UNKNOWN) {
            struct stat st;
            is_folder = fstatat(dirfd(dir), e->d_name, &st, 0) == 0 && S_ISDIR(st.st_mode);
        }
        if (is_folder != folders) {
            continue;
        }
        char *name = MUI_GROW(c, l.names, l.count, l.capacity) ? mui_strdup(c, e->d_name) : NULL;
        if (name == NULL) {
            s = MU_ERR_NOMEM;
            break;
        }
        l.names[l.count++] = name;
    }
    closedir(dir);
    if (s != MU_OK) {
        free_listing(c, &l);
        return s;
    }
    if (l.count > 0) {
        qsort(l.names, l.count, sizeof(*l.names), by_bytes);
    }
    *out = l;
    return MU_OK;
}

static bool has_image_name(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL &&
           (strcasecmp(dot, ".jpg") == 0 || strcasecmp(dot, ".jpeg") == 0 || strcasecmp(dot, ".png") == 0);
}

/* Adds the images of one class folder. With must_have, a folder without any is an error. */
static mu_status add_class(mu_dataset *d, const char *class_name, int label, bool must_have)
{
    mu_context *c = d->context;
    folder *f = d->state;
    char *path = mui_format(c, "%s/%s", f->root, class_name);
    listing files;
    mu_status s = path != NULL ? list(c, path, false, &files) : MU_ERR_NOMEM;
    if (s != MU_OK) {
        goto free_path;
    }
    int64_t before = d->count;
    for (size_t i = 0; i < files.count; i++) {
        if (!has_image_name(files.names[i])) {
            f->others++;
            continue;
        }
        char *name = MUI_GROW(c, f->entries, (size_t)d->count, f->capacity)
                         ? mui_arena_strdup(&f->names, files.names[i]) : NULL;
        if (name == NULL) {
            s = MU_ERR_NOMEM;
            goto free_files;
        }
        f->entries[d->count++] = (entry){name, label};
    }
    if (d->count == before && must_have) {
        s = mui_fail(c, MU_ERR_FORMAT, "%s: class folder without images (%zu files; expected .jpg, .jpeg or .png "
                     "right inside it)", path, files.count);
    }
free_files:
    free_listing(c, &files);
free_path:
    mui_free(c, path);
    return s;
}

/* Which folder holds the class folders of the split, and which one says what the classes are. Both mui_free. */
static mu_status find_roots(mu_context *c, const char *dir, mu_split split, char **root, char **classes_root)
{
    char *train = mui_format(c, "%s/train", dir), *test = mui_format(c, "%s/test", dir);
    char *val = mui_format(c, "%s/val", dir), *flat = mui_strdup(c, dir);
    mu_status s = MU_ERR_NOMEM;
    *root = *classes_root = NULL;
    if (train != NULL && test != NULL && val != NULL && flat != NULL) {
        const char *held_out = is_directory(test) ? test : is_directory(val) ? val : NULL;
        bool parted = held_out != NULL && is_directory(train);
        *root = mui_strdup(c, !parted ? flat : split == MU_SPLIT_TEST ? held_out : train);
        *classes_root = mui_strdup(c, parted ? train : flat);
        s = *root != NULL && *classes_root != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    char *all[] = {train, test, val, flat};
    for (int i = 0; i < 4; i++) {
        mui_free(c, all[i]);
    }
    return s;
}

/* A class that only the held-out part has would have no label. */
static mu_status check_classes(mu_dataset *d, const listing *classes)
{
    mu_context *c = d->context;
    const folder *f = d->state;
    listing found;
    mu_status s = list(c, f->root, true, &found);
    if (s != MU_OK) {
        return s;
    }
    for (size_t i = 0; s == MU_OK && i < found.count; i++) {
        if (classes->count == 0 ||
            bsearch(&found.names[i], classes->names, classes->count, sizeof(*classes->names), by_bytes) == NULL) {
            s = mui_fail(c, MU_ERR_FORMAT, "%s/%s: a class that the training images do not have", f->root,
                         found.names[i]);
        }
    }
    free_listing(c, &found);
    return s;
}

static mu_status scan(mu_dataset *d, const char *dir, const mu_dataset_options *o)
{
    mu_context *c = d->context;
    folder *f = d->state;
    char *classes_root = NULL;
    listing classes = {NULL, 0, 0};
    mu_status s = find_roots(c, dir, o->split, &f->root, &classes_root);
    s = s != MU_OK ? s : list(c, classes_root, true, &classes);
    if (s == MU_OK && classes.count == 0) {
        s = mui_fail(c, MU_ERR_FORMAT, "%s: no class folders", classes_root);
    }
    s = s != MU_OK ? s : check_classes(d, &classes);
    if (s != MU_OK) {
        goto done;
    }
    size_t count = classes.count;
    count = o->first_classes > 0 && (size_t)o->first_classes < count ? (size_t)o->first_classes : count;
    d->class_names = mui_calloc(c, count, sizeof(*d->class_names));
    if (d->class_names == NULL) {
        s = MU_ERR_NOMEM;
        goto done;
    }
    d->classes = (int)count;
    bool parted = strcmp(classes_root, f->root) != 0;
    for (size_t i = 0; s == MU_OK && i < count; i++) {
        d->class_names[i] = mui_strdup(c, classes.names[i]);
        s = d->class_names[i] == NULL ? MU_ERR_NOMEM : MU_OK;
        char *path = parted && s == MU_OK ? mui_format(c, "%s/%s", f->root, classes.names[i]) : NULL;
        bool absent = path != NULL && !is_directory(path); /* the held-out part may lack a class */
        mui_free(c, path);
        if (s == MU_OK && !absent) {
            s = add_class(d, classes.names[i], (int)i, !parted);
        }
    }
    if (s == MU_OK && d->count == 0) {
        s = mui_fail(c, MU_ERR_FORMAT, "%s: no images in its class folders", f->root);
    }
    if (s == MU_OK && f->others > 0) {
        mui_log(c, MU_LOG_INFO, "%s: %" PRId64 " files are not .jpg, .jpeg or .png and are left out", f->root,
                f->others);
    }
done:
    free_listing(c, &classes);
    mui_free(c, classes_root);
    return s;
}

static void name_of(const mu_dataset *d, int64_t i, char *out, size_t out_bytes)
{
    const folder *f = d->state;
    snprintf(out, out_bytes, "%s/%s/%s", f->root, d->class_names[f->entries[i].label], f->entries[i].file);
}

static mu_status bytes_from_file(mu_dataset *d, mui_scratch *s, int64_t i, const uint8_t **pixels, int64_t *label,
                                 mui_trouble *trouble)
{
    const folder *f = d->state;
    char path[4096];
    int length = snprintf(path, sizeof(path), "%s/%s/%s", f->root, d->class_names[f->entries[i].label],
                          f->entries[i].file);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        return mui_trouble_set(trouble, MU_ERR_LIMIT, "path of %d bytes, more than %zu", length, sizeof(path) - 1);
    }
    size_t bytes = 0;
    mui_image image;
    mu_status status = mui_image_read_file(s, path, &bytes, trouble);
    status = status != MU_OK ? status : mui_image_decode(s, s->file.data, bytes, f->channels, &image, trouble);
    status = status != MU_OK ? status : mui_image_fit(s, &image, f->side, pixels, trouble);
    if (status == MU_OK) {
        *label = f->entries[i].label;
    }
    return status;
}

static void destroy_folder(mu_dataset *d)
{
    folder *f = d->state;
    if (f != NULL) {
        mui_arena_free(&f->names);
        mui_free(d->context, f->root);
        mui_free(d->context, f->entries);
        mui_free(d->context, f);
    }
}

static const mui_dataset_kind folder_kind = {
    .bytes = bytes_from_file, .name = name_of, .destroy = destroy_folder};

mu_dataset *mu_image_folder(mu_context *c, const char *dir, const mu_dataset_options *options)
{
    mu_dataset_options o;
    if (mui_failed(c) || !mui_dataset_options(c, options, &o)) {
        return NULL;
    }
    if (dir == NULL) {
        mui_fail(c, MU_ERR_ARG, "an image folder needs a directory");
        return NULL;
    }
    mu_dataset *d = mui_dataset_make(c, &folder_kind);
    folder *f = d != NULL ? mui_calloc(c, 1, sizeof(*f)) : NULL;
    if (f == NULL) {
        goto destroy;
    }
    d->state = f;
    mui_arena_init(&f->names, c);
    f->side = o.side;
    f->channels = o.channels;
    d->skip_bad = o.skip_bad;
    d->dims = MU_DIMS(o.channels, o.side, o.side);
    if (scan(d, dir, &o) != MU_OK) {
        goto destroy;
    }
    return mui_dataset_finish(d);
destroy:
    if (d != NULL) {
        mui_dataset_destroy(d);
    }
    return NULL;
}
