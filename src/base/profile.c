/* Tallies by kind. Replicas' threads add to one context's, so they are atomics; that timers nest is each thread's own. */
#include "base/profile.h"
#include "base/alloc.h"
#include "base/os.h"

static const char *const names[MUI_KIND_COUNT] = {
    [MUI_KIND_CONV_FORWARD] = "conv_forward",
    [MUI_KIND_CONV_BACKWARD_DATA] = "conv_backward_data",
    [MUI_KIND_CONV_BACKWARD_WEIGHTS] = "conv_backward_weights",
    [MUI_KIND_GEMM] = "gemm",
    [MUI_KIND_NORM_FORWARD] = "batch_norm_forward",
    [MUI_KIND_NORM_BACKWARD] = "batch_norm_backward",
    [MUI_KIND_POOL_FORWARD] = "pool_forward",
    [MUI_KIND_POOL_BACKWARD] = "pool_backward",
    [MUI_KIND_ELEMENTWISE] = "elementwise",
    [MUI_KIND_COPY] = "copy",
    [MUI_KIND_SUM] = "sum",
    [MUI_KIND_LOSS] = "loss",
    [MUI_KIND_REORDER] = "reorder",
    [MUI_KIND_WEIGHT_REORDER] = "weight_reorder",
    [MUI_KIND_OPTIMIZER] = "optimizer",
    [MUI_KIND_ALL_REDUCE] = "all_reduce",
    [MUI_KIND_ALL_REDUCE_WAIT] = "all_reduce_wait",
    [MUI_KIND_LOADER_WAIT] = "loader_wait",
};

/* Whole numbers, so that they can be added to without a lock: nanoseconds last for centuries, flops for days. */
typedef struct tally {
    uint64_t calls, nanoseconds, flops, bytes;
} tally;

struct mui_profile {
    tally of[MUI_KIND_COUNT];
    mu_profile_row rows[MUI_KIND_COUNT]; /* as last asked for */
};

static _Thread_local mui_timer *innermost;

struct mui_profile *mui_profile_new(mu_context *c)
{
    return mui_calloc(c, 1, sizeof(struct mui_profile));
}

void mui_timer_begin(mui_timer *t, mui_kind kind)
{
    bool own_row = innermost == NULL || kind == MUI_KIND_REORDER || kind == MUI_KIND_WEIGHT_REORDER;
    if (!own_row) {
        t->profile = NULL;
        return;
    }
    t->kind = kind;
    t->within = 0;
    t->outer = innermost;
    innermost = t;
    t->began = mui_now();
}

void mui_timer_end(mui_timer *t, double flops, double bytes)
{
    double elapsed = mui_now() - t->began, own = elapsed - t->within;
    innermost = t->outer;
    if (t->outer != NULL) {
        t->outer->within += elapsed;
    }
    tally *sum = &t->profile->of[t->kind];
    mui_count(&sum->calls, 1);
    mui_count(&sum->nanoseconds, own > 0 ? (uint64_t)(own * 1e9) : 0);
    mui_count(&sum->flops, (uint64_t)flops);
    mui_count(&sum->bytes, (uint64_t)bytes);
}

int mu_context_profile(const mu_context *c, const mu_profile_row **rows)
{
    struct mui_profile *p = c != NULL ? c->profile : NULL;
    int n = 0;
    for (int k = 0; p != NULL && k < MUI_KIND_COUNT; k++) {
        const tally *t = &p->of[k];
        uint64_t calls = mui_counted(&t->calls);
        if (calls > 0) {
            p->rows[n++] = (mu_profile_row){names[k], calls, 1e-9 * (double)mui_counted(&t->nanoseconds),
                                            (double)mui_counted(&t->flops), (double)mui_counted(&t->bytes)};
        }
    }
    *rows = p != NULL ? p->rows : NULL;
    return n;
}

void mu_context_profile_reset(mu_context *c)
{
    for (int k = 0; c != NULL && c->profile != NULL && k < MUI_KIND_COUNT; k++) {
        tally *t = &c->profile->of[k];
        uint64_t *counters[] = {&t->calls, &t->nanoseconds, &t->flops, &t->bytes};
        for (int i = 0; i < 4; i++) {
            __atomic_store_n(counters[i], 0, __ATOMIC_RELAXED);
        }
    }
}
