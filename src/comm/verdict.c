/* Do all ranks mean the same call? Decided by each rank from the same posted descriptors, hence the same everywhere. */
#include "comm/verdict.h"
#include "comm/reduce.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void describe_plain(const mui_slot *s, char *out, size_t size)
{
    const char *type = mui_reducible_name((mu_dtype)s->type), *op = mui_reduce_op_name((mu_reduce_op)s->op);
    switch ((mui_call_kind)s->call) {
    case MUI_ALL_REDUCE: snprintf(out, size, "an all-reduce (%s) of %" PRIu64 " %s", op, s->count, type); return;
    case MUI_BROADCAST: snprintf(out, size, "a broadcast of %" PRIu64 " bytes from rank %d", s->count, s->root); return;
    case MUI_ALL_GATHER: snprintf(out, size, "an all-gather of %" PRIu64 " bytes", s->count); return;
    case MUI_REDUCE_SCATTER: snprintf(out, size, "a reduce-scatter (%s) to %" PRIu64 " %s", op, s->count, type); return;
    case MUI_BARRIER: snprintf(out, size, "a barrier"); return;
    case MUI_ALLOC: snprintf(out, size, "mu_group_alloc of %" PRIu64 " bytes", s->count); return;
    case MUI_FREE: snprintf(out, size, "mu_group_free of the memory at offset %" PRIu64, s->count); return;
    }
    snprintf(out, size, "an unknown call");
}

void mui_call_describe(const mui_slot *s, char *out, size_t size)
{
    if (s->identified && s->text[0] != '\0') {
        snprintf(out, size, "%.*s", MUI_IDENTITY_TEXT - 1, s->text);
    } else {
        describe_plain(s, out, size);
    }
}

static bool same(const mui_slot *a, const mui_slot *b)
{
    return a->call == b->call && a->identified == b->identified && a->kind == b->kind && a->sequence == b->sequence &&
           a->hash == b->hash && a->steps == b->steps && a->updates == b->updates && a->count == b->count &&
           a->type == b->type && a->op == b->op && a->root == b->root;
}

/* "; like rank 3: 4, 5": who agrees with slot s of rank r. */
static void add_company(const mui_posts *p, int r, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (int q = 0; q < p->size && used + 1 < size; q++) {
        if (q != r && same(mui_post_of(p, r), mui_post_of(p, q))) {
            int n = used == 0 ? snprintf(out, size, "; like rank %d: %d", r, q)
                              : snprintf(out + used, size - used, ", %d", q);
            used += n > 0 ? (size_t)n : 0;
        }
    }
}

static const char *since(const mui_slot *s)
{
    return s->steps >= MUI_STEPS_LOADED ? " since it loaded a file" : "";
}

/* The text is for people; where it is the same on both sides, say in what they differ. */
static void explain(const mui_posts *p, int other, char text[MUI_BROKEN_BYTES])
{
    const mui_slot *a = mui_post_of(p, 0), *b = mui_post_of(p, other);
    char left[MUI_IDENTITY_TEXT], right[MUI_IDENTITY_TEXT], why[200] = "", with_left[200], with_right[200];
    mui_call_describe(a, left, sizeof(left));
    mui_call_describe(b, right, sizeof(right));
    bool reducing = a->identified && b->identified && a->kind == b->kind;
    if (reducing && a->steps != b->steps) {
        if (a->steps / MUI_STEPS_LOADED == b->steps / MUI_STEPS_LOADED) {
            snprintf(why, sizeof(why), ", but after %" PRIu64 " and %" PRIu64 " optimiser steps",
                     a->steps % MUI_STEPS_LOADED, b->steps % MUI_STEPS_LOADED);
        } else {
            snprintf(why, sizeof(why), ", but after %" PRIu64 " optimiser steps%s and %" PRIu64 "%s",
                     a->steps % MUI_STEPS_LOADED, since(a), b->steps % MUI_STEPS_LOADED, since(b));
        }
    } else if (reducing && a->updates / MUI_STEPS_LOADED != b->updates / MUI_STEPS_LOADED) {
        snprintf(why, sizeof(why), ", but after loading %" PRIu64 " and %" PRIu64 " parameters from files",
                 a->updates / MUI_STEPS_LOADED, b->updates / MUI_STEPS_LOADED);
    } else if (reducing && a->updates != b->updates) {
        snprintf(why, sizeof(why), ", but after optimiser steps that updated %" PRIu64 " and %" PRIu64 " parameters",
                 a->updates % MUI_STEPS_LOADED, b->updates % MUI_STEPS_LOADED);
    } else if (strcmp(left, right) == 0) {
        if (a->sequence != b->sequence) {
            snprintf(why, sizeof(why), ", but by sequence numbers %" PRIu64 " and %" PRIu64, a->sequence, b->sequence);
        } else if (a->kind != b->kind) {
            snprintf(why, sizeof(why), ", but of kinds %" PRIu32 " and %" PRIu32, a->kind, b->kind);
        } else if (a->hash != b->hash) {
            snprintf(why, sizeof(why),
                     ", but with different layouts or arguments (hashes %016" PRIx64 " and %016" PRIx64 ")", a->hash,
                     b->hash);
        } else {
            char first[90], second[90];
            describe_plain(a, first, sizeof(first));
            describe_plain(b, second, sizeof(second));
            snprintf(why, sizeof(why), ", but with %.88s and %.88s", first, second);
        }
    }
    add_company(p, 0, with_left, sizeof(with_left));
    add_company(p, other, with_right, sizeof(with_right));
    snprintf(text, MUI_BROKEN_BYTES, "ranks contradict each other: rank 0 is at %s, rank %d at %s%s%s%s", left, other,
             right, why, with_left, with_right);
}

/* All ranks read the same times of one clock, so they agree on who came last. */
static void note_last(const mui_posts *p, mui_verdict *out)
{
    double last = -1, before = -1;
    for (int r = 0; r < p->size; r++) {
        double at = mui_post_of(p, r)->posted_at;
        if (at > last) {
            before = last;
            last = at;
            out->last_rank = r;
        } else if (at > before) {
            before = at;
        }
    }
    out->last_seconds = before >= 0 ? last - before : 0;
}

mu_status mui_verdict_of(const mui_posts *p, mui_verdict *out, char text[MUI_BROKEN_BYTES])
{
    const mui_slot *zero = mui_post_of(p, 0);
    int odd = 0, abandoned = -1, within = -1;
    bool all_identified = true, plain = false, same_within = true;
    note_last(p, out);
    for (int r = 0; r < p->size; r++) {
        const mui_slot *s = mui_post_of(p, r);
        if (odd == 0 && !same(zero, s)) {
            odd = r;
        }
        all_identified = all_identified && s->identified;
        if (s->identified && s->kind >= MUI_KIND_ABANDON) {
            abandoned = abandoned < 0 ? r : abandoned;
        } else if (s->identified && (s->kind & MUI_KIND_WITHIN) != 0) {
            same_within = same_within && (within < 0 || same(mui_post_of(p, within), s));
            within = r;
        } else {
            plain = true;
        }
    }
    /* An abandonment stands for a reduction. Ranks that are at anything else (a barrier, a user's own all-reduce)
     * are not skipped over, since their caller would take the call for done. */
    bool one_place = within < 0 || (!plain && same_within); /* of those who did not abandon */
    if (abandoned >= 0 && all_identified && one_place) {
        out->skip_within = within >= 0;
        char what[MUI_IDENTITY_TEXT];
        mui_call_describe(mui_post_of(p, abandoned), what, sizeof(what));
        snprintf(out->skip_text, sizeof(out->skip_text), "rank %d: %s", abandoned, what);
        return MU_SKIPPED;
    }
    if (odd != 0) {
        explain(p, odd, text);
        return MU_ERR_COMM;
    }
    return MU_OK;
}
