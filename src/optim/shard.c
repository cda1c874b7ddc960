/* Cutting state into ranks' parts, meeting, and what the ranks tell each other. */
#include "optim/shard.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/rng.h"
#include "comm/agree.h"
#include "comm/reduce.h"
#include "dev/pages.h"

#include <stdio.h>
#include <string.h>

mui_cut mui_cut_of(const mui_bucket *b, const mu_group *g)
{
    int size = mu_group_size(g);
    size_t scattered = (size_t)mui_scatter_of(b->floats, size, MU_F32), slice = scattered / (size_t)size;
    return (mui_cut){(size_t)mu_group_rank(g) * slice, slice, scattered};
}

/* -- cutting ---------------------------------------------------------------------------------------------------- */
static bool add_piece(mu_optimizer *o, mui_shard *next, const mui_piece *piece)
{
    if (!MUI_GROW(o->context, next->pieces, next->count, next->capacity)) {
        return false;
    }
    next->pieces[next->count] = *piece;
    next->pieces[next->count++].at = next->floats;
    next->floats += piece->floats;
    return true;
}

/* What of a parameter, which lies at `offset` of its bucket, is between from and to. */
static bool add_part(mu_optimizer *o, mui_shard *next, const mu_parameter *p, int64_t place, size_t offset, size_t from,
                     size_t to, bool everywhere)
{
    size_t begin = offset > from ? offset : from, end = offset + p->capacity < to ? offset + p->capacity : to;
    return begin >= end || add_piece(o, next, &(mui_piece){.id = p->id,
                                                           .place = place,
                                                           .from = begin - offset,
                                                           .floats = end - begin,
                                                           .everywhere = everywhere});
}

static mu_status cut(mu_optimizer *o, const mui_store *s, mui_shard *next)
{
    for (int64_t b = 0; b < s->bucket_count; b++) {
        const mui_bucket *bucket = &s->buckets[b];
        mui_cut c = mui_cut_of(bucket, next->group);
        for (int64_t k = bucket->first; k < bucket->first + bucket->count; k++) {
            const mu_parameter *p = s->parameters[s->order[k]];
            size_t at = p->offset - bucket->offset;
            if (o->progress[s->order[k]].ours &&
                (!add_part(o, next, p, k, at, c.own, c.own + c.slice, false) ||
                 !add_part(o, next, p, k, at, c.rest, bucket->floats, true))) {
                return MU_ERR_NOMEM;
            }
        }
    }
    next->store = s;
    next->store_version = s->version;
    next->store_hash = s->layout_hash;
    return MU_OK;
}

static float *zeros(mu_context *c, size_t floats)
{
    size_t bytes = (floats > 0 ? floats : 1) * sizeof(float);
    float *x = mui_pages_alloc(c, bytes);
    if (x != NULL) {
        memset(x, 0, bytes);
    }
    return x;
}

static size_t bytes_of(const mui_shard *h)
{
    return ((h->states[0] != NULL) + (h->states[1] != NULL)) * h->floats * sizeof(float);
}

mu_status mui_shard_add_state(mu_optimizer *o, int state)
{
    mui_shard *h = o->shard;
    if (h->states[state] != NULL) {
        return MU_OK;
    }
    h->states[state] = zeros(o->context, h->floats);
    if (h->states[state] == NULL) {
        return MU_ERR_NOMEM;
    }
    if (h->counted) {
        o->source->built(o->source)->shared_bytes += h->floats * sizeof(float);
    }
    return MU_OK;
}

static void drop(mu_context *c, mui_shard *h)
{
    for (int k = 0; k < MUI_OPTIMIZER_MAX_STATES; k++) {
        mui_pages_free(c, h->states[k]);
    }
    mui_free(c, h->pieces);
}

/* -- parts of one parameter ------------------------------------------------------------------------------------- */
/* The next piece of p at or after *i; NULL: there is none. */
static const mui_piece *next_piece(const mui_shard *h, const mu_parameter *p, size_t *i)
{
    while (*i < h->count) {
        const mui_piece *piece = &h->pieces[(*i)++];
        if (piece->id == p->id) {
            return piece;
        }
    }
    return NULL;
}

static void put(const mui_shard *h, const mu_parameter *p, float *state, const float *data)
{
    size_t i = 0;
    for (const mui_piece *q; (q = next_piece(h, p, &i)) != NULL;) {
        if (data != NULL) {
            memcpy(state + q->at, data + q->from, q->floats * sizeof(float));
        } else {
            memset(state + q->at, 0, q->floats * sizeof(float));
        }
    }
}

void mui_shard_put(mu_optimizer *o, const mu_parameter *p, int state, const float *data)
{
    if (o->shard->states[state] != NULL) {
        put(o->shard, p, o->shard->states[state], data);
    }
}

/* As integers: 0 and -0 are different then, and a sum in which all ranks but one have zeros is that one's bits. */
mu_status mui_shard_collect(mu_optimizer *o, const mu_parameter *p, int state, float *out)
{
    const mui_shard *h = o->shard;
    size_t i = 0;
    memset(out, 0, p->capacity * sizeof(float));
    for (const mui_piece *q; (q = next_piece(h, p, &i)) != NULL;) {
        if (h->states[state] != NULL && (!q->everywhere || mu_group_rank(h->group) == 0)) {
            memcpy(out + q->from, h->states[state] + q->at, q->floats * sizeof(float));
        }
    }
    return mu_all_reduce(h->group, out, (int64_t)p->capacity, MU_I32, MU_SUM);
}

/* -- meeting ---------------------------------------------------------------------------------------------------- */
static uint64_t hash_double(uint64_t h, double x)
{
    return mui_hash_bytes(h, &x, sizeof(x));
}

/* Whatever decides what a step does: with other settings a rank would make its part of a parameter another's. */
static uint64_t hash_of(const mu_optimizer *o, const mui_store *s)
{
    uint64_t h = mui_hash_u64(mui_hash_u64(s->layout_hash, (uint64_t)o->kind), (uint64_t)o->steps);
    for (size_t g = 0; g < o->group_count; g++) {
        const mui_settings *x = &o->groups[g].settings;
        const double all[] = {x->lr, x->weight_decay, x->momentum, x->dampening, x->beta1, x->beta2, x->eps};
        for (size_t k = 0; k < sizeof(all) / sizeof(*all); k++) {
            h = hash_double(h, all[k]);
        }
        h = mui_hash_u64(h, x->nesterov);
    }
    for (int64_t i = 0; i < s->count; i++) {
        const mui_progress *q = &o->progress[i];
        uint64_t bits = (uint64_t)q->ours | (uint64_t)q->has_state << 1 |
                        (uint64_t)(s->parameters[i]->grad_state != MUI_GRAD_NONE) << 2 |
                        (uint64_t)s->parameters[i]->frozen << 3 | (uint64_t)q->group << 4;
        h = mui_hash_u64(mui_hash_u64(h, bits), (uint64_t)q->step);
    }
    return h;
}

mu_status mui_shard_meet(mu_optimizer *o, uint32_t kind, const char *what, mu_status mine)
{
    mui_store *s = o->source->built(o->source);
    mui_identity id = {.kind = kind, .sequence = (uint64_t)o->steps};
    id.hash = s != NULL && s == o->store ? hash_of(o, s) : 0;
    snprintf(id.text, sizeof(id.text), "%s of the sharded optimiser %s with lr %.6g (state %08x)", what,
             mui_optimizer_kind_name(o->kind), o->groups[0].settings.lr, (unsigned)(id.hash ^ id.hash >> 32));
    return mui_meet(o->shard->group, &id, mine);
}

/* -- opening and closing ---------------------------------------------------------------------------------------- */
mu_status mui_shard_open(mu_optimizer *o, mu_group *g, mu_status status)
{
    mu_context *c = o->context;
    if (g->context != c) {
        return mui_fail(c, MU_ERR_ARG, "an optimiser's state cannot be shared over a group of another context");
    }
    o->shard = mui_calloc(c, 1, sizeof(*o->shard));
    if (o->shard == NULL) {
        mu_group_abort(g, mu_context_message(c));
        return MU_ERR_NOMEM;
    }
    o->shard->group = g;
    mui_store *s = status == MU_OK ? mui_optimizer_follow(o) : NULL;
    status = status != MU_OK ? status : s != NULL ? cut(o, s, o->shard) : mu_context_status(c);
    for (int k = 0; status == MU_OK && k < mui_optimizer_states(o); k++) {
        status = mui_shard_add_state(o, k);
    }
    status = mui_shard_meet(o, MUI_KIND_SHARD, "making", status);
    if (status == MU_OK) {
        s->sharded_over = g;
        s->sharding++;
        s->shared_bytes += bytes_of(o->shard);
        o->shard->counted = true;
    }
    return status;
}

void mui_shard_close(mu_optimizer *o)
{
    mui_store *s = o->source->built(o->source);
    if (o->shard == NULL) {
        return;
    }
    if (s != NULL && o->shard->counted && s->sharding > 0) {
        s->sharding--;
        s->shared_bytes -= bytes_of(o->shard);
        s->sharded_over = s->sharding > 0 ? s->sharded_over : NULL;
    }
    drop(o->context, o->shard);
    mui_free(o->context, o->shard);
    o->shard = NULL;
}

/* -- following the store ---------------------------------------------------------------------------------------- */
/* Parameter by parameter: a change of the layout is rare. */
static mu_status move(mu_optimizer *o, const mui_store *s, mui_shard *next)
{
    mu_status status = MU_OK;
    size_t most = 0;
    for (int64_t i = 0; i < s->count; i++) {
        most = s->parameters[i]->capacity > most ? s->parameters[i]->capacity : most;
    }
    float *whole = mui_pages_alloc(o->context, (most > 0 ? most : 1) * sizeof(float));
    if (whole == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t n = 0; n < o->ours_count; n++) {
        const mu_parameter *p = s->parameters[o->ours[n]];
        for (int k = 0; k < MUI_OPTIMIZER_MAX_STATES && o->progress[o->ours[n]].has_state && status == MU_OK; k++) {
            if (o->shard->states[k] != NULL) {
                status = mui_shard_collect(o, p, k, whole);
                put(next, p, next->states[k], whole);
            }
        }
    }
    mui_pages_free(o->context, whole);
    return status;
}

mu_status mui_shard_settle(mu_optimizer *o)
{
    mu_context *c = o->context;
    mui_shard *h = o->shard, next = {.group = h->group};
    mui_store *s = o->source->built(o->source);
    if (s == h->store && s->version == h->store_version && s->layout_hash == h->store_hash) {
        return MU_OK;
    }
    mu_status status = cut(o, s, &next);
    for (int k = 0; k < MUI_OPTIMIZER_MAX_STATES && status == MU_OK; k++) {
        if (h->states[k] != NULL) {
            next.states[k] = zeros(c, next.floats);
            status = next.states[k] != NULL ? MU_OK : MU_ERR_NOMEM;
        }
    }
    status = mui_agree(c, h->group, status);
    status = status == MU_OK ? move(o, s, &next) : status;
    if (status != MU_OK) {
        drop(c, &next);
        return status;
    }
    s->shared_bytes += bytes_of(&next) - bytes_of(h);
    drop(c, h);
    next.counted = h->counted;
    *h = next;
    return MU_OK;
}

/* -- around a step ---------------------------------------------------------------------------------------------- */
mu_status mui_shard_check(mu_optimizer *o, const mui_store *s)
{
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        if (!o->progress[i].ours || p->frozen || p->grad_state == MUI_GRAD_NONE) {
            continue;
        }
        if (p->grad_state != MUI_GRAD_REDUCED) {
            return mui_fail(o->context, MU_ERR_STATE,
                            "a sharded optimiser steps on what ranks have reduced together, but the gradient of `%s` has "
                            "parts that no reduction brought together (mu_backward or a deferred mu_ddp_backward_with came "
                            "last)", p->name);
        }
        if (s->scattered_version != 0 && s->scattered_version != s->version) {
            return mui_fail(o->context, MU_ERR_STATE,
                            "the model changed between a reduction and the step: the gradient of `%s` was scattered over the "
                            "ranks for a sharded optimiser, by a layout that is gone", p->name);
        }
    }
    return MU_OK;
}

mu_status mui_shard_gather(mu_optimizer *o, mui_store *s, uint64_t now)
{
    mu_status status = MU_OK;
    for (int64_t b = 0; b < s->bucket_count && status == MU_OK; b++) {
        const mui_bucket *bucket = &s->buckets[b];
        mui_cut c = mui_cut_of(bucket, o->shard->group);
        bool touched = false;
        for (int64_t k = bucket->first; k < bucket->first + bucket->count && !touched; k++) {
            const mu_parameter *p = s->parameters[s->order[k]];
            touched = p->stepped == now && o->progress[s->order[k]].ours;
        }
        if (touched && c.slice > 0) {
            float *values = s->values + bucket->offset;
            status = mu_all_gather(o->shard->group, values + c.own, values, c.slice * sizeof(float));
        }
    }
    return status;
}
