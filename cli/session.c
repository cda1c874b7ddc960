/* Setting up a run: data, network, checkpoint, head, ranks, optimiser. */
#include "session.h"
#include "commands.h"
#include "ranked.h"
#include "stop.h"
#include "train_state.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void session_say(const session *s, const char *format, ...)
{
    if (s->rank != 0 || s->rehearsal || s->o->quiet) {
        return;
    }
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    fflush(stdout);
}

const char *with_commas(int64_t n, char out[32])
{
    char digits[32];
    int length = snprintf(digits, sizeof(digits), "%" PRId64, n), used = 0;
    for (int i = 0; i < length; i++) {
        if (i > (digits[0] == '-') && (length - i) % 3 == 0) {
            out[used++] = ',';
        }
        out[used++] = digits[i];
    }
    out[used] = '\0';
    return out;
}

/* A rehearsal's warnings come again in the run, if there is one. */
static void log_line(void *user, mu_log_level level, const char *message)
{
    const session *s = user;
    FILE *to = s->rehearsal ? s->held : stderr;
    if (to != NULL) {
        ranked_log(to, s->o->command, s->rank, s->size, level, message);
    }
}

int session_open(session *s, train_options *o, bool rehearsal)
{
    *s = (session){.o = o, .rehearsal = rehearsal, .size = 1};
    s->c = mu_context_open(&(mu_context_options){
        .seed = (uint64_t)o->seed,
        .threads = (int)o->threads,
        .kernels = o->reference ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT,
        .no_winograd = o->no_winograd,
        .log = log_line,
        .log_user = s,
    });
    if (s->c == NULL) {
        return cli_fail(o->command, CLI_FAILED, "out of memory");
    }
    if (o->trace != NULL) {
        unsetenv("MUSTER_TRACE"); /* the flag counts */
    }
    s->held = rehearsal ? open_memstream(&s->held_text, &s->held_bytes) : NULL;
    s->world = rehearsal ? mu_group_self(s->c) : mu_group_from_env(s->c);
    bool traced = o->trace != NULL && !rehearsal;
    if (s->world == NULL || (traced && mu_trace_open(s->c, s->world, o->trace, NULL) < 0)) {
        return session_close(s, CLI_FAILED, true);
    }
    s->rank = mu_group_rank(s->world);
    s->size = mu_group_size(s->world);
    if (!rehearsal && o->ranks > 0 && o->ranks != s->size) {
        int size = s->size;
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command, "--ranks %d, but this was started with %d ranks", (int)o->ranks, size);
    }
    if (o->ranks == 0) {
        o->ranks = s->size;
    }
    return -1;
}

static void end_rehearsal(session *s, bool refused)
{
    if (s->held == NULL) {
        return;
    }
    if (fclose(s->held) == 0 && refused) {
        fputs(s->held_text, stderr);
    }
    free(s->held_text);
    s->held = NULL;
    s->held_text = NULL;
}

int session_close(session *s, int code, bool early)
{
    end_rehearsal(s, mu_context_status(s->c) < 0 || code != CLI_OK);
    stop_forget_context();
    code = ranked_close(s->c, s->o->command, s->rank, s->size, code, early);
    free(s->note);
    free(s->logits);
    free(s->labels);
    s->c = NULL;
    s->note = NULL;
    s->logits = NULL;
    s->labels = NULL;
    return code;
}

static bool has_parts(const char *data)
{
    if (strncmp(data, "folder:", 7) != 0) {
        return true;
    }
    char path[4096];
    struct stat info;
    snprintf(path, sizeof(path), "%s/train", data + 7);
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* -1, or the exit code. */
static int open_data(session *s, bool train)
{
    train_options *o = s->o;
    mu_dataset_options options = {.first_classes = (int)o->classes, .side = (int)o->side};
    if (train) {
        s->train = mu_dataset_open(s->c, o->data, &options);
    }
    options.split = MU_SPLIT_TEST;
    s->test = mu_dataset_open(s->c, o->data, &options);
    s->no_test = !has_parts(o->data);
    if (mu_context_status(s->c) < 0) {
        return session_close(s, CLI_FAILED, true);
    }
    mu_dims d = mu_dataset_dims(s->test);
    s->classes = mu_dataset_classes(s->test);
    if (d.ndim != 3 || mu_dataset_count(s->test) == 0 || (train && mu_dataset_count(s->train) == 0)) {
        session_close(s, CLI_USAGE, true);
        return cli_fail(o->command, CLI_USAGE, "--data %s holds no images", o->data);
    }
    if (o->channels_given > 0 && o->channels_given != d.dim[0]) {
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command, "--mean has %d numbers, the images have %d channels", o->channels_given,
                               (int)d.dim[0]);
    }
    if (o->classes > s->classes) {
        int classes = s->classes;
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command, "--classes %d, but the data has %d", (int)o->classes, classes);
    }
    if (o->head > 0 && o->head < s->classes) {
        int classes = s->classes;
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command, "--head %d is too small for the data's %d classes", (int)o->head, classes);
    }
    s->outputs = o->head > 0 ? (int)o->head : s->classes;
    return -1;
}

static int open_network(session *s)
{
    mu_dims d = mu_dataset_dims(s->test);
    bool square = strcmp(s->o->model, "cnn") != 0 && strcmp(s->o->model, "mlp") != 0;
    if (!square && d.dim[1] != d.dim[2]) {
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(s->o->command, "%s needs square images, these are %d x %d", s->o->model, (int)d.dim[1],
                               (int)d.dim[2]);
    }
    s->net = mu_model(s->c, s->o->model,
                      &(mu_model_options){.classes = s->outputs, .in_channels = (int)d.dim[0], .side = (int)d.dim[1]});
    s->whole = s->net;
    return s->net != NULL ? -1 : session_close(s, CLI_FAILED, true);
}

/* Loads --from. With --head, weights that do not fit are skipped and named, and the head is new in any case: names too
 * may be missing then, unless --strict. */
static int load_from(session *s)
{
    const train_options *o = s->o;
    bool new_head = o->head > 0 && strcmp(o->command, "train") == 0;
    const load_flags *l = &o->load;
    const char *rename[FLAG_LIST_MAX + 1] = {NULL};
    mu_load_report report;
    memcpy(rename, l->rename.item, (size_t)l->rename.count * sizeof(rename[0]));
    mu_status status = mu_load(s->net, o->from,
                               &(mu_load_options){.not_strict = l->not_strict || (new_head && !l->strict),
                                                  .skip_mismatched = l->ignore_mismatched || new_head,
                                                  .key = l->key,
                                                  .rename = rename,
                                                  .exact_names = l->exact_names,
                                                  .file = &l->file,
                                                  .group = s->size > 1 ? s->world : NULL},
                               &report);
    if (status < 0) {
        int code = session_close(s, CLI_FAILED, true);
        if (status == MU_ERR_SHAPE && o->head == 0 && s->rank == 0 && strcmp(o->command, "train") == 0) {
            fprintf(stderr, "Try 'muster train --head N': a new last layer, for other classes than the checkpoint's.\n");
        }
        return code;
    }
    session_say(s, "%s%s", report.text, report.text[0] != '\0' && report.text[strlen(report.text) - 1] != '\n' ? "\n" : "");
    if (new_head) {
        const char *head = mu_model_head(s->net);
        if (mu_model_replace_head(s->net, (int)o->head) < 0) {
            return session_close(s, CLI_FAILED, true);
        }
        session_say(s, "head %s: new, for %d classes; the checkpoint's is not used\n", head != NULL ? head : "?",
                    (int)o->head);
    }
    return -1;
}

/* One image of zeros through the network: shapes that cannot fit are found before anything is written. */
static int try_forward(session *s)
{
    mu_dims d = mu_dataset_dims(s->test);
    mu_tape *t = mu_tape_new(s->c, &(mu_tape_options){.no_grad = true, .bf16 = s->o->bf16});
    mu_module_train(s->net, false);
    mu_tensor *y = mu_forward(t, s->net, mu_tensor_zeros(t, MU_DIMS(1, d.dim[0], d.dim[1], d.dim[2])));
    if (y == NULL) {
        return session_close(s, CLI_FAILED, true);
    }
    mu_dims out = mu_tensor_dims(y);
    if (out.ndim != 2 || out.dim[1] != s->outputs) {
        session_close(s, CLI_USAGE, true);
        return cli_fail(s->o->command, CLI_USAGE, "the network's output is not (images, %d)", s->outputs);
    }
    mu_module_train(s->net, true);
    mu_tape_free(t);
    return -1;
}

static int freeze(session *s)
{
    for (int i = 0; i < s->o->freeze.count; i++) {
        int64_t count = 0;
        if (mu_module_freeze(s->net, s->o->freeze.item[i], &count) < 0) {
            return session_close(s, CLI_FAILED, true);
        }
        session_say(s, "frozen: %" PRId64 " parameters match %s\n", count, s->o->freeze.item[i]);
    }
    return -1;
}

static int recompute(session *s)
{
    for (int i = 0; i < s->o->recompute.count; i++) {
        int64_t count = 0;
        if (mu_module_checkpoint(s->net, s->o->recompute.item[i], true, &count) < 0) {
            return session_close(s, CLI_FAILED, true);
        }
        session_say(s, "computed again in backward: %" PRId64 " modules match %s\n", count, s->o->recompute.item[i]);
    }
    return -1;
}

static int synchronise_norms(session *s)
{
    int64_t count = 0;
    if (s->o->sync_bn && mu_sync_batch_norm_convert(s->net, s->world, &count) < 0) {
        return session_close(s, CLI_FAILED, true);
    }
    if (s->o->sync_bn) {
        session_say(s, "synchronised over the ranks: %" PRId64 " batch norms\n", count);
    }
    return -1;
}

static int replicate(session *s)
{
    int replicas = (int)s->o->replicas;
    if (replicas > 1) {
        s->whole = mu_data_parallel(s->net, &(mu_data_parallel_options){.replicas = replicas});
        if (s->whole == NULL) {
            return session_close(s, CLI_FAILED, true);
        }
        session_say(s, "each batch in parts: %d replicas in threads\n", replicas);
    }
    return -1;
}

static bool make_optimizer(session *s)
{
    const train_options *o = s->o;
    float lr = (float)o->lr, decay = (float)o->weight_decay;
    mu_group *shard = o->shard_optimizer ? s->world : NULL;
    if (strcmp(o->optimizer, "sgd") == 0) {
        s->optimizer = mu_sgd(s->net, lr, &(mu_sgd_options){.momentum = (float)o->momentum, .weight_decay = decay,
                                                            .nesterov = o->nesterov, .shard = shard});
    } else if (strcmp(o->optimizer, "adam") == 0) {
        s->optimizer = mu_adam(s->net, lr, &(mu_adam_options){.weight_decay = decay, .shard = shard});
    } else {
        /* A zero field would mean adamw's own default; a zero that was asked for is "none". */
        s->optimizer = mu_adamw(s->net, lr, &(mu_adam_options){.weight_decay = decay > 0 ? decay : -1, .shard = shard});
    }
    if (s->optimizer != NULL && mu_optimizer_ranks(s->optimizer) > 1) {
        session_say(s, "optimiser's state shared by %d ranks: %.1f MB on this one\n", mu_optimizer_ranks(s->optimizer),
                    (double)mu_optimizer_state_bytes(s->optimizer) / 1e6);
    }
    return s->optimizer != NULL;
}

static bool open_loaders(session *s)
{
    const train_options *o = s->o;
    mu_dims d = mu_dataset_dims(s->test);
    mu_loader_options options = {.batch = (int)o->batch, .shard = mu_group_shard(s->world), .threads = (int)o->workers};
    memcpy(options.mean, o->mean, sizeof(o->mean));
    memcpy(options.std, o->std, sizeof(o->std));
    s->test_loader = mu_loader_open(s->test, &options);
    s->test_tape = mu_tape_new(s->c, &(mu_tape_options){.no_grad = true, .bf16 = o->bf16});
    if (s->train != NULL) {
        options.shuffle = !o->no_shuffle;
        options.seed = (uint64_t)o->seed;
        if (!o->no_augment) {
            options.crop_padding = o->crop >= 0 ? (int)o->crop : (int)(d.dim[1] / 8);
            options.flip = !o->no_flip;
        }
        s->loader = mu_loader_open(s->train, &options);
        s->tape = mu_tape_new(s->c, &(mu_tape_options){.bf16 = o->bf16});
    }
    return mu_context_status(s->c) >= 0;
}

static int make_schedule(session *s)
{
    const train_options *o = s->o;
    s->steps_per_epoch = mu_loader_steps(s->loader);
    int64_t whole = o->epochs > 0 ? o->epochs * s->steps_per_epoch : o->steps;
    if (o->warmup >= whole) {
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command, "--warmup %" PRId64 " is as long as the run of %" PRId64 " steps", o->warmup,
                               whole);
    }
    int64_t third = whole / 3 > 0 ? whole / 3 : 1;
    s->schedule = (mu_schedule){
        .kind = strcmp(o->schedule, "cosine") == 0 ? MU_SCHEDULE_COSINE
                : strcmp(o->schedule, "step") == 0 ? MU_SCHEDULE_STEP
                                                   : MU_SCHEDULE_CONSTANT,
        .lr = (float)o->lr,
        .warmup_steps = o->warmup,
        .step_size = o->decay_every > 0 ? o->decay_every * s->steps_per_epoch : third,
        .gamma = (float)o->gamma,
        .total_steps = whole,
        .min_lr = (float)o->min_lr,
    };
    return -1;
}

int session_setup_train(session *s)
{
    int code;
    if ((code = train_state_choose(s)) >= 0 || (code = open_data(s, true)) >= 0 || (code = open_network(s)) >= 0) {
        return code;
    }
    /* A resumed run's weights come from its state file; --from only says where it once began. */
    if (s->o->from != NULL && s->o->resume == NULL && (code = load_from(s)) >= 0) {
        return code;
    }
    if ((code = try_forward(s)) >= 0 || (code = freeze(s)) >= 0 || (code = recompute(s)) >= 0 ||
        (code = synchronise_norms(s)) >= 0 || (code = replicate(s)) >= 0) {
        return code;
    }
    s->note = flags_note(train_flags, s->o);
    if (!s->rehearsal) {
        s->ddp = mu_ddp_wrap(s->whole, s->world, NULL);
    }
    if (!make_optimizer(s) || !open_loaders(s)) {
        return session_close(s, CLI_FAILED, true);
    }
    if ((code = make_schedule(s)) >= 0 || (code = train_state_resume(s)) >= 0) {
        return code;
    }
    return -1;
}

int session_setup_eval(session *s)
{
    int code;
    if ((code = open_data(s, false)) >= 0 || (code = open_network(s)) >= 0 || (code = load_from(s)) >= 0 ||
        (code = try_forward(s)) >= 0) {
        return code;
    }
    return s->rehearsal || open_loaders(s) ? -1 : session_close(s, CLI_FAILED, true);
}
