/* Fine-tuning with a replaced head: the case that meets "Expected to have finished reduction in the prior iteration"
 * most often. A network with 7 classes was trained under DataParallel, so its checkpoint's names begin with "module.".
 * Here it is loaded with strict=False, wrapped, given a new `fc` for 3 classes after wrapping, and tuned: first only
 * the head, then all of it. DistributedDataParallel would go on with the parameters it saw when wrapping.
 *     muster run -n 2 -- ./replaced_head [before | after]       (replace the head before or after wrapping) */
#include <muster/muster.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { IN = 12, WIDTH = 48, OLD_CLASSES = 7, NEW_CLASSES = 3, BATCH = 32 };

static mu_module *network(mu_context *c, int classes)
{
    mu_module *net = mu_sequential(c);
    MU_OR_DIE(c, mu_module_add(net, "conv", mu_linear(c, IN, WIDTH, NULL)));
    MU_OR_DIE(c, mu_module_add(net, "bn", mu_batch_norm_layer(c, WIDTH, NULL)));
    MU_OR_DIE(c, mu_module_add(net, "relu", mu_relu_layer(c)));
    MU_OR_DIE(c, mu_module_add(net, "fc", mu_linear(c, WIDTH, classes, NULL)));
    return net;
}

/* Points around one centre for each class. */
static void draw(float *x, int64_t *y, int classes, unsigned *state)
{
    for (int i = 0; i < BATCH; i++) {
        *state = *state * 1664525u + 1013904223u;
        y[i] = (int64_t)(*state >> 16) % classes;
        for (int k = 0; k < IN; k++) {
            *state = *state * 1664525u + 1013904223u;
            float noise = (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
            x[i * IN + k] = noise + (k % NEW_CLASSES == (int)y[i] % NEW_CLASSES ? 0.8f : 0.0f);
        }
    }
}

static mu_tensor *loss_of(mu_tape *t, mu_module *net, int classes, unsigned *state)
{
    float x[BATCH * IN];
    int64_t y[BATCH];
    draw(x, y, classes, state);
    mu_tensor *logits = mu_forward(t, net, mu_tensor_from(t, MU_DIMS(BATCH, IN), x));
    return mu_cross_entropy(t, logits, mu_tensor_from_i64(t, MU_DIMS(BATCH), y));
}

/* What somebody else did before: the same network, trained and saved under DataParallel. */
static void pretrain(mu_context *c, const char *path)
{
    mu_module *net = network(c, OLD_CLASSES);
    mu_optimizer *sgd = mu_sgd(net, 0.1f, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    unsigned state = 5;
    for (int step = 0; step < 50; step++) {
        mu_tape_reset(t);
        MU_OR_DIE(c, mu_backward(t, loss_of(t, net, OLD_CLASSES, &state)));
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    MU_OR_DIE(c, mu_save(net, path, &(mu_save_options){.prefix = "module."}));
}

/* The loop people write in Python to find out which parameters a loss did not reach. */
static bool without_gradient(void *user, const char *name, mu_parameter *p)
{
    if (mu_parameter_grad(p) == NULL) {
        printf("rank %d: no gradient for %s%s\n", *(int *)user, name, mu_parameter_trainable(p) ? "" : " (frozen)");
    }
    return true;
}

int main(int argc, char **argv)
{
    bool before = argc > 1 && strcmp(argv[1], "before") == 0;
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 1, .log_level = MU_LOG_INFO});
    mu_group *world = mu_group_from_env(c);
    int rank = mu_context_rank(c);
    MU_OR_DIE(c, mu_context_status(c));
    char path[64] = "";
    if (rank == 0) {
        snprintf(path, sizeof(path), "/tmp/pretrained-%ld.pth", (long)getpid());
        pretrain(c, path);
    }
    MU_OR_DIE(c, mu_broadcast(world, path, sizeof(path), 0));

    /* Rank 0 reads the file, the others get what it read. */
    mu_module *net = network(c, OLD_CLASSES);
    mu_load_report loaded;
    MU_OR_DIE(c, mu_load(net, path, &(mu_load_options){.not_strict = true, .group = world}, &loaded));
    if (rank == 0) {
        printf("%s", loaded.text);
        remove(path);
    }

    if (before) {
        MU_OR_DIE(c, mu_module_replace(net, "fc", mu_linear(c, WIDTH, NEW_CLASSES, NULL)));
    }
    mu_ddp *ddp = mu_ddp_wrap(net, world, NULL);
    mu_optimizer *sgd = mu_sgd(net, 0.05f, &(mu_sgd_options){.momentum = 0.9f, .weight_decay = 1e-4f});
    if (!before) {
        MU_OR_DIE(c, mu_module_replace(net, "fc", mu_linear(c, WIDTH, NEW_CLASSES, NULL)));
    }
    MU_OR_DIE(c, mu_module_freeze(net, "[!f]*", NULL)); /* all but fc */
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));

    unsigned state = 100u + (unsigned)rank;
    float first = 0, last = 0;
    for (int step = 0; step < 200; step++) {
        if (step == 60) {
            MU_OR_DIE(c, mu_module_unfreeze(net, "*", NULL));
        }
        mu_tape_reset(t);
        mu_tensor *loss = loss_of(t, net, NEW_CLASSES, &state);
        float now = mu_tensor_item(loss);
        first = step == 0 ? now : first;
        last = step < 190 ? 0 : last + now / 10;
        MU_OR_DIE(c, mu_ddp_backward(ddp, t, loss));
        if (step == 0 && rank == 0) {
            MU_OR_DIE(c, mu_module_each_parameter(net, without_gradient, &rank));
        }
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    MU_OR_DIE(c, mu_ddp_check(ddp)); /* the replicas are equal, bit for bit */
    printf("rank %d: loss %.3f, at first %.3f\n", rank, (double)last, (double)first);
    bool learned = last < 0.5f * first;
    return mu_context_close(c) == MU_OK && learned ? 0 : 1;
}
