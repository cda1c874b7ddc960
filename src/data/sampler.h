/* Which samples a rank has in a step: a permutation of (seed, epoch), cut into global batches, cut over ranks. Every
 * rank knows every rank's part, without communication. */
#ifndef MUI_SAMPLER_H
#define MUI_SAMPLER_H

#include "base/context.h"
#include <muster/data.h>

typedef struct mui_sampler {
    int64_t count, batch; /* samples; of one rank and step */
    int64_t rank, size;
    int64_t places;       /* positions in an epoch: count, or more with wrapping, or fewer with dropping */
    int64_t steps;        /* of a whole epoch */
    int64_t offset;       /* positions before step 0: not 0 in an epoch gone on with by another number of ranks */
    int64_t end;          /* the number after this epoch's last step */
    mu_remainder remainder;
    uint64_t seed;
    int64_t *order;       /* (count), NULL without shuffling */
} mui_sampler;

typedef struct mui_part {
    int64_t first, count; /* positions of this rank in the step */
    int64_t total;        /* of all ranks */
} mui_part;

/* Takes what it needs from checked options (no zeros that mean defaults). */
mu_status mui_sampler_init(mui_sampler *s, mu_context *c, int64_t count, const mu_loader_options *o) MU_MUST_USE;
void mui_sampler_free(mui_sampler *s, mu_context *c);
/* Lays out the order of that epoch. Allocates nothing. */
void mui_sampler_epoch(mui_sampler *s, int64_t epoch);
/* Cuts the epoch into steps such that one begins at position `samples` (at least 0), and returns that step's number:
 * how many whole steps come before it. Beyond the end: s->end. */
int64_t mui_sampler_seek(mui_sampler *s, int64_t samples);
mui_part mui_sampler_slice(const mui_sampler *s, int64_t step);
/* The sample at a position of the epoch. */
int64_t mui_sampler_index(const mui_sampler *s, int64_t position);

#endif
