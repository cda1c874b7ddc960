/* Safetensors: a JSON header, then the elements, by falling alignment and then by name, as the reference writes them.
 *
 * The format has no sharing. Of tied tensors the first by name is written; the others are recorded as "dropped": "kept"
 * in __metadata__, as safetensors.torch.save_model does. */
#include "base/alloc.h"
#include "base/text.h"
#include "io/bytes.h"
#include "io/out_list.h"
#include "io/outfile.h"

#include <stdlib.h>
#include <string.h>

/* The order of the data: the reference's, by falling alignment from the end. What shares bytes is not written. */
static const char *const types[] = {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
                                    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"};
enum { TYPES = sizeof(types) / sizeof(types[0]) };

/* -1: the format does not have it. */
static int type_of(const mui_out_tensor *t)
{
    int i = t->dtype->safetensors != NULL ? TYPES - 1 : -1;
    while (i >= 0 && strcmp(types[i], t->dtype->safetensors) != 0) {
        i--;
    }
    return i;
}

typedef struct item {
    const mui_out_tensor *tensor;
    size_t index; /* in the list */
    int type;
    const char *kept; /* the name under which it is written; NULL: its own */
} item;

/* JSON's strings are Unicode: what pickles allow beyond it has no form there. */
static mu_status check(const mui_out_list *l, const char *path, item *x)
{
    const mui_out_tensor *t = x->tensor;
    x->type = type_of(t);
    if (t->quantization != NULL) {
        return mui_fail(l->context, MU_ERR_UNSUPPORTED, "%s: tensor '%s' is quantised, which safetensors cannot hold", path,
                        t->name);
    }
    if (x->type < 0) {
        return mui_fail(l->context, MU_ERR_UNSUPPORTED, "%s: tensor '%s' is of %s, which safetensors does not have", path,
                        t->name, t->dtype->name);
    }
    if (strcmp(t->name, "__metadata__") == 0) {
        return mui_fail(l->context, MU_ERR_ARG, "%s: no tensor of a safetensors file can be named __metadata__", path);
    }
    for (const unsigned char *p = (const unsigned char *)t->name; *p != '\0'; p++) {
        if (p[0] == 0xed && p[1] >= 0xa0) {
            return mui_fail(l->context, MU_ERR_ARG,
                            "%s: the name '%s' has half of a surrogate pair, which safetensors cannot hold", path, t->name);
        }
    }
    return MU_OK;
}

/* Of each group of tied tensors the first by name stays. "format" is a word of __metadata__'s own, so a tensor of that
 * name is not dropped; nor is one without elements, which shares nothing. */
static mu_status drop_tied(const mui_out_list *l, item *items)
{
    const char **first = mui_calloc(l->context, l->count, sizeof(*first));
    if (first == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < l->count; i++) {
        const char **to = &first[l->tensors[i].same_as], *name = l->tensors[i].name;
        *to = *to == NULL || strcmp(name, *to) < 0 ? name : *to;
    }
    for (size_t i = 0; i < l->count; i++) {
        const char *kept = first[l->tensors[i].same_as], *name = l->tensors[i].name;
        bool own = kept == name || strcmp(name, "format") == 0 || mui_out_bytes(&l->tensors[i]) == 0;
        items[i].kept = own ? NULL : kept;
    }
    mui_free(l->context, first);
    return MU_OK;
}

static int by_place(const void *a, const void *b)
{
    const item *x = a, *y = b;
    return x->type != y->type ? y->type - x->type : strcmp(x->tensor->name, y->tensor->name);
}

static void put_header(mui_text *out, const item *items, size_t n)
{
    uint64_t at = 0;
    mui_text_add(out, "{\"__metadata__\":{\"format\":\"pt\"");
    for (size_t i = 0; i < n; i++) {
        if (items[i].kept != NULL) {
            mui_text_add(out, ",");
            mui_text_add_json(out, items[i].tensor->name);
            mui_text_add(out, ":");
            mui_text_add_json(out, items[i].kept);
        }
    }
    mui_text_add(out, "}");
    for (size_t i = 0; i < n; i++) {
        const mui_out_tensor *t = items[i].tensor;
        if (items[i].kept != NULL) {
            continue;
        }
        mui_text_add(out, ",");
        mui_text_add_json(out, t->name);
        mui_text_add(out, ":{\"dtype\":\"%s\",\"shape\":[", types[items[i].type]);
        for (int d = 0; d < t->ndim; d++) {
            mui_text_add(out, "%s%lld", d > 0 ? "," : "", (long long)t->dim[d]);
        }
        uint64_t end = at + mui_out_bytes(t);
        mui_text_add(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at, (unsigned long long)end);
        at = end;
    }
    mui_text_add(out, "}");
    while (out->length % 8 != 0 && !out->failed) {
        mui_text_add(out, " ");
    }
}

static mu_status write_elements(void *user, size_t i, const void *data, size_t bytes)
{
    mui_outfile *f = user;
    (void)i;
    mui_outfile_write(f, data, bytes);
    return f->status;
}

static mu_status write_file(const mui_out_list *l, const char *path, const mui_text *header, const size_t *order, size_t n)
{
    mui_outfile f;
    unsigned char length[8];
    if (header->length > 100000000) {
        return mui_fail(l->context, MU_ERR_LIMIT, "%s: a header of %zu bytes; safetensors allows 100000000", path,
                        header->length);
    }
    mu_status s = mui_outfile_open(l->context, path, &f);
    if (s != MU_OK) {
        return s;
    }
    mui_put_le64(length, header->length);
    mui_outfile_write(&f, length, sizeof(length));
    mui_outfile_write(&f, header->data, header->length);
    s = mui_out_each(l, order, n, write_elements, &f);
    if (s != MU_OK) {
        mui_outfile_abandon(&f);
        return s;
    }
    return mui_outfile_commit(&f);
}

static mu_status write_items(const mui_out_list *l, const char *path, item *items, size_t *order)
{
    size_t n = 0;
    mui_text header;
    mu_status s = drop_tied(l, items);
    for (size_t i = 0; i < l->count && s == MU_OK; i++) {
        items[i].tensor = &l->tensors[i];
        items[i].index = i;
        s = check(l, path, &items[i]);
    }
    if (s != MU_OK) {
        return s;
    }
    if (l->count > 0) {
        qsort(items, l->count, sizeof(*items), by_place);
    }
    for (size_t i = 0; i < l->count; i++) {
        if (items[i].kept == NULL) {
            order[n++] = items[i].index;
        }
    }
    mui_text_init(&header, l->context);
    put_header(&header, items, l->count);
    s = header.failed ? mu_context_status(l->context) : write_file(l, path, &header, order, n);
    mui_text_free(&header);
    return s;
}

mu_status mui_out_safetensors(const mui_out_list *l, const char *path)
{
    item *items = mui_calloc(l->context, l->count, sizeof(*items));
    size_t *order = mui_calloc(l->context, l->count, sizeof(*order));
    mu_status s = items != NULL && order != NULL ? write_items(l, path, items, order) : MU_ERR_NOMEM;
    mui_free(l->context, order);
    mui_free(l->context, items);
    return s;
}
