/* mu_checkpoint_convert. */
#include "io/conversion.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "io/file_elements.h"
#include "io/load_report.h"
#include "tensor/tensor.h"

#include <string.h>

enum { PIECE = 1 << 14 }; /* elements that are converted at a time */

/* Floats of one type to another, by way of float32, which is exact for all but float64. */
static mu_status cast(mu_context *c, mu_dtype from, mu_dtype to, int64_t n, const void *in, float *between, void *out)
{
    if (from == MU_F32) {
        return mui_from_float(c, to, n, in, out);
    }
    mu_status s = mui_to_float(c, from, n, in, between);
    return s == MU_OK ? mui_from_float(c, to, n, between, out) : s;
}

static mu_status read_cast(mui_conversion *v, const mui_elements *source, mu_dtype to, char *out)
{
    mu_context *c = v->file->context;
    mu_dtype from = source->tensor->dtype->carrier;
    char *in = mui_alloc(c, PIECE * sizeof(double));
    float *between = mui_alloc(c, PIECE * sizeof(float));
    mu_status s = in != NULL && between != NULL ? MU_OK : MU_ERR_NOMEM;
    for (int64_t at = 0; s == MU_OK && at < source->elements; at += PIECE) {
        int64_t n = source->elements - at < PIECE ? source->elements - at : PIECE;
        mui_elements_read(source, at, n, in);
        s = cast(c, from, to, n, in, between, out + (size_t)at * mu_dtype_bytes(to));
    }
    mui_free(c, between);
    mui_free(c, in);
    return s;
}

static mu_status read_tensor(void *user, size_t i, void *out, size_t bytes)
{
    mui_conversion *v = user;
    const mui_entry *e = &v->file->tree.entries[v->entries[i]];
    mui_elements source;
    mu_status s = bytes > 0 ? mui_elements_open(v->file, e->name, e->tensor, &source) : MU_OK;
    if (s != MU_OK || bytes == 0) {
        return s;
    }
    if (v->list.tensors[i].dtype != e->tensor->dtype) {
        return read_cast(v, &source, v->list.tensors[i].dtype->carrier, out);
    }
    mui_elements_read(&source, 0, source.elements, out);
    return MU_OK;
}

static mu_status check(mu_checkpoint_file *k, const char *path, const mu_convert_options *o)
{
    if (path == NULL || path[0] == '\0') {
        return mui_fail(k->context, MU_ERR_ARG, "mu_checkpoint_convert: no path");
    }
    if (o->change_dtype && o->dtype != MU_F32 && o->dtype != MU_F64 && o->dtype != MU_F16 && o->dtype != MU_BF16) {
        return mui_fail(k->context, MU_ERR_ARG,
                        "mu_checkpoint_convert: floating tensors become float32, float64, float16 or bfloat16, not %s",
                        mu_dtype_name(o->dtype));
    }
    return MU_OK;
}

static mu_status convert(mui_conversion *v, const char *path, mu_convert_report *report)
{
    mu_context *c = v->file->context;
    mu_status s = mui_convert_list(v);
    s = s == MU_OK ? mui_convert_tell(v) : s;
    if (s == MU_OK && report != NULL) { /* before the file is there: an error means that it is not */
        v->report.text = mui_keep_text(c, MUI_KEPT_CONVERSION, mui_text_get(&v->text));
        s = v->report.text != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    s = s == MU_OK ? mui_out_write(&v->list, v->options->format, path) : s;
    if (s == MU_OK && report != NULL) {
        *report = v->report;
    }
    return s;
}

mu_status mu_checkpoint_convert(mu_checkpoint_file *k, const char *path, const mu_convert_options *options,
                                mu_convert_report *report)
{
    static const mu_convert_options defaults;
    if (k == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = k->context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    mui_conversion v = {.file = k, .options = options != NULL ? options : &defaults};
    mu_status s = check(k, path, v.options);
    if (s != MU_OK) {
        return s;
    }
    mui_out_init(&v.list, c);
    mui_text_init(&v.text, c);
    v.list.read = read_tensor;
    v.list.user = &v;
    mui_place before = mui_go(c, MUI_SAVING, path);
    s = convert(&v, path, report);
    mui_go(c, before.stage, before.path);
    mui_text_free(&v.text);
    mui_free(c, v.entries);
    mui_free(c, v.old_names);
    mui_out_free(&v.list);
    return s;
}
