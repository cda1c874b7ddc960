/* Rows about what a loss reaches: all ranks alike, on some ranks only, in turn, several forwards and backwards. */
#include "patterns.h"

static mu_tensor *toy_terms(side *s, const place *p, const char *names)
{
    return terms(s->t, s->m[0], names, place_key(p));
}

/* -- who is used -------------------------------------------------------------------------------------------------- */
static mu_tensor *all_heads(side *s, place *p)
{
    return heads_loss(s, "one two three", place_key(p));
}
static mu_tensor *unused_on_all(side *s, place *p)
{
    return toy_terms(s, p, "a b c d head.w");
}
static mu_tensor *two_heads(side *s, place *p)
{
    return heads_loss(s, "one two", place_key(p));
}
static mu_tensor *unused_on_last(side *s, place *p)
{
    return toy_terms(s, p, p->rank == p->size - 1 ? "a b c d" : "a b c d head.w head.v");
}
static mu_tensor *head_unused_on_last(side *s, place *p)
{
    return heads_loss(s, p->rank == p->size - 1 ? "one" : "one two three", place_key(p));
}
static mu_tensor *disjoint(side *s, place *p)
{
    static const char *const sets[] = {"a head.w", "b", "c d", "head.v"};
    return toy_terms(s, p, sets[p->rank % 4]);
}
static mu_tensor *disjoint_heads(side *s, place *p)
{
    static const char *const sets[] = {"one", "two", "three"};
    return heads_loss(s, sets[p->rank % 3], place_key(p));
}
static mu_tensor *shifting(side *s, place *p)
{
    static const char *const sets[] = {"a head.w", "b", "c d", "head.v"};
    return toy_terms(s, p, sets[(p->rank + (p->rank == 1 ? p->step : 0)) % 4]);
}
static mu_tensor *shifting_heads(side *s, place *p)
{
    static const char *const sets[] = {"one", "two", "three"};
    return heads_loss(s, sets[(p->rank + p->step) % 3], place_key(p));
}
static mu_tensor *used_later(side *s, place *p)
{
    return toy_terms(s, p, p->step < 2 ? "a b d" : "a b c d head.w head.v");
}
static mu_tensor *head_used_later(side *s, place *p)
{
    return heads_loss(s, p->step < 2 ? "one" : "one two three", place_key(p));
}
static mu_tensor *unused_later(side *s, place *p)
{
    return toy_terms(s, p, p->step >= 2 ? "a b d" : "a b c d head.w head.v");
}
static mu_tensor *head_unused_later(side *s, place *p)
{
    return heads_loss(s, p->step >= 2 ? "one" : "one two three", place_key(p));
}
static mu_tensor *in_turn(side *s, place *p)
{
    return toy_terms(s, p, (p->step + p->rank) % 2 == 0 ? "a b c" : "b c d head.w head.v");
}
static mu_tensor *heads_in_turn(side *s, place *p)
{
    return heads_loss(s, (p->step + p->rank) % 2 == 0 ? "one two" : "three", place_key(p));
}
static mu_tensor *experts(side *s, place *p)
{
    static const char *const expert[] = {"b", "d", "head.w", "head.v"};
    char names[64];
    snprintf(names, sizeof(names), "a c %s", expert[mix(place_key(p)) % 4]);
    return toy_terms(s, p, names);
}
static mu_tensor *routed_heads(side *s, place *p)
{
    static const char *const expert[] = {"one", "two", "three"};
    return heads_loss(s, expert[mix(place_key(p)) % 3], place_key(p));
}
static mu_tensor *one_of_two_tasks(side *s, place *p)
{
    return toy_terms(s, p, p->step % 2 == 0 ? "a b head.w" : "a b head.w c d head.v");
}
static mu_tensor *tasks(side *s, place *p)
{
    return heads_loss(s, p->step % 2 == 0 ? "one two" : "one two three", place_key(p));
}

/* -- how often, in what order ------------------------------------------------------------------------------------- */
static mu_tensor *used_twice(side *s, place *p)
{
    return toy_terms(s, p, p->rank == 1 ? "a b c a d" : "a b a c d a head.w head.v b");
}
static mu_tensor *two_forwards(side *s, place *p)
{
    return mu_add(s->t, all_terms(s, p), terms(s->t, s->m[0], "a b c d head.w head.v", place_key(p) + 50));
}
static mu_tensor *two_batches(side *s, place *p)
{
    return mu_add(s->t, heads_loss(s, "one two three", place_key(p)), heads_loss(s, "one two", place_key(p) + 50));
}
static mu_tensor *two_forwards_disjoint(side *s, place *p)
{
    return mu_add(s->t, toy_terms(s, p, "a b c"), terms(s->t, s->m[0], "d head.w head.v", place_key(p) + 50));
}
static mu_tensor *two_batches_disjoint(side *s, place *p)
{
    return mu_add(s->t, heads_loss(s, "one", place_key(p)), heads_loss(s, "two three", place_key(p) + 50));
}
static mu_tensor *same_loss_again(side *s, place *p)
{
    p->kept[0] = p->pass == 0 ? all_terms(s, p) : p->kept[0];
    return p->kept[0];
}
static mu_tensor *same_heads_again(side *s, place *p)
{
    p->kept[0] = p->pass == 0 ? all_heads(s, p) : p->kept[0];
    return p->kept[0];
}
static mu_tensor *feature(side *s, place *p)
{
    mu_tensor *a = mu_parameter_tensor(mu_module_get_parameter(s->m[0], "a"));
    return mu_mul(s->t, a,
                  mu_mul(s->t, term(s->t, s->m[0], "b", place_key(p)), term(s->t, s->m[0], "d", place_key(p) + 1)));
}
static mu_tensor *trunk_two_losses(side *s, place *p)
{
    p->kept[0] = p->pass == 0 ? feature(s, p) : p->kept[0];
    mu_tensor *head = term(s->t, s->m[0], p->pass == 0 ? "head.w" : "head.v", place_key(p) + 7);
    return mu_mean(s->t, mu_mul(s->t, p->kept[0], head));
}
static mu_tensor *trunk_two_heads(side *s, place *p)
{
    p->kept[0] = p->pass == 0 ? trunk_of(s, place_key(p)) : p->kept[0];
    return head_loss(s, p->pass == 0 ? "one" : "two", p->kept[0], place_key(p));
}
static mu_tensor *losses_disjoint(side *s, place *p)
{
    return toy_terms(s, p, p->pass == 0 ? "a b c" : "d head.w head.v");
}
static mu_tensor *losses_disjoint_crossed(side *s, place *p)
{
    return toy_terms(s, p, (p->pass + p->rank) % 2 == 0 ? "a b c" : "d head.w head.v");
}
static mu_tensor *feature_then_final(side *s, place *p)
{
    if (p->pass == 0) {
        p->kept[0] = feature(s, p);
        return mu_mean(s->t, p->kept[0]);
    }
    mu_tensor *head = terms(s->t, s->m[0], "head.w head.v", place_key(p));
    return mu_mean(s->t, mu_mul(s->t, p->kept[0], head));
}
static mu_tensor *final_then_feature(side *s, place *p)
{
    if (p->pass == 1) {
        return mu_mean(s->t, p->kept[0]);
    }
    p->kept[0] = feature(s, p);
    mu_tensor *head = terms(s->t, s->m[0], "head.w head.v", place_key(p));
    return mu_mean(s->t, mu_mul(s->t, p->kept[0], head));
}
static mu_tensor *other_order(side *s, place *p)
{
    return toy_terms(s, p, p->rank % 2 == 0 ? "a b c d head.w head.v" : "head.v head.w d c b a");
}
static mu_tensor *heads_in_other_order(side *s, place *p)
{
    mu_tensor *x = trunk_of(s, place_key(p)), *sum = NULL;
    static const char *const all[] = {"one", "two", "three"};
    for (int i = 0; i < 3; i++) {
        mu_tensor *y = head_loss(s, all[(i + p->rank) % 3], x, place_key(p));
        sum = sum == NULL ? y : mu_add(s->t, sum, y);
    }
    return sum;
}

/* -- losses that reach nothing, or only look as if ------------------------------------------------------------------
 */
static mu_tensor *constant_on_one(side *s, place *p)
{
    return p->rank == 1 ? mu_mean(s->t, mu_tensor_zeros(s->t, MU_DIMS(3))) : all_terms(s, p);
}
static mu_tensor *no_grad_on_one(side *s, place *p)
{
    if (p->rank != 1) {
        return all_heads(s, p);
    }
    mu_no_grad_begin(s->t, "frozen");
    mu_tensor *x = all_heads(s, p);
    mu_no_grad_end(s->t);
    return x;
}
static mu_tensor *null_on_one(side *s, place *p)
{
    return p->rank == 1 ? NULL : unused_on_all(s, p);
}
static mu_tensor *null_on_first(side *s, place *p)
{
    return p->rank == 0 && p->step < 2 ? NULL : all_terms(s, p);
}
static mu_tensor *zero_auxiliary(side *s, place *p)
{
    mu_tensor *v = mu_parameter_tensor(mu_module_get_parameter(s->m[0], "head.v"));
    mu_tensor *zero = mu_scale(s->t, mu_mean(s->t, mu_softplus(s->t, mu_scale(s->t, v, -1.0F))), 0.0F);
    return mu_add(s->t, unused_on_all(s, p), zero);
}
static mu_tensor *zero_auxiliary_head(side *s, place *p)
{
    mu_tensor *x = trunk_of(s, place_key(p));
    mu_tensor *logits = mu_forward(s->t, mu_module_get(s->m[0], "three"), x);
    mu_tensor *zero = mu_scale(s->t, mu_mean(s->t, mu_softplus(s->t, mu_scale(s->t, logits, -1.0F))), 0.0F);
    return mu_add(s->t, mu_add(s->t, head_loss(s, "one", x, place_key(p)), head_loss(s, "two", x, place_key(p))), zero);
}
/* Zero gradients are gradients: present, and zero. */
static void zero_gradients(world *w)
{
    for (int step = 0; step < STEPS; step++) {
        begin_step(w, step);
        reduce(w, 0, w->net ? w->row->net : w->row->loss, 0);
        check(w, 0);
        mu_tensor *g = mu_parameter_grad(mu_module_get_parameter(w->me.m[0], w->net ? "three.weight" : "head.v"));
        float x[16] = {1};
        CHECK(g != NULL && mu_tensor_read(g, x, mu_tensor_elements(g)) == MU_OK && x[0] == 0 && x[1] == 0, "%s: %g, %g",
              w->row->name, (double)x[0], (double)x[1]);
        update(w, 0);
    }
    check_values(w, 0);
}
static mu_tensor *detached(side *s, place *p)
{
    mu_tensor *x = term(s->t, s->m[0], "head.v", place_key(p));
    return mu_add(s->t, unused_on_all(s, p), p->rank == 1 ? x : mu_detach(s->t, x));
}
static mu_tensor *no_grad_region(side *s, place *p)
{
    mu_no_grad_begin(s->t, "teacher");
    mu_tensor *x = toy_terms(s, p, "head.w head.v");
    mu_no_grad_end(s->t);
    return mu_mul(s->t, toy_terms(s, p, "a b c d"), x);
}
static mu_tensor *result_unused(side *s, place *p)
{
    (void)toy_terms(s, p, "head.w head.v");
    return toy_terms(s, p, "a b c d");
}
static mu_tensor *logits_unused(side *s, place *p)
{
    mu_tensor *x = trunk_of(s, place_key(p));
    (void)head_loss(s, "two", x, 1);
    (void)head_loss(s, "three", x, 1);
    return head_loss(s, "one", x, place_key(p));
}
static mu_tensor *result_unused_on_one(side *s, place *p)
{
    mu_tensor *x = toy_terms(s, p, "head.w head.v"), *y = toy_terms(s, p, "a b c d");
    return p->rank == p->size - 1 ? y : mu_add(s->t, x, y);
}
static mu_tensor *logits_unused_on_one(side *s, place *p)
{
    mu_tensor *x = trunk_of(s, place_key(p));
    mu_tensor *one = head_loss(s, "one", x, place_key(p)), *two = head_loss(s, "two", x, place_key(p));
    return p->rank == p->size - 1 ? one : mu_add(s->t, one, two);
}
static mu_tensor *through_view(side *s, place *p)
{
    mu_tensor *b = mu_reshape(s->t, mu_parameter_tensor(mu_module_get_parameter(s->m[0], "b")), MU_DIMS(12));
    return mu_add(s->t, mu_mean(s->t, mu_mul(s->t, b, b)), toy_terms(s, p, "a c d head.w head.v"));
}
static mu_tensor *parameter_as_loss(side *s, place *p)
{
    return p->rank == 0 ? mu_parameter_tensor(mu_module_get_parameter(s->m[0], "c")) : all_terms(s, p);
}

/* -- results that are no tensor ----------------------------------------------------------------------------------- */
typedef struct outputs {
    mu_tensor *logits, *feature;
} outputs;
/* As a forward that fills a struct of the user's. */
static outputs struct_of(side *s, uint64_t key)
{
    mu_tensor *x = trunk_of(s, key);
    return (outputs){.logits = head_loss(s, "one", x, key), .feature = x};
}
static mu_tensor *loss_of_struct(side *s, place *p)
{
    outputs o = struct_of(s, place_key(p));
    mu_tensor *two = head_loss(s, "two", o.feature, place_key(p));
    return p->rank == 0 ? two : mu_add(s->t, o.logits, two);
}

/* -- weights ------------------------------------------------------------------------------------------------------ */
static int64_t ragged(const place *p)
{
    return 1 + (p->step * 7 + p->rank * 5) % 9;
}
static int64_t one_empty(const place *p)
{
    return p->rank == 1 ? 0 : 3 + p->step;
}
static int64_t large(const place *p)
{
    return (1 << 24) - p->rank * 4097 - p->step;
}

static const row list[] = {
    {.line = 1,
     .name = "all parameters used",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .loss = all_terms,
     .net = all_heads},
    {.line = 1,
     .name = "all parameters used: perceptron",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .build = build_mlp,
     .loss = mlp_loss},
    {.line = 1,
     .name = "all parameters used: convolutional network",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .build = build_cnn,
     .loss = cnn_loss,
     .tolerance = 1e-4},
    {.line = 1,
     .name = "all parameters used: residual network with batch norm",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .build = build_residual,
     .loss = residual_loss,
     .tolerance = 1e-4},
    {.line = 2,
     .name = "unused on all ranks",
     .plain = "SILENT wrong, error a step late",
     .unused = "right",
     .fixed = "right",
     .loss = unused_on_all,
     .net = two_heads},
    {.line = 3,
     .name = "unused on one rank",
     .plain = "error a step late, others hang",
     .unused = "right",
     .fixed = "right",
     .loss = unused_on_last,
     .net = head_unused_on_last},
    {.line = 4,
     .name = "ranks use disjoint sets",
     .plain = "SILENT wrong, error a step late",
     .unused = "right",
     .fixed = "right",
     .loss = disjoint,
     .net = disjoint_heads},
    {.line = 5,
     .name = "disjoint sets that shift on one rank",
     .unused = "right",
     .fixed = "error, others hang",
     .loss = shifting,
     .net = shifting_heads},
    {.line = 6,
     .name = "used later only",
     .unused = "right",
     .fixed = "error",
     .loss = used_later,
     .net = head_used_later},
    {.line = 7,
     .name = "unused later",
     .plain = "SILENT wrong, error a step late",
     .unused = "right",
     .fixed = "SILENT wrong, error a step late",
     .loss = unused_later,
     .net = head_unused_later},
    {.line = 8,
     .name = "used several times in one graph",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .loss = used_twice},
    {.line = 9,
     .name = "two forwards, one backward of the sum",
     .plain = "right",
     .unused = "right",
     .fixed = "false error at first",
     .loss = two_forwards,
     .net = two_batches},
    {.line = 10,
     .name = "two forwards over disjoint parameters, one backward",
     .plain = "right",
     .unused = "error",
     .fixed = "error at first",
     .loss = two_forwards_disjoint,
     .net = two_batches_disjoint},
    {.line = 11,
     .name = "two forwards, then two backwards",
     .plain = "SILENT wrong",
     .unused = "SILENT wrong",
     .loss = all_terms,
     .net = all_heads,
     .passes = 2},
    {.line = 12,
     .name = "one forward, two backwards (graph retained)",
     .plain = "SILENT wrong",
     .unused = "SILENT wrong",
     .fixed = "internal error",
     .loss = same_loss_again,
     .net = same_heads_again,
     .passes = 2,
     .retain = true},
    {.line = 13,
     .name = "shared trunk, two losses, two backwards",
     .plain = "error",
     .unused = "SILENT wrong",
     .fixed = "internal error",
     .loss = trunk_two_losses,
     .net = trunk_two_heads,
     .passes = 2,
     .retain = true},
    {.line = 14,
     .name = "two losses over disjoint parameters, two backwards",
     .plain = "right",
     .unused = "error; graph retained: SILENT",
     .fixed = "error",
     .loss = losses_disjoint,
     .passes = 2},
    {.line = 14,
     .name = "the same, in opposite order on the ranks",
     .plain = "right",
     .unused = "error; graph retained: SILENT",
     .fixed = "error",
     .loss = losses_disjoint_crossed,
     .passes = 2},
    {.line = 15,
     .name = "backward from a feature, then from the loss",
     .plain = "error",
     .unused = "SILENT wrong",
     .loss = feature_then_final,
     .passes = 2,
     .retain = true},
    {.line = 15,
     .name = "backward from the loss, then from a feature",
     .plain = "error",
     .unused = "SILENT wrong",
     .loss = final_then_feature,
     .passes = 2,
     .retain = true},
    {.line = 26,
     .name = "loss of one rank depends on no parameter",
     .plain = "others hang",
     .unused = "others hang",
     .fixed = "others hang",
     .loss = constant_on_one},
    {.line = 27,
     .name = "output of one rank has no graph",
     .plain = "others hang",
     .unused = "others hang",
     .net = no_grad_on_one},
    {.line = 32,
     .name = "an output that does not enter the loss, on all ranks",
     .plain = "error a step late",
     .unused = "right",
     .loss = result_unused,
     .net = logits_unused},
    {.line = 32,
     .name = "an output that does not enter the loss, on one rank",
     .plain = "error a step late",
     .unused = "right",
     .loss = result_unused_on_one,
     .net = logits_unused_on_one},
    {.line = 33,
     .name = "outputs in an object (a struct of the user's)",
     .plain = "right",
     .unused = "error",
     .net = loss_of_struct},
    {.line = 44,
     .name = "sparse embedding unused on one rank",
     .unused = "error there, others hang",
     .none = "gradients are dense; unused on one rank is row 3"},
    {.line = 46,
     .name = "parameters used in another order on ranks",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .loss = other_order,
     .net = heads_in_other_order},
    {.line = 53,
     .name = "float16 gradients whose sum overflows",
     .plain = "right (divides first)",
     .none = "gradients are float32"},
    {.name = "unused on different ranks in turn",
     .plain = "error a step late, hang",
     .unused = "right",
     .fixed = "error",
     .loss = in_turn,
     .net = heads_in_turn},
    {.name = "experts chosen by the batch",
     .plain = "error a step late, hang",
     .unused = "right",
     .fixed = "error",
     .loss = experts,
     .net = routed_heads},
    {.name = "several tasks, one task's loss left out now and then",
     .plain = "SILENT wrong, error a step late",
     .unused = "right",
     .fixed = "error",
     .loss = one_of_two_tasks,
     .net = tasks},
    {.name = "auxiliary loss softplus(-logits).mean() * 0",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .note = "zero gradients, which are not absent ones",
     .run = zero_gradients,
     .loss = zero_auxiliary,
     .net = zero_auxiliary_head},
    {.name = "no loss at all on one rank (NULL)",
     .plain = "others hang",
     .unused = "others hang",
     .fixed = "others hang",
     .loss = null_on_one},
    {.name = "no loss on rank 0 at first",
     .plain = "others hang",
     .unused = "others hang",
     .fixed = "others hang",
     .loss = null_on_first},
    {.name = "detached on all ranks but one", .plain = "error a step late", .unused = "right", .loss = detached},
    {.name = "read in a no-grad region",
     .plain = "error a step late",
     .unused = "right",
     .fixed = "right",
     .loss = no_grad_region},
    {.name = "parameter read through a view",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .loss = through_view},
    {.name = "a parameter that is the loss, on one rank",
     .plain = "right",
     .unused = "right",
     .fixed = "right",
     .loss = parameter_as_loss},
    {.name = "ragged batches, weighted by samples",
     .plain = "not offered",
     .loss = all_terms,
     .net = all_heads,
     .samples = ragged},
    {.name = "ragged batches, weighted, unused in turn",
     .plain = "not offered",
     .loss = in_turn,
     .net = heads_in_turn,
     .samples = ragged},
    {.name = "weighted, one rank without samples", .plain = "not offered", .loss = null_on_one, .samples = one_empty},
    {.name = "weighted by large counts, accumulated over two",
     .plain = "not offered",
     .loss = all_terms,
     .samples = large,
     .passes = 2},
};
const rows graph_rows = {list, sizeof(list) / sizeof(list[0])};
