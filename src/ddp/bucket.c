/* A bucket's memory: zeros for what is absent, the tail that tells the others who takes part, and what comes back. */
#include "ddp/reducer_state.h"
#include "comm/reduce.h"

#include <math.h>
#include <string.h>

/* A bucket's tail holds, for each slice, one bit for each rank that contributed (MASK_BITS ranks to an element), then a
 * bit for each rank whose part was not finite, then this rank's samples in two parts. All are sums of small integers,
 * exact in a float; a mean divides them by the number of ranks, and rounding after multiplying back is exact again: the
 * error is below 2^MASK_BITS times a few ulps. */
enum { MASK_BITS = 20, SAMPLE_PARTS = 2, SAMPLE_LOW = 4096 };

int mui_reducer_words(const mu_group *g)
{
    return (mu_group_size(g) + MASK_BITS - 1) / MASK_BITS;
}

bool mui_mask_has(const uint32_t *mask, int rank)
{
    return (mask[rank / MASK_BITS] >> (rank % MASK_BITS)) & 1u;
}

size_t mui_reducer_tail(const mu_group *g, int64_t count)
{
    return (size_t)(count + 1) * (size_t)mui_reducer_words(g) + SAMPLE_PARTS;
}

static bool finite_f32(const float *x, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

static bool finite_f64(const double *x, size_t n)
{
    uint64_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bad |= (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
    }
    return bad == 0;
}

bool mui_all_finite(const void *x, mu_dtype type, size_t n)
{
    return type == MU_F64 ? finite_f64(x, n) : finite_f32(x, n);
}

static void put(void *tail, mu_dtype type, int64_t i, double value)
{
    if (type == MU_F64) {
        ((double *)tail)[i] = value;
    } else {
        ((float *)tail)[i] = (float)value;
    }
}

/* times: what a mean has to be multiplied by to be a sum again. */
static uint32_t get(const void *tail, mu_dtype type, int64_t i, int times)
{
    double value = type == MU_F64 ? ((const double *)tail)[i] : (double)((const float *)tail)[i];
    return (uint32_t)(value * times + 0.5);
}

void mui_bucket_fill(mui_reducer *r, const mui_slice_bucket *b)
{
    int rank = mu_group_rank(r->group), word = rank / MASK_BITS;
    size_t bytes = mu_dtype_bytes(b->dtype);
    double bit = (double)(1u << (rank % MASK_BITS));
    char *tail = r->slab + b->offset + b->elements * bytes;
    memset(tail, 0, b->tail * bytes);
    for (int64_t k = 0; k < b->count; k++) {
        if (r->states[b->first + k] != MUI_SLICE_ABSENT) {
            put(tail, b->dtype, k * r->words + word, bit);
            continue;
        }
        const mui_slice *s = &r->slices[b->first + k];
        memset(r->slab + s->offset, 0, s->elements * bytes);
    }
    if (r->how.look && !mui_all_finite(r->slab + b->offset, b->dtype, b->elements)) {
        put(tail, b->dtype, b->count * r->words + word, bit);
        r->launched_bad = true;
    }
    int64_t samples = (b->count + 1) * r->words;
    put(tail, b->dtype, samples, (double)(r->how.samples / SAMPLE_LOW));
    put(tail, b->dtype, samples + 1, (double)(r->how.samples % SAMPLE_LOW));
}

void mui_bucket_read_tail(mui_reducer *r, int64_t index)
{
    const mui_slice_bucket *b = &r->buckets[index];
    const char *tail = r->slab + b->offset + b->elements * mu_dtype_bytes(b->dtype);
    int times = r->how.weighted ? 1 : mu_group_size(r->group);
    for (int64_t k = 0; k < b->count * r->words; k++) {
        r->masks[b->first * r->words + k] = get(tail, b->dtype, k, times);
    }
    for (int w = 0; w < r->words; w++) {
        r->bad[index * r->words + w] = get(tail, b->dtype, b->count * r->words + w, times);
    }
    int64_t samples = (b->count + 1) * r->words;
    r->total_samples = (int64_t)get(tail, b->dtype, samples, times) * SAMPLE_LOW +
                       (int64_t)get(tail, b->dtype, samples + 1, times);
}

void mui_bucket_divide(void *data, mu_dtype type, size_t n, int64_t total_samples)
{
    if (type == MU_F64) {
        double *x = data, divisor = (double)total_samples;
        for (size_t i = 0; i < n; i++) {
            x[i] /= divisor;
        }
        return;
    }
    float *x = data, scale = 1.0F / (float)total_samples;
    for (size_t i = 0; i < n; i++) {
        x[i] *= scale;
    }
}

mui_part mui_reducer_part(const mui_reducer *r, const mui_slice_bucket *b, int part)
{
    size_t scattered = r->how.scatter ? (size_t)mui_scatter_of(b->elements, mu_group_size(r->group), b->dtype) : 0;
    size_t slice = scattered / (size_t)mu_group_size(r->group);
    return part == 0 ? (mui_part){(size_t)mu_group_rank(r->group) * slice, slice}
                     : (mui_part){scattered, b->elements - scattered};
}

/* The first slice of the bucket with a value in that part that is not finite, -1 if there is none. */
static int64_t bad_in_part(const mui_reducer *r, const mui_slice_bucket *b, mui_part part)
{
    size_t bytes = mu_dtype_bytes(b->dtype);
    const char *data = r->slab + b->offset;
    if (mui_all_finite(data + part.from * bytes, b->dtype, part.count)) {
        return -1;
    }
    for (int64_t i = b->first; i < b->first + b->count; i++) {
        size_t from = (r->slices[i].offset - b->offset) / bytes, to = from + r->slices[i].elements;
        from = from > part.from ? from : part.from;
        to = to < part.from + part.count ? to : part.from + part.count;
        if (from < to && !mui_all_finite(data + from * bytes, b->dtype, to - from)) {
            return i;
        }
    }
    return b->first; /* between slices, where nothing is */
}

int64_t mui_reducer_find_bad(const mui_reducer *r)
{
    for (int64_t k = 0; k < r->bucket_count; k++) {
        int64_t own = bad_in_part(r, &r->buckets[k], mui_reducer_part(r, &r->buckets[k], 0));
        int64_t rest = bad_in_part(r, &r->buckets[k], mui_reducer_part(r, &r->buckets[k], 1));
        if (own >= 0 || rest >= 0) {
            return own < 0 || (rest >= 0 && rest < own) ? rest : own;
        }
    }
    return -1;
}
