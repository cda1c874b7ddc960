/* What a value of a file's object holds: its items as edges, by the rules that tree.h tells. Each value is looked at once. */
#ifndef MUI_TREE_ITEMS_H
#define MUI_TREE_ITEMS_H

#include "io/tree.h"

typedef enum mui_edge_kind { MUI_BY_KEY, MUI_BY_INDEX, MUI_THROUGH } mui_edge_kind;

typedef struct mui_edge {
    mui_edge_kind kind;
    mui_role role;
    mui_value *key;
    size_t index;
    mui_value *child;
} mui_edge;

/* What the walks of tree.c know of a value; its note. */
typedef struct mui_tree_node {
    mui_edge *edges;
    size_t count, capacity;
    const mui_value *class_name; /* a global, shown as <Name>; NULL: none */
    mui_file_tensor *tensor;
    uint64_t tensors;            /* at and below; the sum over all paths, saturating */
    mui_branch_kind kind;
    size_t items;                /* of a dict, whatever they are */
    size_t direct;               /* tensors right below it, maybe as parameters */
    bool weights;                /* one of those could be a weight: neither an integer nor a scalar */
    bool wraps;                  /* a parameter or the like around its only edge */
    mui_role role;               /* that it gives */
    bool requires_grad;
    bool dict;
    bool counted;                /* the first walk is done with it */
    bool on_path;                /* of the second walk */
} mui_tree_node;

/* Values that can have tensors at or below them. */
bool mui_is_branching(const mui_value *v);
/* False with the error raised. What was looked at is added to w's work. */
bool mui_add_edge(const mui_meaning *w, mui_tree_node *n, mui_edge e);
/* Fills n's edges and what it says of v, which is no tensor and nothing around one. */
bool mui_add_items_of(const mui_meaning *w, mui_tree_node *n, mui_value *v);

#endif
