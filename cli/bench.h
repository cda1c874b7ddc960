/* `muster bench`: what its parts share. Each part is a small program of its own: it opens a context and the ranks,
 * measures, gathers what the ranks found, and rank 0 prints it for people or as one JSON object. */
#ifndef MUSTER_CLI_BENCH_H
#define MUSTER_CLI_BENCH_H

#include "json.h"

#include <muster/muster.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct bench {
    const char *command; /* "bench step", for messages */
    mu_context *c;
    mu_group *world;
    int rank, size;
} bench;

/* The parts. argv[0] is the part's name. whole is the command line from "bench" on, for starting it again on ranks. */
typedef struct bench_words {
    int argc;
    char **argv;
} bench_words;
int bench_allreduce(int argc, char **argv, bench_words whole);
int bench_load(int argc, char **argv, bench_words whole);
int bench_machine(int argc, char **argv, bench_words whole);
int bench_step(int argc, char **argv, bench_words whole);

/* Opens context and ranks; ranks 0: as many as there are. alone: a group of one, to check the input before any rank is
 * started. Returns -1 to go on, otherwise the exit code after a message. */
int bench_open(bench *b, const char *command, const mu_context_options *options, int64_t ranks, bool alone);
/* Frees all. Prints the context's error if there is one; early: nothing was measured yet, so that bad input is CLI_USAGE.
 * Returns the exit code; code when there is no error. */
int bench_close(bench *b, int code, bool early);

/* After a failure whose error is the context's, or that memory ran out. */
int bench_fail(bench *b, bool early);

/* How measurements lie. */
typedef struct spread {
    double median, min, p10, p90;
} spread;
spread spread_of(double *x, int64_t n); /* sorts x */
void json_spread(json *j, const char *key, spread s);

/* Every rank's n numbers on every rank, in rank order: malloc'ed, of size * n; NULL on error (in the context). Collective. */
double *bench_gather(bench *b, const double *x, int64_t n);

/* This process' largest resident memory so far, and its launcher's (0 where there is none), in bytes. */
double peak_memory(void);
double launcher_memory(void);
/* Seconds since this process was started, or where a launcher started it, since that was; to a hundredth. */
double seconds_since_start(void);

#endif
