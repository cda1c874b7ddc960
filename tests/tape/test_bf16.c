/* Mixed precision, operation by operation. The oracle is the float32 operation on the same inputs, which bfloat16 can
 * hold: what may differ is one rounding of each result, and the order of float32 sums. */
#include "fixture.h"
#include "kern/bf16_rounding.h"

#include "kern/engine.h"
#include "tape/op_rows.h"

/* One rounding to 8 bits, to nearest. */
#define UNIT 0x1p-8

/* Leaf values that bfloat16 can hold. */
static mu_tensor *leaf(mu_tape *t, mu_dims dims, uint64_t seed, bool wanted)
{
    mu_tensor *x = mu_tensor_zeros(t, dims);
    assert_non_null(x);
    mui_rng r;
    mui_rng_init(&r, seed, 9);
    for (int64_t i = 0; i < mui_dims_elements(dims); i++) {
        mui_floats(x)[i] = to_bf16(mui_rng_uniform(&r) * 4.0F - 2.0F);
    }
    return wanted ? mu_tensor_require_grad(t, x) : x;
}

/* An input as an operation before would have left it. */
static mu_tensor *narrow(mu_tape *t, mu_tensor *x)
{
    return t->options.bf16 ? mui_cast(t, x, MU_BF16) : x;
}

enum { LEAVES = 3 };
typedef struct made {
    mu_tensor *leaf[LEAVES], *y;
} made;

static made conv(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 16, 9, 9), 1, true), leaf(t, MU_DIMS(16, 16, 3, 3), 2, true),
               leaf(t, MU_DIMS(16), 3, true)}, NULL};
    m.y = mu_conv2d(t, m.leaf[0], m.leaf[1], m.leaf[2], &(mu_conv2d_options){.padding = {1, 1}, .stride = {2, 1}});
    return m;
}

static made conv_odd(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 6, 7, 5), 1, true), leaf(t, MU_DIMS(4, 3, 2, 3), 2, true), NULL}, NULL};
    m.y = mu_conv2d(t, m.leaf[0], m.leaf[1], NULL, &(mu_conv2d_options){.groups = 2});
    return m;
}

/* A weight that was computed: it comes in bfloat16, and its gradient goes back in it. */
static made conv_made(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 6, 7, 5), 1, true), leaf(t, MU_DIMS(4, 6, 2, 3), 2, true), leaf(t, MU_DIMS(4), 3, true)},
              NULL};
    m.y = mu_conv2d(t, m.leaf[0], mu_relu(t, narrow(t, m.leaf[1])), mu_relu(t, narrow(t, m.leaf[2])), NULL);
    return m;
}

static made linear(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(5, 33), 1, true), leaf(t, MU_DIMS(7, 33), 2, true), leaf(t, MU_DIMS(7), 3, true)}, NULL};
    m.y = mu_linear_op(t, m.leaf[0], m.leaf[1], m.leaf[2]);
    return m;
}

static made matmul(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(5, 33), 1, true), leaf(t, MU_DIMS(33, 6), 2, true), NULL}, NULL};
    m.y = mu_matmul(t, m.leaf[0], m.leaf[1]);
    return m;
}

static made norm_of(mu_tape *t, bool relu, bool evaluate)
{
    made m = {{leaf(t, MU_DIMS(4, 8, 5, 5), 1, true), leaf(t, MU_DIMS(8), 2, true), leaf(t, MU_DIMS(8), 3, true)}, NULL};
    mu_tensor *mean = leaf(t, MU_DIMS(8), 4, false), *var = leaf(t, MU_DIMS(8), 5, false);
    for (int i = 0; i < 8; i++) {
        mui_floats(var)[i] = fabsf(mui_floats(var)[i]) + 0.5F;
    }
    m.y = mu_batch_norm(t, narrow(t, m.leaf[0]), m.leaf[1], m.leaf[2], mean, var,
                        &(mu_batch_norm_options){.relu = relu, .evaluate = evaluate});
    return m;
}

static made norm(mu_tape *t)
{
    return norm_of(t, false, false);
}

static made norm_relu(mu_tape *t)
{
    return norm_of(t, true, false);
}

static made norm_eval(mu_tape *t)
{
    return norm_of(t, true, true);
}

static made relu(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(3, 7), 1, true), NULL, NULL}, NULL};
    m.y = mu_relu(t, narrow(t, m.leaf[0]));
    return m;
}

static made add(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(3, 7), 1, true), leaf(t, MU_DIMS(3, 7), 2, true), NULL}, NULL};
    m.y = mu_add(t, narrow(t, m.leaf[0]), narrow(t, m.leaf[1]));
    return m;
}

static made add_relu(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(3, 7), 1, true), leaf(t, MU_DIMS(3, 7), 2, true), NULL}, NULL};
    m.y = mu_add_relu(t, narrow(t, m.leaf[0]), narrow(t, m.leaf[1]));
    return m;
}

/* The gradient comes by two ways, and is added up. */
static made fork(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(3, 7), 1, true), NULL, NULL}, NULL};
    mu_tensor *x = narrow(t, m.leaf[0]);
    m.y = mu_add(t, mu_relu(t, x), x);
    return m;
}

static made max_pool(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 8, 7, 7), 1, true), NULL, NULL}, NULL};
    m.y = mu_max_pool2d(t, narrow(t, m.leaf[0]), 3, 3, &(mu_pool2d_options){.stride = {2, 2}, .padding = {1, 1}});
    return m;
}

static made avg_pool(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 8, 6, 6), 1, true), NULL, NULL}, NULL};
    m.y = mu_avg_pool2d(t, narrow(t, m.leaf[0]), 2, 2, NULL);
    return m;
}

static made flatten(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 3, 2, 2), 1, true), NULL, NULL}, NULL};
    m.y = mu_flatten(t, narrow(t, m.leaf[0]), 1);
    return m;
}

static made dropout(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(5, 9), 1, true), NULL, NULL}, NULL};
    m.y = mu_dropout(t, narrow(t, m.leaf[0]), 0.3F);
    return m;
}

static made subsample(mu_tape *t)
{
    made m = {{leaf(t, MU_DIMS(2, 4, 6, 6), 1, true), NULL, NULL}, NULL};
    m.y = mui_subsample_pad(t, narrow(t, m.leaf[0]), 2, 1, 1);
    return m;
}

/* A blocked result made plain: the layout is changed in bfloat16. */
static made conv_flat(mu_tape *t)
{
    made m = conv(t);
    m.y = mu_flatten(t, m.y, 1);
    return m;
}

typedef struct opcase {
    const char *name;
    made (*make)(mu_tape *t);
    int activations; /* leaves whose gradient is rounded; those of the others are float32 sums */
    int roundings;   /* of results, and of their gradients, at most */
    int terms;       /* of the longest float32 sum */
} opcase;

static const opcase cases[] = {
    {"conv", conv, 1, 1, 160},       {"conv_odd", conv_odd, 1, 1, 70}, {"linear", linear, 1, 1, 34},
    {"conv_made", conv_made, 3, 1, 100},
    {"matmul", matmul, 2, 1, 33},    {"norm", norm, 1, 1, 100},        {"norm_relu", norm_relu, 1, 1, 100},
    {"norm_eval", norm_eval, 1, 1, 100}, {"relu", relu, 1, 0, 0},      {"add", add, 2, 1, 0},
    {"add_relu", add_relu, 2, 1, 0}, {"fork", fork, 1, 1, 0},          {"max_pool", max_pool, 1, 3, 0},
    {"avg_pool", avg_pool, 1, 1, 4}, {"flatten", flatten, 1, 0, 0},    {"dropout", dropout, 1, 1, 0},
    {"subsample", subsample, 1, 0, 0}, {"conv_flat", conv_flat, 1, 1, 160},
};
enum { CASES = sizeof(cases) / sizeof(cases[0]), MOST = 1 << 14 };

/* Output and gradients of all leaves, one after the other; where each begins. */
typedef struct numbers {
    float v[MOST];
    int64_t at[LEAVES + 2];
    mu_dtype dtype;
} numbers;

static void take(numbers *n, int k, const mu_tensor *x)
{
    assert_non_null(x);
    int64_t count = mu_tensor_elements(x);
    n->at[k + 1] = n->at[k] + count;
    assert_true(n->at[k + 1] <= MOST);
    assert_int_equal(mu_tensor_read(x, n->v + n->at[k], count), MU_OK);
}

static void run_case(const opcase *o, mu_kernel_choice kernels, bool bf16, numbers *n)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 3, .kernels = kernels, .log_level = MU_LOG_QUIET});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = bf16});
    memset(n, 0, sizeof(*n));
    made m = o->make(t);
    assert_non_null(m.y);
    n->dtype = mu_tensor_dtype(m.y);
    take(n, 0, m.y);
    mu_tensor *weights = leaf(t, mu_tensor_dims(m.y), 77, false);
    mu_tensor *loss = mu_sum(t, mu_mul(t, m.y, weights));
    assert_int_equal(mu_backward(t, loss), MU_OK);
    for (int i = 0; i < LEAVES; i++) {
        n->at[i + 2] = n->at[i + 1];
        if (m.leaf[i] != NULL) {
            assert_int_equal(mu_tensor_dtype(mu_tensor_grad(m.leaf[i])), MU_F32);
            take(n, i + 1, mu_tensor_grad(m.leaf[i]));
        }
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void check_case(const opcase *o, mu_kernel_choice kernels)
{
    static numbers want, got;
    run_case(o, kernels, false, &want);
    run_case(o, kernels, true, &got);
    assert_int_equal(want.dtype, MU_F32);
    assert_int_equal(got.dtype, MU_BF16);
    for (int k = 0; k <= LEAVES; k++) {
        bool rounds = k <= o->activations;
        double most = 0;
        for (int64_t i = want.at[k]; i < want.at[k + 1]; i++) {
            most = fmax(most, fabs((double)want.v[i]));
        }
        for (int64_t i = want.at[k]; i < want.at[k + 1]; i++) {
            double w = (double)want.v[i], g = (double)got.v[i];
            /* The terms of a sum may be larger than it: by the square root of their number, here. */
            double allowed = (rounds ? o->roundings * UNIT * fabs(w) : 0) + o->terms * 0x1p-24 * most * sqrt(o->terms);
            if (o->make == max_pool && k == 1) {
                allowed = 3 * UNIT * most; /* up to four windows add up here */
            }
            if (!(fabs(w - g) <= allowed)) {
                fail_msg("%s, %s %d, element %lld: %.9g, float32 has %.9g", o->name, k == 0 ? "result" : "gradient", k - 1,
                         (long long)(i - want.at[k]), g, w);
            }
            if (rounds && to_bf16(got.v[i]) != got.v[i]) {
                fail_msg("%s: %.9g is no bfloat16", o->name, g);
            }
        }
    }
}

static void operations(void **state)
{
    (void)state;
    for (int i = 0; i < CASES; i++) {
        check_case(&cases[i], MU_KERNELS_REFERENCE);
        check_case(&cases[i], MU_KERNELS_DEFAULT);
    }
}

/* float32 operands are rounded, weights too; their gradient is not, though that of an activation is. */
static void operands_are_rounded(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = true});
    const float x[2] = {1.0F + 0x1p-9F, 1.0F + 3 * 0x1p-8F}, w[2] = {1.0F + 0x1p-8F, 3.0F};
    mu_tensor *a = mu_tensor_require_grad(t, mu_tensor_from(t, MU_DIMS(1, 2), x));
    mu_tensor *b = mu_tensor_require_grad(t, mu_tensor_from(t, MU_DIMS(1, 2), w));
    mu_tensor *y = mu_linear_op(t, a, b, NULL);
    assert_int_equal(mu_tensor_dtype(y), MU_BF16);
    /* 1 + 2^-9 to 1; 1 + 3 2^-8, a tie, to the even 1 + 2^-6; 1 + 2^-8, a tie, to the even 1. */
    assert_true(mu_tensor_item(y) == to_bf16(1.0F + 3.0F * (1.0F + 0x1p-6F)));
    assert_int_equal(mu_backward(t, mu_sum(t, y)), MU_OK);
    float g[2];
    assert_int_equal(mu_tensor_read(mu_tensor_grad(b), g, 2), MU_OK);
    assert_true(g[0] == 1.0F && g[1] == 1.0F + 0x1p-6F);
    assert_int_equal(mu_tensor_read(mu_tensor_grad(a), g, 2), MU_OK);
    assert_true(g[0] == 1.0F && g[1] == 3.0F);
    mu_context_close(c);
}

/* Convolution and linear with operands that bfloat16 cannot hold: bit for bit what they are with rounded ones. */
static void run_rounding(mu_kernel_choice kernels, bool linear, bool already, float *out, int64_t count)
{
    mu_context *c = mu_context_open(&(mu_context_options){.kernels = kernels, .log_level = MU_LOG_QUIET});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = true});
    mu_dims x = linear ? MU_DIMS(6, 35) : MU_DIMS(2, 16, 5, 5), w = linear ? MU_DIMS(9, 35) : MU_DIMS(16, 16, 3, 3);
    mu_tensor *in[3] = {leaf(t, x, 1, true), leaf(t, w, 2, true), leaf(t, MU_DIMS(w.dim[0]), 3, true)};
    mui_rng r;
    mui_rng_init(&r, 4, 4);
    for (int k = 0; k < 3; k++) {
        for (int64_t i = 0; i < mu_tensor_elements(in[k]); i++) {
            float v = mui_rng_uniform(&r) - 0.5F;
            mui_floats(in[k])[i] = already ? to_bf16(v) : v;
        }
    }
    mu_tensor *y = linear ? mu_linear_op(t, in[0], in[1], in[2]) : mu_conv2d(t, in[0], in[1], in[2], NULL);
    y = mu_tensor_retain(t, y);
    mu_tensor *loss = mu_sum(t, mu_mul(t, y, leaf(t, mu_tensor_dims(y), 7, false)));
    assert_int_equal(mu_backward(t, loss), MU_OK);
    mu_tensor *all[4] = {y, mu_tensor_grad(in[0]), mu_tensor_grad(in[1]), mu_tensor_grad(in[2])};
    for (int k = 0; k < 4; k++) {
        int64_t n = mu_tensor_elements(all[k]);
        assert_true(n <= count);
        assert_int_equal(mu_tensor_read(all[k], out, n), MU_OK);
        out += n;
        count -= n;
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

static void weights_are_rounded(void **state)
{
    (void)state;
    static float once[5000], twice[5000];
    for (int i = 0; i < 4; i++) {
        memset(once, 0, sizeof(once));
        memset(twice, 0, sizeof(twice));
        mu_kernel_choice kernels = i % 2 == 0 ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT;
        run_rounding(kernels, i >= 2, false, once, 5000);
        run_rounding(kernels, i >= 2, true, twice, 5000);
        assert_true(once[0] != 0.0F);
        assert_memory_equal(once, twice, sizeof(once));
    }
}

/* Not in the list: float32 whatever they are given. */
static void others_are_float32(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = true});
    mu_tensor *f = leaf(t, MU_DIMS(4, 3), 1, true), *x = mui_cast(t, f, MU_BF16), *row = narrow(t, leaf(t, MU_DIMS(3), 2, true));
    const int64_t labels[4] = {0, 2, 1, 0};
    mu_tensor *parts[2] = {x, x};
    mu_tensor *all[] = {mu_sigmoid(t, x), mu_gelu(t, x), mu_softmax(t, x), mu_log_softmax(t, x), mu_mean(t, x), mu_sum(t, x),
                        mu_mul(t, x, x), mu_sub(t, x, x), mu_add(t, x, row), mu_add(t, x, f), mu_scale(t, x, 2.0F),
                        mu_permute(t, x, MU_DIMS(1, 0)), mu_narrow(t, x, 0, 1, 2), mu_concat(t, parts, 2, 0),
                        mu_mse_loss(t, x, f), mu_cross_entropy(t, x, mu_tensor_from_i64(t, MU_DIMS(4), labels))};
    mu_tensor *loss = NULL;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        assert_non_null(all[i]);
        assert_int_equal(mu_tensor_dtype(all[i]), MU_F32);
        mu_tensor *sum = mu_sum(t, all[i]);
        loss = loss == NULL ? sum : mu_add(t, loss, sum);
    }
    assert_int_equal(mu_tensor_dtype(mu_detach(t, x)), MU_BF16);
    assert_int_equal(mu_backward(t, loss), MU_OK);
    assert_non_null(mu_tensor_grad(f));
    /* Where a tape has no bf16, nothing is cast behind one's back. */
    mu_tensor *kept = mu_tensor_keep(t, mu_tensor_retain(t, narrow(t, leaf(t, MU_DIMS(2, 2), 5, false))));
    assert_int_equal(mu_tensor_dtype(kept), MU_BF16);
    mu_tape *plain = mu_tape_new(c, NULL);
    assert_null(mu_relu(plain, kept));
    assert_int_equal(mu_context_status(c), MU_ERR_DTYPE);
    mu_context_clear(c);
    mu_context_close(c);
}

typedef struct layers {
    mu_tensor *filter, *scale, *shift, *matrix;
} layers;

static mu_tensor *run_layers(void *self, mu_tape *t, mu_tensor *x)
{
    const layers *l = self;
    mu_tensor *h = mu_conv2d(t, x, l->filter, NULL, NULL);
    h = mu_batch_norm(t, h, l->scale, l->shift, NULL, NULL, &(mu_batch_norm_options){.relu = true});
    h = mu_dropout(t, mu_flatten(t, mu_global_avg_pool2d(t, h), 1), 0.25F);
    return mu_sigmoid(t, mu_linear_op(t, h, l->matrix, NULL));
}

static void run_segment(bool segment, float *grad)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 4, .log_level = MU_LOG_QUIET});
    mu_tape *t = mu_tape_new(c, &(mu_tape_options){.bf16 = true});
    layers l = {leaf(t, MU_DIMS(16, 8, 3, 3), 1, true), leaf(t, MU_DIMS(16), 2, true), leaf(t, MU_DIMS(16), 3, true),
                leaf(t, MU_DIMS(5, 16), 4, true)};
    mu_tensor *x = leaf(t, MU_DIMS(4, 8, 32, 32), 5, true);
    mu_tensor *y = segment ? mu_checkpoint(t, run_layers, &l, x) : run_layers(&l, t, x);
    assert_int_equal(mu_backward(t, mu_mean(t, y)), MU_OK);
    assert_int_equal(mu_tensor_read(mu_tensor_grad(l.filter), grad, 16 * 8 * 9), MU_OK);
    assert_int_equal(mu_tensor_read(mu_tensor_grad(x), grad + 16 * 8 * 9, 4 * 8 * 32 * 32), MU_OK);
    assert_int_equal(mu_context_close(c), MU_OK);
}

/* Running again casts again: the same gradients bit for bit. */
static void segments(void **state)
{
    (void)state;
    static float direct[16 * 8 * 9 + 4 * 8 * 32 * 32], again[16 * 8 * 9 + 4 * 8 * 32 * 32];
    run_segment(false, direct);
    run_segment(true, again);
    assert_memory_equal(direct, again, sizeof(direct));
    bool any = false;
    for (int i = 0; i < 16 * 8 * 9; i++) {
        any = any || direct[i] != 0.0F;
    }
    assert_true(any);
}

typedef struct heard {
    int warnings, notes;
} heard;

static void hear(void *user, mu_log_level level, const char *message)
{
    heard *h = user;
    assert_non_null(strstr(message, "bfloat16"));
    h->warnings += level == MU_LOG_WARN;
    h->notes += level == MU_LOG_INFO;
}

/* That it is not fast here is said once, when the first tape wants it. */
static void slowness_is_said_once(void **state)
{
    (void)state;
    heard h = {0, 0};
    mu_context *c = mu_context_open(&(mu_context_options){.log = hear, .log_user = &h, .log_level = MU_LOG_INFO});
    assert_non_null(mu_tape_new(c, NULL));
    assert_int_equal(h.warnings, 0);
    for (int i = 0; i < 2; i++) {
        assert_non_null(mu_tape_new(c, &(mu_tape_options){.bf16 = true}));
    }
    const mui_engine *e = mui_engine_of(c);
    assert_int_equal(h.warnings, e->k.bf16 && e->k.bf16_instructions ? 0 : 1);
    assert_int_equal(h.notes, 0);
    assert_int_equal(mu_context_close(c), MU_OK);
}

/* Every bit pattern there and back, and what lies between: nearest, ties to even, NaN stays NaN. */
static void conversions(void **state)
{
    (void)state;
    for (uint32_t b = 0; b < 0x10000; b++) {
        uint16_t x = (uint16_t)b, back = 0;
        float wide = 0;
        mui_bf16_widen(1, &x, &wide);
        mui_bf16_round(1, &wide, &back);
        if (isnan(wide)) {
            assert_int_equal(back & 0x7fc0, 0x7fc0);
            continue;
        }
        assert_int_equal(back, x);
        if ((b & 0x7fff) < 0x7f7f) { /* the next away from zero is finite */
            uint32_t bits = b << 16;
            static const uint32_t beyond[] = {0x7fff, 0x8000, 0x8001};
            for (int i = 0; i < 3; i++) {
                uint32_t u = bits | beyond[i];
                float f;
                memcpy(&f, &u, sizeof(f));
                mui_bf16_round(1, &f, &back);
                assert_int_equal(back, b + (i == 2 || (i == 1 && b % 2 == 1)));
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations),
        cmocka_unit_test(operands_are_rounded),
        cmocka_unit_test(weights_are_rounded),
        cmocka_unit_test(others_are_float32),
        cmocka_unit_test(segments),
        cmocka_unit_test(slowness_is_said_once),
        cmocka_unit_test(conversions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
