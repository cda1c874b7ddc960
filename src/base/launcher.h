/* What launchers tell a process about the ranks it is one of, by environment variables: which rank of how many, and which
 * of those on this machine. Reads what it is given to read from and touches nothing else, so that tests make environments
 * up. Not for: which engine carries a group, and how its ranks find each other; that is src/comm/bootstrap.c. */
#ifndef MUI_LAUNCHER_H
#define MUI_LAUNCHER_H

#include "base/context.h"

/* The value of a variable, NULL or "" when it is not set. */
typedef const char *(*mui_lookup)(void *user, const char *variable);

/* One launcher's variables; NULL where it has none. */
typedef struct mui_launcher {
    const char *who;
    const char *rank, *size, *local_rank, *local_size, *node, *nodes;
    const char *job[4]; /* variables that together tell one job from another */
    bool by_parent;     /* and so does the parent process */
    bool whole;         /* rank and size are set together or not at all */
    bool set_by_hand;   /* people set these variables too */
    bool bare_pmi;      /* PMI's, which other launchers set beside their own */
    const char *tasks_per_node; /* Slurm's way to tell the local size: "2(x3),1" */
} mui_launcher;

typedef struct mui_launch {
    const mui_launcher *by; /* NULL: nobody started several ranks, or said that this is one */
    int rank, size;
    int local_rank, local_size; /* among the ranks of this machine; -1: not told */
    int node, nodes;            /* machines; -1: not told */
    bool here;                  /* all ranks are on this machine */
} mui_launch;

/* MU_ERR_ARG names the variables that contradict each other, or the one that is missing or no number. mpi: what
 * torchrun and muster run set counts only where no launcher of MPI's does. */
mu_status mui_launch_read(mu_context *c, mui_lookup get, void *user, bool mpi, mui_launch *out) MU_MUST_USE;

/* Launchers that are known, in the order in which they count; NULL from the end on. */
const mui_launcher *mui_launcher_at(int i);

/* A whole number from least on; *out stays when the variable is not set. */
mu_status mui_read_number(mu_context *c, mui_lookup get, void *user, const char *variable, int least, int *out) MU_MUST_USE;

#endif
