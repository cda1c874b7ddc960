/* A tensor's elements as numbers of a type that was asked for. */
#include "base/alloc.h"
#include "io/checkpoint_file.h"
#include "tensor/tensor.h"

#include <math.h>
#include <string.h>

/* Types of eight bits: mantissa bits, and the bias of the exponent. Those with "fn" have no infinities; "uz": one zero,
 * and its negative is the only NaN. */
static const struct small_float {
    const char *name;
    int mantissa, bias;
    bool infinities, one_zero;
} small_floats[] = {
    {"float8_e4m3fn", 3, 7, false, false},
    {"float8_e5m2", 2, 15, true, false},
    {"float8_e4m3fnuz", 3, 8, false, true},
    {"float8_e5m2fnuz", 2, 16, false, true},
};

static double from_small_float(const struct small_float *f, unsigned char x)
{
    int exponent = (x & 0x7f) >> f->mantissa, mantissa = x & ((1 << f->mantissa) - 1);
    int top = (1 << (7 - f->mantissa)) - 1, all = (1 << f->mantissa) - 1;
    double sign = x & 0x80 ? -1 : 1;
    if (f->one_zero && x == 0x80) {
        return NAN;
    }
    if (!f->one_zero && f->infinities && exponent == top) {
        return mantissa == 0 ? sign * INFINITY : NAN;
    }
    if (!f->one_zero && !f->infinities && exponent == top && mantissa == all) {
        return NAN;
    }
    return sign * (exponent == 0 ? ldexp(mantissa, 1 - f->bias - f->mantissa)
                                 : ldexp(mantissa + (1 << f->mantissa), exponent - f->bias - f->mantissa));
}

typedef enum family { NO_NUMBER, SIGNED, UNSIGNED, FLOATING, SMALL } family;

/* How to read elements of d; *small for SMALL. */
static family family_of(const mui_torch_dtype *d, const struct small_float **small)
{
    for (size_t i = 0; i < sizeof(small_floats) / sizeof(small_floats[0]); i++) {
        if (strcmp(d->name, small_floats[i].name) == 0) {
            *small = &small_floats[i];
            return SMALL;
        }
    }
    if (strcmp(d->name, "uint16") == 0 || strcmp(d->name, "uint32") == 0 || strcmp(d->name, "uint64") == 0) {
        return UNSIGNED;
    }
    if (!d->exact && !d->quantised) {
        return NO_NUMBER;
    }
    switch (d->carrier) {
    case MU_F32:
    case MU_F64:
    case MU_F16:
    case MU_BF16: return FLOATING;
    case MU_I64:
    case MU_I32:
    case MU_I16:
    case MU_I8: return SIGNED;
    case MU_U8:
    case MU_BOOL: return UNSIGNED;
    default: return NO_NUMBER;
    }
}

static uint64_t bits_of(const unsigned char *p, int bytes)
{
    uint64_t x = 0;
    for (int i = bytes; i-- > 0;) {
        x = x << 8 | p[i];
    }
    return x;
}

static int64_t int_of(const unsigned char *p, int bytes, bool is_signed)
{
    uint64_t x = bits_of(p, bytes);
    int unused = 64 - 8 * bytes;
    return is_signed && unused > 0 ? (int64_t)(x << unused) >> unused : (int64_t)x;
}

static void put(double x, mu_dtype to, void *out, size_t i)
{
    if (to == MU_F64) {
        ((double *)out)[i] = x;
    } else {
        ((float *)out)[i] = (float)x;
    }
}

static mu_status convert_floats(mu_context *c, mu_dtype from, const unsigned char *in, mu_dtype to, void *out, size_t n)
{
    float some[256];
    if (from == MU_F64) { /* to float32: what is asked for in its own type was read in place */
        return mui_to_float(c, from, (int64_t)n, in, out);
    }
    for (size_t at = 0; at < n;) {
        size_t m = n - at < 256 ? n - at : 256;
        mu_status s = mui_to_float(c, from, (int64_t)m, in + at * mu_dtype_bytes(from), some);
        if (s != MU_OK) {
            return s;
        }
        for (size_t i = 0; i < m; i++, at++) {
            put(some[i], to, out, at);
        }
    }
    return MU_OK;
}

static void convert_others(const mui_torch_dtype *d, family kind, const struct small_float *small,
                           const unsigned char *in, mu_dtype to, void *out, size_t n)
{
    for (size_t i = 0; i < n; i++, in += d->bytes) {
        int64_t integer = kind != SMALL ? int_of(in, d->bytes, kind == SIGNED) : 0;
        if (to == MU_I64) {
            ((int64_t *)out)[i] = integer;
        } else {
            put(kind == SMALL      ? from_small_float(small, *in)
                : kind == UNSIGNED ? (double)(uint64_t)integer
                                   : (double)integer,
                to, out, i);
        }
    }
}

mu_status mu_checkpoint_read_as(mu_checkpoint_file *k, int64_t i, mu_dtype as, void *out, size_t bytes)
{
    if (k == NULL || out == NULL || (as != MU_F32 && as != MU_F64 && as != MU_I64)) {
        return k == NULL ? MU_ERR_ARG
                         : mui_fail(k->context, MU_ERR_ARG, "mu_checkpoint_read_as: float32, float64 and int64 only");
    }
    const mui_entry *e = mui_entry_at(k, i);
    if (e == NULL) {
        return MU_ERR_ARG;
    }
    size_t raw_bytes = 0, need = 0;
    mu_status s = mui_tensor_bytes(k, e->name, e->tensor, &raw_bytes);
    if (s != MU_OK) {
        return s;
    }
    const mui_torch_dtype *d = e->tensor->dtype;
    const struct small_float *small = NULL;
    family kind = family_of(d, &small);
    if (kind == NO_NUMBER || (as == MU_I64 && kind != SIGNED && kind != UNSIGNED)) {
        return mui_fail(k->context, MU_ERR_DTYPE, "%s: '%s' is of %s, which cannot be read as %s", k->path, e->name, d->name,
                        mu_dtype_name(as));
    }
    if (!mui_size_mul(raw_bytes / d->bytes, mu_dtype_bytes(as), &need) || need != bytes) {
        return mui_fail(k->context, MU_ERR_ARG, "%s: '%s' has %zu elements, as %s of %zu bytes each; room for %zu bytes was given",
                        k->path, e->name, raw_bytes / d->bytes, mu_dtype_name(as), mu_dtype_bytes(as), bytes);
    }
    if (d->exact && d->carrier == as) {
        return mui_tensor_load(k, e->name, e->tensor, out);
    }
    unsigned char *raw = mui_alloc(k->context, raw_bytes);
    s = raw != NULL ? mui_tensor_load(k, e->name, e->tensor, raw) : MU_ERR_NOMEM;
    if (s == MU_OK && kind == FLOATING) {
        s = convert_floats(k->context, d->carrier, raw, as, out, raw_bytes / d->bytes);
    } else if (s == MU_OK) {
        convert_others(d, kind, small, raw, as, out, raw_bytes / d->bytes);
    }
    mui_free(k->context, raw);
    return s;
}
