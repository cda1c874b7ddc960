/* What the events of traces say together: counts by kind, and how much of the communication lay within backward. Events come
 * one by one; what is kept of them is bounded. */
#ifndef MUI_TRACE_TALLY_H
#define MUI_TRACE_TALLY_H

#include "base/context.h"
#include <jansson.h>
#include <muster/trace.h>

typedef struct mui_interval {
    int64_t from, to;
} mui_interval;

typedef struct mui_intervals {
    mui_interval *items;
    size_t count, capacity;
} mui_intervals;

/* An asynchronous event that has begun. */
typedef struct mui_begun {
    uint64_t identity; /* hash of category and id */
    int64_t at;
} mui_begun;

typedef struct mui_tally_rank {
    mu_trace_rank rank;      /* what the summary will show */
    char *file;              /* whose head named the rank; NULL: none did */
    int64_t add;             /* nanoseconds, to its times as they are in the file */
    mui_begun *begun;
    size_t begun_count, begun_capacity;
    mui_intervals backward;  /* that may yet overlap with buckets */
    mui_intervals buckets;   /* of the reduction that is being read */
    uint64_t reduction;      /* hash of whose and which */
} mui_tally_rank;

typedef struct mui_tally {
    mu_context *context;
    mui_tally_rank *ranks; /* by number */
    size_t count, capacity, last;
    mu_trace_kind kinds[65];
    int kind_count;
    int64_t events;
} mui_tally;

/* The rank of that number, made when it is new; NULL without memory. */
mui_tally_rank *mui_tally_rank_of(mui_tally *t, int64_t number);
/* One event that is not metadata. at and took: nanoseconds, took only of ph "X". rank may be NULL: not one of ours. */
mu_status mui_tally_add(mui_tally *t, mui_tally_rank *rank, const json_t *event, int64_t at, int64_t took) MU_MUST_USE;
/* All have come. The summary, as one block of memory that holds its names and ranks, to be freed with mui_free; NULL without
 * memory. */
mu_trace_summary *mui_tally_finish(mui_tally *t);
void mui_tally_free(mui_tally *t);

#endif
