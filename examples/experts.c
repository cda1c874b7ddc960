/* A mixture of experts, routed by the data: in a step an expert may have samples on every rank, on one, or on none, and
 * no rank knows what the others chose. An expert without samples anywhere keeps no gradient, and its moments in Adam
 * stand still; one that only some ranks chose gets their gradients, the others counting as zero.
 *     muster run -n 2 -- ./experts */
#include <muster/muster.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXPERTS = 4, BATCH = 32, IN = 3, WIDTH = 16, STEPS = 500 };

static float next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

/* The samples of a step; how a rank's x[0] is spread differs from rank to rank. */
static void draw(float *x, float *y, int rank, unsigned *state)
{
    for (int i = 0; i < BATCH; i++) {
        for (int k = 0; k < IN; k++) {
            x[i * IN + k] = next(state);
        }
        if (rank > 0) {
            x[i * IN] = 0.4f * x[i * IN] - 0.5f;
        }
        y[i] = sinf(3.0f * x[i * IN]) + 0.5f * x[i * IN + 1];
    }
}

/* Which expert the gate prefers, for each sample. Not recorded: a choice has no gradient. */
static void route(mu_context *c, mu_tape *t, mu_module *net, const float *x, int *choice)
{
    float logits[BATCH * EXPERTS];
    mu_no_grad_begin(t, "routing");
    mu_tensor *out = mu_forward(t, mu_module_get(net, "gate"), mu_tensor_from(t, MU_DIMS(BATCH, IN), x));
    MU_OR_DIE(c, mu_tensor_read(out, logits, BATCH * EXPERTS));
    mu_no_grad_end(t);
    for (int i = 0; i < BATCH; i++) {
        choice[i] = 0;
        for (int e = 1; e < EXPERTS; e++) {
            choice[i] = logits[i * EXPERTS + e] > logits[i * EXPERTS + choice[i]] ? e : choice[i];
        }
    }
}

/* Sum of the squared errors of the samples that chose expert e, over BATCH; NULL when there are none. The output is
 * weighted by the gate's probability, so that the gate learns too. */
static mu_tensor *expert_loss(mu_tape *t, mu_module *net, int e, const int *choice, const float *x, const float *y)
{
    float mine[BATCH * IN], wanted[BATCH];
    int n = 0;
    for (int i = 0; i < BATCH; i++) {
        if (choice[i] == e) {
            for (int k = 0; k < IN; k++) {
                mine[n * IN + k] = x[i * IN + k];
            }
            wanted[n++] = y[i];
        }
    }
    if (n == 0) {
        return NULL;
    }
    char name[16];
    snprintf(name, sizeof(name), "expert%d", e);
    mu_tensor *in = mu_tensor_from(t, MU_DIMS(n, IN), mine);
    mu_tensor *p = mu_softmax(t, mu_forward(t, mu_module_get(net, "gate"), in));
    mu_tensor *out = mu_mul(t, mu_narrow(t, p, 1, e, 1), mu_forward(t, mu_module_get(net, name), in));
    return mu_scale(t, mu_mse_loss(t, out, mu_tensor_from(t, MU_DIMS(n, 1), wanted)), (float)n / BATCH);
}

int main(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 5});
    mu_group *world = mu_group_from_env(c);
    int rank = mu_context_rank(c);
    mu_module *net = mu_module_new(c, "Experts", NULL);
    MU_OR_DIE(c, mu_module_add(net, "gate", mu_linear(c, IN, EXPERTS, NULL)));
    for (int e = 0; e < EXPERTS; e++) {
        char name[16];
        snprintf(name, sizeof(name), "expert%d", e);
        MU_OR_DIE(c, mu_module_add(net, name, mu_mlp(c, IN, (int64_t[]){WIDTH}, 1, 1)));
    }
    mu_ddp *ddp = mu_ddp_wrap(net, world, &(mu_ddp_options){.absent = MU_ABSENT_QUIET});
    mu_optimizer *adam = mu_adam(net, 0.01f, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));

    unsigned state = 77u + 13u * (unsigned)rank;
    float first = 0, last = 0;
    long elsewhere = 0, nowhere = 0;
    for (int step = 0; step < STEPS; step++) {
        float x[BATCH * IN], y[BATCH];
        int choice[BATCH];
        draw(x, y, rank, &state);
        mu_tape_reset(t);
        route(c, t, net, x, choice);
        mu_tensor *loss = NULL;
        for (int e = 0; e < EXPERTS; e++) {
            mu_tensor *part = expert_loss(t, net, e, choice, x, y);
            loss = loss == NULL || part == NULL ? (part == NULL ? loss : part) : mu_add(t, loss, part);
        }
        float now = mu_tensor_item(loss);
        first += step < 20 ? now / 20 : 0;
        last += step >= STEPS - 20 ? now / 20 : 0;
        MU_OR_DIE(c, mu_ddp_backward(ddp, t, loss));
        mu_ddp_report report = mu_ddp_get_report(ddp);
        for (int64_t i = 0; i < report.absent_count; i++) {
            elsewhere += report.absent[i].ranks_present > 0;
            nowhere += report.absent[i].ranks_present == 0;
        }
        MU_OR_DIE(c, mu_optimizer_step(adam));
    }
    MU_OR_DIE(c, mu_ddp_check(ddp));
    printf("rank %d: loss %.4f, at first %.4f; per step %.1f parameters had a gradient on some ranks only, %.1f on none\n",
           rank, (double)last, (double)first, (double)elsewhere / STEPS, (double)nowhere / STEPS);
    return mu_context_close(c) == MU_OK && last < 0.3f * first ? 0 : 1;
}
