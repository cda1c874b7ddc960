/* Words about ranks that a call waits for, alike for every engine. */
#ifndef MUI_MISSING_WORDS_H
#define MUI_MISSING_WORDS_H

#include "comm/group.h"

#define MUI_LACK_BYTES 400

/* What an engine knows of a call of its own. */
typedef struct mui_missing {
    const mu_group *group;
    const mu_request *call;
    bool (*lacks)(const mu_group *g, const mu_request *call, int rank);     /* has that other rank not brought its part? */
    void (*name)(const mu_group *g, int rank, char *out, size_t size);      /* "rank 1 (after 12 calls)" */
    uint64_t (*calls)(const mu_group *g, int rank);                         /* that it is known to have started */
} mui_missing;

/* What the rank has not brought, as "; it has not delivered ..." or nothing. */
void mui_missing_lack(const mui_missing *m, int rank, mui_lack why, char *out, size_t size);
/* The missing ranks with what they lack; the first two are described, others are counted. Returns how many there are. */
int mui_missing_describe(const mui_missing *m, mui_lack why, char *out, size_t size);
/* "rank 1", "ranks 1, 2". Returns how many. */
int mui_missing_list(const mui_missing *m, char *out, size_t size);

#endif
