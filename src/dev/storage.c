/* The pool: one list of free blocks for each class of small sizes; large blocks are ranges of a heap.
 *
 * Classes, eight to a doubling, waste at most an eighth and cost next to nothing to find. Large blocks would wait in them
 * for another of their own size while others are got from the system: for ResNet-18 a third more than was ever in use.
 * Small blocks are cut from ranges too, so that they lie in huge pages: a matrix product over small ones scattered over
 * 4 KiB pages was measured 2.3 times as slow, by misses of the address cache. */
#include "dev/storage.h"
#include "base/alloc.h"
#include "dev/heap.h"
#include "dev/poison.h"

#define SMALLEST_BYTES ((size_t)256)
#define LARGE_BYTES ((size_t)256 << 10) /* and above: of the heap */
#define SHEET_BYTES ((size_t)2 << 20)   /* that small blocks are cut from */
#define CLASSES_PER_DOUBLING 8
#define CLASS_COUNT (10 * CLASSES_PER_DOUBLING + 1) /* up to LARGE_BYTES */

/* One block with its header. The header is first, so that a storage is its block. */
typedef struct block {
    mui_storage storage;
    int size_class;     /* -1: a header only, around a range or memory of somebody else */
    mui_range *range;   /* of a large block; NULL of others */
    struct block *next; /* all blocks of the pool */
} block;

struct mui_pool {
    mu_context *context;
    mui_heap *heap;
    mui_range *sheet; /* what small blocks are cut from now; the heap knows the earlier ones */
    size_t sheet_cut; /* bytes of it */
    block *all;
    mui_storage *free_blocks[CLASS_COUNT];
    mui_storage *free_headers;
    size_t live_bytes, peak_bytes;
};

mui_pool *mui_pool_new(mu_context *c)
{
    mui_pool *p = mui_calloc(c, 1, sizeof(*p));
    if (p == NULL) {
        return NULL;
    }
    p->context = c;
    p->heap = mui_heap_new(c);
    if (p->heap == NULL) {
        mui_free(c, p);
        return NULL;
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
        mui_free(p->context, b);
        b = next;
    }
    mui_heap_free(p->heap);
    mui_free(p->context, p);
}

/* The smallest class that holds bytes, which are below LARGE_BYTES, and its size. */
static int class_of(size_t bytes, size_t *size)
{
    size_t low = SMALLEST_BYTES;
    int c = 0;
    while (low * 2 < bytes) {
        low *= 2;
        c += CLASSES_PER_DOUBLING;
    }
    size_t step = low / CLASSES_PER_DOUBLING;
    size_t k = bytes <= low ? 0 : (bytes - low + step - 1) / step;
    *size = low + k * step;
    return c + (int)k;
}

/* Memory of that size, below SHEET_BYTES, that lives as long as the pool. */
static void *cut(mui_pool *p, size_t size)
{
    size = (size + 63) / 64 * 64 + MUI_RED_ZONE_BYTES;
    if (p->sheet == NULL || SHEET_BYTES - p->sheet_cut < size) {
        mui_range *r = mui_heap_take(p->heap, SHEET_BYTES);
        if (r == NULL) {
            return NULL;
        }
        mui_poison(r->data, r->bytes);
        p->sheet = r;
        p->sheet_cut = 0;
    }
    void *data = p->sheet->data + p->sheet_cut;
    p->sheet_cut += size;
    return data;
}

static block *new_block(mui_pool *p, int size_class, size_t size)
{
    block *b = mui_calloc(p->context, 1, sizeof(*b));
    if (b == NULL) {
        return NULL;
    }
    b->size_class = size_class;
    if (size_class >= 0) {
        b->storage.data = cut(p, size);
        if (b->storage.data == NULL) {
            mui_free(p->context, b);
            return NULL;
        }
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

static mui_storage *new_large(mui_pool *p, size_t bytes)
{
    mui_storage *s = header_of_nothing(p);
    if (s == NULL) {
        return NULL;
    }
    mui_range *r = mui_heap_take(p->heap, bytes);
    if (r == NULL) {
        s->next_free = p->free_headers;
        p->free_headers = s;
        return NULL;
    }
    ((block *)s)->range = r;
    s->data = r->data;
    s->capacity = r->bytes;
    return s;
}

static mui_storage *new_small(mui_pool *p, size_t bytes)
{
    size_t size = 0;
    int c = class_of(bytes, &size);
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
    mui_unpoison(s->data, bytes);
    return s;
}

mui_storage *mui_storage_new(mui_pool *p, size_t bytes)
{
    if (bytes == 0) {
        return mui_storage_wrap(p, NULL, 0);
    }
    mui_storage *s = bytes < LARGE_BYTES ? new_small(p, bytes) : new_large(p, bytes);
    if (s == NULL) {
        return NULL;
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
    p->live_bytes -= s->capacity;
    if (b->size_class < 0) {
        if (b->range != NULL) {
            mui_heap_give(p->heap, b->range);
            b->range = NULL;
        }
        s->data = NULL;
        s->capacity = 0;
        s->next_free = p->free_headers;
        p->free_headers = s;
        return;
    }
    mui_poison(s->data, s->capacity);
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
    return mui_heap_touched(p->heap);
}
