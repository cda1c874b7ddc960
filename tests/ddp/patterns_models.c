/* Rows about trees and several models: tied weights, parameters read elsewhere, several wrappers, two models and two
 * optimisers. */
#include "patterns.h"

static const mu_init normal = {MU_INIT_NORMAL, 0.5F};

/* -- tied and foreign parameters ---------------------------------------------------------------------------------- */
static mu_tensor *matrix_forward(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_linear_op(t, x, mu_parameter_tensor(mu_module_get_parameter(self, "weight")), NULL);
}

/* in and out: linear without bias over one matrix; middle between them. */
static void build_tied(side *s)
{
    mu_module *m = mu_module_new(s->c, "Tied", NULL),
              *in = mu_linear(s->c, 6, 6, &(mu_linear_options){.no_bias = true});
    mu_module *out = mu_module_new(s->c, "Out", &(mu_module_options){.forward = matrix_forward});
    CHECK(mu_module_add(m, "in", in) == MU_OK && mu_module_add(m, "middle", mu_linear(s->c, 6, 6, NULL)) == MU_OK &&
              mu_module_add(m, "out", out) == MU_OK &&
              mu_module_share(out, "weight", mu_module_get_parameter(m, "in.weight")) == MU_OK,
          "tied: %s", mu_context_message(s->c));
    s->m[0] = m;
}

/* out_last: whether the last rank uses the second user of the matrix. */
static mu_tensor *tied_loss_of(side *s, place *p, bool out_last)
{
    mu_module *m = s->m[0];
    uint64_t k = place_key(p);
    mu_tensor *x = mu_tanh(s->t, mu_forward(s->t, mu_module_get(m, "in"), batch(s, MU_DIMS(4, 6), k)));
    x = mu_forward(s->t, mu_module_get(m, "middle"), x);
    if (out_last || p->rank < p->size - 1) {
        x = mu_forward(s->t, mu_module_get(m, "out"), mu_tanh(s->t, x));
    }
    return mu_cross_entropy(s->t, x, labels(s, 4, 6, k));
}
static mu_tensor *tied_loss(side *s, place *p)
{
    return tied_loss_of(s, p, true);
}
static mu_tensor *tied_user_skipped(side *s, place *p)
{
    return tied_loss_of(s, p, false);
}

/* Two modules that read a parameter of a third: they hold no more than a pointer to the root. */
typedef struct reader {
    mu_module *root;
    float factor;
} reader;
static mu_tensor *reader_forward(void *self, mu_tape *t, mu_tensor *x)
{
    const reader *r = self;
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(r->root, "table"));
    return mu_tanh(t, mu_linear_op(t, x, mu_scale(t, w, r->factor), NULL));
}
static void build_readers(side *s)
{
    mu_module *m = mu_module_new(s->c, "Readers", NULL);
    mu_module_parameter(m, "table", MU_DIMS(6, 6), normal);
    mu_module_parameter(m, "outside", MU_DIMS(5), normal);
    for (int i = 0; i < 2; i++) {
        reader *r = malloc(sizeof(*r));
        *r = (reader){m, i == 0 ? 1.0F : -0.5F};
        mu_module_options o = {.forward = reader_forward, .self = r, .destroy = free};
        CHECK(mu_module_add(m, i == 0 ? "first" : "second", mu_module_new(s->c, "Reader", &o)) == MU_OK, "add");
    }
    s->m[0] = m;
}
static mu_tensor *read_in_two(side *s, place *p)
{
    uint64_t k = place_key(p);
    mu_tensor *x = mu_forward(s->t, mu_module_get(s->m[0], "first"), batch(s, MU_DIMS(4, 6), k));
    x = p->rank == 1 && p->step % 2 == 1 ? x : mu_forward(s->t, mu_module_get(s->m[0], "second"), x);
    return mu_cross_entropy(s->t, x, labels(s, 4, 6, k));
}
static mu_tensor *square(side *s, const char *name, float factor)
{
    mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(s->m[0], name));
    return mu_scale(s->t, mu_sum(s->t, mu_mul(s->t, v, v)), factor);
}
static mu_tensor *only_outside(side *s, place *p)
{
    return mu_add(s->t, read_in_two(s, p), square(s, "outside", 0.01F));
}
static mu_tensor *inside_and_outside(side *s, place *p)
{
    mu_tensor *x = heads_loss(s, "one two", place_key(p));
    return p->rank == 0
               ? mu_add(s->t, x, mu_add(s->t, square(s, "trunk.weight", 0.01F), square(s, "three.weight", 0.1F)))
               : mu_add(s->t, x, square(s, "trunk.weight", 0.01F));
}

/* -- wrappers ----------------------------------------------------------------------------------------------------- */
/* The wrapped module itself is called, not a wrapper: there is no other way, and it is the right one. */
static mu_tensor *inner_forward(void *self, mu_tape *t, mu_tensor *x)
{
    return mu_forward(t, mu_module_get(self, "module"), x);
}
static void build_inner(side *s)
{
    mu_module *m = mu_module_new(s->c, "Wrapper", &(mu_module_options){.forward = inner_forward});
    const int64_t hidden[] = {8};
    CHECK(mu_module_add(m, "module", mu_mlp(s->c, 6, hidden, 1, 3)) == MU_OK, "add");
    s->m[0] = m;
}
static mu_tensor *inner_loss(side *s, place *p)
{
    mu_module *called = p->rank % 2 == 0 ? mu_module_get(s->m[0], "module") : s->m[0];
    uint64_t k = place_key(p);
    return mu_cross_entropy(s->t, mu_forward(s->t, called, batch(s, MU_DIMS(4, 6), k)), labels(s, 4, 3, k));
}

static mu_tensor *all_heads(side *s, place *p)
{
    return heads_loss(s, p->step % 2 == 1 && p->rank == 1 ? "one" : "one two three", place_key(p));
}

/* Two wrappers on one module, used in turn; or of the whole and of a part, both in a step. */
static void two_wrappers(world *w)
{
    w->d[1] = wrap(w, w->row->arg ? mu_module_get(w->me.m[0], "two") : w->me.m[0]);
    CHECK(w->d[1] != NULL, "%s: %s", w->row->name, mu_context_message(w->me.c));
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        reduce(w, w->row->arg ? 0 : step % 2, all_heads, 0);
        check(w, 0);
        update(w, 0);
    }
    check_values(w, 0);
    OK(w, mu_ddp_check(w->d[1]));
}

/* Only the part is wrapped when the part is what trains. */
static mu_tensor *part_loss(side *s, place *p)
{
    mu_tensor *x = mu_detach(s->t, trunk_of(s, place_key(p)));
    return head_loss(s, "two", x, place_key(p));
}
static void part_and_whole(world *w)
{
    w->d[1] = wrap(w, mu_module_get(w->me.m[0], "two"));
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        reduce(w, step % 2, step % 2 == 0 ? all_heads : part_loss, 0);
        check(w, 0);
        update(w, 0);
    }
    check_values(w, 0);
}

/* The gradient of an input is each rank's own, whatever becomes of the parameters'. */
static void input_gradient(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        float got[24], want[24];
        uint64_t k = place_key(&w->mine);
        for (int alone = 1; alone >= 0; alone--) {
            mu_tape_reset(w->me.t);
            mu_tensor *x = mu_tensor_require_grad(w->me.t, batch(&w->me, MU_DIMS(4, 6), k));
            mu_tensor *y = mu_forward(w->me.t, w->me.m[0], x);
            mu_tensor *loss = mu_cross_entropy(w->me.t, y, labels(&w->me, 4, 3, k));
            OK(w, alone ? mu_backward(w->me.t, loss) : mu_ddp_backward(w->d[0], w->me.t, loss));
            OK(w, mu_tensor_read(mu_tensor_grad(x), alone ? want : got, 24));
            OK(w, alone ? mu_module_zero_grad(w->me.m[0]) : MU_OK);
        }
        CHECK(memcmp(got, want, sizeof(got)) == 0, "%s: not the rank's own", w->row->name);
        oracle_mean(w, mlp_loss, 0);
        check(w, 0);
        update(w, 0);
    }
    check_values(w, 0);
}

/* -- two models, two optimisers ----------------------------------------------------------------------------------- */
/* D keeps its inner feature apart: trunk, then head. */
static void build_gan(side *s)
{
    const int64_t hidden[] = {8};
    s->m[0] = mu_mlp(s->c, 4, hidden, 1, 6);
    mu_module *d = mu_module_new(s->c, "Discriminator", NULL);
    CHECK(mu_module_add(d, "trunk", mu_linear(s->c, 6, 8, NULL)) == MU_OK &&
              mu_module_add(d, "head", mu_linear(s->c, 8, 1, NULL)) == MU_OK,
          "discriminator");
    s->m[1] = d;
    for (int i = 0; i < 2; i++) {
        s->o[i] = mu_sgd(s->m[i], 0.1F, &(mu_sgd_options){.momentum = 0.5F, .weight_decay = 0.01F});
    }
}
static mu_tensor *fake_of(side *s, place *p)
{
    return mu_forward(s->t, s->m[0], batch(s, MU_DIMS(3, 4), place_key(p) + 3));
}
static mu_tensor *d_feature(side *s, mu_tensor *x)
{
    return mu_tanh(s->t, mu_forward(s->t, mu_module_get(s->m[1], "trunk"), x));
}
static mu_tensor *d_logits(side *s, mu_tensor *feature)
{
    return mu_forward(s->t, mu_module_get(s->m[1], "head"), feature);
}
static mu_tensor *softplus_mean(side *s, mu_tensor *x, float sign)
{
    return mu_mean(s->t, mu_softplus(s->t, mu_scale(s->t, x, sign)));
}
static mu_tensor *d_loss(side *s, place *p)
{
    mu_tensor *real = batch(s, MU_DIMS(3, 6), place_key(p) + 2), *fake = mu_detach(s->t, fake_of(s, p));
    return mu_add(s->t, softplus_mean(s, d_logits(s, d_feature(s, real)), -1),
                  softplus_mean(s, d_logits(s, d_feature(s, fake)), 1));
}
static mu_tensor *g_loss(side *s, place *p)
{
    return softplus_mean(s, d_logits(s, d_feature(s, fake_of(s, p))), -1);
}

/* One step of each a step; D's parameters frozen while G trains, or their gradients thrown away, or collected for D's
 * next step by both, as the oracle does. */
enum { D_FROZEN, D_CLEARED, D_COLLECTS };
static void gan(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        reduce(w, 1, d_loss, 0);
        check(w, 1);
        update(w, 1);
        BOTH(s)
        {
            OK(w, w->row->arg == D_FROZEN ? mu_module_freeze(s->m[1], "*", NULL) : MU_OK);
        }
        reduce(w, 0, g_loss, 1);
        check(w, 0);
        update(w, 0);
        BOTH(s)
        {
            OK(w, w->row->arg == D_FROZEN ? mu_module_unfreeze(s->m[1], "*", NULL) : MU_OK);
            OK(w, w->row->arg == D_CLEARED ? mu_module_zero_grad(s->m[1]) : MU_OK);
        }
    }
    begin_step(w, STEPS);
    reduce(w, 1, d_loss, 0);
    check(w, 1);
    check_values(w, 0);
    check_values(w, 1);
}

/* The second report that started Muster. In one step of D an auxiliary softplus on the inner feature, and the final
 * loss; in either order, over one forward or two. Then the same in a step of G, through D. */
enum { FINAL_FIRST = 1, TWO_FORWARDS = 2, UNFROZEN = 4 };
static mu_tensor *feature_or_final(side *s, place *p, mu_tensor *(*input)(side *, place *), int kept)
{
    bool again = p->pass % 2 == 0 || p->kept[kept] == NULL;
    p->kept[kept] = again ? d_feature(s, input(s, p)) : p->kept[kept];
    bool final = p->pass / 2 == 1;
    mu_tensor *f = p->kept[kept];
    return final ? softplus_mean(s, d_logits(s, f), -1) : mu_scale(s->t, softplus_mean(s, f, -1), 0.3F);
}
static mu_tensor *real_of(side *s, place *p)
{
    return batch(s, MU_DIMS(3, 6), (uint64_t)(p->step * 100 + p->rank * 7 + 1));
}
static mu_tensor *same_fake(side *s, place *p)
{
    return mu_forward(s->t, s->m[0], batch(s, MU_DIMS(3, 4), (uint64_t)(p->step * 100 + p->rank * 7 + 4)));
}
static mu_tensor *d_part(side *s, place *p)
{
    return feature_or_final(s, p, real_of, 0);
}
static mu_tensor *g_part(side *s, place *p)
{
    return feature_or_final(s, p, same_fake, 1);
}
/* pass: bit 0: use the forward that is there; bit 1: the final loss. */
static void two_backwards(world *w, int i, loss_fn part)
{
    int arg = w->row->arg, first = arg & FINAL_FIRST ? 2 : 0;
    reduce(w, i, part, first);
    reduce(w, i, part, (2 - first) | (arg & TWO_FORWARDS ? 0 : 1));
    check(w, i);
    update(w, i);
}
static void feature_gan(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        two_backwards(w, 1, d_part);
        BOTH(s)
        {
            OK(w, w->row->arg & UNFROZEN ? MU_OK : mu_module_freeze(s->m[1], "*", NULL));
        }
        two_backwards(w, 0, g_part);
        BOTH(s)
        {
            OK(w, w->row->arg & UNFROZEN ? MU_OK : mu_module_unfreeze(s->m[1], "*", NULL));
        }
        clear(w, 1);
    }
    check_values(w, 0);
    check_values(w, 1);
}

/* One rank trains G where the others train D. */
static void crossed_models(world *w)
{
    begin_step(w, 0);
    bool odd = w->rank == 1;
    mu_status s = rank_reduce(w, odd ? 0 : 1, odd ? g_loss : d_loss, 0);
    expect_error(w, s, MU_ERR_COMM, "rank 0 is at reduction 1 (ddp `Discriminator`)", "rank 1 at reduction 1 (ddp `",
                 NULL);
}

static const row list[] = {
    {.line = 8,
     .name = "tied weights",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .build = build_tied,
     .loss = tied_loss},
    {.line = 8,
     .name = "one user of a tied weight skipped on one rank",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .build = build_tied,
     .loss = tied_user_skipped},
    {.line = 34,
     .name = "parameter used outside any forward only (a regulariser)",
     .plain = "right",
     .unused = "error",
     .fixed = "right",
     .build = build_readers,
     .loss = only_outside},
    {.line = 34,
     .name = "parameter used inside and outside of forward",
     .plain = "right",
     .unused = "error",
     .fixed = "right",
     .net = inside_and_outside},
    {.line = 39,
     .name = "torch.autograd.grad",
     .plain = "not synchronised, by design",
     .none = "gradients of parameters are always stored; of an input: see below"},
    {.line = 40, .name = "backward(create_graph=True)", .plain = "error", .none = "no second derivatives"},
    {.line = 41,
     .name = "model.module(x) instead of model(x)",
     .plain = "SILENT: not synchronised",
     .build = build_inner,
     .loss = inner_loss,
     .note = "the reduction is a call, not a hook of the forward"},
    {.line = 42,
     .name = "two wrappers on one module, in turn",
     .plain = "right",
     .run = two_wrappers,
     .net = all_heads},
    {.line = 42,
     .name = "nested: a part and the whole wrapped",
     .plain = "right",
     .run = two_wrappers,
     .arg = 1,
     .net = all_heads},
    {.line = 42,
     .name = "nested: reduced through the part and the whole in turn",
     .plain = "right",
     .run = part_and_whole,
     .net = all_heads},
    {.line = 42,
     .name = "deepcopy of the wrapper",
     .plain = "right",
     .none = "objects are not copied: build a second model, load, wrap"},
    {.line = 43,
     .name = "two models (GAN), D frozen while G trains",
     .plain = "right",
     .build = build_gan,
     .run = gan,
     .arg = D_FROZEN,
     .tolerance = 1e-4},
    {.line = 43,
     .name = "two models (GAN), D not frozen, its gradients cleared",
     .plain = "right",
     .build = build_gan,
     .run = gan,
     .arg = D_CLEARED,
     .tolerance = 1e-4},
    {.line = 43,
     .name = "two models (GAN), D collects from G's step",
     .plain = "right",
     .build = build_gan,
     .run = gan,
     .arg = D_COLLECTS,
     .tolerance = 1e-4},
    {.name = "parameter read in two modules that are not its own",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .build = build_readers,
     .loss = read_in_two},
    {.name = "gradient of an input",
     .plain = "right (the rank's own)",
     .run = input_gradient,
     .build = build_mlp,
     .loss = mlp_loss},
    {.name = "GAN: auxiliary softplus on D's feature, then the final loss",
     .plain = "error",
     .unused = "SILENT wrong",
     .build = build_gan,
     .run = feature_gan,
     .retain = true,
     .tolerance = 1e-4},
    {.name = "GAN: the final loss, then the auxiliary one",
     .plain = "error",
     .unused = "SILENT wrong",
     .build = build_gan,
     .run = feature_gan,
     .arg = FINAL_FIRST,
     .retain = true,
     .tolerance = 1e-4},
    {.name = "GAN: the same with two forwards",
     .plain = "SILENT wrong",
     .unused = "SILENT wrong",
     .build = build_gan,
     .run = feature_gan,
     .arg = TWO_FORWARDS,
     .tolerance = 1e-4},
    {.name = "GAN: two forwards, the final loss first",
     .plain = "SILENT wrong",
     .unused = "SILENT wrong",
     .build = build_gan,
     .run = feature_gan,
     .arg = TWO_FORWARDS | FINAL_FIRST,
     .tolerance = 1e-4},
    {.name = "GAN: both losses over one forward, D not frozen in G's step",
     .plain = "error",
     .unused = "SILENT wrong",
     .build = build_gan,
     .run = feature_gan,
     .arg = UNFROZEN,
     .retain = true,
     .tolerance = 1e-4},
    {.name = "GAN: both losses over two forwards, D not frozen in G's step",
     .plain = "SILENT wrong",
     .unused = "SILENT wrong",
     .build = build_gan,
     .run = feature_gan,
     .arg = UNFROZEN | TWO_FORWARDS,
     .tolerance = 1e-4},
    {.name = "one rank trains G where the others train D",
     .plain = "SILENT mixed, or hang",
     .error = "ranks contradict each other",
     .build = build_gan,
     .run = crossed_models,
     .tolerance = 1e-4},
};
const rows model_rows = {list, sizeof(list) / sizeof(list[0])};
