/* What the commands that look into checkpoints share: their common flags, opening, messages and exit codes. */
#ifndef MUSTER_CLI_LOOK_H
#define MUSTER_CLI_LOOK_H

#include "flags.h"
#include "json.h"

#include <muster/checkpoint.h>

/* How a file is read; the flags of every such command. */
typedef struct look_reading {
    flag_list limits;
    mu_checkpoint_options options;
} look_reading;
#define LOOK_FLAGS(type, reading)                                                                                      \
    {"limit", FLAG_LIST, offsetof(type, reading.limits), "NAME=N",                                                     \
     "refuse a file that asks for more: pickle, members, header, tensor, ratio; see the man page", 0, 0, FLAG_FREE},   \
        {"no-checksum", FLAG_SWITCH, offsetof(type, reading.options.no_checksum), NULL,                                \
         "do not verify the checksums of a zip's members", 0, 0, FLAG_FREE},                                           \
        {"big-endian", FLAG_SWITCH, offsetof(type, reading.options.big_endian), NULL,                                  \
         "how to take a zip that does not tell its byte order (s390x before PyTorch 2.1)", 0, 0, FLAG_FREE},           \
        {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE}

#define LOOK_WARNINGS 16
typedef struct look {
    const char *command;
    mu_context *context;
    bool no_file;                        /* a file could not be opened at all */
    const char *warnings[LOOK_WARNINGS + 1]; /* the library's, NULL-terminated */
    int warning_count;
} look;

/* Returns -1 to go on, else an exit code after a message. */
int look_begin(look *l, const char *command, look_reading *reading);
mu_checkpoint_file *look_open(look *l, const char *path, const look_reading *reading);
/* Prints the context's error, if it has one; frees everything. code is for when there is none. */
int look_end(look *l, int code);

/* Of the elements laid out; saturating: a file may claim any shape. */
uint64_t look_elements(const mu_checkpoint_entry *e);
uint64_t look_bytes(const mu_checkpoint_entry *e);
/* Whether the elements of entry i can be read; if not, its note says why. False: an error, which the context has. */
bool look_readable(const look *l, mu_checkpoint_file *k, int64_t i, bool *readable);
/* Room for elements of e, also where there are none; free it. NULL: out of memory, which was printed. */
void *look_room(const look *l, const mu_checkpoint_entry *e, uint64_t bytes);
/* The chain of "module.", "_orig_mod.", "model." and "net." that name begins with: its length. */
size_t look_prefix(const char *name);
/* The part of such a chain that all names of the dict begin with. */
size_t look_common_prefix(const mu_checkpoint_file *k, const mu_state_dict *d);

#endif
