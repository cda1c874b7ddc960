/* Data parallelism within one process: a module that runs its child on several parts of the batch at once, in threads.
 *
 * PyTorch's torch.nn.DataParallel for cores. There is one set of parameters, one optimiser, and one context; use mu_ddp
 * (<muster/ddp.h>) for several processes, around it if need be. */
#ifndef MUSTER_DATA_PARALLEL_H
#define MUSTER_DATA_PARALLEL_H

#include <muster/module.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_data_parallel_options {
    int replicas; /* 0: the context's threads, or if that is one, the cores; each has threads / replicas, at least one */
} mu_data_parallel_options;

/* A module "DataParallel" that owns m, a root, as its child "module", so that all names begin with "module." as they do
 * in PyTorch. Its forward cuts the input along dimension 0 as torch.chunk does (fewer rows than replicas: fewer
 * replicas), runs m on each part, and puts the outputs together along dimension 0; backward sums the replicas' gradients,
 * in their order, so that all is the same bit for bit from run to run.
 *
 * Results are those of m alone up to rounding, except that batch norm normalises each part by itself (its running
 * statistics move once a forward, by the mean of the parts' statistics weighted by their size, in the place of PyTorch's
 * first part), and that dropout draws apart in each replica. Initial values are those of m alone, too: they are set now.
 *
 * m's forward functions are called with the same self in several threads at once, each with a tape of its own: they may
 * read self, parameters and buffers, but not write them, nor use tensors of other tapes. A forward within a replica of
 * another parallel module runs there as a whole. mu_tape_bytes does not count what replicas hold; the tape's reset frees
 * it for the next step. The forward blocks until all replicas are done; an error in one of them is the context's, and
 * names the replica. The module belongs to the context until it is added to a parent. NULL on error (m is no root, or
 * replicas cannot be had: MU_ERR_ARG); m is then still the context's. */
MU_API mu_module *mu_data_parallel(mu_module *m, const mu_data_parallel_options *options);

#ifdef __cplusplus
}
#endif
#endif
