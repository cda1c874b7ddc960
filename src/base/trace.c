/* A trace's life, its names and its ring. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/trace_state.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *mui_trace_kind_name(mui_trace_kind k)
{
    static const char *const names[MUI_TRACE_KIND_COUNT] = {
        [MUI_TRACE_STEP] = "step",
        [MUI_TRACE_DATA] = "data_wait",
        [MUI_TRACE_FORWARD] = "forward",
        [MUI_TRACE_FORWARD_MODULE] = "forward_module",
        [MUI_TRACE_BACKWARD] = "backward",
        [MUI_TRACE_BACKWARD_MODULE] = "backward_module",
        [MUI_TRACE_BUCKET] = "bucket",
        [MUI_TRACE_ALL_REDUCE] = "all_reduce",
        [MUI_TRACE_PROGRESS] = "progress",
        [MUI_TRACE_WAIT] = "wait",
        [MUI_TRACE_HOOK] = "hook",
        [MUI_TRACE_COLLECTIVE] = "collective",
        [MUI_TRACE_OPTIMIZER] = "optimizer",
        [MUI_TRACE_CHECKPOINT] = "checkpoint",
        [MUI_TRACE_USER] = "user",
    };
    return names[k];
}

int64_t mui_trace_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* -- life --------------------------------------------------------------------------------------------------------- */
static void free_all(mui_trace *t)
{
    mu_context *c = t->context;
    for (int i = 0; i < MUI_TRACE_BUCKETS; i++) {
        while (t->names[i] != NULL) {
            mui_trace_name *n = t->names[i];
            t->names[i] = n->next;
            mui_free(NULL, n);
        }
    }
    mui_trace_free_lanes(t);
    mui_free(c, t->ring);
    mui_free(c, t->text);
    mui_free(c, t->path);
    pthread_cond_destroy(&t->news);
    pthread_mutex_destroy(&t->lock);
    mui_free(c, t);
}

static bool init_locks(mui_trace *t)
{
    pthread_condattr_t a;
    if (pthread_mutex_init(&t->lock, NULL) != 0) {
        return false;
    }
    bool good = pthread_condattr_init(&a) == 0;
    if (good) {
        good = pthread_condattr_setclock(&a, CLOCK_MONOTONIC) == 0 && pthread_cond_init(&t->news, &a) == 0;
        pthread_condattr_destroy(&a);
    }
    if (!good) {
        pthread_mutex_destroy(&t->lock);
    }
    return good;
}

mui_trace *mui_trace_new(mu_context *c, const char *path, int events, double flush_seconds, int *failed)
{
    *failed = ENOMEM;
    mui_trace *t = mui_calloc(c, 1, sizeof(*t));
    if (t == NULL || !init_locks(t)) {
        mui_free(c, t);
        return NULL;
    }
    t->context = c;
    t->flush_seconds = flush_seconds;
    t->capacity = (uint64_t)events;
    t->fd = -1;
    t->path = mui_strdup(c, path);
    t->ring = mui_calloc(c, (size_t)events, sizeof(*t->ring));
    t->lanes[0] = mui_calloc(c, 1, sizeof(*t->lanes[0]));
    if (t->path != NULL && t->ring != NULL && t->lanes[0] != NULL && mui_trace_write_begin(t)) {
        t->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        *failed = errno;
    }
    if (t->fd < 0) {
        free_all(t);
        return NULL;
    }
    return t;
}

mu_status mui_trace_finish(mui_trace *t)
{
    mu_context *c = t->context;
    int error = 0;
    if (t->started) {
        c->trace = NULL;
        mui_trace_close_lanes(t);
        if (t->step_open) {
            mui_trace_record r = {.began = t->step_began, .took = mui_trace_now() - t->step_began, .number = t->step,
                                  .kind = MUI_TRACE_STEP, .index = -1};
            mui_trace_put(t, &r);
        }
        mui_trace_write_end(t);
        error = t->write_error;
    }
    if (close(t->fd) != 0 && error == 0) {
        error = errno;
    }
    if (t->dropped > 0) {
        mui_log(c, MU_LOG_WARN, "trace %s: %llu events were dropped, the buffer being full", t->path,
                (unsigned long long)t->dropped);
    }
    mu_status s = error == 0 ? MU_OK
                             : mui_fail(c, MU_ERR_IO, "trace %s: not all of it was written: %s", t->path,
                                        mui_errno_text(error));
    free_all(t);
    return s;
}

/* -- names -------------------------------------------------------------------------------------------------------- */
/* As JSON, cut at a letter where it is too long. */
static mui_trace_name *make_name(const char *text, size_t length, uint64_t hash)
{
    char *copy = mui_strndup(NULL, text, length);
    mui_text json;
    mui_text_init(&json, NULL);
    while (copy != NULL) {
        mui_text_clear(&json);
        mui_text_add_json(&json, copy);
        size_t n = strlen(copy);
        if (json.length <= MUI_TRACE_NAME || n == 0) {
            break;
        }
        do {
            n--;
        } while (n > MUI_TRACE_NAME / 6 && ((unsigned char)copy[n] & 0xc0) == 0x80);
        copy[n] = '\0';
    }
    mui_trace_name *name = copy != NULL && !json.failed ? mui_alloc(NULL, sizeof(*name) + json.length + length + 2) : NULL;
    if (name != NULL) {
        *name = (mui_trace_name){.hash = hash, .length = length};
        memcpy(name->json, json.data, json.length + 1);
        name->plain = name->json + json.length + 1;
        memcpy(name->plain, text, length);
        name->plain[length] = '\0';
    }
    mui_text_free(&json);
    mui_free(NULL, copy);
    return name;
}

/* Names stay until the end, so that a step, whose names were all there before, takes no memory. A trace that lacks some
 * for want of memory is no error of the training. */
const mui_trace_name *mui_trace_name_of(mui_trace *t, const char *text, size_t length)
{
    uint64_t hash = MUI_HASH_START;
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001b3u;
    }
    mui_trace_name **list = &t->names[(hash ^ hash >> 32) % MUI_TRACE_BUCKETS];
    pthread_mutex_lock(&t->lock);
    mui_trace_name *n = *list;
    while (n != NULL && (n->hash != hash || n->length != length || memcmp(n->plain, text, length) != 0)) {
        n = n->next;
    }
    if (n == NULL && (n = make_name(text, length, hash)) != NULL) {
        n->next = *list;
        *list = n;
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

/* -- the ring ------------------------------------------------------------------------------------------------------- */
void mui_trace_put(mui_trace *t, const mui_trace_record *r)
{
    pthread_mutex_lock(&t->lock);
    bool nudge = false;
    if (t->head - t->tail < t->capacity) {
        t->ring[t->head++ % t->capacity] = *r;
        nudge = !t->nudged && t->head - t->tail >= t->capacity / 2;
        t->nudged = t->nudged || nudge;
    } else {
        t->dropped++;
    }
    pthread_mutex_unlock(&t->lock);
    if (nudge) {
        pthread_cond_signal(&t->news);
    }
}

void mui_trace_span(mu_context *c, mui_trace_kind kind, const char *name, int64_t began, int64_t bytes)
{
    mui_trace *t = c->trace;
    mui_trace_record r = {.name = mui_trace_name_of(t, name, strlen(name)), .began = began,
                          .took = mui_trace_now() - began, .bytes = bytes, .kind = (uint8_t)kind, .index = -1};
    int lane = mui_trace_lane_of(c);
    if (r.name != NULL && lane >= 0) {
        r.lane = (uint16_t)lane;
        mui_trace_put(t, &r);
    }
}

static int64_t nanoseconds(double seconds)
{
    return (int64_t)(seconds * 1e9 + 0.5);
}

void mui_trace_add_bucket(mu_context *c, const mui_trace_bucket *b)
{
    mui_trace *t = c->trace;
    mui_trace_record r = {.name = mui_trace_name_of(t, b->who, strlen(b->who)),
                          .began = nanoseconds(b->ready),
                          .bytes = b->bytes,
                          .number = (int64_t)b->reduction,
                          .kind = MUI_TRACE_BUCKET,
                          .index = (int32_t)b->index};
    r.took = nanoseconds(b->reduced) - r.began;
    r.launched = nanoseconds(b->launched) - r.began;
    if (r.name != NULL) {
        mui_trace_put(t, &r);
    }
}

/* -- steps -------------------------------------------------------------------------------------------------------- */
static void change_step(mui_trace *t, int64_t step, bool open)
{
    int64_t now = mui_trace_now();
    if (t->step_open) {
        mui_trace_record r = {.began = t->step_began, .took = now - t->step_began, .number = t->step,
                              .kind = MUI_TRACE_STEP, .index = -1};
        mui_trace_put(t, &r);
    }
    t->step_open = open;
    t->step = step;
    t->step_began = now;
}

void mui_trace_step_to(mu_context *c, int64_t step)
{
    mui_trace *t = c->trace;
    if (!t->step_told) {
        t->step_told = true;
        t->step_open = false; /* the first reset came before */
    }
    change_step(t, step, step >= 0);
}

void mui_trace_tape(mu_context *c, const void *tape, bool worked)
{
    mui_trace *t = c->trace;
    if (t->step_told || (t->tape != NULL && t->tape != tape)) {
        return;
    }
    t->tape = tape;
    if (t->step_open && !worked) {
        t->step_began = mui_trace_now(); /* nothing has happened yet */
        return;
    }
    change_step(t, t->step + 1, true);
}

/* Its last reset began a step that nobody takes. */
void mui_trace_tape_gone(mu_context *c, const void *tape)
{
    mui_trace *t = c->trace;
    if (!t->step_told && t->tape == tape) {
        t->step_open = false;
        t->tape = NULL;
    }
}
