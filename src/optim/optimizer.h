/* The optimiser as io sees it: hyperparameters, and state parameter by parameter, for reading and writing training
 * checkpoints in PyTorch's form. Knows nothing of files. */
#ifndef MUI_OPTIMIZER_H
#define MUI_OPTIMIZER_H

#include "tape/store.h"
#include <muster/optim.h>

typedef enum mui_optimizer_kind { MUI_OPTIMIZER_SGD, MUI_OPTIMIZER_ADAM, MUI_OPTIMIZER_ADAMW } mui_optimizer_kind;

/* Of one parameter group, as they are used: lr includes the group's factor. Doubles, as PyTorch's are: those of the
 * options are what their shortest decimal form says (0.999f is 0.999), those of a file what the file says. */
typedef struct mui_settings {
    double lr, lr_factor;       /* lr_factor: what mu_optimizer_set_lr multiplies by for this group */
    double weight_decay;
    double momentum, dampening; /* SGD */
    double beta1, beta2, eps;   /* Adam, AdamW */
    bool nesterov;
} mui_settings;

/* Progress of one parameter. */
typedef struct mui_optimizer_entry {
    mu_parameter *parameter; /* frozen ones are listed too: PyTorch numbers all of model.parameters() */
    int group;
    bool has_state;          /* it got a gradient before: its state means something */
    int64_t step;            /* updates of this parameter so far (Adam's "step") */
} mui_optimizer_entry;

mui_optimizer_kind mui_optimizer_kind_of(const mu_optimizer *o);
const char *mui_optimizer_kind_name(mui_optimizer_kind kind); /* "AdamW", as PyTorch has it */
mu_context *mui_optimizer_context(const mu_optimizer *o);
int mui_optimizer_groups(const mu_optimizer *o); /* at least 1 */
mui_settings mui_optimizer_get_settings(const mu_optimizer *o, int group);
/* Takes over settings that are in order (mui_settings_problem is NULL). With a first momentum, state is made. */
mu_status mui_optimizer_set_settings(mu_optimizer *o, int group, const mui_settings *s) MU_MUST_USE;
/* Puts back settings that the optimiser had before, of all groups. Cannot fail. */
void mui_optimizer_restore_settings(mu_optimizer *o, const mui_settings *all);
/* What is wrong with them, for a message; NULL: nothing. */
const char *mui_settings_problem(mui_optimizer_kind kind, const mui_settings *s);

/* Follows the tree and says how many parameters there are, in registration order; -1 on failure. Call it first; the
 * indices below are valid until the tree changes. */
int64_t mui_optimizer_count(mu_optimizer *o);
mui_store *mui_optimizer_store(mu_optimizer *o); /* up to date; NULL on failure */
mui_optimizer_entry mui_optimizer_get(mu_optimizer *o, int64_t i);

/* State tensors of each parameter: "momentum_buffer" (SGD with momentum), or "exp_avg" and "exp_avg_sq". */
int mui_optimizer_states(const mu_optimizer *o);
const char *mui_optimizer_state_name(const mu_optimizer *o, int state);
/* Row-major float32, elements = those of the parameter. Where state is shared, reading is collective, and each rank
 * writes its part of what it is given. */
mu_status mui_optimizer_read_state(mu_optimizer *o, int64_t i, int state, float *out, int64_t elements) MU_MUST_USE;
mu_status mui_optimizer_write_state(mu_optimizer *o, int64_t i, int state, const float *in,
                                    int64_t elements) MU_MUST_USE;
/* has_state false: as never updated, state is zeroed. */
void mui_optimizer_set_progress(mu_optimizer *o, int64_t i, bool has_state, int64_t step);
/* Of state that ranks share; without, they cost nothing, and each returns `mine`. Collective.
 * settle: all ranks are at `what`, and state is where it belongs; else the same outcome on all. */
mu_status mui_optimizer_settle(mu_optimizer *o, const char *what, mu_status mine) MU_MUST_USE;
mu_status mui_optimizer_agree(mu_optimizer *o, mu_status mine) MU_MUST_USE;
bool mui_optimizer_writes(const mu_optimizer *o); /* this rank writes files for all */
float *mui_optimizer_own_state(const mu_optimizer *o, int state, size_t *floats); /* its part; NULL: none */
/* Steps of the optimiser as a whole, mu_optimizer_steps. */
void mui_optimizer_set_steps(mu_optimizer *o, int64_t steps);

#endif
