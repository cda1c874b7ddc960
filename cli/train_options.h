/* What `muster train` and `muster eval` can be asked for. */
#ifndef MUSTER_CLI_TRAIN_OPTIONS_H
#define MUSTER_CLI_TRAIN_OPTIONS_H

#include "checkpoint_flags.h"
#include "flags.h"

#define MAX_CHANNELS 4

/* How --from is loaded. */
typedef struct load_flags {
    const char *key;
    flag_list rename, limits;
    bool exact_names, strict, not_strict, ignore_mismatched;
    mu_checkpoint_options file;
} load_flags;

typedef struct train_options {
    const char *command; /* "train" or "eval", for messages */
    const char *model, *data, *from, *resume, *save, *checkpoint, *log, *report, *trace;
    const char *optimizer, *schedule;
    const char *mean_text, *std_text;
    int64_t classes, head, side, ranks, replicas, epochs, steps, batch, threads, workers, warmup, decay_every, seed, crop;
    int64_t eval_every, checkpoint_every, max_restarts;
    double lr, momentum, weight_decay, label_smoothing, clip, gamma, min_lr;
    bool resume_auto; /* from --checkpoint if it is there, else as `resume` says */
    bool nesterov, shard_optimizer, sync_bn, no_shuffle, no_augment, no_flip, no_winograd, bf16, reference, quiet;
    flag_list freeze, recompute;
    load_flags load;
    float mean[MAX_CHANNELS], std[MAX_CHANNELS]; /* from the texts, or the kind of data */
    int channels_given;                          /* how many means were given; 0: the defaults */
} train_options;

extern const flag train_flags[];
extern const flag eval_flags[];

/* Parses and checks all that can be checked without building anything: values, files, folders. As flags_parse. */
int train_options_parse(train_options *o, int argc, char **argv);
int eval_options_parse(train_options *o, int argc, char **argv);

#endif
