/* A growing string. */
#include "base/text.h"
#include "base/alloc.h"

#include <stdarg.h>
#include <stdio.h>

void mui_text_init(mui_text *t, mu_context *c)
{
    *t = (mui_text){.context = c};
}

void mui_text_add(mui_text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int needed = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (needed < 0 || t->failed) {
        return;
    }
    size_t want = t->length + (size_t)needed + 1;
    if (want > t->capacity) {
        size_t capacity = want < 128 ? 128 : want * 2;
        char *data = mui_realloc(t->context, t->data, capacity);
        if (data == NULL) {
            mui_text_free(t);
            t->failed = true;
            return;
        }
        t->data = data;
        t->capacity = capacity;
    }
    va_start(args, format);
    vsnprintf(t->data + t->length, t->capacity - t->length, format, args);
    va_end(args);
    t->length += (size_t)needed;
}

const char *mui_text_get(const mui_text *t)
{
    return t->data != NULL ? t->data : "";
}

void mui_text_clear(mui_text *t)
{
    t->length = 0;
    if (t->data != NULL) {
        t->data[0] = '\0';
    }
}

void mui_text_free(mui_text *t)
{
    mui_free(t->context, t->data);
    *t = (mui_text){.context = t->context};
}
