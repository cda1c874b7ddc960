/* PyTorch's zip archive around a pickle and its storages. */
#ifndef MUI_ARCHIVE_H
#define MUI_ARCHIVE_H

#include "io/out_pickle.h"
#include "io/zip_writer.h"

/* Root folder named after the path, data.pkl, byteorder; then the caller's storages; then version. */
typedef struct mui_archive {
    mui_outfile file;
    mui_zip_writer zip;
    char *root;
} mui_archive;
mu_status mui_archive_open(mu_context *c, const char *path, const mui_pickle_writer *pickle,
                           mui_archive *out) MU_MUST_USE;
/* One storage, its bytes at once. */
void mui_archive_storage(mui_archive *a, int64_t key, const void *data, size_t bytes);
/* Writes the storages that mui_pk_state_dict numbered. */
mu_status mui_archive_tensors(mui_archive *a, const mui_out_list *l, int64_t first) MU_MUST_USE;
/* status: MU_OK commits the file, an error gives it up. */
mu_status mui_archive_close(mui_archive *a, mu_status status) MU_MUST_USE;

#endif
