/* MUSTER_TRACE. */
#ifndef MUI_TRACE_ENV_H
#define MUI_TRACE_ENV_H

#include "comm/group.h"

/* g, with the trace that the environment asks for; NULL when that could not be opened, with an error. Collective. */
mu_group *mui_trace_from_env(mu_context *c, mu_group *g);

#endif
