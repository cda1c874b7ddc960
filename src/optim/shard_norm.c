/* The squares of gradients that ranks hold in parts, added up in the very order in which one rank adds up whole ones:
 * line after line within blocks, block after block. A block that one rank has alone travels as one number; of a block
 * that is cut, each line does. So clipping is the same, bit for bit, with a sharded optimiser and without. */
#include "base/alloc.h"
#include "base/rng.h"
#include "comm/agree.h"
#include "optim/shard.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LINE = MUI_SQUARES_LINE, BLOCK = LINE * MUI_SQUARES_BLOCK };

/* One block of a parameter: `lines` of it, from `at` of its bucket on. */
typedef struct block {
    const float *grads;
    size_t at, lines;
    mui_cut cut;
} block;

static const mui_bucket *bucket_of(const mui_store *s, const mu_parameter *p)
{
    int64_t b = 0;
    while (p->offset < s->buckets[b].offset || p->offset >= s->buckets[b].offset + s->buckets[b].floats) {
        b++;
    }
    return &s->buckets[b];
}

/* The rank that has a line; what all have is rank 0's to tell. */
static size_t owner(const block *k, size_t line)
{
    size_t at = k->at + line * LINE;
    return at < k->cut.rest ? at / k->cut.slice : 0;
}

static bool is_whole(const block *k)
{
    bool spans = k->at < k->cut.rest && k->at + k->lines * LINE > k->cut.rest;
    return !spans && owner(k, 0) == owner(k, k->lines - 1);
}

/* Numbers that the block is told by: writes those of this rank, and zeros for others'. */
static size_t tell(const block *k, size_t rank, double *out)
{
    if (is_whole(k)) {
        out[0] = owner(k, 0) == rank ? mui_sum_squares((int64_t)(k->lines * LINE), k->grads) : 0;
        return 1;
    }
    for (size_t i = 0; i < k->lines; i++) {
        out[i] = owner(k, i) == rank ? mui_sum_squares(LINE, k->grads + i * LINE) : 0;
    }
    return k->lines;
}

static double add_up(const block *k, const double *told, size_t *count)
{
    double sum = 0;
    *count = is_whole(k) ? 1 : k->lines;
    for (size_t i = 0; i < *count; i++) {
        sum += told[i];
    }
    return sum;
}

typedef enum what { COUNT, TELL, ADD } what;

/* Goes through the parameter's blocks; returns their sum when adding. *at moves on by the numbers they take. */
static double go_through(const mui_store *s, const mu_parameter *p, const mu_group *g, what w, double *told, size_t *at)
{
    const mui_bucket *bucket = bucket_of(s, p);
    double sum = 0;
    for (size_t from = 0; from < p->capacity; from += BLOCK) {
        size_t floats = p->capacity - from < BLOCK ? p->capacity - from : BLOCK, count = 0;
        block k = {s->grads + p->offset + from, p->offset - bucket->offset + from, floats / LINE, mui_cut_of(bucket, g)};
        if (w == COUNT) {
            count = is_whole(&k) ? 1 : k.lines;
        } else if (w == TELL) {
            count = tell(&k, (size_t)mu_group_rank(g), told + *at);
        } else {
            sum += add_up(&k, told + *at, &count);
        }
        *at += count;
    }
    return sum;
}

/* Gradients of this rank alone have no norm of all, nor have those that were scattered by a layout that is gone. */
static mu_status check(const mui_store *s, mui_counts_fn counts, mui_source *source)
{
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        if (counts(source, p) && (p->grad_state != MUI_GRAD_REDUCED ||
                                  (s->scattered_version != 0 && s->scattered_version != s->version))) {
            return mui_fail(s->context, MU_ERR_STATE,
                            "clipping gradients that a sharded optimiser steps on: that of `%s` is not the whole outcome of a "
                            "reduction (mu_backward came last, or the model changed since)", p->name);
        }
    }
    return MU_OK;
}

static mu_status exchange(mui_store *s, mu_group *g, size_t count, mu_status mine)
{
    mui_identity id = {.kind = MUI_KIND_CLIP, .hash = mui_hash_u64(s->layout_hash, (uint64_t)count)};
    snprintf(id.text, sizeof(id.text), "mu_clip_grad_norm of gradients that a sharded optimiser steps on (%zu numbers)", count);
    if (mine != MU_OK) {
        return mui_meet(g, &id, mine);
    }
    mu_request *q = mui_all_reduce_start(g, s->square_sums, (int64_t)count, MU_F64, MU_SUM, &id);
    mu_status status = q != NULL ? mu_request_wait(q) : mu_context_status(s->context);
    if (status == MU_SKIPPED) {
        return mui_fail(s->context, MU_ERR_PEER, "%s: not done: %s", id.text, mui_group_skip_text(g));
    }
    return q == NULL && status == MU_OK ? MU_ERR_COMM : status;
}

static mu_status make_room(mui_store *s, size_t count)
{
    if (count > s->square_sums_room) {
        double *grown = mui_realloc(s->context, s->square_sums, count * sizeof(*grown));
        if (grown == NULL) {
            return MU_ERR_NOMEM;
        }
        s->square_sums = grown;
        s->square_sums_room = count;
    }
    return MU_OK;
}

mu_status mui_shard_squares(mui_store *s, mui_counts_fn counts, mui_source *source, double *squares,
                            const mu_parameter **bad)
{
    mu_group *g = s->sharded_over;
    size_t count = 0, at = 0;
    for (int64_t i = 0; i < s->count; i++) {
        if (counts(source, s->parameters[i])) {
            (void)go_through(s, s->parameters[i], g, COUNT, NULL, &count);
        }
    }
    count = count > 0 ? count : 1;
    mu_status status = check(s, counts, source);
    status = status == MU_OK ? make_room(s, count) : status;
    if (status == MU_OK) {
        s->square_sums[0] = 0;
    }
    for (int64_t i = 0; i < s->count && status == MU_OK; i++) {
        if (counts(source, s->parameters[i])) {
            (void)go_through(s, s->parameters[i], g, TELL, s->square_sums, &at);
        }
    }
    status = exchange(s, g, count, status);
    at = 0;
    for (int64_t i = 0; i < s->count && status == MU_OK; i++) {
        if (counts(source, s->parameters[i])) {
            *squares += go_through(s, s->parameters[i], g, ADD, s->square_sums, &at);
            *bad = *bad == NULL && !isfinite(*squares) ? s->parameters[i] : *bad;
        }
    }
    return status;
}
