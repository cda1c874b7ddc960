/* Errors that reach every rank. All collective; a NULL group or one of a single rank costs nothing. */
#ifndef MUI_AGREE_H
#define MUI_AGREE_H

#include "comm/group.h"

/* Each rank brings its own outcome; all get MU_OK only if all bring it, else the status and message of the first rank
 * that failed. A rank that failed has its message in its context. */
mu_status mui_agree(mu_context *c, mu_group *g, mu_status mine) MU_MUST_USE;
/* Comes back when every rank is there with the same identity. Below 0 the group is broken. */
mu_status mui_gate(mu_group *g, const mui_identity *id) MU_MUST_USE;
/* The same for ranks that bring outcomes: a rank that failed has that again, the others get MU_ERR_PEER with its message,
 * and the group stays whole. */
mu_status mui_meet(mu_group *g, const mui_identity *id, mu_status mine) MU_MUST_USE;
/* Rank 0's bytes to all, in pieces. */
mu_status mui_share(mu_group *g, void *data, size_t bytes) MU_MUST_USE;
bool mui_is_reader(const mu_group *g); /* this rank is the one that reads the file */
bool mui_is_shared(const mu_group *g);

#endif
