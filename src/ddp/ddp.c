/* Wrapping a model: options, the meeting of all ranks, and what becomes of a wrap that fails. Reductions: step.c. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

/* -- failure ---------------------------------------------------------------------------------------------------- */
void mui_aside_put(mu_context *c, mui_aside *a)
{
    a->status = mu_context_status(c);
    if (a->status != MU_OK) {
        snprintf(a->message, sizeof(a->message), "%s", mu_context_message(c));
        mu_context_clear(c);
    }
}

void mui_aside_restore(mu_context *c, const mui_aside *a)
{
    if (a->status != MU_OK) {
        pthread_mutex_lock(&c->lock);
        c->status = a->status;
        memcpy(c->message, a->message, sizeof(c->message));
        pthread_mutex_unlock(&c->lock);
    }
}

mu_status mui_ddp_break(mu_ddp *d, mu_status s)
{
    if (d->broken == MU_OK) {
        const char *why = mu_context_message(d->context);
        if (why[0] == '\0') {
            why = d->group->broken_text;
        }
        d->broken = s;
        snprintf(d->broken_text, sizeof(d->broken_text), "ddp `%.60s` cannot go on: %.1300s", d->name, why);
    }
    return mui_fail(d->context, s, "%s", d->broken_text);
}

mu_status mui_ddp_desert(mu_ddp *d, mu_status s)
{
    s = s < 0 ? s : MU_ERR_INTERNAL;
    if (mu_context_status(d->context) == MU_OK) {
        mui_fail(d->context, s, "ddp `%s`: could not lay out the model", d->name);
    }
    mu_group_abort(d->group, mu_context_message(d->context));
    return mui_ddp_break(d, s);
}

void mui_ddp_work(mu_ddp *d, const char *what)
{
    char text[MUI_IDENTITY_TEXT + 48];
    uint64_t sequence = mui_reducer_sequence(d->reducer);
    if (what != NULL) {
        snprintf(text, sizeof(text), "%s, %s", mui_reducer_text(d->reducer), what);
    } else if (sequence > 1) {
        snprintf(text, sizeof(text), "after reduction %llu (ddp `%.80s`)", (unsigned long long)(sequence - 1), d->name);
    } else {
        snprintf(text, sizeof(text), "after mu_ddp_wrap (ddp `%.80s`)", d->name);
    }
    mui_work(d->context, text);
}

void mui_ddp_count_anew(mu_ddp *d)
{
    for (int64_t i = 0; i < d->member_count; i++) {
        d->members[i].parameter->updates = 0;
    }
    mui_ddp_written_agreed(d);
}

/* -- wrapping --------------------------------------------------------------------------------------------------- */
static void ddp_destroy(void *object)
{
    mu_ddp *d = object;
    mu_context *c = d->context;
    if (d->root != NULL) {
        mui_store *s = ((mui_source *)d->root)->built((mui_source *)d->root);
        if (s != NULL && d->counted && s->wrappers > 0) {
            s->wrappers--;
        }
        ((mui_source *)d->root)->users--;
    }
    mui_ddp_free_layout(d);
    mui_text_free(&d->description);
    mui_reducer_free(d->reducer);
    mui_free(c, d->name);
    mui_free(c, d);
}

void mu_ddp_free(mu_ddp *d)
{
    if (d != NULL) {
        mui_ddp_warn_absent(d);
        mui_context_disown(d->context, d);
        ddp_destroy(d);
    }
}

/* Wraps of one group that exist, so that two models of one kind and layout are not taken for each other. */
static int next_ordinal(const mu_context *c, const mu_group *g, const char *name, bool *same_name)
{
    int ordinal = 0;
    for (size_t i = 0; i < c->owned_count; i++) {
        if (c->owned[i].destroy == ddp_destroy) {
            const mu_ddp *other = c->owned[i].object;
            if (other->group == g) {
                ordinal = other->ordinal > ordinal ? other->ordinal : ordinal;
                *same_name = *same_name || strcmp(other->name, name) == 0;
            }
        }
    }
    return ordinal + 1;
}

static mu_status set_up(mu_ddp *d, const mu_ddp_options *o)
{
    mu_context *c = d->context;
    if (o != NULL) {
        d->options = *o;
    }
    if (d->options.check_every < 0) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_wrap: check_every is %d, and must not be negative", o->check_every);
    }
    if ((unsigned)d->options.absent > MU_ABSENT_ERROR_ANY || (unsigned)d->options.nonfinite > MU_NONFINITE_ERROR) {
        return mui_fail(c, MU_ERR_ARG, "mu_ddp_wrap: absent is %d and nonfinite %d: one of mu_absent_policy and of "
                        "mu_nonfinite_policy were expected", (int)o->absent, (int)o->nonfinite);
    }
    d->options.bucket_bytes = d->options.bucket_bytes > 0 ? d->options.bucket_bytes : MUI_BUCKET_BYTES;
    d->options.first_bucket_bytes =
        d->options.first_bucket_bytes > 0 ? d->options.first_bucket_bytes : MUI_FIRST_BUCKET_BYTES;
    bool given = d->options.name != NULL, taken = false;
    const char *name = given ? d->options.name : mu_module_kind(d->root);
    d->options.name = NULL; /* a copy is kept */
    d->ordinal = next_ordinal(c, d->group, name, &taken);
    d->name = taken && !given ? mui_format(c, "%s %d", name, d->ordinal) : mui_strdup(c, name);
    mui_text_init(&d->description, c);
    if (d->name == NULL) {
        return MU_ERR_NOMEM;
    }
    d->reducer = mui_reducer_new(c, d->group, "ddp", d->name, (uint64_t)d->ordinal);
    return d->reducer != NULL ? MU_OK : MU_ERR_NOMEM;
}

/* A store that another wrapper moved into this group's memory stays with that memory's keeper. */
static mu_status find_memory(mu_ddp *d, const mui_store *s)
{
    if (s->grads_alloc == mui_grad_memory_alloc && ((mui_grad_memory *)s->grads_user)->group == d->group) {
        d->memory = s->grads_user;
    } else {
        d->memory = mui_grad_memory_new(d->context, d->group);
    }
    return d->memory != NULL ? MU_OK : MU_ERR_NOMEM;
}

/* Up to here a rank can fail alone, and then tells the others; from the gate on all fail alike. */
static mu_status join(mu_ddp *d)
{
    mui_store *s = mui_store_of(d->root);
    mu_status status = s != NULL ? find_memory(d, s) : mu_context_status(d->context);
    if (s != NULL && status == MU_OK) {
        status = mui_ddp_describe(d, s, &d->description);
    }
    if (s == NULL || status != MU_OK) {
        return mui_ddp_desert(d, status);
    }
    char text[MUI_IDENTITY_TEXT];
    snprintf(text, sizeof(text), "mu_ddp_wrap (ddp `%.120s`)", d->name);
    status = mui_ddp_gate(d, MUI_KIND_WRAP, text);
    if (status == MU_OK) {
        status = mui_ddp_compare(d, &d->description);
    }
    if (status == MU_OK) {
        status = mui_ddp_lay_out(d, s, NULL);
    }
    if (status == MU_OK) {
        status = mui_ddp_spread(d);
    }
    if (status == MU_OK && s->buffer_floats > 0) {
        memcpy(d->buffer_copy, s->buffer_slab, s->buffer_floats * sizeof(float));
    }
    if (status == MU_OK) {
        s->wrappers++;
        d->counted = true;
        mui_ddp_count_anew(d);
        mui_ddp_work(d, NULL);
    }
    return status;
}

mu_ddp *mu_ddp_wrap(mu_module *root, mu_group *g, const mu_ddp_options *options)
{
    if (g == NULL) {
        return NULL; /* a failure upstream */
    }
    mu_context *c = g->context;
    if (root == NULL || mui_failed(c)) {
        const char *why = mu_context_message(c);
        mu_group_abort(g, why[0] != '\0' ? why : "mu_ddp_wrap without a module");
        if (!mui_failed(c)) {
            mui_fail(c, MU_ERR_ARG, "mu_ddp_wrap without a module");
        }
        return NULL;
    }
    if (mu_module_context(root) != c) {
        mui_fail(c, MU_ERR_ARG, "mu_ddp_wrap: the module and the group belong to different contexts");
        mu_group_abort(g, mu_context_message(c));
        return NULL;
    }
    mu_ddp *d = mui_calloc(c, 1, sizeof(*d));
    if (d == NULL) {
        mu_group_abort(g, mu_context_message(c));
        return NULL;
    }
    d->context = c;
    d->root = root;
    d->group = g;
    ((mui_source *)root)->users++;
    mu_status s = set_up(d, options);
    if (s != MU_OK) {
        mu_group_abort(g, mu_context_message(c));
        ddp_destroy(d);
        return NULL;
    }
    s = join(d);
    if (s != MU_OK) {
        ddp_destroy(d);
        return NULL;
    }
    if (mui_context_own(c, d, ddp_destroy, MUI_OWN_FIRST) != MU_OK) {
        mu_group_abort(g, mu_context_message(c));
        return NULL;
    }
    return d;
}
