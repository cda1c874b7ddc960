/* Many normal numbers at a time. Compiled without contraction to fused multiply-add: a seed then means the same initial
 * values on every CPU. */
#include "kern/fast_math.h"
#include "kern/kern.h"
#include "kern/philox_lanes.h"

/* cos(2 pi v / 2^32): v to the nearest quarter turn, which is exact, and what is left of it. */
static inline float cos_of_turn(uint32_t v)
{
    uint32_t quarter = (v + (1u << 29)) >> 30;
    float r = (float)(int32_t)(v - (quarter << 30)) * 1.4629180792671596e-9f; /* 2 pi / 2^32 */
    float s = r * r;
    float even = -2.446388659e-5f;
    even = even * s + 0.001388759007f;
    even = even * s - 0.04166665067f;
    even = even * s + 0.4999999997f;
    float odd = -0.0001958800886f;
    odd = odd * s + 0.008332748999f;
    odd = odd * s - 0.1666666467f;
    float c = quarter & 1 ? -(r + r * s * odd) : 1.0f - s * even;
    return quarter & 2 ? -c : c;
}

/* -log((u + 1) / 2^32) >= 0. Above sqrt(1/2) from the distance to 1, of which a float of u itself would have lost most. */
static inline float minus_log(uint32_t u)
{
    const uint32_t half_root = 0xb504f333u;
    uint32_t bits = mui_bits_of_float((float)u + 1.0f) - 0x3f3504f3u;
    float k = (float)((int32_t)bits >> 23) - 32.0f, f = mui_float_of_bits((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float near = (float)(int32_t)((u < half_root ? 0u : ~u)) * -0x1p-32f;
    float v = -mui_logf_of(u < half_root ? k : 0.0f, u < half_root ? f : near);
    return v > 0.0f ? v : 0.0f;
}

static inline float normal_of(uint32_t u, uint32_t v, float deviation)
{
    return sqrtf(2.0f * minus_log(u)) * cos_of_turn(v) * deviation;
}

MUI_CLONES void mui_normal(int64_t n, float *y, float deviation, uint64_t key, uint64_t stream)
{
    for (int64_t at = 0; at < n; at += 2 * MUI_LANES) {
        uint32_t bits[4][MUI_LANES];
        mui_philox_lanes(key, stream, (uint64_t)(at / 2), bits);
        float first[MUI_LANES], second[MUI_LANES];
        for (int j = 0; j < MUI_LANES; j++) {
            first[j] = normal_of(bits[0][j], bits[1][j], deviation);
            second[j] = normal_of(bits[2][j], bits[3][j], deviation);
        }
        int64_t count = n - at < 2 * MUI_LANES ? n - at : 2 * MUI_LANES;
        for (int64_t i = 0; i < count; i++) {
            y[at + i] = i % 2 == 0 ? first[i / 2] : second[i / 2];
        }
    }
}
