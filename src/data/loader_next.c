/* From the loader's memory to tensors on a tape. */
#include "data/loader.h"

#include <string.h>

bool mu_loader_next(mu_loader *l, mu_tape *t, mu_batch *out)
{
    if (l == NULL || mui_failed(l->context)) {
        return false;
    }
    if (t == NULL || out == NULL) {
        mui_fail(l->context, MU_ERR_ARG, "mu_loader_next needs a tape and a place for the batch");
        return false;
    }
    mui_loaded loaded;
    if (!mui_loader_take(l, &loaded)) {
        return false;
    }
    mu_batch b = {.samples = loaded.samples, .total_samples = loaded.total_samples, .indices = loaded.indices};
    if (b.samples > 0) {
        mu_dims dims = {.ndim = l->dataset->dims.ndim + 1};
        dims.dim[0] = b.samples;
        memcpy(dims.dim + 1, l->dataset->dims.dim, sizeof(dims.dim) - sizeof(dims.dim[0]));
        b.x = mu_tensor_from(t, dims, loaded.x);
        b.y = mu_tensor_from_i64(t, MU_DIMS(b.samples), loaded.y);
        if (b.x == NULL || b.y == NULL) {
            return false;
        }
    }
    *out = b;
    return true;
}
