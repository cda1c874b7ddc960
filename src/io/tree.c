/* Builds the tree. Both walks keep their own stack; values seen twice are expanded once, and cycles are cut. */
#include "io/tree.h"
#include "base/alloc.h"
#include "io/limits.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BRANCH_DEPTH 8
#define MAX_NAMED_DEPTH 1000
#define MAX_VISITS ((size_t)8 << 20)

typedef enum edge_kind { BY_KEY, BY_INDEX, THROUGH } edge_kind;

typedef struct edge {
    edge_kind kind;
    mui_role role;
    mui_value *key;
    size_t index;
    mui_value *child;
} edge;

/* What the walks know of a value; its note. */
typedef struct node {
    edge *edges;
    size_t count, capacity;
    const mui_value *class_name; /* a global, shown as <Name>; NULL: none */
    mui_file_tensor *tensor;
    uint64_t tensors;            /* at and below; the sum over all paths, saturating */
    mui_branch_kind kind;
    size_t items;                /* of a dict, whatever they are */
    size_t direct;               /* tensors right below it, maybe as parameters */
    bool weights;                /* one of those could be a weight: neither an integer nor a scalar */
    bool wraps;                  /* a parameter or the like around its only edge */
    mui_role role;               /* that it gives */
    bool requires_grad;
    bool dict;
    bool counted;                /* the first walk is done with it */
    bool on_path;                /* of the second walk */
} node;

typedef struct frame {
    mui_value *value;
    node *node;
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

/* -- dicts -------------------------------------------------------------------------------------------------------- */

static bool is_dict_class(const mui_value *g)
{
    return mui_global_is(g, "collections", "OrderedDict") || mui_global_is(g, "collections", "defaultdict") ||
           mui_global_is(g, "collections", "Counter");
}

bool mui_dict_items(const mui_value *v, const mui_seq **items)
{
    if (v != NULL && v->kind == MUI_DICT) {
        *items = &v->seq;
        return true;
    }
    if (v != NULL && v->kind == MUI_OBJECT && is_dict_class(v->object->callable)) {
        *items = &v->object->pairs;
        return true;
    }
    return false;
}

mui_value *mui_dict_get(const mui_value *dict, const char *key)
{
    const mui_seq *items = NULL;
    if (!mui_dict_items(dict, &items)) {
        return NULL;
    }
    for (size_t i = items->count / 2; i-- > 0;) {
        if (mui_text_is(items->items[2 * i], key)) {
            return items->items[2 * i + 1];
        }
    }
    return NULL;
}

/* -- what a value holds ------------------------------------------------------------------------------------------- */

static bool add_edge(walk *k, node *n, edge e)
{
    if (n->count == n->capacity) {
        size_t capacity = n->capacity < 4 ? 4 : n->capacity * 2;
        edge *edges = mui_arena_calloc(&k->tree->arena, capacity, sizeof(*edges));
        if (edges == NULL) {
            return false;
        }
        if (n->count > 0) {
            memcpy(edges, n->edges, n->count * sizeof(*edges));
        }
        n->edges = edges;
        n->capacity = capacity;
    }
    n->edges[n->count++] = e;
    return true;
}

/* Values that can have tensors at or below them. */
static bool is_branching(const mui_value *v)
{
    return v->kind == MUI_TUPLE || v->kind == MUI_LIST || v->kind == MUI_SET || v->kind == MUI_DICT ||
           v->kind == MUI_OBJECT || v->kind == MUI_PERSISTENT;
}

/* Room for the edges that every step-th value from first on will make: grown arrays would waste as much again. */
static bool reserve_edges(walk *k, node *n, const mui_seq *s, size_t first, size_t step)
{
    size_t more = 0;
    for (size_t i = first; i < s->count; i += step) {
        more += is_branching(s->items[i]);
    }
    if (more == 0 || n->count > 0) {
        return true;
    }
    n->edges = mui_arena_calloc(&k->tree->arena, more, sizeof(*n->edges));
    n->capacity = n->edges != NULL ? more : 0;
    return n->edges != NULL;
}

static bool add_items(walk *k, node *n, const mui_seq *s)
{
    k->work += s->count;
    if (!reserve_edges(k, n, s, 0, 1)) {
        return false;
    }
    for (size_t i = 0; i < s->count; i++) {
        if (is_branching(s->items[i]) && !add_edge(k, n, (edge){.kind = BY_INDEX, .index = i, .child = s->items[i]})) {
            return false;
        }
    }
    return true;
}

static bool add_pairs(walk *k, node *n, const mui_seq *s)
{
    k->work += s->count;
    n->items += s->count / 2;
    if (!reserve_edges(k, n, s, 1, 2)) {
        return false;
    }
    for (size_t i = 0; i + 1 < s->count; i += 2) {
        if (is_branching(s->items[i + 1]) &&
            !add_edge(k, n, (edge){.kind = BY_KEY, .key = s->items[i], .child = s->items[i + 1]})) {
            return false;
        }
    }
    return true;
}

/* OrderedDict([[key, value], ...]), as Python 2 wrote it, and Counter({...}). */
static bool add_initial_pairs(walk *k, node *n, const mui_value *args)
{
    const mui_value *from = args->seq.count > 0 ? args->seq.items[args->seq.count - 1] : NULL;
    const mui_seq *items = NULL;
    if (mui_dict_items(from, &items)) {
        return add_pairs(k, n, items);
    }
    if (from == NULL || from->kind != MUI_LIST) {
        return true;
    }
    k->work += from->seq.count;
    n->items += from->seq.count;
    for (size_t i = 0; i < from->seq.count; i++) {
        const mui_value *pair = from->seq.items[i];
        if ((pair->kind == MUI_LIST || pair->kind == MUI_TUPLE) && pair->seq.count == 2 &&
            is_branching(pair->seq.items[1]) &&
            !add_edge(k, n, (edge){.kind = BY_KEY, .key = pair->seq.items[0], .child = pair->seq.items[1]})) {
            return false;
        }
    }
    return true;
}

/* Buffers whose names are in _non_persistent_buffers_set are not part of the state_dict. */
static bool is_non_persistent(const mui_value *set, const mui_value *key)
{
    for (size_t i = 0; key->kind == MUI_STR && i < set->seq.count && i < 1024; i++) {
        const mui_value *v = set->seq.items[i];
        if (v->kind == MUI_STR && v->text.bytes == key->text.bytes &&
            memcmp(v->text.data, key->text.data, key->text.bytes) == 0) {
            return true;
        }
    }
    return false;
}

/* A pickled torch.nn.Module, of whatever class: its own parameters, then buffers, then children. */
static bool add_module(walk *k, node *n, const mui_value *state)
{
    static const char *const parts[3] = {"_parameters", "_buffers", "_modules"};
    const mui_value *skip = mui_dict_get(state, "_non_persistent_buffers_set");
    /* A set is SET under protocol 4 and set([...]) before. */
    if (skip != NULL && skip->kind == MUI_OBJECT && skip->object->args->seq.count == 1) {
        skip = skip->object->args->seq.items[0];
    }
    for (int i = 0; i < 3; i++) {
        const mui_seq *items = NULL;
        if (!mui_dict_items(mui_dict_get(state, parts[i]), &items)) {
            continue;
        }
        k->work += items->count; /* many modules may share it */
        for (size_t j = 0; j + 1 < items->count; j += 2) {
            mui_value *key = items->items[j], *child = items->items[j + 1];
            bool skipped = i == 1 && skip != NULL && (skip->kind == MUI_SET || skip->kind == MUI_LIST) &&
                           is_non_persistent(skip, key);
            edge e = {.kind = BY_KEY, .role = i == 0 ? MUI_PARAMETER : i == 1 ? MUI_BUFFER : MUI_NO_ROLE, .key = key, .child = child};
            if (is_branching(child) && !skipped && !add_edge(k, n, e)) {
                return false;
            }
        }
    }
    return true;
}

/* What torch.optim.Optimizer.state_dict() gives, or a pickled optimiser's state. */
static bool is_optimizer(const mui_value *dict)
{
    return mui_dict_get(dict, "param_groups") != NULL && mui_dict_get(dict, "state") != NULL;
}

static bool add_object(walk *k, node *n, const mui_object *o)
{
    if (is_dict_class(o->callable)) {
        n->dict = true;
        n->kind = MUI_BRANCH_DICT;
        return add_initial_pairs(k, n, o->args) && add_pairs(k, n, &o->pairs);
    }
    const mui_seq *state_items = NULL, *ignored = NULL;
    k->work += mui_dict_items(o->state, &state_items) ? 4 * state_items->count : 0;
    if (mui_dict_items(mui_dict_get(o->state, "_modules"), &ignored) &&
        mui_dict_items(mui_dict_get(o->state, "_parameters"), &ignored)) {
        n->dict = true;
        n->kind = MUI_BRANCH_MODULE;
        return add_module(k, n, o->state);
    }
    const mui_value *c = o->callable;
    if (c->kind == MUI_PERSISTENT) {
        c = k->w->refs[c->number].class_value;
    }
    n->class_name = c != NULL && c->kind == MUI_GLOBAL ? c : NULL;
    if (o->state != NULL && o->state->kind == MUI_DICT) {
        n->dict = true;
        n->kind = is_optimizer(o->state) ? MUI_BRANCH_OPTIMIZER : MUI_BRANCH_OBJECT;
        if (!add_pairs(k, n, &o->state->seq)) {
            return false;
        }
    } else if (o->state != NULL && is_branching(o->state) &&
               !add_edge(k, n, (edge){.kind = THROUGH, .child = o->state})) {
        return false;
    }
    return add_pairs(k, n, &o->pairs) && add_items(k, n, &o->appended) && add_items(k, n, &o->args->seq);
}

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
static bool append_edge(walk *k, const edge *e, const node *child)
{
    bool fits = true;
    char text[32];
    if (e->kind == BY_KEY) {
        fits = append_key(k, e->key);
    } else if (e->kind == BY_INDEX) {
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

static mu_status push(walk *k, mui_value *v, node *n)
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
    node *n = k->frames[k->depth - 1].node;
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
        good = !is_branching(inner) || add_edge(k, n, (edge){.kind = THROUGH, .child = inner});
        break;
    default:
        if (v->kind == MUI_DICT) {
            n->dict = true;
            n->kind = is_optimizer(v) ? MUI_BRANCH_OPTIMIZER : MUI_BRANCH_DICT;
            good = add_pairs(k, n, &v->seq);
        } else if (v->kind == MUI_OBJECT) {
            good = add_object(k, n, v->object);
            n->kind = n->kind == MUI_BRANCH_DICT && is_optimizer(v) ? MUI_BRANCH_OPTIMIZER : n->kind;
        } else if (v->kind != MUI_PERSISTENT) {
            good = add_items(k, n, &v->seq);
        }
    }
    return good ? MU_OK : mu_context_status(c);
}

static mu_status enter(walk *k, mui_value *v)
{
    node *n = mui_arena_calloc(&k->tree->arena, 1, sizeof(*n));
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
    const node *n = v->note;
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

static void look_at_items(node *n)
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
    const node *n = v->note;
    return n != NULL && n->tensors > 0;
}

/* First walk: expands every value once and counts the tensors below it. */
static mu_status count_tensors(walk *k, mui_value *root)
{
    mu_status s = is_branching(root) ? enter(k, root) : MU_OK;
    while (s == MU_OK && k->depth > 0) {
        frame *f = &k->frames[k->depth - 1];
        if (f->next < f->node->count) {
            mui_value *child = f->node->edges[f->next++].child;
            const node *seen = child->note;
            if (seen == NULL) {
                s = enter(k, child);
            } else if (seen->counted && __builtin_add_overflow(f->node->tensors, seen->tensors, &f->node->tensors)) {
                f->node->tensors = UINT64_MAX;
            }
            continue;
        }
        node *done = f->node;
        look_at_items(done);
        done->counted = true;
        k->depth--;
        if (k->depth > 0) {
            node *parent = k->frames[k->depth - 1].node;
            if (__builtin_add_overflow(parent->tensors, done->tensors, &parent->tensors)) {
                parent->tensors = UINT64_MAX;
            }
        }
    }
    return s;
}

/* -- naming ------------------------------------------------------------------------------------------------------- */

/* What the way to a tensor, from the nearest dict or object down, says about it. */
static mui_role role_of(const walk *k, const node *n, bool *requires_grad)
{
    mui_role role = MUI_NO_ROLE;
    *requires_grad = n->tensor->requires_grad;
    for (size_t i = k->depth; i-- > 0 && role == MUI_NO_ROLE;) {
        const node *above = k->frames[i].node;
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

static mu_status add_entry(walk *k, const node *n)
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
    node *n = v->note;
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
    const node *top = root->note;
    const edge start = {.kind = THROUGH, .child = root};
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
        const edge *e = &f->node->edges[f->next++];
        const node *n = e->child->note;
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
