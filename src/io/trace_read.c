/* Events of a trace, from a file of any size, or a pipe. */
#define _GNU_SOURCE
#include "io/trace_read.h"
#include "base/alloc.h"
#include "base/os.h"
#include "io/json_object.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BAD(r, ...) mui_fail((r)->context, MU_ERR_FORMAT, __VA_ARGS__)

enum { BUFFER_BYTES = 2 * (1 << 20) + 4096, NONE = -1 };

mu_status mui_trace_reader_open(mu_context *c, const char *path, mui_trace_reader *r)
{
    *r = (mui_trace_reader){.context = c, .path = path};
    r->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0) {
        return mui_fail(c, MU_ERR_IO, "%s: cannot open: %s", path, mui_errno_text(errno));
    }
    r->buffer = mui_alloc(c, BUFFER_BYTES);
    if (r->buffer == NULL) {
        mui_trace_reader_close(r);
        return MU_ERR_NOMEM;
    }
    return MU_OK;
}

void mui_trace_reader_close(mui_trace_reader *r)
{
    json_decref(r->event);
    r->event = NULL;
    mui_free(r->context, r->buffer);
    r->buffer = NULL;
    if (r->fd >= 0) {
        close(r->fd);
        r->fd = -1;
    }
}

/* -- bytes -------------------------------------------------------------------------------------------------------- */
static void skip(mui_trace_reader *r, size_t n)
{
    r->from += n;
    r->at += n;
}

/* Reads more, moving what there is to the front. False with an error of the file. */
static mu_status fill(mui_trace_reader *r)
{
    memmove(r->buffer, r->buffer + r->from, r->to - r->from);
    r->to -= r->from;
    r->from = 0;
    ssize_t n = 0;
    do {
        n = read(r->fd, r->buffer + r->to, BUFFER_BYTES - r->to);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return mui_fail(r->context, MU_ERR_IO, "%s: cannot read: %s", r->path, mui_errno_text(errno));
    }
    r->to += (size_t)n;
    r->ended = n == 0;
    return MU_OK;
}

/* The byte n places on, NONE at the end of the file or after an error. n is below half the buffer. */
static int byte_at(mui_trace_reader *r, size_t n, mu_status *s)
{
    while (r->to - r->from <= n && !r->ended && *s == MU_OK) {
        *s = fill(r);
    }
    return r->to - r->from > n && *s == MU_OK ? (unsigned char)r->buffer[r->from + n] : NONE;
}

static bool is_space(int c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static int next_byte(mui_trace_reader *r, mu_status *s)
{
    int c = byte_at(r, 0, s);
    while (is_space(c)) {
        skip(r, 1);
        c = byte_at(r, 0, s);
    }
    return c;
}

static mu_status expected(mui_trace_reader *r, int c, const char *wanted)
{
    return c > 0x20 && c < 0x7f ? BAD(r, "%s: '%c' at byte %llu, where %s was expected", r->path, c,
                                      (unsigned long long)r->at, wanted)
                                : BAD(r, "%s: byte 0x%02x at byte %llu, where %s was expected", r->path, (unsigned)c,
                                      (unsigned long long)r->at, wanted);
}

/* Length of the value that begins here: a string, a group in brackets, or all up to a comma, bracket or space. 0 when the
 * file ends within it. */
static size_t value_length(mui_trace_reader *r, mu_status *s)
{
    mui_json_scan scan = {0};
    for (size_t i = 0; i <= MUI_TRACE_MAX_EVENT; i++) {
        int c = byte_at(r, i, s);
        if (c == NONE) {
            return 0;
        }
        mui_json_byte b = mui_json_scan_next(&scan, c);
        if (b == MUI_JSON_LAST) {
            return i + 1;
        }
        if (b == MUI_JSON_BEYOND || (b == MUI_JSON_BARE && (c == ',' || c == ':' || is_space(c)))) {
            return i;
        }
    }
    *s = BAD(r, "%s: more than %zu bytes in one value at byte %llu", r->path, MUI_TRACE_MAX_EVENT, (unsigned long long)r->at);
    return 0;
}

static json_t *parse(mui_trace_reader *r, size_t n, const char *what, mu_status *s)
{
    json_error_t e;
    json_t *v = json_loadb(r->buffer + r->from, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (v == NULL && json_error_code(&e) == json_error_out_of_memory) {
        *s = mui_fail(r->context, MU_ERR_NOMEM, "%s: out of memory while reading it", r->path);
    } else if (v == NULL) {
        *s = BAD(r, "%s: no valid JSON at byte %llu, in %s: %s", r->path,
                 (unsigned long long)(r->at + (e.position > 0 ? (uint64_t)e.position : 0)), what, e.text);
    }
    return v;
}

/* The value that begins here, passed over; NULL when the file ends within it, or with an error. */
static json_t *take(mui_trace_reader *r, const char *what, mu_status *s)
{
    size_t n = value_length(r, s);
    json_t *v = n > 0 ? parse(r, n, what, s) : NULL;
    if (v != NULL) {
        skip(r, n);
    }
    return v;
}

/* -- the array ---------------------------------------------------------------------------------------------------- */
/* One member of the object around the array, up to its value; *is_events: that is the array. False at the object's end, at
 * that of the file, or with an error. */
static bool next_member(mui_trace_reader *r, bool *is_events, mu_status *s)
{
    int c = next_byte(r, s);
    if (c == ',') {
        skip(r, 1);
        c = next_byte(r, s);
    }
    if (c == '}' || c == NONE || *s != MU_OK) {
        return false;
    }
    if (c != '"') {
        *s = expected(r, c, "a name in quotes");
        return false;
    }
    json_t *name = take(r, "a name", s);
    if (name == NULL) {
        return false;
    }
    *is_events = json_string_value(name) != NULL && strcmp(json_string_value(name), "traceEvents") == 0;
    json_decref(name);
    c = next_byte(r, s);
    if (c != ':' && c != NONE) {
        *s = expected(r, c, "':'");
        return false;
    }
    skip(r, c == ':');
    return next_byte(r, s) != NONE;
}

/* Members around the array: judged, and passed over, up to the array or, when it is over, the end. */
static bool walk_object(mui_trace_reader *r, mu_status *s)
{
    bool is_events = false;
    while (next_member(r, &is_events, s)) {
        if (is_events) {
            if (r->within) {
                *s = BAD(r, "%s: a second traceEvents at byte %llu", r->path, (unsigned long long)r->at);
                return false;
            }
            return true;
        }
        json_t *v = take(r, "a value", s);
        if (v == NULL) {
            return false;
        }
        json_decref(v);
    }
    return false;
}

static mu_status begin(mui_trace_reader *r)
{
    mu_status s = MU_OK;
    int c = next_byte(r, &s);
    if (s != MU_OK) {
        return s;
    }
    if (c == NONE) {
        return BAD(r, "%s: empty, where a trace was expected", r->path);
    }
    if (c == '{') {
        r->object = true;
        skip(r, 1);
        if (!walk_object(r, &s)) {
            return s != MU_OK ? s : BAD(r, "%s: an object without traceEvents, no trace", r->path);
        }
        c = next_byte(r, &s);
    }
    if (c != '[') {
        return s != MU_OK ? s : expected(r, c, "a trace, an array of events,");
    }
    skip(r, 1);
    r->within = true;
    return MU_OK;
}

/* After the array's ']'. */
static mu_status finish(mui_trace_reader *r)
{
    mu_status s = MU_OK;
    skip(r, 1);
    if (r->object) {
        (void)walk_object(r, &s);
        int c = s == MU_OK ? next_byte(r, &s) : NONE;
        if (s != MU_OK || c == NONE) {
            return s; /* the events are all there, but the file is not whole */
        }
        skip(r, 1);
    }
    int c = next_byte(r, &s);
    if (s == MU_OK && c != NONE) {
        return expected(r, c, "the end of the file");
    }
    r->whole = s == MU_OK;
    return s;
}

static bool take_event(mui_trace_reader *r, mui_trace_event *e, mu_status *s)
{
    size_t n = value_length(r, s);
    if (n == 0) {
        return false; /* cut off, or an error */
    }
    r->event = parse(r, n, "an event", s);
    if (r->event == NULL) {
        return false;
    }
    if (!json_is_object(r->event)) {
        *s = BAD(r, "%s: what begins at byte %llu is no event, which is an object", r->path, (unsigned long long)r->at);
        return false;
    }
    *e = (mui_trace_event){.text = r->buffer + r->from, .bytes = n, .json = r->event, .at = r->at};
    r->taken = n;
    r->any = true;
    return true;
}

bool mui_trace_next(mui_trace_reader *r, mui_trace_event *e, mu_status *s)
{
    json_decref(r->event);
    r->event = NULL;
    skip(r, r->taken);
    r->taken = 0;
    if (*s == MU_OK && !r->within) {
        *s = begin(r);
    }
    int c = *s == MU_OK ? next_byte(r, s) : NONE;
    bool more = c == ',' && r->any;
    if (more) {
        skip(r, 1);
        c = next_byte(r, s);
    } else if (c != ']' && c != NONE && r->any) {
        *s = expected(r, c, "',' or ']'");
        return false;
    }
    if (c == NONE || *s != MU_OK) {
        return false; /* cut off between two events */
    }
    if (c == ']' && !more) {
        *s = finish(r);
        return false;
    }
    if (c != '{') {
        *s = expected(r, c, "an event");
        return false;
    }
    return take_event(r, e, s);
}

/* -- times -------------------------------------------------------------------------------------------------------- */
/* The text is valid JSON. */
bool mui_trace_find_time(const mui_trace_event *e, size_t *at, size_t *bytes)
{
    const char *t = e->text;
    size_t depth = 0, string = 0;
    bool in_string = false;
    for (size_t i = 0; i < e->bytes; i++) {
        char c = t[i];
        if (in_string) {
            i += c == '\\';
            in_string = c != '"';
            continue;
        }
        if (c == '"') {
            in_string = true;
            string = i;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        } else if (c == ':' && depth == 1 && strncmp(t + string, "\"ts\"", 4) == 0) {
            do {
                i++;
            } while (strchr(" \t\r\n", t[i]) != NULL);
            *at = i;
            *bytes = strspn(t + i, "+-0123456789.eE");
            return *bytes > 0;
        }
    }
    return false;
}

bool mui_trace_parse_time(const char *text, size_t bytes, int64_t *ns)
{
    char copy[64];
    if (bytes == 0 || bytes >= sizeof(copy)) {
        return false;
    }
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    char *end = NULL;
    double us = strtod(copy, &end);
    if (*end != '\0' || !(fabs(us) < 4e15)) { /* a century of microseconds */
        return false;
    }
    size_t digits = strspn(copy + (copy[0] == '-'), "0123456789") + (copy[0] == '-');
    if (copy[digits] != '.' && copy[digits] != '\0') {
        *ns = (int64_t)llround(us * 1000);
        return true;
    }
    /* Exactly, which a double is not: microseconds of a clock with nine digits of them take more than its bits. */
    int64_t whole = strtoll(copy, NULL, 10), part = 0, place = 100;
    for (size_t i = digits + 1; copy[digits] == '.' && copy[i] != '\0' && place > 0; i++, place /= 10) {
        part += (copy[i] - '0') * place;
    }
    *ns = whole * 1000 + (copy[0] == '-' ? -part : part);
    return true;
}
