/* An open checkpoint, as the loaders see it: mu_checkpoint_file with its tree. */
#ifndef MUI_CHECKPOINT_FILE_H
#define MUI_CHECKPOINT_FILE_H

#include "base/context.h"
#include "io/filemap.h"
#include "io/limits.h"
#include "io/tree.h"
#include "io/zip_reader.h"
#include <muster/checkpoint.h>

typedef enum mui_file_format {
    MUI_FILE_TORCH_ZIP = 0,
    MUI_FILE_TORCHSCRIPT,
    MUI_FILE_TORCH_LEGACY,
    MUI_FILE_SAFETENSORS,
    MUI_FILE_SHARDED_SAFETENSORS, /* from mui_sniff: an index, whatever its shards are */
    MUI_FILE_SHARDED_TORCH
} mui_file_format;

struct mu_checkpoint_file {
    mu_context *context;
    char *path;
    mui_limits limits;
    mui_filemap map;
    mui_file_format format;
    bool big_endian;
    size_t trailing_bytes;   /* after the format's end */
    mui_zip zip;             /* torch zip and TorchScript */
    void *pickle_bytes;      /* inflated data.pkl; NULL: borrowed from the map */
    mui_pickle pickle;       /* its value is NULL in formats without one: safetensors */
    mui_pickle keys;         /* legacy: the list of storage keys */
    mui_blob *blobs;         /* sorted by key when there is a pickle */
    size_t blob_count;
    mui_storage_ref *refs;
    struct mu_checkpoint_file **shards; /* of an index; owned */
    size_t shard_count;
    bool is_shard;
    mui_tree tree;
    const char **globals;    /* those that run code, NULL-terminated */
    const char **all_globals;
    mui_arena texts;         /* of globals and names */
    mui_arena scales;        /* of quantised tensors */
    uint64_t scales_read;    /* how many so far */
    mu_state_dict *dicts;    /* candidates, in file order */
    size_t dict_count;
    const mui_blob *inflated_blob; /* the one blob kept inflated */
    void *inflated;
};

/* What a file is, from its bytes alone: MU_OK for what can be read, else MU_ERR_FORMAT or MU_ERR_UNSUPPORTED raised with
 * one line that helps. */
mu_status mui_sniff(mu_context *c, const char *path, const unsigned char *data, size_t bytes,
                    mui_file_format *out) MU_MUST_USE;

/* A file that an index names, which must not be an index. Not owned by the context; NULL with an error. */
mu_checkpoint_file *mui_checkpoint_open_shard(mu_context *c, const char *path, const mui_limits *limits);

/* Fill pickle, blobs and refs. k has context, path, map, format. Cleaning up is the caller's. */
mu_status mui_torch_zip_open(mu_checkpoint_file *k) MU_MUST_USE;
mu_status mui_torch_legacy_open(mu_checkpoint_file *k) MU_MUST_USE;
/* Reads all persistent ids of k->pickle into k->refs; blobs are there and sorted. */
mu_status mui_refs_read(mu_checkpoint_file *k, bool legacy) MU_MUST_USE;

/* Entry i; NULL with MU_ERR_ARG when there is none. */
const mui_entry *mui_entry_at(mu_checkpoint_file *k, int64_t i);
/* By key; NULL when there is none. */
mui_blob *mui_blob_find(const mu_checkpoint_file *k, mui_slice key);
/* Bytes a blob must have, or has. */
size_t mui_blob_bytes(const mui_blob *b);

/* Row-major elements of a tensor in the type it has in the file; bytes as mu_checkpoint_read. */
mu_status mui_tensor_bytes(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, size_t *bytes) MU_MUST_USE;
mu_status mui_tensor_load(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, void *out) MU_MUST_USE;
/* Frees the storage that is kept inflated, if there is one. */
void mui_checkpoint_drop_inflated(mu_checkpoint_file *k);

/* Fills globals and all_globals, each name once, sorted. */
mu_status mui_globals_list(mu_checkpoint_file *k) MU_MUST_USE;

#endif
