/* The launcher's parts: run.c (the whole), run_options.c, run_restarts.c (all ranks, once or again), run_ranks.c (starting,
 * watching and ending them), run_guard.c (for when the launcher is killed), run_output.c (what ranks print). */
#ifndef MUSTER_CLI_RUN_H
#define MUSTER_CLI_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define RUN_MOST_RANKS 1024
#define RUN_LINE_BYTES 65536
#define RUN_LAST_BYTES 512
#define RUN_OUT 1 /* a rank's streams, in masks */
#define RUN_ERR 2

typedef struct stream {
    int fd;      /* read end, -1: closed */
    int to;      /* 1 or 2 of the launcher */
    size_t used;
    char *line;  /* RUN_LINE_BYTES: an unfinished line */
} stream;

typedef struct rank_process {
    int rank;
    pid_t pid;   /* and process group; 0: not running */
    int log;     /* file, or -1 */
    int to_file, to_terminal; /* masks */
    stream out, err;
    char last[RUN_LAST_BYTES]; /* last non-empty line on stderr */
} rank_process;

typedef struct launch {
    int size, max_restarts, restart;
    int shutdown;                               /* seconds, -1: not said */
    const char *log_dir, *redirects, *tee, *filter; /* the latter three as the user wrote them, checked */
    const char *master_addr, *master_port, *role, *run_id;
    char **program;
    char job[64], port[16], made_dir[4096];
    rank_process *ranks;
    int signals, guard_fd;
    pid_t guard;
    bool stopping;   /* SIGTERM was sent to all */
    bool killed;     /* SIGKILL too */
    double deadline; /* when it is */
    int failed;      /* first rank that failed, -1: none */
    double words;    /* until when the others may say what they saw of it, before they are sent SIGTERM */
    int failed_status;
    int got_signal;  /* that the launcher itself was sent, and that ends the ranks */
    int passed_on;   /* the latest that it was sent and that need not: SIGUSR1, SIGUSR2 */
    bool mute[3];    /* nobody reads this output of the launcher any more */
} launch;

/* run_options.c. CLI_OK, CLI_USAGE, or -1: help was printed. */
int run_parse(launch *l, int argc, char **argv);
/* The streams (RUN_OUT, RUN_ERR) that an option as "3" or "0:1,2:3" has for the rank. */
int run_mask_of(const char *spec, int rank);
/* 1 where a list as "0,2" has the rank or there is no list. */
int run_list_has(const char *list, int rank);

/* run_restarts.c. Until all have ended well, or failed too often; the exit code, with the message printed. */
int run_all(launch *l);

/* run_guard.c. The guard is a process that ends all ranks should the launcher be killed. */
bool run_start_guard(launch *l);
void run_end_guard(launch *l);
/* A process group has begun; a negative number: it has ended. */
void run_tell_guard(launch *l, pid_t group);

/* run_ranks.c */
/* CLI_OK, or an exit code with the message printed. */
int run_start_rank(launch *l, int rank);
void run_stop_all(launch *l, int sig);
/* Until all ranks have ended. */
void run_watch(launch *l);
double run_now(void); /* seconds, monotonic */

/* run_output.c. Reads once; false when there was nothing: at the end of the stream, which is then closed, or for now. */
bool run_pump(launch *l, rank_process *p, stream *s);
/* What a rank wrote before it ended is already in the pipe; what its own children may still write is not waited for. */
void run_drain(launch *l, rank_process *p);

#endif
