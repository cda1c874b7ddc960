/* The thread that turns records into JSON and writes it: an array of events, a line each. It writes whole events, once a
 * second or when the ring is half full, so that the file of a process that was killed can be read up to there. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/os.h"
#include "base/trace_state.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The longest event has two names. */
enum { TEXT_BYTES = 1 << 16, EVENT_BYTES = 3 * MUI_TRACE_NAME };

static void write_out(mui_trace *t)
{
    size_t done = 0;
    while (done < t->used && t->write_error == 0) {
        ssize_t n = write(t->fd, t->text + done, t->used - done);
        if (n < 0 && errno != EINTR) {
            t->write_error = errno;
            mui_log(t->context, MU_LOG_WARN, "trace %s: %s: it ends here", t->path, mui_errno_text(errno));
        }
        done += n > 0 ? (size_t)n : 0;
    }
    t->used = 0;
}

/* -- text, without the cost of printf ------------------------------------------------------------------------------- */
static void add(mui_trace *t, const char *s, size_t n)
{
    memcpy(t->text + t->used, s, n);
    t->used += n;
}

#define ADD(t, literal) add((t), "" literal, sizeof(literal) - 1)

static void add_string(mui_trace *t, const char *s)
{
    add(t, s, strlen(s));
}

static void add_number(mui_trace *t, int64_t n)
{
    char digits[24];
    size_t at = sizeof(digits);
    uint64_t u = n < 0 ? 0 - (uint64_t)n : (uint64_t)n;
    do {
        digits[--at] = (char)('0' + u % 10);
        u /= 10;
    } while (u > 0);
    if (n < 0) {
        digits[--at] = '-';
    }
    add(t, digits + at, sizeof(digits) - at);
}

/* Nanoseconds as microseconds with three places. */
static void add_time(mui_trace *t, int64_t ns)
{
    ns = ns > 0 ? ns : 0;
    add_number(t, ns / 1000);
    char places[4] = {'.', (char)('0' + ns / 100 % 10), (char)('0' + ns / 10 % 10), (char)('0' + ns % 10)};
    add(t, places, sizeof(places));
}

static void begin_event(mui_trace *t, const char *category, char phase, int64_t at)
{
    if (t->used + EVENT_BYTES > TEXT_BYTES) {
        write_out(t);
    }
    ADD(t, ",\n{\"ph\":\"");
    add(t, &phase, 1);
    ADD(t, "\",\"pid\":");
    add_number(t, t->rank);
    ADD(t, ",\"ts\":");
    add_time(t, at);
    ADD(t, ",\"cat\":\"");
    add_string(t, category);
    ADD(t, "\",\"tid\":");
}

static void add_slice(mui_trace *t, const mui_trace_record *r)
{
    begin_event(t, mui_trace_kind_name((mui_trace_kind)r->kind), 'X', r->began);
    add_number(t, r->kind == MUI_TRACE_STEP ? MUI_TRACE_STEPS : r->lane);
    ADD(t, ",\"dur\":");
    add_time(t, r->took);
    ADD(t, ",\"name\":");
    if (r->kind == MUI_TRACE_STEP) {
        ADD(t, "\"step ");
        add_number(t, r->number);
        ADD(t, "\",\"args\":{\"step\":");
        add_number(t, r->number);
        ADD(t, "}");
    } else {
        add_string(t, r->name->json);
    }
    if (r->path != NULL) {
        ADD(t, ",\"args\":{\"file\":");
        add_string(t, r->path->json);
        ADD(t, "}");
    } else if (r->bytes > 0) {
        ADD(t, ",\"args\":{\"bytes\":");
        add_number(t, r->bytes);
        ADD(t, "}");
    }
    ADD(t, "}");
}

/* One of the four events of a bucket: it begins and ends, and so does its all-reduce within. */
static void add_async(mui_trace *t, const mui_trace_record *r, bool reduce, bool end)
{
    int64_t at = end ? r->began + r->took : reduce ? r->began + r->launched : r->began;
    begin_event(t, mui_trace_kind_name(reduce ? MUI_TRACE_ALL_REDUCE : MUI_TRACE_BUCKET), end ? 'e' : 'b', at);
    ADD(t, "0,\"id\":\"");
    add_number(t, t->rank);
    ADD(t, ".");
    add_number(t, (int64_t)t->identities);
    ADD(t, "\",\"name\":\"");
    add_string(t, reduce ? "all-reduce " : "bucket ");
    add_number(t, r->index);
    ADD(t, "\"");
    if (!end) {
        ADD(t, ",\"args\":{\"ddp\":");
        add_string(t, r->name->json);
        ADD(t, ",\"reduction\":");
        add_number(t, r->number);
        ADD(t, ",\"bucket\":");
        add_number(t, r->index);
        ADD(t, ",\"bytes\":");
        add_number(t, r->bytes);
        ADD(t, "}");
    }
    ADD(t, "}");
}

static void add_record(mui_trace *t, const mui_trace_record *r)
{
    if (r->index < 0) {
        add_slice(t, r);
        return;
    }
    t->identities++;
    add_async(t, r, false, false);
    add_async(t, r, true, false);
    add_async(t, r, true, true);
    add_async(t, r, false, true);
}

/* -- head and end ----------------------------------------------------------------------------------------------- */
static void add_meta(mui_trace *t, const char *name, int64_t thread, const char *format, ...) MU_PRINTF(4, 5);
static void add_meta(mui_trace *t, const char *name, int64_t thread, const char *format, ...)
{
    char args[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(args, sizeof(args), format, list);
    va_end(list);
    if (t->used + EVENT_BYTES > TEXT_BYTES) {
        write_out(t);
    }
    bool first = t->used == 1 && t->text[0] == '[';
    t->used += (size_t)snprintf(t->text + t->used, TEXT_BYTES - t->used,
                                "%s\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%" PRId64 ",\"name\":\"%s\",\"args\":{%s}}",
                                first ? "" : ",", t->rank, thread, name, args);
}

/* Of names that a system gives to hosts, what needs no escaping. */
static void plain_host(char out[256])
{
    if (gethostname(out, 256) != 0) {
        out[0] = '\0';
    }
    out[255] = '\0';
    for (char *s = out; *s != '\0'; s++) {
        *s = *s > 0x20 && *s < 0x7f && *s != '"' && *s != '\\' ? *s : '?';
    }
}

void mui_trace_write_head(mui_trace *t, const mui_trace_head *head)
{
    char host[256];
    struct timespec wall;
    plain_host(host);
    clock_gettime(CLOCK_REALTIME, &wall);
    t->rank = head->rank;
    ADD(t, "[");
    add_meta(t, "muster_trace", 0,
             "\"version\":1,\"muster\":\"%s\",\"rank\":%d,\"ranks\":%d,\"group\":\"%s\",\"run\":\"%016" PRIx64
             "\",\"host\":\"%s\",\"process\":%lld,\"clock\":\"CLOCK_MONOTONIC %016" PRIx64 "\",\"offset_ns\":%" PRId64
             ",\"offset_error_ns\":%" PRId64 ",\"unix_ns\":%lld%09ld,\"now_ns\":%" PRId64,
             mu_version(), head->rank, head->size, head->group, head->run, host, (long long)getpid(), head->clock,
             head->offset, head->error, (long long)wall.tv_sec, wall.tv_nsec, mui_trace_now());
    add_meta(t, "process_name", 0, "\"name\":\"rank %d\"", head->rank);
    add_meta(t, "process_labels", 0, "\"labels\":\"%s\"", host);
    add_meta(t, "process_sort_index", 0, "\"sort_index\":%d", head->rank);
    add_meta(t, "thread_name", 0, "\"name\":\"training\"");
    add_meta(t, "thread_sort_index", 0, "\"sort_index\":1");
    add_meta(t, "thread_name", MUI_TRACE_STEPS, "\"name\":\"steps\"");
    add_meta(t, "thread_sort_index", MUI_TRACE_STEPS, "\"sort_index\":0");
    write_out(t);
}

/* -- the thread ------------------------------------------------------------------------------------------------- */
static struct timespec later(double seconds)
{
    int64_t at = mui_trace_now() + (int64_t)(seconds * 1e9);
    return (struct timespec){.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
}

static void *run(void *user)
{
    mui_trace *t = user;
    for (bool stop = false; !stop;) {
        struct timespec until = later(t->flush_seconds);
        pthread_mutex_lock(&t->lock);
        while (!t->stop && !t->nudged && pthread_cond_timedwait(&t->news, &t->lock, &until) == 0) {
        }
        stop = t->stop;
        uint64_t from = t->tail, to = t->head;
        pthread_mutex_unlock(&t->lock);
        for (uint64_t i = from; i < to; i++) {
            add_record(t, &t->ring[i % t->capacity]); /* nobody writes there before tail has passed it */
        }
        write_out(t);
        pthread_mutex_lock(&t->lock);
        t->tail = to;
        t->nudged = t->head - t->tail >= t->capacity / 2;
        pthread_mutex_unlock(&t->lock);
    }
    return NULL;
}

bool mui_trace_write_begin(mui_trace *t)
{
    t->text = mui_alloc(t->context, TEXT_BYTES);
    return t->text != NULL;
}

mu_status mui_trace_start(mui_trace *t, const mui_trace_head *head)
{
    mu_context *c = t->context;
    sigset_t all, before;
    mui_trace_write_head(t, head);
    /* Signals are the program's threads' business. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int e = pthread_create(&t->writer, NULL, run, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (e != 0) {
        return mui_fail(c, MU_ERR_NOMEM, "trace %s: cannot start a thread: %s", t->path, mui_errno_text(e));
    }
    t->started = true;
    c->trace = t;
    return MU_OK;
}

void mui_trace_write_end(mui_trace *t)
{
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_mutex_unlock(&t->lock);
    pthread_cond_signal(&t->news);
    pthread_join(t->writer, NULL);
    if (t->dropped > 0) {
        add_meta(t, "muster_dropped", 0, "\"events\":%" PRIu64, t->dropped);
    }
    ADD(t, "\n]\n");
    write_out(t);
}
