/* IDX files, plain and gzipped. The first byte chooses how many dimensions are expected. */
#include "base/alloc.h"
#include "data/idx.h"
#include "fuzz_target.h"

#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    char path[64];
    int ndim = 1 + data[0] % MUI_IDX_MAX_DIMS, fd = fuzz_file(data + 1, bytes - 1, path);
    mu_context *c = fuzz_context();
    mui_idx idx = {{0}, NULL};
    if (mui_idx_read(c, path, fd, ndim, &idx) == MU_OK) {
        size_t total = 1;
        volatile uint8_t last;
        for (int i = 0; i < ndim; i++) {
            total *= (size_t)idx.dim[i];
        }
        last = idx.data[total - 1]; /* there are as many as it says */
        (void)last;
        mui_free(c, idx.data);
    } else if (idx.data != NULL || mu_context_status(c) == MU_OK) {
        fuzz_broken("a failed read has a result, or no error");
    }
    fuzz_close(c);
    close(fd);
    return 0;
}
