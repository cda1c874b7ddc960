/* CRC-32 by carry-less multiplication where the processor has it (about three times as fast as zlib's tables), else
 * zlib's.
 *
 * Bytes are a polynomial over GF(2), the first bit its highest power, and the CRC is its remainder modulo P. A block of
 * 128 bits that n bits follow may be replaced by its product with x^n mod P, xored to the block n bits later: folding.
 * Four blocks fold at a time, over 64 bytes, so that their multiplications overlap; the last 16 bytes go to zlib. */
#include "io/crc32.h"

#include <zlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_FOLDING 1
#define FOLDING __attribute__((target("pclmul,sse4.1")))
#define FOLD_MIN 256 /* below, zlib is as fast */

/* x^n mod P, with x^0 at the top bit, as the CRC's register has it. */
static uint32_t power(int n)
{
    uint32_t r = 0x80000000u;
    for (int i = 0; i < n; i++) {
        r = (r & 1) != 0 ? r >> 1 ^ 0xedb88320u : r >> 1;
    }
    return r;
}

/* The factors that move both halves of a block on by that many bits. A 32-bit register as the low half of 64 bits stands
 * for x^32 times itself, and the product of two reflected numbers comes out one bit low: 31 bits to add. The high
 * half of a block lies 64 bits nearer to its end. */
FOLDING static __m128i factors(int bits)
{
    return _mm_set_epi64x((long long)power(bits + 31 - 64), (long long)power(bits + 31));
}

FOLDING static __m128i fold(__m128i x, __m128i by, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next);
}

FOLDING static uint32_t folded(uint32_t crc, const unsigned char *p, size_t bytes)
{
    __m128i over_64 = factors(512), over_16 = factors(128), x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
    }
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
    for (p += 64, bytes -= 64; bytes >= 64; p += 64, bytes -= 64) {
        for (int i = 0; i < 4; i++) {
            x[i] = fold(x[i], over_64, _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)));
        }
    }
    for (int i = 1; i < 4; i++) {
        x[i] = fold(x[i - 1], over_16, x[i]);
    }
    unsigned char rest[16];
    _mm_storeu_si128((__m128i *)(void *)rest, x[3]);
    /* zlib inverts the register before and after: here it starts from zero, which is in the block already */
    return (uint32_t)crc32_z(crc32_z(0xffffffffu, rest, sizeof(rest)), p, bytes);
}
#endif

uint32_t mui_crc32(uint32_t crc, const void *data, size_t bytes)
{
#if HAVE_FOLDING
    if (bytes >= FOLD_MIN && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        return folded(crc, data, bytes);
    }
#endif
    return (uint32_t)crc32_z(crc, data, bytes);
}
