/* What store.c and store_layout.c share. Not for other folders. */
#ifndef MUI_SLABS_H
#define MUI_SLABS_H

#include "tape/store.h"

/* Where everything will lie; nothing of it touches the store until it is committed. */
typedef struct mui_placement {
    int64_t *order;       /* count indices */
    size_t *offsets;      /* of each parameter, by registration index */
    mui_bucket *buckets;
    int64_t bucket_count;
    size_t floats;
    float *values, *grads;
    float **states;       /* one for each optimiser slab */
    size_t state_count;
} mui_placement;

/* Places parameters of these capacities (by registration index) in that order, cut into buckets. Allocates the arrays,
 * not the slabs. order NULL: reverse registration, one bucket. */
mu_status mui_placement_init(mu_context *c, mui_placement *p, const size_t *capacities, int64_t count,
                             const int64_t *order, const int64_t *bucket_params, const size_t *tails,
                             int64_t bucket_count) MU_MUST_USE;
/* Allocates zeroed slabs: values, gradients (from the store's allocator) and a slab for each of s->slabs. */
mu_status mui_placement_slabs(const mui_store *s, mui_placement *p) MU_MUST_USE;
void mui_placement_free(const mui_store *s, mui_placement *p);

float *mui_grads_memory(const mui_store *s, size_t floats); /* zeroed; NULL on failure */
void mui_grads_memory_free(const mui_store *s, float *grads);
float *mui_slab_memory(mu_context *c, size_t floats);       /* zeroed; free with mui_pages_free */

/* Points parameter i's tensors into the store's slabs. */
void mui_store_point(mui_store *s, int64_t i);
uint64_t mui_store_hash(const mui_store *s);

#endif
