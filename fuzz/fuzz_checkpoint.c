/* Whole checkpoint files of any kind. Checksums are not verified, for a search would hardly get past them; fuzz_zip has
 * them. */
#include "fuzz_target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz_open(data, bytes, true);
    return 0;
}
