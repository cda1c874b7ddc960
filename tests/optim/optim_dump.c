/* Runs an optimiser over given gradients and writes what it did, for optim_oracle.py to compare with PyTorch:
 *
 *   optim_dump CASE >floats
 *
 * Output: for each of 50 steps, for each parameter: one float (1: it had a gradient), the gradient, the value after
 * the step; and before the first step the initial values. All float32. "schedule" writes learning rates instead. */
#include "base/rng.h"
#include "tape/store.h"
#include <muster/layers.h>
#include <muster/optim.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 50

static void put(const float *x, int64_t n)
{
    fwrite(x, sizeof(*x), (size_t)n, stdout);
}

static mu_optimizer *make(mu_module *m, const char *name, float *clip)
{
    *clip = 0;
    if (strcmp(name, "sgd") == 0) {
        return mu_sgd(m, 0.1f, NULL);
    }
    if (strcmp(name, "sgd_decay") == 0) {
        return mu_sgd(m, 0.1f, &(mu_sgd_options){.weight_decay = 0.05f});
    }
    if (strcmp(name, "momentum") == 0) {
        return mu_sgd(m, 0.05f, &(mu_sgd_options){.momentum = 0.9f});
    }
    if (strcmp(name, "dampening") == 0) {
        return mu_sgd(m, 0.05f, &(mu_sgd_options){.momentum = 0.8f, .dampening = 0.3f, .weight_decay = 0.01f});
    }
    if (strcmp(name, "nesterov") == 0) {
        return mu_sgd(m, 0.02f, &(mu_sgd_options){.momentum = 0.9f, .nesterov = true, .weight_decay = 0.001f});
    }
    if (strcmp(name, "adam") == 0) {
        return mu_adam(m, 0.01f, NULL);
    }
    if (strcmp(name, "adam_decay") == 0) {
        return mu_adam(m, 0.01f, &(mu_adam_options){.beta1 = 0.8f, .beta2 = 0.99f, .eps = 1e-6f, .weight_decay = 0.1f});
    }
    if (strcmp(name, "adamw") == 0) {
        return mu_adamw(m, 0.01f, NULL);
    }
    if (strcmp(name, "clip") == 0) {
        *clip = 2.0f;
        return mu_sgd(m, 0.05f, &(mu_sgd_options){.momentum = 0.9f});
    }
    if (strcmp(name, "groups_sgd") == 0 || strcmp(name, "groups_adamw") == 0) {
        mu_optimizer *o = name[7] == 's'
                              ? mu_sgd(m, 0.05f, &(mu_sgd_options){.momentum = 0.9f, .weight_decay = 0.1f})
                              : mu_adamw(m, 0.01f, &(mu_adam_options){.weight_decay = 0.1f});
        mu_param_group bias = {.pattern = "*.bias", .weight_decay = -1}, head = {.pattern = "2.*", .lr_factor = 10};
        if (o == NULL || mu_optimizer_add_group(o, &bias) != MU_OK || mu_optimizer_add_group(o, &head) != MU_OK) {
            return NULL;
        }
        return o;
    }
    return NULL;
}

static int schedules(void)
{
    const mu_schedule all[] = {
        {.kind = MU_SCHEDULE_CONSTANT, .lr = 0.5f, .warmup_steps = 5},
        {.kind = MU_SCHEDULE_STEP, .lr = 0.5f, .step_size = 7, .gamma = 0.3f},
        {.kind = MU_SCHEDULE_STEP, .lr = 0.5f, .step_size = 7, .warmup_steps = 5},
        {.kind = MU_SCHEDULE_COSINE, .lr = 0.5f, .total_steps = 40},
        {.kind = MU_SCHEDULE_COSINE, .lr = 0.5f, .total_steps = 40, .min_lr = 0.01f, .warmup_steps = 4},
    };
    for (size_t k = 0; k < sizeof(all) / sizeof(all[0]); k++) {
        for (int64_t i = 0; i < 40; i++) {
            float lr = mu_schedule_lr(&all[k], i);
            put(&lr, 1);
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        return 2;
    }
    if (strcmp(argv[1], "schedule") == 0) {
        return schedules();
    }
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 4});
    mu_module *m = mu_mlp(c, 7, (int64_t[]){33}, 1, 5); /* 4 parameters, sizes that need padding */
    float clip = 0;
    mu_optimizer *o = m != NULL ? make(m, argv[1], &clip) : NULL;
    mui_store *s = o != NULL ? mui_store_of(m) : NULL;
    MU_OR_DIE(c, mu_context_status(c));
    if (s == NULL) {
        return 2;
    }
    float buffer[400];
    for (int64_t i = 0; i < s->count; i++) {
        mu_tensor *t = mu_parameter_tensor(s->parameters[i]);
        MU_OR_DIE(c, mu_tensor_read(t, buffer, mu_tensor_elements(t)));
        put(buffer, mu_tensor_elements(t));
    }
    mui_rng r;
    mui_rng_init(&r, 1, 2);
    for (int step = 0; step < STEPS; step++) {
        float grads[4][400];
        bool present[4];
        for (int64_t i = 0; i < s->count; i++) {
            mu_parameter *p = s->parameters[i];
            int64_t n = mu_tensor_elements(&p->value);
            /* The second comes late, and each is missing now and then. */
            present[i] = mui_rng_below(&r, 4) != 0 && (i != 1 || step > 5);
            for (int64_t k = 0; k < n; k++) {
                grads[i][k] = mui_rng_normal(&r);
            }
            p->grad_state = MUI_GRAD_NONE;
            if (present[i]) {
                MU_OR_DIE(c, mui_tensor_set_raw(&p->grad_view, grads[i], (size_t)n * sizeof(float)));
                p->grad_state = MUI_GRAD_LOCAL;
            }
        }
        if (step == 30) {
            mu_optimizer_set_lr(o, mu_optimizer_lr(o) * 0.5f);
        }
        if (clip > 0) {
            float norm = 0;
            MU_OR_DIE(c, mu_clip_grad_norm(m, clip, &norm));
            put(&norm, 1);
        }
        MU_OR_DIE(c, mu_optimizer_step(o));
        for (int64_t i = 0; i < s->count; i++) {
            mu_tensor *t = mu_parameter_tensor(s->parameters[i]);
            int64_t n = mu_tensor_elements(t);
            float flag = present[i];
            MU_OR_DIE(c, mu_tensor_read(t, buffer, n));
            put(&flag, 1);
            put(grads[i], n);
            put(buffer, n);
        }
    }
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
