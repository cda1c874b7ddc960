/* PyTorch's legacy stream: five pickles, then the storages' data in the order of the key list, which is that of texts:
 * "10" comes before "2". */
#include "base/alloc.h"
#include "io/bytes.h"
#include "io/out_pickle.h"
#include "io/outfile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct storage {
    char key[24];
    size_t tensor;
} storage;

static int by_key(const void *a, const void *b)
{
    return strcmp(((const storage *)a)->key, ((const storage *)b)->key);
}

/* The tensors with storages of their own, as mui_pk_state_dict numbers them from 0, sorted. */
static void sort_storages(const mui_out_list *l, storage *storages, size_t *order, size_t *n)
{
    for (size_t i = 0; i < l->count; i++) {
        if (l->tensors[i].same_as == i) {
            snprintf(storages[*n].key, sizeof(storages[*n].key), "%zu", *n);
            storages[(*n)++].tensor = i;
        }
    }
    if (*n > 0) {
        qsort(storages, *n, sizeof(*storages), by_key);
    }
    for (size_t i = 0; i < *n; i++) {
        order[i] = storages[i].tensor;
    }
}

static void put_entry(mui_pickle_writer *w, const char *key, int64_t value)
{
    mui_pk_text(w, key);
    mui_pk_int(w, value);
}

/* Each pickle begins with its protocol. */
static void next_pickle(mui_pickle_writer *w)
{
    mui_pk_op(w, '.');
    mui_pk_op(w, 0x80);
    mui_pk_op(w, 2);
}

static void put_pickles(mui_pickle_writer *w, const mui_out_list *l, const storage *storages, size_t n)
{
    static const unsigned char magic[] = {0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};
    for (size_t i = 0; i < sizeof(magic); i++) {
        mui_pk_op(w, magic[i]);
    }
    next_pickle(w);
    mui_pk_int(w, 1001);
    next_pickle(w);
    mui_pk_op(w, '}');
    mui_pk_op(w, '(');
    put_entry(w, "protocol_version", 1001);
    mui_pk_text(w, "little_endian");
    mui_pk_bool(w, true);
    mui_pk_text(w, "type_sizes");
    mui_pk_op(w, '}');
    mui_pk_op(w, '(');
    put_entry(w, "short", 2);
    put_entry(w, "int", 4);
    put_entry(w, "long", 4); /* PyTorch says 4 everywhere */
    mui_pk_op(w, 'u');
    mui_pk_op(w, 'u');
    next_pickle(w);
    mui_pk_state_dict(w, l, 0);
    next_pickle(w);
    mui_pk_op(w, ']');
    mui_pk_op(w, '(');
    for (size_t i = 0; i < n; i++) {
        mui_pk_text(w, storages[i].key);
    }
    mui_pk_op(w, 'e');
    mui_pk_op(w, '.');
}

typedef struct sink {
    const mui_out_list *list;
    mui_outfile file;
} sink;

static mu_status write_storage(void *user, size_t i, const void *data, size_t bytes)
{
    sink *to = user;
    const mui_torch_dtype *d = to->list->tensors[i].dtype;
    unsigned char count[8];
    mui_put_le64(count, d->storage != NULL ? bytes / d->bytes : bytes);
    mui_outfile_write(&to->file, count, sizeof(count));
    mui_outfile_write(&to->file, data, bytes);
    return to->file.status;
}

static mu_status write_file(const mui_out_list *l, const char *path, const storage *storages, const size_t *order,
                            size_t n)
{
    sink to = {.list = l};
    mui_pickle_writer w;
    mui_pk_start(&w, l->context);
    w.legacy = true;
    put_pickles(&w, l, storages, n);
    mu_status s = w.failed ? mu_context_status(l->context) : mui_outfile_open(l->context, path, &to.file);
    if (s == MU_OK) {
        mui_outfile_write(&to.file, w.data, w.bytes);
        s = mui_out_each(l, order, n, write_storage, &to);
        if (s == MU_OK) {
            s = mui_outfile_commit(&to.file);
        } else {
            mui_outfile_abandon(&to.file);
        }
    }
    mui_pk_free(&w);
    return s;
}

mu_status mui_out_legacy(const mui_out_list *l, const char *path)
{
    size_t n = 0, *order = mui_calloc(l->context, l->count, sizeof(*order));
    storage *storages = mui_calloc(l->context, l->count, sizeof(*storages));
    mu_status s = order != NULL && storages != NULL ? MU_OK : MU_ERR_NOMEM;
    if (s == MU_OK) {
        sort_storages(l, storages, order, &n);
        s = write_file(l, path, storages, order, n);
    }
    mui_free(l->context, storages);
    mui_free(l->context, order);
    return s;
}
