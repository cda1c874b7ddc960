/* Maps files. */
#define _DEFAULT_SOURCE /* madvise */
#include "io/filemap.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

mu_status mui_filemap_open(mu_context *c, const char *path, mui_filemap *out)
{
    static const unsigned char nothing[1];
    /* O_NONBLOCK: opening a FIFO must not wait for a writer; it is refused below. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return mui_fail(c, MU_ERR_IO, "%s: cannot open: %s", path, mui_errno_text(errno));
    }
    mu_status status = MU_OK;
    struct stat st;
    if (fstat(fd, &st) != 0) {
        status = mui_fail(c, MU_ERR_IO, "%s: cannot open: %s", path, mui_errno_text(errno));
    } else if (!S_ISREG(st.st_mode)) {
        status = mui_fail(c, MU_ERR_IO, "%s: %s, a file was expected", path,
                          S_ISDIR(st.st_mode) ? "is a directory" : "is not a regular file");
    } else if (st.st_size == 0) {
        *out = (mui_filemap){.data = nothing};
    } else {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            status = mui_fail(c, MU_ERR_IO, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size,
                              mui_errno_text(errno));
        } else {
            *out = (mui_filemap){.data = p, .bytes = (size_t)st.st_size, .mapping = p};
            /* Opening looks at places far apart (a zip's headers); what lies between is not wanted yet. A hint. */
            (void)madvise(p, out->bytes, MADV_RANDOM);
        }
    }
    close(fd);
    return status;
}

void mui_filemap_expect_all(const mui_filemap *f)
{
    if (f->mapping != NULL) {
        (void)madvise(f->mapping, f->bytes, MADV_SEQUENTIAL); /* a hint */
    }
}

void mui_filemap_used(mui_filemap *f, size_t bytes)
{
    f->used += bytes;
    if (f->mapping != NULL && f->used >= MUI_MAPPED_WINDOW) {
        (void)madvise(f->mapping, f->bytes, MADV_DONTNEED); /* safe: the mapping is read-only, nothing of it is ours */
        f->used = 0;
    }
}

void mui_filemap_close(mui_filemap *f)
{
    if (f->mapping != NULL) {
        munmap(f->mapping, f->bytes);
    }
    *f = (mui_filemap){0};
}
