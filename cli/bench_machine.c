/* `muster bench machine`: what the cores and the memory can do, alone and all at once, as the measure of everything else. */
#define _GNU_SOURCE
#include "bench.h"
#include "bench_kernels.h"
#include "commands.h"
#include "flags.h"
#include "progress.h"
#include "relaunch.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct machine_options {
    int64_t ranks, megabytes;
    double seconds;
    bool json;
} machine_options;

#define AT(field) offsetof(machine_options, field)

static const flag machine_flags[] = {
    {"ranks", FLAG_INT, AT(ranks), "N", "processes that work at once (one for each core)", 1, 4096, FLAG_FREE},
    {"megabytes", FLAG_INT, AT(megabytes), "N", "size of each array, in MiB (128)", 1, 1 << 20, FLAG_FREE},
    /* At most: shorter than the others wait for rank 0 before they say so. */
    {"seconds", FLAG_FLOAT, AT(seconds), "X", "of each measurement (0.5)", 0.001, 5, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write one JSON object", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};

static const char command[] = "bench machine";

typedef struct memory {
    float *array[2];
    size_t bytes;
} memory;

/* One round of work; returns how much of it was done. */
typedef double (*work_fn)(const memory *m, int parameter);

static double do_fma(const memory *m, int bits)
{
    (void)m;
    return bench_fma(bits, 100000);
}

static double do_read(const memory *m, int unused)
{
    (void)unused;
    return bench_read(m->array[0], m->bytes);
}

static double do_write(const memory *m, int unused)
{
    (void)unused;
    return bench_write(m->array[0], m->bytes);
}

static double do_copy(const memory *m, int unused)
{
    (void)unused;
    return bench_copy(m->array[1], m->array[0], m->bytes);
}

static double do_mean(const memory *m, int unused)
{
    (void)unused;
    return bench_mean(m->array, 2, (int64_t)(m->bytes / sizeof(float)));
}

static const struct row {
    const char *name, *text;
    work_fn work;
    int parameter;
    bool is_fma;
} rows[] = {
    {"fma_512", "512 bits", do_fma, 512, true},
    {"fma_256", "256 bits", do_fma, 256, true},
    {"fma_128", "128 bits", do_fma, 128, true},
    {"read", "read", do_read, 0, false},
    {"write", "write", do_write, 0, false},
    {"copy", "copy", do_copy, 0, false},
    {"mean", "mean of 2", do_mean, 0, false},
};

#define ROWS ((int)(sizeof(rows) / sizeof(rows[0])))

/* Work per second, the median of five parts of the time: the others may have something else in between. Units of 1e9. */
static double rate(const struct row *row, const memory *m, double seconds)
{
    double parts[5];
    if (row->work(m, row->parameter) <= 0) { /* a round for the caches and clocks */
        return 0;
    }
    for (int i = 0; i < 5; i++) {
        double begun = seconds_now(), now = begun, done = 0;
        while (done <= 0 || now - begun < seconds / 5) {
            done += row->work(m, row->parameter);
            now = seconds_now();
        }
        parts[i] = 1e-9 * done / (now - begun);
    }
    return spread_of(parts, 5).median;
}

typedef struct rates {
    double one[ROWS], all[ROWS]; /* of rank 0 alone, and of all ranks at once */
} rates;

static bool measure(bench *b, const machine_options *o, const memory *m, rates *out)
{
    for (int i = 0; i < ROWS; i++) {
        /* Rank 0 works while the others sleep in the barrier, then all begin together. */
        out->one[i] = b->rank == 0 ? rate(&rows[i], m, o->seconds) : 0;
        if (mu_barrier(b->world) < 0) {
            return false;
        }
        out->all[i] = b->size > 1 ? rate(&rows[i], m, o->seconds) : out->one[i];
    }
    return mu_all_reduce(b->world, out->all, ROWS, MU_F64, MU_SUM) >= 0;
}

/* The best of the widths. */
static int best_fma(const rates *r)
{
    int best = 0;
    for (int i = 1; i < ROWS; i++) {
        best = rows[i].is_fma && r->one[i] > r->one[best] ? i : best;
    }
    return best;
}

static void print_json(const bench *b, const machine_options *o, const rates *r)
{
    int fma = best_fma(r);
    json j = {0};
    json_open(&j, NULL, '{');
    json_int(&j, "ranks", b->size);
    json_int(&j, "array_bytes", o->megabytes << 20);
    json_number(&j, "fma_gflops", r->one[fma]);
    json_number(&j, "fma_gflops_all", r->all[fma]);
    json_int(&j, "fma_bits", rows[fma].parameter);
    for (int i = 0; i < ROWS; i++) {
        if (rows[i].is_fma) {
            continue;
        }
        char name[32];
        snprintf(name, sizeof(name), "%s_gb_s", rows[i].name);
        json_number(&j, name, r->one[i]);
        snprintf(name, sizeof(name), "%s_gb_s_all", rows[i].name);
        json_number(&j, name, r->all[i]);
    }
    json_close(&j);
}

static void print_text(const bench *b, const machine_options *o, const rates *r)
{
    char head[32];
    snprintf(head, sizeof(head), "%d at once", b->size);
    printf("%-34s %9s %11s\n", "", "one core", b->size > 1 ? head : "");
    for (int i = 0; i < ROWS; i++) {
        if (r->one[i] <= 0) {
            continue;
        }
        char what[64], all[32] = "";
        if (rows[i].is_fma) {
            snprintf(what, sizeof(what), "multiply-add, %s, GFLOP/s", rows[i].text);
        } else {
            snprintf(what, sizeof(what), "%s of %" PRId64 " MiB arrays, GB/s", rows[i].text, o->megabytes);
        }
        if (b->size > 1) {
            snprintf(all, sizeof(all), "%.1f", r->all[i]);
        }
        printf("%-34s %9.1f %11s\n", what, r->one[i], all);
    }
}

static int run(bench *b, const machine_options *o)
{
    rates r;
    memory m = {.bytes = (size_t)o->megabytes << 20};
    m.array[0] = bench_memory(m.bytes);
    m.array[1] = bench_memory(m.bytes);
    bool ok = m.array[0] != NULL && m.array[1] != NULL && measure(b, o, &m, &r);
    if (ok && b->rank == 0) {
        if (o->json) {
            print_json(b, o, &r);
        } else {
            print_text(b, o, &r);
        }
    }
    free(m.array[0]);
    free(m.array[1]);
    return ok ? bench_close(b, CLI_OK, false) : bench_fail(b, false);
}

int bench_machine(int argc, char **argv, bench_words whole)
{
    machine_options o = {.megabytes = 128, .seconds = 0.5};
    int code = flags_parse(command,
                           "Measures the peak of fused multiply-adds (float32) and the bandwidth of memory, by one core and\n"
                           "by all at once. A copy counts what is read and what is written; the mean of two arrays, written\n"
                           "to both, is what an all-reduce of two ranks does with memory.",
                           machine_flags, &o, argc, argv);
    if (code >= 0) {
        return code;
    }
    cpu_set_t cores;
    if (o.ranks == 0 && !in_launcher()) {
        o.ranks = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
    }
    if (o.ranks > 1 && !in_launcher()) {
        return relaunch((int)o.ranks, 0, whole.argc, whole.argv);
    }
    bench b;
    code = bench_open(&b, command, NULL, o.ranks, false);
    return code >= 0 ? code : run(&b, &o);
}
