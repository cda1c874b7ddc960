/* A process of the launcher's that outlives it: it ends all ranks, and what they started, should the launcher be killed. */
#define _GNU_SOURCE
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Reads process groups from the launcher: a positive number begins, a negative one ends. At the end of the pipe it
 * kills those that have not ended. */
static void guard_groups(int fd)
{
    static pid_t groups[RUN_MOST_RANKS];
    int count = 0;
    for (;;) {
        pid_t g;
        ssize_t n = read(fd, &g, sizeof(g));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n != (ssize_t)sizeof(g)) {
            break;
        }
        if (g > 0 && count < RUN_MOST_RANKS) {
            groups[count++] = g;
        }
        for (int i = 0; i < count && g < 0; i++) {
            if (groups[i] == -g) {
                groups[i] = groups[--count];
                break;
            }
        }
    }
    for (int i = 0; i < count; i++) {
        kill(-groups[i], SIGKILL);
    }
    _exit(0);
}

bool run_start_guard(launch *l)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return false;
    }
    fflush(NULL);
    l->guard = fork();
    if (l->guard == 0) {
        /* Out of reach of what a terminal or a `kill -PGID` sends to the launcher's group. */
        setpgid(0, 0);
        signal(SIGINT, SIG_IGN);
        signal(SIGTERM, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        signal(SIGQUIT, SIG_IGN);
        signal(SIGUSR1, SIG_IGN);
        signal(SIGUSR2, SIG_IGN);
        close(ends[1]);
        guard_groups(ends[0]);
    }
    close(ends[0]);
    l->guard_fd = ends[1];
    return l->guard > 0;
}

void run_tell_guard(launch *l, pid_t group)
{
    /* A dead guard is no reason to stop: PR_SET_PDEATHSIG still covers the ranks themselves. */
    ssize_t n = write(l->guard_fd, &group, sizeof(group));
    (void)n;
}

void run_end_guard(launch *l)
{
    if (l->guard_fd >= 0) {
        close(l->guard_fd);
        waitpid(l->guard, NULL, 0);
    }
}
