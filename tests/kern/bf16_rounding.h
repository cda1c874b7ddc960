/* What rounding to bfloat16 gives, for tests. */
#ifndef BF16_ROUNDING_H
#define BF16_ROUNDING_H

#include <math.h>

/* Nearest, ties to even, worked out in another way than the library's: through the exponent. */
static inline float to_bf16(float x)
{
    int e;
    if (x == 0.0F || !isfinite(x)) {
        return x;
    }
    (void)frexp((double)x, &e);
    double unit = ldexp(1.0, (e < -125 ? -125 : e) - 8);
    return (float)(nearbyint((double)x / unit) * unit);
}

#endif
