/* A step does, from the third on, only what it must do every time: it takes no memory, makes no kernel, and converts
 * between layouts only where expected() says why. Counts, not times: they are the same on a busy machine. */
#define _GNU_SOURCE /* pthread_barrier_t */
#include "comm/ranks.h"

#include "comm/group.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

/* Counted by standing in for glibc's malloc in this program; not with sanitizers, which do that themselves. */
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS 1
#endif
static int64_t calls;
static bool counting;

#ifdef COUNTS
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
static void count(void)
{
    if (__atomic_load_n(&counting, __ATOMIC_RELAXED)) {
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    }
}

#define EXPORT __attribute__((visibility("default")))
EXPORT void *malloc(size_t bytes)
{
    count();
    return __libc_malloc(bytes);
}

EXPORT void *calloc(size_t n, size_t bytes)
{
    count();
    return __libc_calloc(n, bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes)
{
    count();
    return __libc_memalign(alignment, bytes);
}
#endif

enum { RANKS = 2, BATCH = 2, WARM = 2, STEADY = 3 };

typedef struct network {
    const char *name;
    int channels, side;
    const char *small_maps; /* from this layer on, maps have 64 positions or fewer; NULL: irrelevant, few channels */
    mu_module *(*make)(mu_context *c);
} network;

static mu_module *resnet18(mu_context *c)
{
    return mu_resnet(c, 18, &(mu_resnet_options){.classes = 10});
}

static mu_module *resnet18_cifar_stem(mu_context *c)
{
    mu_module *m = resnet18(c);
    mu_conv_options stem = {.stride = 1, .padding = 1, .no_bias = true};
    CHECK(mu_module_replace(m, "conv1", mu_conv2d_layer(c, 3, 64, 3, &stem)) == MU_OK, "conv1");
    CHECK(mu_module_replace(m, "maxpool", mu_identity_layer(c)) == MU_OK, "maxpool");
    return m;
}

static mu_module *resnet20(mu_context *c)
{
    return mu_resnet_cifar(c, 20, &(mu_resnet_options){.in_channels = 1});
}

static mu_module *small_cnn(mu_context *c)
{
    return mu_small_cnn(c, 1, 28, 10);
}

static mu_module *mlp(mu_context *c)
{
    return mu_mlp(c, 784, (const int64_t[]){256, 128}, 2, 10);
}

static const network networks[] = {
    {"ResNet-18", 3, 64, "layer2", resnet18},
    {"ResNet-18 with the CIFAR stem", 3, 32, "layer3", resnet18_cifar_stem},
    {"ResNet-20", 1, 28, NULL, resnet20},
    {"small CNN", 1, 28, NULL, small_cnn},
    {"MLP", 1, 28, NULL, mlp},
};
enum { NETWORKS = sizeof(networks) / sizeof(networks[0]) };

typedef struct job {
    const network *net;
    bool adam, no_winograd, traced;
    mu_kernel_choice kernels;
    pthread_barrier_t *together; /* NULL: alone */
} job;

/* -- what a step has to convert ---------------------------------------------------------------------------------- */
typedef struct limits {
    const network *net;
    int convolutions, taps;
    uint64_t layouts, weights;
} limits;

static bool look_at(void *user, const char *name, mu_parameter *p)
{
    limits *l = user;
    mu_dims d = mu_tensor_dims(mu_parameter_tensor(p));
    if (d.ndim != 4) {
        return true;
    }
    bool square = d.dim[2] * d.dim[3] > 1;
    l->convolutions++;
    l->taps += square && d.dim[0] >= 128 && d.dim[1] >= 128 && l->net->small_maps != NULL &&
               strcmp(name, l->net->small_maps) >= 0;
    return true;
}

/* Of layouts: flatten makes the blocked form row-major, and backward the other way; gradients of weights over small maps
 * are matrix products, for which images and their gradients are put channels last; the first convolution's gradient may
 * want an image of one channel blocked.
 * Of weights: one for each gradient of data, which the first convolution has none of (its gradient of weights may come in
 * another form instead), and one for each gradient by matrix products. Winograd, where the machine has it, takes the stored
 * form in all directions and makes no matrix products: it only saves conversions. */
static limits expected(mu_module *m, const job *j)
{
    limits l = {.net = j->net};
    CHECK(mu_module_each_parameter(m, look_at, &l) == MU_OK, "parameters");
    if (l.convolutions > 0) {
        l.layouts = 2 + 2 * (uint64_t)l.taps + (j->net->channels == 1);
        l.weights = (uint64_t)(l.convolutions + l.taps);
    }
    return l;
}

/* -- steps ------------------------------------------------------------------------------------------------------- */
static bool step(mu_tape *t, mu_module *m, mu_ddp *d, mu_optimizer *o, const job *j, const float *x, const int64_t *y)
{
    mu_tensor *in = mu_tensor_from(t, MU_DIMS(BATCH, j->net->channels, j->net->side, j->net->side), x);
    mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, m, in), mu_tensor_from_i64(t, MU_DIMS(BATCH), y));
    mu_status s = d != NULL ? mu_ddp_backward(d, t, loss) : mu_backward(t, loss);
    bool fine = s == MU_OK && mu_optimizer_step(o) == MU_OK;
    mu_tape_reset(t);
    return fine;
}

static void meet(const job *j)
{
    if (j->together != NULL) {
        pthread_barrier_wait(j->together);
    }
}

static void train(mu_context *c, mu_group *g, const job *j)
{
    mu_module *m = j->net->make(c);
    mu_ddp *d = g != NULL ? mu_ddp_wrap(m, g, NULL) : NULL;
    mu_optimizer *o = j->adam ? mu_adam(m, 1e-3F, NULL) : mu_sgd(m, 0.01F, &(mu_sgd_options){.momentum = 0.9F});
    mu_tape *t = mu_tape_new(c, NULL);
    static const float x[BATCH * 3 * 64 * 64] = {0.5F, -1.0F};
    static const int64_t y[BATCH] = {1, 7};
    limits most = expected(m, j);
    for (int i = 0; i < WARM; i++) {
        CHECK(step(t, m, d, o, j, x, y), "%s: %s", j->net->name, mu_context_message(c));
    }
    meet(j);
    __atomic_store_n(&counting, true, __ATOMIC_RELAXED);
    meet(j);
    for (int i = 0; i < STEADY; i++) {
        mu_counters before, now;
        mu_context_counters(c, &before);
        bool fine = step(t, m, d, o, j, x, y);
        mu_context_counters(c, &now);
        unsigned long long layouts = now.layout_conversions - before.layout_conversions,
                           weights = now.weight_conversions - before.weight_conversions;
        CHECK(fine, "%s: %s", j->net->name, mu_context_message(c));
        CHECK(now.allocations == before.allocations, "%s, step %d", j->net->name, WARM + i);
        CHECK(now.primitives == before.primitives, "%s, step %d", j->net->name, WARM + i);
        CHECK(layouts <= most.layouts, "%s, step %d: %llu", j->net->name, WARM + i, layouts);
        CHECK(weights <= most.weights, "%s, step %d: %llu", j->net->name, WARM + i, weights);
    }
    meet(j);
    __atomic_store_n(&counting, false, __ATOMIC_RELAXED);
    meet(j);
}

static void *rank_of(void *p)
{
    rank_job *r = p;
    const job *j = r->arg;
    mu_context *c = mu_context_open(&(mu_context_options){
        .log_level = MU_LOG_QUIET, .kernels = j->kernels, .no_winograd = j->no_winograd, .threads = 1});
    mu_group *g = r->world != NULL ? mu_group_threads(c, r->world, r->rank) : NULL;
    CHECK(r->world == NULL || g != NULL, "join: %s", mu_context_message(c));
    char file[64] = "";
    if (j->traced) { /* records beside, into a file that is gone at once */
        snprintf(file, sizeof(file), "/tmp/muster-steady-%d.%d", (int)getpid(), r->rank);
        CHECK(mu_trace_open(c, g, file, &(mu_trace_options){.flush_seconds = 0.001}) == MU_OK, "%s", mu_context_message(c));
        snprintf(file, sizeof(file), "/tmp/muster-steady-%d.%d.%d", (int)getpid(), r->rank, r->rank);
        CHECK(unlink(file) == 0, "%s", file);
    }
    train(c, g, j);
    CHECK(mu_context_status(c) == MU_OK, "%s", mu_context_message(c));
    mu_context_close(c);
    return NULL;
}

static void with_ranks(job *j)
{
    pthread_barrier_t together;
    pthread_t thread[RANKS];
    rank_job rank[RANKS];
    mu_thread_world *w = mu_thread_world_new(RANKS, NULL);
    assert_int_equal(pthread_barrier_init(&together, NULL, RANKS), 0);
    j->together = &together;
    for (int r = 0; r < RANKS; r++) {
        rank[r] = (rank_job){.world = w, .rank = r, .size = RANKS, .arg = j};
        assert_int_equal(pthread_create(&thread[r], NULL, rank_of, &rank[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(thread[r], NULL);
    }
    pthread_barrier_destroy(&together);
    mu_thread_world_free(w);
}

static void steps_repeat_no_work(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * NETWORKS; i++) {
        job j = {.net = &networks[i / 2], .adam = i % 2 != 0, .no_winograd = i % 2 == 0, .traced = i % 4 == 0};
        rank_of(&(rank_job){.arg = &j});
        with_ranks(&j);
        assert_int_equal(failures, 0);
    }
}

/* With the plain kernels, whatever takes memory is Muster's: oneDNN does in its calls, see test_kern_steady.c. */
static void malloc_is_never_called(void **state)
{
    (void)state;
#ifdef COUNTS
    int64_t none = calls;
    counting = true;
    mu_context *c = mu_context_open(NULL); /* the counting works */
    counting = false;
    mu_context_close(c);
    assert_true(calls > none);
#endif
    for (int i = NETWORKS - 2; i < NETWORKS; i++) {
        job j = {.net = &networks[i], .adam = i % 2 != 0, .kernels = MU_KERNELS_REFERENCE, .traced = true};
        int64_t before = calls;
        rank_of(&(rank_job){.arg = &j});
        with_ranks(&j);
        assert_int_equal(failures, 0);
        assert_int_equal(calls, before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_repeat_no_work), cmocka_unit_test(malloc_is_never_called)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
