/* The module around mui_parallel. */
#include "base/alloc.h"
#include "base/os.h"
#include "nn/nn.h"
#include "tape/parallel.h"
#include <muster/data_parallel.h>

#include <stdio.h>

enum { MOST_REPLICAS = 256 };

typedef struct wrapper {
    mu_context *context;
    mu_module *module;
    mui_parallel *parallel;
} wrapper;

static void destroy(void *self)
{
    wrapper *w = self;
    mui_parallel_free(w->parallel);
    mui_free(w->context, w);
}

static mu_tensor *forward_child(void *child, mu_tape *t, mu_tensor *x)
{
    return mu_forward(t, child, x);
}

static mu_tensor *forward(void *self, mu_tape *t, mu_tensor *x)
{
    wrapper *w = self;
    mu_module *child = mui_module_need(w->module, "module");
    return child != NULL ? mui_parallel_forward(w->parallel, t, forward_child, child, x) : NULL;
}

static mu_module *make(mu_context *c, int replicas)
{
    wrapper *w = mui_calloc(c, 1, sizeof(*w));
    if (w == NULL) {
        return NULL;
    }
    w->context = c;
    w->parallel = mui_parallel_new(c, replicas);
    if (w->parallel == NULL) {
        mui_free(c, w);
        return NULL;
    }
    mu_module *m = mu_module_new(c, "DataParallel",
                                 &(mu_module_options){.forward = forward, .self = w, .destroy = destroy});
    if (m != NULL) {
        w->module = m;
    }
    return m;
}

mu_module *mu_data_parallel(mu_module *m, const mu_data_parallel_options *options)
{
    mu_context *c = m != NULL ? m->source.context : NULL;
    if (mui_failed(c)) {
        return NULL;
    }
    int replicas = options != NULL ? options->replicas : 0;
    if (replicas < 0 || replicas > MOST_REPLICAS) {
        mui_fail(c, MU_ERR_ARG, "data_parallel: %d replicas; 0 (the default) to %d can be had", replicas, MOST_REPLICAS);
        return NULL;
    }
    if (replicas == 0) {
        replicas = c->threads > 1 ? c->threads : mui_cores();
        replicas = replicas < MOST_REPLICAS ? replicas : MOST_REPLICAS;
    }
    /* Initial values are keyed by names: now they are those of m alone. */
    mu_module *outer = mui_store_of(m) != NULL ? make(c, replicas) : NULL;
    if (outer == NULL) {
        return NULL;
    }
    outer->training = m->training;
    if (mu_module_add(outer, "module", m) != MU_OK) {
        mui_context_disown(c, outer);
        mui_module_destroy_root(outer);
        return NULL;
    }
    if (m->head != NULL) {
        int length = snprintf(outer->head_text, sizeof(outer->head_text), "module.%s", m->head);
        outer->head = length > 0 && (size_t)length < sizeof(outer->head_text) ? outer->head_text : NULL;
    }
    return outer;
}
