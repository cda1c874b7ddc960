/* mu_trace_merge: heads of traces, times moved to rank 0's clock, events passed on as they are. */
#include "base/alloc.h"
#include "io/outfile.h"
#include "io/trace_read.h"
#include "io/trace_tally.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct merge {
    mu_context *context;
    mui_tally tally;
    mui_trace_reader reader;
    mui_outfile out;
    bool writes, begun; /* begun: an event was written */
    char run[64], *run_file; /* of the traces so far; and which said so */
    int64_t *own;       /* numbers of the ranks that this file's heads named */
    size_t own_count, own_capacity;
    bool merged;        /* this file is a merged one */
} merge;

static mu_status bad(merge *m, const mui_trace_event *e, const char *what)
{
    return mui_fail(m->context, MU_ERR_FORMAT, "%s: the event at byte %llu %s", m->reader.path, (unsigned long long)e->at,
                    what);
}

static void put(merge *m, const char *text, size_t bytes)
{
    if (m->writes) {
        mui_outfile_write(&m->out, text, bytes);
    }
}

static void put_separator(merge *m)
{
    put(m, ",\n", m->begun ? 2 : 0);
    m->begun = true;
}

/* The event with ns added to its time. */
static void put_event(merge *m, const mui_trace_event *e, size_t at, size_t bytes, int64_t ns)
{
    char time[40];
    uint64_t size = ns < 0 ? 0 - (uint64_t)ns : (uint64_t)ns;
    int n = snprintf(time, sizeof(time), "%s%" PRIu64 ".%03d", ns < 0 ? "-" : "", size / 1000, (int)(size % 1000));
    put_separator(m);
    put(m, e->text, at);
    put(m, time, (size_t)n);
    put(m, e->text + at + bytes, e->bytes - at - bytes);
}

/* -- heads -------------------------------------------------------------------------------------------------------- */
static bool integer_of(const json_t *args, const char *key, int64_t least, int64_t most, int64_t *out)
{
    const json_t *v = json_object_get(args, key);
    *out = json_integer_value(v);
    return json_is_integer(v) && *out >= least && *out <= most;
}

static mu_status check_run(merge *m, const mui_trace_event *e, const json_t *args)
{
    const char *run = json_string_value(json_object_get(args, "run"));
    if (run == NULL || run[0] == '\0' || strlen(run) >= sizeof(m->run)) {
        return bad(m, e, "does not say to which run the trace belongs");
    }
    if (m->run_file == NULL) {
        snprintf(m->run, sizeof(m->run), "%s", run);
        m->run_file = mui_strdup(m->context, m->reader.path);
        return m->run_file != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    return strcmp(m->run, run) == 0 ? MU_OK
                                    : mui_fail(m->context, MU_ERR_ARG, "%s and %s are traces of different runs",
                                               m->run_file, m->reader.path);
}

/* Passes the head on, marked, so that times are not moved again when the result is merged with others. */
static mu_status put_head(merge *m, json_t *head, json_t *args)
{
    char *text = NULL;
    bool good = json_object_set_new(args, "merged", json_true()) == 0 && (text = json_dumps(head, JSON_COMPACT)) != NULL;
    if (!good) {
        return mui_fail(m->context, MU_ERR_NOMEM, "%s: out of memory while writing its head", m->reader.path);
    }
    put_separator(m);
    put(m, text, strlen(text));
    json_free_t release = NULL;
    json_get_alloc_funcs(NULL, &release);
    release(text);
    return MU_OK;
}

static mu_status read_head(merge *m, const mui_trace_event *e)
{
    json_t *args = json_object_get(e->json, "args");
    int64_t number, version, offset, error;
    const int64_t century = 4000000000000000000;
    if (!integer_of(args, "version", 1, INT32_MAX, &version) || !integer_of(args, "rank", 0, INT32_MAX, &number) ||
        !integer_of(args, "offset_ns", -century, century, &offset) ||
        !integer_of(args, "offset_error_ns", 0, century, &error)) {
        return bad(m, e, "is no head of a trace: version, rank, offset_ns or offset_error_ns is missing or odd");
    }
    if (version > 1) {
        return mui_fail(m->context, MU_ERR_UNSUPPORTED, "%s: a trace of version %lld; this Muster knows version 1",
                        m->reader.path, (long long)version);
    }
    mu_status s = check_run(m, e, args);
    mui_tally_rank *r = s == MU_OK ? mui_tally_rank_of(&m->tally, number) : NULL;
    if (r == NULL) {
        return mu_context_status(m->context);
    }
    if (r->file != NULL || r->rank.events > 0) {
        return mui_fail(m->context, MU_ERR_ARG, "%s and %s both have a trace of rank %lld",
                        r->file != NULL ? r->file : "an earlier file", m->reader.path, (long long)number);
    }
    r->file = mui_strdup(m->context, m->reader.path);
    if (r->file == NULL || !MUI_GROW(m->context, m->own, m->own_count, m->own_capacity)) {
        return MU_ERR_NOMEM;
    }
    m->own[m->own_count++] = number;
    bool merged = json_is_true(json_object_get(args, "merged"));
    m->merged = m->merged || merged;
    r->add = merged ? 0 : offset;
    r->rank.offset = (double)offset * 1e-9;
    r->rank.offset_error = (double)error * 1e-9;
    return m->writes ? put_head(m, e->json, args) : MU_OK;
}

/* -- events ------------------------------------------------------------------------------------------------------- */
static mu_status read_meta(merge *m, const mui_trace_event *e, const char *name, mui_tally_rank *r)
{
    int64_t n;
    if (strcmp(name, "muster_trace") == 0) {
        return read_head(m, e);
    }
    if (r != NULL && strcmp(name, "muster_dropped") == 0 &&
        integer_of(json_object_get(e->json, "args"), "events", 0, INT64_MAX, &n)) {
        r->rank.dropped = n;
    }
    if (r != NULL && strcmp(name, "muster_cut") == 0) {
        r->rank.whole = false;
    }
    put_separator(m);
    put(m, e->text, e->bytes);
    return MU_OK;
}

static mu_status read_event(merge *m, const mui_trace_event *e)
{
    const json_t *pid = json_object_get(e->json, "pid"), *dur = json_object_get(e->json, "dur");
    const char *phase = json_string_value(json_object_get(e->json, "ph")),
               *name = json_string_value(json_object_get(e->json, "name"));
    size_t at = 0, bytes = 0;
    int64_t time = 0, took = 0;
    if (phase == NULL || phase[0] == '\0') {
        return bad(m, e, "has no ph, which is its kind");
    }
    bool meta = strcmp(phase, "M") == 0, head = meta && name != NULL && strcmp(name, "muster_trace") == 0;
    mui_tally_rank *r = NULL;
    if (!head && json_is_integer(pid) && (r = mui_tally_rank_of(&m->tally, json_integer_value(pid))) == NULL) {
        return MU_ERR_NOMEM;
    }
    if (meta) {
        return read_meta(m, e, name != NULL ? name : "", r);
    }
    if (!mui_trace_find_time(e, &at, &bytes) || !mui_trace_parse_time(e->text + at, bytes, &time)) {
        return bad(m, e, "has no ts, or one that is no time in microseconds");
    }
    if (dur != NULL) {
        char text[64];
        int n = json_is_number(dur) ? snprintf(text, sizeof(text), "%.3f", json_number_value(dur)) : 0;
        if (n <= 0 || n >= (int)sizeof(text) || !mui_trace_parse_time(text, (size_t)n, &took) || took < 0) {
            return bad(m, e, "has a dur that is no duration in microseconds");
        }
    }
    int64_t add = r != NULL ? r->add : 0;
    if (add != 0) {
        put_event(m, e, at, bytes, time + add);
    } else {
        put_separator(m);
        put(m, e->text, e->bytes);
    }
    return mui_tally_add(&m->tally, r, e->json, time + add, took);
}

/* What a later file's pid is, it is not this one's any more; and who did not come to its end. */
static void end_file(merge *m)
{
    for (size_t i = 0; i < m->own_count && !m->reader.whole && !m->merged; i++) {
        mui_tally_rank *r = mui_tally_rank_of(&m->tally, m->own[i]);
        char text[100];
        if (r != NULL) {
            r->rank.whole = false;
            int n = snprintf(text, sizeof(text), "{\"ph\":\"M\",\"pid\":%lld,\"tid\":0,\"name\":\"muster_cut\",\"args\":{}}",
                             (long long)m->own[i]);
            put_separator(m);
            put(m, text, (size_t)n);
        }
    }
    m->own_count = 0;
    m->merged = false;
}

static mu_status read_file(merge *m, const char *path)
{
    mu_status s = mui_trace_reader_open(m->context, path, &m->reader);
    if (s != MU_OK) {
        return s;
    }
    mui_trace_event e;
    while (mui_trace_next(&m->reader, &e, &s)) {
        s = read_event(m, &e);
    }
    if (s == MU_OK) {
        end_file(m);
    }
    mui_trace_reader_close(&m->reader);
    return s;
}

static mu_status read_all(merge *m, const char *const *files, int count)
{
    static const char head[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", end[] = "\n]}\n";
    mu_status s = MU_OK;
    put(m, head, sizeof(head) - 1);
    for (int i = 0; i < count && s == MU_OK; i++) {
        s = files[i] != NULL ? read_file(m, files[i])
                             : mui_fail(m->context, MU_ERR_ARG, "mu_trace_merge: file %d has no name", i);
    }
    put(m, end, sizeof(end) - 1);
    return s;
}

/* A summary that the context frees. */
typedef struct owner {
    mu_context *context;
    mu_trace_summary *summary;
} owner;

static void free_summary(void *object)
{
    owner *o = object;
    mui_free(o->context, o->summary);
    mui_free(o->context, o);
}

/* Owned by the context. */
static const mu_trace_summary *keep(merge *m)
{
    owner *o = mui_calloc(m->context, 1, sizeof(*o));
    if (o == NULL) {
        return NULL;
    }
    *o = (owner){m->context, mui_tally_finish(&m->tally)};
    if (o->summary == NULL) {
        mui_free(m->context, o);
        return NULL;
    }
    return mui_context_own(m->context, o, free_summary, MUI_OWN_DEFAULT) == MU_OK ? o->summary : NULL;
}

const mu_trace_summary *mu_trace_merge(mu_context *c, const char *const *files, int count, const char *out)
{
    if (mui_failed(c)) {
        return NULL;
    }
    if (files == NULL || count < 1) {
        mui_fail(c, MU_ERR_ARG, "mu_trace_merge: %d files", count);
        return NULL;
    }
    merge m = {.context = c, .tally = {.context = c}, .writes = out != NULL};
    if (m.writes && mui_outfile_open(c, out, &m.out) != MU_OK) {
        return NULL;
    }
    mu_status s = read_all(&m, files, count);
    const mu_trace_summary *summary = s == MU_OK ? keep(&m) : NULL;
    if (m.writes && summary != NULL && mui_outfile_commit(&m.out) != MU_OK) {
        summary = NULL;
    } else if (m.writes && summary == NULL) {
        mui_outfile_abandon(&m.out);
    }
    mui_tally_free(&m.tally);
    mui_free(c, m.run_file);
    mui_free(c, m.own);
    return summary;
}
