/* Memory that is got from the system in large pieces, cut into ranges, and joined again as they come back.
 *
 * Best fit: the smallest free range that holds the request; of equals the one at the lowest address of the oldest piece.
 * Neighbours that are free are always joined, so what is free depends only on what is in use, not on how it came to be. A
 * step that gives back all it took therefore leaves the heap as it found it, and what it needed once is enough for all
 * later ones that ask in the same order. Not thread-safe. (Knuth, The Art of Computer Programming 1, 2.5.) */
#ifndef MUI_HEAP_H
#define MUI_HEAP_H

#include "base/context.h"

typedef struct mui_heap mui_heap;

struct piece;

typedef struct mui_range {
    char *data;          /* 64-byte aligned, in huge pages where the system gives them */
    size_t bytes;        /* of the range: what was asked for, rounded up */
    bool taken;
    struct piece *piece; /* what it was cut from */
    struct mui_range *before, *after; /* neighbours in memory; NULL at the ends of a piece */
} mui_range;

mui_heap *mui_heap_new(mu_context *c);
void mui_heap_free(mui_heap *h); /* with all ranges, taken ones too; NULL is allowed */
/* Contents undefined. NULL with MU_ERR_NOMEM. */
mui_range *mui_heap_take(mui_heap *h, size_t bytes);
void mui_heap_give(mui_heap *h, mui_range *r);
/* Bytes that were ever part of a taken range: what lies beyond was never touched, so the system has not backed it. */
size_t mui_heap_touched(const mui_heap *h);

#endif
