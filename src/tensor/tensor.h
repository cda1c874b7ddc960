/* The tensor struct: what every floor from here on may read. Who makes tensors is the tape's business. */
#ifndef MUI_TENSOR_H
#define MUI_TENSOR_H

#include "dev/storage.h"
#include "kern/kern.h"
#include <muster/tensor.h>

struct mu_tensor {
    mu_context *context;
    struct mu_tape *tape;         /* NULL: belongs to the context (parameter, buffer, kept) */
    mu_dtype dtype;
    mu_dims dims;
    int64_t stride[MU_MAX_DIMS];  /* in elements; meaningful when layout is NULL */
    const mui_layout *layout;     /* blocked layout, NULL: strided */
    mui_storage *storage;         /* one reference held by the tensor; NULL: memory of somebody else (a slab, a base
                                     tensor of the context), not yet placed, or given back */
    char *data;                   /* first element; NULL: not placed, given back, or no elements */
    struct mu_tensor *view_of;    /* whose memory this one shows, never itself a view; NULL: its own */
    uint64_t written;             /* the context's `writes` when its content was last overwritten; of a view: see view_of */
    bool released;                /* backward gave the memory back: reading is MU_ERR_STATE */
    bool retained;                /* backward must not give it back */
    bool requires_grad;           /* a gradient may be wanted: recorded operations look here */
    bool detached;                /* depends on something trainable, but only through mu_detach or a no-grad region */
    struct mui_node *node;        /* operation that made it, NULL for leaves */
    struct mu_parameter *parameter; /* the parameter it is the value of, else NULL */
    struct mu_tensor *grad;       /* leaves with require_grad: gradient after backward, else NULL */

    /* The tape's own book-keeping; zero for tensors of the context. */
    bool wants_own_grad;          /* mu_tensor_require_grad was called: the gradient is kept for the user */
    bool kept;                    /* made by mu_tensor_keep */
    mui_storage *grad_storage;    /* while backward runs: the gradient so far, of these dims in grad_layout */
    const mui_layout *grad_layout;
    struct mu_tensor *next;       /* all tensors of the tape */
    struct mu_tensor *alias_of;   /* the tensor of which this is a copy in another layout: its gradient goes there */
    struct mu_tensor *converted;  /* first copy of this one in another layout, so that each is made once */
    struct mu_tensor *next_converted;
    uint32_t source_writes;       /* of a converted copy: its source's storage->writes when it was made */
    int32_t consumers;            /* recorded reads that backward has not retired */
    int32_t reaching;             /* of them, those that the loss depends on; set by marking */
    int32_t needed;               /* nodes, not yet retired, whose backward reads this value */
    uint32_t serial;              /* among tensors made in segments (tape/segment.h), from 1; 0: not in one */
    bool dropped;                 /* released because its segment does not keep it */
    struct mui_segment *held_by;  /* last segment that was found to read it from outside */
};

/* Fills strides of a plain row-major tensor. */
void mui_strides_plain(mu_dims dims, int64_t *stride);
int64_t mui_dims_elements(mu_dims dims);
bool mui_dims_equal(mu_dims a, mu_dims b);
/* Row-major without gaps and no blocked layout. */
bool mui_tensor_is_plain(const mu_tensor *t);
/* Checks 0 <= ndim <= MU_MAX_DIMS, dims >= 0, and that bytes fit; raises MU_ERR_SHAPE. */
mu_status mui_dims_check(mu_context *c, mu_dims dims, mu_dtype dtype, size_t *bytes) MU_MUST_USE;
/* "(2, 3, 4)" into out, always terminated; returns out. */
#define MUI_DIMS_TEXT 200
const char *mui_dims_text(mu_dims dims, char out[MUI_DIMS_TEXT]);

/* Says that the elements were overwritten in place. */
void mui_tensor_touch(mu_tensor *t);

/* float32, float64, float16, bfloat16. */
bool mui_is_float(mu_dtype t);
/* Elements of any float type to and from float, flat. */
mu_status mui_to_float(mu_context *c, mu_dtype from, int64_t n, const void *src, float *dst) MU_MUST_USE;
mu_status mui_from_float(mu_context *c, mu_dtype to, int64_t n, const float *src, void *dst) MU_MUST_USE;

/* mui_reorder of float32 or bfloat16 elements. */
mu_status mui_tensor_reorder(mui_engine *e, mu_dims dims, mu_dtype dtype, const mui_layout *from, const void *src,
                             const mui_layout *to, void *dst) MU_MUST_USE;

/* Raw access for loading and saving: the elements row-major in the tensor's own dtype, bytes = elements * size. */
mu_status mui_tensor_get_raw(const mu_tensor *t, void *out, size_t bytes) MU_MUST_USE;
mu_status mui_tensor_set_raw(mu_tensor *t, const void *in, size_t bytes) MU_MUST_USE;
/* Raises what mui_tensor_set_raw would before it writes. A plain tensor may then be written in place, at t->data, with
 * mui_tensor_touch to say so. */
mu_status mui_tensor_check_writable(const mu_tensor *t) MU_MUST_USE;

#endif
