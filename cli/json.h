/* Output that several commands share: JSON with its commas and escapes, and text for people whose control characters
 * show instead of acting on the terminal. All goes to standard output. */
#ifndef MUSTER_CLI_JSON_H
#define MUSTER_CLI_JSON_H

#include <stdbool.h>
#include <stdint.h>

/* An object or array is begun with json_open and ended with json_close. key NULL: in an array, or at the top. Members of
 * the outermost object, and items of arrays right in it, stand on lines of their own. */
typedef struct json {
    int depth;
    char shut[8];
    bool begun[8];
    bool lines[8];
} json;

void json_open(json *j, const char *key, char bracket); /* '{' or '[' */
void json_close(json *j);                               /* ends the line after the outermost */
/* NULL is null. Text that is not UTF-8 is taken as Latin-1; a lone surrogate, which Python's pickles can have, becomes an
 * escape. */
void json_text(json *j, const char *key, const char *s);
void json_int(json *j, const char *key, int64_t n);
void json_uint(json *j, const char *key, uint64_t n);
void json_bool(json *j, const char *key, bool yes);
void json_null(json *j, const char *key);
/* Infinities, which JSON's numbers lack, as "inf" and "-inf", NaN as "nan". */
void json_number(json *j, const char *key, double x);
void json_ints(json *j, const char *key, const int64_t *n, int count); /* an array */
/* An array of texts: NULL-terminated. */
void json_texts(json *j, const char *key, const char *const *list);

/* For people. */
void put_text(const char *s);
void put_size(uint64_t bytes); /* "1.5 MB" */
void put_shape(int ndim, const int64_t *dim, const char *brackets);

#endif
