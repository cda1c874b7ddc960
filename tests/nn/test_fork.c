/* A process that has computed with several threads may fork, and the child computes as well: OpenMP's threads do not
 * exist in the child, and an OpenMP that does not know waits for them for ever. */
#include <muster/muster.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BATCH = 16, SIDE = 16, STEPS = 2, LIMIT_SECONDS = 60 };

typedef struct trainer {
    mu_context *c;
    mu_module *net;
    mu_tape *t;
    mu_optimizer *o;
} trainer;

static trainer trainer_open(int threads, int replicas)
{
    trainer r = {.c = mu_context_open(&(mu_context_options){.seed = 3, .threads = threads})};
    r.net = mu_model(r.c, "cnn", &(mu_model_options){.classes = 10, .in_channels = 1, .side = SIDE});
    if (replicas > 1) {
        r.net = mu_data_parallel(r.net, &(mu_data_parallel_options){.replicas = replicas});
    }
    r.t = mu_tape_new(r.c, NULL);
    r.o = mu_sgd(r.net, 0.05f, NULL);
    return r;
}

/* The loss, or a negative number. */
static float step(trainer *r)
{
    static float x[BATCH * SIDE * SIDE];
    int64_t y[BATCH];
    for (int i = 0; i < BATCH * SIDE * SIDE; i++) {
        x[i] = (float)(i * 7919 % 1000) / 500.0f - 1.0f;
    }
    for (int i = 0; i < BATCH; i++) {
        y[i] = i % 10;
    }
    mu_tape_reset(r->t);
    mu_tensor *in = mu_tensor_from(r->t, MU_DIMS(BATCH, 1, SIDE, SIDE), x);
    mu_tensor *loss = mu_cross_entropy(r->t, mu_forward(r->t, r->net, in), mu_tensor_from_i64(r->t, MU_DIMS(BATCH), y));
    if (mu_backward(r->t, loss) < 0 || mu_optimizer_step(r->o) < 0) {
        return -1;
    }
    return mu_tensor_item(loss);
}

/* In the child: a context of its own, the same steps, the same losses. */
static int child_trains(int threads, int replicas, const float *expected)
{
    trainer r = trainer_open(threads, replicas);
    for (int i = 0; i < STEPS; i++) {
        float loss = step(&r);
        if (loss != expected[i]) {
            fprintf(stderr, "child with %d threads, step %d: loss %.9g, the parent's was %.9g\n", threads, i, (double)loss,
                    (double)expected[i]);
            return 1;
        }
    }
    return mu_context_close(r.c) == MU_OK ? 0 : 1;
}

/* What went wrong, or NULL. */
static const char *fork_and_train(int threads, int replicas)
{
    float losses[STEPS];
    trainer r = trainer_open(threads, replicas);
    for (int i = 0; i < STEPS; i++) {
        losses[i] = step(&r);
    }
    pid_t child = fork();
    if (child == 0) {
        alarm(LIMIT_SECONDS); /* one that waits for ever ends by a signal */
        _exit(child_trains(threads, replicas, losses));
    }
    /* The parent goes on meanwhile. */
    float after = step(&r);
    int status = 0;
    bool waited = child > 0 && waitpid(child, &status, 0) == child;
    float last = step(&r);
    bool closed = mu_context_close(r.c) == MU_OK;
    return !waited               ? "no child"
           : WIFSIGNALED(status) ? "the child did not end by itself"
           : status != 0         ? "the child failed"
           : !closed || !(losses[0] > 0 && losses[1] < losses[0] && after < losses[1] && last < after)
               ? "the parent does not learn"
               : NULL;
}

/* Not within the contract (base.h), but what forks for a task of its own may do so, and must not wait for ever. The child
 * goes on with its parent's context, and comes as far as the parent. */
static const char *fork_and_go_on(int threads)
{
    trainer r = trainer_open(threads, 1);
    if (!(step(&r) > 0)) {
        return "the parent does not compute";
    }
    int results[2];
    if (pipe(results) != 0) {
        return "no pipe";
    }
    pid_t child = fork();
    if (child == 0) {
        alarm(LIMIT_SECONDS);
        float loss = 0;
        for (int i = 0; i < STEPS; i++) {
            loss = step(&r);
        }
        _exit(write(results[1], &loss, sizeof(loss)) == sizeof(loss) ? 0 : 1);
    }
    int status = 0;
    bool waited = child > 0 && waitpid(child, &status, 0) == child;
    close(results[1]);
    float theirs = -1, ours = -2;
    ssize_t got = read(results[0], &theirs, sizeof(theirs));
    close(results[0]);
    for (int i = 0; i < STEPS; i++) {
        ours = step(&r);
    }
    bool closed = mu_context_close(r.c) == MU_OK;
    return !waited                                           ? "no child"
           : WIFSIGNALED(status)                             ? "the child did not end by itself"
           : status != 0 || got != (ssize_t)sizeof(theirs)   ? "the child failed"
           : !closed || memcmp(&theirs, &ours, sizeof(ours)) ? "child and parent computed different things"
                                                             : NULL;
}

static bool says_nothing(const char *problem)
{
    if (problem != NULL) {
        fprintf(stderr, "%s\n", problem);
    }
    return problem == NULL;
}

static void test_fork_after_two_threads(void **state)
{
    (void)state;
    assert_true(says_nothing(fork_and_train(2, 1)));
}

static void test_fork_after_two_replicas(void **state)
{
    (void)state;
    assert_true(says_nothing(fork_and_train(1, 2)));
}

static void test_fork_after_replicas_of_two_threads(void **state)
{
    (void)state;
    assert_true(says_nothing(fork_and_train(4, 2)));
}

static void test_child_goes_on_with_two_threads(void **state)
{
    (void)state;
    assert_true(says_nothing(fork_and_go_on(2)));
}

static void *in_thread(void *problem)
{
    *(const char **)problem = fork_and_train(2, 1);
    return NULL;
}

static void test_fork_from_a_thread(void **state)
{
    (void)state;
    pthread_t thread;
    const char *problem = "the thread did nothing";
    assert_int_equal(pthread_create(&thread, NULL, in_thread, &problem), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(says_nothing(problem));
}

/* As a program that starts others does: what was computed before does not matter to them. */
static void test_run_a_command_after_two_threads(void **state)
{
    (void)state;
    trainer r = trainer_open(2, 1);
    assert_true(step(&r) > 0);
    FILE *p = popen("exec true", "r");
    assert_non_null(p);
    assert_int_equal(pclose(p), 0);
    assert_true(step(&r) > 0);
    assert_int_equal(mu_context_close(r.c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fork_after_two_threads),
        cmocka_unit_test(test_fork_after_two_replicas),
        cmocka_unit_test(test_fork_after_replicas_of_two_threads),
        cmocka_unit_test(test_child_goes_on_with_two_threads),
        cmocka_unit_test(test_fork_from_a_thread),
        cmocka_unit_test(test_run_a_command_after_two_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
