/* Replacing this process by the launcher. An exec, not a fork: the launcher starts with no thread and no compute
 * library, whatever this process did before. */
#include "relaunch.h"
#include "commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool in_launcher(void)
{
    return getenv("RANK") != NULL || getenv("WORLD_SIZE") != NULL;
}

int relaunch(int ranks, int argc, char **argv)
{
    char self[4096], count[16];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char **args = calloc((size_t)argc + 7, sizeof(*args));
    if (n <= 0 || args == NULL) {
        free(args);
        return cli_fail(argv[0], CLI_FAILED, "cannot find this program: %s", strerror(errno));
    }
    self[n] = '\0';
    snprintf(count, sizeof(count), "%d", ranks);
    char muster[] = "muster", run[] = "run", flag_n[] = "-n", dashes[] = "--";
    char *head[] = {muster, run, flag_n, count, dashes, self};
    memcpy(args, head, sizeof(head));
    memcpy(args + 6, argv, (size_t)argc * sizeof(*argv)); /* argv[0] is the subcommand's name */
    fflush(NULL);
    execv(self, args);
    int error = errno;
    free(args);
    return cli_fail(argv[0], CLI_FAILED, "cannot start %s: %s", self, strerror(error));
}
