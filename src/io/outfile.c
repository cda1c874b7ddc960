/* Atomic replacement of a file: POSIX rename in one folder, with fsync of the file before and of the folder after. */
#define _GNU_SOURCE
#include "io/outfile.h"
#include "base/alloc.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BUFFER_BYTES ((size_t)1 << 16)
#define MAX_TEMPORARY_NAMES 1000

/* Links are followed as PyTorch does, so that the file they point to is replaced, not the link. */
static char *follow_links(mu_context *c, const char *path)
{
    struct stat st;
    if (lstat(path, &st) != 0 || !S_ISLNK(st.st_mode)) {
        return mui_strdup(c, path);
    }
    char real[PATH_MAX];
    if (realpath(path, real) == NULL) {
        mui_fail(c, MU_ERR_IO, "%s: a link that leads nowhere: %s", path, mui_errno_text(errno));
        return NULL;
    }
    return mui_strdup(c, real);
}

/* The folder part, "." when there is none. */
static char *folder_of(mu_context *c, const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? mui_strdup(c, ".") : mui_strndup(c, path, slash == path ? 1 : (size_t)(slash - path));
}

static mu_status open_temporary(mui_outfile *f, mode_t mode)
{
    for (int i = 0; i < MAX_TEMPORARY_NAMES; i++) {
        /* Ranks may be threads of one process, so the process number alone is not unique. */
        f->temporary = i == 0 ? mui_format(f->context, "%s.tmp.%ld", f->path, (long)getpid())
                              : mui_format(f->context, "%s.tmp.%ld.%d", f->path, (long)getpid(), i);
        if (f->temporary == NULL) {
            return MU_ERR_NOMEM;
        }
        f->fd = open(f->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (f->fd >= 0) {
            return MU_OK;
        }
        if (errno != EEXIST) {
            break;
        }
        mui_free(f->context, f->temporary);
        f->temporary = NULL;
    }
    mu_status s = mui_fail(f->context, MU_ERR_IO, "%s: cannot write into its folder: %s", f->path, mui_errno_text(errno));
    mui_free(f->context, f->temporary);
    f->temporary = NULL;
    return s;
}

static void release(mui_outfile *f)
{
    mui_free(f->context, f->path);
    mui_free(f->context, f->temporary);
    mui_free(f->context, f->buffer);
    *f = (mui_outfile){.fd = -1};
}

mu_status mui_outfile_open(mu_context *c, const char *path, mui_outfile *out)
{
    mui_outfile f = {.context = c, .fd = -1};
    struct stat st;
    f.path = follow_links(c, path);
    if (f.path == NULL) {
        return mu_context_status(c);
    }
    mu_status s = MU_OK;
    bool exists = stat(f.path, &st) == 0;
    if (exists && !S_ISREG(st.st_mode)) {
        s = mui_fail(c, MU_ERR_IO, "%s: %s; a file was expected", path,
                     S_ISDIR(st.st_mode) ? "is a directory" : "is not a regular file");
    }
    if (s == MU_OK) {
        f.buffer = mui_alloc(c, BUFFER_BYTES);
        s = f.buffer != NULL ? open_temporary(&f, 0666) : MU_ERR_NOMEM;
    }
    if (s == MU_OK && exists && fchmod(f.fd, st.st_mode & 0777) != 0) {
        s = mui_fail(c, MU_ERR_IO, "%s: cannot keep its permissions: %s", path, mui_errno_text(errno));
        close(f.fd);
        unlink(f.temporary);
    }
    if (s != MU_OK) {
        release(&f);
        return s;
    }
    *out = f;
    return MU_OK;
}

static void write_out(mui_outfile *f, const char *data, size_t bytes)
{
    while (bytes > 0 && f->status == MU_OK) {
        ssize_t n = write(f->fd, data, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            f->status = mui_fail(f->context, MU_ERR_IO, "%s: writing stopped: %s (what was there before is unchanged)",
                                 f->path, n == 0 ? "no progress" : mui_errno_text(errno));
            return;
        }
        data += n;
        bytes -= (size_t)n;
    }
}

static void flush(mui_outfile *f)
{
    write_out(f, f->buffer, f->buffered);
    f->buffered = 0;
}

void mui_outfile_write(mui_outfile *f, const void *data, size_t bytes)
{
    if (f->status != MU_OK || bytes == 0) {
        return;
    }
    f->bytes += bytes;
    if (bytes >= BUFFER_BYTES) {
        flush(f);
        write_out(f, data, bytes);
        return;
    }
    if (bytes > BUFFER_BYTES - f->buffered) {
        flush(f);
    }
    memcpy(f->buffer + f->buffered, data, bytes);
    f->buffered += bytes;
}

void mui_outfile_zeros(mui_outfile *f, uint64_t bytes)
{
    static const char zeros[512];
    while (bytes > 0) {
        size_t n = bytes < sizeof(zeros) ? (size_t)bytes : sizeof(zeros);
        mui_outfile_write(f, zeros, n);
        bytes -= n;
    }
}

void mui_outfile_abandon(mui_outfile *f)
{
    if (f->fd >= 0) {
        close(f->fd);
        unlink(f->temporary);
    }
    release(f);
}

/* Makes the rename itself durable. File systems that cannot sync a folder say EINVAL; they need nothing. */
static mu_status sync_folder(mui_outfile *f, const char *folder)
{
    mu_status s = MU_OK;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) {
        s = mui_fail(f->context, MU_ERR_IO, "%s: written, but its folder cannot be synced: %s", f->path,
                     mui_errno_text(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
    return s;
}

mu_status mui_outfile_commit(mui_outfile *f)
{
    flush(f);
    if (f->status == MU_OK && fsync(f->fd) != 0) {
        f->status = mui_fail(f->context, MU_ERR_IO, "%s: cannot be synced to disk: %s", f->path, mui_errno_text(errno));
    }
    char *folder = f->status == MU_OK ? folder_of(f->context, f->path) : NULL; /* now: after the rename nothing may fail */
    f->status = f->status == MU_OK && folder == NULL ? MU_ERR_NOMEM : f->status;
    int fd = f->fd;
    f->fd = -1;
    if (close(fd) != 0 && f->status == MU_OK) {
        f->status = mui_fail(f->context, MU_ERR_IO, "%s: closing failed: %s", f->path, mui_errno_text(errno));
    }
    if (f->status == MU_OK && rename(f->temporary, f->path) != 0) {
        f->status = mui_fail(f->context, MU_ERR_IO, "%s: cannot be replaced: %s", f->path, mui_errno_text(errno));
    }
    mu_status s = f->status;
    if (s != MU_OK) {
        unlink(f->temporary);
    } else {
        s = sync_folder(f, folder);
    }
    mui_free(f->context, folder);
    release(f);
    return s;
}
