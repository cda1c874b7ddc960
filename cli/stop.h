/* Signals that ask a run to stop: remembered, and acted on by all ranks after the same step. */
#ifndef MUSTER_CLI_STOP_H
#define MUSTER_CLI_STOP_H

#include <muster/base.h>

#include <stdbool.h>

/* What a batch system that takes its nodes back sends, a terminal, and a batch system that was asked to warn before
 * (Slurm's --signal). Where ranks got several, the first of these counts, on all ranks. */
#define STOP_SIGNALS 3
extern const int stop_signals[STOP_SIGNALS];

/* From now on they are remembered. SIGTERM also makes the context's waits say soon who is missing: launchers send it to all
 * when a rank is gone. saves false: there is no state to save, only SIGTERM is remembered, and the second one kills. */
void stop_listen(mu_context *c, bool saves);
/* Before the context is closed. */
void stop_forget_context(void);
/* The latest signal of this rank, or 0. */
int stop_asked(void);

#endif
