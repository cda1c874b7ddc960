/* What a load may change, kept so that a failure half way leaves everything bit for bit as it was. Restoring copies
 * memory only and cannot fail. */
#ifndef MUI_SNAPSHOT_H
#define MUI_SNAPSHOT_H

#include "io/state_list.h"
#include "optim/optimizer.h"

typedef struct mui_snapshot {
    mu_context *context;
    const mui_states *states;
    const bool *which;
    mui_store *store;        /* whose state slabs are kept; NULL: no optimiser */
    mu_optimizer *optimizer;
    char *values;            /* of each state that is kept, in order */
    float *slabs;            /* then, of state that ranks share, this rank's part */
    size_t own_floats[2];    /* of that */
    mui_optimizer_entry *progress;
    int64_t parameters;
    mui_settings *settings;  /* of each group */
    size_t slab_count;
    int groups;
    int64_t steps;
} mui_snapshot;

/* Of the states, which may be none, those with which[i], true at most where same_as is i; which must live as long as the
 * snapshot. optimizer may be NULL. On error nothing is left to free. */
mu_status mui_snapshot_take(const mui_states *states, const bool *which, mu_optimizer *optimizer,
                            mui_snapshot *out) MU_MUST_USE;
void mui_snapshot_restore(mui_snapshot *s);
void mui_snapshot_free(mui_snapshot *s);

#endif
