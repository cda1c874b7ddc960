/* A growing string. */
#include "base/text.h"
#include "base/alloc.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

size_t mui_text_give(mui_text *t, char *out, size_t size)
{
    size_t length = t->length;
    snprintf(out, out != NULL ? size : 0, "%s", mui_text_get(t));
    mui_text_free(t);
    return length;
}

bool mui_is_utf8(const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0; i < n;) {
        unsigned char b = s[i];
        size_t more = b < 0x80 ? 0 : b >= 0xc2 && b < 0xe0 ? 1 : b >= 0xe0 && b < 0xf0 ? 2 : b >= 0xf0 && b < 0xf5 ? 3 : 4;
        if (more == 4 || more > n - i - 1) {
            return false;
        }
        for (size_t k = 1; k <= more; k++) {
            if ((s[i + k] & 0xc0) != 0x80) {
                return false;
            }
        }
        if ((b == 0xe0 && s[i + 1] < 0xa0) || (b == 0xf0 && s[i + 1] < 0x90) || (b == 0xf4 && s[i + 1] > 0x8f)) {
            return false;
        }
        i += more + 1;
    }
    return true;
}

/* How many bytes from s on stand for themselves in JSON, ASCII alone. */
static size_t plain_run(const char *s)
{
    size_t n = 0;
    for (unsigned char b = (unsigned char)s[0]; b >= 0x20 && b < 0x80 && b != '"' && b != '\\'; b = (unsigned char)s[n]) {
        n++;
    }
    return n;
}

void mui_text_add_json(mui_text *t, const char *s)
{
    static const char *const escapes[] = {['\b'] = "\\b", ['\t'] = "\\t", ['\n'] = "\\n", ['\f'] = "\\f", ['\r'] = "\\r"};
    mui_text_add(t, "\"");
    for (size_t n = 0; *s != '\0'; s += n) {
        unsigned char b = (unsigned char)*s;
        n = b < 0x80 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
        if (b < sizeof(escapes) / sizeof(escapes[0]) && escapes[b] != NULL) {
            mui_text_add(t, "%s", escapes[b]);
        } else if (b < 0x20) {
            mui_text_add(t, "\\u%04x", b);
        } else if (b == '"' || b == '\\') {
            mui_text_add(t, "\\%c", b);
        } else if (b < 0x80) {
            n = plain_run(s);
            mui_text_add(t, "%.*s", (int)n, s);
        } else if (strnlen(s, n) == n && mui_is_utf8(s, n)) {
            mui_text_add(t, "%.*s", (int)n, s);
        } else {
            mui_text_add(t, "\\ufffd");
            n = 1;
        }
    }
    mui_text_add(t, "\"");
}

double mui_as_written(float f)
{
    char text[40];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) {
            return strtod(text, NULL);
        }
    }
    return (double)f;
}
