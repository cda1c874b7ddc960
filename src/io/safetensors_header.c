/* Reads {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"key": "text"}}. */
#include "io/safetensors_header.h"
#include "base/alloc.h"
#include "io/tree.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reading {
    mui_json json;
    mui_arena *keep;
    mui_st_header *h;
    bool has_metadata;
    bool warned; /* of a field that is not known */
} reading;

#define BAD(r, ...) mui_fail((r)->json.context, MU_ERR_FORMAT, __VA_ARGS__)

static const char *type_name(const json_t *v)
{
    static const char *const names[] = {"an object", "an array", "a text", "an integer", "a real number",
                                        "true", "false", "null"};
    return names[json_typeof(v)];
}

/* -- one tensor --------------------------------------------------------------------------------------------------- */

/* A number that a field must have. JSON has no other integers than these: jansson refuses what 64 bits cannot hold. */
static bool natural(const reading *r, const char *name, const char *field, size_t i, const json_t *v, int64_t *out)
{
    if (!json_is_integer(v)) {
        BAD(r, "%s: tensor '%.200s': %s has %s at %zu, where an integer was expected", r->json.path, name, field,
            type_name(v), i);
        return false;
    }
    *out = json_integer_value(v);
    if (*out < 0) {
        BAD(r, "%s: tensor '%.200s': %s is %" PRId64 " at %zu", r->json.path, name, field, *out, i);
        return false;
    }
    return true;
}

static const json_t *field_of(const reading *r, const char *name, const json_t *o, const char *field, json_type type)
{
    const json_t *v = json_object_get(o, field);
    if (v == NULL) {
        BAD(r, "%s: tensor '%.200s' has no %s", r->json.path, name, field);
        return NULL;
    }
    if (json_typeof(v) != type) {
        BAD(r, "%s: tensor '%.200s': its %s is %s, %s was expected", r->json.path, name, field, type_name(v),
            type == JSON_ARRAY ? "an array" : "a text");
        return NULL;
    }
    return v;
}

static mu_status read_shape(const reading *r, const char *name, const json_t *shape, mui_file_tensor *t, int64_t *elements)
{
    size_t n = json_array_size(shape);
    if (n > MUI_MAX_FILE_DIMS) {
        return BAD(r, "%s: tensor '%.200s' has %zu dimensions, more than %d", r->json.path, name, n,
                   MUI_MAX_FILE_DIMS);
    }
    t->dim = mui_arena_calloc(r->keep, 2 * n + 2, sizeof(*t->dim)); /* one more each: what is packed may need an axis */
    if (t->dim == NULL) {
        return mu_context_status(r->json.context);
    }
    t->stride = t->dim + n + 1;
    int64_t all = 1, nonzero = 1;
    for (size_t i = 0; i < n; i++) {
        if (!natural(r, name, "its shape", i, json_array_get(shape, i), &t->dim[i])) {
            return MU_ERR_FORMAT;
        }
        all *= t->dim[i] != 0; /* a shape like (2^62, 2^62, 0) has no elements, but no honest file has it either */
        if (__builtin_mul_overflow(nonzero, t->dim[i] != 0 ? t->dim[i] : 1, &nonzero) || nonzero > INT64_MAX / 64) {
            return BAD(r, "%s: tensor '%.200s': its shape overflows 64 bits", r->json.path, name);
        }
    }
    t->ndim = (int)n;
    *elements = all * nonzero;
    return MU_OK;
}

/* Elements that share bytes: the last dimension counts bytes where it can, as PyTorch's float4_e2m1fn_x2 does, else
 * there is one dimension of bytes and the note tells the shape. */
static mu_status pack(const reading *r, mui_file_tensor *t, int64_t *elements)
{
    int bits = t->dtype->packed_bits;
    t->note = "of a type of which only the bytes can be read";
    if (t->dtype->packed_bits == 0) {
        return MU_OK;
    }
    int64_t bytes = *elements * bits / 8;
    *elements = bytes;
    if (bits == 4 && t->ndim > 0 && t->dim[t->ndim - 1] % 2 == 0) {
        t->dim[t->ndim - 1] /= 2;
        return MU_OK;
    }
    char text[32 * MUI_MAX_FILE_DIMS + 128];
    int used = snprintf(text, sizeof(text), "packed, %d bits for each element of shape (", bits);
    for (int i = 0; i < t->ndim; i++) {
        used += snprintf(text + used, sizeof(text) - (size_t)used, "%s%" PRId64, i > 0 ? ", " : "", t->dim[i]);
    }
    snprintf(text + used, sizeof(text) - (size_t)used, "): only its bytes can be read");
    t->note = mui_arena_strdup(r->keep, text);
    t->ndim = 1;
    t->dim[0] = bytes;
    return t->note != NULL ? MU_OK : mu_context_status(r->json.context);
}

static void set_strides(mui_file_tensor *t)
{
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->stride[i] = stride;
        stride *= t->dim[i] != 0 ? t->dim[i] : 1;
    }
}

static mu_status check_size(const reading *r, const mui_st_tensor *x)
{
    const mui_file_tensor *t = x->tensor;
    uint64_t element_bits = t->dtype->packed_bits != 0 ? t->dtype->packed_bits : t->dtype->bytes * UINT64_C(8), bits = 0;
    if (x->begin > x->end) {
        return BAD(r, "%s: tensor '%.200s' begins at byte %" PRIu64 " of the data and ends before, at %" PRIu64,
                   r->json.path, x->name, x->begin, x->end);
    }
    if (__builtin_mul_overflow((uint64_t)x->elements, element_bits, &bits)) {
        return BAD(r, "%s: tensor '%.200s': its %" PRId64 " elements of %s overflow 64 bits", r->json.path, x->name,
                   x->elements, t->dtype->safetensors);
    }
    if (bits % 8 != 0) {
        return BAD(r, "%s: tensor '%.200s': its %" PRId64 " elements of %s do not fill whole bytes", r->json.path,
                   x->name, x->elements, t->dtype->safetensors);
    }
    if (x->end - x->begin != bits / 8) {
        return BAD(r, "%s: tensor '%.200s' has %" PRIu64 " bytes (data_offsets %" PRIu64 " to %" PRIu64
                      "), its %" PRId64 " elements of %s need %" PRIu64,
                   r->json.path, x->name, x->end - x->begin, x->begin, x->end, x->elements, t->dtype->safetensors,
                   bits / 8);
    }
    return MU_OK;
}

/* Python's reader ignores fields that it does not know, and so does this one, but not silently. */
static void look_for_others(reading *r, const char *name, json_t *o)
{
    const char *key = NULL;
    json_t *v = NULL;
    json_object_foreach(o, key, v)
    {
        bool known = strcmp(key, "dtype") == 0 || strcmp(key, "shape") == 0 || strcmp(key, "data_offsets") == 0;
        if (!known && !r->warned) {
            r->warned = true;
            mui_log(r->json.context, MU_LOG_WARN,
                    "%s: tensor '%.200s' has a field '%.200s' that is not known; it is ignored", r->json.path, name, key);
        }
    }
}

static mu_status read_fields(reading *r, mui_st_tensor *x, json_t *o)
{
    const char *name = x->name;
    if (!json_is_object(o)) {
        return BAD(r, "%s: tensor '%.200s' is described by %s, an object was expected", r->json.path, name,
                   type_name(o));
    }
    const json_t *dtype = field_of(r, name, o, "dtype", JSON_STRING);
    const json_t *shape = dtype != NULL ? field_of(r, name, o, "shape", JSON_ARRAY) : NULL;
    const json_t *offsets = shape != NULL ? field_of(r, name, o, "data_offsets", JSON_ARRAY) : NULL;
    if (offsets == NULL) {
        return mu_context_status(r->json.context);
    }
    mui_file_tensor *t = x->tensor;
    t->dtype = mui_torch_dtype_of_safetensors(json_string_value(dtype));
    if (t->dtype == NULL) {
        return BAD(r, "%s: tensor '%.200s' is of type '%.60s', which safetensors does not have", r->json.path, name,
                   json_string_value(dtype));
    }
    mu_status s = read_shape(r, name, shape, t, &x->elements);
    if (s != MU_OK) {
        return s;
    }
    int64_t ends[2] = {0, 0};
    if (json_array_size(offsets) != 2) {
        return BAD(r, "%s: tensor '%.200s': its data_offsets are %zu numbers, 2 were expected", r->json.path, name,
                   json_array_size(offsets));
    }
    for (size_t i = 0; i < 2; i++) {
        if (!natural(r, name, "its data_offsets", i, json_array_get(offsets, i), &ends[i])) {
            return MU_ERR_FORMAT;
        }
    }
    x->begin = (uint64_t)ends[0];
    x->end = (uint64_t)ends[1];
    look_for_others(r, name, o);
    s = check_size(r, x);
    if (s == MU_OK && !t->dtype->exact) {
        s = pack(r, t, &x->elements);
    }
    set_strides(t);
    return s;
}

static mu_status read_tensor(reading *r, const mui_json_member *m)
{
    mui_st_header *h = r->h;
    if (m->name_bytes > MUI_MAX_NAME_BYTES) {
        return mui_fail(r->json.context, MU_ERR_LIMIT, "%s: a tensor's name is longer than %d bytes", r->json.path,
                        MUI_MAX_NAME_BYTES);
    }
    if (h->count == MUI_MAX_ENTRIES) {
        return mui_fail(r->json.context, MU_ERR_LIMIT, "%s: more than %d tensors are named", r->json.path,
                        MUI_MAX_ENTRIES);
    }
    if (!MUI_GROW(h->context, h->tensors, h->count, h->capacity)) {
        return MU_ERR_NOMEM;
    }
    mui_st_tensor *x = &h->tensors[h->count];
    *x = (mui_st_tensor){.name = mui_arena_strdup(r->keep, m->name),
                         .tensor = mui_arena_calloc(r->keep, 1, sizeof(*x->tensor)),
                         .index = h->count};
    if (x->name == NULL || x->tensor == NULL) {
        return mu_context_status(r->json.context);
    }
    char what[240];
    snprintf(what, sizeof(what), "tensor '%.200s'", x->name);
    json_t *o = mui_json_value(&r->json, m, what);
    if (o == NULL) {
        return mu_context_status(r->json.context);
    }
    mu_status s = read_fields(r, x, o);
    json_decref(o);
    h->count++;
    return s;
}

/* -- metadata ----------------------------------------------------------------------------------------------------- */

static int by_key(const void *a, const void *b)
{
    return strcmp(((const mui_st_pair *)a)->key, ((const mui_st_pair *)b)->key);
}

static mu_status read_pair(reading *r, mui_json *inner, const mui_json_member *m)
{
    mui_st_header *h = r->h;
    json_t *v = m->value[0] == '"' ? mui_json_value(inner, m, "a text") : NULL;
    if (v == NULL) {
        return mui_failed(h->context)
                   ? mu_context_status(h->context)
                   : BAD(r, "%s: __metadata__ has something other than a text under '%.200s', at byte %zu", r->json.path,
                         m->name, inner->base + m->at);
    }
    mui_st_pair p = {mui_arena_strdup(&h->scratch, m->name), mui_arena_strdup(&h->scratch, json_string_value(v))};
    json_decref(v);
    if (p.key == NULL || p.value == NULL || !MUI_GROW(h->context, h->pairs, h->pair_count, h->pair_capacity)) {
        return mu_context_status(h->context);
    }
    h->pairs[h->pair_count++] = p;
    return MU_OK;
}

static mu_status read_metadata(reading *r, const mui_json_member *m)
{
    mui_st_header *h = r->h;
    if (r->has_metadata) {
        return BAD(r, "%s: the header has __metadata__ twice", r->json.path);
    }
    r->has_metadata = true;
    mui_json inner = mui_json_inner(&r->json, m, "__metadata__");
    mui_json_member pair;
    mu_status s = mui_json_begin(&inner);
    while (mui_json_next(&inner, &pair, &s)) {
        s = read_pair(r, &inner, &pair);
    }
    if (s == MU_OK && h->pair_count > 1) {
        qsort(h->pairs, h->pair_count, sizeof(*h->pairs), by_key);
    }
    for (size_t i = 1; s == MU_OK && i < h->pair_count; i++) {
        if (strcmp(h->pairs[i - 1].key, h->pairs[i].key) == 0) {
            s = BAD(r, "%s: __metadata__ has '%.200s' twice", r->json.path, h->pairs[i].key);
        }
    }
    return s;
}

mu_status mui_st_header_read(mu_context *c, const char *path, const char *text, size_t bytes, mui_arena *keep,
                             mui_st_header *out)
{
    *out = (mui_st_header){.context = c};
    mui_arena_init(&out->scratch, c);
    reading r = {.json = {.context = c, .path = path, .what = "the header", .text = text, .bytes = bytes, .base = 8},
                 .keep = keep,
                 .h = out};
    mui_json_member m;
    mu_status s = mui_json_begin(&r.json);
    while (mui_json_next(&r.json, &m, &s)) {
        s = strcmp(m.name, "__metadata__") == 0 ? read_metadata(&r, &m) : read_tensor(&r, &m);
    }
    return s;
}

void mui_st_header_free(mui_st_header *h)
{
    mui_free(h->context, h->tensors);
    mui_free(h->context, h->pairs);
    mui_arena_free(&h->scratch);
    *h = (mui_st_header){0};
}
