/* Walks a JSON object in a file member by member. Names and values are found by matching brackets and quotes, without
 * recursion, and each is then judged by jansson on its own: so the memory in use is bounded by the largest member and not
 * by the file, while nothing is accepted that jansson refuses. Who walks sees to members of one name: their order in the
 * file is kept. Not for: JSON that is not a file's. */
#ifndef MUI_JSON_OBJECT_H
#define MUI_JSON_OBJECT_H

#include "base/context.h"

#include <jansson.h>

/* The longest value that is parsed into memory; jansson takes at most about 60 bytes for each. */
#define MUI_JSON_MAX_VALUE ((size_t)1 << 20)

/* Where a value ends, byte after byte from its first: a string at its quote, a group at its bracket. */
typedef struct mui_json_scan {
    size_t depth;
    bool in_string, escaped;
} mui_json_scan;

typedef enum mui_json_byte {
    MUI_JSON_WITHIN, /* more of the value follows */
    MUI_JSON_LAST,   /* the value's last byte */
    MUI_JSON_BEYOND, /* the bracket around the value: it has ended before */
    MUI_JSON_BARE    /* of a number or word, or what comes after it: the caller knows its separators */
} mui_json_byte;

static inline mui_json_byte mui_json_scan_next(mui_json_scan *s, int c)
{
    if (s->escaped) {
        s->escaped = false;
    } else if (s->in_string) {
        s->escaped = c == '\\';
        s->in_string = c != '"';
        return s->in_string || s->depth > 0 ? MUI_JSON_WITHIN : MUI_JSON_LAST;
    } else if (c == '"') {
        s->in_string = true;
    } else if (c == '{' || c == '[') {
        s->depth++;
    } else if (c == '}' || c == ']') {
        if (s->depth == 0) {
            return MUI_JSON_BEYOND;
        }
        return --s->depth == 0 ? MUI_JSON_LAST : MUI_JSON_WITHIN;
    } else if (s->depth == 0) {
        return MUI_JSON_BARE;
    }
    return MUI_JSON_WITHIN;
}

typedef struct mui_json {
    mu_context *context;
    const char *path, *what; /* for messages: "the header" */
    const char *text;
    size_t bytes;
    size_t base; /* of text in the file, for messages */
    size_t at;   /* of the next byte */
    json_t *name; /* of the member */
    bool begun;   /* a member was there */
} mui_json;

typedef struct mui_json_member {
    const char *name; /* without NUL inside; valid until the next member */
    size_t name_bytes;
    const char *value; /* not yet judged */
    size_t value_bytes;
    size_t at;         /* of value in text */
} mui_json_member;

/* text must be one object and nothing else but white space:
 *     mu_status s = mui_json_begin(&j);
 *     while (mui_json_next(&j, &m, &s)) {
 *         s = ...;
 *     }
 * The walk ends after the last member, or with the first error, which is then in *s; only so is nothing left to free. */
mu_status mui_json_begin(mui_json *j) MU_MUST_USE;
bool mui_json_next(mui_json *j, mui_json_member *m, mu_status *s) MU_MUST_USE;
/* The value as jansson understands it, to be dropped with json_decref; NULL with an error. Objects inside do not repeat
 * names. what says in messages whose it is. */
json_t *mui_json_value(const mui_json *j, const mui_json_member *m, const char *what);
/* The value as an object to walk, with this name in messages. */
mui_json mui_json_inner(const mui_json *j, const mui_json_member *m, const char *what);

#endif
