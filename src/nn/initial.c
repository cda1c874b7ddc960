/* Initial values, with PyTorch's distributions. Keyed by (seed, parameter path) and drawn in row-major order, so that
 * they depend neither on the order in which modules were made nor on memory layouts. */
#include "nn/nn.h"
#include "base/alloc.h"
#include "base/rng.h"
#include "kern/kern.h"

#include <math.h>

/* Elements that one output (dim 0) or one input (dim 1) is connected to, as torch.nn.init counts. */
static void fans(mu_dims d, double *in, double *out)
{
    double field = 1;
    for (int i = 2; i < d.ndim; i++) {
        field *= (double)d.dim[i];
    }
    *in = (double)d.dim[1] * field;
    *out = (double)d.dim[0] * field;
}

mu_status mui_init_check(mu_context *c, const char *name, mu_dims dims, mu_init init)
{
    switch (init.kind) {
    case MU_INIT_ZEROS:
    case MU_INIT_CONSTANT:
    case MU_INIT_UNIFORM:
    case MU_INIT_NORMAL: return MU_OK;
    case MU_INIT_KAIMING_UNIFORM:
    case MU_INIT_KAIMING_NORMAL:
    case MU_INIT_KAIMING_NORMAL_IN:
        if (dims.ndim < 2) {
            char text[MUI_DIMS_TEXT];
            return mui_fail(c, MU_ERR_ARG, "parameter %s of shape %s: Kaiming initialisation needs 2 dimensions", name,
                            mui_dims_text(dims, text));
        }
        return MU_OK;
    }
    return mui_fail(c, MU_ERR_ARG, "parameter %s: %d is no kind of initialisation", name, (int)init.kind);
}

static void draw_uniform(float *x, int64_t n, mui_rng *r, double bound)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)((2.0 * mui_rng_uniform(r) - 1.0) * bound);
    }
}

static void draw_normal(float *x, int64_t n, const mui_rng *r, double deviation)
{
    mui_normal(n, x, (float)deviation, r->key, r->stream);
}

mu_status mui_init_apply(mu_parameter *p)
{
    mu_context *c = p->context;
    mu_dims d = p->value.dims;
    int64_t n = mui_dims_elements(d);
    float *x = mui_calloc(c, (size_t)n + 1, sizeof(*x));
    if (x == NULL) {
        return MU_ERR_NOMEM;
    }
    mui_rng r;
    mui_rng_init(&r, mui_hash_u64(mui_hash_string(MUI_HASH_START, "initial values"), c->seed),
                 mui_hash_string(MUI_HASH_START, p->name));
    double in = 1, out = 1, value = p->init_value;
    if (d.ndim >= 2) {
        fans(d, &in, &out);
    }
    switch ((mu_init_kind)p->init_kind) {
    case MU_INIT_ZEROS: break;
    case MU_INIT_CONSTANT:
        for (int64_t i = 0; i < n; i++) {
            x[i] = p->init_value;
        }
        break;
    case MU_INIT_UNIFORM: draw_uniform(x, n, &r, value); break;
    case MU_INIT_NORMAL: draw_normal(x, n, &r, value); break;
    case MU_INIT_KAIMING_UNIFORM: draw_uniform(x, n, &r, sqrt(6.0 / ((1.0 + value * value) * in))); break;
    case MU_INIT_KAIMING_NORMAL: draw_normal(x, n, &r, sqrt(2.0 / out)); break;
    case MU_INIT_KAIMING_NORMAL_IN: draw_normal(x, n, &r, sqrt(2.0 / in)); break;
    }
    mu_status s = mui_tensor_set_raw(&p->value, x, (size_t)n * sizeof(*x));
    mui_free(c, x);
    p->initialised = s == MU_OK;
    return s;
}
