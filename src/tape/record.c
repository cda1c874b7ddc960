/* Making tensors and recording operations. */
#include "tape/tape_state.h"
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

mui_engine *mui_tape_engine(mu_tape *t)
{
    return t->engine;
}

mui_pool *mui_tape_pool(mu_tape *t)
{
    return t->pool;
}

mui_arena *mui_tape_arena(mu_tape *t)
{
    return &t->arena;
}

mu_context *mui_tape_context(mu_tape *t)
{
    return t->context;
}

int64_t mui_floats_in_layout(mu_dims dims, const mui_layout *layout)
{
    return (int64_t)(mui_bytes_in_layout(dims, layout) / sizeof(float));
}

mu_tensor *mui_op_fail(mu_tape *t, mu_status s, const char *op, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    mu_context *c = t->context;
    const mui_here *here = mui_here_of(c);
    if (here->path_len > 0) {
        mui_fail(c, s, "%s in %s: %s", op, here->path, text);
    } else {
        mui_fail(c, s, "%s: %s", op, text);
    }
    return NULL;
}

size_t mui_bytes_as(mu_dims dims, mu_dtype dtype, const mui_layout *layout)
{
    return mui_bytes_in_layout(dims, layout) / sizeof(float) * mu_dtype_bytes(dtype);
}

bool mui_inputs_bad(mu_tape *t, const char *op, mu_tensor *const *in, int count)
{
    if (t == NULL || mui_failed(t->context)) {
        return true;
    }
    for (int i = 0; i < count; i++) {
        if (in[i] == NULL) {
            return true;
        }
    }
    for (int i = 0; i < count; i++) {
        if (in[i]->context != t->context || (in[i]->tape != NULL && in[i]->tape != t)) {
            mui_op_fail(t, MU_ERR_ARG, op, "input %d belongs to another %s", i,
                        in[i]->context != t->context ? "context" : "tape");
            return true;
        }
        if (in[i]->dropped) {
            char text[MUI_DIMS_TEXT];
            mui_op_fail(t, MU_ERR_STATE, op,
                        "input %d, of shape %s, was made in a checkpointed segment, which keeps only its outputs: "
                        "mu_tensor_retain in the segment keeps it, or make it an output (mu_checkpoint_many)",
                        i, mui_dims_text(in[i]->dims, text));
            return true;
        }
        if (in[i]->released) {
            char text[MUI_DIMS_TEXT];
            mui_op_fail(t, MU_ERR_STATE, op,
                        "backward has given the memory of input %d, of shape %s, back: mu_tensor_retain keeps it", i,
                        mui_dims_text(in[i]->dims, text));
            return true;
        }
        if (in[i]->data == NULL && mui_dims_elements(in[i]->dims) > 0) {
            mui_op_fail(t, MU_ERR_STATE, op, "input %d has no memory yet: its module has not been laid out", i);
            return true;
        }
    }
    return false;
}

/* How many are bfloat16, where the tape has that; -1 with an error when one is neither that nor float32. */
static int count_bf16(mu_tape *t, const char *op, mu_tensor *const *in, int count)
{
    if (mui_inputs_bad(t, op, in, count)) {
        return -1;
    }
    int found = 0;
    for (int i = 0; i < count; i++) {
        bool narrow = t->options.bf16 && in[i]->dtype == MU_BF16;
        if (in[i]->dtype != MU_F32 && !narrow) {
            mui_op_fail(t, MU_ERR_DTYPE, op, "input %d is %s, float32 was expected", i, mu_dtype_name(in[i]->dtype));
            return -1;
        }
        found += narrow;
    }
    return found;
}

static bool cast_all(mu_tape *t, mu_tensor **in, int count, mu_dtype to)
{
    for (int i = 0; i < count; i++) {
        in[i] = mui_cast(t, in[i], to);
        if (in[i] == NULL) {
            return false;
        }
    }
    return true;
}

bool mui_floats_bad(mu_tape *t, const char *op, mu_tensor **in, int count)
{
    return count_bf16(t, op, in, count) < 0 || !cast_all(t, in, count, MU_F32);
}

bool mui_either_bad(mu_tape *t, const char *op, mu_tensor **in, int count)
{
    int narrow = count_bf16(t, op, in, count);
    return narrow < 0 || (narrow > 0 && narrow < count && !cast_all(t, in, count, MU_F32));
}

bool mui_matrix_bad(mu_tape *t, const char *op, mu_tensor **in, int count, int activations)
{
    return count_bf16(t, op, in, count) < 0 ||
           (t->options.bf16 && (!cast_all(t, in, activations, MU_BF16) ||
                                !cast_all(t, in + activations, count - activations, MU_F32)));
}

/* A tensor of the tape like x, whose reference to memory it takes over, also on failure. */
static mu_tensor *enter_tensor(mu_tape *t, const mu_tensor *x, bool is_copy)
{
    mu_tensor *y = is_copy ? NULL : mui_segment_tensor(t, x);
    if (y != NULL) {
        return y;
    }
    y = mui_arena_alloc(&t->arena, sizeof(*y));
    if (y == NULL) {
        mui_storage_release(x->storage);
        return NULL;
    }
    *y = *x;
    y->next = t->tensors;
    t->tensors = y;
    return is_copy || mui_segment_made(t, y) ? y : NULL;
}

/* Converted copies are apart: a recompute may need others than the first run did. */
static mu_tensor *new_tensor(mu_tape *t, mu_dims dims, mu_dtype dtype, const mui_layout *layout, bool is_copy)
{
    size_t bytes = 0;
    if (mui_dims_check(t->context, dims, dtype, &bytes) != MU_OK) {
        return NULL;
    }
    if (layout != NULL) {
        bytes = mui_bytes_as(dims, dtype, layout);
    }
    /* Empty tensors get memory too: a kernel may then form a pointer without a special case. */
    mui_storage *s = mui_storage_new(t->pool, bytes > 0 ? bytes : 1);
    if (s == NULL) {
        return NULL;
    }
    mu_tensor x = {.context = t->context, .tape = t, .dtype = dtype, .dims = dims, .layout = layout, .storage = s,
                   .data = s->data};
    mui_strides_plain(dims, x.stride);
    return enter_tensor(t, &x, is_copy);
}

mu_tensor *mui_tensor_new(mu_tape *t, mu_dims dims, mu_dtype dtype, const mui_layout *layout)
{
    return new_tensor(t, dims, dtype, layout, false);
}

mu_tensor *mui_tensor_view(mu_tape *t, mu_tensor *base, mu_dims dims, const int64_t *stride, int64_t offset)
{
    mu_tensor x = {.context = t->context, .tape = t, .dtype = base->dtype, .dims = dims, .layout = base->layout,
                   .storage = base->storage, .view_of = base->view_of != NULL ? base->view_of : base};
    /* Memory of the context (parameters) is not counted: it outlives the tape's use of it. */
    if (base->tape == NULL) {
        x.storage = NULL;
    }
    mui_storage_keep(x.storage);
    if (stride != NULL) {
        memcpy(x.stride, stride, (size_t)dims.ndim * sizeof(*stride));
    } else {
        mui_strides_plain(dims, x.stride);
    }
    if (base->data != NULL) {
        x.data = base->data + offset * (int64_t)mu_dtype_bytes(base->dtype);
    }
    return enter_tensor(t, &x, false);
}

static bool has_layout(const mu_tensor *x, const mui_layout *layout)
{
    return layout != NULL ? x->layout == layout : mui_tensor_is_plain(x);
}

mu_tensor *mui_in_layout(mu_tape *t, mu_tensor *x, const mui_layout *layout)
{
    if (x == NULL || has_layout(x, layout)) {
        return x;
    }
    /* Copies of the context's tensors, and of views of them, are never reused: an optimiser may have changed the
     * values since. */
    bool reuse = x->tape != NULL && x->storage != NULL;
    for (mu_tensor *k = reuse ? x->converted : NULL; k != NULL; k = k->next_converted) {
        if (k->layout == layout && !k->released && k->source_writes == x->storage->writes) {
            return k;
        }
    }
    mu_tensor *y = NULL;
    if (x->layout == NULL && !mui_tensor_is_plain(x) && layout != NULL) {
        mu_tensor *plain = mui_in_layout(t, x, NULL);
        y = plain != NULL ? mui_in_layout(t, plain, layout) : NULL;
        return y;
    }
    y = new_tensor(t, x->dims, x->dtype, layout, true);
    if (y == NULL) {
        return NULL;
    }
    if (x->layout == NULL && layout == NULL) {
        mui_count(&t->context->layout_conversions, 1); /* of a view: no kernel knows what its copy is for */
        mui_count(&t->context->converted_bytes, (uint64_t)mui_dims_elements(x->dims) * mu_dtype_bytes(x->dtype));
        mui_copy_strided(t->engine, x->dims, mu_dtype_bytes(x->dtype), x->data, x->stride, y->data, y->stride);
    } else if (mui_tensor_reorder(t->engine, x->dims, x->dtype, x->layout, x->data, layout, y->data) != MU_OK) {
        return NULL;
    }
    y->alias_of = mui_base_of(x);
    y->requires_grad = x->requires_grad;
    if (reuse) {
        y->source_writes = x->storage->writes;
        y->next_converted = x->converted;
        x->converted = y;
    }
    return y;
}

bool mui_tensor_wants_grad(const mu_tensor *x)
{
    const mu_tensor *base = x->alias_of != NULL ? x->alias_of : x;
    return base->parameter != NULL ? !base->parameter->frozen : base->requires_grad;
}

static bool will_record(mu_tape *t, mu_tensor *const *in, int count)
{
    if (t->options.no_grad || t->region_count > t->region_base) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        if (in[i] != NULL && mui_tensor_wants_grad(in[i])) {
            return true;
        }
    }
    return false;
}

bool mui_will_record(mu_tape *t, mu_tensor *const *in, int count)
{
    return mui_tape_decide(t, will_record(t, in, count));
}

/* Whether a report could one day ask what became of y. */
static bool worth_noting(mu_tape *t, mu_tensor *const *in, int count)
{
    if (t->options.no_grad) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        if (mui_tensor_wants_grad(in[i]) || mui_base_of(in[i])->detached) {
            return true;
        }
    }
    return false;
}

static const char *module_path(mu_tape *t)
{
    const char *path = mui_here_of(t->context)->path;
    if (t->module == NULL || strcmp(t->module, path) != 0) {
        t->module = path[0] != '\0' ? mui_arena_strdup(&t->arena, path) : "";
    }
    return t->module;
}

static mui_node *new_node(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count)
{
    const char *module = module_path(t);
    mui_node *n = mui_arena_calloc(&t->arena, 1, sizeof(*n));
    mu_tensor **inputs = mui_arena_alloc(&t->arena, (size_t)in_count * sizeof(*inputs));
    if (n == NULL || inputs == NULL || module == NULL ||
        !MUI_GROW(t->context, t->nodes, t->node_count, t->node_capacity)) {
        return NULL;
    }
    memcpy(inputs, in, (size_t)in_count * sizeof(*inputs));
    n->op = op;
    n->out = y;
    n->in = inputs;
    n->in_count = in_count;
    n->module = module;
    n->recorded = __atomic_load_n(&t->context->writes, __ATOMIC_RELAXED);
    n->segment = t->segment;
    return n;
}

static void enter_node(mu_tape *t, mui_node *n)
{
    if (t->began == 0) {
        t->began = mui_now();
    }
    n->index = (uint32_t)t->node_count;
    t->nodes[t->node_count++] = n;
    n->out->node = n;
}

static const char *region_name(mu_tape *t)
{
    mui_region *r = &t->regions[t->region_count - 1];
    if (r->copy == NULL) {
        r->copy = mui_arena_strdup(&t->arena, r->name);
    }
    return r->copy;
}

static mu_tensor *enter_light(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count)
{
    mui_node *n = new_node(t, op, y, in, in_count);
    if (n == NULL) {
        return NULL;
    }
    n->light = true;
    if (t->region_count > t->region_base) {
        n->region = region_name(t);
        if (n->region == NULL) {
            return NULL;
        }
    }
    y->detached = true;
    enter_node(t, n);
    return y;
}

static mu_tensor *note(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count)
{
    return worth_noting(t, in, in_count) ? enter_light(t, op, y, in, in_count) : y;
}

static void give_up(mui_storage *const *saved, int count)
{
    for (int i = 0; i < count; i++) {
        mui_storage_release(saved[i]);
    }
}

void mui_node_count(mui_node *n)
{
    for (int i = 0; i < n->in_count; i++) {
        mu_tensor *x = n->in[i];
        if (x->tape == NULL) {
            continue; /* outlives the tape: nothing to count */
        }
        x->consumers++;
        x->needed += i < 31 && (n->reads & MUI_READS_IN(i)) != 0;
        if (x->alias_of != NULL && x->alias_of->tape != NULL) {
            x->alias_of->consumers++;
        }
    }
    n->out->needed += (n->reads & MUI_READS_OUT) != 0;
    n->counted = true;
}

mu_tensor *mui_record_reads(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                            const void *attr, size_t attr_bytes, mui_storage *const *saved, int saved_count,
                            uint32_t reads)
{
    if (y != NULL && t->replay.top != NULL) {
        return mui_segment_record(t, op, y, in, in_count, attr, attr_bytes, saved, saved_count, reads);
    }
    if (y == NULL || op->backward == NULL || !will_record(t, in, in_count)) {
        give_up(saved, saved_count);
        return y == NULL ? NULL : note(t, op, y, in, in_count);
    }
    mui_node *n = new_node(t, op, y, in, in_count);
    if (n != NULL && attr_bytes > 0) {
        n->attr = mui_arena_alloc(&t->arena, attr_bytes);
        n = n->attr != NULL ? n : NULL;
    }
    if (n != NULL && saved_count > 0) {
        n->saved = mui_arena_alloc(&t->arena, (size_t)saved_count * sizeof(*n->saved));
        n = n->saved != NULL ? n : NULL;
    }
    if (n == NULL) {
        give_up(saved, saved_count);
        return NULL;
    }
    if (attr_bytes > 0) {
        memcpy(n->attr, attr, attr_bytes);
    }
    if (saved_count > 0) {
        memcpy(n->saved, saved, (size_t)saved_count * sizeof(*n->saved));
    }
    n->saved_count = saved_count;
    n->reads = reads;
    n->attr_bytes = attr_bytes;
    mui_node_count(n);
    y->requires_grad = true;
    enter_node(t, n);
    return y;
}

mu_tensor *mui_record(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count, const void *attr,
                      size_t attr_bytes, mui_storage *const *saved, int saved_count)
{
    return mui_record_reads(t, op, y, in, in_count, attr, attr_bytes, saved, saved_count, op->reads);
}

mu_tensor *mui_record_within(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                             const void *attr, size_t attr_bytes, mui_storage *saved, const mui_within *within,
                             size_t within_count, bool detached)
{
    bool record = mui_will_record(t, in, in_count);
    if (y != NULL && t->replay.top != NULL) {
        return mui_segment_record(t, op, y, in, in_count, attr, attr_bytes, &saved, saved != NULL, op->reads);
    }
    if (y == NULL || t->options.no_grad || (!record && within_count == 0 && !detached)) {
        give_up(&saved, saved != NULL);
        return y;
    }
    if (record) {
        y = mui_record(t, op, y, in, in_count, attr, attr_bytes, &saved, saved != NULL);
    } else {
        give_up(&saved, saved != NULL);
        y = enter_light(t, op, y, in, in_count);
        if (y != NULL) {
            y->detached = detached;
        }
    }
    if (y != NULL) {
        y->node->within = within;
        y->node->within_count = within_count;
    }
    return y;
}

void mui_tape_draw(mu_tape *t, uint64_t *key, uint64_t *stream)
{
    uint64_t h = mui_hash_string(MUI_HASH_START, "tape");
    h = mui_hash_u64(h, t->context->seed);
    *key = mui_hash_u64(h, (uint64_t)t->context->rank);
    if (t->replica) {
        *key = mui_hash_u64(*key, t->salt);
    }
    *stream = mui_hash_u64(mui_hash_u64(MUI_HASH_START, t->step), t->draws++);
}

void mui_tensor_release(mu_tensor *t)
{
    mui_storage_release(t->storage);
    t->storage = NULL;
    t->data = NULL;
    t->released = true;
}

void mui_tensor_forget(mu_tape *t, mu_tensor *x)
{
    if (t == NULL || x == NULL || x->tape != t || t->options.retain_graph || t->segment != NULL || t->replay.top != NULL ||
        mui_maker_of(x) == NULL || x->alias_of != NULL || x->retained || x->released || x->consumers == 0 ||
        x->needed > 0) {
        return;
    }
    mui_tensor_release(x);
}
