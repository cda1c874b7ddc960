/* The parameter store: what moves when the layout or the tree changes, and what stays when memory runs out. */
#include "tape/fixture.h"

#define BUFFERS 2

typedef struct slab_world {
    world w;
    mu_tensor buffer[BUFFERS];
    mu_tensor *buffers[BUFFERS];
    mui_slab *momentum;
} slab_world;

static const char *const buffer_names[BUFFERS] = {"bn.running_mean", "bn.running_var"};

static void open_slabs(slab_world *s)
{
    memset(s, 0, sizeof(*s));
    open_world(&s->w, &(mu_context_options){.log_level = MU_LOG_QUIET}, NULL);
    add_parameter(&s->w, MU_DIMS(20, 17, 3, 3), 1);
    add_parameter(&s->w, MU_DIMS(20), 0);
    add_parameter(&s->w, MU_DIMS(3, 5), 0);
    add_parameter(&s->w, MU_SCALAR, 0);
    add_parameter(&s->w, MU_DIMS(0, 4), 0);
    for (int i = 0; i < BUFFERS; i++) {
        s->buffer[i] = (mu_tensor){.context = s->w.c, .dtype = MU_F32, .dims = MU_DIMS(20)};
        s->buffers[i] = &s->buffer[i];
    }
    s->w.s = mui_store_build(s->w.c, s->w.list, s->w.count, s->buffers, buffer_names, BUFFERS, NULL);
    build(&s->w);
    /* The second build above had no buffers: they were left without memory. */
    assert_null(s->buffer[0].data);
    s->w.s = mui_store_build(s->w.c, s->w.list, s->w.count, s->buffers, buffer_names, BUFFERS, s->w.s);
    assert_non_null(s->w.s);
    s->momentum = mui_store_add_slab(s->w.s);
    assert_non_null(s->momentum);
}

/* A gradient for all but the last two parameters, momentum equal to twice the gradient. */
static void give_gradients(slab_world *s)
{
    world *w = &s->w;
    for (int i = 0; i < 3; i++) {
        mu_tensor *loss = mu_sum(w->t, mu_tanh(w->t, &w->p[i].value));
        assert_int_equal(mu_backward(w->t, loss), MU_OK);
        for (size_t k = 0; k < w->p[i].capacity; k++) {
            s->momentum->data[w->p[i].offset + k] = 2.0f * w->s->grads[w->p[i].offset + k];
        }
    }
    mu_tape_reset(w->t);
}

typedef struct snapshot {
    float *value[MAX_PARAMETERS], *grad[MAX_PARAMETERS];
} snapshot;

static void take(const world *w, snapshot *out)
{
    for (int i = 0; i < w->count; i++) {
        out->value[i] = elements_of(&w->p[i].value);
        mu_tensor *g = mu_parameter_grad((mu_parameter *)&w->p[i]);
        out->grad[i] = g != NULL ? elements_of(g) : NULL;
    }
}

/* Everything of the first n parameters is as it was; frees the snapshot. */
static void assert_kept(const slab_world *s, snapshot *old)
{
    const world *w = &s->w;
    for (int i = 0; i < MAX_PARAMETERS; i++) {
        if (old->value[i] == NULL) {
            continue;
        }
        mu_parameter *p = (mu_parameter *)&w->p[i];
        size_t bytes = (size_t)mu_tensor_elements(&p->value) * sizeof(float);
        float *v = elements_of(&p->value);
        assert_memory_equal(v, old->value[i], bytes);
        mu_tensor *g = mu_parameter_grad(p);
        assert_int_equal(g != NULL, old->grad[i] != NULL);
        if (g != NULL) {
            float *gv = elements_of(g);
            assert_memory_equal(gv, old->grad[i], bytes);
            free(gv);
            for (size_t k = 0; k < p->capacity; k++) {
                assert_true(s->momentum->data[p->offset + k] == 2.0f * w->s->grads[p->offset + k]);
            }
        }
        free(v);
        free(old->value[i]);
        free(old->grad[i]);
    }
    assert_padding_zero(w);
}

static void assert_laid_out(const world *w)
{
    const mui_store *s = w->s;
    size_t at = 0;
    int64_t k = 0;
    for (int64_t b = 0; b < s->bucket_count; b++) {
        assert_int_equal(s->buckets[b].first, k);
        assert_true(s->buckets[b].offset >= at);
        assert_int_equal(s->buckets[b].offset % 16, 0);
        at = s->buckets[b].offset;
        for (int64_t i = 0; i < s->buckets[b].count; i++, k++) {
            const mu_parameter *p = s->parameters[s->order[k]];
            assert_int_equal(p->offset, at);
            assert_int_equal(p->capacity % 16, 0);
            assert_ptr_equal(p->value.data, s->values + p->offset);
            assert_ptr_equal(p->grad_view.data, s->grads + p->offset);
            at += p->capacity;
        }
        assert_int_equal(s->buckets[b].floats, at - s->buckets[b].offset);
        at += s->buckets[b].tail;
    }
    assert_int_equal(k, s->count);
    assert_true(s->floats >= at);
}

static void relayout_moves_everything(void **state)
{
    (void)state;
    slab_world s;
    open_slabs(&s);
    give_gradients(&s);
    assert_laid_out(&s.w);
    assert_int_equal(s.w.s->order[0], 4); /* reverse registration */
    snapshot old = {0};
    take(&s.w, &old);
    uint64_t version = s.w.s->version, hash = s.w.s->layout_hash;
    mu_tensor *view = mu_reshape(s.w.t, &s.w.p[2].value, MU_DIMS(15)); /* of the old slab */
    mu_tensor *copy = mu_tensor_keep(s.w.t, view);
    int64_t order[5] = {2, 0, 4, 3, 1}, counts[3] = {1, 0, 4};
    size_t tails[3] = {1, 7, 40};
    assert_int_equal(mui_store_relayout(s.w.s, order, counts, tails, 3), MU_OK);
    assert_laid_out(&s.w);
    assert_int_equal(s.w.s->bucket_count, 3);
    assert_memory_equal(s.w.s->order, order, sizeof(order));
    assert_true(s.w.s->version > version);
    assert_true(s.w.s->layout_hash != hash);
    assert_close(view, copy, 0.0);
    assert_int_equal(mu_backward(s.w.t, mu_sum(s.w.t, mu_scale(s.w.t, view, 0.0f))), MU_OK);
    assert_kept(&s, &old);
    close_world(&s.w);
}

static void bad_plans_change_nothing(void **state)
{
    (void)state;
    slab_world s;
    open_slabs(&s);
    give_gradients(&s);
    snapshot old = {0};
    take(&s.w, &old);
    uint64_t version = s.w.s->version;
    int64_t twice[5] = {0, 1, 2, 3, 3}, order[5] = {0, 1, 2, 3, 4}, all = 5, few = 4, many = 6;
    size_t tail = 0;
    assert_int_equal(mui_store_relayout(s.w.s, twice, &all, &tail, 1), MU_ERR_ARG);
    mu_context_clear(s.w.c);
    assert_int_equal(mui_store_relayout(s.w.s, order, &few, &tail, 1), MU_ERR_ARG);
    mu_context_clear(s.w.c);
    assert_int_equal(mui_store_relayout(s.w.s, order, &many, &tail, 1), MU_ERR_ARG);
    mu_context_clear(s.w.c);
    int64_t failures = 0;
    for (int64_t k = 0;; k++) {
        s.w.c->fail_after = k;
        mu_status r = mui_store_relayout(s.w.s, order, &all, &tail, 1);
        s.w.c->fail_after = -1;
        if (r == MU_OK) {
            break;
        }
        assert_int_equal(r, MU_ERR_NOMEM);
        mu_context_clear(s.w.c);
        assert_int_equal(s.w.s->version, version);
        assert_laid_out(&s.w);
        failures++;
    }
    assert_true(failures >= 6);
    assert_kept(&s, &old);
    close_world(&s.w);
}

static void rebuild_follows_the_tree(void **state)
{
    (void)state;
    slab_world s;
    open_slabs(&s);
    world *w = &s.w;
    give_gradients(&s);
    fill_random(&s.buffer[0], 1);
    float *mean = elements_of(&s.buffer[0]);
    snapshot old = {0};
    take(w, &old);
    uint64_t version = w->s->version;
    /* Parameter 1 goes, a new one comes; the second buffer goes. */
    mu_parameter *gone = &w->p[1], *fresh = add_parameter(w, MU_DIMS(6), 0);
    mu_parameter *list[5] = {&w->p[0], &w->p[2], &w->p[3], &w->p[4], fresh};
    int64_t failures = 0;
    mui_store *next = NULL;
    for (int64_t k = 0; next == NULL; k++) {
        w->c->fail_after = k;
        next = mui_store_build(w->c, list, 5, s.buffers, buffer_names, 1, w->s);
        w->c->fail_after = -1;
        if (next == NULL) {
            assert_int_equal(mu_context_status(w->c), MU_ERR_NOMEM);
            mu_context_clear(w->c);
            assert_ptr_equal(gone->store, w->s); /* the old one is untouched */
            assert_null(fresh->store);
            assert_laid_out(w);
            failures++;
        }
    }
    assert_true(failures >= 10);
    w->s = next;
    assert_true(next->version > version);
    assert_null(gone->store);
    assert_null(gone->value.data);
    assert_null(mu_parameter_grad(gone));
    assert_null(s.buffer[1].data);
    float *again = elements_of(&s.buffer[0]);
    assert_memory_equal(mean, again, 20 * sizeof(float));
    free(mean);
    free(again);
    assert_int_equal(fresh->grad_state, MUI_GRAD_NONE);
    for (size_t k = 0; k < fresh->capacity; k++) {
        assert_true(s.momentum->data[fresh->offset + k] == 0.0f);
    }
    /* Move what is left to the front for the common check. */
    free(old.value[1]);
    free(old.grad[1]);
    old.value[1] = old.grad[1] = NULL;
    assert_null(mu_relu(w->t, &gone->value)); /* no memory: an error, not a crash */
    assert_int_equal(mu_context_status(w->c), MU_ERR_STATE);
    mu_context_clear(w->c);
    gone->capacity = 0;
    gone->value.dims = MU_DIMS(0);
    assert_kept(&s, &old);
    close_world(w);
}

static int grads_live;

static void *grads_alloc(void *user, size_t bytes)
{
    grads_live++;
    if (*(int *)user < grads_live) {
        grads_live--;
        return NULL;
    }
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(p, 0xff, bytes); /* NaN: nobody may rely on zeros */
    return p;
}

static void grads_free(void *user, void *p)
{
    (void)user;
    grads_live--;
    free(p);
}

static void gradients_live_where_the_group_says(void **state)
{
    (void)state;
    slab_world s;
    open_slabs(&s);
    give_gradients(&s);
    snapshot old = {0};
    take(&s.w, &old);
    int limit = 2;
    assert_int_equal(mui_store_set_grad_memory(s.w.s, grads_alloc, grads_free, &limit), MU_OK);
    assert_int_equal(grads_live, 1);
    assert_laid_out(&s.w);
    int64_t order[5] = {0, 1, 2, 3, 4}, counts[2] = {2, 3};
    size_t tails[2] = {0, 5};
    limit = 1; /* no room for a second slab */
    assert_int_equal(mui_store_relayout(s.w.s, order, counts, tails, 2), MU_ERR_NOMEM);
    mu_context_clear(s.w.c);
    assert_laid_out(&s.w);
    limit = 2;
    assert_int_equal(mui_store_relayout(s.w.s, order, counts, tails, 2), MU_OK);
    assert_int_equal(grads_live, 1);
    s.w.s = mui_store_build(s.w.c, s.w.list, s.w.count, s.buffers, buffer_names, BUFFERS, s.w.s);
    assert_non_null(s.w.s);
    assert_int_equal(grads_live, 1);
    assert_int_equal(mui_store_set_grad_memory(s.w.s, NULL, NULL, NULL), MU_OK);
    assert_int_equal(grads_live, 0);
    assert_laid_out(&s.w);
    assert_kept(&s, &old);
    close_world(&s.w);
}

static void hash_sees_what_ranks_must_agree_on(void **state)
{
    (void)state;
    slab_world a, b;
    open_slabs(&a);
    open_slabs(&b);
    assert_true(a.w.s->layout_hash == b.w.s->layout_hash);
    b.w.p[2].frozen = true;
    b.w.s = mui_store_build(b.w.c, b.w.list, b.w.count, b.buffers, buffer_names, BUFFERS, b.w.s);
    assert_true(a.w.s->layout_hash != b.w.s->layout_hash);
    b.w.p[2].frozen = false;
    b.w.names[2][0] = 'q';
    b.w.s = mui_store_build(b.w.c, b.w.list, b.w.count, b.buffers, buffer_names, BUFFERS, b.w.s);
    assert_true(a.w.s->layout_hash != b.w.s->layout_hash);
    b.w.names[2][0] = 'p';
    b.w.s = mui_store_build(b.w.c, b.w.list, b.w.count, b.buffers, buffer_names, BUFFERS, b.w.s);
    assert_true(a.w.s->layout_hash == b.w.s->layout_hash);
    b.w.s = mui_store_build(b.w.c, b.w.list, b.w.count - 1, b.buffers, buffer_names, BUFFERS, b.w.s);
    assert_true(a.w.s->layout_hash != b.w.s->layout_hash);
    close_world(&a.w);
    close_world(&b.w);
}

static void zero_grad_touches_no_memory_and_is_final(void **state)
{
    (void)state;
    slab_world s;
    open_slabs(&s);
    give_gradients(&s);
    float first = s.w.s->grads[s.w.p[1].offset];
    assert_true(first != 0.0f);
    mui_store_zero_grad(s.w.s);
    assert_true(s.w.s->grads[s.w.p[1].offset] == first);
    assert_null(mu_parameter_grad(&s.w.p[1]));
    /* A contribution overwrites what is there, NaN included. */
    for (size_t k = 0; k < 20; k++) {
        s.w.s->grads[s.w.p[1].offset + k] = NAN;
    }
    assert_int_equal(mu_backward(s.w.t, mu_sum(s.w.t, &s.w.p[1].value)), MU_OK);
    assert_true(s.w.s->grads[s.w.p[1].offset] == 1.0f);
    mui_store_remove_slab(s.w.s, s.momentum);
    assert_int_equal(s.w.s->slab_count, 0);
    close_world(&s.w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(relayout_moves_everything),
        cmocka_unit_test(bad_plans_change_nothing),
        cmocka_unit_test(rebuild_follows_the_tree),
        cmocka_unit_test(gradients_live_where_the_group_says),
        cmocka_unit_test(hash_sees_what_ranks_must_agree_on),
        cmocka_unit_test(zero_grad_touches_no_memory_and_is_final),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
