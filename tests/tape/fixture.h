/* Parameters and a store without a module tree, for tests of floor 4. */
#ifndef TEST_TAPE_FIXTURE_H
#define TEST_TAPE_FIXTURE_H

#include "base/alloc.h"
#include "base/rng.h"
#include "tape/tape_state.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define MAX_PARAMETERS 16

typedef struct world {
    mu_context *c;
    mu_tape *t;
    mu_parameter p[MAX_PARAMETERS];
    mu_parameter *list[MAX_PARAMETERS];
    char names[MAX_PARAMETERS][16];
    int count;
    mui_store *s;
} world;

static inline mu_parameter *add_parameter(world *w, mu_dims dims, int64_t conv_groups)
{
    mu_parameter *p = &w->p[w->count];
    memset(p, 0, sizeof(*p));
    snprintf(w->names[w->count], sizeof(w->names[0]), "p%d", w->count);
    p->context = p->value.context = w->c;
    p->name = w->names[w->count];
    p->value.dtype = MU_F32;
    p->value.dims = dims;
    p->value.parameter = p;
    p->conv_groups = conv_groups;
    p->conv_stride = 1;
    w->list[w->count++] = p;
    return p;
}

static inline mu_status write_random(mu_tensor *x, uint64_t seed)
{
    int64_t n = mu_tensor_elements(x);
    float *v = malloc(((size_t)n + 1) * sizeof(float));
    mui_rng r;
    mui_rng_init(&r, seed, 5);
    for (int64_t i = 0; i < n; i++) {
        v[i] = mui_rng_uniform(&r) * 2.0f - 1.0f;
    }
    mu_status s = mu_tensor_write(x, v, n);
    free(v);
    return s;
}

static inline void fill_random(mu_tensor *x, uint64_t seed)
{
    assert_int_equal(write_random(x, seed), MU_OK);
}

static inline void build(world *w)
{
    w->s = mui_store_build(w->c, w->list, w->count, NULL, NULL, 0, w->s);
    assert_non_null(w->s);
    for (int i = 0; i < w->count; i++) {
        if (!w->p[i].initialised) {
            fill_random(&w->p[i].value, 100 + (uint64_t)i);
            w->p[i].initialised = true;
        }
    }
}

static inline void open_world(world *w, const mu_context_options *o, const mu_tape_options *to)
{
    memset(w, 0, sizeof(*w));
    w->c = mu_context_open(o != NULL ? o : &(mu_context_options){.log_level = MU_LOG_QUIET, .seed = 11});
    assert_non_null(w->c);
    w->t = mu_tape_new(w->c, to);
    assert_non_null(w->t);
}

static inline void close_world(world *w)
{
    mui_store_free(w->s);
    mu_context_close(w->c);
}

/* A tape tensor with random values. */
static inline mu_tensor *input(world *w, mu_dims dims, uint64_t seed)
{
    mu_tensor *x = mu_tensor_zeros(w->t, dims);
    assert_non_null(x);
    fill_random(x, seed);
    return x;
}

/* Elements of x, row-major; free with free. */
static inline float *elements_of(const mu_tensor *x)
{
    int64_t n = mu_tensor_elements(x);
    float *v = calloc((size_t)n + 1, sizeof(float));
    assert_int_equal(mu_tensor_read(x, v, n), MU_OK);
    return v;
}

static inline void assert_close(const mu_tensor *a, const mu_tensor *b, double tolerance)
{
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(mu_tensor_elements(a), mu_tensor_elements(b));
    float *x = elements_of(a), *y = elements_of(b);
    for (int64_t i = 0; i < mu_tensor_elements(a); i++) {
        if (!(fabs((double)x[i] - (double)y[i]) <= tolerance * (1.0 + fabs((double)y[i])))) {
            fail_msg("element %d: %.9g against %.9g", (int)i, (double)x[i], (double)y[i]);
        }
    }
    free(x);
    free(y);
}

/* All floats of all slabs that belong to no parameter's elements are zero. */
static inline void assert_padding_zero(const world *w)
{
    for (int i = 0; i < w->count; i++) {
        const mu_parameter *p = &w->p[i];
        size_t used = mui_bytes_in_layout(p->value.dims, p->value.layout) / sizeof(float);
        for (size_t k = used; k < p->capacity; k++) {
            assert_true(w->s->values[p->offset + k] == 0.0f);
            assert_true(w->s->grads[p->offset + k] == 0.0f);
        }
    }
}

#endif
