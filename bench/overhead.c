/* What reducing many small parameters costs: times the same step without and with a mu_ddp. One rank of `muster run`; see
 * overhead.py.
 *
 *     overhead PARAMETERS FLOATS STEPS plain|ddp all|some
 *
 * The loss adds up all parameters, or all but every tenth. Prints seconds per step, by the wall and of this process, as
 * medians over the steps. */
#include <muster/muster.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WARM_UP = 5 };

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof(*x), ascending);
    return x[n / 2];
}

typedef struct bench {
    mu_context *c;
    mu_module *model;
    mu_ddp *ddp; /* NULL: without */
    mu_tape *tape;
    mu_parameter **parameters;
    int count;
    int64_t floats;
    int some;
} bench;

static void step(bench *b)
{
    mu_tape_reset(b->tape);
    mu_tensor *y = mu_tensor_zeros(b->tape, MU_DIMS(b->floats));
    for (int i = 0; i < b->count; i++) {
        if (!b->some || i % 10 != 9) {
            y = mu_add(b->tape, y, mu_parameter_tensor(b->parameters[i]));
        }
    }
    mu_tensor *loss = mu_sum(b->tape, y);
    MU_OR_DIE(b->c, b->ddp != NULL ? mu_ddp_backward(b->ddp, b->tape, loss) : mu_backward(b->tape, loss));
    MU_OR_DIE(b->c, mu_module_zero_grad(b->model));
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        fprintf(stderr, "overhead PARAMETERS FLOATS STEPS plain|ddp all|some\n");
        return 2;
    }
    bench b = {.count = atoi(argv[1]), .floats = atoi(argv[2]), .some = strcmp(argv[5], "some") == 0};
    int steps = atoi(argv[3]);
    b.c = mu_context_open(NULL);
    mu_group *world = mu_group_from_env(b.c);
    b.model = mu_module_new(b.c, "Many", NULL);
    b.parameters = calloc((size_t)b.count, sizeof(mu_parameter *));
    double *wall = calloc((size_t)steps, sizeof(*wall)), *cpu = calloc((size_t)steps, sizeof(*cpu));
    if (b.parameters == NULL || wall == NULL || cpu == NULL || steps < 1) {
        return 1;
    }
    for (int i = 0; i < b.count; i++) {
        char name[32];
        snprintf(name, sizeof(name), "p%d", i);
        b.parameters[i] = mu_module_parameter(b.model, name, MU_DIMS(b.floats), (mu_init){MU_INIT_NORMAL, 1.0F});
    }
    if (strcmp(argv[4], "ddp") == 0) {
        b.ddp = mu_ddp_wrap(b.model, world, &(mu_ddp_options){.absent = MU_ABSENT_QUIET});
    }
    MU_OR_DIE(b.c, mu_module_zero_grad(b.model)); /* lays the parameters out */
    b.tape = mu_tape_new(b.c, NULL);
    MU_OR_DIE(b.c, mu_context_status(b.c));
    for (int n = -WARM_UP; n < steps; n++) {
        double w = now(CLOCK_MONOTONIC), p = now(CLOCK_PROCESS_CPUTIME_ID);
        step(&b);
        if (n >= 0) {
            wall[n] = now(CLOCK_MONOTONIC) - w;
            cpu[n] = now(CLOCK_PROCESS_CPUTIME_ID) - p;
        }
    }
    if (mu_group_rank(world) == 0) {
        printf("%.9f %.9f\n", median(wall, steps), median(cpu, steps));
    }
    free(b.parameters);
    free(wall);
    free(cpu);
    return mu_context_close(b.c) == MU_OK ? 0 : 1;
}
