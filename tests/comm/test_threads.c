/* Groups whose ranks are threads, and the group of one. */
#include "collectives.h"
#include "failures.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static const int64_t everything = 600001;

static void all_reduce_is_exact(void **state)
{
    (void)state;
    int64_t few = 65537;
    for (int n = 1; n <= 8; n++) {
        assert_int_equal(run_threads(n, body_all_reduce, n == 2 ? (void *)&everything : &few, NULL, true), 0);
    }
}

static void many_in_flight(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_in_flight, NULL, NULL, true), 0);
    }
    assert_int_equal(run_threads(7, body_in_flight, NULL, NULL, true), 0);
    assert_int_equal(run_threads(2, body_staged_in_flight, NULL, NULL, true), 0);
    assert_int_equal(run_threads(3, body_staged_in_flight, NULL, NULL, true), 0);
}

static void other_collectives(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_others, NULL, NULL, true), 0);
    }
}

static void scattered_all_reduce(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(run_threads(n, body_scattered, NULL, NULL, true), 0);
    }
}

static void heap(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, body_heap, NULL, NULL, true), 0);
}

/* -- the warning ------------------------------------------------------------------------------------------------- */
typedef struct heard {
    int warnings;
    char before[2048], text[2048]; /* the last two */
} heard;

static void listen(void *user, mu_log_level level, const char *message)
{
    heard *h = user;
    if (level == MU_LOG_WARN) {
        h->warnings++;
        snprintf(h->before, sizeof(h->before), "%s", h->text);
        snprintf(h->text, sizeof(h->text), "%s", message);
    }
}

static void *late_rank(void *world)
{
    mu_context *c = quiet_context();
    mu_group *g = mu_group_threads(c, world, 1);
    mu_group_set_phase(g, "loading the data");
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    nanosleep(&(struct timespec){.tv_nsec = 700000000}, NULL);
    CHECK(mu_barrier(g) == MU_OK, "barrier");
    mu_context_close(c);
    return NULL;
}

/* told: not by warn_seconds, but because the context was told to. */
static void one_long_wait(double warn_seconds, bool told)
{
    heard h = {0};
    mu_thread_world *w = mu_thread_world_new(2, &(mu_group_options){.warn_seconds = warn_seconds, .timeout_seconds = 60});
    mu_context *c = mu_context_open(&(mu_context_options){.log = listen, .log_user = &h});
    if (told) {
        mu_context_warn_soon(c);
    }
    mu_group *g = mu_group_threads(c, w, 0);
    pthread_t other;
    assert_int_equal(pthread_create(&other, NULL, late_rank, w), 0);
    assert_int_equal(mu_barrier(g), MU_OK);
    int before = h.warnings; /* the thread itself may start late on a busy machine */
    assert_int_equal(mu_barrier(g), MU_OK);
    assert_int_equal(h.warnings, before + 2);
    double late = 0;
    assert_int_equal(sscanf(h.text, "rank 1 came after %lf s", &late), 1);
    assert_true(late >= 0.6);
    assert_non_null(strstr(h.before, "at a barrier: missing rank 1 (after 1 calls, last seen: loading the data"));
    pthread_join(other, NULL);
    assert_int_equal(mu_context_close(c), MU_OK);
    mu_thread_world_free(w);
}

static void a_long_wait_is_logged_once(void **state)
{
    (void)state;
    one_long_wait(0.2, false);
    one_long_wait(50, true);
    mu_context_warn_soon(NULL);
}

/* A world's ranks are taken once, and by number. */
static void joining_a_world(void **state)
{
    (void)state;
    assert_null(mu_thread_world_new(0, NULL));
    assert_null(mu_thread_world_new(100000, NULL));
    mu_thread_world *w = mu_thread_world_new(2, &(mu_group_options){.timeout_seconds = 0.2});
    mu_context *c = quiet_context();
    assert_null(mu_group_threads(c, w, 2));
    assert_int_equal(mu_context_status(c), MU_ERR_ARG);
    mu_context_clear(c);
    mu_group *g = mu_group_threads(c, w, 0);
    assert_string_equal(mu_group_kind(g), "threads");
    assert_int_equal(mu_group_shard(g).size, 2);
    assert_null(mu_group_threads(c, w, 0));
    assert_int_equal(mu_context_status(c), MU_ERR_ARG);
    mu_context_clear(c);
    assert_int_equal(mu_barrier(g), MU_ERR_TIMEOUT);
    assert_non_null(strstr(mu_context_message(c), "missing rank 1 (never joined)"));
    assert_int_equal(mu_context_close(c), MU_ERR_TIMEOUT);
    mu_thread_world_free(w);
}

static void alone(void **state)
{
    (void)state;
    mu_context *c = quiet_context();
    mu_group *g = mu_group_self(c);
    assert_non_null(g);
    assert_string_equal(mu_group_kind(g), "self");
    int before = failures;
    body_all_reduce(g, 0, 1, (void *)&everything);
    body_in_flight(g, 0, 1, NULL);
    body_others(g, 0, 1, NULL);
    body_heap(g, 0, 1, NULL);
    assert_int_equal(failures, before);
    assert_int_equal(mu_context_size(c), 1);
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void failures_are_the_same_everywhere(void **state)
{
    (void)state;
    assert_int_equal(run_failures(run_threads), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_reduce_is_exact),
        cmocka_unit_test(many_in_flight),
        cmocka_unit_test(other_collectives),
        cmocka_unit_test(scattered_all_reduce),
        cmocka_unit_test(heap),
        cmocka_unit_test(failures_are_the_same_everywhere),
        cmocka_unit_test(a_long_wait_is_logged_once),
        cmocka_unit_test(joining_a_world),
        cmocka_unit_test(alone),
    };
    return cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
