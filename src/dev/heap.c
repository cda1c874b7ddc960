/* Best fit with joining: see heap.h. */
#include "dev/heap.h"
#include "base/alloc.h"
#include "dev/pages.h"
#include "dev/poison.h"

/* Large, so that few ranges end because a piece does; what is never cut of it costs no memory. */
#define PIECE_BYTES ((size_t)64 << 20)
#define LINE_BYTES ((size_t)64)

typedef struct piece {
    char *data;
    size_t bytes, touched;
    mui_range *first; /* the range that begins where the piece does */
    struct piece *next;
} piece;

struct mui_heap {
    mu_context *context;
    piece *oldest, *newest;
    mui_range *spare; /* headers without memory, by after */
};

mui_heap *mui_heap_new(mu_context *c)
{
    mui_heap *h = mui_calloc(c, 1, sizeof(*h));
    if (h != NULL) {
        h->context = c;
    }
    return h;
}

void mui_heap_free(mui_heap *h)
{
    if (h == NULL) {
        return;
    }
    for (piece *x = h->oldest; x != NULL;) {
        piece *next = x->next;
        for (mui_range *r = x->first; r != NULL;) {
            mui_range *after = r->after;
            mui_free(h->context, r);
            r = after;
        }
        mui_unpoison(x->data, x->bytes);
        mui_pages_free(h->context, x->data);
        mui_free(h->context, x);
        x = next;
    }
    for (mui_range *r = h->spare; r != NULL;) {
        mui_range *next = r->after;
        mui_free(h->context, r);
        r = next;
    }
    mui_free(h->context, h);
}

static mui_range *new_header(mui_heap *h)
{
    mui_range *r = h->spare;
    if (r == NULL) {
        return mui_calloc(h->context, 1, sizeof(*r));
    }
    h->spare = r->after;
    *r = (mui_range){0};
    return r;
}

static void drop_header(mui_heap *h, mui_range *r)
{
    r->after = h->spare;
    h->spare = r;
}

static mui_range *new_piece(mui_heap *h, size_t bytes)
{
    piece *x = mui_calloc(h->context, 1, sizeof(*x));
    mui_range *r = new_header(h);
    if (x == NULL || r == NULL) {
        goto fail;
    }
    x->bytes = bytes > PIECE_BYTES ? bytes : PIECE_BYTES;
    x->data = mui_pages_alloc(h->context, x->bytes);
    if (x->data == NULL) {
        goto fail;
    }
    mui_poison(x->data, x->bytes);
    *(h->newest != NULL ? &h->newest->next : &h->oldest) = x;
    h->newest = x;
    *r = (mui_range){.data = x->data, .bytes = x->bytes, .piece = x};
    x->first = r;
    return r;
fail:
    mui_free(h->context, x);
    mui_free(h->context, r);
    return NULL;
}

/* The range stays first: it keeps `bytes`, and a free one follows it. Without a header for that one it keeps all. */
static void split(mui_heap *h, mui_range *r, size_t bytes)
{
    mui_range *rest = r->bytes > bytes ? new_header(h) : NULL;
    if (rest == NULL) {
        return;
    }
    *rest = (mui_range){.data = r->data + bytes, .bytes = r->bytes - bytes, .piece = r->piece, .before = r, .after = r->after};
    if (rest->after != NULL) {
        rest->after->before = rest;
    }
    r->after = rest;
    r->bytes = bytes;
}

mui_range *mui_heap_take(mui_heap *h, size_t bytes)
{
    if (bytes > SIZE_MAX / 4) { /* no machine has it, and sums with it would not fit */
        mui_fail(h->context, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    size_t room = (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES + MUI_RED_ZONE_BYTES;
    mui_range *best = NULL;
    for (const piece *x = h->oldest; x != NULL; x = x->next) {
        for (mui_range *r = x->first; r != NULL; r = r->after) {
            if (!r->taken && r->bytes >= room && (best == NULL || r->bytes < best->bytes)) {
                best = r;
            }
        }
    }
    if (best == NULL) {
        best = new_piece(h, room);
        if (best == NULL) {
            return NULL;
        }
    }
    split(h, best, room);
    best->taken = true;
    piece *x = best->piece;
    size_t end = (size_t)(best->data - x->data) + room;
    x->touched = end > x->touched ? end : x->touched;
    mui_unpoison(best->data, bytes);
    return best;
}

/* r takes in the free range after it. */
static void join(mui_heap *h, mui_range *r)
{
    mui_range *gone = r->after;
    r->bytes += gone->bytes;
    r->after = gone->after;
    if (r->after != NULL) {
        r->after->before = r;
    }
    drop_header(h, gone);
}

void mui_heap_give(mui_heap *h, mui_range *r)
{
    mui_poison(r->data, r->bytes);
    r->taken = false;
    if (r->after != NULL && !r->after->taken) {
        join(h, r);
    }
    if (r->before != NULL && !r->before->taken) {
        join(h, r->before);
    }
}

size_t mui_heap_touched(const mui_heap *h)
{
    size_t bytes = 0;
    for (const piece *x = h->oldest; x != NULL; x = x->next) {
        bytes += x->touched;
    }
    return bytes;
}
