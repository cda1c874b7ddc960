/* One IDX file, plain or gzipped, of unsigned bytes. */
#ifndef MUI_IDX_H
#define MUI_IDX_H

#include "base/context.h"

#define MUI_IDX_MAX_DIMS 3
#define MUI_IDX_MAX_BYTES ((size_t)1 << 33)

typedef struct mui_idx {
    int64_t dim[MUI_IDX_MAX_DIMS]; /* ndim of them, each at least 1 */
    uint8_t *data;                 /* from mui_alloc, the caller's */
} mui_idx;

/* Reads fd, which it does not close, from its start: exactly ndim dimensions and exactly the bytes they ask for.
 * Memory grows with what really comes, not with what the header claims. name is for messages. */
mu_status mui_idx_read(mu_context *c, const char *name, int fd, int ndim, mui_idx *out) MU_MUST_USE;

#endif
