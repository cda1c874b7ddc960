/* The context as the library sees it, and how errors are raised. Not for: anything a single floor above owns. */
#ifndef MUI_CONTEXT_H
#define MUI_CONTEXT_H

#include <muster/base.h>
#include <pthread.h>

#define MUI_MESSAGE_BYTES 2048

typedef void (*mui_destroy_fn)(void *object);

/* An object the context will destroy; newest first. */
typedef struct mui_owned {
    void *object;
    mui_destroy_fn destroy;
    int order; /* higher orders are destroyed first, whenever they were made */
} mui_owned;

/* Order of destruction: users of a thing before the thing. */
enum { MUI_OWN_LAST = 0, MUI_OWN_GROUP = 10, MUI_OWN_DEFAULT = 20, MUI_OWN_FIRST = 30 };

/* Where a thread is in the tree of modules, and what it is doing, see beacon.h. */
typedef struct mui_here {
    char path[512]; /* dotted path of the module now in forward, for messages; kept by nn */
    size_t path_len;
    int depth;      /* of forwards within forwards */
    int stage;
    const char *place;
    int lane;       /* in a trace: 0, or a replica's number from 1 on */
} mui_here;

/* What a thread that runs a part of a context's step has to itself: its place, its error, its kernels. While a thread is
 * bound, it sees these in the place of the context's own, and nothing of it is logged. */
typedef struct mui_bound {
    mu_context *context;
    mui_here here;
    mu_status status;
    char message[MUI_MESSAGE_BYTES];
    struct mui_engine *engine;
} mui_bound;
/* True once mu_context_warn_soon was called at least so many seconds ago. */
bool mui_context_warns_soon(const mu_context *c, double seconds);
/* Binds the calling thread, or unbinds it (NULL); returns what it was bound to. */
mui_bound *mui_bind(mui_bound *b);
/* What the calling thread is bound to, when that is of c; else NULL. */
mui_bound *mui_bound_of(const mu_context *c);
/* The calling thread's place. */
mui_here *mui_here_of(mu_context *c);

struct mu_context {
    /* The error has its own lock: loader threads raise errors too. */
    pthread_mutex_t lock;
    mu_status status;
    char message[MUI_MESSAGE_BYTES];

    uint64_t seed;
    int threads;
    mu_kernel_choice kernels;
    bool no_winograd;
    int rank, size;

    mu_log_level log_level;
    mu_log_fn log;
    void *log_user;

    pthread_mutex_t shared_lock; /* owned, and marks that walks over a tree leave in parameters */
    mui_owned *owned;
    size_t owned_count, owned_capacity;

    double warn_soon_since; /* 0: not asked for; atomic, relaxed: a signal's handler writes it */

    mui_here here;                   /* of threads that are not bound: ask mui_here_of */
    struct mui_beacon_link *beacons; /* where it is to be seen, see beacon.h */

    uint64_t writes; /* changes of values in place so far: a clock for mu_tensor.written and mui_node.recorded */
    uint64_t parameter_writes; /* `writes` when mui_tensor_touch last had a parameter's value */
    struct mui_engine *engine; /* kernels, made on first use by mui_engine_of; owned like any object */

    /* Allocation accounting and failure injection, see alloc.h. */
    uint64_t allocations;      /* made so far through this context */
    uint64_t allocated_bytes;
    uint64_t live_allocations; /* not yet freed */
    int64_t fail_after;        /* tests: >= 0 counts down, the allocation at 0 fails; -1: never */
    bool fail_forever;         /* tests: all later ones fail too */

    struct mui_profile *profile; /* NULL: not asked for; see profile.h */
    struct mui_trace *trace;     /* NULL: none is open; see trace.h */

    /* What kernels did, see mu_counters: engines of several threads add to them, through mui_count. */
    uint64_t layout_conversions, weight_conversions, converted_bytes, primitives, flops;
};

/* Records the first error (later ones are dropped until cleared), logs it once, and returns s, so that
 * `return mui_fail(c, MU_ERR_SHAPE, "...")` is the idiom. The message states what was found, where, and what was
 * expected, without newline or trailing stop. */
mu_status mui_fail(mu_context *c, mu_status s, const char *format, ...) MU_PRINTF(3, 4);

/* True when the context already has an error: builders return NULL at once. */
bool mui_failed(const mu_context *c);

/* Counters that several threads add to. Relaxed: a count orders nothing. */
static inline void mui_count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}
static inline uint64_t mui_counted(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

/* The environment's value; NULL when it is not set or empty, or for no variable. For context_open and groups only. */
const char *mui_environment(const char *variable);

void mui_log(mu_context *c, mu_log_level level, const char *format, ...) MU_PRINTF(3, 4);

/* The context destroys object at close unless disowned before. On failure object is destroyed at once. */
mu_status mui_context_own(mu_context *c, void *object, mui_destroy_fn destroy, int order) MU_MUST_USE;
void mui_context_disown(mu_context *c, void *object);

#endif
