/* Opens a checkpoint, asks it everything, and reads every tensor of moderate size. */
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

void fuzz_open(const uint8_t *data, size_t bytes, bool no_checksum)
{
    char path[64];
    int fd = fuzz_file(data, bytes, path);
    mu_context *c = fuzz_context();
    mu_checkpoint_file *k = mu_checkpoint_open_with(c, path, &(mu_checkpoint_options){.no_checksum = no_checksum});
    if (k != NULL) {
        mu_state_dict d;
        mu_checkpoint_globals(k);
        mu_checkpoint_all_globals(k);
        mu_checkpoint_format(k);
        if (mu_checkpoint_find_state_dict(k, NULL, &d) == MU_OK) {
            for (int64_t i = d.first; i < d.first + d.count && i < d.first + 200; i++) {
                mu_checkpoint_name_in(k, &d, i);
            }
        }
        mu_context_clear(c);
        read_all(c, k);
        mu_checkpoint_close(k);
    } else if (mu_context_status(c) == MU_OK) {
        fuzz_broken("a failure without an error");
    }
    close(fd);
    mu_context_close(c);
}
