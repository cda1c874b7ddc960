/* What the bootstrap needs of groups of processes. */
#ifndef MUI_SHM_H
#define MUI_SHM_H

#include "comm/group.h"

/* mu_group_shm with checked arguments and settled options. */
mu_group *mui_group_meet(mu_context *c, const char *name, int rank, int size, const mu_group_options *settled);

#endif
