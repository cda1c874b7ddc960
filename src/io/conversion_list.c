/* From a file's state dict to the list of what is to be written: names, ties, types, versions. */
#include "base/alloc.h"
#include "io/conversion.h"
#include "io/rename.h"

#include <stdlib.h>
#include <string.h>

#define MAX_VERSION 1000000

/* -- names -------------------------------------------------------------------------------------------------------- */

/* A part of a file that is one tensor has no name below itself: the last part of its path, or "tensor". A dict's key may
 * be "" too, and stays. */
static const char *name_of(const mui_conversion *v, int64_t i)
{
    const char *name = mu_checkpoint_name_in(v->file, &v->dict, i);
    if (name == NULL || name[0] != '\0' || v->branch != NULL) {
        return name;
    }
    const char *dot = strrchr(v->dict.path, '.');
    name = dot != NULL ? dot + 1 : v->dict.path;
    return name[0] != '\0' ? name : "tensor";
}

static const char *without_prefix(const mui_conversion *v, const char *name)
{
    const char *prefix = v->options->strip_prefix;
    size_t n = prefix != NULL ? strlen(prefix) : 0;
    return n > 0 && strncmp(name, prefix, n) == 0 ? name + n : name;
}

static const char *with_prefix(mui_conversion *v, const char *name)
{
    const char *prefix = v->options->prefix;
    if (prefix == NULL || prefix[0] == '\0') {
        return name;
    }
    char *text = mui_format(v->list.context, "%s%s", prefix, name);
    const char *kept = text != NULL ? mui_arena_strdup(&v->list.arena, text) : NULL;
    mui_free(v->list.context, text);
    return kept;
}

typedef struct named {
    const char *name;
    size_t index;
} named;

static int by_name(const void *a, const void *b)
{
    int order = strcmp(((const named *)a)->name, ((const named *)b)->name);
    return order != 0 ? order : ((const named *)a)->index < ((const named *)b)->index ? -1 : 1;
}

static mu_status check_collisions(mui_conversion *v, const char *const *names, size_t n)
{
    named *sorted = mui_calloc(v->list.context, n, sizeof(*sorted));
    mu_status s = sorted != NULL ? MU_OK : MU_ERR_NOMEM;
    for (size_t i = 0; s == MU_OK && i < n; i++) {
        sorted[i] = (named){names[i], i};
    }
    if (s == MU_OK && n > 0) {
        qsort(sorted, n, sizeof(*sorted), by_name);
    }
    for (size_t i = 1; s == MU_OK && i < n; i++) {
        if (strcmp(sorted[i - 1].name, sorted[i].name) == 0) {
            s = mui_fail(v->list.context, MU_ERR_FORMAT, "%s: '%s' and '%s' would both become '%s'", v->file->path,
                         v->old_names[sorted[i - 1].index], v->old_names[sorted[i].index], sorted[i].name);
        }
    }
    mui_free(v->list.context, sorted);
    return s;
}

/* names: [n], in the order of v->entries; new_names gets theirs. */
static mu_status rename_all(mui_conversion *v, mui_renames *rules, const char **new_names, size_t n)
{
    mu_status s = MU_OK;
    const char *strip = v->options->strip_prefix;
    bool stripped = strip == NULL || strip[0] == '\0' || n == 0;
    for (size_t i = 0; s == MU_OK && i < n; i++) {
        stripped = stripped || without_prefix(v, v->old_names[i]) != v->old_names[i];
        s = mui_renames_apply(rules, v->file->path, without_prefix(v, v->old_names[i]), &v->list.arena, &new_names[i]);
        if (s == MU_OK) {
            new_names[i] = with_prefix(v, new_names[i]);
            s = new_names[i] != NULL ? MU_OK : mu_context_status(v->list.context);
        }
    }
    if (s == MU_OK) {
        mui_renames_warn_unused(rules, v->file->path);
        if (!stripped) {
            mui_log(v->list.context, MU_LOG_WARN, "%s: no name begins with '%s', which was to be removed: the first is '%s'",
                    v->file->path, strip, v->old_names[0]);
        }
        s = check_collisions(v, new_names, n);
    }
    return s;
}

/* -- versions ----------------------------------------------------------------------------------------------------- */

/* Modules are renamed as the start of a tensor's name is: "bn1" as "bn1." and the root as "". */
static mu_status add_version(mui_conversion *v, mui_renames *rules, mui_slice path, int64_t version)
{
    mu_context *c = v->list.context;
    const char *name = NULL;
    char *start = path.bytes > 0 ? mui_format(c, "%.*s.", (int)path.bytes, path.data) : mui_strdup(c, "");
    if (start == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = mui_renames_apply(rules, v->file->path, without_prefix(v, start), &v->list.arena, &name);
    name = s == MU_OK ? with_prefix(v, name) : NULL;
    char *copy = name != NULL ? mui_strdup(c, name) : NULL;
    mui_free(c, start);
    if (copy == NULL) {
        return s != MU_OK ? s : MU_ERR_NOMEM;
    }
    size_t n = strlen(copy);
    if (n > 0 && copy[n - 1] == '.') {
        copy[n - 1] = '\0';
    }
    s = mui_out_add_version(&v->list, copy, version);
    mui_free(c, copy);
    return s;
}

static bool is_plain_text(const mui_value *x)
{
    return x->kind == MUI_STR && x->text.bytes <= MUI_MAX_NAME_BYTES && memchr(x->text.data, '\0', x->text.bytes) == NULL;
}

static mu_status add_versions(mui_conversion *v, mui_renames *rules)
{
    const mui_value *dict = v->branch != NULL ? v->branch->value : NULL;
    const mui_seq *items = NULL;
    if (dict == NULL || dict->kind != MUI_OBJECT || v->branch->kind != MUI_BRANCH_DICT ||
        !mui_dict_items(mui_dict_get(dict->object->state, "_metadata"), &items)) {
        return MU_OK;
    }
    mu_status s = MU_OK;
    const char *strip = v->options->strip_prefix, *prefix = v->options->prefix;
    bool new_root = strip != NULL && strip[0] != '\0'; /* what was above the prefix is no module any more */
    v->list.has_versions = true;
    if (prefix != NULL && prefix[0] != '\0') {
        s = mui_out_add_version(&v->list, "", 1);
    }
    for (size_t i = 0; s == MU_OK && i + 1 < items->count; i += 2) {
        const mui_value *path = items->items[i];
        const mui_value *version = mui_dict_get(items->items[i + 1], "version");
        if (!is_plain_text(path) || version == NULL || version->kind != MUI_INT || version->i < 0 ||
            version->i > MAX_VERSION) {
            continue; /* no version: readers take that as one of old */
        }
        if (new_root && path->text.bytes + 1 < strlen(strip) + (strip[strlen(strip) - 1] == '.' ? 0u : 1u) &&
            strncmp(path->text.data, strip, path->text.bytes) == 0 &&
            (path->text.bytes == 0 || strip[path->text.bytes] == '.')) {
            continue;
        }
        s = add_version(v, rules, path->text, version->i);
    }
    return s;
}

/* -- tensors ------------------------------------------------------------------------------------------------------ */

/* Two of the quantised types have several elements in a byte. */
static int bits_of(const mui_torch_dtype *d)
{
    return strcmp(d->name, "quint4x2") == 0 ? 4 : strcmp(d->name, "quint2x4") == 0 ? 2 : d->bytes * 8;
}

static mu_status check_tensor(mui_conversion *v, const mui_entry *e)
{
    mu_context *c = v->list.context;
    const mui_file_tensor *t = e->tensor;
    size_t bytes = 0;
    mu_status s = mui_tensor_bytes(v->file, e->name, t, &bytes);
    if (s == MU_OK && t->dtype->quantised && (t->dtype->bytes * 8 != bits_of(t->dtype) || t->quantizer == NULL)) {
        return mui_fail(c, MU_ERR_UNSUPPORTED, "%s: tensor '%s' is of %s%s, which cannot be converted", v->file->path, e->name,
                        t->dtype->name, t->quantizer == NULL ? " without a scale" : "");
    }
    if (s == MU_OK && v->options->change_dtype && !t->dtype->exact && strstr(t->dtype->name, "float") != NULL) {
        return mui_fail(c, MU_ERR_UNSUPPORTED, "%s: tensor '%s' is of %s, which cannot become %s", v->file->path, e->name,
                        t->dtype->name, mu_dtype_name(v->options->dtype));
    }
    return s;
}

/* Of a quantised tensor; NULL for others, and after an error. */
static const mu_quantization *quantization_of(mui_conversion *v, size_t entry)
{
    mu_quantization q;
    if (v->file->tree.entries[entry].tensor->quantizer == NULL ||
        mu_checkpoint_quantization(v->file, (int64_t)entry, &q) != MU_OK) {
        return NULL;
    }
    mu_quantization *kept = mui_arena_alloc(&v->list.arena, sizeof(*kept));
    if (kept != NULL) {
        *kept = q;
    }
    return kept;
}

static mu_status add_tensors(mui_conversion *v, const char *const *names, size_t n)
{
    const mui_tree *tree = &v->file->tree;
    const mui_torch_dtype *floats = v->options->change_dtype ? mui_torch_dtype_for(v->options->dtype) : NULL;
    size_t *first = mui_calloc(v->list.context, tree->count, sizeof(*first)); /* in the list, plus 1 */
    mu_status s = first != NULL ? MU_OK : MU_ERR_NOMEM;
    for (size_t i = 0; s == MU_OK && i < n; i++) {
        const mui_entry *e = &tree->entries[v->entries[i]];
        size_t root = e->tied_to != SIZE_MAX ? e->tied_to : v->entries[i];
        s = check_tensor(v, e);
        if (s != MU_OK) {
            break;
        }
        first[root] = first[root] == 0 ? i + 1 : first[root];
        mui_out_tensor t = {.name = names[i], .dtype = e->tensor->dtype, .ndim = e->tensor->ndim, .dim = e->tensor->dim,
                            .same_as = first[root] - 1,
                            .quantization = quantization_of(v, v->entries[i])};
        if (floats != NULL && mui_torch_dtype_is_float(t.dtype) && t.dtype != floats) {
            t.dtype = floats;
            v->report.converted++;
        }
        v->report.tied += t.same_as != i;
        v->report.renamed += strcmp(names[i], v->old_names[i]) != 0;
        s = mui_failed(v->list.context) ? mu_context_status(v->list.context) : mui_out_add(&v->list, &t);
    }
    mui_free(v->list.context, first);
    return s;
}

/* Bare storages are no tensors of a state dict: they are left out, and said to be. */
static size_t list_entries(mui_conversion *v)
{
    size_t n = 0;
    for (int64_t i = v->dict.first; i < v->dict.first + v->dict.count; i++) {
        if (!v->file->tree.entries[i].tensor->bare_storage) {
            v->old_names[n] = name_of(v, i);
            v->entries[n++] = (size_t)i;
        }
    }
    return n;
}

static void find_branch(mui_conversion *v)
{
    const mui_tree *t = &v->file->tree;
    size_t first = (size_t)v->dict.first, end = first + (size_t)v->dict.count;
    for (size_t i = 0; i < t->branch_count && v->branch == NULL; i++) {
        const mui_branch *b = &t->branches[i];
        /* Of several that hold just these tensors, the one whose names are those of the dict. */
        if (b->first == first && b->end == end && b->first < b->end) {
            mu_state_dict d = {.path = b->plain, .first = v->dict.first, .count = v->dict.count};
            const char *below = mu_checkpoint_name_in(v->file, &d, v->dict.first);
            const char *wanted = mu_checkpoint_name_in(v->file, &v->dict, v->dict.first);
            v->branch = below != NULL && wanted != NULL && strcmp(below, wanted) == 0 ? b : NULL;
        }
    }
}

mu_status mui_convert_list(mui_conversion *v)
{
    mu_context *c = v->file->context;
    mui_renames *rules = NULL;
    mu_status s = mu_checkpoint_find_state_dict(v->file, v->options->key, &v->dict);
    if (s == MU_OK) {
        find_branch(v);
        s = mui_renames_open(c, v->options->rename, &rules);
    }
    if (s != MU_OK) {
        return s;
    }
    size_t count = (size_t)v->dict.count;
    const char **names = mui_calloc(c, count, sizeof(*names));
    v->entries = mui_calloc(c, count, sizeof(*v->entries));
    v->old_names = mui_calloc(c, count, sizeof(*v->old_names));
    s = names != NULL && v->entries != NULL && v->old_names != NULL ? MU_OK : MU_ERR_NOMEM;
    if (s == MU_OK) {
        size_t n = list_entries(v);
        s = rename_all(v, rules, names, n);
        s = s == MU_OK ? add_tensors(v, names, n) : s;
        s = s == MU_OK ? add_versions(v, rules) : s;
        v->report.written = (int64_t)n;
    }
    mui_free(c, names);
    mui_renames_close(rules);
    return s;
}
