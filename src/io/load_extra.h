/* What a load looks at beside names and shapes: versions of modules in _metadata, values that are no tensors, tied
 * parameters. */
#ifndef MUI_LOAD_EXTRA_H
#define MUI_LOAD_EXTRA_H

#include "io/load_verdict.h"

/* Versions of the modules that _metadata of a state dict tells, sorted by path. */
typedef struct mui_versions {
    mu_context *context;
    struct mui_version *items;
    size_t count;
    bool *tracked; /* of each state: it is the num_batches_tracked of a module that _metadata tells to have one */
} mui_versions;

mu_status mui_versions_read(const mui_plan *p, const mu_checkpoint_file *k, mui_match *m, mui_versions *out) MU_MUST_USE;
void mui_versions_free(mui_versions *v);
/* Whether states[i], which the file lacks, is left out of files like this one: num_batches_tracked, which came with
 * PyTorch 0.4.1 and version 2. PyTorch fills in 0. */
bool mui_may_be_missing(const mui_plan *p, const mui_match *m, const mui_versions *v, size_t i);

/* Values of the dict that hold no tensor: not in the model, or an error where a tensor should be. */
mu_status mui_others_list(mui_plan *p, const mu_checkpoint_file *k, mui_match *m, mui_verdict *v) MU_MUST_USE;

/* Parameters that are tied in the model and of which the file has several names: the same values, or an error; a
 * warning when not strict, and the last counts. */
mu_status mui_ties_check(mui_plan *p, mu_checkpoint_file *k, bool not_strict) MU_MUST_USE;

#endif
