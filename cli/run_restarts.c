/* Running all ranks, and running all of them again when one has failed: the group of ranks is made as a whole, so it is
 * ended and started as a whole. What a rank kept in a file is what it goes on from. */
#define _GNU_SOURCE
#include "commands.h"
#include "run.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void describe_failure(const launch *l, char *out, size_t size)
{
    const rank_process *p = &l->ranks[l->failed];
    const char *colon = p->last[0] != '\0' ? "; its last line on stderr: " : "";
    if (WIFSIGNALED(l->failed_status)) {
        const char *name = sigabbrev_np(WTERMSIG(l->failed_status));
        snprintf(out, size, "rank %d was killed by SIG%s%s%s", p->rank, name != NULL ? name : "?", colon, p->last);
    } else {
        snprintf(out, size, "rank %d exited with code %d%s%s", p->rank, WEXITSTATUS(l->failed_status), colon, p->last);
    }
}

static void close_rank(rank_process *p)
{
    int fds[] = {p->log, p->out.fd, p->err.fd};
    for (size_t i = 0; i < 3; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    p->log = p->out.fd = p->err.fd = -1;
}

/* Whether the ranks ended because the launcher was told to tell them so, or because one of them was told and said so by its
 * exit code, as `muster train` does after it has saved its state. */
static bool was_asked(const launch *l)
{
    int s = l->failed_status, sig = l->passed_on;
    if (WIFSIGNALED(s)) {
        return sig != 0 && WTERMSIG(s) == sig;
    }
    int told = WEXITSTATUS(s) - 128;
    return told == SIGTERM || told == SIGINT || told == SIGUSR1 || (sig != 0 && told == sig);
}

/* Runs all ranks once. -1: again; else the exit code. */
static int attempt(launch *l)
{
    l->failed = -1;
    l->stopping = l->killed = false;
    int code = CLI_OK;
    for (int r = 0; r < l->size && code == CLI_OK; r++) {
        code = run_start_rank(l, r);
    }
    if (code != CLI_OK) {
        run_stop_all(l, SIGKILL);
    }
    run_watch(l);
    for (int r = 0; r < l->size; r++) {
        close_rank(&l->ranks[r]);
    }
    if (code != CLI_OK) {
        return code;
    }
    if (l->got_signal != 0) {
        cli_fail("run", 0, "ended by SIG%s", sigabbrev_np(l->got_signal));
        return 128 + l->got_signal;
    }
    if (l->failed < 0) {
        return CLI_OK;
    }
    char what[RUN_LAST_BYTES + 128];
    describe_failure(l, what, sizeof(what));
    if (l->restart < l->max_restarts && !was_asked(l)) {
        l->restart++;
        cli_fail("run", 0, "%s; starting all %d ranks again (%d of %d)", what, l->size, l->restart, l->max_restarts);
        return -1;
    }
    code = WIFSIGNALED(l->failed_status) ? 128 + WTERMSIG(l->failed_status) : WEXITSTATUS(l->failed_status);
    return cli_fail("run", code, "%s", what);
}

int run_all(launch *l)
{
    int code;
    while ((code = attempt(l)) < 0) {
    }
    return code;
}
