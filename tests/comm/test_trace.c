/* Traces as they are written: spans nest whatever a program does, a full buffer or disk holds nobody up, a killed process
 * leaves its events, ranks open theirs together, and clocks. */
#define _GNU_SOURCE
#include "comm/ranks.h"

#include "base/beacon.h"
#include "base/rng.h"
#include "base/trace.h"
#include "comm/clocks.h"

#include <fcntl.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>
#include <cmocka.h>

static char folder[] = "/tmp/muster-trace-XXXXXX";

static const char *in_folder(const char *name)
{
    static _Thread_local char paths[4][128]; /* ranks are threads */
    static _Thread_local int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
    return path;
}

static json_t *load(const char *name)
{
    json_error_t e;
    json_t *j = json_load_file(in_folder(name), JSON_REJECT_DUPLICATES, &e);
    if (j == NULL) {
        print_message("%s: %s at %d\n", name, e.text, e.position);
    }
    assert_true(json_is_array(j));
    return j;
}

static const char *text_of(const json_t *e, const char *key)
{
    const char *s = json_string_value(json_object_get(e, key));
    return s != NULL ? s : "";
}

static json_t *meta(const json_t *j, const char *name)
{
    size_t i;
    json_t *e;
    json_array_foreach(j, i, e) {
        if (strcmp(text_of(e, "name"), name) == 0) {
            return json_object_get(e, "args");
        }
    }
    return NULL;
}

typedef struct span {
    const char *name, *cat;
    int64_t from, to; /* nanoseconds; exact enough in a double for years of uptime */
    int64_t tid;
    size_t place;
} span;

static int64_t nanoseconds(const json_t *e, const char *key)
{
    return (int64_t)(json_number_value(json_object_get(e, key)) * 1000 + 0.5);
}

static int outer_first(const void *a, const void *b)
{
    const span *x = a, *y = b;
    return x->tid != y->tid     ? (x->tid < y->tid ? -1 : 1)
           : x->from != y->from ? (x->from < y->from ? -1 : 1)
           : x->to != y->to     ? (x->to > y->to ? -1 : 1)
                                : (x->place > y->place ? -1 : 1); /* inner ones are written first */
}

/* Spans of each thread nest; returns them as "forward(a(a.b) c) step 1", each thread's after the other's. */
static char *nested(const json_t *j)
{
    size_t n = 0, i, used = 0, depth = 0;
    json_t *e;
    span *all = calloc(json_array_size(j) + 1, sizeof(*all)), *open[200];
    char *out = calloc(1, 1 << 20);
    json_array_foreach(j, i, e) {
        if (strcmp(text_of(e, "ph"), "X") == 0) {
            int64_t from = nanoseconds(e, "ts");
            all[n++] = (span){text_of(e, "name"), text_of(e, "cat"), from, from + nanoseconds(e, "dur"),
                              json_integer_value(json_object_get(e, "tid")), i};
        }
    }
    qsort(all, n, sizeof(*all), outer_first);
    for (i = 0; i <= n; i++) {
        while (depth > 0 && (i == n || all[i].tid != open[depth - 1]->tid || all[i].from >= open[depth - 1]->to)) {
            /* A span of no length at the end of another belongs to it. */
            if (i < n && all[i].from == open[depth - 1]->to && all[i].to == all[i].from &&
                all[i].place < open[depth - 1]->place) {
                break;
            }
            depth--;
            out[used++] = ')';
        }
        if (i < n) {
            assert_true(depth == 0 || all[i].to <= open[depth - 1]->to);
            used += (size_t)sprintf(out + used, "%s%s(", used > 0 && out[used - 1] != '(' ? " " : "", all[i].name);
            open[depth++] = &all[i];
        }
    }
    free(all);
    return out;
}

static void a_while(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

/* As a module's forward does. */
static void visit(mu_context *c, mui_stage stage, const char *path, const char *inner)
{
    mui_place before = mui_go(c, stage, path);
    a_while();
    if (inner != NULL) {
        visit(c, stage, inner, NULL);
    }
    a_while();
    mui_go(c, before.stage, before.path);
}

static void expect(const char *file, const char *want)
{
    json_t *j = load(file);
    char *got = nested(j);
    assert_string_equal(got, want);
    free(got);
    json_decref(j);
}

static mu_context *traced(const char *name, const mu_trace_options *o)
{
    mu_context *c = quiet_context();
    assert_int_equal(mu_trace_open(c, NULL, in_folder(name), o), MU_OK);
    return c;
}

static void spans_nest(void **state)
{
    (void)state;
    mu_context *c = traced("nest.json", NULL);
    mu_trace_end(c); /* nothing is open */
    mu_trace_begin(c, "all \"of\"\n it");
    visit(c, MUI_FORWARD, "", "a.b");
    visit(c, MUI_FORWARD, "a", "a.b"); /* "ab" is no part of "a", below */
    visit(c, MUI_FORWARD, "ab", NULL);
    mui_place before = mui_go(c, MUI_BACKWARD, NULL);
    mui_go(c, MUI_BACKWARD, "a.b.c");
    visit(c, MUI_FORWARD, "a.b", "a.b.d"); /* computed again */
    mui_go(c, MUI_BACKWARD, "a.b.d");
    mui_go(c, MUI_BACKWARD, "a");
    mui_go(c, before.stage, before.path);
    mu_trace_end(c);
    visit(c, MUI_SAVING, "/tmp/x.pth", NULL);
    visit(c, MUI_OPTIMISER, NULL, NULL);
    assert_int_equal(mu_context_close(c), MU_OK);
    expect("nest.0.json", "all \"of\"\n it(forward(a(a.b())) forward(a(a.b())) forward(ab()) "
                          "backward(a(a.b(a.b.c(forward again(a(a.b(a.b.d())))) a.b.d())))) save() optimizer step()");
}

/* Spans of the program's own that end at odd places. */
static void odd_spans_nest(void **state)
{
    (void)state;
    mu_context *c = traced("odd", NULL);
    mui_place before = mui_go(c, MUI_FORWARD, "");
    mu_trace_begin(c, "u");
    visit(c, MUI_FORWARD, "a", NULL);
    mu_trace_end(c);
    visit(c, MUI_FORWARD, "b", NULL);
    mu_trace_begin(c, "v"); /* still open when forward is left */
    visit(c, MUI_FORWARD, "d", NULL);
    mui_go(c, before.stage, before.path);
    mu_trace_end(c);
    mu_trace_begin(c, "w"); /* never ended */
    for (int i = 0; i < 100; i++) {
        mu_trace_begin(c, "deep");
    }
    for (int i = 0; i < 100; i++) {
        mu_trace_end(c);
    }
    visit(c, MUI_LOADER, NULL, NULL);
    assert_int_equal(mu_trace_close(c), MU_OK);
    assert_int_equal(mu_trace_close(c), MU_OK);
    mu_trace_begin(c, "later");
    mu_trace_step(c, 1);
    mu_context_close(c);
    json_t *j = load("odd.0");
    char *got = nested(j), want[2000] = "forward(u(a()) b() v(d())) w(";
    for (int i = 0; i < 63; i++) {
        strcat(want, "deep(");
    }
    for (int i = 0; i < 63; i++) {
        strcat(want, ")");
    }
    strcat(want, " wait for a batch())");
    assert_string_equal(got, want);
    free(got);
    json_decref(j);
}

static void steps(void **state)
{
    (void)state;
    mu_context *c = traced("told.json", NULL);
    mu_tape *t = mu_tape_new(c, NULL), *other = mu_tape_new(c, NULL);
    mu_tape_reset(t);
    for (int i = 3; i < 5; i++) {
        mu_trace_step(c, i);
        mu_tape_reset(t);
    }
    mu_trace_step(c, -1);
    mu_context_close(c);
    expect("told.0.json", "step 3() step 4()");
    c = traced("auto.json", NULL);
    t = mu_tape_new(c, NULL);
    other = mu_tape_new(c, NULL);
    for (int i = 0; i < 3; i++) {
        mu_tape_reset(t);
        mu_tape_reset(t); /* nothing in between: no step */
        mu_tensor *x = mu_tensor_require_grad(t, mu_tensor_zeros(t, MU_DIMS(2)));
        assert_non_null(mu_add(t, x, x));
        mu_tape_reset(other);
        assert_non_null(mu_add(other, mu_tensor_require_grad(other, mu_tensor_zeros(other, MU_DIMS(2))),
                               mu_tensor_zeros(other, MU_DIMS(2))));
    }
    mu_context_close(c);
    expect("auto.0.json", "step 1() step 2() step 3()");
}

static int64_t count(const json_t *j, const char *name)
{
    int64_t n = 0;
    size_t i;
    json_t *e;
    json_array_foreach(j, i, e) {
        n += strcmp(text_of(e, "name"), name) == 0;
    }
    return n;
}

static void *drain(void *arg)
{
    int from = *(int *)arg, to = open(in_folder("drained.json"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    char piece[4096];
    for (ssize_t n; (n = read(from, piece, sizeof(piece))) > 0;) {
        assert_int_equal(write(to, piece, (size_t)n), n);
    }
    close(to);
    return NULL;
}

/* Into a pipe that nobody reads. */
static void a_slow_disk_holds_nobody_up(void **state)
{
    (void)state;
    enum { EVENTS = 20000 };
    pthread_t reader;
    assert_int_equal(mkfifo(in_folder("pipe.0.json"), 0600), 0);
    int from = open(in_folder("pipe.0.json"), O_RDONLY | O_NONBLOCK);
    mu_context *c = traced("pipe.json", &(mu_trace_options){.buffer_events = 64});
    assert_int_equal(fcntl(from, F_SETFL, 0), 0);
    for (int i = 0; i < EVENTS; i++) { /* some 2 MB */
        mu_trace_begin(c, "e");
        mu_trace_end(c);
    }
    assert_int_equal(pthread_create(&reader, NULL, drain, &from), 0);
    assert_int_equal(mu_context_close(c), MU_OK);
    pthread_join(reader, NULL);
    close(from);
    json_t *j = load("drained.json");
    int64_t dropped = json_integer_value(json_object_get(meta(j, "muster_dropped"), "events")), came = count(j, "e");
    assert_true(dropped > 0 && came > 0);
    assert_int_equal(dropped + came, EVENTS);
    json_decref(j);
}

static void a_full_disk_is_told(void **state)
{
    (void)state;
    assert_int_equal(symlink("/dev/full", in_folder("full.0.json")), 0);
    mu_context *c = traced("full.json", NULL);
    mu_trace_begin(c, "e");
    assert_int_equal(mu_trace_close(c), MU_ERR_IO);
    assert_non_null(strstr(mu_context_message(c), "No space left on device"));
    mu_context_close(c);
}

static void a_killed_process_leaves_its_events(void **state)
{
    (void)state;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        mu_context *c = quiet_context();
        if (mu_trace_open(c, NULL, in_folder("killed.json"), &(mu_trace_options){.flush_seconds = 0.02}) != MU_OK) {
            _exit(1);
        }
        for (int i = 0; i < 3000; i++) {
            mu_trace_begin(c, "e");
            mu_trace_end(c);
        }
        usleep(500000);
        mu_trace_begin(c, "open");
        raise(SIGKILL);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    FILE *f = fopen(in_folder("killed.0.json"), "a");
    fputs("\n]\n", f); /* viewers do without it */
    fclose(f);
    json_t *j = load("killed.0.json");
    assert_int_equal(count(j, "e"), 3000);
    json_decref(j);
}

static void bad_calls(void **state)
{
    (void)state;
    assert_int_equal(mu_trace_open(NULL, NULL, "x", NULL), MU_ERR_ARG);
    assert_int_equal(mu_trace_close(NULL), MU_OK);
    mu_trace_begin(NULL, "x");
    mu_trace_end(NULL);
    mu_trace_step(NULL, 1);
    mu_context *c = quiet_context();
    const struct {
        const char *file;
        mu_trace_options o;
        mu_status want;
    } cases[] = {
        {NULL, {0}, MU_ERR_ARG},
        {"", {0}, MU_ERR_ARG},
        {in_folder(""), {0}, MU_ERR_ARG},
        {in_folder("none/x.json"), {0}, MU_ERR_IO},
        {in_folder("x.json"), {.buffer_events = -1}, MU_ERR_ARG},
        {in_folder("x.json"), {.flush_seconds = -1}, MU_ERR_ARG},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(mu_trace_open(c, NULL, cases[i].file, &cases[i].o), cases[i].want);
        mu_context_clear(c);
    }
    assert_int_equal(mu_trace_open(c, NULL, in_folder("once.json"), NULL), MU_OK);
    assert_int_equal(mu_trace_open(c, NULL, in_folder("again.json"), NULL), MU_ERR_STATE);
    mu_context_clear(c);
    assert_int_equal(mu_context_close(c), MU_OK);
}

/* -- ranks --------------------------------------------------------------------------------------------------------- */
static void together(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    const int *bad = arg;
    mu_status s = mu_trace_open(c, g, in_folder(rank == *bad ? "none/r.json" : "r.json"), NULL);
    if (*bad < 0) {
        CHECK(s == MU_OK, "%s", mu_context_message(c));
        CHECK(mu_barrier(g) == MU_OK, "%s", mu_context_message(c));
        return;
    }
    CHECK(s == MU_ERR_IO, "%d", (int)s);
    CHECK(strstr(mu_context_message(c), rank == *bad ? "No such file" : "rank 1 cannot write its own") != NULL, "%s",
          mu_context_message(c));
    mu_context_clear(c);
    CHECK(mu_barrier(g) == MU_OK, "%s", mu_context_message(c));
}

static void ranks_open_theirs_together(void **state)
{
    (void)state;
    int bad = -1;
    assert_int_equal(run_threads(3, together, &bad, NULL, true), 0);
    char run[64] = "";
    for (int r = 0; r < 3; r++) {
        char name[32];
        snprintf(name, sizeof(name), "r.%d.json", r);
        json_t *j = load(name), *m = meta(j, "muster_trace");
        assert_int_equal(json_integer_value(json_object_get(m, "rank")), r);
        assert_int_equal(json_integer_value(json_object_get(m, "ranks")), 3);
        assert_int_equal(json_integer_value(json_object_get(m, "offset_error_ns")), 0);
        assert_int_equal(json_integer_value(json_object_get(json_array_get(j, 0), "pid")), r);
        assert_true(r == 0 || strcmp(run, text_of(m, "run")) == 0);
        snprintf(run, sizeof(run), "%s", text_of(m, "run"));
        assert_int_equal(count(j, "barrier"), 1);
        json_decref(j);
    }
    bad = 1;
    assert_int_equal(run_threads(3, together, &bad, NULL, true), 0);
}

/* One rank traces, the other does not know. */
static void alone_in_it(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_status s = rank == 0 ? mu_trace_open(c, g, in_folder("alone.json"), NULL) : mu_barrier(g);
    CHECK(s == MU_ERR_COMM, "%d", (int)s);
    CHECK(strstr(mu_context_message(c), "opening a trace") != NULL, "%s", mu_context_message(c));
}

static void ranks_that_disagree_are_told(void **state)
{
    (void)state;
    assert_int_equal(run_threads(2, alone_in_it, NULL, NULL, false), 0);
}

/* -- clocks -------------------------------------------------------------------------------------------------------- */
static void bounds_hold_the_offset(void **state)
{
    (void)state;
    mui_rng r;
    mui_rng_init(&r, 7, 1);
    for (int run = 0; run < 200; run++) {
        int64_t offset = (int64_t)mui_rng_below(&r, 2000000000000) - 1000000000000, time = 1000000000, best, error;
        int64_t quickest[2] = {INT64_MAX, INT64_MAX};
        mui_clock_bounds b;
        mui_clock_unknown(&b);
        for (int k = 0; k < 20; k++) {
            /* Sent at times of their own, each way with its own delay; times of the reference's clock. */
            int64_t own = time + (int64_t)mui_rng_below(&r, 50000), theirs = time + (int64_t)mui_rng_below(&r, 50000);
            int64_t there = 1000 + (int64_t)mui_rng_below(&r, 20000), back = 1000 + (int64_t)mui_rng_below(&r, 20000);
            int64_t own_done = theirs + back > own ? theirs + back : own, their_done = own + there > theirs ? own + there : theirs;
            mui_clock_learn(&b, own - offset, own_done - offset, theirs, their_done);
            quickest[0] = their_done - own < quickest[0] ? their_done - own : quickest[0];
            quickest[1] = own_done - theirs < quickest[1] ? own_done - theirs : quickest[1];
            time += 200000;
        }
        mui_clock_best(&b, &best, &error);
        assert_true(offset >= best - error && offset <= best + error);
        assert_true(error <= (quickest[0] + quickest[1] + 1) / 2);
    }
}

static _Thread_local int64_t ahead;
static int64_t own_clock(void)
{
    return mui_trace_now() + ahead;
}

static void compare_clocks(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mui_clock_bounds b;
    int64_t best = 0, error = 0;
    ahead = rank * 5000000000;
    CHECK(mui_clock_compare(g, own_clock, &b) == MU_OK, "%s", mu_context_message(g->context));
    mui_clock_best(&b, &best, &error);
    CHECK(best - error <= -ahead && -ahead <= best + error, "rank %d: %lld +- %lld", rank, (long long)best, (long long)error);
    CHECK(error < 500000000, "%lld", (long long)error); /* of a busy machine */
}

static void ranks_find_their_offsets(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, compare_clocks, NULL, NULL, true), 0);
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) != NULL ? 0 : 1;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[200];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spans_nest),
        cmocka_unit_test(odd_spans_nest),
        cmocka_unit_test(steps),
        cmocka_unit_test(a_slow_disk_holds_nobody_up),
        cmocka_unit_test(a_full_disk_is_told),
        cmocka_unit_test(a_killed_process_leaves_its_events),
        cmocka_unit_test(bad_calls),
        cmocka_unit_test(ranks_open_theirs_together),
        cmocka_unit_test(ranks_that_disagree_are_told),
        cmocka_unit_test(bounds_hold_the_offset),
        cmocka_unit_test(ranks_find_their_offsets),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
