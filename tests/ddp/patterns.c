/* What the programs of the pattern table have in common: worlds, steps, models and losses. */
#include "patterns.h"

#include "base/os.h"
#include "tape/op.h"

int failures;

/* -- steps -------------------------------------------------------------------------------------------------------- */
void expect_ok(world *w, mu_status s, const char *what)
{
    CHECK(s == MU_OK, "%s, rank %d of %d, step %d: %s: %d %s", w->row->name, w->rank, w->size, w->step, what, (int)s,
          mu_context_message(w->me.c));
}

void begin_step(world *w, int step)
{
    w->step = step;
    mu_tape_reset(w->me.t);
    mu_tape_reset(w->one.t);
    w->mine = (place){.step = step, .rank = w->rank, .size = w->size};
    for (int r = 0; r < w->size; r++) {
        w->theirs[r] = (place){.step = step, .rank = r, .size = w->size};
    }
}

mu_status rank_reduce(world *w, int i, loss_fn loss, int pass)
{
    w->mine.pass = pass;
    mu_tensor *x = loss != NULL ? loss(&w->me, &w->mine) : NULL;
    return w->row->samples != NULL ? mu_ddp_backward_weighted(w->d[i], w->me.t, x, w->row->samples(&w->mine))
                                   : mu_ddp_backward(w->d[i], w->me.t, x);
}

void oracle_mean(world *w, loss_fn loss, int pass)
{
    double total = 0, weight[MOST_RANKS];
    for (int r = 0; r < w->size; r++) {
        w->theirs[r].pass = pass;
        weight[r] = w->row->samples != NULL ? (double)w->row->samples(&w->theirs[r]) : 1.0;
        total += weight[r];
    }
    mu_tensor *sum = NULL;
    for (int r = 0; r < w->size; r++) {
        mu_tensor *x = loss(&w->one, &w->theirs[r]);
        if (x != NULL) {
            x = mu_scale(w->one.t, x, (float)(weight[r] / total));
            sum = sum == NULL ? x : mu_add(w->one.t, sum, x);
        }
    }
    mu_status s = sum != NULL ? mu_backward(w->one.t, sum) : MU_OK;
    CHECK(s == MU_OK, "%s: oracle: %s", w->row->name, mu_context_message(w->one.c));
}

void reduce(world *w, int i, loss_fn loss, int pass)
{
    OK(w, rank_reduce(w, i, loss, pass));
    oracle_mean(w, loss, pass);
}

void defer(world *w, int i, loss_fn loss, int pass)
{
    w->mine.pass = pass;
    OK(w, mu_ddp_backward_with(w->d[i], w->me.t, loss(&w->me, &w->mine), &(mu_ddp_backward_options){.defer = true}));
    oracle_mean(w, loss, pass);
}

void accumulate(world *w, int i, loss_fn loss, int pass)
{
    (void)i;
    w->mine.pass = pass;
    mu_tensor *x = loss(&w->me, &w->mine);
    OK(w, x != NULL ? mu_backward(w->me.t, x) : MU_OK);
    oracle_mean(w, loss, pass);
}

void update(world *w, int i)
{
    BOTH(s)
    {
        OK(w, mu_optimizer_step(s->o[i]));
    }
}

void clear(world *w, int i)
{
    BOTH(s)
    {
        OK(w, mu_module_zero_grad(s->m[i]));
    }
}

void check(world *w, int i)
{
    char what[160];
    snprintf(what, sizeof(what), "%s, step %d", w->row->name, w->step);
    check_close(w->me.m[i], w->one.m[i], w->row->tolerance > 0 ? w->row->tolerance : 1e-5,
                w->row->tolerance > 0 ? 0.01 : 0, what);
    check_replicas(w->g, w->me.m[i], what);
}

void check_values(world *w, int i)
{
    snapshot a = snap(w->me.m[i]), b = snap(w->one.m[i]);
    CHECK(a.count == b.count, "%s: models differ", w->row->name);
    double off = 0;
    for (int64_t k = 0; k < a.count && a.count == b.count; k++) {
        off += pow((double)a.values[k] - (double)b.values[k], 2);
    }
    CHECK(sqrt(off) <= 1e-4 * length_of(b.values, b.count), "%s, step %d: values are off by %g", w->row->name, w->step,
          sqrt(off));
    snap_free(&a);
    snap_free(&b);
    CHECK(w->d[i] == NULL || mu_ddp_check(w->d[i]) == MU_OK, "%s: %s", w->row->name, mu_context_message(w->me.c));
}

void good_step(world *w, int step, loss_fn loss)
{
    begin_step(w, step);
    reduce(w, 0, loss, 0);
    check(w, 0);
    update(w, 0);
}

void run_losses(world *w)
{
    loss_fn loss = w->net ? w->row->net : w->row->loss;
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        for (int pass = 0; pass < (w->row->passes > 0 ? w->row->passes : 1); pass++) {
            reduce(w, 0, loss, pass);
        }
        check(w, 0);
        update(w, 0);
    }
    check(w, 0);
    OK(w, mu_ddp_check(w->d[0]));
}

mu_ddp *wrap(world *w, mu_module *m)
{
    mu_ddp_options o = w->row->options;
    o.bucket_bytes = o.first_bucket_bytes = w->bucket;
    return mu_ddp_wrap(m, w->g, &o);
}

void expect_error(world *w, mu_status got, mu_status want, ...)
{
    const char *text = mu_context_message(w->me.c);
    CHECK(got == want, "%s, rank %d of %d: status %d, expected %d: %s", w->row->name, w->rank, w->size, (int)got,
          (int)want, text);
    CHECK(w->row->error == NULL || strstr(text, w->row->error) != NULL, "%s, rank %d of %d: no `%s` in: %s",
          w->row->name, w->rank, w->size, w->row->error, text);
    va_list list;
    va_start(list, want);
    for (const char *part; (part = va_arg(list, const char *)) != NULL;) {
        CHECK(strstr(text, part) != NULL, "%s, rank %d of %d: no `%s` in: %s", w->row->name, w->rank, w->size, part,
              text);
    }
    va_end(list);
    CHECK(mui_now() - w->began < 10, "%s: took %g s", w->row->name, mui_now() - w->began);
    mu_context_clear(w->me.c);
}

void own_file(const world *w, char path[96])
{
    snprintf(path, 96, "/tmp/muster-pattern-%d-%d.pt", (int)getpid(), w->rank);
}

/* -- models ------------------------------------------------------------------------------------------------------- */
uint64_t place_key(const place *p)
{
    return (uint64_t)(p->step * 10007 + p->pass * 101 + p->rank * 11 + 1);
}

mu_tensor *batch(side *s, mu_dims dims, uint64_t key)
{
    float x[1024];
    int64_t n = 1;
    for (int i = 0; i < dims.ndim; i++) {
        n *= dims.dim[i];
    }
    for (int64_t i = 0; i < n && i < 1024; i++) {
        x[i] = (float)(mix(key * 4099 + (uint64_t)i) % 2001) / 1000.0F - 1.0F;
    }
    return mu_tensor_from(s->t, dims, x);
}

mu_tensor *labels(side *s, int64_t n, int64_t classes, uint64_t key)
{
    int64_t y[64];
    for (int64_t i = 0; i < n && i < 64; i++) {
        y[i] = (int64_t)(mix(key * 31 + (uint64_t)i) % (uint64_t)classes);
    }
    return mu_tensor_from_i64(s->t, MU_DIMS(n), y);
}

void build_toy(side *s)
{
    s->m[0] = toy(s->c);
}

mu_tensor *all_terms(side *s, place *p)
{
    return terms(s->t, s->m[0], "a b c d head.w head.v", place_key(p));
}

static mu_module *with(mu_module *m, const char *name, mu_module *child)
{
    return mu_module_add(m, name, child) == MU_OK ? m : NULL;
}

void build_heads(side *s)
{
    mu_module *m = mu_module_new(s->c, "Heads", NULL);
    with(m, "trunk", mu_linear(s->c, 6, 8, NULL));
    with(m, "one", mu_linear(s->c, 8, 3, NULL));
    with(m, "two", mu_linear(s->c, 8, 4, NULL));
    with(m, "three", mu_linear(s->c, 8, 2, &(mu_linear_options){.no_bias = true}));
    s->m[0] = m;
}

mu_tensor *trunk_of(side *s, uint64_t key)
{
    return mu_tanh(s->t, mu_forward(s->t, mu_module_get(s->m[0], "trunk"), batch(s, MU_DIMS(4, 6), key)));
}

mu_tensor *head_loss(side *s, const char *name, mu_tensor *feature, uint64_t key)
{
    int64_t classes = strcmp(name, "one") == 0 ? 3 : strcmp(name, "two") == 0 ? 4 : 2;
    return mu_cross_entropy(s->t, mu_forward(s->t, mu_module_get(s->m[0], name), feature), labels(s, 4, classes, key));
}

mu_tensor *heads_loss(side *s, const char *names, uint64_t key)
{
    mu_tensor *feature = trunk_of(s, key), *sum = NULL;
    static const char *const all[] = {"one", "two", "three"};
    for (int i = 0; i < 3; i++) {
        if (strstr(names, all[i]) != NULL) {
            mu_tensor *x = head_loss(s, all[i], feature, key + (uint64_t)i);
            sum = sum == NULL ? x : mu_add(s->t, sum, x);
        }
    }
    return sum;
}

void build_mlp(side *s)
{
    const int64_t hidden[] = {8, 5};
    s->m[0] = mu_mlp(s->c, 6, hidden, 2, 3);
}

mu_tensor *mlp_loss(side *s, place *p)
{
    mu_tensor *x = batch(s, MU_DIMS(4, 6), place_key(p));
    return mu_cross_entropy(s->t, mu_forward(s->t, s->m[0], x), labels(s, 4, 3, place_key(p)));
}

void build_cnn(side *s)
{
    s->m[0] = mu_small_cnn(s->c, 1, 8, 4);
}

mu_tensor *cnn_loss(side *s, place *p)
{
    mu_tensor *x = batch(s, MU_DIMS(3, 1, 8, 8), place_key(p));
    return mu_cross_entropy(s->t, mu_forward(s->t, s->m[0], x), labels(s, 3, 4, place_key(p)));
}

static mu_tensor *block_forward(void *self, mu_tape *t, mu_tensor *x)
{
    mu_tensor *y = mu_forward(t, mu_module_get(self, "conv1"), x);
    y = mu_relu(t, mu_forward(t, mu_module_get(self, "bn1"), y));
    y = mu_forward(t, mu_module_get(self, "conv2"), y);
    return mu_add_relu(t, mu_forward(t, mu_module_get(self, "bn2"), y), x);
}

static mu_tensor *feature_forward(mu_module *m, mu_tape *t, mu_tensor *x)
{
    x = mu_relu(t, mu_forward(t, mu_module_get(m, "bn1"), mu_forward(t, mu_module_get(m, "conv1"), x)));
    x = mu_forward(t, mu_module_get(m, "layer1"), x);
    return mu_flatten(t, mu_global_avg_pool2d(t, x), 1);
}

static mu_tensor *residual_forward(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_forward(t, mu_module_get(self, "fc"), feature_forward(self, t, x));
}

mu_module *residual(mu_context *c, int64_t classes)
{
    static const mu_conv_options same = {.padding = 1, .no_bias = true};
    mu_module *m = mu_module_new(c, "Residual", &(mu_module_options){.forward = residual_forward});
    mu_module *block = mu_module_new(c, "Block", &(mu_module_options){.forward = block_forward});
    with(block, "conv1", mu_conv2d_layer(c, 8, 8, 3, &same));
    with(block, "bn1", mu_batch_norm_layer(c, 8, NULL));
    with(block, "conv2", mu_conv2d_layer(c, 8, 8, 3, &same));
    with(block, "bn2", mu_batch_norm_layer(c, 8, NULL));
    with(m, "conv1", mu_conv2d_layer(c, 3, 8, 3, &same));
    with(m, "bn1", mu_batch_norm_layer(c, 8, NULL));
    with(m, "layer1", block);
    with(m, "fc", mu_linear(c, 8, classes, NULL));
    return m;
}

void build_residual(side *s)
{
    s->m[0] = residual(s->c, 3);
}

mu_tensor *residual_feature(side *s, mu_module *m, uint64_t key)
{
    return feature_forward(m, s->t, batch(s, MU_DIMS(4, 3, 5, 5), key));
}

mu_tensor *residual_loss(side *s, place *p)
{
    mu_tensor *x = mu_forward(s->t, s->m[0], batch(s, MU_DIMS(4, 3, 5, 5), place_key(p)));
    return mu_cross_entropy(s->t, x, labels(s, 4, 3, place_key(p)));
}

/* -- an operation whose backward fails on request ----------------------------------------------------------------- */
static mu_status fuse_backward(mui_backward *b, mui_node *n)
{
    return *(const bool *)n->attr ? mui_fail(n->out->context, MU_ERR_DEVICE, "the fuse blew") : mui_grad_pass(b, n, 0);
}

static const mui_op fuse_op = {.name = "fuse", .backward = fuse_backward};

mu_tensor *fuse(mu_tape *t, mu_tensor *x, bool blows)
{
    mu_tensor *y = mui_tensor_view(t, x, x->dims, x->stride, 0);
    return mui_record(t, &fuse_op, y, &x, 1, &blows, sizeof(blows), NULL, 0);
}
