/* The calls of a mu_reducer. Whatever a front end does between begin and finish, finish runs the same collectives as on
 * every other rank: a call in a wrong order gives the step up, it does not leave it out. */
#include "ddp/reducer_alone.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/os.h"
#include "base/rng.h"
#include "ddp/reducer_state.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

/* -- making ------------------------------------------------------------------------------------------------------- */
static void destroy(void *object)
{
    mu_reducer *r = object;
    mu_context *c = r->context;
    for (int64_t i = 0; i < r->count; i++) {
        mui_free(c, r->entries[i].name);
    }
    mui_free(c, r->entries);
    mui_free(c, r->entry_of);
    mui_free(c, r->states);
    mui_free(c, r->masks);
    mui_free(c, r->ready_order);
    mui_reducer_free(r->core);
    mui_free(c, r->name);
    mui_free(c, r);
}

static int next_ordinal(const mu_context *c, const mu_group *g)
{
    int ordinal = 0;
    for (size_t i = 0; i < c->owned_count; i++) {
        const mu_reducer *other = c->owned[i].object;
        if (c->owned[i].destroy == destroy && other->group == g && other->ordinal > ordinal) {
            ordinal = other->ordinal;
        }
    }
    return ordinal + 1;
}

static mu_status take_parameter(mu_reducer *r, const mu_reducer_parameter *p, int64_t i)
{
    mu_context *c = r->context;
    mui_entry *e = &r->entries[i];
    if (p->name == NULL || p->count < 0 || (p->dtype != MU_F32 && p->dtype != MU_F64)) {
        return mui_fail(c, MU_ERR_ARG,
                        "mu_reducer_new (reducer `%s`): parameter %lld, `%s`, has %lld elements of type %d: a name, a "
                        "number >= 0, and MU_F32 or MU_F64 are needed",
                        r->name, (long long)i, p->name != NULL ? p->name : "(null)", (long long)p->count, (int)p->dtype);
    }
    if (!mui_size_mul((size_t)p->count, mu_dtype_bytes(p->dtype), &e->bytes) || e->bytes > SIZE_MAX / 2) {
        return mui_fail(c, MU_ERR_NOMEM, "mu_reducer_new (reducer `%s`): `%s` of %lld elements", r->name, p->name,
                        (long long)p->count);
    }
    e->count = p->count;
    e->dtype = p->dtype;
    e->memory = p->memory;
    e->name = mui_strdup(c, p->name);
    return e->name != NULL ? MU_OK : MU_ERR_NOMEM;
}

/* What this rank can do alone. */
static mu_status set_up(mu_reducer *r, const mu_reducer_parameter *parameters, int64_t count,
                        const mu_reducer_options *o)
{
    mu_context *c = r->context;
    r->options = o != NULL ? *o : (mu_reducer_options){0};
    r->name = mui_strdup(c, r->options.name != NULL ? r->options.name : "reducer");
    r->options.name = NULL;
    r->ordinal = next_ordinal(c, r->group);
    if (r->name == NULL) {
        return MU_ERR_NOMEM;
    }
    if (parameters == NULL || count < 1) {
        return mui_fail(c, MU_ERR_ARG, "mu_reducer_new (reducer `%s`): %lld parameters, at least one is needed", r->name,
                        (long long)(parameters != NULL ? count : 0));
    }
    if ((unsigned)r->options.nonfinite > MU_NONFINITE_ERROR) {
        return mui_fail(c, MU_ERR_ARG, "mu_reducer_new (reducer `%s`): nonfinite is %d, not a mu_nonfinite_policy",
                        r->name, (int)r->options.nonfinite);
    }
    /* The kind tells its collectives from those of a ddp of the same name and number. */
    r->core = mui_reducer_new(c, r->group, "reducer", r->name, (uint64_t)r->ordinal | UINT64_C(1) << 32);
    r->words = mui_reducer_words(r->group);
    r->entries = mui_calloc(c, (size_t)count, sizeof(*r->entries));
    r->states = mui_calloc(c, (size_t)count, 1);
    r->masks = mui_calloc(c, (size_t)count * (size_t)r->words, sizeof(*r->masks));
    r->ready_order = mui_calloc(c, (size_t)count, sizeof(*r->ready_order));
    if (r->core == NULL || r->entries == NULL || r->states == NULL || r->masks == NULL || r->ready_order == NULL) {
        return MU_ERR_NOMEM;
    }
    r->count = count;
    mu_status s = MU_OK;
    for (int64_t i = 0; i < count && s == MU_OK; i++) {
        s = take_parameter(r, &parameters[i], i);
    }
    return s;
}

static mu_status describe(const mu_reducer *r, mui_text *out)
{
    const mu_reducer_options *o = &r->options;
    mui_text_add(out, "a %s group; buckets of %zu bytes, the first of %zu; nonfinite policy %d%s\n",
                 mu_group_kind(r->group), o->bucket_bytes, o->first_bucket_bytes, (int)o->nonfinite,
                 o->keep_plan ? "; plan kept" : "");
    for (int64_t i = 0; i < r->count; i++) {
        mui_text_add(out, "parameter `%s`, %lld of %s\n", r->entries[i].name, (long long)r->entries[i].count,
                     mu_dtype_name(r->entries[i].dtype));
    }
    return out->failed ? MU_ERR_NOMEM : MU_OK;
}

/* With the others. MU_ERR_COMM while the group is whole: all ranks have seen the same difference. */
static mu_status join(mu_reducer *r, const mui_text *description)
{
    mui_identity id = {.kind = MUI_KIND_ALONE, .hash = mui_hash_string(MUI_HASH_START, r->name)};
    char who[96];
    snprintf(who, sizeof(who), "reducer `%.80s`", r->name);
    snprintf(id.text, sizeof(id.text), "mu_reducer_new (%s)", who);
    mu_status s = mui_gate(r->group, &id);
    if (s == MU_OK) {
        s = mui_compare_texts(r->group, who, "parameters", description);
    }
    if (s != MU_OK) {
        return s;
    }
    return mui_alone_lay_out(r, NULL);
}

static void desert(mu_group *g, mu_status s)
{
    mu_context *c = g->context;
    if (mu_context_status(c) == MU_OK) {
        mui_fail(c, s < 0 ? s : MU_ERR_INTERNAL, "mu_reducer_new failed");
    }
    mu_group_abort(g, mu_context_message(c));
}

mu_reducer *mu_reducer_new(mu_group *g, const mu_reducer_parameter *parameters, int64_t count,
                           const mu_reducer_options *options)
{
    if (g == NULL) {
        return NULL; /* a failure upstream */
    }
    mu_context *c = g->context;
    mu_reducer *r = mui_failed(c) ? NULL : mui_calloc(c, 1, sizeof(*r));
    if (r == NULL) {
        desert(g, MU_ERR_NOMEM);
        return NULL;
    }
    r->context = c;
    r->group = g;
    mui_text description;
    mui_text_init(&description, c);
    mu_status s = set_up(r, parameters, count, options);
    s = s == MU_OK ? describe(r, &description) : s;
    bool together = s == MU_OK;
    s = together ? join(r, &description) : s;
    mui_text_free(&description);
    if (s == MU_OK && mui_context_own(c, r, destroy, MUI_OWN_FIRST) != MU_OK) {
        desert(g, MU_ERR_NOMEM);
        return NULL;
    }
    if (s != MU_OK) {
        if (!(together && s == MU_ERR_COMM && g->broken == MU_OK)) {
            desert(g, s);
        }
        destroy(r);
        return NULL;
    }
    return r;
}

void mu_reducer_free(mu_reducer *r)
{
    if (r != NULL) {
        mu_group_free(r->group, r->slab);
        mui_context_disown(r->context, r);
        destroy(r);
    }
}

void *mu_reducer_memory(mu_reducer *r, int64_t i)
{
    if (r == NULL || i < 0 || i >= r->count) {
        return NULL;
    }
    return r->entries[i].memory != NULL ? r->entries[i].memory : r->slab + r->entries[i].offset;
}

/* -- a reduction -------------------------------------------------------------------------------------------------- */
static mu_status say_broken(mu_reducer *r)
{
    return mui_fail(r->context, r->broken, "%s", r->broken_text);
}

static mu_status break_for_good(mu_reducer *r, mu_status s)
{
    const char *why = mu_context_message(r->context);
    r->broken = s;
    snprintf(r->broken_text, sizeof(r->broken_text), "reducer `%.60s` cannot go on: %.1200s", r->name,
             why[0] != '\0' ? why : r->group->broken_text);
    return say_broken(r);
}

/* This rank gives the running reduction up; the first reason counts. */
static void give_up(mu_reducer *r, mu_status s, const char *reason)
{
    if (r->core->abandoned) {
        return;
    }
    r->local = s;
    mui_reducer_abandon(r->core, reason);
}

/* A call that must not be made now, or not like this. */
static mu_status wrong(mu_reducer *r, mu_status s, const char *text)
{
    char message[400];
    snprintf(message, sizeof(message), "%.300s (%s)", text, mui_reducer_text(r->core));
    s = mui_fail(r->context, s, "%s", message);
    if (r->running) {
        give_up(r, s, text);
    }
    return s;
}

mu_status mu_reducer_begin(mu_reducer *r, const mu_reducer_step *step)
{
    if (r == NULL) {
        return MU_ERR_ARG;
    }
    if (r->broken != MU_OK) {
        return say_broken(r);
    }
    if (r->running) {
        return wrong(r, MU_ERR_STATE, "mu_reducer_begin in a reduction: mu_reducer_finish comes first");
    }
    const mu_reducer_step all = {0};
    step = step != NULL ? step : &all;
    bool samples_fit = !step->weighted || (step->samples >= 0 && step->samples <= MUI_MAX_SAMPLES);
    r->weighted = step->weighted;
    r->samples = step->weighted && samples_fit ? step->samples : 0;
    r->began = mui_now();
    r->local = MU_OK;
    for (int64_t k = 0; k < r->count; k++) {
        bool comes = step->expected == NULL || step->expected[r->entry_of[k]];
        r->states[k] = comes && step->abandon == NULL && samples_fit ? MUI_SLICE_EXPECTED : MUI_SLICE_ABSENT;
    }
    mui_reduction how = {.weighted = r->weighted,
                         .samples = r->samples,
                         .note = "",
                         .look = r->options.nonfinite != MU_NONFINITE_KEEP,
                         .abandon = step->abandon};
    char text[120];
    if (!samples_fit) {
        snprintf(text, sizeof(text), "mu_reducer_begin: %lld samples, expected 0 to %d", (long long)step->samples,
                 MUI_MAX_SAMPLES);
        how.abandon = text;
    }
    r->running = true;
    mui_reducer_begin(r->core, &how, r->states);
    mui_work(r->context, mui_reducer_text(r->core));
    if (!samples_fit) {
        r->local = mui_fail(r->context, MU_ERR_ARG, "%s (%s)", text, mui_reducer_text(r->core));
    }
    return r->local;
}

static void bring(mu_reducer *r, const mui_entry *e)
{
    char *to = r->slab + e->offset;
    if (e->memory != NULL && e->bytes > 0) {
        memcpy(to, e->memory, e->bytes);
    }
    for (int64_t k = 0; r->weighted && k < e->count; k++) {
        if (e->dtype == MU_F32) {
            ((float *)(void *)to)[k] *= (float)r->samples;
        } else {
            ((double *)(void *)to)[k] *= (double)r->samples;
        }
    }
}

mu_status mu_reducer_ready(mu_reducer *r, int64_t i)
{
    char text[300];
    if (r == NULL) {
        return MU_ERR_ARG;
    }
    if (r->broken != MU_OK) {
        return say_broken(r);
    }
    if (!r->running) {
        return wrong(r, MU_ERR_STATE, "mu_reducer_ready before mu_reducer_begin");
    }
    if (i < 0 || i >= r->count) {
        snprintf(text, sizeof(text), "mu_reducer_ready of parameter %lld: there are %lld", (long long)i,
                 (long long)r->count);
        return wrong(r, MU_ERR_ARG, text);
    }
    if (r->core->abandoned) {
        return r->local;
    }
    const mui_entry *e = &r->entries[i];
    uint8_t state = r->core->states[e->slice];
    if (state != MUI_SLICE_EXPECTED) {
        snprintf(text, sizeof(text), "mu_reducer_ready of `%.200s`, which %s", e->name,
                 state == MUI_SLICE_READY ? "is ready already" : "was not expected");
        return wrong(r, MU_ERR_STATE, text);
    }
    bring(r, e);
    mui_reducer_ready(r->core, e->slice, true);
    return MU_OK;
}

mu_status mu_reducer_abandon(mu_reducer *r, const char *reason)
{
    if (r == NULL) {
        return MU_ERR_ARG;
    }
    if (r->broken != MU_OK) {
        return say_broken(r);
    }
    if (!r->running) {
        return wrong(r, MU_ERR_STATE, "mu_reducer_abandon before mu_reducer_begin");
    }
    give_up(r, MU_OK, reason);
    return MU_OK;
}

/* Keeps who took part, by entry: the layout may change now. */
static void keep_result(mu_reducer *r, int64_t came)
{
    int size = mu_group_size(r->group);
    size_t words = (size_t)r->words;
    r->report.absent = r->report.nowhere = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const mui_entry *e = &r->entries[i];
        int ranks = mui_reducer_ranks(r->core, e->slice);
        memcpy(r->masks + (size_t)i * words, r->core->masks + (size_t)e->slice * words, words * sizeof(*r->masks));
        r->report.absent += ranks < size;
        r->report.nowhere += ranks == 0;
        if (ranks > 0 && e->memory != NULL && e->bytes > 0) {
            memcpy(e->memory, r->slab + e->offset, e->bytes);
        }
    }
    int64_t count = 0;
    const int64_t *order = mui_reducer_ready_order(r->core, &count);
    for (int64_t k = 0; k < came; k++) {
        r->ready_order[k] = r->entry_of[order[k]];
    }
    r->ready_count = came;
    r->total_samples = r->weighted ? mui_reducer_total_samples(r->core) : 0;
    r->report.reductions++;
    r->report.bytes = r->slab_bytes;
}

static mu_status conclude(mu_reducer *r, mu_status s, int64_t came)
{
    mu_context *c = r->context;
    if (s < 0) {
        return break_for_good(r, s);
    }
    if (s == MU_SKIPPED) {
        mui_log(c, mu_group_rank(r->group) == 0 ? MU_LOG_WARN : MU_LOG_INFO, "reducer `%s`: step skipped: %s", r->name,
                mui_reducer_skip_text(r->core));
        return s;
    }
    if (r->weighted && mui_reducer_total_samples(r->core) == 0) {
        return mui_fail(c, MU_ERR_ARG, "reducer `%s`: the ranks' samples sum up to 0", r->name);
    }
    if (mui_reducer_first_bad(r->core) >= 0) {
        return mui_reducer_not_finite(r->core, r->options.nonfinite == MU_NONFINITE_ERROR);
    }
    keep_result(r, came);
    if (!r->planned && !r->options.keep_plan) {
        s = mui_alone_plan(r);
        if (s != MU_OK) {
            mu_group_abort(r->group, mu_context_message(c));
            return break_for_good(r, s);
        }
    }
    return MU_OK;
}

mu_status mu_reducer_finish(mu_reducer *r)
{
    if (r == NULL) {
        return MU_ERR_ARG;
    }
    if (r->broken != MU_OK) {
        r->running = false;
        return say_broken(r);
    }
    if (!r->running) {
        return wrong(r, MU_ERR_STATE, "mu_reducer_finish before mu_reducer_begin");
    }
    mu_context *c = r->context;
    if (mui_failed(c)) {
        give_up(r, mu_context_status(c), mu_context_message(c));
    }
    /* Whatever this rank failed with must not keep it from the collectives. */
    mui_aside failure;
    mui_aside_put(c, &failure);
    double local = mui_now();
    int64_t came = 0;
    (void)mui_reducer_ready_order(r->core, &came);
    r->report.buckets = r->bucket_count;
    r->report.buckets_early = mui_reducer_launched(r->core);
    for (int64_t k = 0; k < r->count; k++) {
        mui_reducer_ready(r->core, k, false); /* those that did not come */
    }
    mui_reducer_launch_rest(r->core);
    char text[MUI_IDENTITY_TEXT + 48];
    snprintf(text, sizeof(text), "%s, waiting for the others' gradients", mui_reducer_text(r->core));
    mui_work(c, text);
    mu_status s = mui_reducer_wait(r->core);
    r->report.wait_seconds = mui_now() - local;
    s = conclude(r, s, came);
    r->running = false;
    r->report.seconds = mui_now() - r->began;
    snprintf(text, sizeof(text), "after %.150s", mui_reducer_text(r->core));
    mui_work(c, text);
    mui_aside_restore(c, &failure);
    if (r->local != MU_OK && !mui_failed(c)) { /* it was cleared meanwhile */
        mui_fail(c, r->local, "%s", r->core->abandon_text);
    }
    return r->local != MU_OK ? r->local : s;
}

/* -- what became of it -------------------------------------------------------------------------------------------- */
static bool knows(const mu_reducer *r, int64_t i)
{
    return r != NULL && i >= 0 && i < r->count;
}

bool mu_reducer_present(const mu_reducer *r, int64_t i, int rank)
{
    return knows(r, i) && rank >= 0 && rank < mu_group_size(r->group) && mui_mask_has(r->masks + i * r->words, rank);
}

int mu_reducer_ranks(const mu_reducer *r, int64_t i)
{
    int n = 0;
    for (int rank = 0; knows(r, i) && rank < mu_group_size(r->group); rank++) {
        n += mui_mask_has(r->masks + i * r->words, rank);
    }
    return n;
}

int64_t mu_reducer_total_samples(const mu_reducer *r)
{
    return r != NULL ? r->total_samples : 0;
}

int64_t mu_reducer_ready_order(const mu_reducer *r, int64_t *out, int64_t room)
{
    if (r == NULL) {
        return 0;
    }
    for (int64_t k = 0; out != NULL && k < r->ready_count && k < room; k++) {
        out[k] = r->ready_order[k];
    }
    return r->ready_count;
}

mu_reducer_report mu_reducer_get_report(const mu_reducer *r)
{
    mu_reducer_report report = {0};
    if (r != NULL) {
        report = r->report;
        report.parameters = r->count;
        report.buckets = r->bucket_count;
        report.bytes = r->slab_bytes;
    }
    return report;
}

static void add_absent(mui_text *t, const mu_reducer *r, int64_t i)
{
    int size = mu_group_size(r->group), ranks = mu_reducer_ranks(r, i);
    mui_text_add(t, "%s: on %s", r->entries[i].name, ranks == 0 ? "no rank" : "rank");
    const char *separator = " ";
    for (int k = 0; k < size; k++) {
        if (mu_reducer_present(r, i, k)) {
            mui_text_add(t, "%s%d", separator, k);
            separator = ", ";
        }
    }
    if (ranks > 0) {
        mui_text_add(t, " (%d of %d ranks)", ranks, size);
    }
    mui_text_add(t, "\n");
}

size_t mu_reducer_print_report(const mu_reducer *r, char *out, size_t size)
{
    if (r == NULL) {
        return mui_text_give(&(mui_text){0}, out, size);
    }
    mu_reducer_report report = mu_reducer_get_report(r);
    mui_text t;
    mui_text_init(&t, r->context);
    mui_text_add(&t,
                 "reducer `%s`: %llu reductions over %d ranks (%s), %lld parameters in %lld buckets of %zu bytes; last "
                 "one %.3f ms, of it %.3f ms in finish, %lld buckets launched before\n",
                 r->name, (unsigned long long)report.reductions, mu_group_size(r->group), mu_group_kind(r->group),
                 (long long)r->count, (long long)report.buckets, report.bytes, report.seconds * 1e3,
                 report.wait_seconds * 1e3, (long long)report.buckets_early);
    if (report.reductions > 0 && report.absent == 0) {
        mui_text_add(&t, "every rank had every parameter\n");
    }
    for (int64_t i = 0; i < r->count && report.absent > 0; i++) {
        if (mu_reducer_ranks(r, i) < mu_group_size(r->group)) {
            add_absent(&t, r, i);
        }
    }
    return mui_text_give(&t, out, size);
}
