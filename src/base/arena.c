/* Bump allocation over a list of blocks that only grows. */
#include "base/arena.h"
#include "base/alloc.h"

#include <string.h>

#define FIRST_BLOCK_BYTES ((size_t)16 << 10)
#define LARGEST_BLOCK_BYTES ((size_t)1 << 20)

struct mui_arena_block {
    mui_arena_block *next;
    size_t bytes, used; /* of data */
    _Alignas(16) char data[];
};

void mui_arena_init(mui_arena *a, mu_context *c)
{
    *a = (mui_arena){.context = c};
}

static mui_arena_block *next_block(mui_arena *a, size_t bytes)
{
    /* Blocks kept from before the last reset come first; one that is too small is passed over for this round. */
    while (a->current != NULL && a->current->next != NULL) {
        a->current = a->current->next;
        a->current->used = 0;
        if (a->current->bytes >= bytes) {
            return a->current;
        }
    }
    size_t size = a->current == NULL ? FIRST_BLOCK_BYTES : a->current->bytes * 2;
    size = size > LARGEST_BLOCK_BYTES ? LARGEST_BLOCK_BYTES : size;
    size = size < bytes ? bytes : size;
    size_t total = 0;
    if (!mui_size_add(size, sizeof(mui_arena_block), &total)) {
        mui_fail(a->context, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    mui_arena_block *b = mui_alloc(a->context, total);
    if (b == NULL) {
        return NULL;
    }
    *b = (mui_arena_block){.bytes = size};
    if (a->current == NULL) {
        a->first = b;
    } else {
        a->current->next = b;
    }
    a->current = b;
    return b;
}

void *mui_arena_alloc(mui_arena *a, size_t bytes)
{
    size_t rounded = 0;
    if (!mui_size_add(bytes, 15, &rounded)) {
        mui_fail(a->context, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    rounded = rounded / 16 * 16;
    if (a->limit_bytes != 0 && (rounded > a->limit_bytes || a->used > a->limit_bytes - rounded)) {
        mui_fail(a->context, MU_ERR_LIMIT, "more than the limit of %zu bytes are needed", a->limit_bytes);
        return NULL;
    }
    mui_arena_block *b = a->current;
    if (b == NULL || b->bytes - b->used < rounded) {
        b = next_block(a, rounded);
        if (b == NULL) {
            return NULL;
        }
    }
    void *p = b->data + b->used;
    b->used += rounded;
    a->used += rounded;
    return p;
}

void *mui_arena_calloc(mui_arena *a, size_t count, size_t bytes)
{
    size_t total = 0;
    if (!mui_size_mul(count, bytes, &total)) {
        mui_fail(a->context, MU_ERR_NOMEM, "out of memory: %zu times %zu bytes were asked for", count, bytes);
        return NULL;
    }
    void *p = mui_arena_alloc(a, total);
    if (p != NULL) {
        memset(p, 0, total);
    }
    return p;
}

char *mui_arena_strdup(mui_arena *a, const char *s)
{
    return mui_arena_strndup(a, s, SIZE_MAX);
}

char *mui_arena_strndup(mui_arena *a, const char *s, size_t n)
{
    size_t length = n > 0 ? strnlen(s, n) : 0;
    char *copy = mui_arena_alloc(a, length + 1);
    if (copy != NULL) {
        if (length > 0) {
            memcpy(copy, s, length);
        }
        copy[length] = '\0';
    }
    return copy;
}

void mui_arena_reset(mui_arena *a)
{
    a->current = a->first;
    a->used = 0;
    if (a->first != NULL) {
        a->first->used = 0;
    }
}

void mui_arena_free(mui_arena *a)
{
    for (mui_arena_block *b = a->first; b != NULL;) {
        mui_arena_block *next = b->next;
        mui_free(a->context, b);
        b = next;
    }
    mui_arena_init(a, a->context);
}
