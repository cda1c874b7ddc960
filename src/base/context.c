/* Opening and closing contexts, ownership, and the first-error rule. */
#include "base/context.h"
#include "base/os.h"
#include "base/alloc.h"
#include "base/profile.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *mui_environment(const char *variable)
{
    const char *s = variable != NULL ? getenv(variable) : NULL;
    return s != NULL && s[0] != '\0' ? s : NULL;
}

static int threads_from_env(void)
{
    const char *text = getenv("OMP_NUM_THREADS");
    if (text == NULL) {
        return 1;
    }
    char *end = NULL;
    long n = strtol(text, &end, 10);
    /* OMP_NUM_THREADS may be a list for nested regions ("4,2"); the first entry is the outer one. */
    return (end != text && n >= 1 && n <= INT_MAX) ? (int)n : 1;
}

/* -- bound threads ---------------------------------------------------------------------------------------------- */
static _Thread_local mui_bound *bound;

mui_bound *mui_bind(mui_bound *b)
{
    mui_bound *before = bound;
    bound = b;
    return before;
}

mui_bound *mui_bound_of(const mu_context *c)
{
    return bound != NULL && bound->context == c && c != NULL ? bound : NULL;
}

mui_here *mui_here_of(mu_context *c)
{
    mui_bound *b = mui_bound_of(c);
    return b != NULL ? &b->here : &c->here;
}

/* -- life ------------------------------------------------------------------------------------------------------- */
mu_context *mu_context_open(const mu_context_options *options)
{
    static const mu_context_options defaults;
    const mu_context_options *o = options != NULL ? options : &defaults;
    mu_context *c = calloc(1, sizeof(*c));
    if (c == NULL) {
        return NULL;
    }
    if (pthread_mutex_init(&c->lock, NULL) != 0) {
        free(c);
        return NULL;
    }
    if (pthread_mutex_init(&c->shared_lock, NULL) != 0) {
        pthread_mutex_destroy(&c->lock);
        free(c);
        return NULL;
    }
    c->seed = o->seed;
    c->threads = o->threads > 0 ? o->threads : threads_from_env();
    c->kernels = o->kernels;
    c->no_winograd = o->no_winograd;
    c->size = 1;
    c->log_level = o->log_level != MU_LOG_DEFAULT ? o->log_level : MU_LOG_WARN;
    c->log = o->log;
    c->log_user = o->log_user;
    c->fail_after = -1;
    if (o->profile) {
        c->profile = mui_profile_new(c); /* without memory for it, the context has the error, and no profile */
    }
    return c;
}

mu_status mu_context_close(mu_context *c)
{
    if (c == NULL) {
        return MU_OK;
    }
    while (c->owned_count > 0) {
        /* Newest of the highest order. Destroying one may disown others, so search anew each time. */
        size_t pick = c->owned_count - 1;
        for (size_t i = c->owned_count; i-- > 0;) {
            if (c->owned[i].order > c->owned[pick].order) {
                pick = i;
            }
        }
        mui_owned o = c->owned[pick];
        memmove(&c->owned[pick], &c->owned[pick + 1], (c->owned_count - pick - 1) * sizeof(*c->owned));
        c->owned_count--;
        o.destroy(o.object);
    }
    mui_free(c, c->profile);
    mui_free(c, c->owned);
    mu_status s = c->status;
    pthread_mutex_destroy(&c->shared_lock);
    pthread_mutex_destroy(&c->lock);
    free(c);
    return s;
}

mu_status mui_context_own(mu_context *c, void *object, mui_destroy_fn destroy, int order)
{
    pthread_mutex_lock(&c->shared_lock);
    bool room = MUI_GROW(c, c->owned, c->owned_count, c->owned_capacity);
    if (room) {
        c->owned[c->owned_count++] = (mui_owned){object, destroy, order};
    }
    pthread_mutex_unlock(&c->shared_lock);
    if (!room) {
        destroy(object);
    }
    return room ? MU_OK : MU_ERR_NOMEM;
}

void mui_context_disown(mu_context *c, void *object)
{
    pthread_mutex_lock(&c->shared_lock);
    for (size_t i = c->owned_count; i-- > 0;) {
        if (c->owned[i].object == object) {
            memmove(&c->owned[i], &c->owned[i + 1], (c->owned_count - i - 1) * sizeof(*c->owned));
            c->owned_count--;
            break;
        }
    }
    pthread_mutex_unlock(&c->shared_lock);
}

static void emit(mu_context *c, mu_log_level level, const char *message)
{
    if (level > c->log_level) {
        return;
    }
    if (c->log != NULL) {
        c->log(c->log_user, level, message);
        return;
    }
    const char *kind = level == MU_LOG_ERROR ? "error: " : level == MU_LOG_WARN ? "warning: " : "";
    if (c->size > 1) {
        fprintf(stderr, "muster[%d]: %s%s\n", c->rank, kind, message);
    } else {
        fprintf(stderr, "muster: %s%s\n", kind, message);
    }
}

mu_status mui_fail(mu_context *c, mu_status s, const char *format, ...)
{
    if (c == NULL) {
        return s;
    }
    char message[MUI_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    mui_bound *own = mui_bound_of(c);
    if (own != NULL) {
        if (own->status == MU_OK) {
            own->status = s;
            memcpy(own->message, message, sizeof(message));
        }
        return s;
    }
    pthread_mutex_lock(&c->lock);
    bool first = c->status == MU_OK;
    if (first) {
        c->status = s;
        memcpy(c->message, message, sizeof(message));
    }
    pthread_mutex_unlock(&c->lock);
    if (first) {
        emit(c, MU_LOG_ERROR, message);
    }
    return s;
}

bool mui_failed(const mu_context *c)
{
    return c == NULL || mu_context_status(c) != MU_OK;
}

void mui_log(mu_context *c, mu_log_level level, const char *format, ...)
{
    if (level > c->log_level) {
        return;
    }
    char message[MUI_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    emit(c, level, message);
}

mu_status mu_context_status(const mu_context *c)
{
    if (c == NULL) {
        return MU_ERR_NOMEM;
    }
    const mui_bound *own = mui_bound_of(c);
    if (own != NULL) {
        return own->status;
    }
    pthread_mutex_t *lock = (pthread_mutex_t *)&c->lock;
    pthread_mutex_lock(lock);
    mu_status s = c->status;
    pthread_mutex_unlock(lock);
    return s;
}

const char *mu_context_message(const mu_context *c)
{
    const mui_bound *own = mui_bound_of(c);
    return c == NULL ? "out of memory" : own != NULL ? own->message : c->message;
}

void mu_context_clear(mu_context *c)
{
    mui_bound *own = mui_bound_of(c);
    if (c == NULL || own != NULL) {
        if (own != NULL) {
            own->status = MU_OK;
            own->message[0] = '\0';
        }
        return;
    }
    pthread_mutex_lock(&c->lock);
    c->status = MU_OK;
    c->message[0] = '\0';
    pthread_mutex_unlock(&c->lock);
}

int mu_context_rank(const mu_context *c)
{
    return c != NULL ? c->rank : 0;
}

int mu_context_size(const mu_context *c)
{
    return c != NULL ? c->size : 1;
}

int mu_context_threads(const mu_context *c)
{
    return c != NULL ? c->threads : 1;
}

void mu_context_warn_soon(mu_context *c)
{
    double now = mui_now();
    if (c != NULL) {
        __atomic_store(&c->warn_soon_since, &now, __ATOMIC_RELAXED); /* pairs with mui_context_warns_soon's load */
    }
}

bool mui_context_warns_soon(const mu_context *c, double seconds)
{
    double since;
    __atomic_load(&c->warn_soon_since, &since, __ATOMIC_RELAXED);
    return since > 0 && mui_now() >= since + seconds;
}

void mu_context_counters(const mu_context *c, mu_counters *out)
{
    *out = (mu_counters){0};
    if (c != NULL) {
        *out = (mu_counters){.allocations = mui_counted(&c->allocations),
                             .allocated_bytes = mui_counted(&c->allocated_bytes),
                             .layout_conversions = mui_counted(&c->layout_conversions),
                             .weight_conversions = mui_counted(&c->weight_conversions),
                             .converted_bytes = mui_counted(&c->converted_bytes),
                             .primitives = mui_counted(&c->primitives),
                             .flops = mui_counted(&c->flops)};
    }
}

mu_status mu_complain(const mu_context *c, mu_status s)
{
    if (s < 0) {
        const char *message = mu_context_message(c);
        fprintf(stderr, "muster: %s\n", message[0] != '\0' ? message : mu_status_name(s));
    }
    return s;
}

void mu_die(const mu_context *c)
{
    mu_status s = mu_context_status(c);
    mu_complain(c, s < 0 ? s : MU_ERR_INTERNAL);
    exit(1);
}
