/* What a param_group of torch.optim says beside its parameters: which optimiser it is of, and its settings. */
#ifndef MUI_OPTIM_SETTINGS_H
#define MUI_OPTIM_SETTINGS_H

#include "io/checkpoint_file.h"
#include "optim/optimizer.h"

/* A number: int, float, bool or a tensor of one element (learning rates may be). *found false: v is none. */
mu_status mui_optim_number(mu_checkpoint_file *k, const mui_value *v, double *out, bool *found) MU_MUST_USE;

/* That the group is of an optimiser of this kind, and does nothing that Muster's does not do. named: what the file says
 * beside it ("AdamW"), or NULL. */
mu_status mui_optim_check_kind(mu_checkpoint_file *k, const mui_value *group, const mui_value *named,
                               mui_optimizer_kind ours) MU_MUST_USE;

/* ours becomes what the group goes on with: its learning rate, and with `take` all else, too; without, a warning names
 * what differs. */
mu_status mui_optim_read_settings(mu_checkpoint_file *k, const mui_value *group, mui_optimizer_kind kind, bool take,
                                  mui_settings *ours) MU_MUST_USE;
/* The file's base rate of a group for schedulers ("initial_lr"); 0: not told. */
mu_status mui_optim_initial_lr(mu_checkpoint_file *k, const mui_value *group, double *out) MU_MUST_USE;

#endif
