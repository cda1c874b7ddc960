/* The walk over a JSON object. */
#include "io/json_object.h"

#include <string.h>

#define BAD(j, ...) mui_fail((j)->context, MU_ERR_FORMAT, __VA_ARGS__)

static void skip_space(mui_json *j)
{
    while (j->at < j->bytes && strchr(" \t\r\n", j->text[j->at]) != NULL && j->text[j->at] != '\0') {
        j->at++;
    }
}

static mu_status expected(const mui_json *j, const char *wanted)
{
    if (j->at == j->bytes) {
        return BAD(j, "%s: %s ends at byte %zu, where %s was expected", j->path, j->what, j->base + j->at, wanted);
    }
    unsigned char c = (unsigned char)j->text[j->at];
    return c > 0x20 && c < 0x7f
               ? BAD(j, "%s: %s has '%c' at byte %zu, where %s was expected", j->path, j->what, c, j->base + j->at, wanted)
               : BAD(j, "%s: %s has byte 0x%02x at byte %zu, where %s was expected", j->path, j->what, c,
                     j->base + j->at, wanted);
}

/* One past the value that begins at `at`: a string, a group in brackets, or all up to a comma or bracket. */
static size_t value_end(const mui_json *j)
{
    mui_json_scan scan = {0};
    for (size_t i = j->at; i < j->bytes; i++) {
        char c = j->text[i];
        mui_json_byte b = mui_json_scan_next(&scan, c);
        if (b == MUI_JSON_LAST) {
            return i + 1;
        }
        if (b == MUI_JSON_BEYOND || (b == MUI_JSON_BARE && c == ',')) {
            return i;
        }
    }
    return j->bytes;
}

static json_t *parse(const mui_json *j, const char *text, size_t bytes, size_t at, const char *what)
{
    json_error_t e;
    json_t *v = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (v == NULL && json_error_code(&e) == json_error_out_of_memory) {
        mui_fail(j->context, MU_ERR_NOMEM, "%s: out of memory while reading %s", j->path, j->what);
    } else if (v == NULL) {
        BAD(j, "%s: %s is no valid JSON at byte %zu, in %s: %s", j->path, j->what,
            j->base + at + (e.position > 0 ? (size_t)e.position : 0), what, e.text);
    }
    return v;
}

mu_status mui_json_begin(mui_json *j)
{
    j->at = 0;
    j->begun = false;
    j->name = NULL;
    skip_space(j);
    if (j->at == j->bytes || j->text[j->at] != '{') {
        return expected(j, "'{'");
    }
    j->at++;
    return MU_OK;
}

static mu_status read_member(mui_json *j, mui_json_member *m)
{
    if (j->begun) {
        if (j->at == j->bytes || j->text[j->at] != ',') {
            return expected(j, "',' or '}'");
        }
        j->at++;
        skip_space(j);
    }
    if (j->at == j->bytes || j->text[j->at] != '"') {
        return expected(j, j->begun ? "a name in quotes" : "a name in quotes or '}'");
    }
    size_t start = j->at, stop = value_end(j);
    if (stop - start > MUI_JSON_MAX_VALUE) {
        return BAD(j, "%s: %s has a name of %zu bytes at byte %zu", j->path, j->what, stop - start, j->base + start);
    }
    j->name = parse(j, j->text + start, stop - start, start, "a name");
    if (j->name == NULL) {
        return mu_context_status(j->context);
    }
    j->at = stop;
    skip_space(j);
    if (j->at == j->bytes || j->text[j->at] != ':') {
        return expected(j, "':'");
    }
    j->at++;
    skip_space(j);
    start = j->at;
    stop = value_end(j);
    *m = (mui_json_member){.name = json_string_value(j->name),
                           .name_bytes = json_string_length(j->name),
                           .value = j->text + start,
                           .value_bytes = stop - start,
                           .at = start};
    j->at = stop;
    j->begun = true;
    return stop > start ? MU_OK : expected(j, "a value");
}

static void drop_name(mui_json *j)
{
    json_decref(j->name);
    j->name = NULL;
}

bool mui_json_next(mui_json *j, mui_json_member *m, mu_status *s)
{
    drop_name(j);
    if (*s != MU_OK) {
        return false;
    }
    skip_space(j);
    if (j->at < j->bytes && j->text[j->at] == '}') {
        j->at++;
        skip_space(j);
        *s = j->at == j->bytes ? MU_OK : expected(j, "its end");
        return false;
    }
    *s = read_member(j, m);
    if (*s != MU_OK) {
        drop_name(j);
    }
    return *s == MU_OK;
}

json_t *mui_json_value(const mui_json *j, const mui_json_member *m, const char *what)
{
    if (m->value_bytes > MUI_JSON_MAX_VALUE) {
        BAD(j, "%s: %s has %zu bytes in %s at byte %zu; at most %zu were expected", j->path, j->what, m->value_bytes,
            what, j->base + m->at, MUI_JSON_MAX_VALUE);
        return NULL;
    }
    return parse(j, m->value, m->value_bytes, m->at, what);
}

mui_json mui_json_inner(const mui_json *j, const mui_json_member *m, const char *what)
{
    return (mui_json){.context = j->context,
                      .path = j->path,
                      .what = what,
                      .text = m->value,
                      .bytes = m->value_bytes,
                      .base = j->base + m->at};
}
