/* The group over MPI as one rank sees it, with messages in the place of data. Ranks are alike, so what this one sends and
 * receives, when, stands for all.
 *
 * A bucket is launched when its gradients are ready, in order, the last one at the end of backward. Descriptors of all
 * ranks are gathered in log2(ranks) steps; then the bucket travels in rounds: slices go to whoever reduces them, a few
 * exchanges under way at a time, and the results go back in the same way. Nothing goes on between two gradients: there is
 * no thread for it. What the numbers below stand for is in src/comm/mpi_group.h and mpi_smpi.c. */
#include "plan_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES = 896, ROUND_BYTES = 8 << 20, ROUNDS = 4, WINDOW = 4, MASK_BITS = 20, ELEMENT_BYTES = 4 };

/* A number of messages of one size, a few under way at a time. */
typedef struct exchange {
    int64_t left; /* to start */
    double bytes; /* of each */
    int under_way, limit;
    double done[WINDOW]; /* when those under way are here */
} exchange;

typedef enum phase { GATHERING, QUEUED, SCATTERING, TO_SHARE, SHARING, ENDED } phase;

/* A bucket while its descriptors are gathered, or one round of a bucket. */
typedef struct part {
    phase phase;
    int64_t blocks; /* GATHERING: of descriptors that are here */
    double bytes;
    exchange messages;
} part;

typedef struct rank {
    const plan_network *net;
    int ranks;
    double now, link_free, link_busy;
    int64_t messages;
    part *gather;        /* one for each bucket */
    int64_t launched, gathered;
    part *round;         /* of all buckets, in order */
    int64_t *first_round; /* of each bucket, and their number behind the last */
    int64_t started, shared, ended;
} rank;

/* -- messages ------------------------------------------------------------------------------------------------------ */
static void start_message(rank *r, exchange *e)
{
    r->now += r->net->overhead;
    double begin = r->now > r->link_free ? r->now : r->link_free, takes = e->bytes / r->net->bytes_per_second;
    r->link_free = begin + takes;
    r->link_busy += takes;
    r->messages++;
    e->done[e->under_way++] = r->link_free + r->net->latency;
    e->left--;
}

/* True when something came or went. */
static bool exchange_go(rank *r, exchange *e)
{
    bool moved = false;
    for (int i = e->under_way; i-- > 0;) {
        if (e->done[i] <= r->now) {
            e->done[i] = e->done[--e->under_way];
            moved = true;
        }
    }
    while (e->left > 0 && e->under_way < e->limit) {
        start_message(r, e);
        moved = true;
    }
    return moved;
}

static bool exchange_over(const exchange *e)
{
    return e->left == 0 && e->under_way == 0;
}

static exchange of_slices(const rank *r, double bytes)
{
    return (exchange){.left = r->ranks - 1, .bytes = bytes / r->ranks, .limit = WINDOW};
}

/* -- progress ------------------------------------------------------------------------------------------------------ */
static bool gather_go(rank *r, part *g)
{
    bool moved = exchange_go(r, &g->messages);
    if (g->phase != GATHERING || !exchange_over(&g->messages)) {
        return moved;
    }
    if (g->blocks >= r->ranks) {
        g->phase = ENDED;
        return true;
    }
    int64_t more = g->blocks < r->ranks - g->blocks ? g->blocks : r->ranks - g->blocks;
    g->messages = (exchange){.left = 1, .bytes = (double)more * HEADER_BYTES, .limit = 1};
    g->blocks += more;
    return exchange_go(r, &g->messages) || moved;
}

static bool round_go(rank *r, int64_t index)
{
    part *p = &r->round[index];
    bool moved = exchange_go(r, &p->messages);
    if (p->phase == SCATTERING && exchange_over(&p->messages)) {
        r->now += p->bytes / r->net->reduce_bytes_per_second;
        p->phase = TO_SHARE;
        moved = true;
    }
    if (p->phase == TO_SHARE && r->shared == index) {
        r->shared++;
        p->phase = SHARING;
        p->messages = of_slices(r, p->bytes);
        (void)exchange_go(r, &p->messages);
        moved = true;
    } else if (p->phase == SHARING && exchange_over(&p->messages)) {
        p->phase = ENDED;
        moved = true;
    }
    return moved;
}

static void progress(rank *r)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t k = r->gathered; k < r->launched; k++) {
            moved = gather_go(r, &r->gather[k]) || moved;
        }
        while (r->gathered < r->launched && r->gather[r->gathered].phase == ENDED) {
            r->gathered++;
        }
        for (int64_t i = r->ended; i < r->started; i++) {
            moved = round_go(r, i) || moved;
        }
        while (r->ended < r->started && r->round[r->ended].phase == ENDED) {
            r->ended++;
        }
        if (r->started < r->first_round[r->gathered] && r->started < r->ended + ROUNDS) {
            part *p = &r->round[r->started++];
            p->phase = SCATTERING;
            p->messages = of_slices(r, p->bytes);
            moved = true;
        }
    }
}

static double soonest(const exchange *e, double when)
{
    for (int i = 0; i < e->under_way; i++) {
        when = e->done[i] < when ? e->done[i] : when;
    }
    return when;
}

/* Waits until the next message is here. */
static void wait_for_message(rank *r)
{
    double when = INFINITY;
    for (int64_t k = r->gathered; k < r->launched; k++) {
        when = soonest(&r->gather[k].messages, when);
    }
    for (int64_t i = r->ended; i < r->started; i++) {
        when = soonest(&r->round[i].messages, when);
    }
    r->now = when > r->now ? when : r->now;
}

/* -- the step ------------------------------------------------------------------------------------------------------ */
/* bytes: room for one of each parameter; last: which parameter is each bucket's last. Returns their number. */
static int64_t cut(const plan_step *s, int ranks, int64_t bucket_bytes, int64_t first_bytes, double *bytes, int64_t *last)
{
    int64_t buckets = 0, sum = 0, count = 0;
    for (int64_t i = 0; i < s->count; i++) {
        sum += s->parameter[i].bytes > 0 ? s->parameter[i].bytes : 1;
        count++;
        if (sum >= (buckets == 0 ? first_bytes : bucket_bytes) || i == s->count - 1) {
            /* Who takes part travels behind the gradients. */
            int64_t words = (ranks + MASK_BITS - 1) / MASK_BITS;
            bytes[buckets] = (double)(sum + ((count + 1) * words + 2) * ELEMENT_BYTES);
            last[buckets++] = i;
            sum = count = 0;
        }
    }
    return buckets;
}

static bool lay_out(rank *r, const double *bytes, int64_t buckets)
{
    int64_t rounds = 0;
    r->gather = calloc((size_t)buckets, sizeof(*r->gather));
    r->first_round = calloc((size_t)buckets + 1, sizeof(*r->first_round));
    for (int64_t k = 0; k < buckets && r->first_round != NULL; k++) {
        r->first_round[k] = rounds;
        rounds += (int64_t)ceil(bytes[k] / ROUND_BYTES);
        r->first_round[k + 1] = rounds;
    }
    r->round = calloc((size_t)rounds + 1, sizeof(*r->round));
    if (r->gather == NULL || r->first_round == NULL || r->round == NULL) {
        return false;
    }
    for (int64_t k = 0; k < buckets; k++) {
        r->gather[k] = (part){.phase = GATHERING, .blocks = 1};
        double left = bytes[k];
        for (int64_t i = r->first_round[k]; i < r->first_round[k + 1]; i++, left -= ROUND_BYTES) {
            r->round[i] = (part){.phase = QUEUED, .bytes = left < ROUND_BYTES ? left : ROUND_BYTES};
        }
    }
    return true;
}

static void run(rank *r, const plan_step *s, const int64_t *last, int64_t buckets)
{
    double before = 0;
    for (int64_t i = 0; i < s->count; i++) {
        r->now += s->parameter[i].ready - before;
        before = s->parameter[i].ready;
        r->launched += r->launched < buckets - 1 && last[r->launched] == i;
        progress(r);
    }
    r->now += s->backward - before;
    r->launched = buckets;
    progress(r);
    while (r->ended < r->first_round[buckets]) {
        wait_for_message(r);
        progress(r);
    }
}

bool plan_predict(const plan_step *s, int ranks, const plan_network *net, int64_t bucket_bytes, int64_t first_bytes,
                  plan_result *out)
{
    rank r = {.net = net, .ranks = ranks};
    double *bytes = calloc((size_t)s->count + 1, sizeof(*bytes));
    int64_t *last = calloc((size_t)s->count + 1, sizeof(*last));
    int64_t buckets = bytes != NULL && last != NULL ? cut(s, ranks, bucket_bytes, first_bytes, bytes, last) : -1;
    bool good = buckets >= 0 && lay_out(&r, bytes, buckets);
    if (good) {
        r.now = 0;
        if (ranks > 1 && buckets > 0) {
            run(&r, s, last, buckets);
        } else {
            r.now = s->backward;
        }
        *out = (plan_result){.step = s->forward + r.now, .exposed = r.now - s->backward, .link = r.link_busy,
                             .buckets = buckets, .messages = r.messages};
    }
    free(bytes);
    free(last);
    free(r.gather);
    free(r.round);
    free(r.first_round);
    return good;
}
