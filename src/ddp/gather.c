/* Gradients that were scattered for a sharded optimiser, made whole on every rank. */
#include "comm/reduce.h"
#include "ddp/replica.h"

/* What a rank added itself since the reduction is not to be overwritten by what others added. */
static mu_status check(mu_ddp *d)
{
    for (int64_t i = 0; i < d->member_count; i++) {
        const mu_parameter *p = d->members[i].parameter;
        if (p->grad_state == MUI_GRAD_LOCAL || p->grad_state == MUI_GRAD_MIXED) {
            return mui_fail(d->context, MU_ERR_STATE, "mu_ddp_gather_gradients (ddp `%s`): rank %d has added to the gradient of "
                            "`%s` since the last reduction", d->name, mu_group_rank(d->group), p->name);
        }
    }
    return MU_OK;
}

static mu_status gather(mu_ddp *d)
{
    mui_store *s = d->store;
    int size = mu_group_size(d->group);
    mu_status status = MU_OK;
    for (int64_t b = 0; b < d->bucket_count && status == MU_OK; b++) {
        const mui_bucket *k = &s->buckets[b];
        size_t slice = (size_t)mui_scatter_of(k->floats, size, MU_F32) / (size_t)size;
        float *grads = s->grads + k->offset;
        status = slice == 0 ? MU_OK
                            : mu_all_gather(d->group, grads + (size_t)mu_group_rank(d->group) * slice, grads,
                                            slice * sizeof(float));
    }
    return status < 0 ? mui_ddp_break(d, status) : MU_OK;
}

mu_status mu_ddp_gather_gradients(mu_ddp *d)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    mui_aside aside;
    mu_status s = mui_ddp_meet(d, MUI_KIND_GATHER, "mu_ddp_gather_gradients", &aside);
    if (s == MU_OK) {
        s = mui_agree(d->context, d->group, check(d));
    }
    if (s == MU_OK && d->store->scattered_version != 0) {
        s = gather(d);
        d->store->scattered_version = 0;
    }
    return mui_ddp_part(d, &aside, s);
}
