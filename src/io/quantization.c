/* The scales and zero points of quantised tensors. They are read when asked for: those of a channel-wise tensor are
 * tensors themselves, and damage in them must not keep anybody from the rest of the file. */
#include "base/alloc.h"
#include "io/checkpoint_file.h"

#include <string.h>

/* Number i of a list or of a loaded tensor, as a double. */
static bool number_at(const mui_value *list, const void *data, mu_dtype type, int64_t i, double *out)
{
    const mui_value *v = list != NULL ? list->seq.items[i] : NULL;
    if (v != NULL) {
        *out = v->kind == MUI_FLOAT ? v->f : v->kind == MUI_INT ? (double)v->i : 0;
        return v->kind == MUI_FLOAT || v->kind == MUI_INT;
    }
    const char *at = (const char *)data + (size_t)i * mu_dtype_bytes(type);
    float f = 0;
    int64_t l = 0;
    int32_t n = 0;
    switch (type) {
    case MU_F64: memcpy(out, at, sizeof(*out)); return true;
    case MU_F32: memcpy(&f, at, sizeof(f)); *out = f; return true;
    case MU_I64: memcpy(&l, at, sizeof(l)); *out = (double)l; return true;
    case MU_I32: memcpy(&n, at, sizeof(n)); *out = n; return true;
    default: return false;
    }
}

/* Exactly `count` numbers: a number (count 1), a list of them, or a tensor. NULL with the error raised. */
static double *numbers_of(mu_checkpoint_file *k, const char *name, const mui_value *v, const char *what, int64_t count)
{
    mu_context *c = k->context;
    mui_meaning meaning = {.context = c, .path = k->path, .refs = k->refs};
    mui_axes axes;
    mui_file_tensor t = {0};
    mui_value *inner = NULL, *one = (mui_value *)(uintptr_t)v;
    mui_value single = {.kind = MUI_LIST, .seq = {&one, 1, 1}};
    char problem[256] = "";
    const mui_value *list = mui_is_sequence(v) ? v : NULL;
    list = v->kind == MUI_FLOAT || v->kind == MUI_INT ? &single : list;
    int64_t have = list != NULL ? (int64_t)list->seq.count : -1;
    if (list == NULL && mui_tensor_read(&meaning, v, &axes, &t, &inner, problem, sizeof(problem)) == MUI_IS_TENSOR &&
        t.ndim == 1 && t.dtype != NULL) {
        have = t.dim[0];
    }
    /* Many tensors may share a few scales; a file has no more of them than it has bytes. */
    bool within = count >= 0 && (uint64_t)count <= k->map.bytes - k->scales_read + 1000000 && k->scales_read <= k->map.bytes;
    if (have != count || !within) {
        mui_fail(c, have != count ? MU_ERR_FORMAT : MU_ERR_LIMIT, "%s: tensor '%s' has %lld %s; %lld were expected%s%s%s",
                 k->path, name, (long long)have, what, (long long)count, within ? "" : ", more than the file has bytes",
                 problem[0] != '\0' ? ": " : "", problem);
        return NULL;
    }
    k->scales_read += (uint64_t)count;
    size_t bytes = list == NULL ? (size_t)count * t.dtype->bytes : 0;
    double *out = mui_arena_alloc(&k->scales, (size_t)count * sizeof(*out) + 1);
    void *data = list == NULL ? mui_alloc(c, bytes + 1) : NULL;
    bool good = out != NULL && (list != NULL || (data != NULL && mui_tensor_load(k, name, &t, data) == MU_OK));
    for (int64_t i = 0; good && i < count; i++) {
        if (!number_at(list, data, list == NULL ? t.dtype->carrier : MU_F64, i, &out[i])) {
            mui_fail(c, MU_ERR_FORMAT, "%s: tensor '%s': its %s are not numbers", k->path, name, what);
            good = false;
        }
    }
    mui_free(c, data);
    return good ? out : NULL;
}

/* "per_tensor_affine" and so on; NULL: not a scheme of PyTorch's. */
static const char *scheme_of(const mui_value *v, bool *per_channel)
{
    static const char *const names[] = {"per_tensor_affine", "per_tensor_symmetric", "per_channel_affine",
                                        "per_channel_symmetric", "per_channel_affine_float_qparams"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (mui_global_is(v, "torch", names[i])) {
            *per_channel = i >= 2;
            return names[i];
        }
    }
    return NULL;
}

mu_status mu_checkpoint_quantization(mu_checkpoint_file *k, int64_t i, mu_quantization *out)
{
    if (k == NULL || out == NULL) {
        return MU_ERR_ARG;
    }
    const mui_entry *e = mui_entry_at(k, i);
    if (e == NULL) {
        return MU_ERR_ARG;
    }
    const mui_value *q = e->tensor->quantizer;
    *out = (mu_quantization){.scheme = NULL, .axis = -1};
    if (q == NULL) {
        return MU_OK;
    }
    bool per_channel = false;
    mu_quantization r = {.axis = -1, .count = 1};
    r.scheme = q->kind == MUI_TUPLE && q->seq.count >= 3 ? scheme_of(q->seq.items[0], &per_channel) : NULL;
    const mui_value *axis = per_channel && q->seq.count >= 4 ? q->seq.items[3] : NULL;
    if (r.scheme == NULL || (per_channel && (axis == NULL || axis->kind != MUI_INT || axis->i < 0 ||
                                             axis->i >= e->tensor->ndim))) {
        return mui_fail(k->context, MU_ERR_FORMAT,
                        "%s: tensor '%s': its quantiser is not (scheme, scale, zero point) or (scheme, scales, zero "
                        "points, axis)",
                        k->path, e->name);
    }
    if (per_channel) {
        r.axis = (int)axis->i;
        r.count = e->tensor->dim[axis->i];
    }
    r.scales = numbers_of(k, e->name, q->seq.items[1], "scales", r.count);
    r.zero_points = r.scales != NULL ? numbers_of(k, e->name, q->seq.items[2], "zero points", r.count) : NULL;
    if (r.zero_points == NULL) {
        return mu_context_status(k->context);
    }
    *out = r;
    return MU_OK;
}
