/* Ten steps of ResNet-20 on 1, 2 and 4 ranks, as threads and as processes, on the same global batch.
 *
 * Batch norm uses the statistics of what it is given, so the global batch is cut into 4 fixed shards: a rank of N runs
 * a forward for each of its 4/N shards and one reduction over the mean of their losses. All runs then compute the same
 * function, and differ only in the order of sums.
 *
 * That difference does not stay small by itself. A difference of one rounding flips a ReLU here and there, each flip
 * moves a gradient by parts in a thousand, and after some steps the runs are apart: one rank as much from itself, when
 * its first weights are changed by one rounding. Hence two measures. Guided: each step of N ranks starts from the
 * parameters that one rank had there, and must end within 1e-5 of where that one ended. Free: ten steps by themselves
 * must not lead further from one rank than a few times one rounding does; and at the small rate of a careful
 * fine-tuning, where flips have less to work with, all parameters together stay within 1e-5 of their norm.
 *
 * Under mpirun: on that many ranks over MPI, free against threads (bit for bit) and guided against one rank. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, RTLD_DEFAULT */
#include "comm/mpi_ranks.h"
#include "rig.h"

#include <muster/layers.h>
#include <muster/optim.h>
#include <sys/mman.h>

enum { SHARDS = 4, IMAGES = 4, SIDE = 28, STEPS = 10, STEPS_OVER_MPI = 4, FLOATS = 1 << 19 };

typedef struct result {
    int64_t count, param_count;
    int64_t start[257];
    char names[256][48];
    float losses[STEPS];            /* of rank 0's shards */
    float after[STEPS + 1][FLOATS]; /* values before the first step and after each */
} result;

typedef struct run {
    result *out;
    result *guide;       /* start each step from its values; NULL: free */
    bool send_guide;     /* rank 0 alone has it */
    bool perturbed;      /* the first weights are changed by one rounding */
    bool gentle;         /* a small learning rate */
    int steps;           /* 0: STEPS */
} run;

static void set_values(mu_module *net, const result *from, const float *values, float factor)
{
    for (int64_t i = 0; i < from->param_count; i++) {
        mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(net, from->names[i]));
        int64_t n = from->start[i + 1] - from->start[i];
        float *x = malloc((size_t)n * sizeof(float));
        for (int64_t k = 0; k < n; k++) {
            x[k] = values[from->start[i] + k] * factor;
        }
        CHECK(mu_tensor_write(w, x, n) == MU_OK, "write %s", from->names[i]);
        free(x);
    }
}

static void note_values(result *out, mu_module *net, int step)
{
    snapshot s = snap(net);
    CHECK(s.count <= FLOATS, "%d floats", (int)s.count);
    out->count = s.count;
    out->param_count = s.param_count;
    memcpy(out->names, s.names, sizeof(s.names));
    memcpy(out->start, s.start, sizeof(s.start));
    memcpy(out->after[step], s.values, (size_t)s.count * sizeof(float));
    snap_free(&s);
}

static mu_tensor *shard_loss(mu_tape *t, mu_module *net, int step, int shard)
{
    static const int64_t pixels = SIDE * SIDE;
    float *x = malloc(sizeof(float) * (size_t)(IMAGES * pixels));
    int64_t y[IMAGES];
    for (int i = 0; i < IMAGES; i++) {
        uint64_t id = (uint64_t)((step * SHARDS + shard) * IMAGES + i);
        y[i] = (int64_t)(mix(id) % 10);
        for (int64_t k = 0; k < pixels; k++) {
            float noise = (float)(mix(id * 1000003 + (uint64_t)k) % 2001) / 5000.0F - 0.2F;
            x[i * pixels + k] = sinf(0.1F * (float)((y[i] + 2) * (k % SIDE) + (7 - y[i]) * (k / SIDE))) + noise;
        }
    }
    mu_tensor *in = mu_tensor_from(t, MU_DIMS(IMAGES, 1, SIDE, SIDE), x);
    free(x);
    return mu_cross_entropy(t, mu_forward(t, net, in), mu_tensor_from_i64(t, MU_DIMS(IMAGES), y));
}

static mu_tensor *own_loss(mu_tape *t, mu_module *net, int step, int rank, int size)
{
    mu_tensor *sum = NULL;
    for (int shard = rank * (SHARDS / size); shard < (rank + 1) * (SHARDS / size); shard++) {
        mu_tensor *loss = shard_loss(t, net, step, shard);
        sum = sum == NULL ? loss : mu_add(t, sum, loss);
    }
    return mu_scale(t, sum, (float)size / SHARDS);
}

static void train(mu_group *g, int rank, int size, void *arg)
{
    run *job = arg;
    result *out = job->out;
    mu_context *c = g->context;
    mu_module *net = mu_resnet_cifar(c, 20, &(mu_resnet_options){.in_channels = 1});
    mu_ddp *d = mu_ddp_wrap(net, g, &(mu_ddp_options){.bucket_bytes = 200000, .first_bucket_bytes = 20000});
    mu_optimizer *sgd = mu_sgd(net, job->gentle ? 1e-4F : 0.05F, &(mu_sgd_options){.momentum = 0.9F, .weight_decay = 1e-4F});
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(d != NULL && sgd != NULL && t != NULL, "set-up: %s", mu_context_message(c));
    if (job->send_guide) {
        CHECK(mu_broadcast(g, job->guide, sizeof(*job->guide), 0) == MU_OK, "%s", mu_context_message(c));
    }
    if (rank == 0) {
        note_values(out, net, 0);
    }
    if (job->perturbed) {
        set_values(net, out, out->after[0], 1.0F + 6e-8F);
    }
    for (int step = 0; step < (job->steps > 0 ? job->steps : STEPS) && mu_context_status(c) == MU_OK; step++) {
        if (job->guide != NULL) {
            set_values(net, job->guide, job->guide->after[step], 1.0F);
        }
        mu_tape_reset(t);
        mu_tensor *loss = own_loss(t, net, step, rank, size);
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "step %d: %s", step, mu_context_message(c));
        check_replicas(g, net, "before the step");
        CHECK(mu_optimizer_step(sgd) == MU_OK, "step %d: %s", step, mu_context_message(c));
        if (rank == 0) {
            out->losses[step] = mu_tensor_item(loss);
            note_values(out, net, step + 1);
        }
    }
    CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_ddp_get_report(d).buckets > 3, "%d buckets", mu_ddp_get_report(d).buckets);
    check_replicas(g, net, "at the end");
}

static double norm_of(const float *a, const float *b, int64_t from, int64_t to)
{
    double sum = 0;
    for (int64_t k = from; k < to; k++) {
        sum += pow((double)a[k] - (b != NULL ? (double)b[k] : 0.0), 2);
    }
    return sqrt(sum);
}

/* Largest difference of a parameter after a step, in norm, relative to the parameter's norm. */
static double distance(const result *a, const result *b, int step)
{
    double worst = 0;
    for (int64_t i = 0; i < b->param_count; i++) {
        double far = norm_of(a->after[step], b->after[step], b->start[i], b->start[i + 1]) /
                     norm_of(b->after[step], NULL, b->start[i], b->start[i + 1]);
        worst = far > worst || isnan(far) ? far : worst;
    }
    return worst;
}

/* Of all parameters together after the last step, relative to their norm. */
static double apart(const result *a, const result *b)
{
    return norm_of(a->after[STEPS], b->after[STEPS], 0, b->count) / norm_of(b->after[STEPS], NULL, 0, b->count);
}

/* Of all parameters together, relative to how far one rank has moved. */
static double drift(const result *a, const result *b)
{
    return norm_of(a->after[STEPS], b->after[STEPS], 0, b->count) / norm_of(b->after[STEPS], b->after[0], 0, b->count);
}

static void start_run(bool processes, int size, run job)
{
    int bad = processes ? run_processes(size, train, &job, NULL, true) : run_threads(size, train, &job, NULL, true);
    assert_int_equal(bad, 0);
}

static void n_ranks_equal_one(void **state)
{
    (void)state;
    enum { ONE, PERTURBED, FREE, AGAIN, GUIDED, THREADS, RESULTS };
    /* Shared with children, which are the ranks of the shm runs. */
    size_t bytes = sizeof(result) * RESULTS;
    result *r = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(r != MAP_FAILED);
    start_run(false, 1, (run){.out = &r[ONE]});
    start_run(false, 1, (run){.out = &r[PERTURBED], .perturbed = true});
    double rounding = drift(&r[PERTURBED], &r[ONE]);
    printf("1 rank, first weights off by one rounding: after %d steps apart by %.2g of the way\n", STEPS, rounding);
    for (int size = 2; size <= SHARDS; size *= 2) {
        for (int processes = 0; processes < 2; processes++) {
            start_run(processes, size, (run){.out = &r[FREE]});
            start_run(processes, size, (run){.out = &r[AGAIN]});
            start_run(processes, size, (run){.out = &r[GUIDED], .guide = &r[ONE]});
            bool same = memcmp(&r[FREE], &r[AGAIN], sizeof(result)) == 0;
            double worst = 0;
            for (int step = 1; step <= STEPS; step++) {
                double far = distance(&r[GUIDED], &r[ONE], step);
                worst = far > worst || isnan(far) ? far : worst;
            }
            printf(
                "%d %-9s  each step from the same start: at most %.2g of a parameter; free: apart by %.2g of the way; "
                "again: %s\n",
                size, processes ? "processes" : "threads", worst, drift(&r[FREE], &r[ONE]),
                same ? "bitwise equal" : "DIFFERENT");
            assert_true(worst <= 1e-5);
            assert_true(drift(&r[FREE], &r[ONE]) <= 4 * rounding);
            assert_true(same);
            if (processes) { /* threads and shared memory run the same sums */
                assert_int_equal(memcmp(&r[FREE], &r[THREADS], sizeof(result)), 0);
            } else {
                memcpy(&r[THREADS], &r[FREE], sizeof(result));
            }
        }
    }
    start_run(false, 1, (run){.out = &r[ONE], .gentle = true});
    for (int size = 2; size <= SHARDS; size *= 2) {
        start_run(false, size, (run){.out = &r[FREE], .gentle = true});
        double far = apart(&r[FREE], &r[ONE]);
        printf("%d ranks, small learning rate, free: %d steps apart by %.2g of all parameters, which moved by %.2g\n",
               size, STEPS, far,
               norm_of(r[ONE].after[STEPS], r[ONE].after[0], 0, r[ONE].count) /
                   norm_of(r[ONE].after[0], NULL, 0, r[ONE].count));
        assert_true(far <= 1e-5);
    }
    munmap(r, bytes);
}

static void start_over_mpi(run job)
{
    assert_int_equal(run_mpi(mpi_world(), train, &job, NULL, true), 0);
}

static void n_ranks_equal_one_over_mpi(void **state)
{
    (void)state;
    enum { ONE, FREE, GUIDED, THREADS, RESULTS };
    int size = mpi_world();
    bool first = atoi(getenv(getenv("PMI_RANK") != NULL ? "PMI_RANK" : "OMPI_COMM_WORLD_RANK")) == 0;
    result *r = calloc(RESULTS, sizeof(*r));
    assert_non_null(r);
    if (first) {
        start_run(false, 1, (run){.out = &r[ONE], .steps = STEPS_OVER_MPI});
        start_run(false, size, (run){.out = &r[THREADS], .steps = STEPS_OVER_MPI});
    }
    start_over_mpi((run){.out = &r[FREE], .steps = STEPS_OVER_MPI});
    start_over_mpi((run){.out = &r[GUIDED], .guide = &r[ONE], .send_guide = true, .steps = STEPS_OVER_MPI});
    double worst = 0;
    for (int step = 1; step <= STEPS_OVER_MPI && first; step++) {
        double far = distance(&r[GUIDED], &r[ONE], step);
        worst = far > worst || isnan(far) ? far : worst;
    }
    if (first) {
        printf("%d ranks over MPI  each step from the same start: at most %.2g of a parameter\n", size, worst);
        assert_true(worst <= 1e-5);
        assert_int_equal(memcmp(&r[FREE], &r[THREADS], sizeof(result)), 0);
    }
    free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(n_ranks_equal_one)};
    const struct CMUnitTest over_mpi[] = {cmocka_unit_test(n_ranks_equal_one_over_mpi)};
    int bad = mpi_world() > 0 ? cmocka_run_group_tests(over_mpi, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
    mpi_end();
    return bad;
}
