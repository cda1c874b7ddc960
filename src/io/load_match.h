/* Which tensor of a file goes to which name of a model: finds the state dict in the file and the prefix that stands
 * between its names and the model's. */
#ifndef MUI_LOAD_MATCH_H
#define MUI_LOAD_MATCH_H

#include "io/checkpoint_file.h"
#include "io/state_list.h"

typedef enum mui_rename { MUI_RENAME_NONE, MUI_RENAME_REMOVE, MUI_RENAME_ADD, MUI_RENAME_REMOVE_ALL } mui_rename;

#define MUI_PREFIX_BYTES 64

typedef struct mui_match {
    const char *path;          /* of the state dict in the file; borrowed from the checkpoint or the caller */
    const mui_value *dict;     /* NULL when path is only a common start of names */
    size_t first, end;         /* its entries */
    mui_rename rename;
    char prefix[MUI_PREFIX_BYTES]; /* "" for MUI_RENAME_NONE */
    int64_t matched;           /* names of the model that were found */
} mui_match;

/* key: path of the state dict, NULL: found by itself. No match at all, or several dicts that fit: an error. */
mu_status mui_match_find(mu_checkpoint_file *k, const mui_states *s, const char *key, mui_match *out) MU_MUST_USE;
/* The model's name for entry i, into out of MUI_MATCH_NAME bytes; false when the entry is not part of the dict. */
#define MUI_MATCH_NAME (MUI_MAX_NAME_BYTES + MUI_PREFIX_BYTES + 1)
bool mui_match_name(const mu_checkpoint_file *k, const mui_match *m, size_t i, char *out);

#endif
