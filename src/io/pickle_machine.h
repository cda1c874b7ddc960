/* The machine's inside, shared by its source files. */
#ifndef MUI_PICKLE_MACHINE_H
#define MUI_PICKLE_MACHINE_H

#include "io/pickle.h"

typedef struct mui_machine {
    mui_pickle *p;
    mu_context *context;
    const char *path, *what;
    const unsigned char *data;
    size_t bytes, at;        /* at: next byte */
    uint64_t limit;          /* that at must not pass */
    size_t op_at;            /* of the current opcode, for messages */
    unsigned char op;
    uint64_t ops;            /* executed so far */
    mui_value **stack;
    size_t depth, stack_capacity;
    size_t *marks;           /* stack depths */
    size_t mark_count, mark_capacity;
    mui_value **memo;
    size_t memo_count, memo_capacity;
    mui_value *none, *yes, *no, *unit; /* values made once: None, True, False, () */
} mui_machine;

mu_status mui_machine_fail(mui_machine *m, mu_status s, const char *format, ...) MU_PRINTF(3, 4);
#define MUI_CHECK(call)                                                                                                \
    do {                                                                                                               \
        mu_status check_status = (call);                                                                               \
        if (check_status != MU_OK) {                                                                                   \
            return check_status;                                                                                       \
        }                                                                                                              \
    } while (0)

mui_value *mui_machine_new(mui_machine *m, mui_kind kind); /* NULL: no memory, raised */
mu_status mui_machine_push(mui_machine *m, mui_value *v);  /* NULL v: MU_ERR_NOMEM */
mu_status mui_machine_pop(mui_machine *m, mui_value **v);
/* Pops all above the topmost mark into *items (borrowed from the stack, valid until the next push), and the mark. */
mu_status mui_machine_pop_mark(mui_machine *m, mui_value ***items, size_t *count);
mu_status mui_machine_take(mui_machine *m, uint64_t bytes, const unsigned char **out);
mu_status mui_machine_line(mui_machine *m, mui_slice *out); /* up to a newline, which is taken too */

/* A length of so many bytes, little-endian. */
mu_status mui_machine_length(mui_machine *m, size_t width, uint64_t *length);
mu_status mui_machine_signed_length(mui_machine *m, uint64_t *length); /* of 4 bytes, and not negative */
mu_status mui_machine_text(mui_machine *m, mui_kind kind, const unsigned char *data, uint64_t bytes); /* pushes it */
mu_status mui_machine_global_lines(mui_machine *m, mui_value **out); /* a global: module and name are the next two lines */

/* pickle_text.c: texts and bytes. */
mu_status mui_machine_do_text(mui_machine *m);
/* pickle_containers.c: lists, dicts, sets, tuples, and object records. Opcodes that are not theirs: *mine is false. */
mu_status mui_machine_container(mui_machine *m, bool *mine);

#endif
