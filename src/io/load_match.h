/* Which tensor of a file goes to which name of a model: finds the state dict in the file and the wrappers' names that
 * stand between its names and the model's. */
#ifndef MUI_LOAD_MATCH_H
#define MUI_LOAD_MATCH_H

#include "io/checkpoint_file.h"
#include "io/name_table.h"
#include "io/rename.h"

#define MUI_PREFIX_BYTES 64

/* How names of the file are changed before they are looked for. */
typedef enum mui_start { MUI_START_KEPT, MUI_START_REMOVED, MUI_START_ADDED } mui_start;
typedef struct mui_renaming {
    mui_start start;
    char prefix[MUI_PREFIX_BYTES]; /* that is removed or added */
    unsigned dropped;              /* wrappers that are left out of both sides' names, wherever they are */
    int rank;                      /* 0: nothing is changed; the mildest is the lowest */
} mui_renaming;

typedef struct mui_match {
    mu_context *context;
    const char *path;      /* of the state dict in the file; borrowed from the checkpoint */
    const mui_value *dict; /* NULL when path is only a common start of names */
    size_t first, end;     /* its entries */
    const char **own;      /* of each entry from first on: its name below the dict, NULL: it is no state */
    const char **names;    /* the same after the rules of rename */
    size_t *state_of;      /* index of the state that the entry goes to, SIZE_MAX: none */
    mui_renaming renaming;
    int64_t matched;       /* names of the model that were found */
    char removed[MUI_PREFIX_BYTES], added[MUI_PREFIX_BYTES]; /* wrappers the file has more of, and less */
    mui_renames *renames;
    mui_name_table table;  /* for the renaming */
    mui_arena arena;
} mui_match;

/* No match at all, or several dicts that fit: an error. What was found is to be freed. */
mu_status mui_match_find(mu_checkpoint_file *k, const mui_states *s, const mu_load_options *o, mui_match *out) MU_MUST_USE;
void mui_match_free(mui_match *m);
/* The only state that a key of the dict would go to; NULL: none. */
const mui_state *mui_match_state(mui_match *m, const char *path, const char *own);
/* What else could be tried, as "; ...", or "": a key or a rename under which more than m->matched names would be found. */
void mui_match_hint(const mu_checkpoint_file *k, const mui_states *s, const mu_load_options *o, const mui_match *m,
                    char *out, size_t out_bytes);

#endif
