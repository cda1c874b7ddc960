/* Whole checkpoint files, zip and legacy: opened, listed, and every tensor of moderate size read. */
#include "base/context.h"
#include "fuzz_target.h"

#include <muster/checkpoint.h>
#include <stdlib.h>
#include <unistd.h>

#define MOST_BYTES ((size_t)16 << 20)

static void read_all(mu_context *c, mu_checkpoint_file *k)
{
    int64_t count = mu_checkpoint_count(k);
    for (int64_t i = 0; i < count && i < 200; i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        size_t bytes = mu_dtype_bytes(e.dtype);
        for (int d = 0; d < e.dims.ndim; d++) {
            if (e.dims.dim[d] < 0 || __builtin_mul_overflow(bytes, (size_t)e.dims.dim[d], &bytes)) {
                bytes = MOST_BYTES + 1;
                break;
            }
        }
        void *out = bytes <= MOST_BYTES ? malloc(bytes + 1) : NULL;
        mu_status s = mu_checkpoint_read(k, i, out, bytes);
        if (s != MU_OK && mu_context_status(c) == MU_OK) {
            fuzz_broken("a failure without an error");
        }
        mu_context_clear(c);
        free(out);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[64];
    int fd = fuzz_file(data, bytes, path);
    mu_context *c = fuzz_context();
    mu_checkpoint_file *k = mu_checkpoint_open(c, path);
    if (k != NULL) {
        mu_checkpoint_globals(k);
        mu_checkpoint_format(k);
        read_all(c, k);
        mu_checkpoint_close(k);
    } else if (mu_context_status(c) == MU_OK) {
        fuzz_broken("a failure without an error");
    }
    close(fd);
    mu_context_close(c);
    return 0;
}
