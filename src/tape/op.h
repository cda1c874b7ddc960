/* The op table: one row for each operation, and the nodes that record it.
 *
 * To add an operation: a public function in ops_*.c that checks shapes, computes, and calls mui_record; a row in its
 * table with the backward; a sample for the tests. See docs/add-an-op.md. */
#ifndef MUI_OP_H
#define MUI_OP_H

#include "base/arena.h"
#include "tensor/tensor.h"
#include <muster/ops.h>

typedef struct mui_node mui_node;
typedef struct mui_backward mui_backward; /* state of one backward call, tape/backward.c */

typedef struct mui_op {
    const char *name; /* as in messages and reports: "conv2d" */
    /* Computes gradients of the node's inputs from that of its output. For each input i with
     * mui_wants_grad(b, n, i), it either asks for memory with mui_grad_out and fills it, or hands over ready memory
     * with mui_grad_pass. */
    mu_status (*backward)(mui_backward *b, mui_node *n);
    /* Test samples: builds inputs (leaves that require gradients) and the output for sample i, from the seed; returns
     * NULL when there is no sample i. Every row has at least one. */
    mu_tensor *(*sample)(mu_tape *t, int i, uint64_t seed);
    uint32_t reads; /* values that backward reads: MUI_READS_OUT, MUI_READS_IN(0), ...; others may be given back early */
    bool collective; /* makes collectives in backward, among ranks that all run it */
} mui_op;
#define MUI_READS_OUT ((uint32_t)1 << 31)
#define MUI_READS_IN(i) ((uint32_t)1 << (i)) /* i < 31 */

/* A parameter that a node's inside reads, whether or not it is among the node's inputs, which are those that a gradient
 * reaches. For reports. */
typedef struct mui_within {
    struct mu_parameter *parameter;
    const char *op, *module; /* that read it */
    const struct mui_absence *absence; /* why no gradient reaches it; NULL: one does if one reaches the node */
} mui_within;

struct mui_node {
    const mui_op *op;
    mu_tensor *out;
    mu_tensor **in;       /* arena */
    int in_count;
    void *attr;           /* arena, of the op: shapes, plans, saved small things */
    mui_storage **saved;  /* arena; released when the node has run backward: workspaces, masks */
    int saved_count;
    size_t attr_bytes;
    struct mui_segment *segment; /* the innermost that it is part of, or NULL */
    bool counted;         /* its reads are in its inputs' consumers and needed: not of a dropped segment */
    const char *module;   /* arena, path of the module that ran it, "" at top */
    uint32_t reads;       /* of the op, or narrower */
    uint64_t recorded;    /* the context's `writes` then: what was written later is not what it computed with */
    uint32_t index;       /* position on the tape */
    bool reaches_loss;    /* set by marking: a gradient arrives here */
    bool leads_to_loss;   /* set by marking: the loss depends on the value, gradient or not */
    bool done;            /* ran backward and gave its values back */
    /* Not differentiable: mu_detach, an operation in a no-grad region, or one that depends on trainable things only
     * through such. Noted without attr and saved, so that a report can tell where a parameter lost its gradient. */
    bool light;
    const char *region;   /* of a light node in a no-grad region: its name, "" when it has none; else NULL */
    const mui_within *within; /* arena or longer; NULL: there is no inside, its inputs are all it reads */
    size_t within_count;
    struct mui_node *next, *cut, *end; /* found by marking for reports: a reader of out (one that leads to the loss if
                                        * any does), first light node on that path, last node of that path */
};

/* All rows, NULL-terminated. */
const mui_op *const *mui_ops(void);

/* -- for forward functions -------------------------------------------------------------------------------------- */
/* True when op cannot start: silently when the context failed before or a tensor is NULL (a failure upstream), with an
 * error when one belongs elsewhere or its memory was given back. */
bool mui_inputs_bad(mu_tape *t, const char *op, mu_tensor *const *in, int count);
/* The same, and all must be float32; a tape with bf16 casts bfloat16 ones, in place. */
bool mui_floats_bad(mu_tape *t, const char *op, mu_tensor **in, int count);
/* For ops that work on either type: all of in are float32, or all bfloat16; of a mixture, bfloat16 ones are cast. */
bool mui_either_bad(mu_tape *t, const char *op, mu_tensor **in, int count);
/* For ops that a tape with bf16 computes in bfloat16: casts the first `activations` of in to it, the rest (weights, biases)
 * to float32, which their kernels round. Without bf16 as mui_floats_bad. */
bool mui_matrix_bad(mu_tape *t, const char *op, mu_tensor **in, int count, int activations);
/* x with elements of that type, recorded: x itself if they are. float32 and bfloat16. */
mu_tensor *mui_cast(mu_tape *t, mu_tensor *x, mu_dtype to);
/* A new tensor of the tape with memory in that layout (NULL: plain), contents undefined. */
mu_tensor *mui_tensor_new(mu_tape *t, mu_dims dims, mu_dtype dtype, const mui_layout *layout);
/* A view: shares storage. */
mu_tensor *mui_tensor_view(mu_tape *t, mu_tensor *base, mu_dims dims, const int64_t *stride, int64_t offset);
/* x itself if it has that layout already (NULL: plain row-major), else a converted copy, recorded as nothing: the
 * gradient goes to x. Used at the start of ops. */
mu_tensor *mui_in_layout(mu_tape *t, mu_tensor *x, const mui_layout *layout);
/* Bytes of a float32 or bfloat16 tensor of these dims in that layout. */
size_t mui_bytes_as(mu_dims dims, mu_dtype dtype, const mui_layout *layout);
/* Records y = op(in...) when grad mode is on and an input requires grad; sets y->requires_grad and y->node. `attr` of
 * attr_bytes is copied; the node takes over the references in saved. Returns y, or NULL. */
mu_tensor *mui_record(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count, const void *attr,
                      size_t attr_bytes, mui_storage *const *saved, int saved_count);
/* The same for an op that knows better than its row what its backward will read. */
mu_tensor *mui_record_reads(mu_tape *t, const mui_op *op, mu_tensor *y, mu_tensor *const *in, int in_count,
                            const void *attr, size_t attr_bytes, mui_storage *const *saved, int saved_count,
                            uint32_t reads);
/* Whether x is, or depends on, something whose gradient is wanted. */
bool mui_tensor_wants_grad(const mu_tensor *x);
/* Whether an op with these inputs will be recorded, so that it may skip saving. */
bool mui_will_record(mu_tape *t, mu_tensor *const *in, int count);
mui_engine *mui_tape_engine(mu_tape *t);
mui_pool *mui_tape_pool(mu_tape *t);
mui_arena *mui_tape_arena(mu_tape *t);
mu_context *mui_tape_context(mu_tape *t);
/* The first failure of an op: "conv2d in layer1.0.conv1: ..." with the module path. Returns NULL. */
mu_tensor *mui_op_fail(mu_tape *t, mu_status s, const char *op, const char *format, ...) MU_PRINTF(4, 5);
/* A fresh (key, stream) for a random op: from seed, rank, step and the op's position in the step. */
void mui_tape_draw(mu_tape *t, uint64_t *key, uint64_t *stream);

/* Operations that are not public. x (N, C, H, W) -> (N, before + C + after, ceil(H/step), ceil(W/step)): every step-th row
 * and column, between that many channels of zeros. */
mu_tensor *mui_subsample_pad(mu_tape *t, mu_tensor *x, int64_t step, int64_t before, int64_t after);

/* -- for backward functions: a gradient has the type of its tensor ---------------------------------------------- */
bool mui_wants_grad(const mui_backward *b, const mui_node *n, int input);
/* Gradient of the node's output in `layout` (converted if need be); valid during the call. */
const void *mui_grad_in(mui_backward *b, mui_node *n, const mui_layout *layout);
/* Memory for the gradient of input i in `layout`. *accumulate: it holds earlier contributions, add to them; false:
 * overwrite all, padding with zero. For a parameter whose layout it is, this is its slice of the gradient slab itself.
 * NULL on failure. */
void *mui_grad_out(mui_backward *b, mui_node *n, int input, const mui_layout *layout, bool *accumulate);
/* The same for a computation that can only overwrite: the engine adds it to earlier contributions afterwards. */
void *mui_grad_put(mui_backward *b, mui_node *n, int input, const mui_layout *layout);
/* The gradient of input i is the output's gradient unchanged (add, reshape): shares memory where it can. */
mu_status mui_grad_pass(mui_backward *b, mui_node *n, int input) MU_MUST_USE;
/* The gradient of input i is ready in this memory (of its dims, in `layout`): shares it. The caller keeps its reference
 * and may no longer change the content. */
mu_status mui_grad_give(mui_backward *b, mui_node *n, int input, mui_storage *s, const mui_layout *layout) MU_MUST_USE;
/* For gradients computed in place (relu): *dy is the output's gradient, the result is memory to put another in its
 * stead, often the same memory; hand that over with mui_grad_pass. NULL on failure. */
void *mui_grad_remake(mui_backward *b, mui_node *n, const mui_layout *layout, const void **dy);
/* Scratch for this call, in floats. NULL on failure. */
float *mui_grad_scratch(mui_backward *b, size_t floats);
mui_engine *mui_backward_engine(mui_backward *b);
/* False when the node's values are given back after this call: backward may then overwrite what it saved. */
bool mui_backward_retains(const mui_backward *b);
/* Floats that a tensor of these dims fills in that layout, padding included. */
int64_t mui_floats_in_layout(mu_dims dims, const mui_layout *layout);

/* For who made x, gave it to those who had to read it, and to nobody else: gives its memory back now when no backward
 * reads it, rather than when backward begins, so that it is not part of a step's peak. */
void mui_tensor_forget(mu_tape *t, mu_tensor *x);

#endif
