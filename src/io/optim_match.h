/* Which parameter of an optimiser's state_dict is which of ours. */
#ifndef MUI_OPTIM_MATCH_H
#define MUI_OPTIM_MATCH_H

#include "io/checkpoint_file.h"
#include "optim/optimizer.h"

typedef struct mui_optim_match {
    const mui_value **states;  /* of our parameter i; NULL: it has none in the file */
    const mui_value **groups;  /* of our group g; NULL: it has no parameters */
} mui_optim_match;

/* order: our parameters' indices in the order in which the file's model has them, NULL: not known. out's arrays are
 * the caller's, of all parameters and groups, and start as NULLs. */
mu_status mui_optim_match_find(mu_checkpoint_file *k, mu_optimizer *o, const mui_value *dict, const int64_t *order,
                               const mui_optim_match *out) MU_MUST_USE;

#endif
