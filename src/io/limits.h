/* How much a file may ask for: mu_checkpoint_options with every default filled in. */
#ifndef MUI_LIMITS_H
#define MUI_LIMITS_H

#include "base/context.h"
#include <muster/checkpoint.h>

typedef struct mui_limits {
    uint64_t pickle_bytes, members, header_bytes, tensor_bytes, inflate_ratio;
    bool no_checksum, big_endian;
} mui_limits;

/* options may be NULL. Negative numbers are MU_ERR_ARG. */
mu_status mui_limits_read(mu_context *c, const mu_checkpoint_options *options, mui_limits *out) MU_MUST_USE;
mui_limits mui_limits_default(void);

/* The most bytes that are made of a pickle of so many: names, mostly, and many values may share one text. */
size_t mui_limits_texts(size_t pickle_bytes);

#endif
