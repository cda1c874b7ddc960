/* Agreement on an outcome by one all-gather and, on failure only, one broadcast of the message. */
#include "comm/agree.h"
#include "base/alloc.h"
#include "base/beacon.h"

#include <stdio.h>
#include <string.h>

#define PIECE_BYTES ((size_t)64 << 20)

bool mui_is_shared(const mu_group *g)
{
    return g != NULL && mu_group_size(g) > 1;
}

bool mui_is_reader(const mu_group *g)
{
    return g == NULL || mu_group_rank(g) == 0;
}

mu_status mui_agree(mu_context *c, mu_group *g, mu_status mine)
{
    if (!mui_is_shared(g)) {
        return mine;
    }
    /* Counted in a fixed array, so that a rank without memory can still say so. */
    int64_t all[256] = {0}, own = mine;
    int size = mu_group_size(g), first = -1;
    int64_t *found = size <= 256 ? all : mui_calloc(c, (size_t)size, sizeof(*found));
    if (found == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = mu_all_gather(g, &own, found, sizeof(own));
    for (int i = 0; s == MU_OK && i < size && first < 0; i++) {
        first = found[i] < 0 ? i : -1;
    }
    mu_status theirs = first >= 0 ? (mu_status)found[first] : MU_OK;
    if (found != all) {
        mui_free(c, found);
    }
    if (s != MU_OK || first < 0) {
        return s != MU_OK ? s : mine;
    }
    char message[MUI_MESSAGE_BYTES] = "";
    if (first == mu_group_rank(g)) {
        const char *text = mu_context_message(c);
        memcpy(message, text, strnlen(text, sizeof(message) - 1));
    }
    s = mu_broadcast(g, message, sizeof(message), first);
    if (s != MU_OK) {
        return s;
    }
    return mui_fail(c, theirs, "%s", message);
}

mu_status mui_share(mu_group *g, void *data, size_t bytes)
{
    mu_status s = MU_OK;
    for (size_t at = 0; at < bytes && s == MU_OK && mui_is_shared(g); at += PIECE_BYTES) {
        size_t n = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        s = mu_broadcast(g, (char *)data + at, n, 0);
    }
    return s;
}

/* -- gates -------------------------------------------------------------------------------------------------------- */
static mu_status come(mu_group *g, const mui_identity *id)
{
    int64_t word = 0;
    mui_work(g->context, id->text);
    mu_request *q = mui_all_reduce_start(g, &word, 1, MU_I64, MU_MAX, id);
    mu_status s = q != NULL ? mu_request_wait(q) : mu_context_status(g->context);
    return q == NULL && s == MU_OK ? MU_ERR_COMM : s;
}

mu_status mui_gate(mu_group *g, const mui_identity *id)
{
    mu_status s = come(g, id);
    if (s == MU_SKIPPED) {
        /* Others abandon a reduction of a layout that this rank does not have any more. */
        char reason[256];
        snprintf(reason, sizeof(reason), "at %.180s, where another rank abandoned a reduction", id->text);
        mu_group_abort(g, reason);
        s = mui_fail(g->context, MU_ERR_COMM, "%s", reason);
    }
    return s;
}

mu_status mui_meet(mu_group *g, const mui_identity *id, mu_status mine)
{
    mui_identity own = *id;
    if (mine < 0) {
        own.kind |= MUI_KIND_ABANDON;
        snprintf(own.text, sizeof(own.text), "%.150s", mu_context_message(g->context));
    }
    mu_status s = come(g, &own);
    if (s == MU_SKIPPED && mine >= 0) {
        s = mui_fail(g->context, MU_ERR_PEER, "%s: not done: %s", id->text, mui_group_skip_text(g));
    }
    return mine < 0 ? mine : s;
}
