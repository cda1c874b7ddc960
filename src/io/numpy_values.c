/* NumPy's pickles: numpy.core.multiarray._reconstruct with a state, .scalar, and numpy.core.numeric._frombuffer of
 * protocol 5; numpy._core since NumPy 2. Their bytes are checked against shape and type before anything trusts them. */
#include "io/numpy_values.h"

#include <stdio.h>
#include <string.h>

typedef struct np_type {
    char kind;  /* 'f', 'i', 'u', 'b', 'c'; others are no numbers */
    int64_t bytes;
    bool big_endian;
} np_type;

static const mui_value *argument(const mui_value *v, size_t i)
{
    return v != NULL && v->kind == MUI_TUPLE && i < v->seq.count ? v->seq.items[i] : NULL;
}

static bool is_numpy(const mui_value *g, const char *part, const char *name)
{
    char old[40], new[40];
    snprintf(old, sizeof(old), "numpy.core.%s", part);
    snprintf(new, sizeof(new), "numpy._core.%s", part);
    return mui_global_is(g, old, name) || mui_global_is(g, new, name);
}

/* numpy.dtype('f8', False, True) with the state (3, '<', ...): the state's byte order counts. */
static bool type_of(const mui_value *v, np_type *out)
{
    if (v == NULL || v->kind != MUI_OBJECT || !mui_global_is(v->object->callable, "numpy", "dtype")) {
        return false;
    }
    const mui_value *text = argument(v->object->args, 0), *order = argument(v->object->state, 1);
    if (text == NULL || (text->kind != MUI_STR && text->kind != MUI_BYTES) || text->text.bytes < 2 ||
        text->text.bytes > 8) {
        return false;
    }
    const char *s = text->text.data, *end = s + text->text.bytes;
    *out = (np_type){0};
    if (*s == '<' || *s == '>' || *s == '|' || *s == '=') {
        out->big_endian = *s++ == '>';
    }
    if (s == end) {
        return false;
    }
    for (out->kind = *s++; s < end; s++) {
        if (*s < '0' || *s > '9') {
            return false;
        }
        out->bytes = out->bytes * 10 + (*s - '0');
    }
    if (order != NULL && (order->kind == MUI_STR || order->kind == MUI_BYTES)) {
        out->big_endian = mui_slice_is(order->text, ">");
    }
    return true;
}

static const mui_torch_dtype *dtype_of(np_type t)
{
    static const struct {
        char kind;
        int bytes;
        const char *name;
    } rows[] = {{'f', 4, "float32"}, {'f', 8, "float64"},   {'f', 2, "float16"},    {'i', 8, "int64"},
                {'i', 4, "int32"},   {'i', 2, "int16"},     {'i', 1, "int8"},       {'u', 1, "uint8"},
                {'u', 2, "uint16"},  {'u', 4, "uint32"},    {'u', 8, "uint64"},     {'b', 1, "bool"},
                {'c', 8, "complex64"}, {'c', 16, "complex128"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].kind == t.kind && rows[i].bytes == t.bytes) {
            return mui_torch_dtype_named(rows[i].name);
        }
    }
    return NULL;
}

/* Protocol 2 has no bytes: they are _codecs.encode(text, 'latin1'), one character each. */
static bool latin1(const mui_meaning *w, mui_slice text, mui_slice *out)
{
    unsigned char *to = mui_arena_alloc(w->arena, text.bytes > 0 ? text.bytes : 1);
    size_t n = 0;
    *w->work += text.bytes; /* many arrays may share one text */
    for (size_t i = 0; to != NULL && i < text.bytes; i++) {
        unsigned char c = (unsigned char)text.data[i];
        if (c >= 0x80) {
            if ((c & 0xfc) != 0xc0 || i + 1 == text.bytes) {
                return false; /* above U+00FF */
            }
            c = (unsigned char)(c << 6 | ((unsigned char)text.data[++i] & 0x3f));
        }
        to[n++] = c;
    }
    *out = (mui_slice){(const char *)to, n};
    return to != NULL;
}

static bool bytes_of(const mui_meaning *w, const mui_value *v, mui_slice *out)
{
    if (v == NULL) {
        return false;
    }
    if (v->kind == MUI_BYTES || v->kind == MUI_STR) { /* Python 2's str may look like a text */
        *out = v->text;
        return true;
    }
    if (v->kind != MUI_OBJECT) {
        return false;
    }
    const mui_value *args = v->object->args, *text = argument(args, 0), *coding = argument(args, 1);
    if (mui_global_is(v->object->callable, "_codecs", "encode")) {
        return text != NULL && text->kind == MUI_STR && (mui_text_is(coding, "latin1") || mui_text_is(coding, "latin-1")) &&
               latin1(w, text->text, out);
    }
    if (mui_global_is(v->object->callable, "builtins", "bytes") || mui_global_is(v->object->callable, "builtins", "bytearray")) {
        *out = (mui_slice){"", 0};
        return text == NULL || ((text->kind == MUI_BYTES || text->kind == MUI_STR) && (*out = text->text, true));
    }
    return false;
}

/* What both kinds of record say. shape NULL: a scalar. */
typedef struct description {
    const mui_value *shape, *type, *data;
    bool fortran;
} description;

static mui_tensor_verdict build(const mui_meaning *w, const description *d, mui_file_tensor *out, char *problem,
                                size_t problem_bytes)
{
    np_type type;
    mui_slice data;
    if (!type_of(d->type, &type) || strchr("fiubc", type.kind) == NULL) {
        return MUI_NOT_TENSOR;
    }
    out->array = true;
    if (d->shape != NULL && !mui_shape_read(d->shape, out->dim, &out->ndim, problem, problem_bytes)) {
        return MUI_BROKEN;
    }
    out->dtype = dtype_of(type);
    if (out->dtype == NULL) {
        out->note = "of a NumPy type that PyTorch does not have";
        return MUI_IS_TENSOR;
    }
    int64_t elements = 1;
    for (int i = 0; i < out->ndim; i++) {
        if (__builtin_mul_overflow(elements, out->dim[i], &elements) || elements > INT64_MAX / 16) {
            snprintf(problem, problem_bytes, "its shape overflows 64 bits");
            return MUI_BROKEN;
        }
    }
    int64_t stride = 1;
    for (int i = 0; i < out->ndim; i++) {
        int at = d->fortran ? i : out->ndim - 1 - i;
        out->stride[at] = stride;
        stride *= out->dim[at] > 0 ? out->dim[at] : 1; /* at most `elements` where it matters */
        stride = stride > INT64_MAX / 16 ? 0 : stride;
    }
    if (!bytes_of(w, d->data, &data)) {
        snprintf(problem, problem_bytes, "the data of this NumPy array are a %s, bytes were expected",
                 d->data != NULL ? mui_kind_name(d->data->kind) : "None");
        return MUI_BROKEN;
    }
    if (data.bytes != (size_t)elements * out->dtype->bytes) {
        snprintf(problem, problem_bytes, "a NumPy array of %lld elements of %s needs %zu bytes and has %zu",
                 (long long)elements, out->dtype->name, (size_t)elements * out->dtype->bytes, data.bytes);
        return MUI_BROKEN;
    }
    mui_blob *blob = mui_arena_calloc(w->arena, 1, sizeof(*blob));
    mui_storage_ref *ref = mui_arena_calloc(w->arena, 1, sizeof(*ref));
    if (blob == NULL || ref == NULL) {
        snprintf(problem, problem_bytes, "out of memory");
        return MUI_BROKEN;
    }
    *blob = (mui_blob){.key = "", .dtype = out->dtype, .elements = elements, .data = (const unsigned char *)data.data,
                       .order = type.big_endian ? MUI_ORDER_BIG : MUI_ORDER_LITTLE};
    *ref = (mui_storage_ref){.blob = blob, .dtype = out->dtype, .elements = elements, .place = ""};
    out->storage = ref;
    out->note = out->dtype->exact ? NULL : "of a type that only its bytes can be read of";
    return MUI_IS_TENSOR;
}

mui_tensor_verdict mui_numpy_read(const mui_meaning *w, const mui_value *v, mui_file_tensor *out, mui_value **inner,
                                  char *problem, size_t problem_bytes)
{
    const mui_value *f = v->object->callable, *args = v->object->args, *state = v->object->state;
    description d = {0};
    if (w->arena == NULL || f->kind != MUI_GLOBAL || f->global.module.bytes < 6 || memcmp(f->global.module.data, "numpy.", 6) != 0) {
        return MUI_NOT_TENSOR;
    }
    if (is_numpy(f, "multiarray", "scalar")) {
        d = (description){.type = argument(args, 0), .data = argument(args, 1)};
        return d.data != NULL ? build(w, &d, out, problem, problem_bytes) : MUI_NOT_TENSOR;
    }
    if (is_numpy(f, "numeric", "_frombuffer")) {
        d = (description){.data = argument(args, 0), .type = argument(args, 1), .shape = argument(args, 2),
                          .fortran = mui_text_is(argument(args, 3), "F")};
    } else if (is_numpy(f, "multiarray", "_reconstruct") && state != NULL && state->kind == MUI_TUPLE &&
               state->seq.count >= 4) {
        size_t first = state->seq.count >= 5; /* a version goes before; not in the oldest */
        const mui_value *fortran = argument(state, first + 2);
        d = (description){.shape = argument(state, first), .type = argument(state, first + 1),
                          .data = argument(state, first + 3),
                          .fortran = fortran->kind == MUI_BOOL ? fortran->truth : fortran->kind == MUI_INT && fortran->i};
    }
    if (d.shape == NULL) {
        return MUI_NOT_TENSOR;
    }
    if (d.data->kind == MUI_LIST) { /* of objects */
        *inner = state->seq.items[state->seq.count >= 5 ? 4 : 3];
        return MUI_WRAPS;
    }
    return build(w, &d, out, problem, problem_bytes);
}
