/* Starting ranks, watching over them, and ending them. Every rank is a process group of its own. */
#define _GNU_SOURCE
#include "commands.h"
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Between what asks ranks to end and SIGKILL, in seconds: after a failure they have nothing to save any more; after a signal
 * to the launcher they may have, and 30 is what torchrun and Slurm give. */
#define GRACE_AFTER_FAILURE 5
#define GRACE_AFTER_SIGNAL 30
/* Between a failure and SIGTERM to the others: whoever waits for the failed rank notices within 0.05 s, and says what
 * it was doing. */
#define WORDS_SECONDS 0.3

static double grace(const launch *l)
{
    bool asked = l->got_signal != 0 || l->passed_on != 0;
    return l->shutdown >= 0 ? l->shutdown : asked ? GRACE_AFTER_SIGNAL : GRACE_AFTER_FAILURE;
}

double run_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
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
    setenv("ROLE_NAME", l->role, 1);
    setenv("MASTER_ADDR", l->master_addr, 1);
    setenv("MASTER_PORT", l->master_port, 1);
    set_number("TORCHELASTIC_RESTART_COUNT", l->restart);
    set_number("TORCHELASTIC_MAX_RESTARTS", l->max_restarts);
    setenv("TORCHELASTIC_RUN_ID", l->run_id != NULL ? l->run_id : l->job, 1);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE"); /* of a torchrun around us; PyTorch's rank 0 has to open its own store */
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

/* As torchrun has it; but a directory for logs alone means all output of all ranks. */
static void choose_outputs(const launch *l, rank_process *p)
{
    int redirect = run_mask_of(l->redirects, p->rank), tee = run_mask_of(l->tee, p->rank), both = RUN_OUT | RUN_ERR;
    bool said = l->redirects != NULL || l->tee != NULL;
    p->to_file = said ? redirect | tee : l->log_dir != NULL ? both : 0;
    p->to_terminal = said ? both & ~(redirect & ~tee) : l->log_dir == NULL || p->rank == 0 ? both : 0;
    if (l->filter != NULL) {
        p->to_terminal = run_list_has(l->filter, p->rank) ? said ? p->to_terminal : both : 0;
    }
}

static bool open_log(const launch *l, rank_process *p)
{
    p->log = -1;
    if (p->to_file == 0) {
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

int run_start_rank(launch *l, int rank)
{
    rank_process *p = &l->ranks[rank];
    char *lines[2] = {p->out.line, p->err.line};
    *p = (rank_process){.rank = rank, .log = -1, .out = {-1, 1, 0, lines[0]}, .err = {-1, 2, 0, lines[1]}};
    int out[2] = {-1, -1}, err[2], report[2];
    choose_outputs(l, p);
    /* On a terminal rank 0 writes straight to it, as a program of its own would. */
    bool direct = rank == 0 && (p->to_file & RUN_OUT) == 0 && (p->to_terminal & RUN_OUT) != 0 && isatty(1);
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
    run_tell_guard(l, pid);
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

void run_stop_all(launch *l, int sig)
{
    if (!l->stopping) {
        l->stopping = true;
        l->deadline = run_now() + grace(l);
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
    bool known = l->stopping || l->failed >= 0;
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
        run_tell_guard(l, -p->pid);
        p->pid = 0;
        run_drain(l, p);
        if (failed && !known &&
            (l->failed < 0 || (WIFSIGNALED(status) && !WIFSIGNALED(l->failed_status)))) {
            l->failed = p->rank;
            l->failed_status = status;
        }
    }
    if (l->failed >= 0 && !known) {
        /* Ranks that end after SIGUSR1 do so because they were told to; the others may have something to save yet. */
        l->words = run_now() + (l->passed_on != 0 ? grace(l) : WORDS_SECONDS);
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
        if (sig == SIGUSR1 || sig == SIGUSR2) {
            l->passed_on = sig;
            signal_all(l, sig);
            continue;
        }
        if (l->got_signal != 0) {
            l->deadline = 0; /* asked twice: no more grace */
        }
        l->got_signal = sig;
        run_stop_all(l, sig);
    }
    reap(l);
}

void run_watch(launch *l)
{
    struct pollfd *fds = calloc((size_t)l->size * 2 + 1, sizeof(*fds));
    if (fds == NULL) {
        run_stop_all(l, SIGKILL);
        return;
    }
    while (running(l) > 0) {
        fds[0] = (struct pollfd){.fd = l->signals, .events = POLLIN};
        for (int r = 0; r < l->size; r++) {
            fds[2 * r + 1] = (struct pollfd){.fd = l->ranks[r].out.fd, .events = POLLIN};
            fds[2 * r + 2] = (struct pollfd){.fd = l->ranks[r].err.fd, .events = POLLIN};
        }
        bool words = l->failed >= 0 && !l->stopping;
        double left = (words ? l->words : l->deadline) - run_now();
        int timeout = (!l->stopping && !words) || l->killed ? 1000 : left <= 0 ? 0 : (int)(left * 1000) + 1;
        int n = poll(fds, (nfds_t)l->size * 2 + 1, timeout);
        for (int r = 0; r < l->size && n > 0; r++) {
            rank_process *p = &l->ranks[r];
            if (fds[2 * r + 1].revents != 0) {
                run_pump(l, p, &p->out);
            }
            if (fds[2 * r + 2].revents != 0) {
                run_pump(l, p, &p->err);
            }
        }
        on_signal(l);
        if (l->failed >= 0 && run_now() >= l->words) {
            run_stop_all(l, SIGTERM);
        }
        if (l->stopping && !l->killed && run_now() >= l->deadline) {
            l->killed = true;
            signal_all(l, SIGKILL);
        }
    }
    free(fds);
}
