/* OpenMP, which runs oneDNN's threads: how many there are, and what becomes of them in a fork. Muster itself is not built
 * with OpenMP. Which runtime it is, oneDNN decides, so functions are looked up where oneDNN found them; without one there
 * are no threads. */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "kern/engine.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

typedef void (*any_fn)(void); /* to be cast to what it is */

/* NULL where there is none. */
static any_fn look_up(const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    any_fn f = NULL;
    memcpy(&f, &symbol, sizeof(f)); /* ISO C has no cast from object to function pointer */
    return f;
}

/* Before a fork, in the thread that forks. The child gets a copy of what this thread's OpenMP knows, but not the threads
 * that it knows of, and would wait for them for ever at the next kernel. So they are ended here; parent and child
 * each start new ones when they want them. Within a parallel region this does nothing, and nothing can be done. */
static void before_fork(void)
{
    enum { OMP_PAUSE_SOFT = 1 };
    any_fn pause = look_up("omp_pause_resource_all"); /* OpenMP 5.0 */
    if (pause != NULL) {
        ((int (*)(int))pause)(OMP_PAUSE_SOFT);
    }
}

static void watch_forks(void)
{
    (void)pthread_atfork(before_fork, NULL, NULL); /* fails for want of memory only; then forks are as they were */
}

void mui_dnnl_set_threads(int threads)
{
    /* Of the process, like what it guards, and it is never undone: the list of handlers only grows. */
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    if (threads > 1) {
        pthread_once(&watched, watch_forks);
    }
    /* A primitive's number of threads is fixed when it is made, from the calling thread's setting. */
    any_fn set = look_up("omp_set_num_threads");
    if (set != NULL) {
        ((void (*)(int))set)(threads);
    }
}

mui_together_fn mui_dnnl_together(void)
{
    /* What gcc makes of "omp parallel"; other compilers' runtimes have it too, for programs that gcc compiled. */
    return (mui_together_fn)look_up("GOMP_parallel");
}
