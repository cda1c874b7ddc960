/* A rank is killed or stops at a random moment of training: the others end, soon, with an error that names it. */
#include "rig.h"

enum { RANKS = 3, KILLS = 40 };

static int victim; /* of this round; set before forking */

/* Trains until it fails; then the error must be about the victim. */
static void train_for_ever(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_module_buffer(m, "stat", MU_DIMS(3), MU_F32, 0);
    size_t bucket = *(size_t *)arg;
    mu_ddp *d =
        mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = bucket, .first_bucket_bytes = bucket, .check_every = 5});
    mu_tape *t = mu_tape_new(c, NULL);
    mu_status s = d != NULL && t != NULL ? MU_OK : mu_context_status(c);
    for (int step = 0; s == MU_OK; step++) {
        mu_tape_reset(t);
        s = mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", (uint64_t)(step * 10 + rank)));
        if (s == MU_OK) {
            toy_optimizer_step(m, 0.01F);
        }
    }
    char who[32];
    snprintf(who, sizeof(who), "rank %d", victim);
    CHECK(s == MU_ERR_PEER && mu_context_status(c) == MU_ERR_PEER, "%d %s", (int)s, mu_context_message(c));
    CHECK(strstr(mu_context_message(c), who) != NULL, "`%s` does not name %s", mu_context_message(c), who);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Kills one of the ranks after some microseconds; returns how long the others took to end, in seconds. */
static double kill_one(int round, size_t bucket)
{
    char name[64];
    fresh_name(name);
    victim = (int)(mix((uint64_t)round) % RANKS);
    static const mu_group_options options = {.timeout_seconds = 60, .arena_bytes = 1 << 20};
    pid_t pid[RANKS];
    for (int r = 0; r < RANKS; r++) {
        pid[r] = fork_rank(name, r, RANKS, train_for_ever, &bucket, &options, false);
    }
    long us = 30000 + (long)(mix((uint64_t)round + 1000) % 60000);
    struct timespec nap = {.tv_nsec = us * 1000};
    nanosleep(&nap, NULL);
    kill(pid[victim], SIGKILL);
    double begin = now();
    int left = RANKS, bad = 0;
    while (left > 0 && now() - begin < 20) {
        int status;
        pid_t done = waitpid(-1, &status, WNOHANG);
        if (done > 0) {
            left--;
            bad += done != pid[victim] && (!WIFEXITED(status) || WEXITSTATUS(status) != 0);
        } else {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    }
    double took = now() - begin;
    for (int r = 0; r < RANKS && left > 0; r++) {
        kill(pid[r], SIGKILL);
        waitpid(pid[r], NULL, 0);
    }
    assert_int_equal(left, 0);
    assert_int_equal(bad, 0);
    return took;
}

static void killed_ranks_are_named_by_the_others(void **state)
{
    (void)state;
    double worst = 0;
    for (int round = 0; round < KILLS; round++) {
        double took = kill_one(round, round % 2 == 0 ? 1 : 1 << 20);
        worst = took > worst ? took : worst;
    }
    printf("%d kills: the others ended after at most %.3f s\n", KILLS, worst);
    assert_true(worst < 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed_ranks_are_named_by_the_others)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
