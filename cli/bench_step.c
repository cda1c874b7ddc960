/* `muster bench step`: training steps on one batch that stays the same. A step is what a program's loop has between two
 * batches: the tape's reset, forward, loss, backward (of the reducer, with ranks), the optimiser. */
#include "bench_step.h"
#include "commands.h"
#include "flags.h"
#include "progress.h"
#include "relaunch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(step_options, field)

static const flag step_flags[] = {
    {"model", FLAG_TEXT, AT(model), "NAME", "network, as of muster train", 0, 0, FLAG_FREE},
    {"channels", FLAG_INT, AT(channels), "N", "of the images (3)", 1, 4096, FLAG_FREE},
    {"side", FLAG_INT, AT(side), "N", "height and width of the images (32)", 1, 16384, FLAG_FREE},
    {"classes", FLAG_INT, AT(classes), "N", "outputs of the network (its default)", 1, 1e6, FLAG_FREE},
    {"batch", FLAG_INT, AT(batch), "N", "images per step and rank (32)", 1, 1e6, FLAG_FREE},
    {"cifar-stem", FLAG_SWITCH, AT(cifar_stem), NULL,
     "resnet18 34 50: a first convolution of 3 x 3, stride 1, and no max pooling", 0, 0, FLAG_FREE},
    {"from", FLAG_TEXT, AT(from), "FILE", "initial weights, a checkpoint", 0, 0, FLAG_FREE},
    {"batch-from", FLAG_TEXT, AT(batch_from), "FILE",
     "a checkpoint with tensors x and y, whose parts are the ranks' batches (made-up ones)", 0, 0, FLAG_FREE},
    {"optimizer", FLAG_CHOICE, AT(optimizer), "sgd|adam", "update rule (sgd)", 0, 0, FLAG_FREE},
    {"lr", FLAG_FLOAT, AT(lr), "X", "learning rate (0.01 for sgd, 0.001 for adam)", 0, 1e6, FLAG_FREE},
    {"momentum", FLAG_FLOAT, AT(momentum), "X", "of sgd (0.9)", 0, 1, FLAG_FREE},
    {"weight-decay", FLAG_FLOAT, AT(weight_decay), "X", "(0)", 0, 1e6, FLAG_FREE},
    {"steps", FLAG_INT, AT(steps), "N", "steps measured (20)", 1, 1e6, FLAG_FREE},
    {"warmup", FLAG_INT, AT(warmup), "N", "steps before them (3)", 0, 1e6, FLAG_FREE},
    {"ranks", FLAG_INT, AT(ranks), "N", "ranks on this machine (1, or those of the launcher)", 1, 4096, FLAG_FREE},
    {"no-ddp", FLAG_SWITCH, AT(no_ddp), NULL, "the ranks train apart, and only begin together", 0, 0, FLAG_FREE},
    {"threads", FLAG_INT, AT(threads), "N", "compute threads of each rank (OMP_NUM_THREADS, else 1)", 1, 1024, FLAG_FREE},
    {"data-parallel", FLAG_INT, AT(replicas), "N", "replicas in threads of each rank (none)", 1, 1024, FLAG_FREE},
    {"no-winograd", FLAG_SWITCH, AT(no_winograd), NULL, "direct convolutions only", 0, 0, FLAG_FREE},
    {"profile", FLAG_SWITCH, AT(profile), NULL, "time by kind of kernel, which takes some itself", 0, 0, FLAG_FREE},
    {"bf16", FLAG_SWITCH, AT(bf16), NULL, "mixed precision: layers compute in bfloat16", 0, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write one JSON object", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};

static const char command[] = "bench step";

static int parse(step_options *o, int argc, char **argv)
{
    *o = (step_options){.optimizer = "sgd",
                        .channels = 3,
                        .side = 32,
                        .batch = 32,
                        .steps = 20,
                        .warmup = 3,
                        .lr = -1,
                        .momentum = 0.9};
    int code = flags_parse(command, "Trains on one batch that stays the same, and measures the steps.", step_flags, o, argc,
                           argv);
    if (code >= 0) {
        return code;
    }
    if (o->model == NULL) {
        return cli_usage_error(command, "which --model?");
    }
    if (o->lr < 0) {
        o->lr = strcmp(o->optimizer, "adam") == 0 ? 0.001 : 0.01;
    }
    return -1;
}

static mu_dims batch_dims(const step_options *o)
{
    return MU_DIMS(o->batch, o->channels, o->side, o->side);
}

/* As the usual ResNets for images of 32 x 32 differ from those for large ones. */
static int put_cifar_stem(step_run *r)
{
    mu_module *first = mu_module_get(r->net, "conv1");
    if (first == NULL || mu_module_get(r->net, "maxpool") == NULL) {
        bench_close(&r->b, CLI_USAGE, true);
        return cli_usage_error(command, "--cifar-stem is for resnet18, resnet34 and resnet50, not %s", r->o->model);
    }
    mu_module *stem = mu_conv2d_layer(r->b.c, r->o->channels, 64, 3,
                                      &(mu_conv_options){.stride = 1,
                                                         .padding = 1,
                                                         .no_bias = true,
                                                         .init = {MU_INIT_KAIMING_NORMAL, 0}});
    if (mu_module_replace(r->net, "conv1", stem) < 0 ||
        mu_module_replace(r->net, "maxpool", mu_identity_layer(r->b.c)) < 0) {
        return bench_fail(&r->b, true);
    }
    return -1;
}

/* All that can be refused. -1, or the exit code. */
static int build(step_run *r, int ranks)
{
    const step_options *o = r->o;
    r->net = mu_model(r->b.c, o->model,
                      &(mu_model_options){.classes = (int)o->classes, .in_channels = (int)o->channels, .side = (int)o->side});
    if (r->net == NULL) {
        return bench_fail(&r->b, true);
    }
    int code = o->cifar_stem ? put_cifar_stem(r) : -1;
    if (code < 0 && o->batch_from != NULL) {
        code = bench_batch_check(&r->b, o->batch_from, ranks, batch_dims(o));
    }
    return code;
}

static bool set_up(step_run *r)
{
    const step_options *o = r->o;
    mu_group *world = r->b.size > 1 ? r->b.world : NULL;
    if (o->from != NULL && mu_load(r->net, o->from, &(mu_load_options){.group = world}, NULL) < 0) {
        return false;
    }
    char head[256];
    snprintf(head, sizeof(head), "%s.weight", mu_model_head(r->net));
    int64_t classes = mu_tensor_dim(mu_parameter_tensor(mu_module_get_parameter(r->net, head)), 0);
    if (o->replicas > 0) {
        r->net = mu_data_parallel(r->net, &(mu_data_parallel_options){.replicas = (int)o->replicas});
    }
    if (world != NULL && !o->no_ddp) {
        r->ddp = mu_ddp_wrap(r->net, world, NULL);
    }
    r->optimizer = strcmp(o->optimizer, "adam") == 0
                       ? mu_adam(r->net, (float)o->lr, &(mu_adam_options){.weight_decay = (float)o->weight_decay})
                       : mu_sgd(r->net, (float)o->lr, &(mu_sgd_options){.momentum = (float)o->momentum,
                                                                        .weight_decay = (float)o->weight_decay});
    r->tape = mu_tape_new(r->b.c, &(mu_tape_options){.bf16 = o->bf16});
    r->seconds = calloc((size_t)o->steps, sizeof(double));
    r->losses = calloc((size_t)(o->warmup + o->steps), sizeof(double));
    return mu_context_status(r->b.c) == MU_OK && r->seconds != NULL && r->losses != NULL &&
           bench_batch_make(&r->b, o->batch_from, batch_dims(o), classes, &r->batch);
}

static bool one_step(step_run *r, double *loss_out)
{
    mu_tape_reset(r->tape);
    mu_tensor *loss = mu_cross_entropy(r->tape, mu_forward(r->tape, r->net, r->batch.x), r->batch.y);
    *loss_out = (double)mu_tensor_item(loss);
    mu_status status = r->ddp != NULL ? mu_ddp_backward(r->ddp, r->tape, loss) : mu_backward(r->tape, loss);
    return status == MU_OK && mu_optimizer_step(r->optimizer) >= 0;
}

static bool measure(step_run *r)
{
    const step_options *o = r->o;
    if (mu_barrier(r->b.world) < 0) {
        return false;
    }
    for (int64_t i = 0; i < o->warmup + o->steps; i++) {
        if (i == o->warmup) {
            mu_context_counters(r->b.c, &r->before);
            mu_context_profile_reset(r->b.c);
        }
        double begun = seconds_now();
        if (!one_step(r, &r->losses[i])) {
            return false;
        }
        if (i >= o->warmup) {
            r->seconds[i - o->warmup] = seconds_now() - begun;
        }
        if (i == 0) {
            r->first_step_after = seconds_since_start();
        }
    }
    mu_context_counters(r->b.c, &r->after);
    return true;
}

/* Puts together what the ranks found; all of it on every rank. */
static bool gather(step_run *r, step_result *out)
{
    const step_options *o = r->o;
    int64_t steps = o->steps, size = r->b.size;
    double mine[] = {peak_memory(), r->first_step_after};
    uint64_t flops = r->after.flops - r->before.flops;
    *out = (step_result){
        .count = o->warmup + steps, .job = launcher_memory(), .gflop = 1e-9 * (double)flops / (double)steps};
    double *seconds = bench_gather(&r->b, r->seconds, steps);
    double *losses = seconds != NULL ? bench_gather(&r->b, r->losses, out->count) : NULL;
    double *others = losses != NULL ? bench_gather(&r->b, mine, 2) : NULL;
    out->rank_ms = calloc((size_t)size, sizeof(double));
    out->losses = calloc((size_t)out->count, sizeof(double));
    bool ok = others != NULL && out->rank_ms != NULL && out->losses != NULL;
    for (int64_t k = 0; ok && k < size; k++) {
        for (int64_t i = 0; i < steps; i++) {
            seconds[k * steps + i] *= 1e3;
        }
        out->rank_ms[k] = spread_of(seconds + k * steps, steps).median;
        for (int64_t i = 0; i < out->count; i++) {
            out->losses[i] += losses[k * out->count + i] / (double)size;
        }
        const double *other = others + k * 2;
        out->peak = other[0] > out->peak ? other[0] : out->peak;
        out->job += other[0];
        out->first_step_after = other[1] > out->first_step_after ? other[1] : out->first_step_after;
    }
    if (ok) {
        out->ms = spread_of(seconds, size * steps);
        out->images_per_second = 1e3 * (double)(size * o->batch) / out->ms.median;
    }
    free(seconds);
    free(losses);
    free(others);
    return ok;
}

static int run(step_run *r)
{
    step_result s = {0};
    bool ok = set_up(r);
    if (!ok) {
        return bench_fail(&r->b, true);
    }
    ok = measure(r) && gather(r, &s);
    if (ok && r->b.rank == 0) {
        if (r->o->json) {
            bench_step_print_json(r, &s);
        } else {
            bench_step_print_text(r, &s);
        }
    }
    free(s.losses);
    free(s.rank_ms);
    return ok ? bench_close(&r->b, CLI_OK, false) : bench_fail(&r->b, false);
}

int bench_step(int argc, char **argv, bench_words whole)
{
    static step_options o;
    int code = parse(&o, argc, argv);
    if (code >= 0) {
        return code;
    }
    step_run r = {.o = &o};
    bool start_ranks = o.ranks > 1 && !in_launcher();
    code = bench_open(&r.b, command,
                      &(mu_context_options){
                          .threads = (int)o.threads, .no_winograd = o.no_winograd, .profile = o.profile},
                      o.ranks, start_ranks);
    if (code < 0) {
        code = build(&r, start_ranks ? (int)o.ranks : r.b.size);
    }
    if (code >= 0) {
        return code;
    }
    if (start_ranks) {
        code = bench_close(&r.b, CLI_OK, true);
        return code != CLI_OK ? code : relaunch((int)o.ranks, 0, whole.argc, whole.argv);
    }
    code = run(&r);
    free(r.seconds);
    free(r.losses);
    return code;
}
