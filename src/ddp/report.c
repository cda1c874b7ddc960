/* Who was absent, and why: collected after each reduction and told once. */
#include "base/alloc.h"
#include "ddp/replica.h"

#include <string.h>

enum { GROUPS_TOLD = 12, INDICES_TOLD = 12 };

/* Keeps a text of the tape; its room is kept too, so that a steady step allocates nothing. */
static const char *keep_text(mu_ddp *d, mui_member *m, int which, const char *text)
{
    if (text == NULL) {
        return NULL;
    }
    size_t need = strlen(text) + 1;
    if (need > m->capacities[which]) {
        char *grown = mui_realloc(d->context, m->texts[which], need + 32);
        if (grown == NULL) {
            return NULL; /* the report then lacks it, the reduction goes on */
        }
        m->texts[which] = grown;
        m->capacities[which] = need + 32;
    }
    memcpy(m->texts[which], text, need);
    return m->texts[which];
}

static mu_absent describe(mu_ddp *d, mui_member *m, int ranks, uint64_t mask, bool here)
{
    mu_absent a = {.name = m->name, .here = MU_PRESENT, .ranks_present = ranks, .ranks = mask};
    if (here) {
        return a;
    }
    const mui_absence *why = &m->parameter->absence;
    a.here = (mu_absence)why->kind;
    a.op = keep_text(d, m, MUI_ABSENCE_OP, why->op);
    a.module = keep_text(d, m, MUI_ABSENCE_MODULE, why->module);
    a.end_op = keep_text(d, m, MUI_ABSENCE_END_OP, why->end_op);
    a.end_module = keep_text(d, m, MUI_ABSENCE_END_MODULE, why->end_module);
    a.region = keep_text(d, m, MUI_ABSENCE_REGION, why->region);
    return a;
}

void mui_ddp_note_absent(mu_ddp *d)
{
    int size = mu_group_size(d->group), rank = mu_group_rank(d->group);
    d->absent_count = 0;
    d->absent_stamp++;
    for (int64_t i = 0; i < d->member_count; i++) {
        int ranks = mui_reducer_ranks(d->reducer, i);
        if (ranks == size) {
            continue;
        }
        mui_member *m = &d->members[i];
        uint64_t mask = 0;
        for (int r = 0; r < size && r < MUI_RANKS_NAMED; r++) {
            mask |= (uint64_t)mui_reducer_on(d->reducer, i, r) << r;
        }
        m->stamp = d->absent_stamp;
        m->absent_at = d->absent_count;
        d->absent[d->absent_count++] = describe(d, m, ranks, mask, mui_reducer_on(d->reducer, i, rank));
    }
}

/* Counted only for reductions that gave gradients. */
static void count_absent(mu_ddp *d)
{
    bool tells = d->options.absent == MU_ABSENT_DEFAULT && mu_group_rank(d->group) == 0, any = false;
    if (d->absent_count == 0 && !d->any_pending) {
        return;
    }
    for (int64_t i = 0; i < d->member_count; i++) {
        mui_member *m = &d->members[i];
        if (m->stamp != d->absent_stamp) {
            m->pending = false;
            continue;
        }
        const mu_absent *a = &d->absent[m->absent_at];
        bool nowhere = a->ranks_present == 0;
        m->missed_somewhere++;
        m->missed_here += a->here != MU_PRESENT;
        m->missed_everywhere += nowhere;
        m->ever |= a->ranks;
        /* One that has a gradient from an earlier reduction is updated with it: nothing to tell. */
        m->pending = tells && nowhere && !m->warned && a->here != MU_NO_LOSS && m->entry != MUI_GRAD_REDUCED;
        any = any || m->pending;
    }
    d->any_pending = any;
}

void mui_ddp_note_ready(mu_ddp *d)
{
    int64_t count = 0;
    const int64_t *order = mui_reducer_ready_order(d->reducer, &count);
    for (int64_t i = 0; i < d->member_count; i++) {
        d->members[i].ready = 0;
    }
    for (int64_t k = 0; k < count; k++) {
        d->members[order[k]].ready = k + 1;
    }
}

void mui_ddp_warn_absent(mu_ddp *d)
{
    if (!d->any_pending) {
        return;
    }
    d->any_pending = false;
    mui_absent_list list;
    mui_text text;
    mui_text_init(&text, d->context);
    if (mui_absent_list_make(d, MUI_ABSENT_PENDING, &list) == MU_OK && list.selected > 0) {
        mui_absent_list_add(&list, &text, GROUPS_TOLD, 0, "; ");
        mui_log(d->context, MU_LOG_WARN,
                "ddp `%s`: %lld of %lld parameters did not receive a gradient on any rank, and are left as they are: %s",
                d->name, (long long)list.selected, (long long)d->member_count, mui_text_get(&text));
    }
    for (int64_t i = 0; i < d->member_count; i++) {
        d->members[i].warned = d->members[i].warned || d->members[i].pending;
        d->members[i].pending = false;
    }
    mui_absent_list_free(d, &list);
    mui_text_free(&text);
}

static void add_indices(mui_text *t, const mui_absent_list *list)
{
    int64_t told = 0;
    for (int64_t i = 0; i < list->count && told < INDICES_TOLD; i++) {
        if (list->items[i] != NULL) {
            mui_text_add(t, " %lld", (long long)i);
            told++;
        }
    }
    mui_text_add(t, "%s", list->selected > told ? " ..." : "");
}

/* The counts and which parameters are the same on all ranks; reasons are each rank's own. */
static mu_status strict(mu_ddp *d, mui_absent_filter which)
{
    mui_absent_list list;
    mui_text text, indices;
    mui_text_init(&text, d->context);
    mui_text_init(&indices, d->context);
    mu_status s = mui_absent_list_make(d, which, &list);
    if (s == MU_OK && list.selected > 0) {
        bool any = which == MUI_ABSENT_ANYWHERE;
        mui_absent_list_add(&list, &text, GROUPS_TOLD, any ? mu_group_size(d->group) : 0, "; ");
        add_indices(&indices, &list);
        s = mui_fail(d->context, MU_ERR_STATE,
                     "Expected to have finished reduction in the prior iteration before starting a new one: these are "
                     "PyTorch's words; here, %lld of %lld parameters did not receive a gradient on %s rank in %s "
                     "(parameter indices%.200s): %s",
                     (long long)list.selected, (long long)d->member_count, any ? "every" : "any",
                     mui_reducer_text(d->reducer), mui_text_get(&indices), mui_text_get(&text));
    }
    mui_absent_list_free(d, &list);
    mui_text_free(&text);
    mui_text_free(&indices);
    return s;
}

mu_status mui_ddp_judge_absent(mu_ddp *d, uint64_t updates)
{
    mu_absent_policy policy = d->options.absent;
    if (d->absent_count > 0 && (policy == MU_ABSENT_ERROR || policy == MU_ABSENT_ERROR_ANY)) {
        bool any = policy == MU_ABSENT_ERROR_ANY;
        for (int64_t k = 0; k < d->absent_count && !any; k++) {
            any = d->absent[k].ranks_present == 0;
        }
        if (any) {
            return strict(d, policy == MU_ABSENT_ERROR_ANY ? MUI_ABSENT_ANYWHERE : MUI_ABSENT_EVERYWHERE);
        }
    }
    count_absent(d);
    d->pending_updates = updates;
    return MU_OK;
}

mu_status mui_ddp_not_finite(mu_ddp *d)
{
    return mui_reducer_not_finite(d->reducer, d->options.nonfinite == MU_NONFINITE_ERROR);
}
