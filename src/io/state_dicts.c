/* Which parts of a file's object are state dicts. The rules, in order:
 *
 * 1. A safetensors file and a TorchScript archive are one, with path "".
 * 2. Optimiser state (a dict or object with "state" and "param_groups") and all below it never is; what lies below a key
 *    with "optim" in it counts under rule 5 only.
 * 3. A pickled torch.nn.Module is one, with all its children.
 * 4. A dict is one when tensors lie right in it: at least half of its items (numbers, None and `_extra_state` may be
 *    among them), at least as many as lie in containers below it, and one that could be a weight, that is, neither a
 *    scalar nor of integers. So {"model": {...}, "mean": tensor} has one, "model", and random number generators' states,
 *    counters and best scores are none.
 * 5. If nothing of these is in the file: any dict or object with a tensor right in it; and if there is none, everything
 *    outside optimisers: a list of tensors or a bare tensor, with path "".
 *
 * Candidates do not overlap: the outermost counts. */
#include "io/state_dicts.h"
#include "base/alloc.h"
#include "io/rename.h"

#include <stdio.h>
#include <string.h>

/* -- names without classes ---------------------------------------------------------------------------------------- */

/* "<Class>" stands after a name's parts for what is an object; to is a place of at least name's size. */
static void drop_classes(const char *name, char *to)
{
    while (*name != '\0') {
        const char *end = *name == '<' ? strchr(name, '>') : NULL;
        if (end != NULL) {
            name = end + 1;
        } else {
            *to++ = *name++;
        }
    }
    *to = '\0';
}

/* What follows path in name, NULL when name is not below path. */
static const char *below(const char *name, const char *path)
{
    size_t n = strlen(path);
    if (strncmp(name, path, n) != 0 || (n > 0 && name[n] != '\0' && name[n] != '.' && name[n] != '[')) {
        return NULL;
    }
    return n > 0 && name[n] == '.' ? name + n + 1 : name + n;
}

/* -- candidates --------------------------------------------------------------------------------------------------- */

typedef enum strength { NEVER, LAST_RESORT, STATE_DICT } strength;

static strength judge(const mui_branch *b)
{
    size_t all = b->end - b->first;
    if (b->kind == MUI_BRANCH_MODULE) {
        return STATE_DICT;
    }
    if (b->kind == MUI_BRANCH_OPTIMIZER || b->direct == 0) {
        return NEVER;
    }
    if (strstr(b->plain, "optim") != NULL) {
        return LAST_RESORT;
    }
    bool mostly = 2 * b->direct >= b->items && 2 * b->direct >= all;
    return b->kind == MUI_BRANCH_DICT && mostly && b->weights ? STATE_DICT : LAST_RESORT;
}

static mu_status add(mu_checkpoint_file *k, size_t *capacity, const char *path, size_t first, size_t end)
{
    if (!MUI_GROW(k->context, k->dicts, k->dict_count, *capacity)) {
        return MU_ERR_NOMEM;
    }
    k->dicts[k->dict_count++] = (mu_state_dict){.path = path, .first = (int64_t)first, .count = (int64_t)(end - first)};
    return MU_OK;
}

/* Branches come in order of first, parents before children. Returns how many entries lie in optimisers. */
static mu_status add_branches(mu_checkpoint_file *k, size_t *capacity, strength least, size_t *in_optimizers)
{
    mu_status s = MU_OK;
    size_t taken_end = 0;
    *in_optimizers = 0;
    for (size_t i = 0; s == MU_OK && i < k->tree.branch_count; i++) {
        const mui_branch *b = &k->tree.branches[i];
        if (b->first < taken_end || b->first == b->end) {
            continue;
        }
        if (b->kind == MUI_BRANCH_OPTIMIZER) {
            *in_optimizers += b->end - b->first;
            taken_end = b->end;
        } else if (judge(b) >= least) {
            s = add(k, capacity, b->plain, b->first, b->end);
            taken_end = b->end;
        }
    }
    return s;
}

mu_status mui_state_dicts_list(mu_checkpoint_file *k)
{
    size_t capacity = 0, in_optimizers = 0, tensors = 0;
    for (size_t i = 0; i < k->tree.count; i++) {
        tensors += !k->tree.entries[i].tensor->bare_storage;
    }
    if (tensors == 0) {
        return MU_OK;
    }
    if (k->pickle.value == NULL || k->format == MUI_FILE_TORCHSCRIPT) {
        return add(k, &capacity, "", 0, k->tree.count);
    }
    mu_status s = add_branches(k, &capacity, STATE_DICT, &in_optimizers);
    if (s == MU_OK && k->dict_count == 0) {
        s = add_branches(k, &capacity, LAST_RESORT, &in_optimizers);
    }
    if (s == MU_OK && k->dict_count == 0 && in_optimizers == 0) {
        s = add(k, &capacity, "", 0, k->tree.count);
    }
    return s;
}

/* -- questions ---------------------------------------------------------------------------------------------------- */

int64_t mu_checkpoint_state_dicts(const mu_checkpoint_file *k)
{
    return k != NULL ? (int64_t)k->dict_count : 0;
}

mu_state_dict mu_checkpoint_state_dict(const mu_checkpoint_file *k, int64_t i)
{
    return k != NULL && i >= 0 && (uint64_t)i < k->dict_count ? k->dicts[i] : (mu_state_dict){.path = ""};
}

const char *mu_checkpoint_name_in(const mu_checkpoint_file *k, const mu_state_dict *d, int64_t i)
{
    if (k == NULL || d == NULL || i < d->first || i - d->first >= d->count || (uint64_t)i >= k->tree.count) {
        return NULL;
    }
    return below(k->tree.entries[i].plain, d->path);
}

mu_status mu_checkpoint_names_in(mu_checkpoint_file *k, const mu_state_dict *d, const char *const *rename,
                                 const char **out)
{
    mui_renames *rules = NULL;
    if (k == NULL || d == NULL || (out == NULL && d->count > 0)) {
        return MU_ERR_ARG;
    }
    const char **names = mui_calloc(k->context, (size_t)d->count, sizeof(*names));
    if (names == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t i = 0; i < d->count; i++) {
        names[i] = out[i] = mu_checkpoint_name_in(k, d, d->first + i);
    }
    mu_status s = mui_renames_open(k->context, rename, &rules);
    if (s == MU_OK && rules != NULL) {
        s = mui_renames_apply_all(rules, k->path, names, (size_t)d->count, &k->texts, out);
    }
    if (s == MU_OK && rules != NULL) {
        mui_renames_warn_unused(rules, k->path);
    }
    mui_renames_close(rules);
    mui_free(k->context, names);
    return s;
}

/* The entries below a path; end 0: there are none. gap: others lie between them. */
typedef struct range {
    size_t first, end;
    bool gap;
} range;

static range range_below(const mu_checkpoint_file *k, const char *path)
{
    range r = {0};
    for (size_t i = 0; i < k->tree.count; i++) {
        if (below(k->tree.entries[i].plain, path) == NULL) {
            continue;
        }
        r.first = r.end == 0 ? i : r.first;
        r.gap |= r.end != 0 && r.end != i;
        r.end = i + 1;
    }
    return r;
}

/* Any dict or common start of names. As it is first, for a dict's key may look like the mark of a class; then without
 * marks of classes, which a path taken from inspect's list has. */
static mu_status find_by_key(mu_checkpoint_file *k, const char *key, mu_state_dict *out)
{
    size_t n = strlen(key);
    char *path = mui_arena_strdup(&k->texts, key);
    if (path == NULL) {
        return mu_context_status(k->context);
    }
    range r = {0};
    for (int i = 0; i < 2 && r.end == 0; i++) {
        if (i == 1) {
            drop_classes(key, path);
            path += path[0] == '.'; /* an object around everything */
            n = strlen(path);
        }
        if (n > 0 && path[n - 1] == '.') { /* "model." as well as "model" */
            path[n - 1] = '\0';
        }
        r = range_below(k, path);
    }
    if (r.end == 0) {
        return mui_fail(k->context, MU_ERR_ARG, "%s: there is no tensor below \"%.200s\" in the file; it has \"%.200s\", ...",
                        k->path, key, k->tree.count > 0 ? k->tree.entries[0].name : "");
    }
    if (r.gap) {
        return mui_fail(k->context, MU_ERR_ARG,
                        "%s: \"%.200s\" is no dict of its own in the file, and other names lie between those below it",
                        k->path, key);
    }
    *out = (mu_state_dict){.path = path, .first = (int64_t)r.first, .count = (int64_t)(r.end - r.first)};
    return MU_OK;
}

mu_status mu_checkpoint_find_state_dict(mu_checkpoint_file *k, const char *key, mu_state_dict *out)
{
    if (k == NULL || out == NULL) {
        return MU_ERR_ARG;
    }
    if (key != NULL) {
        return find_by_key(k, key, out);
    }
    if (k->dict_count == 1) {
        *out = k->dicts[0];
        return MU_OK;
    }
    if (k->dict_count == 0) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: there is no state dict in the file (%s, %zu tensor%s%s)", k->path,
                        mu_checkpoint_format(k), k->tree.count, k->tree.count == 1 ? "" : "s",
                        k->tree.count > 0 ? ", all of optimisers or bare storages" : "");
    }
    char list[1024];
    size_t used = 0;
    for (size_t i = 0; i < k->dict_count; i++) {
        int n = snprintf(list + used, sizeof(list) - used, "%s\"%.100s\" (%lld tensor%s)", i > 0 ? ", " : "",
                         k->dicts[i].path, (long long)k->dicts[i].count, k->dicts[i].count == 1 ? "" : "s");
        if (n < 0 || (size_t)n >= sizeof(list) - used - 32) {
            snprintf(list + used, sizeof(list) - used, ", and %zu more", k->dict_count - i);
            break;
        }
        used += (size_t)n;
    }
    return mui_fail(k->context, MU_ERR_ARG, "%s: several state dicts are in the file: %s. Say which one: --key PATH (in C: key)",
                    k->path, list);
}
