/* Steps on data that need no generator of random numbers. */
#include "tool_steps.h"

void tool_steps(mu_context *c, mu_module *m, mu_optimizer *o, mu_ddp *ddp, int from, int count)
{
    mu_tape *t = mu_tape_new(c, NULL);
    for (int s = from; s < from + count; s++) {
        float x[4 * 3 * 6 * 6];
        int64_t y[4];
        for (int i = 0; i < 4 * 108; i++) {
            x[i] = (float)((i * 37 + s * 11) % 101 - 50) / 50;
        }
        for (int i = 0; i < 4; i++) {
            y[i] = (i + s) % 5;
        }
        mu_tape_reset(t);
        mu_tensor *out = mu_forward(t, m, mu_tensor_from(t, MU_DIMS(4, 3, 6, 6), x));
        mu_tensor *loss = mu_cross_entropy(t, out, mu_tensor_from_i64(t, MU_DIMS(4), y));
        MU_OR_DIE(c, ddp != NULL ? mu_ddp_backward(ddp, t, loss) : mu_backward(t, loss));
        MU_OR_DIE(c, mu_optimizer_step(o));
    }
    MU_OR_DIE(c, mu_context_status(c));
}
