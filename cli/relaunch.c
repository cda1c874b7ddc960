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
    /* The launchers of MPI and Slurm; one rank of theirs is a program started alone. */
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    bool many = false;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        const char *size = getenv(sizes[i]);
        many = many || (size != NULL && atoi(size) > 1);
    }
    return many || getenv("RANK") != NULL || getenv("WORLD_SIZE") != NULL;
}

bool launcher_restarts(void)
{
    return getenv("TORCHELASTIC_MAX_RESTARTS") != NULL;
}

int launcher_restart(void)
{
    const char *count = getenv("TORCHELASTIC_RESTART_COUNT");
    return count != NULL ? atoi(count) : 0;
}

int relaunch(int ranks, int restarts, int argc, char **argv)
{
    char self[4096], count[16], most[16];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char **args = calloc((size_t)argc + 9, sizeof(*args));
    if (n <= 0 || args == NULL) {
        free(args);
        return cli_fail(argv[0], CLI_FAILED, "cannot find this program: %s", strerror(errno));
    }
    self[n] = '\0';
    snprintf(count, sizeof(count), "%d", ranks);
    snprintf(most, sizeof(most), "%d", restarts);
    char muster[] = "muster", run[] = "run", flag_n[] = "-n", flag_r[] = "--max-restarts", dashes[] = "--";
    char *head[] = {muster, run, flag_n, count, flag_r, most, dashes, self};
    memcpy(args, head, sizeof(head));
    memcpy(args + sizeof(head) / sizeof(*head), argv, (size_t)argc * sizeof(*argv)); /* argv[0] is the subcommand's name */
    fflush(NULL);
    execv(self, args);
    int error = errno;
    free(args);
    return cli_fail(argv[0], CLI_FAILED, "cannot start %s: %s", self, strerror(error));
}
