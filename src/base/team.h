/* Threads that are started once and then run one function together, again and again. Not for: work that comes in at any
 * time (loaders have their own). */
#ifndef MUI_TEAM_H
#define MUI_TEAM_H

#include "base/context.h"

typedef struct mui_team mui_team;
typedef void (*mui_team_fn)(void *user, int member);

/* Members are the caller of mui_team_run, as member 0, and members - 1 threads. NULL on failure, without a thread left. */
mui_team *mui_team_new(mu_context *c, int members);
void mui_team_free(mui_team *t); /* joins; NULL is allowed */
/* fn(user, i) in member i, for 0 <= i < members, at most those there are; returns when all have. */
void mui_team_run(mui_team *t, int members, mui_team_fn fn, void *user);

#endif
