/* What the header of a safetensors file says of its tensors, each checked by itself. Not for: how they lie in the file,
 * which safetensors.c checks. */
#ifndef MUI_SAFETENSORS_HEADER_H
#define MUI_SAFETENSORS_HEADER_H

#include "io/json_object.h"
#include "io/torch_values.h"

typedef struct mui_st_tensor {
    char *name;
    mui_file_tensor *tensor; /* without storage */
    int64_t elements;        /* of tensor->dtype, as a storage counts them */
    uint64_t begin, end;     /* bytes, of the data behind the header */
    size_t index;            /* in the header */
} mui_st_tensor;

/* A pair of __metadata__. */
typedef struct mui_st_pair {
    char *key, *value;
} mui_st_pair;

typedef struct mui_st_header {
    mu_context *context;
    mui_st_tensor *tensors;
    size_t count, capacity;
    mui_st_pair *pairs;
    size_t pair_count, pair_capacity;
    mui_arena scratch; /* of pairs */
} mui_st_header;

/* text is the JSON alone, at byte 8 of the file. Names and tensors are made in keep. To be freed also after an error. */
mu_status mui_st_header_read(mu_context *c, const char *path, const char *text, size_t bytes, mui_arena *keep,
                             mui_st_header *out) MU_MUST_USE;
void mui_st_header_free(mui_st_header *h);

#endif
