/* What a file of text is, to name it when it is refused. */
#ifndef MUI_SNIFF_TEXT_H
#define MUI_SNIFF_TEXT_H

#include "base/context.h"

/* Where a text first is, NULL: nowhere. */
const unsigned char *mui_find_bytes(const unsigned char *data, size_t bytes, const char *text);
/* A JSON object with "weight_map" in it. */
bool mui_is_shard_index(const unsigned char *data, size_t bytes);
/* MU_OK when the file is no text that is known; else an error. */
mu_status mui_refuse_text(mu_context *c, const char *path, const unsigned char *data, size_t bytes) MU_MUST_USE;
/* For the very end: MU_OK when the file does not look like text of any kind. */
mu_status mui_refuse_any_text(mu_context *c, const char *path, const unsigned char *data, size_t bytes) MU_MUST_USE;

#endif
