/* Making optimisers, following the tree, and the step: a loop over runs of neighbouring slices. */
#include "optim/shard.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/glob.h"
#include "base/profile.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNREDUCED_NAMED = 4 };

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

/* -- the step --------------------------------------------------------------------------------------------------- */
/* Neighbouring slices that are updated alike. */
typedef struct run {
    size_t offset, floats; /* in the slabs */
    size_t at;             /* in the state: the same, unless it is shared */
    int group;
    bool first;     /* no state yet */
    int64_t step;   /* Adam: of each parameter in the run */
} run;

static float *state_at(const mu_optimizer *o, int k, size_t at)
{
    float *data = o->shard != NULL ? o->shard->states[k] : o->slabs[k] != NULL ? o->slabs[k]->data : NULL;
    return data != NULL ? data + at : NULL;
}

static void update(const mu_optimizer *o, mui_store *s, const run *r)
{
    mui_engine *e = o->context->engine; /* the store's layouts are its; asked for here, it could fail amid a step */
    const mui_settings *g = &o->groups[r->group].settings;
    int64_t n = (int64_t)r->floats;
    float *w = s->values + r->offset;
    const float *grad = s->grads + r->offset;
    float *first = state_at(o, 0, r->at);
    if (o->kind == MUI_OPTIMIZER_SGD) {
        mui_sgd_update(e, n, w, grad, first,
                       &(mui_sgd_args){.lr = g->lr,
                                       .momentum = g->momentum,
                                       .dampening = g->dampening,
                                       .weight_decay = g->weight_decay,
                                       .nesterov = g->nesterov,
                                       .first = r->first});
        return;
    }
    mui_adam_update(e, n, w, grad, first, state_at(o, 1, r->at),
                    &(mui_adam_args){.lr = g->lr,
                                     .beta1 = g->beta1,
                                     .beta2 = g->beta2,
                                     .eps = g->eps,
                                     .weight_decay = g->weight_decay,
                                     .decoupled = o->kind == MUI_OPTIMIZER_ADAMW,
                                     .step = r->step});
}

/* Ranks that step on gradients of their own drift apart; PyTorch says nothing when forward went around the wrapper. */
static void warn_unreduced(mu_optimizer *o, const mui_store *s)
{
    mui_text names;
    mui_text_init(&names, o->context);
    int64_t count = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        if (o->progress[i].ours && !p->frozen && (p->grad_state == MUI_GRAD_LOCAL || p->grad_state == MUI_GRAD_MIXED)) {
            if (count < UNREDUCED_NAMED) {
                mui_text_add(&names, "%s%s", count > 0 ? ", " : "", p->name);
            }
            count++;
        }
    }
    if (count > 0) {
        o->warned_unreduced = true;
        mui_log(o->context, MU_LOG_WARN,
                "rank %d of %d: the optimiser steps on gradients of %lld parameters that no reduction brought together "
                "(mu_backward or a deferred mu_ddp_backward_with came last): %s%s; the replicas will differ",
                mu_context_rank(o->context), mu_context_size(o->context), (long long)count, mui_text_get(&names),
                count > UNREDUCED_NAMED ? ", ..." : "");
    }
    mui_text_free(&names);
}

/* Goes on with the run, or ends it and begins another. */
static void extend(const mu_optimizer *o, mui_store *s, run *r, const run *part)
{
    bool alike = r->floats > 0 && r->offset + r->floats == part->offset && r->at + r->floats == part->at &&
                 r->group == part->group && r->first == part->first &&
                 (o->kind == MUI_OPTIMIZER_SGD || r->step == part->step);
    if (alike) {
        r->floats += part->floats;
        return;
    }
    if (r->floats > 0) {
        update(o, s, r);
    }
    *r = *part;
}

/* Of a parameter, what this rank updates: all of it, or its pieces, which lie in the order of the slabs. */
static void extend_by(const mu_optimizer *o, mui_store *s, run *r, int64_t place, run part, size_t *piece)
{
    const mui_shard *h = o->shard;
    const mu_parameter *p = s->parameters[s->order[place]];
    if (h == NULL) {
        part.offset = part.at = p->offset;
        part.floats = p->capacity;
        extend(o, s, r, &part);
        return;
    }
    while (*piece < h->count && h->pieces[*piece].place < place) {
        ++*piece;
    }
    for (; *piece < h->count && h->pieces[*piece].place == place; ++*piece) {
        const mui_piece *q = &h->pieces[*piece];
        part.offset = p->offset + q->from;
        part.at = q->at;
        part.floats = q->floats;
        extend(o, s, r, &part);
    }
}

static mu_status begin_step(mu_optimizer *o, mui_store *s)
{
    if (o->shard == NULL) {
        if (s->reduced_over > 1 && !o->warned_unreduced) {
            warn_unreduced(o, s);
        }
        return MU_OK;
    }
    char what[48];
    snprintf(what, sizeof(what), "step %lld", (long long)o->steps + 1);
    mu_status status = mui_shard_meet(o, MUI_KIND_STEP, what, mui_shard_check(o, s));
    return status == MU_OK ? mui_shard_settle(o) : status;
}

/* Counts, and updates values and states. Returns the number of floats. */
static int64_t step_all(mu_optimizer *o, mui_store *s, uint64_t now)
{
    run r = {0};
    int64_t floats = 0;
    size_t piece = 0;
    for (int64_t i = 0; i < s->count; i++) {
        int64_t index = s->order[i];
        mu_parameter *p = s->parameters[index];
        mui_progress *q = &o->progress[index];
        if (!q->ours || p->frozen || p->grad_state == MUI_GRAD_NONE) {
            continue;
        }
        q->step++;
        p->updates++;
        p->stepped = now;
        extend_by(o, s, &r, i, (run){.group = q->group, .first = !q->has_state, .step = q->step}, &piece);
        floats += (int64_t)p->capacity;
        q->has_state = true;
        if (!o->keep_grad) {
            p->grad_state = MUI_GRAD_NONE;
        }
    }
    if (r.floats > 0) {
        update(o, s, &r);
    }
    return floats / mu_optimizer_ranks(o);
}

mu_status mu_optimizer_step(mu_optimizer *o)
{
    if (o == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "optimiser step: the optimiser is NULL");
    }
    if (mui_failed(o->context)) {
        return mu_context_status(o->context);
    }
    mui_store *s = mui_optimizer_follow(o);
    if (s == NULL) {
        mu_status failed = mu_context_status(o->context);
        return o->shard != NULL ? mui_shard_meet(o, MUI_KIND_STEP, "a step", failed) : failed;
    }
    mui_place before = mui_go(o->context, MUI_OPTIMISER, NULL);
    mui_timer timer;
    mu_status status = begin_step(o, s);
    mui_timer_start(&timer, o->context, MUI_KIND_OPTIMIZER);
    uint64_t now = ++o->context->writes;
    int64_t floats = status == MU_OK ? step_all(o, s, now) : 0;
    int states = mui_optimizer_states(o);
    /* The value and each state read and written, the gradient read. */
    mui_timer_stop(&timer, 0, (double)floats * (double)sizeof(float) * (3 + 2 * states));
    if (status == MU_OK && o->shard != NULL) {
        status = mui_shard_gather(o, s, now);
    }
    if (status == MU_OK) {
        o->steps++;
        s->clears += !o->keep_grad;
    }
    mui_go(o->context, before.stage, before.path);
    return status;
}

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

size_t mu_optimizer_state_bytes(const mu_optimizer *o)
{
    const mui_store *s = o != NULL ? o->source->built(o->source) : NULL;
    size_t floats = s == NULL ? 0 : o->shard != NULL ? o->shard->floats : s->floats, states = 0;
    for (int k = 0; floats > 0 && k < MUI_OPTIMIZER_MAX_STATES; k++) {
        states += state_at(o, k, 0) != NULL;
    }
    return states * floats * sizeof(float);
}

int mu_optimizer_ranks(const mu_optimizer *o)
{
    return o != NULL && o->shard != NULL ? mu_group_size(o->shard->group) : 1;
}
