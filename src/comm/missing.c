/* Reasons not to wait any longer: deaths, ranks that left, aborts, time. And what there is to say about who is missing:
 * number, process, what it was last seen doing, and what it has not brought. */
#include "base/os.h"
#include "comm/local.h"
#include "comm/missing_words.h"
#include "comm/naming.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#define WHO_BYTES (3 * MUI_BOARD_BYTES + 600)

/* -- names --------------------------------------------------------------------------------------------------------- */
static uint32_t turn_of(const mui_rank_block *b)
{
    return mui_board_turn(&b->phase) + mui_board_turn(&b->beacon.work) + mui_board_turn(&b->beacon.place);
}

/* "step 12 of epoch 3, reduction 200 (ddp `net`), backward, layer3.2.conv2"; how long it has been there is known only
 * when it did not move while this rank waited. */
static void describe_place(const mui_local *g, int r, char *out, size_t size)
{
    const mui_rank_block *b = mui_block_of(g, r);
    char for_long[48] = "";
    mui_place_text(&b->phase, &b->beacon, out, size);
    size_t used = strlen(out);
    double still = mui_now() - g->stall.still_since;
    if (used > 0 && g->stall.still_since > 0 && g->stall.rank == r && g->stall.turn == turn_of(b) && still >= 0.1) {
        snprintf(for_long, sizeof(for_long), "for %.1f s now", still);
        mui_join(out, size, &used, ", ", for_long);
    }
}

/* "rank 1 (pid 123, after 12 calls, last seen: after reduction 3 (ddp `net`), forward, layer1.0)" */
static void name_rank(const mu_group *base, int r, char *out, size_t size)
{
    const mui_local *g = (const mui_local *)base;
    const mui_rank_block *b = mui_block_of(g, r);
    char place[3 * MUI_BOARD_BYTES], pid[24] = "";
    if (g->pidfds != NULL) {
        snprintf(pid, sizeof(pid), "pid %d, ", (int)b->pid);
    }
    if (__atomic_load_n(&b->state, __ATOMIC_ACQUIRE) == MUI_ABSENT) {
        snprintf(out, size, "rank %d (%snever joined)", r, pid);
        return;
    }
    describe_place(g, r, place, sizeof(place));
    uint64_t calls = __atomic_load_n(&b->calls, __ATOMIC_RELAXED);
    snprintf(out, size, "rank %d (%safter %" PRIu64 " calls%s%s)", r, pid, calls,
             place[0] != '\0' ? ", last seen: " : "", place);
}

static bool lacks(const mu_group *g, const mu_request *call, int r)
{
    return mui_call_lacks((const mui_local *)g, (const mui_call *)call, r);
}

static uint64_t calls_of(const mu_group *g, int r)
{
    return __atomic_load_n(&mui_block_of((const mui_local *)g, r)->calls, __ATOMIC_RELAXED);
}

/* At the call that is awaited. */
static mui_missing missing(const mui_local *g)
{
    return (mui_missing){&g->base, &g->first->base, lacks, name_rank, calls_of};
}

static void name_call(const mui_local *g, const mui_call *call, char out[MUI_IDENTITY_TEXT])
{
    if (call->state == MUI_QUEUED) {
        snprintf(out, MUI_IDENTITY_TEXT, "a free slot");
    } else {
        mui_call_describe(mui_slot_of(g, g->base.rank, call->base.number), out, MUI_IDENTITY_TEXT);
    }
}

/* -- late ranks ---------------------------------------------------------------------------------------------------- */
void mui_stall_over(mui_local *g)
{
    mui_log(g->base.context, MU_LOG_WARN, "%s came after %.1f s", g->stall.who, mui_now() - g->stall.since);
    g->stall.warned = 0;
}

/* Looks whether the first missing rank tells anything new. */
static void watch(mui_local *g, const mui_call *call)
{
    int r = 0;
    while (r < g->base.size && (r == g->base.rank || !mui_call_lacks(g, call, r))) {
        r++;
    }
    if (r == g->base.size) {
        return;
    }
    const mui_rank_block *b = mui_block_of(g, r);
    uint32_t turn = turn_of(b);
    if (g->stall.rank != r || g->stall.turn != turn || g->stall.still_since == 0) {
        g->stall.rank = r;
        g->stall.turn = turn;
        g->stall.still_since = mui_now();
    }
}

static bool look_at_clock(mui_local *g, double since)
{
    char what[MUI_IDENTITY_TEXT], who[MUI_BROKEN_BYTES], text[MUI_BROKEN_BYTES];
    const mui_call *call = g->first;
    const mui_missing m = missing(g);
    double waited = mui_now() - since;
    watch(g, call);
    if (waited >= g->base.timeout_seconds) {
        name_call(g, call, what);
        mui_missing_describe(&m, MUI_LACK_DEAD, who, sizeof(who));
        snprintf(text, sizeof(text), "rank %d waited %.1f s for %s: missing %.1000s", g->base.rank, waited, what, who);
        (void)mui_local_break(g, MU_ERR_TIMEOUT, text);
        return false;
    }
    if (mui_wait_is_long(&g->base, waited) && g->stall.warned != call->base.number + 1) {
        g->stall.warned = call->base.number + 1;
        g->stall.since = since;
        mui_missing_list(&m, g->stall.who, sizeof(g->stall.who));
        name_call(g, call, what);
        mui_missing_describe(&m, MUI_LACK_LATE, who, sizeof(who));
        mui_log(g->base.context, MU_LOG_WARN, "waiting for %.1f s at %s: missing %s", waited, what, who);
    }
    return true;
}

/* -- looking around ------------------------------------------------------------------------------------------------ */
/* Marks ranks whose process has ended; false: none. */
static bool find_ended(const mui_local *g, bool ended[MUI_MAX_RANKS])
{
    if (g->pidfds == NULL) {
        return false;
    }
    struct pollfd fds[MUI_MAX_RANKS];
    for (int r = 0; r < g->base.size; r++) {
        fds[r] = (struct pollfd){.fd = g->pidfds[r], .events = POLLIN};
    }
    if (poll(fds, (nfds_t)g->base.size, 0) <= 0) {
        return false;
    }
    for (int r = 0; r < g->base.size; r++) {
        ended[r] = fds[r].revents != 0;
    }
    return true;
}

/* One that ended without closing the group and has not done what call waits for; -1: none. Who had done its part before
 * is missed by a later call. */
static int find_dead(const mui_local *g, const mui_call *call, const bool ended[MUI_MAX_RANKS])
{
    for (int r = 0; r < g->base.size; r++) {
        if (ended[r] && __atomic_load_n(&mui_block_of(g, r)->state, __ATOMIC_ACQUIRE) != MUI_LEFT &&
            mui_call_lacks(g, call, r)) {
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

static void break_for(mui_local *g, int r, mui_lack why)
{
    char who[WHO_BYTES], what[MUI_IDENTITY_TEXT], lack[MUI_LACK_BYTES], text[MUI_BROKEN_BYTES];
    const mui_missing m = missing(g);
    name_rank(&g->base, r, who, sizeof(who));
    mui_missing_lack(&m, r, why, lack, sizeof(lack));
    name_call(g, g->first, what);
    if (why == MUI_LACK_DEAD) {
        snprintf(text, sizeof(text),
                 "%.600s died: its process ended without closing the group, while rank %d waits at %s%s", who,
                 g->base.rank, what, lack);
    } else {
        snprintf(text, sizeof(text), "%.600s closed the group while rank %d waits at %s%s", who, g->base.rank, what,
                 lack);
    }
    (void)mui_local_break(g, MU_ERR_PEER, text);
}

bool mui_look_around(mui_local *g, double since)
{
    g->last_look = mui_now();
    /* What these find happened before now; so did all that those ranks had posted, hence the progress before judging.
     */
    bool aborted = __atomic_load_n(&g->region.control->abort_state, __ATOMIC_ACQUIRE) == 2;
    bool ended[MUI_MAX_RANKS], any = find_ended(g, ended);
    if (mui_local_progress(g) || g->first == NULL) {
        return g->base.broken == MU_OK;
    }
    if (aborted) {
        (void)mui_local_break(g, MU_ERR_PEER, "the group was aborted");
        return false;
    }
    int dead = any ? find_dead(g, g->first, ended) : -1;
    if (dead >= 0) {
        break_for(g, dead, MUI_LACK_DEAD);
        return false;
    }
    int leaver = find_leaver(g, g->first);
    if (leaver >= 0) {
        break_for(g, leaver, MUI_LACK_LEFT);
        return false;
    }
    return look_at_clock(g, since);
}
