/* Copying what will not be read again soon. */
#ifndef MUI_COPY_LARGE_H
#define MUI_COPY_LARGE_H

#include <stddef.h>

/* memcpy that leaves the caches alone when there is much: memory is then written without being read first, which in a
 * load of many tensors of some megabytes saves a third of the time. */
void mui_copy_large(void *to, const void *from, size_t bytes);

#endif
