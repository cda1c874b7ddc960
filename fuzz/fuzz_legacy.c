/* Legacy streams from the object on: the three pickles that stand before it are put there, so that a search need not
 * find them. */
#include "fuzz_target.h"

#include <stdlib.h>
#include <string.h>

/* The magic number, protocol 1001, {"little_endian": True}. */
static const char head[] = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
                           "\x80\x02M\xe9\x03."
                           "\x80\x02}X\x0d\x00\x00\x00little_endian\x88s.";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    size_t before = sizeof(head) - 1;
    uint8_t *whole = malloc(before + bytes);
    if (whole == NULL) {
        fuzz_broken("out of memory");
    }
    memcpy(whole, head, before);
    if (bytes > 0) {
        memcpy(whole + before, data, bytes);
    }
    fuzz_open(whole, before + bytes, true);
    free(whole);
    return 0;
}
