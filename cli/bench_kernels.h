/* Loops that reach what this machine can do: floating-point units, and memory. */
#ifndef MUSTER_CLI_BENCH_KERNELS_H
#define MUSTER_CLI_BENCH_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Runs about `rounds` rounds of independent fused multiply-adds in vectors of `bits` bits; returns how many floating-point
 * operations that was, 0 where this processor has no such vectors. */
double bench_fma(int bits, int64_t rounds);

/* Bytes of `bytes` (a multiple of 64) at 64-byte aligned addresses, with ordinary loads and stores. Each returns the bytes
 * that were read and written. */
double bench_read(const void *from, size_t bytes);
double bench_write(void *to, size_t bytes);
double bench_copy(void *to, const void *from, size_t bytes);

/* Reads `count` floats of each of n arrays and writes their mean into all of them: what a rank does with its slice in an
 * all-reduce, without waiting for anyone. */
double bench_mean(float *const *arrays, int n, int64_t count);

/* Memory of that many bytes, written once, on huge pages where the system has them; NULL: none. Freed with free(). */
void *bench_memory(size_t bytes);

#endif
