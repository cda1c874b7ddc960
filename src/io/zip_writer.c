/* Writes zip archives as PyTorch does, so that tools which rely on its layout (mapping tensors in place) work. */
#include "io/zip_writer.h"
#include "base/alloc.h"
#include "io/bytes.h"

#include <libdeflate.h>
#include <string.h>

#define ALIGNMENT 64u
#define FLAGS 0x0808u /* sizes in a descriptor after the data; names are UTF-8 */

void mui_zip_writer_init(mui_zip_writer *z, mui_outfile *file)
{
    *z = (mui_zip_writer){.file = file, .context = file->context, .wide_from = UINT32_MAX};
}

static bool is_wide(const mui_zip_writer *z, uint64_t v)
{
    return v >= z->wide_from;
}

static uint32_t narrow(const mui_zip_writer *z, uint64_t v)
{
    return is_wide(z, v) ? UINT32_MAX : (uint32_t)v;
}

void mui_zip_begin(mui_zip_writer *z, const char *name, uint64_t bytes)
{
    if (z->status != MU_OK || !MUI_GROW(z->context, z->members, z->count, z->capacity)) {
        z->status = z->status != MU_OK ? z->status : MU_ERR_NOMEM;
        return;
    }
    char *copy = mui_strdup(z->context, name);
    if (copy == NULL) {
        z->status = MU_ERR_NOMEM;
        return;
    }
    uint64_t header = z->file->bytes;
    z->members[z->count++] = (mui_zip_written){.name = copy, .header = header, .bytes = bytes};
    /* A zip64 field, where needed, then the padding that moves the data to a multiple of 64. */
    size_t name_bytes = strlen(name), wide_bytes = is_wide(z, bytes) ? 20 : 0;
    uint64_t data_at = header + 30 + name_bytes + wide_bytes + 4;
    size_t padding = (size_t)((ALIGNMENT - data_at % ALIGNMENT) % ALIGNMENT);
    unsigned char h[30] = "PK\3\4", extra[20], fill[4 + ALIGNMENT];
    mui_put_le16(h + 6, FLAGS);
    mui_put_le16(h + 26, (uint16_t)name_bytes);
    mui_put_le16(h + 28, (uint16_t)(wide_bytes + 4 + padding));
    if (wide_bytes > 0) { /* says that the descriptor has 8-byte sizes; the header's own stay 0, as torch has them */
        mui_put_le16(extra, 1);
        mui_put_le16(extra + 2, 16);
        mui_put_le64(extra + 4, bytes);
        mui_put_le64(extra + 12, bytes);
    }
    memcpy(fill, "FB", 2);
    mui_put_le16(fill + 2, (uint16_t)padding);
    memset(fill + 4, 'Z', ALIGNMENT);
    mui_outfile_write(z->file, h, sizeof(h));
    mui_outfile_write(z->file, name, name_bytes);
    mui_outfile_write(z->file, extra, wide_bytes);
    mui_outfile_write(z->file, fill, 4 + padding);
    z->crc = 0;
    z->data_at = data_at + padding;
}

void mui_zip_add(mui_zip_writer *z, const void *data, size_t bytes)
{
    if (z->status == MU_OK && bytes > 0) {
        z->crc = libdeflate_crc32(z->crc, data, bytes);
        mui_outfile_write(z->file, data, bytes);
    }
}

void mui_zip_end(mui_zip_writer *z)
{
    if (z->status != MU_OK || z->file->status != MU_OK) {
        return;
    }
    mui_zip_written *m = &z->members[z->count - 1];
    if (z->file->bytes - z->data_at != m->bytes) {
        z->status = mui_fail(z->context, MU_ERR_INTERNAL, "%s: member '%s' got %llu bytes instead of %llu",
                             z->file->path, m->name, (unsigned long long)(z->file->bytes - z->data_at),
                             (unsigned long long)m->bytes);
        return;
    }
    m->crc = z->crc;
    unsigned char d[24] = "PK\7\10";
    mui_put_le32(d + 4, m->crc);
    if (is_wide(z, m->bytes)) {
        mui_put_le64(d + 8, m->bytes);
        mui_put_le64(d + 16, m->bytes);
    } else {
        mui_put_le32(d + 8, (uint32_t)m->bytes);
        mui_put_le32(d + 12, (uint32_t)m->bytes);
    }
    mui_outfile_write(z->file, d, is_wide(z, m->bytes) ? 24 : 16);
}

void mui_zip_member_write(mui_zip_writer *z, const char *name, const void *data, size_t bytes)
{
    mui_zip_begin(z, name, bytes);
    mui_zip_add(z, data, bytes);
    mui_zip_end(z);
}

static void write_entry(mui_zip_writer *z, const mui_zip_written *m)
{
    unsigned char e[46] = "PK\1\2", extra[28];
    size_t wide = 4;
    if (is_wide(z, m->bytes)) {
        mui_put_le64(extra + wide, m->bytes);
        mui_put_le64(extra + wide + 8, m->bytes);
        wide += 16;
    }
    if (is_wide(z, m->header)) {
        mui_put_le64(extra + wide, m->header);
        wide += 8;
    }
    mui_put_le16(extra, 1);
    mui_put_le16(extra + 2, (uint16_t)(wide - 4));
    wide = wide == 4 ? 0 : wide;
    mui_put_le16(e + 8, FLAGS);
    mui_put_le32(e + 16, m->crc);
    mui_put_le32(e + 20, narrow(z, m->bytes));
    mui_put_le32(e + 24, narrow(z, m->bytes));
    mui_put_le16(e + 28, (uint16_t)strlen(m->name));
    mui_put_le16(e + 30, (uint16_t)wide);
    mui_put_le32(e + 42, narrow(z, m->header));
    mui_outfile_write(z->file, e, sizeof(e));
    mui_outfile_write(z->file, m->name, strlen(m->name));
    mui_outfile_write(z->file, extra, wide);
}

static void write_end(mui_zip_writer *z, uint64_t at, uint64_t bytes)
{
    unsigned char wide[56] = "PK\6\6", locator[20] = "PK\6\7", end[22] = "PK\5\6";
    uint64_t wide_at = z->file->bytes;
    uint16_t count = z->count >= UINT16_MAX ? UINT16_MAX : (uint16_t)z->count;
    mui_put_le64(wide + 4, 44);
    mui_put_le16(wide + 12, 798); /* what miniz says: made by, needed */
    mui_put_le16(wide + 14, 45);
    mui_put_le64(wide + 24, z->count);
    mui_put_le64(wide + 32, z->count);
    mui_put_le64(wide + 40, bytes);
    mui_put_le64(wide + 48, at);
    mui_put_le64(locator + 8, wide_at);
    mui_put_le32(locator + 16, 1);
    mui_put_le16(end + 8, count);
    mui_put_le16(end + 10, count);
    mui_put_le32(end + 12, narrow(z, bytes));
    mui_put_le32(end + 16, narrow(z, at));
    mui_outfile_write(z->file, wide, sizeof(wide));
    mui_outfile_write(z->file, locator, sizeof(locator));
    mui_outfile_write(z->file, end, sizeof(end));
}

mu_status mui_zip_finish(mui_zip_writer *z)
{
    uint64_t at = z->file->bytes;
    for (size_t i = 0; i < z->count && z->status == MU_OK; i++) {
        write_entry(z, &z->members[i]);
    }
    if (z->status == MU_OK) {
        write_end(z, at, z->file->bytes - at);
    }
    mu_status s = z->status != MU_OK ? z->status : z->file->status;
    for (size_t i = 0; i < z->count; i++) {
        mui_free(z->context, z->members[i].name);
    }
    mui_free(z->context, z->members);
    *z = (mui_zip_writer){0};
    return s;
}
