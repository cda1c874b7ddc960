/* `muster trace-merge FILE...`: traces of ranks as one, and what they say in numbers. */
#include "commands.h"
#include "flags.h"
#include "json.h"

#include <muster/trace.h>

#include <stdlib.h>
#include <string.h>

typedef struct merge_options {
    flag_words files;
    const char *output;
    bool summary, json;
} merge_options;

#define AT(field) offsetof(merge_options, field)
static const flag merge_flags[] = {
    {"FILE", FLAG_WORDS, AT(files), NULL, NULL, 0, 0, FLAG_FREE},
    {"output", FLAG_TEXT, AT(output), "FILE", "write all events there, on rank 0's clock; also -o", 0, 0, FLAG_FREE},
    {"summary", FLAG_SWITCH, AT(summary), NULL, "print counts, times, and how much of the communication was hidden (default "
     "without --output)", 0, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "print the summary as JSON, for programs (docs/trace.md)", 0, 0, FLAG_FREE},
    {NULL, FLAG_END, 0, NULL, NULL, 0, 0, FLAG_FREE},
};
static const char about[] =
    "Puts traces of several ranks (muster train --trace, MUSTER_TRACE) together, for Perfetto or chrome://tracing. Files may\n"
    "be of any size, and cut off where a rank was killed.\n"
    "Exit codes: 0 done, 1 out of memory, or the summary could not be printed, 2 bad flags, a file that cannot be read, is no\n"
    "trace, or cannot be written: nothing was written.";

static const char *name_of(const mu_trace_kind *k)
{
    return k->name[0] != '\0' ? k->name : "(none)";
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static void print_rank(const mu_trace_rank *r)
{
    printf("rank %lld: %lld events", (long long)r->rank, (long long)r->events);
    if (r->steps > 0) {
        printf(", %lld steps of %.3f ms", (long long)r->steps, r->step_seconds * 1e3 / (double)r->steps);
    }
    printf(", communication %.3f ms, %.1f %% of it during backward, waiting %.3f ms", r->communication * 1e3,
           percent(r->hidden, r->communication), r->waiting * 1e3);
    if (r->offset != 0 || r->offset_error != 0) {
        printf(", clock %+.6f s (right to %.6f s)", r->offset, r->offset_error);
    }
    if (r->dropped > 0) {
        printf(", %lld events dropped", (long long)r->dropped);
    }
    printf("%s\n", r->whole ? "" : ", cut off: it did not close its trace");
}

static void print_text(const mu_trace_summary *s)
{
    double communication = 0, hidden = 0;
    printf("%-20s %12s %14s\n", "kind", "events", "seconds");
    for (int i = 0; i < s->kind_count; i++) {
        printf("%-20s %12lld %14.6f\n", name_of(&s->kinds[i]), (long long)s->kinds[i].events, s->kinds[i].seconds);
    }
    for (int i = 0; i < s->rank_count; i++) {
        print_rank(&s->ranks[i]);
        communication += s->ranks[i].communication;
        hidden += s->ranks[i].hidden;
    }
    printf("%lld events; overlap: %.1f %% of %.6f s of communication hidden behind backward\n", (long long)s->events,
           percent(hidden, communication), communication);
}

static void print_json(const mu_trace_summary *s)
{
    double communication = 0, hidden = 0;
    json j = {0};
    json_open(&j, NULL, '{');
    json_int(&j, "events", s->events);
    json_open(&j, "kinds", '[');
    for (int i = 0; i < s->kind_count; i++) {
        json_open(&j, NULL, '{');
        json_text(&j, "kind", s->kinds[i].name);
        json_int(&j, "events", s->kinds[i].events);
        json_number(&j, "seconds", s->kinds[i].seconds);
        json_close(&j);
    }
    json_close(&j);
    json_open(&j, "ranks", '[');
    for (int i = 0; i < s->rank_count; i++) {
        const mu_trace_rank *r = &s->ranks[i];
        communication += r->communication;
        hidden += r->hidden;
        json_open(&j, NULL, '{');
        json_int(&j, "rank", r->rank);
        json_int(&j, "events", r->events);
        json_int(&j, "steps", r->steps);
        json_number(&j, "step_seconds", r->step_seconds);
        json_number(&j, "communication", r->communication);
        json_number(&j, "hidden", r->hidden);
        json_number(&j, "waiting", r->waiting);
        json_number(&j, "offset", r->offset);
        json_number(&j, "offset_error", r->offset_error);
        json_int(&j, "dropped", r->dropped);
        json_bool(&j, "whole", r->whole);
        json_close(&j);
    }
    json_close(&j);
    json_number(&j, "communication", communication);
    json_number(&j, "hidden", hidden);
    json_number(&j, "overlap", communication > 0 ? hidden / communication : 0);
    json_close(&j);
}

int cmd_trace_merge(int argc, char **argv)
{
    merge_options o = {0};
    int code = flags_parse("trace-merge", about, merge_flags, &o, argc, argv);
    if (code >= 0) {
        return code;
    }
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    if (c == NULL) {
        return cli_fail("trace-merge", CLI_FAILED, "out of memory");
    }
    const mu_trace_summary *s = mu_trace_merge(c, (const char *const *)o.files.item, o.files.count, o.output);
    code = CLI_OK;
    if (s == NULL) {
        code = cli_fail("trace-merge", mu_context_status(c) == MU_ERR_NOMEM ? CLI_FAILED : CLI_USAGE, "%s",
                        mu_context_message(c));
    } else if (o.json) {
        print_json(s);
    } else if (o.summary || o.output == NULL) {
        print_text(s);
    }
    if (code == CLI_OK && fflush(stdout) != 0) {
        code = cli_fail("trace-merge", CLI_FAILED, "not all of the summary could be printed");
    }
    mu_context_close(c);
    return code;
}
