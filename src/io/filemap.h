/* A whole regular file, mapped for reading. The file must not shrink while it is open (true of any mapped file). */
#ifndef MUI_FILEMAP_H
#define MUI_FILEMAP_H

#include "base/context.h"

typedef struct mui_filemap {
    const unsigned char *data; /* never NULL, also when bytes is 0 */
    size_t bytes;
    void *mapping; /* NULL: nothing to unmap */
    size_t used;   /* bytes read since pages were last let go */
} mui_filemap;

mu_status mui_filemap_open(mu_context *c, const char *path, mui_filemap *out) MU_MUST_USE;
void mui_filemap_close(mui_filemap *f);

/* From now on most of it will be read, from front to back: worth reading ahead. Without, only what is touched is read. */
void mui_filemap_expect_all(const mui_filemap *f);
/* Says that bytes more of it were read. Now and then this lets all pages go, so that a process stays small however large
 * the file: they stay in the system's cache, and data stays valid. Call it at least every MUI_MAPPED_WINDOW bytes. */
void mui_filemap_used(mui_filemap *f, size_t bytes);
#define MUI_MAPPED_WINDOW ((size_t)16 << 20)

#endif
