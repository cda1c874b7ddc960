/* Offsets between clocks as NTP finds them, for all ranks at a time: in each round everybody gathers everybody's time of
 * sending. A rank that came late to a round bounds the offset tightly from one side, an early one from the other; the
 * tightest of all rounds count, which is the shortest way there and the shortest way back. */
#define _GNU_SOURCE
#include "comm/clocks.h"
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"

#include <unistd.h>

enum { ROUNDS = 40 };

uint64_t mui_clock_id(void)
{
    char space[64] = "";
    ssize_t n = readlink("/proc/self/ns/time", space, sizeof(space) - 1);
    space[n > 0 ? n : 0] = '\0';
    return mui_hash_string(mui_kernel_hash(), space);
}

void mui_clock_unknown(mui_clock_bounds *b)
{
    *b = (mui_clock_bounds){INT64_MIN, INT64_MAX};
}

void mui_clock_learn(mui_clock_bounds *b, int64_t before, int64_t after, int64_t reference_before, int64_t reference_after)
{
    int64_t least = reference_before - after, most = reference_after - before;
    b->least = least > b->least ? least : b->least;
    b->most = most < b->most ? most : b->most;
}

void mui_clock_best(const mui_clock_bounds *b, int64_t *offset, int64_t *error)
{
    *offset = b->least + (b->most - b->least) / 2;
    *error = (b->most - b->least + 1) / 2;
}

typedef struct round_times {
    int64_t before, last_after; /* of the round before this one */
} round_times;

mu_status mui_clock_compare(mu_group *g, int64_t (*now)(void), mui_clock_bounds *out)
{
    round_times *all = mui_calloc(g->context, (size_t)g->size, sizeof(*all));
    mu_status s = all != NULL ? MU_OK : MU_ERR_NOMEM;
    int64_t before = 0, after = 0, reference_before = 0;
    mui_clock_unknown(out);
    for (int i = 0; i <= ROUNDS && s == MU_OK; i++) {
        round_times own = {.last_after = after, .before = now()};
        s = mu_all_gather(g, &own, all, sizeof(own));
        int64_t arrived = now();
        if (s == MU_OK && i > 0) {
            mui_clock_learn(out, before, after, reference_before, all[0].last_after);
        }
        before = own.before;
        after = arrived;
        reference_before = all != NULL ? all[0].before : 0;
    }
    mui_free(g->context, all);
    return s;
}
