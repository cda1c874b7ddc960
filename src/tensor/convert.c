/* Element types to and from float. */
#include "tensor/tensor.h"
#include "kern/bf16.h"

#include <string.h>

static float from_half(uint16_t h)
{
    uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = (h >> 10) & 31u, mantissa = h & 1023u, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        /* Subnormal: mantissa times 2^-24, exact in float. */
        float value = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    float out;
    memcpy(&out, &bits, sizeof(out));
    return out;
}

/* Rounds to nearest, ties to even, as hardware does. */
static uint16_t to_half(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {
        return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    }
    if (magnitude < 0x38800000u) {
        /* Below the smallest normal number: adding 2^-1 aligns the mantissa so that the FPU rounds for us. */
        float aligned;
        memcpy(&aligned, &magnitude, sizeof(aligned));
        aligned += 0.5f;
        memcpy(&magnitude, &aligned, sizeof(magnitude));
        return (uint16_t)(sign | (magnitude - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

mu_status mui_to_float(mu_context *c, mu_dtype from, int64_t n, const void *src, float *dst)
{
    switch (from) {
    case MU_F32:
        if (n > 0) {
            memcpy(dst, src, (size_t)n * sizeof(*dst));
        }
        return MU_OK;
    case MU_F64:
        for (int64_t i = 0; i < n; i++) {
            dst[i] = (float)((const double *)src)[i];
        }
        return MU_OK;
    case MU_F16:
        for (int64_t i = 0; i < n; i++) {
            dst[i] = from_half(((const uint16_t *)src)[i]);
        }
        return MU_OK;
    case MU_BF16:
        mui_bf16_widen(n, src, dst);
        return MU_OK;
    default:
        return mui_fail(c, MU_ERR_DTYPE, "elements of %s cannot become float32", mu_dtype_name(from));
    }
}

mu_status mui_from_float(mu_context *c, mu_dtype to, int64_t n, const float *src, void *dst)
{
    switch (to) {
    case MU_F32:
        if (n > 0) {
            memcpy(dst, src, (size_t)n * sizeof(*src));
        }
        return MU_OK;
    case MU_F64:
        for (int64_t i = 0; i < n; i++) {
            ((double *)dst)[i] = src[i];
        }
        return MU_OK;
    case MU_F16:
        for (int64_t i = 0; i < n; i++) {
            ((uint16_t *)dst)[i] = to_half(src[i]);
        }
        return MU_OK;
    case MU_BF16:
        mui_bf16_round(n, src, dst);
        return MU_OK;
    default:
        return mui_fail(c, MU_ERR_DTYPE, "float32 elements cannot become %s", mu_dtype_name(to));
    }
}
