/* Buffers: float ones (running statistics) become the mean over ranks, or rank 0's; integer ones (numbers of batches)
 * the largest, since a rank without a batch has not counted it.
 *
 * The mean is taken in double: that of equal floats is then this float, whatever the number of ranks (in float, three
 * times a, divided by three, may be a's neighbour). What all ranks have alike, as synchronised batch norm's statistics
 * and those of frozen layers, is so not moved by reductions. */
#include "ddp/replica.h"

#include <math.h>
#include <string.h>

static int64_t elements_of(const mu_tensor *t)
{
    return mui_dims_elements(t->dims);
}

void mui_ddp_counters_get(mu_ddp *d)
{
    int64_t n = 0;
    for (int64_t i = 0; i < d->counter_count; i++) {
        memcpy(d->counter_values + n, d->counters[i]->data, (size_t)elements_of(d->counters[i]) * sizeof(int64_t));
        n += elements_of(d->counters[i]);
    }
}

void mui_ddp_counters_set(mu_ddp *d)
{
    int64_t n = 0;
    for (int64_t i = 0; i < d->counter_count; i++) {
        memcpy(d->counters[i]->data, d->counter_values + n, (size_t)elements_of(d->counters[i]) * sizeof(int64_t));
        n += elements_of(d->counters[i]);
    }
}

/* A step that is given up, or will be for its gradients, may have met a batch that spoilt the statistics: what is not
 * finite any more goes back to what it was after the last reduction, or it would spread to all ranks for good. */
static void repair(mu_ddp *d)
{
    float *x = d->store->buffer_slab;
    for (size_t i = 0; i < d->store->buffer_floats; i++) {
        if (!isfinite(x[i])) {
            x[i] = d->buffer_copy[i];
        }
    }
}

void mui_ddp_buffers_start(mu_ddp *d, bool repairs, mui_buffer_requests *q)
{
    q->floats = q->counters = NULL;
    mui_store *s = d->store;
    if (repairs) {
        repair(d);
    }
    if (d->options.buffers_from_rank0) {
        return;
    }
    if (s->buffer_floats > 0) {
        for (size_t i = 0; i < s->buffer_floats; i++) {
            d->buffer_sums[i] = (double)s->buffer_slab[i];
        }
        q->floats = mui_reducer_start_other(d->reducer, d->buffer_sums, (int64_t)s->buffer_floats, MU_F64, MU_MEAN);
    }
    if (d->counter_elements > 0) {
        mui_ddp_counters_get(d);
        q->counters = mui_reducer_start_other(d->reducer, d->counter_values, d->counter_elements, MU_I64, MU_MAX);
    }
}

mu_status mui_ddp_buffers_finish(mu_ddp *d, mui_buffer_requests *q)
{
    mui_store *s = d->store;
    mu_status status = MU_OK, other = MU_OK;
    if (d->options.buffers_from_rank0) {
        if (s->buffer_floats > 0) {
            status = mu_broadcast(d->group, s->buffer_slab, s->buffer_floats * sizeof(float), 0);
        }
        if (status == MU_OK && d->counter_elements > 0) {
            mui_ddp_counters_get(d);
            other = mu_broadcast(d->group, d->counter_values, (size_t)d->counter_elements * sizeof(int64_t), 0);
            mui_ddp_counters_set(d);
        }
    } else {
        /* Both are waited for even when the first failed: they write to memory of ours until then. */
        status = q->floats != NULL ? mu_request_wait(q->floats) : MU_OK;
        other = q->counters != NULL ? mu_request_wait(q->counters) : MU_OK;
        for (size_t i = 0; q->floats != NULL && status == MU_OK && i < s->buffer_floats; i++) {
            s->buffer_slab[i] = (float)d->buffer_sums[i];
        }
        if (q->counters != NULL && other == MU_OK) {
            mui_ddp_counters_set(d);
        }
    }
    if (status == MU_OK && s->buffer_floats > 0) {
        memcpy(d->buffer_copy, s->buffer_slab, s->buffer_floats * sizeof(float));
    }
    return status != MU_OK ? status : other;
}
