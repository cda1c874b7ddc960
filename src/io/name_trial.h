/* One way of renaming tried on the names of one dict: which name of the model each of them would go to. */
#ifndef MUI_NAME_TRIAL_H
#define MUI_NAME_TRIAL_H

#include "io/load_match.h"

/* Scratch of trials on up to `names` names against one model; each trial costs its names only. */
typedef struct mui_trial {
    const mui_states *states;
    mui_name_table tables[1 << MUI_WRAPPERS]; /* by what they drop; made when first asked for */
    uint64_t *stamps;     /* of each slot: the trial that last touched it */
    size_t *heads, *next; /* of each slot: names that go there, linked */
    size_t *slots;        /* touched in this trial */
    size_t *pairs;        /* state of each name, SIZE_MAX: none */
    size_t slot_count;
    uint64_t number;
    size_t clash[2];      /* two names that would go to one state; SIZE_MAX: none */
    bool unclear;         /* they might as well go to several */
} mui_trial;

mu_status mui_trial_open(const mui_states *s, size_t names, mui_trial *out) MU_MUST_USE;
void mui_trial_close(mui_trial *t);
/* How many states get a name; NULL names are passed over. -1: out of memory. */
int64_t mui_trial_run(mui_trial *t, const mui_renaming *r, const char *const *names, size_t n);
/* `name` as it is looked for: what goes before it, and its rest. */
const char *mui_renaming_read(const mui_renaming *r, const char *name, const char **before);

#endif
