/* Buckets, their launch in fixed order, and what their tails say. */
#include "ddp/reducer_state.h"
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"
#include "base/trace.h"
#include "comm/reduce.h"

#include <stdio.h>
#include <string.h>

static void write_text(mui_reducer *r)
{
    bool hook = r->hook != NULL;
    snprintf(r->text, sizeof(r->text), "%s%sreduction %llu (%s `%.70s`)%s%s%.40s%s", r->how.weighted ? "weighted " : "",
             r->how.scatter ? "scattered " : "",
             (unsigned long long)r->sequence, r->kind, r->name, r->how.note != NULL ? r->how.note : "", hook ? ", hook `" : "",
             hook ? r->hook_name : "", hook ? "`" : "");
}

mui_reducer *mui_reducer_new(mu_context *c, mu_group *g, const char *kind, const char *name, uint64_t id)
{
    mui_reducer *r = mui_calloc(c, 1, sizeof(*r));
    if (r == NULL) {
        return NULL;
    }
    r->context = c;
    r->group = g;
    r->kind = kind;
    r->id = id;
    r->words = mui_reducer_words(g);
    r->sequence = 1;
    r->name = mui_strdup(c, name);
    if (r->name == NULL) {
        mui_free(c, r);
        return NULL;
    }
    write_text(r);
    return r;
}

static void free_layout(mui_reducer *r)
{
    mu_context *c = r->context;
    mui_free(c, r->slices);
    mui_free(c, r->buckets);
    mui_free(c, r->bucket_of);
    mui_free(c, r->states);
    mui_free(c, r->seen);
    mui_free(c, r->pending);
    mui_free(c, r->requests);
    mui_free(c, r->numbers);
    mui_free(c, r->times);
    mui_free(c, r->masks);
    mui_free(c, r->bad);
    mui_free(c, r->ready_order);
    mui_free(c, r->views);
}

void mui_reducer_free(mui_reducer *r)
{
    if (r != NULL) {
        if (r->group->lack_user == r) { /* freed in the middle of a reduction, on the way out of a failed program */
            r->group->lack = NULL;
        }
        free_layout(r);
        mui_free(r->context, r->name);
        mui_free(r->context, r->hook_name);
        mui_free(r->context, r);
    }
}

int64_t mui_reducer_plan(const size_t *bytes, int64_t count, size_t first, size_t cap, int64_t *counts)
{
    int64_t buckets = 0;
    size_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        if (sum == 0) {
            counts[buckets] = 0;
        }
        counts[buckets]++;
        /* A slice without bytes counts one, so that the test above still tells an empty bucket. */
        sum += bytes[i] > 0 ? bytes[i] : 1;
        if (sum >= (buckets == 0 ? first : cap)) {
            buckets++;
            sum = 0;
        }
    }
    return buckets + (sum > 0);
}

mu_status mui_reducer_layout(mui_reducer *r, const mui_slice *slices, int64_t count, const mui_slice_bucket *buckets,
                             int64_t bucket_count, void *slab, uint64_t hash)
{
    mu_context *c = r->context;
    size_t n = (size_t)count, b = (size_t)bucket_count, most = 0;
    for (size_t k = 0; k < b; k++) {
        most = (size_t)buckets[k].count > most ? (size_t)buckets[k].count : most;
    }
    if (r->group->ops->reserve(r->group, b + MUI_OTHER_REQUESTS) != MU_OK) {
        return MU_ERR_NOMEM;
    }
    mui_reducer next = *r;
    next.slices = mui_calloc(c, n, sizeof(*next.slices));
    next.buckets = mui_calloc(c, b, sizeof(*next.buckets));
    next.bucket_of = mui_calloc(c, n, sizeof(*next.bucket_of));
    next.states = mui_calloc(c, n, 1);
    next.seen = mui_calloc(c, n, 1);
    next.pending = mui_calloc(c, b, sizeof(*next.pending));
    next.requests = mui_calloc(c, b, sizeof(*next.requests));
    next.numbers = mui_calloc(c, b, sizeof(*next.numbers));
    next.times = mui_calloc(c, b, sizeof(*next.times));
    next.masks = mui_calloc(c, n * (size_t)r->words, sizeof(*next.masks));
    next.bad = mui_calloc(c, b * (size_t)r->words, sizeof(*next.bad));
    next.ready_order = mui_calloc(c, n, sizeof(*next.ready_order));
    next.views = mui_calloc(c, most, sizeof(*next.views));
    if (next.slices == NULL || next.buckets == NULL || next.bucket_of == NULL || next.states == NULL ||
        next.seen == NULL || next.pending == NULL || next.requests == NULL || next.masks == NULL ||
        next.ready_order == NULL || next.bad == NULL || next.views == NULL || next.numbers == NULL ||
        next.times == NULL) {
        free_layout(&next);
        return MU_ERR_NOMEM;
    }
    if (n > 0) {
        memcpy(next.slices, slices, n * sizeof(*slices));
    }
    memcpy(next.buckets, buckets, b * sizeof(*buckets));
    for (int64_t k = 0; k < bucket_count; k++) {
        for (int64_t i = 0; i < buckets[k].count; i++) {
            next.bucket_of[buckets[k].first + i] = k;
        }
    }
    next.count = count;
    next.bucket_count = bucket_count;
    next.slab = slab;
    next.layout_hash = hash;
    next.layouts++;
    next.ready_count = 0;
    free_layout(r);
    *r = next;
    return MU_OK;
}

static void remember_failure(mui_reducer *r, mu_status s)
{
    if (r->failed == MU_OK) {
        r->failed = s;
    }
}

void mui_reducer_start_failed(mui_reducer *r)
{
    mu_status own = mu_context_status(r->context);
    remember_failure(r, r->group->broken != MU_OK ? r->group->broken : own != MU_OK ? own : MU_ERR_COMM);
    mu_group_abort(r->group, own != MU_OK ? mu_context_message(r->context) : "could not start a reduction");
}

static void launch_next(mui_reducer *r)
{
    int64_t k = r->launched++;
    const mui_slice_bucket *b = &r->buckets[k];
    mui_bucket_times *at = &r->times[k];
    at->launched = mui_now();
    at->ready = at->ready > 0 ? at->ready : at->launched;
    if (r->failed != MU_OK) {
        return;
    }
    mui_identity *id = &r->identity;
    id->kind = r->how.weighted ? MUI_KIND_WEIGHTED : MUI_KIND_MEAN;
    if (r->abandoned) {
        id->kind |= MUI_KIND_ABANDON;
        memcpy(id->text, r->abandon_text, sizeof(id->text));
    } else {
        memcpy(id->text, r->text, sizeof(id->text));
        mui_bucket_fill(r, b);
    }
    uint64_t h = mui_hash_u64(mui_hash_u64(r->layout_hash, r->id), r->how.agreement);
    id->hash = mui_hash_u64(mui_hash_string(h, r->name), (uint64_t)k);
    id->sequence = r->sequence;
    size_t local = r->hook != NULL ? b->elements : 0; /* left to the hook */
    if (r->hook != NULL) {
        id->hash = mui_hash_string(id->hash, r->hook_name);
    }
    id->steps = r->how.steps;
    id->updates = r->how.updates;
    id->scattered = 0;
    if (r->how.scatter) {
        id->scattered = mui_scatter_of(b->elements, mu_group_size(r->group), b->dtype);
        id->hash = mui_hash_u64(id->hash, id->scattered);
    }
    r->requests[k] = mui_all_reduce_start(r->group, r->slab + b->offset + local * mu_dtype_bytes(b->dtype),
                                          (int64_t)(b->elements - local + b->tail), b->dtype,
                                          r->how.weighted ? MU_SUM : MU_MEAN, id);
    if (r->requests[k] == NULL) {
        mui_reducer_start_failed(r);
        return;
    }
    r->numbers[k] = r->requests[k]->number;
}

/* The last bucket is kept back: while it is, this rank can still give up the step on all ranks. */
static void launch_complete(mui_reducer *r)
{
    while (!r->how.hold && r->launched < r->bucket_count - 1 && r->pending[r->launched] == 0) {
        launch_next(r);
    }
}

/* One request reported: MU_SKIPPED marks the reduction, an error fails it. */
static void note_result(mui_reducer *r, mu_status s)
{
    r->last_rank = r->group->last_rank; /* of the request that has just been reported */
    r->last_seconds = r->group->last_seconds;
    if (s == MU_SKIPPED) {
        if (!r->skipped) {
            snprintf(r->skip_text, sizeof(r->skip_text), "%s", mui_group_skip_text(r->group));
        }
        r->skipped = true;
    } else if (s < 0) {
        remember_failure(r, s);
    }
}

static void make_progress(mui_reducer *r)
{
    while (r->completed < r->launched && r->requests[r->completed] != NULL) {
        bool done = false;
        mu_status s = mu_request_test(r->requests[r->completed], &done);
        if (s == MU_OK && !done) {
            return;
        }
        r->times[r->completed].reduced = mui_now();
        r->requests[r->completed++] = NULL;
        note_result(r, s);
    }
}

void mui_reducer_begin(mui_reducer *r, const mui_reduction *how, const uint8_t *states)
{
    r->how = *how;
    r->how.scatter = how->scatter && r->hook == NULL; /* a hook leaves all of it on every rank */
    write_text(r);
    r->group->lack = mui_reducer_lack;
    r->group->lack_user = r;
    r->launched = r->completed = 0;
    r->abandoned = r->skipped = r->launched_bad = false;
    r->failed = MU_OK;
    r->ready_count = 0;
    r->total_samples = 0;
    r->first_bad = -1;
    memset(r->times, 0, (size_t)r->bucket_count * sizeof(*r->times));
    memset(r->pending, 0, (size_t)r->bucket_count * sizeof(*r->pending));
    if (r->count > 0) {
        memset(r->seen, 0, (size_t)r->count);
        memcpy(r->states, states, (size_t)r->count);
    }
    for (int64_t i = 0; i < r->count; i++) {
        r->pending[r->bucket_of[i]] += states[i] == MUI_SLICE_EXPECTED;
    }
    if (how->abandon != NULL) {
        mui_reducer_abandon(r, how->abandon);
    } else {
        launch_complete(r);
    }
}

void mui_reducer_ready(mui_reducer *r, int64_t i, bool contributes)
{
    if (r->states[i] != MUI_SLICE_EXPECTED) {
        return;
    }
    r->states[i] = contributes ? MUI_SLICE_READY : MUI_SLICE_ABSENT;
    if (!r->seen[i]) {
        r->seen[i] = 1;
        r->ready_order[r->ready_count++] = i;
    }
    if (--r->pending[r->bucket_of[i]] == 0) {
        r->times[r->bucket_of[i]].ready = mui_now();
        launch_complete(r);
    }
    make_progress(r);
}

void mui_reducer_abandon(mui_reducer *r, const char *reason)
{
    r->abandoned = true;
    snprintf(r->abandon_text, sizeof(r->abandon_text), "%.90s: %s", r->text,
             reason != NULL ? reason : "no reason given");
}

/* The others may be at a collective within the step, which this rank's first abandonment then ends: that one did not
 * stand for the bucket. So nothing else is posted before it is known. */
static void abandon_first(mui_reducer *r)
{
    bool again = true;
    while (again) {
        r->launched = 0;
        launch_next(r);
        mu_request *q = r->requests[0];
        r->requests[0] = NULL;
        if (r->failed != MU_OK || q == NULL) {
            return;
        }
        mu_status s = mu_request_wait(q);
        note_result(r, s);
        again = s == MU_SKIPPED && r->group->skip_within;
    }
    r->completed = 1;
    r->times[0].reduced = mui_now();
}

void mui_reducer_launch_rest(mui_reducer *r)
{
    if (r->abandoned && r->launched == 0 && r->bucket_count > 0) {
        abandon_first(r);
    }
    while (r->launched < r->bucket_count) {
        launch_next(r);
        make_progress(r);
    }
}

/* All buckets are here, on all ranks. */
static mu_status finish(mui_reducer *r)
{
    for (int64_t k = 0; k < r->bucket_count; k++) {
        mui_bucket_read_tail(r, k);
    }
    if (r->how.weighted && r->total_samples == 0) {
        return MU_OK; /* nothing to divide by */
    }
    if (r->hook != NULL) {
        mu_status s = mui_reducer_run_hook(r);
        if (s != MU_OK || r->first_bad >= 0) {
            return s;
        }
    }
    for (int64_t k = 0; k < r->bucket_count && r->how.weighted && r->hook == NULL; k++) {
        const mui_slice_bucket *b = &r->buckets[k];
        for (int i = 0; i < 2; i++) {
            mui_part part = mui_reducer_part(r, b, i);
            mui_bucket_divide(r->slab + b->offset + part.from * mu_dtype_bytes(b->dtype), b->dtype, part.count,
                              r->total_samples);
        }
    }
    if (r->how.look && r->how.scatter) {
        return mui_reducer_agree_bad(r);
    }
    if (r->how.look) {
        /* In what has been reduced, which is the same on all ranks: so is the answer. */
        r->first_bad = mui_reducer_find_bad(r);
    }
    return MU_OK;
}

static void trace_buckets(const mui_reducer *r)
{
    for (int64_t k = 0; k < r->bucket_count; k++) {
        const mui_bucket_times *at = &r->times[k];
        const mui_slice_bucket *b = &r->buckets[k];
        if (at->reduced > 0) {
            mui_trace_add_bucket(r->context,
                                 &(mui_trace_bucket){.who = r->name, .reduction = r->sequence, .index = k,
                                                     .bytes = (int64_t)((b->elements + b->tail) * mu_dtype_bytes(b->dtype)),
                                                     .ready = at->ready, .launched = at->launched,
                                                     .reduced = at->reduced});
        }
    }
}

mu_status mui_reducer_wait(mui_reducer *r)
{
    for (; r->completed < r->launched; r->completed++) {
        mu_request *q = r->requests[r->completed];
        if (q != NULL) {
            r->requests[r->completed] = NULL;
            note_result(r, mu_request_wait(q));
            r->times[r->completed].reduced = mui_now();
        }
    }
    if (r->context->trace != NULL) {
        trace_buckets(r);
    }
    mu_status s = r->failed != MU_OK ? r->failed : r->skipped ? MU_SKIPPED : finish(r);
    r->sequence++;
    r->group->lack = NULL;
    return s;
}

mu_request *mui_reducer_start_other(mui_reducer *r, void *data, int64_t count, mu_dtype type, mu_reduce_op op)
{
    if (r->failed != MU_OK) {
        return NULL;
    }
    mui_identity *id = &r->identity;
    id->kind = MUI_KIND_BUFFERS;
    id->sequence = r->sequence;
    id->scattered = 0;
    id->steps = id->updates = 0; /* buffers come together in an abandoned reduction too */
    id->hash = mui_hash_u64(mui_hash_string(mui_hash_u64(MUI_HASH_START, r->id), r->name), (uint64_t)count);
    snprintf(id->text, sizeof(id->text), "buffers of %.150s", r->text);
    mu_request *q = mui_all_reduce_start(r->group, data, count, type, op, id);
    if (q == NULL) {
        mui_reducer_start_failed(r);
    }
    return q;
}

bool mui_reducer_scatters(const mui_reducer *r)
{
    return r->how.scatter;
}

const mui_slice_bucket *mui_reducer_buckets(const mui_reducer *r)
{
    return r->buckets;
}

const mui_bucket_times *mui_reducer_times(const mui_reducer *r)
{
    return r->times;
}

int mui_reducer_last_rank(const mui_reducer *r, double *seconds)
{
    *seconds = r->last_seconds;
    return r->last_rank;
}

int64_t mui_reducer_launched(const mui_reducer *r)
{
    return r->launched;
}

bool mui_reducer_on_its_way(const mui_reducer *r, int64_t i)
{
    return r->bucket_of[i] < r->launched;
}

bool mui_reducer_launched_bad(const mui_reducer *r)
{
    return r->launched_bad;
}

int64_t mui_reducer_first_bad(const mui_reducer *r)
{
    return r->first_bad;
}

bool mui_reducer_bad_on(const mui_reducer *r, int64_t i, int rank)
{
    return mui_mask_has(r->bad + r->bucket_of[i] * r->words, rank);
}

mu_status mui_reducer_not_finite(const mui_reducer *r, bool error)
{
    const char *name = r->slices[r->first_bad].name;
    char ranks[200] = "";
    size_t n = 0;
    for (int k = 0; k < mu_group_size(r->group) && n + 16 < sizeof(ranks); k++) {
        if (mui_reducer_bad_on(r, r->first_bad, k)) {
            n += (size_t)snprintf(ranks + n, sizeof(ranks) - n, "%s%d", n > 0 ? ", " : " on rank ", k);
        }
    }
    const char *what = n > 0 ? ranks : " only after summing over ranks (an overflow)";
    if (error) {
        return mui_fail(r->context, MU_ERR_STATE, "the gradient of `%s` is not finite%s in %s", name, what, r->text);
    }
    mui_log(r->context, mu_group_rank(r->group) == 0 ? MU_LOG_WARN : MU_LOG_INFO,
            "%s `%s`: step skipped: the gradient of `%s` is not finite%s in %s", r->kind, r->name, name, what, r->text);
    return MU_SKIPPED;
}

uint64_t mui_reducer_sequence(const mui_reducer *r)
{
    return r->sequence;
}

int64_t mui_reducer_total_samples(const mui_reducer *r)
{
    return r->total_samples;
}

int mui_reducer_ranks(const mui_reducer *r, int64_t i)
{
    int n = 0;
    for (int w = 0; w < r->words; w++) {
        for (uint32_t m = r->masks[i * r->words + w]; m != 0; m &= m - 1) {
            n++;
        }
    }
    return n;
}

bool mui_reducer_on(const mui_reducer *r, int64_t i, int rank)
{
    return mui_mask_has(r->masks + i * r->words, rank);
}

const int64_t *mui_reducer_ready_order(const mui_reducer *r, int64_t *count)
{
    *count = r->ready_count;
    return r->ready_order;
}

const char *mui_reducer_text(const mui_reducer *r)
{
    return r->text;
}

const char *mui_reducer_skip_text(const mui_reducer *r)
{
    return r->skip_text;
}
