/* What a training checkpoint says beside the model: the optimiser's state, staged, and the numbers. */
#ifndef MUI_TRAINING_STATE_H
#define MUI_TRAINING_STATE_H

#include "io/checkpoint_file.h"
#include "io/snapshot.h"
#include <muster/group.h>

typedef struct mui_training_numbers {
    int64_t epoch, step_in_epoch, step, samples_in_epoch, optimizer_steps;
    uint64_t seed;
    bool has_note;
} mui_training_numbers;

typedef struct mui_training_progress {
    int64_t has_state, step; /* int64_t both: they travel as they are */
} mui_training_progress;

/* floats holds the state tensors of parameter 0, then 1, ...; progress one entry for each parameter, settings one for
 * each group. */
typedef struct mui_training_state {
    mu_context *context;
    mu_optimizer *optimizer;   /* NULL: none is loaded */
    const char *optimizer_key; /* as in mu_training_options */
    bool file_settings;
    int64_t parameters, floats_count;
    int groups, states;        /* states: tensors of each parameter in floats */
    mui_training_progress *progress;
    mui_settings *settings;
    float *floats;
    int64_t *offsets;          /* in floats, of each parameter's part */
    mui_training_numbers numbers;
    char *note;
} mui_training_state;

/* Room for the optimiser's state. All ranks, with equal options. */
mu_status mui_training_state_open(mu_context *c, mu_optimizer *o, const char *optimizer_key, bool file_settings,
                                  mui_training_state *out) MU_MUST_USE;
void mui_training_state_close(mui_training_state *s);
/* The reader: fills numbers from beside the optimiser's state. They start as what stays when the file tells nothing. */
mu_status mui_training_numbers_read(mui_training_state *s, mu_checkpoint_file *k) MU_MUST_USE;
/* The reader: fills progress, settings and floats, checking kinds, counts and shapes. order: the optimiser's parameters
 * in the order of the file's model; NULL: not known. */
mu_status mui_optim_state_read(mui_training_state *s, mu_checkpoint_file *k, const int64_t *order) MU_MUST_USE;
/* All ranks: what the reader has reaches the others. Ends with equal outcomes. */
mu_status mui_training_state_share(mui_training_state *s, mu_group *g) MU_MUST_USE;
/* Writes into the optimiser; the caller restores its snapshot on failure. */
mu_status mui_training_state_apply(const mui_training_state *s) MU_MUST_USE;

#endif
