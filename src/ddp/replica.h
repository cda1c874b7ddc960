/* The parts of a mu_ddp and what its files offer each other. Not for: anything outside src/ddp. */
#ifndef MUI_REPLICA_H
#define MUI_REPLICA_H

#include "base/text.h"
#include "comm/agree.h"
#include "ddp/reducer.h"
#include "tape/store.h"
#include <muster/ddp.h>

/* Where a store's gradients live: in the group's memory while a reducer has laid it out on all ranks together, else on
 * the heap, since a store may be rebuilt on one rank at a time of its own. Outlives the ddp. */
typedef struct mui_grad_memory {
    mu_context *context;
    mu_group *group;
    bool together; /* all ranks are here: group memory may be taken and given back */
    void **blocks; /* of the group, in the order they were taken */
    bool *unused;  /* to be given back when all ranks are together again */
    size_t count, blocks_capacity, unused_capacity;
} mui_grad_memory;

enum {
    MUI_ABSENCE_OP,
    MUI_ABSENCE_MODULE,
    MUI_ABSENCE_END_OP,
    MUI_ABSENCE_END_MODULE,
    MUI_ABSENCE_REGION,
    MUI_ABSENCE_TEXTS
};
enum { MUI_RANKS_NAMED = 64, MUI_KNOWN_MODELS = 8 };

/* What is known of one trainable parameter between reductions; index: its slice. */
typedef struct mui_member {
    mu_parameter *parameter;
    char *name;     /* copies for the report: the tree may change, the tape may be reset */
    uint8_t entry;  /* mui_grad_state when the running reduction began */
    bool warned;    /* its absence was told */
    bool pending;   /* absent on every rank in all reductions since gradients were cleared; not told yet */
    uint64_t since; /* reductions of the ddp before this member was there */
    uint64_t missed_here, missed_somewhere, missed_everywhere;
    uint64_t ever;  /* ranks that contributed to reductions which some rank missed, of the first MUI_RANKS_NAMED */
    int64_t ready;  /* place in the ready order before buckets were rebuilt, from 1 */
    uint64_t stamp; /* equal to the ddp's: absent_at counts */
    int64_t absent_at; /* in mu_ddp.absent */
    char *texts[MUI_ABSENCE_TEXTS];
    size_t capacities[MUI_ABSENCE_TEXTS];
} mui_member;

/* What the report says of a parameter of the store: copies, since the tree may change and the store go. */
typedef struct mui_listed {
    bool inside;  /* the wrapped module, which may be part of a tree */
    char *name;   /* of a frozen one; others have it in their member */
    int64_t bytes;
} mui_listed;

struct mu_ddp {
    mu_context *context;
    mu_module *root;
    mu_group *group;
    mu_ddp_options options;
    char *name;
    int ordinal; /* tells wraps of one context apart */
    mui_reducer *reducer;
    mui_grad_memory *memory;
    bool counted; /* in its store's `wrappers` */

    /* The layout all ranks agreed on, and what it was made from. */
    mui_store *store;
    uint64_t version;
    mui_text description;             /* one line for each parameter and buffer */
    uint64_t known[MUI_KNOWN_MODELS]; /* hashes of descriptions seen before: going back and forth (a GAN that freezes
                                       * its discriminator) is told once */
    int known_count;
    mui_member *members; /* trainable ones, in slab order */
    int64_t member_count;
    int64_t *slice_of; /* of each parameter of the store, -1: not reduced (frozen, outside the module) */
    uint8_t *frozen;   /* of each parameter of the store, when it was laid out */
    int64_t parameter_count;
    mui_listed *listed; /* one for each parameter of the store */
    int64_t listed_count;
    int64_t bucket_count;  /* reduced ones; other parameters come after them */
    uint8_t *slice_states; /* for mui_reducer_begin */
    bool planned;          /* buckets follow the ready order */
    uint64_t written_seen;    /* the context's `writes` when values were last known to be equal on all ranks */
    bool replicas_differ;     /* on purpose, between two averages of the parameters: written values are not compared */
    int64_t deferred;         /* deferred backwards since the last reduction, or since gradients were cleared */
    int64_t deferred_samples; /* of them, when weighted */
    bool deferred_weighted;
    uint64_t deferred_clears; /* the store's, when they were counted */
    char deferred_failed[160]; /* why gradients hold a part of a deferred backward; "": they do not */
    float *stash;          /* earlier gradients, as large as the slab; made when first needed */
    mu_tensor **counters;  /* integer buffers of the tree */
    int64_t counter_count;
    size_t counter_capacity;
    int64_t *counter_values; /* all their elements */
    int64_t counter_elements;
    float *buffer_copy;  /* float buffers after the last reduction */
    double *buffer_sums; /* the same on their way */

    mu_status broken; /* the group failed in a reduction: every later call says so */
    char broken_text[1400];

    mu_absent *absent; /* of the last reduction, room for all members */
    int64_t absent_count;
    uint64_t reductions;
    int64_t buckets_early;
    double backward_seconds, wait_seconds;
    uint64_t skipped;
    char skip_text[2 * MUI_IDENTITY_TEXT];
    mu_ddp_times last, sum;
    double called, ended;   /* when the last reduction began and ended */
    int last_rank;
    double last_rank_seconds;
    uint64_t absent_stamp;  /* counts reductions whose absences were collected */
    bool any_pending;
    uint64_t pending_updates; /* of optimisers when they were collected */
    mu_ddp_parameter *report_parameters; /* made on request, as large as the store's list */
    mu_ddp_bucket *report_buckets;
};

/* An error raised before, put aside while collectives run: they must take place all the same. */
typedef struct mui_aside {
    mu_status status;
    char message[MUI_MESSAGE_BYTES];
} mui_aside;

/* -- memory.c --------------------------------------------------------------------------------------------------- */
mui_grad_memory *mui_grad_memory_new(mu_context *c, mu_group *g);
/* Marks where all ranks are at the same place: gives back what became unused, in the same order everywhere. */
void mui_grad_memory_together(mui_grad_memory *m, bool together);
void *mui_grad_memory_alloc(void *user, size_t bytes);
void mui_grad_memory_free(void *user, void *p);

/* -- construct.c: collective ------------------------------------------------------------------------------------ */
/* Compares texts of lines on all ranks. MU_ERR_COMM with a group that is not broken: they differ, and all ranks have
 * named the first difference ("who: the ranks' what differ: ..."). MU_ERR_NOMEM: here alone, others wait. */
mu_status mui_compare_texts(mu_group *g, const char *who, const char *what, const mui_text *mine) MU_MUST_USE;
/* Comes back when every rank is at the same kind of call of the same ddp; `text` names it, and what this rank says
 * about itself, to ranks that are elsewhere. */
mu_status mui_ddp_gate(mu_ddp *d, uint32_t kind, const char *text) MU_MUST_USE;
/* For a collective of the user's beside reductions, which `what` names: follows the tree, and comes back when every rank
 * is there. An error this rank brings along is put into `aside`; mui_ddp_part brings it back, whatever came of the call,
 * and returns it, or else s. */
mu_status mui_ddp_meet(mu_ddp *d, uint32_t kind, const char *what, mui_aside *aside) MU_MUST_USE;
mu_status mui_ddp_part(mu_ddp *d, const mui_aside *aside, mu_status s) MU_MUST_USE;
/* Describes the tree as it is now, into `out`. */
mu_status mui_ddp_describe(mu_ddp *d, mui_store *s, mui_text *out) MU_MUST_USE;
/* Compares that description on all ranks; MU_ERR_COMM on all of them naming the first difference. */
mu_status mui_ddp_compare(mu_ddp *d, const mui_text *mine) MU_MUST_USE;
/* Gives every rank the values, float and integer buffers of rank 0. */
mu_status mui_ddp_spread(mu_ddp *d) MU_MUST_USE;
/* Start of the first line in which two descriptions differ, "nothing" where one has ended; NULL when equal. */
bool mui_ddp_first_difference(const char *a, const char *b, char *line_a, char *line_b, size_t line_bytes);

/* -- layout.c --------------------------------------------------------------------------------------------------- */
/* Lays the store out: `ready` (trainable parameters by index in the store, all of them) or reverse registration order
 * where NULL. Collective: gradients move into the group's memory. A failure aborts the group. */
mu_status mui_ddp_lay_out(mu_ddp *d, mui_store *s, const int64_t *ready) MU_MUST_USE;
/* Sees whether the tree changed since the last layout; then agrees with the other ranks on the new one. MU_SKIPPED:
 * the ranks computed this step with different values, so its gradients mean nothing. */
mu_status mui_ddp_follow(mu_ddp *d) MU_MUST_USE;
/* After the first reduction: buckets in the order in which rank 0's gradients became ready. Collective. */
mu_status mui_ddp_plan(mu_ddp *d) MU_MUST_USE;
void mui_ddp_free_layout(mu_ddp *d);

/* -- buffers.c -------------------------------------------------------------------------------------------------- */
/* Brings buffers together, in step with a reduction, also an abandoned one. start after local backward, finish after
 * the gradients have arrived. */
typedef struct mui_buffer_requests {
    mu_request *floats, *counters;
} mui_buffer_requests;
void mui_ddp_buffers_start(mu_ddp *d, bool repairs, mui_buffer_requests *q);
mu_status mui_ddp_buffers_finish(mu_ddp *d, mui_buffer_requests *q) MU_MUST_USE;
void mui_ddp_counters_get(mu_ddp *d);
void mui_ddp_counters_set(mu_ddp *d);

/* -- report.c --------------------------------------------------------------------------------------------------- */
/* Collects who was absent in the reduction that just ended. */
void mui_ddp_note_absent(mu_ddp *d);
/* With an error policy, fails about parameters that were absent. Else remembers those that are to be told. */
mu_status mui_ddp_judge_absent(mu_ddp *d, uint64_t updates) MU_MUST_USE;
/* Gradients were cleared or used since the last reduction: what is still without one is told, once. */
void mui_ddp_warn_absent(mu_ddp *d);
/* Before buckets are cut anew: remembers the order that the report still tells of. */
void mui_ddp_note_ready(mu_ddp *d);

/* -- absent_text.c ---------------------------------------------------------------------------------------------- */
typedef enum mui_absent_filter { MUI_ABSENT_ANYWHERE, MUI_ABSENT_EVERYWHERE, MUI_ABSENT_PENDING } mui_absent_filter;
/* Trainable parameters in registration order; items: NULL for those that are not selected. */
typedef struct mui_absent_list {
    const mu_absent **items;
    const char **names;
    int64_t count, selected;
} mui_absent_list;
mu_status mui_absent_list_make(mu_ddp *d, mui_absent_filter which, mui_absent_list *list) MU_MUST_USE;
void mui_absent_list_free(mu_ddp *d, mui_absent_list *list);
/* "head (12 parameters): reason; fc.{weight, bias}: reason": whole modules where all is absent for one reason. At most
 * so many groups; `ranks` says for each on which ranks it was present. */
void mui_absent_list_add(const mui_absent_list *list, mui_text *t, int64_t groups, int ranks, const char *separator);
void mui_add_ranks(mui_text *t, uint64_t mask, int size);

/* The reduced gradients are not finite, and the policy is not to keep them: names parameter and ranks. Returns
 * MU_SKIPPED or MU_ERR_STATE. */
mu_status mui_ddp_not_finite(mu_ddp *d) MU_MUST_USE;

/* -- what the others are told, when they wait for this rank -------------------------------------------------------- */
/* What it does in the running reduction; NULL: that reduction is over. */
void mui_ddp_work(mu_ddp *d, const char *what);

/* -- written.c -------------------------------------------------------------------------------------------------- */
/* Hash of the values of parameters that the program itself wrote since the last reduction: all ranks must have written
 * the same. `count`: how many parameters; `first`: the name of one. */
uint64_t mui_ddp_hash_written(const mu_ddp *d, int64_t *count, const char **first);
/* What is written now is the same on all ranks. */
void mui_ddp_written_agreed(mu_ddp *d);
/* Values were replaced by rank 0's: a tape that computed with others is of no use any more. */
void mui_ddp_values_replaced(mu_ddp *d);
/* The same by the mean over ranks, where trainable: whatever ranks had written into these before. */
void mui_ddp_values_averaged(mu_ddp *d);

/* Replicas are equal, made so or compared: optimiser steps, which all ranks must take alike, are counted from here. */
void mui_ddp_count_anew(mu_ddp *d);

/* -- failure ---------------------------------------------------------------------------------------------------- */
void mui_aside_put(mu_context *c, mui_aside *a);
void mui_aside_restore(mu_context *c, const mui_aside *a);
/* The group failed: remembers it for later calls and returns s. */
mu_status mui_ddp_break(mu_ddp *d, mu_status s);
/* The others must not wait for a rank that failed alone. Returns s. */
mu_status mui_ddp_desert(mu_ddp *d, mu_status s);

/* Values and buffers, compared over the ranks. */
uint64_t mui_hash_floats(uint64_t h, const float *x, size_t n);

#endif
