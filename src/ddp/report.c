/* Who was absent, and why: collected after each reduction, told once, and printed on request. */
#include "base/alloc.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

enum { NAMES_TOLD = 12 };

/* Keeps a text of the tape; its room is kept too, so that a steady step allocates nothing. */
static const char *keep_text(mu_ddp *d, mui_member *m, int which, const char *text)
{
    if (text == NULL) {
        return NULL;
    }
    size_t need = strlen(text) + 1;
    if (need > m->capacities[which]) {
        char *grown = mui_realloc(d->context, m->texts[which], need + 32);
        if (grown == NULL) {
            return NULL; /* the report then lacks it, the reduction goes on */
        }
        m->texts[which] = grown;
        m->capacities[which] = need + 32;
    }
    memcpy(m->texts[which], text, need);
    return m->texts[which];
}

static mu_absent describe(mu_ddp *d, mui_member *m, int ranks, bool here)
{
    mu_absent a = {.name = m->name, .here = MU_PRESENT, .ranks_present = ranks};
    if (here) {
        return a;
    }
    const mui_absence *why = &m->parameter->absence;
    a.here = (mu_absence)why->kind;
    a.op = keep_text(d, m, MUI_ABSENCE_OP, why->op);
    a.module = keep_text(d, m, MUI_ABSENCE_MODULE, why->module);
    a.end_op = keep_text(d, m, MUI_ABSENCE_END_OP, why->end_op);
    a.end_module = keep_text(d, m, MUI_ABSENCE_END_MODULE, why->end_module);
    a.region = keep_text(d, m, MUI_ABSENCE_REGION, why->region);
    return a;
}

void mui_ddp_note_absent(mu_ddp *d)
{
    int size = mu_group_size(d->group), rank = mu_group_rank(d->group);
    d->absent_count = 0;
    for (int64_t i = 0; i < d->member_count; i++) {
        int ranks = mui_reducer_ranks(d->reducer, i);
        if (ranks < size) {
            d->members[i].ranks = 0;
            for (int r = 0; r < size && r < MUI_RANKS_NAMED; r++) {
                d->members[i].ranks |= (uint64_t)mui_reducer_on(d->reducer, i, r) << r;
            }
            d->absent[d->absent_count++] = describe(d, &d->members[i], ranks, mui_reducer_on(d->reducer, i, rank));
        }
    }
}

static const char *shown(const char *module)
{
    return module != NULL && module[0] != '\0' ? module : "the root";
}

static void add_reason(mui_text *t, const mu_absent *a)
{
    switch (a->here) {
    case MU_PRESENT: mui_text_add(t, "present here"); return;
    case MU_NOT_READ: mui_text_add(t, "not read by any operation of this step (its layer was not called)"); return;
    case MU_FROZEN: mui_text_add(t, "frozen"); return;
    case MU_NO_LOSS: mui_text_add(t, "this rank had no loss"); return;
    case MU_NOT_REACHED:
        mui_text_add(t, "read by %s in %s, but nothing that leads to the loss uses the result",
                     a->op ? a->op : "an operation", shown(a->module));
        if (a->end_op != NULL) {
            mui_text_add(t, " (the path ends at %s in %s)", a->end_op, shown(a->end_module));
        }
        return;
    case MU_DETACHED:
        mui_text_add(t, "read by %s in %s, but cut off from the loss", a->op ? a->op : "an operation",
                     shown(a->module));
        if (a->region != NULL) {
            mui_text_add(t, " by the no-grad region%s%s", a->region[0] != '\0' ? " " : "", a->region);
        }
        if (a->end_op != NULL) {
            mui_text_add(t, "%s at %s in %s", a->region != NULL ? "," : "", a->end_op, shown(a->end_module));
        }
        return;
    }
}

static size_t module_length(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL ? (size_t)(dot - name) : 0;
}

/* Text pointers are of one member each, so compare contents. */
static bool same_text(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static bool same_group(const mu_absent *a, const mu_absent *b)
{
    size_t n = module_length(a->name);
    return n == module_length(b->name) && memcmp(a->name, b->name, n) == 0 && a->here == b->here &&
           a->ranks_present == b->ranks_present && same_text(a->op, b->op) && same_text(a->module, b->module) &&
           same_text(a->end_op, b->end_op) && same_text(a->end_module, b->end_module);
}

/* Entries next to each other that share module and reason become one: "fc.{weight, bias}: not read ...". Returns how
 * many entries it took. */
static int64_t add_group(mui_text *t, const mu_absent *a, int64_t count)
{
    int64_t n = 1;
    while (n < count && same_group(a, a + n)) {
        n++;
    }
    size_t module = module_length(a->name);
    const char *own = a->name + (module > 0 ? module + 1 : 0);
    if (n == 1) {
        mui_text_add(t, "%s", a->name);
    } else {
        mui_text_add(t, "%.*s%s{%s", (int)module, a->name, module > 0 ? "." : "", own);
        for (int64_t i = 1; i < n; i++) {
            mui_text_add(t, ", %s", a[i].name + (module > 0 ? module + 1 : 0));
        }
        mui_text_add(t, "}");
    }
    mui_text_add(t, ": ");
    add_reason(t, a);
    return n;
}

/* Those no rank contributed to, in a list of their own; told: leave out those that were. */
static int64_t collect_nowhere(mu_ddp *d, bool only_new, mu_absent *out)
{
    int64_t n = 0, a = 0;
    for (int64_t i = 0; i < d->member_count && a < d->absent_count; i++) {
        if (d->members[i].name != d->absent[a].name) {
            continue;
        }
        const mu_absent *x = &d->absent[a++];
        if (x->ranks_present == 0 && !(only_new && (d->members[i].warned || x->here == MU_NO_LOSS))) {
            out[n++] = *x;
            d->members[i].warned = d->members[i].warned || only_new;
        }
    }
    return n;
}

static void add_list(mui_text *t, const mu_absent *list, int64_t n)
{
    int64_t i = 0;
    for (int groups = 0; i < n && groups < NAMES_TOLD; groups++) {
        mui_text_add(t, "%s", groups > 0 ? "; " : "");
        i += add_group(t, list + i, n - i);
    }
    if (i < n) {
        mui_text_add(t, "; and %lld more", (long long)(n - i));
    }
}

static bool some_nowhere(const mu_ddp *d, bool only_new)
{
    int64_t a = 0;
    for (int64_t i = 0; i < d->member_count && a < d->absent_count; i++) {
        if (d->members[i].name == d->absent[a].name) {
            const mu_absent *x = &d->absent[a++];
            if (x->ranks_present == 0 && !(only_new && (d->members[i].warned || x->here == MU_NO_LOSS))) {
                return true;
            }
        }
    }
    return false;
}

mu_status mui_ddp_judge_absent(mu_ddp *d)
{
    bool strict = d->options.absent == MU_ABSENT_ERROR;
    bool tells = d->options.absent == MU_ABSENT_DEFAULT && mu_group_rank(d->group) == 0;
    if (!(strict || tells) || !some_nowhere(d, !strict)) {
        return MU_OK;
    }
    mu_context *c = d->context;
    mui_text list;
    mui_text_init(&list, c);
    mu_absent *nowhere = mui_calloc(c, (size_t)d->absent_count, sizeof(*nowhere));
    int64_t n = 0;
    if (nowhere != NULL) {
        n = collect_nowhere(d, !strict, nowhere);
        add_list(&list, nowhere, n);
    }
    mu_status s = MU_OK;
    if (strict) {
        s = mui_fail(
            c, MU_ERR_STATE,
            "%lld parameters did not receive a gradient on any rank in %s (where PyTorch would say: Expected to "
            "have finished reduction in the prior iteration before starting a new one): %s",
            (long long)n, mui_reducer_text(d->reducer), mui_text_get(&list));
    } else {
        mui_log(
            c, MU_LOG_WARN,
            "ddp `%s`: %lld of %lld parameters did not receive a gradient on any rank, and are left as they are: %s",
            d->name, (long long)n, (long long)d->member_count, mui_text_get(&list));
    }
    mui_free(c, nowhere);
    mui_text_free(&list);
    return s;
}

mu_status mui_ddp_not_finite(mu_ddp *d)
{
    return mui_reducer_not_finite(d->reducer, d->options.nonfinite == MU_NONFINITE_ERROR);
}

/* -- on request ------------------------------------------------------------------------------------------------- */
mu_ddp_report mu_ddp_get_report(mu_ddp *d)
{
    if (d == NULL) {
        return (mu_ddp_report){0};
    }
    return (mu_ddp_report){.reductions = d->reductions,
                           .buckets = (int)d->bucket_count,
                           .buckets_early = (int)d->buckets_early,
                           .absent = d->absent,
                           .absent_count = d->absent_count,
                           .backward_seconds = d->backward_seconds,
                           .wait_seconds = d->wait_seconds};
}

static const mui_member *member_of(const mu_ddp *d, const mu_absent *a)
{
    const mui_member *m = d->members;
    while (m->name != a->name) {
        m++;
    }
    return m;
}

static void add_ranks(mu_ddp *d, mui_text *t, const mu_absent *a)
{
    if (a->ranks_present == 0) {
        mui_text_add(t, "on no rank; ");
        return;
    }
    mui_text_add(t, "on rank");
    const mui_member *m = member_of(d, a);
    const char *separator = " ";
    for (int r = 0; r < mu_group_size(d->group) && r < MUI_RANKS_NAMED; r++) {
        if (m->ranks >> r & 1u) {
            mui_text_add(t, "%s%d", separator, r);
            separator = ", ";
        }
    }
    mui_text_add(t, " (%d of %d ranks); ", a->ranks_present, mu_group_size(d->group));
}

size_t mu_ddp_print_report(mu_ddp *d, char *out, size_t size)
{
    size = out != NULL ? size : 0;
    if (d == NULL) {
        return (size_t)snprintf(out, size, "%s", "");
    }
    mui_text t;
    mui_text_init(&t, d->context);
    mui_text_add(&t,
                 "ddp `%s`: %llu reductions over %d ranks (%s), %lld parameters in %lld buckets; last one %.3f ms, "
                 "of it %.3f ms waiting, %lld buckets launched during backward\n",
                 d->name, (unsigned long long)d->reductions, mu_group_size(d->group), mu_group_kind(d->group),
                 (long long)d->member_count, (long long)d->bucket_count, d->backward_seconds * 1e3,
                 d->wait_seconds * 1e3, (long long)d->buckets_early);
    if (d->reductions > 0 && d->absent_count == 0) {
        mui_text_add(&t, "every rank contributed to every parameter\n");
    }
    for (int64_t i = 0; i < d->absent_count; i++) {
        mui_text_add(&t, "%s: ", d->absent[i].name);
        add_ranks(d, &t, &d->absent[i]);
        add_reason(&t, &d->absent[i]);
        mui_text_add(&t, "\n");
    }
    size_t n = (size_t)snprintf(out, size, "%s", mui_text_get(&t));
    mui_text_free(&t);
    return n;
}
