/* Tensors as calls of torch._utils._rebuild_tensor_v2, or _v3 for the types without a storage class of their own, which
 * are over bytes (PyTorch 2.1 and later read them), or _rebuild_qtensor. */
#include "io/out_pickle.h"
#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

static void put_ints(mui_pickle_writer *w, const int64_t *v, int n)
{
    mui_pk_op(w, '(');
    for (int i = 0; i < n; i++) {
        mui_pk_int(w, v[i]);
    }
    mui_pk_op(w, 't');
}

static void put_strides(mui_pickle_writer *w, const mui_out_tensor *t)
{
    mui_pk_op(w, '(');
    for (int i = 0; i < t->ndim; i++) {
        int64_t run = 1;
        for (int j = i + 1; j < t->ndim; j++) {
            run *= t->dim[j] > 0 ? t->dim[j] : 1; /* as PyTorch counts */
        }
        mui_pk_int(w, run);
    }
    mui_pk_op(w, 't');
}

/* The persistent id: ('storage', class, key, 'cpu', elements), in legacy files with a sixth item, a view of old. */
static void put_storage(mui_pickle_writer *w, int64_t key, const mui_out_tensor *t)
{
    char text[24];
    snprintf(text, sizeof(text), "%lld", (long long)key);
    mui_pk_op(w, '(');
    mui_pk_text(w, "storage");
    if (t->dtype->storage != NULL) {
        mui_pk_global(w, "torch", t->dtype->storage);
    } else if (w->legacy) { /* PyTorch 2.15 writes UntypedStorage there too, and cannot read it back */
        mui_pk_global(w, "torch", "ByteStorage");
    } else {
        mui_pk_global(w, "torch.storage", "UntypedStorage");
    }
    mui_pk_text(w, text);
    mui_pk_text(w, "cpu");
    mui_pk_int(w, t->dtype->storage != NULL ? mui_out_elements(t) : (int64_t)mui_out_bytes(t));
    if (w->legacy) {
        mui_pk_op(w, 'N');
    }
    mui_pk_op(w, 't');
    mui_pk_op(w, 'Q');
}

/* Scales as floats; zero points as integers, but for the one scheme that has them as floats. */
static void put_numbers(mui_pickle_writer *w, const mu_quantization *q, const double *v, bool floats)
{
    bool list = q->axis >= 0;
    if (list) { /* PyTorch makes tensors of lists */
        mui_pk_op(w, ']');
        mui_pk_op(w, '(');
    }
    for (int64_t i = 0; i < q->count; i++) {
        if (floats) {
            mui_pk_float(w, v[i]);
        } else {
            mui_pk_int(w, (int64_t)v[i]);
        }
    }
    if (list) {
        mui_pk_op(w, 'e');
    }
}

static void put_quantization(mui_pickle_writer *w, const mu_quantization *q)
{
    mui_pk_op(w, '(');
    mui_pk_global(w, "torch", q->scheme);
    put_numbers(w, q, q->scales, true);
    put_numbers(w, q, q->zero_points, strstr(q->scheme, "float_qparams") != NULL);
    if (q->axis >= 0) {
        mui_pk_int(w, q->axis);
    }
    mui_pk_op(w, 't');
}

void mui_pk_out_tensor(mui_pickle_writer *w, int64_t key, const mui_out_tensor *t)
{
    bool bytes = t->dtype->storage == NULL;
    mui_pk_global(w, "torch._utils",
                  t->quantization != NULL ? "_rebuild_qtensor" : bytes ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    mui_pk_op(w, '(');
    put_storage(w, key, t);
    mui_pk_int(w, 0);
    put_ints(w, t->dim, t->ndim);
    put_strides(w, t);
    if (t->quantization != NULL) {
        put_quantization(w, t->quantization);
    }
    mui_pk_bool(w, false);
    mui_pk_ordered_dict(w);
    if (bytes) {
        mui_pk_global(w, "torch", t->dtype->name);
    }
    mui_pk_op(w, 't');
    mui_pk_op(w, 'R');
}

void mui_pk_tensor(mui_pickle_writer *w, int64_t key, mu_dtype dtype, mu_dims dims)
{
    mui_out_tensor t = {.dtype = mui_torch_dtype_for(dtype), .ndim = dims.ndim, .dim = dims.dim};
    mui_pk_out_tensor(w, key, &t);
}

/* Torch's attribute of state dicts: {module path: {'version': n}}. */
static void put_versions(mui_pickle_writer *w, const mui_out_list *l)
{
    mui_pk_ordered_dict(w);
    mui_pk_op(w, '(');
    for (size_t i = 0; i < l->version_count; i++) {
        mui_pk_text(w, l->versions[i].path);
        mui_pk_op(w, '}');
        mui_pk_text(w, "version");
        mui_pk_int(w, l->versions[i].version);
        mui_pk_op(w, 's');
    }
    mui_pk_op(w, 'u');
}

int64_t mui_pk_state_dict(mui_pickle_writer *w, const mui_out_list *l, int64_t first)
{
    int64_t next = first, *keys = mui_calloc(w->context, l->count, sizeof(*keys));
    if (keys == NULL) {
        w->failed = true;
        return next;
    }
    mui_pk_ordered_dict(w);
    mui_pk_op(w, '(');
    for (size_t i = 0; i < l->count; i++) {
        const mui_out_tensor *t = &l->tensors[i];
        keys[i] = t->same_as == i ? next++ : keys[t->same_as];
        mui_pk_text(w, t->name);
        mui_pk_out_tensor(w, keys[i], t);
    }
    mui_pk_op(w, 'u');
    if (l->has_versions) { /* state of the OrderedDict: its attribute _metadata */
        mui_pk_op(w, '}');
        mui_pk_text(w, "_metadata");
        put_versions(w, l);
        mui_pk_op(w, 's');
        mui_pk_op(w, 'b');
    }
    mui_free(w->context, keys);
    return next;
}
