/* The consumer's side of the loader: opening, epochs, taking batches in order, and raising what went wrong in one. */
#include "data/loader.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/profile.h"

#include <inttypes.h>
#include <string.h>

#define MAX_THREADS 1024
#define MAX_PREFETCH 4096
#define LARGEST_CHUNK 16

static bool check_options(mu_context *c, const mu_loader_options *options, mu_loader_options *o)
{
    *o = options != NULL ? *options : (mu_loader_options){0};
    o->batch = o->batch == 0 ? 32 : o->batch;
    o->shard.size = o->shard.size == 0 ? 1 : o->shard.size;
    o->seed = o->seed == 0 ? c->seed : o->seed;
    o->threads = o->threads == 0 ? 1 : o->threads < 0 ? 0 : o->threads;
    o->prefetch = o->prefetch == 0 ? 2 : o->prefetch;
    if (o->batch < 0) {
        mui_fail(c, MU_ERR_ARG, "loader option batch is %d: expected at least 1", o->batch);
    } else if (o->shard.size < 0 || o->shard.rank < 0 || o->shard.rank >= o->shard.size) {
        mui_fail(c, MU_ERR_ARG, "loader option shard is rank %d of %d: expected a rank from 0 to size - 1",
                 o->shard.rank, o->shard.size);
    } else if (o->threads > MAX_THREADS) {
        mui_fail(c, MU_ERR_ARG, "loader option threads is %d: expected at most %d", o->threads, MAX_THREADS);
    } else if (o->prefetch < 0 || o->prefetch > MAX_PREFETCH) {
        mui_fail(c, MU_ERR_ARG, "loader option prefetch is %d: expected 1 to %d", o->prefetch, MAX_PREFETCH);
    }
    return !mui_failed(c);
}

static mu_status make_slots(mu_loader *l, const mu_loader_options *o)
{
    mu_context *c = l->context;
    /* No rank ever gets more than its part of everything: a batch "of everything" costs no more than that. */
    int64_t most = l->sampler.places / l->sampler.size + 1;
    size_t batch = (size_t)(o->batch < most ? o->batch : most), elements = 0;
    if (!mui_size_mul(batch, (size_t)l->dataset->elements, &elements)) {
        return mui_fail(c, MU_ERR_NOMEM, "out of memory: a batch of %d samples of %" PRId64 " numbers", o->batch,
                        l->dataset->elements);
    }
    /* The consumer holds one batch while `prefetch` others are loaded. */
    l->slot_count = l->thread_count > 0 ? (int64_t)o->prefetch + 1 : 1;
    l->slots = mui_calloc(c, (size_t)l->slot_count, sizeof(*l->slots));
    if (l->slots == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t i = 0; i < l->slot_count; i++) {
        mui_slot *s = &l->slots[i];
        s->step = -1;
        s->x = mui_calloc(c, elements, sizeof(*s->x));
        s->y = mui_calloc(c, batch, sizeof(*s->y));
        s->indices = mui_calloc(c, batch, sizeof(*s->indices));
        s->trouble = mui_calloc(c, batch, sizeof(*s->trouble));
        if (s->x == NULL || s->y == NULL || s->indices == NULL || s->trouble == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    return MU_OK;
}

/* Where a user's sample waits for its augmentation. Now, so that a steady epoch asks for no memory. */
static mu_status make_raw(mu_loader *l, int workers)
{
    bool needed = l->dataset->kind->bytes == NULL && !mui_augment_is_copy(&l->augment);
    for (int i = 0; needed && i < workers; i++) {
        l->workers[i].raw = mui_calloc(l->context, (size_t)l->dataset->elements, sizeof(float));
        if (l->workers[i].raw == NULL) {
            return MU_ERR_NOMEM;
        }
    }
    return MU_OK;
}

static void destroy_loader(void *object)
{
    mu_loader *l = object;
    mu_context *c = l->context;
    mui_workers_stop(l);
    for (int64_t i = 0; l->slots != NULL && i < l->slot_count; i++) {
        mui_free(c, l->slots[i].x);
        mui_free(c, l->slots[i].y);
        mui_free(c, l->slots[i].indices);
        mui_free(c, l->slots[i].trouble);
    }
    mui_free(c, l->slots);
    for (int i = 0; l->workers != NULL && i < (l->thread_count > 0 ? l->thread_count : 1); i++) {
        mui_scratch_free(&l->workers[i].scratch);
        mui_free(c, l->workers[i].raw);
    }
    mui_free(c, l->workers);
    mui_sampler_free(&l->sampler, c);
    pthread_cond_destroy(&l->ready);
    pthread_cond_destroy(&l->work);
    pthread_mutex_destroy(&l->lock);
    mui_free(c, l);
}

mu_loader *mu_loader_open(mu_dataset *d, const mu_loader_options *options)
{
    mu_loader_options o;
    if (d == NULL || mui_failed(d->context) || !check_options(d->context, options, &o)) {
        return NULL;
    }
    mu_context *c = d->context;
    mu_loader *l = mui_calloc(c, 1, sizeof(*l));
    if (l == NULL) {
        return NULL;
    }
    l->context = c;
    l->dataset = d;
    l->thread_count = o.threads;
    l->held = -1;
    l->chunk = o.batch / (o.threads > 0 ? o.threads : 1);
    l->chunk = l->chunk < 1 ? 1 : l->chunk > LARGEST_CHUNK ? LARGEST_CHUNK : l->chunk;
    pthread_mutex_init(&l->lock, NULL); /* with default attributes, Linux's never fail */
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->ready, NULL);
    l->paused = true;
    int workers = o.threads > 0 ? o.threads : 1;
    l->workers = mui_calloc(c, (size_t)workers, sizeof(*l->workers));
    for (int i = 0; l->workers != NULL && i < workers; i++) {
        l->workers[i].loader = l;
        l->workers[i].scratch.context = c;
    }
    if (l->workers == NULL ||  mui_augment_init(&l->augment, c, d->dims, &o) != MU_OK ||
        mui_sampler_init(&l->sampler, c, d->count, &o) != MU_OK || make_slots(l, &o) != MU_OK ||
        make_raw(l, workers) != MU_OK) {
        destroy_loader(l);
        return NULL;
    }
    /* Before the data set it reads from. On failure the context destroys it. */
    return mui_context_own(c, l, destroy_loader, MUI_OWN_FIRST) == MU_OK ? l : NULL;
}

void mu_loader_close(mu_loader *l)
{
    if (l != NULL) {
        mui_context_disown(l->context, l);
        destroy_loader(l);
    }
}

int64_t mu_loader_steps(const mu_loader *l)
{
    return l != NULL ? l->sampler.steps : 0;
}

int64_t mu_loader_steps_left(const mu_loader *l)
{
    return l != NULL && l->started ? l->sampler.end - l->step : 0;
}

int64_t mu_loader_position(const mu_loader *l)
{
    if (l == NULL || !l->started) {
        return 0;
    }
    const mui_sampler *s = &l->sampler;
    int64_t position = s->offset + l->step * s->batch * s->size;
    return position < s->places ? position : s->places;
}

/* From the sampler's step `first`; errors have been found. */
static mu_status start(mu_loader *l, int64_t epoch, int64_t samples)
{
    mui_workers_pause(l);
    if (!l->started || l->epoch != epoch) {
        mui_sampler_epoch(&l->sampler, epoch);
    }
    l->epoch = epoch;
    l->step = mui_sampler_seek(&l->sampler, samples);
    l->held = -1;
    l->stopped = false;
    mu_status s = mui_workers_start(l);
    if (s != MU_OK) {
        return s;
    }
    l->started = true;
    mui_workers_resume(l, l->step);
    return MU_OK;
}

mu_status mu_loader_rewind(mu_loader *l, int64_t epoch, int64_t first)
{
    if (l == NULL) {
        return MU_ERR_ARG; /* the builder that returned NULL has raised why */
    }
    mu_context *c = l->context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (epoch < 0 || first < 0 || first > l->sampler.steps) {
        return mui_fail(c, MU_ERR_ARG,
                        "a loader of %" PRId64 " steps cannot be set to epoch %" PRId64 ", step %" PRId64,
                        l->sampler.steps, epoch, first);
    }
    return start(l, epoch, first * l->sampler.batch * l->sampler.size);
}

mu_status mu_loader_seek(mu_loader *l, int64_t epoch, int64_t samples)
{
    if (l == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = l->context;
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    /* With MU_REMAINDER_WRAP an epoch has up to a sample more for each rank, of however many ranks it was. */
    if (epoch < 0 || samples < 0 || (samples > l->sampler.count && l->sampler.remainder != MU_REMAINDER_WRAP)) {
        return mui_fail(c, MU_ERR_ARG,
                        "a loader of %" PRId64 " samples cannot be set to epoch %" PRId64 ", sample %" PRId64,
                        l->sampler.count, epoch, samples);
    }
    return start(l, epoch, samples);
}

/* Moves good samples together over bad ones. Returns the number of good ones, or -1 when a bad one is an error. */
static int64_t sort_out(mu_loader *l, mui_slot *slot)
{
    mu_context *c = l->context;
    mu_dataset *d = l->dataset;
    int64_t good = 0;
    for (int64_t i = 0; i < slot->slice.count; i++) {
        const mui_trouble *t = &slot->trouble[i];
        if (t->status == MU_OK) {
            if (good != i) {
                memcpy(slot->x + good * d->elements, slot->x + i * d->elements, (size_t)d->elements * sizeof(float));
                slot->y[good] = slot->y[i];
                slot->indices[good] = slot->indices[i];
            }
            good++;
            continue;
        }
        char name[1024];
        mui_dataset_sample_name(d, slot->indices[i], name, sizeof(name));
        /* Without memory, or with a failing disk, no image can be called bad. */
        if (!d->skip_bad || t->status == MU_ERR_NOMEM || t->status == MU_ERR_INTERNAL) {
            mui_fail(c, t->status, "%s: %s", name, t->text);
            return -1;
        }
        if (mui_dataset_note_bad(d, slot->indices[i])) {
            mui_log(c, MU_LOG_WARN, "%s: %s; left out (%" PRId64 " so far)", name, t->text, d->bad);
        }
    }
    return good;
}

bool mui_loader_take(mu_loader *l, mui_loaded *out)
{
    mu_context *c = l->context;
    if (mui_failed(c)) {
        return false;
    }
    if (!l->started) {
        mui_fail(c, MU_ERR_STATE, "the loader has no epoch yet: mu_loader_rewind comes before mu_loader_next");
        return false;
    }
    if (l->stopped) {
        mui_fail(c, MU_ERR_STATE, "the loader stopped at an error in step %" PRId64 " of epoch %" PRId64
                 ": mu_loader_rewind starts it again", l->step, l->epoch);
        return false;
    }
    if (l->held >= 0) {
        mui_workers_release(l, l->held);
        l->held = -1;
    }
    if (l->step >= l->sampler.end) {
        return false;
    }
    mui_place before = mui_go(c, MUI_LOADER, NULL);
    mui_timer timer;
    mui_timer_start(&timer, c, MUI_KIND_LOADER_WAIT);
    mui_slot *slot = mui_workers_wait(l, l->step);
    mui_timer_stop(&timer, 0, 0);
    mui_go(c, before.stage, before.path);
    int64_t good = sort_out(l, slot);
    if (good < 0) {
        l->stopped = true;
        return false;
    }
    *out = (mui_loaded){slot->x, slot->y, slot->indices, good, slot->slice.total};
    l->held = l->step++;
    return true;
}
