/* Our own loops over large arrays, cut into parts for the engine's threads. For loops whose elements do not depend on each
 * other: the results are the same bit for bit for any number of threads. Not for: sums, and oneDNN, which has its own. */
#ifndef MUI_SHARE_H
#define MUI_SHARE_H

#include "kern/kern.h"

/* Elements from <= i < to; args as given. Runs in a thread that is bound to nothing: it must not fail. */
typedef void (*mui_part_fn)(void *args, int64_t from, int64_t to);
/* Threads that are awake take some microseconds to come; a shorter loop is done by then. */
enum { MUI_ALONE_BELOW = 1 << 15 };
/* fn over [0, n), in one piece where n is small, or there is one thread, or no engine; returns when all is done. Takes no
 * memory. In the engine's thread only. */
void mui_split(mui_engine *e, int64_t n, mui_part_fn fn, void *args);

#endif
