/* Conversions into float32 and int64, the two types that models hold, and copies of equal types. */
#include "io/load_convert.h"
#include "base/alloc.h"

#include <math.h>
#include <string.h>

static bool is_complex(mu_dtype t)
{
    return t == MU_C64 || t == MU_C128;
}

bool mui_can_convert(mu_dtype from, mu_dtype to)
{
    return from == to || ((to == MU_F32 || to == MU_I64) && !is_complex(from));
}

static int64_t int_at(mu_dtype t, const void *p, int64_t i)
{
    switch (t) {
    case MU_I64: return ((const int64_t *)p)[i];
    case MU_I32: return ((const int32_t *)p)[i];
    case MU_I16: return ((const int16_t *)p)[i];
    case MU_I8: return ((const int8_t *)p)[i];
    default: return ((const uint8_t *)p)[i]; /* uint8, bool */
    }
}

/* Towards zero, as C and PyTorch do; what no int64 can hold becomes the nearest one, NaN becomes 0. */
static int64_t truncated(double v)
{
    if (isnan(v)) {
        return 0;
    }
    return v >= 0x1p63 ? INT64_MAX : v <= -0x1p63 ? INT64_MIN : (int64_t)v;
}

mu_status mui_convert(mu_context *c, mu_dtype from, mu_dtype to, int64_t n, const void *src, void *dst)
{
    if (from == to) {
        if (n > 0) {
            memcpy(dst, src, (size_t)n * mu_dtype_bytes(to));
        }
        return MU_OK;
    }
    if (!mui_can_convert(from, to)) {
        return mui_fail(c, MU_ERR_DTYPE, "%s cannot be loaded as %s", mu_dtype_name(from), mu_dtype_name(to));
    }
    if (to == MU_F32 && mui_is_float(from)) {
        return mui_to_float(c, from, n, src, dst);
    }
    for (int64_t i = 0; to == MU_F32 && i < n; i++) {
        ((float *)dst)[i] = (float)int_at(from, src, i);
    }
    for (int64_t i = 0; to == MU_I64 && i < n; i++) {
        float f = 0;
        if (from == MU_F64) {
            ((int64_t *)dst)[i] = truncated(((const double *)src)[i]);
        } else if (mui_is_float(from)) {
            mu_status s = mui_to_float(c, from, 1, (const char *)src + (size_t)i * mu_dtype_bytes(from), &f);
            if (s != MU_OK) {
                return s;
            }
            ((int64_t *)dst)[i] = truncated(f);
        } else {
            ((int64_t *)dst)[i] = int_at(from, src, i);
        }
    }
    return MU_OK;
}

bool mui_tensor_of(const mu_checkpoint_file *k, const mui_value *v, mui_axes *room, mui_file_tensor *out,
                   char problem[MUI_PROBLEM_BYTES])
{
    mui_value *inner = NULL;
    mui_meaning meaning = {.context = k->context, .path = k->path, .refs = k->refs};
    return mui_tensor_read(&meaning, v, room, out, &inner, problem, MUI_PROBLEM_BYTES) == MUI_IS_TENSOR;
}

bool mui_shape_is(const mui_file_tensor *t, mu_dims d)
{
    return t->ndim == d.ndim && memcmp(t->dim, d.dim, (size_t)d.ndim * sizeof(d.dim[0])) == 0;
}

mu_status mui_tensor_load_as(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, mu_dtype to, void *out)
{
    size_t bytes = 0;
    mu_status s = mui_tensor_bytes(k, name, t, &bytes);
    if (s != MU_OK || t->dtype->carrier == to) {
        return s == MU_OK ? mui_tensor_load(k, name, t, out) : s;
    }
    void *stored = mui_alloc(k->context, bytes);
    s = stored != NULL ? mui_tensor_load(k, name, t, stored) : MU_ERR_NOMEM;
    if (s == MU_OK) {
        s = mui_convert(k->context, t->dtype->carrier, to, (int64_t)(bytes / (size_t)t->dtype->bytes), stored, out);
    }
    mui_free(k->context, stored);
    return s;
}
