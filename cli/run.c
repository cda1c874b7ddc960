/* `muster run`: starts a program on several ranks of this machine, as torchrun does, and ends them together.
 *
 * The launcher starts no thread and touches nothing of the library. Every rank is a process group of its own. Besides
 * the ranks there is a guard, a process that ends all groups should the launcher be killed. */
#define _GNU_SOURCE
#include "commands.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 1024
#define LINE_BYTES 65536
#define LAST_BYTES 512
#define GRACE_SECONDS 5.0 /* between SIGTERM and SIGKILL */

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

typedef struct stream {
    int fd;      /* read end, -1: closed */
    int to;      /* 1 or 2 of the launcher */
    size_t used;
    char *line;  /* LINE_BYTES: an unfinished line */
} stream;

typedef struct rank_process {
    int rank;
    pid_t pid;   /* and process group; 0: not running */
    int log;     /* file, or -1 */
    stream out, err;
    char last[LAST_BYTES]; /* last non-empty line on stderr */
} rank_process;

typedef struct launch {
    int size, max_restarts, restart;
    const char *log_dir, *master_addr, *master_port;
    char **program;
    char job[64], port[16];
    rank_process *ranks;
    int signals, guard_fd;
    pid_t guard;
    bool stopping;   /* SIGTERM was sent to all */
    bool killed;     /* SIGKILL too */
    double deadline; /* when it is */
    int failed;      /* first rank that failed, -1: none */
    int failed_status;
    int got_signal;  /* that the launcher itself was sent */
    bool mute[3];    /* nobody reads this output of the launcher any more */
} launch;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

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
        } else if (!whole_number(value, 1, MOST_RANKS, &l->size)) {
            return cli_usage_error("run", "-n is `%s`; 1 to %d ranks or `auto` were expected", value, MOST_RANKS);
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

/* -- the guard --------------------------------------------------------------------------------------------------- */
/* Reads process groups from the launcher: a positive number begins, a negative one ends. At the end of the pipe it
 * kills those that have not ended. */
static void guard_groups(int fd)
{
    static pid_t groups[MOST_RANKS];
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
        if (g > 0 && count < MOST_RANKS) {
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

static bool start_guard(launch *l)
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
        close(ends[1]);
        guard_groups(ends[0]);
    }
    close(ends[0]);
    l->guard_fd = ends[1];
    return l->guard > 0;
}

static void tell_guard(launch *l, pid_t group)
{
    /* A dead guard is no reason to stop: PR_SET_PDEATHSIG still covers the ranks themselves. */
    ssize_t n = write(l->guard_fd, &group, sizeof(group));
    (void)n;
}

/* -- starting a rank --------------------------------------------------------------------------------------------- */
static void set_number(const char *name, int n)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", n);
    setenv(name, text, 1);
}

static void set_environment(const launch *l, int rank)
{
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    set_number("WORLD_SIZE", l->size);
    set_number("LOCAL_WORLD_SIZE", l->size);
    set_number("GROUP_RANK", 0);
    set_number("GROUP_WORLD_SIZE", 1);
    set_number("ROLE_RANK", rank);
    set_number("ROLE_WORLD_SIZE", l->size);
    setenv("ROLE_NAME", "default", 1);
    setenv("MASTER_ADDR", l->master_addr, 1);
    setenv("MASTER_PORT", l->master_port, 1);
    set_number("TORCHELASTIC_RESTART_COUNT", l->restart);
    set_number("TORCHELASTIC_MAX_RESTARTS", l->max_restarts);
    setenv("TORCHELASTIC_RUN_ID", l->job, 1);
    setenv("MUSTER_JOB", l->job, 1);
    if (l->size > 1) {
        setenv("OMP_NUM_THREADS", "1", 0);
    }
}

/* In the child. Ends in exec, or with errno written to `report`. */
static void become_rank(const launch *l, int rank, pid_t parent, int out, int err, int report)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(1); /* the launcher died before the line above */
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    /* A terminal would stop a process outside its foreground group. */
    if (rank != 0 || isatty(0)) {
        int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (nothing >= 0) {
            dup2(nothing, 0);
        }
    }
    if (out >= 0) {
        dup2(out, 1);
    }
    dup2(err, 2);
    set_environment(l, rank);
    execvp(l->program[0], l->program);
    int e = errno;
    ssize_t n = write(report, &e, sizeof(e));
    (void)n;
    _exit(127);
}

static bool open_log(const launch *l, rank_process *p)
{
    p->log = -1;
    if (l->log_dir == NULL) {
        return true;
    }
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/rank-%d.log", l->log_dir, p->rank);
    p->log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (l->restart == 0 ? O_TRUNC : 0), 0666);
    if (p->log < 0) {
        cli_fail("run", CLI_FAILED, "%s: %s", path, strerror(errno));
    }
    return p->log >= 0;
}

/* CLI_OK, or an exit code with the message printed. */
static int start_rank(launch *l, int rank)
{
    rank_process *p = &l->ranks[rank];
    char *lines[2] = {p->out.line, p->err.line};
    *p = (rank_process){.rank = rank, .log = -1, .out = {-1, 1, 0, lines[0]}, .err = {-1, 2, 0, lines[1]}};
    int out[2] = {-1, -1}, err[2], report[2];
    /* On a terminal rank 0 writes straight to it, as a program of its own would. */
    bool direct = rank == 0 && l->log_dir == NULL && isatty(1);
    if (!open_log(l, p)) {
        return CLI_FAILED;
    }
    if ((!direct && pipe2(out, O_CLOEXEC) != 0) || pipe2(err, O_CLOEXEC) != 0 || pipe2(report, O_CLOEXEC) != 0) {
        return cli_fail("run", CLI_FAILED, "pipe: %s", strerror(errno));
    }
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        become_rank(l, rank, parent, out[1], err[1], report[1]);
    }
    if (pid < 0) {
        return cli_fail("run", CLI_FAILED, "fork: %s", strerror(errno));
    }
    setpgid(pid, pid); /* both sides do, so that it is done before either goes on; fails after the exec */
    p->pid = pid;
    tell_guard(l, pid);
    close(out[1]);
    close(err[1]);
    close(report[1]);
    p->out.fd = out[0];
    p->err.fd = err[0];
    int e = 0;
    ssize_t n;
    do {
        n = read(report[0], &e, sizeof(e));
    } while (n < 0 && errno == EINTR);
    close(report[0]);
    return n == (ssize_t)sizeof(e) ? cli_fail("run", CLI_USAGE, "cannot run %s: %s", l->program[0], strerror(e)) : CLI_OK;
}

/* -- output ------------------------------------------------------------------------------------------------------ */
static bool write_all(int fd, const char *data, size_t n)
{
    while (n > 0) {
        ssize_t k = write(fd, data, n);
        if (k < 0 && errno == EAGAIN) { /* somebody shares a terminal that does not block */
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            poll(&p, 1, 100);
            continue;
        }
        if (k < 0 && errno != EINTR) {
            return false;
        }
        data += k > 0 ? k : 0;
        n -= k > 0 ? (size_t)k : 0;
    }
    return true;
}

/* One line with its newline, or a piece of one that is too long. */
static void emit(launch *l, rank_process *p, stream *s, const char *line, size_t n)
{
    if (p->log >= 0) {
        write_all(p->log, line, n);
    }
    if ((p->log < 0 || p->rank == 0) && !l->mute[s->to]) {
        char text[LINE_BYTES + 24];
        size_t used = p->rank == 0 ? 0 : (size_t)snprintf(text, 24, "[%d] ", p->rank);
        memcpy(text + used, line, n);
        l->mute[s->to] = !write_all(s->to, text, used + n);
    }
    size_t end = n;
    while (end > 0 && (line[end - 1] == '\n' || line[end - 1] == '\r')) {
        end--;
    }
    if (s->to == 2 && end > 0) {
        end = end < sizeof(p->last) - 1 ? end : sizeof(p->last) - 1;
        memcpy(p->last, line, end);
        p->last[end] = '\0';
    }
}

static void emit_lines(launch *l, rank_process *p, stream *s, bool ended)
{
    size_t from = 0;
    for (size_t i = 0; i < s->used; i++) {
        /* Rank 0's progress bars redraw themselves with carriage returns. */
        if (s->line[i] == '\n' || (s->line[i] == '\r' && p->rank == 0)) {
            emit(l, p, s, s->line + from, i + 1 - from);
            from = i + 1;
        }
    }
    memmove(s->line, s->line + from, s->used - from);
    s->used -= from;
    if (s->used > 0 && (ended || s->used >= LINE_BYTES - 1)) {
        s->line[s->used++] = '\n';
        emit(l, p, s, s->line, s->used);
        s->used = 0;
    }
}

/* Reads once. False at the end of the stream, which is then closed. */
static bool pump(launch *l, rank_process *p, stream *s)
{
    ssize_t n = read(s->fd, s->line + s->used, LINE_BYTES - 1 - s->used);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) {
        return false;
    }
    s->used += n > 0 ? (size_t)n : 0;
    emit_lines(l, p, s, n <= 0);
    if (n <= 0) {
        close(s->fd);
        s->fd = -1;
    }
    return n > 0;
}

/* What a rank wrote before it ended is already in the pipe; what its own children may still write is not waited for. */
static void drain(launch *l, rank_process *p)
{
    stream *both[2] = {&p->out, &p->err};
    for (int i = 0; i < 2; i++) {
        if (both[i]->fd >= 0) {
            fcntl(both[i]->fd, F_SETFL, O_NONBLOCK);
            while (both[i]->fd >= 0 && pump(l, p, both[i])) {
            }
            emit_lines(l, p, both[i], true);
        }
    }
}

/* -- ending ------------------------------------------------------------------------------------------------------ */
static void signal_all(launch *l, int sig)
{
    for (int r = 0; r < l->size; r++) {
        if (l->ranks[r].pid > 0) {
            kill(-l->ranks[r].pid, sig);
            kill(-l->ranks[r].pid, SIGCONT); /* a stopped rank gets it too */
        }
    }
}

static void stop_all(launch *l, int sig)
{
    if (!l->stopping) {
        l->stopping = true;
        l->deadline = now() + GRACE_SECONDS;
        signal_all(l, sig);
    }
}

static int running(const launch *l)
{
    int n = 0;
    for (int r = 0; r < l->size; r++) {
        n += l->ranks[r].pid > 0;
    }
    return n;
}

static rank_process *find_pid(launch *l, pid_t pid)
{
    for (int r = 0; r < l->size; r++) {
        if (l->ranks[r].pid == pid) {
            return &l->ranks[r];
        }
    }
    return NULL;
}

/* Collects whoever has ended. Of several at once, one that was killed is taken for the cause: the others may have
 * failed because of it. */
static void reap(launch *l)
{
    bool was_stopping = l->stopping;
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
            break;
        }
        rank_process *p = find_pid(l, info.si_pid);
        int status = 0;
        bool failed = info.si_code != CLD_EXITED || info.si_status != 0;
        if (p != NULL && (failed || l->stopping)) {
            kill(-p->pid, SIGKILL); /* its own children; before its number can be given to another */
        }
        waitpid(info.si_pid, &status, 0);
        if (p == NULL) {
            continue; /* the guard */
        }
        tell_guard(l, -p->pid);
        p->pid = 0;
        drain(l, p);
        if (failed && !was_stopping &&
            (l->failed < 0 || (WIFSIGNALED(status) && !WIFSIGNALED(l->failed_status)))) {
            l->failed = p->rank;
            l->failed_status = status;
        }
    }
    if (l->failed >= 0) {
        stop_all(l, SIGTERM);
    }
}

static void on_signal(launch *l)
{
    struct signalfd_siginfo info;
    while (read(l->signals, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        int sig = (int)info.ssi_signo;
        if (sig == SIGCHLD) {
            continue;
        }
        if (l->got_signal != 0) {
            l->deadline = 0; /* asked twice: no more grace */
        }
        l->got_signal = sig;
        stop_all(l, sig);
    }
    reap(l);
}

/* Until all ranks have ended. */
static void watch(launch *l)
{
    struct pollfd *fds = calloc((size_t)l->size * 2 + 1, sizeof(*fds));
    if (fds == NULL) {
        stop_all(l, SIGKILL);
        return;
    }
    while (running(l) > 0) {
        fds[0] = (struct pollfd){.fd = l->signals, .events = POLLIN};
        for (int r = 0; r < l->size; r++) {
            fds[2 * r + 1] = (struct pollfd){.fd = l->ranks[r].out.fd, .events = POLLIN};
            fds[2 * r + 2] = (struct pollfd){.fd = l->ranks[r].err.fd, .events = POLLIN};
        }
        double left = l->deadline - now();
        int timeout = !l->stopping || l->killed ? 1000 : left <= 0 ? 0 : (int)(left * 1000) + 1;
        int n = poll(fds, (nfds_t)l->size * 2 + 1, timeout);
        for (int r = 0; r < l->size && n > 0; r++) {
            rank_process *p = &l->ranks[r];
            if (fds[2 * r + 1].revents != 0) {
                pump(l, p, &p->out);
            }
            if (fds[2 * r + 2].revents != 0) {
                pump(l, p, &p->err);
            }
        }
        on_signal(l);
        if (l->stopping && !l->killed && now() >= l->deadline) {
            l->killed = true;
            signal_all(l, SIGKILL);
        }
    }
    free(fds);
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
        code = start_rank(l, r);
    }
    if (code != CLI_OK) {
        stop_all(l, SIGKILL);
    }
    watch(l);
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
    char what[LAST_BYTES + 128];
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
    snprintf(l->job, sizeof(l->job), "muster-%d-%.6f", (int)getpid(), now());
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
            p->out.line = malloc(LINE_BYTES);
            p->err.line = malloc(LINE_BYTES);
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
    if (l->signals < 0 || !start_guard(l)) {
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
    if (l.guard_fd >= 0) {
        close(l.guard_fd);
        waitpid(l.guard, NULL, 0);
    }
    for (int r = 0; r < l.size && l.ranks != NULL; r++) {
        free(l.ranks[r].out.line);
        free(l.ranks[r].err.line);
    }
    free(l.ranks);
    return code;
}
