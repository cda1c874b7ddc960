/* Values that change between reductions by other hands than an optimiser's: written by the program, loaded, or replaced
 * by rank 0's. */
#include "base/rng.h"
#include "ddp/replica.h"

uint64_t mui_ddp_hash_written(const mu_ddp *d, int64_t *count, const char **first)
{
    uint64_t h = MUI_HASH_START;
    *count = 0;
    if (d->context->parameter_writes <= d->written_seen || d->replicas_differ) {
        return h;
    }
    const mui_store *s = d->store;
    mui_source *source = (mui_source *)d->root;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        if (p->value.written > d->written_seen && source->contains(source, p)) {
            h = mui_hash_u64(h, (uint64_t)i + 1);
            h = mui_hash_floats(h, s->values + p->offset, p->capacity);
            *first = *count == 0 ? p->name : *first;
            ++*count;
        }
    }
    return h;
}

void mui_ddp_written_agreed(mu_ddp *d)
{
    d->written_seen = d->context->writes;
}

void mui_ddp_values_replaced(mu_ddp *d)
{
    uint64_t now = ++d->context->writes;
    for (int64_t i = 0; i < d->store->count; i++) {
        d->store->parameters[i]->stepped = now;
    }
}

void mui_ddp_values_averaged(mu_ddp *d)
{
    uint64_t now = ++d->context->writes;
    for (int64_t i = 0; i < d->member_count; i++) {
        mu_parameter *p = d->members[i].parameter;
        p->stepped = now;
        p->value.written = 0;
    }
}
