/* `muster bench allreduce`: the mean over the ranks, in place, beside what the memory would allow. */
#include "bench.h"
#include "bench_kernels.h"
#include "commands.h"
#include "flags.h"
#include "progress.h"
#include "relaunch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_SIZES 32
#define SAMPLE_SECONDS 200e-6 /* calls that are shorter are timed several at once: the clock takes time too */

typedef struct allreduce_options {
    const char *sizes, *memory;
    int64_t ranks, iterations;
    bool json;
    int64_t bytes[MOST_SIZES];
    int count;
} allreduce_options;

#define AT(field) offsetof(allreduce_options, field)

static const flag allreduce_flags[] = {
    {"ranks", FLAG_INT, AT(ranks), "N", "ranks on this machine (2, or those of the launcher)", 1, 64, FLAG_FREE},
    {"sizes", FLAG_TEXT, AT(sizes), "A,B,...", "bytes; K, M and G are 1024 of the next smaller (4K,1M,25M,100M)", 0, 0,
     FLAG_FREE},
    {"iterations", FLAG_INT, AT(iterations), "N", "samples of each size (50)", 1, 100000, FLAG_FREE},
    {"memory", FLAG_CHOICE, AT(memory), "group|own",
     "that all ranks reach, as gradients are, or the process' own (group)", 0, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write one JSON object", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};

static const char command[] = "bench allreduce";

typedef struct size_result {
    int64_t bytes;
    spread us, limit_us;
} size_result;

static int parse_sizes(allreduce_options *o)
{
    static const char units[] = "KMG";
    for (const char *p = o->sizes; *p != '\0';) {
        char *end = NULL;
        long long n = strtoll(p, &end, 10);
        const char *unit = *end != '\0' ? strchr(units, *end) : NULL;
        int64_t bytes = n > 0 && n <= (1ll << 34) ? (int64_t)n << (unit != NULL ? 10 * (unit - units + 1) : 0) : 0;
        end += unit != NULL;
        if (bytes <= 0 || bytes > ((int64_t)1 << 34) || bytes % 4 != 0 || (*end != ',' && *end != '\0') ||
            o->count == MOST_SIZES) {
            return cli_usage_error(command, "--sizes needs up to %d sizes of 4 bytes to 16G, divisible by 4, not '%s'",
                                   MOST_SIZES, o->sizes);
        }
        o->bytes[o->count++] = bytes;
        p = end + (*end == ',');
    }
    return -1;
}

/* Calls of one kind: the reduction, or the loop over memory that stands for its limit. */
typedef struct task {
    bench *b;
    float *data;           /* reduced, NULL: the limit's */
    int64_t elements;
    float *const *arrays;  /* one for each rank, of this rank's slice */
    int64_t slice;
} task;

static bool do_once(const task *t)
{
    if (t->data != NULL) {
        return mu_all_reduce(t->b->world, t->data, t->elements, MU_F32, MU_MEAN) >= 0;
    }
    bench_mean(t->arrays, t->b->size, t->slice);
    return true;
}

static bool sample(const task *t, int64_t calls, double *seconds)
{
    double begun = seconds_now();
    for (int64_t i = 0; i < calls; i++) {
        if (!do_once(t)) {
            return false;
        }
    }
    *seconds = (seconds_now() - begun) / (double)calls;
    return true;
}

/* How many calls make a sample, the same on all ranks. */
static bool calibrate(const task *t, int64_t *calls)
{
    double seconds = 0;
    if (!sample(t, 3, &seconds) || !sample(t, 5, &seconds) ||
        mu_all_reduce(t->b->world, &seconds, 1, MU_F64, MU_MAX) < 0) {
        return false;
    }
    *calls = seconds > 0 && seconds < SAMPLE_SECONDS ? (int64_t)ceil(SAMPLE_SECONDS / seconds) : 1;
    return true;
}

/* Of each sample, the time of the slowest rank: microseconds. */
static bool spread_over_ranks(bench *b, double *seconds, int64_t n, spread *out)
{
    if (mu_all_reduce(b->world, seconds, n, MU_F64, MU_MAX) < 0) {
        return false;
    }
    for (int64_t i = 0; i < n; i++) {
        seconds[i] *= 1e6;
    }
    *out = spread_of(seconds, n);
    return true;
}

/* The two take turns, so that what else the machine does is in both. */
static bool take_turns(const task *reduce, const task *limit, int64_t n, double *seconds, size_result *out)
{
    int64_t calls[2];
    double *limits = seconds + n;
    bench *b = reduce->b;
    if (!calibrate(reduce, &calls[0]) || !calibrate(limit, &calls[1])) {
        return false;
    }
    for (int64_t i = 0; i < n; i++) {
        if (mu_barrier(b->world) < 0 || !sample(reduce, calls[0], &seconds[i]) || mu_barrier(b->world) < 0 ||
            !sample(limit, calls[1], &limits[i])) {
            return false;
        }
    }
    return spread_over_ranks(b, seconds, n, &out->us) && spread_over_ranks(b, limits, n, &out->limit_us);
}

/* Ranks begin with rank + 1 everywhere, and the mean of equal numbers stays what it is. False after a message. */
static bool is_mean(bench *b, const float *data, int64_t elements)
{
    float expected = 0.5f * (float)(b->size + 1);
    for (int64_t i = 0; i < elements; i++) {
        if (fabsf(data[i] - expected) > 1e-5f * expected) {
            cli_fail(command, 0, "rank %d: element %" PRId64 " of the mean is %g, not %g", b->rank, i, (double)data[i],
                     (double)expected);
            return false;
        }
    }
    return true;
}

typedef struct room {
    float *data, **arrays;
    double *seconds;
    bool own;
} room;

static void leave(bench *b, room *m)
{
    for (int i = 0; m->arrays != NULL && i < b->size; i++) {
        free(m->arrays[i]);
    }
    free(m->arrays);
    free(m->seconds);
    if (m->own) {
        free(m->data);
    } else if (m->data != NULL) {
        mu_group_free(b->world, m->data);
    }
}

static bool measure_size(bench *b, const allreduce_options *o, int64_t bytes, size_result *out, bool *wrong)
{
    int64_t elements = bytes / (int64_t)sizeof(float), slice = (elements + b->size - 1) / b->size;
    room m = {.own = strcmp(o->memory, "own") == 0};
    m.data = m.own ? bench_memory((size_t)bytes) : mu_group_alloc(b->world, (size_t)bytes);
    m.arrays = calloc((size_t)b->size, sizeof(*m.arrays));
    m.seconds = calloc(2 * (size_t)o->iterations, sizeof(double));
    bool ok = m.data != NULL && m.arrays != NULL && m.seconds != NULL;
    for (int i = 0; ok && i < b->size; i++) {
        m.arrays[i] = bench_memory((size_t)slice * sizeof(float));
        ok = m.arrays[i] != NULL;
    }
    for (int64_t i = 0; ok && i < elements; i++) {
        m.data[i] = (float)(b->rank + 1);
    }
    out->bytes = bytes;
    ok = ok && take_turns(&(task){.b = b, .data = m.data, .elements = elements},
                          &(task){.b = b, .arrays = m.arrays, .slice = slice}, o->iterations, m.seconds, out);
    if (ok && !is_mean(b, m.data, elements)) {
        *wrong = true;
        ok = false;
    }
    leave(b, &m);
    return ok;
}

static double gb_s(int64_t bytes, double us)
{
    return 1e-3 * (double)bytes / us;
}

static void print_json(const bench *b, const allreduce_options *o, const size_result *s)
{
    json j = {0};
    json_open(&j, NULL, '{');
    json_int(&j, "ranks", b->size);
    json_text(&j, "group", mu_group_kind(b->world));
    json_text(&j, "memory", o->memory);
    json_int(&j, "iterations", o->iterations);
    json_open(&j, "rows", '[');
    for (int i = 0; i < o->count; i++) {
        double rate = gb_s(s[i].bytes, s[i].us.median), limit = gb_s(s[i].bytes, s[i].limit_us.median);
        json_open(&j, NULL, '{');
        json_int(&j, "bytes", s[i].bytes);
        json_spread(&j, "us", s[i].us);
        json_spread(&j, "limit_us", s[i].limit_us);
        json_number(&j, "algbw_gb_s", rate);
        json_number(&j, "limit_gb_s", limit);
        json_number(&j, "share_of_limit", rate / limit);
        json_close(&j);
    }
    json_close(&j);
    json_close(&j);
}

static void print_text(const bench *b, const allreduce_options *o, const size_result *s)
{
    printf("mean over %d ranks (%s), float32, in place, in %s memory: medians\n", b->size, mu_group_kind(b->world),
           strcmp(o->memory, "own") == 0 ? "the process' own" : "the group's");
    printf("%12s %12s %10s %10s %10s %9s %9s\n", "bytes", "us", "fastest", "90 %", "GB/s", "limit", "share");
    for (int i = 0; i < o->count; i++) {
        double rate = gb_s(s[i].bytes, s[i].us.median), limit = gb_s(s[i].bytes, s[i].limit_us.median);
        printf("%12" PRId64 " %12.1f %10.1f %10.1f %10.2f %9.2f %7.0f %%\n", s[i].bytes, s[i].us.median, s[i].us.min,
               s[i].us.p90, rate, limit, 100 * rate / limit);
    }
}

static int run(bench *b, const allreduce_options *o)
{
    size_result results[MOST_SIZES];
    bool ok = true, wrong = false;
    for (int i = 0; ok && i < o->count; i++) {
        ok = measure_size(b, o, o->bytes[i], &results[i], &wrong);
    }
    if (ok && b->rank == 0) {
        if (o->json) {
            print_json(b, o, results);
        } else {
            print_text(b, o, results);
        }
    }
    if (wrong) {
        mu_group_abort(b->world, "the mean was wrong");
        return bench_close(b, CLI_FAILED, false);
    }
    return ok ? bench_close(b, CLI_OK, false) : bench_fail(b, false);
}

int bench_allreduce(int argc, char **argv, bench_words whole)
{
    allreduce_options o = {.sizes = "4K,1M,25M,100M", .memory = "group", .iterations = 50};
    int code = flags_parse(command,
                           "Measures the mean over the ranks of float32 arrays, in place. The limit is what all ranks at once\n"
                           "take to read their slice of as many arrays as there are ranks, and to write the mean into all.",
                           allreduce_flags, &o, argc, argv);
    if (code < 0) {
        code = parse_sizes(&o);
    }
    if (code >= 0) {
        return code;
    }
    if (!in_launcher()) {
        o.ranks = o.ranks == 0 ? 2 : o.ranks;
        if (o.ranks > 1) {
            return relaunch((int)o.ranks, 0, whole.argc, whole.argv);
        }
    }
    bench b;
    code = bench_open(&b, command, NULL, o.ranks, false);
    return code >= 0 ? code : run(&b, &o);
}
