/* Runs one function as N ranks, as threads or as processes, and counts what they find wrong. cmocka's assertions jump
 * out of the test's own thread only, hence CHECK. */
#ifndef TEST_RANKS_H
#define TEST_RANKS_H

#include "base/context.h"
#include <muster/muster.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Of this process; atomic. */
#ifdef TEST_MANY_FILES
extern int failures; /* the file with main has it */
#else
static int failures;
#endif

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
        }                                                                                                              \
    } while (0)

/* Returns normally or not at all; the context is closed afterwards. */
typedef void (*rank_fn)(mu_group *g, int rank, int size, void *arg);

typedef struct rank_job {
    mu_thread_world *world;
    rank_fn fn;
    int rank, size;
    void *arg;
    bool clean; /* the context must end without an error */
} rank_job;

static inline mu_context *quiet_context(void)
{
    return mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
}

static inline void *rank_thread(void *p)
{
    rank_job *job = p;
    mu_context *c = quiet_context();
    mu_group *g = mu_group_threads(c, job->world, job->rank);
    CHECK(g != NULL, "join: %s", mu_context_message(c));
    if (g != NULL) {
        job->fn(g, job->rank, job->size, job->arg);
    }
    CHECK(!job->clean || mu_context_status(c) == MU_OK, "rank %d: %s", job->rank, mu_context_message(c));
    mu_context_close(c);
    return NULL;
}

static inline int run_threads(int size, rank_fn fn, void *arg, const mu_group_options *options, bool clean)
{
    mu_thread_world *w = mu_thread_world_new(size, options);
    pthread_t thread[32];
    rank_job job[32];
    int before = __atomic_load_n(&failures, __ATOMIC_RELAXED);
    for (int r = 0; r < size; r++) {
        job[r] = (rank_job){w, fn, r, size, arg, clean};
        if (pthread_create(&thread[r], NULL, rank_thread, &job[r]) != 0) {
            abort();
        }
    }
    for (int r = 0; r < size; r++) {
        pthread_join(thread[r], NULL);
    }
    mu_thread_world_free(w);
    return __atomic_load_n(&failures, __ATOMIC_RELAXED) - before;
}

/* A name no other run has. */
static inline void fresh_name(char out[64])
{
    static int counter;
    snprintf(out, 64, "test-%d-%d", (int)getpid(), counter++);
}

static inline pid_t fork_rank(const char *name, int rank, int size, rank_fn fn, void *arg, const mu_group_options *options,
                       bool clean)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) {
        return pid;
    }
    failures = 0;
    mu_context *c = quiet_context();
    mu_group *g = mu_group_shm(c, name, rank, size, options);
    CHECK(g != NULL, "join: %s", mu_context_message(c));
    if (g != NULL) {
        fn(g, rank, size, arg);
    }
    CHECK(!clean || mu_context_status(c) == MU_OK, "rank %d: %s", rank, mu_context_message(c));
    mu_context_close(c);
    fflush(NULL);
    _exit(failures > 0 ? 99 : 0);
}

static inline int run_processes(int size, rank_fn fn, void *arg, const mu_group_options *options, bool clean)
{
    char name[64];
    fresh_name(name);
    pid_t pid[32];
    int bad = 0;
    for (int r = 0; r < size; r++) {
        pid[r] = fork_rank(name, r, size, fn, arg, options, clean);
    }
    for (int r = 0; r < size; r++) {
        int status = 0;
        while (waitpid(pid[r], &status, 0) < 0 && errno == EINTR) {
        }
        bad += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    return bad;
}
/* A cheap generator for test data: the same for everyone who asks alike. */
static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline void nap_randomly(uint64_t key, int at_most_us)
{
    int us = (int)(mix(key) % (uint64_t)(at_most_us + 1));
    if (us % 3 != 0) {
        struct timespec t = {.tv_nsec = us * 1000L};
        nanosleep(&t, NULL);
    }
}

#endif
