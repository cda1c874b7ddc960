/* Communication hooks: what a hook sees of a bucket, and that all ranks come out of it together. */
#include "base/alloc.h"
#include "base/rng.h"
#include "base/trace.h"
#include "ddp/reducer_state.h"
#include "base/beacon.h"
#include "ddp/replica.h"

#include <stdio.h>

mu_status mui_reducer_set_hook(mui_reducer *r, const char *name, mu_bucket_hook hook, void *user)
{
    char *copy = NULL;
    if (hook != NULL) {
        copy = mui_strdup(r->context, name);
        if (copy == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    mui_free(r->context, r->hook_name);
    r->hook_name = copy;
    r->hook = hook;
    r->hook_user = user;
    return MU_OK;
}

static mu_bucket view(const mui_reducer *r, int64_t k)
{
    const mui_slice_bucket *b = &r->buckets[k];
    int rank = mu_group_rank(r->group);
    for (int64_t i = 0; i < b->count; i++) {
        const mui_slice *s = &r->slices[b->first + i];
        r->views[i] = (mu_bucket_parameter){.name = s->name,
                                            .offset = (int64_t)((s->offset - b->offset) / sizeof(float)),
                                            .elements = mui_dims_elements(s->dims),
                                            .room = (int64_t)s->elements,
                                            .dims = s->dims,
                                            .row_major = s->row_major,
                                            .here = mui_reducer_on(r, b->first + i, rank),
                                            .ranks = mui_reducer_ranks(r, b->first + i)};
    }
    return (mu_bucket){.group = r->group,
                       .ddp = r->name,
                       .reduction = r->sequence,
                       .layout = r->layouts,
                       .index = k,
                       .count = r->bucket_count,
                       .is_last = k == r->bucket_count - 1,
                       .data = (float *)(void *)(r->slab + b->offset),
                       .elements = (int64_t)b->elements,
                       .parameters = r->views,
                       .parameter_count = b->count,
                       .weighted = r->how.weighted,
                       .samples = r->how.weighted ? r->how.samples : 0,
                       .total_samples = r->how.weighted ? r->total_samples : 0,
                       .divisor = r->how.weighted ? (double)r->total_samples : (double)mu_group_size(r->group)};
}

/* This rank's hook failed, or a collective in it: nobody must wait for this rank. */
static mu_status hook_failed(mui_reducer *r, int64_t k, mu_status s)
{
    mu_context *c = r->context;
    if (r->group->broken != MU_OK) {
        return r->group->broken;
    }
    mu_status own = mu_context_status(c);
    s = s < 0 ? s : own < 0 ? own : MU_ERR_STATE;
    char reason[400];
    snprintf(reason, sizeof(reason), "hook `%.40s` failed (%s) at bucket %lld of %lld in %.90s%s%.180s", r->hook_name,
             mu_status_name(s), (long long)k + 1, (long long)r->bucket_count, r->text, own < 0 ? ": " : "",
             mu_context_message(c));
    if (own == MU_OK) {
        mui_fail(c, s, "%s", reason);
    }
    mu_group_abort(r->group, reason);
    return s;
}

/* One word from every rank, in step with the reduction. */
static mu_status agree(mui_reducer *r, uint32_t kind, const char *what, int64_t *word, mu_reduce_op op)
{
    mui_identity *id = &r->identity;
    id->kind = kind;
    id->sequence = r->sequence;
    id->steps = id->updates = id->scattered = 0;
    id->hash = mui_hash_string(mui_hash_u64(r->layout_hash, r->id), r->name);
    snprintf(id->text, sizeof(id->text), "%s of %.150s", what, r->text);
    mu_request *q = mui_all_reduce_start(r->group, word, 1, MU_I64, op, id);
    if (q == NULL) {
        mui_reducer_start_failed(r);
        return r->failed;
    }
    mu_status s = mu_request_wait(q);
    /* Abandonments stand for reductions, and all ranks are in this one. */
    return s > 0 ? MU_ERR_COMM : s;
}

mu_status mui_reducer_agree_bad(mui_reducer *r)
{
    int64_t first = mui_reducer_find_bad(r);
    first = first >= 0 ? first : r->count;
    mu_status s = agree(r, MUI_KIND_BAD, "values that are not finite", &first, MU_MIN);
    r->first_bad = first < r->count ? first : -1;
    return s;
}

mu_status mui_reducer_run_hook(mui_reducer *r)
{
    bool bad = false;
    for (int64_t k = 0; k < r->bucket_count * r->words && r->how.look; k++) {
        bad = bad || r->bad[k] > 0;
    }
    if (bad) {
        /* A hook may remember what it sees. This step is going to be skipped, so it sees nothing of it. */
        int64_t first = mui_reducer_find_bad(r);
        first = first >= 0 ? first : r->count;
        mu_status s = agree(r, MUI_KIND_BAD, "values that are not finite", &first, MU_MIN);
        r->first_bad = first;
        return s;
    }
    for (int64_t k = 0; k < r->bucket_count; k++) {
        mu_bucket b = view(r, k);
        char text[MUI_IDENTITY_TEXT + 64];
        snprintf(text, sizeof(text), "%s, in it at bucket %lld of %lld", r->text, (long long)k + 1,
                 (long long)r->bucket_count);
        mui_work(r->context, text);
        r->in_hook = true;
        int64_t traced = mui_trace_began(r->context);
        mu_status s = r->hook(r->hook_user, &b);
        mui_trace_ended(r->context, MUI_TRACE_HOOK, r->hook_name, traced, b.elements * (int64_t)sizeof(float));
        r->in_hook = false;
        if (s != MU_OK || mui_failed(r->context)) {
            return hook_failed(r, k, s);
        }
    }
    /* A rank whose hook failed without the others noticing is noticed here, not in some later step. */
    int64_t word = 0;
    return agree(r, MUI_KIND_HOOKS, "the end", &word, MU_MAX);
}

mu_status mu_bucket_all_reduce(mu_bucket *b)
{
    if (b == NULL) {
        return MU_ERR_ARG;
    }
    mu_status s = mu_all_reduce(b->group, b->data, b->elements, MU_F32, b->weighted ? MU_SUM : MU_MEAN);
    if (s == MU_OK && b->weighted) {
        mui_bucket_divide(b->data, MU_F32, (size_t)b->elements, b->total_samples);
    }
    return s;
}

mu_status mu_ddp_set_hook(mu_ddp *d, const char *name, mu_bucket_hook hook, void *user)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    if (hook != NULL && (name == NULL || name[0] == '\0')) {
        return mui_fail(d->context, MU_ERR_ARG, "mu_ddp_set_hook (ddp `%s`): a hook without a name", d->name);
    }
    if (d->reducer->in_hook) {
        return mui_fail(d->context, MU_ERR_STATE, "mu_ddp_set_hook (ddp `%s`): from within a hook", d->name);
    }
    return mui_reducer_set_hook(d->reducer, name, hook, user);
}
