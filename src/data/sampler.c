/* The distributed sampler. See data.h for the rule by which a global batch is cut. */
#include "data/sampler.h"
#include "base/alloc.h"
#include "base/rng.h"

#include <inttypes.h>

mu_status mui_sampler_init(mui_sampler *s, mu_context *c, int64_t count, const mu_loader_options *o)
{
    int64_t size = o->shard.size, global = (int64_t)o->batch * size; /* two ints: fits */
    *s = (mui_sampler){.count = count, .batch = o->batch, .rank = o->shard.rank, .size = size, .seed = o->seed,
                       .remainder = o->remainder};
    switch (o->remainder) {
    case MU_REMAINDER_DEFAULT:
        s->places = count;
        break;
    case MU_REMAINDER_WRAP:
        s->places = (count + size - 1) / size * size;
        break;
    case MU_REMAINDER_DROP:
        s->places = count / global * global;
        if (s->places == 0) {
            return mui_fail(c, MU_ERR_ARG, "%" PRId64 " samples make no full batch of %d on %" PRId64
                            " ranks, and partial ones are to be dropped", count, o->batch, size);
        }
        break;
    default:
        return mui_fail(c, MU_ERR_ARG, "loader option remainder is %d: expected one of mu_remainder",
                        (int)o->remainder);
    }
    s->steps = s->end = (s->places + global - 1) / global;
    if (o->shuffle) {
        s->order = mui_calloc(c, (size_t)count, sizeof(*s->order));
        if (s->order == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    return MU_OK;
}

void mui_sampler_free(mui_sampler *s, mu_context *c)
{
    mui_free(c, s->order);
    s->order = NULL;
}

void mui_sampler_epoch(mui_sampler *s, int64_t epoch)
{
    if (s->order == NULL) {
        return;
    }
    mui_rng r;
    mui_rng_init(&r, mui_hash_u64(mui_hash_string(MUI_HASH_START, "shuffle"), s->seed), (uint64_t)epoch);
    for (int64_t i = 0; i < s->count; i++) {
        s->order[i] = i;
    }
    /* Fisher and Yates. */
    for (int64_t i = s->count - 1; i > 0; i--) {
        int64_t j = (int64_t)mui_rng_below(&r, (uint64_t)i + 1), kept = s->order[i];
        s->order[i] = s->order[j];
        s->order[j] = kept;
    }
}

int64_t mui_sampler_seek(mui_sampler *s, int64_t samples)
{
    int64_t global = s->batch * s->size, step = samples / global;
    s->offset = samples % global;
    int64_t left = s->count > s->offset ? s->count - s->offset : 0;
    if (s->remainder == MU_REMAINDER_DROP) {
        left = left / global * global;
    } else if (s->remainder == MU_REMAINDER_WRAP) {
        left = (left + s->size - 1) / s->size * s->size;
    }
    s->places = s->offset + left;
    s->end = (left + global - 1) / global;
    return step < s->end ? step : s->end;
}

mui_part mui_sampler_slice(const mui_sampler *s, int64_t step)
{
    int64_t global = s->batch * s->size, start = s->offset + step * global;
    int64_t total = s->places - start < global ? s->places - start : global;
    int64_t each = total / s->size, more = total % s->size; /* the first `more` ranks get one more */
    int64_t before = s->rank * each + (s->rank < more ? s->rank : more);
    return (mui_part){start + before, each + (s->rank < more ? 1 : 0), total};
}

int64_t mui_sampler_index(const mui_sampler *s, int64_t position)
{
    int64_t place = position % s->count; /* beyond the end: the first samples again */
    return s->order != NULL ? s->order[place] : place;
}
