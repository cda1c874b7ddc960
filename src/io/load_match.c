/* Matching names. Renamings are tried from the mildest on, and one is taken only where it matches more names than all
 * before it. Each trial costs the names of the dict. */
#include "io/load_match.h"
#include "base/alloc.h"
#include "io/name_trial.h"

#include <stdio.h>
#include <string.h>

#define MAX_CHAINS 16

typedef struct chains {
    char text[MAX_CHAINS][MUI_PREFIX_BYTES];
    int count;
} chains;

/* Adds every chain of wrappers that name begins with: for "module.model.fc" they are "module." and "module.model.". */
static void add_chains(chains *c, const char *name)
{
    char chain[MUI_PREFIX_BYTES] = "";
    for (size_t n = 0;;) {
        int w = mui_wrapper_at(name + n);
        if (w < 0 || n + strlen(mui_wrappers[w]) >= sizeof(chain)) {
            return;
        }
        memcpy(chain + n, mui_wrappers[w], strlen(mui_wrappers[w]) + 1);
        n += strlen(mui_wrappers[w]);
        bool known = false;
        for (int i = 0; i < c->count; i++) {
            known |= strcmp(c->text[i], chain) == 0;
        }
        if (!known && c->count < MAX_CHAINS) {
            memcpy(c->text[c->count++], chain, sizeof(chain));
        }
    }
}

/* What the search for a model's names in one file shares over its dicts. */
typedef struct search {
    mu_checkpoint_file *k;
    const mui_states *states;
    const mu_load_options *o;
    mui_trial trial;
    chains of_model;
    unsigned in_model;
} search;

/* A dict with its names, while renamings are tried on it. */
typedef struct outcome {
    size_t branch;
    int64_t matched, left; /* names of the file that match, that do not */
    mui_renaming renaming;
} outcome;

static void set_names(search *q, mui_match *m)
{
    mu_state_dict d = {.path = m->path, .first = (int64_t)m->first, .count = (int64_t)(m->end - m->first)};
    for (size_t i = m->first; i < m->end; i++) {
        bool bare = q->k->tree.entries[i].tensor->bare_storage;
        m->own[i - m->first] = bare ? NULL : mu_checkpoint_name_in(q->k, &d, (int64_t)i);
    }
}

static void try_renaming(search *q, const mui_match *m, outcome *best, mui_start start, const char *prefix,
                         unsigned dropped, int rank)
{
    mui_renaming r = {.start = start, .dropped = dropped, .rank = rank};
    snprintf(r.prefix, sizeof(r.prefix), "%s", prefix);
    int64_t matched = mui_trial_run(&q->trial, &r, m->names, m->end - m->first);
    if (matched > best->matched) {
        best->matched = matched;
        best->renaming = r;
    }
}

static int bits(unsigned x)
{
    int n = 0;
    for (; x != 0; x &= x - 1) {
        n++;
    }
    return n;
}

static void collect(const mui_match *m, chains *starts, unsigned *inside, int64_t *count)
{
    for (size_t i = 0; i < m->end - m->first; i++) {
        if (m->names[i] != NULL) {
            add_chains(starts, m->names[i]);
            *inside |= mui_wrappers_in(m->names[i], NULL);
            ++*count;
        }
    }
}

/* Nothing; wrappers' names removed at the start, or added there; left out anywhere. */
static outcome find_renaming(search *q, const mui_match *m)
{
    chains of_file = {.count = 0};
    unsigned inside = 0;
    int64_t count = 0;
    outcome best = {.matched = -1};
    collect(m, &of_file, &inside, &count);
    int64_t most = count < (int64_t)q->states->count ? count : (int64_t)q->states->count;
    try_renaming(q, m, &best, MUI_START_KEPT, "", 0, 0);
    for (size_t length = 1; length < MUI_PREFIX_BYTES && !q->o->exact_names; length++) {
        for (int i = 0; i < of_file.count && best.matched < most; i++) {
            if (strlen(of_file.text[i]) == length) {
                try_renaming(q, m, &best, MUI_START_REMOVED, of_file.text[i], 0, (int)length);
            }
        }
    }
    for (int i = 0; i < q->of_model.count && best.matched < most && !q->o->exact_names; i++) {
        try_renaming(q, m, &best, MUI_START_ADDED, q->of_model.text[i], 0, MUI_PREFIX_BYTES + i);
    }
    unsigned any = inside | q->in_model;
    for (int n = 1; n <= MUI_WRAPPERS && !q->o->exact_names; n++) {
        for (unsigned set = 1; set < 1u << MUI_WRAPPERS && best.matched < most; set++) {
            if (bits(set) == n && (set & ~any) == 0) {
                try_renaming(q, m, &best, MUI_START_KEPT, "", set, 2 * MUI_PREFIX_BYTES + n);
            }
        }
    }
    best.left = count - best.matched;
    return best;
}

static mu_status match_open(search *q, const char *path, const mui_value *dict, size_t first, size_t end, mui_match *m)
{
    m->path = path;
    m->dict = dict;
    m->first = first;
    m->end = end;
    mui_arena_reset(&m->arena);
    set_names(q, m);
    mu_status s = MU_OK;
    for (size_t i = 0; i < end - first && s == MU_OK; i++) {
        m->names[i] = m->own[i];
        if (m->own[i] != NULL && m->renames != NULL) {
            s = mui_renames_apply(m->renames, q->k->path, m->own[i], &m->arena, &m->names[i]);
        }
    }
    return s;
}

static mu_status open_branch(search *q, size_t i, mui_match *m)
{
    const mui_branch *b = &q->k->tree.branches[i];
    return match_open(q, b->plain, b->value, b->first, b->end, m);
}

/* Of dicts that match the same number of names the one with fewer others is meant, then the one that needs less
 * renaming, then the higher one. */
static bool beats(const outcome *a, const outcome *b)
{
    if (a->matched != b->matched) {
        return a->matched > b->matched;
    }
    return a->left != b->left ? a->left < b->left : a->renaming.rank < b->renaming.rank;
}

static mu_status refuse_rivals(const search *q, const outcome *best, const outcome *rival)
{
    const mu_checkpoint_file *k = q->k;
    return mui_fail(k->context, MU_ERR_FORMAT,
                    "%s: several state dicts in the file fit the model, at least \"%s\" (%lld names) and \"%s\" (%lld): "
                    "say which one by its key",
                    k->path, k->tree.branches[best->branch].path, (long long)best->matched,
                    k->tree.branches[rival->branch].path, (long long)rival->matched);
}

static mu_status refuse_none(search *q, const mui_match *m)
{
    const mu_checkpoint_file *k = q->k;
    const char *key = q->o->key;
    char hint[400];
    if (k->tree.count == 0) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: there is no tensor in the file (%s)", k->path,
                        mu_checkpoint_format(k));
    }
    mui_match_hint(k, q->states, q->o, m, hint, sizeof(hint));
    return mui_fail(k->context, MU_ERR_FORMAT,
                    "%s: none of the model's %zu names is in the file%s%s%s; the file has \"%.200s\", ..., the model "
                    "\"%.200s\", ...%s",
                    k->path, q->states->count, key != NULL ? " below \"" : "", key != NULL ? key : "",
                    key != NULL ? "\"" : "", k->tree.entries[0].name,
                    q->states->count > 0 ? q->states->items[0].name : "", hint);
}

/* The dict that fits best. */
static mu_status find_branch(search *q, mui_match *m, outcome *best)
{
    const mui_tree *tree = &q->k->tree;
    outcome *all = mui_calloc(q->k->context, tree->branch_count, sizeof(*all));
    mu_status s = all != NULL ? MU_OK : MU_ERR_NOMEM;
    *best = (outcome){.matched = 0, .branch = SIZE_MAX};
    for (size_t i = 0; i < tree->branch_count && s == MU_OK; i++) {
        s = open_branch(q, i, m);
        if (s == MU_OK) {
            all[i] = find_renaming(q, m);
            all[i].branch = i;
            *best = all[i].matched > 0 && (best->matched == 0 || beats(&all[i], best)) ? all[i] : *best;
        }
    }
    const outcome *rival = NULL;
    for (size_t i = 0; i < tree->branch_count && s == MU_OK && best->matched > 0; i++) {
        const mui_branch *a = &tree->branches[i], *b = &tree->branches[best->branch];
        bool apart = a->end <= b->first || b->end <= a->first;
        if (apart && all[i].matched > 0 && (rival == NULL || beats(&all[i], rival))) {
            rival = &all[i];
        }
    }
    if (rival != NULL && 2 * rival->matched > best->matched) {
        s = refuse_rivals(q, best, rival);
    }
    mui_free(q->k->context, all);
    return s;
}

static mu_status find_key(search *q, mui_match *m, outcome *best)
{
    mu_state_dict d;
    mu_status s = mu_checkpoint_find_state_dict(q->k, q->o->key, &d);
    if (s != MU_OK) {
        return s;
    }
    const mui_value *dict = NULL;
    for (size_t i = 0; i < q->k->tree.branch_count && dict == NULL; i++) {
        const mui_branch *b = &q->k->tree.branches[i];
        if (b->first == (size_t)d.first && b->end == (size_t)(d.first + d.count)) {
            dict = strcmp(b->plain, d.path) == 0 ? b->value : NULL;
        }
    }
    s = match_open(q, d.path, dict, (size_t)d.first, (size_t)(d.first + d.count), m);
    if (s == MU_OK) {
        *best = find_renaming(q, m);
    }
    return s;
}

/* Two chains of wrappers of which each would do, as in {"model.fc": ..., "net.fc": ...}. */
static mu_status check_one_start(search *q, const mui_match *m, const outcome *best)
{
    if (best->renaming.start != MUI_START_REMOVED) {
        return MU_OK;
    }
    chains starts = {.count = 0};
    unsigned inside = 0;
    int64_t count = 0;
    outcome plain = {.matched = -1}, rival = {.matched = 0};
    const char *taken = best->renaming.prefix;
    collect(m, &starts, &inside, &count);
    try_renaming(q, m, &plain, MUI_START_KEPT, "", 0, 0);
    for (int i = 0; i < starts.count; i++) {
        size_t a = strlen(taken), b = strlen(starts.text[i]);
        if (strncmp(taken, starts.text[i], a < b ? a : b) != 0) {
            try_renaming(q, m, &rival, MUI_START_REMOVED, starts.text[i], 0, 1);
        }
    }
    if (2 * (rival.matched - plain.matched) > best->matched - plain.matched) {
        return mui_fail(m->context, MU_ERR_FORMAT,
                        "%s: names of the model are in the file both with \"%s\" before them (%lld) and with \"%s\" "
                        "(%lld): say which by the key or a rename",
                        q->k->path, taken, (long long)best->matched, rival.renaming.prefix, (long long)rival.matched);
    }
    return MU_OK;
}

/* Which wrappers the file's names have more of than the model's, and less. */
static void describe(mui_match *m, const mui_states *s)
{
    bool more[MUI_WRAPPERS] = {false}, less[MUI_WRAPPERS] = {false};
    if (m->renaming.start != MUI_START_KEPT) {
        memcpy(m->renaming.start == MUI_START_REMOVED ? m->removed : m->added, m->renaming.prefix, MUI_PREFIX_BYTES);
        return;
    }
    for (size_t i = 0; m->renaming.dropped != 0 && i < m->end - m->first; i++) {
        int theirs[MUI_WRAPPERS] = {0}, ours[MUI_WRAPPERS] = {0};
        if (m->state_of[i] == SIZE_MAX) {
            continue;
        }
        mui_wrappers_in(m->names[i], theirs);
        mui_wrappers_in(s->items[m->state_of[i]].name, ours);
        for (int w = 0; w < MUI_WRAPPERS; w++) {
            more[w] |= theirs[w] > ours[w];
            less[w] |= theirs[w] < ours[w];
        }
    }
    for (int w = 0; w < MUI_WRAPPERS; w++) {
        char *to[2] = {more[w] ? m->removed : NULL, less[w] ? m->added : NULL};
        for (int i = 0; i < 2; i++) {
            if (to[i] != NULL) {
                snprintf(to[i] + strlen(to[i]), MUI_PREFIX_BYTES - strlen(to[i]), "%s", mui_wrappers[w]);
            }
        }
    }
}

static mu_status refuse_clash(const search *q, const mui_match *m)
{
    const mui_trial *t = &q->trial;
    const char *a = q->k->tree.entries[m->first + t->clash[0]].name, *b = q->k->tree.entries[m->first + t->clash[1]].name;
    if (t->clash[0] == t->clash[1]) {
        return mui_fail(m->context, MU_ERR_FORMAT,
                        "%s: several names of the model could be meant by '%s'; a rename or exact names would tell",
                        q->k->path, a);
    }
    const char *before, *name = mui_renaming_read(&m->renaming, m->names[t->clash[0]], &before);
    size_t slot = mui_name_table_find(&t->tables[m->renaming.dropped], before, name);
    size_t state = slot != SIZE_MAX ? t->tables[m->renaming.dropped].slots[slot] : SIZE_MAX;
    return mui_fail(m->context, MU_ERR_FORMAT, "%s: both '%s' and '%s' would be loaded into %s%s", q->k->path, a, b,
                    state != SIZE_MAX ? q->states->items[state].name : name,
                    t->unclear ? ", or one of them into another name" : "");
}

/* The best dict once more, and for good. */
static mu_status settle(search *q, const outcome *best, mui_match *m)
{
    size_t n = m->end - m->first;
    mu_status s = MU_OK;
    m->renaming = best->renaming;
    m->matched = best->matched > 0 ? best->matched : 0;
    if (m->renames != NULL) {
        mui_renames_restart(m->renames);
        s = mui_renames_apply_all(m->renames, q->k->path, m->own, n, &m->arena, m->names);
        if (s == MU_OK) {
            mui_renames_warn_unused(m->renames, q->k->path);
        }
    }
    if (s == MU_OK && m->matched == 0) {
        s = refuse_none(q, m);
    }
    s = s == MU_OK ? check_one_start(q, m, best) : s;
    if (s != MU_OK) {
        return s;
    }
    if (mui_trial_run(&q->trial, &m->renaming, m->names, n) < 0) {
        return MU_ERR_NOMEM;
    }
    if (q->trial.clash[0] != SIZE_MAX) {
        return refuse_clash(q, m);
    }
    memcpy(m->state_of, q->trial.pairs, n * sizeof(*m->state_of));
    describe(m, q->states);
    return mui_name_table_make(q->states, m->renaming.dropped, &m->table);
}

static mu_status find(search *q, mui_match *m)
{
    outcome best = {.matched = 0};
    mu_status s = q->o->key != NULL ? find_key(q, m, &best) : find_branch(q, m, &best);
    if (s == MU_OK && q->o->key == NULL) {
        m->first = m->end = 0;
        s = best.matched > 0 ? open_branch(q, best.branch, m) : refuse_none(q, m);
    }
    return s == MU_OK ? settle(q, &best, m) : s;
}

mu_status mui_match_find(mu_checkpoint_file *k, const mui_states *states, const mu_load_options *o, mui_match *out)
{
    mu_context *c = k->context;
    mui_match m = {.context = c, .path = ""};
    search q = {.k = k, .states = states, .o = o};
    mui_arena_init(&m.arena, c);
    for (size_t i = 0; i < states->count; i++) {
        add_chains(&q.of_model, states->items[i].name);
        q.in_model |= mui_wrappers_in(states->items[i].name, NULL);
    }
    mu_status s = mui_renames_open(c, o->rename, &m.renames);
    s = s == MU_OK ? mui_trial_open(states, k->tree.count, &q.trial) : s;
    m.own = s == MU_OK ? mui_calloc(c, k->tree.count, sizeof(*m.own)) : NULL;
    m.names = m.own != NULL ? mui_calloc(c, k->tree.count, sizeof(*m.names)) : NULL;
    m.state_of = m.names != NULL ? mui_calloc(c, k->tree.count, sizeof(*m.state_of)) : NULL;
    s = s == MU_OK && m.state_of == NULL ? MU_ERR_NOMEM : s;
    s = s == MU_OK ? find(&q, &m) : s;
    mui_trial_close(&q.trial);
    s = s == MU_OK ? mu_context_status(c) : s;
    if (s != MU_OK) {
        mui_match_free(&m);
        return s;
    }
    *out = m;
    return MU_OK;
}

void mui_match_free(mui_match *m)
{
    if (m->context == NULL) {
        return;
    }
    mui_name_table_free(&m->table);
    mui_renames_close(m->renames);
    mui_free(m->context, m->own);
    mui_free(m->context, m->names);
    mui_free(m->context, m->state_of);
    mui_arena_free(&m->arena);
    *m = (mui_match){0};
}

const mui_state *mui_match_state(mui_match *m, const char *path, const char *own)
{
    const char *name = own, *before = "";
    if (mui_renames_apply(m->renames, path, own, &m->arena, &name) != MU_OK) {
        return NULL;
    }
    name = mui_renaming_read(&m->renaming, name, &before);
    size_t slot = mui_name_table_find(&m->table, before, name);
    size_t state = slot != SIZE_MAX ? m->table.slots[slot] : SIZE_MAX;
    return state != SIZE_MAX && m->table.next[state] == SIZE_MAX ? &m->table.states->items[state] : NULL;
}
