/* The tree of named tensors in a file's object: every tensor with its path, and every dict that could be a state dict.
 *
 * Paths: keys joined by dots, "[i]" for list and tuple items, "<Class>" after what is an instance of a class, except
 * that a pickled torch.nn.Module is shown by its state_dict's names. */
#ifndef MUI_TREE_H
#define MUI_TREE_H

#include "io/torch_values.h"

#define MUI_MAX_NAME_BYTES 4096
#define MUI_MAX_ENTRIES 1000000

typedef struct mui_entry {
    char *name;
    const char *plain; /* the name without the classes; a key of a dict may itself be "<pad>", and stays */
    mui_file_tensor *tensor;
    size_t tied_to; /* index of an earlier entry with the same view; SIZE_MAX: none */
    mui_role role;  /* as far as the file tells: a pickled module does, a state dict does not */
    bool requires_grad;
} mui_entry;

typedef enum mui_branch_kind {
    MUI_BRANCH_DICT = 0,
    MUI_BRANCH_MODULE,    /* a pickled torch.nn.Module */
    MUI_BRANCH_OPTIMIZER, /* "state" and "param_groups" */
    MUI_BRANCH_OBJECT     /* of another class, with its attributes as items */
} mui_branch_kind;

/* A dict with tensors below it: they are entries [first, end). */
typedef struct mui_branch {
    char *path;
    const char *plain; /* likewise */
    size_t first, end;
    mui_value *value; /* NULL: the format has no objects */
    mui_branch_kind kind;
    size_t items;     /* keys it has, whatever they lead to */
    size_t direct;    /* tensors right below it */
    bool weights;     /* one of those is neither a scalar nor of integers */
} mui_branch;

typedef struct mui_tree {
    mu_context *context;
    mui_arena arena;
    mui_entry *entries;
    size_t count, capacity;
    mui_branch *branches; /* in order of first: a parent before its children */
    size_t branch_count, branch_capacity;
} mui_tree;

/* Walks root once to see what it holds and once to name it. On error nothing is left to free. */
mu_status mui_tree_build(const mui_meaning *w, mui_value *root, size_t pickle_bytes, mui_tree *out) MU_MUST_USE;
void mui_tree_free(mui_tree *t);
/* Fills tied_to of all entries. */
mu_status mui_tree_find_ties(mui_tree *t) MU_MUST_USE;

/* A tree for a format that lists its tensors by itself: init, add each, finish; what was begun is freed as above. It is
 * one state dict, a branch with path "" and no value. name and tensor must live as long as the tree. */
void mui_tree_init(mui_tree *t, mu_context *c);
mu_status mui_tree_add(mui_tree *t, char *name, mui_file_tensor *tensor) MU_MUST_USE;
mu_status mui_tree_finish(mui_tree *t) MU_MUST_USE;

/* The value of a str key in a dict, OrderedDict or module record; NULL when it has none. The last one counts. */
mui_value *mui_dict_get(const mui_value *dict, const char *key);
/* Whether v is a tensor or there are some below it. The tree was built from what v is part of, and is not freed. */
bool mui_holds_tensors(const mui_value *v);
/* Items of a dict or OrderedDict: key, value, ...; false when v is no dict. */
bool mui_dict_items(const mui_value *v, const mui_seq **items);

#endif
