/* Making, mapping and populating the shared region. Not for: finding the other ranks (meet.c). */
#define _GNU_SOURCE
#include "comm/region.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define REGION_MAGIC 0x4d555331u
#define REGION_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static size_t control_bytes(int size)
{
    return round_up(sizeof(mui_control) + (size_t)size * sizeof(mui_rank_block), MUI_HUGE_BYTES);
}

size_t mui_arena_bytes(size_t wanted)
{
    size_t most = (size_t)1 << 40; /* 128 ranks of it still fit in the address space */
    size_t bytes = wanted != 0 ? wanted : mui_ram_bytes() / 4;
    bytes = bytes < most ? bytes : most;
    return round_up(bytes, MUI_HUGE_BYTES) + MUI_STAGING_BYTES;
}

/* Maps at an address that is a multiple of 2 MiB, as huge pages of a file demand. */
static void *map_aligned(size_t bytes, int fd)
{
    char *hole = mmap(NULL, bytes + MUI_HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (hole == MAP_FAILED) {
        return NULL;
    }
    size_t skip = (MUI_HUGE_BYTES - (uintptr_t)hole % MUI_HUGE_BYTES) % MUI_HUGE_BYTES;
    char *at = hole + skip;
    if (skip > 0) {
        munmap(hole, skip);
    }
    if (MUI_HUGE_BYTES - skip > 0) {
        munmap(at + bytes, MUI_HUGE_BYTES - skip);
    }
    int flags = MAP_FIXED | MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) {
        munmap(at, bytes);
        return NULL;
    }
    return at;
}

static void set_up(mui_region *r, void *mapping, size_t bytes, int size, size_t arena_bytes, int fd)
{
    *r = (mui_region){.control = mapping,
                      .arenas = (char *)mapping + control_bytes(size),
                      .arena_bytes = arena_bytes,
                      .size = size,
                      .fd = fd,
                      .mapping = mapping,
                      .mapping_bytes = bytes};
}

static void write_header(const mui_region *r)
{
    r->control->magic = REGION_MAGIC;
    r->control->size = (uint32_t)r->size;
    r->control->arena_bytes = r->arena_bytes;
}

mu_status mui_region_new(mui_region *r, mu_context *c, int size, size_t arena_bytes)
{
    for (;; arena_bytes = round_up(arena_bytes / 2, MUI_HUGE_BYTES)) {
        size_t bytes = control_bytes(size) + (size_t)size * arena_bytes;
        void *p = map_aligned(bytes, -1);
        if (p != NULL) {
            set_up(r, p, bytes, size, arena_bytes, -1);
            write_header(r);
            return MU_OK;
        }
        if (arena_bytes <= 2 * MUI_STAGING_BYTES) {
            return mui_fail(c, MU_ERR_NOMEM, "out of memory: cannot reserve %zu bytes for a group of %d: %s", bytes,
                            size, mui_errno_text(errno));
        }
    }
}

mu_status mui_region_create(mui_region *r, mu_context *c, int size, size_t arena_bytes)
{
    size_t bytes = control_bytes(size) + (size_t)size * arena_bytes;
    int fd = memfd_create("muster", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return mui_fail(c, MU_ERR_IO, "cannot make shared memory: memfd_create: %s", mui_errno_text(errno));
    }
    if (ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, REGION_SEALS) != 0) {
        int e = errno;
        close(fd);
        return mui_fail(c, MU_ERR_IO, "cannot size %zu bytes of shared memory: %s", bytes, mui_errno_text(e));
    }
    void *p = map_aligned(bytes, fd);
    if (p == NULL) {
        int e = errno;
        close(fd);
        return mui_fail(c, MU_ERR_NOMEM, "cannot map %zu bytes of shared memory: %s", bytes, mui_errno_text(e));
    }
    set_up(r, p, bytes, size, arena_bytes, fd);
    write_header(r);
    return MU_OK;
}

mu_status mui_region_map(mui_region *r, mu_context *c, int size, int fd)
{
    struct stat st;
    size_t least = control_bytes(size) + (size_t)size * MUI_HUGE_BYTES;
    if (fstat(fd, &st) != 0 || fcntl(fd, F_GET_SEALS) != REGION_SEALS || (uint64_t)st.st_size < least) {
        close(fd);
        return mui_fail(c, MU_ERR_COMM, "the shared memory that rank 0 sent is not a sealed region for %d ranks", size);
    }
    size_t bytes = (size_t)st.st_size;
    void *p = map_aligned(bytes, fd);
    if (p == NULL) {
        int e = errno;
        close(fd);
        return mui_fail(c, MU_ERR_NOMEM, "cannot map %zu bytes of shared memory: %s", bytes, mui_errno_text(e));
    }
    const mui_control *control = p;
    size_t arena = (bytes - control_bytes(size)) / (size_t)size;
    if (control->magic != REGION_MAGIC || control->size != (uint32_t)size || control->arena_bytes != arena ||
        arena % MUI_HUGE_BYTES != 0) {
        munmap(p, bytes);
        close(fd);
        return mui_fail(c, MU_ERR_COMM, "the shared memory that rank 0 sent was made by another version of Muster");
    }
    set_up(r, p, bytes, size, arena, fd);
    return MU_OK;
}

void mui_region_free(mui_region *r)
{
    if (r->mapping != NULL) {
        munmap(r->mapping, r->mapping_bytes);
    }
    if (r->fd >= 0) {
        close(r->fd);
    }
    *r = (mui_region){.fd = -1};
}

char *mui_region_arena(const mui_region *r, int rank)
{
    return r->arenas + (size_t)rank * r->arena_bytes;
}

void mui_region_populate(const mui_region *r, int rank, size_t from, size_t to, bool own)
{
    /* A page fault may cost 20 us: one touch and one MADV_COLLAPSE per 2 MiB make huge pages without any setting of
     * the system. Whoever did not make them maps them by MADV_POPULATE_WRITE. All of it may fail: pages then come one
     * by one as they are used. */
    char *arena = mui_region_arena(r, rank);
    size_t first = from / MUI_HUGE_BYTES * MUI_HUGE_BYTES, last = round_up(to, MUI_HUGE_BYTES);
    last = last < r->arena_bytes ? last : r->arena_bytes;
    if (own) {
        for (size_t at = first; at < last; at += MUI_HUGE_BYTES) {
            if (at >= from) {
                *(volatile char *)(arena + at) = 0;
            }
            if (madvise(arena + at, MUI_HUGE_BYTES, MADV_COLLAPSE) != 0) {
                break;
            }
        }
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t begin = from / page * page;
    (void)madvise(arena + begin, round_up(to, page) - begin, MADV_POPULATE_WRITE);
}
