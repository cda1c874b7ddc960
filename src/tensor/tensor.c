/* Shapes, element types, and copying elements in and out of any layout. Not for: making tensors (the tape does). */
#include "tensor/tensor.h"
#include "base/alloc.h"
#include "kern/bf16.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[MU_DTYPE_COUNT] = {
    [MU_F32] = {"float32", 4},    [MU_F64] = {"float64", 8}, [MU_F16] = {"float16", 2},
    [MU_BF16] = {"bfloat16", 2},  [MU_I64] = {"int64", 8},   [MU_I32] = {"int32", 4},
    [MU_I16] = {"int16", 2},      [MU_I8] = {"int8", 1},     [MU_U8] = {"uint8", 1},
    [MU_BOOL] = {"bool", 1},      [MU_C64] = {"complex64", 8}, [MU_C128] = {"complex128", 16},
};

const char *mu_dtype_name(mu_dtype t)
{
    return (unsigned)t < MU_DTYPE_COUNT ? dtypes[t].name : "unknown";
}

size_t mu_dtype_bytes(mu_dtype t)
{
    return (unsigned)t < MU_DTYPE_COUNT ? dtypes[t].bytes : 0;
}

mu_dims mu_tensor_dims(const mu_tensor *t)
{
    return t != NULL ? t->dims : MU_SCALAR;
}

int64_t mu_tensor_dim(const mu_tensor *t, int i)
{
    if (t == NULL) {
        return 0;
    }
    i = i < 0 ? i + t->dims.ndim : i;
    return i >= 0 && i < t->dims.ndim ? t->dims.dim[i] : 0;
}

mu_dtype mu_tensor_dtype(const mu_tensor *t)
{
    return t != NULL ? t->dtype : MU_F32;
}

int64_t mu_tensor_elements(const mu_tensor *t)
{
    return t != NULL ? mui_dims_elements(t->dims) : 0;
}

void mui_strides_plain(mu_dims dims, int64_t *stride)
{
    int64_t step = 1;
    for (int i = dims.ndim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= dims.dim[i];
    }
}

int64_t mui_dims_elements(mu_dims dims)
{
    int64_t n = 1;
    for (int i = 0; i < dims.ndim; i++) {
        n *= dims.dim[i];
    }
    return n;
}

bool mui_dims_equal(mu_dims a, mu_dims b)
{
    return a.ndim == b.ndim && memcmp(a.dim, b.dim, (size_t)a.ndim * sizeof(a.dim[0])) == 0;
}

bool mui_tensor_is_plain(const mu_tensor *t)
{
    if (t->layout != NULL) {
        return false;
    }
    int64_t step = 1;
    for (int i = t->dims.ndim - 1; i >= 0; i--) {
        if (t->dims.dim[i] == 0) {
            return true;
        }
        if (t->dims.dim[i] != 1) {
            if (t->stride[i] != step) {
                /* A dimension of size 0 further out still makes it plain. */
                return mui_dims_elements(t->dims) == 0;
            }
            step *= t->dims.dim[i];
        }
    }
    return true;
}

mu_status mui_dims_check(mu_context *c, mu_dims dims, mu_dtype dtype, size_t *bytes)
{
    if (dims.ndim < 0 || dims.ndim > MU_MAX_DIMS) {
        return mui_fail(c, MU_ERR_SHAPE, "a tensor has 0 to %d dimensions, not %d", MU_MAX_DIMS, dims.ndim);
    }
    /* Sizes of 0 do not excuse the others: strides are products of them all. */
    int64_t n = 1;
    bool empty = false, fits = true;
    for (int i = 0; i < dims.ndim; i++) {
        if (dims.dim[i] < 0) {
            return mui_fail(c, MU_ERR_SHAPE, "dimension %d is negative: %lld", i, (long long)dims.dim[i]);
        }
        if (dims.dim[i] == 0) {
            empty = true;
        } else if (__builtin_mul_overflow(n, dims.dim[i], &n)) {
            fits = false;
            break;
        }
    }
    int64_t total = 0;
    if (!fits || __builtin_mul_overflow(n, (int64_t)mu_dtype_bytes(dtype), &total)) {
        char text[MUI_DIMS_TEXT];
        return mui_fail(c, MU_ERR_SHAPE, "a tensor of shape %s is larger than memory can be", mui_dims_text(dims, text));
    }
    *bytes = empty ? 0 : (size_t)total;
    return MU_OK;
}

const char *mui_dims_text(mu_dims dims, char out[MUI_DIMS_TEXT])
{
    size_t used = (size_t)snprintf(out, MUI_DIMS_TEXT, "(");
    for (int i = 0; i < dims.ndim && i < MU_MAX_DIMS; i++) {
        used += (size_t)snprintf(out + used, MUI_DIMS_TEXT - used, "%s%lld", i > 0 ? ", " : "", (long long)dims.dim[i]);
    }
    snprintf(out + used, MUI_DIMS_TEXT - used, dims.ndim == 1 ? ",)" : ")");
    return out;
}

static mu_status readable(const mu_tensor *t)
{
    if (t->dropped) {
        return mui_fail(t->context, MU_ERR_STATE,
                        "this tensor was made in a checkpointed segment, which keeps only its outputs: call "
                        "mu_tensor_retain in the segment to read it later");
    }
    if (t->released) {
        return mui_fail(t->context, MU_ERR_STATE,
                        "backward has given this tensor's memory back: call mu_tensor_retain before backward to read it "
                        "afterwards");
    }
    return MU_OK;
}

/* Parameters and buffers are everybody's: a replica of a parallel module must leave them alone in its forward. */
static mu_status writable(const mu_tensor *t)
{
    if (t->tape == NULL && !t->kept && mui_bound_of(t->context) != NULL) {
        return mui_fail(t->context, MU_ERR_STATE,
                        "a forward that runs in several replicas at once cannot write to a parameter or buffer, which they "
                        "share");
    }
    return readable(t);
}

static mu_status count_fits(const mu_tensor *t, int64_t elements)
{
    if (elements != mui_dims_elements(t->dims)) {
        char text[MUI_DIMS_TEXT];
        return mui_fail(t->context, MU_ERR_SHAPE, "a tensor of shape %s has %lld elements, not %lld",
                        mui_dims_text(t->dims, text), (long long)mui_dims_elements(t->dims), (long long)elements);
    }
    return MU_OK;
}

/* What failed first (memory, say) rather than where it was noticed. */
static mu_status first_error(const mu_tensor *t, mu_status s)
{
    return s != MU_OK && mui_failed(t->context) ? mu_context_status(t->context) : s;
}

mu_status mui_tensor_reorder(mui_engine *e, mu_dims dims, mu_dtype dtype, const mui_layout *from, const void *src,
                             const mui_layout *to, void *dst)
{
    return dtype == MU_BF16 ? mui_bf16_reorder(e, dims, from, src, to, dst) : mui_reorder(e, dims, from, src, to, dst);
}

/* Elements row-major in the tensor's own type. */
static mu_status copy_out(const mu_tensor *t, void *out)
{
    if (mui_dims_elements(t->dims) == 0) {
        return MU_OK;
    }
    size_t bytes = mu_dtype_bytes(t->dtype);
    if (mui_tensor_is_plain(t)) {
        memcpy(out, t->data, (size_t)mui_dims_elements(t->dims) * bytes);
        return MU_OK;
    }
    mui_engine *e = mui_engine_of(t->context);
    if (e == NULL) {
        return mu_context_status(t->context);
    }
    if (t->layout != NULL) {
        return first_error(t, mui_tensor_reorder(e, t->dims, t->dtype, t->layout, t->data, NULL, out));
    }
    int64_t plain[MU_MAX_DIMS];
    mui_strides_plain(t->dims, plain);
    mui_copy_strided(e, t->dims, bytes, t->data, t->stride, out, plain);
    return MU_OK;
}

static mu_status copy_in(mu_tensor *t, const void *in)
{
    if (mui_dims_elements(t->dims) == 0) {
        return MU_OK;
    }
    size_t bytes = mu_dtype_bytes(t->dtype);
    if (mui_tensor_is_plain(t)) {
        memcpy(t->data, in, (size_t)mui_dims_elements(t->dims) * bytes);
        return MU_OK;
    }
    mui_engine *e = mui_engine_of(t->context);
    if (e == NULL) {
        return mu_context_status(t->context);
    }
    if (t->layout != NULL) {
        return first_error(t, mui_tensor_reorder(e, t->dims, t->dtype, NULL, in, t->layout, t->data));
    }
    int64_t plain[MU_MAX_DIMS];
    mui_strides_plain(t->dims, plain);
    mui_copy_strided(e, t->dims, bytes, in, plain, t->data, t->stride);
    return MU_OK;
}

void mui_tensor_touch(mu_tensor *t)
{
    /* Counted where all views of the memory see it. */
    mu_tensor *base = t->view_of != NULL ? t->view_of : t;
    base->written = __atomic_add_fetch(&t->context->writes, 1, __ATOMIC_RELAXED); /* replicas may write to their own */
    if (base->parameter != NULL) {
        t->context->parameter_writes = base->written;
    }
    if (t->storage != NULL) {
        t->storage->writes++;
    }
}

bool mui_is_float(mu_dtype t)
{
    return t == MU_F32 || t == MU_F64 || t == MU_F16 || t == MU_BF16;
}

mu_status mu_tensor_read(const mu_tensor *t, float *out, int64_t elements)
{
    if (t == NULL || out == NULL) {
        return t == NULL ? MU_ERR_ARG : mui_fail(t->context, MU_ERR_ARG, "mu_tensor_read: out is NULL");
    }
    if (readable(t) != MU_OK || count_fits(t, elements) != MU_OK) {
        return mu_context_status(t->context);
    }
    if (t->dtype == MU_F32) {
        return copy_out(t, out);
    }
    if (!mui_is_float(t->dtype)) {
        return mui_fail(t->context, MU_ERR_DTYPE, "a tensor of %s is read with mu_tensor_read_i64, not as float",
                        mu_dtype_name(t->dtype));
    }
    void *own = mui_alloc(t->context, (size_t)elements * mu_dtype_bytes(t->dtype));
    if (own == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = copy_out(t, own);
    if (s == MU_OK) {
        s = mui_to_float(t->context, t->dtype, elements, own, out);
    }
    mui_free(t->context, own);
    return s;
}

/* Widens integers in place of a loop per type at each caller. */
static void to_i64(mu_dtype from, int64_t n, const void *src, int64_t *dst)
{
    for (int64_t i = 0; i < n; i++) {
        switch (from) {
        case MU_I32: dst[i] = ((const int32_t *)src)[i]; break;
        case MU_I16: dst[i] = ((const int16_t *)src)[i]; break;
        case MU_I8: dst[i] = ((const int8_t *)src)[i]; break;
        case MU_U8: dst[i] = ((const uint8_t *)src)[i]; break;
        case MU_BOOL: dst[i] = ((const uint8_t *)src)[i] != 0; break;
        default: dst[i] = ((const int64_t *)src)[i]; break;
        }
    }
}

mu_status mu_tensor_read_i64(const mu_tensor *t, int64_t *out, int64_t elements)
{
    if (t == NULL || out == NULL) {
        return t == NULL ? MU_ERR_ARG : mui_fail(t->context, MU_ERR_ARG, "mu_tensor_read_i64: out is NULL");
    }
    if (readable(t) != MU_OK || count_fits(t, elements) != MU_OK) {
        return mu_context_status(t->context);
    }
    if (mui_is_float(t->dtype) || t->dtype == MU_C64 || t->dtype == MU_C128) {
        return mui_fail(t->context, MU_ERR_DTYPE, "a tensor of %s cannot be read as integers", mu_dtype_name(t->dtype));
    }
    if (t->dtype == MU_I64) {
        return copy_out(t, out);
    }
    void *own = mui_alloc(t->context, (size_t)elements * mu_dtype_bytes(t->dtype));
    if (own == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = copy_out(t, own);
    if (s == MU_OK) {
        to_i64(t->dtype, elements, own, out);
    }
    mui_free(t->context, own);
    return s;
}

mu_status mu_tensor_write(mu_tensor *t, const float *in, int64_t elements)
{
    if (t == NULL || in == NULL) {
        return t == NULL ? MU_ERR_ARG : mui_fail(t->context, MU_ERR_ARG, "mu_tensor_write: in is NULL");
    }
    if (writable(t) != MU_OK || count_fits(t, elements) != MU_OK) {
        return mu_context_status(t->context);
    }
    mui_tensor_touch(t);
    if (t->dtype == MU_F32) {
        return copy_in(t, in);
    }
    if (!mui_is_float(t->dtype)) {
        return mui_fail(t->context, MU_ERR_DTYPE, "a tensor of %s cannot be written from float",
                        mu_dtype_name(t->dtype));
    }
    void *own = mui_alloc(t->context, (size_t)elements * mu_dtype_bytes(t->dtype));
    if (own == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = mui_from_float(t->context, t->dtype, elements, in, own);
    if (s == MU_OK) {
        s = copy_in(t, own);
    }
    mui_free(t->context, own);
    return s;
}

float mu_tensor_item(const mu_tensor *t)
{
    if (t == NULL) {
        return NAN;
    }
    if (mui_is_float(t->dtype)) {
        float value = NAN;
        return mu_tensor_read(t, &value, 1) == MU_OK ? value : NAN;
    }
    int64_t value = 0;
    return mu_tensor_read_i64(t, &value, 1) == MU_OK ? (float)value : NAN;
}

static mu_status raw_fits(const mu_tensor *t, size_t bytes)
{
    size_t own = (size_t)mui_dims_elements(t->dims) * mu_dtype_bytes(t->dtype);
    if (bytes != own) {
        return mui_fail(t->context, MU_ERR_SHAPE, "a tensor of %zu bytes cannot be copied from or to %zu bytes", own,
                        bytes);
    }
    return MU_OK;
}

mu_status mui_tensor_get_raw(const mu_tensor *t, void *out, size_t bytes)
{
    mu_status s = readable(t);
    s = s == MU_OK ? raw_fits(t, bytes) : s;
    return s == MU_OK ? copy_out(t, out) : s;
}

mu_status mui_tensor_check_writable(const mu_tensor *t)
{
    return writable(t);
}

mu_status mui_tensor_set_raw(mu_tensor *t, const void *in, size_t bytes)
{
    mu_status s = writable(t);
    s = s == MU_OK ? raw_fits(t, bytes) : s;
    if (s == MU_OK) {
        mui_tensor_touch(t);
        s = copy_in(t, in);
    }
    return s;
}
