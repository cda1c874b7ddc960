/* Bump allocation that is freed as a whole and keeps its blocks over a reset. Not thread-safe. */
#ifndef MUI_ARENA_H
#define MUI_ARENA_H

#include "base/context.h"

typedef struct mui_arena_block mui_arena_block;
typedef struct mui_arena {
    mu_context *context;
    mui_arena_block *first, *current;
    size_t used;        /* bytes handed out since the last reset */
    size_t limit_bytes; /* 0: none; beyond it MU_ERR_LIMIT */
} mui_arena;

void mui_arena_init(mui_arena *a, mu_context *c);
/* 16-byte aligned, not cleared; NULL on failure. */
void *mui_arena_alloc(mui_arena *a, size_t bytes);
void *mui_arena_calloc(mui_arena *a, size_t count, size_t bytes);
char *mui_arena_strdup(mui_arena *a, const char *s);
/* At most n bytes of s, which need not end there; s may be NULL when n is 0. */
char *mui_arena_strndup(mui_arena *a, const char *s, size_t n);
void mui_arena_reset(mui_arena *a);
void mui_arena_free(mui_arena *a);

#endif
