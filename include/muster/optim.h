/* Optimisers and schedules, with PyTorch's arithmetic. An optimiser follows its tree: after a change of the tree, the
 * next step keeps the state of parameters that are still there and starts new ones at zero. Parameters without
 * gradient are skipped: no decay, no momentum. */
#ifndef MUSTER_OPTIM_H
#define MUSTER_OPTIM_H

#include <muster/group.h>
#include <muster/tape.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_optimizer mu_optimizer;

/* State shared by ranks (ZeRO stage 1, torch's ZeroRedundancyOptimizer): with `shard`, each rank of that group keeps the
 * state of its own part of every parameter, updates that part, and gets the others' from their ranks. The parameters
 * are those of an optimiser without it, bit for bit; the state takes a rank's share of the memory; and no more travels,
 * since a ddp over the same group then only brings a rank its own part of the mean (docs/semantics.md).
 *
 * Of such an optimiser, making it, mu_optimizer_step, mu_clip_grad_norm, and saving and loading are collective over the
 * group: all ranks call them. Gradients must come from reductions over that group. After one, a rank has the mean in
 * its own parts alone, and elsewhere what it brought itself: mu_ddp_gather_gradients completes them, for reading.
 * All optimisers of a tree share over one group, or none does (MU_ERR_STATE). NULL, or a group of one: nothing is shared.
 * The group is to outlive the optimiser. */

typedef struct mu_sgd_options {
    float momentum;
    float dampening;
    float weight_decay;
    bool nesterov;
    mu_group *shard; /* state is shared over its ranks, see above; NULL: each rank has all of it */
} mu_sgd_options;
/* Owned by the context. root may be a part of a tree: then only its parameters are updated, and their gradients
 * cleared. */
MU_API mu_optimizer *mu_sgd(mu_module *root, float lr, const mu_sgd_options *options);

typedef struct mu_adam_options {
    float beta1;        /* 0: 0.9; for a true zero give a tiny value */
    float beta2;        /* 0: 0.999 */
    float eps;          /* 0: 1e-8 */
    float weight_decay; /* mu_adam: added to the gradient, default 0. mu_adamw: decoupled, 0: 0.01, negative: none */
    mu_group *shard;    /* state is shared over its ranks, see above; NULL: each rank has all of it */
} mu_adam_options;
MU_API mu_optimizer *mu_adam(mu_module *root, float lr, const mu_adam_options *options);
MU_API mu_optimizer *mu_adamw(mu_module *root, float lr, const mu_adam_options *options);

/* Parameter groups: parameters whose name matches the glob get their own learning rate factor and weight decay. The
 * last matching group counts. */
typedef struct mu_param_group {
    const char *pattern;    /* copied */
    float lr_factor;        /* times the optimiser's learning rate; 0: 1; negative: 0 (no update) */
    float weight_decay;     /* 0: the optimiser's; negative: none */
} mu_param_group;
MU_API mu_status mu_optimizer_add_group(mu_optimizer *o, const mu_param_group *group) MU_MUST_USE;

/* Updates every parameter that has a gradient, then clears all gradients (unless keep_grad was set). Not collective:
 * equal gradients give equal parameters. With shared state it is, and blocks; ranks whose gradients or settings differ
 * in kind are MU_ERR_COMM, and gradients that no reduction brought together MU_ERR_STATE. */
MU_API mu_status mu_optimizer_step(mu_optimizer *o) MU_MUST_USE;
MU_API void mu_optimizer_keep_grad(mu_optimizer *o, bool keep);
/* One that is negative or not finite is MU_ERR_ARG of the context, and changes nothing. */
MU_API void mu_optimizer_set_lr(mu_optimizer *o, float lr);
MU_API float mu_optimizer_lr(const mu_optimizer *o);
MU_API int64_t mu_optimizer_steps(const mu_optimizer *o);
/* Bytes of state that this rank keeps (momenta, averages), and how many ranks share all of it: 1 without `shard`. */
MU_API size_t mu_optimizer_state_bytes(const mu_optimizer *o);
MU_API int mu_optimizer_ranks(const mu_optimizer *o);
MU_API void mu_optimizer_free(mu_optimizer *o);

/* Scales all gradients of root so that their joint 2-norm is at most max_norm, as torch.nn.utils.clip_grad_norm_;
 * *norm (may be NULL) is the norm before. A norm that is not finite leaves gradients alone and is MU_ERR_STATE. Collective
 * where root's optimisers share state; the norm is then the same to the bit. */
MU_API mu_status mu_clip_grad_norm(mu_module *root, float max_norm, float *norm) MU_MUST_USE;

/* Schedules are pure functions of the step, so there is nothing to save or resume. */
typedef enum mu_schedule_kind {
    MU_SCHEDULE_CONSTANT = 0,
    /* Steps are counted from the end of the warm-up, as PyTorch's SequentialLR of LinearLR and then: */
    MU_SCHEDULE_STEP,   /* times gamma every step_size steps (StepLR) */
    MU_SCHEDULE_COSINE  /* from lr to min_lr at total_steps, half a cosine (CosineAnnealingLR); min_lr from then on */
} mu_schedule_kind;
typedef struct mu_schedule {
    mu_schedule_kind kind;
    float lr;              /* base learning rate */
    int64_t warmup_steps;  /* linear from lr/warmup_steps up to lr over the first steps; then the schedule proper */
    int64_t step_size;
    float gamma;           /* 0: 0.1 */
    int64_t total_steps;   /* of the whole run, warm-up included */
    float min_lr;
} mu_schedule;
/* Learning rate of step (from 0). */
MU_API float mu_schedule_lr(const mu_schedule *s, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
