/* The loops of reductions. Memory-bound: an accumulator that stays in the first-level cache, plain loops. */
#include "comm/reduce.h"

#include <string.h>

#define ACC_BYTES 8192

size_t mui_reducible_bytes(mu_dtype type)
{
    return type == MU_F32 || type == MU_I32 ? 4 : type == MU_F64 || type == MU_I64 ? 8 : 0;
}

const char *mui_reducible_name(mu_dtype type)
{
    return type == MU_F32 ? "float32" : type == MU_F64 ? "float64" : type == MU_I32 ? "int32" : "int64";
}

const char *mui_reduce_op_name(mu_reduce_op op)
{
    return op == MU_SUM ? "sum" : op == MU_MEAN ? "mean" : op == MU_MAX ? "max" : "min";
}

void mui_reduce_slice(int64_t n, int size, int rank, size_t bytes, int64_t *from, int64_t *count)
{
    int64_t line = (int64_t)(64 / bytes), lines = (n + line - 1) / line;
    int64_t first = lines / size * rank + (rank < lines % size ? rank : lines % size);
    int64_t many = lines / size + (rank < lines % size ? 1 : 0);
    *from = first * line < n ? first * line : n;
    *count = (first + many) * line < n ? many * line : n - *from;
}

uint64_t mui_scatter_of(uint64_t n, int size, mu_dtype type)
{
    uint64_t unit = 64 / mui_reducible_bytes(type) * (uint64_t)size;
    return n / unit * unit;
}

uint64_t mui_scattered(const mui_identity *id, int size, mu_dtype type)
{
    return id->scattered == mui_scatter_of(id->scattered, size, type) ? id->scattered : 0;
}

/* a = x op y; a may be x. Integers wrap. */
#define COMBINE(name, type, expression)                                                                               \
    static void name(type *a, const type *x, const type *restrict y, int64_t n)                                       \
    {                                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            type p = x[i], q = y[i];                                                                                   \
            a[i] = expression;                                                                                         \
        }                                                                                                              \
    }
#define DIVIDE(name, type)                                                                                             \
    static void name(type *a, int ranks, int64_t n)                                                                    \
    {                                                                                                                  \
        type d = (type)ranks;                                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            a[i] /= d;                                                                                                 \
        }                                                                                                              \
    }

COMBINE(sum_f32, float, p + q)
COMBINE(sum_f64, double, p + q)
COMBINE(sum_i32, int32_t, (int32_t)((uint32_t)p + (uint32_t)q))
COMBINE(sum_i64, int64_t, (int64_t)((uint64_t)p + (uint64_t)q))
/* q != q: NaN wins whichever rank brings it. */
COMBINE(max_f32, float, q > p || q != q ? q : p)
COMBINE(max_f64, double, q > p || q != q ? q : p)
COMBINE(max_i32, int32_t, q > p ? q : p)
COMBINE(max_i64, int64_t, q > p ? q : p)
COMBINE(min_f32, float, q < p || q != q ? q : p)
COMBINE(min_f64, double, q < p || q != q ? q : p)
COMBINE(min_i32, int32_t, q < p ? q : p)
COMBINE(min_i64, int64_t, q < p ? q : p)
DIVIDE(divide_f32, float)
DIVIDE(divide_f64, double)

#define CASES(suffix, type)                                                                                            \
    switch (op) {                                                                                                      \
    case MU_SUM:                                                                                                       \
    case MU_MEAN: sum_##suffix((type *)a, (const type *)x, (const type *)y, n); break;                                 \
    case MU_MAX: max_##suffix((type *)a, (const type *)x, (const type *)y, n); break;                                  \
    case MU_MIN: min_##suffix((type *)a, (const type *)x, (const type *)y, n); break;                                  \
    }

static void combine(mu_dtype t, mu_reduce_op op, void *a, const void *x, const void *y, int64_t n)
{
    if (t == MU_F32) {
        CASES(f32, float)
    } else if (t == MU_F64) {
        CASES(f64, double)
    } else if (t == MU_I32) {
        CASES(i32, int32_t)
    } else {
        CASES(i64, int64_t)
    }
}

/* The commonest case in one pass: two ranks, in place, float. */
static void pair_f32(float *restrict a, float *restrict b, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        /* Times 0.5 is exactly the division by 2. */
        float v = (a[i] + b[i]) * factor;
        a[i] = v;
        b[i] = v;
    }
}

void mui_reduce(mu_dtype type, mu_reduce_op op, int ranks, const void *const *in, int outs, void *const *out,
                int64_t n)
{
    if (ranks == 2 && outs == 2 && type == MU_F32 && (op == MU_SUM || op == MU_MEAN) && in[0] == out[0] &&
        in[1] == out[1]) {
        pair_f32(out[0], out[1], op == MU_MEAN ? 0.5f : 1.0f, n);
        return;
    }
    _Alignas(64) char acc[ACC_BYTES];
    int64_t size = (int64_t)mui_reducible_bytes(type), block = ACC_BYTES / size;
    for (int64_t at = 0; at < n; at += block) {
        int64_t m = n - at < block ? n - at : block;
        size_t skip = (size_t)(at * size), bytes = (size_t)(m * size);
        if (ranks == 1) {
            memcpy(acc, (const char *)in[0] + skip, bytes);
        }
        for (int r = 1; r < ranks; r++) {
            combine(type, op, acc, r == 1 ? (const char *)in[0] + skip : acc, (const char *)in[r] + skip, m);
        }
        if (op == MU_MEAN && type == MU_F32) {
            divide_f32((float *)(void *)acc, ranks, m);
        } else if (op == MU_MEAN && type == MU_F64) {
            divide_f64((double *)(void *)acc, ranks, m);
        }
        for (int r = 0; r < outs; r++) {
            memcpy((char *)out[r] + skip, acc, bytes);
        }
    }
}
