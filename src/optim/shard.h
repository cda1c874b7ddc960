/* State that the ranks of a group share: each keeps that of its own part of every parameter, and updates that part alone
 * (ZeRO stage 1). Not for: the step itself (optimizer.c) and what moves it between ranks (shard_settle.c).
 *
 * A bucket of the store is cut into as many equal slices of whole cache lines as there are ranks; what is left at its
 * end, less than a line for each rank, every rank keeps and updates alike. That is the cut of scattered all-reduces too
 * (mui_scatter_of), so a rank has the mean where it needs it. */
#ifndef MUI_SHARD_H
#define MUI_SHARD_H

#include "optim/optimizer_impl.h"
#include <muster/group.h>

enum { MUI_KIND_SHARD = 0x2000, MUI_KIND_STEP, MUI_KIND_CLIP, MUI_KIND_STATE };

/* A part of a parameter that this rank updates. */
typedef struct mui_piece {
    uint64_t id;         /* of the parameter, */
    int64_t place;       /* and where it is in the order of the slabs */
    size_t from, floats; /* within its slice of the slabs */
    size_t at;           /* of its state, in each of the states */
    bool everywhere;     /* all ranks have it */
} mui_piece;

struct mui_shard {
    mu_group *group;
    mui_piece *pieces;   /* in the order of the slabs, of the layout below */
    size_t count, capacity;
    size_t floats;       /* of each state */
    float *states[MUI_OPTIMIZER_MAX_STATES];
    bool counted;        /* in the store's `sharding` */
    const mui_store *store; /* that pieces were cut from; only compared */
    uint64_t store_version, store_hash;
};

/* What b's rank's part is: its slice from `own` on, and from `rest` on what all ranks have; all in floats from the
 * bucket's start. */
typedef struct mui_cut {
    size_t own, slice, rest;
} mui_cut;
mui_cut mui_cut_of(const mui_bucket *b, const mu_group *g);

/* shard.c. Collective; status: what this rank brings along. */
mu_status mui_shard_open(mu_optimizer *o, mu_group *g, mu_status status) MU_MUST_USE;
void mui_shard_close(mu_optimizer *o);
mu_status mui_shard_add_state(mu_optimizer *o, int state) MU_MUST_USE;
/* Comes back when all ranks are at the same call of the same optimiser; the first rank that brings an error gives it to
 * all of them. what: "step 12". */
mu_status mui_shard_meet(mu_optimizer *o, uint32_t kind, const char *what, mu_status mine) MU_MUST_USE;
/* Collective: pieces and states follow the store's layout. */
mu_status mui_shard_settle(mu_optimizer *o) MU_MUST_USE;
/* Collective: the updated parts of values reach all ranks. now: p->stepped of parameters that were updated. */
mu_status mui_shard_gather(mu_optimizer *o, mui_store *s, uint64_t now) MU_MUST_USE;
/* Why this rank cannot step: gradients that no reduction scattered for it. MU_OK: it can. */
mu_status mui_shard_check(mu_optimizer *o, const mui_store *s) MU_MUST_USE;
/* Collective: all of a parameter's state, as it lies in a slab; capacity floats. */
mu_status mui_shard_collect(mu_optimizer *o, const mu_parameter *p, int state, float *out) MU_MUST_USE;
/* This rank's part of a parameter's state, to or from a slice of a slab; data NULL: it is zeroed. */
void mui_shard_put(mu_optimizer *o, const mu_parameter *p, int state, const float *data);

#endif
