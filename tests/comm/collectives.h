/* What every kind of group must do right: bodies of ranks, run by the tests of threads and of processes. */
#ifndef TEST_COLLECTIVES_H
#define TEST_COLLECTIVES_H

#include "comm/group.h"
#include "comm/region.h"
#include "ranks.h"

#include <math.h>

static const mu_dtype test_types[] = {MU_F32, MU_F64, MU_I32, MU_I64};
static const int64_t test_counts[] = {0, 1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, 1000, 1023, 4097, 65537, 262145, 600001};

static size_t type_bytes(mu_dtype t)
{
    return t == MU_F32 || t == MU_I32 ? 4 : 8;
}

/* Elements from <= i < to of what a rank brings. */
static void fill_range(void *data, mu_dtype t, int64_t from, int64_t to, int rank, uint64_t salt)
{
    static const double scales[] = {1e-3, 1e-2, 1e-1, 1, 1e1, 1e2, 1e3};
    for (int64_t i = from; i < to; i++) {
        uint64_t bits = mix((uint64_t)rank * 1000003u + (uint64_t)i + salt * 77777u);
        double v = (double)(int64_t)bits / 9.3e17 * scales[bits % 7];
        bool nan = bits % 211 == 0;
        switch (t) {
        case MU_F32: ((float *)data)[i] = nan ? NAN : (float)v; break;
        case MU_F64: ((double *)data)[i] = nan ? NAN : v; break;
        case MU_I32: ((int32_t *)data)[i] = (int32_t)bits; break;
        default: ((int64_t *)data)[i] = (int64_t)bits; break;
        }
    }
}

static void fill(void *data, mu_dtype t, int64_t n, int rank, uint64_t salt)
{
    fill_range(data, t, 0, n, rank, salt);
}

/* The reference: element by element, rank after rank, written without any of the library. */
#define REFERENCE(type, acc, value, r, op, size)                                                                       \
    do {                                                                                                               \
        type v_ = (value);                                                                                             \
        if ((r) == 0) {                                                                                                \
            acc = v_;                                                                                                  \
        } else if ((op) == MU_SUM || (op) == MU_MEAN) {                                                                \
            acc = acc + v_;                                                                                            \
        } else if ((op) == MU_MAX) {                                                                                   \
            acc = (v_ != v_ || v_ > acc) ? v_ : acc;                                                                   \
        } else {                                                                                                       \
            acc = (v_ != v_ || v_ < acc) ? v_ : acc;                                                                   \
        }                                                                                                              \
        if ((op) == MU_MEAN && (r) == (size)-1) {                                                                      \
            acc = acc / (type)(size);                                                                                  \
        }                                                                                                              \
    } while (0)

static void reference(void *out, void *const *in, mu_dtype t, mu_reduce_op op, int size, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float f = 0;
        double d = 0;
        uint32_t u = 0;
        int32_t s = 0;
        uint64_t ul = 0;
        int64_t sl = 0;
        for (int r = 0; r < size; r++) {
            if (t == MU_F32) {
                REFERENCE(float, f, ((float *)in[r])[i], r, op, size);
            } else if (t == MU_F64) {
                REFERENCE(double, d, ((double *)in[r])[i], r, op, size);
            } else if (t == MU_I32) {
                int32_t v = ((int32_t *)in[r])[i];
                u += (uint32_t)v; /* wraps */
                s = r == 0 || (op == MU_MAX ? v > s : v < s) ? v : s;
            } else {
                int64_t v = ((int64_t *)in[r])[i];
                ul += (uint64_t)v;
                sl = r == 0 || (op == MU_MAX ? v > sl : v < sl) ? v : sl;
            }
        }
        if (t == MU_F32) {
            ((float *)out)[i] = f;
        } else if (t == MU_F64) {
            ((double *)out)[i] = d;
        } else if (t == MU_I32) {
            ((int32_t *)out)[i] = op == MU_SUM ? (int32_t)u : s;
        } else {
            ((int64_t *)out)[i] = op == MU_SUM ? (int64_t)ul : sl;
        }
    }
}

typedef struct all_inputs {
    void *in[16];
    void *want;
} all_inputs;

static inline all_inputs inputs_new(int size, size_t bytes)
{
    all_inputs a = {.want = malloc(bytes + 1)};
    for (int r = 0; r < size; r++) {
        a.in[r] = malloc(bytes + 1);
    }
    return a;
}

static void inputs_free(all_inputs *a, int size)
{
    for (int r = 0; r < size; r++) {
        free(a->in[r]);
    }
    free(a->want);
}

/* All sizes, types and operations; the group's memory, other memory, and memory of both kinds on different ranks. */
static inline void body_all_reduce(mu_group *g, int rank, int size, void *arg)
{
    int64_t most = *(const int64_t *)arg;
    size_t bytes = (size_t)most * 8;
    char *shared = mu_group_alloc(g, bytes + 64), *own = malloc(bytes + 64);
    all_inputs a = inputs_new(size, bytes);
    CHECK(shared != NULL, "alloc");
    for (size_t k = 0; k < sizeof(test_counts) / sizeof(*test_counts) && test_counts[k] <= most; k++) {
        for (int way = 0; way < 3; way++) {
            mu_dtype t = test_types[(k + (size_t)way) % 4];
            mu_reduce_op op = (mu_reduce_op)(mix(k * 3 + (size_t)way) % 4);
            op = op == MU_MEAN && (t == MU_I32 || t == MU_I64) ? MU_SUM : op;
            int64_t n = test_counts[k];
            char *data = way == 0 || (way == 2 && rank % 2 == 0) ? shared : own;
            data += way == 2 ? 8 : 0;
            for (int r = 0; r < size; r++) {
                fill(a.in[r], t, n, r, k * 3 + (size_t)way);
            }
            reference(a.want, a.in, t, op, size, n);
            memcpy(data, a.in[rank], (size_t)n * type_bytes(t));
            nap_randomly(k * 64 + (size_t)way * 16 + (size_t)rank, 300);
            mu_status s = mu_all_reduce(g, data, n, t, op);
            CHECK(s == MU_OK, "status %d", s);
            CHECK(memcmp(data, a.want, (size_t)n * type_bytes(t)) == 0, "rank %d of %d: %lld elements, type %d, op %d, way %d",
                  rank, size, (long long)n, (int)t, (int)op, way);
        }
    }
    mu_group_free(g, shared);
    free(own);
    inputs_free(&a, size);
}

/* All-reduces of which each rank only needs a slice and the end: those are right, whatever kind of memory; and in the
 * group's memory the other slices are left alone, so that nothing travels for them. A length that cannot be cut into
 * equal slices of whole cache lines is reduced everywhere. */
static inline void body_scattered(mu_group *g, int rank, int size, void *arg)
{
    static const int64_t lines[] = {1, 3, 64, 1000, 9000}, ends[] = {0, 5, 300};
    int64_t most = arg != NULL ? *(const int64_t *)arg : 9000;
    size_t bytes = (size_t)(9000 * size * 64 + 4096);
    char *shared = mu_group_alloc(g, bytes), *own = malloc(bytes);
    all_inputs a = inputs_new(size, bytes);
    for (size_t k = 0; k < 15 && lines[k / 3] <= most; k++) {
        for (int way = 0; way < 3; way++) {
            mu_dtype t = (k + (size_t)way) % 2 == 0 ? MU_F32 : MU_F64;
            int64_t scattered = lines[k / 3] * size * (64 / (int64_t)type_bytes(t)) + (way == 2 ? 1 : 0);
            int64_t n = scattered + ends[k % 3], slice = scattered / size;
            char *data = way == 1 ? own : shared;
            for (int r = 0; r < size; r++) {
                fill(a.in[r], t, n, r, k * 3 + (size_t)way);
            }
            reference(a.want, a.in, t, MU_MEAN, size, n);
            memcpy(data, a.in[rank], (size_t)n * type_bytes(t));
            nap_randomly(k * 64 + (size_t)way * 16 + (size_t)rank, 300);
            mui_identity id = {.kind = 5, .sequence = k, .hash = (uint64_t)way + 1, .scattered = (uint64_t)scattered};
            mu_request *q = mui_all_reduce_start(g, data, n, t, MU_MEAN, &id);
            CHECK(q != NULL && mu_request_wait(q) == MU_OK, "scattered");
            size_t each = type_bytes(t), at = (size_t)(rank * slice) * each, end = (size_t)scattered * each;
            const char *want = a.want, *in = a.in[rank];
            CHECK(memcmp(data + at, want + at, (size_t)slice * each) == 0, "rank %d of %d: slice of %lld, way %d", rank, size,
                  (long long)scattered, way);
            CHECK(memcmp(data + end, want + end, (size_t)(n - scattered) * each) == 0, "rank %d of %d: end, way %d", rank,
                  size, way);
            bool small = (size_t)n * each <= MUI_INLINE_BYTES || size == 1;
            if (way == 2 || small) {
                CHECK(memcmp(data, want, (size_t)n * each) == 0, "rank %d of %d: %lld, way %d", rank, size, (long long)n, way);
            } else if (way == 0) {
                CHECK(memcmp(data, in, at) == 0 && memcmp(data + at + (size_t)slice * each, in + at + (size_t)slice * each,
                                                          end - at - (size_t)slice * each) == 0,
                      "rank %d of %d: others' slices of %lld", rank, size, (long long)scattered);
            }
        }
    }
    mu_group_free(g, shared);
    free(own);
    inputs_free(&a, size);
}

/* Several in flight, of all sizes, tested and waited for in various ways. */
static inline void body_in_flight(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    enum { MANY = 150, LONGEST = 9000 };
    float *shared = mu_group_alloc(g, sizeof(float) * MANY * LONGEST);
    float *own = malloc(sizeof(float) * MANY * LONGEST);
    all_inputs a = inputs_new(size, sizeof(float) * LONGEST);
    mu_request *requests[MANY];
    for (int round = 0; round < 2; round++) {
        int64_t counts[MANY];
        float *data[MANY];
        if (rank == round % size) {
            /* The others start all of theirs meanwhile: more than there are slots. */
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        }
        for (int i = 0; i < MANY; i++) {
            counts[i] = (int64_t)(mix((uint64_t)(i * 2 + round)) % (i % 5 == 0 ? LONGEST : 60));
            data[i] = (i % 3 == 0 ? own : shared) + i * LONGEST;
            fill(data[i], MU_F32, counts[i], rank, (uint64_t)i);
            requests[i] = mu_all_reduce_start(g, data[i], counts[i], MU_F32, MU_MEAN);
            CHECK(requests[i] != NULL, "start");
            nap_randomly((uint64_t)(i * 16 + rank), 40);
            bool done = false;
            if (i % 4 == 1 && requests[i - 1] != NULL) {
                CHECK(mu_request_test(requests[i - 1], &done) == MU_OK, "test");
                requests[i - 1] = done ? NULL : requests[i - 1];
            }
        }
        for (int k = 0; k < MANY; k++) {
            int i = round == 0 ? k : MANY - 1 - k; /* waiting in any order is allowed */
            if (requests[i] != NULL) {
                CHECK(mu_request_wait(requests[i]) == MU_OK, "wait");
            }
        }
        for (int i = 0; i < MANY; i++) {
            for (int r = 0; r < size; r++) {
                fill(a.in[r], MU_F32, counts[i], r, (uint64_t)i);
            }
            reference(a.want, a.in, MU_F32, MU_MEAN, size, counts[i]);
            CHECK(memcmp(data[i], a.want, sizeof(float) * (size_t)counts[i]) == 0, "request %d on rank %d", i, rank);
        }
        CHECK(mu_barrier(g) == MU_OK, "barrier");
    }
    inputs_free(&a, size);
    free(own);
}

/* Several that all need the staging space, posted by all before any of them has moved. */
static inline void body_staged_in_flight(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    enum { MANY = 5, LONGEST = 700000 };
    float *data = malloc(sizeof(float) * MANY * LONGEST);
    all_inputs a = inputs_new(size, sizeof(float) * LONGEST);
    for (int round = 0; round < 6; round++) {
        mu_request *requests[MANY];
        int64_t counts[MANY];
        for (int i = 0; i < MANY; i++) {
            counts[i] = i == round % MANY ? LONGEST : 100 + (int64_t)(mix((uint64_t)(i + round)) % 5000);
            fill(data + i * LONGEST, MU_F32, counts[i], rank, (uint64_t)i);
        }
        nap_randomly((uint64_t)(round * 16 + rank), 2000);
        for (int i = 0; i < MANY; i++) {
            requests[i] = mu_all_reduce_start(g, data + i * LONGEST, counts[i], MU_F32, MU_SUM);
        }
        nap_randomly((uint64_t)(round * 16 + rank + 7), 2000);
        for (int i = 0; i < MANY; i++) {
            CHECK(mu_request_wait(requests[i]) == MU_OK, "wait");
            for (int r = 0; r < size; r++) {
                fill(a.in[r], MU_F32, counts[i], r, (uint64_t)i);
            }
            reference(a.want, a.in, MU_F32, MU_SUM, size, counts[i]);
            CHECK(memcmp(data + i * LONGEST, a.want, sizeof(float) * (size_t)counts[i]) == 0, "request %d on rank %d",
                  i, rank);
        }
    }
    inputs_free(&a, size);
    free(data);
}

static inline void body_others(mu_group *g, int rank, int size, void *arg)
{
    static const size_t sizes[] = {0, 1, 7, 64, 250, 256, 257, 4096, 100001, 2200001};
    size_t most = arg != NULL ? *(const size_t *)arg : SIZE_MAX;
    enum { MOST = 2200008 };
    char *shared = mu_group_alloc(g, (size_t)MOST * (size_t)size), *own = malloc((size_t)MOST * (size_t)size);
    char *second = mu_group_alloc(g, (size_t)MOST * (size_t)size);
    for (size_t k = 0; k < sizeof(sizes) / sizeof(*sizes) && sizes[k] <= most; k++) {
        size_t n = sizes[k];
        for (int way = 0; way < 2; way++) {
            char *data = way == 0 ? shared : own;
            int root = (int)(k + (size_t)way) % size;
            memset(data, rank == root ? 17 + (int)k : 0, n);
            nap_randomly(k * 64 + (size_t)way * 16 + (size_t)rank, 300);
            CHECK(mu_broadcast(g, data, n, root) == MU_OK, "broadcast");
            bool right = true;
            for (size_t i = 0; i < n; i++) {
                right = right && data[i] == 17 + (int)k;
            }
            CHECK(right, "broadcast of %zu, way %d", n, way);

            /* in place, and from elsewhere */
            char *in = k % 2 == 0 ? data + (size_t)rank * n : second;
            memset(in, rank + 1 + way, n);
            CHECK(mu_all_gather(g, in, data, n) == MU_OK, "all-gather");
            right = true;
            for (int r = 0; r < size; r++) {
                for (size_t i = 0; i < n; i++) {
                    right = right && data[(size_t)r * n + i] == r + 1 + way;
                }
            }
            CHECK(right, "all-gather of %zu, way %d", n, way);

            int64_t count = (int64_t)(n / 4);
            float *whole = (float *)(void *)data;
            float *part = k % 2 == 0 ? whole + (int64_t)rank * count : (float *)(void *)second;
            all_inputs a = inputs_new(size, (size_t)count * 4 * (size_t)size);
            /* All of this rank's, and of the others' what becomes this rank's. */
            void *mine[16];
            for (int r = 0; r < size; r++) {
                fill_range(a.in[r], MU_F32, r == rank ? 0 : rank * count, r == rank ? size * count : (rank + 1) * count, r, k);
                mine[r] = (float *)a.in[r] + rank * count;
            }
            reference(a.want, mine, MU_F32, MU_MEAN, size, count);
            memcpy(whole, a.in[rank], (size_t)(count * size) * 4);
            CHECK(mu_reduce_scatter(g, whole, part, count, MU_F32, MU_MEAN) == MU_OK, "reduce-scatter");
            CHECK(memcmp(part, a.want, (size_t)count * 4) == 0, "reduce-scatter of %lld, way %d", (long long)count, way);
            inputs_free(&a, size);
            CHECK(mu_barrier(g) == MU_OK, "barrier");
        }
    }
    mu_group_free(g, second);
    free(own);
}

/* The heap gives the same offsets everywhere, zeroed, also when memory is used again. */
static inline void body_heap(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    char *p[8];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 8; i++) {
            size_t n = (size_t)(mix((uint64_t)(round * 8 + i)) % 5000000);
            p[i] = mu_group_alloc(g, n);
            CHECK(p[i] != NULL && (uintptr_t)p[i] % 64 == 0, "alloc %zu", n);
            bool zero = true;
            for (size_t k = 0; k < n; k++) {
                zero = zero && p[i][k] == 0;
            }
            CHECK(zero, "memory of rank %d is not zeroed", rank);
            memset(p[i], 1 + rank, n);
        }
        for (int i = 0; i < 8; i++) {
            mu_group_free(g, p[(i * 3 + round) % 8]);
        }
    }
    CHECK(mu_group_size(g) == size && mu_group_rank(g) == rank, "identity");
}

#endif
