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
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char help_text[] =
    "usage: muster run [-n N] [options] [--] program [args...]\n"
    "\n"
    "Starts N copies (ranks) of a program on this machine, which find each other through the environment, and ends\n"
    "all of them when one fails. The exit code is that of the first rank that failed, 128 + signal if it was killed.\n"
    "\n"
    "  -n, --nproc-per-node N  ranks to start: a number, or `auto` for one per core (default: 1)\n"
    "      --log-dir DIR       each rank's output to DIR/rank-R.log; only rank 0's also to the terminal\n"
    "      --max-restarts K    when a rank fails, start all ranks again, at most K times (default: 0)\n"
    "      --master-addr HOST  MASTER_ADDR for the program (default: 127.0.0.1)\n"
    "      --master-port PORT  MASTER_PORT for the program (default: a free one)\n"
    "      --standalone, --no-python, --nnodes 1\n"
    "                          accepted, as torchrun has them; they are always so\n"
    "  -h, --help              print this\n"
    "\n"
    "Ranks see RANK, WORLD_SIZE, LOCAL_RANK and the other variables of torchrun, MUSTER_JOB, and OMP_NUM_THREADS=1\n"
    "unless it is set or there is one rank. Lines of ranks other than 0 are printed with `[rank] ` before them.\n";

/* -- options ----------------------------------------------------------------------------------------------------- */
static bool whole_number(const char *s, int least, int most, int *out)
{
    char *end = NULL;
    errno = 0;
    long n = strtol(s, &end, 10);
    if (end == s || *end != '\0' || errno != 0 || n < least || n > most) {
        return false;
    }
    *out = (int)n;
    return true;
}

/* torchrun spells its options with underscores or hyphens. */
static bool is_option(const char *arg, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (name[i] == '\0' || (arg[i] != name[i] && !(arg[i] == '_' && name[i] == '-'))) {
            return false;
        }
    }
    return name[n] == '\0';
}

static int set_option(launch *l, const char *name, const char *value)
{
    int nodes;
    if (strcmp(name, "--nproc-per-node") == 0) {
        cpu_set_t cores;
        bool per_core = strcmp(value, "auto") == 0 || strcmp(value, "cpu") == 0;
        if (per_core && sched_getaffinity(0, sizeof(cores), &cores) == 0) {
            l->size = CPU_COUNT(&cores);
        } else if (!whole_number(value, 1, RUN_MOST_RANKS, &l->size)) {
            return cli_usage_error("run", "-n is `%s`; 1 to %d ranks or `auto` were expected", value, RUN_MOST_RANKS);
        }
    } else if (strcmp(name, "--max-restarts") == 0) {
        if (!whole_number(value, 0, INT_MAX, &l->max_restarts)) {
            return cli_usage_error("run", "--max-restarts is `%s`; a whole number was expected", value);
        }
    } else if (strcmp(name, "--nnodes") == 0) {
        if (strcmp(value, "1:1") != 0 && !whole_number(value, 1, 1, &nodes)) {
            return cli_usage_error("run", "--nnodes is `%s`; this version runs on one machine only", value);
        }
    } else if (strcmp(name, "--log-dir") == 0) {
        l->log_dir = value;
    } else if (strcmp(name, "--master-addr") == 0) {
        l->master_addr = value;
    } else {
        int port;
        if (!whole_number(value, 1, 65535, &port)) {
            return cli_usage_error("run", "--master-port is `%s`; 1 to 65535 was expected", value);
        }
        l->master_port = value;
    }
    return CLI_OK;
}

/* CLI_OK, CLI_USAGE, or -1: help was printed. */
static int parse(launch *l, int argc, char **argv)
{
    static const char *const with_value[] = {"--nproc-per-node", "--log-dir",     "--max-restarts",
                                             "--nnodes",         "--master-addr", "--master-port"};
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        const char *arg = argv[i], *value = strchr(arg, '='), *name = NULL;
        size_t n = value != NULL ? (size_t)(value - arg) : strlen(arg);
        if (strcmp(arg, "--") == 0) {
            i++;
            break;
        }
        if (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0) {
            fputs(help_text, stdout);
            return -1;
        }
        if (is_option(arg, n, "--standalone") || is_option(arg, n, "--no-python")) {
            continue;
        }
        if (strncmp(arg, "-n", 2) == 0) {
            name = "--nproc-per-node";
            value = arg[2] == '\0' ? NULL : arg[2] == '=' ? arg + 3 : arg + 2;
        } else {
            for (size_t k = 0; k < sizeof(with_value) / sizeof(*with_value); k++) {
                name = is_option(arg, n, with_value[k]) ? with_value[k] : name;
            }
            value = value != NULL ? value + 1 : NULL;
        }
        if (name == NULL) {
            return cli_usage_error("run", "unknown option `%s`", arg);
        }
        value = value != NULL ? value : i + 1 < argc ? argv[++i] : NULL;
        if (value == NULL) {
            return cli_usage_error("run", "%s needs a value", arg);
        }
        if (set_option(l, name, value) != CLI_OK) {
            return CLI_USAGE;
        }
    }
    l->program = argv + i;
    return i < argc ? CLI_OK : cli_usage_error("run", "no program to run");
}

/* -- the whole --------------------------------------------------------------------------------------------------- */
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
    if (l->restart < l->max_restarts) {
        l->restart++;
        cli_fail("run", 0, "%s; starting all %d ranks again (%d of %d)", what, l->size, l->restart, l->max_restarts);
        return -1;
    }
    code = WIFSIGNALED(l->failed_status) ? 128 + WTERMSIG(l->failed_status) : WEXITSTATUS(l->failed_status);
    return cli_fail("run", code, "%s", what);
}

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
    launch l = {.size = 1, .master_addr = "127.0.0.1", .signals = -1, .guard_fd = -1, .failed = -1};
    int code = parse(&l, argc, argv);
    if (code != CLI_OK) {
        return code < 0 ? CLI_OK : code;
    }
    code = prepare(&l);
    while (code == CLI_OK && (code = attempt(&l)) < 0) {
        code = CLI_OK;
    }
    run_end_guard(&l);
    for (int r = 0; r < l.size && l.ranks != NULL; r++) {
        free(l.ranks[r].out.line);
        free(l.ranks[r].err.line);
    }
    free(l.ranks);
    return code;
}
