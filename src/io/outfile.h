/* A file that appears whole or not at all: written beside its place under a temporary name, synced, then renamed over
 * it. Errors are kept: write on, and ask at the end. */
#ifndef MUI_OUTFILE_H
#define MUI_OUTFILE_H

#include "base/context.h"

typedef struct mui_outfile {
    mu_context *context;
    char *path;      /* where it goes; links are followed */
    char *temporary; /* in the same folder */
    int fd;
    uint64_t bytes;  /* written so far, buffered ones included */
    char *buffer;
    size_t buffered;
    mu_status status;
} mui_outfile;

/* A path that is there must be a regular file; its permissions are kept. On error there is nothing to close. */
mu_status mui_outfile_open(mu_context *c, const char *path, mui_outfile *out) MU_MUST_USE;
void mui_outfile_write(mui_outfile *f, const void *data, size_t bytes);
void mui_outfile_zeros(mui_outfile *f, uint64_t bytes);
/* Syncs, renames, syncs the folder. On any error, also an earlier one, removes the temporary file: what was at path is
 * untouched. Frees f's memory either way. */
mu_status mui_outfile_commit(mui_outfile *f) MU_MUST_USE;
/* Removes the temporary file and frees f's memory. */
void mui_outfile_abandon(mui_outfile *f);

#endif
