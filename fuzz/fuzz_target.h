/* What every fuzz target has: libFuzzer's entry point, and the way from bytes to a file. */
#ifndef FUZZ_TARGET_H
#define FUZZ_TARGET_H

#include <muster/base.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* A file without a name that holds the bytes; close it. Its path while it is open is written to path. */
int fuzz_file(const uint8_t *data, size_t bytes, char path[64]);
/* The same bytes as a checkpoint: opened, listed, read. Errors are fine, anything else is broken. */
void fuzz_open(const uint8_t *data, size_t bytes, bool no_checksum);
/* Ends the process as a crash does: a broken invariant was found. */
void fuzz_broken(const char *what);
/* A context that logs nothing. */
mu_context *fuzz_context(void);
/* Closes it; that something allocated from it is left is broken. */
void fuzz_close(mu_context *c);

#endif
