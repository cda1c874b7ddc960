/* Wrapping: what ranks must have in common, and that they say the same when they do not. */
#include "rig.h"

typedef struct variant {
    const char *name;
    mu_module *(*others)(mu_context *c), *(*make)(mu_context *c); /* the other ranks' model, and rank 1's */
    mu_ddp_options options;            /* rank 1's */
    const char *zero, *one;            /* both sides, as the message must have them; NULL: no error */
} variant;

static const mu_init zeros = {MU_INIT_ZEROS, 0};

static mu_module *with_extra(mu_context *c)
{
    mu_module *m = toy(c);
    mu_module_parameter(mu_module_get(m, "head"), "extra", MU_DIMS(2), zeros);
    return m;
}
static mu_module *with_shape(mu_context *c)
{
    mu_module *m = toy(c), *head = mu_module_new(c, "Head", NULL);
    mu_module_parameter(head, "w", MU_DIMS(8), zeros);
    mu_module_parameter(head, "v", MU_DIMS(2), zeros);
    return mu_module_replace(m, "head", head) == MU_OK ? m : NULL;
}
static mu_module *with_name(mu_context *c)
{
    mu_module *m = toy(c), *head = mu_module_new(c, "Head", NULL);
    mu_module_parameter(head, "w", MU_DIMS(7), zeros);
    mu_module_parameter(head, "u", MU_DIMS(2), zeros);
    return mu_module_replace(m, "head", head) == MU_OK ? m : NULL;
}
static mu_module *with_order(mu_context *c)
{
    mu_module *m = toy(c), *head = mu_module_new(c, "Head", NULL);
    mu_module_parameter(head, "v", MU_DIMS(2), zeros);
    mu_module_parameter(head, "w", MU_DIMS(7), zeros);
    return mu_module_replace(m, "head", head) == MU_OK ? m : NULL;
}
static mu_module *with_frozen(mu_context *c)
{
    mu_module *m = toy(c);
    return mu_module_freeze(m, "d", NULL) == MU_OK ? m : NULL;
}
static mu_module *with_buffer(mu_context *c)
{
    mu_module *m = toy(c);
    mu_module_buffer(m, "stat", MU_DIMS(3), MU_F32, 0);
    return m;
}
static mu_module *with_counter(mu_context *c)
{
    mu_module *m = toy(c);
    mu_module_buffer(m, "seen", MU_SCALAR, MU_I64, 0);
    return m;
}
static mu_module *with_float_counter(mu_context *c)
{
    mu_module *m = with_counter(c);
    mu_module_buffer(m, "stat", MU_SCALAR, MU_F32, 0);
    return m;
}
static mu_module *with_long_stat(mu_context *c)
{
    mu_module *m = with_counter(c);
    mu_module_buffer(m, "stat", MU_SCALAR, MU_I64, 0);
    return m;
}
static mu_module *with_tied(mu_context *c)
{
    mu_module *m = toy(c);
    return mu_module_share(mu_module_get(m, "head"), "t", mu_module_get_parameter(m, "a")) == MU_OK ? m : NULL;
}
static mu_module *with_own(mu_context *c)
{
    mu_module *m = toy(c);
    mu_module_parameter(mu_module_get(m, "head"), "t", MU_DIMS(5), zeros);
    return m;
}
static mu_module *with_kind(mu_context *c)
{
    mu_module *m = mu_module_new(c, "Other", NULL);
    mu_module_parameter(m, "a", MU_DIMS(5), zeros);
    return m;
}

static const variant variants[] = {
    {"the same", toy, toy, {0}, NULL, NULL},
    {"more parameters", toy, with_extra, {0}, "nothing", "parameter `head.extra` (2,) float32"},
    {"another shape", toy, with_shape, {0}, "parameter `head.w` (7,) float32, trainable",
     "parameter `head.w` (8,) float32"},
    {"another name", toy, with_name, {0}, "parameter `head.v` (2,)", "parameter `head.u` (2,)"},
    {"another order", toy, with_order, {0}, "parameter `head.w` (7,)", "parameter `head.v` (2,)"},
    {"another trainable set", toy, with_frozen, {0}, "parameter `d` (33,) float32, trainable",
     "parameter `d` (33,) float32, frozen"},
    {"another buffer", toy, with_buffer, {0}, "nothing", "buffer `stat` (3,) float32"},
    {"another counter", toy, with_counter, {0}, "nothing", "buffer `seen` () int64"},
    {"other options", toy, toy, {.bucket_bytes = 77}, "buckets of 26214400 bytes", "buckets of 77 bytes"},
    {"another absent policy", toy, toy, {.absent = MU_ABSENT_ERROR}, "absent policy 0", "absent policy 2"},
    {"another dtype", with_float_counter, with_long_stat, {0}, "buffer `stat` () float32", "buffer `stat` () int64"},
    {"another trainable set, the other way", with_frozen, toy, {0}, "parameter `d` (33,) float32, frozen",
     "parameter `d` (33,) float32, trainable"},
    {"tied here only", toy, with_tied, {0}, "nothing", "parameter `head.t`, tied to `a`"},
    {"tied there only", with_tied, with_own, {0}, "parameter `head.t`, tied to `a`", "parameter `head.t` (5,) float32"},
    {"another first bucket", toy, toy, {.first_bucket_bytes = 5}, "the first of 1048576", "the first of 5"},
    {"buffers of rank 0", with_buffer, with_buffer, {.buffers_from_rank0 = true}, "buffers averaged",
     "buffers from rank 0"},
    {"another nonfinite policy", toy, toy, {.nonfinite = MU_NONFINITE_SKIP}, "nonfinite policy 0",
     "nonfinite policy 1"},
    {"another check", toy, toy, {.check_every = 3}, "check every 0", "check every 3"},
    {"another name", toy, toy, {.name = "net"}, "mu_ddp_wrap (ddp `Toy`)", "mu_ddp_wrap (ddp `net`)"},
    {"another kind", toy, with_kind, {0}, "mu_ddp_wrap (ddp `Toy`)", "mu_ddp_wrap (ddp `Other`)"},
};

/* The message is the same on all ranks. */
static void check_message(mu_group *g, const char *what)
{
    char own[600], *all = malloc(sizeof(own) * 32);
    snprintf(own, sizeof(own), "%s", mu_context_message(g->context));
    if (mu_all_gather(g, own, all, sizeof(own)) == MU_OK) { /* else the group is broken, with one text for all */
        for (int r = 1; r < mu_group_size(g); r++) {
            CHECK(strcmp(all, all + (size_t)r * sizeof(own)) == 0, "%s: `%s` and `%s`", what, all,
                  all + (size_t)r * sizeof(own));
        }
    }
    free(all);
}

static void wrap_variant(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    const variant *v = arg;
    mu_context *c = g->context;
    mu_module *m = rank == 1 ? v->make(c) : v->others(c);
    CHECK(m != NULL, "model: %s", mu_context_message(c));
    mu_ddp *d = mu_ddp_wrap(m, g, rank == 1 ? &v->options : NULL);
    const char *text = mu_context_message(c);
    if (v->zero == NULL) {
        CHECK(d != NULL, "%s: %s", v->name, text);
        return;
    }
    CHECK(d == NULL && mu_context_status(c) == MU_ERR_COMM, "%s: %s", v->name, text);
    CHECK(strstr(text, v->zero) != NULL && strstr(text, v->one) != NULL, "%s: %s", v->name, text);
    check_message(g, v->name);
}

static void differences_are_named_on_all_ranks(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); i++) {
        for (int size = 2; size <= 3; size++) {
            assert_int_equal(run_threads(size, wrap_variant, (void *)&variants[i], NULL, false), 0);
            assert_int_equal(run_processes(size, wrap_variant, (void *)&variants[i], NULL, false), 0);
        }
    }
}

/* A rank whose model could not be built tells the others instead of leaving them to a timeout. */
static void wrap_nothing(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    if (rank == 1) {
        mui_fail(c, MU_ERR_IO, "no such file");
    }
    CHECK(mu_ddp_wrap(rank == 1 ? NULL : toy(c), g, NULL) == NULL, "wrapped");
    CHECK(mu_context_status(c) == (rank == 1 ? MU_ERR_IO : MU_ERR_PEER), "%s", mu_context_message(c));
    CHECK(strstr(mu_context_message(c), "no such file") != NULL, "%s", mu_context_message(c));
}
static void wrap_frozen(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)rank;
    (void)arg;
    mu_module *m = toy(g->context);
    CHECK(mu_module_freeze(m, "*", NULL) == MU_OK, "freeze");
    CHECK(mu_ddp_wrap(m, g, NULL) == NULL, "wrapped");
    CHECK(mu_context_status(g->context) == MU_ERR_STATE, "%s", mu_context_message(g->context));
}
static void failures_of_one_rank_reach_all(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, wrap_nothing, NULL, NULL, false), 0);
    assert_int_equal(run_threads(2, wrap_frozen, NULL, NULL, false), 0);
}

/* Values, float buffers and counters become rank 0's. */
static void wrap_unequal(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_tensor *stat = mu_module_buffer(m, "stat", MU_DIMS(3), MU_F32, (float)rank + 1);
    mu_tensor *seen = mu_module_buffer(m, "seen", MU_SCALAR, MU_I64, (float)(rank + 5));
    mui_store_of(m);
    float mine[2] = {(float)rank, 7};
    CHECK(mu_tensor_write(mu_parameter_tensor(mu_module_get_parameter(m, "head.v")), mine, 2) == MU_OK, "write");
    CHECK(mu_module_freeze(m, "head.v", NULL) == MU_OK, "frozen parameters are replicas too");
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    CHECK(d != NULL, "%s", mu_context_message(c));
    check_replicas(g, m, "after wrapping");
    float v[3];
    int64_t n = 0;
    CHECK(mu_tensor_read(mu_parameter_tensor(mu_module_get_parameter(m, "head.v")), v, 2) == MU_OK && v[0] == 0, "%g",
          (double)v[0]);
    CHECK(mu_tensor_read(stat, v, 3) == MU_OK && v[2] == 1, "buffer: %g", (double)v[2]);
    CHECK(mu_tensor_read_i64(seen, &n, 1) == MU_OK && n == 5, "counter: %d", (int)n);
    CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    mu_ddp_free(d);
    d = mu_ddp_wrap(m, g, NULL); /* again: the same memory goes on */
    CHECK(d != NULL && mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
}
static void all_start_from_rank_0(void **state)
{
    (void)state;
    assert_int_equal(run_threads(3, wrap_unequal, NULL, NULL, true), 0);
    assert_int_equal(run_processes(2, wrap_unequal, NULL, NULL, true), 0);
}

/* Out of memory at every allocation of wrapping, on one rank: errors on all, nobody waits. */
static void wrap_without_memory(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mui_store_of(m);
    if (rank == 1) {
        c->fail_after = *(int *)arg;
    }
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    bool ran_out = rank == 1 && c->fail_after < 0;
    c->fail_after = -1;
    if (rank == 1) {
        CHECK(ran_out ? d == NULL && mu_context_status(c) == MU_ERR_NOMEM : d != NULL, "at %d: %s", *(int *)arg,
              mu_context_message(c));
        *(int *)arg = ran_out ? *(int *)arg : -1;
    }
    CHECK(d != NULL || rank == 1 || mu_context_status(c) == MU_ERR_PEER, "at %d: %s", *(int *)arg,
          mu_context_message(c));
}
static void out_of_memory_reaches_all(void **state)
{
    (void)state;
    int n = 0;
    for (int at = 0; at >= 0; n++) {
        at = n;
        assert_int_equal(run_threads(2, wrap_without_memory, &at, &(mu_group_options){.timeout_seconds = 20}, false),
                         0);
        assert_true(n < 1000);
    }
    assert_true(n > 10);
}

static void bad_arguments_are_errors(void **state)
{
    (void)state;
    const mu_ddp_options bad[] = {{.absent = (mu_absent_policy)9}, {.nonfinite = (mu_nonfinite_policy)9}};
    for (int i = 0; i < 2; i++) {
        mu_context *c = quiet_context();
        assert_null(mu_ddp_wrap(toy(c), mu_group_self(c), &bad[i]));
        assert_int_equal(mu_context_status(c), MU_ERR_ARG);
        mu_context_close(c);
    }
    mu_context *c = quiet_context(), *other = quiet_context();
    mu_ddp *d = mu_ddp_wrap(toy(c), mu_group_self(c), NULL);
    mu_tape *t = mu_tape_new(other, NULL);
    assert_int_equal(mu_ddp_backward(d, t, mu_mean(t, mu_tensor_zeros(t, MU_DIMS(2)))), MU_ERR_ARG);
    assert_non_null(strstr(mu_context_message(c), "another context"));
    mu_context_clear(c);
    assert_true(mu_ddp_print_report(d, NULL, 5) > 5);
    assert_int_equal(mu_context_close(other), MU_OK);
    assert_int_equal(mu_context_close(c), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(differences_are_named_on_all_ranks),
        cmocka_unit_test(failures_of_one_rank_reach_all),
        cmocka_unit_test(all_start_from_rank_0),
        cmocka_unit_test(out_of_memory_reaches_all),
        cmocka_unit_test(bad_arguments_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
