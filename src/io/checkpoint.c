/* Opening any checkpoint, and the questions one can ask it. */
#include "base/alloc.h"
#include "io/directory.h"
#include "io/file_elements.h"
#include "io/safetensors.h"
#include "io/sharded.h"
#include "io/state_dicts.h"

#include <stdlib.h>
#include <string.h>

size_t mui_blob_bytes(const mui_blob *b)
{
    return (size_t)b->elements * b->dtype->bytes; /* elements were held to INT64_MAX / 16 */
}

mui_blob *mui_blob_find(const mu_checkpoint_file *k, mui_slice key)
{
    size_t low = 0, high = k->blob_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const char *have = k->blobs[middle].key;
        int order = mui_slice_compare((mui_slice){have, strlen(have)}, key);
        if (order == 0) {
            return &k->blobs[middle];
        }
        low = order < 0 ? middle + 1 : low;
        high = order < 0 ? high : middle;
    }
    return NULL;
}

static mui_blob *find_blob(void *user, mui_slice key)
{
    return mui_blob_find(user, key);
}

/* The location as a C string. Most references name the same bytes of the pickle, and then share one text; a long one is
 * cut, since many may share it. */
static mu_status set_place(mu_checkpoint_file *k, mui_storage_ref *r, const mui_storage_ref *before)
{
    if (before != NULL && before->location.data == r->location.data && before->location.bytes == r->location.bytes) {
        r->place = before->place;
        return MU_OK;
    }
    size_t n = r->location.bytes < MUI_MAX_PLACE_BYTES ? r->location.bytes : MUI_MAX_PLACE_BYTES;
    r->place = mui_arena_strndup(&k->texts, r->location.data, n);
    return r->place != NULL ? MU_OK : mu_context_status(k->context);
}

mu_status mui_refs_read(mu_checkpoint_file *k, bool legacy)
{
    size_t n = k->pickle.persistent_count;
    k->refs = mui_calloc(k->context, n, sizeof(*k->refs));
    if (k->refs == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        mu_status s = mui_storage_ref_read(k->context, k->path, k->pickle.persistent[i]->id, legacy, find_blob, k,
                                           &k->refs[i]);
        if (s == MU_OK) {
            s = set_place(k, &k->refs[i], i > 0 ? &k->refs[i - 1] : NULL);
        }
        if (s != MU_OK) {
            return s;
        }
    }
    return MU_OK;
}

static void destroy(void *object)
{
    mu_checkpoint_file *k = object;
    mu_context *c = k->context;
    mui_free(c, k->inflated);
    for (size_t i = 0; i < k->blob_count; i++) {
        mui_free(c, k->blobs[i].inflated);
    }
    mui_free(c, k->dicts);
    mui_free(c, k->all_globals);
    mui_free(c, k->globals);
    for (size_t i = 0; i < k->shard_count; i++) {
        destroy(k->shards[i]);
    }
    mui_free(c, k->shards);
    mui_tree_free(&k->tree);
    mui_free(c, k->refs);
    mui_free(c, k->blobs);
    mui_pickle_free(&k->keys);
    mui_pickle_free(&k->pickle);
    mui_free(c, k->pickle_bytes);
    mui_arena_free(&k->scales);
    mui_arena_free(&k->texts);
    mui_zip_close(&k->zip);
    mui_filemap_close(&k->map);
    mui_free(c, k->path);
    mui_free(c, k);
}

static mu_status open_format(mu_checkpoint_file *k)
{
    switch (k->format) {
    case MUI_FILE_SAFETENSORS: return mui_safetensors_open(k);
    case MUI_FILE_TORCH_LEGACY: return mui_torch_legacy_open(k);
    case MUI_FILE_SHARDED_SAFETENSORS:
    case MUI_FILE_SHARDED_TORCH:
        return !k->is_shard ? mui_sharded_open(k)
                            : mui_fail(k->context, MU_ERR_FORMAT, "%s: an index, where a shard of one was expected", k->path);
    default: return mui_torch_zip_open(k);
    }
}

static mu_status fill(mu_checkpoint_file *k)
{
    mu_status s = mui_refuse_directory(k->context, k->path);
    if (s == MU_OK) {
        s = mui_filemap_open(k->context, k->path, &k->map);
    }
    if (s == MU_OK) {
        s = mui_sniff(k->context, k->path, k->map.data, k->map.bytes, &k->format);
    }
    if (s == MU_OK) {
        s = open_format(k);
    }
    if (s == MU_OK && k->pickle.value != NULL) {
        mui_meaning meaning = {.context = k->context, .path = k->path, .refs = k->refs};
        s = mui_tree_build(&meaning, k->pickle.value, k->pickle.used, &k->tree);
    }
    if (s == MU_OK) {
        k->texts.limit_bytes = mui_limits_texts(k->pickle.used);
        s = k->shards != NULL ? mui_sharded_globals(k) : mui_globals_list(k);
    }
    return s == MU_OK ? mui_state_dicts_list(k) : s;
}

static mu_checkpoint_file *open_file(mu_context *c, const char *path, const mui_limits *limits, bool is_shard)
{
    mu_checkpoint_file *k = mui_calloc(c, 1, sizeof(*k));
    if (k == NULL) {
        return NULL;
    }
    k->context = c;
    k->limits = *limits;
    k->is_shard = is_shard;
    mui_arena_init(&k->texts, c);
    mui_arena_init(&k->scales, c);
    k->path = mui_strdup(c, path);
    if (k->path == NULL || fill(k) != MU_OK) {
        destroy(k);
        return NULL;
    }
    return k;
}

mu_checkpoint_file *mui_checkpoint_open_shard(mu_context *c, const char *path, const mui_limits *limits)
{
    return open_file(c, path, limits, true);
}

mu_checkpoint_file *mu_checkpoint_open(mu_context *c, const char *path)
{
    return mu_checkpoint_open_with(c, path, NULL);
}

mu_checkpoint_file *mu_checkpoint_open_with(mu_context *c, const char *path, const mu_checkpoint_options *options)
{
    mui_limits limits;
    if (mui_failed(c)) {
        return NULL;
    }
    if (path == NULL || path[0] == '\0') {
        mui_fail(c, MU_ERR_ARG, "mu_checkpoint_open: no path");
        return NULL;
    }
    if (mui_limits_read(c, options, &limits) != MU_OK) {
        return NULL;
    }
    mu_checkpoint_file *k = open_file(c, path, &limits, false);
    return k != NULL && mui_context_own(c, k, destroy, MUI_OWN_DEFAULT) == MU_OK ? k : NULL;
}

void mu_checkpoint_close(mu_checkpoint_file *k)
{
    if (k != NULL) {
        mui_context_disown(k->context, k);
        destroy(k);
    }
}

const char *mu_checkpoint_format(const mu_checkpoint_file *k)
{
    static const char *const names[] = {"torch zip", "torchscript", "torch legacy", "safetensors",
                                        "sharded safetensors", "sharded torch"};
    return k != NULL ? names[k->format] : "";
}

int64_t mu_checkpoint_count(const mu_checkpoint_file *k)
{
    return k != NULL ? (int64_t)k->tree.count : 0;
}

mu_checkpoint_entry mu_checkpoint_get(const mu_checkpoint_file *k, int64_t i)
{
    mu_checkpoint_entry e = {.name = "", .dtype_name = "", .location = ""};
    if (k == NULL || i < 0 || (uint64_t)i >= k->tree.count) {
        return e;
    }
    const mui_entry *from = &k->tree.entries[i];
    const mui_file_tensor *t = from->tensor;
    e.name = from->name;
    e.dtype = t->dtype != NULL ? t->dtype->carrier : MU_F32;
    e.dtype_name = t->dtype != NULL ? t->dtype->name : "unknown";
    e.tied_to = from->tied_to != SIZE_MAX ? k->tree.entries[from->tied_to].name : NULL;
    e.note = t->note;
    e.location = t->storage != NULL ? t->storage->place : "";
    e.is_array = t->array;
    e.is_storage = t->bare_storage;
    e.is_parameter = from->role == MUI_PARAMETER;
    e.is_buffer = from->role == MUI_BUFFER;
    e.requires_grad = from->requires_grad;
    if (t->ndim > MU_MAX_DIMS) {
        e.note = "of more dimensions than Muster has";
        return e;
    }
    e.dims.ndim = t->ndim;
    memcpy(e.dims.dim, t->dim, (size_t)t->ndim * sizeof(t->dim[0]));
    return e;
}

const mui_entry *mui_entry_at(mu_checkpoint_file *k, int64_t i)
{
    if (i < 0 || (uint64_t)i >= k->tree.count) {
        mui_fail(k->context, MU_ERR_ARG, "%s: entry %lld of %zu", k->path, (long long)i, k->tree.count);
        return NULL;
    }
    return &k->tree.entries[i];
}

mu_status mu_checkpoint_read(mu_checkpoint_file *k, int64_t i, void *out, size_t bytes)
{
    if (k == NULL) {
        return MU_ERR_ARG;
    }
    const mui_entry *e = mui_entry_at(k, i);
    if (e == NULL) {
        return MU_ERR_ARG;
    }
    size_t need = 0;
    mu_status s = mui_tensor_bytes(k, e->name, e->tensor, &need);
    if (s != MU_OK) {
        return s;
    }
    if (bytes != need) {
        return mui_fail(k->context, MU_ERR_ARG, "%s: '%s' has %zu bytes, room for %zu was given", k->path, e->name, need,
                        bytes);
    }
    return out != NULL ? mui_tensor_load(k, e->name, e->tensor, out) : MU_OK;
}

const void *mu_checkpoint_data(mu_checkpoint_file *k, int64_t i)
{
    mui_elements x = {0};
    if (k == NULL || mui_failed(k->context)) {
        return NULL;
    }
    const mui_entry *e = mui_entry_at(k, i);
    if (e == NULL) {
        return NULL;
    }
    if (mui_elements_open(k, e->name, e->tensor, &x) != MU_OK || !x.mapped || !x.direct) {
        return NULL;
    }
    size_t width = e->tensor->dtype->swap; /* of one number */
    return width <= 1 || (uintptr_t)x.first % width == 0 ? x.first : NULL;
}

const char *const *mu_checkpoint_globals(const mu_checkpoint_file *k)
{
    static const char *const none[1] = {NULL};
    return k != NULL && k->globals != NULL ? k->globals : none;
}

const char *const *mu_checkpoint_all_globals(const mu_checkpoint_file *k)
{
    static const char *const none[1] = {NULL};
    return k != NULL && k->all_globals != NULL ? k->all_globals : none;
}
