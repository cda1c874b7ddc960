/* Time, cores, files. */
#define _GNU_SOURCE
#include "base/os.h"
#include "base/alloc.h"
#include "base/rng.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

double mui_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

uint64_t mui_kernel_hash(void)
{
    char text[256] = "";
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    bool known = f != NULL && fgets(text, sizeof(text), f) != NULL;
    if (f != NULL) {
        fclose(f);
    }
    if (!known && gethostname(text, sizeof(text) - 1) != 0) {
        text[0] = '\0';
    }
    return mui_hash_string(MUI_HASH_START, text);
}

int mui_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        int n = CPU_COUNT(&set);
        return n > 0 ? n : 1;
    }
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

size_t mui_ram_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (size_t)pages * (size_t)page : (size_t)1 << 30;
}

const char *mui_errno_text(int e)
{
    const char *s = strerrordesc_np(e);
    return s != NULL ? s : "unknown error";
}

mu_status mui_read_file(mu_context *c, const char *path, size_t limit, char **out, size_t *bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return mui_fail(c, MU_ERR_IO, "%s: cannot open: %s", path, mui_errno_text(errno));
    }
    struct stat st;
    mu_status status = MU_OK;
    char *data = NULL;
    size_t used = 0;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        status = mui_fail(c, MU_ERR_IO, "%s: not a regular file", path);
        goto close_file;
    }
    if ((uint64_t)st.st_size > limit) {
        status = mui_fail(c, MU_ERR_LIMIT, "%s: %lld bytes, more than the limit of %zu", path, (long long)st.st_size,
                          limit);
        goto close_file;
    }
    size_t size = (size_t)st.st_size;
    data = mui_alloc(c, size + 1);
    if (data == NULL) {
        status = MU_ERR_NOMEM;
        goto close_file;
    }
    while (used < size) {
        ssize_t n = read(fd, data + used, size - used);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            status = mui_fail(c, MU_ERR_IO, "%s: reading stopped at byte %zu of %zu: %s", path, used, size,
                              n == 0 ? "the file was cut" : mui_errno_text(errno));
            mui_free(c, data);
            goto close_file;
        }
        used += (size_t)n;
    }
    data[size] = '\0';
    *out = data;
    *bytes = size;
close_file:
    close(fd);
    return status;
}
