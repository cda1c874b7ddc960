/* Writes what a network of the zoo computes, for zoo_oracle.py to compare with PyTorch:
 *
 *   zoo_dump MODEL SIDE CHANNELS CLASSES BATCH [reference] [seed=N] [checkpoint=PATTERN] >records
 *
 * Records, in this order: the text of the tree, state before, input, labels, logits in evaluation mode, logits in
 * training mode, loss, gradients, state after, logits in evaluation mode again. Not a test by itself. */
#include "base/rng.h"
#include <muster/layers.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* name '\0', a letter for the type, ndim as one byte, dims as int64, elements. */
static void record(const char *name, char type, mu_dims d, const void *data, size_t bytes)
{
    fwrite(name, 1, strlen(name) + 1, stdout);
    fputc(type, stdout);
    fputc(d.ndim, stdout);
    fwrite(d.dim, sizeof(int64_t), (size_t)d.ndim, stdout);
    fwrite(data, 1, bytes, stdout);
}

static bool record_tensor(const char *kind, const char *name, mu_tensor *t)
{
    char full[300];
    snprintf(full, sizeof(full), "%s%s", kind, name);
    int64_t n = mu_tensor_elements(t);
    bool is_int = mu_tensor_dtype(t) == MU_I64;
    size_t bytes = (size_t)n * (is_int ? sizeof(int64_t) : sizeof(float));
    void *data = malloc(bytes + 1);
    mu_status s = is_int ? mu_tensor_read_i64(t, data, n) : mu_tensor_read(t, data, n);
    if (s == MU_OK) {
        record(full, is_int ? 'i' : 'f', mu_tensor_dims(t), data, bytes);
    }
    free(data);
    return s == MU_OK;
}

static bool record_state(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    (void)p;
    return record_tensor(user, name, value);
}

static bool record_gradient(void *user, const char *name, mu_parameter *p)
{
    (void)user;
    return record_tensor("grad ", name, mu_parameter_grad(p));
}

int main(int argc, char **argv)
{
    if (argc < 6) {
        return 2;
    }
    int side = atoi(argv[2]), channels = atoi(argv[3]), classes = atoi(argv[4]), batch = atoi(argv[5]);
    mu_kernel_choice kernels = MU_KERNELS_DEFAULT;
    uint64_t seed = 0; /* of the input */
    const char *picked = NULL; /* modules that are run as checkpointed segments */
    for (int i = 6; i < argc; i++) {
        if (strcmp(argv[i], "reference") == 0) {
            kernels = MU_KERNELS_REFERENCE;
        } else if (strncmp(argv[i], "seed=", 5) == 0) {
            seed = strtoull(argv[i] + 5, NULL, 10);
        } else if (strncmp(argv[i], "checkpoint=", 11) == 0) {
            picked = argv[i] + 11;
        }
    }
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 5, .kernels = kernels});
    mu_module *m = mu_model(c, argv[1],
                            &(mu_model_options){.classes = classes, .in_channels = channels, .side = side});
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));
    if (picked != NULL) {
        MU_OR_DIE(c, mu_module_checkpoint(m, picked, true, NULL));
    }
    size_t length = mu_module_print(m, NULL, 0);
    char *text = malloc(length + 1);
    mu_module_print(m, text, length + 1);
    record("print", 'c', MU_DIMS((int64_t)length), text, length);
    free(text);
    MU_OR_DIE(c, mu_module_each_state(m, record_state, "before "));

    int64_t n = (int64_t)batch * channels * side * side;
    float *pixels = malloc((size_t)n * sizeof(*pixels));
    int64_t *labels = malloc((size_t)batch * sizeof(*labels));
    mui_rng r;
    mui_rng_init(&r, 11, seed);
    for (int64_t i = 0; i < n; i++) {
        pixels[i] = mui_rng_normal(&r);
    }
    for (int i = 0; i < batch; i++) {
        labels[i] = (int64_t)mui_rng_below(&r, (uint64_t)classes);
    }
    mu_dims dims = MU_DIMS(batch, channels, side, side);
    for (int pass = 0; pass < 3; pass++) {
        static const char *const names[] = {"eval", "train", "eval after"};
        mu_tape_reset(t);
        mu_module_train(m, pass == 1);
        mu_tensor *x = mu_tensor_from(t, dims, pixels), *y = mu_tensor_from_i64(t, MU_DIMS(batch), labels);
        if (pass == 0) {
            record_tensor("", "input", x);
            record_tensor("", "labels", y);
        }
        mu_tensor *logits = mu_forward(t, m, x);
        MU_OR_DIE(c, mu_context_status(c));
        record_tensor("", names[pass], logits);
        if (pass == 1) {
            mu_tensor *loss = mu_cross_entropy(t, logits, y);
            MU_OR_DIE(c, mu_context_status(c));
            record_tensor("", "loss", loss);
            MU_OR_DIE(c, mu_backward(t, loss));
            MU_OR_DIE(c, mu_module_each_parameter(m, record_gradient, NULL));
            MU_OR_DIE(c, mu_module_each_state(m, record_state, "after "));
        }
    }
    free(pixels);
    free(labels);
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
