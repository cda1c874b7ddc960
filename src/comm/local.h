/* The one engine behind self, threads and shm: ranks of one machine over a shared region.
 *
 * Every collective is a call with a number. A rank posts a call in its slot, waits until all ranks have posted theirs,
 * compares all of them, and then does its part in steps; a step begins when all ranks have done the one before. Calls
 * in flight are worked on together and complete in order. Nothing here blocks but mui_local_wait. */
#ifndef MUI_LOCAL_H
#define MUI_LOCAL_H

#include "comm/verdict.h"

typedef enum mui_call_state {
    MUI_QUEUED = 0, /* no free slot yet */
    MUI_POSTED,     /* waiting for the others to post theirs */
    MUI_MOVING,     /* all agree, data moves in steps */
    MUI_FINISHED,   /* waiting for earlier calls */
    MUI_REPORTABLE  /* out of the queue, status is final */
} mui_call_state;

typedef struct mui_call {
    mu_request base;
    struct mui_call *next;     /* in the queue, or in the free list */
    struct mui_call *next_all; /* of all that were ever allocated */
    mui_call_spec spec;        /* its identity pointer is not used */
    mui_identity identity;
    bool identified;
    uint64_t offset;
    mui_call_state state;
    mu_status status;
    int seen;                  /* ranks below have posted, or have done step `stage` */
    uint64_t stage, stages;    /* steps done by this rank, steps in all */
    bool direct;               /* no staging: peers reach the data itself */
    double polled;             /* when a test first found it undone; 0: not yet */
    mui_verdict verdict;
} mui_call;

typedef struct mui_block {
    size_t offset, bytes;
    bool used;
} mui_block;

/* A wait that has become long. */
typedef struct mui_stall {
    uint64_t warned;    /* number of the call somebody is late for, + 1; 0: nobody is, or nothing was said yet */
    double since;       /* when that wait began */
    char who[80];
    /* The rank looked at last, and since when it has told nothing new. */
    int rank;
    uint32_t turn;
    double still_since;
} mui_stall;

typedef struct mui_local {
    mu_group base;
    mui_region region;
    bool own_region;           /* else it is a thread world's */
    bool oversubscribed;       /* more ranks than cores */
    int *pidfds;               /* of the peers, own entry -1; NULL for threads */
    mui_rank_block *me;

    uint64_t posted;           /* calls */
    uint64_t completed;
    uint64_t all_completed;    /* what every rank is known to have completed */
    mui_call *first, *last;    /* the queue, in order of number */
    mui_call *free_calls, *all_calls;

    mui_block *blocks;         /* the arena's heap, sorted, without gaps; the same on all ranks */
    size_t block_count, block_capacity;
    size_t populated;          /* bytes of the own arena that have pages */
    size_t fresh;              /* bytes of the arenas from here on were never handed out: they are zero */

    uint64_t moves;            /* counts progress, to tell waiting from working */
    double last_look;          /* seconds */
    mui_stall stall;
    mui_beacon_link beacon;
} mui_local;

/* local.c. Takes the region and pidfds also on failure. */
mu_group *mui_local_open(mu_context *c, const mui_group_ops *ops, int rank, mui_region region, bool own_region,
                         int *pidfds, const mu_group_options *options);
extern const mui_group_ops mui_self_ops, mui_threads_ops, mui_shm_ops;
/* Fills zero fields: timeout from MUSTER_TIMEOUT or 600, warning 10, arena. */
mu_status mui_group_settings(mu_context *c, const mu_group_options *options, mu_group_options *out) MU_MUST_USE;

/* call.c */
mu_status mui_calls_reserve(mui_local *g, size_t count) MU_MUST_USE; /* so many calls exist */
mui_call *mui_call_start(mui_local *g, const mui_call_spec *spec); /* NULL with an error raised */
bool mui_local_progress(mui_local *g);                             /* true when something moved */
mu_status mui_local_run(mui_local *g, const mui_call_spec *spec);  /* start and wait */
mu_status mui_local_test(mu_request *r, bool *done);
mu_status mui_local_wait(mu_request *r);
/* True when rank q has not done what this call now waits for. */
bool mui_call_lacks(const mui_local *g, const mui_call *call, int q);
void mui_call_fail_all(mui_local *g, mu_status status);
void mui_calls_free(mui_local *g);

/* patience.c */
typedef struct mui_patience {
    double since;      /* of this wait, or of the last progress in it */
    double spin_since;
    uint64_t moves;
    int turns;
} mui_patience;
void mui_patience_step(mui_local *g, mui_patience *p); /* one turn of waiting; may break the group */
void mui_wake_others(mui_local *g);                    /* after news that peers may sleep for */
/* Breaks the group on this rank and, if nobody did before, on all; an earlier reason replaces this one. */
mu_status mui_local_break(mui_local *g, mu_status status, const char *text);
/* The same without an error in this rank's context. */
void mui_local_give_up(mui_local *g, mu_status status, const char *text);

/* missing.c */
bool mui_look_around(mui_local *g, double since); /* deaths, leavers, aborts, time; false: broken now */
void mui_stall_over(mui_local *g);                /* the call that was warned about is complete */

/* transfer.c */
void mui_transfer_plan(const mui_local *g, mui_call *call);        /* direct and stages */
void mui_transfer_step(const mui_local *g, mui_call *call);        /* the work of step `stage` */
void mui_transfer_finish(const mui_local *g, mui_call *call);      /* after all steps of all ranks */
size_t mui_call_bytes(const mui_call *call);                       /* of what a rank brings */
uint64_t mui_call_offset(const mui_local *g, const mui_call *call); /* to post */

static inline mui_rank_block *mui_block_of(const mui_local *g, int rank)
{
    return &g->region.control->ranks[rank];
}

static inline mui_slot *mui_slot_of(const mui_local *g, int rank, uint64_t number)
{
    return &mui_block_of(g, rank)->slots[number % MUI_SLOTS];
}

static inline mui_posts mui_posts_of(const mui_local *g, const mui_call *call)
{
    return (mui_posts){mui_slot_of(g, 0, call->base.number), sizeof(mui_rank_block), g->base.size};
}

#endif
