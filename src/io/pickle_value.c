/* Questions about values. */
#include "io/pickle.h"

#include <string.h>

const char *mui_kind_name(mui_kind k)
{
    static const char *const names[] = {"None", "bool", "int",  "int of more than 64 bits",  "float",  "str",        "bytes",
                                        "tuple", "list", "dict", "set", "global", "persistent id", "object"};
    return (size_t)k < sizeof(names) / sizeof(names[0]) ? names[k] : "?";
}

bool mui_slice_is(mui_slice s, const char *text)
{
    return s.bytes == strlen(text) && memcmp(s.data, text, s.bytes) == 0;
}

int mui_slice_compare(mui_slice a, mui_slice b)
{
    size_t common = a.bytes < b.bytes ? a.bytes : b.bytes;
    int order = a.data == b.data ? 0 : memcmp(a.data, b.data, common); /* names said once and referred to are one text */
    return order != 0 ? order : a.bytes < b.bytes ? -1 : a.bytes > b.bytes;
}

bool mui_text_is(const mui_value *v, const char *text)
{
    return v != NULL && v->kind == MUI_STR && mui_slice_is(v->text, text);
}

bool mui_global_is(const mui_value *v, const char *module, const char *name)
{
    if (v == NULL || v->kind != MUI_GLOBAL || !mui_slice_is(v->global.name, name)) {
        return false;
    }
    /* Protocols 0 to 2 written by Python 3 use Python 2's names. */
    return mui_slice_is(v->global.module, module) ||
           (strcmp(module, "builtins") == 0 && mui_slice_is(v->global.module, "__builtin__")) ||
           (strcmp(module, "copyreg") == 0 && mui_slice_is(v->global.module, "copy_reg"));
}

bool mui_is_sequence(const mui_value *v)
{
    return v != NULL && (v->kind == MUI_LIST || v->kind == MUI_TUPLE);
}
