/* The machine's texts and bytes: counted ones are slices of the pickle, those of protocol 0 are lines with escapes. */
#include "io/bytes.h"
#include "io/pickle_machine.h"
#include "base/text.h"

#include <string.h>

/* A length of so many bytes, little-endian, then what it counts. */
mu_status mui_machine_length(mui_machine *m, size_t width, uint64_t *length)
{
    const unsigned char *arg = NULL;
    MUI_CHECK(mui_machine_take(m, width, &arg));
    *length = width == 1 ? arg[0] : width == 2 ? mui_le16(arg) : width == 4 ? mui_le32(arg) : mui_le64(arg);
    return MU_OK;
}

mu_status mui_machine_signed_length(mui_machine *m, uint64_t *length)
{
    MUI_CHECK(mui_machine_length(m, 4, length));
    return *length <= INT32_MAX ? MU_OK : mui_machine_fail(m, MU_ERR_FORMAT, "a negative length");
}

mu_status mui_machine_text(mui_machine *m, mui_kind kind, const unsigned char *data, uint64_t bytes)
{
    mui_value *v = mui_machine_new(m, kind);
    if (v != NULL) {
        v->text = (mui_slice){(const char *)data, (size_t)bytes};
    }
    return mui_machine_push(m, v);
}

static mu_status push_unicode(mui_machine *m, uint64_t bytes)
{
    const unsigned char *data = NULL;
    MUI_CHECK(mui_machine_take(m, bytes, &data));
    if (!mui_is_utf8((const char *)data, (size_t)bytes)) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "the text is not UTF-8");
    }
    return mui_machine_text(m, MUI_STR, data, bytes);
}

static mu_status push_bytes(mui_machine *m, uint64_t bytes)
{
    const unsigned char *data = NULL;
    MUI_CHECK(mui_machine_take(m, bytes, &data));
    return mui_machine_text(m, MUI_BYTES, data, bytes);
}

/* Python 2's str: text where it can be. */
static mu_status push_string(mui_machine *m, const unsigned char *data, uint64_t bytes)
{
    return mui_machine_text(m, mui_is_utf8((const char *)data, (size_t)bytes) ? MUI_STR : MUI_BYTES, data, bytes);
}

/* Digits of a base up to 16; -1: there are not that many. */
static int64_t digits(const char *s, const char *end, int count, int base)
{
    int64_t v = 0;
    for (int i = 0; i < count; i++) {
        static const char all[] = "0123456789abcdef";
        char c = s + i < end ? s[i] : '\0';
        const char *at = c != '\0' ? memchr(all, c >= 'A' && c <= 'F' ? c + 'a' - 'A' : c, (size_t)base) : NULL;
        if (at == NULL) {
            return -1;
        }
        v = v * base + (at - all);
    }
    return v;
}

/* One escape of Python's repr() of bytes, after the backslash: the byte, or -1 for what is none. */
static int64_t escaped_byte(const char **s, const char *end)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *known = strchr(from, **s);
    if (known != NULL && **s != '\0') {
        ++*s;
        return (unsigned char)to[known - from];
    }
    if (**s == 'x') {
        int64_t v = digits(*s + 1, end, 2, 16);
        *s += v >= 0 ? 3 : 0;
        return v;
    }
    for (int n = 3; n > 0; n--) {
        int64_t v = digits(*s, end, n, 8);
        if (v >= 0) {
            *s += n;
            return v & 0xff;
        }
    }
    return -1;
}

/* STRING: a quoted line, as repr() writes it. */
static mu_status push_quoted(mui_machine *m)
{
    mui_slice line = {0};
    MUI_CHECK(mui_machine_line(m, &line));
    if (line.bytes < 2 || (line.data[0] != '\'' && line.data[0] != '"') || line.data[line.bytes - 1] != line.data[0]) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "the text is not quoted");
    }
    const char *s = line.data + 1, *end = line.data + line.bytes - 1;
    if (memchr(s, '\\', (size_t)(end - s)) == NULL) {
        return push_string(m, (const unsigned char *)s, (uint64_t)(end - s));
    }
    char *out = mui_arena_alloc(&m->p->arena, line.bytes); /* escapes are longer than what they stand for */
    size_t n = 0;
    if (out == NULL) {
        return mu_context_status(m->context);
    }
    while (s < end) {
        if (*s != '\\') {
            out[n++] = *s++;
            continue;
        }
        s++;
        int64_t byte = s < end ? escaped_byte(&s, end) : -1;
        if (byte < 0 && (s == end || *s == 'x')) {
            return mui_machine_fail(m, MU_ERR_FORMAT, "an escape in the text is not whole");
        }
        out[n++] = byte >= 0 ? (char)byte : '\\'; /* an unknown escape stands for itself, as in Python */
    }
    return push_string(m, (const unsigned char *)out, n);
}

static size_t put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3f));
        out[2] = (char)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3f));
    out[2] = (char)(0x80 | (c >> 6 & 0x3f));
    out[3] = (char)(0x80 | (c & 0x3f));
    return 4;
}

/* UNICODE: Python's raw-unicode-escape: Latin-1, and \uXXXX and \UXXXXXXXX. */
static mu_status push_unicode_line(mui_machine *m)
{
    mui_slice line = {0};
    MUI_CHECK(mui_machine_line(m, &line));
    char *out = mui_arena_alloc(&m->p->arena, 2 * line.bytes + 1);
    size_t n = 0;
    if (out == NULL) {
        return mu_context_status(m->context);
    }
    for (const char *s = line.data, *end = s + line.bytes; s < end;) {
        bool escape = *s == '\\' && s + 1 < end;
        int width = escape && s[1] == 'u' ? 4 : escape && s[1] == 'U' ? 8 : 0;
        if (width > 0) {
            int64_t c = digits(s + 2, end, width, 16);
            if (c < 0 || c > 0x10ffff) {
                return mui_machine_fail(m, MU_ERR_FORMAT, "an escape in the text is no character");
            }
            n += put_utf8(out + n, (uint32_t)c);
            s += 2 + width;
            continue;
        }
        n += put_utf8(out + n, (unsigned char)*s++);
        if (escape) { /* a backslash before a backslash escapes nothing behind it */
            n += put_utf8(out + n, (unsigned char)*s++);
        }
    }
    return mui_machine_text(m, MUI_STR, (const unsigned char *)out, n);
}

mu_status mui_machine_do_text(mui_machine *m)
{
    uint64_t n = 0;
    const unsigned char *data = NULL;
    switch (m->op) {
    case 'X': MUI_CHECK(mui_machine_length(m, 4, &n)); return push_unicode(m, n);
    case 0x8c: MUI_CHECK(mui_machine_length(m, 1, &n)); return push_unicode(m, n);
    case 0x8d: MUI_CHECK(mui_machine_length(m, 8, &n)); return push_unicode(m, n);
    case 'V': return push_unicode_line(m);
    case 'B': MUI_CHECK(mui_machine_length(m, 4, &n)); return push_bytes(m, n);
    case 'C': MUI_CHECK(mui_machine_length(m, 1, &n)); return push_bytes(m, n);
    case 0x8e:
    case 0x96: MUI_CHECK(mui_machine_length(m, 8, &n)); return push_bytes(m, n);
    case 'S': return push_quoted(m);
    case 'U': MUI_CHECK(mui_machine_length(m, 1, &n)); break;
    default: MUI_CHECK(mui_machine_signed_length(m, &n)); break; /* T */
    }
    MUI_CHECK(mui_machine_take(m, n, &data));
    return push_string(m, data, n);
}
