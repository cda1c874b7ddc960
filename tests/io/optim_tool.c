/* Trains for test_optim_torch.py, through the public interface:
 *     optim_tool NET OPTIMIZER FLAGS FROM COUNT IN OUT [MODEL_KEY [OPTIMIZER_KEY]]
 * NET: net, or the path of a checkpoint (a model with the names of its state dict and no forward). OPTIMIZER:
 * sgd:LR,MOMENTUM,DAMPENING,DECAY,NESTEROV or adam(w):LR,BETA1,BETA2,EPS,DECAY. IN or OUT "-": none; a key "-": NULL.
 * FLAGS, any of: f(ile settings), g(roups: the head for itself), z (the convolution frozen), t(rainable only, when
 * saving), o (only the optimiser is loaded and saved), r(anks: two threads, one reads, wrapped before the load), l (the
 * learning rate is set to 0.01 after the load, as a schedule does), s(harded over the two threads). */
#include "tool_steps.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct job {
    char **a;
    int n;
    mu_thread_world *world; /* NULL: alone */
    int rank;
} job;

static mu_tensor *squash(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    return mu_tanh(t, x);
}

/* A module with the parameters and buffers of a file's entries, whatever they are for. */
static mu_module *from_file(mu_context *c, const char *path)
{
    mu_module *root = mu_module_new(c, "Names", NULL);
    mu_checkpoint_file *k = mu_checkpoint_open(c, path);
    MU_OR_DIE(c, mu_context_status(c));
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        char name[256];
        if (strncmp(e.name, "state_dict.", 11) != 0) {
            continue;
        }
        snprintf(name, sizeof(name), "%s", e.name + 11);
        mu_module *m = root;
        char *at = name, *dot;
        while ((dot = strchr(at, '.')) != NULL) {
            *dot = '\0';
            mu_module *child = mu_module_get(m, at);
            if (child == NULL) {
                child = mu_module_new(c, "Names", NULL);
                MU_OR_DIE(c, mu_module_add(m, at, child));
            }
            m = child;
            at = dot + 1;
        }
        if (strncmp(at, "running_", 8) == 0 || strcmp(at, "num_batches_tracked") == 0) {
            mu_module_buffer(m, at, e.dims, e.dtype, 0);
        } else {
            mu_module_parameter(m, at, e.dims, (mu_init){.kind = MU_INIT_ZEROS});
        }
    }
    mu_checkpoint_close(k);
    return root;
}

static mu_module *network(mu_context *c, const char *name)
{
    if (strcmp(name, "net") == 0) { /* nothing that jumps: rounding stays rounding */
        mu_module *m = mu_sequential(c), *tanh = mu_module_new(c, "Tanh", &(mu_module_options){.forward = squash});
        MU_OR_DIE(c, mu_sequential_append(m, mu_conv2d_layer(c, 3, 4, 3, &(mu_conv_options){.padding = 1, .no_bias = true})));
        MU_OR_DIE(c, mu_sequential_append(m, mu_batch_norm_layer(c, 4, NULL)));
        MU_OR_DIE(c, mu_sequential_append(m, tanh));
        MU_OR_DIE(c, mu_sequential_append(m, mu_flatten_layer(c)));
        MU_OR_DIE(c, mu_sequential_append(m, mu_linear(c, 144, 5, NULL)));
        return m;
    }
    return from_file(c, name);
}

static mu_optimizer *optimizer(mu_module *m, const char *spec, mu_group *shard)
{
    float v[5] = {0};
    const char *at = strchr(spec, ':');
    for (int i = 0; i < 5 && at != NULL; i++) {
        v[i] = strtof(at + 1, NULL);
        at = strchr(at + 1, ',');
    }
    if (strncmp(spec, "sgd", 3) == 0) {
        return mu_sgd(m, v[0], &(mu_sgd_options){.momentum = v[1], .dampening = v[2], .weight_decay = v[3],
                                                 .nesterov = v[4] != 0, .shard = shard});
    }
    mu_adam_options o = {.beta1 = v[1], .beta2 = v[2], .eps = v[3], .weight_decay = v[4] == 0 ? -1 : v[4], .shard = shard};
    if (strncmp(spec, "adamw", 5) == 0) {
        return mu_adamw(m, v[0], &o);
    }
    o.weight_decay = v[4];
    return mu_adam(m, v[0], &o);
}

static const char *key_at(const job *j, int i)
{
    return j->n > i && strcmp(j->a[i], "-") != 0 ? j->a[i] : NULL;
}

static void *work(void *user)
{
    job *j = user;
    const char *flags = j->a[2], *in = key_at(j, 5), *out = key_at(j, 6);
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 7 + (uint64_t)j->rank, .log_level = MU_LOG_INFO});
    mu_group *g = j->world != NULL ? mu_group_threads(c, j->world, j->rank) : NULL;
    mu_training t = {.model = network(c, j->a[0]), .seed = 5};
    int from = atoi(j->a[3]), count = atoi(j->a[4]);
    bool only = strchr(flags, 'o') != NULL, take = strchr(flags, 'f') != NULL;
    MU_OR_DIE(c, strchr(flags, 'z') != NULL ? mu_module_freeze(t.model, "0.*", NULL) : MU_OK);
    bool sharded = strchr(flags, 's') != NULL;
    t.optimizer = optimizer(t.model, j->a[1], sharded ? g : NULL);
    if (strchr(flags, 'g') != NULL) {
        MU_OR_DIE(c, mu_optimizer_add_group(t.optimizer, &(mu_param_group){.pattern = "4.*", .lr_factor = 2, .weight_decay = -1}));
    }
    mu_ddp *ddp = g != NULL ? mu_ddp_wrap(t.model, g, &(mu_ddp_options){.bucket_bytes = 1024, .first_bucket_bytes = 256})
                            : NULL;
    if (g != NULL) { /* a reduction lays memory out anew, in the order of readiness */
        tool_steps(c, t.model, t.optimizer, ddp, 0, 2);
    }
    if (in != NULL && only) {
        MU_OR_DIE(c, mu_load(t.model, in, &(mu_load_options){.key = key_at(j, 7), .group = g}, NULL));
        MU_OR_DIE(c, mu_optimizer_load(t.optimizer, in, &(mu_optimizer_load_options){.key = key_at(j, 8), .group = g,
                                                                                     .file_settings = take}));
    } else if (in != NULL) {
        mu_training_options o = {.model = {.key = key_at(j, 7), .group = g}, .optimizer_key = key_at(j, 8), .file_settings = take};
        MU_OR_DIE(c, mu_training_load_with(&t, in, &o, NULL));
    }
    if (strchr(flags, 'l') != NULL) {
        mu_optimizer_set_lr(t.optimizer, 0.01f);
    }
    if (j->rank == 0) {
        printf("epoch=%lld step=%lld seed=%llu steps=%lld lr=%g\n", (long long)t.epoch, (long long)t.step,
               (unsigned long long)t.seed, (long long)mu_optimizer_steps(t.optimizer), (double)mu_optimizer_lr(t.optimizer));
    }
    if (count > 0) {
        tool_steps(c, t.model, t.optimizer, ddp, from, count);
    }
    if ((j->rank == 0 || sharded) && out != NULL) {
        mu_optimizer_save_options o = {.trainable_only = strchr(flags, 't') != NULL};
        MU_OR_DIE(c, only ? mu_optimizer_save(t.optimizer, out, &o) : mu_training_save_with(&t, out, &o));
    }
    mu_context_close(c);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 8) {
        fprintf(stderr, "usage: optim_tool NET OPTIMIZER FLAGS FROM COUNT IN OUT [MODEL_KEY [OPTIMIZER_KEY]]\n");
        return 2;
    }
    int ranks = strchr(argv[3], 'r') != NULL ? 2 : 1;
    job jobs[2] = {{argv + 1, argc - 1, NULL, 0}, {argv + 1, argc - 1, NULL, 1}};
    mu_thread_world *w = ranks > 1 ? mu_thread_world_new(2, &(mu_group_options){.timeout_seconds = 30}) : NULL;
    pthread_t other;
    for (int i = 0; i < ranks; i++) {
        jobs[i].world = w;
    }
    if (ranks > 1 && pthread_create(&other, NULL, work, &jobs[1]) != 0) {
        return 2;
    }
    work(&jobs[0]);
    if (ranks > 1) {
        pthread_join(other, NULL);
        mu_thread_world_free(w);
    }
    return 0;
}
