/* What a ready-made hook makes of gradients, for torch_hooks.py.
 * hook_dump bf16|powersgd RANKS STEPS RANK FEEDBACK WARM, then on stdin, as float32: PowerSGD's first Q of each of the
 * matrices w (24 by 18) and k (16 by 4, 3, 3); then for each step and rank the gradients of w, k and b (11). On stdout:
 * for each step the reduced gradients, as rank 0 has them. */
#include "comm/ranks.h"

#include "comm/group.h"

enum { W = 24 * 18, K = 16 * 36, B = 11, ALL = W + K + B };

typedef struct job {
    bool bf16;
    int steps, rank, feedback, warm;
    float *q_w, *q_k, *in, *out;
} job;

static void first_q(void *user, const char *name, int64_t columns, int64_t rank, float *q)
{
    const job *j = user;
    memcpy(q, name[0] == 'w' ? j->q_w : j->q_k, (size_t)(columns * rank) * sizeof(float));
}

static mu_tensor *weighted_sum(mu_tape *t, mu_module *m, const char *name, const float *x)
{
    mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(m, name));
    return mu_sum(t, mu_mul(t, v, mu_tensor_from(t, mu_tensor_dims(v), x)));
}

static void run(mu_group *g, int rank, int size, void *arg)
{
    job *j = arg;
    mu_context *c = g->context;
    mu_module *m = mu_module_new(c, "Model", NULL);
    mu_module_parameter(m, "w", MU_DIMS(24, 18), (mu_init){MU_INIT_NORMAL, 1.0F});
    mu_module_parameter(m, "k", MU_DIMS(16, 4, 3, 3), (mu_init){MU_INIT_NORMAL, 1.0F});
    mu_module_parameter(m, "b", MU_DIMS(B), (mu_init){MU_INIT_NORMAL, 1.0F});
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_powersgd_options o = {.rank = j->rank, .plain_reductions = 2, .no_error_feedback = !j->feedback,
                             .no_warm_start = !j->warm, .q_init = first_q, .q_user = j};
    CHECK(j->bf16 ? mu_ddp_set_bf16(d) == MU_OK : mu_powersgd_new(d, &o) != NULL, "set");
    mu_tape *t = mu_tape_new(c, NULL);
    for (int n = 0; n < j->steps; n++) {
        const float *x = j->in + (size_t)(n * size + rank) * ALL;
        mu_tape_reset(t);
        mu_tensor *loss = mu_add(t, weighted_sum(t, m, "w", x), weighted_sum(t, m, "k", x + W));
        CHECK(mu_ddp_backward(d, t, mu_add(t, loss, weighted_sum(t, m, "b", x + W + K))) == MU_OK, "%s",
              mu_context_message(c));
        float *y = j->out + (size_t)n * ALL;
        const char *const names[] = {"w", "k", "b"};
        const int counts[] = {W, K, B};
        for (int i = 0; i < 3 && rank == 0; y += counts[i++]) {
            mu_tensor *grad = mu_parameter_grad(mu_module_get_parameter(m, names[i]));
            CHECK(mu_tensor_read(grad, y, counts[i]) == MU_OK, "read");
        }
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero_grad");
    }
}

static bool read_all(float *x, size_t n)
{
    return fread(x, sizeof(*x), n, stdin) == n;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        return 2;
    }
    int size = atoi(argv[2]);
    job j = {.bf16 = strcmp(argv[1], "bf16") == 0, .steps = atoi(argv[3]), .rank = atoi(argv[4]),
             .feedback = atoi(argv[5]), .warm = atoi(argv[6])};
    size_t in = (size_t)(j.steps * size) * ALL, out = (size_t)j.steps * ALL;
    j.q_w = calloc((size_t)(18 * j.rank), sizeof(float));
    j.q_k = calloc((size_t)(36 * j.rank), sizeof(float));
    j.in = calloc(in, sizeof(float));
    j.out = calloc(out, sizeof(float));
    bool ok = read_all(j.q_w, (size_t)(18 * j.rank)) && read_all(j.q_k, (size_t)(36 * j.rank)) && read_all(j.in, in) &&
              run_threads(size, run, &j, NULL, true) == 0 && fwrite(j.out, sizeof(float), out, stdout) == out;
    free(j.q_w);
    free(j.q_k);
    free(j.in);
    free(j.out);
    return ok ? 0 : 1;
}
