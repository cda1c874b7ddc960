/* Learning rate schedules, as pure functions of the step. */
#include <muster/optim.h>

#include <math.h>

float mu_schedule_lr(const mu_schedule *s, int64_t step)
{
    if (s == NULL) {
        return 0;
    }
    double lr = s->lr;
    step = step > 0 ? step : 0;
    if (step < s->warmup_steps) {
        return (float)(lr * (double)(step + 1) / (double)s->warmup_steps);
    }
    int64_t warmup = s->warmup_steps > 0 ? s->warmup_steps : 0;
    int64_t after = step - warmup, length = s->total_steps - warmup;
    double gamma = s->gamma != 0 ? s->gamma : 0.1, low = s->min_lr;
    switch (s->kind) {
    case MU_SCHEDULE_CONSTANT: break;
    case MU_SCHEDULE_STEP:
        if (s->step_size > 0) {
            lr *= pow(gamma, (double)(after / s->step_size));
        }
        break;
    case MU_SCHEDULE_COSINE:
        /* At and after the end it stays at min_lr. */
        if (after >= length) {
            lr = low;
        } else {
            lr = low + (lr - low) * 0.5 * (1.0 + cos(3.141592653589793 * (double)after / (double)length));
        }
        break;
    }
    return (float)lr;
}
