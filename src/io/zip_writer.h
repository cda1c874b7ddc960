/* Writes zips byte for byte in the layout of PyTorch's own (miniz): stored members, data aligned to 64 bytes by an 'FB'
 * extra field, sizes and CRC in a descriptor after the data, zip64 end records always. */
#ifndef MUI_ZIP_WRITER_H
#define MUI_ZIP_WRITER_H

#include "io/outfile.h"

typedef struct mui_zip_written {
    char *name;
    uint64_t header, bytes;
    uint32_t crc;
} mui_zip_written;

typedef struct mui_zip_writer {
    mui_outfile *file;
    mu_context *context;
    mui_zip_written *members;
    size_t count, capacity;
    uint64_t wide_from; /* sizes and offsets from here on take zip64 fields: 0xffffffff; lower in tests */
    uint32_t crc;       /* of the member that is open */
    uint64_t data_at;
    mu_status status;
} mui_zip_writer;

void mui_zip_writer_init(mui_zip_writer *z, mui_outfile *file);
/* One member at a time: begin with its exact size, add its bytes, end. Errors are kept until finish. */
void mui_zip_begin(mui_zip_writer *z, const char *name, uint64_t bytes);
void mui_zip_add(mui_zip_writer *z, const void *data, size_t bytes);
void mui_zip_end(mui_zip_writer *z);
void mui_zip_member_write(mui_zip_writer *z, const char *name, const void *data, size_t bytes);
/* Writes the directory. Frees the writer's memory in any case; the file is still open. */
mu_status mui_zip_finish(mui_zip_writer *z) MU_MUST_USE;

#endif
