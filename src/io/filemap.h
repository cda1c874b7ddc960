/* A whole regular file, mapped for reading. The file must not shrink while it is open (true of any mapped file). */
#ifndef MUI_FILEMAP_H
#define MUI_FILEMAP_H

#include "base/context.h"

typedef struct mui_filemap {
    const unsigned char *data; /* never NULL, also when bytes is 0 */
    size_t bytes;
    void *mapping; /* NULL: nothing to unmap */
} mui_filemap;

mu_status mui_filemap_open(mu_context *c, const char *path, mui_filemap *out) MU_MUST_USE;
void mui_filemap_close(mui_filemap *f);

#endif
