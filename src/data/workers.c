/* The threads that fill batches. They claim chunks of samples from one batch after the other, in order, as far ahead
 * as there are free slots; what a sample becomes depends on its index and the epoch only, never on who loads it.
 *
 * Waits here are for threads of this process whose work is bounded by the caps on files and images (or by the user's
 * own get), and which wake the waiter whatever becomes of that work: so they have no timeout. */
#define _GNU_SOURCE
#include "base/os.h"
#include "data/loader.h"

#include <signal.h>

/* -- one sample --------------------------------------------------------------------------------------------------- */
static mu_status load_floats(mui_worker *w, int64_t index, mui_draw draw, float *x, int64_t *y, mui_trouble *trouble)
{
    mu_loader *l = w->loader;
    mu_dataset *d = l->dataset;
    if (mui_augment_is_copy(&l->augment)) {
        return d->kind->floats(d, index, x, y, trouble);
    }
    mu_status s = d->kind->floats(d, index, w->raw, y, trouble);
    if (s == MU_OK) {
        mui_augment_floats(&l->augment, draw, w->raw, x);
    }
    return s;
}

/* Sample i of the slot's batch. */
static void load_sample(mui_worker *w, mui_slot *slot, int64_t i)
{
    mu_loader *l = w->loader;
    mu_dataset *d = l->dataset;
    int64_t index = mui_sampler_index(&l->sampler, slot->slice.first + i);
    float *x = slot->x + i * d->elements;
    mui_trouble *trouble = &slot->trouble[i];
    mui_draw draw = mui_augment_draw(&l->augment, l->epoch, index);
    slot->indices[i] = index;
    slot->y[i] = 0;
    trouble->status = MU_OK;
    if (d->kind->bytes == NULL) {
        (void)load_floats(w, index, draw, x, &slot->y[i], trouble); /* the outcome is in trouble */
        return;
    }
    const uint8_t *pixels = NULL;
    if (d->kind->bytes(d, &w->scratch, index, &pixels, &slot->y[i], trouble) == MU_OK) {
        mui_augment_bytes(&l->augment, draw, pixels, x);
    }
}

/* -- threads ------------------------------------------------------------------------------------------------------ */
/* Batch `step` will be loaded into its slot. Under the lock, or paused. It comes before anybody can wait for the batch:
 * in resume for the first, in release when the batch's slot had to become free first, else in claim, in the critical
 * section in which its predecessor became ready. So a batch without samples, ready from here on, needs no signal. */
static void prepare(mu_loader *l, int64_t step)
{
    mui_slot *slot = &l->slots[step % l->slot_count];
    slot->step = step;
    slot->slice = mui_sampler_slice(&l->sampler, step);
    slot->claimed = slot->done = 0;
}

/* Under the lock: a chunk to load, or false. */
static bool claim(mu_loader *l, mui_slot **slot, int64_t *first, int64_t *count)
{
    while (!l->paused && !l->closing && l->fill < l->limit) {
        mui_slot *s = &l->slots[l->fill % l->slot_count];
        int64_t left = s->slice.count - s->claimed;
        if (left > 0) {
            *slot = s;
            *first = s->claimed;
            *count = left < l->chunk ? left : l->chunk;
            s->claimed += *count;
            return true;
        }
        l->fill++;
        if (l->fill < l->limit) {
            prepare(l, l->fill);
        }
    }
    return false;
}

static void *work(void *argument)
{
    mui_worker *w = argument;
    mu_loader *l = w->loader;
    mui_slot *slot = NULL;
    int64_t first = 0, count = 0;
    pthread_mutex_lock(&l->lock);
    while (!l->closing) {
        if (!claim(l, &slot, &first, &count)) {
            pthread_cond_wait(&l->work, &l->lock);
            continue;
        }
        l->busy++;
        pthread_mutex_unlock(&l->lock);
        /* Relaxed, paired with the store in mui_workers_pause: a late look costs one more sample, nothing else. */
        for (int64_t i = first; i < first + count && !__atomic_load_n(&l->cancel, __ATOMIC_RELAXED); i++) {
            load_sample(w, slot, i);
        }
        pthread_mutex_lock(&l->lock);
        l->busy--;
        slot->done += count;
        if (slot->done == slot->slice.count || l->busy == 0) {
            pthread_cond_broadcast(&l->ready);
        }
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

mu_status mui_workers_start(mu_loader *l)
{
    /* Signals are the program's business: they go to threads that it made. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    mu_status s = MU_OK;
    while (l->running < l->thread_count) {
        mui_worker *w = &l->workers[l->running];
        int e = pthread_create(&w->thread, NULL, work, w);
        if (e != 0) {
            s = mui_fail(l->context, MU_ERR_IO, "cannot start loader thread %d of %d: %s", l->running,
                         l->thread_count, mui_errno_text(e));
            break;
        }
        l->running++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s;
}

void mui_workers_pause(mu_loader *l)
{
    __atomic_store_n(&l->cancel, 1, __ATOMIC_RELAXED); /* partner: the loop in work */
    pthread_mutex_lock(&l->lock);
    l->paused = true;
    while (l->busy > 0) {
        pthread_cond_wait(&l->ready, &l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    __atomic_store_n(&l->cancel, 0, __ATOMIC_RELAXED);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

void mui_workers_resume(mu_loader *l, int64_t first)
{
    pthread_mutex_lock(&l->lock);
    for (int64_t i = 0; i < l->slot_count; i++) {
        l->slots[i].step = -1; /* what an earlier epoch left is no batch of this one */
    }
    l->fill = first;
    l->limit = least(l->sampler.end, first + l->slot_count);
    if (first < l->limit) {
        prepare(l, first);
    }
    l->paused = false;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
}

void mui_workers_stop(mu_loader *l)
{
    mui_workers_pause(l);
    pthread_mutex_lock(&l->lock);
    l->closing = true;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->running; i++) {
        pthread_join(l->workers[i].thread, NULL);
    }
    l->running = 0;
}

mui_slot *mui_workers_wait(mu_loader *l, int64_t step)
{
    mui_slot *slot = &l->slots[step % l->slot_count];
    if (l->thread_count == 0) {
        prepare(l, step);
        for (int64_t i = 0; i < slot->slice.count; i++) {
            load_sample(&l->workers[0], slot, i);
        }
        return slot;
    }
    pthread_mutex_lock(&l->lock);
    while (slot->step != step || slot->done < slot->slice.count) {
        pthread_cond_wait(&l->ready, &l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return slot;
}

void mui_workers_release(mu_loader *l, int64_t step)
{
    pthread_mutex_lock(&l->lock);
    int64_t limit = least(l->sampler.end, step + 1 + l->slot_count);
    if (limit > l->limit) {
        /* When everything up to the old limit was claimed, its slot is prepared here: no thread is at it. */
        if (l->fill == l->limit) {
            prepare(l, l->fill);
        }
        l->limit = limit;
        pthread_cond_broadcast(&l->work);
    }
    pthread_mutex_unlock(&l->lock);
}
