/* Elements out of storages: any strides and offsets, byte order, and the odd flags of a view. */
#include "base/alloc.h"
#include "base/os.h"
#include "io/file_elements.h"

#include <string.h>

/* The file that has a tensor's data: k, or one of its shards. */
static mu_checkpoint_file *holder(mu_checkpoint_file *k, const mui_file_tensor *t)
{
    return t->storage != NULL && t->storage->blob->shard != NULL ? t->storage->blob->shard : k;
}

mu_status mui_tensor_bytes(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, size_t *bytes)
{
    k = holder(k, t);
    if (t->storage == NULL || t->dtype == NULL) {
        return mui_fail(k->context, MU_ERR_UNSUPPORTED, "%s: tensor '%s' is %s", k->path, name,
                        t->note != NULL ? t->note : "without data");
    }
    size_t n = t->dtype->bytes;
    for (int i = 0; i < t->ndim; i++) {
        if (!mui_size_mul(n, (size_t)t->dim[i], &n)) {
            return mui_fail(k->context, MU_ERR_LIMIT, "%s: tensor '%s' is too large", k->path, name);
        }
    }
    if (n > k->limits.tensor_bytes) {
        return mui_fail(k->context, MU_ERR_LIMIT,
                        "%s: tensor '%s' would take %zu bytes (its file has %zu), more than the limit of %llu%s",
                        k->path, name, n, k->map.bytes, (unsigned long long)k->limits.tensor_bytes,
                        k->limits.tensor_bytes == mui_ram_bytes() ? ", this machine's memory" : "");
    }
    *bytes = n;
    return MU_OK;
}

void mui_checkpoint_drop_inflated(mu_checkpoint_file *k)
{
    mui_free(k->context, k->inflated);
    k->inflated = NULL;
    k->inflated_blob = NULL;
}

/* One blob is kept inflated, so that memory stays small. Tensors that take turns between a few blobs would have them
 * inflated each time: what was inflated often is kept to the end, so that the time is bounded too. */
#define INFLATED_OFTEN 3

static mu_status blob_data(mu_checkpoint_file *k, mui_blob *b, const unsigned char **data)
{
    if (b->member == NULL) {
        *data = b->data;
        return MU_OK;
    }
    if (k->inflated_blob == b || b->inflated != NULL) {
        *data = b->inflated != NULL ? b->inflated : k->inflated;
        return MU_OK;
    }
    void *owned = NULL;
    mu_status s = mui_zip_read(&k->zip, b->member, data, &owned);
    if (s == MU_OK && owned != NULL && ++b->inflations > INFLATED_OFTEN) {
        b->inflated = owned;
    } else if (s == MU_OK && owned != NULL) {
        mui_checkpoint_drop_inflated(k);
        k->inflated = owned;
        k->inflated_blob = b;
    }
    return s;
}

static mui_view simplify(const mui_file_tensor *t)
{
    mui_view v = {0};
    for (int i = 0; i < t->ndim; i++) {
        if (t->dim[i] == 1) {
            continue;
        }
        int64_t whole = 0;
        if (v.ndim > 0 && !__builtin_mul_overflow(t->stride[i], t->dim[i], &whole) && v.stride[v.ndim - 1] == whole) {
            v.dim[v.ndim - 1] *= t->dim[i];
            v.stride[v.ndim - 1] = t->stride[i];
        } else {
            v.dim[v.ndim] = t->dim[i];
            v.stride[v.ndim++] = t->stride[i];
        }
    }
    return v;
}

static void copy_run(char *out, const unsigned char *in, int64_t n, int64_t stride, size_t bytes)
{
    if (stride == 1) {
        memcpy(out, in, (size_t)n * bytes);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy(out + (size_t)i * bytes, in + (size_t)(i * stride) * bytes, bytes);
    }
}

/* Elements [from, from + n) of the view; in is its first one. The view was checked to lie inside its storage. */
static void gather(const mui_view *v, const unsigned char *in, size_t bytes, int64_t from, int64_t n, char *out)
{
    int64_t at[MUI_MAX_FILE_DIMS] = {0};
    int last = v->ndim - 1;
    if (v->ndim == 0) {
        memcpy(out, in, (size_t)n * bytes); /* n is 0 or 1 */
        return;
    }
    for (int i = last; i >= 0; i--) {
        at[i] = from % v->dim[i];
        from /= v->dim[i];
        in += (size_t)(at[i] * v->stride[i]) * bytes;
    }
    while (n > 0) {
        int64_t run = v->dim[last] - at[last] < n ? v->dim[last] - at[last] : n;
        copy_run(out, in, run, v->stride[last], bytes);
        out += (size_t)run * bytes;
        n -= run;
        in -= (size_t)(at[last] * v->stride[last]) * bytes;
        at[last] = 0;
        for (int i = last - 1; i >= 0 && n > 0; i--) {
            in += (size_t)v->stride[i] * bytes;
            if (++at[i] < v->dim[i]) {
                break;
            }
            in -= (size_t)(v->stride[i] * v->dim[i]) * bytes;
            at[i] = 0;
        }
    }
}

static void swap_bytes(char *data, size_t bytes, size_t width)
{
    for (size_t i = 0; width > 1 && i + width <= bytes; i += width) {
        for (size_t j = 0; j < width / 2; j++) {
            char x = data[i + j];
            data[i + j] = data[i + width - 1 - j];
            data[i + width - 1 - j] = x;
        }
    }
}

/* The sign is the top bit of each number, of every second one for a conjugate. */
static void flip_signs(char *data, size_t bytes, size_t width, bool imaginary_only)
{
    for (size_t i = imaginary_only ? width : 0; i + width <= bytes; i += imaginary_only ? 2 * width : width) {
        data[i + width - 1] ^= (char)0x80;
    }
}

static bool is_contiguous(const mui_view *v)
{
    return v->ndim == 0 || (v->ndim == 1 && v->stride[0] == 1);
}

mu_status mui_elements_open(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, mui_elements *out)
{
    size_t bytes = 0;
    const unsigned char *data = NULL;
    k = holder(k, t);
    mu_status s = mui_tensor_bytes(k, name, t, &bytes);
    if (s != MU_OK) {
        return s;
    }
    bool is_complex = t->dtype->carrier == MU_C64 || t->dtype->carrier == MU_C128;
    if ((t->conjugate && !is_complex) || (t->negative && !mui_torch_dtype_is_float(t->dtype) && !is_complex)) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: tensor '%s' of %s is marked as conjugate or negative", k->path,
                        name, t->dtype->name);
    }
    mui_blob *b = t->storage->blob;
    s = blob_data(k, b, &data);
    if (s != MU_OK) {
        return s;
    }
    mui_elements r = {.tensor = t, .first = data, .elements = (int64_t)(bytes / t->dtype->bytes)};
    r.mapped = (b->member == NULL && b->order == MUI_ORDER_OF_FILE) || (b->member != NULL && b->member->method == 0);
    if (r.elements > 0) {
        /* The reference counts its own elements, the view those of the tensor's type; both lie inside the blob. */
        r.first = data + (size_t)t->storage->offset * t->storage->dtype->bytes + (size_t)t->offset * t->dtype->bytes;
        r.view = simplify(t);
    }
    r.swap = (b->order == MUI_ORDER_OF_FILE ? k->big_endian : b->order == MUI_ORDER_BIG) && t->dtype->swap > 1;
    r.direct = is_contiguous(&r.view) && !r.swap && !t->conjugate && !t->negative && t->dtype->carrier != MU_BOOL;
    *out = r;
    return MU_OK;
}

void mui_elements_read(const mui_elements *s, int64_t from, int64_t n, void *out)
{
    const mui_file_tensor *t = s->tensor;
    size_t bytes = (size_t)n * t->dtype->bytes;
    if (n == 0) {
        return;
    }
    gather(&s->view, s->first, t->dtype->bytes, from, n, out);
    if (s->swap) {
        swap_bytes(out, bytes, t->dtype->swap);
    }
    if (t->conjugate) {
        flip_signs(out, bytes, t->dtype->swap, true);
    }
    if (t->negative) {
        flip_signs(out, bytes, t->dtype->swap, false);
    }
    if (t->dtype->carrier == MU_BOOL) {
        for (size_t i = 0; i < bytes; i++) {
            ((unsigned char *)out)[i] = ((unsigned char *)out)[i] != 0;
        }
    }
}

mu_status mui_tensor_load(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t, void *out)
{
    mui_elements from;
    mu_status s = mui_elements_open(k, name, t, &from);
    if (s == MU_OK) {
        mui_elements_read(&from, 0, from.elements, out);
    }
    return s;
}
