/* The pickle machine on bare pickles. */
#include "fuzz_target.h"
#include "io/pickle.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    mu_context *c = fuzz_context();
    mui_pickle p;
    if (mui_pickle_read(c, "fuzz", "data.pkl", data, bytes, &p) == MU_OK) {
        if (p.value == NULL || p.used > bytes) {
            fuzz_broken("a pickle without a value, or longer than its bytes");
        }
        mui_pickle_free(&p);
    } else if (mu_context_status(c) == MU_OK) {
        fuzz_broken("a failure without an error");
    }
    fuzz_close(c);
    return 0;
}
