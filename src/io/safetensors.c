/* Opens a safetensors file: a length, a header of that many bytes of JSON, the data. Every byte of the data belongs to
 * exactly one tensor; that is what tells a whole file from a cut one. */
#include "io/safetensors.h"
#include "base/alloc.h"
#include "io/bytes.h"
#include "io/safetensors_header.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define BAD(k, ...) mui_fail((k)->context, MU_ERR_FORMAT, __VA_ARGS__)

static int by_name(const void *a, const void *b)
{
    return strcmp(((const mui_st_tensor *)a)->name, ((const mui_st_tensor *)b)->name);
}

/* Tensors without elements come before the one that begins where they are. */
static int by_place(const void *a, const void *b)
{
    const mui_st_tensor *x = a, *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    if (x->end != y->end) {
        return x->end < y->end ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

static int by_index(const void *a, const void *b)
{
    const mui_st_tensor *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Mostly they are in order: writers put the header in that of the data. */
static void sort(mui_st_header *h, int (*order)(const void *, const void *))
{
    size_t i = 1;
    while (i < h->count && order(&h->tensors[i - 1], &h->tensors[i]) <= 0) {
        i++;
    }
    if (i < h->count) {
        qsort(h->tensors, h->count, sizeof(*h->tensors), order);
    }
}

static mu_status check_layout(mu_checkpoint_file *k, mui_st_header *h, uint64_t data_at)
{
    uint64_t at = 0, have = k->map.bytes - data_at;
    sort(h, by_place);
    for (size_t i = 0; i < h->count; i++) {
        const mui_st_tensor *x = &h->tensors[i];
        if (x->begin > at) {
            return BAD(k, "%s: tensor '%.200s' begins at byte %" PRIu64 " of the data, %" PRIu64
                          " were expected: the bytes between belong to no tensor",
                       k->path, x->name, x->begin, at);
        }
        if (x->begin < at) {
            return BAD(k, "%s: tensor '%.200s' begins at byte %" PRIu64 " of the data, inside tensor '%.200s', which ends at "
                          "%" PRIu64,
                       k->path, x->name, x->begin, h->tensors[i - 1].name, at);
        }
        at = x->end;
    }
    if (at > have) {
        return BAD(k, "%s: the file ends early: it is %zu bytes, its header describes %" PRIu64
                      " (a download that was cut off?)",
                   k->path, k->map.bytes, data_at + at);
    }
    if (at < have) {
        return BAD(k, "%s: the file is %zu bytes, its header describes %" PRIu64 ": %" PRIu64
                      " bytes at the end belong to no tensor",
                   k->path, k->map.bytes, data_at + at, have - at);
    }
    return MU_OK;
}

static mu_status check_names(mu_checkpoint_file *k, mui_st_header *h)
{
    sort(h, by_name);
    for (size_t i = 1; i < h->count; i++) {
        if (strcmp(h->tensors[i - 1].name, h->tensors[i].name) == 0) {
            return BAD(k, "%s: the header describes tensor '%.200s' twice", k->path, h->tensors[i].name);
        }
    }
    return MU_OK;
}

/* Of tied weights only one name is stored, and __metadata__ says under which the others are: {"dropped": "kept"}. */
static mu_status add_tied(mu_checkpoint_file *k, mui_st_header *h)
{
    if (h->pair_count == 0 || h->count == 0) {
        return MU_OK;
    }
    sort(h, by_name);
    for (size_t i = 0; i < h->pair_count; i++) {
        mui_st_tensor dropped = {.name = h->pairs[i].key}, wanted = {.name = h->pairs[i].value};
        const mui_st_tensor *kept = bsearch(&wanted, h->tensors, h->count, sizeof(wanted), by_name);
        if (kept == NULL || strcmp(dropped.name, "format") == 0 || strlen(dropped.name) > MUI_MAX_NAME_BYTES ||
            bsearch(&dropped, h->tensors, h->count, sizeof(dropped), by_name) != NULL) {
            continue;
        }
        char *name = mui_arena_strdup(&k->tree.arena, dropped.name);
        mu_status s = name != NULL ? mui_tree_add(&k->tree, name, kept->tensor) : mu_context_status(k->context);
        if (s != MU_OK) {
            return s;
        }
    }
    return MU_OK;
}

static mu_status add_tensors(mu_checkpoint_file *k, mui_st_header *h, const unsigned char *data)
{
    sort(h, by_index);
    k->blobs = mui_calloc(k->context, h->count, sizeof(*k->blobs));
    k->refs = mui_calloc(k->context, h->count, sizeof(*k->refs));
    if (k->blobs == NULL || k->refs == NULL) {
        return MU_ERR_NOMEM;
    }
    k->blob_count = h->count;
    for (size_t i = 0; i < h->count; i++) {
        const mui_st_tensor *x = &h->tensors[i];
        k->blobs[i] = (mui_blob){.key = x->name, .dtype = x->tensor->dtype, .elements = x->elements, .data = data + x->begin};
        k->refs[i] = (mui_storage_ref){.blob = &k->blobs[i],
                                       .dtype = x->tensor->dtype,
                                       .elements = x->elements,
                                       .place = ""};
        x->tensor->storage = &k->refs[i];
        mu_status s = mui_tree_add(&k->tree, x->name, x->tensor);
        if (s != MU_OK) {
            return s;
        }
    }
    return MU_OK;
}

mu_status mui_safetensors_open(mu_checkpoint_file *k)
{
    if (k->map.bytes < 8) {
        return BAD(k, "%s: the file is %zu bytes, a safetensors file has 8 at least", k->path, k->map.bytes);
    }
    uint64_t n = mui_le64(k->map.data);
    if (n > k->limits.header_bytes) {
        return mui_fail(k->context, MU_ERR_LIMIT,
                        "%s: a safetensors header of %" PRIu64 " bytes, more than the limit of %" PRIu64, k->path, n,
                        k->limits.header_bytes);
    }
    if (n > k->map.bytes - 8) {
        return BAD(k, "%s: the file ends early: it is %zu bytes, its header alone needs %" PRIu64
                      " (a download that was cut off?)",
                   k->path, k->map.bytes, n + 8);
    }
    mui_tree_init(&k->tree, k->context);
    mui_st_header h;
    mu_status s = mui_st_header_read(k->context, k->path, (const char *)k->map.data + 8, (size_t)n, &k->tree.arena, &h);
    s = s == MU_OK ? check_names(k, &h) : s;
    s = s == MU_OK ? check_layout(k, &h, 8 + n) : s;
    s = s == MU_OK ? add_tensors(k, &h, k->map.data + 8 + n) : s;
    s = s == MU_OK ? add_tied(k, &h) : s;
    mui_st_header_free(&h);
    return s == MU_OK ? mui_tree_finish(&k->tree) : s;
}
