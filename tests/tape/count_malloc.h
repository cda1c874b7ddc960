/* Counts every allocation of the process by standing in for malloc and its like. Not under sanitizers, which do the
 * same themselves. For one test program: include it in one file. */
#ifndef TEST_COUNT_MALLOC_H
#define TEST_COUNT_MALLOC_H

#include <errno.h>
#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_MALLOC 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define COUNTS_MALLOC 0
#endif
#endif
#ifndef COUNTS_MALLOC
#define COUNTS_MALLOC 1
#endif

static long malloc_calls, malloc_live;

#if COUNTS_MALLOC
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *p);

static void *counted(void *p)
{
    __atomic_fetch_add(&malloc_calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&malloc_live, p != NULL, __ATOMIC_RELAXED);
    return p;
}

void *malloc(size_t bytes)
{
    return counted(__libc_malloc(bytes));
}

void *calloc(size_t n, size_t bytes)
{
    return counted(__libc_calloc(n, bytes));
}

void *realloc(void *p, size_t bytes)
{
    __atomic_fetch_add(&malloc_calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&malloc_live, p == NULL, __ATOMIC_RELAXED);
    return __libc_realloc(p, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return counted(__libc_memalign(align, bytes));
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    *out = counted(__libc_memalign(align, bytes));
    return *out != NULL ? 0 : ENOMEM;
}

void free(void *p)
{
    __atomic_fetch_sub(&malloc_live, p != NULL, __ATOMIC_RELAXED);
    __libc_free(p);
}
#endif

#endif
