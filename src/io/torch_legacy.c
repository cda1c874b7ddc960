/* PyTorch's legacy stream: five pickles (magic, version, system, object, keys), then the storages' data in the order
 * of the key list, which is not the order of appearance. */
#include "base/alloc.h"
#include "io/bytes.h"
#include "io/checkpoint_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The pickle at *at, which is moved behind it. */
static mu_status next_pickle(mu_checkpoint_file *k, size_t *at, const char *what, mui_pickle *out)
{
    char place[96]; /* offsets in messages are the pickle's own */
    snprintf(place, sizeof(place), "%s", what);
    if (*at > 0) {
        snprintf(place, sizeof(place), "%s, which begins at byte %zu", what, *at);
    }
    mu_status s = mui_pickle_read_within(k->context, k->path, place, k->map.data + *at, k->map.bytes - *at,
                                         k->limits.pickle_bytes, out);
    if (s == MU_OK) {
        *at += out->used;
    }
    return s;
}

static mu_status read_head(mu_checkpoint_file *k, size_t *at)
{
    mui_pickle p = {0};
    mu_status s = next_pickle(k, at, "the magic number", &p);
    if (s != MU_OK) {
        return s;
    }
    mui_pickle_free(&p);
    s = next_pickle(k, at, "the protocol version", &p);
    if (s != MU_OK) {
        return s;
    }
    bool good = p.value->kind == MUI_INT && p.value->i == 1001;
    long long version = p.value->kind == MUI_INT ? (long long)p.value->i : -1;
    mui_pickle_free(&p);
    if (!good) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: legacy protocol %lld; 1001 was expected", k->path, version);
    }
    s = next_pickle(k, at, "the system description", &p);
    if (s == MU_OK) { /* data are little-endian whatever it says; torch ignores it too */
        mui_pickle_free(&p);
    }
    return s;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const mui_blob *)a)->key, ((const mui_blob *)b)->key);
}

static mu_status list_blobs(mu_checkpoint_file *k)
{
    const mui_value *list = k->keys.value;
    if (list->kind != MUI_LIST) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: the storage keys are a %s, a list was expected", k->path,
                        mui_kind_name(list->kind));
    }
    k->blobs = mui_calloc(k->context, list->seq.count, sizeof(*k->blobs));
    if (k->blobs == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < list->seq.count; i++) {
        const mui_value *key = list->seq.items[i];
        if (key->kind != MUI_STR || memchr(key->text.data, '\0', key->text.bytes) != NULL) {
            return mui_fail(k->context, MU_ERR_FORMAT, "%s: storage key %zu is not a text", k->path, i);
        }
        k->blobs[i].key = mui_arena_strndup(&k->texts, key->text.data, key->text.bytes);
        if (k->blobs[i].key == NULL) {
            return mu_context_status(k->context);
        }
    }
    k->blob_count = list->seq.count;
    if (k->blob_count > 0) {
        qsort(k->blobs, k->blob_count, sizeof(*k->blobs), by_key);
    }
    for (size_t i = 1; i < k->blob_count; i++) {
        if (strcmp(k->blobs[i - 1].key, k->blobs[i].key) == 0) {
            return mui_fail(k->context, MU_ERR_FORMAT, "%s: storage key '%s' is listed twice", k->path, k->blobs[i].key);
        }
    }
    return MU_OK;
}

static mu_status find_data(mu_checkpoint_file *k, size_t at)
{
    const mui_value *list = k->keys.value;
    for (size_t i = 0; i < list->seq.count; i++) {
        mui_blob *b = mui_blob_find(k, list->seq.items[i]->text);
        if (b == NULL) {
            return mui_fail(k->context, MU_ERR_INTERNAL, "%s: storage key %zu was lost", k->path, i);
        }
        if (b->dtype == NULL) {
            return mui_fail(k->context, MU_ERR_FORMAT, "%s: storage '%s' has data, but nothing refers to it", k->path,
                            b->key);
        }
        if (!mui_inside(at, 8, k->map.bytes)) {
            return mui_fail(k->context, MU_ERR_FORMAT,
                            "%s: the file ends early, at byte %zu, before the data of storage '%s' (%zu of %zu)", k->path,
                            k->map.bytes, b->key, i + 1, list->seq.count);
        }
        int64_t count = (int64_t)mui_le64(k->map.data + at);
        if (count != b->elements) {
            return mui_fail(k->context, MU_ERR_FORMAT,
                            "%s: storage '%s' has %lld elements at byte %zu, the pickle says %lld", k->path, b->key,
                            (long long)count, at, (long long)b->elements);
        }
        at += 8;
        if (!mui_inside(at, mui_blob_bytes(b), k->map.bytes)) {
            return mui_fail(k->context, MU_ERR_FORMAT,
                            "%s: the file ends early, at byte %zu: storage '%s' needs %zu bytes from byte %zu", k->path,
                            k->map.bytes, b->key, mui_blob_bytes(b), at);
        }
        b->data = k->map.data + at;
        at += mui_blob_bytes(b);
    }
    k->trailing_bytes = k->map.bytes - at;
    if (at != k->map.bytes) {
        mui_log(k->context, MU_LOG_WARN, "%s: %zu bytes follow the last storage; they are ignored", k->path,
                k->map.bytes - at);
    }
    return MU_OK;
}

mu_status mui_torch_legacy_open(mu_checkpoint_file *k)
{
    size_t at = 0;
    mu_status s = read_head(k, &at);
    if (s == MU_OK) {
        s = next_pickle(k, &at, "the object", &k->pickle);
    }
    if (s == MU_OK) {
        s = next_pickle(k, &at, "the list of storage keys", &k->keys);
    }
    if (s == MU_OK) {
        s = list_blobs(k);
    }
    if (s == MU_OK) {
        s = mui_refs_read(k, true);
    }
    return s == MU_OK ? find_data(k, at) : s;
}
