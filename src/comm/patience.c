/* Waiting for other ranks: spinning, sleeping, and looking around for reasons not to wait any longer.
 *
 * With a core for each rank, spinning for some 50 us beats any sleep (a wake-up costs 40 to 220 us on virtual
 * machines); with more ranks than cores, whoever spins keeps the awaited rank from running. */
#define _GNU_SOURCE
#include "base/os.h"
#include "comm/local.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
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

/* -- phases: what a rank was last seen doing -------------------------------------------------------------------- */
void mui_phase_set(mui_rank_block *b, const char *text)
{
    char bytes[MUI_PHASE_BYTES] = "";
    size_t n = strnlen(text, sizeof(bytes) - 1);
    memcpy(bytes, text, n);
    uint32_t turn = __atomic_load_n(&b->phase_turn, __ATOMIC_RELAXED);
    /* Acquire keeps the words below from moving up; pairs with the loads in phase_get. */
    (void)__atomic_exchange_n(&b->phase_turn, turn + 1, __ATOMIC_ACQ_REL);
    for (size_t i = 0; i <= n / 8; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        __atomic_store_n(&b->phase[i], word, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&b->phase_turn, turn + 2, __ATOMIC_RELEASE);
}

/* A rank that died while writing leaves the turn odd: after some tries, what is there will do. */
static void phase_get(mui_rank_block *b, char out[MUI_PHASE_BYTES])
{
    for (int tries = 0; tries < 100; tries++) {
        uint32_t before = __atomic_load_n(&b->phase_turn, __ATOMIC_ACQUIRE);
        for (size_t i = 0; i < MUI_PHASE_BYTES / 8; i++) {
            uint64_t word = __atomic_load_n(&b->phase[i], __ATOMIC_ACQUIRE);
            memcpy(out + 8 * i, &word, 8);
        }
        if (before % 2 == 0 && before == __atomic_load_n(&b->phase_turn, __ATOMIC_RELAXED)) {
            break;
        }
    }
    out[MUI_PHASE_BYTES - 1] = '\0';
}

/* "rank 1 (pid 123, after 12 calls, last seen in `forward`)" */
static void name_rank(const mui_local *g, int r, char *out, size_t size)
{
    mui_rank_block *b = mui_block_of(g, r);
    char phase[MUI_PHASE_BYTES] = "", pid[24] = "";
    if (g->pidfds != NULL) {
        snprintf(pid, sizeof(pid), "pid %d, ", (int)b->pid);
    }
    if (__atomic_load_n(&b->state, __ATOMIC_ACQUIRE) == MUI_ABSENT) {
        snprintf(out, size, "rank %d (%snever joined)", r, pid);
        return;
    }
    phase_get(b, phase);
    uint64_t calls = __atomic_load_n(&b->calls, __ATOMIC_RELAXED);
    snprintf(out, size, "rank %d (%safter %" PRIu64 " calls%s%s%s)", r, pid, calls,
             phase[0] != '\0' ? ", last seen in `" : "", phase, phase[0] != '\0' ? "`" : "");
}

static void name_missing(const mui_local *g, const mui_call *call, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (int r = 0; r < g->base.size && used + 1 < size; r++) {
        if (r != g->base.rank && mui_call_lacks(g, call, r)) {
            char one[MUI_PHASE_BYTES + 80];
            name_rank(g, r, one, sizeof(one));
            int n = snprintf(out + used, size - used, "%s%s", used > 0 ? ", " : "", one);
            used += n > 0 ? (size_t)n : 0;
        }
    }
}

static void name_call(const mui_local *g, const mui_call *call, char out[MUI_IDENTITY_TEXT])
{
    if (call->state == MUI_QUEUED) {
        snprintf(out, MUI_IDENTITY_TEXT, "a free slot");
    } else {
        mui_call_describe(mui_slot_of(g, g->base.rank, call->number), out, MUI_IDENTITY_TEXT);
    }
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

/* -- looking around ---------------------------------------------------------------------------------------------- */
/* A rank whose process has ended without closing the group; -1: none. */
static int find_dead(const mui_local *g)
{
    if (g->pidfds == NULL) {
        return -1;
    }
    struct pollfd fds[MUI_MAX_RANKS];
    for (int r = 0; r < g->base.size; r++) {
        fds[r] = (struct pollfd){.fd = g->pidfds[r], .events = POLLIN};
    }
    if (poll(fds, (nfds_t)g->base.size, 0) <= 0) {
        return -1;
    }
    for (int r = 0; r < g->base.size; r++) {
        if (fds[r].revents != 0 && __atomic_load_n(&mui_block_of(g, r)->state, __ATOMIC_ACQUIRE) != MUI_LEFT) {
            return r;
        }
    }
    return -1;
}

/* A rank that closed the group and has not done what call waits for; -1: none. */
static int find_leaver(const mui_local *g, const mui_call *call)
{
    for (int r = 0; r < g->base.size; r++) {
        /* State first: what the rank did before it left is then visible. */
        if (__atomic_load_n(&mui_block_of(g, r)->state, __ATOMIC_ACQUIRE) == MUI_LEFT && mui_call_lacks(g, call, r)) {
            return r;
        }
    }
    return -1;
}

static bool look_at_clock(mui_local *g, double since)
{
    char what[MUI_IDENTITY_TEXT], who[400], text[2 * MUI_BROKEN_BYTES];
    const mui_call *call = g->first;
    double waited = mui_now() - since;
    if (waited >= g->base.timeout_seconds) {
        name_call(g, call, what);
        name_missing(g, call, who, sizeof(who));
        snprintf(text, sizeof(text), "rank %d waited %.1f s for %s: missing %s", g->base.rank, waited, what, who);
        (void)mui_local_break(g, MU_ERR_TIMEOUT, text);
        return false;
    }
    if (waited >= g->base.warn_seconds && !g->warned) {
        g->warned = true;
        name_call(g, call, what);
        name_missing(g, call, who, sizeof(who));
        mui_log(g->base.context, MU_LOG_WARN, "waiting for %.1f s at %s: missing %s", waited, what, who);
    }
    return true;
}

bool mui_look_around(mui_local *g, double since)
{
    g->last_look = mui_now();
    /* What these find happened before now; so did all that those ranks had posted, hence the progress before judging. */
    bool aborted = __atomic_load_n(&g->region.control->abort_state, __ATOMIC_ACQUIRE) == 2;
    int dead = find_dead(g);
    if (mui_local_progress(g) || g->first == NULL) {
        return g->base.broken == MU_OK;
    }
    if (aborted) {
        (void)mui_local_break(g, MU_ERR_PEER, "the group was aborted");
        return false;
    }
    char who[MUI_PHASE_BYTES + 80], what[MUI_IDENTITY_TEXT], text[2 * MUI_BROKEN_BYTES];
    if (dead >= 0) {
        name_rank(g, dead, who, sizeof(who));
        snprintf(text, sizeof(text), "%s died: its process ended without closing the group", who);
        (void)mui_local_break(g, MU_ERR_PEER, text);
        return false;
    }
    int leaver = find_leaver(g, g->first);
    if (leaver >= 0) {
        name_rank(g, leaver, who, sizeof(who));
        name_call(g, g->first, what);
        snprintf(text, sizeof(text), "rank %d left: it closed the group while rank %d was at %s: %s", leaver,
                 g->base.rank, what, who);
        (void)mui_local_break(g, MU_ERR_PEER, text);
        return false;
    }
    return look_at_clock(g, since);
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
