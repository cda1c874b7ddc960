/* Writes JSON and text. */
#include "json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* One character of a name at s as JSON or, for people, with control characters made visible; returns its end. */
static const char *put_char(const char *s, bool as_json)
{
    unsigned char c = (unsigned char)*s;
    if (c < 0x20 || c == 0x7f) {
        printf(as_json ? "\\u%04x" : "\\x%02x", c);
        return s + 1;
    }
    if (as_json && (c == '"' || c == '\\')) {
        printf("\\%c", c);
        return s + 1;
    }
    /* A lone surrogate, which UTF-8 does not allow but Python's pickles do. */
    if (c == 0xed && (unsigned char)s[1] >= 0xa0 && s[1] != '\0' && s[2] != '\0') {
        printf("\\u%04x", 0xd000u | ((unsigned char)s[1] & 0x3fu) << 6 | ((unsigned char)s[2] & 0x3fu));
        return s + 3;
    }
    /* C1 control characters act on terminals too. */
    if (!as_json && c == 0xc2 && (unsigned char)s[1] >= 0x80 && (unsigned char)s[1] < 0xa0) {
        printf("\\x%02x", (unsigned char)s[1]);
        return s + 2;
    }
    putchar(c);
    return s + 1;
}

void put_text(const char *s)
{
    while (*s != '\0') {
        s = put_char(s, false);
    }
}

/* Whether bytes form UTF-8 as put_char expects; keys may be bytes. Others are shown byte by byte. */
static void put_quoted(const char *s)
{
    putchar('"');
    for (const char *p = s; *p != '\0';) {
        unsigned char c = (unsigned char)*p;
        int more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : -1;
        bool whole = more >= 0;
        for (int i = 1; whole && i <= more; i++) {
            whole = ((unsigned char)p[i] & 0xc0) == 0x80;
        }
        if (!whole) { /* not UTF-8: as Latin-1 */
            printf("\\u%04x", c);
            p++;
        } else if (more == 0 || c == 0xed) {
            p = put_char(p, true);
            /* the rest of a valid three-byte letter that begins with 0xed */
            while (((unsigned char)*p & 0xc0) == 0x80) {
                putchar(*p++);
            }
        } else {
            fwrite(p, 1, (size_t)more + 1, stdout);
            p += more + 1;
        }
    }
    putchar('"');
}

/* What stands before a value: comma, line, key. */
static void before(json *j, const char *key)
{
    if (j->depth > 0) {
        int d = j->depth - 1;
        if (j->begun[d]) {
            putchar(',');
        }
        if (j->lines[d]) {
            if (j->begun[d] || d > 0) {
                printf("\n%*s", j->depth, "");
            }
        } else if (j->begun[d]) {
            putchar(' ');
        }
        j->begun[d] = true;
    }
    if (key != NULL) {
        put_quoted(key);
        fputs(": ", stdout);
    }
}

void json_open(json *j, const char *key, char bracket)
{
    before(j, key);
    putchar(bracket);
    if (j->depth < (int)sizeof(j->shut)) {
        j->shut[j->depth] = bracket == '{' ? '}' : ']';
        j->begun[j->depth] = false;
        j->lines[j->depth] = j->depth == 0 || (j->depth == 1 && bracket == '[');
        j->depth++;
    }
}

void json_close(json *j)
{
    j->depth--;
    putchar(j->shut[j->depth]);
    if (j->depth == 0) {
        putchar('\n');
    }
}

void json_text(json *j, const char *key, const char *s)
{
    if (s == NULL) {
        json_null(j, key);
        return;
    }
    before(j, key);
    put_quoted(s);
}

void json_int(json *j, const char *key, int64_t n)
{
    before(j, key);
    printf("%" PRId64, n);
}

void json_ints(json *j, const char *key, const int64_t *n, int count)
{
    json_open(j, key, '[');
    for (int i = 0; i < count; i++) {
        json_int(j, NULL, n[i]);
    }
    json_close(j);
}

void json_uint(json *j, const char *key, uint64_t n)
{
    before(j, key);
    printf("%" PRIu64, n);
}

void json_bool(json *j, const char *key, bool yes)
{
    before(j, key);
    fputs(yes ? "true" : "false", stdout);
}

void json_null(json *j, const char *key)
{
    before(j, key);
    fputs("null", stdout);
}

void json_number(json *j, const char *key, double x)
{
    before(j, key);
    if (isfinite(x)) {
        printf("%.17g", x);
    } else {
        fputs(isnan(x) ? "\"nan\"" : x > 0 ? "\"inf\"" : "\"-inf\"", stdout);
    }
}

void json_texts(json *j, const char *key, const char *const *list)
{
    json_open(j, key, '[');
    for (size_t i = 0; list[i] != NULL; i++) {
        json_text(j, NULL, list[i]);
    }
    json_close(j);
}

void put_size(uint64_t bytes)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
    double x = (double)bytes / 1000;
    int u = 0;
    if (bytes < 1000) {
        printf("%" PRIu64 " bytes", bytes);
        return;
    }
    for (; x >= 1000 && u < 5; u++) {
        x /= 1000;
    }
    printf("%.1f %s", x, units[u]);
}

void put_shape(int ndim, const int64_t *dim, const char *brackets)
{
    putchar(brackets[0]);
    for (int i = 0; i < ndim; i++) {
        printf("%s%" PRId64, i > 0 ? ", " : "", dim[i]);
    }
    putchar(brackets[1]);
}
