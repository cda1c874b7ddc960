/* Sequence locks over short texts, and the context's way to them. */
#include "base/beacon.h"
#include "base/trace.h"

#include <sched.h>
#include <string.h>

void mui_board_write(mui_board *b, uint32_t stage, const char *text)
{
    size_t n = strnlen(text, MUI_BOARD_BYTES - 1);
    uint32_t turn = __atomic_load_n(&b->turn, __ATOMIC_RELAXED);
    /* Acquire keeps the words below from moving up; pairs with the loads in mui_board_read. A writer before us may have
     * died half way in this very memory: the low bit is set and cleared, not counted. */
    (void)__atomic_exchange_n(&b->turn, turn | 1, __ATOMIC_ACQ_REL);
    __atomic_store_n(&b->stage, stage, __ATOMIC_RELAXED);
    for (size_t at = 0; at <= n; at += 8) {
        uint64_t word = 0;
        memcpy(&word, text + at, n - at < 8 ? n - at : 8);
        __atomic_store_n(&b->words[at / 8], word, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&b->turn, (turn | 1) + 1, __ATOMIC_RELEASE);
}

void mui_board_read(const mui_board *b, uint32_t *stage, char out[MUI_BOARD_BYTES])
{
    for (int tries = 0; tries < 1000; tries++) {
        if (tries > 50) {
            sched_yield(); /* the writer may have been put off in the middle */
        }
        uint32_t before = __atomic_load_n(&b->turn, __ATOMIC_ACQUIRE);
        uint32_t where = __atomic_load_n(&b->stage, __ATOMIC_ACQUIRE);
        for (size_t i = 0; i < MUI_BOARD_BYTES / 8; i++) {
            uint64_t word = __atomic_load_n(&b->words[i], __ATOMIC_ACQUIRE);
            memcpy(out + 8 * i, &word, 8);
        }
        if (stage != NULL) {
            *stage = where;
        }
        if (before % 2 == 0 && before == __atomic_load_n(&b->turn, __ATOMIC_RELAXED)) {
            break;
        }
    }
    out[MUI_BOARD_BYTES - 1] = '\0';
}

uint32_t mui_board_turn(const mui_board *b)
{
    return __atomic_load_n(&b->turn, __ATOMIC_RELAXED);
}

void mui_beacon_add(mu_context *c, mui_beacon_link *link)
{
    link->next = c->beacons;
    c->beacons = link;
}

void mui_beacon_remove(mu_context *c, mui_beacon_link *link)
{
    for (mui_beacon_link **at = &c->beacons; *at != NULL; at = &(*at)->next) {
        if (*at == link) {
            *at = link->next;
            return;
        }
    }
}

void mui_work(mu_context *c, const char *text)
{
    for (mui_beacon_link *l = c->beacons; l != NULL; l = l->next) {
        mui_board_write(&l->beacon->work, 0, text);
    }
}

const char *mui_stage_name(uint32_t stage)
{
    switch ((mui_stage)stage) {
    case MUI_ELSEWHERE: break;
    case MUI_FORWARD: return "forward";
    case MUI_BACKWARD: return "backward";
    case MUI_OPTIMISER: return "the optimiser's step";
    case MUI_LOADER: return "waiting for its loader";
    case MUI_SAVING: return "writing a file";
    case MUI_READING: return "reading a file";
    }
    return "";
}

mui_place mui_go(mu_context *c, mui_stage stage, const char *path)
{
    mui_here *here = mui_here_of(c);
    mui_place before = {(mui_stage)here->stage, here->place};
    here->stage = stage;
    here->place = path;
    if (c->trace != NULL) {
        mui_trace_move(c, here, stage, path != NULL ? path : "");
    }
    if (here != &c->here) {
        return before; /* a board has one writer */
    }
    for (mui_beacon_link *l = c->beacons; l != NULL; l = l->next) {
        mui_board_write(&l->beacon->place, stage, path != NULL ? path : "");
    }
    return before;
}
