/* The memory that the ranks of one machine share: a control block, then one arena per rank, the same offsets in each.
 *
 * For threads it is anonymous memory, for processes one sealed memfd that every rank maps. Nothing in it is a pointer.
 * Each word that one rank writes while others look is atomic; its order and its partner are named beside it. */
#ifndef MUI_REGION_H
#define MUI_REGION_H

#include "base/beacon.h"
#include "comm/group.h"

#define MUI_MAX_RANKS 128      /* of one machine; their pidfds must fit in one SCM_RIGHTS message (253) */
#define MUI_SLOTS 64           /* calls in flight; later ones queue in their rank */
#define MUI_INLINE_BYTES 256   /* payloads up to this travel in the slot */
#define MUI_HUGE_BYTES ((size_t)2 << 20)
#define MUI_STAGING_BYTES MUI_HUGE_BYTES /* at the start of each arena, for data outside the arenas; two halves */
#define MUI_STAGING_HALF (MUI_STAGING_BYTES / 2)
#define MUI_OUTSIDE UINT64_MAX /* as an offset: not in the arena */
#define MUI_BROKEN_BYTES 1280

/* One call of one rank, posted for the others to compare. Reused for the call MUI_SLOTS later, once all ranks have
 * completed this one (mui_rank_block.completed). */
typedef struct mui_slot {
    /* Number of the call + 1. Stored with seq_cst after everything else here but stage is written (release for the
     * readers; seq_cst against `sleeping`), loaded with acquire. */
    _Alignas(64) uint64_t posted;
    uint64_t sequence, hash, steps, updates; /* of the identity */
    double posted_at; /* seconds of the machine's monotonic clock, which all ranks share */
    uint64_t count;
    uint64_t offset;         /* of the data in the poster's arena, or MUI_OUTSIDE */
    uint32_t kind;
    int32_t root;
    uint8_t call, type, op, identified;
    /* Steps of the transfer this rank has done. Stored with seq_cst after the step's data is written, loaded with
     * acquire before it is read. */
    _Alignas(64) uint64_t stage;
    _Alignas(64) char text[MUI_IDENTITY_TEXT];
    _Alignas(64) char payload[MUI_INLINE_BYTES];
} mui_slot;

enum { MUI_ABSENT = 0, MUI_JOINED, MUI_LEFT };

typedef struct mui_rank_block {
    /* MUI_JOINED..; stored with seq_cst by its rank (after all it posted), loaded with acquire by waiting ranks. */
    _Alignas(64) uint32_t state;
    int32_t pid;        /* of processes; written by rank 0 before any other rank maps it */
    int32_t core;       /* where it ran when it last posted something, a hint: relaxed */
    uint64_t calls;     /* posted so far, for messages only: relaxed */
    /* Calls this rank needs no slot of any more. Stored with release after its last read of the slots, loaded with
     * acquire by ranks that want to reuse theirs. */
    _Alignas(64) uint64_t completed;
    /* Sleeping: 1 while the rank is about to wait on event. The sleeper stores it with seq_cst and looks again; the
     * poster stores its news with seq_cst and then looks at sleeping: one of them sees the other. */
    _Alignas(64) uint32_t event;
    uint32_t sleeping;
    mui_board phase;   /* mu_group_set_phase */
    mui_beacon beacon; /* what the library knows itself */
    mui_slot slots[MUI_SLOTS];
} mui_rank_block;

typedef struct mui_control {
    uint32_t magic, size; /* written before any other rank maps it */
    uint64_t arena_bytes;
    /* Why the group is broken; the first one in wins. 0, then 1 (claimed by compare-and-swap), then 2, stored with
     * release after the fields below and loaded with acquire before reading them. */
    _Alignas(64) uint32_t abort_state;
    int32_t abort_status;
    char abort_text[MUI_BROKEN_BYTES];
    mui_rank_block ranks[];
} mui_control;

typedef struct mui_region {
    mui_control *control;
    char *arenas;        /* of rank 0; rank r's is r * arena_bytes further */
    size_t arena_bytes;  /* a multiple of 2 MiB */
    int size;
    int fd;              /* the memfd, or -1 */
    void *mapping;
    size_t mapping_bytes;
} mui_region;

/* Anonymous memory for ranks of one process. arena_bytes is halved until the system grants it. */
mu_status mui_region_new(mui_region *r, mu_context *c, int size, size_t arena_bytes) MU_MUST_USE;
/* A sealed memfd and a mapping of it; fd stays open in r. */
mu_status mui_region_create(mui_region *r, mu_context *c, int size, size_t arena_bytes) MU_MUST_USE;
/* Maps the memfd that another process made, checking its size, seals and header. Takes fd. */
mu_status mui_region_map(mui_region *r, mu_context *c, int size, int fd) MU_MUST_USE;
void mui_region_free(mui_region *r);

char *mui_region_arena(const mui_region *r, int rank);
/* Gives bytes [from, to) of rank's arena pages, huge where the system lets us. `own` when the caller's rank is rank. */
void mui_region_populate(const mui_region *r, int rank, size_t from, size_t to, bool own);

/* Arena bytes to use for an option's value. */
size_t mui_arena_bytes(size_t wanted);

#endif
