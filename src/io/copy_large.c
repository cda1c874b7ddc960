/* Copies past the caches where the processor lets us. */
#include "io/copy_large.h"

#include <stdint.h>
#include <string.h>

#define LARGE ((size_t)64 << 10)

#if defined(__SSE2__)
#include <emmintrin.h>

static void copy_past_caches(char *to, const char *from, size_t bytes)
{
    size_t before = (64 - ((uintptr_t)to & 63)) & 63;
    memcpy(to, from, before);
    to += before;
    from += before;
    for (bytes -= before; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        __m128i x[4];
        for (int i = 0; i < 4; i++) {
            x[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
        }
        for (int i = 0; i < 4; i++) {
            _mm_stream_si128((__m128i *)(void *)(to + 16 * i), x[i]);
        }
    }
    _mm_sfence(); /* before anything that another thread may take as a sign that the copy is there */
    memcpy(to, from, bytes);
}
#endif

void mui_copy_large(void *to, const void *from, size_t bytes)
{
#if defined(__SSE2__)
    if (bytes >= LARGE) {
        copy_past_caches(to, from, bytes);
        return;
    }
#endif
    if (bytes > 0) {
        memcpy(to, from, bytes);
    }
}
