/* The strict zip reader on bare bytes: every member read, its checksum verified or, chosen by the first byte, not, so
 * that a search gets past it. */
#include "base/alloc.h"
#include "fuzz_target.h"
#include "io/zip_reader.h"

#include <string.h>

#define MOST_BYTES ((uint64_t)1 << 20)

static void read_member(mui_zip *z, mui_zip_member *m)
{
    const unsigned char *data = NULL;
    void *owned = NULL;
    if (strlen(m->name) == 0 || mui_zip_find(z, m->name) != m) {
        fuzz_broken("a member cannot be found by its name");
    }
    if (m->bytes > MOST_BYTES) { /* allowed, but slow to try */
        return;
    }
    if (mui_zip_read(z, m, &data, &owned) == MU_OK) {
        volatile unsigned char sum = 0;
        for (uint64_t i = 0; i < m->bytes; i++) { /* there are as many as it says */
            sum = (unsigned char)(sum + data[i]);
        }
    } else if (mu_context_status(z->context) == MU_OK || owned != NULL) {
        fuzz_broken("a failed read has a result, or no error");
    }
    mui_free(z->context, owned);
    mu_context_clear(z->context);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    mu_context *c = fuzz_context();
    mui_limits limits = mui_limits_default();
    mui_zip z;
    limits.no_checksum = data[0] % 2 == 1;
    if (mui_zip_open(c, "fuzz", data + 1, bytes - 1, &limits, &z) == MU_OK) {
        for (size_t i = 0; i < z.count && i < 64; i++) {
            read_member(&z, &z.members[i]);
        }
        mui_zip_close(&z);
    } else if (mu_context_status(c) == MU_OK) {
        fuzz_broken("a failure without an error");
    }
    fuzz_close(c);
    return 0;
}
