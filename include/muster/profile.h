/* Where a context's time went, by kind of kernel. For measuring: open the context with .profile set, run the steps that
 * count, read. What the rows do not sum up to is not kernels: the tape, the modules, the program itself. */
#ifndef MUSTER_PROFILE_H
#define MUSTER_PROFILE_H

#include <muster/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Each moment of a thread belongs to one row at most: a kernel within another belongs to the outer one, but for
 * conversions of layout, which have their own rows and are taken off the kernel that wanted them.
 *   conv_forward, conv_backward_data, conv_backward_weights
 *   gemm                                 linear layers and matrix products
 *   batch_norm_forward, batch_norm_backward, pool_forward, pool_backward
 *   elementwise                          activations, sums of two, dropout, gradients added up
 *   copy                                 of views, slices, joins
 *   sum, loss                            reductions to a number; softmax and losses
 *   reorder, weight_reorder              into another layout, as mu_counters counts them
 *   optimizer                            updates of weights, the norm for clipping
 *   all_reduce, all_reduce_wait          of a ddp: its progress during backward, and the wait for the rest after it
 *   loader_wait                          for a batch that was not ready */
typedef struct mu_profile_row {
    const char *kind;
    uint64_t calls;
    double seconds; /* by the clock, of all threads of mu_data_parallel together */
    double flops;   /* of convolutions and gemm, as counted from shapes: padding counts, Winograd saves nothing */
    double bytes;   /* operands and results, each once, whatever the caches did; 0 where not known */
} mu_profile_row;

/* Sets *rows to the kinds that occurred since opening or the last reset, and returns how many; the rows belong to the
 * context, until the next call. 0 and NULL without the option. Not while another thread asks. */
MU_API int mu_context_profile(const mu_context *c, const mu_profile_row **rows);

/* Starts again from nothing. */
MU_API void mu_context_profile_reset(mu_context *c);

#ifdef __cplusplus
}
#endif
#endif
