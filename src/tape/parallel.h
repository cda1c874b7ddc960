/* A part of a graph that runs several times side by side, each time on some rows of its input: on tapes of its own, in
 * threads, with one set of parameters. The main tape sees one node, whose inputs are x and the parameters that the result
 * depends on; its backward runs those of the replicas and adds up what they give.
 *
 * For who writes an operation or layer with effects beside its result (statistics, counters): in a replica such an effect
 * would race with that of the others. mui_tape_defer notes it; when all replicas have run, the notes are brought together
 * in the order of replicas. */
#ifndef MUI_PARALLEL_H
#define MUI_PARALLEL_H

#include "tape/op.h"
#include "tape/store.h"

/* What to do to a tensor of the context after the forward. The n-th note of one tensor in a replica belongs to the n-th in
 * each other. */
typedef struct mui_late {
    mu_tensor *target;
    const float *value;  /* MU_F32: target = (1 - momentum) * target + momentum * (mean of the replicas' by weight) */
    float scale;         /* of value */
    float momentum;
    double weight;       /* positive */
    int64_t add;         /* MU_I64, one element: target += add, once, however many replicas say so */
} mui_late;
/* Notes it if t is a replica's, copying value; false: t is not, so do it now. (Of memory that runs out, the replica's
 * error tells.) */
bool mui_tape_defer(mu_tape *t, const mui_late *late);
typedef struct mui_parallel mui_parallel;
/* fn(self, tape, rows of x): called in all replicas at once. Threads start with the first forward. */
typedef mu_tensor *(*mui_parallel_fn)(void *self, mu_tape *t, mu_tensor *x);
mui_parallel *mui_parallel_new(mu_context *c, int replicas);
/* A tape that still has a node of it can be reset, but not run backward through it. NULL is allowed. */
void mui_parallel_free(mui_parallel *p);
/* NULL on failure. With one replica, and within a replica, this is fn(self, t, x). */
mu_tensor *mui_parallel_forward(mui_parallel *p, mu_tape *t, mui_parallel_fn fn, void *self, mu_tensor *x);

#endif
