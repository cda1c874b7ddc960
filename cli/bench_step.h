/* What `muster bench step` is asked for, holds while it runs, and finds: bench_step.c measures, bench_step_print.c tells. */
#ifndef MUSTER_CLI_BENCH_STEP_H
#define MUSTER_CLI_BENCH_STEP_H

#include "bench_batch.h"

typedef struct step_options {
    const char *model, *from, *batch_from, *optimizer;
    int64_t channels, side, classes, batch, ranks, threads, replicas, steps, warmup;
    double lr, momentum, weight_decay;
    bool cifar_stem, no_ddp, no_winograd, profile, bf16, json;
} step_options;

typedef struct step_run {
    bench b;
    const step_options *o;
    mu_module *net;
    mu_ddp *ddp; /* NULL: one rank, or ranks apart */
    mu_optimizer *optimizer;
    mu_tape *tape;
    bench_batch batch;
    double *seconds; /* of each measured step */
    double *losses;  /* of each step, warm-up too */
    double first_step_after; /* seconds since the process, or its launcher, began */
    mu_counters before, after; /* the measured steps */
} step_run;

typedef struct step_result {
    spread ms;                /* of all ranks' steps */
    double images_per_second; /* of all ranks */
    double peak, job;         /* bytes: of the largest rank, and of all and the launcher */
    double first_step_after;
    double gflop;             /* of a step of this rank */
    int64_t count;            /* of losses */
    double *losses;           /* mean over the ranks */
    double *rank_ms;          /* median of each rank */
} step_result;

void bench_step_print_json(const step_run *r, const step_result *s);
void bench_step_print_text(const step_run *r, const step_result *s);

#endif
