/* Communication hook: local SGD. Gradients stay, parameters are averaged every so many steps. */
#include "base/alloc.h"
#include "ddp/reducer_state.h"
#include "ddp/replica.h"
#include <muster/hooks.h>

#include <stdio.h>

enum { PERIOD = 4 };

struct mu_local_sgd {
    mu_ddp *d;
    mu_context *context;
    mu_local_sgd_options options;
    int64_t steps; /* of the optimiser */
};

/* Slices that lie together travel together. Padding is zero and stays so. */
static mu_status average(mu_ddp *d)
{
    mu_status s = MU_OK;
    for (int64_t i = 0; i < d->member_count && s == MU_OK;) {
        const mu_parameter *first = d->members[i].parameter;
        size_t n = 0;
        for (; i < d->member_count && d->members[i].parameter->offset == first->offset + n; i++) {
            n += d->members[i].parameter->capacity;
        }
        s = mu_all_reduce(d->group, d->store->values + first->offset, (int64_t)n, MU_F32, MU_MEAN);
    }
    mui_ddp_values_averaged(d);
    return s < 0 ? mui_ddp_break(d, s) : MU_OK;
}

mu_status mu_ddp_average_parameters(mu_ddp *d)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    if (d->reducer->in_hook) {
        return mui_fail(d->context, MU_ERR_STATE, "mu_ddp_average_parameters (ddp `%s`): from within a hook", d->name);
    }
    mui_aside aside;
    mu_status s = mui_ddp_meet(d, MUI_KIND_AVERAGE, "mu_ddp_average_parameters", &aside);
    s = s >= 0 ? average(d) : s;
    return mui_ddp_part(d, &aside, s);
}

/* A weighted gradient was multiplied by this rank's samples, and is to be that of its own mean. */
static mu_status local_sgd_hook(void *user, mu_bucket *b)
{
    const mu_local_sgd *l = user;
    if (l->steps < l->options.start) {
        return mu_bucket_all_reduce(b);
    }
    for (int64_t i = 0; i < b->elements && b->weighted && b->samples > 0; i++) {
        b->data[i] = (float)((double)b->data[i] / (double)b->samples);
    }
    return MU_OK;
}

mu_status mu_local_sgd_step(mu_local_sgd *l, bool *averaged)
{
    bool unused;
    averaged = averaged != NULL ? averaged : &unused;
    *averaged = false;
    if (l == NULL) {
        return MU_ERR_ARG;
    }
    int64_t local = l->steps++ - l->options.start;
    if (local < 0 || local % l->options.period != 0) {
        return mu_context_status(l->context);
    }
    mu_status s = mu_ddp_average_parameters(l->d);
    *averaged = s == MU_OK;
    return s;
}

static void local_sgd_destroy(void *object)
{
    mu_local_sgd *l = object;
    mui_free(l->context, l);
}

mu_local_sgd *mu_local_sgd_new(mu_ddp *d, const mu_local_sgd_options *options)
{
    if (d == NULL || mui_failed(d->context)) {
        return NULL;
    }
    mu_context *c = d->context;
    mu_local_sgd_options o = options != NULL ? *options : (mu_local_sgd_options){0};
    if (o.start < 0 || o.period < 0) {
        mui_fail(c, MU_ERR_ARG, "mu_local_sgd_new: start %lld, period %lld: neither may be negative",
                 (long long)o.start, (long long)o.period);
        return NULL;
    }
    if (d->options.check_every > 0) {
        mui_fail(c, MU_ERR_ARG, "mu_local_sgd_new: ddp `%s` has check_every %d, but its replicas are going to differ",
                 d->name, d->options.check_every);
        return NULL;
    }
    o.period = o.period > 0 ? o.period : PERIOD;
    mu_local_sgd *l = mui_calloc(c, 1, sizeof(*l));
    if (l == NULL) {
        return NULL;
    }
    *l = (mu_local_sgd){.d = d, .context = c, .options = o};
    char name[120];
    snprintf(name, sizeof(name), "local SGD(from %lld, every %lld)", (long long)o.start, (long long)o.period);
    if (mui_context_own(c, l, local_sgd_destroy, MUI_OWN_LAST) != MU_OK) {
        return NULL;
    }
    if (mu_ddp_set_hook(d, name, local_sgd_hook, l) != MU_OK) {
        mu_local_sgd_free(l);
        return NULL;
    }
    d->replicas_differ = true;
    return l;
}

void mu_local_sgd_free(mu_local_sgd *l)
{
    if (l != NULL) {
        mui_context_disown(l->context, l);
        local_sgd_destroy(l);
    }
}
