/* Running a segment for the first time, dropping its values, and bringing them back. What operations do while it runs
 * again is in segment_replay.c. */
#include "base/alloc.h"
#include "tape/tape_state.h"

#include <string.h>

static mu_status failure(const mu_tape *t)
{
    return mui_failed(t->context) ? mu_context_status(t->context) : MU_ERR_INTERNAL;
}

static bool inside(const mui_segment *g, const mu_tensor *x)
{
    return x->serial > g->tensor_first && x->serial <= g->tensor_end;
}

static mu_status call(mu_tape *t, mui_segment *g, mu_tensor **out)
{
    if (g->many != NULL) {
        mu_status s = g->many(g->self, t, g->in, g->in_count, out, g->out_count);
        return s == MU_OK && mui_failed(t->context) ? mu_context_status(t->context) : s;
    }
    out[0] = g->one(g->self, t, g->in[0]);
    return mui_failed(t->context) ? mu_context_status(t->context) : MU_OK;
}

/* -- what a segment reads from outside -------------------------------------------------------------------------- */

static void hold(mui_segment *g)
{
    for (size_t i = 0; !g->holds && i < g->held_count; i++) {
        g->held[i]->consumers++;
        g->held[i]->needed++;
    }
    g->holds = true;
}

static void let_go(mui_segment *g)
{
    for (size_t i = 0; g->holds && i < g->held_count; i++) {
        g->held[i]->consumers--;
        g->held[i]->needed--;
    }
    g->holds = false;
}

static void note_held(mui_segment *g, mu_tensor *x, mu_tensor **list, size_t *count)
{
    x = mui_base_of(x);
    if (x->tape == NULL || inside(g, x) || x->held_by == g) {
        return;
    }
    x->held_by = g;
    list[(*count)++] = x;
}

/* Light nodes list what was read in no-grad regions: the function will read that again. */
static mu_status find_held(mu_tape *t, mui_segment *g)
{
    size_t most = (size_t)g->in_count;
    for (size_t i = g->node_first; i < g->node_end; i++) {
        most += (size_t)t->nodes[i]->in_count;
    }
    g->held = mui_arena_alloc(&t->arena, most * sizeof(*g->held));
    if (g->held == NULL) {
        return failure(t);
    }
    for (int i = 0; i < g->in_count; i++) {
        note_held(g, g->in[i], g->held, &g->held_count);
    }
    for (size_t i = g->node_first; i < g->node_end; i++) {
        const mui_node *n = t->nodes[i];
        for (int k = 0; k < n->in_count; k++) {
            note_held(g, n->in[k], g->held, &g->held_count);
        }
    }
    return MU_OK;
}

/* -- dropping --------------------------------------------------------------------------------------------------- */

static void uncount(mui_node *n)
{
    for (int i = 0; i < n->in_count; i++) {
        mu_tensor *x = n->in[i];
        if (x->tape == NULL) {
            continue;
        }
        x->consumers--;
        x->needed -= i < 31 && (n->reads & MUI_READS_IN(i)) != 0;
        if (x->alias_of != NULL && x->alias_of->tape != NULL) {
            x->alias_of->consumers--;
        }
    }
    n->out->needed -= (n->reads & MUI_READS_OUT) != 0;
    for (int k = 0; k < n->saved_count; k++) {
        mui_storage_release(n->saved[k]);
        n->saved[k] = NULL;
    }
    n->counted = false;
}

/* Which output x is, -1: none. */
static int output_of(const mui_segment *g, const mu_tensor *x)
{
    int i = g->out_count - 1;
    while (i >= 0 && g->out[i] != x) {
        i--;
    }
    return i;
}

static bool stays(const mui_segment *g, const mu_tensor *x)
{
    int i = output_of(g, x);
    return x->retained || (i >= 0 && g->out_alive[i]);
}

static void drop(mu_tape *t, mui_segment *g)
{
    bool again = false;
    for (size_t i = g->node_first; i < g->node_end; i++) {
        mui_node *n = t->nodes[i];
        again = again || (!n->light && !n->done);
        if (n->counted) {
            uncount(n);
        }
    }
    for (size_t i = g->order + 1; i < g->segment_end; i++) {
        let_go(t->segments[i]);
    }
    for (size_t i = g->tensor_first; i < g->tensor_end; i++) {
        mu_tensor *x = t->made[i];
        if (!x->released && !stays(g, x)) {
            mui_tensor_release(x);
            x->dropped = output_of(g, x) < 0; /* an output was given back by backward, as others are */
        }
    }
    for (mu_tensor *x = t->tensors; x != g->since; x = x->next) {
        if (x->alias_of != NULL && !x->released) { /* copies in other layouts, made as it ran */
            mui_tensor_release(x);
        }
    }
    g->live = false;
    if (again) {
        hold(g);
    } else {
        let_go(g);
    }
}

/* A function that failed: what it recorded is as if it had been called directly. */
static void dissolve(mu_tape *t, mui_segment *g)
{
    for (size_t i = g->node_first; i < t->node_count; i++) {
        if (t->nodes[i]->segment == g) {
            t->nodes[i]->segment = g->parent;
        }
    }
}

/* -- the first run ---------------------------------------------------------------------------------------------- */

static mui_segment *new_segment(mu_tape *t, const mui_segment *like)
{
    mui_segment *g = mui_arena_alloc(&t->arena, sizeof(*g));
    size_t ins = (size_t)like->in_count, outs = (size_t)like->out_count;
    mu_tensor **all = mui_arena_calloc(&t->arena, ins + outs, sizeof(mu_tensor *));
    bool *alive = mui_arena_calloc(&t->arena, outs, sizeof(*alive));
    const char *here = mui_here_of(t->context)->path;
    const char *path = here[0] != '\0' ? mui_arena_strdup(&t->arena, here) : "";
    if (g == NULL || all == NULL || alive == NULL || path == NULL ||
        !MUI_GROW(t->context, t->segments, t->segment_count, t->segment_capacity)) {
        return NULL;
    }
    *g = *like;
    g->in = all;
    g->out = all + ins;
    g->out_alive = alive;
    memcpy(g->in, like->in, ins * sizeof(*g->in));
    g->parent = t->segment;
    g->order = t->segment_count;
    g->node_first = t->node_count;
    g->tensor_first = t->made_count;
    g->tensor_end = UINT32_MAX; /* until it is known: all that is made from now on */
    g->memory_first = t->memory_count;
    g->draws = t->draws;
    g->step = t->step;
    g->sample_leaves = t->sample_leaves;
    g->path = path;
    g->since = t->tensors;
    t->segments[t->segment_count++] = g;
    return g;
}

static void set_alive(mui_segment *g, bool always)
{
    for (int i = 0; i < g->out_count; i++) {
        g->out_alive[i] = g->out[i] != NULL && (always || !g->out[i]->released);
    }
}

static mu_status run_first(mu_tape *t, const mui_segment *like, mu_tensor **out)
{
    mui_segment *g = new_segment(t, like);
    if (g == NULL) {
        return failure(t);
    }
    size_t regions = t->region_count;
    t->segment = g;
    mu_status s = call(t, g, out);
    t->segment = g->parent;
    g->node_end = t->node_count;
    g->tensor_end = t->made_count;
    g->segment_end = t->segment_count;
    if (s == MU_OK && t->region_count != regions) {
        s = mui_fail(t->context, MU_ERR_STATE, "checkpoint%s%s: its function left a no-grad region open",
                     g->path[0] != '\0' ? " in " : "", g->path);
    }
    s = s == MU_OK ? find_held(t, g) : s;
    if (s != MU_OK) {
        dissolve(t, g);
        return s;
    }
    memcpy(g->out, out, (size_t)g->out_count * sizeof(*out));
    set_alive(g, true);
    drop(t, g);
    return MU_OK;
}

/* Within a segment that runs again. */
static mu_status run_within(mu_tape *t, const mui_segment *like, mu_tensor **out)
{
    mui_replay *r = &t->replay;
    mui_segment *g = r->segment < r->top->segment_end ? t->segments[r->segment] : NULL;
    bool same = !r->strayed && g != NULL && g->one == like->one && g->many == like->many &&
                g->in_count == like->in_count && g->out_count == like->out_count && g->node_first == r->node &&
                g->tensor_first == r->tensor;
    for (int i = 0; same && i < g->in_count; i++) {
        same = g->in[i] == like->in[i];
    }
    if (!same) {
        return mui_segment_stray(t, "checkpoint", NULL);
    }
    mui_segment *around = t->segment;
    g->self = like->self;
    g->since = t->tensors;
    r->segment++;
    t->segment = g;
    mu_status s = call(t, g, out);
    t->segment = around;
    if (s == MU_OK && (r->strayed || r->node != g->node_end || r->tensor != g->tensor_end ||
                       memcmp(out, g->out, (size_t)g->out_count * sizeof(*out)) != 0)) {
        s = mui_segment_stray(t, NULL, NULL);
    }
    if (s == MU_OK) {
        set_alive(g, true);
        drop(t, g);
    }
    return s;
}

static mu_status run(mu_tape *t, const mui_segment *like, mu_tensor **out)
{
    for (int i = 0; i < like->out_count; i++) {
        out[i] = NULL;
    }
    if (mui_inputs_bad(t, "checkpoint", like->in, like->in_count)) {
        return failure(t);
    }
    mu_status s;
    if (t->options.no_grad || t->region_count > t->region_base) {
        mui_segment direct = *like;
        s = call(t, &direct, out);
    } else {
        s = t->replay.top != NULL ? run_within(t, like, out) : run_first(t, like, out);
    }
    for (int i = 0; s != MU_OK && i < like->out_count; i++) {
        out[i] = NULL;
    }
    return s;
}

mu_tensor *mu_checkpoint(mu_tape *t, mu_forward_fn fn, void *self, mu_tensor *x)
{
    if (t == NULL || x == NULL || fn == NULL) {
        if (t != NULL && fn == NULL && !mui_failed(t->context)) {
            mui_fail(t->context, MU_ERR_ARG, "mu_checkpoint: the function is NULL");
        }
        return NULL;
    }
    mu_tensor *y = NULL;
    mui_segment like = {.one = fn, .self = self, .in = &x, .in_count = 1, .out_count = 1};
    return run(t, &like, &y) == MU_OK ? y : NULL;
}

mu_status mu_checkpoint_many(mu_tape *t, mu_segment_fn fn, void *self, mu_tensor *const *in, int in_count,
                             mu_tensor **out, int out_count)
{
    if (t == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = t->context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    bool good = fn != NULL && in_count >= 0 && out_count >= 0 && (in != NULL || in_count == 0) &&
                (out != NULL || out_count == 0);
    for (int i = 0; good && i < in_count; i++) {
        good = in[i] != NULL;
    }
    if (!good) {
        return mui_fail(c, MU_ERR_ARG, "mu_checkpoint_many: the function, an input or a list is NULL, or a count negative");
    }
    mui_segment like = {.many = fn, .self = self, .in_count = in_count, .out_count = out_count};
    like.in = mui_arena_alloc(&t->arena, ((size_t)in_count + 1) * sizeof(*in));
    if (like.in == NULL) {
        return failure(t);
    }
    if (in_count > 0) {
        memcpy(like.in, in, (size_t)in_count * sizeof(*in));
    }
    return run(t, &like, out);
}

/* -- backward --------------------------------------------------------------------------------------------------- */

/* The function runs as it did first: in its module, outside of no-grad regions, with the draws of then. */
static mu_status run_again(mu_tape *t, mui_segment *g)
{
    mu_context *c = t->context;
    mu_tensor **out = mui_arena_calloc(&t->arena, (size_t)g->out_count, sizeof(*out));
    if (out == NULL) {
        return failure(t);
    }
    mui_here *here = mui_here_of(c);
    char path[sizeof(here->path)];
    size_t length = strlen(g->path), path_len = here->path_len, base = t->region_base, regions = t->region_count;
    uint64_t draws = t->draws, step = t->step;
    int64_t leaves = t->sample_leaves;
    memcpy(path, here->path, path_len + 1);
    memcpy(here->path, g->path, length + 1);
    here->path_len = length;
    t->region_base = regions;
    t->draws = g->draws;
    t->step = g->step;
    t->sample_leaves = g->sample_leaves;
    t->segment = g;
    t->replay = (mui_replay){.top = g, .node = g->node_first, .tensor = g->tensor_first, .segment = g->order + 1,
                             .memory = g->memory_first};
    g->since = t->tensors;
    mu_status s = call(t, g, out);
    if (s == MU_OK && (t->replay.strayed || t->replay.node != g->node_end || t->replay.tensor != g->tensor_end ||
                       t->replay.segment != g->segment_end || t->region_count != regions ||
                       memcmp(out, g->out, (size_t)g->out_count * sizeof(*out)) != 0)) {
        s = mui_segment_stray(t, NULL, NULL);
    }
    t->replay = (mui_replay){0};
    t->segment = NULL;
    t->sample_leaves = leaves;
    t->step = step;
    t->draws = draws;
    t->region_base = base;
    t->region_count = regions;
    memcpy(here->path, path, path_len + 1);
    here->path_len = path_len;
    return s;
}

static mu_status bring_back(mu_tape *t, mui_segment *g)
{
    if (g->parent != NULL && !g->parent->live) {
        mu_status around = bring_back(t, g->parent);
        if (around != MU_OK) {
            return around;
        }
    }
    set_alive(g, false);
    mu_status s = run_again(t, g);
    if (s != MU_OK) {
        drop(t, g);
        return s;
    }
    g->live = true;
    t->live = g;
    let_go(g);
    for (size_t i = 0; i < g->held_count; i++) {
        mui_release_if_idle(t, g->held[i]);
    }
    for (size_t i = g->tensor_first; i < g->tensor_end; i++) {
        mu_tensor *x = t->made[i];
        if (x->needed == 0 && !x->released && mui_maker_of(x) != NULL && x != t->marked && !stays(g, x)) {
            mui_tensor_release(x); /* the function read it, backward will not */
        }
    }
    return MU_OK;
}

mu_status mui_segment_need(mu_tape *t, mui_node *n)
{
    return n->segment != NULL && !n->segment->live ? bring_back(t, n->segment) : MU_OK;
}

void mui_segment_behind(mu_tape *t, size_t i)
{
    while (t->live != NULL && i <= t->live->node_first) {
        mui_segment *g = t->live;
        t->live = g->parent;
        drop(t, g);
    }
}
