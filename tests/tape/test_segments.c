/* Checkpointed segments against the same functions called directly: gradients bit for bit, the order in which they
 * become complete, reasons of absences, memory, errors. */
#include "tape/fixture.h"

#define SEEDS 600

/* -- random programs -------------------------------------------------------------------------------------------- */

/* One program is run twice: with checkpoints, and with direct calls in their place. */
typedef struct program {
    world w;
    bool checkpoints;
    int runs; /* of segments' functions */
    mu_tensor *outer[3];     /* tensors that segments read without being given them */
    int64_t ready[200];
    int ready_count;
} program;
static program *now;

/* self of a segment: how it draws its operations. */
typedef struct recipe {
    uint64_t seed;
    int depth;
} recipe;
static recipe recipes[4096];

static recipe *recipe_of(uint64_t seed, int depth)
{
    recipe *r = &recipes[seed % 4096];
    *r = (recipe){seed, depth};
    return r;
}

static int pick(mui_rng *r, int n)
{
    return (int)mui_rng_below(r, (uint64_t)n);
}

static mu_tensor *one_in(void *self, mu_tape *t, mu_tensor *x);
static mu_status many_in(void *self, mu_tape *t, mu_tensor *const *in, int in_count, mu_tensor **out, int out_count);

static mu_tensor *segment(mui_rng *r, int depth, mu_tensor *a, mu_tensor *b)
{
    mu_tape *t = now->w.t;
    recipe *self = recipe_of(mui_rng_below(r, 1 << 30), depth + 1);
    if (pick(r, 2) == 0) {
        return now->checkpoints ? mu_checkpoint(t, one_in, self, a) : one_in(self, t, a);
    }
    mu_tensor *in[2] = {a, b}, *out[2] = {NULL, NULL};
    mu_status s = now->checkpoints ? mu_checkpoint_many(t, many_in, self, in, 2, out, 2)
                                   : many_in(self, t, in, 2, out, 2);
    assert_int_equal(s, MU_OK);
    return out[1] == NULL || pick(r, 3) == 0 ? out[0] : mu_sub(t, out[0], out[1]); /* sometimes one stays unused */
}

/* All values are (2, 6, 4, 4), so that any can be combined with any. */
static mu_tensor *grow(mui_rng *r, int depth, mu_tensor *a, mu_tensor *b)
{
    world *w = &now->w;
    mu_tape *t = w->t;
    mu_dims image = MU_DIMS(2, 6, 4, 4);
    mu_tensor *parts[2], *y;
    switch (pick(r, 22)) {
    case 0: return mu_add(t, a, b);
    case 1: return mu_scale(t, mu_mul(t, a, b), 0.5f);
    case 2: return mu_tanh(t, a);
    case 3: return mu_conv2d(t, a, &w->p[0].value, &w->p[1].value, &(mu_conv2d_options){.padding = {1, 1}});
    case 4: return mu_conv2d(t, a, &w->p[2].value, NULL, NULL);
    case 5: return mu_batch_norm(t, a, &w->p[3].value, &w->p[1].value, NULL, NULL, NULL);
    case 6: return mu_permute(t, a, MU_DIMS(0, 1, 3, 2));
    case 7:
        parts[0] = mu_narrow(t, a, 1, 3, 3);
        parts[1] = mu_narrow(t, b, 1, 1, 3);
        return mu_concat(t, parts, 2, 1);
    case 8: return mu_reshape(t, mu_linear_op(t, mu_reshape(t, a, MU_DIMS(2, 24, 4)), &w->p[4].value, NULL), image);
    case 9: return mu_mul(t, a, mu_global_avg_pool2d(t, b));
    case 10: return mu_mul(t, a, mu_reshape(t, mu_narrow(t, &w->p[2].value, 0, 0, 1), MU_DIMS(6, 1, 1)));
    case 11: case 12: return mu_dropout(t, a, 0.3f);
    case 13: return mu_detach(t, a);
    case 14:
        mu_no_grad_begin(t, "region");
        y = grow(r, depth, a, b);
        mu_no_grad_end(t);
        return y;
    case 15: return mu_mul(t, a, now->outer[pick(r, 3)]);
    case 16: return mu_add(t, b, mu_reshape(t, &w->p[5 + pick(r, 3)].value, MU_DIMS(6, 1, 1)));
    default: return depth < 3 ? segment(r, depth, a, b) : mu_relu(t, a);
    }
}

static void steps(const recipe *self, mu_tape *t, mu_tensor *a, mu_tensor *b, mu_tensor **out)
{
    mu_tensor *v[8] = {a, b};
    mui_rng r;
    mui_rng_init(&r, self->seed, 1);
    int n = 3 + pick(&r, 5);
    for (int i = 2; i < n; i++) {
        v[i] = grow(&r, self->depth, v[pick(&r, i)], v[i - 1]);
        if (v[i] == NULL) {
            fail_msg("%s", mu_context_message(t->context));
        }
    }
    out[0] = v[n - 1];
    out[1] = pick(&r, 4) == 0 ? NULL : v[pick(&r, n)]; /* also one of the inputs */
    now->runs++;
}

static mu_tensor *one_in(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *out[2];
    steps(self, t, x, x, out);
    return out[0];
}

static mu_status many_in(void *self, mu_tape *t, mu_tensor *const *in, int in_count, mu_tensor **out, int out_count)
{
    assert_int_equal(in_count, 2);
    assert_int_equal(out_count, 2);
    steps(self, t, in[0], in[1], out);
    return MU_OK;
}

static void note_ready(void *user, mu_parameter *p)
{
    program *g = user;
    assert_true(g->ready_count < 200);
    g->ready[g->ready_count++] = p->index;
}

static void open_program(program *g, bool checkpoints, bool retain, mu_kernel_choice kernels)
{
    memset(g, 0, sizeof(*g));
    open_world(&g->w, &(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 11, .kernels = kernels},
               &(mu_tape_options){.retain_graph = retain});
    g->checkpoints = checkpoints;
    add_parameter(&g->w, MU_DIMS(6, 6, 3, 3), 1);
    add_parameter(&g->w, MU_DIMS(6), 0);
    add_parameter(&g->w, MU_DIMS(6, 6, 1, 1), 1);
    add_parameter(&g->w, MU_DIMS(6), 0);
    add_parameter(&g->w, MU_DIMS(4, 4), 0);
    for (int i = 0; i < 3; i++) {
        add_parameter(&g->w, MU_DIMS(6), 0);
    }
    build(&g->w);
    g->w.s->ready = note_ready;
    g->w.s->ready_user = g;
}

/* One step: a graph with two losses, and a backward from each. */
static void run_program(program *g, uint64_t seed)
{
    mu_tape *t = g->w.t;
    now = g;
    mui_store_zero_grad(g->w.s);
    g->ready_count = 0;
    mu_tensor *x = input(&g->w, MU_DIMS(2, 6, 4, 4), seed), *out[2];
    if (seed % 3 == 0) {
        assert_non_null(mu_tensor_require_grad(t, x));
    }
    g->outer[0] = x;
    g->outer[1] = mu_tanh(t, mu_add(t, x, mu_reshape(t, &g->w.p[5].value, MU_DIMS(6, 1, 1))));
    g->outer[2] = mu_batch_norm(t, x, &g->w.p[3].value, &g->w.p[1].value, NULL, NULL, NULL);
    steps(recipe_of(seed, 0), t, g->outer[1], g->outer[2], out);
    mu_tensor *loss[2] = {mu_mean(t, mu_mul(t, out[0], out[0])),
                          mu_sum(t, mu_mul(t, out[1] != NULL ? out[1] : g->outer[1], g->outer[2]))};
    for (int k = 0; k < 2; k++) {
        if (k == 1 && !t->options.retain_graph && seed % 2 == 0) {
            break; /* the second loss may need what the first gave back: an error with or without checkpoints */
        }
        if (seed % 5 == 0) {
            mu_no_grad_begin(t, "around backward");
        }
        mu_status s = mui_backward_mark(t, loss[k], g->w.s);
        s = s == MU_OK ? mui_backward_run(t, loss[k], 1.5f, g->w.s) : s;
        if (seed % 5 == 0) {
            mu_no_grad_end(t);
        }
        if (s != MU_OK && (k == 0 || t->options.retain_graph || s != MU_ERR_STATE)) {
            fail_msg("seed %d, backward %d: %s", (int)seed, k, mu_context_message(t->context));
        }
        g->ready[g->ready_count++] = -1 - (int64_t)s;
        mu_context_clear(t->context);
    }
}

static const char *or_none(const char *s)
{
    return s != NULL ? s : "none";
}

static void compare(program *a, program *b, uint64_t seed)
{
    assert_int_equal(a->ready_count, b->ready_count);
    assert_memory_equal(a->ready, b->ready, (size_t)a->ready_count * sizeof(a->ready[0]));
    for (int i = 0; i < a->w.count; i++) {
        const mu_parameter *p = &a->w.p[i], *q = &b->w.p[i];
        if (p->grad_state != q->grad_state || p->reads != q->reads || p->reads_left != q->reads_left) {
            fail_msg("seed %d, parameter %d: state %d %d, reads %d %d, left %d %d", (int)seed, i, (int)p->grad_state,
                     (int)q->grad_state, (int)p->reads, (int)q->reads, (int)p->reads_left, (int)q->reads_left);
        }
        if (p->grad_state != MUI_GRAD_NONE &&
            memcmp(a->w.s->grads + p->offset, b->w.s->grads + q->offset, p->capacity * sizeof(float)) != 0) {
            fail_msg("seed %d: gradients of parameter %d differ", (int)seed, i);
        }
        const mui_absence *u = &p->absence, *v = &q->absence;
        assert_int_equal(u->kind, v->kind);
        assert_string_equal(or_none(u->op), or_none(v->op));
        assert_string_equal(or_none(u->end_op), or_none(v->end_op));
        assert_string_equal(or_none(u->region), or_none(v->region));
    }
}

static void random_programs(bool retain, mu_kernel_choice kernels)
{
    static program a, b;
    open_program(&a, false, retain, kernels);
    open_program(&b, true, retain, kernels);
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        run_program(&a, seed);
        run_program(&b, seed);
        compare(&a, &b, seed);
        mu_tape_reset(a.w.t);
        mu_tape_reset(b.w.t);
        assert_int_equal(mu_tape_bytes(b.w.t), 0);
    }
    assert_true(b.runs > a.runs + SEEDS / 4); /* functions did run again */
    close_world(&a.w);
    close_world(&b.w);
}

static void test_random(void **state)
{
    (void)state;
    random_programs(false, MU_KERNELS_DEFAULT);
    random_programs(false, MU_KERNELS_REFERENCE);
}

static void test_random_retained(void **state)
{
    (void)state;
    random_programs(true, MU_KERNELS_DEFAULT);
}

/* The same step again and again allocates nothing from the third on, and gives the same gradients. */
static void test_steady(void **state)
{
    (void)state;
    static program g;
    open_program(&g, true, false, MU_KERNELS_DEFAULT);
    for (uint64_t seed = 1; seed < 60; seed++) {
        uint64_t before = 0;
        for (int step = 0; step < 5; step++) {
            before = step == 3 ? g.w.c->allocations : before;
            mu_tape_set_step(g.w.t, 7);
            run_program(&g, seed);
            mu_tape_reset(g.w.t);
        }
        assert_int_equal(g.w.c->allocations, before);
    }
    close_world(&g.w);
}

/* -- every operation -------------------------------------------------------------------------------------------- */

typedef struct sample_of {
    const mui_op *op;
    int sample;
} sample_of;

static mu_tensor *run_sample(void *self, mu_tape *t, mu_tensor *x)
{
    const sample_of *s = self;
    mu_tensor *y = s->op->sample(t, s->sample, 7);
    (void)x;
    return y != NULL ? mu_scale(t, y, 0.75f) : NULL;
}

static int leaf_gradients(mu_tape *t, float *out, int most)
{
    int n = 0;
    for (mu_tensor *x = t->tensors; x != NULL; x = x->next) {
        if (!x->wants_own_grad) {
            continue;
        }
        const mu_tensor *g = mu_tensor_grad(x);
        int64_t count = mu_tensor_elements(x);
        assert_true(n + count + 1 <= most);
        out[n++] = g != NULL;
        if (g != NULL) {
            assert_int_equal(mu_tensor_read(g, out + n, count), MU_OK);
            n += (int)count;
        }
    }
    return n;
}

static void test_every_operation(void **state)
{
    (void)state;
    world w;
    open_world(&w, NULL, NULL);
    float a[4000], b[4000];
    int checked = 0;
    for (const mui_op *const *op = mui_ops(); *op != NULL; op++) {
        for (int sample = 0;; sample++) {
            sample_of s = {*op, sample};
            int n[2];
            bool end = false;
            for (int k = 0; k < 2 && !end; k++) {
                mu_tape_reset(w.t);
                mu_tape_set_step(w.t, 5);
                mu_tensor *x = mu_tensor_zeros(w.t, MU_SCALAR);
                mu_tensor *y = k == 0 ? run_sample(&s, w.t, x) : mu_checkpoint(w.t, run_sample, &s, x);
                end = y == NULL;
                if (end) {
                    break;
                }
                mu_status r = mu_backward(w.t, mu_sum(w.t, mu_mul(w.t, y, y)));
                if (r != MU_OK) {
                    fail_msg("%s sample %d: %s", (*op)->name, sample, mu_context_message(w.c));
                }
                n[k] = leaf_gradients(w.t, k == 0 ? a : b, 4000);
            }
            assert_int_equal(mu_context_status(w.c), MU_OK);
            if (end) {
                break;
            }
            assert_int_equal(n[0], n[1]);
            if (memcmp(a, b, (size_t)n[0] * sizeof(float)) != 0) {
                fail_msg("%s sample %d: gradients differ", (*op)->name, sample);
            }
            checked++;
        }
    }
    assert_true(checked > 60);
    close_world(&w);
}

/* -- memory ----------------------------------------------------------------------------------------------------- */

enum { LAYERS = 24, WIDTH = 64, ROWS = 256 };

static mu_tensor *layers(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    for (int i = 0; i < 4; i++) {
        x = mu_dropout(t, mu_gelu(t, mu_linear_op(t, x, &now->w.p[i].value, NULL)), 0.1f);
    }
    return x;
}

static size_t deep_peak(bool checkpoints, float *grads)
{
    static program g;
    memset(&g, 0, sizeof(g));
    open_world(&g.w, NULL, NULL);
    for (int i = 0; i < 4; i++) {
        add_parameter(&g.w, MU_DIMS(WIDTH, WIDTH), 0);
    }
    build(&g.w);
    now = &g;
    mu_tensor *x = input(&g.w, MU_DIMS(ROWS, WIDTH), 3);
    for (int i = 0; i < LAYERS / 4; i++) {
        x = checkpoints ? mu_checkpoint(g.w.t, layers, NULL, x) : layers(NULL, g.w.t, x);
    }
    assert_int_equal(mu_backward(g.w.t, mu_mean(g.w.t, mu_mul(g.w.t, x, x))), MU_OK);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(mu_tensor_read(mu_parameter_grad(&g.w.p[i]), grads + i * WIDTH * WIDTH, WIDTH * WIDTH), MU_OK);
    }
    size_t peak = mu_tape_peak_bytes(g.w.t);
    close_world(&g.w);
    return peak;
}

static void test_memory(void **state)
{
    (void)state;
    static float a[4 * WIDTH * WIDTH], b[4 * WIDTH * WIDTH];
    size_t without = deep_peak(false, a), with = deep_peak(true, b);
    print_message("24 layers, a segment for every 4: peak %zu KiB without, %zu KiB with\n", without >> 10, with >> 10);
    assert_true(with * 2 <= without);
    assert_memory_equal(a, b, sizeof(a));
}

/* -- particular cases ------------------------------------------------------------------------------------------- */

static world *here;

/* p0 * x, kept on request; counts its runs. */
typedef struct piece {
    int runs, change_at;
    mu_tensor *inner;
    bool retain;
    mu_status within;
} piece;

static mu_tensor *piece_forward(void *self, mu_tape *t, mu_tensor *x)
{
    piece *s = self;
    s->runs++;
    mu_tensor *h = mu_tanh(t, mu_mul(t, x, &here->p[0].value));
    s->inner = s->retain ? mu_tensor_retain(t, h) : h;
    if (s->runs == s->change_at) {
        return mu_relu(t, h);
    }
    return mu_mul(t, mu_tanh(t, h), &here->p[1].value);
}

static void open_pieces(world *w, bool retain)
{
    open_world(w, NULL, &(mu_tape_options){.retain_graph = retain});
    add_parameter(w, MU_DIMS(4), 0);
    add_parameter(w, MU_DIMS(4), 0);
    build(w);
    here = w;
}

static void expect_error(world *w, mu_status got, mu_status want, const char *words)
{
    assert_int_equal(got, want);
    if (strstr(mu_context_message(w->c), words) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", mu_context_message(w->c), words);
    }
    mu_context_clear(w->c);
}

/* What a segment made and did not keep cannot be read; what it was told to keep can, and gets its gradient. */
static void test_inner_values(void **state)
{
    (void)state;
    world w;
    open_pieces(&w, false);
    float v[4], want[4];
    for (int k = 0; k < 2; k++) {
        mu_tape_reset(w.t);
        mui_store_zero_grad(w.s);
        piece s = {.retain = true};
        mu_tensor *x = input(&w, MU_DIMS(4), 1);
        mu_tensor *y = k == 0 ? piece_forward(&s, w.t, x) : mu_checkpoint(w.t, piece_forward, &s, x);
        assert_int_equal(mu_backward(w.t, mu_sum(w.t, mu_add(w.t, y, mu_mul(w.t, s.inner, s.inner)))), MU_OK);
        assert_int_equal(mu_tensor_read(s.inner, v, 4), MU_OK);
        assert_int_equal(mu_tensor_read(mu_parameter_grad(&w.p[0]), k == 0 ? want : v, 4), MU_OK);
    }
    assert_memory_equal(v, want, sizeof(v));
    mu_tape_reset(w.t);
    piece s = {0};
    mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    assert_null(mu_relu(w.t, s.inner));
    expect_error(&w, mu_context_status(w.c), MU_ERR_STATE, "made in a checkpointed segment");
    expect_error(&w, mu_tensor_read(s.inner, v, 4), MU_ERR_STATE, "made in a checkpointed segment");
    close_world(&w);
}

static void test_runs_once_again(void **state)
{
    (void)state;
    world w;
    open_pieces(&w, true);
    piece s = {0};
    mu_tensor *x = input(&w, MU_DIMS(4), 1), *y = mu_checkpoint(w.t, piece_forward, &s, x);
    mu_tensor *loss = mu_sum(w.t, y);
    assert_int_equal(mu_backward(w.t, loss), MU_OK);
    assert_int_equal(s.runs, 2);
    float once[4], twice[4];
    assert_int_equal(mu_tensor_read(mu_parameter_grad(&w.p[0]), once, 4), MU_OK);
    assert_int_equal(mu_backward(w.t, loss), MU_OK); /* retain_graph: it runs once more */
    assert_int_equal(s.runs, 3);
    assert_int_equal(mu_tensor_read(mu_parameter_grad(&w.p[0]), twice, 4), MU_OK);
    for (int i = 0; i < 4; i++) {
        assert_true(twice[i] == 2 * once[i]);
    }
    /* Nothing to differentiate: not again. */
    mu_tape_reset(w.t);
    w.p[0].frozen = w.p[1].frozen = true;
    s.runs = 0;
    y = mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    w.p[0].frozen = w.p[1].frozen = false;
    assert_int_equal(mu_backward(w.t, mu_sum(w.t, mu_mul(w.t, y, &w.p[1].value))), MU_OK);
    assert_int_equal(s.runs, 1);
    /* Within a region without gradients it is the function alone. */
    mu_tape_reset(w.t);
    mui_store_zero_grad(w.s);
    mu_no_grad_begin(w.t, "teacher");
    y = mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    mu_no_grad_end(w.t);
    loss = mu_sum(w.t, mu_mul(w.t, y, &w.p[1].value));
    assert_int_equal(mui_backward_mark(w.t, loss, w.s), MU_OK);
    assert_string_equal(w.p[0].absence.region, "teacher");
    assert_int_equal(mui_backward_run(w.t, loss, 1, w.s), MU_OK);
    assert_int_equal(s.runs, 2);
    assert_null(mu_parameter_grad(&w.p[0]));
    assert_int_equal(mu_tensor_read(s.inner, once, 4), MU_OK);
    close_world(&w);
}

static mu_tensor *whole_loss(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_mean(t, piece_forward(self, t, x));
}

/* The loss itself may be made in a segment, and read before and after. */
static void test_loss_within(void **state)
{
    (void)state;
    world w;
    open_pieces(&w, false);
    piece s = {0};
    mu_tensor *loss = mu_checkpoint(w.t, whole_loss, &s, input(&w, MU_DIMS(4), 1));
    float before = mu_tensor_item(loss);
    assert_int_equal(mu_backward(w.t, loss), MU_OK);
    assert_true(mu_tensor_item(loss) == before);
    assert_non_null(mu_parameter_grad(&w.p[0]));
    /* A value between two segments is gone after backward, as without them. */
    mu_tape_reset(w.t);
    float v[4];
    mu_tensor *y = mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    assert_int_equal(mu_tensor_read(y, v, 4), MU_OK);
    assert_int_equal(mu_backward(w.t, mu_checkpoint(w.t, whole_loss, &s, y)), MU_OK);
    expect_error(&w, mu_tensor_read(y, v, 4), MU_ERR_STATE, "backward has given this tensor's memory back");
    close_world(&w);
}

static void test_other_second_run(void **state)
{
    (void)state;
    world w;
    open_pieces(&w, false);
    piece s = {.change_at = 2};
    mu_tensor *y = mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    expect_error(&w, mu_backward(w.t, mu_sum(w.t, y)), MU_ERR_STATE,
                 "its function comes to relu, of shape (4,) where the first run had tanh, of shape (4,)");
    mu_tape_reset(w.t);
    s = (piece){.change_at = 1}; /* more than the first time */
    y = mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    expect_error(&w, mu_backward(w.t, mu_sum(w.t, y)), MU_ERR_STATE, "comes to tanh, of shape (4,) where the first run had relu");
    /* And the next step is as if nothing had been. */
    mu_tape_reset(w.t);
    s = (piece){0};
    y = mu_checkpoint(w.t, piece_forward, &s, input(&w, MU_DIMS(4), 1));
    assert_int_equal(mu_backward(w.t, mu_sum(w.t, y)), MU_OK);
    close_world(&w);
}

static mu_tensor *other_parameter(void *self, mu_tape *t, mu_tensor *x)
{
    piece *s = self;
    return mu_mul(t, x, &here->p[s->runs++ % 2].value);
}

static mu_tensor *longer(void *self, mu_tape *t, mu_tensor *x)
{
    piece *s = self;
    mu_tensor *y = mu_mul(t, x, &here->p[0].value);
    for (int i = 0; i < s->runs; i++) {
        y = mu_scale(t, y, 2.0f);
    }
    s->runs += s->change_at;
    return y;
}

static mu_tensor *leaves_region(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    mu_no_grad_begin(t, NULL);
    return mu_relu(t, x);
}

static mu_tensor *calls_backward(void *self, mu_tape *t, mu_tensor *x)
{
    piece *s = self;
    mu_tensor *y = mu_mul(t, x, &here->p[0].value);
    s->within = mu_backward(t, mu_sum(t, y));
    return y;
}

static mu_tensor *resets(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self;
    mu_tape_reset(t);
    return mu_relu(t, x);
}

static mu_tensor *nothing(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self, (void)t, (void)x;
    return NULL;
}

static mu_tensor *itself(void *self, mu_tape *t, mu_tensor *x)
{
    (void)self, (void)t;
    return x;
}

static void test_bad_functions(void **state)
{
    (void)state;
    world w;
    open_pieces(&w, false);
    piece s = {0};
    mu_tensor *x = input(&w, MU_DIMS(4), 1);
    mu_tensor *y = mu_checkpoint(w.t, other_parameter, &s, x);
    expect_error(&w, mu_backward(w.t, mu_sum(w.t, y)), MU_ERR_STATE, "input 1 of its mul is p1 where it was p0");
    s = (piece){.change_at = 1};
    y = mu_checkpoint(w.t, longer, &s, x);
    expect_error(&w, mu_backward(w.t, mu_sum(w.t, y)), MU_ERR_STATE, "comes to scale, of shape (4,) where the first run had nothing");
    s = (piece){.runs = 1, .change_at = -1};
    y = mu_checkpoint(w.t, longer, &s, x);
    expect_error(&w, mu_backward(w.t, mu_sum(w.t, y)), MU_ERR_STATE, "comes to its end where the first run had scale");
    assert_null(mu_checkpoint(w.t, leaves_region, &s, x));
    expect_error(&w, mu_context_status(w.c), MU_ERR_STATE, "left a no-grad region open");
    mu_no_grad_end(w.t);
    assert_null(mu_checkpoint(w.t, calls_backward, &s, x));
    expect_error(&w, s.within, MU_ERR_STATE, "within the function of a checkpointed segment");
    assert_null(mu_checkpoint(w.t, resets, &s, x));
    expect_error(&w, mu_context_status(w.c), MU_ERR_STATE, "mu_tape_reset within");
    assert_null(mu_checkpoint(w.t, NULL, &s, x));
    expect_error(&w, mu_context_status(w.c), MU_ERR_ARG, "function is NULL");
    assert_null(mu_checkpoint(w.t, nothing, &s, x));
    assert_null(mu_checkpoint(w.t, nothing, &s, NULL));
    assert_null(mu_checkpoint(NULL, nothing, &s, x));
    assert_int_equal(mu_context_status(w.c), MU_OK);
    assert_int_equal(mu_checkpoint_many(NULL, NULL, NULL, NULL, 0, NULL, 0), MU_ERR_ARG);
    expect_error(&w, mu_checkpoint_many(w.t, many_in, NULL, &(mu_tensor *){NULL}, 1, NULL, 0), MU_ERR_ARG, "NULL");
    assert_ptr_equal(mu_checkpoint(w.t, itself, &s, x), x);
    mu_tensor *own = mu_checkpoint(w.t, itself, &s, &w.p[0].value);
    assert_ptr_equal(own, &w.p[0].value);
    assert_int_equal(mu_context_status(w.c), MU_OK);
    close_world(&w);
}

/* Two segments within one, on parameters of six elements. */
static mu_tensor *half_of_pieces(void *self, mu_tape *t, mu_tensor *x)
{
    piece *s = self;
    s->runs++;
    return mu_dropout(t, mu_tanh(t, mu_mul(t, x, &here->p[5].value)), 0.2f);
}

static mu_tensor *layers_of_pieces(void *self, mu_tape *t, mu_tensor *x)
{
    x = mu_add(t, mu_tanh(t, x), &here->p[6].value);
    x = mu_checkpoint(t, half_of_pieces, self, x);
    return mu_checkpoint(t, half_of_pieces, self, mu_tanh(t, x));
}

/* Memory fails at each allocation of a step in turn: an error, and the next step is right. */
static void test_out_of_memory(void **state)
{
    (void)state;
    static program fresh, g;
    for (uint64_t seed = 3; seed < 30; seed += 9) {
        open_program(&fresh, false, false, MU_KERNELS_DEFAULT);
        run_program(&fresh, seed);
        for (int64_t k = 0;; k++) {
            open_program(&g, true, false, MU_KERNELS_DEFAULT);
            now = &g;
            piece s = {0};
            here = &g.w;
            g.w.c->fail_after = k;
            mu_tensor *x = mu_tensor_zeros(g.w.t, MU_DIMS(6));
            mu_tensor *y = mu_checkpoint(g.w.t, layers_of_pieces, &s, x);
            mu_status r = y != NULL ? mu_backward(g.w.t, mu_sum(g.w.t, y)) : mu_context_status(g.w.c);
            bool enough = g.w.c->fail_after >= 0;
            g.w.c->fail_after = -1;
            assert_int_equal(r, enough ? MU_OK : MU_ERR_NOMEM);
            mu_context_clear(g.w.c);
            mu_tape_reset(g.w.t);
            assert_int_equal(mu_tape_bytes(g.w.t), 0);
            mu_tape_set_step(g.w.t, 0);
            run_program(&g, seed);
            compare(&fresh, &g, seed);
            close_world(&g.w);
            if (enough) {
                assert_true(k > 10);
                break;
            }
        }
        close_world(&fresh.w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_operation), cmocka_unit_test(test_random),
        cmocka_unit_test(test_random_retained), cmocka_unit_test(test_steady),
        cmocka_unit_test(test_memory),          cmocka_unit_test(test_inner_values),
        cmocka_unit_test(test_runs_once_again), cmocka_unit_test(test_other_second_run),
        cmocka_unit_test(test_bad_functions),   cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_loss_within),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
