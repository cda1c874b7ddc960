/* Rows about activation checkpointing. The oracle calls the same functions directly. */
#include "patterns.h"

static mu_tensor *segment(side *s, mu_forward_fn fn, void *self, mu_tensor *x)
{
    return s->oracle ? fn(self, s->t, x) : mu_checkpoint(s->t, fn, self, x);
}

/* tanh of x times parts of the toy's parameters. */
static mu_tensor *scaled(mu_module *m, mu_tape *t, const char *name, mu_tensor *x)
{
    mu_tensor *p = mu_parameter_tensor(mu_module_get_parameter(m, name));
    return mu_tanh(t, mu_mul(t, x, mu_narrow(t, mu_reshape(t, p, MU_DIMS(-1)), 0, 0, 1)));
}
static mu_tensor *ab(void *self, mu_tape *t, mu_tensor *x)
{
    return scaled(self, t, "b", scaled(self, t, "a", x));
}
static mu_tensor *cd(void *self, mu_tape *t, mu_tensor *x)
{
    return scaled(self, t, "d", scaled(self, t, "c", x));
}
/* Reads head.w to no avail. */
static mu_tensor *cd_and_more(void *self, mu_tape *t, mu_tensor *x)
{
    scaled(self, t, "head.w", x);
    return cd(self, t, x);
}

/* The input needs no gradient: PyTorch's reentrant form gives none to anything then. */
static mu_tensor *once(side *s, place *p)
{
    mu_tensor *x = segment(s, ab, s->m[0], batch(s, MU_DIMS(6), place_key(p)));
    return mu_add(s->t, mu_sum(s->t, x), terms(s->t, s->m[0], "c d head.w head.v", place_key(p)));
}
static mu_tensor *twice(side *s, place *p)
{
    mu_tensor *x = segment(s, ab, s->m[0], batch(s, MU_DIMS(6), place_key(p)));
    x = segment(s, cd, s->m[0], x);
    x = segment(s, ab, s->m[0], x);
    return mu_add(s->t, mu_sum(s->t, x), terms(s->t, s->m[0], "a d head.w head.v", place_key(p)));
}
static mu_tensor *with_unused(side *s, place *p)
{
    mu_tensor *x = segment(s, ab, s->m[0], batch(s, MU_DIMS(6), place_key(p)));
    return mu_sum(s->t, segment(s, cd_and_more, s->m[0], x));
}
/* On the last rank only. */
static mu_tensor *unused_on_last(side *s, place *p)
{
    return p->rank == p->size - 1 ? with_unused(s, p) : twice(s, p);
}
static mu_tensor *used_on_rank_0(side *s, place *p)
{
    mu_tensor *x = batch(s, MU_DIMS(6), place_key(p));
    return mu_sum(s->t, p->rank == 0 ? segment(s, ab, s->m[0], x) : cd(s->m[0], s->t, x));
}

static mu_tensor *trunk_and_one(void *self, mu_tape *t, mu_tensor *x)
{
    x = mu_tanh(t, mu_forward(t, mu_module_get(self, "trunk"), x));
    return mu_forward(t, mu_module_get(self, "one"), x);
}
static mu_tensor *trunk(void *self, mu_tape *t, mu_tensor *x)
{
    mu_forward(t, mu_module_get(self, "two"), mu_forward(t, mu_module_get(self, "trunk"), x));
    return mu_tanh(t, mu_forward(t, mu_module_get(self, "trunk"), x));
}
static mu_tensor *heads_once(side *s, place *p)
{
    uint64_t key = place_key(p);
    mu_tensor *x = segment(s, trunk_and_one, s->m[0], batch(s, MU_DIMS(4, 6), key));
    return mu_add(s->t, mu_cross_entropy(s->t, x, labels(s, 4, 3, key)), heads_loss(s, "two three", key));
}
static mu_tensor *heads_twice(side *s, place *p)
{
    uint64_t key = place_key(p);
    mu_tensor *x = segment(s, trunk_and_one, s->m[0], batch(s, MU_DIMS(4, 6), key));
    mu_tensor *y = segment(s, trunk_and_one, s->m[0], batch(s, MU_DIMS(4, 6), key + 7));
    mu_tensor *loss = mu_add(s->t, mu_cross_entropy(s->t, x, labels(s, 4, 3, key)), mu_mean(s->t, mu_mul(s->t, y, y)));
    return mu_add(s->t, loss, heads_loss(s, "two three", key));
}
static mu_tensor *heads_unused(side *s, place *p)
{
    uint64_t key = place_key(p);
    mu_tensor *x = segment(s, trunk, s->m[0], batch(s, MU_DIMS(4, 6), key));
    return head_loss(s, p->rank == 0 ? "one" : "three", x, key);
}

/* The switch of a model, on the ranks and not in the oracle; also not on the last rank where arg says so. */
static void switched(world *w)
{
    if (w->row->arg == 0 || w->rank < w->size - 1) {
        OK(w, mu_module_checkpoint(w->me.m[0], "layer1*", true, NULL));
        OK(w, mu_module_checkpoint(w->me.m[0], "layer1.bn?", true, NULL));
        OK(w, mu_module_checkpoint(w->me.m[0], "conv?", true, NULL));
    }
    run_losses(w);
}

static const row list[] = {
    {.line = 35,
     .name = "reentrant checkpoint once",
     .plain = "right",
     .unused = "error",
     .fixed = "right",
     .loss = once,
     .net = heads_once},
    {.line = 36,
     .name = "same module checkpointed twice",
     .plain = "SILENT wrong, or error",
     .fixed = "right",
     .loss = twice,
     .net = heads_twice},
    {.line = 37,
     .name = "non-reentrant checkpoint",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .note = "there is one form only",
     .run = switched,
     .build = build_residual,
     .loss = residual_loss,
     .tolerance = 1e-4},
    {.line = 38,
     .name = "checkpoint and a parameter that is really unused",
     .plain = "error a step late",
     .unused = "error",
     .fixed = "right",
     .loss = with_unused,
     .net = heads_unused},
    {.name = "checkpointed segment with other parameters on the last rank", .loss = unused_on_last},
    {.name = "segment read on rank 0 only", .loss = used_on_rank_0},
    {.name = "layers checkpointed on all ranks but the last",
     .run = switched,
     .build = build_residual,
     .loss = residual_loss,
     .arg = 1,
     .tolerance = 1e-4},
};
const rows segment_rows = {list, sizeof(list) / sizeof(list[0])};
