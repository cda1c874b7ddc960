/* What a reducer is made of, for its files: reducer.c (launching), bucket_hook.c (hooks), lack.c (what a rank owes). */
#ifndef MUI_REDUCER_STATE_H
#define MUI_REDUCER_STATE_H

#include "ddp/reducer.h"

/* A bucket's tail holds, for each slice, one bit for each rank that contributed (MASK_BITS ranks to a float), then a
 * bit for each rank whose part was not finite, then this rank's samples in two parts. All are sums of small integers,
 * exact in a float; a mean divides them by the number of ranks, and rounding after multiplying back is exact again: the
 * error is below 2^MASK_BITS times a few ulps. */
enum { MASK_BITS = 20, SAMPLE_FLOATS = 2, SAMPLE_LOW = 4096 };
enum { OTHER_REQUESTS = 4 }; /* beside buckets: buffers, and what else is in flight */

struct mui_reducer {
    mu_context *context;
    mu_group *group;
    char *name;
    uint64_t id;
    int words; /* mask floats of a slice */

    mui_slice *slices;
    int64_t count;
    mui_slice_bucket *buckets;
    int64_t bucket_count;
    float *slab;
    uint64_t layout_hash;
    int64_t *bucket_of; /* of each slice */
    uint8_t *states;
    uint8_t *seen;         /* became ready in this reduction */
    int64_t *pending;      /* slices each bucket still waits for */
    mu_request **requests; /* of each bucket; NULL when done or not started */
    uint64_t *numbers;     /* of each launched bucket's collective in the group */
    float *masks;          /* of each slice, words each, after wait */
    float *bad;            /* of each bucket, words each, after wait */
    int64_t *ready_order;
    int64_t ready_count;

    uint64_t sequence;
    mui_reduction how;
    mui_identity identity;
    int64_t launched;  /* buckets launched so far: the next one */
    int64_t completed; /* requests seen to be done; they complete in order */
    bool abandoned, skipped;
    mu_status failed;
    int64_t total_samples;
    int64_t first_bad;

    mu_bucket_hook hook; /* NULL: the built-in all-reduce */
    void *hook_user;
    char *hook_name;
    bool in_hook;
    uint64_t layouts;           /* how often the buckets were cut */
    mu_bucket_parameter *views; /* for the hook, room for the bucket with the most slices */

    char text[MUI_IDENTITY_TEXT];
    char abandon_text[MUI_IDENTITY_TEXT];
    char skip_text[2 * MUI_IDENTITY_TEXT];
};

/* First slice with a value that is not finite in this rank's slab, -1 if there is none. */
int64_t mui_reducer_find_bad(const mui_reducer *r);
/* An all-reduce that could not be started: this rank's fault alone must not keep the others waiting. */
void mui_reducer_start_failed(mui_reducer *r);
/* Whether any rank's part was not finite: all ranks agree on the first slice then, and no hook is called. Else calls
 * the hook for each bucket. Tails have been read. */
mu_status mui_reducer_run_hook(mui_reducer *r) MU_MUST_USE;
/* A mui_lack_fn of a reducer whose reduction is running. */
void mui_reducer_lack(void *user, int rank, uint64_t calls, mui_lack why, char *out, size_t size);

#endif
