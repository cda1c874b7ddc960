/* Reasons not to wait any longer over MPI, and what there is to say about who is missing. Ranks cannot look at each
 * other: whoever waits for long says so to the others, and who has not said so is missing. */
#include "base/os.h"
#include "comm/missing_words.h"
#include "comm/mpi_group.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define WHO_BYTES (MUI_MPI_SEEN_BYTES + 120)

/* -- names --------------------------------------------------------------------------------------------------------- */
/* True when rank q is not known to be at this call too, or past it. */
static bool lacks(const mu_group *g, const mu_request *call, int q)
{
    uint64_t n = call->number;
    const mui_mpi_peer *p = &((const mui_mpi *)g)->peers[q];
    return p->calls <= n || (((const mui_mpi_call *)call)->state == MUI_MPI_MOVING && p->completed < n);
}

/* What is known of it: by its last message, or by the descriptors of the last call it has brought. */
static uint64_t last_seen(const mui_mpi *g, int q, const char **seen)
{
    const mui_mpi_peer *p = &g->peers[q];
    bool by_header = g->headers_number > p->calls;
    *seen = by_header ? g->headers[1 + q].seen : p->seen;
    return by_header ? g->headers_number : p->calls;
}

/* "rank 1 (after 12 calls, last seen: after reduction 3 (ddp `net`), forward, layer1.0)" */
static void name_rank(const mu_group *g, int q, char *out, size_t size)
{
    const char *seen;
    uint64_t calls = last_seen((const mui_mpi *)g, q, &seen);
    snprintf(out, size, "rank %d (after %" PRIu64 " calls%s%s)", q, calls, seen[0] != '\0' ? ", last seen: " : "", seen);
}

static uint64_t calls_of(const mu_group *g, int q)
{
    const char *seen;
    return last_seen((const mui_mpi *)g, q, &seen);
}

/* At the call that is awaited. */
static mui_missing missing(const mui_mpi *g)
{
    return (mui_missing){&g->base, &g->first->base, lacks, name_rank, calls_of};
}

static void describe(const mui_missing *m, mui_lack why, char *out, size_t size)
{
    if (mui_missing_describe(m, why, out, size) == 0) {
        snprintf(out, size, "nobody: all ranks have brought their part, but MPI does not complete it");
    }
}

static void name_call(const mui_mpi *g, const mui_mpi_call *call, char out[MUI_IDENTITY_TEXT])
{
    mui_slot slot;
    mui_call_spec spec = call->spec;
    memset(&slot, 0, sizeof(slot));
    spec.in = NULL; /* only its words are wanted */
    mui_post_fill(&slot, &spec, call->identified ? &call->identity : NULL, g->base.size);
    mui_call_describe(&slot, out, MUI_IDENTITY_TEXT);
}

/* -- looking ------------------------------------------------------------------------------------------------------- */
void mui_mpi_stall_over(mui_mpi *g)
{
    mui_log(g->base.context, MU_LOG_WARN, "%s came after %.1f s", g->warned_who, mui_now() - g->warned_since);
    g->warned = 0;
}

static void break_for_leaver(mui_mpi *g, int q)
{
    char who[WHO_BYTES], what[MUI_IDENTITY_TEXT], lack[MUI_LACK_BYTES + 4], text[MUI_BROKEN_BYTES];
    const mui_missing m = missing(g);
    name_rank(&g->base, q, who, sizeof(who));
    mui_missing_lack(&m, q, MUI_LACK_LEFT, lack, sizeof(lack));
    name_call(g, g->first, what);
    snprintf(text, sizeof(text), "%s closed the group while rank %d waits at %s%s", who, g->base.rank, what, lack);
    mui_mpi_give_up(g, MU_ERR_PEER, text);
}

/* Those who wait for the same learn that this rank is not the one they miss. */
static void say_where(mui_mpi *g, const mui_mpi_call *call, double waited)
{
    double sooner = g->base.warn_seconds < g->base.timeout_seconds ? g->base.warn_seconds : g->base.timeout_seconds;
    bool stalled = waited >= sooner / 4 || mui_context_warns_soon(g->base.context, 0);
    for (int q = 0; q < g->base.size && call->state != MUI_MPI_QUEUED; q++) {
        const mui_mpi_peer *p = &g->peers[q];
        if (q != g->base.rank && p->told <= call->base.number && (stalled || p->calls > call->base.number)) {
            mui_mpi_say_here(g, q);
        }
    }
}

static bool look_at_clock(mui_mpi *g, double since)
{
    char what[MUI_IDENTITY_TEXT], who[MUI_BROKEN_BYTES], text[MUI_BROKEN_BYTES];
    const mui_mpi_call *call = g->first;
    const mui_missing m = missing(g);
    double waited = mui_now() - since;
    say_where(g, call, waited);
    if (waited >= g->base.timeout_seconds) {
        name_call(g, call, what);
        describe(&m, MUI_LACK_DEAD, who, sizeof(who));
        snprintf(text, sizeof(text), "rank %d waited %.1f s for %s: missing %.1000s", g->base.rank, waited, what, who);
        mui_mpi_give_up(g, MU_ERR_TIMEOUT, text);
        return false;
    }
    if (mui_wait_is_long(&g->base, waited) && g->warned != call->base.number + 1) {
        g->warned = call->base.number + 1;
        g->warned_since = since;
        if (mui_missing_list(&m, g->warned_who, sizeof(g->warned_who)) == 0) {
            snprintf(g->warned_who, sizeof(g->warned_who), "MPI");
        }
        name_call(g, call, what);
        describe(&m, MUI_LACK_LATE, who, sizeof(who));
        mui_log(g->base.context, MU_LOG_WARN, "waiting for %.1f s at %s: missing %s", waited, what, who);
    }
    return true;
}

bool mui_mpi_look(mui_mpi *g, double since)
{
    g->last_look = mui_now();
    /* What was heard happened before now; so did all that those ranks had brought, hence the progress before judging. */
    mui_mpi_listen(g);
    if (mui_mpi_progress(g) || g->first == NULL || g->base.broken != MU_OK) {
        return g->base.broken == MU_OK;
    }
    for (int q = 0; q < g->base.size; q++) {
        const mui_mpi_peer *p = &g->peers[q];
        if (q != g->base.rank && p->left && g->first->base.number >= p->completed) {
            break_for_leaver(g, q);
            return false;
        }
    }
    return look_at_clock(g, since);
}
