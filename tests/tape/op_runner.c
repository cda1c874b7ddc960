/* Runs operations for torch_ops.py: reads cases from one file, writes results and gradients to another.
 *
 * A case: name, integers, floats, inputs (the last one is the gradient of the output), each as int64 counts and flat
 * data. Results: status; if 0, the output, then a gradient for each input that wants one, then the inputs that are
 * updated in place. Not a test by itself. */
#include <muster/muster.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ITEMS 16

typedef struct item {
    int64_t kind; /* 0: float, 1: float with gradient, 2: the same with its last two dimensions swapped, 3: int64,
                     4: float, written back */
    mu_tensor *leaf, *x;
} item;

typedef struct op_case {
    char name[64];
    int64_t i[MAX_ITEMS];
    double f[MAX_ITEMS];
    item in[MAX_ITEMS];
    int64_t inputs;
} op_case;

static void get(FILE *in, void *out, size_t bytes)
{
    if (fread(out, 1, bytes, in) != bytes) {
        fprintf(stderr, "op_runner: the case file ends early\n");
        exit(2);
    }
}

static void put(FILE *out, const void *data, size_t bytes)
{
    if (fwrite(data, 1, bytes, out) != bytes) {
        fprintf(stderr, "op_runner: cannot write\n");
        exit(2);
    }
}

static int64_t get_count(FILE *in)
{
    int64_t n = 0;
    get(in, &n, sizeof(n));
    if (n < 0 || n > 1 << 20) {
        fprintf(stderr, "op_runner: bad count\n");
        exit(2);
    }
    return n;
}

static void get_input(FILE *in, mu_tape *t, item *x)
{
    mu_dims dims = {0};
    x->kind = get_count(in);
    dims.ndim = (int)get_count(in);
    int64_t n = 1;
    for (int i = 0; i < dims.ndim; i++) {
        dims.dim[i] = get_count(in);
        n *= dims.dim[i];
    }
    void *data = malloc((size_t)n * 8 + 1);
    get(in, data, (size_t)n * (x->kind == 3 ? 8 : 4));
    x->leaf = x->x = x->kind == 3 ? mu_tensor_from_i64(t, dims, data) : mu_tensor_from(t, dims, data);
    free(data);
    if (x->kind == 1 || x->kind == 2) {
        mu_tensor_require_grad(t, x->leaf);
    }
    if (x->kind == 2) {
        mu_dims order = {.ndim = dims.ndim};
        for (int i = 0; i < dims.ndim; i++) {
            order.dim[i] = i;
        }
        order.dim[dims.ndim - 1] = dims.ndim - 2;
        order.dim[dims.ndim - 2] = dims.ndim - 1;
        x->x = mu_permute(t, x->leaf, order);
    }
}

static mu_tensor *run_images(mu_tape *t, const op_case *c, mu_tensor *const *x, int n)
{
    const int64_t *i = c->i;
    if (strcmp(c->name, "conv2d") == 0) {
        mu_conv2d_options o = {{(int)i[0], (int)i[1]}, {(int)i[2], (int)i[3]}, {(int)i[4], (int)i[5]}, (int)i[6]};
        return mu_conv2d(t, x[0], x[1], n > 2 ? x[2] : NULL, &o);
    }
    mu_pool2d_options o = {{(int)i[2], (int)i[3]}, {(int)i[4], (int)i[5]}, i[6] != 0};
    if (strcmp(c->name, "max_pool2d") == 0) {
        return mu_max_pool2d(t, x[0], (int)i[0], (int)i[1], &o);
    }
    if (strcmp(c->name, "avg_pool2d") == 0) {
        return mu_avg_pool2d(t, x[0], (int)i[0], (int)i[1], &o);
    }
    if (strcmp(c->name, "global_avg_pool2d") == 0) {
        return mu_global_avg_pool2d(t, x[0]);
    }
    if (strcmp(c->name, "global_max_pool2d") == 0) {
        return mu_global_max_pool2d(t, x[0]);
    }
    if (strcmp(c->name, "batch_norm") == 0) { /* i: affine, running, evaluate, relu; f: eps, momentum */
        mu_batch_norm_options b = {(float)c->f[0], (float)c->f[1], i[2] != 0, i[3] != 0};
        int at = i[0] != 0 ? 3 : 1;
        return mu_batch_norm(t, x[0], i[0] ? x[1] : NULL, i[0] ? x[2] : NULL, i[1] ? x[at] : NULL,
                             i[1] ? x[at + 1] : NULL, &b);
    }
    return NULL;
}

static mu_tensor *run_simple(mu_tape *t, const op_case *c, mu_tensor *const *x, int n, bool *known)
{
    static const struct {
        const char *name;
        mu_tensor *(*one)(mu_tape *, mu_tensor *);
        mu_tensor *(*two)(mu_tape *, mu_tensor *, mu_tensor *);
    } ops[] = {
        {"relu", mu_relu, NULL},       {"sigmoid", mu_sigmoid, NULL},         {"tanh", mu_tanh, NULL},
        {"gelu", mu_gelu, NULL},       {"softplus", mu_softplus, NULL},       {"sum", mu_sum, NULL},
        {"mean", mu_mean, NULL},       {"softmax", mu_softmax, NULL},         {"log_softmax", mu_log_softmax, NULL},
        {"add", NULL, mu_add},         {"sub", NULL, mu_sub},                 {"mul", NULL, mu_mul},
        {"matmul", NULL, mu_matmul},   {"add_relu", NULL, mu_add_relu},       {"mse_loss", NULL, mu_mse_loss},
        {"bce_with_logits", NULL, mu_bce_with_logits},
    };
    for (size_t k = 0; k < sizeof(ops) / sizeof(ops[0]); k++) {
        if (strcmp(ops[k].name, c->name) == 0) {
            *known = true;
            return ops[k].one != NULL ? ops[k].one(t, x[0]) : n == 2 ? ops[k].two(t, x[0], x[1]) : NULL;
        }
    }
    return NULL;
}

static mu_dims dims_of(const int64_t *i)
{
    mu_dims d = {.ndim = (int)i[0]};
    for (int k = 0; k < d.ndim; k++) {
        d.dim[k] = i[1 + k];
    }
    return d;
}

static mu_tensor *run(mu_tape *t, const op_case *c, mu_tensor *const *x, int n)
{
    const int64_t *i = c->i;
    if (strcmp(c->name, "linear") == 0) {
        return mu_linear_op(t, x[0], x[1], n > 2 ? x[2] : NULL);
    }
    if (strcmp(c->name, "cross_entropy") == 0) {
        mu_cross_entropy_options o = {(float)c->f[0], i[0], i[1] != 0};
        return mu_cross_entropy_with(t, x[0], x[1], &o);
    }
    if (strcmp(c->name, "leaky_relu") == 0) {
        return mu_leaky_relu(t, x[0], (float)c->f[0]);
    }
    if (strcmp(c->name, "scale") == 0) {
        return mu_scale(t, x[0], (float)c->f[0]);
    }
    if (strcmp(c->name, "dropout") == 0) {
        return mu_dropout(t, x[0], (float)c->f[0]);
    }
    if (strcmp(c->name, "reshape") == 0) {
        return mu_reshape(t, x[0], dims_of(i));
    }
    if (strcmp(c->name, "flatten") == 0) {
        return mu_flatten(t, x[0], (int)i[0]);
    }
    if (strcmp(c->name, "permute") == 0) {
        return mu_permute(t, x[0], dims_of(i));
    }
    if (strcmp(c->name, "narrow") == 0) {
        return mu_narrow(t, x[0], (int)i[0], i[1], i[2]);
    }
    if (strcmp(c->name, "concat") == 0) {
        return mu_concat(t, x, n, (int)i[0]);
    }
    if (strcmp(c->name, "detach") == 0) {
        return mu_add(t, mu_detach(t, x[0]), mu_scale(t, x[0], 2.0f));
    }
    bool known = false;
    mu_tensor *y = run_simple(t, c, x, n, &known);
    return known ? y : run_images(t, c, x, n);
}

static void put_tensor(FILE *out, const mu_tensor *x)
{
    int64_t n = mu_tensor_elements(x);
    mu_dims d = mu_tensor_dims(x);
    int64_t ndim = d.ndim;
    put(out, &ndim, sizeof(ndim));
    put(out, d.dim, (size_t)d.ndim * sizeof(d.dim[0]));
    float *v = malloc((size_t)n * sizeof(float) + 1);
    if (mu_tensor_read(x, v, n) != MU_OK) {
        fprintf(stderr, "op_runner: cannot read a result\n");
        exit(2);
    }
    put(out, v, (size_t)n * sizeof(float));
    free(v);
}

static bool one_case(FILE *in, FILE *out, mu_context *ctx, mu_tape *t)
{
    op_case c;
    memset(&c, 0, sizeof(c));
    int64_t length = get_count(in);
    if (length == 0) {
        return false;
    }
    get(in, c.name, (size_t)length < sizeof(c.name) ? (size_t)length : 0);
    int64_t n = get_count(in);
    get(in, c.i, (size_t)n * sizeof(c.i[0]));
    n = get_count(in);
    get(in, c.f, (size_t)n * sizeof(c.f[0]));
    c.inputs = get_count(in);
    mu_tape_reset(t);
    mu_tensor *x[MAX_ITEMS];
    for (int64_t k = 0; k < c.inputs; k++) {
        get_input(in, t, &c.in[k]);
        x[k] = c.in[k].x;
    }
    int operands = (int)c.inputs - 1;
    mu_tensor *y = mu_tensor_retain(t, run(t, &c, x, operands));
    mu_tensor *loss = mu_sum(t, mu_mul(t, y, x[operands]));
    int64_t status = loss != NULL ? mu_backward(t, loss) : mu_context_status(ctx);
    put(out, &status, sizeof(status));
    if (status != MU_OK) {
        fprintf(stderr, "op_runner: %s: %s\n", c.name, mu_context_message(ctx));
        mu_context_clear(ctx);
        return true;
    }
    put_tensor(out, y);
    for (int64_t k = 0; k < operands; k++) {
        if (c.in[k].kind == 1 || c.in[k].kind == 2) {
            put_tensor(out, mu_tensor_grad(c.in[k].leaf));
        } else if (c.in[k].kind == 4) {
            put_tensor(out, c.in[k].leaf);
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: op_runner reference|default CASES RESULTS\n");
        return 2;
    }
    mu_context *c = mu_context_open(&(mu_context_options){
        .kernels = strcmp(argv[1], "reference") == 0 ? MU_KERNELS_REFERENCE : MU_KERNELS_DEFAULT});
    mu_tape *t = mu_tape_new(c, NULL);
    FILE *in = fopen(argv[2], "rb"), *out = fopen(argv[3], "wb");
    if (t == NULL || in == NULL || out == NULL) {
        fprintf(stderr, "op_runner: cannot start\n");
        return 2;
    }
    while (one_case(in, out, c, t)) {
    }
    fclose(in);
    return fclose(out) == 0 && mu_context_close(c) == MU_OK ? 0 : 1;
}
