/* `--ranks N`: the command starts itself N times, by its own launcher. */
#ifndef MUSTER_CLI_RELAUNCH_H
#define MUSTER_CLI_RELAUNCH_H

#include <stdbool.h>

/* True inside a launcher (muster run, torchrun): this process is one of the ranks already. */
bool in_launcher(void);

/* True where that launcher starts ranks again when one fails, as muster run and torchrun do. */
bool launcher_restarts(void);
/* How often it has. */
int launcher_restart(void);

/* Replaces this process by "muster run -n ranks --max-restarts restarts -- muster argv...". Returns only on failure, with
 * the exit code. */
int relaunch(int ranks, int restarts, int argc, char **argv);

#endif
