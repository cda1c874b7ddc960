/* Helpers of the fuzz targets. */
#define _GNU_SOURCE
#include "base/context.h"
#include "fuzz_target.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

void fuzz_broken(const char *what)
{
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

int fuzz_file(const uint8_t *data, size_t bytes, char path[64])
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, bytes) != (ssize_t)bytes || lseek(fd, 0, SEEK_SET) != 0) {
        fuzz_broken("cannot make a file");
    }
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

mu_context *fuzz_context(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    if (c == NULL) {
        fuzz_broken("no context");
    }
    return c;
}

void fuzz_close(mu_context *c)
{
    if (c->live_allocations != 0) {
        fuzz_broken("memory is left");
    }
    mu_context_close(c);
}
