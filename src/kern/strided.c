/* Kernels over strided and broadcasting operands. Dimensions are first merged where both sides allow it, so that the
 * inner loop is long; then an odometer walks the outer ones. */
#include "kern/engine.h"
#include "kern/fast_math.h"

/* Up to three operands over the same dims. */
enum { MAX_SIDES = 3 };
typedef struct walk {
    int ndim;
    int64_t dim[MU_MAX_DIMS];
    int64_t stride[MAX_SIDES][MU_MAX_DIMS];
    int64_t index[MU_MAX_DIMS];
    int64_t offset[MAX_SIDES];
    int sides;
} walk;

/* False when there is no element at all. Dimensions of 1 are dropped and neighbours merged; at least one is left. */
static bool walk_start(walk *v, mu_dims dims, int sides, const int64_t *const *stride)
{
    *v = (walk){.sides = sides};
    for (int d = 0; d < dims.ndim; d++) {
        if (dims.dim[d] == 0) {
            return false;
        }
        if (dims.dim[d] == 1) {
            continue;
        }
        bool merge = v->ndim > 0;
        for (int s = 0; s < sides && merge; s++) {
            merge = v->stride[s][v->ndim - 1] == stride[s][d] * dims.dim[d];
        }
        int at = merge ? v->ndim - 1 : v->ndim++;
        v->dim[at] = merge ? v->dim[at] * dims.dim[d] : dims.dim[d];
        for (int s = 0; s < sides; s++) {
            v->stride[s][at] = stride[s][d];
        }
    }
    if (v->ndim == 0) {
        v->dim[v->ndim++] = 1;
    }
    return true;
}

/* Moves to the next inner row; false after the last. */
static bool walk_next(walk *v)
{
    for (int d = v->ndim - 2; d >= 0; d--) {
        for (int s = 0; s < v->sides; s++) {
            v->offset[s] += v->stride[s][d];
        }
        if (++v->index[d] < v->dim[d]) {
            return true;
        }
        for (int s = 0; s < v->sides; s++) {
            v->offset[s] -= v->stride[s][d] * v->dim[d];
        }
        v->index[d] = 0;
    }
    return false;
}

static void plain_strides(mu_dims dims, int64_t *stride)
{
    int64_t n = 1;
    for (int d = dims.ndim - 1; d >= 0; d--) {
        stride[d] = n;
        n *= dims.dim[d];
    }
}

/* Rows of a binary operation; the common strides have loops of their own. */
#define ROW(name, op)                                                                                                  \
    MUI_CLONES static void name(int64_t n, const float *a, int64_t sa, const float *b, int64_t sb, float *y)           \
    {                                                                                                                  \
        if (sa == 1 && sb == 1) {                                                                                      \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                y[i] = a[i] op b[i];                                                                                   \
            }                                                                                                          \
        } else if (sa == 1 && sb == 0) {                                                                               \
            float v = b[0];                                                                                            \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                y[i] = a[i] op v;                                                                                      \
            }                                                                                                          \
        } else if (sa == 0 && sb == 1) {                                                                               \
            float v = a[0];                                                                                            \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                y[i] = v op b[i];                                                                                      \
            }                                                                                                          \
        } else {                                                                                                       \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                y[i] = a[i * sa] op b[i * sb];                                                                         \
            }                                                                                                          \
        }                                                                                                              \
    }
ROW(row_add, +)
ROW(row_sub, -)
ROW(row_mul, *)

void mui_binary_forward(mui_engine *e, mui_binary op, mu_dims dims, const float *a, const int64_t *stride_a,
                        const float *b, const int64_t *stride_b, float *y)
{
    int64_t stride_y[MU_MAX_DIMS];
    plain_strides(dims, stride_y);
    walk v;
    if (!walk_start(&v, dims, 3, (const int64_t *const[]){stride_a, stride_b, stride_y})) {
        return;
    }
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    void (*row)(int64_t, const float *, int64_t, const float *, int64_t, float *) =
        op == MUI_ADD ? row_add : op == MUI_SUB ? row_sub : row_mul;
    int last = v.ndim - 1;
    do {
        row(v.dim[last], a + v.offset[0], v.stride[0][last], b + v.offset[1], v.stride[1][last], y + v.offset[2]);
    } while (walk_next(&v));
    mui_timer_stop(&t, 0, mui_float_bytes(3 * mui_elements(dims)));
}

/* -- copies ----------------------------------------------------------------------------------------------------- */
#define COPY(name, type)                                                                                               \
    static void name(int64_t n, const char *src, int64_t ss, char *dst, int64_t ds)                                    \
    {                                                                                                                  \
        const type *from = (const type *)(const void *)src;                                                            \
        type *to = (type *)(void *)dst;                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            to[i * ds] = from[i * ss];                                                                                 \
        }                                                                                                              \
    }
typedef struct wide {
    uint64_t half[2];
} wide;
COPY(copy_1, uint8_t)
COPY(copy_2, uint16_t)
COPY(copy_4, uint32_t)
COPY(copy_8, uint64_t)
COPY(copy_16, wide)

void mui_copy_strided(mui_engine *e, mu_dims dims, size_t bytes, const void *src, const int64_t *src_stride, void *dst,
                      const int64_t *dst_stride)
{
    walk v;
    if (!walk_start(&v, dims, 2, (const int64_t *const[]){src_stride, dst_stride})) {
        return;
    }
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_COPY);
    void (*copy)(int64_t, const char *, int64_t, char *, int64_t) = bytes == 1   ? copy_1
                                                                    : bytes == 2 ? copy_2
                                                                    : bytes == 4 ? copy_4
                                                                    : bytes == 8 ? copy_8
                                                                                 : copy_16;
    int last = v.ndim - 1;
    int64_t ss = v.stride[0][last], ds = v.stride[1][last], unit = (int64_t)bytes;
    do {
        const char *from = (const char *)src + v.offset[0] * unit;
        char *to = (char *)dst + v.offset[1] * unit;
        if (v.dim[last] == 1 || (ss == 1 && ds == 1)) {
            memcpy(to, from, (size_t)v.dim[last] * bytes);
        } else {
            copy(v.dim[last], from, ss, to, ds);
        }
    } while (walk_next(&v));
    mui_timer_stop(&t, 0, 2.0 * (double)bytes * (double)mui_elements(dims));
}

/* -- sums ------------------------------------------------------------------------------------------------------- */
MUI_CLONES static void add_row(int64_t n, const float *src, int64_t ss, float *dst, int64_t ds)
{
    if (ds == 0) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) {
            sum += src[i * ss];
        }
        *dst = (float)(*dst + sum);
    } else if (ss == 1 && ds == 1) {
        for (int64_t i = 0; i < n; i++) {
            dst[i] += src[i];
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            dst[i * ds] += src[i * ss];
        }
    }
}

void mui_add_strided(mui_engine *e, mu_dims dims, const float *src, const int64_t *src_stride, float *dst,
                     const int64_t *dst_stride)
{
    walk v;
    if (!walk_start(&v, dims, 2, (const int64_t *const[]){src_stride, dst_stride})) {
        return;
    }
    mui_timer t;
    mui_kernel_start(&t, e, MUI_KIND_ELEMENTWISE);
    int last = v.ndim - 1;
    do {
        add_row(v.dim[last], src + v.offset[0], v.stride[0][last], dst + v.offset[1], v.stride[1][last]);
    } while (walk_next(&v));
    mui_timer_stop(&t, 0, mui_float_bytes(3 * mui_elements(dims)));
}
