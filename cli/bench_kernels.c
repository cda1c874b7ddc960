/* Vectors are the compiler's own extension, so there is one text for every processor; only which widths there are is
 * asked of it. cli/CMakeLists.txt allows fused multiply-add here. */
#define _GNU_SOURCE
#include "bench_kernels.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+x"
#endif

/* A sum is kept in registers as long as all of them fit there, with one factor and one addend: as many as hide the
 * latency of two units (2 units x 5 cycles, or 4 x 4). The empty asm makes a value unknown to the compiler, so that it
 * can leave nothing out. */
#define FMA_LOOP(name, bytes, attributes)                                                                              \
    attributes static double name(int64_t rounds)                                                                      \
    {                                                                                                                  \
        typedef float vec __attribute__((vector_size(bytes)));                                                         \
        vec a = {0}, m = {0}, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11;                                        \
        __asm__ volatile("" : IN_REGISTER(a), IN_REGISTER(m));                                                         \
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = s9 = s10 = s11 = a;                                               \
        for (int64_t i = 0; i < rounds; i++) {                                                                         \
            s0 = s0 * m + a, s1 = s1 * m + a, s2 = s2 * m + a, s3 = s3 * m + a;                                        \
            s4 = s4 * m + a, s5 = s5 * m + a, s6 = s6 * m + a, s7 = s7 * m + a;                                        \
            s8 = s8 * m + a, s9 = s9 * m + a, s10 = s10 * m + a, s11 = s11 * m + a;                                    \
            __asm__ volatile("" : IN_REGISTER(s0), IN_REGISTER(s1), IN_REGISTER(s2), IN_REGISTER(s3));                 \
            __asm__ volatile("" : IN_REGISTER(s4), IN_REGISTER(s5), IN_REGISTER(s6), IN_REGISTER(s7));                 \
            __asm__ volatile("" : IN_REGISTER(s8), IN_REGISTER(s9), IN_REGISTER(s10), IN_REGISTER(s11));               \
        }                                                                                                              \
        return 12.0 * 2 * (bytes / 4) * (double)rounds;                                                                \
    }

#if defined(__x86_64__)
FMA_LOOP(fma_512, 64, __attribute__((target("avx512f"))))
FMA_LOOP(fma_256, 32, __attribute__((target("avx2,fma"))))
FMA_LOOP(fma_128, 16, __attribute__((target("fma"))))
#elif defined(__aarch64__)
FMA_LOOP(fma_128, 16, )
#endif

double bench_fma(int bits, int64_t rounds)
{
#if defined(__x86_64__)
    if (bits == 512) {
        return __builtin_cpu_supports("avx512f") ? fma_512(rounds) : 0;
    }
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return 0;
    }
    if (bits == 256) {
        return fma_256(rounds);
    }
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    return bits == 128 ? fma_128(rounds) : 0;
#else
    (void)bits;
    (void)rounds;
    return 0;
#endif
}

/* -- memory: the widest vectors that every processor can be asked for ------------------------------------------------- */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

CLONES double bench_read(const void *from, size_t bytes)
{
    const uint64_t *p = from;
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes / sizeof(*p); i++) {
        sum += p[i];
    }
    __asm__ volatile("" : : "r"(sum));
    return (double)bytes;
}

/* Each 1024 bytes are behind a wall for the compiler: else it would make these loops into calls of memset and memcpy,
 * which choose stores past the caches. */
#define BLOCK 256

CLONES double bench_write(void *to, size_t bytes)
{
    float *q = to;
    for (size_t at = 0; at < bytes / sizeof(*q); at += BLOCK) {
        for (size_t i = 0; i < BLOCK; i++) {
            q[at + i] = (float)at;
        }
        __asm__ volatile("" : : : "memory");
    }
    return (double)bytes;
}

CLONES double bench_copy(void *to, const void *from, size_t bytes)
{
    float *restrict q = to;
    const float *restrict p = from;
    for (size_t at = 0; at < bytes / sizeof(*q); at += BLOCK) {
        for (size_t i = 0; i < BLOCK; i++) {
            q[at + i] = p[at + i];
        }
        __asm__ volatile("" : : : "memory");
    }
    return 2 * (double)bytes;
}

CLONES static void mean_of_two(float *restrict a, float *restrict b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float mean = 0.5f * (a[i] + b[i]);
        a[i] = mean;
        b[i] = mean;
    }
}

CLONES static void add_to(float *restrict sum, const float *restrict a, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        sum[i] += a[i];
    }
}

CLONES static void scale(float *restrict out, const float *restrict sum, float factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        out[i] = factor * sum[i];
    }
}

/* Of more than two, piece by piece, so that the sum stays in the first cache. */
static void mean_of_many(float *const *arrays, int n, int64_t count)
{
    float sum[1024];
    const int64_t most = (int64_t)(sizeof(sum) / sizeof(sum[0]));
    for (int64_t at = 0; at < count; at += most) {
        int64_t piece = count - at < most ? count - at : most;
        memcpy(sum, arrays[0] + at, (size_t)piece * sizeof(*sum));
        for (int r = 1; r < n; r++) {
            add_to(sum, arrays[r] + at, piece);
        }
        for (int r = 0; r < n; r++) {
            scale(arrays[r] + at, sum, 1.0f / (float)n, piece);
        }
    }
}

double bench_mean(float *const *arrays, int n, int64_t count)
{
    if (n == 2) {
        mean_of_two(arrays[0], arrays[1], count);
    } else {
        mean_of_many(arrays, n, count);
    }
    return 2.0 * n * (double)count * sizeof(float);
}

#define HUGE_PAGE ((size_t)2 << 20)

void *bench_memory(size_t bytes)
{
    void *p = NULL;
    size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (posix_memalign(&p, HUGE_PAGE, whole) != 0) {
        return NULL;
    }
    madvise(p, whole, MADV_HUGEPAGE); /* only faster pages are lost where it cannot be had */
    memset(p, 0, whole);
    return p;
}
