/* Counted, aligned heap memory. */
#include "base/alloc.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Sits right before the user's bytes, so that realloc and free know what they have. */
typedef struct header {
    size_t bytes;
    char pad[64 - sizeof(size_t)];
} header;

static bool injected_failure(mu_context *c)
{
    if (c == NULL) {
        return false;
    }
    int64_t left = __atomic_load_n(&c->fail_after, __ATOMIC_RELAXED);
    if (left < 0) {
        return false;
    }
    left = __atomic_fetch_sub(&c->fail_after, 1, __ATOMIC_RELAXED);
    if (left == 0 && c->fail_forever) {
        __atomic_store_n(&c->fail_after, 0, __ATOMIC_RELAXED);
    }
    return left == 0;
}

void *mui_alloc(mu_context *c, size_t bytes)
{
    size_t total = 0;
    header *h = NULL;
    if (mui_size_add(bytes, sizeof(*h) + 63, &total) && !injected_failure(c)) {
        h = aligned_alloc(64, total / 64 * 64);
    }
    if (h == NULL) {
        mui_fail(c, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    h->bytes = bytes;
    if (c != NULL) {
        mui_count(&c->allocations, 1);
        mui_count(&c->allocated_bytes, bytes);
        mui_count(&c->live_allocations, 1);
    }
    return h + 1;
}

void *mui_calloc(mu_context *c, size_t count, size_t bytes)
{
    size_t total = 0;
    if (!mui_size_mul(count, bytes, &total)) {
        mui_fail(c, MU_ERR_NOMEM, "out of memory: %zu times %zu bytes were asked for", count, bytes);
        return NULL;
    }
    void *p = mui_alloc(c, total);
    if (p != NULL) {
        memset(p, 0, total);
    }
    return p;
}

void *mui_realloc(mu_context *c, void *old, size_t bytes)
{
    void *p = mui_alloc(c, bytes);
    if (p != NULL && old != NULL) {
        size_t had = ((header *)old - 1)->bytes;
        memcpy(p, old, had < bytes ? had : bytes);
        mui_free(c, old);
    }
    return p;
}

void mui_free(mu_context *c, void *p)
{
    if (p == NULL) {
        return;
    }
    if (c != NULL) {
        __atomic_fetch_sub(&c->live_allocations, 1, __ATOMIC_RELAXED);
    }
    free((header *)p - 1);
}

char *mui_strndup(mu_context *c, const char *s, size_t n)
{
    size_t length = strnlen(s, n);
    char *copy = mui_alloc(c, length + 1);
    if (copy != NULL) {
        memcpy(copy, s, length);
        copy[length] = '\0';
    }
    return copy;
}

char *mui_strdup(mu_context *c, const char *s)
{
    return mui_strndup(c, s, SIZE_MAX);
}

char *mui_format(mu_context *c, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *s = mui_alloc(c, (size_t)(length < 0 ? 0 : length) + 1);
    if (s != NULL) {
        va_start(args, format);
        vsnprintf(s, (size_t)(length < 0 ? 0 : length) + 1, format, args);
        va_end(args);
    }
    return s;
}

bool mui_size_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

bool mui_size_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

bool mui_grow(mu_context *c, void **items, size_t count, size_t *capacity, size_t item_bytes)
{
    if (count < *capacity) {
        return true;
    }
    size_t more = *capacity < 8 ? 8 : *capacity, bytes = 0;
    if (!mui_size_add(more, *capacity, &more) || !mui_size_mul(more, item_bytes, &bytes)) {
        mui_fail(c, MU_ERR_NOMEM, "out of memory: an array of %zu elements cannot grow", count);
        return false;
    }
    void *p = mui_realloc(c, *items, bytes);
    if (p == NULL) {
        return false;
    }
    *items = p;
    *capacity = more;
    return true;
}
