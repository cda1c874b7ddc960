/* Where a training run is: on its way to a --checkpoint file, and back from one on as many ranks or on others. */
#ifndef MUSTER_CLI_TRAIN_STATE_H
#define MUSTER_CLI_TRAIN_STATE_H

#include "session.h"

/* Which file this run goes on from, where it was told to see for itself: rank 0 looks, all ranks hear. Collective. -1, or
 * the exit code. */
int train_state_choose(session *s);
/* Reads it, if there is one, and sets up the session's state and its last step. Collective. -1, or the exit code. */
int train_state_resume(session *s);
/* Rank 0 writes --checkpoint, if it was given; the others wait. Collective. False on error. */
bool train_state_save(session *s);

/* The step that the schedule is at: that of a run which had this number of ranks from the start. */
int64_t train_state_schedule_step(const session *s);
/* True when the run has nothing more to do. */
bool train_state_done(const session *s);

#endif
