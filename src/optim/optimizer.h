/* The optimiser as io sees it: hyperparameters, and state parameter by parameter, for reading and writing training
 * checkpoints in PyTorch's form. Knows nothing of files. */
#ifndef MUI_OPTIMIZER_H
#define MUI_OPTIMIZER_H

#include "tape/store.h"
#include <muster/optim.h>

typedef enum mui_optimizer_kind { MUI_OPTIMIZER_SGD, MUI_OPTIMIZER_ADAM, MUI_OPTIMIZER_ADAMW } mui_optimizer_kind;

/* Of one parameter group, as they are used: lr includes the group's factor. */
typedef struct mui_optimizer_group {
    const char *pattern; /* NULL for group 0, the parameters that no pattern matches; the optimiser's */
    float lr, weight_decay;
    float momentum, dampening; /* SGD */
    bool nesterov;
    float beta1, beta2, eps; /* Adam, AdamW */
} mui_optimizer_group;

/* Progress of one parameter. */
typedef struct mui_optimizer_entry {
    mu_parameter *parameter; /* frozen ones are listed too: PyTorch numbers all of model.parameters() */
    int group;
    bool has_state;          /* it got a gradient before: its state means something */
    int64_t step;            /* updates of this parameter so far (Adam's "step") */
} mui_optimizer_entry;

mui_optimizer_kind mui_optimizer_kind_of(const mu_optimizer *o);
mu_context *mui_optimizer_context(const mu_optimizer *o);
int mui_optimizer_groups(const mu_optimizer *o); /* at least 1 */
mui_optimizer_group mui_optimizer_get_group(const mu_optimizer *o, int group);

/* Follows the tree and says how many parameters there are, in registration order; -1 on failure. Call it first; the
 * indices below are valid until the tree changes. */
int64_t mui_optimizer_count(mu_optimizer *o);
mui_optimizer_entry mui_optimizer_get(mu_optimizer *o, int64_t i);

/* State tensors of each parameter: "momentum_buffer" (SGD with momentum), or "exp_avg" and "exp_avg_sq". */
int mui_optimizer_states(const mu_optimizer *o);
const char *mui_optimizer_state_name(const mu_optimizer *o, int state);
/* Row-major float32, elements = those of the parameter. */
mu_status mui_optimizer_read_state(mu_optimizer *o, int64_t i, int state, float *out, int64_t elements) MU_MUST_USE;
mu_status mui_optimizer_write_state(mu_optimizer *o, int64_t i, int state, const float *in,
                                    int64_t elements) MU_MUST_USE;
/* has_state false: as never updated, state is zeroed. */
void mui_optimizer_set_progress(mu_optimizer *o, int64_t i, bool has_state, int64_t step);
/* Steps of the optimiser as a whole, mu_optimizer_steps. */
void mui_optimizer_set_steps(mu_optimizer *o, int64_t steps);

#endif
