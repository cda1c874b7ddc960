/* The table of element types. */
#include "io/torch_dtype.h"

#include <string.h>

static const mui_torch_dtype table[] = {
    {"float32", "FloatStorage", MU_F32, 4, 4, true, false},
    {"float64", "DoubleStorage", MU_F64, 8, 8, true, false},
    {"float16", "HalfStorage", MU_F16, 2, 2, true, false},
    {"bfloat16", "BFloat16Storage", MU_BF16, 2, 2, true, false},
    {"int64", "LongStorage", MU_I64, 8, 8, true, false},
    {"int32", "IntStorage", MU_I32, 4, 4, true, false},
    {"int16", "ShortStorage", MU_I16, 2, 2, true, false},
    {"int8", "CharStorage", MU_I8, 1, 1, true, false},
    {"uint8", "ByteStorage", MU_U8, 1, 1, true, false},
    {"bool", "BoolStorage", MU_BOOL, 1, 1, true, false},
    {"complex64", "ComplexFloatStorage", MU_C64, 8, 4, true, false},
    {"complex128", "ComplexDoubleStorage", MU_C128, 16, 8, true, false},
    {"qint8", "QInt8Storage", MU_I8, 1, 1, false, true},
    {"quint8", "QUInt8Storage", MU_U8, 1, 1, false, true},
    {"qint32", "QInt32Storage", MU_I32, 4, 4, false, true},
    {"quint4x2", "QUInt4x2Storage", MU_U8, 1, 1, false, true},
    {"quint2x4", "QUInt2x4Storage", MU_U8, 1, 1, false, true},
    {"complex32", NULL, MU_I32, 4, 2, false, false},
    {"uint16", NULL, MU_I16, 2, 2, false, false},
    {"uint32", NULL, MU_I32, 4, 4, false, false},
    {"uint64", NULL, MU_I64, 8, 8, false, false},
    {"float8_e4m3fn", NULL, MU_U8, 1, 1, false, false},
    {"float8_e5m2", NULL, MU_U8, 1, 1, false, false},
    {"float8_e4m3fnuz", NULL, MU_U8, 1, 1, false, false},
    {"float8_e5m2fnuz", NULL, MU_U8, 1, 1, false, false},
    {"float8_e8m0fnu", NULL, MU_U8, 1, 1, false, false},
    {"float4_e2m1fn_x2", NULL, MU_U8, 1, 1, false, false},
};
#define COUNT (sizeof(table) / sizeof(table[0]))

const mui_torch_dtype *mui_torch_dtype_of_storage(const mui_value *g)
{
    if (g == NULL || g->kind != MUI_GLOBAL) {
        return NULL;
    }
    if (mui_torch_is_untyped_storage(g)) {
        return mui_torch_dtype_bytes();
    }
    if (!mui_slice_is(g->global.module, "torch") && !mui_slice_is(g->global.module, "torch.cuda") &&
        !mui_slice_is(g->global.module, "torch.storage")) {
        return NULL;
    }
    for (size_t i = 0; i < COUNT; i++) {
        if (table[i].storage != NULL && mui_slice_is(g->global.name, table[i].storage)) {
            return &table[i];
        }
    }
    return NULL;
}

const mui_torch_dtype *mui_torch_dtype_of_name(const mui_value *g)
{
    for (size_t i = 0; g != NULL && i < COUNT; i++) {
        if (mui_global_is(g, "torch", table[i].name)) {
            return &table[i];
        }
    }
    return NULL;
}

bool mui_torch_is_untyped_storage(const mui_value *g)
{
    return mui_global_is(g, "torch.storage", "UntypedStorage") || mui_global_is(g, "torch", "UntypedStorage") ||
           mui_global_is(g, "torch.storage", "_UntypedStorage");
}

const mui_torch_dtype *mui_torch_dtype_bytes(void)
{
    return &table[8];
}

const char *mui_torch_storage_name(mu_dtype t)
{
    for (size_t i = 0; i < COUNT; i++) {
        if (table[i].exact && table[i].carrier == t) {
            return table[i].storage;
        }
    }
    return NULL;
}
