/* Builds the tree: paths and the two walks. Both keep their own stack; values seen twice are expanded once, and cycles are
 * cut. */
#include "io/tree_items.h"
#include "base/alloc.h"
#include "io/limits.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BRANCH_DEPTH 8
#define MAX_NAMED_DEPTH 1000
#define MAX_VISITS ((size_t)8 << 20)

typedef struct frame {
    mui_value *value;
    mui_tree_node *node;
    size_t next;
    size_t name_bytes, plain_bytes; /* of the path of this value */
    size_t branch;     /* index, SIZE_MAX: none */
} frame;

typedef struct walk {
    const mui_meaning *w; /* with arena and work of this walk */
    mui_tree *tree;
    frame *frames;
    size_t depth, capacity;
    /* The path, with "<Class>" after what is an object, and without. */
    char name[MUI_MAX_NAME_BYTES + 1], plain[MUI_MAX_NAME_BYTES + 1];
    size_t name_bytes, plain_bytes;
    /* Items looked at so far, and how many may be: values shared as the state of many objects must not cost their
     * size each time. */
    size_t work, work_limit;
    size_t names_limit; /* a few bytes may name a shared dict everywhere: what that costs is held to the file's size too */
} walk;

/* -- paths -------------------------------------------------------------------------------------------------------- */

static void append_class(walk *k, const char *data, size_t bytes, bool *fits)
{
    for (size_t i = 0; i < bytes; i++) {
        /* Names are C strings: a NUL inside is shown. */
        const char *piece = data[i] == '\0' ? "\\x00" : data + i;
        size_t piece_bytes = data[i] == '\0' ? 4 : 1;
        if (k->name_bytes + piece_bytes > MUI_MAX_NAME_BYTES) {
            *fits = false;
            return;
        }
        memcpy(k->name + k->name_bytes, piece, piece_bytes);
        k->name_bytes += piece_bytes;
    }
    k->name[k->name_bytes] = '\0';
}

/* The plain path is never the longer one, so it has room for what the name has. */
static void append(walk *k, const char *data, size_t bytes, bool *fits)
{
    size_t start = k->name_bytes;
    append_class(k, data, bytes, fits);
    memcpy(k->plain + k->plain_bytes, k->name + start, k->name_bytes - start);
    k->plain_bytes += k->name_bytes - start;
    k->plain[k->plain_bytes] = '\0';
}

/* Cuts the path to what one above has. */
static void set_path(walk *k, size_t name_bytes, size_t plain_bytes)
{
    k->name_bytes = name_bytes;
    k->plain_bytes = plain_bytes;
    k->name[name_bytes] = k->plain[plain_bytes] = '\0';
}

static bool append_key(walk *k, const mui_value *key)
{
    bool fits = true;
    char text[64];
    if (k->plain_bytes > 0) {
        append(k, ".", 1, &fits);
    } else if (k->name_bytes > 0) {
        append_class(k, ".", 1, &fits);
    }
    if (key->kind == MUI_STR || key->kind == MUI_BYTES) {
        append(k, key->text.data, key->text.bytes, &fits);
        return fits;
    }
    if (key->kind == MUI_INT) {
        snprintf(text, sizeof(text), "%" PRId64, key->i);
    } else if (key->kind == MUI_BOOL) {
        snprintf(text, sizeof(text), "%s", key->truth ? "True" : "False");
    } else if (key->kind == MUI_FLOAT) {
        snprintf(text, sizeof(text), "%.17g", key->f);
    } else {
        snprintf(text, sizeof(text), "<%s>", mui_kind_name(key->kind));
    }
    append(k, text, strlen(text), &fits);
    return fits;
}

/* Adds an edge and the class of what it leads to. */
static bool append_edge(walk *k, const mui_edge *e, const mui_tree_node *child)
{
    bool fits = true;
    char text[32];
    if (e->kind == MUI_BY_KEY) {
        fits = append_key(k, e->key);
    } else if (e->kind == MUI_BY_INDEX) {
        snprintf(text, sizeof(text), "[%zu]", e->index);
        append(k, text, strlen(text), &fits);
    }
    if (child != NULL && child->class_name != NULL) {
        append_class(k, "<", 1, &fits);
        append_class(k, child->class_name->global.name.data, child->class_name->global.name.bytes, &fits);
        append_class(k, ">", 1, &fits);
    }
    return fits;
}

/* The path of the value on top of the stack, for a message; cut where it is too long. */
static const char *place(walk *k)
{
    set_path(k, 0, 0);
    for (size_t i = 0; i + 1 < k->depth && i < MAX_NAMED_DEPTH; i++) {
        append_edge(k, &k->frames[i].node->edges[k->frames[i].next - 1], k->frames[i + 1].node);
    }
    return k->name;
}

static mu_status push(walk *k, mui_value *v, mui_tree_node *n)
{
    if (!MUI_GROW(k->w->context, k->frames, k->depth, k->capacity)) {
        return MU_ERR_NOMEM;
    }
    k->frames[k->depth++] = (frame){.value = v, .node = n, .name_bytes = k->name_bytes,
                                    .plain_bytes = k->plain_bytes, .branch = SIZE_MAX};
    return MU_OK;
}

/* Fills the node of the value on top of the stack. */
static mu_status expand(walk *k)
{
    mu_context *c = k->w->context;
    mui_value *v = k->frames[k->depth - 1].value, *inner = NULL;
    mui_tree_node *n = k->frames[k->depth - 1].node;
    char problem[256] = "";
    mui_axes axes;
    mui_file_tensor t;
    bool good = true;
    switch (mui_tensor_read(k->w, v, &axes, &t, &inner, problem, sizeof(problem))) {
    case MUI_BROKEN: {
        const char *name = place(k);
        return mui_fail(c, MU_ERR_FORMAT, "%s: tensor '%s': %s", k->w->path, name, problem);
    }
    case MUI_IS_TENSOR:
        n->tensor = mui_file_tensor_keep(&k->tree->arena, &t);
        if (n->tensor == NULL) {
            return mu_context_status(c);
        }
        n->tensors = 1;
        return MU_OK;
    case MUI_WRAPS:
        n->wraps = true;
        n->role = t.role;
        n->requires_grad = t.requires_grad;
        good = !mui_is_branching(inner) || mui_add_edge(k->w, n, (mui_edge){.kind = MUI_THROUGH, .child = inner});
        break;
    default:
        good = mui_add_items_of(k->w, n, v);
    }
    return good ? MU_OK : mu_context_status(c);
}

static mu_status enter(walk *k, mui_value *v)
{
    mui_tree_node *n = mui_arena_calloc(&k->tree->arena, 1, sizeof(*n));
    if (n == NULL) {
        return mu_context_status(k->w->context);
    }
    v->note = n;
    mu_status s = push(k, v, n);
    if (s == MU_OK) {
        s = expand(k);
    }
    if (s == MU_OK && k->work > k->work_limit) {
        s = mui_fail(k->w->context, MU_ERR_LIMIT, "%s: the same items are referred to too many times", k->w->path);
    }
    return s;
}

/* The tensor that v is, or that v as a parameter is around; NULL: v holds others, or none. */
static const mui_file_tensor *tensor_of(const mui_value *v)
{
    const mui_tree_node *n = v->note;
    for (int i = 0; i < 4 && n != NULL && n->wraps && n->count == 1; i++) {
        n = n->edges[0].child->note;
    }
    return n != NULL ? n->tensor : NULL;
}

static bool could_be_weight(const mui_file_tensor *t)
{
    mu_dtype d = t->dtype != NULL ? t->dtype->carrier : MU_F32;
    bool whole = d == MU_I64 || d == MU_I32 || d == MU_I16 || d == MU_I8 || d == MU_U8 || d == MU_BOOL;
    return t->ndim > 0 && (!whole || (t->dtype != NULL && !t->dtype->exact));
}

static void look_at_items(mui_tree_node *n)
{
    for (size_t i = 0; n->dict && i < n->count; i++) {
        const mui_file_tensor *t = tensor_of(n->edges[i].child);
        if (t != NULL && !t->bare_storage) {
            n->direct++;
            n->weights |= could_be_weight(t);
        }
    }
}

bool mui_holds_tensors(const mui_value *v)
{
    const mui_tree_node *n = v->note;
    return n != NULL && n->tensors > 0;
}

/* First walk: expands every value once and counts the tensors below it. */
static mu_status count_tensors(walk *k, mui_value *root)
{
    mu_status s = mui_is_branching(root) ? enter(k, root) : MU_OK;
    while (s == MU_OK && k->depth > 0) {
        frame *f = &k->frames[k->depth - 1];
        if (f->next < f->node->count) {
            mui_value *child = f->node->edges[f->next++].child;
            const mui_tree_node *seen = child->note;
            if (seen == NULL) {
                s = enter(k, child);
            } else if (seen->counted && __builtin_add_overflow(f->node->tensors, seen->tensors, &f->node->tensors)) {
                f->node->tensors = UINT64_MAX;
            }
            continue;
        }
        mui_tree_node *done = f->node;
        look_at_items(done);
        done->counted = true;
        k->depth--;
        if (k->depth > 0) {
            mui_tree_node *parent = k->frames[k->depth - 1].node;
            if (__builtin_add_overflow(parent->tensors, done->tensors, &parent->tensors)) {
                parent->tensors = UINT64_MAX;
            }
        }
    }
    return s;
}

/* -- naming ------------------------------------------------------------------------------------------------------- */

/* What the way to a tensor, from the nearest dict or object down, says about it. */
static mui_role role_of(const walk *k, const mui_tree_node *n, bool *requires_grad)
{
    mui_role role = MUI_NO_ROLE;
    *requires_grad = n->tensor->requires_grad;
    for (size_t i = k->depth; i-- > 0 && role == MUI_NO_ROLE;) {
        const mui_tree_node *above = k->frames[i].node;
        role = above->wraps ? above->role : above->edges[k->frames[i].next - 1].role;
        if (!above->wraps) {
            break;
        }
        *requires_grad = above->requires_grad;
    }
    return role;
}

/* The plain path, which is mostly the same text as name, a copy of the path. */
static const char *plain_copy(walk *k, const char *name)
{
    return name == NULL || k->plain_bytes == k->name_bytes ? name : mui_arena_strdup(&k->tree->arena, k->plain);
}

static mu_status add_entry(walk *k, const mui_tree_node *n)
{
    mui_tree *t = k->tree;
    mui_entry e = {.tensor = n->tensor, .tied_to = SIZE_MAX};
    if (!MUI_GROW(t->context, t->entries, t->count, t->capacity)) {
        return MU_ERR_NOMEM;
    }
    e.name = mui_arena_strdup(&t->arena, k->name);
    e.plain = plain_copy(k, e.name);
    if (e.plain == NULL) {
        return mu_context_status(t->context);
    }
    e.role = role_of(k, n, &e.requires_grad);
    t->entries[t->count++] = e;
    return MU_OK;
}

static mu_status open_branch(walk *k, frame *f)
{
    mui_tree *t = k->tree;
    if (!f->node->dict || k->depth > MAX_BRANCH_DEPTH) {
        return MU_OK;
    }
    if (!MUI_GROW(t->context, t->branches, t->branch_count, t->branch_capacity)) {
        return MU_ERR_NOMEM;
    }
    char *path = mui_arena_strdup(&t->arena, k->name);
    const char *plain = plain_copy(k, path);
    if (plain == NULL) {
        return mu_context_status(t->context);
    }
    f->branch = t->branch_count;
    t->branches[t->branch_count++] = (mui_branch){.path = path, .plain = plain, .first = t->count, .end = t->count,
        .value = f->value, .kind = f->node->kind, .items = f->node->items,
        .direct = f->node->direct, .weights = f->node->weights};
    return MU_OK;
}

static mu_status name_value(walk *k, mui_value *v)
{
    mui_tree_node *n = v->note;
    if (n->tensor != NULL) {
        return add_entry(k, n);
    }
    if (k->depth >= MAX_NAMED_DEPTH) {
        return mui_fail(k->w->context, MU_ERR_LIMIT, "%s: tensors are nested more than %d levels deep", k->w->path,
                        MAX_NAMED_DEPTH);
    }
    mu_status s = push(k, v, n);
    if (s == MU_OK) {
        n->on_path = true;
        s = open_branch(k, &k->frames[k->depth - 1]);
    }
    return s;
}

/* Second walk: only where tensors are. A value shared by several parents is named under each. */
static mu_status name_tensors(walk *k, mui_value *root)
{
    const mui_tree_node *top = root->note;
    const mui_edge start = {.kind = MUI_THROUGH, .child = root};
    size_t visits = 0;
    set_path(k, 0, 0);
    if (top == NULL || top->tensors == 0) {
        return MU_OK;
    }
    append_edge(k, &start, top);
    if (top->tensors > k->names_limit && top->tensors <= MUI_MAX_ENTRIES) {
        return mui_fail(k->w->context, MU_ERR_LIMIT,
                        "%s: the same tensors are referred to too many times: %" PRIu64 " names, and at most %zu are taken "
                        "of a pickle of this size",
                        k->w->path, top->tensors, k->names_limit);
    }
    mu_status s = top->tensors > MUI_MAX_ENTRIES ? MU_ERR_LIMIT : name_value(k, root);
    while (s == MU_OK && k->depth > 0) {
        frame *f = &k->frames[k->depth - 1];
        set_path(k, f->name_bytes, f->plain_bytes);
        if (f->next == f->node->count) {
            f->node->on_path = false;
            if (f->branch != SIZE_MAX) {
                k->tree->branches[f->branch].end = k->tree->count;
            }
            k->depth--;
            continue;
        }
        const mui_edge *e = &f->node->edges[f->next++];
        const mui_tree_node *n = e->child->note;
        if (n == NULL || n->tensors == 0 || n->on_path) {
            continue;
        }
        if (++visits > MAX_VISITS) {
            s = MU_ERR_LIMIT;
        } else if (!append_edge(k, e, n)) {
            s = mui_fail(k->w->context, MU_ERR_LIMIT, "%s: a tensor's name is longer than %d bytes: '%.80s...'", k->w->path,
                         MUI_MAX_NAME_BYTES, k->name);
        } else {
            s = name_value(k, e->child);
        }
    }
    return s != MU_ERR_LIMIT ? s
                             : mui_fail(k->w->context, s, "%s: more than %d tensors are named", k->w->path,
                                        MUI_MAX_ENTRIES);
}

mu_status mui_tree_build(const mui_meaning *w, mui_value *root, size_t pickle_bytes, mui_tree *out)
{
    mui_tree t = {.context = w->context};
    mui_arena_init(&t.arena, w->context);
    t.arena.limit_bytes = mui_limits_texts(pickle_bytes);
    mui_meaning own = *w;
    walk k = {.w = &own, .tree = &t, .work_limit = pickle_bytes * 8 + 250000,
              .names_limit = pickle_bytes * 4 + 10000};
    own.arena = &t.arena;
    own.work = &k.work;
    mu_status s = count_tensors(&k, root);
    if (s == MU_OK) {
        s = name_tensors(&k, root);
    }
    if (s == MU_OK) {
        s = mui_tree_find_ties(&t);
    }
    mui_free(w->context, k.frames);
    if (s != MU_OK) {
        mui_tree_free(&t);
        return s;
    }
    *out = t;
    return MU_OK;
}

void mui_tree_free(mui_tree *t)
{
    mui_arena_free(&t->arena);
    mui_free(t->context, t->entries);
    mui_free(t->context, t->branches);
    *t = (mui_tree){0};
}
