/* What a rank is doing: written as it works, read by ranks that wait for it, also while it is being written or after
 * its writer was killed half way. Not for: news that others must not miss (comm posts those). */
#ifndef MUI_BEACON_H
#define MUI_BEACON_H

#include "base/context.h"

#define MUI_BOARD_BYTES 192

/* One text, one writer, any number of readers. Zeroed memory is an empty one. */
typedef struct mui_board {
    /* A sequence lock: odd while the words change. All words are relaxed but this one. */
    _Alignas(64) uint32_t turn;
    uint32_t stage;
    uint64_t words[MUI_BOARD_BYTES / 8];
} mui_board;

/* Longer texts are cut off. */
void mui_board_write(mui_board *b, uint32_t stage, const char *text);
/* A writer that died half way leaves a mixture of two texts, which will do. stage may be NULL. */
void mui_board_read(const mui_board *b, uint32_t *stage, char out[MUI_BOARD_BYTES]);
/* Changes with every write. */
uint32_t mui_board_turn(const mui_board *b);

typedef struct mui_beacon {
    mui_board work;  /* "reduction 12 (ddp `net`)" */
    mui_board place; /* stage, and path of the module */
} mui_beacon;

/* Where a context's beacon is to be seen; a member of a group, whose memory it is in. */
typedef struct mui_beacon_link {
    mui_beacon *beacon;
    struct mui_beacon_link *next;
} mui_beacon_link;
void mui_beacon_add(mu_context *c, mui_beacon_link *link);
void mui_beacon_remove(mu_context *c, mui_beacon_link *link);

/* What the rank is working on, until told otherwise. Copied; some 20 ns for each group of several ranks, nothing when
 * there is none. */
void mui_work(mu_context *c, const char *text);

typedef enum mui_stage {
    MUI_ELSEWHERE = 0,
    MUI_FORWARD,
    MUI_BACKWARD,
    MUI_OPTIMISER,
    MUI_LOADER,
    MUI_SAVING,
    MUI_READING
} mui_stage;
const char *mui_stage_name(uint32_t stage); /* "" for elsewhere and unknown ones */

/* Goes to a place (path may be NULL, and must stay valid until the place is left), and back to the one before:
 *     mui_place before = mui_go(c, MUI_FORWARD, path);
 *     ...
 *     mui_go(c, before.stage, before.path); */
typedef struct mui_place {
    mui_stage stage;
    const char *path;
} mui_place;
mui_place mui_go(mu_context *c, mui_stage stage, const char *path);

#endif
