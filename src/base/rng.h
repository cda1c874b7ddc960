/* Random numbers by counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
 * A stream is a key; a draw is a position in it. So any draw can be repeated without having made the earlier ones. */
#ifndef MUI_RNG_H
#define MUI_RNG_H

#include <stddef.h>
#include <stdint.h>

typedef struct mui_rng {
    uint64_t key;
    uint64_t stream;  /* second half of the counter */
    uint64_t counter; /* next block */
    uint32_t block[4];
    int used; /* words of block already given out */
} mui_rng;

/* 128 random bits for (key, stream, counter). */
void mui_philox(uint64_t key, uint64_t stream, uint64_t counter, uint32_t out[4]);

void mui_rng_init(mui_rng *r, uint64_t key, uint64_t stream);
uint32_t mui_rng_u32(mui_rng *r);
uint64_t mui_rng_below(mui_rng *r, uint64_t n); /* uniform in [0, n), n > 0, without bias */
float mui_rng_uniform(mui_rng *r);              /* [0, 1) */
float mui_rng_normal(mui_rng *r);               /* mean 0, deviation 1 (Box and Muller) */

/* Hashes for keys and identities: 64-bit FNV-1a with a final mix. Not for hostile input. */
uint64_t mui_hash_bytes(uint64_t h, const void *data, size_t bytes);
uint64_t mui_hash_string(uint64_t h, const char *s);
uint64_t mui_hash_u64(uint64_t h, uint64_t v);
#define MUI_HASH_START 0xcbf29ce484222325u

#endif
