/* A checkpoint in several files with an index: {"metadata": {...}, "weight_map": {"tensor": "file"}}, as transformers
 * writes it beside its shards: model.safetensors.index.json, pytorch_model.bin.index.json. */
#ifndef MUI_SHARDED_H
#define MUI_SHARDED_H

#include "io/checkpoint_file.h"

/* Opens all shards, which may be of any format, and fills tree, shards and format. k has context, path, map, limits.
 * Cleaning up is the caller's. */
mu_status mui_sharded_open(mu_checkpoint_file *k) MU_MUST_USE;
/* The globals of all shards, as mui_globals_list of one file. */
mu_status mui_sharded_globals(mu_checkpoint_file *k) MU_MUST_USE;

#endif
