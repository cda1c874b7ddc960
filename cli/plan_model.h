/* What a training step over MPI would take on so many ranks: a small simulation of one rank, which stands for all of them.
 * Knows nothing of files or flags. */
#ifndef MUSTER_CLI_PLAN_MODEL_H
#define MUSTER_CLI_PLAN_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct plan_network {
    double bytes_per_second;        /* of each rank, in each direction; may be INFINITY, as all rates here */
    double latency;                 /* seconds from one rank to another */
    double overhead;                /* seconds of the sender's processor for each message */
    double reduce_bytes_per_second; /* what a rank adds up */
} plan_network;

typedef struct plan_parameter {
    int64_t bytes;
    double ready; /* seconds since backward began */
} plan_parameter;

/* What was recorded of a step on one rank, without communication. */
typedef struct plan_step {
    double forward, backward; /* seconds */
    int64_t count;
    plan_parameter *parameter; /* in the order in which they became ready */
} plan_step;

typedef struct plan_result {
    double step, exposed; /* seconds; exposed: what communication adds to the step */
    double link;          /* seconds in which the rank's link is busy */
    int64_t buckets, messages;
} plan_result;

/* Buckets are cut as the reducer cuts them: the first at first_bytes, the others at bucket_bytes. False: out of memory. */
bool plan_predict(const plan_step *s, int ranks, const plan_network *net, int64_t bucket_bytes, int64_t first_bytes,
                  plan_result *out);

#endif
