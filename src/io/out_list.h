/* What is to be written, whatever the format: named tensors with their types, shapes and ties, the versions of the
 * modules they belong to, and a function that gives their elements. Made by mu_save, training files and conversion. */
#ifndef MUI_OUT_LIST_H
#define MUI_OUT_LIST_H

#include "base/arena.h"
#include "io/torch_dtype.h"
#include <muster/checkpoint.h>

/* What the reader takes, in the file of a training run too, where names are below "model". */
#define MUI_LONGEST_OUT_NAME (4096 - (int)sizeof("model"))

typedef struct mui_out_tensor {
    const char *name;
    const mui_torch_dtype *dtype;
    int ndim;
    const int64_t *dim;
    size_t same_as; /* index of an earlier tensor that is the same memory (tied weights), else its own */
    const mu_quantization *quantization; /* lives as long as the list; NULL: not quantised */
} mui_out_tensor;

/* An entry of a state dict's _metadata. */
typedef struct mui_out_version {
    const char *path;
    int64_t version;
} mui_out_version;

typedef struct mui_out_list {
    mu_context *context;
    mui_arena arena;
    mui_out_tensor *tensors;
    size_t count, capacity;
    bool has_versions; /* the state dict has a _metadata, though perhaps an empty one */
    mui_out_version *versions;
    size_t version_count, version_capacity;
    /* Elements of tensor i, row-major and little-endian; bytes as mui_out_bytes says. Not called for tied ones. */
    mu_status (*read)(void *user, size_t i, void *out, size_t bytes);
    void *user;
} mui_out_list;

void mui_out_init(mui_out_list *l, mu_context *c);
void mui_out_free(mui_out_list *l);
/* Copies name and shape. MU_ERR_ARG or MU_ERR_LIMIT for a name that no reader would take. */
mu_status mui_out_add(mui_out_list *l, const mui_out_tensor *t) MU_MUST_USE;
mu_status mui_out_add_version(mui_out_list *l, const char *path, int64_t version) MU_MUST_USE;

int64_t mui_out_elements(const mui_out_tensor *t);
size_t mui_out_bytes(const mui_out_tensor *t);

/* Gives the elements of tensors order[0 .. n) to sink, one at a time: memory is that of the largest. A sink that says
 * other than MU_OK ends it. */
typedef mu_status (*mui_out_sink)(void *user, size_t i, const void *data, size_t bytes);
mu_status mui_out_each(const mui_out_list *l, const size_t *order, size_t n, mui_out_sink sink, void *user) MU_MUST_USE;

/* Writes the list as a file of its own, atomically. */
mu_status mui_out_write(const mui_out_list *l, mu_file_format format, const char *path) MU_MUST_USE;
mu_status mui_out_torch(const mui_out_list *l, const char *path) MU_MUST_USE;
mu_status mui_out_legacy(const mui_out_list *l, const char *path) MU_MUST_USE;
mu_status mui_out_safetensors(const mui_out_list *l, const char *path) MU_MUST_USE;

#endif
