/* Threads that run one function together. */
#include "base/team.h"
#include "base/alloc.h"
#include "base/os.h"

#include <signal.h>

typedef struct member {
    mui_team *team;
    pthread_t thread;
    int index;
} member;

struct mui_team {
    mu_context *context;
    member *members; /* [0] is whoever calls */
    int started;     /* threads */
    pthread_mutex_t lock;
    pthread_cond_t begin, done;
    /* Under the lock. */
    uint64_t round;
    int wanted, running;
    mui_team_fn fn;
    void *user;
    bool closing;
};

static void *work(void *argument)
{
    const member *m = argument;
    mui_team *t = m->team;
    uint64_t seen = 0;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->closing && t->round == seen) {
            pthread_cond_wait(&t->begin, &t->lock);
        }
        if (t->closing) {
            break;
        }
        seen = t->round;
        if (m->index >= t->wanted) {
            continue;
        }
        mui_team_fn fn = t->fn;
        void *user = t->user;
        pthread_mutex_unlock(&t->lock);
        fn(user, m->index);
        pthread_mutex_lock(&t->lock);
        if (--t->running == 0) {
            pthread_cond_signal(&t->done);
        }
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static mu_status start(mui_team *t, int members)
{
    /* Signals are the program's business: they go to threads that it made. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    mu_status s = MU_OK;
    for (int i = 1; i < members && s == MU_OK; i++) {
        t->members[i] = (member){.team = t, .index = i};
        int e = pthread_create(&t->members[i].thread, NULL, work, &t->members[i]);
        if (e != 0) {
            s = mui_fail(t->context, MU_ERR_IO, "cannot start thread %d of %d: %s", i, members - 1, mui_errno_text(e));
        } else {
            t->started++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s;
}

mui_team *mui_team_new(mu_context *c, int members)
{
    mui_team *t = mui_calloc(c, 1, sizeof(*t));
    member *list = t != NULL ? mui_calloc(c, (size_t)members, sizeof(*list)) : NULL;
    if (list == NULL) {
        mui_free(c, t);
        return NULL;
    }
    t->context = c;
    t->members = list;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->begin, NULL);
    pthread_cond_init(&t->done, NULL);
    if (start(t, members) != MU_OK) {
        mui_team_free(t);
        return NULL;
    }
    return t;
}

void mui_team_free(mui_team *t)
{
    if (t == NULL) {
        return;
    }
    pthread_mutex_lock(&t->lock);
    t->closing = true;
    pthread_cond_broadcast(&t->begin);
    pthread_mutex_unlock(&t->lock);
    for (int i = 1; i <= t->started; i++) {
        pthread_join(t->members[i].thread, NULL);
    }
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->begin);
    pthread_mutex_destroy(&t->lock);
    mui_free(t->context, t->members);
    mui_free(t->context, t);
}

void mui_team_run(mui_team *t, int members, mui_team_fn fn, void *user)
{
    int others = members - 1 < t->started ? members - 1 : t->started;
    if (others > 0) {
        pthread_mutex_lock(&t->lock);
        t->fn = fn;
        t->user = user;
        t->wanted = others + 1;
        t->running = others;
        t->round++;
        pthread_cond_broadcast(&t->begin);
        pthread_mutex_unlock(&t->lock);
    }
    fn(user, 0);
    if (others > 0) {
        pthread_mutex_lock(&t->lock);
        while (t->running > 0) {
            pthread_cond_wait(&t->done, &t->lock);
        }
        pthread_mutex_unlock(&t->lock);
    }
}
