/* The reducer: averages slices of one flat slab over a group, bucket by bucket, while they are being made.
 *
 * It knows parameters as (name, slice of the slab), buckets and a group: nothing of tensors, tapes or modules. Whoever
 * drives it says which parameters will come (begin), when each is complete (ready), and when none will come any more
 * (launch_rest); wait then tells who contributed to what on all ranks.
 *
 * Every reduction runs the same collectives in the same order on every rank, one for each bucket, whatever happens on
 * a rank: one that cannot go on posts abandonments in the place of the buckets it has not launched yet. So no rank
 * waits for another that failed, and all are in step for the next reduction. */
#ifndef MUI_REDUCER_H
#define MUI_REDUCER_H

#include "comm/group.h"
#include <muster/hooks.h>

/* Of a rank in one reduction, so that sums of weights stay exact. Defaults of what cuts slices into buckets. */
enum { MUI_MAX_SAMPLES = 1 << 24, MUI_BUCKET_BYTES = 25 << 20, MUI_FIRST_BUCKET_BYTES = 1 << 20 };

typedef struct mui_reducer mui_reducer;

/* Kinds of identities used by this floor; a group's own are below. */
enum { MUI_KIND_WRAP = 0x1000, MUI_KIND_CHANGE, MUI_KIND_CHECK, MUI_KIND_MEAN, MUI_KIND_WEIGHTED, MUI_KIND_BUFFERS,
       MUI_KIND_HOOKS, MUI_KIND_BAD, MUI_KIND_ALONE, MUI_KIND_AVERAGE, MUI_KIND_GATHER };

typedef struct mui_slice {
    const char *name; /* of whoever made the layout; must stay valid */
    size_t offset;    /* in bytes, from the start of the slab */
    size_t elements;  /* of the bucket's type, padding included */
    mu_dims dims;     /* for hooks: shape, and whether the slice begins with the elements in its order */
    bool row_major;
} mui_slice;

typedef struct mui_slice_bucket {
    mu_dtype dtype;       /* of all its slices: MU_F32 or MU_F64 */
    int64_t first, count; /* of the slices, in order */
    size_t offset;        /* in bytes */
    size_t elements;      /* of all slices; contiguous */
    size_t tail;          /* elements that follow, at least mui_reducer_tail(group, count) */
} mui_slice_bucket;

typedef enum mui_slice_state {
    MUI_SLICE_ABSENT = 0, /* this rank adds nothing: the slice is overwritten with zeros */
    MUI_SLICE_EXPECTED,   /* mui_reducer_ready will be called for it */
    MUI_SLICE_READY       /* complete */
} mui_slice_state;

/* What all ranks must agree on in one reduction; differing is MU_ERR_COMM on all of them, with both texts. */
typedef struct mui_reduction {
    bool weighted;       /* slices are multiplied by this rank's samples already; the sum is divided by the total */
    int64_t samples;     /* >= 0, at most MUI_MAX_SAMPLES */
    uint64_t agreement;  /* hash of whatever else must be equal on all ranks */
    uint64_t steps, updates; /* of optimisers on what is reduced: equal on all ranks too, see mui_identity */
    const char *note;    /* of it, for the text; "" */
    bool look;           /* for values that are not finite: costs two passes over the slab */
    bool scatter;        /* each rank needs its own slices alone, see mui_reducer_part */
    bool hold;           /* nothing is launched before launch_rest: backward has collectives of its own to make first */
    const char *abandon; /* this rank takes no part from the start, and why; NULL: it does */
} mui_reduction;

/* id tells reducers of one group apart. kind: what is in front of the name in messages, a literal. name is copied. */
mui_reducer *mui_reducer_new(mu_context *c, mu_group *g, const char *kind, const char *name, uint64_t id);
void mui_reducer_free(mui_reducer *r);

/* Elements that a bucket of so many slices needs after them. */
size_t mui_reducer_tail(const mu_group *g, int64_t count);
/* Neither NaN nor infinite; type MU_F32 or MU_F64. */
bool mui_all_finite(const void *x, mu_dtype type, size_t n);
/* Cuts slices of these bytes, in order, into buckets: one is closed when it has reached its limit (first for the first,
 * cap for all others). Writes counts (room for `count`) and returns the number of buckets. */
int64_t mui_reducer_plan(const size_t *bytes, int64_t count, size_t first, size_t cap, int64_t *counts);
/* Takes over a layout (copied; names are borrowed). hash identifies it on all ranks. */
mu_status mui_reducer_layout(mui_reducer *r, const mui_slice *slices, int64_t count, const mui_slice_bucket *buckets,
                             int64_t bucket_count, void *slab, uint64_t hash) MU_MUST_USE;

/* Leaves bringing the buckets together to this hook, from the next reduction on; NULL: not any more. Only the tails
 * travel at launch then; mui_reducer_wait calls the hook. */
mu_status mui_reducer_set_hook(mui_reducer *r, const char *name, mu_bucket_hook hook, void *user) MU_MUST_USE;

/* Begins reduction number mui_reducer_sequence and launches the buckets that wait for nothing. Never blocks for a
 * peer; failures are kept for mui_reducer_wait. states: one for each slice. */
void mui_reducer_begin(mui_reducer *r, const mui_reduction *how, const uint8_t *states);
/* Slice i is complete (contributes), or will not come after all. */
void mui_reducer_ready(mui_reducer *r, int64_t i, bool contributes);
/* This rank cannot go on: buckets not launched yet will be posted as abandonments. Between begin and wait. Before
 * launch_rest it makes every rank skip, since the last bucket is not launched earlier. */
void mui_reducer_abandon(mui_reducer *r, const char *reason);
/* Launches what is left; slices still expected count as complete. */
void mui_reducer_launch_rest(mui_reducer *r); /* blocks when this rank abandons: see MUI_KIND_WITHIN */
/* Waits for all buckets. MU_OK: the slab holds the mean and the queries below may be used; when weighted and the total
 * of samples is 0, or when there is a hook and mui_reducer_first_bad found one, its content means nothing.
 * MU_SKIPPED: a rank (perhaps this one) abandoned; slices of some buckets may have been reduced, others not. Anything else: the group is broken. */
mu_status mui_reducer_wait(mui_reducer *r) MU_MUST_USE;

/* Starts an identified all-reduce in the same reduction, after launch_rest: buffers. */
mu_request *mui_reducer_start_other(mui_reducer *r, void *data, int64_t count, mu_dtype type, mu_reduce_op op);

/* When a bucket's slices were complete here, when it was launched, and when this rank noticed that it was reduced;
 * seconds of mui_now, of the last reduction. */
typedef struct mui_bucket_times {
    double ready, launched, reduced;
} mui_bucket_times;
/* What this rank has of a bucket after a reduction: all of it, or with `scatter` part 0, its slice, and part 1, the end,
 * which is less than a cache line for each rank and which all have. In elements from the bucket's start. */
typedef struct mui_part {
    size_t from, count;
} mui_part;
bool mui_reducer_scatters(const mui_reducer *r); /* so did the last reduction */
mui_part mui_reducer_part(const mui_reducer *r, const mui_slice_bucket *b, int part);
/* As laid out. */
const mui_slice_bucket *mui_reducer_buckets(const mui_reducer *r);
const mui_bucket_times *mui_reducer_times(const mui_reducer *r); /* one for each bucket */
/* Who came last to the last bucket of the last reduction, and how long after the rank before it. */
int mui_reducer_last_rank(const mui_reducer *r, double *seconds);

int64_t mui_reducer_launched(const mui_reducer *r); /* buckets, in this reduction so far */
bool mui_reducer_on_its_way(const mui_reducer *r, int64_t i); /* slice i: its bucket is launched, others write to it */
/* With `look`: this rank has launched a value that is not finite. */
bool mui_reducer_launched_bad(const mui_reducer *r);
/* First slice that is not finite after a reduction with `look`, -1 if none; the same on all ranks. */
int64_t mui_reducer_first_bad(const mui_reducer *r);
/* Whether that rank's own part of the slice's bucket was not finite. */
bool mui_reducer_bad_on(const mui_reducer *r, int64_t i, int rank);
/* Says so, naming slice and ranks: as an error (MU_ERR_STATE), or in the log (MU_SKIPPED). */
mu_status mui_reducer_not_finite(const mui_reducer *r, bool error) MU_MUST_USE;
uint64_t mui_reducer_sequence(const mui_reducer *r); /* of the running or next reduction, from 1 */
int64_t mui_reducer_total_samples(const mui_reducer *r);
int mui_reducer_ranks(const mui_reducer *r, int64_t i);         /* how many ranks contributed to slice i */
bool mui_reducer_on(const mui_reducer *r, int64_t i, int rank); /* whether that one did */
/* Indices in the order in which they became ready on this rank; *count of them. */
const int64_t *mui_reducer_ready_order(const mui_reducer *r, int64_t *count);
/* "reduction 17 (ddp `name`)": kind and name */
const char *mui_reducer_text(const mui_reducer *r);
/* After MU_SKIPPED: who and why. */
const char *mui_reducer_skip_text(const mui_reducer *r);

#endif
