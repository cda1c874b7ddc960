/* A load in steps: plan (find, compare, judge), stage (read and convert everything), apply. Until apply nothing of the
 * model is touched. Over a group rank 0 plans and stages, the others receive. */
#ifndef MUI_LOAD_PLAN_H
#define MUI_LOAD_PLAN_H

#include "base/text.h"
#include "io/load_match.h"
#include "io/snapshot.h"
#include <muster/checkpoint.h>

typedef struct mui_plan_item {
    size_t entry;     /* of the file; SIZE_MAX: none */
    bool take;        /* the state will be overwritten */
    size_t offset;    /* of its bytes in staging */
} mui_plan_item;

typedef struct mui_plan {
    mu_context *context;
    mui_states states;
    mui_plan_item *items; /* one for each state */
    char *staging;
    size_t staging_bytes;
    int64_t loaded, missing, unexpected, mismatched;
    char removed[MUI_PREFIX_BYTES], added[MUI_PREFIX_BYTES];
    mui_text text;
} mui_plan;

/* All ranks. */
mu_status mui_plan_open(mu_context *c, mu_module *root, mui_plan *out) MU_MUST_USE;
void mui_plan_close(mui_plan *p);
/* The reader: decides what goes where. key as in mu_load_options. */
mu_status mui_plan_make(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o) MU_MUST_USE;
/* The reader: fills staging. */
mu_status mui_plan_read(mui_plan *p, mu_checkpoint_file *k) MU_MUST_USE;
/* All ranks: the reader's decisions, report and staged bytes reach the others. Ends with equal outcomes. */
mu_status mui_plan_share(mui_plan *p, mu_group *g) MU_MUST_USE;
/* Writes what is staged into the model. The caller keeps a snapshot and restores it on failure. */
mu_status mui_plan_apply(mui_plan *p) MU_MUST_USE;

#endif
