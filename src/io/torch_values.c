/* Storages and tensor constructors, and every check of the numbers they bring. Constructors as in torch/_utils.py. */
#include "io/numpy_values.h"

#include <stdio.h>
#include <string.h>

static int shown(mui_slice s)
{
    return s.bytes < 80 ? (int)s.bytes : 80;
}

static bool int_of(const mui_value *v, int64_t *out)
{
    if (v == NULL || v->kind != MUI_INT) {
        return false;
    }
    *out = v->i;
    return true;
}

mu_status mui_storage_ref_read(mu_context *c, const char *path, const mui_value *id, bool legacy,
                               mui_find_blob_fn find, void *user, mui_storage_ref *out)
{
    if (id->kind != MUI_TUPLE || id->seq.count < 2) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: a persistent id is a %s, not ('storage', class, key, location, count)",
                        path, mui_kind_name(id->kind));
    }
    mui_value **item = id->seq.items;
    *out = (mui_storage_ref){0};
    if (legacy && mui_text_is(item[0], "module")) { /* the source of a class goes along; its value is the class */
        out->class_value = item[1];
        return MU_OK;
    }
    int64_t elements = 0;
    if (!mui_text_is(item[0], "storage") || id->seq.count != (legacy ? 6u : 5u) || item[2]->kind != MUI_STR ||
        item[3]->kind != MUI_STR || !int_of(item[4], &elements)) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: a persistent id is not ('storage', class, key, location, count%s)", path,
                        legacy ? ", view" : "");
    }
    mui_slice key = item[2]->text;
    const mui_torch_dtype *dtype = mui_torch_dtype_of_storage(item[1]);
    if (dtype == NULL) {
        bool is_global = item[1]->kind == MUI_GLOBAL;
        mui_slice none = {"", 0}, module = is_global ? item[1]->global.module : none;
        mui_slice name = is_global ? item[1]->global.name : none;
        return mui_fail(c, MU_ERR_FORMAT, "%s: storage '%.*s' is of class %.*s.%.*s, which is no storage of PyTorch's",
                        path, shown(key), key.data, shown(module), module.data, shown(name), name.data);
    }
    if (elements < 0 || elements > INT64_MAX / 16) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: storage '%.*s' is said to have %lld elements", path, shown(key), key.data,
                        (long long)elements);
    }
    mui_blob *blob = find(user, key);
    if (blob == NULL) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: the data of storage '%.*s' (%lld elements of %s) are not in the file",
                        path, shown(key), key.data, (long long)elements, dtype->name);
    }
    bool untyped = mui_torch_is_untyped_storage(item[1]);
    if (blob->dtype != NULL && (blob->dtype != dtype || blob->untyped != untyped || blob->elements != elements)) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: storage '%s' is %lld elements of %s in one place and %lld of %s in another",
                        path, blob->key, (long long)blob->elements, blob->dtype->name, (long long)elements,
                        dtype->name);
    }
    blob->dtype = dtype;
    blob->untyped = untyped;
    blob->elements = elements;
    *out = (mui_storage_ref){.blob = blob, .dtype = dtype, .elements = elements, .location = item[3]->text};
    if (legacy && item[5]->kind != MUI_NONE) {
        const mui_value *view = item[5];
        int64_t at = 0, count = 0;
        if (view->kind != MUI_TUPLE || view->seq.count != 3 || !int_of(view->seq.items[1], &at) ||
            !int_of(view->seq.items[2], &count) || at < 0 || count < 0 || at > elements || count > elements - at) {
            return mui_fail(c, MU_ERR_FORMAT, "%s: a view of storage '%.*s' does not lie inside its %lld elements", path,
                            shown(key), key.data, (long long)elements);
        }
        out->offset = at;
        out->elements = count;
    }
    return MU_OK;
}

/* -- tensors ------------------------------------------------------------------------------------------------------ */

typedef struct problem {
    char *text;
    size_t bytes;
} problem;
#define PROBLEM(p, ...) (snprintf((p)->text, (p)->bytes, __VA_ARGS__), false)

/* A tuple of integers, or torch.Size of one. */
static bool ints_of(const mui_value *v, int64_t *out, int *count, const char *what, problem *p)
{
    if (v->kind == MUI_OBJECT && mui_global_is(v->object->callable, "torch", "Size") &&
        v->object->args->seq.count == 1) {
        v = v->object->args->seq.items[0];
    }
    if (v->kind != MUI_TUPLE && v->kind != MUI_LIST) {
        return PROBLEM(p, "its %s is a %s", what, mui_kind_name(v->kind));
    }
    if (v->seq.count > MUI_MAX_FILE_DIMS) {
        return PROBLEM(p, "its %s has %zu dimensions, more than %d", what, v->seq.count, MUI_MAX_FILE_DIMS);
    }
    for (size_t i = 0; i < v->seq.count; i++) {
        if (!int_of(v->seq.items[i], &out[i])) {
            return PROBLEM(p, "its %s has a %s at %zu", what, mui_kind_name(v->seq.items[i]->kind), i);
        }
        if (out[i] < 0) {
            return PROBLEM(p, "its %s is %lld at %zu", what, (long long)out[i], i);
        }
    }
    *count = (int)v->seq.count;
    return true;
}

bool mui_shape_read(const mui_value *v, int64_t *dim, int *ndim, char *problem_text, size_t problem_bytes)
{
    problem p = {problem_text, problem_bytes};
    return ints_of(v, dim, ndim, "shape", &p);
}

/* The view lies inside the storage; all in 64 bits with overflow seen. */
static bool check_view(const mui_file_tensor *t, problem *p)
{
    int64_t last = t->offset, all = 1;
    bool empty = false, over = false;
    for (int i = 0; i < t->ndim; i++) {
        int64_t reach = 0;
        empty |= t->dim[i] == 0;
        over |= t->dim[i] != 0 && __builtin_mul_overflow(all, t->dim[i], &all);
        if (t->dim[i] > 0) {
            over |= __builtin_mul_overflow(t->dim[i] - 1, t->stride[i], &reach);
            over |= __builtin_add_overflow(last, reach, &last);
        }
    }
    /* A shape like (2^62, 2^62, 0) has no elements, but no honest file has it either. */
    if (over || all > INT64_MAX / 16) {
        return PROBLEM(p, "its shape or strides overflow 64 bits");
    }
    if (!empty && last >= t->storage->elements) {
        return PROBLEM(p, "it reaches element %lld of storage '%s', which has %lld", (long long)last,
                       t->storage->blob->key, (long long)t->storage->elements);
    }
    return true;
}

static const mui_storage_ref *storage_of(const mui_meaning *w, const mui_value *v)
{
    if (v->kind != MUI_PERSISTENT) {
        return NULL;
    }
    const mui_storage_ref *r = &w->refs[v->number];
    return r->blob != NULL ? r : NULL;
}

static bool is_true(const mui_value *v)
{
    return v != NULL && v->kind == MUI_BOOL && v->truth;
}

static void read_flags(const mui_value *metadata, mui_file_tensor *out)
{
    if (metadata->kind != MUI_DICT) {
        return;
    }
    /* Two keys are known; many tensors may share a dict of very many. */
    for (size_t i = 0; i + 1 < metadata->seq.count && i < 32; i += 2) {
        const mui_value *on = metadata->seq.items[i + 1];
        bool yes = is_true(on);
        out->conjugate |= yes && mui_text_is(metadata->seq.items[i], "conj");
        out->negative |= yes && mui_text_is(metadata->seq.items[i], "neg");
    }
}

/* _rebuild_tensor, _v2, _v3 and _rebuild_qtensor begin alike: storage, offset, size, stride. */
static bool read_strided(const mui_meaning *w, const mui_value *args, mui_file_tensor *out, problem *p)
{
    mui_value **a = args->seq.items;
    int strides = 0;
    if (args->seq.count < 4) {
        return PROBLEM(p, "its constructor has %zu arguments", args->seq.count);
    }
    out->storage = storage_of(w, a[0]);
    if (out->storage == NULL) {
        return PROBLEM(p, "its storage is a %s", mui_kind_name(a[0]->kind));
    }
    out->dtype = out->storage->dtype;
    if (!int_of(a[1], &out->offset) || out->offset < 0) {
        return PROBLEM(p, "its offset is %s", a[1]->kind == MUI_INT ? "negative" : "not an integer");
    }
    if (!ints_of(a[2], out->dim, &out->ndim, "shape", p) || !ints_of(a[3], out->stride, &strides, "stride", p)) {
        return false;
    }
    if (out->ndim != strides) {
        return PROBLEM(p, "its shape has %d dimensions and its stride %d", out->ndim, strides);
    }
    out->requires_grad = args->seq.count >= 5 && is_true(a[4]);
    return true;
}

static bool read_v3(const mui_meaning *w, const mui_value *args, mui_file_tensor *out, problem *p)
{
    if (!read_strided(w, args, out, p)) {
        return false;
    }
    const mui_torch_dtype *d = args->seq.count >= 7 ? mui_torch_dtype_of_name(args->seq.items[6]) : NULL;
    if (d == NULL) {
        return PROBLEM(p, "its element type is not known");
    }
    out->dtype = d;
    if (!d->exact) {
        out->note = "of a type that only its bytes can be read of";
    }
    if (args->seq.count >= 8) {
        read_flags(args->seq.items[7], out);
    }
    /* The storage counts bytes; offset and strides count elements. */
    int64_t have = out->storage->elements * out->storage->dtype->bytes / d->bytes;
    mui_storage_ref counted = *out->storage;
    counted.elements = have;
    mui_file_tensor t = *out;
    t.storage = &counted;
    return check_view(&t, p);
}

/* A tensor without strided data: only its shape is told, where it is plain to see. */
static bool read_dataless(const char *note, const mui_value *shape, const mui_value *dtype, mui_file_tensor *out)
{
    char ignored[64];
    problem p = {ignored, sizeof(ignored)};
    out->note = note;
    out->dtype = dtype != NULL ? mui_torch_dtype_of_name(dtype) : NULL;
    if (shape == NULL || !ints_of(shape, out->dim, &out->ndim, "shape", &p)) {
        out->ndim = 0;
    }
    return true;
}

static mui_value *item_of(const mui_value *v, size_t i)
{
    return mui_is_sequence(v) && i < v->seq.count ? v->seq.items[i] : NULL;
}

/* (layout, (indices, values, size, ...)) or, compressed, (layout, (rows, columns, values, size)): the shape follows the
 * tensors, and the last of these has the values. */
static bool read_sparse(const mui_meaning *w, const mui_value *args, mui_file_tensor *out)
{
    const mui_value *parts = item_of(args, 1), *shape = NULL, *values = NULL;
    char ignored[64];
    problem p = {ignored, sizeof(ignored)};
    for (size_t i = 2; i < 4 && shape == NULL; i++) {
        const mui_value *v = item_of(parts, i);
        bool is_size = v != NULL && (v->kind == MUI_TUPLE ||
                                     (v->kind == MUI_OBJECT && mui_global_is(v->object->callable, "torch", "Size")));
        shape = is_size ? v : NULL;
        values = is_size ? item_of(parts, i - 1) : NULL;
    }
    read_dataless("sparse: cannot be read", shape, NULL, out);
    mui_axes ignored_axes;
    mui_file_tensor t = {.dim = ignored_axes.dim, .stride = ignored_axes.stride};
    if (values != NULL && values->kind == MUI_OBJECT && read_strided(w, values->object->args, &t, &p)) {
        out->dtype = t.dtype;
    }
    return true;
}

static bool read_utils(const mui_meaning *w, mui_slice name, const mui_value *args, mui_file_tensor *out, bool *known,
                       problem *p)
{
    *known = true;
    if (mui_slice_is(name, "_rebuild_tensor")) {
        return read_strided(w, args, out, p) && check_view(out, p);
    }
    if (mui_slice_is(name, "_rebuild_tensor_v2")) {
        if (args->seq.count >= 7) {
            read_flags(args->seq.items[6], out);
        }
        return read_strided(w, args, out, p) && check_view(out, p);
    }
    if (mui_slice_is(name, "_rebuild_tensor_v3")) {
        return read_v3(w, args, out, p);
    }
    if (mui_slice_is(name, "_rebuild_qtensor")) {
        out->note = "quantised: read as its integers";
        out->quantizer = item_of(args, 4);
        return read_strided(w, args, out, p) && check_view(out, p);
    }
    if (mui_slice_is(name, "_rebuild_meta_tensor_no_storage")) {
        return read_dataless("on the meta device: it has no data", item_of(args, 1), item_of(args, 0), out);
    }
    if (mui_slice_is(name, "_rebuild_sparse_tensor") || mui_slice_is(name, "_rebuild_sparse_csr_tensor")) {
        return read_sparse(w, args, out);
    }
    if (mui_slice_is(name, "_rebuild_wrapper_subclass")) {
        return read_dataless("a tensor subclass without data", item_of(args, 2), item_of(args, 1), out);
    }
    *known = false;
    return true;
}

/* Constructors around another tensor; out gets what they say of it. */
static mui_value *wrapped(const mui_value *f, const mui_value *args, const mui_value *built, mui_file_tensor *out)
{
    mui_value *first = item_of(args, 0);
    if (mui_global_is(f, "torch._utils", "_rebuild_parameter") ||
        mui_global_is(f, "torch._utils", "_rebuild_parameter_with_state")) {
        out->role = MUI_PARAMETER;
        out->requires_grad = is_true(item_of(args, 1));
        return first;
    }
    if (mui_global_is(f, "torch._utils", "_rebuild_device_tensor_from_cpu_tensor")) {
        out->requires_grad = is_true(item_of(args, 3));
        return first;
    }
    if (mui_global_is(f, "torch.nn.parameter", "Parameter") || mui_global_is(f, "torch.nn.parameter", "Buffer") ||
        mui_global_is(f, "torch.autograd.variable", "Variable")) { /* before 0.4, tensors of a graph were Variables */
        mui_value *state = item_of(built, 0);
        out->role = mui_slice_is(f->global.name, "Buffer")      ? MUI_BUFFER
                    : mui_slice_is(f->global.name, "Parameter") ? MUI_PARAMETER
                                                                : MUI_NO_ROLE;
        out->requires_grad = is_true(state != NULL ? item_of(built, 1) : item_of(args, 1));
        return state != NULL ? state : first;
    }
    return NULL;
}

/* (array, dtype, device, requires_grad): XLA's and other devices' tensors. bfloat16 went through float32, which is then
 * what is read. */
static mui_tensor_verdict read_device_numpy(const mui_meaning *w, const mui_value *args, mui_file_tensor *out,
                                            mui_value **inner, char *problem_text, size_t problem_bytes)
{
    mui_value *array = args->seq.items[0];
    if (array->kind != MUI_OBJECT) {
        return MUI_NOT_TENSOR;
    }
    mui_tensor_verdict verdict = mui_numpy_read(w, array, out, inner, problem_text, problem_bytes);
    out->array = false;
    out->requires_grad = is_true(args->seq.items[3]);
    const mui_value *device = args->seq.items[2];
    if (verdict == MUI_IS_TENSOR && out->storage != NULL && device->kind == MUI_STR) {
        size_t n = device->text.bytes < MUI_MAX_PLACE_BYTES ? device->text.bytes : MUI_MAX_PLACE_BYTES;
        mui_storage_ref *ref = mui_arena_alloc(w->arena, sizeof(*ref));
        const char *place = mui_arena_strndup(w->arena, device->text.data, n);
        if (ref == NULL || place == NULL) {
            snprintf(problem_text, problem_bytes, "out of memory");
            return MUI_BROKEN;
        }
        *ref = *out->storage;
        ref->place = place;
        out->storage = ref;
    }
    return verdict;
}

mui_file_tensor *mui_file_tensor_keep(mui_arena *a, const mui_file_tensor *t)
{
    size_t n = (size_t)t->ndim;
    mui_file_tensor *copy = mui_arena_alloc(a, sizeof(*copy));
    int64_t *axes = copy != NULL ? mui_arena_calloc(a, 2 * n + 1, sizeof(*axes)) : NULL;
    if (axes == NULL) {
        return NULL;
    }
    *copy = *t;
    copy->dim = axes;
    copy->stride = axes + n;
    for (size_t i = 0; i < n; i++) {
        copy->dim[i] = t->dim[i];
        copy->stride[i] = t->stride[i];
    }
    return copy;
}

mui_tensor_verdict mui_tensor_read(const mui_meaning *w, const mui_value *v, mui_axes *room, mui_file_tensor *out,
                                   mui_value **inner, char *problem_text, size_t problem_bytes)
{
    problem p = {problem_text, problem_bytes};
    *out = (mui_file_tensor){.dim = room->dim, .stride = room->stride};
    if (v->kind == MUI_PERSISTENT) {
        out->storage = storage_of(w, v);
        if (out->storage == NULL) {
            return MUI_NOT_TENSOR;
        }
        out->dtype = out->storage->dtype;
        out->ndim = 1;
        out->dim[0] = out->storage->elements;
        out->stride[0] = 1;
        out->bare_storage = true;
        return MUI_IS_TENSOR;
    }
    if (v->kind != MUI_OBJECT) {
        return MUI_NOT_TENSOR;
    }
    *room = (mui_axes){.dim = {0}};
    const mui_value *callable = v->object->callable, *args = v->object->args;
    /* _rebuild_from_type_v2(function, type, arguments, state) calls function(*arguments). */
    if ((mui_global_is(callable, "torch._tensor", "_rebuild_from_type_v2") ||
         mui_global_is(callable, "torch._tensor", "_rebuild_from_type") ||
         mui_global_is(callable, "torch.tensor", "_rebuild_from_type")) &&
        args->seq.count >= 3 && args->seq.items[2]->kind == MUI_TUPLE) {
        callable = args->seq.items[0];
        args = args->seq.items[2];
    }
    mui_value *through = wrapped(callable, args, v->object->state, out);
    if (through != NULL) {
        *inner = through;
        return MUI_WRAPS;
    }
    if (mui_global_is(callable, "torch._utils", "_rebuild_device_tensor_from_numpy") && args->seq.count >= 4) {
        return read_device_numpy(w, args, out, inner, problem_text, problem_bytes);
    }
    mui_tensor_verdict numpy = mui_numpy_read(w, v, out, inner, problem_text, problem_bytes);
    if (numpy != MUI_NOT_TENSOR) {
        return numpy;
    }
    if (callable->kind != MUI_GLOBAL || !mui_slice_is(callable->global.module, "torch._utils")) {
        return MUI_NOT_TENSOR;
    }
    bool known = false;
    bool good = read_utils(w, callable->global.name, args, out, &known, &p);
    return !good ? MUI_BROKEN : known ? MUI_IS_TENSOR : MUI_NOT_TENSOR;
}
