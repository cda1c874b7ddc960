/* What the two writers of checkpoints (save.c, training_save.c) share: a state dict as pickle, and the archive around. */
#ifndef MUI_SAVE_H
#define MUI_SAVE_H

#include "io/pickle_writer.h"
#include "io/state_list.h"
#include "io/zip_writer.h"

/* Puts the state dict at this place of the pickle. Storages get numbers from first on, one for each distinct value in
 * state_dict order; returns the next free one. prefix may be NULL. */
int64_t mui_save_state_dict(mui_pickle_writer *w, mu_module *root, const mui_states *s, const char *prefix,
                            int64_t first);

/* The archive: root folder named after the path, data.pkl, byteorder; then the caller's storages; then version. */
typedef struct mui_archive {
    mui_outfile file;
    mui_zip_writer zip;
    char *root;
} mui_archive;
mu_status mui_archive_open(mu_context *c, const char *path, const mui_pickle_writer *pickle,
                           mui_archive *out) MU_MUST_USE;
/* One storage, its bytes at once. */
void mui_archive_storage(mui_archive *a, int64_t key, const void *data, size_t bytes);
/* Writes the storages that mui_save_state_dict numbered. */
mu_status mui_archive_states(mui_archive *a, const mui_states *s, int64_t first) MU_MUST_USE;
/* status: MU_OK commits the file, an error gives it up. */
mu_status mui_archive_close(mui_archive *a, mu_status status) MU_MUST_USE;

#endif
