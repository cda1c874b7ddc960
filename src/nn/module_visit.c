/* Going through a tree: names, visitors, freezing, counting. */
#include "nn/nn.h"
#include "base/alloc.h"
#include "base/glob.h"

#include <string.h>

/* -- traversal -------------------------------------------------------------------------------------------------- */
void mui_state_list_free(mu_context *c, mui_state_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        mui_free(c, list->entries[i].name);
    }
    mui_free(c, list->entries);
    *list = (mui_state_list){0};
}

static char *join(mu_context *c, const char *path, const char *name)
{
    return path[0] != '\0' ? mui_format(c, "%s.%s", path, name) : mui_strdup(c, name);
}

static mui_state_entry *append(mui_state_list *list, mu_context *c, const char *path, const char *name)
{
    if (!MUI_GROW(c, list->entries, list->count, list->capacity)) {
        return NULL;
    }
    char *full = join(c, path, name);
    if (full == NULL) {
        return NULL;
    }
    list->entries[list->count] = (mui_state_entry){.name = full};
    return &list->entries[list->count++];
}

uint64_t mui_module_next_visit(mu_module *m)
{
    /* Counted at the root, since a parameter may be shared over the whole tree. */
    return ++mui_module_root(m)->visits;
}

static bool collect(mui_state_list *list, mu_module *m, const char *path, uint64_t visit, bool paths)
{
    mu_context *c = m->source.context;
    for (size_t i = 0; i < m->param_count; i++) {
        mui_state_entry *e = append(list, c, path, m->params[i].name);
        if (e == NULL) {
            return false;
        }
        e->param = m->params[i].param;
        e->repeated = e->param->visit == visit;
        e->param->visit = visit;
    }
    for (size_t i = 0; i < m->buffer_count; i++) {
        mui_state_entry *e = append(list, c, path, m->buffers[i].name);
        if (e == NULL) {
            return false;
        }
        e->buffer = m->buffers[i].buffer;
    }
    for (size_t i = 0; i < m->child_count; i++) {
        char *below = join(c, path, m->children[i]->name);
        bool ok = below != NULL && collect(list, m->children[i], below, visit, paths);
        if (!ok) {
            mui_free(c, below);
            return false;
        }
        if (paths) {
            mui_free(c, m->children[i]->path);
            m->children[i]->path = below;
        } else {
            mui_free(c, below);
        }
    }
    return true;
}

mu_status mui_state_list_make(mui_state_list *list, mu_module *m, bool paths)
{
    mu_context *c = m->source.context;
    *list = (mui_state_list){0};
    pthread_mutex_lock(&c->shared_lock);
    bool complete = collect(list, m, "", mui_module_next_visit(m), paths);
    pthread_mutex_unlock(&c->shared_lock);
    if (!complete) {
        mui_state_list_free(c, list);
        return MU_ERR_NOMEM;
    }
    return MU_OK;
}

/* -- visitors --------------------------------------------------------------------------------------------------- */
static mu_status no_module(const char *what)
{
    return mui_fail(NULL, MU_ERR_ARG, "%s: the module is NULL", what);
}

static mu_status no_function(mu_module *root, const char *what)
{
    return mui_fail(root->source.context, MU_ERR_ARG, "%s: the function is NULL", what);
}

/* The traversal of a tree that has memory. */
static mu_status list_built(mui_state_list *list, mu_module *root)
{
    if (mui_store_of(root) == NULL) {
        return mu_context_status(root->source.context);
    }
    return mui_state_list_make(list, root, false);
}

mu_status mu_module_each_parameter(mu_module *root, mu_parameter_fn fn, void *user)
{
    if (root == NULL) {
        return no_module("visiting parameters");
    }
    if (fn == NULL) {
        return no_function(root, "visiting parameters");
    }
    mui_state_list list;
    mu_status s = list_built(&list, root);
    if (s != MU_OK) {
        return s;
    }
    for (size_t i = 0; i < list.count; i++) {
        mui_state_entry *e = &list.entries[i];
        if (e->param != NULL && !e->repeated && !fn(user, e->name, &e->param->p)) {
            break;
        }
    }
    mui_state_list_free(root->source.context, &list);
    return MU_OK;
}

mu_status mu_module_each_state(mu_module *root, mu_state_fn fn, void *user)
{
    if (root == NULL) {
        return no_module("visiting a state dict");
    }
    if (fn == NULL) {
        return no_function(root, "visiting a state dict");
    }
    mui_state_list list;
    mu_status s = list_built(&list, root);
    if (s != MU_OK) {
        return s;
    }
    for (size_t i = 0; i < list.count; i++) {
        mui_state_entry *e = &list.entries[i];
        bool more = e->param != NULL ? fn(user, e->name, &e->param->p.value, &e->param->p)
                                     : fn(user, e->name, &e->buffer->t, NULL);
        if (!more) {
            break;
        }
    }
    mui_state_list_free(root->source.context, &list);
    return MU_OK;
}

/* The module that holds the last part of path, which *name is set to. */
static mu_module *holder_of(mu_module *root, const char *path, const char **name)
{
    if (root == NULL || path == NULL || mui_store_of(root) == NULL) {
        return NULL;
    }
    const char *dot = strrchr(path, '.');
    *name = dot != NULL ? dot + 1 : path;
    return mui_module_find(root, path, dot != NULL ? (size_t)(dot - path) : 0);
}

mu_parameter *mu_module_get_parameter(mu_module *root, const char *path)
{
    const char *name = NULL;
    mu_module *m = holder_of(root, path, &name);
    mui_param *q = m != NULL ? mui_module_own_param(m, name) : NULL;
    return q != NULL ? &q->p : NULL;
}

mu_tensor *mu_module_get_buffer(mu_module *root, const char *path)
{
    const char *name = NULL;
    mu_module *m = holder_of(root, path, &name);
    mui_buffer *b = m != NULL ? mui_module_own_buffer(m, name) : NULL;
    return b != NULL ? &b->t : NULL;
}

static int64_t count_elements(mu_module *m, uint64_t visit)
{
    int64_t n = 0;
    for (size_t i = 0; i < m->param_count; i++) {
        mui_param *q = m->params[i].param;
        if (q->visit != visit) {
            n += mui_dims_elements(q->p.value.dims);
        }
        q->visit = visit;
    }
    for (size_t i = 0; i < m->child_count; i++) {
        n += count_elements(m->children[i], visit);
    }
    return n;
}

int64_t mu_module_parameter_elements(mu_module *root)
{
    if (root == NULL) {
        return 0;
    }
    pthread_mutex_lock(&root->source.context->shared_lock);
    int64_t n = count_elements(root, mui_module_next_visit(root));
    pthread_mutex_unlock(&root->source.context->shared_lock);
    return n;
}

mu_status mu_module_zero_grad(mu_module *root)
{
    if (root == NULL) {
        return no_module("clearing gradients");
    }
    mui_store *s = mui_store_of(root);
    if (s == NULL) {
        return mu_context_status(root->source.context);
    }
    if (root->parent == NULL) {
        mui_store_zero_grad(s);
        return MU_OK;
    }
    for (int64_t i = 0; i < s->count; i++) {
        if (mui_module_contains(&root->source, s->parameters[i])) {
            s->parameters[i]->grad_state = MUI_GRAD_NONE;
        }
    }
    s->clears++;
    return MU_OK;
}

/* -- freezing --------------------------------------------------------------------------------------------------- */
static mu_status set_frozen(mu_module *root, const char *pattern, bool frozen, int64_t *count)
{
    const char *what = frozen ? "freeze" : "unfreeze";
    if (root == NULL) {
        return no_module(what);
    }
    mu_context *c = root->source.context;
    if (pattern == NULL) {
        return mui_fail(c, MU_ERR_ARG, "%s: the pattern is NULL", what);
    }
    mui_state_list list;
    mu_status s = mui_state_list_make(&list, root, false);
    if (s != MU_OK) {
        return s;
    }
    /* A shared parameter matches by any of its names, and counts once. */
    uint64_t matched_mark = mui_module_next_visit(root);
    int64_t matched = 0;
    bool changed = false;
    for (size_t i = 0; i < list.count; i++) {
        mui_param *q = list.entries[i].param;
        if (q == NULL || q->visit == matched_mark || !mui_glob_match(pattern, list.entries[i].name)) {
            continue;
        }
        q->visit = matched_mark;
        matched++;
        if (q->p.frozen != frozen) {
            q->p.frozen = frozen;
            q->p.value.requires_grad = !frozen;
            q->p.grad_state = MUI_GRAD_NONE;
            changed = true;
        }
    }
    mui_state_list_free(c, &list);
    if (matched == 0) {
        return mui_fail(c, MU_ERR_ARG, "%s: no parameter of the %s matches \"%s\"", what, root->kind, pattern);
    }
    if (changed) {
        mui_module_root(root)->version++;
    }
    if (count != NULL) {
        *count = matched;
    }
    return MU_OK;
}

mu_status mu_module_freeze(mu_module *root, const char *pattern, int64_t *count)
{
    return set_frozen(root, pattern, true, count);
}

mu_status mu_module_unfreeze(mu_module *root, const char *pattern, int64_t *count)
{
    return set_frozen(root, pattern, false, count);
}
