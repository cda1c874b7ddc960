/* Making and freeing modules, their parameters and buffers, and running them. */
#include "nn/nn.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/glob.h"
#include "base/text.h"

#include <string.h>

mu_module *mu_module_new(mu_context *c, const char *kind, const mu_module_options *options)
{
    static const mu_module_options defaults;
    const mu_module_options *o = options != NULL ? options : &defaults;
    mu_module *m = NULL;
    if (!mui_failed(c)) {
        m = mui_calloc(c, 1, sizeof(*m));
    }
    if (m == NULL) {
        if (o->destroy != NULL && o->self != NULL) {
            o->destroy(o->self);
        }
        return NULL;
    }
    m->source = (mui_source){
        .context = c, .store = mui_module_store, .built = mui_module_built, .contains = mui_module_contains};
    m->forward = o->forward;
    m->self = o->self != NULL ? o->self : m;
    m->destroy = o->destroy;
    m->training = true;
    m->version = 1;
    m->kind = mui_strdup(c, kind != NULL ? kind : "Module");
    m->extra = o->extra != NULL ? mui_strdup(c, o->extra) : NULL;
    if (m->kind == NULL || (o->extra != NULL && m->extra == NULL)) {
        mui_module_destroy_root(m);
        return NULL;
    }
    return mui_context_own(c, m, mui_module_destroy_root, MUI_OWN_DEFAULT) == MU_OK ? m : NULL;
}

/* -- names ------------------------------------------------------------------------------------------------------ */
mui_param *mui_module_own_param(mu_module *m, const char *name)
{
    for (size_t i = 0; i < m->param_count; i++) {
        if (strcmp(m->params[i].name, name) == 0) {
            return m->params[i].param;
        }
    }
    return NULL;
}

mui_buffer *mui_module_own_buffer(mu_module *m, const char *name)
{
    for (size_t i = 0; i < m->buffer_count; i++) {
        if (strcmp(m->buffers[i].name, name) == 0) {
            return m->buffers[i].buffer;
        }
    }
    return NULL;
}

mu_module *mui_module_child(mu_module *m, const char *name)
{
    for (size_t i = 0; i < m->child_count; i++) {
        if (strcmp(m->children[i]->name, name) == 0) {
            return m->children[i];
        }
    }
    return NULL;
}

/* A name that may be registered in m: not empty, without dots, not in use. */
static mu_status check_name(mu_module *m, const char *name, const char *what)
{
    mu_context *c = m->source.context;
    if (m->removed) {
        return mui_fail(c, MU_ERR_STATE, "cannot add %s to a %s that was removed from its tree", what, m->kind);
    }
    if (name == NULL || name[0] == '\0' || strchr(name, '.') != NULL) {
        return mui_fail(c, MU_ERR_ARG, "%s of %s: \"%s\" is not a name: it must not be empty or have dots", what,
                        m->kind, name != NULL ? name : "");
    }
    if (mui_module_own_param(m, name) != NULL || mui_module_own_buffer(m, name) != NULL ||
        mui_module_child(m, name) != NULL) {
        return mui_fail(c, MU_ERR_ARG, "%s of %s: the name \"%s\" is taken already", what, m->kind, name);
    }
    return MU_OK;
}

/* -- parameters and buffers ------------------------------------------------------------------------------------- */
static void free_param(mu_context *c, mui_param *q)
{
    if (q != NULL) {
        mui_free(c, q->p.name);
        mui_free(c, q->in);
        mui_free(c, q);
    }
}

static void free_buffer(mu_context *c, mui_buffer *b)
{
    if (b != NULL) {
        mui_free(c, b->heap);
        mui_free(c, b);
    }
}

/* Puts q under name; on failure nothing changed. */
static mu_status register_param(mu_module *m, const char *name, mui_param *q)
{
    mu_context *c = m->source.context;
    if (!MUI_GROW(c, m->params, m->param_count, m->param_capacity) ||
        !MUI_GROW(c, q->in, q->in_count, q->in_capacity)) {
        return MU_ERR_NOMEM;
    }
    char *copy = mui_strdup(c, name);
    if (copy == NULL) {
        return MU_ERR_NOMEM;
    }
    m->params[m->param_count++] = (mui_named_param){copy, q};
    q->in[q->in_count++] = m;
    mui_module_root(m)->version++;
    return MU_OK;
}

mu_parameter *mu_module_parameter(mu_module *m, const char *name, mu_dims dims, mu_init init)
{
    if (m == NULL || mui_failed(m->source.context)) {
        return NULL;
    }
    mu_context *c = m->source.context;
    size_t bytes = 0;
    if (check_name(m, name, "parameter") != MU_OK || mui_dims_check(c, dims, MU_F32, &bytes) != MU_OK ||
        mui_init_check(c, name, dims, init) != MU_OK) {
        return NULL;
    }
    mui_param *q = mui_calloc(c, 1, sizeof(*q));
    if (q == NULL) {
        return NULL;
    }
    mu_parameter *p = &q->p;
    p->context = c;
    p->id = c->allocations; /* it only goes up, and q was just counted */
    p->name = mui_strdup(c, name);
    p->value = (mu_tensor){.context = c, .dtype = MU_F32, .dims = dims, .requires_grad = true, .parameter = p};
    mui_strides_plain(dims, p->value.stride);
    p->grad_view = (mu_tensor){.context = c, .dtype = MU_F32, .dims = dims};
    mui_strides_plain(dims, p->grad_view.stride);
    p->init_kind = init.kind;
    p->init_value = init.value;
    p->owner = q;
    if (p->name == NULL || register_param(m, name, q) != MU_OK) {
        free_param(c, q);
        return NULL;
    }
    return p;
}

mu_status mu_module_share(mu_module *m, const char *name, mu_parameter *p)
{
    if (m == NULL || p == NULL) {
        mu_context *c = m != NULL ? m->source.context : p != NULL ? p->context : NULL;
        return mui_failed(c) ? mu_context_status(c) : mui_fail(c, MU_ERR_ARG, "sharing needs a module and a parameter");
    }
    if (p->context != m->source.context) {
        return mui_fail(m->source.context, MU_ERR_ARG, "parameter %s belongs to another context", p->name);
    }
    mu_status s = check_name(m, name, "parameter");
    return s != MU_OK ? s : register_param(m, name, p->owner);
}

mu_tensor *mu_module_buffer(mu_module *m, const char *name, mu_dims dims, mu_dtype dtype, float fill)
{
    if (m == NULL || mui_failed(m->source.context)) {
        return NULL;
    }
    mu_context *c = m->source.context;
    if (dtype != MU_F32 && dtype != MU_I64) {
        mui_fail(c, MU_ERR_DTYPE, "buffer %s of %s: %s; buffers are float32 or int64", name != NULL ? name : "",
                 m->kind, mu_dtype_name(dtype));
        return NULL;
    }
    size_t bytes = 0;
    if (check_name(m, name, "buffer") != MU_OK || mui_dims_check(c, dims, dtype, &bytes) != MU_OK ||
        !MUI_GROW(c, m->buffers, m->buffer_count, m->buffer_capacity)) {
        return NULL;
    }
    mui_buffer *b = mui_calloc(c, 1, sizeof(*b));
    char *copy = mui_strdup(c, name);
    void *heap = mui_alloc(c, bytes > 0 ? bytes : 1);
    if (b == NULL || copy == NULL || heap == NULL) {
        mui_free(c, heap);
        mui_free(c, copy);
        mui_free(c, b);
        return NULL;
    }
    for (int64_t i = 0; i < mui_dims_elements(dims); i++) {
        if (dtype == MU_F32) {
            ((float *)heap)[i] = fill;
        } else {
            ((int64_t *)heap)[i] = (int64_t)fill;
        }
    }
    b->heap = heap;
    b->storage = (mui_storage){.data = heap, .bytes = bytes, .capacity = bytes, .refs = 1};
    b->t = (mu_tensor){.context = c, .dtype = dtype, .dims = dims, .storage = &b->storage, .data = heap};
    mui_strides_plain(dims, b->t.stride);
    m->buffers[m->buffer_count++] = (mui_named_buffer){copy, b};
    mui_module_root(m)->version++;
    return &b->t;
}

/* -- the tree --------------------------------------------------------------------------------------------------- */
mu_module *mui_module_root(mu_module *m)
{
    while (m->parent != NULL) {
        m = m->parent;
    }
    return m;
}

static mu_status check_child(mu_module *parent, mu_module *child, const char *name)
{
    mu_context *c = parent->source.context;
    if (child->source.context != c) {
        return mui_fail(c, MU_ERR_ARG, "child %s: the %s belongs to another context", name, child->kind);
    }
    if (child->removed) {
        return mui_fail(c, MU_ERR_ARG, "child %s: the %s was removed from its tree and freed", name, child->kind);
    }
    if (child->parent != NULL) {
        return mui_fail(c, MU_ERR_ARG, "child %s: the %s has a parent already, as its child %s", name, child->kind,
                        child->name);
    }
    if (mui_module_root(parent) == child) {
        return mui_fail(c, MU_ERR_ARG, "child %s: a module cannot be below itself", name);
    }
    return MU_OK;
}

/* Status of a call whose module arguments are not all there. */
static mu_status missing_argument(mu_module *a, mu_module *b, const char *what)
{
    mu_context *c = a != NULL ? a->source.context : b != NULL ? b->source.context : NULL;
    return mui_failed(c) ? mu_context_status(c) : mui_fail(c, MU_ERR_ARG, "%s: a module is NULL", what);
}

mu_status mu_module_add(mu_module *parent, const char *name, mu_module *child)
{
    if (parent == NULL || child == NULL) {
        return missing_argument(parent, child, name != NULL ? name : "adding a child");
    }
    mu_context *c = parent->source.context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    mu_status s = check_name(parent, name, "child");
    s = s != MU_OK ? s : check_child(parent, child, name);
    if (s != MU_OK) {
        return s;
    }
    mu_module *root = mui_module_root(parent);
    s = mui_module_merge_prepare(root, child);
    if (s != MU_OK) {
        return s;
    }
    char *copy = mui_strdup(c, name);
    if (copy == NULL || !MUI_GROW(c, parent->children, parent->child_count, parent->child_capacity)) {
        mui_free(c, copy);
        return MU_ERR_NOMEM;
    }
    mui_context_disown(c, child);
    mui_module_merge(root, child);
    child->name = copy;
    child->parent = parent;
    parent->children[parent->child_count++] = child;
    root->version++;
    return MU_OK;
}

mu_module *mui_module_find(mu_module *m, const char *path, size_t length)
{
    while (m != NULL && length > 0) {
        const char *dot = memchr(path, '.', length);
        size_t n = dot != NULL ? (size_t)(dot - path) : length;
        mu_module *next = NULL;
        for (size_t i = 0; i < m->child_count && next == NULL; i++) {
            const char *name = m->children[i]->name;
            if (strncmp(name, path, n) == 0 && name[n] == '\0') {
                next = m->children[i];
            }
        }
        size_t step = dot != NULL ? n + 1 : n;
        path += step;
        length -= step;
        m = dot != NULL && length == 0 ? NULL : next; /* "a." leads nowhere */
    }
    return m;
}

mu_module *mu_module_get(mu_module *root, const char *path)
{
    return root != NULL && path != NULL ? mui_module_find(root, path, strlen(path)) : NULL;
}

/* The module at path below root, which must be there and not be root itself. */
static mu_status find_below(mu_module *root, const char *path, mu_module **out)
{
    mu_module *m = mu_module_get(root, path);
    if (m == NULL || m == root) {
        return mui_fail(root->source.context, MU_ERR_ARG, "%s has no module \"%s\" below it", root->kind,
                        path != NULL ? path : "");
    }
    *out = m;
    return MU_OK;
}

static size_t index_in_parent(const mu_module *m)
{
    size_t i = 0;
    while (m->parent->children[i] != m) {
        i++;
    }
    return i;
}

mu_status mu_module_replace(mu_module *root, const char *path, mu_module *child)
{
    if (root == NULL || child == NULL) {
        return missing_argument(root, child, path != NULL ? path : "replacing a module");
    }
    mu_module *old = NULL;
    mu_status s = find_below(root, path, &old);
    s = s != MU_OK ? s : check_child(old->parent, child, path);
    mu_module *top = mui_module_root(root);
    s = s != MU_OK ? s : mui_module_merge_prepare(top, child);
    if (s != MU_OK) {
        return s;
    }
    mui_context_disown(root->source.context, child);
    mui_module_merge(top, child);
    mu_module *parent = old->parent;
    parent->children[index_in_parent(old)] = child;
    child->parent = parent;
    child->name = old->name;
    old->name = NULL;
    mui_module_bury(old, top);
    top->version++;
    return MU_OK;
}

mu_status mu_module_remove(mu_module *root, const char *path)
{
    if (root == NULL) {
        return missing_argument(root, NULL, path != NULL ? path : "removing a module");
    }
    mu_module *old = NULL;
    mu_status s = find_below(root, path, &old);
    if (s != MU_OK) {
        return s;
    }
    mu_module *top = mui_module_root(root), *parent = old->parent;
    size_t i = index_in_parent(old);
    memmove(&parent->children[i], &parent->children[i + 1], (parent->child_count - i - 1) * sizeof(mu_module *));
    parent->child_count--;
    mui_module_bury(old, top);
    top->version++;
    return MU_OK;
}

/* -- freeing ---------------------------------------------------------------------------------------------------- */
static void release_param(mui_param *q, mu_module *m, mu_module *root)
{
    size_t i = 0;
    while (q->in[i] != m) {
        i++;
    }
    q->in[i] = q->in[--q->in_count];
    if (q->in_count > 0) {
        return; /* shared with a module that stays */
    }
    if (root == NULL) {
        free_param(m->source.context, q);
    } else {
        q->next_grave = root->param_graves;
        root->param_graves = q;
    }
}

void mui_module_bury(mu_module *m, mu_module *root)
{
    mu_context *c = m->source.context;
    for (size_t i = 0; i < m->child_count; i++) {
        mui_module_bury(m->children[i], root);
    }
    m->removed = true;
    if (m->destroy != NULL) {
        m->destroy(m->self);
    }
    for (size_t i = 0; i < m->param_count; i++) {
        release_param(m->params[i].param, m, root);
        mui_free(c, m->params[i].name);
    }
    for (size_t i = 0; i < m->buffer_count; i++) {
        mui_buffer *b = m->buffers[i].buffer;
        if (root == NULL) {
            free_buffer(c, b);
        } else {
            b->next_grave = root->buffer_graves;
            root->buffer_graves = b;
        }
        mui_free(c, m->buffers[i].name);
    }
    mui_free(c, m->params);
    mui_free(c, m->buffers);
    mui_free(c, m->children);
    mui_free(c, m->name);
    mui_free(c, m->path);
    mui_free(c, m->extra);
    m->params = NULL;
    m->buffers = NULL;
    m->children = NULL;
    m->param_count = m->buffer_count = m->child_count = 0;
    m->name = m->path = m->extra = NULL;
    m->parent = NULL;
    if (root != NULL && m->source.users > 0) {
        m->next_removed = root->removed_list; /* keeps kind, for messages */
        root->removed_list = m;
        return;
    }
    mui_free(c, m->kind);
    mui_free(c, m);
}

void mui_module_free_graves(mu_module *root)
{
    mu_context *c = root->source.context;
    while (root->param_graves != NULL) {
        mui_param *q = root->param_graves;
        root->param_graves = q->next_grave;
        free_param(c, q);
    }
    while (root->buffer_graves != NULL) {
        mui_buffer *b = root->buffer_graves;
        root->buffer_graves = b->next_grave;
        free_buffer(c, b);
    }
}

void mui_module_destroy_root(void *object)
{
    mu_module *m = object;
    mu_context *c = m->source.context;
    /* Stores list parameters, so they go first. */
    if (m->built != NULL) {
        mui_store_free(m->built);
    }
    for (size_t i = 0; i < m->orphan_count; i++) {
        mui_store_free(m->orphans[i]);
    }
    mui_free(c, m->orphans);
    mui_module_free_graves(m);
    while (m->removed_list != NULL) {
        mu_module *r = m->removed_list;
        m->removed_list = r->next_removed;
        mui_free(c, r->kind);
        mui_free(c, r);
    }
    mui_module_bury(m, NULL);
}

enum { DEEPEST = 1000 }; /* forwards within forwards: far below what a thread's stack can hold */

/* -- running ---------------------------------------------------------------------------------------------------- */
static mu_tensor *children_in_order(mu_module *m, mu_tape *t, mu_tensor *x)
{
    for (size_t i = 0; i < m->child_count; i++) {
        x = mu_forward(t, m->children[i], x);
    }
    return x;
}

static mu_tensor *run_as(mu_module *m, mu_forward_fn fn, mu_tape *t, mu_tensor *x)
{
    mu_context *c = m->source.context;
    mui_here *here = mui_here_of(c);
    if (here->depth >= DEEPEST) {
        mui_fail(c, MU_ERR_LIMIT, "forward of %s: %d forwards within each other: does one call itself?", m->kind, DEEPEST);
        return NULL;
    }
    here->depth++;
    mu_tensor *y = fn != NULL ? fn(m->self, t, x) : children_in_order(m, t, x);
    here->depth--;
    return y;
}

static mu_tensor *run_directly(void *self, mu_tape *t, mu_tensor *x)
{
    mu_module *m = self;
    return run_as(m, m->forward, t, x);
}

static mu_tensor *run(mu_tape *t, mu_module *m, mu_forward_fn fn, mu_tensor *x)
{
    return m->checkpoint ? mu_checkpoint(t, run_directly, m, x) : run_as(m, fn, t, x);
}

mu_tensor *mu_forward(mu_tape *t, mu_module *m, mu_tensor *x)
{
    return mui_forward_as(t, m, m != NULL ? m->forward : NULL, x);
}

mu_tensor *mui_forward_as(mu_tape *t, mu_module *m, mu_forward_fn fn, mu_tensor *x)
{
    if (t == NULL || m == NULL || x == NULL) {
        mu_context *c = m != NULL ? m->source.context : x != NULL ? x->context : NULL;
        /* A NULL module is no failure upstream when it came from mu_module_get. */
        if (!mui_failed(c) && (m == NULL || x != NULL)) {
            mui_fail(c, MU_ERR_ARG, "forward: the %s is NULL", m == NULL ? "module" : "tape");
        }
        return NULL;
    }
    mu_context *c = m->source.context;
    if (mui_failed(c) || mui_store_of(m) == NULL) {
        return NULL;
    }
    mui_here *here = mui_here_of(c);
    if (m->parent == NULL) {
        mui_place before = mui_go(c, MUI_FORWARD, here->path);
        mu_tensor *y = run(t, m, fn, x);
        mui_go(c, before.stage, before.path);
        return y;
    }
    /* The full path replaces the caller's and not just extends it: a forward may call a grandchild directly. */
    char saved[sizeof(here->path)];
    size_t saved_len = here->path_len, len = strlen(m->path);
    memcpy(saved, here->path, saved_len + 1);
    len = len < sizeof(here->path) ? len : sizeof(here->path) - 1;
    memcpy(here->path, m->path, len);
    here->path[len] = '\0';
    here->path_len = len;
    mui_place before = mui_go(c, MUI_FORWARD, here->path);
    mu_tensor *y = run(t, m, fn, x);
    memcpy(here->path, saved, saved_len + 1);
    here->path_len = saved_len;
    mui_go(c, before.stage, before.path);
    return y;
}

static mu_tensor *forward_of(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_forward(t, self, x);
}

mu_tensor *mu_checkpoint_forward(mu_tape *t, mu_module *m, mu_tensor *x)
{
    return t != NULL && m != NULL && x != NULL ? mu_checkpoint(t, forward_of, m, x) : mu_forward(t, m, x);
}

/* Picks m, or else those below it that the pattern matches, not what is below these. */
static int64_t pick(mu_module *m, const char *pattern, const char *path, bool on)
{
    if (path[0] != '\0' && mui_glob_match(pattern, path)) {
        m->checkpoint = on;
        return 1;
    }
    int64_t picked = 0;
    for (size_t i = 0; i < m->child_count; i++) {
        mui_text below;
        mui_text_init(&below, m->source.context);
        mui_text_add(&below, "%s%s%s", path, path[0] != '\0' ? "." : "", m->children[i]->name);
        picked += pick(m->children[i], pattern, mui_text_get(&below), on);
        mui_text_free(&below);
    }
    return picked;
}

mu_status mu_module_checkpoint(mu_module *root, const char *pattern, bool on, int64_t *count)
{
    if (root == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = root->source.context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    int64_t picked = pattern != NULL ? pick(root, pattern, "", on) : 0;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (picked == 0) {
        return mui_fail(c, MU_ERR_ARG, "checkpoint: no module of the %s matches \"%s\"", root->kind,
                        pattern != NULL ? pattern : "(NULL)");
    }
    if (count != NULL) {
        *count = picked;
    }
    return MU_OK;
}

void mu_module_train(mu_module *m, bool training)
{
    if (m == NULL) {
        return;
    }
    m->training = training;
    for (size_t i = 0; i < m->child_count; i++) {
        mu_module_train(m->children[i], training);
    }
}

bool mu_module_is_training(const mu_module *m)
{
    return m != NULL && m->training;
}

const char *mu_module_kind(const mu_module *m)
{
    return m != NULL ? m->kind : "";
}

void *mu_module_self(const mu_module *m)
{
    return m != NULL ? m->self : NULL;
}

mu_context *mu_module_context(const mu_module *m)
{
    return m != NULL ? m->source.context : NULL;
}
