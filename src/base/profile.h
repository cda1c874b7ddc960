/* Timers around what may be slow: kernels, the optimiser, waits. One branch each when the context has no profile.
 * Timers of one thread nest; the rules of <muster/profile.h> say to whom a moment belongs. */
#ifndef MUI_PROFILE_H
#define MUI_PROFILE_H

#include "base/context.h"
#include <muster/profile.h>

typedef enum mui_kind {
    MUI_KIND_CONV_FORWARD,
    MUI_KIND_CONV_BACKWARD_DATA,
    MUI_KIND_CONV_BACKWARD_WEIGHTS,
    MUI_KIND_GEMM,
    MUI_KIND_NORM_FORWARD,
    MUI_KIND_NORM_BACKWARD,
    MUI_KIND_POOL_FORWARD,
    MUI_KIND_POOL_BACKWARD,
    MUI_KIND_ELEMENTWISE,
    MUI_KIND_COPY,
    MUI_KIND_SUM,
    MUI_KIND_LOSS,
    MUI_KIND_REORDER,
    MUI_KIND_WEIGHT_REORDER,
    MUI_KIND_OPTIMIZER,
    MUI_KIND_ALL_REDUCE,
    MUI_KIND_ALL_REDUCE_WAIT,
    MUI_KIND_LOADER_WAIT,
    MUI_KIND_COUNT
} mui_kind;

struct mui_profile;
struct mui_profile *mui_profile_new(mu_context *c);

/* On the stack of what is timed; every start has its stop on the same thread, innermost first. */
typedef struct mui_timer {
    struct mui_profile *profile; /* NULL: counts nothing */
    struct mui_timer *outer;
    mui_kind kind;
    double began, within; /* within: seconds of inner timers that have a row of their own */
} mui_timer;
void mui_timer_begin(mui_timer *t, mui_kind kind);
void mui_timer_end(mui_timer *t, double flops, double bytes);

static inline void mui_timer_start(mui_timer *t, const mu_context *c, mui_kind kind)
{
    t->profile = c != NULL ? c->profile : NULL;
    if (t->profile != NULL) {
        mui_timer_begin(t, kind);
    }
}

static inline void mui_timer_stop(mui_timer *t, double flops, double bytes)
{
    if (t->profile != NULL) {
        mui_timer_end(t, flops, bytes);
    }
}

#endif
