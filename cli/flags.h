/* Command-line flags from a table: parsing, checking and --help come from the same rows, so they cannot disagree.
 * Words that are no flags fill the table's FLAG_FILE rows in their order; all of them are wanted. */
#ifndef MUSTER_CLI_FLAGS_H
#define MUSTER_CLI_FLAGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum flag_kind {
    FLAG_SWITCH, /* bool */
    FLAG_INT,    /* int64_t in [min, max] */
    FLAG_FLOAT,  /* double in [min, max] */
    FLAG_TEXT,   /* const char *, borrowed from argv; may be "" where min is -1 */
    FLAG_LIST,   /* flag_list: may be given several times */
    FLAG_CHOICE, /* const char *, one of `choices`, separated by '|' */
    FLAG_FILE,   /* const char *: a word that is no flag, shown as `name` */
    FLAG_WORDS,  /* flag_words: all words that are no flags, at least one; the only row of its kind, and no FLAG_FILE */
    FLAG_END
} flag_kind;

/* What resuming a run does when the flag differs from what the run had. */
typedef enum flag_resume { FLAG_FREE = 0, FLAG_WARN, FLAG_SAME, FLAG_ASKED /* noted; the command itself compares */ } flag_resume;

#define FLAG_LIST_MAX 64
typedef struct flag_list {
    const char *item[FLAG_LIST_MAX];
    int count;
} flag_list;

/* As many as there are: they stay in argv. */
typedef struct flag_words {
    char **item;
    int count;
} flag_words;

typedef struct flag {
    const char *name; /* without dashes; "output" may be given as -o, too */
    flag_kind kind;
    size_t offset;    /* of its field in the options struct */
    const char *arg;  /* word for the argument in --help; choices for FLAG_CHOICE */
    const char *help;
    double min, max;
    flag_resume resume;
} flag;

/* Fills out, which holds the defaults, from argv. Returns -1 to go on; otherwise the exit code: 0 after --help, which
 * prints `about` (and the usual exit codes, unless it tells some), 2 after a message about what is wrong. */
int flags_parse(const char *command, const char *about, const flag *table, void *out, int argc, char **argv);

/* Text of a flag's value, "" when unset. */
void flags_value(const flag *f, const void *options, char *text, size_t size);

/* One line "name=value" for each flag whose resume is not FLAG_FREE; malloc'ed, NULL when out of memory. */
char *flags_note(const flag *table, const void *options);

/* The value of a flag (or another line "name=value") in a note. False when it has none. */
bool flags_noted(const char *note, const char *name, char *value, size_t size);

/* Compares with a note of another run. Differences of kind FLAG_WARN are written to out, one line each. Returns the
 * first flag of kind FLAG_SAME that differs (old gets its value then), or NULL. */
const flag *flags_differ(const flag *table, const void *options, const char *note, FILE *out, char *old, size_t size);

#endif
