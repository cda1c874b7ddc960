/* A strict zip reader over bytes in memory: what torch.save writes and people re-zip, and nothing looser. Members come
 * from the central directory alone (torch's local headers hold no sizes). Everything the file says is checked before it
 * is used: see open_member and check_overlap. Not for: writing (zip_writer.h), and no member name is ever a path. */
#ifndef MUI_ZIP_READER_H
#define MUI_ZIP_READER_H

#include "io/filemap.h"
#include "io/limits.h"

typedef struct mui_zip_member {
    const char *name;  /* NUL-terminated, owned by the zip; no NUL inside, see name_problem */
    uint64_t header;   /* offset of the local header */
    uint64_t offset;   /* of the data */
    uint64_t packed;   /* bytes in the file */
    uint64_t bytes;    /* bytes unpacked */
    uint32_t crc;
    uint16_t method;   /* 0 stored, 8 deflated */
    bool verified;     /* the CRC was checked once */
} mui_zip_member;

typedef struct mui_zip {
    mu_context *context;
    const char *path; /* borrowed, for messages */
    mui_limits limits;
    const unsigned char *data;
    size_t bytes;
    mui_filemap *map; /* whose data this is, set by who opens; NULL: memory */
    mui_zip_member *members; /* central directory order */
    mui_zip_member **sorted; /* by name */
    size_t count;
    char *names;
    bool unsummed;   /* a member without a checksum was read, and the user was told */
    size_t trailing; /* bytes after the end record, which is odd but harmless */
} mui_zip;

/* path and data must outlive the zip. limits NULL: the defaults. Closing a zip whose opening failed is not needed. */
mu_status mui_zip_open(mu_context *c, const char *path, const unsigned char *data, size_t bytes,
                       const mui_limits *limits, mui_zip *out) MU_MUST_USE;
void mui_zip_close(mui_zip *z);
/* NULL when there is none. */
mui_zip_member *mui_zip_find(const mui_zip *z, const char *name);

/* Largest member that may inflate to more than the limit's ratio; beyond it a member is taken for a bomb. */
#define MUI_ZIP_SUSPICIOUS_BYTES ((uint64_t)256 << 20)
mu_status mui_zip_check_ratio(const mui_zip *z, const mui_zip_member *m) MU_MUST_USE;

/* The member's bytes, CRC checked (once). A stored member is borrowed from the file and *owned is NULL; a deflated one
 * is inflated into *owned, to be freed with mui_free. bytes is limit-checked by the caller beforehand. */
mu_status mui_zip_read(mui_zip *z, mui_zip_member *m, const unsigned char **data, void **owned) MU_MUST_USE;

#endif
