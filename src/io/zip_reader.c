/* Reads zip archives strictly. Offsets and names as in PKWARE's APPNOTE.TXT, sections 4.3.7 to 4.3.16 and 4.5.3. */
#include "io/zip_reader.h"
#include "base/alloc.h"
#include "io/bytes.h"

#include <libdeflate.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define LOCAL_BYTES 30u
#define CENTRAL_BYTES 46u
#define END_BYTES 22u
#define END64_BYTES 56u
#define LOCATOR_BYTES 20u
/* Bit 0 encrypted, 5 patched, 6 strong encryption, 13 masked headers. */
#define REFUSED_FLAGS (1u << 0 | 1u << 5 | 1u << 6 | 1u << 13)

/* Where the central directory lies. */
typedef struct directory {
    uint64_t offset, bytes, count;
} directory;

#define BAD(z, ...) mui_fail((z)->context, MU_ERR_FORMAT, __VA_ARGS__)

/* How many local headers the start of a cut file shows, for the message. */
static size_t local_headers(const mui_zip *z)
{
    size_t n = 0;
    for (size_t i = 0; i + 4 <= z->bytes; i++) {
        if (z->data[i] == 'P' && memcmp(z->data + i, "PK\3\4", 4) == 0) {
            n++;
        }
    }
    return n;
}

/* The end record is the last place whose signature is there and whose comment fits into the file. */
static const unsigned char *find_end(const mui_zip *z)
{
    if (z->bytes < END_BYTES) {
        return NULL;
    }
    size_t lowest = z->bytes > END_BYTES + 65535u ? z->bytes - END_BYTES - 65535u : 0;
    for (size_t at = z->bytes - END_BYTES + 1; at-- > lowest;) {
        const unsigned char *p = z->data + at;
        if (memcmp(p, "PK\5\6", 4) == 0 && mui_le16(p + 20) <= z->bytes - at - END_BYTES) {
            return p;
        }
    }
    return NULL;
}

/* Reads the zip64 end record that a locator right before the end record points to. *limit is lowered to its start. */
static mu_status read_end64(mui_zip *z, size_t end_at, directory *d, uint64_t *limit)
{
    if (end_at < LOCATOR_BYTES || memcmp(z->data + end_at - LOCATOR_BYTES, "PK\6\7", 4) != 0) {
        return MU_OK;
    }
    const unsigned char *locator = z->data + end_at - LOCATOR_BYTES;
    uint64_t at = mui_le64(locator + 8), locator_at = end_at - LOCATOR_BYTES;
    if (mui_le32(locator + 4) != 0 || mui_le32(locator + 16) > 1) {
        return BAD(z, "%s: a zip of several disks, which cannot be read", z->path);
    }
    if (!mui_inside(at, END64_BYTES, locator_at) || memcmp(z->data + at, "PK\6\6", 4) != 0 ||
        mui_le64(z->data + at + 4) != locator_at - at - 12) {
        return BAD(z, "%s: damaged zip: the zip64 end record is not where byte %llu says", z->path,
                   (unsigned long long)locator_at);
    }
    const unsigned char *e = z->data + at;
    directory wide = {mui_le64(e + 48), mui_le64(e + 40), mui_le64(e + 32)};
    /* Values the ordinary record can hold must agree. */
    if ((d->offset != UINT32_MAX && d->offset != wide.offset) || (d->bytes != UINT32_MAX && d->bytes != wide.bytes) ||
        (d->count != UINT16_MAX && d->count != wide.count) || mui_le64(e + 24) != wide.count ||
        mui_le32(e + 16) != 0 || mui_le32(e + 20) != 0) {
        return BAD(z, "%s: damaged zip: its two end records contradict each other", z->path);
    }
    *d = wide;
    *limit = at;
    return MU_OK;
}

static mu_status find_directory(mui_zip *z, directory *d)
{
    const unsigned char *end = find_end(z);
    if (end == NULL) {
        return BAD(z,
                   "%s: the file ends early, at byte %zu: a zip without its directory, which is at the end (%zu members "
                   "begin in what is there): was the download or copy cut off?",
                   z->path, z->bytes, local_headers(z));
    }
    size_t end_at = (size_t)(end - z->data);
    *d = (directory){mui_le32(end + 16), mui_le32(end + 12), mui_le16(end + 10)};
    z->trailing = z->bytes - end_at - END_BYTES - mui_le16(end + 20);
    if (mui_le16(end + 4) != 0 || mui_le16(end + 6) != 0 || mui_le16(end + 8) != d->count) {
        return BAD(z, "%s: a zip of several disks, or a damaged one: the end record at byte %zu contradicts itself",
                   z->path, end_at);
    }
    uint64_t limit = end_at;
    mu_status s = read_end64(z, end_at, d, &limit);
    if (s != MU_OK) {
        return s;
    }
    if (!mui_inside(d->offset, d->bytes, limit) || d->offset + d->bytes != limit) {
        return BAD(z,
                   "%s: damaged zip: the directory should end at byte %llu, but is said to be %llu bytes at %llu (are "
                   "two files joined here?)",
                   z->path, (unsigned long long)limit, (unsigned long long)d->bytes, (unsigned long long)d->offset);
    }
    if (d->count > z->limits.members) {
        return mui_fail(z->context, MU_ERR_LIMIT, "%s: a zip of %llu members, more than the limit of %llu", z->path,
                        (unsigned long long)d->count, (unsigned long long)z->limits.members);
    }
    if (d->count > d->bytes / CENTRAL_BYTES) {
        return BAD(z, "%s: damaged zip: %llu members cannot be in a directory of %llu bytes", z->path,
                   (unsigned long long)d->count, (unsigned long long)d->bytes);
    }
    return MU_OK;
}

/* Names are never used as paths; odd ones are refused all the same, since no PyTorch ever wrote one. */
static const char *name_problem(const char *name, size_t length)
{
    if (length == 0) {
        return "an empty name";
    }
    if (memchr(name, '\0', length) != NULL || memchr(name, '\\', length) != NULL) {
        return "a NUL or backslash in its name";
    }
    if (name[0] == '/') {
        return "an absolute path as name";
    }
    for (size_t i = 0; i + 1 < length; i++) {
        bool starts = i == 0 || name[i - 1] == '/';
        if (starts && name[i] == '.' && name[i + 1] == '.' && (i + 2 == length || name[i + 2] == '/')) {
            return "'..' in its name";
        }
    }
    return NULL;
}

/* Takes the 64-bit values from the zip64 extra field where the 32-bit ones are full. */
static bool read_extra64(const unsigned char *extra, size_t bytes, mui_zip_member *m)
{
    bool wide_bytes = m->bytes == UINT32_MAX, wide_packed = m->packed == UINT32_MAX;
    bool wide_header = m->header == UINT32_MAX;
    while (bytes >= 4) {
        size_t length = mui_le16(extra + 2);
        if (length > bytes - 4) {
            return false;
        }
        if (mui_le16(extra) == 1) {
            const unsigned char *p = extra + 4, *end = p + length;
            uint64_t *targets[3] = {wide_bytes ? &m->bytes : NULL, wide_packed ? &m->packed : NULL,
                                    wide_header ? &m->header : NULL};
            for (int i = 0; i < 3; i++) {
                if (targets[i] != NULL) {
                    if (end - p < 8) {
                        return false;
                    }
                    *targets[i] = mui_le64(p);
                    p += 8;
                }
            }
            return true;
        }
        extra += 4 + length;
        bytes -= 4 + length;
    }
    return !wide_bytes && !wide_packed && !wide_header;
}

/* Checks a member against its local header and finds its data. e is its directory entry. */
static mu_status open_member(mui_zip *z, mui_zip_member *m, const unsigned char *e, uint64_t directory_at)
{
    uint16_t flags = mui_le16(e + 8);
    if ((flags & REFUSED_FLAGS) != 0) {
        return BAD(z, "%s: member '%s' is %s, which cannot be read", z->path, m->name,
                   (flags & 1u) != 0 ? "encrypted" : "patched or masked");
    }
    if (m->method != 0 && m->method != 8) {
        return mui_fail(z->context, MU_ERR_UNSUPPORTED,
                        "%s: member '%s' is compressed by method %u; stored (0) and deflated (8) can be read", z->path,
                        m->name, m->method);
    }
    if (m->method == 0 && m->packed != m->bytes) {
        return BAD(z, "%s: member '%s' is stored, but said to be %llu bytes from %llu", z->path, m->name,
                   (unsigned long long)m->bytes, (unsigned long long)m->packed);
    }
    if (!mui_inside(m->header, LOCAL_BYTES, directory_at)) {
        return BAD(z, "%s: member '%s' is said to begin at byte %llu, outside the %llu bytes of data", z->path, m->name,
                   (unsigned long long)m->header, (unsigned long long)directory_at);
    }
    const unsigned char *local = z->data + m->header;
    size_t name_bytes = strlen(m->name);
    if (memcmp(local, "PK\3\4", 4) != 0) {
        return BAD(z, "%s: member '%s': no member begins at byte %llu", z->path, m->name,
                   (unsigned long long)m->header);
    }
    m->offset = m->header + LOCAL_BYTES + mui_le16(local + 26) + mui_le16(local + 28);
    if (!mui_inside(m->offset, m->packed, directory_at)) {
        return BAD(z, "%s: member '%s': %llu bytes at %llu do not fit into the %llu bytes of data", z->path, m->name,
                   (unsigned long long)m->packed, (unsigned long long)m->offset, (unsigned long long)directory_at);
    }
    if (mui_le16(local + 26) != name_bytes || memcmp(local + LOCAL_BYTES, m->name, name_bytes) != 0 ||
        mui_le16(local + 8) != m->method || (mui_le16(local + 6) & REFUSED_FLAGS) != 0) {
        return BAD(z, "%s: member '%s' has another name, method or flags at byte %llu than in the directory", z->path,
                   m->name, (unsigned long long)m->header);
    }
    return MU_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(mui_zip_member *const *)a)->name, (*(mui_zip_member *const *)b)->name);
}

static int by_header(const void *a, const void *b)
{
    const mui_zip_member *x = *(mui_zip_member *const *)a, *y = *(mui_zip_member *const *)b;
    return x->header < y->header ? -1 : x->header > y->header;
}

/* Members that share bytes (a small file of overlapping members inflates to petabytes), and names given twice. */
static mu_status check_overlap(mui_zip *z)
{
    for (size_t i = 0; i < z->count; i++) {
        z->sorted[i] = &z->members[i];
    }
    if (z->count > 0) {
        qsort(z->sorted, z->count, sizeof(*z->sorted), by_header);
    }
    for (size_t i = 1; i < z->count; i++) {
        const mui_zip_member *a = z->sorted[i - 1], *b = z->sorted[i];
        if (a->offset + a->packed > b->header) {
            return BAD(z, "%s: members '%s' and '%s' overlap", z->path, a->name, b->name);
        }
    }
    if (z->count > 0) {
        qsort(z->sorted, z->count, sizeof(*z->sorted), by_name);
    }
    for (size_t i = 1; i < z->count; i++) {
        if (strcmp(z->sorted[i - 1]->name, z->sorted[i]->name) == 0) {
            return BAD(z, "%s: two members are named '%s'", z->path, z->sorted[i]->name);
        }
    }
    return MU_OK;
}

static mu_status read_directory(mui_zip *z, directory d)
{
    size_t used = 0;
    char *name = z->names;
    for (size_t i = 0; i < d.count; i++) {
        const unsigned char *e = z->data + d.offset + used;
        uint64_t left = d.bytes - used;
        size_t name_bytes = left >= CENTRAL_BYTES ? mui_le16(e + 28) : 0;
        size_t extra_bytes = left >= CENTRAL_BYTES ? mui_le16(e + 30) : 0;
        size_t all = left >= CENTRAL_BYTES ? CENTRAL_BYTES + name_bytes + extra_bytes + mui_le16(e + 32) : 0;
        if (left < CENTRAL_BYTES || memcmp(e, "PK\1\2", 4) != 0 || all > left) {
            return BAD(z, "%s: damaged zip: directory entry %zu of %llu, at byte %llu, is not one", z->path, i + 1,
                       (unsigned long long)d.count, (unsigned long long)(d.offset + used));
        }
        const char *problem = name_problem((const char *)e + CENTRAL_BYTES, name_bytes);
        if (problem != NULL) {
            return BAD(z, "%s: zip member %zu has %s", z->path, i + 1, problem);
        }
        memcpy(name, e + CENTRAL_BYTES, name_bytes);
        name[name_bytes] = '\0';
        mui_zip_member *m = &z->members[z->count++];
        *m = (mui_zip_member){.name = name, .header = mui_le32(e + 42), .packed = mui_le32(e + 20),
                              .bytes = mui_le32(e + 24), .crc = mui_le32(e + 16), .method = mui_le16(e + 10)};
        name += name_bytes + 1;
        if (mui_le16(e + 34) != 0) {
            return BAD(z, "%s: member '%s' is said to be on disk %u; one file is all there is", z->path, m->name,
                       mui_le16(e + 34));
        }
        if (!read_extra64(e + CENTRAL_BYTES + name_bytes, extra_bytes, m)) {
            return BAD(z, "%s: damaged zip: the extra field of member '%s' is not one", z->path, m->name);
        }
        mu_status s = open_member(z, m, e, d.offset);
        if (s != MU_OK) {
            return s;
        }
        used += all;
    }
    if (used != d.bytes) {
        return BAD(z, "%s: damaged zip: %llu members take %zu bytes of a directory of %llu", z->path,
                   (unsigned long long)d.count, used, (unsigned long long)d.bytes);
    }
    return check_overlap(z);
}

mu_status mui_zip_open(mu_context *c, const char *path, const unsigned char *data, size_t bytes,
                       const mui_limits *limits, mui_zip *out)
{
    mui_zip z = {.context = c, .path = path, .data = data, .bytes = bytes};
    z.limits = limits != NULL ? *limits : mui_limits_default();
    directory d = {0};
    mu_status s = find_directory(&z, &d);
    if (s != MU_OK) {
        return s;
    }
    z.members = mui_calloc(c, (size_t)d.count, sizeof(*z.members));
    z.sorted = mui_calloc(c, (size_t)d.count, sizeof(*z.sorted));
    z.names = mui_alloc(c, (size_t)d.bytes + 1); /* names with their NULs are shorter than the entries */
    if (z.members == NULL || z.sorted == NULL || z.names == NULL) {
        mui_zip_close(&z);
        return MU_ERR_NOMEM;
    }
    s = read_directory(&z, d);
    if (s != MU_OK) {
        mui_zip_close(&z);
        return s;
    }
    *out = z;
    return MU_OK;
}

void mui_zip_close(mui_zip *z)
{
    mui_free(z->context, z->members);
    mui_free(z->context, z->sorted);
    mui_free(z->context, z->names);
    *z = (mui_zip){0};
}

static int name_against(const void *key, const void *member)
{
    return strcmp(key, (*(mui_zip_member *const *)member)->name);
}

mui_zip_member *mui_zip_find(const mui_zip *z, const char *name)
{
    if (z->count == 0) {
        return NULL;
    }
    mui_zip_member **found = bsearch(name, z->sorted, z->count, sizeof(*z->sorted), name_against);
    return found != NULL ? *found : NULL;
}

mu_status mui_zip_check_ratio(const mui_zip *z, const mui_zip_member *m)
{
    /* Deflate cannot exceed 1032 to 1, so a lie is cheap to see; what is left are archives made to fill memory. */
    if (m->method != 0 && (m->bytes / 1032 > m->packed + 1 ||
                           (m->bytes > MUI_ZIP_SUSPICIOUS_BYTES && m->bytes / z->limits.inflate_ratio > m->packed))) {
        return mui_fail(z->context, MU_ERR_LIMIT,
                        "%s: member '%s' would inflate %llu bytes to %llu: refused as a decompression bomb (the limit is %llu to 1)",
                        z->path, m->name, (unsigned long long)m->packed, (unsigned long long)m->bytes,
                        (unsigned long long)z->limits.inflate_ratio);
    }
    return MU_OK;
}

static uint32_t crc_of(mui_zip *z, const mui_zip_member *m, const unsigned char *data)
{
    uint32_t crc = 0;
    size_t bytes = (size_t)m->bytes;
    for (size_t at = 0; at < bytes; at += MUI_MAPPED_WINDOW) {
        size_t n = bytes - at < MUI_MAPPED_WINDOW ? bytes - at : MUI_MAPPED_WINDOW;
        crc = libdeflate_crc32(crc, data + at, n);
        if (z->map != NULL && m->method == 0) {
            mui_filemap_used(z->map, n);
        }
    }
    return crc;
}

static mu_status check_crc(mui_zip *z, mui_zip_member *m, const unsigned char *data)
{
    /* torch can be told not to compute checksums; it then writes 0. */
    if (!m->verified && m->crc == 0 && m->bytes > 0 && !z->limits.no_checksum && !z->unsummed) {
        mui_log(z->context, MU_LOG_WARN, "%s: member '%s' has no checksum; damage to it and its like cannot be seen",
                z->path, m->name);
        z->unsummed = true;
    }
    if (!m->verified && m->crc != 0 && !z->limits.no_checksum) {
        uint32_t is = crc_of(z, m, data);
        if (is != m->crc) {
            return BAD(z, "%s: member '%s' is damaged: its checksum is %08x, the directory says %08x", z->path, m->name,
                       is, m->crc);
        }
    }
    m->verified = true;
    return MU_OK;
}

/* zlib's own memory goes through the context, so that it is counted and failures can be injected. */
static void *zlib_alloc(void *user, unsigned items, unsigned bytes)
{
    return mui_calloc(user, items, bytes);
}

static void zlib_free(void *user, void *p)
{
    mui_free(user, p);
}

static mu_status inflate_member(mui_zip *z, const mui_zip_member *m, unsigned char *out)
{
    z_stream s = {.zalloc = zlib_alloc, .zfree = zlib_free, .opaque = z->context};
    if (inflateInit2(&s, -MAX_WBITS) != Z_OK) {
        return mui_fail(z->context, MU_ERR_NOMEM, "%s: out of memory while inflating", z->path);
    }
    const unsigned char *in = z->data + m->offset;
    uint64_t in_left = m->packed, out_left = m->bytes;
    unsigned char *to = out;
    int r = Z_OK;
    do { /* zlib counts in 32 bits */
        uInt give = in_left > UINT32_MAX / 2 ? UINT32_MAX / 2 : (uInt)in_left;
        uInt room = out_left > UINT32_MAX / 2 ? UINT32_MAX / 2 : (uInt)out_left;
        s.next_in = (Bytef *)(uintptr_t)in;
        s.avail_in = give;
        s.next_out = to;
        s.avail_out = room;
        r = inflate(&s, Z_NO_FLUSH);
        in += give - s.avail_in;
        in_left -= give - s.avail_in;
        to += room - s.avail_out;
        out_left -= room - s.avail_out;
        if (r == Z_OK && give == s.avail_in && room == s.avail_out) {
            break; /* neither side moves: the stream wants more than it has */
        }
    } while (r == Z_OK);
    inflateEnd(&s);
    if (r != Z_STREAM_END || out_left != 0 || in_left != 0) {
        return BAD(z, "%s: member '%s' is damaged: its %llu bytes do not inflate to %llu", z->path, m->name,
                   (unsigned long long)m->packed, (unsigned long long)m->bytes);
    }
    return MU_OK;
}

mu_status mui_zip_read(mui_zip *z, mui_zip_member *m, const unsigned char **data, void **owned)
{
    if (m->method == 0) {
        mu_status s = check_crc(z, m, z->data + m->offset);
        if (s == MU_OK) {
            *data = z->data + m->offset;
            *owned = NULL;
        }
        return s;
    }
    mu_status s = mui_zip_check_ratio(z, m);
    if (s != MU_OK) {
        return s;
    }
    unsigned char *out = mui_alloc(z->context, (size_t)m->bytes);
    if (out == NULL) {
        return MU_ERR_NOMEM;
    }
    s = inflate_member(z, m, out);
    if (s == MU_OK) {
        m->verified = false; /* each inflation is checked: a wrong bit may come from the disk this time */
        s = check_crc(z, m, out);
    }
    if (s != MU_OK) {
        mui_free(z->context, out);
        return s;
    }
    *data = out;
    *owned = out;
    return MU_OK;
}
