/* What the files of a trace share. Not for others. */
#ifndef MUI_TRACE_STATE_H
#define MUI_TRACE_STATE_H

#include "base/trace.h"

#include <pthread.h>

enum {
    MUI_TRACE_DEPTH = 64,      /* spans open at a time; deeper ones are not seen */
    MUI_TRACE_LANES = 257,     /* the context's own thread and replicas */
    MUI_TRACE_STEPS = 1000000, /* "thread" of the steps, beside those */
    MUI_TRACE_NAME = 2000      /* bytes of a name in JSON, quotes included; longer ones are cut */
};

/* A name as JSON, quotes and all. Never moves. */
typedef struct mui_trace_name {
    struct mui_trace_name *next; /* of the same hash */
    uint64_t hash;
    size_t length; /* of plain */
    char *plain;   /* behind json */
    char json[];
} mui_trace_name;

typedef struct mui_trace_record {
    const mui_trace_name *name;  /* of buckets: whose they are */
    const mui_trace_name *path;  /* of files; or NULL */
    int64_t began, took;         /* nanoseconds */
    int64_t bytes, number;       /* number: the step's, the reduction's */
    int64_t launched;            /* of buckets, after `began` */
    int32_t index;               /* of buckets: which; -1: no bucket */
    uint16_t lane;
    uint8_t kind;
} mui_trace_record;

typedef enum mui_frame_kind {
    MUI_FRAME_STAGE, /* forward, backward, ... */
    MUI_FRAME_PART,  /* a module */
    MUI_FRAME_USER   /* mu_trace_begin */
} mui_frame_kind;

/* A span that is open. */
typedef struct mui_trace_frame {
    mui_frame_kind what;
    mui_stage stage;
    const mui_trace_name *name; /* of a module: its path, from the root; NULL: no memory */
    const mui_trace_name *file;
    uint8_t kind;
    int64_t began;
} mui_trace_frame;

/* What one thread has open. Only that thread looks at it, and at the end the one that closes. */
typedef struct mui_trace_lane {
    mui_trace_frame frames[MUI_TRACE_DEPTH];
    int depth;
    int unseen; /* mu_trace_begin beyond that depth */
} mui_trace_lane;

enum { MUI_TRACE_BUCKETS = 1024 }; /* of the table of names */

struct mui_trace {
    mu_context *context;
    char *path;
    int fd;
    bool started;

    pthread_mutex_t lock; /* all of this block; the writer alone reads records from tail to head without it */
    pthread_cond_t news;
    mui_trace_record *ring;
    uint64_t capacity, head, tail, dropped;
    bool stop, nudged;
    mui_trace_name *names[MUI_TRACE_BUCKETS];

    pthread_t writer;
    double flush_seconds;
    int write_error; /* errno; the writer's, and after it whoever closes */
    char *text;      /* what is to be written next */
    size_t used;
    uint64_t identities; /* of asynchronous events so far */
    int rank;

    mui_trace_lane *lanes[MUI_TRACE_LANES];

    /* Steps: the context's own thread. */
    bool step_open, step_told; /* told: mu_trace_step was called */
    int64_t step, step_began;
    const void *tape; /* whose resets are steps, when nobody tells them */
};

/* -- trace.c -- */
/* NULL only when there is no memory. */
const mui_trace_name *mui_trace_name_of(mui_trace *t, const char *text, size_t length);
void mui_trace_put(mui_trace *t, const mui_trace_record *r);
/* -- trace_places.c -- */
void mui_trace_close_lanes(mui_trace *t);
void mui_trace_free_lanes(mui_trace *t);
int mui_trace_lane_of(mu_context *c);
/* -- trace_write.c -- */
void mui_trace_write_head(mui_trace *t, const mui_trace_head *head);
bool mui_trace_write_begin(mui_trace *t);
/* Writes the rest and the end; the writer is gone then. */
void mui_trace_write_end(mui_trace *t);

#endif
