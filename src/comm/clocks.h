/* How clocks of ranks differ, from messages between them. */
#ifndef MUI_CLOCKS_H
#define MUI_CLOCKS_H

#include "comm/group.h"

/* Alike where one clock is shared: one kernel, one time namespace. */
uint64_t mui_clock_id(void);

/* What is known of (reference's clock) - (own clock), in nanoseconds: it lies between these. */
typedef struct mui_clock_bounds {
    int64_t least, most;
} mui_clock_bounds;
void mui_clock_unknown(mui_clock_bounds *b);
/* A message each way, of the same round: no message arrives before it was sent. Each *_before is of before sending, each
 * *_after of after receiving the other's. */
void mui_clock_learn(mui_clock_bounds *b, int64_t before, int64_t after, int64_t reference_before, int64_t reference_after);
/* Their middle, and how far from it they are. */
void mui_clock_best(const mui_clock_bounds *b, int64_t *offset, int64_t *error);

/* Collective: finds bounds of rank 0's clock against each rank's own; now is the clock (mui_trace_now). */
mu_status mui_clock_compare(mu_group *g, int64_t (*now)(void), mui_clock_bounds *out) MU_MUST_USE;

#endif
