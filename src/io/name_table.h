/* Names seen through their wrappers. DataParallel and DDP put "module." before the names below them, torch.compile
 * "_orig_mod.", Lightning "model." or "net.", at any depth and in any nesting. A table finds the names of a model by what
 * is left of them when some of these are dropped. */
#ifndef MUI_NAME_TABLE_H
#define MUI_NAME_TABLE_H

#include "io/state_list.h"

#define MUI_WRAPPERS 4
extern const char *const mui_wrappers[MUI_WRAPPERS]; /* "module.", ... */

/* The wrapper that `name` begins with: its number, -1: none. */
int mui_wrapper_at(const char *name);
/* Bits of the wrappers anywhere in name; counts, of each, may be NULL. */
unsigned mui_wrappers_in(const char *name, int counts[MUI_WRAPPERS]);

typedef struct mui_name_table {
    const mui_states *states;
    unsigned dropped;      /* bits of the wrappers that names are seen without */
    size_t mask;           /* slots less one, a power of two less one */
    size_t *slots;         /* index of a state, SIZE_MAX: free */
    uint64_t *hashes;      /* of what is left of each state's name */
    size_t *next;          /* of each state: another one of the same name, SIZE_MAX: none */
} mui_name_table;

mu_status mui_name_table_make(const mui_states *s, unsigned dropped, mui_name_table *out) MU_MUST_USE;
void mui_name_table_free(mui_name_table *t);
/* The slot of `before` and `name` joined; SIZE_MAX: no state has that name. */
size_t mui_name_table_find(const mui_name_table *t, const char *before, const char *name);

#endif
