/* The result of `muster bench step`, as JSON and for people. */
#include "bench_step.h"

#include <inttypes.h>
#include <stdio.h>

/* How often, or how many bytes, in each measured step. */
static void print_counters(json *j, const step_run *r)
{
    const mu_counters *a = &r->before, *b = &r->after;
    double steps = (double)r->o->steps;
    json_open(j, "counters", '{');
    json_number(j, "allocations", (double)(b->allocations - a->allocations) / steps);
    json_number(j, "allocated_bytes", (double)(b->allocated_bytes - a->allocated_bytes) / steps);
    json_number(j, "layout_conversions", (double)(b->layout_conversions - a->layout_conversions) / steps);
    json_number(j, "weight_conversions", (double)(b->weight_conversions - a->weight_conversions) / steps);
    json_number(j, "converted_bytes", (double)(b->converted_bytes - a->converted_bytes) / steps);
    json_number(j, "primitives", (double)(b->primitives - a->primitives) / steps);
    json_close(j);
}

/* Rank 0's time by kind of kernel, in each measured step, and what is left for everything else. */
static void print_profile_json(json *j, const step_run *r)
{
    const mu_profile_row *rows;
    int n = mu_context_profile(r->b.c, &rows);
    double steps = (double)r->o->steps;
    json_open(j, "profile", '[');
    for (int i = 0; i < n; i++) {
        json_open(j, NULL, '{');
        json_text(j, "kind", rows[i].kind);
        json_number(j, "calls", (double)rows[i].calls / steps);
        json_number(j, "ms", 1e3 * rows[i].seconds / steps);
        json_number(j, "gflop", 1e-9 * rows[i].flops / steps);
        json_number(j, "bytes", rows[i].bytes / steps);
        json_close(j);
    }
    json_close(j);
}

static void print_profile_text(const step_run *r)
{
    const mu_profile_row *rows;
    int n = mu_context_profile(r->b.c, &rows);
    double steps = (double)r->o->steps, all = 0, rest;
    for (int64_t i = 0; i < r->o->steps; i++) {
        all += 1e3 * r->seconds[i] / steps; /* the mean, as the rows' */
    }
    rest = all;
    printf("%-24s %9s %10s %7s %9s %9s\n", "kernels of a step", "calls", "ms", "share", "GFLOP/s", "GB/s");
    for (int i = 0; i < n; i++) {
        double ms = 1e3 * rows[i].seconds / steps;
        printf("%-24s %9.1f %10.3f %5.1f %% %9.1f %9.1f\n", rows[i].kind, (double)rows[i].calls / steps, ms, 100 * ms / all,
               1e-9 * rows[i].flops / rows[i].seconds, 1e-9 * rows[i].bytes / rows[i].seconds);
        rest -= ms;
    }
    printf("%-24s %9s %10.3f %5.1f %%\n", "everything else", "", rest, 100 * rest / all);
}

void bench_step_print_json(const step_run *r, const step_result *s)
{
    const step_options *o = r->o;
    json j = {0};
    json_open(&j, NULL, '{');
    json_text(&j, "model", o->model);
    json_bool(&j, "cifar_stem", o->cifar_stem);
    json_int(&j, "batch", o->batch);
    json_int(&j, "channels", o->channels);
    json_int(&j, "side", o->side);
    json_int(&j, "ranks", r->b.size);
    json_bool(&j, "ddp", r->ddp != NULL);
    json_int(&j, "threads", mu_context_threads(r->b.c));
    json_int(&j, "data_parallel", o->replicas);
    json_bool(&j, "winograd", !o->no_winograd);
    json_bool(&j, "bf16", o->bf16);
    json_text(&j, "optimizer", o->optimizer);
    json_number(&j, "lr", o->lr);
    json_int(&j, "steps", o->steps);
    json_int(&j, "warmup", o->warmup);
    json_spread(&j, "step_ms", s->ms);
    json_open(&j, "step_ms_all", '['); /* of rank 0, in order */
    for (int64_t i = 0; i < o->steps; i++) {
        json_number(&j, NULL, 1e3 * r->seconds[i]);
    }
    json_close(&j);
    json_open(&j, "rank_ms", '[');
    for (int i = 0; i < r->b.size; i++) {
        json_number(&j, NULL, s->rank_ms[i]);
    }
    json_close(&j);
    json_number(&j, "images_per_second", s->images_per_second);
    json_number(&j, "gflop_per_step", s->gflop); /* of a rank */
    json_number(&j, "gflops", 1e3 * s->gflop * r->b.size / s->ms.median);
    json_number(&j, "loss_first", s->losses[0]);
    json_number(&j, "loss_last", s->losses[s->count - 1]);
    json_open(&j, "losses", '[');
    for (int64_t i = 0; i < s->count; i++) {
        json_number(&j, NULL, s->losses[i]);
    }
    json_close(&j);
    json_number(&j, "peak_rss_bytes", s->peak);
    json_number(&j, "job_rss_bytes", s->job);
    json_number(&j, "seconds_to_first_step", s->first_step_after);
    print_counters(&j, r); /* of rank 0 */
    if (o->profile) {
        print_profile_json(&j, r);
    }
    json_close(&j);
}

void bench_step_print_text(const step_run *r, const step_result *s)
{
    const step_options *o = r->o;
    int threads = mu_context_threads(r->b.c);
    printf("%s%s: batch %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64 ", %d rank%s%s, %d thread%s, %s, %" PRId64
           " steps after %" PRId64 "\n",
           o->model, o->cifar_stem ? " (CIFAR stem)" : "", o->batch, o->channels, o->side, o->side, r->b.size,
           r->b.size == 1 ? "" : "s", r->b.size > 1 && r->ddp == NULL ? " apart" : "", threads,
           threads == 1 ? "" : "s", o->optimizer, o->steps, o->warmup);
    printf("step       %.3f ms (fastest %.3f, 10 %% %.3f, 90 %% %.3f)\n", s->ms.median, s->ms.min, s->ms.p10, s->ms.p90);
    printf("images/s   %.1f\n", s->images_per_second);
    printf("GFLOP/s    %.1f (%.3f GFLOP in a step of a rank)\n", 1e3 * s->gflop * r->b.size / s->ms.median, s->gflop);
    printf("loss       %.6f, then %.6f\n", s->losses[0], s->losses[s->count - 1]);
    printf("memory     ");
    put_size((uint64_t)s->peak);
    if (r->b.size > 1) {
        printf(" on a rank, ");
        put_size((uint64_t)s->job);
        printf(" in all");
    }
    printf("\nfirst step %.2f s after the start\n", s->first_step_after);
    double steps = (double)o->steps;
    printf("in a step  %g allocations, %g copies into another layout, %g of weights\n",
           (double)(r->after.allocations - r->before.allocations) / steps,
           (double)(r->after.layout_conversions - r->before.layout_conversions) / steps,
           (double)(r->after.weight_conversions - r->before.weight_conversions) / steps);
    if (o->profile) {
        print_profile_text(r);
    }
}
