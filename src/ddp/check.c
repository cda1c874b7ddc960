/* Are the replicas equal? By hash; where they are not, by the hash of each parameter and buffer. */
#include "base/alloc.h"
#include "base/rng.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

/* Eight bytes at a time: this runs over the whole model. */
uint64_t mui_hash_floats(uint64_t h, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 2 <= n; i += 2) {
        uint64_t w;
        memcpy(&w, x + i, sizeof(w));
        h = (h ^ w) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    if (i < n) {
        uint32_t w;
        memcpy(&w, x + i, sizeof(w));
        h = (h ^ w) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static size_t item_count(const mu_ddp *d)
{
    return (size_t)(d->store->count + d->store->buffer_count + d->counter_count);
}

static void hash_items(const mu_ddp *d, uint64_t *out)
{
    const mui_store *s = d->store;
    size_t k = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        out[k++] = mui_hash_floats(MUI_HASH_START, s->values + p->offset, p->capacity);
    }
    for (int64_t i = 0; i < s->buffer_count; i++) {
        const mu_tensor *b = s->buffers[i];
        out[k++] = mui_hash_floats(MUI_HASH_START, (const float *)b->data, (size_t)mui_dims_elements(b->dims));
    }
    for (int64_t i = 0; i < d->counter_count; i++) {
        const mu_tensor *b = d->counters[i];
        out[k++] = mui_hash_bytes(MUI_HASH_START, b->data, (size_t)mui_dims_elements(b->dims) * sizeof(int64_t));
    }
}

/* The item as it is looked for in the tree, to learn an integer buffer's name. */
typedef struct wanted {
    const mu_tensor *value;
    char name[300];
} wanted;

static bool is_wanted(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    wanted *w = user;
    (void)p;
    if (value == w->value) {
        snprintf(w->name, sizeof(w->name), "%s", name);
    }
    return value != w->value;
}

static const mu_tensor *item_value(const mu_ddp *d, size_t i)
{
    size_t params = (size_t)d->store->count, buffers = (size_t)d->store->buffer_count;
    return i < params             ? &d->store->parameters[i]->value
           : i < params + buffers ? d->store->buffers[i - params]
                                  : d->counters[i - params - buffers];
}

static void item_name(const mu_ddp *d, size_t i, char *out, size_t size)
{
    size_t params = (size_t)d->store->count, buffers = (size_t)d->store->buffer_count;
    if (i < params + buffers) {
        snprintf(out, size, "%s", i < params ? d->store->parameters[i]->name : d->store->buffer_names[i - params]);
        return;
    }
    wanted w = {.value = item_value(d, i), .name = "an integer buffer"};
    mu_status s = mu_module_each_state(d->root, is_wanted, &w);
    snprintf(out, size, "%s", s >= 0 ? w.name : "an integer buffer");
}

/* Where a rank first differs from rank 0, in row-major order; -1: nowhere. */
typedef struct difference {
    int64_t at;
    uint64_t here, zero; /* bits of the element on this rank, and on rank 0 */
} difference;

static void write_value(uint64_t bits, bool integer, char *out, size_t size)
{
    if (integer) {
        int64_t x;
        memcpy(&x, &bits, sizeof(x));
        snprintf(out, size, "%lld", (long long)x);
    } else {
        uint32_t low = (uint32_t)bits;
        float x;
        memcpy(&x, &low, sizeof(x));
        snprintf(out, size, "%.9g (0x%08x)", (double)x, low);
    }
}

/* Rank 0's values go to all, each rank compares its own, and all learn what each found. Collective. */
static mu_status find_element(mu_ddp *d, const mu_tensor *value, char *out, size_t size)
{
    mu_context *c = d->context;
    bool integer = value->dtype == MU_I64;
    int64_t n = mui_dims_elements(value->dims);
    size_t width = integer ? sizeof(int64_t) : sizeof(float), ranks = (size_t)mu_group_size(d->group);
    char *mine = mui_calloc(c, (size_t)n + 1, width), *zero = mui_calloc(c, (size_t)n + 1, width);
    difference *all = mui_calloc(c, ranks, sizeof(*all)), own = {.at = -1};
    mu_status s = mine != NULL && zero != NULL && all != NULL ? MU_OK : MU_ERR_NOMEM;
    if (s == MU_OK && integer) {
        memcpy(mine, value->data, (size_t)n * width);
    } else if (s == MU_OK) {
        s = mu_tensor_read(value, (float *)(void *)mine, n);
    }
    if (s != MU_OK) {
        s = mui_ddp_desert(d, s);
        goto done;
    }
    memcpy(zero, mine, (size_t)n * width);
    s = mu_broadcast(d->group, zero, (size_t)n * width, 0);
    for (int64_t i = 0; i < n && own.at < 0; i++) {
        if (memcmp(mine + (size_t)i * width, zero + (size_t)i * width, width) != 0) {
            own.at = i;
            memcpy(&own.here, mine + (size_t)i * width, width);
            memcpy(&own.zero, zero + (size_t)i * width, width);
        }
    }
    s = s < 0 ? s : mu_all_gather(d->group, &own, all, sizeof(own));
    if (s < 0) {
        s = mui_ddp_break(d, s);
        goto done;
    }
    snprintf(out, size, "only in its padding");
    for (size_t r = 1; r < ranks; r++) {
        if (all[r].at >= 0) {
            char here[64], there[64];
            write_value(all[r].here, integer, here, sizeof(here));
            write_value(all[r].zero, integer, there, sizeof(there));
            snprintf(out, size, "element %lld is %s on rank %zu and %s on rank 0", (long long)all[r].at, here, r, there);
            break;
        }
    }
done:
    mui_free(c, mine);
    mui_free(c, zero);
    mui_free(c, all);
    return s;
}

/* all: hashes of every item, rank after rank. */
static mu_status name_first(mu_ddp *d, const uint64_t *all, size_t n)
{
    size_t size = (size_t)mu_group_size(d->group), items = 0;
    int64_t first = -1;
    for (size_t i = 0; i < n; i++) {
        bool differs = false;
        for (size_t r = 1; r < size; r++) {
            differs = differs || all[r * n + i] != all[i];
        }
        items += differs;
        first = differs && first < 0 ? (int64_t)i : first;
    }
    if (first < 0) {
        return mui_fail(d->context, MU_ERR_INTERNAL, "ddp `%s`: replicas differ, but in no parameter", d->name);
    }
    char name[300], element[300];
    mu_status found = find_element(d, item_value(d, (size_t)first), element, sizeof(element));
    if (found < 0) {
        return found;
    }
    item_name(d, (size_t)first, name, sizeof(name));
    mui_text ranks;
    mui_text_init(&ranks, d->context);
    for (size_t r = 1; r < size; r++) {
        if (all[r * n + (size_t)first] != all[first]) {
            mui_text_add(&ranks, "%s%zu", ranks.length > 0 ? ", " : "", r);
        }
    }
    mu_status s = mui_fail(
        d->context, MU_ERR_COMM,
        "ddp `%s`: replicas differ after %llu reductions: `%s` is not the same on rank %s as on rank 0: "
        "%s (%zu of %zu parameters and buffers differ)",
        d->name, (unsigned long long)d->reductions, name, mui_text_get(&ranks), element, items, n);
    mui_text_free(&ranks);
    return s;
}

static mu_status compare_items(mu_ddp *d)
{
    mu_context *c = d->context;
    size_t n = item_count(d), size = (size_t)mu_group_size(d->group);
    uint64_t *all = mui_calloc(c, n * (size + 1), sizeof(*all)); /* gathered, then the own */
    if (all == NULL) {
        return mui_ddp_desert(d, MU_ERR_NOMEM);
    }
    uint64_t *own = all + n * size;
    hash_items(d, own);
    uint64_t total = mui_hash_bytes(MUI_HASH_START, own, n * sizeof(*own));
    mu_status s = mu_all_gather(d->group, &total, all, sizeof(total));
    bool equal = true;
    for (size_t r = 1; r < size; r++) {
        equal = equal && all[r] == all[0];
    }
    if (s == MU_OK && !equal) {
        s = mu_all_gather(d->group, own, all, n * sizeof(*own));
        s = s == MU_OK ? name_first(d, all, n) : mui_ddp_break(d, s);
    } else if (s < 0) {
        s = mui_ddp_break(d, s);
    }
    mui_free(c, all);
    return s;
}

mu_status mu_ddp_check(mu_ddp *d)
{
    if (d == NULL) {
        return MU_ERR_ARG;
    }
    mui_aside aside;
    mu_status s = mui_ddp_meet(d, MUI_KIND_CHECK, "mu_ddp_check", &aside);
    if (s == MU_OK) {
        s = compare_items(d);
    }
    if (s == MU_OK) {
        mui_ddp_count_anew(d);
    }
    return mui_ddp_part(d, &aside, s);
}
