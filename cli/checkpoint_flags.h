/* The flag --limit NAME=N of every command that reads a checkpoint; the others are switches. */
#ifndef MUSTER_CLI_CHECKPOINT_FLAGS_H
#define MUSTER_CLI_CHECKPOINT_FLAGS_H

#include <muster/checkpoint.h>

/* Sets a limit from "NAME=N"; returns NULL, or what is wrong with it in words. */
const char *checkpoint_limit_set(mu_checkpoint_options *o, const char *text);

#endif
