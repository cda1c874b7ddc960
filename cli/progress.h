/* What a person sees while a run goes on: a bar on a terminal, a line every few seconds elsewhere. The bar goes to
 * standard error, or to standard output where only that is the terminal: under `muster run` rank 0 has it so. */
#ifndef MUSTER_CLI_PROGRESS_H
#define MUSTER_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct progress {
    bool on, tty;
    int fd;                       /* of the terminal */
    FILE *out;
    int64_t epochs;               /* 0: the run is given in steps */
    int64_t steps_per_epoch, first_step, last_step;
    int64_t offset;               /* added to a step to tell its epoch: a run that other ranks began; 0 */
    double started, shown;        /* seconds */
    double loss_sum;              /* since the last display */
    int64_t loss_count;
    double images;                /* since started */
    double paused;                /* seconds spent on other things, e.g. evaluation */
} progress;

/* Seconds of a clock that only goes forward. */
double seconds_now(void);
/* Processor seconds that this rank has used, all its threads: what a busy machine does not change much. */
double cpu_seconds(void);

void progress_start(progress *p, bool on, int64_t epochs, int64_t steps_per_epoch, int64_t first, int64_t last);
/* After `step` steps in all. loss is the step's, images over all ranks. Shows only now and then. */
void progress_step(progress *p, int64_t step, double loss, int64_t images, double lr);
/* Takes the bar away, so that other lines can be printed. */
void progress_clear(progress *p);
/* Time that does not count as training. */
void progress_pause(progress *p, double seconds);
/* Images per second since the start. */
double progress_rate(const progress *p);
/* Seconds trained. */
double progress_seconds(const progress *p);

#endif
