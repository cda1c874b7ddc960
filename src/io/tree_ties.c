/* Trees that a format lists by itself, and which entries of any tree show the same elements. */
#include "base/alloc.h"
#include "io/tree.h"

#include <stdlib.h>

typedef struct tie {
    const mui_file_tensor *tensor;
    size_t index;
} tie;

static int compare_views(const mui_file_tensor *x, const mui_file_tensor *y)
{
    const mui_storage_ref *p = x->storage, *q = y->storage;
    if (p->blob != q->blob) {
        return p->blob < q->blob ? -1 : 1;
    }
    int64_t a = p->offset + x->offset, b = q->offset + y->offset;
    if (a != b || x->dtype != y->dtype || x->ndim != y->ndim) {
        return a != b ? (a < b ? -1 : 1) : x->dtype != y->dtype ? (x->dtype < y->dtype ? -1 : 1) : x->ndim - y->ndim;
    }
    for (int i = 0; i < x->ndim; i++) {
        if (x->dim[i] != y->dim[i] || x->stride[i] != y->stride[i]) {
            return x->dim[i] != y->dim[i] ? (x->dim[i] < y->dim[i] ? -1 : 1) : x->stride[i] < y->stride[i] ? -1 : 1;
        }
    }
    return 0;
}

static int by_view(const void *a, const void *b)
{
    const tie *x = a, *y = b;
    int order = compare_views(x->tensor, y->tensor);
    return order != 0 ? order : x->index < y->index ? -1 : x->index > y->index;
}

mu_status mui_tree_find_ties(mui_tree *t)
{
    tie *ties = mui_calloc(t->context, t->count, sizeof(*ties));
    if (ties == NULL) {
        return MU_ERR_NOMEM;
    }
    size_t n = 0;
    for (size_t i = 0; i < t->count; i++) {
        const mui_file_tensor *x = t->entries[i].tensor;
        if (x->storage != NULL && x->storage->elements > 0) {
            ties[n++] = (tie){x, i};
        }
    }
    if (n > 0) {
        qsort(ties, n, sizeof(*ties), by_view);
    }
    for (size_t i = 1; i < n; i++) {
        if (compare_views(ties[i - 1].tensor, ties[i].tensor) == 0) {
            size_t first = t->entries[ties[i - 1].index].tied_to;
            t->entries[ties[i].index].tied_to = first != SIZE_MAX ? first : ties[i - 1].index;
        }
    }
    mui_free(t->context, ties);
    return MU_OK;
}

void mui_tree_init(mui_tree *t, mu_context *c)
{
    *t = (mui_tree){.context = c};
    mui_arena_init(&t->arena, c);
}

mu_status mui_tree_add(mui_tree *t, char *name, mui_file_tensor *tensor)
{
    if (t->count == MUI_MAX_ENTRIES) {
        return mui_fail(t->context, MU_ERR_LIMIT, "more than %d tensors are named", MUI_MAX_ENTRIES);
    }
    if (!MUI_GROW(t->context, t->entries, t->count, t->capacity)) {
        return MU_ERR_NOMEM;
    }
    t->entries[t->count++] = (mui_entry){.name = name, .plain = name, .tensor = tensor, .tied_to = SIZE_MAX};
    return MU_OK;
}

mu_status mui_tree_finish(mui_tree *t)
{
    if (!MUI_GROW(t->context, t->branches, t->branch_count, t->branch_capacity)) {
        return MU_ERR_NOMEM;
    }
    char *path = mui_arena_strdup(&t->arena, "");
    if (path == NULL) {
        return mu_context_status(t->context);
    }
    t->branches[t->branch_count++] = (mui_branch){.path = path, .plain = path, .first = 0, .end = t->count};
    return mui_tree_find_ties(t);
}
