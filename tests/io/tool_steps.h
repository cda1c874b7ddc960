/* Steps of training that the oracle scripts' programs take, and PyTorch in the scripts beside them. */
#ifndef TOOL_STEPS_H
#define TOOL_STEPS_H

#include <muster/muster.h>

/* Steps [from, from + count) of a network on 3 x 6 x 6 with 5 classes, in batches of 4: x[i] = ((i * 37 + step * 11) %
 * 101 - 50) / 50, y[i] = (i + step) % 5. ddp NULL: alone; else each rank has the same batch, whose mean is that of one.
 * Exits on errors. */
void tool_steps(mu_context *c, mu_module *m, mu_optimizer *o, mu_ddp *ddp, int from, int count);

#endif
