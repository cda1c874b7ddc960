/* The table of element types. */
#include "io/torch_dtype.h"
#include "tensor/tensor.h"

#include <string.h>

static const mui_torch_dtype table[] = {
    {"float32", "FloatStorage", "F32", MU_F32, 4, 4, true, false, 0},
    {"float64", "DoubleStorage", "F64", MU_F64, 8, 8, true, false, 0},
    {"float16", "HalfStorage", "F16", MU_F16, 2, 2, true, false, 0},
    {"bfloat16", "BFloat16Storage", "BF16", MU_BF16, 2, 2, true, false, 0},
    {"int64", "LongStorage", "I64", MU_I64, 8, 8, true, false, 0},
    {"int32", "IntStorage", "I32", MU_I32, 4, 4, true, false, 0},
    {"int16", "ShortStorage", "I16", MU_I16, 2, 2, true, false, 0},
    {"int8", "CharStorage", "I8", MU_I8, 1, 1, true, false, 0},
    {"uint8", "ByteStorage", "U8", MU_U8, 1, 1, true, false, 0},
    {"bool", "BoolStorage", "BOOL", MU_BOOL, 1, 1, true, false, 0},
    {"complex64", "ComplexFloatStorage", "C64", MU_C64, 8, 4, true, false, 0},
    {"complex128", "ComplexDoubleStorage", NULL, MU_C128, 16, 8, true, false, 0},
    {"qint8", "QInt8Storage", NULL, MU_I8, 1, 1, false, true, 0},
    {"quint8", "QUInt8Storage", NULL, MU_U8, 1, 1, false, true, 0},
    {"qint32", "QInt32Storage", NULL, MU_I32, 4, 4, false, true, 0},
    {"quint4x2", "QUInt4x2Storage", NULL, MU_U8, 1, 1, false, true, 0},
    {"quint2x4", "QUInt2x4Storage", NULL, MU_U8, 1, 1, false, true, 0},
    {"complex32", NULL, NULL, MU_I32, 4, 2, false, false, 0},
    {"uint16", NULL, "U16", MU_I16, 2, 2, false, false, 0},
    {"uint32", NULL, "U32", MU_I32, 4, 4, false, false, 0},
    {"uint64", NULL, "U64", MU_I64, 8, 8, false, false, 0},
    {"float8_e4m3fn", NULL, "F8_E4M3", MU_U8, 1, 1, false, false, 0},
    {"float8_e5m2", NULL, "F8_E5M2", MU_U8, 1, 1, false, false, 0},
    {"float8_e4m3fnuz", NULL, "F8_E4M3FNUZ", MU_U8, 1, 1, false, false, 0},
    {"float8_e5m2fnuz", NULL, "F8_E5M2FNUZ", MU_U8, 1, 1, false, false, 0},
    {"float8_e8m0fnu", NULL, "F8_E8M0", MU_U8, 1, 1, false, false, 0},
    {"float4_e2m1fn_x2", NULL, "F4", MU_U8, 1, 1, false, false, 4},
    {"float6_e2m3fn", NULL, "F6_E2M3", MU_U8, 1, 1, false, false, 6}, /* not in PyTorch */
    {"float6_e3m2fn", NULL, "F6_E3M2", MU_U8, 1, 1, false, false, 6},
};
#define COUNT (sizeof(table) / sizeof(table[0]))

const mui_torch_dtype *mui_torch_dtype_of_storage(const mui_value *g)
{
    if (g == NULL || g->kind != MUI_GLOBAL) {
        return NULL;
    }
    if (mui_torch_is_untyped_storage(g)) {
        return mui_torch_dtype_for(MU_U8);
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

const mui_torch_dtype *mui_torch_dtype_of_safetensors(const char *name)
{
    for (size_t i = 0; i < COUNT; i++) {
        if (table[i].safetensors != NULL && strcmp(table[i].safetensors, name) == 0) {
            return &table[i];
        }
    }
    return NULL;
}

const mui_torch_dtype *mui_torch_dtype_named(const char *name)
{
    for (size_t i = 0; i < COUNT; i++) {
        if (strcmp(table[i].name, name) == 0) {
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

const mui_torch_dtype *mui_torch_dtype_for(mu_dtype t)
{
    for (size_t i = 0; i < COUNT; i++) {
        if (table[i].exact && table[i].carrier == t) {
            return &table[i];
        }
    }
    return NULL;
}

bool mui_torch_dtype_is_float(const mui_torch_dtype *d)
{
    return d->exact && mui_is_float(d->carrier);
}
