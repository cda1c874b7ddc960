/* A growing string for messages and reports. After an allocation failure it stays empty and `failed`. */
#ifndef MUI_TEXT_H
#define MUI_TEXT_H

#include "base/context.h"

typedef struct mui_text {
    mu_context *context;
    char *data; /* NUL-terminated, "" when empty (never NULL for readers: use mui_text_get) */
    size_t length, capacity;
    bool failed;
} mui_text;

void mui_text_init(mui_text *t, mu_context *c);
void mui_text_add(mui_text *t, const char *format, ...) MU_PRINTF(2, 3);
const char *mui_text_get(const mui_text *t);
void mui_text_clear(mui_text *t);
void mui_text_free(mui_text *t);
/* Copies it out as snprintf does (out NULL: only the length), and frees it. */
size_t mui_text_give(mui_text *t, char *out, size_t size);

/* Well-formed UTF-8, with surrogates allowed as Python's surrogatepass does. */
bool mui_is_utf8(const char *text, size_t n);

/* s as a string of JSON, quotes and all, escaped as serde does; each byte that is no UTF-8 becomes \ufffd. */
void mui_text_add_json(mui_text *t, const char *s);

/* The double whose shortest decimal form is that of the float: 0.1f becomes 0.1, as the user wrote it. */
double mui_as_written(float f);

#endif
