/* The parts of a conversion: the list of what is to be written, its elements, and the report. */
#ifndef MUI_CONVERSION_H
#define MUI_CONVERSION_H

#include "base/text.h"
#include "io/checkpoint_file.h"
#include "io/out_list.h"

typedef struct mui_conversion {
    mu_checkpoint_file *file;
    const mu_convert_options *options;
    mu_state_dict dict;
    const mui_branch *branch; /* the dict itself, NULL: it is none of its own (a common start of names, a list) */
    mui_out_list list;
    size_t *entries;          /* of the file's tree, for each item of the list */
    const char **old_names;   /* in the dict, likewise */
    mu_convert_report report;
    mui_text text;
} mui_conversion;

/* Fills dict, branch and list; everything that can be wrong with names, types and values is found here, before anything
 * is written. */
mu_status mui_convert_list(mui_conversion *v) MU_MUST_USE;
/* Counts and names what was left out, and finishes the text. */
mu_status mui_convert_tell(mui_conversion *v) MU_MUST_USE;

#endif
