/* The pool: one list of free blocks for each size class.
 *
 * Classes, eight to a doubling, waste at most an eighth, and make a step's demand on each class the same every time it
 * is run: what the first step got is enough for all later ones of the same shape, whatever the order of releases. A
 * best fit over all free blocks would hold a little less, and could go on asking for blocks for several steps. */
#include "dev/storage.h"
#include "base/alloc.h"
#include "dev/pages.h"

#define SMALLEST_BYTES ((size_t)256)
#define CLASSES_PER_DOUBLING 8
#define CLASS_COUNT (56 * CLASSES_PER_DOUBLING)

/* One block with its header. The header is first, so that a storage is its block. */
typedef struct block {
    mui_storage storage;
    int size_class;     /* -1: a header only, around memory of somebody else */
    struct block *next; /* all blocks of the pool */
} block;

struct mui_pool {
    mu_context *context;
    block *all;
    mui_storage *free_blocks[CLASS_COUNT];
    mui_storage *free_headers;
    size_t live_bytes, peak_bytes, held_bytes;
};

mui_pool *mui_pool_new(mu_context *c)
{
    mui_pool *p = mui_calloc(c, 1, sizeof(*p));
    if (p != NULL) {
        p->context = c;
    }
    return p;
}

void mui_pool_free(mui_pool *p)
{
    if (p == NULL) {
        return;
    }
    for (block *b = p->all; b != NULL;) {
        block *next = b->next;
        if (b->size_class >= 0) {
            mui_pages_free(p->context, b->storage.data);
        }
        mui_free(p->context, b);
        b = next;
    }
    mui_free(p->context, p);
}

/* The smallest class that holds bytes, and its size; -1 when there is none. */
static int class_of(size_t bytes, size_t *size)
{
    size_t low = SMALLEST_BYTES;
    int c = 0;
    if (bytes > SIZE_MAX / 4) {
        return -1;
    }
    while (low * 2 < bytes) {
        low *= 2;
        c += CLASSES_PER_DOUBLING;
    }
    size_t step = low / CLASSES_PER_DOUBLING;
    size_t k = bytes <= low ? 0 : (bytes - low + step - 1) / step;
    *size = low + k * step;
    c += (int)k;
    return c < CLASS_COUNT ? c : -1;
}

static block *new_block(mui_pool *p, int size_class, size_t size)
{
    block *b = mui_calloc(p->context, 1, sizeof(*b));
    if (b == NULL) {
        return NULL;
    }
    b->size_class = size_class;
    if (size_class >= 0) {
        b->storage.data = mui_pages_alloc(p->context, size);
        if (b->storage.data == NULL) {
            mui_free(p->context, b);
            return NULL;
        }
        p->held_bytes += size;
    }
    b->storage.capacity = size;
    b->next = p->all;
    p->all = b;
    return b;
}

static mui_storage *header_of_nothing(mui_pool *p)
{
    mui_storage *s = p->free_headers;
    if (s != NULL) {
        p->free_headers = s->next_free;
    } else {
        block *b = new_block(p, -1, 0);
        if (b == NULL) {
            return NULL;
        }
        s = &b->storage;
    }
    s->next_free = NULL;
    s->refs = 1;
    s->pool = p;
    return s;
}

mui_storage *mui_storage_new(mui_pool *p, size_t bytes)
{
    if (bytes == 0) {
        return mui_storage_wrap(p, NULL, 0);
    }
    size_t size = 0;
    int c = class_of(bytes, &size);
    if (c < 0) {
        mui_fail(p->context, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    mui_storage *s = p->free_blocks[c];
    if (s != NULL) {
        p->free_blocks[c] = s->next_free;
    } else {
        block *b = new_block(p, c, size);
        if (b == NULL) {
            return NULL;
        }
        s = &b->storage;
    }
    s->bytes = bytes;
    s->refs = 1;
    s->pool = p;
    s->next_free = NULL;
    p->live_bytes += s->capacity;
    if (p->live_bytes > p->peak_bytes) {
        p->peak_bytes = p->live_bytes;
    }
    return s;
}

mui_storage *mui_storage_wrap(mui_pool *p, void *data, size_t bytes)
{
    mui_storage *s = header_of_nothing(p);
    if (s != NULL) {
        s->data = data;
        s->bytes = bytes;
    }
    return s;
}

void mui_storage_keep(mui_storage *s)
{
    if (s != NULL) {
        s->refs++;
    }
}

void mui_storage_release(mui_storage *s)
{
    if (s == NULL || --s->refs > 0 || s->pool == NULL) {
        return;
    }
    mui_pool *p = s->pool;
    block *b = (block *)s;
    if (b->size_class < 0) {
        s->data = NULL;
        s->next_free = p->free_headers;
        p->free_headers = s;
        return;
    }
    p->live_bytes -= s->capacity;
    s->next_free = p->free_blocks[b->size_class];
    p->free_blocks[b->size_class] = s;
}

size_t mui_pool_live_bytes(const mui_pool *p)
{
    return p->live_bytes;
}

size_t mui_pool_peak_bytes(const mui_pool *p)
{
    return p->peak_bytes;
}

size_t mui_pool_held_bytes(const mui_pool *p)
{
    return p->held_bytes;
}
