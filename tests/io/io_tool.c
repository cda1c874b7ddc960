/* A small program for the oracle scripts: loads, saves and trains through the public interface, as a user would.
 * Prints what mu_load reports; exits 1 with the message on stderr when something fails. */
#include "tool_steps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mu_module *network(mu_context *c, const char *name)
{
    if (strcmp(name, "small") == 0) { /* conv, batch norm, relu, flatten, linear on 3 x 6 x 6 */
        mu_module *m = mu_sequential(c);
        MU_OR_DIE(c, mu_sequential_append(m, mu_conv2d_layer(c, 3, 4, 3, &(mu_conv_options){.padding = 1})));
        MU_OR_DIE(c, mu_sequential_append(m, mu_batch_norm_layer(c, 4, NULL)));
        MU_OR_DIE(c, mu_sequential_append(m, mu_relu_layer(c)));
        MU_OR_DIE(c, mu_sequential_append(m, mu_flatten_layer(c)));
        MU_OR_DIE(c, mu_sequential_append(m, mu_linear(c, 144, 5, NULL)));
        return m;
    }
    if (strcmp(name, "tied") == 0) { /* two linear layers with one weight */
        mu_module *m = mu_module_new(c, "Tied", NULL);
        mu_module *a = mu_linear(c, 6, 6, NULL), *b = mu_module_new(c, "Linear", NULL);
        MU_OR_DIE(c, mu_module_add(m, "a", a));
        MU_OR_DIE(c, mu_module_add(m, "b", b));
        MU_OR_DIE(c, mu_module_share(b, "weight", mu_module_get_parameter(m, "a.weight")));
        mu_module_parameter(b, "bias", MU_DIMS(6), (mu_init){.kind = MU_INIT_UNIFORM, .value = 1});
        return m;
    }
    return mu_model(c, name, NULL);
}

static mu_optimizer *optimizer(mu_module *m, const char *name)
{
    if (strcmp(name, "sgd") == 0) {
        return mu_sgd(m, 0.05f, &(mu_sgd_options){.momentum = 0.9f, .weight_decay = 1e-3f});
    }
    if (strcmp(name, "plain") == 0) {
        return mu_sgd(m, 0.05f, NULL);
    }
    return strcmp(name, "adam") == 0 ? mu_adam(m, 0.01f, NULL) : mu_adamw(m, 0.01f, NULL);
}

/* logits MODEL CHECKPOINT INPUT OUTPUT: raw float32 images of 3 x 32 x 32 in, raw logits out. */
static void logits(mu_context *c, char **a)
{
    mu_module *m = network(c, a[0]);
    mu_load_report r;
    MU_OR_DIE(c, mu_load(m, a[1], NULL, &r));
    printf("%s", r.text);
    FILE *in = fopen(a[2], "rb"), *out = fopen(a[3], "wb");
    static float x[64 * 3072], y[64 * 10];
    size_t n = in != NULL ? fread(x, 3072 * sizeof(float), 64, in) : 0;
    if (n == 0 || out == NULL) {
        exit(2);
    }
    mu_module_train(m, false);
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.no_grad = true});
    mu_tensor *result = mu_forward(t, m, mu_tensor_from(t, MU_DIMS((int64_t)n, 3, 32, 32), x));
    MU_OR_DIE(c, mu_tensor_read(result, y, (int64_t)n * 10));
    fwrite(y, 10 * sizeof(float), n, out);
    fclose(in);
    fclose(out);
}

/* Scheme, axis, and each scale with its zero point, of the entry of that name. */
static void quantization(mu_context *c, const char *path, const char *name)
{
    mu_checkpoint_file *k = mu_checkpoint_open(c, path);
    for (int64_t i = 0; k != NULL && i < mu_checkpoint_count(k); i++) {
        mu_quantization q;
        if (strcmp(mu_checkpoint_get(k, i).name, name) == 0 && mu_checkpoint_quantization(k, i, &q) == MU_OK) {
            printf("%s %d", q.scheme != NULL ? q.scheme : "none", q.axis);
            for (int64_t j = 0; j < q.count; j++) {
                printf(" %.17g:%.17g", q.scales[j], q.zero_points[j]);
            }
            putchar('\n');
        }
    }
    MU_OR_DIE(c, mu_context_status(c));
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    char **a = argv + 2;
    int n = argc - 2;
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 7, .log_level = MU_LOG_WARN});
    if (strcmp(command, "save") == 0 && n >= 2) { /* save MODEL OUT [PREFIX [FORMAT]] */
        mu_module *m = network(c, a[0]);
        const char *format = n > 3 ? a[3] : "torch";
        mu_file_format f = strcmp(format, "legacy") == 0        ? MU_FORMAT_LEGACY
                           : strcmp(format, "safetensors") == 0 ? MU_FORMAT_SAFETENSORS
                                                                : MU_FORMAT_TORCH;
        MU_OR_DIE(c, mu_save(m, a[1], &(mu_save_options){.prefix = n > 2 ? a[2] : NULL, .format = f}));
    } else if (strcmp(command, "convert") == 0 && n >= 3) { /* convert MODEL IN OUT [loose] [KEY|- [RENAME]...]: load, save */
        mu_module *m = network(c, a[0]);
        mu_load_report r;
        mu_load_options o = {.not_strict = n > 3 && strcmp(a[3], "loose") == 0,
                             .key = n > 4 && strcmp(a[4], "-") != 0 ? a[4] : NULL,
                             .rename = n > 5 ? (const char *const *)(a + 5) : NULL}; /* argv ends with NULL */
        MU_OR_DIE(c, mu_load(m, a[1], &o, &r));
        MU_OR_DIE(c, mu_save(m, a[2], NULL));
        printf("removed=%s added=%s loaded=%lld missing=%lld unexpected=%lld\n%s", r.prefix_removed, r.prefix_added,
               (long long)r.loaded, (long long)r.missing, (long long)r.unexpected, r.text);
    } else if (strcmp(command, "quantization") == 0 && n == 2) {
        quantization(c, a[0], a[1]);
    } else if (strcmp(command, "logits") == 0 && n == 4) {
        logits(c, a);
    } else if (strcmp(command, "train") == 0 && n == 4) { /* train OPTIMIZER FROM COUNT OUT, FROM 0: new, else resumes OUT */
        mu_training t = {.model = network(c, "small"), .note = "a note", .seed = UINT64_MAX - 1};
        t.optimizer = optimizer(t.model, a[0]);
        int from = atoi(a[1]), count = atoi(a[2]);
        if (from > 0) {
            MU_OR_DIE(c, mu_training_load(&t, a[3], NULL));
            printf("epoch=%lld step_in_epoch=%lld step=%lld seed=%llu note=%s\n", (long long)t.epoch,
                   (long long)t.step_in_epoch, (long long)t.step, (unsigned long long)t.seed,
                   t.note != NULL ? t.note : "(none)");
        }
        tool_steps(c, t.model, t.optimizer, NULL, from, count);
        t.step = from + count;
        t.epoch = t.step / 3;
        t.step_in_epoch = t.step % 3;
        MU_OR_DIE(c, mu_training_save(&t, a[3]));
    } else {
        fprintf(stderr, "usage: io_tool save|convert|logits|train ...\n");
        return 2;
    }
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
