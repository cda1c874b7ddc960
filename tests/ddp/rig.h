/* What the tests of ddp share: small models, losses that depend on (step, rank), and the oracle, one process that
 * differentiates the mean of all ranks' losses on one tape. */
#ifndef TEST_RIG_H
#define TEST_RIG_H

#define TEST_PROCESSES
#include "comm/ranks.h"

#include "comm/group.h"
#include "tape/store.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>

enum { RIG_PARAMS = 6, RIG_MOST = 64 };

/* A tree of parameters without forward functions: losses read them by name. Sizes differ, one is a single number. */
static inline mu_module *toy(mu_context *c)
{
    const mu_init normal = {MU_INIT_NORMAL, 1.0F};
    mu_module *m = mu_module_new(c, "Toy", NULL), *head = mu_module_new(c, "Head", NULL);
    mu_module_parameter(m, "a", MU_DIMS(5), normal);
    mu_module_parameter(m, "b", MU_DIMS(3, 4), normal);
    mu_module_parameter(m, "c", MU_DIMS(1), normal);
    mu_module_parameter(m, "d", MU_DIMS(33), normal);
    mu_module_parameter(head, "w", MU_DIMS(7), normal);
    mu_module_parameter(head, "v", MU_DIMS(2), normal);
    return mu_module_add(m, "head", head) == MU_OK ? m : NULL;
}

/* mean(p * p * x) for an x drawn from key: its gradient depends on the value of p, and nothing in it is round. */
static inline mu_tensor *term(mu_tape *t, mu_module *m, const char *name, uint64_t key)
{
    mu_parameter *p = mu_module_get_parameter(m, name);
    if (p == NULL) {
        return NULL;
    }
    mu_tensor *v = mu_parameter_tensor(p);
    float x[RIG_MOST];
    int64_t n = mu_tensor_elements(v);
    for (int64_t i = 0; i < n && i < RIG_MOST; i++) {
        x[i] = (float)(mix(key * 1000 + (uint64_t)i) % 2001) / 1000.0F - 1.0F;
    }
    return mu_mean(t, mu_mul(t, mu_mul(t, v, v), mu_tensor_from(t, mu_tensor_dims(v), x)));
}

/* Sum of the terms of all parameters named in `names`, separated by blanks; NULL when there are none. */
static inline mu_tensor *terms(mu_tape *t, mu_module *m, const char *names, uint64_t key)
{
    mu_tensor *sum = NULL;
    char text[128];
    snprintf(text, sizeof(text), "%s", names);
    char *rest = text;
    for (char *name; (name = strtok_r(rest, " ", &rest)) != NULL;) {
        mu_tensor *x = term(t, m, name, key++);
        sum = sum == NULL ? x : mu_add(t, sum, x);
    }
    return sum;
}

/* What a context logs: how many warnings, and the last line. */
typedef struct log_lines {
    int warnings;
    char last[2048];
} log_lines;
static inline void count_line(void *user, mu_log_level level, const char *message)
{
    log_lines *l = user;
    l->warnings += level == MU_LOG_WARN;
    snprintf(l->last, sizeof(l->last), "%s", message);
}
static inline void listen_to(mu_context *c, log_lines *l)
{
    c->log_level = MU_LOG_WARN;
    c->log = count_line;
    c->log_user = l;
}

/* The oracle's backward of a step in which rank r's loss was terms(names, first + r * stride): their mean. */
static inline void oracle_of_terms(mu_tape *t, mu_module *m, const char *names, uint64_t first, uint64_t stride, int size)
{
    mu_tensor *sum = NULL;
    for (int r = 0; r < size; r++) {
        mu_tensor *x = mu_scale(t, terms(t, m, names, first + (uint64_t)r * stride), 1.0F / (float)size);
        sum = sum == NULL ? x : mu_add(t, sum, x);
    }
    CHECK(mu_backward(t, sum) == MU_OK, "oracle");
}

/* w -= lr * g for parameters with a gradient; then none has one. */
typedef struct toy_step {
    float lr;
    mu_status status;
} toy_step;
static bool step_one(void *user, const char *name, mu_parameter *p)
{
    toy_step *s = user;
    (void)name;
    mu_tensor *g = mu_parameter_grad(p), *w = mu_parameter_tensor(p);
    if (g != NULL && mu_parameter_trainable(p)) {
        int64_t n = mu_tensor_elements(w);
        float *x = malloc(2 * (size_t)n * sizeof(float));
        s->status = mu_tensor_read(w, x, n);
        s->status = s->status == MU_OK ? mu_tensor_read(g, x + n, n) : s->status;
        for (int64_t i = 0; i < n; i++) {
            x[i] -= s->lr * x[n + i];
        }
        s->status = s->status == MU_OK ? mu_tensor_write(w, x, n) : s->status;
        free(x);
    }
    return s->status == MU_OK;
}
static inline void toy_optimizer_step(mu_module *m, float lr)
{
    toy_step s = {lr, MU_OK};
    mu_status each = mu_module_each_parameter(m, step_one, &s);
    CHECK(each == MU_OK && s.status == MU_OK, "step: %d %d", (int)each, (int)s.status);
    CHECK(mu_module_zero_grad(m) == MU_OK, "zero_grad");
}

/* Everything about a model's parameters and gradients, for comparison. */
typedef struct snapshot {
    int64_t count; /* floats: of values and gradients, absent gradients as zeros */
    float *values, *grads;
    int64_t param_count;
    bool has[256];
    int64_t start[257];
    char names[256][48];
} snapshot;

static bool snap_one(void *user, const char *name, mu_parameter *p)
{
    snapshot *s = user;
    mu_tensor *w = mu_parameter_tensor(p), *g = mu_parameter_grad(p);
    int64_t n = mu_tensor_elements(w), i = s->param_count++;
    snprintf(s->names[i], sizeof(s->names[i]), "%s", name);
    s->start[i] = s->count;
    s->count += n;
    s->start[i + 1] = s->count;
    s->values = realloc(s->values, (size_t)(s->count + 1) * sizeof(float));
    s->grads = realloc(s->grads, (size_t)(s->count + 1) * sizeof(float));
    s->has[i] = g != NULL;
    memset(s->grads + s->start[i], 0, (size_t)n * sizeof(float));
    return mu_tensor_read(w, s->values + s->start[i], n) == MU_OK &&
           (g == NULL || mu_tensor_read(g, s->grads + s->start[i], n) == MU_OK);
}
static inline snapshot snap(mu_module *m)
{
    snapshot s = {0};
    CHECK(mu_module_each_parameter(m, snap_one, &s) == MU_OK, "snapshot");
    return s;
}
static inline void snap_free(snapshot *s)
{
    free(s->values);
    free(s->grads);
}

/* Bit for bit the same on all ranks: values, gradients, and which parameters have one. */
static inline void check_replicas(mu_group *g, mu_module *m, const char *what)
{
    snapshot s = snap(m);
    size_t bytes = (size_t)s.count * sizeof(float) * 2 + sizeof(s.has), size = (size_t)mu_group_size(g);
    char *own = calloc(1, bytes), *all = malloc(bytes * size);
    memcpy(own, s.values, (size_t)s.count * sizeof(float));
    memcpy(own + (size_t)s.count * sizeof(float), s.grads, (size_t)s.count * sizeof(float));
    memcpy(own + (size_t)s.count * sizeof(float) * 2, s.has, sizeof(s.has));
    CHECK(mu_all_gather(g, own, all, bytes) == MU_OK, "gather");
    for (size_t r = 1; r < size; r++) {
        CHECK(memcmp(all, all + r * bytes, bytes) == 0, "%s: rank %zu is not equal to rank 0", what, r);
    }
    free(own);
    free(all);
    snap_free(&s);
}

static inline double length_of(const float *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += pow((double)x[i], 2);
    }
    return sqrt(sum);
}

/* Gradients and values against the oracle's: absent where absent, else within rounding of the parameter's norm, or of
 * `share` of the norm of all parameters where that is more: a gradient that is a sum of much larger numbers which cancel
 * is not better than these. */
static inline void check_close(mu_module *m, mu_module *oracle, double tolerance, double share, const char *what)
{
    snapshot a = snap(m), b = snap(oracle);
    double least_v = pow(share * length_of(b.values, b.count), 2), least_g = pow(share * length_of(b.grads, b.count), 2);
    CHECK(a.param_count == b.param_count && a.count == b.count, "%s: models differ", what);
    for (int64_t i = 0; i < a.param_count && a.count == b.count; i++) {
        CHECK(a.has[i] == b.has[i], "%s: %s has %s gradient, the oracle has %s", what, a.names[i],
              a.has[i] ? "a" : "no", b.has[i] ? "one" : "none");
        double dv = 0, nv = 1e-12, dg = 0, ng = 1e-12;
        for (int64_t k = a.start[i]; k < a.start[i + 1]; k++) {
            dv += pow((double)a.values[k] - (double)b.values[k], 2);
            nv += pow((double)b.values[k], 2);
            dg += pow((double)a.grads[k] - (double)b.grads[k], 2);
            ng += pow((double)b.grads[k], 2);
        }
        nv = nv > least_v ? nv : least_v;
        ng = ng > least_g ? ng : least_g;
        CHECK(sqrt(dv) <= tolerance * sqrt(nv), "%s: value of %s is off by %g of its norm", what, a.names[i],
              sqrt(dv / nv));
        CHECK(sqrt(dg) <= tolerance * sqrt(ng), "%s: gradient of %s is off by %g of its norm", what, a.names[i],
              sqrt(dg / ng));
    }
    snap_free(&a);
    snap_free(&b);
}

static inline void check_oracle(mu_module *m, mu_module *oracle, double tolerance, const char *what)
{
    check_close(m, oracle, tolerance, 0, what);
}

#endif
