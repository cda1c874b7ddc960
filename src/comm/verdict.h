/* Calls as descriptors: what each rank posts, whether all mean the same, and the result where payloads fit in them. For
 * every engine that has the descriptors of all ranks side by side. */
#ifndef MUI_VERDICT_H
#define MUI_VERDICT_H

#include "comm/region.h"

typedef enum mui_call_kind {
    MUI_ALL_REDUCE = 1,
    MUI_BROADCAST,
    MUI_ALL_GATHER,
    MUI_REDUCE_SCATTER,
    MUI_BARRIER,
    MUI_ALLOC,
    MUI_FREE
} mui_call_kind;

/* What a call is, as posted. */
typedef struct mui_call_spec {
    mui_call_kind kind;
    uint64_t count; /* elements, or bytes of broadcast, all-gather and alloc, or an offset of free */
    mu_dtype type;
    mu_reduce_op op;
    int root;
    const void *in;
    void *out;
    const mui_identity *identity; /* may be NULL; copied */
} mui_call_spec;

/* What the ranks have posted for one call: rank r's slot is r * stride bytes after the first. */
typedef struct mui_posts {
    const mui_slot *first;
    size_t stride;
    int size;
} mui_posts;

typedef struct mui_verdict {
    int last_rank; /* whoever posted last, and by how much: see mu_group */
    double last_seconds;
    char skip_text[MUI_IDENTITY_TEXT + 32];
    bool skip_within; /* see mu_group */
} mui_verdict;

static inline const mui_slot *mui_post_of(const mui_posts *p, int rank)
{
    return (const mui_slot *)(const void *)((const char *)(const void *)p->first + (size_t)rank * p->stride);
}

/* MU_OK, MU_SKIPPED (out->skip_text is set) or MU_ERR_COMM (text is set); the same on all ranks. */
mu_status mui_verdict_of(const mui_posts *p, mui_verdict *out, char text[MUI_BROKEN_BYTES]);
void mui_call_describe(const mui_slot *s, char *out, size_t size);

/* inline.c: bytes of the result of each rank that count stands for; and of what a rank brings. */
size_t mui_spec_bytes(const mui_call_spec *s);
size_t mui_spec_brings(const mui_call_spec *s, int size);
/* Fills a slot but for its hand-over words; small payloads travel in it. */
void mui_post_fill(mui_slot *slot, const mui_call_spec *s, const mui_identity *identity, int size);
/* The whole result of a call whose payloads lie in the posts, or of a group of one. in: room for as many pointers as
 * ranks. */
void mui_finish_inline(const mui_posts *p, const mui_call_spec *s, int rank, const void **in);

#endif
