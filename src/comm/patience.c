/* Waiting for other ranks: spinning, sleeping, and breaking off. Not for: reasons to (missing.c).
 *
 * With a core for each rank, spinning for some 50 us beats any sleep (a wake-up costs 40 to 220 us on virtual
 * machines); with more ranks than cores, whoever spins keeps the awaited rank from running. */
#define _GNU_SOURCE
#include "base/os.h"
#include "comm/local.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_SECONDS 50e-6
#define CROWDED_PAUSES 200
#define CROWDED_YIELDS 10
#define NAP_NANOSECONDS 20000000L /* a death is noticed after about this */
#define LOOK_SECONDS 0.018

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* -- breaking ---------------------------------------------------------------------------------------------------- */
void mui_local_give_up(mui_local *g, mu_status status, const char *text)
{
    mui_control *control = g->region.control;
    if (g->base.broken != MU_OK) {
        return;
    }
    uint32_t was = 0;
    if (__atomic_compare_exchange_n(&control->abort_state, &was, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        control->abort_status = status;
        snprintf(control->abort_text, sizeof(control->abort_text), "%s", text);
        __atomic_store_n(&control->abort_state, 2, __ATOMIC_SEQ_CST); /* pairs with the acquires of abort_state */
        mui_wake_others(g);
    }
    /* Whoever claimed it may have died in between: then our own reason stands. */
    for (int i = 0; was == 1 && i < 10000; i++) {
        was = __atomic_load_n(&control->abort_state, __ATOMIC_ACQUIRE);
        pause_briefly();
    }
    if (was == 2) {
        status = (mu_status)control->abort_status;
        text = control->abort_text;
    }
    g->base.broken = status;
    snprintf(g->base.broken_text, sizeof(g->base.broken_text), "%s", text);
    mui_call_fail_all(g, status);
}

mu_status mui_local_break(mui_local *g, mu_status status, const char *text)
{
    mui_local_give_up(g, status, text);
    return mui_fail(g->base.context, g->base.broken, "%s", g->base.broken_text);
}

/* -- waiting ----------------------------------------------------------------------------------------------------- */
void mui_wake_others(mui_local *g)
{
    int core = sched_getcpu();
    if (g->me->core != core) { /* only this rank writes it */
        __atomic_store_n(&g->me->core, core, __ATOMIC_RELAXED);
    }
    for (int r = 0; r < g->base.size; r++) {
        mui_rank_block *b = mui_block_of(g, r);
        if (r == g->base.rank || __atomic_load_n(&b->sleeping, __ATOMIC_SEQ_CST) == 0) {
            continue;
        }
        if (__atomic_exchange_n(&b->sleeping, 0, __ATOMIC_SEQ_CST) != 0) {
            __atomic_fetch_add(&b->event, 1, __ATOMIC_SEQ_CST); /* pairs with the futex's own look */
            syscall(SYS_futex, &b->event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        }
    }
}

/* True when somebody woke us or there was news. */
static bool nap(mui_local *g)
{
    mui_rank_block *me = g->me;
    uint32_t event = __atomic_load_n(&me->event, __ATOMIC_SEQ_CST);
    __atomic_store_n(&me->sleeping, 1, __ATOMIC_SEQ_CST); /* pairs with the load in mui_wake_others */
    bool news = mui_local_progress(g);
    if (!news) {
        struct timespec nap_time = {.tv_nsec = NAP_NANOSECONDS};
        news = syscall(SYS_futex, &me->event, FUTEX_WAIT, event, &nap_time, NULL, 0) == 0 || errno == EAGAIN;
    }
    __atomic_store_n(&me->sleeping, 0, __ATOMIC_SEQ_CST);
    return news;
}

/* There may be cores enough for all ranks, but on a busy machine two may have been put on one. */
static bool awaited_is_on_our_core(const mui_local *g)
{
    const mui_call *call = g->first;
    if (call == NULL || call->seen >= g->base.size || call->seen == g->base.rank) {
        return false;
    }
    return __atomic_load_n(&mui_block_of(g, call->seen)->core, __ATOMIC_RELAXED) == sched_getcpu();
}

void mui_patience_step(mui_local *g, mui_patience *p)
{
    if (p->turns == 0) {
        p->spin_since = mui_now();
        if (p->since == 0.0 || p->moves != g->moves) {
            p->since = p->spin_since;
            p->moves = g->moves;
        }
    }
    p->turns++;
    if (awaited_is_on_our_core(g)) {
        /* It cannot come while we spin. */
    } else if (g->oversubscribed) {
        if (p->turns <= CROWDED_PAUSES) {
            pause_briefly();
            return;
        }
        if (p->turns <= CROWDED_PAUSES + CROWDED_YIELDS) {
            sched_yield();
            return;
        }
    } else if (p->turns % 16 != 0 || mui_now() - p->spin_since < SPIN_SECONDS) {
        pause_briefly();
        return;
    }
    if (nap(g)) {
        p->turns = 0;
    }
    if (mui_now() - g->last_look >= LOOK_SECONDS) {
        (void)mui_look_around(g, p->moves == g->moves ? p->since : mui_now());
    }
}
