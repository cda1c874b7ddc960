/* The module tree as this floor sees it. Not for other floors: they see a module as a mui_source.
 *
 * Only the root of a tree has a store, a version and graves. Parameters and buffers of removed modules go to the
 * root's graves and stay allocated until the store has been rebuilt without them, since the store still lists them. */
#ifndef MUI_NN_H
#define MUI_NN_H

#include "tape/store.h"
#include <muster/layers.h>
#include <muster/module.h>

typedef struct mui_param {
    mu_parameter p;
    mu_module **in;         /* the modules in which it is registered: more than one when shared */
    size_t in_count, in_capacity;
    uint64_t visit;         /* last traversal that met it */
    struct mui_param *next_grave;
} mui_param;

typedef struct mui_buffer {
    mu_tensor t;
    mui_storage storage;    /* header around heap */
    void *heap;             /* contents: of MU_I64 for good, of MU_F32 until a store takes them over */
    struct mui_buffer *next_grave;
} mui_buffer;

typedef struct mui_named_param {
    char *name;
    mui_param *param;
} mui_named_param;

typedef struct mui_named_buffer {
    char *name;
    mui_buffer *buffer;
} mui_named_buffer;

struct mu_module {
    mui_source source;      /* first: see mui_store_of */
    mu_module *parent;      /* NULL: a root, owned by the context */
    char *name;             /* in the parent */
    char *path;             /* from the root, "" for it; as of the last build */
    char *kind, *extra;
    mu_forward_fn forward;
    void *self;
    void (*destroy)(void *self);
    mui_named_param *params;
    mui_named_buffer *buffers;
    mu_module **children;
    size_t param_count, param_capacity, buffer_count, buffer_capacity, child_count, child_capacity;
    bool training;
    bool checkpoint;        /* mu_forward runs it as a segment, see mu_module_checkpoint */
    bool removed;           /* out of its tree and freed but for this struct, which users still hold */
    const char *head;       /* path of the classification head, where the zoo knows it; static or in head_text */
    char head_text[24];
    /* Of roots. */
    uint64_t version, built_version; /* goes up with every change of the tree; that of the store */
    mui_store *built;
    mui_store **orphans;    /* stores of former roots, whose values the next build copies */
    size_t orphan_count, orphan_capacity;
    mui_param *param_graves;
    mui_buffer *buffer_graves;
    mu_module *removed_list; /* through next_removed */
    mu_module *next_removed;
    uint64_t visits;        /* number of the last traversal; above those its parameters remember */
};

mu_module *mui_module_root(mu_module *m);
/* Where `path` leads from m: "" is m itself. NULL when there is none. */
mu_module *mui_module_find(mu_module *m, const char *path, size_t length);
mu_module *mui_module_child(mu_module *m, const char *name);
mui_param *mui_module_own_param(mu_module *m, const char *name);
mui_buffer *mui_module_own_buffer(mu_module *m, const char *name);

/* Frees a module and all below it. Parameters and buffers that a store of `root` may list go to its graves; root NULL:
 * nothing lists them any more. */
void mui_module_bury(mu_module *m, mu_module *root);
void mui_module_free_graves(mu_module *root);
/* Context's destructor of a root. */
void mui_module_destroy_root(void *m);

/* The source callbacks, module_store.c. */
mui_store *mui_module_store(mui_source *s);
mui_store *mui_module_built(mui_source *s);
bool mui_module_contains(mui_source *s, const mu_parameter *p);
/* Before `child`, a root, joins the tree of root: makes room for its store. MU_ERR_STATE when it cannot be merged. */
mu_status mui_module_merge_prepare(mu_module *root, mu_module *child) MU_MUST_USE;
/* Takes over the child's store, graves and removed modules; after a successful prepare this cannot fail. */
void mui_module_merge(mu_module *root, mu_module *child);

/* A number no parameter of the tree has as its last visit. */
uint64_t mui_module_next_visit(mu_module *m);
/* One entry of a traversal in state_dict order. */
typedef struct mui_state_entry {
    char *name;           /* relative to where the traversal began */
    mui_param *param;     /* NULL: a buffer */
    mui_buffer *buffer;
    bool repeated;        /* a shared parameter under a later name */
} mui_state_entry;
typedef struct mui_state_list {
    mui_state_entry *entries;
    size_t count, capacity;
} mui_state_list;
/* All parameters and buffers of m and below. On failure the list is empty. paths: also sets each module's path. */
mu_status mui_state_list_make(mui_state_list *list, mu_module *m, bool paths) MU_MUST_USE;
void mui_state_list_free(mu_context *c, mui_state_list *list);

/* Checks kind and shape of an initialiser; raises MU_ERR_ARG. */
mu_status mui_init_check(mu_context *c, const char *name, mu_dims dims, mu_init init) MU_MUST_USE;
/* Gives p, which has memory, its initial value, keyed by (seed, its name). */
mu_status mui_init_apply(mu_parameter *p) MU_MUST_USE;

/* mu_forward with another forward function of m (NULL: children in order), with all its checks, and m's path. */
mu_tensor *mui_forward_as(mu_tape *t, mu_module *m, mu_forward_fn fn, mu_tensor *x);

/* Layers' insides for the zoo: batch norm followed by an activation, and an addition followed by one, in one pass when
 * `norm` and `act` are still what the zoo put there; a user may have replaced them. */
mu_tensor *mui_forward_norm_act(mu_tape *t, mu_module *norm, mu_module *act, mu_tensor *x);
mu_tensor *mui_forward_norm_relu(mu_tape *t, mu_module *norm, mu_tensor *x); /* without a module for the relu */
mu_tensor *mui_forward_add_act(mu_tape *t, mu_module *act, mu_tensor *a, mu_tensor *b);
/* Gives x back, which m made, once the addition that follows has run, when m is a norm or a sequence that ends with one, and
 * that of a norm with activation once the max pool has, unless backward reads it. Not when a module that a user put there
 * made or read it: it may hold on to it. */
void mui_forget_norm(mu_tape *t, const mu_module *m, mu_tensor *x);
void mui_forget_pooled(mu_tape *t, const mu_module *norm, const mu_module *act, const mu_module *pool, mu_tensor *x);
/* A ReLU that prints like this: "inplace=True" as in torchvision's networks. */
mu_module *mui_relu_layer(mu_context *c, const char *extra);
/* In and out sizes when m is a linear layer. */
bool mui_is_linear(const mu_module *m, int64_t *in, int64_t *out, mu_linear_options *options);
/* The child, which must be there: raises MU_ERR_STATE naming it. */
mu_module *mui_module_need(mu_module *m, const char *name);
/* mu_module_add that frees nothing and gives the child back, NULL on failure: for building trees. */
mu_module *mui_module_put(mu_module *parent, const char *name, mu_module *child);

#endif
