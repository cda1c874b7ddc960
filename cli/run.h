/* The launcher's parts: run.c (options, attempts), run_ranks.c (starting and ending), run_output.c (what ranks print). */
#ifndef MUSTER_CLI_RUN_H
#define MUSTER_CLI_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define RUN_MOST_RANKS 1024
#define RUN_LINE_BYTES 65536
#define RUN_LAST_BYTES 512

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
    stream out, err;
    char last[RUN_LAST_BYTES]; /* last non-empty line on stderr */
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
    double words;    /* until when the others may say what they saw of it, before they are sent SIGTERM */
    int failed_status;
    int got_signal;  /* that the launcher itself was sent */
    bool mute[3];    /* nobody reads this output of the launcher any more */
} launch;

/* run_ranks.c. The guard is a process that ends all ranks should the launcher be killed. */
bool run_start_guard(launch *l);
void run_end_guard(launch *l);
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
