/* Calls as descriptors: how many bytes they mean, how a slot is filled, and results of payloads that lie in the slots. */
#include "comm/reduce.h"
#include "comm/verdict.h"
#include "base/os.h"

#include <string.h>

size_t mui_spec_bytes(const mui_call_spec *s)
{
    switch (s->kind) {
    case MUI_ALL_REDUCE:
    case MUI_REDUCE_SCATTER: return (size_t)s->count * mui_reducible_bytes(s->type);
    case MUI_BROADCAST:
    case MUI_ALL_GATHER: return (size_t)s->count;
    case MUI_BARRIER:
    case MUI_ALLOC:
    case MUI_FREE: break;
    }
    return 0;
}

size_t mui_spec_brings(const mui_call_spec *s, int size)
{
    return mui_spec_bytes(s) * (s->kind == MUI_REDUCE_SCATTER ? (size_t)size : 1);
}

void mui_post_fill(mui_slot *slot, const mui_call_spec *s, const mui_identity *identity, int size)
{
    slot->sequence = identity != NULL ? identity->sequence : 0;
    slot->hash = identity != NULL ? identity->hash : 0;
    slot->steps = identity != NULL ? identity->steps : 0;
    slot->updates = identity != NULL ? identity->updates : 0;
    slot->kind = identity != NULL ? identity->kind : 0;
    slot->posted_at = mui_now();
    slot->count = s->count;
    slot->root = s->root;
    slot->call = (uint8_t)s->kind;
    slot->type = (uint8_t)s->type;
    slot->op = (uint8_t)s->op;
    slot->identified = identity != NULL;
    if (identity != NULL) {
        memcpy(slot->text, identity->text, strlen(identity->text) + 1);
    }
    size_t bytes = mui_spec_brings(s, size);
    if (bytes <= MUI_INLINE_BYTES && bytes > 0 && s->in != NULL) {
        memcpy(slot->payload, s->in, bytes);
    }
}

void mui_finish_inline(const mui_posts *p, const mui_call_spec *s, int rank, const void **in)
{
    size_t bytes = mui_spec_bytes(s);
    bool alone = p->size == 1;
    void *out = s->out;
    if (bytes == 0) {
        return;
    }
    for (int r = 0; r < p->size; r++) {
        size_t at = s->kind == MUI_REDUCE_SCATTER ? (size_t)rank * bytes : 0;
        in[r] = alone ? s->in : mui_post_of(p, r)->payload + at;
    }
    switch (s->kind) {
    case MUI_REDUCE_SCATTER: mui_reduce(s->type, s->op, p->size, in, 1, &out, (int64_t)s->count); break;
    case MUI_ALL_REDUCE:
        if (!alone) { /* the sum, the mean, the greatest of one is itself */
            mui_reduce(s->type, s->op, p->size, in, 1, &out, (int64_t)s->count);
        }
        break;
    case MUI_BROADCAST:
        if (rank != s->root) {
            memcpy(out, in[s->root], bytes);
        }
        break;
    case MUI_ALL_GATHER:
        for (int r = 0; r < p->size; r++) {
            memmove((char *)out + (size_t)r * bytes, in[r], bytes);
        }
        break;
    case MUI_BARRIER:
    case MUI_ALLOC:
    case MUI_FREE: break;
    }
}
