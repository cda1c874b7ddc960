/* One parallel forward on its tapes, until the reset of the tape that it was part of. Not for other floors. */
#ifndef MUI_PARALLEL_FRAME_H
#define MUI_PARALLEL_FRAME_H

#include "base/team.h"
#include "tape/tape_state.h"

typedef struct mui_replica {
    mu_tape *tape;
    mu_tensor *x, *y;      /* its rows, and what its forward made of them, in plain layout */
    int64_t first, rows;   /* of x */
    int64_t y_first, y_rows;
    size_t settled;        /* late notes that have been brought in with an earlier replica's */
    mui_bound bound;
} mui_replica;

/* Where the replicas' gradients of a parameter are added up. */
typedef struct mui_added {
    const mu_parameter *parameter;
    float *to;
    int64_t floats;
    bool accumulate; /* onto what is there */
} mui_added;

typedef struct mui_frame {
    mui_parallel *owner;   /* NULL: freed meanwhile */
    mu_context *context;
    mu_tape *main;         /* whose step it is part of; NULL: free for the next */
    mui_attachment link;
    mui_replica *replicas; /* as many as the owner has */
    int used;
    bool brief;            /* made for a segment that runs again: goes when its backward has run */
    struct mui_frame *next;
    /* For the threads of the run that is on. */
    mui_parallel_fn fn;
    void *self;
    const mu_tensor *in;   /* forward: all rows, plain */
    bool wants;            /* and a gradient for them */
    const float *dy;       /* backward: of all rows of the result */
    int64_t row;           /* its floats in a row */
    mui_added *sums;       /* arena of the main tape */
    int sum_count;
    int64_t sum_floats;    /* of all sums */
} mui_frame;

struct mui_parallel {
    mu_context *context;
    int count;
    mui_team *team;         /* NULL: not yet */
    mui_engine **engines;
    mui_frame *frames;
};

/* fn for each replica of the frame that is in use, in threads, bound. Then the first replica's error that there is is
 * raised, naming the module at path. */
mu_status mui_frame_run(mui_frame *f, mui_team_fn fn, const char *path) MU_MUST_USE;
/* The op of the node on the main tape; its attribute is a mui_parallel_attr. */
extern const mui_op mui_op_parallel;
typedef struct mui_parallel_attr {
    mui_frame *frame; /* NULL: of a segment that has not been run again */
    bool has_x; /* the first input is x; the others are parameters */
} mui_parallel_attr;
/* mui_check_values of what the node ran. */
mu_status mui_parallel_check(const mui_node *n) MU_MUST_USE;
/* Before the tape's reset: nothing of the frame is needed any more. */
void mui_frame_release(mui_frame *f);
/* Brings the replicas' late notes in. */
void mui_frame_settle(mui_frame *f);

#endif
