/* Reducing one stretch of elements over all ranks: in rank order, one writer, so all ranks get the same bits. */
#ifndef MUI_REDUCE_H
#define MUI_REDUCE_H

#include "comm/group.h"

/* Bytes of an element that can be reduced; 0 for other types. */
size_t mui_reducible_bytes(mu_dtype type);
const char *mui_reducible_name(mu_dtype type);
const char *mui_reduce_op_name(mu_reduce_op op);

/* The part of n elements of so many bytes that a rank of size reduces: whole cache lines but for the end. */
void mui_reduce_slice(int64_t n, int size, int rank, size_t bytes, int64_t *from, int64_t *count);

/* The most of n elements that can be cut into equal slices of whole cache lines. */
uint64_t mui_scatter_of(uint64_t n, int size, mu_dtype type);
/* The part of mui_identity.scattered that is really cut into slices, of whole cache lines: all of it or nothing. */
uint64_t mui_scattered(const mui_identity *id, int size, mu_dtype type);

/* out[0..outs) each get the reduction of in[0..ranks), n elements. An out may be an in. NaN in any rank makes MU_MAX
 * and MU_MIN NaN. MU_MEAN is the sum divided by ranks. */
void mui_reduce(mu_dtype type, mu_reduce_op op, int ranks, const void *const *in, int outs, void *const *out,
                int64_t n);

#endif
