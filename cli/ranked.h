/* What commands that run on ranks share: how they log, and how they end. */
#ifndef MUSTER_CLI_RANKED_H
#define MUSTER_CLI_RANKED_H

#include <muster/base.h>

#include <stdbool.h>
#include <stdio.h>

/* Writes a context's message, with the rank where there are several. Errors are left out: they are printed once, at the
 * end, by ranked_close. */
void ranked_log(FILE *to, const char *command, int rank, int size, mu_log_level level, const char *message);

/* Prints the context's error if there is one, and closes the context. early: no work was done yet, so that bad input is
 * CLI_USAGE. Returns the exit code; code when there is no error. */
int ranked_close(mu_context *c, const char *command, int rank, int size, int code, bool early);

#endif
