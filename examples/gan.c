/* A GAN: two models, two optimisers, and in each step three losses that reach different parameters.
 *   1. The discriminator's, on real and on generated points (detached: nothing for the generator).
 *   2. The generator's first: the mean of an inner feature of the discriminator has to agree with that of real points.
 *      It does not reach the discriminator's last layer.
 *   3. The generator's second, on the discriminator's final output. Two backwards add up before its optimiser steps.
 * The discriminator is frozen while the generator learns. Each model has its own wrapper; in DistributedDataParallel
 * this is where one reads "Expected to have finished reduction in the prior iteration", or trains on gradients that
 * differ from rank to rank.
 *     muster run -n 2 -- ./gan */
#include <muster/muster.h>

#include <math.h>
#include <stdio.h>

enum { BATCH = 64, NOISE = 4, STEPS = 1000 };

static float next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

/* Real points: a square around (2, -1). */
static mu_tensor *real_points(mu_tape *t, unsigned *state)
{
    float x[BATCH * 2];
    for (int i = 0; i < BATCH; i++) {
        x[2 * i] = 2.0f + 0.5f * next(state);
        x[2 * i + 1] = -1.0f + 0.5f * next(state);
    }
    return mu_tensor_from(t, MU_DIMS(BATCH, 2), x);
}

static mu_tensor *generated(mu_tape *t, mu_module *g, unsigned *state)
{
    float z[BATCH * NOISE];
    for (int i = 0; i < BATCH * NOISE; i++) {
        z[i] = next(state);
    }
    return mu_forward(t, g, mu_tensor_from(t, MU_DIMS(BATCH, NOISE), z));
}

static mu_tensor *feature(mu_tape *t, mu_module *d, mu_tensor *x)
{
    return mu_forward(t, mu_module_get(d, "body"), x);
}
static mu_tensor *judged(mu_tape *t, mu_module *d, mu_tensor *features)
{
    return mu_forward(t, mu_module_get(d, "head"), features);
}

/* -log sigmoid(x) = softplus(-x): x should be judged real. */
static mu_tensor *real_loss(mu_tape *t, mu_tensor *logits)
{
    return mu_mean(t, mu_softplus(t, mu_scale(t, logits, -1.0f)));
}
static mu_tensor *fake_loss(mu_tape *t, mu_tensor *logits)
{
    return mu_mean(t, mu_softplus(t, logits));
}

/* Means over the batch: (BATCH, n) -> (1, n). */
static mu_tensor *batch_mean(mu_tape *t, mu_tensor *x)
{
    float share[BATCH];
    for (int i = 0; i < BATCH; i++) {
        share[i] = 1.0f / BATCH;
    }
    return mu_matmul(t, mu_tensor_from(t, MU_DIMS(1, BATCH), share), x);
}

typedef struct gan {
    mu_context *c;
    mu_tape *t;
    mu_module *g, *d;
    mu_ddp *g_ddp, *d_ddp;
    mu_optimizer *g_adam, *d_adam;
} gan;

static void discriminator_step(gan *n, unsigned *state)
{
    mu_tape_reset(n->t);
    mu_tensor *fake = mu_detach(n->t, generated(n->t, n->g, state));
    mu_tensor *loss = mu_add(n->t, real_loss(n->t, judged(n->t, n->d, feature(n->t, n->d, real_points(n->t, state)))),
                             fake_loss(n->t, judged(n->t, n->d, feature(n->t, n->d, fake))));
    MU_OR_DIE(n->c, mu_ddp_backward(n->d_ddp, n->t, loss));
    MU_OR_DIE(n->c, mu_optimizer_step(n->d_adam));
}

static void generator_step(gan *n, unsigned *state)
{
    mu_tape_reset(n->t);
    MU_OR_DIE(n->c, mu_module_freeze(n->d, "*", NULL));
    mu_tensor *real = mu_detach(n->t, batch_mean(n->t, feature(n->t, n->d, real_points(n->t, state))));
    mu_tensor *fake = feature(n->t, n->d, generated(n->t, n->g, state));
    mu_tensor *matching = mu_mse_loss(n->t, batch_mean(n->t, fake), real);
    MU_OR_DIE(n->c, mu_ddp_backward(n->g_ddp, n->t, matching)); /* does not reach d's head */
    mu_tensor *fooling = real_loss(n->t, judged(n->t, n->d, fake));
    MU_OR_DIE(n->c, mu_ddp_backward(n->g_ddp, n->t, fooling)); /* adds to the first */
    MU_OR_DIE(n->c, mu_optimizer_step(n->g_adam));
    MU_OR_DIE(n->c, mu_module_unfreeze(n->d, "*", NULL));
}

int main(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 4});
    mu_group *world = mu_group_from_env(c);
    int rank = mu_context_rank(c);
    gan n = {.c = c, .g = mu_mlp(c, NOISE, (int64_t[]){32}, 1, 2), .d = mu_module_new(c, "Discriminator", NULL)};
    mu_module *body = mu_sequential(c);
    MU_OR_DIE(c, mu_sequential_append(body, mu_linear(c, 2, 32, NULL)));
    MU_OR_DIE(c, mu_sequential_append(body, mu_relu_layer(c)));
    MU_OR_DIE(c, mu_module_add(n.d, "body", body));
    MU_OR_DIE(c, mu_module_add(n.d, "head", mu_linear(c, 32, 1, NULL)));
    n.g_ddp = mu_ddp_wrap(n.g, world, &(mu_ddp_options){.name = "generator"});
    n.d_ddp = mu_ddp_wrap(n.d, world, &(mu_ddp_options){.name = "discriminator"});
    n.g_adam = mu_adam(n.g, 0.003f, NULL);
    n.d_adam = mu_adam(n.d, 0.003f, NULL);
    n.t = mu_tape_new(c, &(mu_tape_options){.retain_graph = true}); /* two backwards over one graph */
    MU_OR_DIE(c, mu_context_status(c));

    unsigned state = 11u + (unsigned)rank;
    for (int step = 0; step < STEPS; step++) {
        discriminator_step(&n, &state);
        generator_step(&n, &state);
    }
    MU_OR_DIE(c, mu_ddp_check(n.g_ddp));
    MU_OR_DIE(c, mu_ddp_check(n.d_ddp));

    mu_tape_reset(n.t);
    float centre[2];
    MU_OR_DIE(c, mu_tensor_read(batch_mean(n.t, generated(n.t, n.g, &state)), centre, 2));
    printf("rank %d: generated points are around (%.2f, %.2f), real ones around (2, -1)\n", rank, (double)centre[0],
           (double)centre[1]);
    /* They began around (0, 0), 2.2 away, and go on circling, as GANs do. */
    bool learned = hypotf(centre[0] - 2.0f, centre[1] + 1.0f) < 1.0f;
    return mu_context_close(c) == MU_OK && learned ? 0 : 1;
}
