/* What batch normalisation and its synchronised form share. */
#ifndef MUI_OPS_NORM_H
#define MUI_OPS_NORM_H

#include "tape/op_rows.h"

typedef struct mui_norm_args {
    mu_tensor *x, *weight, *bias, *running_mean, *running_var;
} mui_norm_args;

/* Raises what is wrong with the arguments of op. x may be bfloat16 where the tape has that. alone: this rank's values are
 * all there are. */
bool mui_norm_bad(mu_tape *t, const char *op, mui_norm_args *a, const mu_batch_norm_options *o, bool alone);
mui_norm_shape mui_norm_shape_of(const mu_tensor *x, const mu_batch_norm_options *o);
/* Moves running statistics by those of a batch with `count` values per channel; var is biased. */
void mui_norm_update_running(mu_tape *t, mu_tensor *running_mean, mu_tensor *running_var, const float *mean, const float *var,
                             int64_t c, int64_t count, float momentum);
/* Gradients of weight and bias (inputs 1 and 2 of n): `both` holds c of each, this rank's own. */
mu_status mui_norm_settle_affine(mui_backward *b, mui_node *n, int64_t c, const float *both) MU_MUST_USE;

#endif
