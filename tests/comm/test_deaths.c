/* Processes that are killed or stopped at any moment: the others must end, soon, with an error that names them. */
#define _GNU_SOURCE
#include "base/os.h"
#include "comm/group.h"
#include "ranks.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <cmocka.h>

/* Written by the ranks, read by the test: one page that all share. */
typedef struct board {
    int ready;            /* ranks that have joined; atomic */
    double noticed[16];   /* when a rank got its error; 0: it got none */
    mu_status status[16];
    char message[16][512];
} board;

/* All kinds of calls for ever, until an error ends it. */
static void body_endless(mu_group *g, int rank, int size, void *arg)
{
    board *b = arg;
    enum { N = 300000 };
    float *shared = mu_group_alloc(g, N * sizeof(float)), *own = calloc(N, sizeof(float));
    __atomic_fetch_add(&b->ready, 1, __ATOMIC_SEQ_CST);
    mu_status s = shared != NULL ? MU_OK : mu_context_status(g->context);
    for (uint64_t i = 0; s == MU_OK; i++) {
        char phase[64];
        snprintf(phase, sizeof(phase), "step %llu", (unsigned long long)i);
        mu_group_set_phase(g, phase);
        int64_t n = (int64_t)(mix(i) % (i % 3 == 0 ? N : 100));
        switch (mix(i * 7) % 5) {
        case 0: s = mu_barrier(g); break;
        case 1: s = mu_all_reduce(g, shared, n, MU_F32, MU_MAX); break;
        case 2: s = mu_all_reduce(g, own, n, MU_F32, MU_MAX); break;
        case 3: s = mu_broadcast(g, own, (size_t)n, (int)(i % (uint64_t)size)); break;
        default: {
            mu_request *r = mu_all_reduce_start(g, shared, n, MU_F32, MU_MAX);
            mu_request *q = r != NULL ? mu_all_reduce_start(g, own, 3, MU_F32, MU_MAX) : NULL;
            s = r != NULL ? mu_request_wait(r) : mu_context_status(g->context);
            if (q != NULL) {
                mu_status t = mu_request_wait(q);
                s = s != MU_OK ? s : t;
            }
        }
        }
    }
    b->noticed[rank] = mui_now();
    b->status[rank] = s;
    snprintf(b->message[rank], sizeof(b->message[rank]), "%s", mu_context_message(g->context));
    free(own);
}

static board *board_new(void)
{
    board *b = mmap(NULL, sizeof(*b), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(b != MAP_FAILED);
    return b;
}

static void wait_ready(const board *b, int n)
{
    for (double before = mui_now(); __atomic_load_n(&b->ready, __ATOMIC_SEQ_CST) < n;) {
        assert_true(mui_now() - before < 20);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* The exit status; the test fails when the process does not end in time. */
static int ended_within(pid_t pid, double seconds)
{
    for (double before = mui_now();;) {
        int status;
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) {
            return status;
        }
        if (mui_now() - before > seconds) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            fail_msg("pid %d did not end within %g s", (int)pid, seconds);
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static int shm_files(void)
{
    int n = 0;
    DIR *d = opendir("/dev/shm");
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        n += strstr(e->d_name, "muster") != NULL;
    }
    if (d != NULL) {
        closedir(d);
    }
    return n;
}

static void kills_at_random_moments(void **state)
{
    (void)state;
    double slowest = 0, total = 0;
    int noticed = 0;
    enum { ROUNDS = 120 };
    for (int round = 0; round < ROUNDS; round++) {
        board *b = board_new();
        int size = 2 + round % 3, victims = round % 10 == 9 ? size : 1;
        int victim = (int)(mix((uint64_t)round) % (uint64_t)size);
        char name[64];
        fresh_name(name);
        pid_t pid[4];
        mu_group_options o = {.timeout_seconds = 60, .arena_bytes = 8 << 20};
        for (int r = 0; r < size; r++) {
            pid[r] = fork_rank(name, r, size, body_endless, b, &o, false);
        }
        /* Most in the middle of work, some while the group is being made. */
        if (round % 5 != 4) {
            wait_ready(b, size);
        }
        nap_randomly((uint64_t)round * 31, 20000);
        double when = mui_now();
        for (int r = 0; r < size; r++) {
            if (victims == size || r == victim) {
                kill(pid[r], SIGKILL);
            }
        }
        if (__atomic_load_n(&b->ready, __ATOMIC_SEQ_CST) < size && victims == 1) {
            /* Killed before all had met: the others rightly wait for its successor. */
            nap_randomly(7, 30000);
            if (__atomic_load_n(&b->ready, __ATOMIC_SEQ_CST) < size) {
                for (int r = 0; r < size; r++) {
                    kill(pid[r], SIGKILL);
                }
            }
        }
        for (int r = 0; r < size; r++) {
            int status = ended_within(pid[r], 10);
            bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            if (killed) {
                continue;
            }
            assert_true(r != victim && victims == 1);
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            if (b->noticed[r] == 0) {
                fail_msg("rank %d ended without an error", r);
            }
            char want[64];
            snprintf(want, sizeof(want), "rank %d (pid %d, ", victim, (int)pid[victim]);
            if (b->status[r] != MU_ERR_PEER || strstr(b->message[r], want) == NULL ||
                strstr(b->message[r], " died: ") == NULL) {
                fail_msg("round %d, rank %d: status %d, %s", round, r, b->status[r], b->message[r]);
            }
            double took = b->noticed[r] - when;
            slowest = took > slowest ? took : slowest;
            total += took;
            noticed++;
        }
        munmap(b, sizeof(*b));
    }
    assert_true(noticed > ROUNDS);
    print_message("%d survivors noticed a death after %.1f ms on average, %.1f ms at most\n", noticed,
                  1e3 * total / noticed, 1e3 * slowest);
    /* Generous, for loaded machines; alone it is below 60 ms. */
    assert_true(total / noticed < 0.5);
    assert_int_equal(shm_files(), 0);
}

static void a_stopped_rank_times_out(void **state)
{
    (void)state;
    board *b = board_new();
    char name[64];
    fresh_name(name);
    pid_t pid[3];
    mu_group_options o = {.timeout_seconds = 2.0, .arena_bytes = 8 << 20};
    for (int r = 0; r < 3; r++) {
        pid[r] = fork_rank(name, r, 3, body_endless, b, &o, false);
    }
    wait_ready(b, 3);
    double when = mui_now();
    kill(pid[2], SIGSTOP);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(ended_within(pid[r], 10), 0);
        assert_int_equal(b->status[r], MU_ERR_TIMEOUT);
        char want[64];
        snprintf(want, sizeof(want), "missing rank 2 (pid %d, ", (int)pid[2]);
        assert_non_null(strstr(b->message[r], want));
        assert_non_null(strstr(b->message[r], "last seen: step "));
        assert_true(b->noticed[r] - when > 1.5 && b->noticed[r] - when < 6);
    }
    /* Awake again, it learns that the others have given it up. */
    kill(pid[2], SIGCONT);
    assert_int_equal(ended_within(pid[2], 10), 0);
    assert_int_equal(b->status[2], MU_ERR_TIMEOUT);
    assert_string_equal(b->message[2], b->message[0]);
    munmap(b, sizeof(*b));
}

/* -- meeting ----------------------------------------------------------------------------------------------------- */
static void body_once(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    int32_t x = rank + 1;
    CHECK(mu_all_reduce(g, &x, 1, MU_I32, MU_SUM) == MU_OK && x == size * (size + 1) / 2, "sum %d", x);
}

static void ranks_may_be_started_again_while_meeting(void **state)
{
    (void)state;
    for (int victim = 0; victim < 2; victim++) {
        char name[64];
        fresh_name(name);
        pid_t first = fork_rank(name, victim, 3, body_once, NULL, NULL, true);
        pid_t other = fork_rank(name, 1 - victim, 3, body_once, NULL, NULL, true);
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        kill(first, SIGKILL);
        ended_within(first, 5);
        pid_t again = fork_rank(name, victim, 3, body_once, NULL, NULL, true);
        pid_t last = fork_rank(name, 2, 3, body_once, NULL, NULL, true);
        assert_int_equal(ended_within(other, 10), 0);
        assert_int_equal(ended_within(again, 10), 0);
        assert_int_equal(ended_within(last, 10), 0);
    }
}

/* A rank that must not get its group; arg is what the message must say. */
static pid_t fork_refused(const char *name, int rank, int size, double timeout, mu_status want, const char *says)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) {
        return pid;
    }
    mu_context *c = quiet_context();
    mu_group *g = mu_group_shm(c, name, rank, size, &(mu_group_options){.timeout_seconds = timeout});
    bool right = g == NULL && mu_context_status(c) == want && strstr(mu_context_message(c), says) != NULL;
    if (!right) {
        fprintf(stderr, "rank %d: status %d, `%s`, not `%s`\n", rank, mu_context_status(c), mu_context_message(c), says);
    }
    mu_context_close(c);
    _exit(right ? 0 : 1);
}

static void contradictions_while_meeting(void **state)
{
    (void)state;
    char name[64];
    fresh_name(name);
    pid_t a = fork_refused(name, 0, 2, 20, MU_ERR_COMM, "one of 2 ranks, rank 1 (pid ");
    pid_t b = fork_refused(name, 1, 3, 20, MU_ERR_COMM, "one of 2 ranks, rank 1 (pid ");
    assert_int_equal(ended_within(a, 10), 0);
    assert_int_equal(ended_within(b, 10), 0);
    fresh_name(name);
    a = fork_refused(name, 0, 3, 20, MU_ERR_COMM, "both say they are rank 1");
    b = fork_refused(name, 1, 3, 20, MU_ERR_COMM, "both say they are rank 1");
    pid_t d = fork_refused(name, 1, 3, 20, MU_ERR_COMM, "both say they are rank 1");
    assert_int_equal(ended_within(a, 10), 0);
    assert_int_equal(ended_within(b, 10), 0);
    assert_int_equal(ended_within(d, 10), 0);
    fresh_name(name);
    a = fork_refused(name, 0, 4, 0.5, MU_ERR_TIMEOUT, "rank 2, 3 never came");
    b = fork_refused(name, 1, 4, 20, MU_ERR_TIMEOUT, "rank 2, 3 never came");
    assert_int_equal(ended_within(a, 10), 0);
    assert_int_equal(ended_within(b, 10), 0);
    fresh_name(name);
    a = fork_refused(name, 1, 2, 0.5, MU_ERR_TIMEOUT, "rank 0 never came");
    assert_int_equal(ended_within(a, 10), 0);
    a = fork_refused("no/slash", 0, 2, 1, MU_ERR_ARG, "group name `no/slash`");
    assert_int_equal(ended_within(a, 10), 0);
    a = fork_refused("x", 2, 2, 1, MU_ERR_ARG, "rank 2 of 2");
    assert_int_equal(ended_within(a, 10), 0);
}

/* Groups one after the other under one name, by ranks in no particular step. */
static void body_again(mu_group *g, int rank, int size, void *arg)
{
    for (int i = 0; i < 20; i++) {
        nap_randomly((uint64_t)(i * 16 + rank), 2000);
        mu_group *h = mu_group_shm(g->context, arg, rank, size, &(mu_group_options){.arena_bytes = 1 << 20});
        CHECK(h != NULL, "%s", mu_context_message(g->context));
        if (h == NULL) {
            return;
        }
        body_once(h, rank, size, NULL);
    }
}

static void one_name_many_groups(void **state)
{
    (void)state;
    char name[64];
    fresh_name(name);
    assert_int_equal(run_processes(3, body_again, name, NULL, true), 0);
}

/* -- many ranks -------------------------------------------------------------------------------------------------- */
static void body_barriers(mu_group *g, int rank, int size, void *arg)
{
    (void)rank, (void)size;
    double before = mui_now();
    for (int i = 0; i < 2000; i++) {
        CHECK(mu_barrier(g) == MU_OK, "barrier");
    }
    *(double *)arg = (mui_now() - before) / 2000;
}

static void more_ranks_than_cores(void **state)
{
    (void)state;
    double *each = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int n = 4 * mui_cores() < 16 ? 4 * mui_cores() : 16;
    assert_int_equal(run_processes(n, body_barriers, each, NULL, true), 0);
    print_message("%d ranks on %d cores: a barrier takes %.1f us\n", n, mui_cores(), *each * 1e6);
    assert_true(*each < 12e-3); /* sleeping for whole naps would take 20 ms each */
    munmap(each, 4096);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kills_at_random_moments),
        cmocka_unit_test(a_stopped_rank_times_out),
        cmocka_unit_test(ranks_may_be_started_again_while_meeting),
        cmocka_unit_test(contradictions_while_meeting),
        cmocka_unit_test(one_name_many_groups),
        cmocka_unit_test(more_ranks_than_cores),
    };
    return cmocka_run_group_tests_name("deaths", tests, NULL, NULL);
}
