/* The loader without the tape: batches as plain memory. loader.c has the consumer's side, workers.c the threads',
 * loader_next.c the way onto the tape. */
#ifndef MUI_LOADER_H
#define MUI_LOADER_H

#include "data/augment.h"
#include "data/dataset.h"
#include "data/sampler.h"

/* One batch in the ring. Samples are claimed in chunks; the batch is ready when as many are done as it has. */
typedef struct mui_slot {
    int64_t step;      /* which batch of the epoch is (being) loaded here */
    mui_part slice;
    int64_t claimed, done; /* samples; under the loader's lock */
    float *x;          /* (batch, elements) */
    int64_t *y;        /* (batch) */
    int64_t *indices;  /* (batch) */
    mui_trouble *trouble; /* (batch), status MU_OK for good samples */
} mui_slot;

typedef struct mui_worker {
    struct mu_loader *loader;
    pthread_t thread;
    mui_scratch scratch;
    float *raw; /* (elements), a user's sample before augmentation; NULL when not needed */
} mui_worker;

struct mu_loader {
    mu_context *context;
    mu_dataset *dataset;
    mui_sampler sampler;
    mui_augment augment;
    int64_t epoch;
    int64_t step;        /* next batch the consumer gets */
    bool started;        /* rewound at least once */
    bool stopped;        /* at an error, until the next rewind */
    int64_t held;        /* batch whose memory the consumer still has; -1: none */

    mui_slot *slots;     /* batch `step` is in slot step % slot_count */
    int64_t slot_count;
    int64_t chunk;       /* samples claimed at once */

    mui_worker *workers;       /* thread_count of them; [0] is the caller's when thread_count is 0 */
    int thread_count, running; /* wanted; created */

    /* Shared with the threads, under lock. */
    pthread_mutex_t lock;
    pthread_cond_t work;  /* there may be something to claim, or to end for */
    pthread_cond_t ready; /* a batch became ready, or a thread became idle */
    int64_t fill;         /* the batch whose samples are being claimed */
    int64_t limit;        /* batches below it have a free slot */
    int busy;             /* threads with a chunk in hand */
    bool paused;          /* claim nothing */
    bool closing;
    int cancel;           /* atomic: give up chunks in hand; their batches will not be read */
};

/* A batch as plain memory, valid until the next call. */
typedef struct mui_loaded {
    float *x;
    int64_t *y, *indices;
    int64_t samples, total_samples;
} mui_loaded;

/* Like mu_loader_next, without the tape. */
bool mui_loader_take(mu_loader *l, mui_loaded *out);

/* -- workers.c --------------------------------------------------------------------------------------------------- */
/* Creates the threads if they are not running. */
mu_status mui_workers_start(mu_loader *l) MU_MUST_USE;
/* Returns when no thread has a chunk in hand and none will claim one. */
void mui_workers_pause(mu_loader *l);
/* Loading goes on from batch `first`. Only when paused. */
void mui_workers_resume(mu_loader *l, int64_t first);
/* Ends and joins all threads. */
void mui_workers_stop(mu_loader *l);
/* Waits until batch `step` is ready, or loads it here when there are no threads. */
mui_slot *mui_workers_wait(mu_loader *l, int64_t step);
/* The slot of batch `step` may be used again. */
void mui_workers_release(mu_loader *l, int64_t step);

#endif
