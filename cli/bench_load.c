/* `muster bench load`: images per second of the loader, and the time to load a checkpoint into a network. */
#include "bench.h"
#include "commands.h"
#include "flags.h"
#include "progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MOST_BATCHES 100000

typedef struct load_options {
    const char *data, *checkpoint, *model;
    int64_t workers, batch, side, crop, times, channels, classes;
    double seconds;
    bool flip, shuffle, json;
} load_options;

#define AT(field) offsetof(load_options, field)

static const flag load_flags_table[] = {
    {"data", FLAG_TEXT, AT(data), "KIND:DIR", "images, as of muster train", 0, 0, FLAG_FREE},
    {"workers", FLAG_INT, AT(workers), "N", "loader threads; 0: none, load when asked (1)", 0, 256, FLAG_FREE},
    {"batch", FLAG_INT, AT(batch), "N", "images at a time (64)", 1, 1e6, FLAG_FREE},
    {"side", FLAG_INT, AT(side), "N", "image folders: resize and crop to N x N (224); of the network (32)", 8, 4096,
     FLAG_FREE},
    {"shuffle", FLAG_SWITCH, AT(shuffle), NULL, "in random order", 0, 0, FLAG_FREE},
    {"crop", FLAG_INT, AT(crop), "N", "zeros around the image before a random crop (no crop)", 0, 1024, FLAG_FREE},
    {"flip", FLAG_SWITCH, AT(flip), NULL, "random left-right flips", 0, 0, FLAG_FREE},
    {"seconds", FLAG_FLOAT, AT(seconds), "X", "how long to load images (2)", 0.001, 3600, FLAG_FREE},
    {"checkpoint", FLAG_TEXT, AT(checkpoint), "FILE", "load this checkpoint", 0, 0, FLAG_FREE},
    {"model", FLAG_TEXT, AT(model), "NAME", "into this network, as of muster train", 0, 0, FLAG_FREE},
    {"channels", FLAG_INT, AT(channels), "N", "of the network's images (3)", 1, 4096, FLAG_FREE},
    {"classes", FLAG_INT, AT(classes), "N", "outputs of the network (its default)", 1, 1e6, FLAG_FREE},
    {"times", FLAG_INT, AT(times), "N", "how often to load it, after once (5)", 1, 10000, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write one JSON object", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};

static const char command[] = "bench load";

typedef struct images_result {
    int64_t images, batches;
    double seconds;
    spread ms; /* what the loop waits for a batch */
} images_result;

/* Epochs until the time is over; the first batch, for which the threads start, counts for the waiting only. */
static bool load_images(bench *b, const load_options *o, mu_loader *l, images_result *out)
{
    mu_tape *t = mu_tape_new(b->c, &(mu_tape_options){.no_grad = true});
    double *waits = calloc(MOST_BATCHES, sizeof(*waits)), begun = 0;
    bool ok = waits != NULL && t != NULL;
    *out = (images_result){0};
    for (int64_t epoch = 0; ok && out->seconds < o->seconds && out->batches < MOST_BATCHES; epoch++) {
        ok = mu_loader_rewind(l, epoch, 0) >= 0;
        while (ok && out->seconds < o->seconds && out->batches < MOST_BATCHES) {
            mu_batch batch;
            mu_tape_reset(t);
            double before = seconds_now();
            if (!mu_loader_next(l, t, &batch)) {
                ok = mu_context_status(b->c) == MU_OK;
                break;
            }
            double now = seconds_now();
            waits[out->batches++] = 1e3 * (now - before);
            if (out->batches == 1) {
                begun = now;
            } else {
                out->images += batch.samples;
            }
            out->seconds = now - begun;
        }
    }
    if (ok && out->batches > 0) {
        out->ms = spread_of(waits, out->batches);
    }
    free(waits);
    return ok;
}

typedef struct checkpoint_result {
    spread ms;
    double bytes;
    int64_t tensors;
} checkpoint_result;

static bool load_checkpoint(const load_options *o, mu_module *net, checkpoint_result *out)
{
    double *ms = calloc((size_t)o->times, sizeof(*ms));
    struct stat info;
    bool ok = ms != NULL;
    for (int64_t i = -1; ok && i < o->times; i++) {
        mu_load_report report;
        double begun = seconds_now();
        ok = mu_load(net, o->checkpoint, NULL, &report) >= 0;
        if (ok && i >= 0) {
            ms[i] = 1e3 * (seconds_now() - begun);
            out->tensors = report.loaded;
        }
    }
    if (ok) {
        out->ms = spread_of(ms, o->times);
        out->bytes = stat(o->checkpoint, &info) == 0 ? (double)info.st_size : 0;
    }
    free(ms);
    return ok;
}

static void print_json(const load_options *o, const images_result *images, const checkpoint_result *k)
{
    json j = {0};
    json_open(&j, NULL, '{');
    if (o->data != NULL) {
        json_text(&j, "data", o->data);
        json_int(&j, "workers", o->workers);
        json_int(&j, "batch", o->batch);
        json_int(&j, "images", images->images);
        json_number(&j, "seconds", images->seconds);
        json_number(&j, "images_per_second", (double)images->images / images->seconds);
        json_spread(&j, "batch_ms", images->ms);
    }
    if (o->checkpoint != NULL) {
        json_text(&j, "checkpoint", o->checkpoint);
        json_text(&j, "model", o->model);
        json_number(&j, "bytes", k->bytes);
        json_int(&j, "tensors", k->tensors);
        json_spread(&j, "load_ms", k->ms);
    }
    json_number(&j, "peak_rss_bytes", peak_memory());
    json_close(&j);
}

static void print_text(const load_options *o, const images_result *images, const checkpoint_result *k)
{
    if (o->data != NULL) {
        printf("%s: %" PRId64 " images in %.2f s, batch %" PRId64 ", %" PRId64 " thread%s\n", o->data, images->images,
               images->seconds, o->batch, o->workers, o->workers == 1 ? "" : "s");
        printf("images/s   %.0f\nbatch      %.3f ms (fastest %.3f, 90 %% %.3f)\n", (double)images->images / images->seconds,
               images->ms.median, images->ms.min, images->ms.p90);
    }
    if (o->checkpoint != NULL) {
        printf("%s into %s: %" PRId64 " tensors, ", o->checkpoint, o->model, k->tensors);
        put_size((uint64_t)k->bytes);
        printf("\nload       %.3f ms (fastest %.3f, 90 %% %.3f), %.2f GB/s\n", k->ms.median, k->ms.min, k->ms.p90,
               1e-6 * k->bytes / k->ms.median);
    }
    printf("memory     ");
    put_size((uint64_t)peak_memory());
    printf("\n");
}

static int run(bench *b, const load_options *o)
{
    images_result images = {0};
    checkpoint_result k = {0};
    if (o->data != NULL) {
        mu_dataset *d = mu_dataset_open(b->c, o->data, &(mu_dataset_options){.side = (int)o->side});
        mu_loader *l = mu_loader_open(d, &(mu_loader_options){.batch = (int)o->batch,
                                                              .threads = o->workers > 0 ? (int)o->workers : -1,
                                                              .shuffle = o->shuffle,
                                                              .crop_padding = (int)o->crop,
                                                              .flip = o->flip});
        if (l == NULL) {
            return bench_fail(b, true);
        }
        if (!load_images(b, o, l, &images)) {
            return bench_fail(b, false);
        }
        mu_loader_close(l);
    }
    if (o->checkpoint != NULL) {
        mu_module *net = mu_model(b->c, o->model,
                                  &(mu_model_options){.classes = (int)o->classes,
                                                      .in_channels = (int)o->channels,
                                                      .side = (int)o->side});
        if (net == NULL || !load_checkpoint(o, net, &k)) {
            return bench_fail(b, true);
        }
    }
    if (o->json) {
        print_json(o, &images, &k);
    } else {
        print_text(o, &images, &k);
    }
    return bench_close(b, CLI_OK, false);
}

int bench_load(int argc, char **argv, bench_words whole)
{
    load_options o = {.workers = 1, .batch = 64, .seconds = 2, .times = 5, .channels = 3};
    (void)whole;
    int code = flags_parse(command, "Measures the loader, or how long a checkpoint takes into a network, or both.",
                           load_flags_table, &o, argc, argv);
    if (code >= 0) {
        return code;
    }
    if (o.data == NULL && o.checkpoint == NULL) {
        return cli_usage_error(command, "which --data, or which --checkpoint?");
    }
    if ((o.checkpoint == NULL) != (o.model == NULL)) {
        return cli_usage_error(command, "--checkpoint and --model go together");
    }
    bench b;
    code = bench_open(&b, command, NULL, 0, true);
    return code >= 0 ? code : run(&b, &o);
}
