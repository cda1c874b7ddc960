/* The optimiser's struct, for the files of this floor. */
#ifndef MUI_OPTIMIZER_IMPL_H
#define MUI_OPTIMIZER_IMPL_H

#include "optim/optimizer.h"

#define MUI_OPTIMIZER_MAX_STATES 2

typedef struct mui_shard mui_shard;

typedef struct mui_group_setting {
    char *pattern;     /* NULL: the default group */
    mui_settings settings;
} mui_group_setting;

/* What the optimiser remembers of a parameter. Kept by identity over changes of the tree. */
typedef struct mui_progress {
    uint64_t id;
    int64_t step;       /* updates so far */
    int group;
    bool has_state;     /* the state slabs mean something */
    bool ours;          /* in the module the optimiser was made for */
} mui_progress;

struct mu_optimizer {
    mu_context *context;
    mui_source *source;
    mui_optimizer_kind kind;
    mui_group_setting *groups; /* at least the default one */
    size_t group_count, group_capacity;
    mui_slab *slabs[MUI_OPTIMIZER_MAX_STATES]; /* NULL where state is shared */
    mui_shard *shard;          /* NULL: it is not */
    const mui_store *store;    /* that progress is about; only compared */
    uint64_t store_version, store_hash;
    mui_progress *progress;    /* by index in the store */
    int64_t count, ours_count;
    int64_t *ours;             /* store indices of our parameters, in registration order */
    int64_t steps;
    bool keep_grad;
    bool counted;              /* in the store's `stepping` */
    bool warned_unreduced;     /* said once */
};

/* Which gradients of a store count for a norm. */
typedef bool (*mui_counts_fn)(mui_source *source, const mu_parameter *p);
/* shard_norm.c. Collective: adds the squares of gradients that ranks have in parts; bad: the first that is not finite. */
mu_status mui_shard_squares(mui_store *s, mui_counts_fn counts, mui_source *source, double *squares,
                            const mu_parameter **bad) MU_MUST_USE;

/* Float `at` of a state, of this rank's part where it is shared; NULL: there is no such state. */
float *mui_optimizer_state_at(const mu_optimizer *o, int state, size_t at);

/* The up-to-date store, with progress and slabs in step with it. NULL on failure. */
mui_store *mui_optimizer_follow(mu_optimizer *o);

#endif
