/* Reads the events of a trace one by one: an array of them, or an object with it as "traceEvents". Events are found by
 * matching brackets and quotes, and each is then judged by jansson on its own, so that memory is bounded by the largest
 * event and not by the file. Not for: what events mean. */
#ifndef MUI_TRACE_READ_H
#define MUI_TRACE_READ_H

#include "base/context.h"

#include <jansson.h>

/* The longest event. */
#define MUI_TRACE_MAX_EVENT ((size_t)1 << 20)

typedef struct mui_trace_reader {
    mu_context *context;
    const char *path;
    int fd;
    char *buffer;
    size_t from, to;  /* of what is in it */
    uint64_t at;      /* of `from` in the file */
    bool ended;       /* nothing more will come */
    bool object;      /* the array is in an object */
    bool within;      /* the array has begun */
    bool any;         /* and had an event */
    bool whole;       /* its end was there */
    size_t taken;     /* bytes of the event that was given last */
    json_t *event;
} mui_trace_reader;

typedef struct mui_trace_event {
    const char *text; /* as in the file; valid, as json is, until the next one */
    size_t bytes;
    json_t *json;     /* an object */
    uint64_t at;      /* in the file, for messages */
} mui_trace_event;

mu_status mui_trace_reader_open(mu_context *c, const char *path, mui_trace_reader *r) MU_MUST_USE;
/* False after the last event, or with an error in *s. A file that ends too early ends there; whole tells. */
bool mui_trace_next(mui_trace_reader *r, mui_trace_event *e, mu_status *s);
void mui_trace_reader_close(mui_trace_reader *r);

/* Where the number of the event's own "ts" stands in its text; false if there is none that can be found as it is. */
bool mui_trace_find_time(const mui_trace_event *e, size_t *at, size_t *bytes);
/* Microseconds as text to nanoseconds; false unless it is a number of a size that times have. */
bool mui_trace_parse_time(const char *text, size_t bytes, int64_t *ns);

#endif
