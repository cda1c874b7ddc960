/* Reference-counted blocks of memory, recycled by a pool. Not thread-safe: one pool belongs to one rank's thread.
 * Peak and current bytes are counted, so that tests can hold a step to "allocates nothing". */
#ifndef MUI_STORAGE_H
#define MUI_STORAGE_H

#include "base/context.h"

typedef struct mui_pool mui_pool;

typedef struct mui_storage {
    void *data;      /* 64-byte aligned; NULL when bytes is 0 */
    size_t bytes;    /* asked for; capacity may be more */
    size_t capacity;
    int refs;
    uint32_t writes; /* times the content was overwritten in place: copies in other layouts from before are stale */
    mui_pool *pool;  /* where it goes back to */
    struct mui_storage *next_free;
} mui_storage;

/* Keeps all memory it ever got, for blocks to come: small ones in size classes that waste at most an eighth, large ones as
 * ranges of a heap (dev/heap.h). All of it asks for huge pages, since a page fault costs more than a kernel here. */
mui_pool *mui_pool_new(mu_context *c);
void mui_pool_free(mui_pool *p); /* all storages must have been released */

/* One reference, contents undefined. NULL with MU_ERR_NOMEM. */
mui_storage *mui_storage_new(mui_pool *p, size_t bytes);
/* A header around memory of somebody else, with the pool's header recycling. */
mui_storage *mui_storage_wrap(mui_pool *p, void *data, size_t bytes);
void mui_storage_keep(mui_storage *s);
void mui_storage_release(mui_storage *s); /* NULL is allowed */

size_t mui_pool_live_bytes(const mui_pool *p); /* handed out now */
size_t mui_pool_peak_bytes(const mui_pool *p); /* most ever handed out at once */
size_t mui_pool_held_bytes(const mui_pool *p); /* that were ever in use: memory got from the system */

#endif
