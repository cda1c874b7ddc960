/* The candidates for "the state dict" of a file: what a user means who names no key. */
#ifndef MUI_STATE_DICTS_H
#define MUI_STATE_DICTS_H

#include "io/checkpoint_file.h"

/* Fills k->dicts; the tree is there. */
mu_status mui_state_dicts_list(mu_checkpoint_file *k) MU_MUST_USE;

#endif
