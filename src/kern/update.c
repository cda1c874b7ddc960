/* Optimiser updates over flat slabs, in PyTorch's order of operations (torch/optim of 1.13, the one-tensor form).
 * Compiled without contraction to fused multiply-add: replicas on CPUs of different kinds then stay bitwise equal. */
#include "kern/engine.h"
#include "kern/fast_math.h"
#include "kern/share.h"

MUI_CLONES static void sgd_plain(int64_t n, float *w, const float *g, float lr, float decay)
{
    for (int64_t i = 0; i < n; i++) {
        w[i] -= lr * (g[i] + decay * w[i]);
    }
}

MUI_CLONES static void sgd_first(int64_t n, float *w, const float *g, float *m, float lr, float decay, float momentum,
                                 bool nesterov)
{
    float carry = nesterov ? momentum : 0.0f;
    for (int64_t i = 0; i < n; i++) {
        float d = g[i] + decay * w[i];
        m[i] = d;
        w[i] -= lr * (d + carry * d);
    }
}

MUI_CLONES static void sgd_momentum(int64_t n, float *w, const float *g, float *m, float lr, float decay,
                                    float momentum, float damped)
{
    for (int64_t i = 0; i < n; i++) {
        float v = momentum * m[i] + damped * (g[i] + decay * w[i]);
        m[i] = v;
        w[i] -= lr * v;
    }
}

MUI_CLONES static void sgd_nesterov(int64_t n, float *w, const float *g, float *m, float lr, float decay,
                                    float momentum, float damped)
{
    for (int64_t i = 0; i < n; i++) {
        float d = g[i] + decay * w[i];
        float v = momentum * m[i] + damped * d;
        m[i] = v;
        w[i] -= lr * (d + momentum * v);
    }
}

/* Of either kind: what an update reads and writes. */
typedef struct slabs {
    float *w;
    const float *g;
    float *m, *v;
    const void *how;
} slabs;

static void sgd_part(void *args, int64_t from, int64_t to)
{
    const slabs *s = args;
    const mui_sgd_args *a = s->how;
    int64_t n = to - from;
    float *w = s->w + from, *m = s->m != NULL ? s->m + from : NULL;
    const float *g = s->g + from;
    float lr = (float)a->lr, decay = (float)a->weight_decay, momentum = (float)a->momentum;
    float damped = (float)(1.0 - a->dampening);
    if (m == NULL || momentum == 0.0f) {
        sgd_plain(n, w, g, lr, decay);
    } else if (a->first) {
        sgd_first(n, w, g, m, lr, decay, momentum, a->nesterov);
    } else if (a->nesterov) {
        sgd_nesterov(n, w, g, m, lr, decay, momentum, damped);
    } else {
        sgd_momentum(n, w, g, m, lr, decay, momentum, damped);
    }
}

void mui_sgd_update(mui_engine *e, int64_t n, float *w, const float *g, float *m, const mui_sgd_args *a)
{
    mui_split(e, n, sgd_part, &(slabs){.w = w, .g = g, .m = m, .how = a});
}

/* Factors of one step, all rounded to float once, as PyTorch passes scalars to its kernels. */
typedef struct adam_factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps, step_size, decay, shrink;
} adam_factors;

MUI_CLONES static void adam(int64_t n, float *w, const float *g, float *m, float *v, const adam_factors *f)
{
    const adam_factors a = *f;
    for (int64_t i = 0; i < n; i++) {
        float p = w[i] * a.shrink;
        float d = g[i] + a.decay * p;
        float first = m[i] * a.beta1 + a.one_minus_beta1 * d;
        float second = v[i] * a.beta2 + a.one_minus_beta2 * d * d;
        m[i] = first;
        v[i] = second;
        w[i] = p - a.step_size * (first / (sqrtf(second) / a.root_correction2 + a.eps));
    }
}

static void adam_part(void *args, int64_t from, int64_t to)
{
    const slabs *s = args;
    adam(to - from, s->w + from, s->g + from, s->m + from, s->v + from, s->how);
}

void mui_adam_update(mui_engine *e, int64_t n, float *w, const float *g, float *m, float *v, const mui_adam_args *a)
{
    double correction1 = 1.0 - pow(a->beta1, (double)a->step), correction2 = 1.0 - pow(a->beta2, (double)a->step);
    adam_factors f = {.beta1 = (float)a->beta1,
                      .one_minus_beta1 = (float)(1.0 - a->beta1),
                      .beta2 = (float)a->beta2,
                      .one_minus_beta2 = (float)(1.0 - a->beta2),
                      .root_correction2 = (float)sqrt(correction2),
                      .eps = (float)a->eps,
                      .step_size = (float)(a->lr / correction1),
                      .decay = a->decoupled ? 0.0f : (float)a->weight_decay,
                      .shrink = a->decoupled ? (float)(1.0 - a->lr * a->weight_decay) : 1.0f};
    mui_split(e, n, adam_part, &(slabs){.w = w, .g = g, .m = m, .v = v, .how = &f});
}

MUI_CLONES void mui_scale_inplace(int64_t n, float *x, float a)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] *= a;
    }
}
