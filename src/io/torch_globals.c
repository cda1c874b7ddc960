/* Which classes and functions of a pickle are harmless, and the list of those that are not known to be: Python would
 * import them, and run their code, to load the file. */
#include "base/alloc.h"
#include "io/checkpoint_file.h"

#include <stdlib.h>
#include <string.h>

/* name NULL: everything in the module. Only what builds data; builtins' getattr, eval and their like are not here. */
static const struct {
    const char *module, *name;
} harmless[] = {
    {"collections", "OrderedDict"}, {"collections", "defaultdict"}, {"collections", "Counter"},
    {"collections", "deque"}, {"torch", "Size"}, {"torch", "device"}, {"torch", "Tensor"},
    {"torch.nn.parameter", "Parameter"}, {"torch.nn.parameter", "Buffer"},
    {"torch._utils", "_rebuild_tensor"}, {"torch._utils", "_rebuild_tensor_v2"},
    {"torch._utils", "_rebuild_tensor_v3"}, {"torch._utils", "_rebuild_parameter"},
    {"torch._utils", "_rebuild_parameter_with_state"}, {"torch._utils", "_rebuild_qtensor"},
    {"torch._utils", "_rebuild_sparse_tensor"}, {"torch._utils", "_rebuild_sparse_csr_tensor"},
    {"torch._utils", "_rebuild_meta_tensor_no_storage"}, {"torch._utils", "_rebuild_wrapper_subclass"},
    {"torch._utils", "_rebuild_device_tensor_from_numpy"}, {"torch._utils", "_rebuild_device_tensor_from_cpu_tensor"},
    {"torch._tensor", "_rebuild_from_type_v2"}, {"torch.serialization", "_get_layout"},
    {"torch", "per_tensor_affine"}, {"torch", "per_channel_affine"}, {"torch", "per_tensor_symmetric"},
    {"torch", "per_channel_symmetric"}, {"torch", "per_channel_affine_float_qparams"},
    {"numpy.core.multiarray", "_reconstruct"}, {"numpy.core.multiarray", "scalar"},
    {"numpy._core.multiarray", "_reconstruct"}, {"numpy._core.multiarray", "scalar"},
    {"numpy.core.numeric", "_frombuffer"}, {"numpy._core.numeric", "_frombuffer"}, {"numpy", "ndarray"},
    {"numpy", "dtype"}, {"_codecs", "encode"}, {"builtins", "set"}, {"builtins", "frozenset"},
    {"builtins", "bytearray"}, {"builtins", "complex"}, {"builtins", "slice"}, {"builtins", "range"},
    {"builtins", "xrange"}, {"builtins", "dict"}, {"builtins", "list"}, {"builtins", "tuple"}, {"builtins", "int"},
    {"builtins", "long"}, {"builtins", "float"}, {"builtins", "bool"}, {"builtins", "str"}, {"builtins", "unicode"},
    {"builtins", "bytes"}, {"builtins", "object"}, {"argparse", "Namespace"}, {"datetime", "datetime"},
    {"pathlib", "PosixPath"}, {"pathlib", "PurePosixPath"}, {"uuid", "UUID"},
};

/* Long names are cut: thousands may refer to one text of megabytes. */
#define MAX_TEXT 500

static bool is_harmless(const mu_checkpoint_file *k, const mui_value *g)
{
    if (mui_torch_dtype_of_storage(g) != NULL || mui_torch_dtype_of_name(g) != NULL) {
        return true;
    }
    /* TorchScript's own classes live in the archive; no Python is imported for them. */
    if (k->format == MUI_FILE_TORCHSCRIPT &&
        ((g->global.module.bytes >= 9 && memcmp(g->global.module.data, "__torch__", 9) == 0) ||
         mui_slice_is(g->global.module, "torch.jit._pickle"))) {
        return true;
    }
    for (size_t i = 0; i < sizeof(harmless) / sizeof(harmless[0]); i++) {
        if (mui_global_is(g, harmless[i].module, harmless[i].name)) {
            return true;
        }
    }
    return false;
}

static int by_name(const void *a, const void *b)
{
    const mui_value *x = *(mui_value *const *)a, *y = *(mui_value *const *)b;
    int order = mui_slice_compare(x->global.module, y->global.module);
    return order != 0 ? order : mui_slice_compare(x->global.name, y->global.name);
}

static const char *text_of(mu_checkpoint_file *k, const mui_value *g)
{
    size_t module = g->global.module.bytes < MAX_TEXT ? g->global.module.bytes : MAX_TEXT;
    size_t name = g->global.name.bytes < MAX_TEXT ? g->global.name.bytes : MAX_TEXT;
    char *text = mui_arena_alloc(&k->texts, module + name + 2);
    if (text != NULL) {
        memcpy(text, g->global.module.data, module);
        text[module] = '.';
        memcpy(text + module + 1, g->global.name.data, name);
        text[module + 1 + name] = '\0';
    }
    return text;
}

mu_status mui_globals_list(mu_checkpoint_file *k)
{
    const mui_pickle *p = &k->pickle;
    size_t n = 0, running = 0;
    mui_value **sorted = mui_calloc(k->context, p->global_count + 1, sizeof(*sorted));
    k->globals = mui_calloc(k->context, p->global_count + 1, sizeof(*k->globals));
    k->all_globals = mui_calloc(k->context, p->global_count + 1, sizeof(*k->all_globals));
    bool good = sorted != NULL && k->globals != NULL && k->all_globals != NULL;
    if (good && p->global_count > 0) {
        memcpy(sorted, p->globals, p->global_count * sizeof(*sorted));
        qsort(sorted, p->global_count, sizeof(*sorted), by_name);
    }
    for (size_t i = 0; good && i < p->global_count; i++) {
        if (i > 0 && by_name(&sorted[i - 1], &sorted[i]) == 0) {
            continue;
        }
        const char *text = text_of(k, sorted[i]);
        k->all_globals[n++] = text;
        if (!is_harmless(k, sorted[i])) {
            k->globals[running++] = text;
        }
        good = text != NULL;
    }
    mui_free(k->context, sorted);
    return good ? MU_OK : mu_context_status(k->context);
}
