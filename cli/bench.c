/* `muster bench`: picks the part, and what the parts share. */
#include "bench.h"
#include "commands.h"
#include "ranked.h"
#include "relaunch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const struct part {
    const char *name, *what;
    int (*run)(int argc, char **argv, bench_words whole);
} parts[] = {
    {"step", "time of training steps, memory, and time to the first step", bench_step},
    {"allreduce", "time of the mean over ranks, beside what the memory allows", bench_allreduce},
    {"load", "images per second of the loader, time to load a checkpoint", bench_load},
    {"machine", "peak of the cores and bandwidth of the memory", bench_machine},
};

static void print_parts(FILE *out)
{
    fprintf(out, "usage: muster bench PART [OPTION...]\nMeasures this machine and Muster on it.\n\n");
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        fprintf(out, "  %-9s %s\n", parts[i].name, parts[i].what);
    }
    fprintf(out, "\n'muster bench PART --help' lists a part's options. All take --json.\n"
                 "Exit codes: 0 done, 1 failed while running, 2 bad flags or input (nothing was done).\n");
}

int cmd_bench(int argc, char **argv)
{
    if (argc < 2) {
        print_parts(stderr);
        return CLI_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_parts(stdout);
        return CLI_OK;
    }
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (strcmp(parts[i].name, argv[1]) == 0) {
            return parts[i].run(argc - 1, argv + 1, (bench_words){argc, argv});
        }
    }
    return cli_usage_error("bench", "no part '%s'", argv[1]);
}

/* -- context and ranks --------------------------------------------------------------------------------------------- */

static void log_line(void *user, mu_log_level level, const char *message)
{
    const bench *b = user;
    ranked_log(stderr, b->command, b->rank, b->size, level, message);
}

int bench_open(bench *b, const char *command, const mu_context_options *options, int64_t ranks, bool alone)
{
    mu_context_options with_log = options != NULL ? *options : (mu_context_options){0};
    *b = (bench){.command = command, .size = 1};
    with_log.log = log_line;
    with_log.log_user = b;
    b->c = mu_context_open(&with_log);
    if (b->c == NULL) {
        return cli_fail(command, CLI_FAILED, "out of memory");
    }
    b->world = alone ? mu_group_self(b->c) : mu_group_from_env(b->c);
    if (b->world == NULL) {
        return bench_close(b, CLI_FAILED, true);
    }
    b->rank = mu_group_rank(b->world);
    b->size = mu_group_size(b->world);
    if (!alone && ranks > 0 && ranks != b->size) {
        int size = b->size;
        bench_close(b, CLI_USAGE, true);
        return cli_usage_error(command, "--ranks %d, but this was started with %d ranks", (int)ranks, size);
    }
    return -1;
}

int bench_close(bench *b, int code, bool early)
{
    code = ranked_close(b->c, b->command, b->rank, b->size, code, early);
    b->c = NULL;
    return code;
}

int bench_fail(bench *b, bool early)
{
    if (mu_context_status(b->c) == MU_OK) {
        cli_fail(b->command, CLI_FAILED, "out of memory");
    }
    return bench_close(b, CLI_FAILED, early);
}

double *bench_gather(bench *b, const double *x, int64_t n)
{
    double *all = malloc((size_t)(n * b->size) * sizeof(*all));
    if (all == NULL || mu_all_gather(b->world, x, all, (size_t)n * sizeof(*x)) < 0) {
        free(all);
        return NULL;
    }
    return all;
}

/* -- numbers ------------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

spread spread_of(double *x, int64_t n)
{
    qsort(x, (size_t)n, sizeof(*x), by_value);
    return (spread){
        .median = 0.5 * (x[(n - 1) / 2] + x[n / 2]), .min = x[0], .p10 = x[(n - 1) / 10], .p90 = x[n - 1 - (n - 1) / 10]};
}

void json_spread(json *j, const char *key, spread s)
{
    json_open(j, key, '{');
    json_number(j, "median", s.median);
    json_number(j, "min", s.min);
    json_number(j, "p10", s.p10);
    json_number(j, "p90", s.p90);
    json_close(j);
}

/* -- what the system says of processes ----------------------------------------------------------------------------- */

static double peak_of(pid_t pid)
{
    char path[64], line[256];
    double kilobytes = 0;
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, "VmHWM:", 6) == 0) {
            kilobytes = strtod(line + 6, NULL);
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return kilobytes * 1024;
}

double peak_memory(void)
{
    return peak_of(getpid());
}

double launcher_memory(void)
{
    return in_launcher() ? peak_of(getppid()) : 0;
}

/* Clock ticks after the machine's start, 0 when not to be had: proc(5), field 22 of stat. An exec leaves it as it is, so
 * a launcher's is that of the command that was typed. */
static double started_at(pid_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    size_t n = f != NULL ? fread(text, 1, sizeof(text) - 1, f) : 0;
    if (f != NULL) {
        fclose(f);
    }
    text[n] = '\0';
    char *p = strrchr(text, ')'); /* ends field 2, a name that may hold spaces */
    for (int field = 2; p != NULL && field < 22; field++) {
        p = strchr(p + 1, ' ');
    }
    return p != NULL ? strtod(p, NULL) : 0;
}

double seconds_since_start(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec -
           started_at(in_launcher() ? getppid() : getpid()) / (double)sysconf(_SC_CLK_TCK);
}
