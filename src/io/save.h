/* The state of a module as what is to be written, for mu_save and training files. */
#ifndef MUI_SAVE_H
#define MUI_SAVE_H

#include "io/archive.h"
#include "io/state_list.h"

typedef struct mui_out_module {
    mui_out_list list;
    mui_states states;
} mui_out_module;

/* prefix may be NULL. out must stay where it is. On error only mui_out_module_free is to be called. */
mu_status mui_out_module_list(mu_module *root, const char *prefix, mui_out_module *out) MU_MUST_USE;
void mui_out_module_free(mui_out_module *m);

#endif
