/* Making optimisers, following the tree, groups of parameters. */
#include "optim/shard.h"
#include "base/alloc.h"
#include "base/glob.h"
#include "base/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int mui_optimizer_states(const mu_optimizer *o)
{
    if (o->kind != MUI_OPTIMIZER_SGD) {
        return 2;
    }
    for (size_t g = 0; g < o->group_count; g++) {
        if (o->groups[g].settings.momentum != 0) {
            return 1;
        }
    }
    return 0;
}

/* -- making and freeing ----------------------------------------------------------------------------------------- */
static void destroy(void *object)
{
    mu_optimizer *o = object;
    mui_store *s = o->source->built(o->source);
    for (int i = 0; s != NULL && i < MUI_OPTIMIZER_MAX_STATES; i++) {
        if (o->slabs[i] != NULL) {
            mui_store_remove_slab(s, o->slabs[i]);
        }
    }
    mui_shard_close(o);
    if (s != NULL && o->counted && s->stepping > 0) {
        s->stepping--;
    }
    o->source->users--;
    for (size_t i = 0; i < o->group_count; i++) {
        mui_free(o->context, o->groups[i].pattern);
    }
    mui_free(o->context, o->groups);
    mui_free(o->context, o->progress);
    mui_free(o->context, o->ours);
    mui_free(o->context, o);
}

void mu_optimizer_free(mu_optimizer *o)
{
    if (o != NULL) {
        mui_context_disown(o->context, o);
        destroy(o);
    }
}

static bool at_least_zero(float v)
{
    return isfinite(v) && v >= 0;
}

/* Between a reduction and the step a tree's gradients are either whole or scattered. */
static mu_status check_sharing(const mui_store *s, const mu_group *shard)
{
    if (s->stepping == 0 || s->sharded_over == shard) {
        return MU_OK;
    }
    return mui_fail(s->context, MU_ERR_STATE,
                    "the model has an optimiser %s: all optimisers of a tree share their state over one group, or none does",
                    s->sharded_over == NULL ? "that does not share its state" : "that shares its state over another group");
}

/* Whatever fails on one rank fails on all. */
static mu_status join(mu_optimizer *o, mu_group *shard)
{
    mui_store *s = o->source->store(o->source);
    mu_status status = s != NULL ? check_sharing(s, shard) : mu_context_status(o->context);
    if (shard != NULL) {
        status = mui_shard_open(o, shard, status);
    } else if (status == MU_OK && mui_optimizer_follow(o) == NULL) {
        status = mu_context_status(o->context);
    }
    if (status == MU_OK) {
        s->stepping++;
        o->counted = true;
    }
    return status;
}

static mu_optimizer *make(mu_module *root, mui_optimizer_kind kind, const mui_settings *settings, mu_group *shard)
{
    mui_source *source = (mui_source *)root;
    mu_context *c = source->context;
    if (mui_failed(c)) {
        return NULL;
    }
    mu_optimizer *o = mui_alloc(c, sizeof(*o));
    if (o == NULL) {
        return NULL;
    }
    *o = (mu_optimizer){.context = c, .source = source, .kind = kind};
    source->users++;
    if (!MUI_GROW(c, o->groups, o->group_count, o->group_capacity)) {
        destroy(o);
        return NULL;
    }
    o->groups[o->group_count++] = (mui_group_setting){.settings = *settings};
    /* Before modules and their stores, whichever was made first. */
    if (mui_context_own(c, o, destroy, MUI_OWN_FIRST) != MU_OK) {
        return NULL;
    }
    if (join(o, mu_group_size(shard) > 1 ? shard : NULL) != MU_OK) {
        mu_optimizer_free(o);
        return NULL;
    }
    return o;
}

mu_optimizer *mu_sgd(mu_module *root, float lr, const mu_sgd_options *options)
{
    if (root == NULL) {
        return NULL;
    }
    mu_sgd_options s = options != NULL ? *options : (mu_sgd_options){0};
    if (!at_least_zero(lr) || !at_least_zero(s.momentum) || !isfinite(s.dampening) || !at_least_zero(s.weight_decay)) {
        mui_fail(((mui_source *)root)->context, MU_ERR_ARG,
                 "sgd: lr %g, momentum %g, dampening %g, weight decay %g; they must be finite and not negative",
                 (double)lr, (double)s.momentum, (double)s.dampening, (double)s.weight_decay);
        return NULL;
    }
    if (s.nesterov && (s.momentum <= 0 || s.dampening != 0)) {
        mui_fail(((mui_source *)root)->context, MU_ERR_ARG,
                 "sgd: Nesterov needs a momentum and no dampening; they are %g and %g", (double)s.momentum,
                 (double)s.dampening);
        return NULL;
    }
    return make(root, MUI_OPTIMIZER_SGD,
                &(mui_settings){.lr = mui_as_written(lr),
                                .lr_factor = 1,
                                .momentum = mui_as_written(s.momentum),
                                .dampening = mui_as_written(s.dampening),
                                .weight_decay = mui_as_written(s.weight_decay),
                                .nesterov = s.nesterov},
                s.shard);
}

static mu_optimizer *make_adam(mu_module *root, float lr, const mu_adam_options *options, mui_optimizer_kind kind)
{
    if (root == NULL) {
        return NULL;
    }
    mu_adam_options a = options != NULL ? *options : (mu_adam_options){0};
    a.beta1 = a.beta1 != 0 ? a.beta1 : 0.9f;
    a.beta2 = a.beta2 != 0 ? a.beta2 : 0.999f;
    a.eps = a.eps != 0 ? a.eps : 1e-8f;
    if (kind == MUI_OPTIMIZER_ADAMW) {
        a.weight_decay = a.weight_decay == 0 ? 0.01f : a.weight_decay < 0 ? 0.0f : a.weight_decay;
    }
    if (!at_least_zero(lr) || !(a.beta1 >= 0 && a.beta1 < 1) || !(a.beta2 >= 0 && a.beta2 < 1) ||
        !at_least_zero(a.eps) || !at_least_zero(a.weight_decay)) {
        mui_fail(((mui_source *)root)->context, MU_ERR_ARG,
                 "adam: lr %g, betas %g and %g, eps %g, weight decay %g; betas must be in [0, 1), the others finite and "
                 "not negative",
                 (double)lr, (double)a.beta1, (double)a.beta2, (double)a.eps, (double)a.weight_decay);
        return NULL;
    }
    return make(root, kind,
                &(mui_settings){.lr = mui_as_written(lr),
                                .lr_factor = 1,
                                .beta1 = mui_as_written(a.beta1),
                                .beta2 = mui_as_written(a.beta2),
                                .eps = mui_as_written(a.eps),
                                .weight_decay = mui_as_written(a.weight_decay)},
                a.shard);
}

mu_optimizer *mu_adam(mu_module *root, float lr, const mu_adam_options *options)
{
    return make_adam(root, lr, options, MUI_OPTIMIZER_ADAM);
}

mu_optimizer *mu_adamw(mu_module *root, float lr, const mu_adam_options *options)
{
    return make_adam(root, lr, options, MUI_OPTIMIZER_ADAMW);
}

/* -- following the tree ----------------------------------------------------------------------------------------- */
static int group_of(const mu_optimizer *o, const mu_parameter *p)
{
    for (size_t g = o->group_count; g-- > 1;) {
        if (mui_glob_match(o->groups[g].pattern, p->name)) {
            return (int)g; /* the last that matches */
        }
    }
    return 0;
}

static int by_id(const void *a, const void *b)
{
    const mui_progress *x = a, *y = b;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Fills fresh and ours for the store's parameters; what o knows of them is carried over. */
static void carry_over(mu_optimizer *o, mui_store *s, mui_progress *fresh, int64_t *ours, int64_t *ours_count)
{
    /* The old array is of no other use any more, so it may as well be sorted in place. */
    if (o->count > 0) {
        qsort(o->progress, (size_t)o->count, sizeof(*o->progress), by_id);
    }
    *ours_count = 0;
    for (int64_t i = 0; i < s->count; i++) {
        mu_parameter *p = s->parameters[i];
        mui_progress key = {.id = p->id};
        mui_progress *known =
            o->count > 0 ? bsearch(&key, o->progress, (size_t)o->count, sizeof(key), by_id) : NULL;
        fresh[i] = known != NULL ? *known : key;
        fresh[i].group = group_of(o, p);
        fresh[i].ours = o->source->contains(o->source, p);
        if (fresh[i].ours) {
            ours[(*ours_count)++] = i;
        }
    }
}

mui_store *mui_optimizer_follow(mu_optimizer *o)
{
    mu_context *c = o->context;
    mui_store *s = o->source->store(o->source);
    if (s == NULL || (s == o->store && s->version == o->store_version && s->layout_hash == o->store_hash)) {
        return s;
    }
    for (int i = 0; i < mui_optimizer_states(o) && o->shard == NULL; i++) {
        if (o->slabs[i] == NULL) {
            o->slabs[i] = mui_store_add_slab(s);
            if (o->slabs[i] == NULL) {
                return NULL;
            }
        }
    }
    mui_progress *fresh = mui_calloc(c, (size_t)s->count + 1, sizeof(*fresh));
    int64_t *ours = mui_calloc(c, (size_t)s->count + 1, sizeof(*ours));
    if (fresh == NULL || ours == NULL) {
        mui_free(c, fresh);
        mui_free(c, ours);
        return NULL;
    }
    carry_over(o, s, fresh, ours, &o->ours_count);
    mui_free(c, o->progress);
    mui_free(c, o->ours);
    o->progress = fresh;
    o->ours = ours;
    o->count = s->count;
    o->store = s;
    o->store_version = s->version;
    o->store_hash = s->layout_hash;
    return s;
}

mu_status mu_optimizer_add_group(mu_optimizer *o, const mu_param_group *group)
{
    if (o == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "parameter group: the optimiser is NULL");
    }
    mu_context *c = o->context;
    if (group == NULL || group->pattern == NULL || isnan(group->lr_factor) || isnan(group->weight_decay)) {
        return mui_fail(c, MU_ERR_ARG, "parameter group: it needs a pattern, and numbers");
    }
    mui_store *s = mui_optimizer_follow(o);
    if (s == NULL) {
        return mu_context_status(c);
    }
    bool found = false;
    for (int64_t i = 0; i < o->ours_count && !found; i++) {
        found = mui_glob_match(group->pattern, s->parameters[o->ours[i]]->name);
    }
    if (!found) {
        return mui_fail(c, MU_ERR_ARG, "parameter group: no parameter matches \"%s\"", group->pattern);
    }
    char *pattern = mui_strdup(c, group->pattern);
    if (pattern == NULL || !MUI_GROW(c, o->groups, o->group_count, o->group_capacity)) {
        mui_free(c, pattern);
        return MU_ERR_NOMEM;
    }
    mui_group_setting g = {.pattern = pattern, .settings = o->groups[0].settings};
    g.settings.lr_factor = group->lr_factor == 0 ? 1 : group->lr_factor < 0 ? 0 : mui_as_written(group->lr_factor);
    g.settings.lr *= g.settings.lr_factor;
    if (group->weight_decay != 0) {
        g.settings.weight_decay = group->weight_decay < 0 ? 0 : mui_as_written(group->weight_decay);
    }
    o->groups[o->group_count++] = g;
    for (int64_t i = 0; i < s->count; i++) {
        o->progress[i].group = group_of(o, s->parameters[i]);
    }
    return MU_OK;
}

/* -- what it is told and asked ------------------------------------------------------------------------------------ */
void mu_optimizer_keep_grad(mu_optimizer *o, bool keep)
{
    if (o != NULL) {
        o->keep_grad = keep;
    }
}

void mu_optimizer_set_lr(mu_optimizer *o, float lr)
{
    if (o == NULL) {
        return;
    }
    if (!at_least_zero(lr)) { /* one step with it would ruin every parameter */
        mui_fail(o->context, MU_ERR_ARG, "mu_optimizer_set_lr: %g is not a learning rate; it stays %g", (double)lr,
                 o->groups[0].settings.lr);
        return;
    }
    double as_written = mui_as_written(lr);
    for (size_t g = 0; g < o->group_count; g++) {
        o->groups[g].settings.lr = as_written * o->groups[g].settings.lr_factor;
    }
}

float mu_optimizer_lr(const mu_optimizer *o)
{
    return o != NULL ? (float)o->groups[0].settings.lr : 0;
}

int64_t mu_optimizer_steps(const mu_optimizer *o)
{
    return o != NULL ? o->steps : 0;
}

float *mui_optimizer_state_at(const mu_optimizer *o, int k, size_t at)
{
    float *data = o->shard != NULL ? o->shard->states[k] : o->slabs[k] != NULL ? o->slabs[k]->data : NULL;
    return data != NULL ? data + at : NULL;
}

size_t mu_optimizer_state_bytes(const mu_optimizer *o)
{
    const mui_store *s = o != NULL ? o->source->built(o->source) : NULL;
    size_t floats = s == NULL ? 0 : o->shard != NULL ? o->shard->floats : s->floats, states = 0;
    for (int k = 0; floats > 0 && k < MUI_OPTIMIZER_MAX_STATES; k++) {
        states += mui_optimizer_state_at(o, k, 0) != NULL;
    }
    return states * floats * sizeof(float);
}

int mu_optimizer_ranks(const mu_optimizer *o)
{
    return o != NULL && o->shard != NULL ? mu_group_size(o->shard->group) : 1;
}
