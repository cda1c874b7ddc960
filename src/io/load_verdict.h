/* What a load found: the names of each kind, the error when they may not be, and the report. */
#ifndef MUI_LOAD_VERDICT_H
#define MUI_LOAD_VERDICT_H

#include "io/load_plan.h"

/* Names of one kind. */
typedef struct mui_name_list {
    mui_text brief; /* the first few, for messages */
    mui_text full;  /* all, a line each */
    int64_t count;
} mui_name_list;

typedef struct mui_verdict {
    mui_name_list missing, unexpected, mismatched, converted, renamed, tied;
} mui_verdict;

void mui_verdict_init(mui_verdict *v, mu_context *c);
void mui_verdict_free(mui_verdict *v);
/* what: written behind the name. */
void mui_list_add(mui_name_list *l, const char *name, const char *what);

/* The error that lists all that does not fit. */
mu_status mui_verdict_refuse(mui_plan *p, const mu_checkpoint_file *k, const mu_load_options *o,
                             const mui_verdict *v);
/* Nothing of worth was loaded: an error; little: a warning. */
mu_status mui_verdict_weigh(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, const mu_load_options *o,
                            const mui_verdict *v) MU_MUST_USE;
void mui_verdict_report(mui_plan *p, const mu_checkpoint_file *k, const mui_match *m, const mui_verdict *v);

#endif
