/* All heap memory of the library: 64-byte aligned, counted per context, with failure injection for tests.
 * Not for: tensors' memory (dev/pool.h) and per-step objects (arena.h). */
#ifndef MUI_ALLOC_H
#define MUI_ALLOC_H

#include "base/context.h"

/* NULL and MU_ERR_NOMEM raised on failure. bytes 0 is allowed. c may be NULL (no accounting, no error raised). */
void *mui_alloc(mu_context *c, size_t bytes);
void *mui_calloc(mu_context *c, size_t count, size_t bytes); /* checks the product */
/* Like realloc: on failure old stays valid. Content beyond the old size is undefined. */
void *mui_realloc(mu_context *c, void *old, size_t bytes);
void mui_free(mu_context *c, void *p);
char *mui_strdup(mu_context *c, const char *s);
char *mui_strndup(mu_context *c, const char *s, size_t n);
char *mui_format(mu_context *c, const char *format, ...) MU_PRINTF(2, 3);

/* a * b, a + b for sizes; false on overflow, *out untouched. */
bool mui_size_mul(size_t a, size_t b, size_t *out);
bool mui_size_add(size_t a, size_t b, size_t *out);

/* Makes room for one more element in a growing array; false with MU_ERR_NOMEM. */
bool mui_grow(mu_context *c, void **items, size_t count, size_t *capacity, size_t item_bytes);
#define MUI_GROW(c, items, count, capacity)                                                                            \
    mui_grow((c), (void **)&(items), (count), &(capacity), sizeof(*(items)))

#endif
