/* safetensors files: two bytes say how long the header is, as far as there are bytes, and the header's length is put
 * before it, so that a search need not keep eight bytes in step with it. */
#include "fuzz_target.h"
#include "io/bytes.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 2) {
        return 0;
    }
    size_t rest = bytes - 2, header = mui_le16(data);
    uint8_t *whole = malloc(8 + rest);
    if (whole == NULL) {
        fuzz_broken("out of memory");
    }
    mui_put_le64(whole, header < rest ? header : rest);
    memcpy(whole + 8, data + 2, rest);
    fuzz_open(whole, 8 + rest, true);
    free(whole);
    return 0;
}
