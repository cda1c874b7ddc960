/* Matching names. The cost is bounded by entries times renamings times nesting, each a binary search. */
#include "io/load_match.h"

#include <stdio.h>
#include <string.h>

/* What DataParallel and DDP, torch.compile, and Lightning put before names. */
static const char *const tokens[] = {"module.", "_orig_mod.", "model.", "net."};
#define TOKENS (sizeof(tokens) / sizeof(tokens[0]))
#define MAX_CHAINS 16

typedef struct chains {
    char text[MAX_CHAINS][MUI_PREFIX_BYTES];
    int count;
} chains;

/* Adds every chain of tokens that name begins with: for "module.model.fc" they are "module." and "module.model.". */
static void add_chains(chains *c, const char *name)
{
    char chain[MUI_PREFIX_BYTES] = "";
    for (size_t n = 0;;) {
        const char *next = NULL;
        for (size_t i = 0; i < TOKENS; i++) {
            if (strncmp(name + n, tokens[i], strlen(tokens[i])) == 0) {
                next = tokens[i];
            }
        }
        if (next == NULL || n + strlen(next) >= sizeof(chain)) {
            return;
        }
        memcpy(chain + n, next, strlen(next) + 1);
        n += strlen(next);
        bool known = false;
        for (int i = 0; i < c->count; i++) {
            known |= strcmp(c->text[i], chain) == 0;
        }
        if (!known && c->count < MAX_CHAINS) {
            memcpy(c->text[c->count++], chain, sizeof(chain));
        }
    }
}

/* Drops every `token` that begins a part of the dotted name. */
static void remove_all(char *name, const char *token)
{
    size_t n = strlen(token), to = 0;
    bool starts = true;
    for (size_t from = 0; name[from] != '\0';) {
        if (starts && strncmp(name + from, token, n) == 0) {
            from += n;
            continue;
        }
        starts = name[from] == '.';
        name[to++] = name[from++];
    }
    name[to] = '\0';
}

/* The entry's name below the dict, without the classes that stand in names of pickled objects. */
static bool own_name(const mu_checkpoint_file *k, const mui_match *m, size_t i, char *out)
{
    const char *name = k->tree.entries[i].name;
    size_t path = strlen(m->path), n = 0;
    if (strncmp(name, m->path, path) != 0 ||
        (path > 0 && name[path] != '\0' && strchr(".[<", name[path]) == NULL)) {
        return false;
    }
    name += path;
    while (*name != '\0') {
        const char *end = *name == '<' ? strchr(name, '>') : NULL;
        if (end != NULL) {
            name = end + 1;
        } else if (n == 0 && *name == '.') {
            name++;
        } else {
            out[n++] = *name++;
        }
    }
    out[n] = '\0';
    return true;
}

static bool renamed(const mu_checkpoint_file *k, const mui_match *m, size_t i, char *out)
{
    size_t n = strlen(m->prefix);
    char *at = m->rename == MUI_RENAME_ADD ? out + n : out;
    if (!own_name(k, m, i, at)) {
        return false;
    }
    if (m->rename == MUI_RENAME_ADD) {
        memcpy(out, m->prefix, n);
    } else if (m->rename == MUI_RENAME_REMOVE && strncmp(out, m->prefix, n) == 0) {
        memmove(out, out + n, strlen(out + n) + 1);
    } else if (m->rename == MUI_RENAME_REMOVE_ALL) {
        remove_all(out, m->prefix);
    }
    return true;
}

bool mui_match_name(const mu_checkpoint_file *k, const mui_match *m, size_t i, char *out)
{
    return i >= m->first && i < m->end && !k->tree.entries[i].tensor->bare_storage && renamed(k, m, i, out);
}

static int64_t score(const mu_checkpoint_file *k, const mui_states *s, const mui_match *m)
{
    char name[MUI_MATCH_NAME];
    int64_t matched = 0;
    for (size_t i = m->first; i < m->end; i++) {
        matched += mui_match_name(k, m, i, name) && mui_states_find(s, name) != NULL;
    }
    return matched;
}

static void try_rename(const mu_checkpoint_file *k, const mui_states *s, mui_match *best, mui_rename rename,
                       const char *prefix)
{
    mui_match m = *best;
    m.rename = rename;
    snprintf(m.prefix, sizeof(m.prefix), "%s", prefix);
    m.matched = score(k, s, &m);
    if (m.matched > best->matched) {
        *best = m;
    }
}

/* Tries renamings from the mildest on; one is taken only where it matches more names than all before. */
static void find_rename(const mu_checkpoint_file *k, const mui_states *s, const chains *of_model, mui_match *m)
{
    chains of_file = {.count = 0};
    bool inside[2] = {false, false}; /* module. and _orig_mod. after the first part */
    char name[MUI_MATCH_NAME];
    for (size_t i = m->first; i < m->end; i++) {
        if (mui_match_name(k, m, i, name)) {
            add_chains(&of_file, name);
            inside[0] |= strstr(name, ".module.") != NULL;
            inside[1] |= strstr(name, "._orig_mod.") != NULL;
        }
    }
    m->matched = score(k, s, m);
    for (size_t length = 1; length < MUI_PREFIX_BYTES; length++) {
        for (int i = 0; i < of_file.count; i++) {
            if (strlen(of_file.text[i]) == length) {
                try_rename(k, s, m, MUI_RENAME_REMOVE, of_file.text[i]);
            }
        }
    }
    for (int i = 0; i < of_model->count; i++) {
        try_rename(k, s, m, MUI_RENAME_ADD, of_model->text[i]);
    }
    for (int i = 0; i < 2; i++) {
        if (inside[i]) {
            try_rename(k, s, m, MUI_RENAME_REMOVE_ALL, tokens[i]);
        }
    }
}

static bool is_inside(const mui_match *a, const mui_match *b)
{
    return a->first >= b->first && a->end <= b->end;
}

/* A dict beats one above or below it by matching more names, else by needing less renaming, else by being higher. */
static bool beats(const mui_match *a, const mui_match *b)
{
    return a->matched != b->matched ? a->matched > b->matched : strlen(a->prefix) < strlen(b->prefix);
}

static mu_status refuse_rivals(mu_checkpoint_file *k, const mui_match *best, const mui_match *rival)
{
    return mui_fail(k->context, MU_ERR_FORMAT,
                    "%s: several state dicts in the file fit the model, at least \"%s\" (%lld names) and \"%s\" (%lld): "
                    "say which one by its key",
                    k->path, best->path, (long long)best->matched, rival->path, (long long)rival->matched);
}

/* A start of the file's names without which a name would be the model's; "" when there is none. */
static void suggest(const mu_checkpoint_file *k, const mui_states *s, char *out, size_t out_bytes)
{
    out[0] = '\0';
    for (size_t i = 0; i < k->tree.count && i < 200; i++) {
        const char *name = k->tree.entries[i].name;
        for (const char *dot = strchr(name, '.'); dot != NULL; dot = strchr(dot + 1, '.')) {
            if ((size_t)(dot - name) < out_bytes && mui_states_find(s, dot + 1) != NULL) {
                snprintf(out, out_bytes, "%.*s", (int)(dot - name), name);
                return;
            }
        }
    }
}

static mu_status refuse_none(mu_checkpoint_file *k, const mui_states *s, const char *key)
{
    char start[256], hint[400] = "";
    if (k->tree.count == 0) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: there is no tensor in the file (%s)", k->path,
                        mu_checkpoint_format(k));
    }
    suggest(k, s, start, sizeof(start));
    if (start[0] != '\0') {
        snprintf(hint, sizeof(hint), "; names would fit below \"%s\": give that as key", start);
    }
    return mui_fail(k->context, MU_ERR_FORMAT,
                    "%s: none of the model's %zu names is in the file%s%s%s; the file has \"%.200s\", ..., the model "
                    "\"%.200s\", ...%s",
                    k->path, s->count, key != NULL ? " below \"" : "", key != NULL ? key : "", key != NULL ? "\"" : "",
                    k->tree.entries[0].name, s->count > 0 ? s->items[0].name : "", hint);
}

static mui_match match_of(const mui_branch *b)
{
    return (mui_match){.path = b->path, .dict = b->value, .first = b->first, .end = b->end};
}

static mu_status find_by_key(mu_checkpoint_file *k, const mui_states *s, const char *key, const chains *of_model,
                             mui_match *out)
{
    /* Not necessarily a dict of its own: any common start of names will do. */
    mui_match m = {.path = key, .first = 0, .end = k->tree.count};
    char name[MUI_MATCH_NAME];
    bool any = false;
    for (size_t i = 0; i < k->tree.branch_count; i++) {
        if (strcmp(k->tree.branches[i].path, key) == 0) {
            m = match_of(&k->tree.branches[i]);
            break;
        }
    }
    for (size_t i = m.first; i < m.end && !any; i++) {
        any = mui_match_name(k, &m, i, name);
    }
    if (!any) {
        return mui_fail(k->context, MU_ERR_ARG, "%s: there is no tensor below \"%s\" in the file; it has \"%.200s\", ...",
                        k->path, key, k->tree.count > 0 ? k->tree.entries[0].name : "");
    }
    find_rename(k, s, of_model, &m);
    *out = m;
    return m.matched > 0 ? MU_OK : refuse_none(k, s, key);
}

mu_status mui_match_find(mu_checkpoint_file *k, const mui_states *s, const char *key, mui_match *out)
{
    chains of_model = {.count = 0};
    for (size_t i = 0; i < s->count; i++) {
        add_chains(&of_model, s->items[i].name);
    }
    if (key != NULL) {
        return find_by_key(k, s, key, &of_model, out);
    }
    mui_match best = {.path = ""}, rival = {.path = ""};
    for (size_t i = 0; i < k->tree.branch_count; i++) {
        mui_match m = match_of(&k->tree.branches[i]);
        find_rename(k, s, &of_model, &m);
        best = m.matched > 0 && beats(&m, &best) ? m : best;
    }
    if (best.matched == 0) {
        return refuse_none(k, s, NULL);
    }
    for (size_t i = 0; i < k->tree.branch_count; i++) {
        mui_match m = match_of(&k->tree.branches[i]);
        if (is_inside(&m, &best) || is_inside(&best, &m)) {
            continue;
        }
        find_rename(k, s, &of_model, &m);
        rival = beats(&m, &rival) ? m : rival;
    }
    if (rival.matched > 0 && 2 * rival.matched > best.matched) {
        return refuse_rivals(k, &best, &rival);
    }
    *out = best;
    return MU_OK;
}
