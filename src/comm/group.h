/* The group table: what a transport fills in, and the identity that travels with every reduction. */
#ifndef MUI_GROUP_H
#define MUI_GROUP_H

#include "base/context.h"
#include <muster/group.h>

#define MUI_IDENTITY_TEXT 192

/* What a rank is doing, compared on all ranks before any byte of a peer is used. Ranks whose kind, sequence or hash
 * differ get MU_ERR_COMM on all of them with both texts. */
typedef struct mui_identity {
    uint32_t kind;                /* of the caller's choosing: broadcast, reduction, abandon, ... */
    uint64_t sequence;
    uint64_t hash;                /* layout and arguments */
    /* How often optimisers have changed what is reduced: their steps, and the updates of single parameters in them. Who
     * has made more or fewer of them than others has another replica. */
    uint64_t steps, updates; /* MUI_STEPS_LOADED and the steps since, where a file was loaded after the wrap */
    /* Elements at the start of an all-reduce of which each rank needs only its own equal slice; what is in the others
     * afterwards means nothing. Engines may reduce them all the same. Part of hash where it is not 0. */
    uint64_t scattered;
    char text[MUI_IDENTITY_TEXT]; /* for people: "reduction 17 (ddp `D`)" */
} mui_identity;

/* Far above any number of steps: a rank that alone has loaded a file has another replica, also before its first step. */
#define MUI_STEPS_LOADED ((uint64_t)1 << 40)

/* Kinds at and above this are abandonments: every rank then completes with MU_SKIPPED, data untouched, and
 * mui_group_skip_text names the rank and its text. They never mismatch with a kind below. */
#define MUI_KIND_ABANDON 0x80000000u
/* A bit of the kinds of collectives within a step, on its way to the reduction. An abandonment that finds all other
 * ranks at such a one ends that one (MU_SKIPPED, and skip_within tells so); the reduction is still to be abandoned. */
#define MUI_KIND_WITHIN 0x40000000u

typedef struct mui_group_ops {
    const char *name;
    /* Starts (never blocks for a peer longer than it takes to post); identity may be NULL. */
    mu_request *(*all_reduce_start)(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op,
                                    const mui_identity *identity);
    mu_status (*test)(mu_request *r, bool *done);
    mu_status (*wait)(mu_request *r);
    mu_status (*broadcast)(mu_group *g, void *data, size_t bytes, int root);
    mu_status (*all_gather)(mu_group *g, const void *in, void *out, size_t bytes);
    mu_status (*reduce_scatter)(mu_group *g, const void *in, void *out, int64_t count, mu_dtype type, mu_reduce_op op);
    mu_status (*barrier)(mu_group *g);
    void *(*alloc)(mu_group *g, size_t bytes);
    void (*free)(mu_group *g, void *p);
    /* Makes room for so many requests in flight: starting them then allocates nothing, however late peers are. */
    mu_status (*reserve)(mu_group *g, size_t requests);
    void (*set_phase)(mu_group *g, const char *phase);
    void (*abort)(mu_group *g, const char *reason);
    void (*close)(mu_group *g);
} mui_group_ops;

/* Why somebody asks what a rank has not brought. */
typedef enum mui_lack {
    MUI_LACK_LATE, /* it may yet come */
    MUI_LACK_DEAD, /* its process has ended, or it was given up */
    MUI_LACK_LEFT  /* it has closed the group */
} mui_lack;

/* For texts about a rank that others wait for: what a rank that has started only so many collectives has not brought to
 * those that are running, and nothing ("") when it has brought all. Called by the rank that waits. */
typedef void (*mui_lack_fn)(void *user, int rank, uint64_t calls, mui_lack why, char *out, size_t size);

/* First member of every transport's group. */
struct mu_group {
    const mui_group_ops *ops;
    mu_context *context;
    int rank, size;
    double timeout_seconds, warn_seconds;
    mu_status broken;             /* sticky: the first failure, MU_OK while whole */
    char broken_text[1280];
    uint64_t calls;               /* collectives started so far, alike on all ranks */
    mui_lack_fn lack;             /* of whoever has collectives running, or NULL */
    void *lack_user;
    char skip_text[MUI_IDENTITY_TEXT + 32];
    bool skip_within;             /* what was skipped is MUI_KIND_WITHIN on the ranks that did not abandon */
    int last_rank;                /* of the request reported last: who came to it last, */
    double last_seconds;          /* and how long after the rank before it */
};

/* First member of every transport's request. */
struct mu_request {
    mu_group *group;
    uint64_t number; /* of the collective, from 0 */
};

/* That a wait has lasted so long that the others' names are to be logged. */
static inline bool mui_wait_is_long(const mu_group *g, double seconds)
{
    return seconds >= g->warn_seconds || (seconds >= 0.1 && mui_context_warns_soon(g->context, 0.1));
}

/* With identity, for the reducer. */
mu_request *mui_all_reduce_start(mu_group *g, void *data, int64_t count, mu_dtype type, mu_reduce_op op,
                                 const mui_identity *identity);
/* After MU_SKIPPED: who and why, valid until the next collective. */
const char *mui_group_skip_text(const mu_group *g);

#endif
