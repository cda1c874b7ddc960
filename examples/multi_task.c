/* Several tasks over one backbone. Every rank draws, step by step, the task its batch is of; so in one step a head may
 * have work on all ranks, on some, or on none. The loss is the sum of what there is: no term times zero for the others,
 * no flag, and a head without work on any rank is not decayed by the optimiser.
 *     muster run -n 2 -- ./multi_task */
#include <muster/muster.h>

#include <math.h>
#include <stdio.h>

enum { TASKS = 3, BATCH = 16, IN = 6, STEPS = 300 };
static const char *const task_names[TASKS] = {"sum", "difference", "product"};

static float next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

static float target(int task, const float *x)
{
    return task == 0 ? x[0] + x[1] : task == 1 ? x[0] - x[1] : x[0] * x[1];
}

static mu_tensor *task_loss(mu_tape *t, mu_module *net, int task, unsigned *state)
{
    float x[BATCH * IN], y[BATCH];
    for (int i = 0; i < BATCH; i++) {
        for (int k = 0; k < IN; k++) {
            x[i * IN + k] = next(state);
        }
        y[i] = target(task, x + i * IN);
    }
    mu_tensor *h = mu_forward(t, mu_module_get(net, "backbone"), mu_tensor_from(t, MU_DIMS(BATCH, IN), x));
    mu_tensor *out = mu_forward(t, mu_module_get(net, task_names[task]), h);
    return mu_mse_loss(t, out, mu_tensor_from(t, MU_DIMS(BATCH, 1), y));
}

int main(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 2});
    mu_group *world = mu_group_from_env(c);
    int rank = mu_context_rank(c);

    mu_module *net = mu_module_new(c, "MultiTask", NULL), *backbone = mu_sequential(c);
    MU_OR_DIE(c, mu_sequential_append(backbone, mu_linear(c, IN, 64, NULL)));
    MU_OR_DIE(c, mu_sequential_append(backbone, mu_relu_layer(c)));
    MU_OR_DIE(c, mu_module_add(net, "backbone", backbone));
    for (int k = 0; k < TASKS; k++) {
        MU_OR_DIE(c, mu_module_add(net, task_names[k], mu_linear(c, 64, 1, NULL)));
    }
    mu_ddp *ddp = mu_ddp_wrap(net, world, &(mu_ddp_options){.absent = MU_ABSENT_QUIET}); /* we know */
    mu_optimizer *adam = mu_adam(net, 0.01f, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));

    unsigned state = 31u + 7u * (unsigned)rank;
    float loss[TASKS] = {0};
    long missed[TASKS] = {0};
    for (int step = 0; step < STEPS; step++) {
        mu_tape_reset(t);
        int task = (int)(fabsf(next(&state)) * TASKS) % TASKS;
        mu_tensor *l = task_loss(t, net, task, &state);
        loss[task] = mu_tensor_item(l);
        if (step % 10 == 9) { /* now and then a batch of a second task as well */
            l = mu_add(t, l, task_loss(t, net, (task + 1) % TASKS, &state));
        }
        MU_OR_DIE(c, mu_ddp_backward(ddp, t, l));
        for (int k = 0; k < TASKS; k++) {
            char name[32];
            snprintf(name, sizeof(name), "%s.weight", task_names[k]);
            missed[k] += mu_parameter_grad(mu_module_get_parameter(net, name)) == NULL;
        }
        MU_OR_DIE(c, mu_optimizer_step(adam));
    }
    MU_OR_DIE(c, mu_ddp_check(ddp));
    bool learned = true;
    for (int k = 0; k < TASKS; k++) {
        printf("rank %d: task %-10s last loss %.4f, without work on any rank in %ld of %d steps\n", rank,
               task_names[k], (double)loss[k], missed[k], STEPS);
        learned = learned && loss[k] < 0.08f;
    }
    return mu_context_close(c) == MU_OK && learned ? 0 : 1;
}
