/* ten_steps MODEL FOLDER [bf16]: ten SGD steps on made-up batches. Writes into FOLDER what another framework needs to do the
 * same - initial.pth, batches.bin (float32 images, then int64 labels, per step) - and what came out: losses.txt,
 * final.pth. torch_steps.py compares. Public headers only, like any user. */
#include <muster/muster.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STEPS 10
#define CLASSES 10

static uint64_t state = 1;

/* Knuth's MMIX generator: the high bits are good enough for test data. */
static float uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / (float)(1 << 24);
}

static const struct shape {
    const char *model;
    int batch, channels, side;
    float lr;
} shapes[] = { /* torch_steps.py has the same */
    {"resnet20", 32, 3, 32, 0.001f}, {"resnet18", 32, 3, 48, 0.0001f}, {"cnn", 32, 1, 28, 0.02f}, {"mlp", 32, 1, 28, 0.02f}};

int main(int argc, char **argv)
{
    const struct shape *s = NULL;
    for (size_t i = 0; argc >= 3 && i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        s = strcmp(shapes[i].model, argv[1]) == 0 ? &shapes[i] : s;
    }
    if (s == NULL || chdir(argv[2]) != 0) {
        fprintf(stderr, "usage: ten_steps MODEL FOLDER [bf16]\n");
        return 2;
    }
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 7});
    mu_module *net = mu_model(
        c, s->model, &(mu_model_options){.classes = CLASSES, .in_channels = s->channels, .side = s->side});
    mu_ddp *ddp = mu_ddp_wrap(net, mu_group_self(c), NULL);
    mu_optimizer *sgd = mu_sgd(net, s->lr, &(mu_sgd_options){.momentum = 0.9f, .weight_decay = 5e-4f});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = argc > 3 && strcmp(argv[3], "bf16") == 0});
    MU_OR_DIE(c, mu_context_status(c));
    MU_OR_DIE(c, mu_save(net, "initial.pth", NULL));

    int64_t elements = (int64_t)s->batch * s->channels * s->side * s->side, labels[64];
    float *x = malloc((size_t)elements * sizeof(*x));
    FILE *batches = fopen("batches.bin", "wb"), *losses = fopen("losses.txt", "w");
    if (x == NULL || batches == NULL || losses == NULL) {
        perror("ten_steps");
        return 1;
    }
    for (int step = 0; step < STEPS; step++) {
        /* Noise around a wave of the class's own: learnable, so that the losses go down instead of about. */
        int64_t per_image = elements / s->batch;
        for (int i = 0; i < s->batch; i++) {
            labels[i] = (int64_t)(uniform() * CLASSES);
            for (int64_t k = 0; k < per_image; k++) {
                float wave = (float)((k * (labels[i] + 1)) % s->side) / (float)s->side - 0.5f;
                x[i * per_image + k] = wave + uniform() + uniform() - 1;
            }
        }
        fwrite(x, sizeof(*x), (size_t)elements, batches);
        fwrite(labels, sizeof(*labels), (size_t)s->batch, batches);
        mu_tape_reset(t);
        mu_tensor *input = mu_tensor_from(t, MU_DIMS(s->batch, s->channels, s->side, s->side), x);
        mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, net, input), mu_tensor_from_i64(t, MU_DIMS(s->batch), labels));
        fprintf(losses, "%.9g\n", (double)mu_tensor_item(loss));
        MU_OR_DIE(c, mu_ddp_backward(ddp, t, loss));
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    MU_OR_DIE(c, mu_save(net, "final.pth", NULL));
    free(x);
    if (fclose(batches) != 0 || fclose(losses) != 0) {
        perror("ten_steps");
        return 1;
    }
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
