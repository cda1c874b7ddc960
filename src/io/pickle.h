/* An inert pickle machine: builds the values a pickle describes and never calls, imports or looks up anything. What
 * Python would call becomes an object record: (callable, arguments, state, items).
 *
 * Values form a graph that may share nodes and contain cycles; all live in one arena and go together. Nothing here, and
 * nothing that walks values, recurses on the input's depth. Texts are slices of the pickle's own bytes, which must
 * outlive the values. Not for: what a record means (torch_values.h). */
#ifndef MUI_PICKLE_H
#define MUI_PICKLE_H

#include "base/arena.h"

typedef enum mui_kind {
    MUI_NONE = 0,
    MUI_BOOL,
    MUI_INT,
    MUI_BIGINT, /* more than 64 bits: little-endian two's complement bytes; its digits in protocol 0 */
    MUI_FLOAT,
    MUI_STR,    /* UTF-8, lone surrogates allowed */
    MUI_BYTES,
    MUI_TUPLE,
    MUI_LIST,
    MUI_DICT,   /* items are key, value, key, value, ... */
    MUI_SET,
    MUI_GLOBAL, /* module and name: never looked up */
    MUI_PERSISTENT, /* a reference to something outside the pickle: a storage */
    MUI_OBJECT
} mui_kind;

typedef struct mui_value mui_value;

typedef struct mui_slice {
    const char *data;
    size_t bytes;
} mui_slice;

typedef struct mui_seq {
    mui_value **items;
    size_t count, capacity;
} mui_seq;

typedef struct mui_object {
    mui_value *callable; /* a global, or an object again */
    mui_value *args;     /* a tuple */
    mui_value *kwargs;   /* NEWOBJ_EX only, else NULL */
    mui_value *state;    /* of BUILD, NULL when there was none */
    mui_seq pairs;       /* of SETITEM(S): key, value, ... */
    mui_seq appended;    /* of APPEND(S) and ADDITEMS */
} mui_object;

struct mui_value {
    mui_kind kind;
    uint32_t number; /* of persistent values: index in mui_pickle.persistent */
    union {
        bool truth;
        int64_t i;
        double f;
        mui_slice text;          /* MUI_STR, MUI_BYTES, MUI_BIGINT */
        mui_seq seq;             /* tuple, list, set, dict */
        struct {
            mui_slice module, name;
        } global;
        mui_value *id;           /* of a persistent value */
        mui_object *object;
    };
    void *note; /* for who walks the values; NULL at first */
};

typedef struct mui_pickle {
    mu_context *context;
    mui_arena arena;
    mui_value *value;        /* what the pickle describes */
    size_t used;             /* bytes up to and including STOP */
    mui_value **persistent;  /* all persistent values, in order of appearance */
    size_t persistent_count, persistent_capacity;
    mui_value **globals;     /* all globals, in order of appearance, repeated ones repeated */
    size_t global_count, global_capacity;
} mui_pickle;

/* Runs one pickle. what names it in messages ("data.pkl"). limit: the most bytes it may take of data; MU_ERR_LIMIT
 * beyond. On error nothing is left to free. */
mu_status mui_pickle_read_within(mu_context *c, const char *path, const char *what, const unsigned char *data,
                                 size_t bytes, uint64_t limit, mui_pickle *out) MU_MUST_USE;
/* The same without a limit. */
mu_status mui_pickle_read(mu_context *c, const char *path, const char *what, const unsigned char *data, size_t bytes,
                          mui_pickle *out) MU_MUST_USE;
void mui_pickle_free(mui_pickle *p);

/* "dict", "str", ... */
const char *mui_kind_name(mui_kind k);
bool mui_text_is(const mui_value *v, const char *text); /* a str equal to text */
/* A global of this name; Python 2's names of the built-in modules count as Python 3's. */
bool mui_global_is(const mui_value *v, const char *module, const char *name);
bool mui_is_sequence(const mui_value *v); /* a list or a tuple; NULL is none */
bool mui_slice_is(mui_slice s, const char *text);
int mui_slice_compare(mui_slice a, mui_slice b); /* as strcmp */

#endif
