/* The report as structs and as text. */
#include "base/alloc.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

enum { GROUPS_PRINTED = 200, FROZEN_PRINTED = 12 };

static int64_t bucket_bytes(const mui_slice_bucket *b)
{
    return (int64_t)((b->elements + b->tail) * mu_dtype_bytes(b->dtype));
}

static void add_optimizer(const mu_ddp *d, mu_ddp_report *r)
{
    mui_source *source = (mui_source *)d->root;
    const mui_store *s = source->built(source);
    r->scattered = d->reductions > 0 && mui_reducer_scatters(d->reducer);
    r->optimizer_ranks = s != NULL && s->sharded_over != NULL ? mu_group_size(s->sharded_over) : 1;
    if (s != NULL) {
        size_t whole = s->slab_count - (s->reduced != NULL); /* each of them is optimiser state but that one */
        r->optimizer_bytes = (int64_t)(s->shared_bytes + whole * s->floats * sizeof(float));
    }
}

mu_ddp_report mu_ddp_get_report(mu_ddp *d)
{
    if (d == NULL) {
        return (mu_ddp_report){.name = "", .group = "", .skip_reason = ""};
    }
    double n = d->reductions > 0 ? (double)d->reductions : 1;
    mu_ddp_report r = {.name = d->name,
                       .group = mu_group_kind(d->group),
                       .rank = mu_group_rank(d->group),
                       .ranks = mu_group_size(d->group),
                       .reductions = d->reductions,
                       .skipped = d->skipped,
                       .skip_reason = d->skip_text,
                       .parameters = d->member_count,
                       .buckets = (int)d->bucket_count,
                       .rebuilt = d->planned,
                       .buckets_early = (int)d->buckets_early,
                       .absent = d->absent,
                       .absent_count = d->absent_count,
                       .backward_seconds = d->backward_seconds,
                       .wait_seconds = d->wait_seconds,
                       .last = d->last,
                       .average = {d->sum.forward / n, d->sum.backward / n, d->sum.communication / n,
                                   d->sum.overlapped / n, d->sum.exposed / n},
                       .last_rank = d->last_rank,
                       .last_rank_seconds = d->last_rank_seconds};
    add_optimizer(d, &r);
    r.overlap = d->last.communication > 0 ? d->last.overlapped / d->last.communication : 0;
    int64_t trainable = 0;
    for (int64_t i = 0; i < d->listed_count; i++) {
        r.frozen += d->listed[i].name != NULL;
        if (d->slice_of[i] >= 0) {
            const mui_member *m = &d->members[d->slice_of[i]];
            if (m->stamp == d->absent_stamp && m->absent_at < d->absent_count) {
                d->absent[m->absent_at].index = trainable;
            }
            trainable++;
        }
    }
    for (int64_t b = 0; b < d->bucket_count; b++) {
        r.bytes += bucket_bytes(&mui_reducer_buckets(d->reducer)[b]);
    }
    return r;
}

const mu_ddp_bucket *mu_ddp_report_buckets(mu_ddp *d, int64_t *count)
{
    *count = 0;
    if (d == NULL || d->listed == NULL) {
        return NULL;
    }
    /* Cut anew, there may be more of them. */
    mui_free(d->context, d->report_buckets);
    d->report_buckets = mui_calloc(d->context, (size_t)d->bucket_count, sizeof(*d->report_buckets));
    if (d->report_buckets == NULL) {
        return NULL;
    }
    const mui_slice_bucket *buckets = mui_reducer_buckets(d->reducer);
    const mui_bucket_times *at = mui_reducer_times(d->reducer);
    for (int64_t b = 0; b < d->bucket_count; b++) {
        mu_ddp_bucket *out = &d->report_buckets[b];
        out->bytes = bucket_bytes(&buckets[b]);
        out->parameters = buckets[b].count;
        if (at[b].reduced > 0) {
            out->ready = at[b].ready - d->called;
            out->launched = at[b].launched - d->called;
            out->reduced = at[b].reduced - d->called;
        }
    }
    *count = d->bucket_count;
    return d->report_buckets;
}

static uint64_t all_ranks(const mu_ddp *d)
{
    int size = mu_group_size(d->group);
    return size >= MUI_RANKS_NAMED ? UINT64_MAX : ((uint64_t)1 << size) - 1;
}

static void fill_member(const mu_ddp *d, const mui_member *m, mu_ddp_parameter *out)
{
    out->reductions = d->reductions - m->since;
    out->here = out->reductions - m->missed_here;
    out->anywhere = out->reductions - m->missed_everywhere;
    bool absent = m->stamp == d->absent_stamp && m->absent_at < d->absent_count;
    out->ranks = out->reductions == 0 ? 0 : absent ? d->absent[m->absent_at].ranks : all_ranks(d);
    out->ranks_ever = out->reductions > m->missed_somewhere ? all_ranks(d) : m->ever;
    out->ready = m->ready - 1;
}

static int64_t bucket_of(const mu_ddp *d, int64_t slice)
{
    int64_t low = 0, high = d->bucket_count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        const mui_slice_bucket *k = &mui_reducer_buckets(d->reducer)[middle];
        if (slice < k->first + k->count) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

const mu_ddp_parameter *mu_ddp_report_parameters(mu_ddp *d, int64_t *count)
{
    *count = 0;
    if (d == NULL || d->listed == NULL) {
        return NULL;
    }
    if (d->report_parameters == NULL) {
        d->report_parameters = mui_calloc(d->context, (size_t)d->listed_count + 1, sizeof(*d->report_parameters));
        if (d->report_parameters == NULL) {
            return NULL;
        }
    }
    int64_t known = 0, trainable = 0, n = 0;
    (void)mui_reducer_ready_order(d->reducer, &known);
    if (known > 0) { /* else buckets were cut since, and the order before is remembered */
        mui_ddp_note_ready(d);
    }
    for (int64_t i = 0; i < d->listed_count; i++) {
        int64_t at = d->slice_of[i];
        if (at < 0 && d->listed[i].name == NULL) {
            continue; /* outside the wrapped module */
        }
        mu_ddp_parameter *out = &d->report_parameters[n++];
        *out = (mu_ddp_parameter){.name = at >= 0 ? d->members[at].name : d->listed[i].name,
                                  .index = -1,
                                  .bucket = -1,
                                  .ready = -1,
                                  .bytes = d->listed[i].bytes};
        if (at < 0) {
            continue;
        }
        out->index = trainable++;
        fill_member(d, &d->members[at], out);
        out->bucket = bucket_of(d, at);
    }
    *count = n;
    return d->report_parameters;
}

/* -- text ------------------------------------------------------------------------------------------------------- */
static void add_times(mui_text *t, const char *what, const mu_ddp_times *x)
{
    mui_text_add(t,
                 "%s: forward %.3f ms, backward %.3f ms, communication %.3f ms, of it %.3f ms during backward, "
                 "%.3f ms waited for afterwards\n",
                 what, x->forward * 1e3, x->backward * 1e3, x->communication * 1e3, x->overlapped * 1e3,
                 x->exposed * 1e3);
}

static void add_participation(mu_ddp *d, mui_text *t)
{
    int64_t count = 0, frozen = 0, told = 0;
    const mu_ddp_parameter *p = mu_ddp_report_parameters(d, &count);
    for (int64_t i = 0; i < count; i++) {
        frozen += p[i].index < 0;
        if (p[i].index < 0 || p[i].here == p[i].reductions || told++ >= GROUPS_PRINTED) {
            continue;
        }
        mui_text_add(t, "  %s (index %lld): %s %llu of %llu reductions, this rank in %llu; ever from rank", p[i].name,
                     (long long)p[i].index, p[i].anywhere == 0 ? "never received a gradient:" : "a gradient in",
                     (unsigned long long)p[i].anywhere, (unsigned long long)p[i].reductions,
                     (unsigned long long)p[i].here);
        mui_text_add(t, "%s", p[i].ranks_ever == 0 ? " none" : " ");
        mui_add_ranks(t, p[i].ranks_ever, mu_group_size(d->group));
        mui_text_add(t, "\n");
    }
    if (told > GROUPS_PRINTED) {
        mui_text_add(t, "  and %lld more\n", (long long)(told - GROUPS_PRINTED));
    }
    told = 0;
    for (int64_t i = 0; i < count && told < FROZEN_PRINTED; i++) {
        if (p[i].index < 0) {
            mui_text_add(t, "%s%s", told++ == 0 ? "frozen: " : ", ", p[i].name);
        }
    }
    if (frozen > told) {
        mui_text_add(t, " and %lld more", (long long)(frozen - told));
    }
    mui_text_add(t, "%s", frozen > 0 ? "\n" : "");
}

static void add_absent(mu_ddp *d, mui_text *t)
{
    mui_absent_list list;
    if (mui_absent_list_make(d, MUI_ABSENT_ANYWHERE, &list) == MU_OK && list.selected > 0) {
        mui_absent_list_add(&list, t, GROUPS_PRINTED, mu_group_size(d->group), "\n");
        mui_text_add(t, "\n");
    }
    mui_absent_list_free(d, &list);
}

size_t mu_ddp_print_report(mu_ddp *d, char *out, size_t size)
{
    if (d == NULL) {
        return mui_text_give(&(mui_text){0}, out, size);
    }
    mu_ddp_report r = mu_ddp_get_report(d);
    mui_text t;
    mui_text_init(&t, d->context);
    mui_text_add(&t,
                 "ddp `%s`: %llu reductions over %d ranks (%s), %lld parameters in %lld buckets; last one %.3f ms, "
                 "of it %.3f ms waiting, %lld buckets launched during backward\n",
                 d->name, (unsigned long long)d->reductions, r.ranks, r.group, (long long)d->member_count,
                 (long long)d->bucket_count, d->backward_seconds * 1e3, d->wait_seconds * 1e3,
                 (long long)d->buckets_early);
    if (d->skipped > 0) {
        mui_text_add(&t, "%llu reductions were skipped, the last one by %s\n", (unsigned long long)d->skipped,
                     d->skip_text);
    }
    if (d->reductions > 0) {
        add_times(&t, "last", &r.last);
        add_times(&t, "average", &r.average);
        mui_text_add(&t, "%lld bytes per reduction, %.0f %% of communication during backward, buckets %s\n",
                     (long long)r.bytes, r.overlap * 100, r.rebuilt ? "in the order of ready gradients" : "as registered");
    }
    if (d->reductions > 0 && r.ranks > 1) {
        mui_text_add(&t, "rank %d came last, %.3f ms after the others\n", r.last_rank, r.last_rank_seconds * 1e3);
    }
    if (r.optimizer_bytes > 0) {
        mui_text_add(&t, "optimiser state: %lld bytes on this rank, %s%s\n", (long long)r.optimizer_bytes,
                     r.optimizer_ranks > 1 ? "its share" : "all of it",
                     r.scattered ? "; gradients reach each rank in its own part alone" : "");
    }
    mui_text_add(&t, "%s", d->reductions > 0 && d->absent_count == 0 ? "every rank contributed to every parameter\n" : "");
    add_absent(d, &t);
    add_participation(d, &t);
    return mui_text_give(&t, out, size);
}
