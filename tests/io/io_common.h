/* What the tests of loading and saving share. Failures of what has to work for a test to mean anything end it. */
#ifndef IO_COMMON_H
#define IO_COMMON_H

#include <muster/muster.h>

/* cmocka's set-up and tear-down of a group whose tests write into the current folder: one of their own, which must be
 * empty again at the end. */
int io_enter_folder(void **state);
int io_leave_folder(void **state);

/* Entries of a folder, less those that begin with a dot. */
int io_entries(const char *folder);

/* Names and values of all parameters and buffers, through the public interface, as one hash. False when one cannot be
 * read. */
bool io_hash(mu_module *m, uint64_t *out);

#endif
