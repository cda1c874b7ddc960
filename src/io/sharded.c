/* Opens an index and its shards. A tensor is where the index says, and nowhere else. */
#include "io/sharded.h"
#include "base/alloc.h"
#include "base/text.h"
#include "io/json_object.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_SHARDS 10000
#define MAX_FILE_NAME 255

#define BAD(k, ...) mui_fail((k)->context, MU_ERR_FORMAT, __VA_ARGS__)

/* What the index says of one tensor. */
typedef struct promise {
    char *name, *file;
    size_t index; /* in the weight map */
    const mui_entry *found;
} promise;

typedef struct list {
    promise *items;
    size_t count, capacity;
} list;

/* -- the index ---------------------------------------------------------------------------------------------------- */

/* Shards lie beside the index: their names are never paths. */
static mu_status check_file(mu_checkpoint_file *k, const char *name, const char *file, size_t bytes)
{
    if (bytes == 0 || bytes > MAX_FILE_NAME || strcmp(file, ".") == 0 || strcmp(file, "..") == 0) {
        return BAD(k, "%s: the index has tensor '%.200s' in '%.60s', which is no file's name", k->path, name, file);
    }
    if (strchr(file, '/') != NULL || strchr(file, '\\') != NULL) {
        return BAD(k, "%s: the index has tensor '%.200s' in '%.200s', outside its own folder: refused", k->path,
                   name, file);
    }
    return MU_OK;
}

static mu_status read_promise(mu_checkpoint_file *k, const mui_json *j, const mui_json_member *m, list *l)
{
    if (m->name_bytes > MUI_MAX_NAME_BYTES || l->count == MUI_MAX_ENTRIES) {
        return l->count == MUI_MAX_ENTRIES
                   ? mui_fail(k->context, MU_ERR_LIMIT, "%s: more than %d tensors are named", k->path, MUI_MAX_ENTRIES)
                   : mui_fail(k->context, MU_ERR_LIMIT, "%s: a tensor's name is longer than %d bytes", k->path,
                              MUI_MAX_NAME_BYTES);
    }
    json_t *v = m->value[0] == '"' ? mui_json_value(j, m, "a file's name") : NULL;
    if (v == NULL) {
        return mui_failed(k->context)
                   ? mu_context_status(k->context)
                   : BAD(k, "%s: the weight map has something other than a file's name for '%.200s', at byte %zu", k->path,
                         m->name, j->base + m->at);
    }
    const char *file = json_string_value(v);
    mu_status s = check_file(k, m->name, file, json_string_length(v));
    if (s == MU_OK && !MUI_GROW(k->context, l->items, l->count, l->capacity)) {
        s = MU_ERR_NOMEM;
    }
    if (s == MU_OK) {
        promise *last = l->count > 0 ? &l->items[l->count - 1] : NULL;
        promise p = {.name = mui_arena_strdup(&k->tree.arena, m->name), .index = l->count};
        /* Neighbours mostly lie in one file, whose name is kept once. */
        p.file = last != NULL && strcmp(last->file, file) == 0 ? last->file : mui_arena_strdup(&k->tree.arena, file);
        s = p.name != NULL && p.file != NULL ? MU_OK : mu_context_status(k->context);
        l->items[l->count] = p;
        l->count += s == MU_OK;
    }
    json_decref(v);
    return s;
}

static mu_status read_weight_map(mu_checkpoint_file *k, const mui_json *outer, const mui_json_member *m, list *l)
{
    mui_json j = mui_json_inner(outer, m, "the weight map");
    mui_json_member member;
    mu_status s = mui_json_begin(&j);
    while (mui_json_next(&j, &member, &s)) {
        s = read_promise(k, &j, &member, l);
    }
    return s;
}

static mu_status read_index(mu_checkpoint_file *k, list *l)
{
    mui_json j = {.context = k->context,
                  .path = k->path,
                  .what = "the index",
                  .text = (const char *)k->map.data,
                  .bytes = k->map.bytes};
    if (k->map.bytes > k->limits.header_bytes) {
        return mui_fail(k->context, MU_ERR_LIMIT, "%s: an index of %zu bytes, more than the limit of %llu", k->path,
                        k->map.bytes, (unsigned long long)k->limits.header_bytes);
    }
    bool has_map = false;
    mui_json_member m;
    mu_status s = mui_json_begin(&j);
    while (mui_json_next(&j, &m, &s)) {
        if (strcmp(m.name, "weight_map") == 0) {
            s = has_map ? BAD(k, "%s: the index has two weight maps", k->path) : read_weight_map(k, &j, &m, l);
            has_map = true;
        } else { /* sizes and the like, for people */
            json_t *v = mui_json_value(&j, &m, "the index");
            s = v != NULL ? MU_OK : mu_context_status(k->context);
            json_decref(v);
        }
    }
    if (s == MU_OK && l->count == 0) {
        s = BAD(k, "%s: a JSON file whose weight_map %s, so no index of a sharded checkpoint", k->path,
                has_map ? "is empty" : "is not at its top");
    }
    return s;
}

/* -- the shards --------------------------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const promise *)a)->name, ((const promise *)b)->name);
}

static int by_file_and_name(const void *a, const void *b)
{
    const promise *x = a, *y = b;
    int order = x->file == y->file ? 0 : strcmp(x->file, y->file);
    return order != 0 ? order : strcmp(x->name, y->name);
}

static int by_index(const void *a, const void *b)
{
    const promise *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int by_entry_name(const void *a, const void *b)
{
    return strcmp((*(const mui_entry *const *)a)->name, (*(const mui_entry *const *)b)->name);
}

static mu_status check_names(mu_checkpoint_file *k, const list *l)
{
    qsort(l->items, l->count, sizeof(*l->items), by_name);
    for (size_t i = 1; i < l->count; i++) {
        if (strcmp(l->items[i - 1].name, l->items[i].name) == 0) {
            return BAD(k, "%s: the index names tensor '%.200s' twice", k->path, l->items[i].name);
        }
    }
    return MU_OK;
}

static mu_status open_shard(mu_checkpoint_file *k, const char *file, mu_checkpoint_file **out)
{
    const char *slash = strrchr(k->path, '/');
    char *path = mui_format(k->context, "%.*s%s", slash != NULL ? (int)(slash - k->path) + 1 : 0, k->path, file);
    if (path == NULL) {
        return MU_ERR_NOMEM;
    }
    struct stat st;
    mu_status s = MU_OK;
    if (stat(path, &st) != 0 && errno == ENOENT) {
        s = BAD(k, "%s: the shard '%s', which the index names, is not there", k->path, file);
    }
    *out = s == MU_OK ? mui_checkpoint_open_shard(k->context, path, &k->limits) : NULL;
    mui_free(k->context, path);
    return *out != NULL ? MU_OK : mu_context_status(k->context);
}

/* What a shard has and the index does not name: told, and left out, since nobody can say that it belongs here. */
typedef struct others {
    size_t count;
    mui_text names;
} others;

static void add_other(others *o, const mui_entry *e, const char *file)
{
    if (o->count++ < 3) {
        mui_text_add(&o->names, "%s'%.200s' in %s", o->count > 1 ? ", " : "", e->name, file);
    }
}

static const mui_entry **sorted_entries(mu_checkpoint_file *k, const mui_tree *t)
{
    const mui_entry **sorted = mui_calloc(k->context, t->count, sizeof(*sorted));
    for (size_t i = 0; sorted != NULL && i < t->count; i++) {
        sorted[i] = &t->entries[i];
    }
    if (sorted != NULL && t->count > 1) {
        qsort(sorted, t->count, sizeof(*sorted), by_entry_name);
    }
    return sorted;
}

typedef struct matching {
    const list *named; /* all of the index, by name */
    list tied;         /* names that are only other ones for a tensor, see safetensors.c: the index does not have those */
    others others;
} matching;

static mu_status take_other(mu_checkpoint_file *k, matching *g, const mu_checkpoint_file *shard, const mui_entry *e,
                            const char *file)
{
    promise p = {.name = e->name, .found = e};
    if (shard->format != MUI_FILE_SAFETENSORS || e->tied_to == SIZE_MAX ||
        bsearch(&p, g->named->items, g->named->count, sizeof(p), by_name) != NULL) {
        add_other(&g->others, e, file);
        return MU_OK;
    }
    if (!MUI_GROW(k->context, g->tied.items, g->tied.count, g->tied.capacity)) {
        return MU_ERR_NOMEM;
    }
    g->tied.items[g->tied.count++] = p;
    return MU_OK;
}

/* Finds the tensors [first, end) of the index, all of one file and sorted by name, in their shard. */
static mu_status match_shard(mu_checkpoint_file *k, matching *g, const mu_checkpoint_file *shard, promise *first,
                             const promise *end)
{
    const char *file = first->file;
    const mui_entry **sorted = sorted_entries(k, &shard->tree);
    size_t i = 0, n = shard->tree.count;
    mu_status s = sorted != NULL ? MU_OK : MU_ERR_NOMEM;
    for (; s == MU_OK && first < end; first++) {
        for (; s == MU_OK && i < n && strcmp(sorted[i]->name, first->name) < 0; i++) {
            s = take_other(k, g, shard, sorted[i], file);
        }
        if (s == MU_OK && (i == n || strcmp(sorted[i]->name, first->name) != 0)) {
            s = BAD(k, "%s: tensor '%.200s', which the index has in '%s', is not there", k->path, first->name, file);
        } else if (s == MU_OK) {
            first->found = sorted[i++];
        }
    }
    for (; s == MU_OK && i < n; i++) {
        s = take_other(k, g, shard, sorted[i], file);
    }
    mui_free(k->context, sorted);
    return s;
}

static mu_status open_shards(mu_checkpoint_file *k, matching *g, list *l)
{
    size_t files = 0;
    qsort(l->items, l->count, sizeof(*l->items), by_file_and_name);
    for (size_t i = 0; i < l->count; i++) {
        files += i == 0 || strcmp(l->items[i - 1].file, l->items[i].file) != 0;
    }
    if (files > MAX_SHARDS) {
        return mui_fail(k->context, MU_ERR_LIMIT, "%s: an index of %zu files, more than %d", k->path, files, MAX_SHARDS);
    }
    k->shards = mui_calloc(k->context, files, sizeof(mu_checkpoint_file *));
    if (k->shards == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = MU_OK;
    k->format = MUI_FILE_SHARDED_SAFETENSORS;
    for (size_t i = 0, end = 0; s == MU_OK && i < l->count; i = end) {
        for (end = i + 1; end < l->count && strcmp(l->items[i].file, l->items[end].file) == 0;) {
            end++;
        }
        mu_checkpoint_file *shard = NULL;
        s = open_shard(k, l->items[i].file, &shard);
        if (s != MU_OK) {
            break;
        }
        k->shards[k->shard_count++] = shard;
        if (shard->format != MUI_FILE_SAFETENSORS) {
            k->format = MUI_FILE_SHARDED_TORCH;
        }
        for (size_t b = 0; b < shard->blob_count; b++) {
            shard->blobs[b].shard = shard;
        }
        s = match_shard(k, g, shard, l->items + i, l->items + end);
    }
    return s;
}

static mu_status add_entries(mu_checkpoint_file *k, const list *l)
{
    mu_status s = MU_OK;
    for (size_t i = 0; s == MU_OK && i < l->count; i++) {
        s = mui_tree_add(&k->tree, l->items[i].found->name, l->items[i].found->tensor);
    }
    return s;
}

static mu_status read_all(mu_checkpoint_file *k, matching *g, list *named, list *l)
{
    mu_status s = read_index(k, named);
    s = s == MU_OK ? check_names(k, named) : s;
    if (s != MU_OK) {
        return s;
    }
    l->items = mui_calloc(k->context, named->count, sizeof(*l->items));
    if (l->items == NULL) {
        return MU_ERR_NOMEM;
    }
    memcpy(l->items, named->items, named->count * sizeof(*l->items));
    l->count = named->count;
    s = open_shards(k, g, l);
    if (s != MU_OK) {
        return s;
    }
    qsort(l->items, l->count, sizeof(*l->items), by_index);
    s = add_entries(k, l);
    s = s == MU_OK ? add_entries(k, &g->tied) : s;
    if (s == MU_OK && g->others.count > 0) {
        mui_log(k->context, MU_LOG_WARN, "%s: %zu tensor%s in the shards %s not in the index and left out: %s%s", k->path,
                g->others.count, g->others.count == 1 ? "" : "s", g->others.count == 1 ? "is" : "are",
                mui_text_get(&g->others.names), g->others.count > 3 ? ", ..." : "");
    }
    return s == MU_OK ? mui_tree_finish(&k->tree) : s;
}

mu_status mui_sharded_open(mu_checkpoint_file *k)
{
    list named = {0}, by_file = {0};
    matching g = {.named = &named};
    mui_tree_init(&k->tree, k->context);
    mui_text_init(&g.others.names, k->context);
    mu_status s = read_all(k, &g, &named, &by_file);
    mui_text_free(&g.others.names);
    mui_free(k->context, g.tied.items);
    mui_free(k->context, by_file.items);
    mui_free(k->context, named.items);
    return s;
}

/* -- globals ------------------------------------------------------------------------------------------------------ */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* One sorted list of the lists that get gives; the texts stay the shards'. */
static const char **merged(mu_checkpoint_file *k, const char *const *(*get)(const mu_checkpoint_file *))
{
    size_t n = 0, kept = 0;
    for (size_t i = 0; i < k->shard_count; i++) {
        for (const char *const *g = get(k->shards[i]); *g != NULL; g++) {
            n++;
        }
    }
    const char **all = mui_calloc(k->context, n + 1, sizeof(*all));
    if (all == NULL) {
        return NULL;
    }
    n = 0;
    for (size_t i = 0; i < k->shard_count; i++) {
        for (const char *const *g = get(k->shards[i]); *g != NULL; g++) {
            all[n++] = *g;
        }
    }
    if (n > 1) {
        qsort(all, n, sizeof(*all), by_text);
    }
    for (size_t i = 0; i < n; i++) {
        if (kept == 0 || strcmp(all[kept - 1], all[i]) != 0) {
            all[kept++] = all[i];
        }
    }
    all[kept] = NULL;
    return all;
}

mu_status mui_sharded_globals(mu_checkpoint_file *k)
{
    k->globals = merged(k, mu_checkpoint_globals);
    k->all_globals = k->globals != NULL ? merged(k, mu_checkpoint_all_globals) : NULL;
    return k->all_globals != NULL ? MU_OK : MU_ERR_NOMEM;
}
