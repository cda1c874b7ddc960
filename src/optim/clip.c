/* Clipping gradients by their joint norm. */
#include "optim/optimizer_impl.h"
#include "base/profile.h"

#include <math.h>

static bool counts(mui_source *source, const mu_parameter *p)
{
    return p->grad_state != MUI_GRAD_NONE && !p->frozen && source->contains(source, p);
}

mu_status mu_clip_grad_norm(mu_module *root, float max_norm, float *norm)
{
    if (root == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "clipping gradients: the module is NULL");
    }
    mui_source *source = (mui_source *)root;
    if (!(max_norm >= 0)) {
        return mui_fail(source->context, MU_ERR_ARG, "clipping gradients: the norm %g is not a bound",
                        (double)max_norm);
    }
    mui_store *s = mui_store_of(root);
    if (s == NULL) {
        return mu_context_status(source->context);
    }
    /* Parameter by parameter in registration order, so that the sum depends neither on the cut into buckets nor on the
     * rank: every rank scales by the same bits. Padding is zero and adds nothing. */
    mui_timer timer;
    mui_timer_start(&timer, source->context, MUI_KIND_OPTIMIZER);
    double squares = 0;
    const mu_parameter *bad = NULL;
    mu_status status = s->sharded_over != NULL ? mui_shard_squares(s, counts, source, &squares, &bad) : MU_OK;
    for (int64_t i = 0; i < s->count && s->sharded_over == NULL; i++) {
        const mu_parameter *p = s->parameters[i];
        if (counts(source, p)) {
            squares += mui_sum_squares((int64_t)p->capacity, s->grads + p->offset);
            bad = bad == NULL && !isfinite(squares) ? p : bad;
        }
    }
    mui_timer_stop(&timer, 0, 0);
    if (status != MU_OK) {
        return status;
    }
    if (bad != NULL) {
        return mui_fail(source->context, MU_ERR_STATE,
                        "clipping gradients: their norm is %g, first because of parameter %s", sqrt(squares),
                        bad->name);
    }
    float total = (float)sqrt(squares);
    float factor = max_norm / (total + 1e-6f); /* as PyTorch */
    mui_timer_start(&timer, source->context, MUI_KIND_OPTIMIZER);
    for (int64_t i = 0; factor < 1 && i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        if (counts(source, p)) {
            mui_scale_inplace((int64_t)p->capacity, s->grads + p->offset, factor);
        }
    }
    mui_timer_stop(&timer, 0, 0);
    if (norm != NULL) {
        *norm = total;
    }
    return MU_OK;
}
