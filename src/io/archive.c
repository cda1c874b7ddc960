/* The archive, member by member. */
#include "io/archive.h"
#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* PyTorch names the folder after the file, less its last extension. */
static char *root_of(mu_context *c, const char *path)
{
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path, *dot = strrchr(base, '.');
    size_t n = dot != NULL && dot != base ? (size_t)(dot - base) : strlen(base);
    char *root = n > 0 ? mui_strndup(c, base, n) : mui_strdup(c, "archive");
    for (char *p = root; p != NULL && *p != '\0'; p++) {
        *p = *p == '\\' || (unsigned char)*p < 0x20 ? '_' : *p;
    }
    if (root != NULL && (strcmp(root, ".") == 0 || strcmp(root, "..") == 0)) {
        mui_free(c, root);
        root = mui_strdup(c, "archive");
    }
    return root;
}

static void write_member(mui_archive *a, const char *name, const void *data, size_t bytes)
{
    char full[512];
    snprintf(full, sizeof(full), "%s/%s", a->root, name); /* a file name has at most 255 bytes */
    mui_zip_member_write(&a->zip, full, data, bytes);
}

mu_status mui_archive_open(mu_context *c, const char *path, const mui_pickle_writer *pickle, mui_archive *out)
{
    if (pickle->failed) {
        return mu_context_status(c);
    }
    *out = (mui_archive){.root = root_of(c, path)};
    if (out->root == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = mui_outfile_open(c, path, &out->file);
    if (s != MU_OK) {
        mui_free(c, out->root);
        return s;
    }
    mui_zip_writer_init(&out->zip, &out->file);
    write_member(out, "data.pkl", pickle->data, pickle->bytes);
    write_member(out, "byteorder", "little", 6);
    return MU_OK;
}

void mui_archive_storage(mui_archive *a, int64_t key, const void *data, size_t bytes)
{
    char name[40];
    snprintf(name, sizeof(name), "data/%lld", (long long)key);
    write_member(a, name, data, bytes);
}

/* Indices of the tensors that have storages of their own, in list order; NULL when memory ran out. */
static size_t *own_storages(const mui_out_list *l, size_t *n)
{
    size_t *order = mui_calloc(l->context, l->count, sizeof(*order));
    *n = 0;
    for (size_t i = 0; order != NULL && i < l->count; i++) {
        if (l->tensors[i].same_as == i) {
            order[(*n)++] = i;
        }
    }
    return order;
}

typedef struct counted {
    mui_archive *archive;
    int64_t next;
} counted;

static mu_status write_storage(void *user, size_t i, const void *data, size_t bytes)
{
    counted *to = user;
    (void)i;
    mui_archive_storage(to->archive, to->next++, data, bytes);
    return to->archive->file.status;
}

mu_status mui_archive_tensors(mui_archive *a, const mui_out_list *l, int64_t first)
{
    size_t n = 0, *order = own_storages(l, &n);
    counted to = {a, first};
    mu_status s = order != NULL ? mui_out_each(l, order, n, write_storage, &to) : MU_ERR_NOMEM;
    mui_free(l->context, order);
    return s;
}

mu_status mui_archive_close(mui_archive *a, mu_status status)
{
    mu_context *c = a->file.context;
    if (status == MU_OK) {
        write_member(a, "version", "3\n", 2);
    }
    mu_status finished = mui_zip_finish(&a->zip);
    status = status != MU_OK ? status : finished;
    mui_free(c, a->root);
    if (status != MU_OK) {
        mui_outfile_abandon(&a->file);
        return status;
    }
    return mui_outfile_commit(&a->file);
}

mu_status mui_out_torch(const mui_out_list *l, const char *path)
{
    mui_pickle_writer pickle;
    mui_archive archive;
    mui_pk_start(&pickle, l->context);
    mui_pk_state_dict(&pickle, l, 0);
    mui_pk_op(&pickle, '.');
    mu_status s = mui_archive_open(l->context, path, &pickle, &archive);
    if (s == MU_OK) {
        s = mui_archive_close(&archive, mui_archive_tensors(&archive, l, 0));
    }
    mui_pk_free(&pickle);
    return s;
}
