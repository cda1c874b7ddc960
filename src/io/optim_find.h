/* Where in a file an optimiser's state_dict is: told by what it holds, since every program has another name for it. */
#ifndef MUI_OPTIM_FIND_H
#define MUI_OPTIM_FIND_H

#include "io/checkpoint_file.h"

/* key: its path, as the error that lists several shows it; NULL: the only one. */
mu_status mui_optim_find(mu_checkpoint_file *k, const char *key, const mui_value **out) MU_MUST_USE;

#endif
