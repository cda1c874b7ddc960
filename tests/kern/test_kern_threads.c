/* Our own loops by several threads: every element once, at the same time where there are threads, and the same bits for
 * any number of them. */
#include "kern/kern_util.h"
#include "kern/bf16.h"
#include "kern/engine.h"
#include "kern/share.h"

#include <pthread.h>
#include <time.h>

enum { EDGE = MUI_ALONE_BELOW, MOST = 5, PARTS = 64, LIMIT_SECONDS = 30 };
static const int64_t sizes[] = {0, 1, 333, EDGE - 1, EDGE, EDGE + 1, 3 * EDGE + 1023, (1 << 18) + 333};
enum { SIZES = (int)(sizeof(sizes) / sizeof(sizes[0])), LARGEST = (1 << 18) + 333 };

static mu_context *open_with(int threads)
{
    mu_context *c = mu_context_open(&(mu_context_options){.threads = threads});
    assert_non_null(mui_engine_of(c));
    return c;
}

/* -- parts ------------------------------------------------------------------------------------------------------ */
typedef struct seen {
    pthread_mutex_t lock;
    int64_t from[PARTS], to[PARTS];
    int count;
} seen;

static void note(void *args, int64_t from, int64_t to)
{
    seen *s = args;
    pthread_mutex_lock(&s->lock);
    if (s->count < PARTS) {
        s->from[s->count] = from;
        s->to[s->count] = to;
    }
    s->count++;
    pthread_mutex_unlock(&s->lock);
}

static void check_parts(mui_engine *e, int64_t n, int expected)
{
    seen s = {.lock = PTHREAD_MUTEX_INITIALIZER};
    mui_split(e, n, note, &s);
    assert_int_equal(s.count, expected);
    int64_t covered = 0;
    for (int i = 0; i < s.count; i++) {
        covered += s.to[i] - s.from[i];
        assert_int_equal(s.from[i] % 1024, 0);
        assert_in_range(s.to[i], s.from[i], n);
        for (int k = 0; k < i; k++) {
            assert_true(s.to[i] <= s.from[k] || s.to[k] <= s.from[i]);
        }
    }
    assert_int_equal(covered, n);
}

static void every_element_is_in_one_part(void **state)
{
    (void)state;
    for (int threads = 1; threads <= MOST; threads++) {
        mu_context *c = open_with(threads);
        for (int i = 0; i < SIZES; i++) {
            bool cut = HAVE_DNNL && sizes[i] >= EDGE;
            check_parts(mui_engine_of(c), sizes[i], cut ? threads : 1);
        }
        assert_int_equal(mu_context_close(c), MU_OK);
    }
    check_parts(NULL, LARGEST, 1); /* no engine: here */
}

/* -- at the same time ------------------------------------------------------------------------------------------- */
typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t came;
    pthread_t first;
    int count;
    bool met, same_thread;
} meeting;

/* Waits until two parts are under way. */
static void meet(void *args, int64_t from, int64_t to)
{
    (void)from;
    (void)to;
    meeting *m = args;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LIMIT_SECONDS;
    pthread_mutex_lock(&m->lock);
    if (m->count++ == 0) {
        m->first = pthread_self();
    } else {
        m->same_thread = pthread_equal(m->first, pthread_self());
        pthread_cond_signal(&m->came);
    }
    while (m->count < 2 && pthread_cond_timedwait(&m->came, &m->lock, &until) == 0) {
    }
    m->met = m->count == 2;
    pthread_mutex_unlock(&m->lock);
}

static void two_threads_work_at_the_same_time(void **state)
{
    (void)state;
    if (!HAVE_DNNL) {
        skip();
    }
    mu_context *c = open_with(2);
    meeting m = {.lock = PTHREAD_MUTEX_INITIALIZER, .came = PTHREAD_COND_INITIALIZER};
    mui_split(mui_engine_of(c), EDGE, meet, &m);
    assert_int_equal(m.count, 2);
    assert_true(m.met);
    assert_false(m.same_thread);
    assert_int_equal(mu_context_close(c), MU_OK);
}

/* -- the same bits ---------------------------------------------------------------------------------------------- */
typedef struct data {
    int64_t n;
    const float *x, *z; /* normal */
    float *out;         /* results, one after the other, each with a float behind it that stays what it is */
    int64_t at;
} data;

static float *next(data *d, const float *begin_as)
{
    float *out = d->out + d->at;
    d->at += d->n + 1;
    out[d->n] = 123;
    if (begin_as != NULL) {
        memcpy(out, begin_as, (size_t)d->n * sizeof(float));
    }
    return out;
}

static void compute_elementwise(mui_engine *e, data *d)
{
    for (int op = 0; op < MUI_UNARY_COUNT; op++) {
        float *y = next(d, NULL), *dx = next(d, NULL);
        mui_unary_forward(e, (mui_unary)op, d->n, d->x, y, 0.3f);
        mui_unary_backward(e, (mui_unary)op, d->n, d->x, y, d->z, dx, 0.3f, false);
        mui_unary_backward(e, (mui_unary)op, d->n, d->x, y, d->z, dx, 0.3f, true);
    }
    mui_add_relu_forward(e, d->n, d->x, d->z, next(d, NULL));
    mui_dropout(e, d->n, d->x, next(d, NULL), 0.3f, 5, 7);
    mui_axpy(e, d->n, 0.7f, d->x, next(d, d->z));
}

static uint16_t *next_narrow(data *d)
{
    return (uint16_t *)(void *)next(d, NULL);
}

static void compute_bf16(mui_engine *e, data *d)
{
    uint16_t *a = next_narrow(d), *b = next_narrow(d);
    mui_bf16_cast(e, d->n, d->x, a, true);
    mui_bf16_cast(e, d->n, d->z, b, true);
    mui_bf16_cast(e, d->n, a, next(d, NULL), false);
    mui_bf16_relu(e, d->n, a, next_narrow(d));
    mui_bf16_relu_backward(e, d->n, a, b, next_narrow(d));
    mui_bf16_add(e, d->n, a, b, next_narrow(d));
    mui_bf16_add_relu(e, d->n, a, b, next_narrow(d));
}

/* Three steps, so that states have a history. */
static void compute_updates(mui_engine *e, data *d)
{
    const mui_sgd_args sgd[] = {{.lr = 0.1},
                                {.lr = 0.1, .weight_decay = 0.01},
                                {.lr = 0.1, .momentum = 0.9, .dampening = 0.1},
                                {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}};
    const mui_adam_args adam[] = {{0.01, 0.9, 0.999, 1e-8, 0.01, false, 0}, {0.01, 0.9, 0.999, 1e-8, 0.01, true, 0}};
    for (int i = 0; i < 4; i++) {
        float *w = next(d, d->x), *m = next(d, d->z);
        for (int step = 0; step < 3; step++) {
            mui_sgd_args a = sgd[i];
            a.first = step == 0;
            mui_sgd_update(e, d->n, w, d->z, a.momentum != 0 ? m : NULL, &a);
        }
    }
    for (int i = 0; i < 2; i++) {
        float *w = next(d, d->x), *m = next(d, d->z), *v = next(d, NULL);
        memset(v, 0, (size_t)d->n * sizeof(float));
        for (int step = 1; step <= 3; step++) {
            mui_adam_args a = adam[i];
            a.step = step;
            mui_adam_update(e, d->n, w, d->z, m, v, &a);
        }
    }
}

enum { RESULTS = 2 * MUI_UNARY_COUNT + 3 + 7 + 4 * 2 + 2 * 3 };

static void compute(int threads, data *d)
{
    mu_context *c = open_with(threads);
    memset(d->out, 0, (size_t)(RESULTS * (d->n + 1)) * sizeof(float));
    d->at = 0;
    compute_elementwise(mui_engine_of(c), d);
    compute_bf16(mui_engine_of(c), d);
    compute_updates(mui_engine_of(c), d);
    assert_int_equal(d->at, RESULTS * (d->n + 1));
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void any_number_of_threads_gives_the_same_bits(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(NULL);
    const float *x = random_floats(c, LARGEST, 1), *z = random_floats(c, LARGEST, 2);
    float *one = floats(c, RESULTS * (LARGEST + 1)), *more = floats(c, RESULTS * (LARGEST + 1));
    for (int i = 0; i < SIZES; i++) {
        data d = {.n = sizes[i], .x = x, .z = z, .out = one};
        compute(1, &d);
        for (int k = 1; k <= RESULTS; k++) {
            assert_true(one[k * (d.n + 1) - 1] == 123);
        }
        const int counts[] = {2, 3, MOST};
        for (int k = 0; k < 3; k++) {
            data other = {.n = sizes[i], .x = x, .z = z, .out = more};
            compute(counts[k], &other);
            assert_same_bits("several threads", more, one, (size_t)d.at * sizeof(float));
        }
    }
    free_floats(c);
    assert_int_equal(mu_context_close(c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_is_in_one_part),
        cmocka_unit_test(two_threads_work_at_the_same_time),
        cmocka_unit_test(any_number_of_threads_gives_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
