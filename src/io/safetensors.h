/* The safetensors format: reading. */
#ifndef MUI_SAFETENSORS_H
#define MUI_SAFETENSORS_H

#include "io/checkpoint_file.h"

/* Fills tree, blobs and refs. k has context, path, map, limits. Cleaning up is the caller's. */
mu_status mui_safetensors_open(mu_checkpoint_file *k) MU_MUST_USE;

#endif
