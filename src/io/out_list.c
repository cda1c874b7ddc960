/* Lists of what is to be written. */
#include "io/out_list.h"
#include "base/alloc.h"
#include "base/text.h"

#include <string.h>

void mui_out_init(mui_out_list *l, mu_context *c)
{
    *l = (mui_out_list){.context = c};
    mui_arena_init(&l->arena, c);
}

void mui_out_free(mui_out_list *l)
{
    mui_free(l->context, l->tensors);
    mui_free(l->context, l->versions);
    mui_arena_free(&l->arena);
    *l = (mui_out_list){0};
}

static mu_status check_name(mu_context *c, const char *name)
{
    size_t n = strlen(name);
    if (n > MUI_LONGEST_OUT_NAME) {
        return mui_fail(c, MU_ERR_LIMIT, "the name %.60s... has %zu bytes; checkpoints can have names of %d", name, n,
                        MUI_LONGEST_OUT_NAME);
    }
    if (!mui_is_utf8(name, n)) {
        return mui_fail(c, MU_ERR_ARG, "\"%.100s\" is not UTF-8, and no checkpoint can have it as a name", name);
    }
    return MU_OK;
}

mu_status mui_out_add(mui_out_list *l, const mui_out_tensor *t)
{
    mu_status s = check_name(l->context, t->name);
    if (s != MU_OK) {
        return s;
    }
    if (!MUI_GROW(l->context, l->tensors, l->count, l->capacity)) {
        return MU_ERR_NOMEM;
    }
    char *name = mui_arena_strdup(&l->arena, t->name);
    int64_t *dim = mui_arena_calloc(&l->arena, (size_t)t->ndim, sizeof(*dim));
    if (name == NULL || dim == NULL) {
        return mu_context_status(l->context);
    }
    if (t->ndim > 0) {
        memcpy(dim, t->dim, (size_t)t->ndim * sizeof(*dim));
    }
    mui_out_tensor *to = &l->tensors[l->count++];
    *to = *t;
    to->name = name;
    to->dim = dim;
    return MU_OK;
}

mu_status mui_out_add_version(mui_out_list *l, const char *path, int64_t version)
{
    char *copy = mui_arena_strdup(&l->arena, path);
    if (copy == NULL || !MUI_GROW(l->context, l->versions, l->version_count, l->version_capacity)) {
        return mu_context_status(l->context);
    }
    l->has_versions = true;
    l->versions[l->version_count++] = (mui_out_version){copy, version};
    return MU_OK;
}

/* Shapes were checked where they came from: a tensor's in memory, a file's by mui_tensor_bytes. */
int64_t mui_out_elements(const mui_out_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) {
        n *= t->dim[i];
    }
    return n;
}

size_t mui_out_bytes(const mui_out_tensor *t)
{
    return (size_t)mui_out_elements(t) * t->dtype->bytes;
}

mu_status mui_out_each(const mui_out_list *l, const size_t *order, size_t n, mui_out_sink sink, void *user)
{
    size_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        size_t bytes = mui_out_bytes(&l->tensors[order[i]]);
        largest = bytes > largest ? bytes : largest;
    }
    void *room = mui_alloc(l->context, largest);
    mu_status s = room != NULL ? MU_OK : MU_ERR_NOMEM;
    for (size_t i = 0; i < n && s == MU_OK; i++) {
        size_t bytes = mui_out_bytes(&l->tensors[order[i]]);
        s = l->read(l->user, order[i], room, bytes);
        if (s == MU_OK) {
            s = sink(user, order[i], room, bytes);
        }
    }
    mui_free(l->context, room);
    return s;
}

mu_status mui_out_write(const mui_out_list *l, mu_file_format format, const char *path)
{
    switch (format) {
    case MU_FORMAT_TORCH: return mui_out_torch(l, path);
    case MU_FORMAT_LEGACY: return mui_out_legacy(l, path);
    case MU_FORMAT_SAFETENSORS: return mui_out_safetensors(l, path);
    }
    return mui_fail(l->context, MU_ERR_ARG, "%s: there is no file format %d", path, (int)format);
}
