/* exp, log, erf and their relatives as straight-line float code, so that plain loops over them become vector code.
 * Coefficients are minimax fits made for this file; errors (tests/kern measure them) are a few units in the last place.
 * The including file must be compiled without -ffast-math: the rounding by a magic number would be optimised away. */
#ifndef MUI_FAST_MATH_H
#define MUI_FAST_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* One copy of the loop for each vector width, chosen by the CPU at load time. Not with sanitizers: their runtime is not
 * up yet when the choice is made. clang 14 has no target_clones. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 &&                               \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MUI_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MUI_CLONES
#endif

static inline float mui_float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint32_t mui_bits_of_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

/* e^x; 0 and infinity beyond the range of float; NaN stays. */
static inline float mui_expf(float x)
{
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, left in the low bits */
    float shifted = x * 1.44269504f + magic;
    float k = shifted - magic;
    float r = (x - k * 0.693145752f) - k * 1.42860677e-6f; /* ln 2 in two parts, the first exact times small integers */
    float p = 0.0013950486f;
    p = p * r + 0.0083688879f;
    p = p * r + 0.0416662060f;
    p = p * r + 0.1666651815f;
    p = p * r + 0.5f;
    p = 1.0f + (r + r * r * p);
    /* 2^k in two factors, each a normal number although the product may not be one. */
    uint32_t n = mui_bits_of_float(shifted) - mui_bits_of_float(magic);
    uint32_t half = (uint32_t)((int32_t)n >> 1);
    return p * mui_float_of_bits((half + 127u) << 23) * mui_float_of_bits((n - half + 127u) << 23);
}

/* k log 2 + log(1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1). */
static inline float mui_logf_of(float k, float f)
{
    float p = 0.0691536814f;
    p = p * f - 0.1178980768f;
    p = p * f + 0.1187297627f;
    p = p * f - 0.1238434836f;
    p = p * f + 0.1421865821f;
    p = p * f - 0.1666925102f;
    p = p * f + 0.2000222653f;
    p = p * f - 0.2499998659f;
    p = p * f + 0.3333331048f;
    float tail = f * f * (f * p - 0.5f) + k * 1.42860677e-6f;
    return k * 0.693145752f + (f + tail);
}

/* log of a normal number > 0. */
static inline float mui_logf_normal(float x)
{
    uint32_t bits = mui_bits_of_float(x) - 0x3f3504f3u; /* so that the mantissa lies in [sqrt(1/2), sqrt(2)) */
    return mui_logf_of((float)((int32_t)bits >> 23), mui_float_of_bits((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f);
}

/* log(1 + t) for t >= 0, and NaN. */
static inline float mui_log1pf_positive(float t)
{
    float u = 1.0f + t;
    float lost = t > 1.0f ? 1.0f - (u - t) : t - (u - 1.0f); /* what the sum rounded away */
    return mui_logf_normal(u) + lost / u + (t - t);            /* the last term keeps NaN and makes infinity one */
}

/* 1 / (1 + e^-x) */
static inline float mui_sigmoidf(float x)
{
    return 1.0f / (1.0f + mui_expf(-x));
}

static inline float mui_tanhf(float x)
{
    float a = fabsf(x), s = x * x;
    float p = -0.0056607803f;
    p = p * s + 0.0206019990f;
    p = p * s - 0.0537292287f;
    p = p * s + 0.1333132833f;
    p = p * s - 0.3333327770f;
    float small = x + x * s * p;
    float large = copysignf(1.0f - 2.0f / (mui_expf(2.0f * a) + 1.0f), x);
    return a < 0.625f ? small : large;
}

static inline float mui_erff(float x)
{
    float a = fabsf(x), s = x * x;
    float p = 7.88912e-05f;
    p = p * s - 0.0008020842f;
    p = p * s + 0.0051895352f;
    p = p * s - 0.0268544443f;
    p = p * s + 0.1128360033f;
    p = p * s - 0.3761262596f;
    p = p * s + 0.1283791065f;
    float small = x + x * p;
    float t = a > 4.0f ? 4.0f : a;
    float q = -1.3345561e-05f;
    q = q * t + 0.0003442267f;
    q = q * t - 0.0037307311f;
    q = q * t + 0.0239514671f;
    q = q * t - 0.1064602062f;
    q = q * t - 0.6350139976f;
    q = q * t - 1.1286827518f;
    float large = copysignf(1.0f - mui_expf(q * t), x);
    return a < 1.0f ? small : large;
}

#endif
