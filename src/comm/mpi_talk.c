/* What ranks say to each other beyond calls: that they are here, that they have left, that the group is broken. */
#include "base/os.h"
#include "comm/mpi_group.h"
#include "comm/naming.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define HEAD_BYTES offsetof(mui_mpi_message, text)
#define DOOM_SECONDS 2.0   /* for calls that all ranks had brought when one of them broke the group */
#define AWAY_SECONDS 5e-3
#define GRACE_SECONDS 5.0  /* for the others to hear that the group is broken */

_Static_assert(offsetof(mui_mpi_message, text) == offsetof(mui_mpi_here, text), "one is the beginning of the other");

/* -- hearing ------------------------------------------------------------------------------------------------------- */
static void handle(mui_mpi *g, mui_mpi_peer *p)
{
    const mui_mpi_message *m = &g->heard;
    p->calls = m->calls > p->calls ? m->calls : p->calls;
    p->completed = m->completed > p->completed ? m->completed : p->completed;
    if (m->kind == MUI_TALK_ABORT) {
        p->aborted = true;
        mui_mpi_doom *d = &g->doom;
        if (d->status == MU_OK) {
            d->status = m->status < 0 ? (mu_status)m->status : MU_ERR_PEER;
            d->since = mui_now();
            d->completed = m->completed;
            snprintf(d->text, sizeof(d->text), "%s", m->text);
        }
        d->completed = m->completed < d->completed ? m->completed : d->completed;
        return;
    }
    p->left = p->left || m->kind == MUI_TALK_LEFT;
    snprintf(p->seen, sizeof(p->seen), "%.*s", (int)sizeof(p->seen) - 1, m->text);
}

void mui_mpi_listen(mui_mpi *g)
{
    /* One look may only make MPI fetch what has come. Whoever was away for a while hears all of it before it goes on: the
     * group may be broken meanwhile. */
    double now = mui_now();
    int looks = now - g->last_listen > AWAY_SECONDS ? 4 : 1;
    g->last_listen = now;
    for (int from = 0; from >= 0 || --looks > 0;) {
        int bytes = 0, code = g->mpi->receive(g->port, &g->heard, (int)sizeof(g->heard), &from, &bytes);
        if (code != 0) {
            mui_mpi_failed(g, "receiving a message", code);
            return;
        }
        if (from >= 0 && from < g->base.size && bytes > (int)HEAD_BYTES) {
            g->heard.text[(size_t)bytes - HEAD_BYTES - 1] = '\0';
            handle(g, &g->peers[from]);
        }
    }
}

void mui_mpi_check_doom(mui_mpi *g)
{
    const mui_mpi_doom *d = &g->doom;
    if (d->status == MU_OK || g->base.broken != MU_OK) {
        return;
    }
    /* Whoever broke it had completed so many calls: all ranks have brought those, and can complete them too. */
    if (g->first == NULL || g->first->base.number >= d->completed || mui_now() - d->since > DOOM_SECONDS) {
        mui_mpi_give_up(g, d->status, d->text);
    }
}

/* -- saying -------------------------------------------------------------------------------------------------------- */
static bool still_busy(mui_mpi *g, bool busy, mui_mpi_request *request)
{
    bool done = false;
    return busy && g->mpi->test(request, &done) == 0 && !done;
}

void mui_mpi_say_here(mui_mpi *g, int to)
{
    mui_mpi_peer *p = &g->peers[to];
    p->here_busy = still_busy(g, p->here_busy, &p->here_request);
    if (p->here_busy || g->leaving || g->first == NULL) {
        return;
    }
    p->here = (mui_mpi_here){.kind = MUI_TALK_HERE, .calls = g->posted, .completed = g->completed};
    mui_place_text(&g->phase, &g->beacon, p->here.text, sizeof(p->here.text));
    int bytes = (int)(HEAD_BYTES + strlen(p->here.text) + 1);
    p->here_busy = g->mpi->send(g->port, to, &p->here, bytes, &p->here_request) == 0;
    p->told = g->first->base.number + 1;
}

static void say_farewell(mui_mpi *g, uint32_t kind, mu_status status, const char *text)
{
    if (g->leaving) {
        return; /* said already, and perhaps still on its way */
    }
    g->leaving = true;
    mui_mpi_message *m = &g->farewell;
    *m = (mui_mpi_message){.kind = kind, .status = status, .calls = g->posted, .completed = g->completed};
    snprintf(m->text, sizeof(m->text), "%s", text);
    int bytes = (int)(HEAD_BYTES + strlen(m->text) + 1);
    for (int r = 0; r < g->base.size; r++) {
        mui_mpi_peer *p = &g->peers[r];
        p->last_busy = r != g->base.rank && g->mpi->send(g->port, r, m, bytes, &p->last_request) == 0;
    }
}

void mui_mpi_give_up(mui_mpi *g, mu_status status, const char *text)
{
    if (g->base.broken != MU_OK) {
        return;
    }
    if (g->doom.status != MU_OK) { /* an earlier reason */
        status = g->doom.status;
        text = g->doom.text;
    }
    g->base.broken = status;
    snprintf(g->base.broken_text, sizeof(g->base.broken_text), "%s", text);
    say_farewell(g, MUI_TALK_ABORT, status, g->base.broken_text);
    mui_mpi_fail_all(g, status);
}

/* -- leaving ------------------------------------------------------------------------------------------------------- */
/* The first other rank that has not said farewell; -1: all have, and ours has gone out. */
static int find_staying(mui_mpi *g)
{
    int staying = -1;
    for (int r = 0; r < g->base.size; r++) {
        mui_mpi_peer *p = &g->peers[r];
        p->last_busy = still_busy(g, p->last_busy, &p->last_request);
        p->here_busy = still_busy(g, p->here_busy, &p->here_request);
        bool gone = (p->left || p->aborted) && !p->last_busy && !p->here_busy;
        if (r != g->base.rank && !gone && staying < 0) {
            staying = r;
        }
    }
    return staying;
}

/* Whether all ranks left in good order at one place: nothing of theirs is on its way. */
static bool all_done(mui_mpi *g)
{
    bool done = g->base.broken == MU_OK && g->first == NULL;
    for (int r = 0; r < g->base.size; r++) {
        const mui_mpi_peer *p = &g->peers[r];
        done = done && (r == g->base.rank || (p->left && !p->aborted && p->completed == g->completed &&
                                              p->calls == g->completed));
    }
    return done;
}

bool mui_mpi_leave(mui_mpi *g)
{
    char seen[MUI_MPI_SEEN_BYTES];
    mui_place_text(&g->phase, &g->beacon, seen, sizeof(seen));
    say_farewell(g, MUI_TALK_LEFT, MU_OK, seen);
    double begin = mui_now(), waited = 0, limit = g->base.timeout_seconds;
    limit = g->base.broken != MU_OK && limit > GRACE_SECONDS ? GRACE_SECONDS : limit;
    bool warned = g->base.broken != MU_OK;
    int staying;
    while ((staying = find_staying(g)) >= 0 && waited < limit) {
        waited = mui_now() - begin;
        if (waited >= g->base.warn_seconds && !warned) {
            warned = true;
            mui_log(g->base.context, MU_LOG_WARN, "waiting for %.1f s to close the group: rank %d has not closed it", waited,
                    staying);
        }
        mui_mpi_listen(g);
        (void)mui_mpi_drained(g);
        mui_mpi_pause(g, waited);
    }
    return staying < 0 && mui_mpi_drained(g) && all_done(g);
}
