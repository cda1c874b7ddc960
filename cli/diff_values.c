/* Compares elements: bits first, numbers only where those differ. */
#include "diff_values.h"
#include "commands.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *values_status_name(values_status s)
{
    static const char *const names[] = {"equal", "differ", "shape", "incomparable"};
    return names[s];
}

int values_index(mu_dims d, int64_t element, int64_t *out)
{
    for (int i = d.ndim; i-- > 0;) {
        out[i] = d.dim[i] > 0 ? element % d.dim[i] : 0;
        element = d.dim[i] > 0 ? element / d.dim[i] : 0;
    }
    return d.ndim;
}

/* Types as numbers: integers are compared exactly, not as doubles. */
typedef enum number { NO_NUMBER, WHOLE, SINGLE, DOUBLE, COMPLEX } number;

static bool same_dims(mu_dims a, mu_dims b)
{
    return a.ndim == b.ndim && memcmp(a.dim, b.dim, (size_t)a.ndim * sizeof(a.dim[0])) == 0;
}

static number number_of(const mu_checkpoint_entry *e)
{
    const char *n = e->dtype_name;
    if (strcmp(n, "complex64") == 0 || strcmp(n, "complex128") == 0) {
        return COMPLEX;
    }
    if (strcmp(n, "float64") == 0) {
        return DOUBLE;
    }
    if (strcmp(n, "float32") == 0 || strcmp(n, "float16") == 0 || strcmp(n, "bfloat16") == 0 ||
        strncmp(n, "float8_e4", 9) == 0 || strncmp(n, "float8_e5", 9) == 0) {
        return SINGLE;
    }
    if (strcmp(n, "bool") == 0 || strncmp(n, "int", 3) == 0 || strncmp(n, "uint", 4) == 0 || strcmp(n, "qint8") == 0 ||
        strcmp(n, "quint8") == 0 || strcmp(n, "qint32") == 0) {
        return WHOLE;
    }
    return NO_NUMBER;
}

/* One side's elements, as numbers or as they are. */
typedef struct elements {
    void *data;
    number kind;
    bool complex_doubles;
} elements;

static double real_at(const elements *e, int64_t i)
{
    return e->kind == SINGLE ? (double)((const float *)e->data)[i]
           : e->kind == WHOLE ? (double)((const int64_t *)e->data)[i]
                              : ((const double *)e->data)[i];
}

static void complex_at(const elements *e, int64_t i, double out[2])
{
    for (int part = 0; part < 2; part++) {
        out[part] = e->kind != COMPLEX      ? (part == 0 ? real_at(e, i) : 0)
                    : e->complex_doubles    ? ((const double *)e->data)[2 * i + part]
                                            : (double)((const float *)e->data)[2 * i + part];
    }
}

static void take(values_diff *d, int64_t i, double difference, double size, double rtol, double atol)
{
    double relative = difference == 0 ? 0 : size == 0 ? INFINITY : isinf(difference) ? INFINITY : difference / size;
    /* An infinite tolerance, of an infinite b, would take anything. */
    bool within = difference == 0 || (isfinite(difference) && difference <= atol + rtol * size);
    d->differ += !within;
    if (difference > 0 && (d->worst < 0 || difference > d->max_abs)) {
        d->max_abs = difference;
        d->worst = i;
    }
    d->max_rel = relative > d->max_rel ? relative : d->max_rel;
}

static double distance(double a, double b)
{
    return a == b ? 0 : fabs(a - b); /* equal infinities too */
}

static void compare_numbers(const elements *a, const elements *b, int64_t n, double rtol, double atol, values_diff *d)
{
    bool both_whole = a->kind == WHOLE && b->kind == WHOLE, any_complex = a->kind == COMPLEX || b->kind == COMPLEX;
    for (int64_t i = 0; i < n; i++) {
        double difference, size;
        bool nan_a, nan_b;
        if (both_whole) {
            int64_t x = ((const int64_t *)a->data)[i], y = ((const int64_t *)b->data)[i];
            uint64_t apart = x > y ? (uint64_t)x - (uint64_t)y : (uint64_t)y - (uint64_t)x;
            take(d, i, (double)apart, fabs((double)y), rtol, atol);
            continue;
        }
        if (any_complex) {
            double x[2], y[2];
            complex_at(a, i, x);
            complex_at(b, i, y);
            nan_a = isnan(x[0]) || isnan(x[1]);
            nan_b = isnan(y[0]) || isnan(y[1]);
            difference = hypot(distance(x[0], y[0]), distance(x[1], y[1]));
            size = hypot(y[0], y[1]);
        } else {
            double x = real_at(a, i), y = real_at(b, i);
            nan_a = isnan(x);
            nan_b = isnan(y);
            difference = distance(x, y);
            size = fabs(y);
        }
        if (nan_a || nan_b) {
            d->nan_on_one_side += nan_a != nan_b;
            difference = nan_a && nan_b ? 0 : INFINITY;
            size = 1;
        }
        take(d, i, difference, size, rtol, atol);
    }
}

static void compare_bits(const elements *a, const elements *b, int64_t n, size_t bytes, values_diff *d)
{
    d->no_numbers = true;
    for (int64_t i = 0; i < n; i++) {
        if (memcmp((const char *)a->data + (size_t)i * bytes, (const char *)b->data + (size_t)i * bytes, bytes) != 0) {
            d->worst = d->differ == 0 ? i : d->worst;
            d->differ++;
        }
    }
}

/* Reads entry i: as it is, or as numbers. data NULL on failure. */
static bool load(const look *l, mu_checkpoint_file *k, int64_t i, bool as_numbers, elements *out)
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    uint64_t n = look_elements(&e), bytes = look_bytes(&e);
    *out = (elements){.kind = number_of(&e), .complex_doubles = e.dtype == MU_C128};
    mu_dtype as = out->kind == WHOLE ? MU_I64 : out->kind == SINGLE ? MU_F32 : MU_F64;
    bool convert = as_numbers && out->kind != COMPLEX && out->kind != NO_NUMBER;
    if (convert && __builtin_mul_overflow(n, (uint64_t)mu_dtype_bytes(as), &bytes)) {
        bytes = UINT64_MAX;
    }
    out->data = look_room(l, &e, bytes);
    if (out->data == NULL) {
        return false;
    }
    mu_status s = convert ? mu_checkpoint_read_as(k, i, as, out->data, (size_t)bytes)
                          : mu_checkpoint_read(k, i, out->data, (size_t)bytes);
    if (s != MU_OK) {
        free(out->data);
        out->data = NULL;
    }
    return s == MU_OK;
}

static bool load_both(const look *l, mu_checkpoint_file *a, int64_t i, mu_checkpoint_file *b, int64_t at, bool as_numbers,
                      elements out[2])
{
    out[0].data = out[1].data = NULL;
    if (!load(l, a, i, as_numbers, &out[0])) {
        return false;
    }
    if (!load(l, b, at, as_numbers, &out[1])) {
        free(out[0].data);
        return false;
    }
    return true;
}

static bool is_readable(const look *l, mu_checkpoint_file *k, int64_t i, values_diff *d)
{
    bool readable = false;
    bool good = look_readable(l, k, i, &readable);
    if (good && !readable) {
        d->status = VALUES_INCOMPARABLE;
        d->why = mu_checkpoint_get(k, i).note;
    }
    return good;
}

bool values_compare(look *l, mu_checkpoint_file *a, int64_t i, mu_checkpoint_file *b, int64_t at, double rtol, double atol,
                    values_diff *out)
{
    mu_checkpoint_entry x = mu_checkpoint_get(a, i), y = mu_checkpoint_get(b, at);
    *out = (values_diff){.worst = -1, .why = ""};
    if (!is_readable(l, a, i, out) || !is_readable(l, b, at, out)) {
        return false;
    }
    if (out->status == VALUES_INCOMPARABLE) {
        return true;
    }
    if (!same_dims(x.dims, y.dims)) {
        out->status = VALUES_SHAPE;
        out->why = "shapes differ";
        return true;
    }
    bool same_type = strcmp(x.dtype_name, y.dtype_name) == 0;
    bool numbers = number_of(&x) != NO_NUMBER && number_of(&y) != NO_NUMBER;
    elements e[2];
    out->elements = (int64_t)look_elements(&x);
    if (!numbers && !same_type) {
        out->status = VALUES_INCOMPARABLE;
        out->why = "the values of one of these types are not known";
        return true;
    }
    if (same_type) {
        if (!load_both(l, a, i, b, at, false, e)) {
            return false;
        }
        bool equal = memcmp(e[0].data, e[1].data, (size_t)look_bytes(&x)) == 0;
        if (!equal && !numbers) {
            compare_bits(&e[0], &e[1], out->elements, mu_dtype_bytes(x.dtype), out);
        }
        free(e[0].data);
        free(e[1].data);
        if (equal || !numbers) {
            out->no_numbers = !numbers;
            out->status = out->differ > 0 ? VALUES_DIFFER : VALUES_EQUAL;
            return true;
        }
    }
    if (!load_both(l, a, i, b, at, true, e)) {
        return false;
    }
    compare_numbers(&e[0], &e[1], out->elements, rtol, atol, out);
    free(e[0].data);
    free(e[1].data);
    out->status = out->differ > 0 ? VALUES_DIFFER : VALUES_EQUAL;
    return true;
}
