/* Two tasks, one backbone, and ranks that disagree about what they train: rank 0 has data of both tasks, the others of
 * the first only, and nobody reaches a third head that was left in the model. DistributedDataParallel answers such a
 * step with "Expected to have finished reduction in the prior iteration", or hangs; here it is a step like another:
 *     muster run -n 2 -- ./two_heads */
#include <muster/muster.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 16, IN = 8, STEPS = 200 };

/* Numbers that differ from rank to rank and step to step. */
static float next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

int main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 3, .log_level = MU_LOG_INFO});
    mu_group *world = mu_group_from_env(c);
    int rank = mu_context_rank(c), size = mu_context_size(c);

    mu_module *net = mu_module_new(c, "TwoHeads", NULL);
    mu_module *backbone = mu_sequential(c);
    MU_OR_DIE(c, mu_sequential_append(backbone, mu_linear(c, IN, 32, NULL)));
    MU_OR_DIE(c, mu_sequential_append(backbone, mu_relu_layer(c)));
    MU_OR_DIE(c, mu_module_add(net, "backbone", backbone));
    MU_OR_DIE(c, mu_module_add(net, "sum", mu_linear(c, 32, 1, NULL)));        /* task of all ranks */
    MU_OR_DIE(c, mu_module_add(net, "difference", mu_linear(c, 32, 1, NULL))); /* task of rank 0 */
    MU_OR_DIE(c, mu_module_add(net, "forgotten", mu_linear(c, 32, 1, NULL)));  /* nobody's */

    mu_ddp *ddp = mu_ddp_wrap(net, world, NULL);
    mu_optimizer *sgd = mu_sgd(net, 0.05f, &(mu_sgd_options){.momentum = 0.9f, .weight_decay = 1e-4f});
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));

    unsigned state = 17u + (unsigned)rank;
    float first = 0, last = 0;
    for (int step = 0; step < STEPS; step++) {
        mu_tape_reset(t);
        float x[BATCH * IN], sums[BATCH], differences[BATCH];
        for (int i = 0; i < BATCH; i++) {
            for (int k = 0; k < IN; k++) {
                x[i * IN + k] = next(&state);
            }
            sums[i] = x[i * IN] + x[i * IN + 1];
            differences[i] = x[i * IN] - x[i * IN + 1];
        }
        mu_tensor *h = mu_forward(t, backbone, mu_tensor_from(t, MU_DIMS(BATCH, IN), x));
        mu_tensor *y = mu_forward(t, mu_module_get(net, "sum"), h);
        mu_tensor *loss = mu_mse_loss(t, y, mu_tensor_from(t, MU_DIMS(BATCH, 1), sums));
        last = mu_tensor_item(loss);
        first = step == 0 ? last : first;
        if (rank == 0) {
            mu_tensor *z = mu_forward(t, mu_module_get(net, "difference"), h);
            loss = mu_add(t, loss, mu_mse_loss(t, z, mu_tensor_from(t, MU_DIMS(BATCH, 1), differences)));
        }
        MU_OR_DIE(c, mu_ddp_backward(ddp, t, loss));
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    MU_OR_DIE(c, mu_ddp_check(ddp)); /* the replicas are equal, bit for bit */

    for (int r = 0; r < size; r++) { /* one after the other */
        if (r == rank) {
            char report[2000];
            mu_ddp_print_report(ddp, report, sizeof(report));
            printf("rank %d of %d: loss of the common task %.4f, at first %.4f\n%s", rank, size, (double)last,
                   (double)first, report);
            fflush(stdout);
        }
        MU_OR_DIE(c, mu_barrier(world));
    }
    bool learned = isfinite(last) && last < 0.1f * first;
    return mu_context_close(c) == MU_OK && learned ? 0 : 1;
}
