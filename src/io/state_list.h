/* The state dict of a module as an array: what is saved, and what a load fills. */
#ifndef MUI_STATE_LIST_H
#define MUI_STATE_LIST_H

#include "base/arena.h"
#include "tape/store.h"
#include <muster/module.h>

typedef struct mui_state {
    const char *name; /* in the list's arena */
    mu_tensor *value;
    mu_parameter *parameter; /* NULL: a buffer */
    size_t same_as;          /* index of an earlier entry with the same value (tied weights), else its own */
} mui_state;

typedef struct mui_states {
    mu_context *context;
    mui_arena arena;
    mui_state *items; /* state_dict order */
    size_t count, capacity;
} mui_states;

/* On error nothing is left to free. */
mu_status mui_states_list(mu_context *c, mu_module *root, mui_states *out) MU_MUST_USE;
void mui_states_free(mui_states *s);
/* Over names, shapes and types: equal on ranks whose models are alike. */
uint64_t mui_states_hash(const mui_states *s);

#endif
