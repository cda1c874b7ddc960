/* `muster run`: starts a program on several ranks of this machine, as torchrun does, and ends them together.
 *
 * The launcher starts no thread and touches nothing of the library. */
#define _GNU_SOURCE
#include "commands.h"
#include "run.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

static void choose_port(launch *l)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = 29500;
    if (fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0 && getsockname(fd, (struct sockaddr *)&a, &n) == 0) {
        port = ntohs(a.sin_port);
    }
    if (fd >= 0) {
        close(fd);
    }
    snprintf(l->port, sizeof(l->port), "%d", port);
    l->master_port = l->port;
}

static int prepare(launch *l)
{
    snprintf(l->job, sizeof(l->job), "muster-%d-%.6f", (int)getpid(), run_now());
    if (l->master_port == NULL) {
        choose_port(l);
    }
    if (l->log_dir == NULL && (l->redirects != NULL || l->tee != NULL)) {
        const char *tmp = getenv("TMPDIR");
        snprintf(l->made_dir, sizeof(l->made_dir), "%s/muster-run-XXXXXX", tmp != NULL && strlen(tmp) < PATH_MAX / 2 ? tmp : "/tmp");
        l->log_dir = mkdtemp(l->made_dir);
        if (l->log_dir == NULL) {
            return cli_fail("run", CLI_FAILED, "cannot make %s: %s", l->made_dir, strerror(errno));
        }
        cli_fail("run", 0, "logs are in %s", l->log_dir);
    }
    if (l->log_dir != NULL && mkdir(l->log_dir, 0777) != 0 && errno != EEXIST) {
        return cli_fail("run", CLI_FAILED, "cannot make %s: %s", l->log_dir, strerror(errno));
    }
    l->ranks = calloc((size_t)l->size, sizeof(*l->ranks));
    for (int r = 0; r < l->size; r++) {
        rank_process *p = l->ranks != NULL ? &l->ranks[r] : NULL;
        if (p != NULL) {
            p->log = p->out.fd = p->err.fd = -1;
            p->out.line = malloc(RUN_LINE_BYTES);
            p->err.line = malloc(RUN_LINE_BYTES);
        }
        if (p == NULL || p->out.line == NULL || p->err.line == NULL) {
            return cli_fail("run", CLI_FAILED, "out of memory");
        }
    }
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGQUIT);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_DFL); /* ignored by whoever started us, it would not come */
    l->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (l->signals < 0 || !run_start_guard(l)) {
        return cli_fail("run", CLI_FAILED, "cannot start: %s", strerror(errno));
    }
    return CLI_OK;
}

int cmd_run(int argc, char **argv)
{
    launch l = {.size = 1, .shutdown = -1, .master_addr = "127.0.0.1", .role = "default", .signals = -1, .guard_fd = -1, .failed = -1};
    int code = run_parse(&l, argc, argv);
    if (code != CLI_OK) {
        return code < 0 ? CLI_OK : code;
    }
    code = prepare(&l);
    code = code == CLI_OK ? run_all(&l) : code;
    run_end_guard(&l);
    for (int r = 0; r < l.size && l.ranks != NULL; r++) {
        free(l.ranks[r].out.line);
        free(l.ranks[r].err.line);
    }
    free(l.ranks);
    return code;
}
