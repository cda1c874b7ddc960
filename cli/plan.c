/* `muster plan REPORT --ranks N --network SPEC`: what a step would take over MPI on so many ranks, for some bucket sizes,
 * from the report of a small run (docs/report.md). docs/scaling.md says how far from a simulation of messages it is. */
#include "commands.h"
#include "flags.h"
#include "json.h"
#include "plan_model.h"
#include "plan_read.h"

#include <stdlib.h>
#include <string.h>

typedef struct plan_options {
    const char *report, *network;
    int64_t ranks;
    double bucket_mib, forward, backward;
    bool json;
} plan_options;

#define AT(field) offsetof(plan_options, field)
static const flag plan_flags[] = {
    {"REPORT", FLAG_FILE, AT(report), NULL, NULL, 0, 0, FLAG_FREE},
    {"ranks", FLAG_INT, AT(ranks), "N", "how many ranks, each with a network link of its own", 1, 1e6, FLAG_FREE},
    {"network", FLAG_TEXT, AT(network), "SPEC", "10gbe, 25gbe, 100gbe, ib200, or gbit=X,latency_us=X,overhead_us=X (man)", 0, 0, FLAG_FREE},
    {"bucket-mib", FLAG_FLOAT, AT(bucket_mib), "MIB", "of the buckets (0: try some, and suggest one)", 0, 1e6, FLAG_FREE},
    {"forward", FLAG_FLOAT, AT(forward), "SECONDS", "in the place of the report's", 0, 1e6, FLAG_FREE},
    {"backward", FLAG_FLOAT, AT(backward), "SECONDS", "in the place of the report's, gradients ready in proportion", 0, 1e6,
     FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write JSON, for programs", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};
static const char about[] =
    "Predicts the time of a training step over MPI on many ranks from REPORT, which `muster train --report` or\n"
    "mu_ddp_report_json has written on a few (best with buckets of 1 MiB), and suggests a bucket size. Ranks are taken to be\n"
    "alike: nobody is late. docs/scaling.md states its error.";

/* MiB; with one as large as all of it at the end. */
static const double sizes[] = {0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100};
enum { SIZES = sizeof(sizes) / sizeof(*sizes), TABLE = SIZES + 1 };
#define MIB 1048576.0

typedef struct row {
    double bucket_mib;
    plan_result result;
} row;

/* The rows, and which one is the best: the largest buckets within a thousandth of the shortest step. */
static int predict(const plan_options *o, const plan_step *s, const plan_network *net, row table[TABLE], int *best)
{
    int64_t all = 0;
    int rows = 0;
    for (int64_t i = 0; i < s->count; i++) {
        all += s->parameter[i].bytes;
    }
    *best = 0;
    for (int i = 0; i < SIZES; i++) {
        bool asked = o->bucket_mib > 0;
        double mib = asked ? o->bucket_mib : sizes[i];
        row *r = &table[rows];
        r->bucket_mib = mib;
        /* As mu_ddp_options: the first one has 1 MiB, or less. */
        if (!plan_predict(s, (int)o->ranks, net, (int64_t)(mib * MIB), (int64_t)((mib < 1 ? mib : 1) * MIB), &r->result)) {
            return -1;
        }
        rows++;
        if (asked || mib * MIB >= (double)all) {
            break;
        }
    }
    for (int i = 1; i < rows; i++) {
        *best = table[i].result.step < table[*best].result.step ? i : *best;
    }
    for (int i = *best + 1; i < rows; i++) {
        *best = table[i].result.step <= table[*best].result.step * 1.001 ? i : *best;
    }
    return rows;
}

static double efficiency(const plan_step *s, const plan_result *r)
{
    return r->step > 0 ? (s->forward + s->backward) / r->step : 1;
}

static void print_json(const plan_options *o, const plan_step *s, const plan_network *net, const row *table, int rows,
                       int best)
{
    json j = {0};
    json_open(&j, NULL, '{');
    json_text(&j, "report", o->report);
    json_int(&j, "ranks", o->ranks);
    json_number(&j, "gbit", net->bytes_per_second * 8e-9);
    json_number(&j, "latency_us", net->latency * 1e6);
    json_number(&j, "overhead_us", net->overhead * 1e6);
    json_number(&j, "reduce_gb_s", net->reduce_bytes_per_second * 1e-9);
    json_number(&j, "forward", s->forward);
    json_number(&j, "backward", s->backward);
    json_open(&j, "rows", '[');
    for (int i = 0; i < rows; i++) {
        const plan_result *r = &table[i].result;
        json_open(&j, NULL, '{');
        json_number(&j, "bucket_mib", table[i].bucket_mib);
        json_int(&j, "buckets", r->buckets);
        json_number(&j, "step", r->step);
        json_number(&j, "exposed", r->exposed);
        json_number(&j, "efficiency", efficiency(s, r));
        json_number(&j, "link_busy", r->link);
        json_int(&j, "messages", r->messages);
        json_close(&j);
    }
    json_close(&j);
    json_number(&j, "suggested_mib", table[best].bucket_mib);
    json_close(&j);
}

static void print_text(const plan_options *o, const plan_step *s, const plan_network *net, const row *table, int rows,
                       int best)
{
    printf("%s: %lld parameters, forward %.3f ms, backward %.3f ms\n", o->report, (long long)s->count, s->forward * 1e3,
           s->backward * 1e3);
    printf("%lld ranks, %g Gbit/s each, %g us to another, %g us of the processor for a message\n\n", (long long)o->ranks,
           net->bytes_per_second * 8e-9, net->latency * 1e6, net->overhead * 1e6);
    printf("%10s %8s %12s %12s %12s %14s\n", "bucket", "buckets", "step ms", "exposed ms", "efficiency", "link busy ms");
    for (int i = 0; i < rows; i++) {
        const plan_result *r = &table[i].result;
        printf("%6g MiB %8lld %12.3f %12.3f %10.1f %% %14.3f\n", table[i].bucket_mib, (long long)r->buckets, r->step * 1e3,
               r->exposed * 1e3, efficiency(s, r) * 100, r->link * 1e3);
    }
    if (o->bucket_mib <= 0) {
        printf("\nsuggested: buckets of %g MiB (mu_ddp_options.bucket_bytes)\n", table[best].bucket_mib);
    }
}

int cmd_plan(int argc, char **argv)
{
    plan_options o = {.forward = -1, .backward = -1};
    plan_step s = {0};
    plan_network net;
    row table[TABLE];
    int best = 0, code = flags_parse("plan", about, plan_flags, &o, argc, argv);
    if (code >= 0) {
        return code;
    }
    if (o.ranks < 1 || o.network == NULL) {
        return cli_usage_error("plan", "%s", o.ranks < 1 ? "on how many ranks? --ranks N" : "over what? --network SPEC");
    }
    code = plan_read_network(o.network, &net);
    code = code < 0 ? plan_read_report(o.report, &s) : code;
    if (code < 0) {
        plan_scale(&s, o.forward, o.backward);
        int rows = predict(&o, &s, &net, table, &best);
        if (rows < 0) {
            code = cli_fail("plan", CLI_FAILED, "out of memory");
        } else {
            (o.json ? print_json : print_text)(&o, &s, &net, table, rows, best);
            code = fflush(stdout) == 0 ? CLI_OK : cli_fail("plan", CLI_FAILED, "cannot write the output");
        }
    }
    free(s.parameter);
    return code;
}
