/* Blocks of Philox4x32-10 side by side: the same numbers as mui_philox, in vector code. */
#ifndef MUI_PHILOX_LANES_H
#define MUI_PHILOX_LANES_H

#include <stdint.h>

enum { MUI_LANES = 64 };

/* out[w][j]: word w of block counter + j. */
static inline void mui_philox_lanes(uint64_t key, uint64_t stream, uint64_t counter, uint32_t out[4][MUI_LANES])
{
#pragma omp simd
    for (int j = 0; j < MUI_LANES; j++) {
        uint64_t n = counter + (uint64_t)j;
        uint32_t c0 = (uint32_t)n, c1 = (uint32_t)(n >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c1 = (uint32_t)p1;
            c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        out[0][j] = c0;
        out[1][j] = c1;
        out[2][j] = c2;
        out[3][j] = c3;
    }
}

#endif
