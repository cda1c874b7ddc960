/* Parameters and the store that gives them memory.
 *
 * A store belongs to the root of a module tree. It holds values, gradients and optimiser state of all trainable and
 * frozen parameters in parallel flat slabs with one layout: slice i of every slab belongs to parameter i. Slabs are cut
 * into buckets, in the order in which they will be reduced; a bucket's slices are contiguous and may be followed by a
 * tail of floats that only the reducer uses (participation counts). Padding is zero in every slab and stays zero.
 *
 * Knows nothing of modules, groups or optimisers: nn lists the parameters, ddp plans buckets and brings the gradient
 * slab's memory, optim adds slabs of its own. */
#ifndef MUI_STORE_H
#define MUI_STORE_H

#include "tensor/tensor.h"
#include <muster/tape.h>

typedef struct mui_store mui_store;

typedef enum mui_grad_state {
    MUI_GRAD_NONE = 0, /* absent: the slice's content means nothing */
    MUI_GRAD_LOCAL,    /* this rank's own, from mu_backward or a deferred reduction */
    MUI_GRAD_REDUCED,  /* the mean over ranks */
    MUI_GRAD_MIXED     /* that, and more of this rank's own on top; the mean alone is in the store's `reduced` slab */
} mui_grad_state;

/* Why a parameter got no gradient; kept by the marking pass until the next one. */
typedef struct mui_absence {
    int kind;                /* mu_absence of <muster/ddp.h>, as a plain number: this floor does not see that header */
    const char *op;          /* the operation that read it; all strings are of the tape: valid until its reset */
    const char *module;      /* path of the module that read it */
    const char *end_op;      /* detached: "detach" or the operation in the no-grad region; not reached: the last one */
    const char *end_module;
    const char *region;      /* detached in a no-grad region: its name, "" if it has none; else NULL */
} mui_absence;

struct mu_parameter {
    mu_context *context;
    char *name;              /* full path in the tree, owned */
    mu_tensor value;         /* context-lifetime; data inside the value slab once the store is built */
    mu_tensor grad_view;     /* same, inside the gradient slab */
    bool frozen;
    uint64_t updates;        /* by optimisers, since it was made, wrapped, loaded or compared: the same on all ranks */
    uint64_t stepped;        /* the context's `writes` when an optimiser or a ddp last changed the value; what
                              * others wrote is in value.written */
    mui_grad_state grad_state;
    int64_t reads;           /* reads among the nodes that reach the loss, counted by marking */
    int64_t reads_left;      /* not yet retired by backward; the gradient is complete at 0 */
    mui_absence absence;
    mui_store *store;
    int64_t index;           /* in the store, registration order */
    size_t offset;           /* of its slice, in floats, in every slab */
    size_t capacity;         /* floats of its slice, padding included, a multiple of 16 */
    bool initialised;        /* the value has been set */
    int init_kind;           /* mu_init of <muster/module.h>, applied by nn */
    float init_value;
    int64_t conv_groups, conv_stride; /* nn says so for convolution weights: layout is asked from kern; 0: not one */
    void *owner;             /* of nn */
    uint64_t id;             /* unique in the context, never used again: an address may be */
};

/* When the tape's first node since its reset was recorded (mui_now); 0: there is none. */
double mui_tape_began(const mu_tape *t);

/* Called by backward when the last counted read of p retired: its gradient is complete. */
typedef void (*mui_ready_fn)(void *user, mu_parameter *p);

/* What the optimiser and the reducer see of a module: its first member. nn fills it. */
typedef struct mui_source {
    mu_context *context;
    /* The up-to-date store of the tree's root: built or rebuilt when the tree changed. NULL on failure. */
    mui_store *(*store)(struct mui_source *s);
    /* The store as it is, perhaps outdated; NULL when there is none. Never builds: for freeing. */
    mui_store *(*built)(struct mui_source *s);
    /* Whether p is registered in this module or below: always, for the root's own. Shared ones count everywhere. */
    bool (*contains)(struct mui_source *s, const mu_parameter *p);
    /* Holders of this pointer (optimisers, reducers). While there are any, nn keeps the struct even when the module is
     * removed from its tree; store then raises MU_ERR_STATE and returns NULL. */
    int users;
} mui_source;
/* A contribution of this rank to the gradient of p has come. */
static inline void mui_grad_came(mu_parameter *p)
{
    p->grad_state = p->grad_state == MUI_GRAD_MIXED ? MUI_GRAD_MIXED : MUI_GRAD_LOCAL;
}
static inline mui_store *mui_store_of(mu_module *m)
{
    mui_source *s = (mui_source *)m; /* mu_module begins with a mui_source */
    return s->store(s);
}

typedef struct mui_bucket {
    int64_t first, count;     /* range in the store's slab order */
    size_t offset, floats;    /* of the slices, in every slab */
    size_t tail;              /* floats after the slices, reducer's own */
} mui_bucket;

typedef struct mui_slab {
    float *data;
    bool is_state;            /* optimiser state: zero for new parameters, kept over relayouts */
} mui_slab;

struct mui_store {
    mu_context *context;
    mu_parameter **parameters; /* registration order (PyTorch's), shared ones once */
    int64_t count;
    int64_t *order;            /* slab order: indices into parameters; reverse registration unless planned */
    mui_bucket *buckets;
    int64_t bucket_count;
    size_t floats;             /* of a slab */
    float *values, *grads;
    float *old_values;         /* of the layout before, readable until the next: tapes may hold views of it */
    mui_slab **slabs;          /* optimiser state, registered with mui_store_add_slab */
    size_t slab_count, slab_capacity;
    mu_tensor **buffers;       /* float buffers in state_dict order, memory in one slab */
    char **buffer_names;
    int64_t buffer_count;
    float *buffer_slab;
    size_t buffer_floats;
    uint64_t version;          /* goes up at every rebuild or relayout */
    uint64_t layout_hash;      /* of names, shapes, dtypes, layouts, frozen flags, order, buckets */
    mui_slab *reduced;         /* means over ranks under gradients that are mixed; NULL: never needed */
    uint64_t clears;           /* goes up whenever gradients are cleared, by zero_grad or an optimiser */
    int reduced_over;          /* ranks of the reducers that laid it out, the most; 0: none has */
    int wrappers;              /* of them that exist */
    /* Optimisers that share their state over the ranks of a group, and all optimisers. While there are any, a reduction
     * may bring each rank its own slices of gradients alone: the others' then mean nothing. */
    struct mu_group *sharded_over; /* NULL: none does */
    int sharding, stepping;
    size_t shared_bytes;        /* of state that is shared, on this rank */
    uint64_t scattered_version; /* of the layout by which gradients that are reduced were scattered so; 0: they are whole */
    double *square_sums;        /* for their norm */
    size_t square_sums_room;
    mui_ready_fn ready;        /* set by the reducer while a reduction runs, else NULL */
    void *ready_user;
    /* Memory of the gradient slab: the group's when the reducer says so, else the heap. */
    void *(*grads_alloc)(void *user, size_t bytes);
    void (*grads_free)(void *user, void *p);
    void *grads_user;
};

/* Makes a store of these parameters and float buffers (names are copied, values kept where already initialised: old
 * slabs may belong to `old`, which is consumed, its optimiser slabs and allocators carried over). buckets: one.
 * - Values are copied from where value.data (initialised parameters) and a buffer's data (not NULL) point, whichever
 *   store or memory that is; gradients and optimiser state only of parameters that are in `old`. Memory other than
 *   old's stays the caller's.
 * - Parameters and buffers of `old` that are not listed any more are still alive during the call; they are left without
 *   store and data.
 * - mui_store pointers change, mui_slab pointers stay.
 * - On failure NULL, and `old`, parameters and buffers are as they were. */
mui_store *mui_store_build(mu_context *c, mu_parameter *const *parameters, int64_t count, mu_tensor *const *buffers,
                           const char *const *buffer_names, int64_t buffer_count, mui_store *old);
/* Parameters and buffers whose memory is this store's lose it (store and data NULL); others are not touched. */
void mui_store_free(mui_store *s);

/* Lays all slabs out anew: order (count indices), cut into buckets of these counts, each with its tail. Values,
 * gradients and optimiser state move along; version goes up. All or nothing. Called between a forward and its backward
 * too: the old value slab therefore stays readable until the next relayout or rebuild, since tapes may hold views of
 * it (a tensor made by reshape of a parameter). */
mu_status mui_store_relayout(mui_store *s, const int64_t *order, const int64_t *bucket_params, const size_t *tails,
                             int64_t bucket_count) MU_MUST_USE;
/* Moves the gradient slab to memory of this allocator (NULL: the heap). */
mu_status mui_store_set_grad_memory(mui_store *s, void *(*alloc)(void *user, size_t bytes),
                                    void (*free_fn)(void *user, void *p), void *user) MU_MUST_USE;
/* Optimiser state: zeroed, moves with relayouts and rebuilds, until removed. */
mui_slab *mui_store_add_slab(mui_store *s);
void mui_store_remove_slab(mui_store *s, mui_slab *slab);

/* Every parameter has no gradient. Touches no memory: the next contribution overwrites. */
void mui_store_zero_grad(mui_store *s);

/* -- backward in steps, for the reducer ------------------------------------------------------------------------- */
/* Marks what the loss depends on, counts reads of each parameter of `s` (NULL loss: none), and finds the reason for
 * each absent one. */
mu_status mui_backward_mark(mu_tape *t, mu_tensor *loss, mui_store *s) MU_MUST_USE;
/* Operations on the way to the marked loss that make collectives in backward. */
int64_t mui_backward_collectives(const mu_tape *t);
/* An operation that makes a collective found that another rank abandoned the step: it returned NULL without an error,
 * or its backward MU_SKIPPED. Why, until the tape's reset; NULL: nothing of the kind. */
const char *mui_tape_skipped(const mu_tape *t);
/* Runs backward with d loss = seed; calls s->ready as gradients complete. After mui_backward_mark of the same loss. */
mu_status mui_backward_run(mu_tape *t, mu_tensor *loss, float seed, mui_store *s) MU_MUST_USE;

/* Module path for messages: nn pushes and pops around forward functions. */
void mui_path_push(mu_context *c, const char *name, size_t *mark);
void mui_path_pop(mu_context *c, size_t mark);

#endif
