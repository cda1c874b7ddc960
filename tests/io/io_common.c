/* Folders and hashes for the tests of io. */
#define _GNU_SOURCE
#include "io_common.h"
#include "base/rng.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int io_enter_folder(void **state)
{
    static char folder[] = "/tmp/muster-io-XXXXXX";
    *state = folder;
    return mkdtemp(folder) != NULL && chdir(folder) == 0 ? 0 : -1;
}

int io_leave_folder(void **state)
{
    return chdir("/") == 0 && rmdir(*state) == 0 ? 0 : -1;
}

int io_entries(const char *folder)
{
    DIR *d = opendir(folder);
    int n = 0;
    if (d == NULL) {
        perror(folder);
        abort();
    }
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        n += e->d_name[0] != '.';
    }
    closedir(d);
    return n;
}

typedef struct hashing {
    uint64_t hash;
    bool good;
} hashing;

static bool add_state(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    hashing *h = user;
    int64_t n = mu_tensor_elements(value);
    bool ints = mu_tensor_dtype(value) == MU_I64;
    int64_t *x = calloc((size_t)n + 1, sizeof(*x));
    (void)p;
    h->good = x != NULL && (ints ? mu_tensor_read_i64(value, x, n) : mu_tensor_read(value, (float *)(void *)x, n)) == MU_OK;
    if (h->good) {
        h->hash = mui_hash_bytes(h->hash, x, (size_t)n * (ints ? sizeof(int64_t) : sizeof(float)));
        h->hash = mui_hash_string(h->hash, name);
    }
    free(x);
    return h->good;
}

bool io_hash(mu_module *m, uint64_t *out)
{
    hashing h = {MUI_HASH_START, true};
    bool all = mu_module_each_state(m, add_state, &h) == MU_OK;
    *out = h.hash;
    return all && h.good;
}
