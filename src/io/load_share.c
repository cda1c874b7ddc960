/* The reader's decisions to all ranks. */
#include "base/alloc.h"
#include "comm/agree.h"
#include "comm/group.h"
#include "io/load_plan.h"

#include <string.h>

typedef struct header {
    uint64_t states_hash, text_bytes;
    mui_load_counts counts;
    char removed[MUI_PREFIX_BYTES], added[MUI_PREFIX_BYTES];
} header;

static header header_of(const mui_plan *p)
{
    header h = {.states_hash = mui_states_hash(&p->states),
                .text_bytes = p->text.length,
                .counts = p->counts};
    memcpy(h.removed, p->removed, sizeof(h.removed));
    memcpy(h.added, p->added, sizeof(h.added));
    return h;
}

/* A receiver takes the reader's decisions: flags is a byte for each state, text the report. */
static mu_status take_over(mui_plan *p, const header *h, const char *flags, const char *text)
{
    p->counts = h->counts;
    memcpy(p->removed, h->removed, sizeof(p->removed));
    memcpy(p->added, h->added, sizeof(p->added));
    for (size_t i = 0; i < p->states.count; i++) {
        p->items[i].take = flags[i] != 0;
    }
    mui_text_clear(&p->text);
    mui_text_add(&p->text, "%s", text);
    return mu_context_status(p->context);
}

mu_status mui_plan_share(mui_plan *p, mu_group *g)
{
    if (!mui_is_shared(g)) {
        return MU_OK;
    }
    bool reader = mui_is_reader(g);
    header h = header_of(p);
    uint64_t own_hash = h.states_hash;
    mu_status s = mui_share(g, &h, sizeof(h));
    if (s != MU_OK) {
        return s;
    }
    if (h.states_hash != own_hash) {
        s = mui_fail(p->context, MU_ERR_COMM, "the model of rank %d has other names, shapes or types than that of rank 0",
                     mu_group_rank(g));
    }
    char *flags = mui_calloc(p->context, p->states.count + 1, 1);
    char *text = mui_calloc(p->context, (size_t)h.text_bytes + 1, 1);
    s = s == MU_OK && (flags == NULL || text == NULL) ? MU_ERR_NOMEM : s;
    if (s == MU_OK && reader) {
        for (size_t i = 0; i < p->states.count; i++) {
            flags[i] = p->items[i].take;
        }
        memcpy(text, mui_text_get(&p->text), p->text.length);
    }
    s = mui_agree(p->context, g, s);
    s = s == MU_OK ? mui_share(g, flags, p->states.count) : s;
    s = s == MU_OK ? mui_share(g, text, (size_t)h.text_bytes) : s;
    if (s == MU_OK) {
        s = mui_agree(p->context, g, reader ? MU_OK : take_over(p, &h, flags, text));
    }
    mui_free(p->context, flags);
    mui_free(p->context, text);
    return s;
}
