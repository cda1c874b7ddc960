/* Flags of `muster train` and `muster eval`, and the checks that need nothing built. */
#include "train_options.h"
#include "commands.h"
#include "relaunch.h"

#include <muster/layers.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define AT(field) offsetof(train_options, field)
#define BIG 1e15
#define UNSET (-1.0)

/* What both take. */
#define NETWORK_FLAGS                                                                                                  \
    {"model", FLAG_TEXT, AT(model), "NAME", "network: resnet20 32 44 56 (CIFAR form), resnet18 34 50, cnn, mlp", 0, 0, \
     FLAG_SAME},                                                                                                       \
    {"data", FLAG_TEXT, AT(data), "KIND:DIR", "idx:DIR, cifar:DIR or folder:DIR (DIR/[train/]CLASS/IMAGE)", 0, 0,      \
     FLAG_SAME},                                                                                                       \
    {"classes", FLAG_INT, AT(classes), "N", "only the first N classes of the data", 1, 1e6, FLAG_SAME}

#define INPUT_FLAGS                                                                                                    \
    {"side", FLAG_INT, AT(side), "N", "image folders: resize and crop to N x N (224)", 8, 4096, FLAG_SAME},            \
    {"mean", FLAG_TEXT, AT(mean_text), "A,B,C", "mean of each channel, pixels in [0, 1] (by the kind of data)", 0, 0,  \
     FLAG_SAME},                                                                                                       \
    {"std", FLAG_TEXT, AT(std_text), "A,B,C", "standard deviation of each channel (by the kind of data)", 0, 0,        \
     FLAG_SAME}

#define MACHINE_FLAGS                                                                                                  \
    {"ranks", FLAG_INT, AT(ranks), "N", "ranks on this machine (1, or those of the launcher)", 1, 4096, FLAG_ASKED},    \
    {"threads", FLAG_INT, AT(threads), "N", "compute threads of each rank (OMP_NUM_THREADS, else 1)", 1, 1024,         \
     FLAG_FREE},                                                                                                       \
    {"workers", FLAG_INT, AT(workers), "N", "loader threads of each rank (1)", 1, 256, FLAG_FREE},                     \
    {"no-winograd", FLAG_SWITCH, AT(no_winograd), NULL, "direct convolutions only", 0, 0, FLAG_WARN},                  \
    {"bf16", FLAG_SWITCH, AT(bf16), NULL, "mixed precision: layers compute in bfloat16", 0, 0, FLAG_WARN},             \
    {"reference", FLAG_SWITCH, AT(reference), NULL, "plain C kernels only: slow, the oracle", 0, 0, FLAG_WARN}

/* How --from is read. */
#define FROM_FLAGS                                                                                                     \
    {"key", FLAG_TEXT, AT(load.key), "PATH", "state dict in --from's file (found by itself)", 0, 0, FLAG_FREE},        \
    {"rename", FLAG_LIST, AT(load.rename), "FROM=TO",                                                                  \
     "change names of --from's file by extended regular expression (repeatable, in order)", 0, 0, FLAG_FREE},          \
    {"exact-names", FLAG_SWITCH, AT(load.exact_names), NULL,                                                           \
     "take names as they are: no module., _orig_mod., model., net. removed or added", 0, 0, FLAG_FREE},                \
    {"not-strict", FLAG_SWITCH, AT(load.not_strict), NULL, "names that are missing or too many are no error", 0, 0,    \
     FLAG_FREE},                                                                                                       \
    {"ignore-mismatched", FLAG_SWITCH, AT(load.ignore_mismatched), NULL, "tensors of other shapes are skipped", 0, 0,  \
     FLAG_FREE},                                                                                                       \
    {"limit", FLAG_LIST, AT(load.limits), "NAME=N", "what --from's file may ask for, as of muster inspect", 0, 0,      \
     FLAG_FREE},                                                                                                       \
    {"no-checksum", FLAG_SWITCH, AT(load.file.no_checksum), NULL, "do not verify --from's checksums", 0, 0, FLAG_FREE}, \
    {"big-endian", FLAG_SWITCH, AT(load.file.big_endian), NULL, "of a --from that does not tell its byte order", 0, 0, \
     FLAG_FREE}

const flag train_flags[] = {
    NETWORK_FLAGS,
    {"from", FLAG_TEXT, AT(from), "FILE", "start from a PyTorch checkpoint's weights", 0, 0, FLAG_FREE},
    FROM_FLAGS,
    {"strict", FLAG_SWITCH, AT(load.strict), NULL, "with --head too every name must be in --from's file", 0, 0, FLAG_FREE},
    {"head", FLAG_INT, AT(head), "N", "replace the last layer by a new one for N classes", 1, 1e6, FLAG_SAME},
    {"freeze", FLAG_LIST, AT(freeze), "GLOB", "do not train parameters of that name, e.g. 'layer1.*' (repeatable)", 0,
     0, FLAG_SAME},
    {"recompute", FLAG_LIST, AT(recompute), "GLOB",
     "activation checkpointing of modules of that name, e.g. 'layer?.?': less memory (repeatable)", 0, 0, FLAG_FREE},
    {"sync-bn", FLAG_SWITCH, AT(sync_bn), NULL, "batch norm over the batches of all ranks together", 0, 0, FLAG_WARN},
    {"epochs", FLAG_INT, AT(epochs), "N", "passes over the data (1); the schedule's length", 1, 1e9, FLAG_WARN},
    {"steps", FLAG_INT, AT(steps), "N", "stop after N steps in all; without --epochs also the schedule's length", 1,
     BIG, FLAG_FREE},
    {"batch", FLAG_INT, AT(batch), "N", "images per step and rank (64)", 1, 1e6, FLAG_ASKED},
    {"optimizer", FLAG_CHOICE, AT(optimizer), "sgd|adam|adamw", "update rule (sgd)", 0, 0, FLAG_SAME},
    {"lr", FLAG_FLOAT, AT(lr), "X", "learning rate (0.1 for sgd, 0.001 for adam and adamw)", 0, 1e6, FLAG_WARN},
    {"momentum", FLAG_FLOAT, AT(momentum), "X", "of sgd (0.9)", 0, 1, FLAG_WARN},
    {"nesterov", FLAG_SWITCH, AT(nesterov), NULL, "Nesterov's momentum", 0, 0, FLAG_WARN},
    {"weight-decay", FLAG_FLOAT, AT(weight_decay), "X", "(0.0005 for sgd, 0 for adam, 0.01 for adamw)", 0, 1e6,
     FLAG_WARN},
    {"shard-optimizer", FLAG_SWITCH, AT(shard_optimizer), NULL,
     "each rank keeps its part of the optimiser's state alone: less memory, same results", 0, 0, FLAG_FREE},
    {"schedule", FLAG_CHOICE, AT(schedule), "constant|step|cosine", "of the learning rate (cosine)", 0, 0, FLAG_WARN},
    {"warmup", FLAG_INT, AT(warmup), "N", "steps of linear warm-up (0)", 0, BIG, FLAG_WARN},
    {"decay-every", FLAG_INT, AT(decay_every), "N", "schedule step: epochs between decays (a third of all)", 1, 1e9,
     FLAG_WARN},
    {"gamma", FLAG_FLOAT, AT(gamma), "X", "schedule step: factor of each decay (0.1)", 0, 1, FLAG_WARN},
    {"min-lr", FLAG_FLOAT, AT(min_lr), "X", "schedule cosine: where it ends (0)", 0, 1e6, FLAG_WARN},
    {"label-smoothing", FLAG_FLOAT, AT(label_smoothing), "X", "of the cross-entropy (0)", 0, 0.999, FLAG_WARN},
    {"clip", FLAG_FLOAT, AT(clip), "X", "scale gradients to a joint norm of at most X", 1e-12, 1e12, FLAG_WARN},
    {"seed", FLAG_INT, AT(seed), "N", "of initial values, order and augmentation (0)", 0, BIG, FLAG_SAME},
    {"no-shuffle", FLAG_SWITCH, AT(no_shuffle), NULL, "images in the data's order", 0, 0, FLAG_SAME},
    {"no-augment", FLAG_SWITCH, AT(no_augment), NULL, "no random crops and flips", 0, 0, FLAG_SAME},
    {"crop", FLAG_INT, AT(crop), "N", "zeros around the image before a random crop (an eighth of its side)", 0, 1024,
     FLAG_SAME},
    {"no-flip", FLAG_SWITCH, AT(no_flip), NULL, "no random left-right flips (digits, text)", 0, 0, FLAG_SAME},
    INPUT_FLAGS,
    MACHINE_FLAGS,
    {"data-parallel", FLAG_INT, AT(replicas), "N", "replicas in threads of each rank, each with its part of the batch (1)",
     1, 256, FLAG_WARN},
    {"save", FLAG_TEXT, AT(save), "FILE", "write the weights at the end, as a PyTorch checkpoint", 0, 0, FLAG_FREE},
    {"checkpoint", FLAG_TEXT, AT(checkpoint), "FILE", "write all training state each epoch, at the end and at SIGTERM",
     0, 0, FLAG_FREE},
    {"checkpoint-every", FLAG_INT, AT(checkpoint_every), "N", "also every N steps", 1, BIG, FLAG_FREE},
    {"resume", FLAG_TEXT, AT(resume), "FILE",
     "go on from a --checkpoint file, bit for bit, or from a PyTorch program's training file; auto: from --checkpoint if "
     "it is there", 0, 0, FLAG_FREE},
    {"eval-every", FLAG_INT, AT(eval_every), "N", "test every N epochs; 0: only at the end (1)", 0, 1e9, FLAG_FREE},
    {"max-restarts", FLAG_INT, AT(max_restarts), "K",
     "when a rank fails, start all again from --checkpoint, at most K times (0)", 0, 1e6, FLAG_FREE},
    {"log", FLAG_TEXT, AT(log), "FILE", "write one line of JSON for each step", 0, 0, FLAG_FREE},
    {"report", FLAG_TEXT, AT(report), "FILE", "write rank 0's report of the reductions at the end, as JSON; -: print it",
     0, 0, FLAG_FREE},
    {"trace", FLAG_TEXT, AT(trace), "FILE",
     "write what each rank does, and when, for Perfetto; t.json becomes t.RANK.json", 0, 0,
     FLAG_FREE},
    {"quiet", FLAG_SWITCH, AT(quiet), NULL, "print the result only", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};

const flag eval_flags[] = {
    NETWORK_FLAGS,
    {"from", FLAG_TEXT, AT(from), "FILE", "PyTorch checkpoint with the weights", 0, 0, FLAG_FREE},
    FROM_FLAGS,
    {"head", FLAG_INT, AT(head), "N", "outputs of the network, where not the data's classes", 1, 1e6, FLAG_SAME},
    {"batch", FLAG_INT, AT(batch), "N", "images at a time and rank (64)", 1, 1e6, FLAG_FREE},
    INPUT_FLAGS,
    MACHINE_FLAGS,
    {"quiet", FLAG_SWITCH, AT(quiet), NULL, "print the result only", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};

static int parse_channels(const train_options *o, const char *name, const char *text, float *out, int *count)
{
    *count = 0;
    for (const char *p = text; *p != '\0';) {
        char *end = NULL;
        float value = strtof(p, &end);
        if (end == p || (*end != ',' && *end != '\0') || !isfinite(value) || *count == MAX_CHANNELS) {
            return cli_usage_error(o->command, "--%s needs up to %d numbers with commas between, not '%s'", name,
                                   MAX_CHANNELS, text);
        }
        out[(*count)++] = value;
        p = end + (*end == ',');
    }
    return -1;
}

/* The usual constants; for idx those of Fashion-MNIST, for folders those of ImageNet. */
static void default_statistics(train_options *o)
{
    static const float grey[2][1] = {{0.2860f}, {0.3530f}};
    static const float cifar[2][3] = {{0.4914f, 0.4822f, 0.4465f}, {0.2470f, 0.2435f, 0.2616f}};
    static const float image[2][3] = {{0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}};
    if (strncmp(o->data, "idx:", 4) == 0) {
        o->mean[0] = grey[0][0];
        o->std[0] = grey[1][0];
        return;
    }
    const float(*from)[3] = strncmp(o->data, "cifar:", 6) == 0 ? cifar : image;
    memcpy(o->mean, from[0], sizeof(from[0]));
    memcpy(o->std, from[1], sizeof(from[1]));
}

static int check_statistics(train_options *o)
{
    int means = 0, stds = 0;
    default_statistics(o);
    if (o->mean_text == NULL && o->std_text == NULL) {
        return -1;
    }
    if (o->mean_text == NULL || o->std_text == NULL) {
        return cli_usage_error(o->command, "--mean and --std go together");
    }
    int code = parse_channels(o, "mean", o->mean_text, o->mean, &means);
    if (code < 0) {
        code = parse_channels(o, "std", o->std_text, o->std, &stds);
    }
    if (code >= 0) {
        return code;
    }
    if (means != stds) {
        return cli_usage_error(o->command, "--mean has %d numbers and --std %d", means, stds);
    }
    for (int i = 0; i < stds; i++) {
        if (o->std[i] <= 0) {
            return cli_usage_error(o->command, "--std must be above 0, not %g", o->std[i]);
        }
    }
    o->channels_given = means;
    return -1;
}

static int check_model(const train_options *o)
{
    const char *const *names = mu_model_names();
    char list[512] = "";
    for (int i = 0; names[i] != NULL; i++) {
        if (strcmp(names[i], o->model) == 0) {
            return -1;
        }
        size_t used = strlen(list);
        snprintf(list + used, sizeof(list) - used, " %s", names[i]);
    }
    return cli_usage_error(o->command, "no network '%s'; there are:%s", o->model, list);
}

static int check_data(const train_options *o)
{
    const char *dir = strchr(o->data, ':');
    struct stat info;
    if (dir == NULL || (strncmp(o->data, "idx:", 4) != 0 && strncmp(o->data, "cifar:", 6) != 0 &&
                        strncmp(o->data, "folder:", 7) != 0)) {
        return cli_usage_error(o->command, "--data is idx:DIR, cifar:DIR or folder:DIR, not '%s'", o->data);
    }
    if (stat(dir + 1, &info) != 0) {
        return cli_usage_error(o->command, "--data %s: %s", dir + 1, strerror(errno));
    }
    if (!S_ISDIR(info.st_mode)) {
        return cli_usage_error(o->command, "--data %s: not a folder", dir + 1);
    }
    return -1;
}

static int check_readable(const train_options *o, const char *name, const char *path)
{
    struct stat info;
    if (path == NULL) {
        return -1;
    }
    if (stat(path, &info) != 0 || access(path, R_OK) != 0) {
        return cli_usage_error(o->command, "--%s %s: %s", name, path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) { /* of a directory, opening it names the checkpoint in it */
        return cli_usage_error(o->command, "--%s %s: not a file", name, path);
    }
    return -1;
}

/* That the file's folder can be written, before hours of training end with a file that cannot. */
static int check_writable(const train_options *o, const char *name, const char *path)
{
    if (path == NULL) {
        return -1;
    }
    char folder[4096];
    struct stat info;
    if ((size_t)snprintf(folder, sizeof(folder), "%s", path) >= sizeof(folder)) {
        return cli_usage_error(o->command, "--%s: a path of %zu bytes", name, strlen(path));
    }
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        return cli_usage_error(o->command, "--%s %s: a folder, not a file", name, path);
    }
    char *slash = strrchr(folder, '/');
    if (slash == NULL) {
        strcpy(folder, ".");
    } else {
        slash[slash == folder] = '\0';
    }
    if (stat(folder, &info) != 0 || access(folder, W_OK | X_OK) != 0) {
        return cli_usage_error(o->command, "--%s %s: cannot write in %s: %s", name, path, folder, strerror(errno));
    }
    if (!S_ISDIR(info.st_mode)) {
        return cli_usage_error(o->command, "--%s %s: %s is not a folder", name, path, folder);
    }
    return -1;
}

static int check_load(train_options *o)
{
    load_flags *l = &o->load;
    if (l->strict && l->not_strict) {
        return cli_usage_error(o->command, "--strict and --not-strict exclude each other");
    }
    for (int i = 0; i < l->limits.count; i++) {
        const char *problem = checkpoint_limit_set(&l->file, l->limits.item[i]);
        if (problem != NULL) {
            return cli_usage_error(o->command, "--limit %s: %s", l->limits.item[i], problem);
        }
    }
    const char *given = l->key != NULL            ? "key"
                        : l->rename.count > 0     ? "rename"
                        : l->exact_names          ? "exact-names"
                        : l->strict               ? "strict"
                        : l->not_strict           ? "not-strict"
                        : l->ignore_mismatched    ? "ignore-mismatched"
                        : l->limits.count > 0     ? "limit"
                        : l->file.no_checksum     ? "no-checksum"
                        : l->file.big_endian      ? "big-endian"
                                                  : NULL;
    if (given != NULL && o->from == NULL) {
        return cli_usage_error(o->command, "--%s says how --from is read, which is missing", given);
    }
    return -1;
}

static int check_common(train_options *o)
{
    int code;
    if (o->model == NULL) {
        return cli_usage_error(o->command, "--model is missing");
    }
    if (o->data == NULL) {
        return cli_usage_error(o->command, "--data is missing");
    }
    if ((code = check_model(o)) >= 0 || (code = check_data(o)) >= 0 || (code = check_statistics(o)) >= 0 ||
        (code = check_readable(o, "from", o->from)) >= 0 || (code = check_load(o)) >= 0) {
        return code;
    }
    return -1;
}

static void fill_defaults(train_options *o)
{
    bool sgd = strcmp(o->optimizer, "sgd") == 0;
    if (o->lr < 0) {
        o->lr = sgd ? 0.1 : 0.001;
    }
    if (o->weight_decay < 0) {
        o->weight_decay = sgd ? 0.0005 : strcmp(o->optimizer, "adamw") == 0 ? 0.01 : 0;
    }
    if (o->epochs == 0 && o->steps == 0) {
        o->epochs = 1;
    }
}

/* Ranks that are started again go on from --checkpoint, so what is there when they are first started has to be theirs. */
static int check_restarts(train_options *o)
{
    if (o->max_restarts == 0) {
        return -1;
    }
    if (o->checkpoint == NULL) {
        return cli_usage_error("train", "--max-restarts goes on from --checkpoint, which is missing");
    }
    if (!in_launcher()) {
        bool from_it = o->resume_auto || (o->resume != NULL && strcmp(o->resume, o->checkpoint) == 0);
        if (!from_it && access(o->checkpoint, F_OK) == 0) {
            return cli_usage_error("train", "--max-restarts would go on from %s, which is there already: --resume auto begins "
                                   "with it, or remove it", o->checkpoint);
        }
        return -1;
    }
    if (!launcher_restarts()) {
        return cli_usage_error("train", "--max-restarts starts ranks of this machine again; under mpirun or srun the whole "
                               "command is to be started again, with --resume auto");
    }
    o->resume_auto = o->resume_auto || launcher_restart() > 0;
    return -1;
}

int train_options_parse(train_options *o, int argc, char **argv)
{
    *o = (train_options){.command = "train",   .optimizer = "sgd",    .schedule = "cosine", .batch = 64, .workers = 1,
                         .replicas = 1,         .crop = -1,           .eval_every = 1,       .lr = UNSET,          .momentum = UNSET,
                         .weight_decay = UNSET, .gamma = 0.1};
    int code = flags_parse("train", "Trains a network and prints its accuracy on the test data.", train_flags, o, argc,
                           argv);
    if (code >= 0 || (code = check_common(o)) >= 0) {
        return code;
    }
    if (strcmp(o->optimizer, "sgd") != 0 && (o->momentum >= 0 || o->nesterov)) {
        return cli_usage_error("train", "--momentum and --nesterov belong to --optimizer sgd");
    }
    if (o->momentum < 0) {
        o->momentum = 0.9;
    }
    if (o->nesterov && o->momentum == 0) {
        return cli_usage_error("train", "--nesterov needs a --momentum above 0");
    }
    if (o->replicas > 1 && o->sync_bn) {
        return cli_usage_error("train", "--sync-bn and --data-parallel exclude each other: replicas are no ranks");
    }
    if (o->checkpoint_every > 0 && o->checkpoint == NULL) {
        return cli_usage_error("train", "--checkpoint-every says when --checkpoint is written, which is missing");
    }
    if (o->resume != NULL && strcmp(o->resume, "auto") == 0) {
        if (o->checkpoint == NULL) {
            return cli_usage_error("train", "--resume auto goes on from --checkpoint, which is missing");
        }
        o->resume_auto = true;
        o->resume = NULL;
    }
    if ((code = check_restarts(o)) >= 0 || (code = check_readable(o, "resume", o->resume)) >= 0 || (code = check_writable(o, "save", o->save)) >= 0 ||
        (code = check_writable(o, "checkpoint", o->checkpoint)) >= 0 ||
        (code = check_writable(o, "log", o->log)) >= 0 ||
        (code = check_writable(o, "report", o->report)) >= 0 || (code = check_writable(o, "trace", o->trace)) >= 0) {
        return code;
    }
    fill_defaults(o);
    return -1;
}

int eval_options_parse(train_options *o, int argc, char **argv)
{
    *o = (train_options){.command = "eval", .optimizer = "sgd", .schedule = "constant", .batch = 64, .workers = 1};
    int code = flags_parse("eval", "Prints accuracy and loss of a checkpoint on the test data.", eval_flags, o, argc,
                           argv);
    if (code >= 0 || (code = check_common(o)) >= 0) {
        return code;
    }
    if (o->from == NULL) {
        return cli_usage_error("eval", "--from is missing");
    }
    return -1;
}
