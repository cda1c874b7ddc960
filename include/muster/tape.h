/* The tape: records the operations of one step and differentiates them in reverse.
 *
 * A tape owns every tensor, node and temporary made from it until mu_tape_reset, which keeps the memory for the next
 * step: from the third step of the same shape on, a step allocates nothing. One tape belongs to one thread. */
#ifndef MUSTER_TAPE_H
#define MUSTER_TAPE_H

#include <muster/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_tape mu_tape;
typedef struct mu_parameter mu_parameter;
typedef struct mu_module mu_module; /* a tree of parameters, see <muster/module.h> */

typedef struct mu_tape_options {
    bool no_grad;      /* record nothing: for evaluation */
    bool retain_graph; /* keep values through backward, so that several backwards may run over the same graph */
    /* Mixed precision, as torch.autocast(dtype=bfloat16). Convolutions, mu_linear_op and mu_matmul round float32 operands
     * to bfloat16 (nearest, ties to even), sum in float32 and give MU_BF16. Batch norm (its statistics, scale and shift
     * stay float32), relu, add and add_relu of equal shapes, pooling, dropout, reshape, flatten and detach give what they
     * get; mixed operands become float32. Everything else, losses above all, computes in float32 and gives that. The
     * gradient of an activation has its type; values and gradients of parameters are float32 throughout, and reduced as such
     * (but for mu_ddp_set_bf16). By oneDNN's kernels where the CPU has AVX-512, elsewhere by float32 kernels and rounding,
     * slower than float32. One warning says where the CPU has no instructions for it (AVX512_BF16). */
    bool bf16;
} mu_tape_options;

/* Owned by the context. NULL on error. */
MU_API mu_tape *mu_tape_new(mu_context *c, const mu_tape_options *options);
/* Ends the step: every tensor made from the tape is gone, its memory is kept for the next. Never fails. */
MU_API void mu_tape_reset(mu_tape *t);
MU_API void mu_tape_free(mu_tape *t);

/* Random operations (dropout) draw from (seed, rank, step, operation), so a resumed run repeats them. The step counts
 * up by itself at each reset; set it when resuming. */
MU_API void mu_tape_set_step(mu_tape *t, uint64_t step);
MU_API uint64_t mu_tape_step(const mu_tape *t);

/* Tensors that enter the tape. The data is copied (row-major); NULL data gives zeros. */
MU_API mu_tensor *mu_tensor_from(mu_tape *t, mu_dims dims, const float *data);
MU_API mu_tensor *mu_tensor_from_i64(mu_tape *t, mu_dims dims, const int64_t *data);
MU_API mu_tensor *mu_tensor_zeros(mu_tape *t, mu_dims dims);

/* Asks for the gradient of a tensor that entered the tape; read it with mu_tensor_grad after backward. Returns x. */
MU_API mu_tensor *mu_tensor_require_grad(mu_tape *t, mu_tensor *x);
/* Gradient of a tensor for which require_grad was called, of the same shape; NULL if the last backward gave it none. */
MU_API mu_tensor *mu_tensor_grad(const mu_tensor *x);

/* Backward returns memory of values as it goes. A retained tensor stays readable until reset. Returns x. */
MU_API mu_tensor *mu_tensor_retain(mu_tape *t, mu_tensor *x);
/* Copies a tensor out of the tape: the copy belongs to the context and is never on any tape. Free with
 * mu_tensor_free, or leave it to the context. */
MU_API mu_tensor *mu_tensor_keep(mu_tape *t, const mu_tensor *x);
MU_API void mu_tensor_free(mu_tensor *kept);

/* Operations between begin and end are not recorded; regions nest, and stay open over mu_tape_reset. name (may be NULL;
 * up to 63 characters count) is copied, and named in reports about parameters that lost their gradient here. */
MU_API void mu_no_grad_begin(mu_tape *t, const char *name);
MU_API void mu_no_grad_end(mu_tape *t);
/* Training or evaluation mode of mode-dependent operations is the module's, see mu_module_train. */

/* Differentiates the one-element tensor loss, adding to the gradient of every parameter it depends on; parameters it
 * does not depend on are left alone. One process only: with ranks, use mu_ddp_backward. A second backward that needs
 * values given back by the first is MU_ERR_STATE, unless the tape retains its graph. */
MU_API mu_status mu_backward(mu_tape *t, mu_tensor *loss) MU_MUST_USE;

/* Computes a tensor of the tape from x; NULL on failure, with the context's error. self is the caller's. */
typedef mu_tensor *(*mu_forward_fn)(void *self, mu_tape *t, mu_tensor *x);

/* Activation checkpointing. Runs fn(self, t, x) without keeping the values that its operations' backward will need; when
 * backward comes there, fn runs again, and its operations fill in what is missing. Gradients are bit for bit those of
 * calling fn directly, whatever it reads: parameters, tensors it got through self, an x without gradient. The second
 * run repeats dropout's draws and layers' training mode, moves no running statistics and counts no batch; effects of
 * fn's own happen twice. fn and self must be valid until the tape's reset, and fn must run the same operations on the
 * same tensors both times, else backward is MU_ERR_STATE and names the first difference. Calls nest. Of the tensors made
 * inside, the result and those given to mu_tensor_retain can be used afterwards. Where nothing is recorded (no_grad) it
 * is fn alone. NULL on error. See mu_module_checkpoint for doing it to modules of a tree. */
MU_API mu_tensor *mu_checkpoint(mu_tape *t, mu_forward_fn fn, void *self, mu_tensor *x);
/* The same with several inputs and outputs. fn sets each of out, to NULL where it has nothing there. */
typedef mu_status (*mu_segment_fn)(void *self, mu_tape *t, mu_tensor *const *in, int in_count, mu_tensor **out,
                                   int out_count);
MU_API mu_status mu_checkpoint_many(mu_tape *t, mu_segment_fn fn, void *self, mu_tensor *const *in, int in_count,
                                    mu_tensor **out, int out_count) MU_MUST_USE;

/* Bytes of tensors and temporaries that the tape holds now, and its peak since it was made. */
MU_API size_t mu_tape_bytes(const mu_tape *t);
MU_API size_t mu_tape_peak_bytes(const mu_tape *t);

/* Parameters. Made by modules (mu_module_parameter); visited by name. */
MU_API const char *mu_parameter_name(const mu_parameter *p);  /* path in the tree, e.g. "layer1.0.conv1.weight" */
MU_API mu_tensor *mu_parameter_tensor(mu_parameter *p);       /* the value, as an operand of operations */
MU_API bool mu_parameter_trainable(const mu_parameter *p);    /* false when frozen */
/* Gradient, of the parameter's shape, a view valid until the tree changes; NULL while the parameter has no gradient
 * (no loss reached it since gradients were last cleared). A zero gradient is not an absent one. */
MU_API mu_tensor *mu_parameter_grad(mu_parameter *p);

#ifdef __cplusplus
}
#endif
#endif
