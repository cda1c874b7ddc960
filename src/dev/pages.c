/* Aligned large allocations that ask for huge pages: a page fault costs more than many a kernel. */
#define _DEFAULT_SOURCE /* madvise */
#include "dev/pages.h"
#include "base/alloc.h"

#include <sys/mman.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define BEFORE_BYTES ((size_t)64) /* holds the pointer that mui_free wants */

void *mui_pages_alloc(mu_context *c, size_t bytes)
{
    size_t align = bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : BEFORE_BYTES, total = 0;
    if (!mui_size_add(bytes, align + BEFORE_BYTES, &total)) {
        mui_fail(c, MU_ERR_NOMEM, "out of memory: %zu bytes were asked for", bytes);
        return NULL;
    }
    char *base = mui_alloc(c, total);
    if (base == NULL) {
        return NULL;
    }
    uintptr_t before = (uintptr_t)base + BEFORE_BYTES;
    char *data = base + BEFORE_BYTES + (align - before % align) % align;
    ((void **)(void *)data)[-1] = base;
#ifdef MADV_HUGEPAGE
    if (align == HUGE_PAGE_BYTES) {
        madvise(data, bytes / align * align, MADV_HUGEPAGE); /* a wish: failure changes nothing */
    }
#endif
    return data;
}

void mui_pages_free(mu_context *c, void *data)
{
    if (data != NULL) {
        mui_free(c, ((void **)data)[-1]);
    }
}
