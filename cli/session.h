/* Everything a training or evaluation run holds on one rank: network, data, optimiser, and the ranks it belongs to.
 * The same code checks a run before its ranks are started (a group of one, nothing printed) and sets up each rank. */
#ifndef MUSTER_CLI_SESSION_H
#define MUSTER_CLI_SESSION_H

#include "train_options.h"

#include <muster/muster.h>

/* What the epoch has come to so far; the same on all ranks, and kept in --checkpoint. */
typedef struct tally {
    double loss;    /* sum over the epoch's images */
    int64_t images;
    int64_t skips;  /* steps in a row that a rank could not do */
} tally;

typedef struct session {
    train_options *o;
    mu_context *c;
    mu_group *world;
    int rank, size;
    bool rehearsal;            /* only checks that the run can be set up */
    FILE *held;                /* its warnings, printed if there will be no run */
    char *held_text;
    size_t held_bytes;
    mu_dataset *train, *test;
    bool no_test;              /* the data has no test part: `test` is the training data */
    mu_module *net;            /* what is saved, by its own names */
    mu_module *whole;          /* what runs: net, or the replicas around it */
    mu_ddp *ddp;
    mu_optimizer *optimizer;
    mu_loader *loader, *test_loader;
    mu_tape *tape, *test_tape; /* recording, and not */
    mu_schedule schedule;
    mu_training state;         /* where the run is: epoch, step in it, step in all */
    tally tally;
    char *note;                /* the options that a resumed run must share */
    int64_t steps_per_epoch, last_step;
    int classes, outputs;
    float *logits;             /* scratch of evaluation */
    int64_t *labels;
    size_t logits_count, labels_count;
} session;

/* What evaluation found, over all ranks. */
typedef struct score {
    int64_t correct, count;
    double loss; /* mean over count */
} score;

/* Opens context and ranks. Returns -1 to go on, otherwise the exit code after a message. */
int session_open(session *s, train_options *o, bool rehearsal);
int session_setup_train(session *s);
int session_setup_eval(session *s);

/* Accuracy and loss on the test data, each image exactly once. Collective. False on error (in the context). */
bool session_evaluate(session *s, score *out);

/* Frees all. Prints the context's error if there is one; early: it came before any work was done, so that bad input
 * is CLI_USAGE. Returns the exit code; code when there is no error. */
int session_close(session *s, int code, bool early);

/* printf on rank 0 to stdout, unless quiet or a rehearsal. */
void session_say(const session *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* 42000 -> "42,000"; out holds 32 bytes. */
const char *with_commas(int64_t n, char out[32]);

#endif
