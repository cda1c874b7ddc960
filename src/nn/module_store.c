/* The store of a tree: built when the tree is first used, rebuilt when it has changed, with all values kept. Also what
 * happens to the store of a root that gets a parent. */
#include "nn/nn.h"
#include "base/alloc.h"

#include <string.h>

mui_store *mui_module_built(mui_source *s)
{
    return mui_module_root((mu_module *)s)->built;
}

bool mui_module_contains(mui_source *s, const mu_parameter *p)
{
    const mui_param *q = p->owner;
    for (size_t i = 0; i < q->in_count; i++) {
        for (const mu_module *m = q->in[i]; m != NULL; m = m->parent) {
            if (m == (const mu_module *)s) {
                return true;
            }
        }
    }
    return false;
}

/* -- merging ---------------------------------------------------------------------------------------------------- */
mu_status mui_module_merge_prepare(mu_module *root, mu_module *child)
{
    mu_context *c = root->source.context;
    if (child->built == NULL || root->built == NULL) {
        return MU_OK; /* the one store there is goes on as that of the whole */
    }
    if (child->built->slab_count > 0 || child->built->sharding > 0 || child->built->grads_alloc != NULL) {
        return mui_fail(c, MU_ERR_STATE,
                        "the %s has an optimiser or is wrapped on its own, and so it cannot join a %s that is in use "
                        "already: add it first",
                        child->kind, root->kind);
    }
    /* One place for each: those the child already waits with, and its own. */
    size_t needed = root->orphan_count + child->orphan_count + 1;
    if (needed > root->orphan_capacity) {
        mui_store **grown = mui_realloc(c, root->orphans, needed * sizeof(*grown));
        if (grown == NULL) {
            return MU_ERR_NOMEM;
        }
        root->orphans = grown;
        root->orphan_capacity = needed;
    }
    return MU_OK;
}

void mui_module_merge(mu_module *root, mu_module *child)
{
    mu_context *c = root->source.context;
    if (child->built != NULL) {
        if (root->built == NULL) {
            root->built = child->built;
            root->orphans = child->orphans;
            root->orphan_count = child->orphan_count;
            root->orphan_capacity = child->orphan_capacity;
            child->orphans = NULL;
        } else {
            for (size_t i = 0; i < child->orphan_count; i++) {
                root->orphans[root->orphan_count++] = child->orphans[i];
            }
            root->orphans[root->orphan_count++] = child->built;
        }
    }
    child->built = NULL;
    root->visits = child->visits > root->visits ? child->visits : root->visits;
    mui_free(c, child->orphans);
    child->orphans = NULL;
    child->orphan_count = child->orphan_capacity = 0;
    while (child->param_graves != NULL) {
        mui_param *q = child->param_graves;
        child->param_graves = q->next_grave;
        q->next_grave = root->param_graves;
        root->param_graves = q;
    }
    while (child->buffer_graves != NULL) {
        mui_buffer *b = child->buffer_graves;
        child->buffer_graves = b->next_grave;
        b->next_grave = root->buffer_graves;
        root->buffer_graves = b;
    }
    while (child->removed_list != NULL) {
        mu_module *r = child->removed_list;
        child->removed_list = r->next_removed;
        r->next_removed = root->removed_list;
        root->removed_list = r;
    }
}

/* -- building --------------------------------------------------------------------------------------------------- */
/* What a build works on: the tree's parameters and float buffers, once each. */
typedef struct build {
    mu_parameter **params;
    char **param_names; /* full names; swapped into the parameters while building */
    mu_tensor **buffers;
    mui_buffer **owners;
    const char **buffer_names;
    int64_t param_count, buffer_count;
} build;

static void free_build(mu_context *c, build *b)
{
    for (int64_t i = 0; b->param_names != NULL && i < b->param_count; i++) {
        mui_free(c, b->param_names[i]);
    }
    mui_free(c, b->params);
    mui_free(c, b->param_names);
    mui_free(c, b->buffers);
    mui_free(c, b->owners);
    mui_free(c, b->buffer_names);
}

static bool is_one_of(const mu_module *root, const mui_store *s)
{
    if (s == NULL || s == root->built) {
        return true;
    }
    for (size_t i = 0; i < root->orphan_count; i++) {
        if (root->orphans[i] == s) {
            return true;
        }
    }
    return false;
}

static mu_status fill_build(build *b, mu_module *root, mui_state_list *list)
{
    mu_context *c = root->source.context;
    size_t n = list->count + 1;
    b->params = mui_calloc(c, n, sizeof(*b->params));
    b->param_names = mui_calloc(c, n, sizeof(*b->param_names));
    b->buffers = mui_calloc(c, n, sizeof(*b->buffers));
    b->owners = mui_calloc(c, n, sizeof(*b->owners));
    b->buffer_names = mui_calloc(c, n, sizeof(*b->buffer_names));
    if (b->params == NULL || b->param_names == NULL || b->buffers == NULL || b->owners == NULL ||
        b->buffer_names == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < list->count; i++) {
        mui_state_entry *e = &list->entries[i];
        if (e->param == NULL) {
            if (e->buffer->t.dtype == MU_F32) {
                b->buffers[b->buffer_count] = &e->buffer->t;
                b->owners[b->buffer_count] = e->buffer;
                b->buffer_names[b->buffer_count++] = e->name;
            }
            continue;
        }
        if (e->repeated) {
            continue;
        }
        if (!is_one_of(root, e->param->p.store)) {
            return mui_fail(c, MU_ERR_STATE, "parameter %s is shared with another tree, where it is %s", e->name,
                            e->param->p.name);
        }
        b->params[b->param_count] = &e->param->p;
        b->param_names[b->param_count++] = e->name;
        e->name = NULL; /* taken over */
    }
    return MU_OK;
}

static void swap_names(build *b)
{
    for (int64_t i = 0; i < b->param_count; i++) {
        char *name = b->params[i]->name;
        b->params[i]->name = b->param_names[i];
        b->param_names[i] = name;
    }
}

/* The old store has been consumed and everything it and the orphans held is in the new one. */
static void settle(mu_module *root, build *b, mui_store *fresh)
{
    mu_context *c = root->source.context;
    root->built = fresh;
    for (size_t i = 0; i < root->orphan_count; i++) {
        mui_store_free(root->orphans[i]);
    }
    root->orphan_count = 0;
    mui_module_free_graves(root);
    for (int64_t i = 0; i < b->buffer_count; i++) {
        if (b->owners[i]->heap != NULL) {
            mui_free(c, b->owners[i]->heap);
            b->owners[i]->heap = NULL;
            b->owners[i]->t.storage = NULL; /* the slab's memory has no header, as that of parameters */
        }
    }
}

static mui_store *rebuild(mu_module *root)
{
    mu_context *c = root->source.context;
    mui_state_list list = {0};
    build b = {0};
    mui_store *fresh = NULL;
    mu_status s = mui_state_list_make(&list, root, true);
    if (s == MU_OK) {
        s = fill_build(&b, root, &list);
    }
    if (s == MU_OK) {
        swap_names(&b);
        fresh = mui_store_build(c, b.params, b.param_count, b.buffers, b.buffer_names, b.buffer_count, root->built);
        if (fresh == NULL) {
            swap_names(&b);
        }
    }
    if (fresh != NULL) {
        settle(root, &b, fresh);
        for (int64_t i = 0; i < b.param_count && s == MU_OK; i++) {
            if (!b.params[i]->initialised) {
                s = mui_init_apply(b.params[i]);
            }
        }
        if (s == MU_OK) {
            root->built_version = root->version;
        }
    }
    free_build(c, &b);
    mui_state_list_free(c, &list);
    return s == MU_OK ? fresh : NULL;
}

mui_store *mui_module_store(mui_source *source)
{
    mu_module *m = (mu_module *)source;
    if (m->removed) {
        mui_fail(source->context, MU_ERR_STATE, "the %s was removed from its tree and freed", m->kind);
        return NULL;
    }
    mu_module *root = mui_module_root(m);
    if (root->built != NULL && root->built_version == root->version) {
        return root->built;
    }
    return rebuild(root);
}
