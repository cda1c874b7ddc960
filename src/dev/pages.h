/* Memory for large flat arrays: counted like all memory, and when large, on huge pages where the system has them. */
#ifndef MUI_PAGES_H
#define MUI_PAGES_H

#include "base/context.h"

/* 64-byte aligned, 2 MiB aligned from 2 MiB on; contents undefined. NULL with MU_ERR_NOMEM. */
void *mui_pages_alloc(mu_context *c, size_t bytes);
void mui_pages_free(mu_context *c, void *data); /* NULL is allowed */

#endif
