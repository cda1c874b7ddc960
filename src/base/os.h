/* What the library needs from the operating system beyond C. Linux and POSIX. */
#ifndef MUI_OS_H
#define MUI_OS_H

#include "base/context.h"

double mui_now(void); /* seconds, monotonic */
/* Equal in processes that run on one kernel, and so share its clock and, unless namespaces part them, its memory. */
uint64_t mui_kernel_hash(void);
int mui_cores(void);  /* cores this process may run on, at least 1 */
size_t mui_ram_bytes(void);
/* Reads a whole regular file; *out is NUL-terminated beyond *bytes. Files over limit are MU_ERR_LIMIT. */
mu_status mui_read_file(mu_context *c, const char *path, size_t limit, char **out, size_t *bytes) MU_MUST_USE;
/* strerror, thread-safe, into a static table's string. */
const char *mui_errno_text(int e);

#endif
