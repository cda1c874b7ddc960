/* One loop by several threads: those that oneDNN computes with, so that no others wait for its to give up a core. */
#include "kern/share.h"
#include "kern/engine.h"

#include <stdatomic.h>

/* OpenMP orders what its threads do, and says so to no tool: ThreadSanitizer is told here. */
#if defined(__SANITIZE_THREAD__)
#define MUI_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MUI_TSAN 1
#endif
#endif
#ifdef MUI_TSAN
#include <sanitizer/tsan_interface.h>
#define MUI_HAND_OVER(what) __tsan_release(what)
#define MUI_TAKE_OVER(what) __tsan_acquire(what)
#else
#define MUI_HAND_OVER(what) ((void)(what))
#define MUI_TAKE_OVER(what) ((void)(what))
#endif

/* Parts begin at multiples of it, so that an element is computed by vector code, or by the rest of a loop, whatever the
 * number of threads. */
enum { UNIT = 1024 };

typedef struct shared {
    int64_t n, part;
    mui_part_fn fn;
    void *args;
    _Atomic int64_t next; /* where the part begins that nobody has taken yet */
} shared;

/* In every thread there is. Whoever comes takes a part, so that it does not matter how many come. */
static void take_parts(void *user)
{
    shared *s = user;
    MUI_TAKE_OVER(s);
    /* Relaxed: it orders nothing, the threads' beginning and end do. */
    for (int64_t from; (from = atomic_fetch_add_explicit(&s->next, s->part, memory_order_relaxed)) < s->n;) {
        s->fn(s->args, from, from + s->part < s->n ? from + s->part : s->n);
    }
    MUI_HAND_OVER(s);
}

void mui_split(mui_engine *e, int64_t n, mui_part_fn fn, void *args)
{
    if (e == NULL || e->together == NULL || n < MUI_ALONE_BELOW) {
        fn(args, 0, n);
        return;
    }
    int64_t units = (n + UNIT - 1) / UNIT;
    shared s = {.n = n, .part = (units + e->threads - 1) / e->threads * UNIT, .fn = fn, .args = args};
    MUI_HAND_OVER(&s);
    e->together(take_parts, &s, (unsigned)e->threads, 0);
    MUI_TAKE_OVER(&s);
}
