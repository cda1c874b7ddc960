/* What a reducer is made of, for its files: reducer.c (launching), bucket.c (a bucket's memory), bucket_hook.c (hooks),
 * lack.c (what a rank owes). */
#ifndef MUI_REDUCER_STATE_H
#define MUI_REDUCER_STATE_H

#include "ddp/reducer.h"

enum { MUI_OTHER_REQUESTS = 4 }; /* beside buckets: buffers, and what else is in flight */

struct mui_reducer {
    mu_context *context;
    mu_group *group;
    const char *kind;
    char *name;
    uint64_t id;
    int words; /* of participation bits, for each slice */

    mui_slice *slices;
    int64_t count;
    mui_slice_bucket *buckets;
    int64_t bucket_count;
    char *slab;
    uint64_t layout_hash;
    int64_t *bucket_of; /* of each slice */
    uint8_t *states;
    uint8_t *seen;         /* became ready in this reduction */
    int64_t *pending;      /* slices each bucket still waits for */
    mu_request **requests; /* of each bucket; NULL when done or not started */
    mui_bucket_times *times; /* of each bucket */
    uint64_t *numbers;     /* of each launched bucket's collective in the group */
    uint32_t *masks;       /* of each slice, words each, after wait */
    uint32_t *bad;         /* of each bucket, words each, after wait */
    int64_t *ready_order;
    int64_t ready_count;

    uint64_t sequence;
    mui_reduction how;
    mui_identity identity;
    int64_t launched;  /* buckets launched so far: the next one */
    int64_t completed; /* requests seen to be done; they complete in order */
    bool abandoned, skipped, launched_bad;
    mu_status failed;
    int64_t total_samples;
    int64_t first_bad;
    int last_rank;
    double last_seconds;

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

/* -- bucket.c: what is done to a bucket's memory, in its element type ------------------------------------------- */
int mui_reducer_words(const mu_group *g);
/* Zeros for slices this rank has nothing for, and the tail. */
void mui_bucket_fill(mui_reducer *r, const mui_slice_bucket *b);
/* Keeps what the tail says. */
void mui_bucket_read_tail(mui_reducer *r, int64_t index);
/* Divides a weighted sum. */
void mui_bucket_divide(void *data, mu_dtype type, size_t n, int64_t total_samples);
/* First slice with a value that is not finite in this rank's slab, -1 if there is none. */
int64_t mui_reducer_find_bad(const mui_reducer *r);
bool mui_mask_has(const uint32_t *mask, int rank);

/* -- reducer.c -------------------------------------------------------------------------------------------------- */
/* An all-reduce could not be started: this rank's fault alone must not keep the others waiting. */
void mui_reducer_start_failed(mui_reducer *r);

/* -- bucket_hook.c ---------------------------------------------------------------------------------------------- */
/* Whether any rank's part was not finite: all ranks agree on the first slice then, and no hook is called. Else calls
 * the hook for each bucket. Tails have been read. */
mu_status mui_reducer_run_hook(mui_reducer *r) MU_MUST_USE;
/* All ranks agree on the first slice that is not finite on any of them, each of which has looked at what it has. */
mu_status mui_reducer_agree_bad(mui_reducer *r) MU_MUST_USE;
/* A mui_lack_fn of a reducer whose reduction is running. */
void mui_reducer_lack(void *user, int rank, uint64_t calls, mui_lack why, char *out, size_t size);

#endif
