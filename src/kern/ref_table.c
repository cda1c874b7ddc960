/* The reference's row of the kernel table. It knows no layout but plain, so a reorder never comes here. */
#include "kern/engine.h"

static mu_status reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src, const mui_layout *to,
                         float *dst)
{
    (void)dims, (void)src, (void)dst;
    return mui_fail(e->context, MU_ERR_INTERNAL, "reorder from %s to %s: the reference knows plain only",
                    mui_layout_name(from), mui_layout_name(to));
}

const mui_kernels mui_ref_kernels = {
    .conv2d_plan = mui_ref_conv2d_plan,
    .reorder = reorder,
    .gemm = mui_ref_gemm,
    .norm_forward = mui_ref_norm_forward,
    .norm_backward = mui_ref_norm_backward,
    .norm_forward_eval = mui_ref_norm_forward_eval,
    .pool_workspace_bytes = mui_ref_pool_workspace_bytes,
    .pool_forward = mui_ref_pool_forward,
    .pool_backward = mui_ref_pool_backward,
};
