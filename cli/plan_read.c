/* Networks and reports, for `muster plan`. */
#include "plan_read.h"
#include "commands.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* -- networks ------------------------------------------------------------------------------------------------------ */
/* As usual: TCP through a switch; InfiniBand HDR. What a rank adds up per second is of one core. */
static const struct known {
    const char *name;
    double gbit, latency_us, overhead_us;
} known[] = {
    {"10gbe", 10, 20, 5},
    {"25gbe", 25, 10, 5},
    {"100gbe", 100, 5, 2},
    {"ib200", 200, 1.5, 1},
};
#define REDUCE_GB_S 20

/* NULL: good; else what is wrong with it. */
static const char *set_item(const char *item, size_t length, double value[4], bool *has_rate)
{
    static const char *const keys[] = {"gbit", "latency_us", "overhead_us", "reduce_gb_s"};
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (strlen(known[i].name) == length && strncmp(item, known[i].name, length) == 0) {
            value[0] = known[i].gbit;
            value[1] = known[i].latency_us;
            value[2] = known[i].overhead_us;
            *has_rate = true;
            return NULL;
        }
    }
    for (int k = 0; k < 4; k++) {
        size_t n = strlen(keys[k]);
        if (length <= n || strncmp(item, keys[k], n) != 0 || item[n] != '=') {
            continue;
        }
        char *end = NULL;
        double x = strtod(item + n + 1, &end);
        bool rate = k == 0 || k == 3;
        if (end != item + length || end == item + n + 1 || isnan(x) || x < 0 || (rate ? x <= 0 : isinf(x))) {
            return rate ? "a number above 0, or inf, was expected" : "a number from 0 on was expected";
        }
        value[k] = x;
        *has_rate = *has_rate || k == 0;
        return NULL;
    }
    return "10gbe, 25gbe, 100gbe, ib200, gbit=, latency_us=, overhead_us= and reduce_gb_s= are known";
}

int plan_read_network(const char *spec, plan_network *out)
{
    double value[4] = {0, 0, 0, REDUCE_GB_S};
    bool has_rate = false;
    for (const char *p = spec, *end = spec; *end != '\0'; p = end + 1) {
        end = p + strcspn(p, ",");
        const char *wrong = set_item(p, (size_t)(end - p), value, &has_rate);
        if (wrong != NULL) {
            return cli_usage_error("plan", "--network '%s', at '%.*s': %s", spec, (int)(end - p), p, wrong);
        }
    }
    if (!has_rate) {
        return cli_usage_error("plan", "--network '%s' tells no bandwidth: a name or gbit= was expected", spec);
    }
    *out = (plan_network){.bytes_per_second = value[0] * 1e9 / 8, .latency = value[1] * 1e-6, .overhead = value[2] * 1e-6,
                          .reduce_bytes_per_second = value[3] * 1e9};
    return -1;
}

/* -- reports ------------------------------------------------------------------------------------------------------- */
typedef struct entry {
    int64_t bytes, bucket, order;
} entry;

static int in_ready_order(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->bucket != y->bucket) {
        return x->bucket < y->bucket ? -1 : 1;
    }
    return x->order < y->order ? -1 : x->order > y->order;
}

/* NULL when it is good, else what is wrong. Parameters that did not come are left out; so are frozen ones. */
static const char *read_parameters(json_t *list, size_t buckets, entry *entries, int64_t *count)
{
    size_t i;
    json_t *p;
    *count = 0;
    json_array_foreach(list, i, p)
    {
        json_t *bytes = json_object_get(p, "bytes"), *bucket = json_object_get(p, "bucket"),
               *ready = json_object_get(p, "ready");
        if (!json_is_integer(bytes) || !json_is_integer(bucket) || !json_is_integer(ready)) {
            return "a parameter without bytes, bucket and ready";
        }
        entry e = {json_integer_value(bytes), json_integer_value(bucket), json_integer_value(ready)};
        if (e.bytes < 0 || e.bytes > (int64_t)1 << 50 || e.bucket >= (int64_t)buckets) {
            return "a parameter of impossible bytes or bucket";
        }
        if (e.bucket >= 0 && e.order >= 0) {
            entries[(*count)++] = e;
        }
    }
    qsort(entries, (size_t)*count, sizeof(*entries), in_ready_order);
    return *count > 0 ? NULL : "no parameter that had a gradient in the last reduction";
}

/* The report tells when each bucket was ready. What lies between is shared out by bytes. */
static const char *spread(const json_t *buckets, const entry *entries, plan_step *s)
{
    double before = 0;
    for (int64_t i = 0; i < s->count;) {
        int64_t end = i, bytes = 0, sum = 0;
        while (end < s->count && entries[end].bucket == entries[i].bucket) {
            bytes += entries[end++].bytes;
        }
        json_t *ready = json_object_get(json_array_get(buckets, (size_t)entries[i].bucket), "ready");
        double at = json_number_value(ready);
        if (!json_is_number(ready) || !(at >= 0) || at > 1e6) {
            return "a bucket without the time when it was ready";
        }
        at = at > before ? at : before;
        at = at < s->backward ? at : s->backward;
        for (; i < end; i++) {
            sum += entries[i].bytes;
            s->parameter[i] = (plan_parameter){entries[i].bytes,
                                               bytes > 0 ? before + (at - before) * (double)sum / (double)bytes : at};
        }
        before = at;
    }
    return NULL;
}

static const char *read_step(json_t *root, plan_step *s)
{
    json_t *last = json_object_get(root, "last"), *buckets = json_object_get(root, "buckets"),
           *parameters = json_object_get(root, "parameters");
    json_t *forward = json_object_get(last, "forward"), *backward = json_object_get(last, "backward");
    size_t n = json_array_size(parameters);
    if (!json_is_number(forward) || !json_is_number(backward) || n == 0 || json_array_size(buckets) == 0) {
        return "last.forward, last.backward, buckets and parameters were expected";
    }
    s->forward = json_number_value(forward);
    s->backward = json_number_value(backward);
    if (!(s->forward >= 0 && s->backward >= 0 && s->forward < 1e6 && s->backward < 1e6)) {
        return "impossible times";
    }
    entry *entries = calloc(n, sizeof(*entries));
    s->parameter = calloc(n, sizeof(*s->parameter));
    const char *wrong = entries == NULL || s->parameter == NULL ? "out of memory" : NULL;
    wrong = wrong == NULL ? read_parameters(parameters, json_array_size(buckets), entries, &s->count) : wrong;
    wrong = wrong == NULL ? spread(buckets, entries, s) : wrong;
    free(entries);
    return wrong;
}

int plan_read_report(const char *path, plan_step *s)
{
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) {
        return error.line < 0 ? cli_fail("plan", CLI_USAGE, "%s", error.text)
                              : cli_fail("plan", CLI_USAGE, "%s: line %d: %s", path, error.line, error.text);
    }
    const char *wrong = read_step(root, s);
    json_decref(root);
    return wrong == NULL ? -1 : cli_fail("plan", CLI_USAGE, "%s is no report of `muster train --report`: %s", path, wrong);
}

void plan_scale(plan_step *s, double forward, double backward)
{
    s->forward = forward >= 0 ? forward : s->forward;
    if (backward < 0) {
        return;
    }
    for (int64_t i = 0; i < s->count; i++) {
        /* Of a backward of no length nothing is known: all at its end. */
        s->parameter[i].ready = s->backward > 0 ? s->parameter[i].ready * backward / s->backward : backward;
    }
    s->backward = backward;
}
