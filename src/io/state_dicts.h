/* The candidates for "the state dict" of a file: what a user means who names no key. */
#ifndef MUI_STATE_DICTS_H
#define MUI_STATE_DICTS_H

#include "io/checkpoint_file.h"

/* Fills k->dicts and the entries' plain names; the tree is there. */
mu_status mui_state_dicts_list(mu_checkpoint_file *k) MU_MUST_USE;
/* A branch's path without classes, as mu_checkpoint_name_in takes it; NULL: out of memory. */
const char *mui_state_dict_path(mu_checkpoint_file *k, const char *path);

#endif
