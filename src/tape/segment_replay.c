/* What operations find while a segment runs again: the tensors, nodes and answers of its first run, in the same order. */
#include "base/alloc.h"
#include "tape/tape_state.h"

#include <stdio.h>
#include <string.h>

bool mui_tape_recomputes(const mu_tape *t)
{
    return t->replay.top != NULL;
}

mu_status mui_tape_remember(mu_tape *t, const void *data, size_t bytes)
{
    if (t->segment == NULL || t->replay.top != NULL) {
        return MU_OK;
    }
    void *copy = mui_arena_alloc(&t->arena, bytes);
    if (copy == NULL || !MUI_GROW(t->context, t->memories, t->memory_count, t->memory_capacity)) {
        return MU_ERR_NOMEM;
    }
    memcpy(copy, data, bytes);
    t->memories[t->memory_count++] = (mui_memory){copy, bytes};
    return MU_OK;
}

const void *mui_tape_recall(mu_tape *t, size_t bytes)
{
    mui_replay *r = &t->replay;
    if (r->top == NULL || r->strayed || mui_failed(t->context)) {
        return NULL;
    }
    if (r->memory >= t->memory_count || t->memories[r->memory].bytes != bytes) {
        mui_segment_stray(t, "another operation or layer", NULL);
        return NULL;
    }
    return t->memories[r->memory++].data;
}

bool mui_tape_decide(mu_tape *t, bool now)
{
    if (t->replay.top == NULL) {
        return mui_tape_remember(t, &now, sizeof(now)) == MU_OK && now;
    }
    const bool *then = mui_tape_recall(t, sizeof(now));
    return then != NULL ? *then : now;
}

bool mui_segment_made(mu_tape *t, mu_tensor *x)
{
    if (t->segment == NULL || t->replay.top != NULL) {
        return true;
    }
    if (!MUI_GROW(t->context, t->made, t->made_count, t->made_capacity)) {
        return false;
    }
    t->made[t->made_count++] = x;
    x->serial = (uint32_t)t->made_count;
    return true;
}

mu_tensor *mui_segment_tensor(mu_tape *t, const mu_tensor *template)
{
    mui_replay *r = &t->replay;
    if (r->top == NULL || r->strayed) {
        return NULL;
    }
    mu_tensor *x = r->tensor < r->top->tensor_end ? t->made[r->tensor] : NULL;
    if (x == NULL || x->dtype != template->dtype || x->layout != template->layout ||
        !mui_dims_equal(x->dims, template->dims)) {
        r->strayed = true;
        return NULL;
    }
    r->tensor++;
    mui_storage_release(x->storage);
    x->storage = template->storage;
    x->data = template->data;
    x->view_of = template->view_of;
    memcpy(x->stride, template->stride, sizeof(x->stride));
    x->converted = NULL;
    x->released = x->dropped = false;
    return x;
}

/* -- where the function does something else ---------------------------------------------------------------------- */

/* "conv2d in layer1.conv1, of shape (2, 3)" */
static void describe(char *out, size_t size, const char *op, const char *module, const mu_tensor *y)
{
    char dims[MUI_DIMS_TEXT] = "";
    snprintf(out, size, "%s%s%s%s%s", op, module[0] != '\0' ? " in " : "", module, y != NULL ? ", of shape " : "",
             y != NULL ? mui_dims_text(y->dims, dims) : "");
}

mu_status mui_segment_stray(mu_tape *t, const char *op, const mu_tensor *y)
{
    const mui_replay *r = &t->replay;
    const mui_segment *g = t->segment != NULL ? t->segment : r->top;
    const mui_node *n = r->node < g->node_end ? t->nodes[r->node] : NULL;
    char now[900], then[900] = "nothing more";
    if (op != NULL) {
        describe(now, sizeof(now), op, mui_here_of(t->context)->path, y);
    } else {
        snprintf(now, sizeof(now), "its end");
    }
    if (n != NULL) {
        describe(then, sizeof(then), n->op->name, n->module, n->out);
    } else if (op == NULL) {
        snprintf(then, sizeof(then), "other results, or values that need no gradient");
    }
    t->replay.strayed = true;
    return mui_fail(t->context, MU_ERR_STATE,
                    "checkpoint%s%s: run again for backward, its function comes to %s where the first run had %s: it must "
                    "do the same both times",
                    g->path[0] != '\0' ? " in " : "", g->path, now, then);
}

static const char *parameter_of(mu_tensor *x)
{
    const mu_parameter *p = mui_base_of(x)->parameter;
    return p != NULL ? mu_parameter_name(p) : "a tensor";
}

/* Same operation, same operands. */
static bool matches(mu_tape *t, const mui_node *n, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                    size_t attr_bytes)
{
    const mui_replay *r = &t->replay;
    if (r->strayed || n != (r->node < r->top->node_end ? t->nodes[r->node] : NULL) || n->op != op ||
        n->in_count != in_count || (!n->light && n->attr_bytes != attr_bytes) ||
        strcmp(n->module, mui_here_of(t->context)->path) != 0) {
        mui_segment_stray(t, op->name, y);
        return false;
    }
    for (int i = 0; i < in_count; i++) {
        if (mui_base_of(in[i]) != mui_base_of(n->in[i])) {
            mui_fail(t->context, MU_ERR_STATE,
                     "checkpoint%s%s: run again for backward, input %d of its %s%s%s is %s where it was %s in the first run",
                     r->top->path[0] != '\0' ? " in " : "", r->top->path, i, op->name, n->module[0] != '\0' ? " in " : "",
                     n->module, parameter_of(in[i]), parameter_of(n->in[i]));
            return false;
        }
    }
    return true;
}

/* Whether the first run would have made a node of this: parameters may have been frozen since, or unfrozen. */
static bool depends(mu_tensor *const *in, int in_count)
{
    for (int i = 0; i < in_count; i++) {
        const mu_tensor *x = mui_base_of(in[i]);
        if (x->parameter == NULL && (x->requires_grad || x->detached)) {
            return true;
        }
    }
    return false;
}

static bool fill(mu_tape *t, mui_node *n, mu_tensor *const *in, const void *attr, mui_storage *const *saved,
                 int saved_count, uint32_t reads)
{
    memcpy(n->in, in, (size_t)n->in_count * sizeof(*in));
    if (n->light || n->done) {
        return false;
    }
    for (int k = 0; k < n->saved_count; k++) {
        mui_storage_release(n->saved[k]);
        n->saved[k] = NULL;
    }
    if (saved_count > n->saved_count) {
        mui_storage **more = mui_arena_alloc(&t->arena, (size_t)saved_count * sizeof(*more));
        if (more == NULL) {
            return false;
        }
        n->saved = more;
    }
    if (n->attr_bytes > 0) {
        memcpy(n->attr, attr, n->attr_bytes);
    }
    if (saved_count > 0) {
        memcpy(n->saved, saved, (size_t)saved_count * sizeof(*saved));
    }
    n->saved_count = saved_count;
    n->reads = reads;
    mui_node_count(n);
    return true;
}

mu_tensor *mui_segment_record(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                              const void *attr, size_t attr_bytes, mui_storage *const *saved, int saved_count,
                              uint32_t reads)
{
    mui_node *n = y->node;
    bool good = true, filled = false;
    if (n != NULL) {
        good = matches(t, n, op, y, in, in_count, attr_bytes);
        if (good) {
            t->replay.node++;
            filled = fill(t, n, in, attr, saved, saved_count, reads);
        }
    } else if (t->replay.strayed || (depends(in, in_count) && t->region_count == t->region_base)) {
        good = false;
        mui_segment_stray(t, op->name, y);
    }
    for (int i = 0; !filled && i < saved_count; i++) {
        mui_storage_release(saved[i]);
    }
    return good && !mui_failed(t->context) ? y : NULL;
}
