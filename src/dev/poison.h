/* AddressSanitizer is told what of our own memory is free, so that it sees a use after release there as in malloc's. */
#ifndef MUI_POISON_H
#define MUI_POISON_H

#if defined(__SANITIZE_ADDRESS__)
#define MUI_POISONS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MUI_POISONS 1
#endif
#endif

#ifdef MUI_POISONS
#include <sanitizer/asan_interface.h>
#define MUI_RED_ZONE_BYTES ((size_t)64) /* between two ranges */
#define mui_poison(data, bytes) __asan_poison_memory_region(data, bytes)
#define mui_unpoison(data, bytes) __asan_unpoison_memory_region(data, bytes)
#else
#define MUI_RED_ZONE_BYTES ((size_t)0)
#define mui_poison(data, bytes) ((void)(data), (void)(bytes))
#define mui_unpoison(data, bytes) ((void)(data), (void)(bytes))
#endif

#endif
