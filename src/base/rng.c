/* Philox4x32-10 and what is drawn from it. */
#include "base/rng.h"

#include <math.h>
#include <string.h>

void mui_philox(uint64_t key, uint64_t stream, uint64_t counter, uint32_t out[4])
{
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c[1] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[0] = n0;
        c[1] = (uint32_t)p1;
        c[2] = n2;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof(c));
}

void mui_rng_init(mui_rng *r, uint64_t key, uint64_t stream)
{
    *r = (mui_rng){.key = key, .stream = stream, .used = 4};
}

uint32_t mui_rng_u32(mui_rng *r)
{
    if (r->used == 4) {
        mui_philox(r->key, r->stream, r->counter++, r->block);
        r->used = 0;
    }
    return r->block[r->used++];
}

uint64_t mui_rng_below(mui_rng *r, uint64_t n)
{
    /* Draws below 2^64 mod n are rejected, so that every residue is equally likely. */
    uint64_t reject = (0 - n) % n;
    for (;;) {
        uint64_t high = mui_rng_u32(r);
        uint64_t v = high << 32 | mui_rng_u32(r);
        if (v >= reject) {
            return v % n;
        }
    }
}

float mui_rng_uniform(mui_rng *r)
{
    return (float)(mui_rng_u32(r) >> 8) * 0x1p-24f;
}

float mui_rng_normal(mui_rng *r)
{
    double u = ((double)mui_rng_u32(r) + 1.0) * 0x1p-32, v = (double)mui_rng_u32(r) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static uint64_t mix(uint64_t h)
{
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdu;
    h ^= h >> 33;
    return h;
}

uint64_t mui_hash_bytes(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) {
        h = (h ^ p[i]) * 0x100000001b3u;
    }
    return mix(h);
}

uint64_t mui_hash_string(uint64_t h, const char *s)
{
    return mui_hash_bytes(h, s, strlen(s) + 1);
}

uint64_t mui_hash_u64(uint64_t h, uint64_t v)
{
    return mui_hash_bytes(h, &v, sizeof(v));
}
