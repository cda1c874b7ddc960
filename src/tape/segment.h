/* Segments: parts of a tape whose values are dropped after they ran, and made again when backward comes to them.
 *
 * The nodes and tensors of a segment stay on the tape, without memory. So marking sees the same graph as ever: reads of
 * parameters, reasons of absences and the order in which gradients become complete do not depend on segments. Before
 * backward runs the last node of a segment that a gradient reaches, the segment's function runs again: operations take
 * the tensors and nodes of the first run, in the same order, and fill them anew; then backward goes on through them as
 * through any others. Behind its first node the segment is dropped again.
 *
 * For who writes an operation or layer with effects beside its result (statistics, counters, communication):
 * - mui_tape_recomputes says that this is not the first run: leave the effects out;
 * - mui_tape_decide gives the first run's answer to a question about state that may have changed since (training mode);
 * - mui_tape_remember and mui_tape_recall are for what cannot or must not be computed twice (sums over ranks, say).
 * A graph piece whose backward is something else than its nodes' own is not a segment: give it an op of its own. */
#ifndef MUI_SEGMENT_H
#define MUI_SEGMENT_H

#include "tape/op.h"
#include "tape/store.h"

typedef struct mui_segment mui_segment;

/* Whether a segment's function is running again, for backward. */
bool mui_tape_recomputes(const mu_tape *t);
/* `now`, or in a recompute what it was in the first run, the calls being the same in both. */
bool mui_tape_decide(mu_tape *t, bool now);
/* Copies something small that a recompute could not find again; nothing when no segment runs for the first time. */
mu_status mui_tape_remember(mu_tape *t, const void *data, size_t bytes) MU_MUST_USE;
/* In a recompute what the same call, with as many bytes, remembered in the first run; else NULL. Also NULL, with an error,
 * where the second run is not like the first. */
const void *mui_tape_recall(mu_tape *t, size_t bytes);

/* -- for this folder -------------------------------------------------------------------------------------------- */
/* A tensor of the first run, filled with the template's memory, whose reference it takes; NULL: not recomputing, or
 * the first run had no such tensor here, and the reference stays the caller's. */
mu_tensor *mui_segment_tensor(mu_tape *t, const mu_tensor *template);
/* Notes a tensor made in an open segment's first run. */
bool mui_segment_made(mu_tape *t, mu_tensor *x);
/* Fills the first run's node of y, in the place of recording one. Takes the references in saved. */
mu_tensor *mui_segment_record(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                              const void *attr, size_t attr_bytes, mui_storage *const *saved, int saved_count,
                              uint32_t reads);
/* Runs the function of n's segment, and of those around it, unless their values are there. */
mu_status mui_segment_need(mu_tape *t, mui_node *n) MU_MUST_USE;
/* Backward has come down to node i: drops what lies behind. 0: all. */
void mui_segment_behind(mu_tape *t, size_t i);
/* Raises the error of a recompute that came to `op` with result y (NULL: none; op NULL: to the end) where the first run
 * went on otherwise. */
mu_status mui_segment_stray(mu_tape *t, const char *op, const mu_tensor *y);

#endif
