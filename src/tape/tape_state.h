/* The tape's struct and what the files of this folder share. Not for other floors. */
#ifndef MUI_TAPE_STATE_H
#define MUI_TAPE_STATE_H

#include "tape/op.h"
#include "tape/parallel.h"
#include "tape/segment.h"
#include "tape/store.h"

/* A contribution to a gradient that could not be written in place: added when the node's backward returns. */
typedef struct mui_pending {
    mu_tensor *target;
    mui_storage *storage;
    const mui_layout *layout;
} mui_pending;

typedef struct mui_region {
    char name[64];           /* cut off if longer */
    const char *copy;        /* the same in the arena, for nodes: made on demand, gone at reset */
} mui_region;

/* A part of the tape with a function that can run again. Of the arena. */
struct mui_segment {
    mu_forward_fn one;        /* one of these */
    mu_segment_fn many;
    void *self;
    mu_tensor **in, **out;
    int in_count, out_count;
    bool *out_alive;          /* of each output, whether it had its memory before the segment was run again */
    mui_segment *parent;
    size_t order;             /* in the tape's segments; those within follow, up to segment_end */
    size_t segment_end, node_first, node_end, tensor_first, tensor_end, memory_first;
    uint64_t draws, step;
    int64_t sample_leaves;
    const char *path;         /* of the module that called */
    mu_tensor *since;         /* newest tensor of the tape before the last run began */
    mu_tensor **held;         /* tensors of outside that running again reads: kept while `holds` */
    size_t held_count;
    bool holds;
    bool live;                /* recomputed: its nodes can run backward */
};

typedef struct mui_memory {
    const void *data;
    size_t bytes;
} mui_memory;

/* Where a recompute is. */
typedef struct mui_replay {
    mui_segment *top;         /* NULL: none is running */
    size_t node, tensor, segment, memory;
    bool strayed;             /* made a tensor that the first run did not */
} mui_replay;

/* Told of a tape's reset, before its tensors go. One telling for each time it was attached. */
typedef struct mui_attachment {
    void (*reset)(void *self);
    void *self;
    struct mui_attachment *next;
} mui_attachment;

/* The gradients of parameters that backward over a replica's tape makes, apart from the parameters' own: for each
 * parameter that is read there, a copy of the struct that points to memory of the tape. */
typedef struct mui_shadows {
    mui_store store;         /* parameters, count and grads are all there is */
    mu_parameter *copies;    /* count of them, arena, as the rest */
    mu_parameter **originals;
    const mui_node **readers; /* the first of each; NULL: it is the result itself */
    uint32_t *slots;         /* hash table of indices + 1 */
    size_t mask;
    mui_storage *slab;       /* of the gradients, while backward runs and until they are added up */
} mui_shadows;
/* Makes them of all parameters that t's nodes, and y, read; at least their struct stays valid until t's reset. */
mu_status mui_shadows_make(mu_tape *t, const mu_tensor *y) MU_MUST_USE;
/* That of p, or NULL. */
mu_parameter *mui_shadow_of(const mui_shadows *s, const mu_parameter *p);

struct mui_backward {
    mu_tape *tape;
    mui_pending *pending;
    size_t pending_count, pending_capacity;
    mu_tensor **given;     /* targets whose own memory the running node was given: it may not have filled it yet */
    size_t given_count, given_capacity;
    mui_storage **temps;   /* released when the running node's backward returns */
    size_t temp_count, temp_capacity;
};

struct mu_tape {
    mu_context *context;
    mui_engine *engine;
    mui_pool *pool;
    mui_arena arena;
    mu_tape_options options;
    mui_node **nodes;
    size_t node_count, node_capacity;
    mu_tensor *tensors;
    mui_region *regions;     /* open no-grad regions; they stay open over a reset */
    size_t region_count, region_capacity;
    size_t region_base;      /* regions below are not those of the running segment's function */
    uint64_t step, draws;
    bool adds_to_reduced;    /* the last marking met a gradient that a reduction left */
    int64_t collectives;     /* of the last marking, see mui_backward_collectives */
    uint64_t group_calls;    /* collectives that operations made since the reset */
    char skipped[256];       /* see mui_tape_skipped; "": nothing */
    mui_segment **segments;  /* in the order in which they began */
    size_t segment_count, segment_capacity;
    mui_segment *segment;    /* innermost whose function is running */
    mui_segment *live;       /* innermost that backward is in */
    mui_replay replay;
    mu_tensor **made;        /* tensors of segments, in order */
    size_t made_count, made_capacity;
    mui_memory *memories;    /* of mui_tape_remember */
    size_t memory_count, memory_capacity;
    double began;            /* when the first node was recorded, mui_now; 0: none since the reset */
    const char *module;      /* arena copy of the module path of the last node: most nodes share it with the next */
    mu_tensor *marked;       /* loss of the last marking */
    bool is_marked;
    mui_attachment *attached;
    /* Of a replica's tape. */
    bool replica;
    bool has_shadows;
    mui_shadows shadows;
    uint64_t salt;           /* sets its draws apart from those of the others */
    mui_late *late;
    size_t late_count, late_capacity;
    mui_backward backward;
    /* For tests of gradients: samples add delta to this element of this leaf (counted from 0; -1: none). */
    struct {
        int64_t leaf, element;
        float delta;
    } nudge;
    int64_t sample_leaves;
};

/* The tensor that gets the gradient of t: t, or what it is a converted copy of. */
static inline mu_tensor *mui_base_of(mu_tensor *t)
{
    return t->alias_of != NULL ? t->alias_of : t;
}

/* What holds p's gradient and counts on this tape: p itself, but for replicas. */
static inline mu_parameter *mui_own_of(const mu_tape *t, mu_parameter *p)
{
    return p != NULL && t->has_shadows ? mui_shadow_of(&t->shadows, p) : p;
}

/* The recorded, differentiable operation that made t, or NULL. */
static inline mui_node *mui_maker_of(const mu_tensor *t)
{
    return t->requires_grad && t->node != NULL && !t->node->light ? t->node : NULL;
}

/* Counts the node's reads in its inputs' and output's fields. */
void mui_node_count(mui_node *n);
/* Gives an intermediate value back when nothing will read it any more; what the user put in or holds on to stays. */
void mui_release_if_idle(mu_tape *t, mu_tensor *x);

/* What was marked can run: the values that its backward reads are still those of forward. */
mu_status mui_check_values(mu_tape *t) MU_MUST_USE;

/* Drops a tensor's memory; reading it is an error from then on. */
void mui_tensor_release(mu_tensor *t);

/* A tape that its owner frees with mu_tape_free; the context does not know of it. */
mu_tape *mui_tape_make(mu_context *c, mui_engine *e);
/* mui_backward_mark from any tensor. */
mu_status mui_mark(mu_tape *t, mu_tensor *y, mui_store *s) MU_MUST_USE;
/* mui_backward_run from any tensor, whose gradient is g in `layout`. */
mu_status mui_run_from(mu_tape *t, mu_tensor *y, mui_storage *g, const mui_layout *layout, mui_store *s) MU_MUST_USE;
/* Records y, of a node with parameters read within it, see op.h; light when none of `in` wants a gradient. The list must
 * be as long-lived as the tape's arena. Nothing is recorded that nobody would ask for. */
mu_tensor *mui_record_within(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                             const void *attr, size_t attr_bytes, mui_storage *saved, const mui_within *within,
                             size_t within_count, bool detached);

/* tape/grads.c: adds what is pending, releases temporaries. Both leave the lists empty, also on failure. */
mu_status mui_grads_settle(mui_backward *b) MU_MUST_USE;
void mui_grads_drop(mui_backward *b);
/* Adds `floats` in storage s to the gradient of target. */
mu_status mui_grads_add(mui_backward *b, mu_tensor *target, mui_storage *s, const mui_layout *layout) MU_MUST_USE;

#endif
