/* Layout: which parameters are reduced, in which buckets, and how all ranks come to the same one. */
#include "base/alloc.h"
#include "base/rng.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

/* -- members ---------------------------------------------------------------------------------------------------- */
static void free_member(mu_context *c, mui_member *m)
{
    mui_free(c, m->name);
    for (int i = 0; i < MUI_ABSENCE_TEXTS; i++) {
        mui_free(c, m->texts[i]);
    }
}

static void free_members(mu_context *c, mui_member *members, int64_t count)
{
    for (int64_t i = 0; members != NULL && i < count; i++) {
        free_member(c, &members[i]);
    }
    mui_free(c, members);
}

static void free_list(mu_context *c, mui_listed *list, int64_t count)
{
    for (int64_t i = 0; list != NULL && i < count; i++) {
        mui_free(c, list[i].name);
    }
    mui_free(c, list);
}

void mui_ddp_free_layout(mu_ddp *d)
{
    mu_context *c = d->context;
    free_members(c, d->members, d->member_count);
    free_list(c, d->listed, d->listed_count);
    d->listed = NULL;
    d->listed_count = 0;
    mui_free(c, d->slice_of);
    mui_free(c, d->frozen);
    mui_free(c, d->slice_states);
    mui_free(c, d->stash);
    mui_free(c, d->counters);
    mui_free(c, d->counter_values);
    mui_free(c, d->buffer_copy);
    mui_free(c, d->buffer_sums);
    mui_free(c, d->absent);
    mui_free(c, d->report_parameters);
    mui_free(c, d->report_buckets);
    d->report_parameters = NULL;
    d->report_buckets = NULL;
    d->members = NULL;
    d->slice_of = NULL;
    d->frozen = d->slice_states = NULL;
    d->stash = d->buffer_copy = NULL;
    d->counters = NULL;
    d->counter_values = NULL;
    d->buffer_sums = NULL;
    d->absent = NULL;
    d->member_count = d->parameter_count = d->counter_count = d->counter_elements = d->absent_count = 0;
    d->counter_capacity = 0;
    d->store = NULL;
}

/* The plan of one layout, before the store takes it. */
typedef struct plan {
    int64_t *order, *counts;
    size_t *tails, *bytes;
    int64_t reduced;      /* parameters in reduced buckets, first in order */
    int64_t bucket_count; /* reduced ones */
} plan;

static void free_plan(mu_context *c, plan *p)
{
    mui_free(c, p->order);
    mui_free(c, p->counts);
    mui_free(c, p->tails);
    mui_free(c, p->bytes);
}

static bool is_reduced(mu_ddp *d, const mu_parameter *p)
{
    mui_source *source = (mui_source *)d->root;
    return !p->frozen && source->contains(source, p);
}

static mu_status make_plan(mu_ddp *d, mui_store *s, const int64_t *ready, plan *p)
{
    mu_context *c = d->context;
    size_t n = (size_t)s->count + 1;
    p->order = mui_calloc(c, n, sizeof(*p->order));
    p->counts = mui_calloc(c, n, sizeof(*p->counts));
    p->tails = mui_calloc(c, n, sizeof(*p->tails));
    p->bytes = mui_calloc(c, n, sizeof(*p->bytes));
    if (p->order == NULL || p->counts == NULL || p->tails == NULL || p->bytes == NULL) {
        return MU_ERR_NOMEM;
    }
    int64_t others = 0;
    for (int64_t i = s->count; i-- > 0;) {
        if (is_reduced(d, s->parameters[i])) {
            p->order[p->reduced++] = i;
        }
    }
    if (ready != NULL) {
        memcpy(p->order, ready, (size_t)p->reduced * sizeof(*ready));
    }
    for (int64_t i = s->count; i-- > 0;) {
        if (!is_reduced(d, s->parameters[i])) {
            p->order[p->reduced + others++] = i;
        }
    }
    for (int64_t i = 0; i < p->reduced; i++) {
        p->bytes[i] = s->parameters[p->order[i]]->capacity * sizeof(float);
    }
    p->bucket_count =
        mui_reducer_plan(p->bytes, p->reduced, d->options.first_bucket_bytes, d->options.bucket_bytes, p->counts);
    for (int64_t b = 0; b < p->bucket_count; b++) {
        p->tails[b] = mui_reducer_tail(d->group, p->counts[b]);
    }
    p->counts[p->bucket_count] = others;
    return MU_OK;
}

static mu_status move_store(mu_ddp *d, mui_store *s, const plan *p)
{
    if (s->grads_user != d->memory) {
        mu_status status = mui_store_set_grad_memory(s, mui_grad_memory_alloc, mui_grad_memory_free, d->memory);
        if (status != MU_OK) {
            return status;
        }
    }
    s->reduced_over = mu_group_size(d->group) > s->reduced_over ? mu_group_size(d->group) : s->reduced_over;
    mui_grad_memory_together(d->memory, true);
    int64_t buckets = p->bucket_count + (p->reduced < s->count);
    mu_status status = mui_store_relayout(s, p->order, p->counts, p->tails, buckets);
    mui_grad_memory_together(d->memory, false);
    return status;
}

/* Members by slice; those of the layout before keep what is known of them. */
static mu_status make_members(mu_ddp *d, mui_store *s, const plan *p)
{
    mu_context *c = d->context;
    mui_member *members = mui_calloc(c, (size_t)p->reduced + 1, sizeof(*members));
    int64_t *slice_of = mui_calloc(c, (size_t)s->count + 1, sizeof(*slice_of));
    uint8_t *frozen = mui_calloc(c, (size_t)s->count + 1, 1);
    mu_status status = members == NULL || slice_of == NULL || frozen == NULL ? MU_ERR_NOMEM : MU_OK;
    for (int64_t i = 0; status == MU_OK && i < s->count; i++) {
        slice_of[i] = -1;
        frozen[i] = s->parameters[i]->frozen;
    }
    for (int64_t i = 0; status == MU_OK && i < p->reduced; i++) {
        int64_t at = p->order[i];
        slice_of[at] = i;
        if (d->store == s) {
            mui_member *old = &d->members[d->slice_of[at]];
            members[i] = *old;
            memset(old, 0, sizeof(*old));
        } else {
            members[i].parameter = s->parameters[at];
            members[i].since = d->reductions;
            members[i].name = mui_strdup(c, s->parameters[at]->name);
            status = members[i].name != NULL ? MU_OK : MU_ERR_NOMEM;
        }
    }
    if (status != MU_OK) {
        free_members(c, members, p->reduced);
        mui_free(c, slice_of);
        mui_free(c, frozen);
        return status;
    }
    free_members(c, d->members, d->member_count);
    mui_free(c, d->slice_of);
    mui_free(c, d->frozen);
    d->members = members;
    d->member_count = p->reduced;
    d->slice_of = slice_of;
    d->frozen = frozen;
    d->parameter_count = s->count;
    return MU_OK;
}

static mu_status make_list(mu_ddp *d, const mui_store *s)
{
    mui_source *source = (mui_source *)d->root;
    mui_listed *list = mui_calloc(d->context, (size_t)s->count + 1, sizeof(*list));
    mu_status status = list != NULL ? MU_OK : MU_ERR_NOMEM;
    for (int64_t i = 0; status == MU_OK && i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        list[i].inside = source->contains(source, p);
        list[i].bytes = mui_dims_elements(p->value.dims) * (int64_t)sizeof(float);
        if (list[i].inside && p->frozen) {
            list[i].name = mui_strdup(d->context, p->name);
            status = list[i].name != NULL ? MU_OK : MU_ERR_NOMEM;
        }
    }
    free_list(d->context, status == MU_OK ? d->listed : list, status == MU_OK ? d->listed_count : s->count);
    if (status == MU_OK) {
        d->listed = list;
        d->listed_count = s->count;
        mui_free(d->context, d->report_parameters);
        d->report_parameters = NULL;
    }
    return status;
}

static bool add_counter(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    mu_ddp *d = user;
    (void)name;
    if (p == NULL && value->dtype == MU_I64 && mui_dims_elements(value->dims) > 0) {
        if (!MUI_GROW(d->context, d->counters, (size_t)d->counter_count, d->counter_capacity)) {
            return false;
        }
        d->counters[d->counter_count++] = value;
        d->counter_elements += mui_dims_elements(value->dims);
    }
    return true;
}

/* What hangs on the store but not on its buckets. */
static mu_status make_rest(mu_ddp *d, mui_store *s)
{
    mu_context *c = d->context;
    size_t n = (size_t)d->member_count + 1;
    d->counter_count = d->counter_elements = 0;
    mu_status status = mu_module_each_state(d->root, add_counter, d);
    if (status != MU_OK) {
        return status;
    }
    d->counter_values = mui_calloc(c, (size_t)d->counter_elements + 1, sizeof(*d->counter_values));
    d->buffer_copy = mui_calloc(c, s->buffer_floats + 1, sizeof(float));
    d->buffer_sums = mui_calloc(c, s->buffer_floats + 1, sizeof(double));
    d->slice_states = mui_calloc(c, n, 1);
    d->absent = mui_calloc(c, n, sizeof(*d->absent));
    if (d->counter_values == NULL || d->buffer_copy == NULL || d->buffer_sums == NULL || d->slice_states == NULL ||
        d->absent == NULL || mui_failed(c)) {
        return MU_ERR_NOMEM;
    }
    if (s->buffer_floats > 0) {
        memcpy(d->buffer_copy, s->buffer_slab, s->buffer_floats * sizeof(float));
    }
    return MU_OK;
}

static mu_status tell_reducer(mu_ddp *d, mui_store *s)
{
    mu_context *c = d->context;
    size_t n = (size_t)d->member_count;
    mui_slice *slices = mui_calloc(c, n + 1, sizeof(*slices));
    mui_slice_bucket *buckets = mui_calloc(c, (size_t)d->bucket_count, sizeof(*buckets));
    mu_status status = MU_ERR_NOMEM;
    if (slices != NULL && buckets != NULL) {
        for (size_t i = 0; i < n; i++) {
            const mu_parameter *p = d->members[i].parameter;
            slices[i] = (mui_slice){.name = d->members[i].name,
                                    .offset = p->offset * sizeof(float),
                                    .elements = p->capacity,
                                    .dims = p->value.dims,
                                    .row_major = mui_tensor_is_plain(&p->grad_view)};
        }
        for (int64_t b = 0; b < d->bucket_count; b++) {
            const mui_bucket *k = &s->buckets[b];
            buckets[b] = (mui_slice_bucket){MU_F32, k->first, k->count, k->offset * sizeof(float), k->floats, k->tail};
        }
        status =
            mui_reducer_layout(d->reducer, slices, d->member_count, buckets, d->bucket_count, s->grads, s->layout_hash);
    }
    mui_free(c, slices);
    mui_free(c, buckets);
    return status;
}

mu_status mui_ddp_lay_out(mu_ddp *d, mui_store *s, const int64_t *ready)
{
    mu_context *c = d->context;
    plan p = {0};
    mu_status status = make_plan(d, s, ready, &p);
    if (status == MU_OK && p.reduced == 0) {
        free_plan(c, &p);
        /* The same on all ranks, which have just compared their parameters: nobody waits. */
        return mui_fail(c, MU_ERR_STATE, "ddp `%s`: no parameter is trainable, so there is nothing to reduce", d->name);
    }
    if (status == MU_OK) {
        status = move_store(d, s, &p);
    }
    mui_free(c, d->stash);
    d->stash = NULL;
    if (status == MU_OK && d->store != s) {
        mui_ddp_free_layout(d);
    }
    if (status == MU_OK) {
        status = make_members(d, s, &p);
    }
    if (status == MU_OK) {
        status = make_list(d, s);
    }
    if (status == MU_OK && d->store != s) {
        status = make_rest(d, s);
    }
    if (status == MU_OK) {
        d->bucket_count = p.bucket_count;
        status = tell_reducer(d, s);
    }
    free_plan(c, &p);
    if (status != MU_OK) {
        mui_ddp_free_layout(d);
        return mui_ddp_desert(d, status);
    }
    d->store = s;
    d->version = s->version;
    return MU_OK;
}

/* -- following the tree ----------------------------------------------------------------------------------------- */
static bool changed(const mu_ddp *d, const mui_store *s)
{
    if (s != d->store || s->version != d->version) {
        return true;
    }
    for (int64_t i = 0; i < s->count; i++) {
        if (d->frozen[i] != s->parameters[i]->frozen) {
            return true;
        }
    }
    return false;
}

/* By parameter, not by slab, so that it does not depend on the layout. */
static mu_status values_differ(mu_ddp *d, int *differing)
{
    mui_store *s = d->store;
    size_t size = (size_t)mu_group_size(d->group);
    uint64_t own = MUI_HASH_START;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        own = mui_hash_floats(own, s->values + p->offset, p->capacity);
    }
    uint64_t *all = mui_calloc(d->context, size, sizeof(own));
    if (all == NULL) {
        return mui_ddp_desert(d, MU_ERR_NOMEM);
    }
    mu_status status = mu_all_gather(d->group, &own, all, sizeof(own));
    *differing = -1;
    for (size_t r = size; r-- > 1;) {
        *differing = all[r] != all[0] ? (int)r : *differing;
    }
    mui_free(d->context, all);
    return status < 0 ? mui_ddp_break(d, status) : MU_OK;
}

/* True the first time. */
static bool is_news(mu_ddp *d, const mui_text *description)
{
    uint64_t h = mui_hash_bytes(MUI_HASH_START, mui_text_get(description), description->length);
    for (int i = 0; i < d->known_count; i++) {
        if (d->known[i] == h) {
            return false;
        }
    }
    if (d->known_count < MUI_KNOWN_MODELS) {
        d->known[d->known_count++] = h;
    }
    return true;
}

/* Gradients of an earlier reduction that were scattered by the layout that goes now. All ranks have the same. */
static mu_status check_scattered(mu_ddp *d, const mui_store *s)
{
    for (int64_t i = 0; i < s->count && s->scattered_version != 0; i++) {
        const mu_parameter *p = s->parameters[i];
        if (p->grad_state == MUI_GRAD_REDUCED || p->grad_state == MUI_GRAD_MIXED) {
            return mui_fail(d->context, MU_ERR_STATE, "ddp `%s`: the model changed while the gradient of `%s`, scattered over the "
                            "ranks for a sharded optimiser, waited for the step: step or clear gradients before a change",
                            d->name, p->name);
        }
    }
    return MU_OK;
}

static mu_status adopt(mu_ddp *d, mui_store *s, mui_text *now)
{
    char was[300], is[300];
    bool differs = mui_ddp_first_difference(mui_text_get(&d->description), mui_text_get(now), was, is, sizeof(was));
    char text[MUI_IDENTITY_TEXT + 400];
    /* Without the difference it is a relayout by another wrapper of the same tree. */
    snprintf(text, sizeof(text), "reduction %llu (ddp `%.40s`) of a changed model, %.110s",
             (unsigned long long)mui_reducer_sequence(d->reducer), d->name, differs ? is : "laid out anew");
    mu_status status = mui_ddp_gate(d, MUI_KIND_CHANGE, text);
    if (status == MU_OK) {
        status = mui_ddp_compare(d, now);
    }
    if (status == MU_OK) {
        status = check_scattered(d, s);
    }
    if (status == MU_OK) {
        status = mui_ddp_lay_out(d, s, NULL);
    }
    int odd = -1;
    if (status == MU_OK) {
        d->planned = false;
        status = values_differ(d, &odd);
    }
    if (status != MU_OK) {
        return status;
    }
    (void)is_news(d, &d->description);
    if (differs && is_news(d, now) && mu_group_rank(d->group) == 0) {
        mui_log(d->context, MU_LOG_WARN,
                "ddp `%s`: the model changed after wrapping, on all ranks alike: %s; before: %s", d->name, is, was);
    }
    if (odd >= 0) {
        if (mu_group_rank(d->group) == 0) {
            mui_log(
                d->context, MU_LOG_WARN,
                "ddp `%s`: rank %d has other values than rank 0 after the change; all take rank 0's, and this step, "
                "computed with different ones, is skipped",
                d->name, odd);
        }
        status = mui_ddp_spread(d);
    }
    mui_text old = d->description;
    d->description = *now;
    *now = old;
    mui_ddp_count_anew(d);
    return status != MU_OK ? status : odd >= 0 ? MU_SKIPPED : MU_OK;
}

mu_status mui_ddp_follow(mu_ddp *d)
{
    mui_store *s = mui_store_of(d->root);
    if (s == NULL) {
        return mui_ddp_desert(d, mu_context_status(d->context));
    }
    if (!changed(d, s)) {
        return MU_OK;
    }
    mui_text now;
    mui_text_init(&now, d->context);
    mu_status status = mui_ddp_describe(d, s, &now);
    status = status != MU_OK ? mui_ddp_desert(d, status) : adopt(d, s, &now);
    mui_text_free(&now);
    return status;
}

mu_status mui_ddp_plan(mu_ddp *d)
{
    mu_context *c = d->context;
    int64_t n = d->member_count, count = 0, filled = 0;
    bool rank0 = false;
    for (int64_t i = 0; i < n && !rank0; i++) {
        rank0 = mui_reducer_on(d->reducer, i, 0);
    }
    if (!rank0) {
        return MU_OK; /* it had no loss: its order says nothing */
    }
    int64_t *order = mui_calloc(c, (size_t)n, sizeof(*order));
    uint8_t *used = mui_calloc(c, (size_t)n, 1);
    if (order == NULL || used == NULL) {
        mui_free(c, order);
        mui_free(c, used);
        return mui_ddp_desert(d, MU_ERR_NOMEM);
    }
    const int64_t *ready = mui_reducer_ready_order(d->reducer, &count);
    for (int64_t i = 0; i < count; i++) {
        order[filled++] = d->members[ready[i]].parameter->index;
        used[ready[i]] = 1;
    }
    for (int64_t i = 0; i < n; i++) {
        if (!used[i]) {
            order[filled++] = d->members[i].parameter->index;
        }
    }
    mui_free(c, used);
    mu_status status = mu_broadcast(d->group, order, (size_t)n * sizeof(*order), 0);
    bool same = true;
    for (int64_t i = 0; i < n; i++) {
        same = same && order[i] == d->members[i].parameter->index;
    }
    if (status < 0) {
        status = mui_ddp_break(d, status);
    } else {
        mui_ddp_note_ready(d);
        status = same ? MU_OK : mui_ddp_lay_out(d, d->store, order);
        d->planned = status == MU_OK;
    }
    mui_free(c, order);
    return status;
}
