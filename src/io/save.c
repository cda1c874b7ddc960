/* mu_save: a module's state as a list of what is to be written. */
#include "io/save.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include <muster/checkpoint.h>

#include <string.h>

/* Versions of modules' state: torch counts 2 for batch norm (with num_batches_tracked) and 1 for all others. */
static mu_status add_version(mui_out_list *l, mu_module *root, const char *prefix, const char *path)
{
    mu_module *m = path[0] != '\0' ? mu_module_get(root, path) : root;
    bool batch_norm = m != NULL && strstr(mu_module_kind(m), "BatchNorm") != NULL;
    char *key = mui_format(l->context, "%s%s", prefix, path);
    if (key == NULL) {
        return MU_ERR_NOMEM;
    }
    size_t n = strlen(key);
    if (path[0] == '\0' && n > 0 && key[n - 1] == '.') {
        key[n - 1] = '\0'; /* the root below "module." is "module" */
    }
    mu_status s = mui_out_add_version(l, key, batch_norm ? 2 : 1);
    mui_free(l->context, key);
    return s;
}

/* The modules above one name that were not above the one before: names come in tree order, so a module is new exactly
 * when its path goes beyond what the two share. */
static mu_status add_versions_above(mui_out_list *l, mu_module *root, const char *prefix, const char *name,
                                    const char *before)
{
    size_t shared = 0;
    mu_status s = MU_OK;
    while (name[shared] != '\0' && name[shared] == before[shared]) {
        shared++;
    }
    for (const char *dot = strchr(name, '.'); dot != NULL && s == MU_OK; dot = strchr(dot + 1, '.')) {
        size_t n = (size_t)(dot - name);
        if (n < shared) { /* the dot itself is shared */
            continue;
        }
        char *path = mui_strndup(l->context, name, n);
        s = path != NULL ? add_version(l, root, prefix, path) : MU_ERR_NOMEM;
        mui_free(l->context, path);
    }
    return s;
}

static mu_status add_versions(mui_out_list *l, mu_module *root, const mui_states *states, const char *prefix)
{
    mu_status s = prefix[0] != '\0' ? mui_out_add_version(l, "", 1) : MU_OK;
    if (s == MU_OK) {
        s = add_version(l, root, prefix, "");
    }
    for (size_t i = 0; i < states->count && s == MU_OK; i++) {
        s = add_versions_above(l, root, prefix, states->items[i].name, i > 0 ? states->items[i - 1].name : "");
    }
    return s;
}

static mu_status read_state(void *user, size_t i, void *out, size_t bytes)
{
    const mui_states *s = user;
    return mui_tensor_get_raw(s->items[i].value, out, bytes);
}

mu_status mui_out_module_list(mu_module *root, const char *prefix, mui_out_module *out)
{
    mu_context *c = mu_module_context(root);
    *out = (mui_out_module){.states.context = c};
    mui_out_init(&out->list, c);
    mui_out_list *l = &out->list;
    mu_status s = mui_states_list(c, root, &out->states);
    prefix = prefix != NULL ? prefix : "";
    for (size_t i = 0; s == MU_OK && i < out->states.count; i++) {
        const mui_state *x = &out->states.items[i];
        char *name = mui_format(c, "%s%s", prefix, x->name);
        mui_out_tensor t = {.name = name, .dtype = mui_torch_dtype_for(x->value->dtype), .ndim = x->value->dims.ndim,
                            .dim = x->value->dims.dim, .same_as = x->same_as};
        s = name != NULL ? mui_out_add(l, &t) : MU_ERR_NOMEM;
        mui_free(c, name);
    }
    if (s == MU_OK) {
        s = add_versions(l, root, &out->states, prefix);
    }
    l->read = read_state;
    l->user = &out->states;
    return s;
}

void mui_out_module_free(mui_out_module *m)
{
    mui_out_free(&m->list);
    mui_states_free(&m->states);
}

mu_status mu_save(mu_module *root, const char *path, const mu_save_options *options)
{
    static const mu_save_options defaults;
    if (root == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = mu_module_context(root);
    options = options != NULL ? options : &defaults;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (path == NULL || path[0] == '\0') {
        return mui_fail(c, MU_ERR_ARG, "mu_save: no path");
    }
    mui_out_module m;
    mui_place before = mui_go(c, MUI_SAVING, path);
    mu_status s = mui_out_module_list(root, options->prefix, &m);
    if (s == MU_OK) {
        s = mui_out_write(&m.list, options->format, path);
    }
    mui_out_module_free(&m);
    mui_go(c, before.stage, before.path);
    return s;
}
