/* The optimiser as io sees it. */
#include "optim/shard.h"
#include "base/alloc.h"
#include "comm/agree.h"

#include <math.h>
#include <string.h>

mui_optimizer_kind mui_optimizer_kind_of(const mu_optimizer *o)
{
    return o->kind;
}

const char *mui_optimizer_kind_name(mui_optimizer_kind kind)
{
    static const char *const names[] = {"SGD", "Adam", "AdamW"};
    return names[kind];
}

mu_context *mui_optimizer_context(const mu_optimizer *o)
{
    return o->context;
}

int mui_optimizer_groups(const mu_optimizer *o)
{
    return (int)o->group_count;
}

mui_settings mui_optimizer_get_settings(const mu_optimizer *o, int group)
{
    return o->groups[group].settings;
}

const char *mui_settings_problem(mui_optimizer_kind kind, const mui_settings *s)
{
    if (!(isfinite(s->lr) && s->lr >= 0)) {
        return "lr";
    }
    if (!(isfinite(s->weight_decay) && s->weight_decay >= 0)) {
        return "weight_decay";
    }
    if (kind != MUI_OPTIMIZER_SGD) {
        return !(s->beta1 >= 0 && s->beta1 < 1) || !(s->beta2 >= 0 && s->beta2 < 1) ? "betas"
               : !(isfinite(s->eps) && s->eps >= 0)                                 ? "eps"
                                                                                    : NULL;
    }
    return !(isfinite(s->momentum) && s->momentum >= 0)                  ? "momentum"
           : !isfinite(s->dampening)                                     ? "dampening"
           : s->nesterov && !(s->momentum > 0 && s->dampening == 0)      ? "nesterov"
                                                                         : NULL;
}

mu_status mui_optimizer_set_settings(mu_optimizer *o, int group, const mui_settings *s)
{
    mui_store *store = mui_optimizer_follow(o);
    if (store == NULL) {
        return mu_context_status(o->context);
    }
    if (o->kind == MUI_OPTIMIZER_SGD && s->momentum != 0 && o->shard != NULL) {
        mu_status status = mui_shard_add_state(o, 0);
        if (status != MU_OK) {
            return status;
        }
    } else if (o->kind == MUI_OPTIMIZER_SGD && s->momentum != 0 && o->slabs[0] == NULL) {
        o->slabs[0] = mui_store_add_slab(store);
        if (o->slabs[0] == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    o->groups[group].settings = *s;
    return MU_OK;
}

void mui_optimizer_restore_settings(mu_optimizer *o, const mui_settings *all)
{
    for (size_t g = 0; g < o->group_count; g++) {
        o->groups[g].settings = all[g];
    }
}

mui_store *mui_optimizer_store(mu_optimizer *o)
{
    return mui_optimizer_follow(o);
}

int64_t mui_optimizer_count(mu_optimizer *o)
{
    return mui_optimizer_follow(o) != NULL ? o->ours_count : -1;
}

static mu_parameter *parameter_at(const mu_optimizer *o, int64_t i)
{
    return o->source->built(o->source)->parameters[o->ours[i]];
}

mui_optimizer_entry mui_optimizer_get(mu_optimizer *o, int64_t i)
{
    const mui_progress *q = &o->progress[o->ours[i]];
    return (mui_optimizer_entry){
        .parameter = parameter_at(o, i), .group = q->group, .has_state = q->has_state, .step = q->step};
}

const char *mui_optimizer_state_name(const mu_optimizer *o, int state)
{
    if (o->kind == MUI_OPTIMIZER_SGD) {
        return "momentum_buffer";
    }
    return state == 0 ? "exp_avg" : "exp_avg_sq";
}

/* A tensor header over the parameter's slice of a state slab: same shape, same layout. Shared state has none: it goes
 * through one of its own, *own, which is to be freed. */
static mu_status slice(mu_optimizer *o, int64_t i, int state, int64_t elements, mu_tensor *out, float **own)
{
    mu_parameter *p = parameter_at(o, i);
    *own = NULL;
    if (state < 0 || state >= mui_optimizer_states(o) || elements != mui_dims_elements(p->value.dims)) {
        return mui_fail(o->context, MU_ERR_ARG, "optimiser state %d of %s, %lld elements: there is none of that size",
                        state, p->name, (long long)elements);
    }
    if (o->shard != NULL && (*own = mui_calloc(o->context, p->capacity, sizeof(float))) == NULL) {
        return MU_ERR_NOMEM;
    }
    *out = p->value;
    out->parameter = NULL;
    out->requires_grad = false;
    out->data = (char *)(*own != NULL ? *own : o->slabs[state]->data + p->offset);
    return MU_OK;
}

mu_status mui_optimizer_read_state(mu_optimizer *o, int64_t i, int state, float *out, int64_t elements)
{
    mu_tensor t;
    float *own = NULL;
    mu_status s = slice(o, i, state, elements, &t, &own);
    if (s != MU_OK && o->shard != NULL) {
        mu_group_abort(o->shard->group, mu_context_message(o->context)); /* others wait for its part */
    }
    if (s == MU_OK && own != NULL) {
        s = mui_shard_collect(o, parameter_at(o, i), state, own);
    }
    s = s != MU_OK ? s : mui_tensor_get_raw(&t, out, (size_t)elements * sizeof(float));
    mui_free(o->context, own);
    return s;
}

mu_status mui_optimizer_write_state(mu_optimizer *o, int64_t i, int state, const float *in, int64_t elements)
{
    mu_tensor t;
    float *own = NULL;
    mu_status s = slice(o, i, state, elements, &t, &own);
    s = s != MU_OK ? s : mui_tensor_set_raw(&t, in, (size_t)elements * sizeof(float));
    if (s == MU_OK && own != NULL) {
        mui_shard_put(o, parameter_at(o, i), state, own);
    }
    mui_free(o->context, own);
    return s;
}

void mui_optimizer_set_progress(mu_optimizer *o, int64_t i, bool has_state, int64_t step)
{
    mui_progress *q = &o->progress[o->ours[i]];
    q->has_state = has_state;
    q->step = has_state ? step : 0;
    const mu_parameter *p = parameter_at(o, i);
    for (int k = 0; !has_state && k < MUI_OPTIMIZER_MAX_STATES; k++) {
        if (o->shard != NULL) {
            mui_shard_put(o, p, k, NULL);
        } else if (o->slabs[k] != NULL) {
            memset(o->slabs[k]->data + p->offset, 0, p->capacity * sizeof(float));
        }
    }
}

/* -- shared state ------------------------------------------------------------------------------------------------- */
mu_status mui_optimizer_settle(mu_optimizer *o, const char *what, mu_status mine)
{
    if (o == NULL || o->shard == NULL) {
        return mine;
    }
    mine = mine == MU_OK && mui_optimizer_follow(o) == NULL ? mu_context_status(o->context) : mine;
    mu_status s = mui_shard_meet(o, MUI_KIND_STATE, what, mine);
    return s == MU_OK ? mui_shard_settle(o) : s;
}

mu_status mui_optimizer_agree(mu_optimizer *o, mu_status mine)
{
    return o != NULL && o->shard != NULL ? mui_agree(o->context, o->shard->group, mine) : mine;
}

bool mui_optimizer_writes(const mu_optimizer *o)
{
    return o == NULL || o->shard == NULL || mu_group_rank(o->shard->group) == 0;
}

float *mui_optimizer_own_state(const mu_optimizer *o, int state, size_t *floats)
{
    *floats = o->shard != NULL && o->shard->states[state] != NULL ? o->shard->floats : 0;
    return *floats > 0 ? o->shard->states[state] : NULL;
}

void mui_optimizer_set_steps(mu_optimizer *o, int64_t steps)
{
    o->steps = steps;
}
