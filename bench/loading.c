/* What loading a checkpoint takes, beside reading its bytes; one contestant of loading.py in one process.
 *
 *     loading read|fresh|load|open FILE TIMES
 *
 * read: read() of the file into memory that is there already; fresh: into new memory each time; load: mu_load into a model
 * with the file's names and shapes; open: mu_checkpoint_open and a look at every entry, as `muster inspect` does.
 * Prints seconds by the clock and of this process for each time, then how far its memory went beyond what it had before them
 * (VmHWM, which has the pages of mapped files too), in bytes. */
#define _GNU_SOURCE
#include <muster/muster.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "loading: %s\n", what);
    exit(1);
}

static long long status_bytes(const char *field)
{
    char line[256];
    long long kb = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, field, strlen(field)) == 0) {
            kb = atoll(line + strlen(field));
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return kb * 1024;
}

static long long resident_from_here(void)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY); /* 5: forget the peak so far */
    if (fd < 0 || write(fd, "5", 1) != 1) {
        die("cannot reset the peak");
    }
    close(fd);
    return status_bytes("VmRSS:");
}

typedef struct bench {
    const char *path;
    size_t bytes;
    char *memory;
    mu_context *c;
    mu_module *model;
} bench;

static char *map(size_t bytes)
{
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p != MAP_FAILED ? p : (die("no memory"), NULL);
}

static void read_into(const bench *b, char *to)
{
    int fd = open(b->path, O_RDONLY);
    size_t got = 0;
    while (got < b->bytes) {
        ssize_t n = fd >= 0 ? read(fd, to + got, b->bytes - got) : -1;
        if (n <= 0) {
            die("cannot read the file");
        }
        got += (size_t)n;
    }
    close(fd);
}

static void do_read(bench *b)
{
    if (b->memory == NULL) {
        b->memory = map(b->bytes);
        memset(b->memory, 1, b->bytes);
        return; /* not timed: the first time never is */
    }
    read_into(b, b->memory);
}

static void do_fresh(bench *b)
{
    char *p = map(b->bytes);
    read_into(b, p);
    munmap(p, b->bytes);
}

static void do_open(bench *b)
{
    mu_checkpoint_file *k = mu_checkpoint_open(b->c, b->path);
    int64_t elements = 0;
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        elements += e.dims.ndim > 0 ? e.dims.dim[0] : 1;
    }
    if (k == NULL || elements == 0) {
        die("cannot open the file");
    }
    mu_checkpoint_close(k);
}

static void build(bench *b)
{
    mu_checkpoint_file *k = mu_checkpoint_open(b->c, b->path);
    b->model = mu_module_new(b->c, "Flat", NULL);
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        mu_module_parameter(b->model, e.name, e.dims, (mu_init){.kind = MU_INIT_CONSTANT, .value = 1});
    }
    mu_checkpoint_close(k);
}

static void do_load(bench *b)
{
    if (b->model == NULL) {
        build(b);
    }
    MU_OR_DIE(b->c, mu_load(b->model, b->path, NULL, NULL));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(bench *b);
    } kinds[] = {{"read", do_read}, {"fresh", do_fresh}, {"load", do_load}, {"open", do_open}};
    struct stat st;
    if (argc != 4 || stat(argv[2], &st) != 0) {
        die("usage: loading read|fresh|load|open FILE TIMES");
    }
    long long before = 0;
    bench b = {.path = argv[2], .bytes = (size_t)st.st_size, .c = mu_context_open(NULL)};
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        for (int i = 0; strcmp(argv[1], kinds[k].name) == 0 && i <= atoi(argv[3]); i++) {
            if (i == 1) {
                before = resident_from_here();
            }
            double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
            kinds[k].run(&b);
            if (i > 0) {
                printf("%.6f %.6f\n", now(CLOCK_MONOTONIC) - wall, now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
            }
        }
    }
    printf("%lld\n", status_bytes("VmHWM:") - before);
    mu_context_close(b.c);
    return 0;
}
