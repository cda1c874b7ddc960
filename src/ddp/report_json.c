/* The report as JSON; docs/report.md describes it. Numbers are written without the locale's help. */
#include "base/text.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

static void add_string(mui_text *t, const char *s)
{
    if (s == NULL) {
        mui_text_add(t, "null");
    } else {
        mui_text_add_json(t, s);
    }
}

static void add_seconds(mui_text *t, const char *key, double seconds)
{
    long long ns = seconds > 0 ? (long long)(seconds * 1e9 + 0.5) : 0;
    mui_text_add(t, "\"%s\":%lld.%09lld", key, ns / 1000000000, ns % 1000000000);
}

static void add_count(mui_text *t, const char *key, uint64_t n)
{
    mui_text_add(t, "\"%s\":%llu,", key, (unsigned long long)n);
}

static void add_text(mui_text *t, const char *key, const char *s)
{
    mui_text_add(t, "\"%s\":", key);
    add_string(t, s);
    mui_text_add(t, ",");
}

static void add_mask(mui_text *t, const char *key, uint64_t mask, int size)
{
    mui_text_add(t, "\"%s\":[", key);
    mui_add_ranks(t, mask, size);
    mui_text_add(t, "]");
}

static void add_times(mui_text *t, const char *key, const mu_ddp_times *x)
{
    mui_text_add(t, "\"%s\":{", key);
    add_seconds(t, "forward", x->forward);
    mui_text_add(t, ",");
    add_seconds(t, "backward", x->backward);
    mui_text_add(t, ",");
    add_seconds(t, "communication", x->communication);
    mui_text_add(t, ",");
    add_seconds(t, "overlapped", x->overlapped);
    mui_text_add(t, ",");
    add_seconds(t, "exposed", x->exposed);
    mui_text_add(t, "},");
}

static void add_buckets(mu_ddp *d, mui_text *t)
{
    int64_t n = 0;
    const mu_ddp_bucket *b = mu_ddp_report_buckets(d, &n);
    mui_text_add(t, "\"buckets\":[");
    for (int64_t i = 0; i < n; i++) {
        mui_text_add(t, "%s{\"bytes\":%lld,\"parameters\":%lld,", i > 0 ? "," : "", (long long)b[i].bytes,
                     (long long)b[i].parameters);
        add_seconds(t, "ready", b[i].ready);
        mui_text_add(t, ",");
        add_seconds(t, "launched", b[i].launched);
        mui_text_add(t, ",");
        add_seconds(t, "reduced", b[i].reduced);
        mui_text_add(t, "}");
    }
    mui_text_add(t, "],");
}

static void add_parameters(mu_ddp *d, mui_text *t)
{
    int64_t n = 0;
    int size = mu_group_size(d->group);
    const mu_ddp_parameter *p = mu_ddp_report_parameters(d, &n);
    mui_text_add(t, "\"parameters\":[");
    for (int64_t i = 0; i < n; i++) {
        mui_text_add(t, "%s{", i > 0 ? "," : "");
        add_text(t, "name", p[i].name);
        mui_text_add(t, "\"index\":%lld,\"frozen\":%s,\"bytes\":%lld,\"bucket\":%lld,\"ready\":%lld,",
                     (long long)p[i].index, p[i].index < 0 ? "true" : "false", (long long)p[i].bytes,
                     (long long)p[i].bucket, (long long)p[i].ready);
        add_count(t, "reductions", p[i].reductions);
        add_count(t, "here", p[i].here);
        add_count(t, "anywhere", p[i].anywhere);
        add_mask(t, "ranks", p[i].ranks, size);
        mui_text_add(t, ",");
        add_mask(t, "ranks_ever", p[i].ranks_ever, size);
        mui_text_add(t, "}");
    }
    mui_text_add(t, "],");
}

static const char *absence_name(mu_absence a)
{
    switch (a) {
    case MU_PRESENT: return "present";
    case MU_NOT_READ: return "not read";
    case MU_NOT_REACHED: return "not reached";
    case MU_DETACHED: return "detached";
    case MU_FROZEN: return "frozen";
    case MU_NO_LOSS: return "no loss";
    }
    return "unknown";
}

static void add_absent(const mu_ddp_report *r, mui_text *t)
{
    mui_text_add(t, "\"absent\":[");
    for (int64_t i = 0; i < r->absent_count; i++) {
        const mu_absent *a = &r->absent[i];
        mui_text_add(t, "%s{", i > 0 ? "," : "");
        add_text(t, "name", a->name);
        mui_text_add(t, "\"index\":%lld,\"ranks_present\":%d,", (long long)a->index, a->ranks_present);
        add_text(t, "here", absence_name(a->here));
        add_text(t, "op", a->op);
        add_text(t, "module", a->module);
        add_text(t, "end_op", a->end_op);
        add_text(t, "end_module", a->end_module);
        add_text(t, "region", a->region);
        add_mask(t, "ranks", a->ranks, r->ranks);
        mui_text_add(t, "}");
    }
    mui_text_add(t, "]");
}

size_t mu_ddp_report_json(mu_ddp *d, char *out, size_t size)
{
    if (d == NULL) {
        return mui_text_give(&(mui_text){0}, out, size);
    }
    mu_ddp_report r = mu_ddp_get_report(d);
    mui_text t;
    mui_text_init(&t, d->context);
    mui_text_add(&t, "{");
    add_text(&t, "ddp", r.name);
    add_text(&t, "group", r.group);
    mui_text_add(&t, "\"rank\":%d,\"ranks\":%d,", r.rank, r.ranks);
    add_count(&t, "reductions", r.reductions);
    add_count(&t, "skipped", r.skipped);
    add_text(&t, "skip_reason", r.skip_reason);
    add_count(&t, "trainable", (uint64_t)r.parameters);
    add_count(&t, "frozen", (uint64_t)r.frozen);
    add_count(&t, "bytes", (uint64_t)r.bytes);
    mui_text_add(&t, "\"rebuilt\":%s,\"scattered\":%s,", r.rebuilt ? "true" : "false", r.scattered ? "true" : "false");
    add_count(&t, "optimizer_bytes", (uint64_t)r.optimizer_bytes);
    add_count(&t, "optimizer_ranks", (uint64_t)r.optimizer_ranks);
    add_count(&t, "buckets_early", (uint64_t)r.buckets_early);
    add_times(&t, "last", &r.last);
    add_times(&t, "average", &r.average);
    add_seconds(&t, "overlap", r.overlap);
    mui_text_add(&t, ",\"last_rank\":%d,", r.last_rank);
    add_seconds(&t, "last_rank_seconds", r.last_rank_seconds);
    mui_text_add(&t, ",");
    add_buckets(d, &t);
    add_parameters(d, &t);
    add_absent(&r, &t);
    mui_text_add(&t, "}\n");
    return mui_text_give(&t, out, size);
}
