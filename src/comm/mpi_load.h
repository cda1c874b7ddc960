/* Finding the plug-in for the MPI of this process. */
#ifndef MUI_MPI_LOAD_H
#define MUI_MPI_LOAD_H

#include "comm/mpi_table.h"
#include "base/context.h"

/* For the MPI that the process has loaded; where it has none, for the one that MUSTER_MPI names or the launcher belongs
 * to. lent: the program must have one. NULL with an error raised. The plug-in stays loaded. */
const mui_mpi_table *mui_mpi_load(mu_context *c, bool lent);

#endif
