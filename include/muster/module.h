/* Modules: a tree with dotted names that holds parameters and buffers, as torch.nn.Module.
 *
 * A user's own module is a struct and a forward function: see examples/custom_module.c. Parameters get memory and
 * initial values when the root of their tree is first used (forward, optimiser, load, save, wrap, or asking for a
 * parameter or buffer by path): initial values are keyed by (seed, path), so they do not depend on the order in which
 * modules were built. */
#ifndef MUSTER_MODULE_H
#define MUSTER_MODULE_H

#include <muster/tape.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_module_options {
    /* mu_forward_fn of <muster/tape.h>: computes the module's output. Called with the module path pushed, so that errors
     * and reports name it. Calls children with mu_forward. NULL: children in order, as torch.nn.Sequential. */
    mu_forward_fn forward;
    void *self;                   /* passed to forward; NULL: the mu_module itself */
    void (*destroy)(void *self);  /* called once when the module is freed; NULL: nothing */
    const char *extra;            /* text for printing, e.g. "in=3, out=16"; copied; may be NULL */
} mu_module_options;

/* kind is the class name for printing and errors, e.g. "BasicBlock"; copied. The module belongs to the context until
 * it is added to a parent, then to the parent. Takes self over at once: where making it fails, destroy has been called. */
MU_API mu_module *mu_module_new(mu_context *c, const char *kind, const mu_module_options *options);

typedef enum mu_init_kind {
    MU_INIT_ZEROS = 0,
    MU_INIT_CONSTANT,         /* value */
    MU_INIT_UNIFORM,          /* in [-value, value] */
    MU_INIT_NORMAL,           /* standard deviation value */
    MU_INIT_KAIMING_UNIFORM,  /* PyTorch's default of Linear and Conv: bound sqrt(6 / ((1 + value^2) fan_in)) */
    MU_INIT_KAIMING_NORMAL,   /* std sqrt(2 / fan_out), fan_out = dim 0 times the receptive field (torchvision's) */
    MU_INIT_KAIMING_NORMAL_IN /* std sqrt(2 / fan_in), PyTorch's kaiming_normal_ (the public CIFAR ResNets) */
} mu_init_kind;
typedef struct mu_init {
    mu_init_kind kind;
    float value;
} mu_init;

/* Registers a parameter under name (no dots, unique in the module). It belongs to the module. */
MU_API mu_parameter *mu_module_parameter(mu_module *m, const char *name, mu_dims dims, mu_init init);
/* A tensor that is state but not trained (running statistics): saved, loaded and averaged, never given a gradient.
 * dtype MU_F32 or MU_I64. Returns the tensor, owned by the module; NULL on error. */
MU_API mu_tensor *mu_module_buffer(mu_module *m, const char *name, mu_dims dims, mu_dtype dtype, float fill);
/* Registers, in m under name, a parameter that another module of the same tree already holds (tied weights). */
MU_API mu_status mu_module_share(mu_module *m, const char *name, mu_parameter *p) MU_MUST_USE;

/* Adds a child under name (no dots, unique); the parent owns it from then on. NULL child: a failure upstream. */
MU_API mu_status mu_module_add(mu_module *parent, const char *name, mu_module *child) MU_MUST_USE;
/* Replaces the module at path (e.g. "fc", "layer4.1.conv2"); the old one is freed. Before or after wrapping or
 * making an optimiser: the next reduction and the next step see it. Between steps: what a tape holds of the old module
 * must not be used any more (mu_tape_reset). On failure nothing changed, and child is still the context's. */
MU_API mu_status mu_module_replace(mu_module *root, const char *path, mu_module *child);
MU_API mu_status mu_module_remove(mu_module *root, const char *path) MU_MUST_USE;
/* Borrowed; NULL when there is none (not an error). */
MU_API mu_module *mu_module_get(mu_module *root, const char *path);
MU_API mu_parameter *mu_module_get_parameter(mu_module *root, const char *path);
MU_API mu_tensor *mu_module_get_buffer(mu_module *root, const char *path);
MU_API const char *mu_module_kind(const mu_module *m);
MU_API void *mu_module_self(const mu_module *m);
MU_API mu_context *mu_module_context(const mu_module *m);

/* Patterns are shell globs over full names ("layer1.*", "*.bias", "*"); a pattern that matches no parameter is
 * MU_ERR_ARG. *count (may be NULL) is how many matched. Frozen parameters get no gradient and are not reduced. */
MU_API mu_status mu_module_freeze(mu_module *root, const char *pattern, int64_t *count) MU_MUST_USE;
MU_API mu_status mu_module_unfreeze(mu_module *root, const char *pattern, int64_t *count) MU_MUST_USE;

/* Training mode (the default) or evaluation mode of the module and all below it. */
MU_API void mu_module_train(mu_module *m, bool training);
MU_API bool mu_module_is_training(const mu_module *m);

/* Runs a module; up to 1,000 within each other. The first use of a tree, or of a changed one, lays out its memory. */
MU_API mu_tensor *mu_forward(mu_tape *t, mu_module *m, mu_tensor *x);

/* Runs a module as mu_checkpoint does: its values are dropped after the forward and made again in backward. */
MU_API mu_tensor *mu_checkpoint_forward(mu_tape *t, mu_module *m, mu_tensor *x);
/* Has mu_forward do that (on), or not any more, with each module below root whose path matches the glob: "layer1.*",
 * "layer?.?", "fc". Of modules within each other that match only the outermost is picked; another call may pick more
 * within it. A pattern that matches no module is MU_ERR_ARG. *count (may be NULL) is how many were picked. Not saved in
 * checkpoints; a replaced module's successor is not picked. Ranks need not agree. */
MU_API mu_status mu_module_checkpoint(mu_module *root, const char *pattern, bool on, int64_t *count) MU_MUST_USE;

/* Visits in PyTorch's state_dict order: each module's own parameters, then its buffers, then its children, all in
 * order of registration. A shared parameter is visited once, under its first name, by mu_module_each_parameter, and
 * under each name by mu_module_each_state. Return false from the callback to stop. */
typedef bool (*mu_parameter_fn)(void *user, const char *name, mu_parameter *p);
typedef bool (*mu_state_fn)(void *user, const char *name, mu_tensor *value, mu_parameter *p /* NULL: a buffer */);
MU_API mu_status mu_module_each_parameter(mu_module *root, mu_parameter_fn fn, void *user) MU_MUST_USE;
MU_API mu_status mu_module_each_state(mu_module *root, mu_state_fn fn, void *user) MU_MUST_USE;
MU_API int64_t mu_module_parameter_elements(mu_module *root); /* shared ones once */

/* Clears all gradients: afterwards every parameter has none. */
MU_API mu_status mu_module_zero_grad(mu_module *root);

/* Writes the tree as text, as Python's print(module), into out of size bytes (always terminated); returns the length
 * it would need without terminator. */
MU_API size_t mu_module_print(mu_module *root, char *out, size_t size);

#ifdef __cplusplus
}
#endif
#endif
