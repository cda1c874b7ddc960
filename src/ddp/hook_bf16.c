/* Communication hook: gradients travel as bfloat16. Sums are float32, in rank order: a sum in bfloat16 would lose what
 * the ranks agree on, and with another order on another rank replicas would drift apart. */
#include "base/alloc.h"
#include "ddp/replica.h"
#include "tensor/tensor.h"
#include <muster/hooks.h>

/* Elements sent at a time: what all ranks sent has to be held. */
enum { PIECE = 1 << 18 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* mine: room for a piece as bfloat16. all: that for each rank; one: a piece as floats. */
static mu_status piece(mu_bucket *b, float *data, int64_t n, uint16_t *mine, uint16_t *all, float *one)
{
    mu_context *c = b->group->context;
    for (int64_t i = 0; i < n; i++) {
        data[i] = (float)((double)data[i] / b->divisor);
    }
    mu_status s = mui_from_float(c, MU_BF16, n, data, mine);
    s = s == MU_OK ? mu_all_gather(b->group, mine, all, (size_t)n * sizeof(*mine)) : s;
    s = s == MU_OK ? mui_to_float(c, MU_BF16, n, all, data) : s;
    for (int r = 1; r < mu_group_size(b->group) && s == MU_OK; r++) {
        s = mui_to_float(c, MU_BF16, n, all + (int64_t)r * n, one);
        for (int64_t i = 0; i < n; i++) {
            data[i] += one[i];
        }
    }
    return s;
}

static mu_status bf16_hook(void *user, mu_bucket *b)
{
    (void)user;
    mu_context *c = b->group->context;
    size_t n = (size_t)least(PIECE, b->elements);
    uint16_t *mine = mui_calloc(c, n, sizeof(*mine));
    uint16_t *all = mui_calloc(c, n * (size_t)mu_group_size(b->group), sizeof(*all));
    float *one = mui_calloc(c, n, sizeof(*one));
    mu_status s = mine != NULL && all != NULL && one != NULL ? MU_OK : MU_ERR_NOMEM;
    for (int64_t at = 0; at < b->elements && s == MU_OK; at += PIECE) {
        s = piece(b, b->data + at, least(PIECE, b->elements - at), mine, all, one);
    }
    mui_free(c, mine);
    mui_free(c, all);
    mui_free(c, one);
    return s;
}

mu_status mu_ddp_set_bf16(mu_ddp *d)
{
    return mu_ddp_set_hook(d, "bf16", bf16_hook, NULL);
}
