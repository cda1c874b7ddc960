/* A module of one's own: a struct and a forward function. This one is a residual layer with a learned gate,
 *
 *     y = x + gate * relu(linear(x)),
 *
 * stacked twice and trained to tell points inside a ring from those outside. Run it with
 *     ./custom_module */
#include <muster/muster.h>

#include <stdio.h>
#include <stdlib.h>

typedef struct gated {
    mu_module *inner;   /* the module owns it; kept here to call it */
    mu_parameter *gate; /* likewise */
} gated;

static mu_tensor *gated_forward(void *self, mu_tape *t, mu_tensor *x)
{
    gated *g = self;
    mu_tensor *y = mu_relu(t, mu_forward(t, g->inner, x));
    return mu_add(t, x, mu_mul(t, mu_parameter_tensor(g->gate), y));
}

/* No check in between: when something fails, all that follows returns NULL too, and the caller asks once. */
static mu_module *gated_new(mu_context *c, int64_t width)
{
    gated *g = calloc(1, sizeof(*g));
    if (g == NULL) {
        return NULL;
    }
    /* From here on the module has g, and frees it: also when making the module fails. */
    mu_module *m = mu_module_new(
        c, "Gated", &(mu_module_options){.forward = gated_forward, .self = g, .destroy = free});
    if (m == NULL) {
        return NULL;
    }
    g->inner = mu_linear(c, width, width, NULL);
    g->gate = mu_module_parameter(m, "gate", MU_DIMS(width), (mu_init){MU_INIT_CONSTANT, 0.5f});
    return mu_module_add(m, "inner", g->inner) == MU_OK ? m : NULL;
}

/* A batch of points in the square [-1, 1)^2; label 1 in the ring of radii 0.4 to 0.8. */
enum { BATCH = 64 };
static void draw(float *x, int64_t *label, unsigned *state)
{
    for (int i = 0; i < BATCH; i++) {
        float r = 0;
        for (int k = 0; k < 2; k++) {
            *state = *state * 1664525u + 1013904223u;
            x[2 * i + k] = (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
            r += x[2 * i + k] * x[2 * i + k];
        }
        label[i] = r > 0.16f && r < 0.64f;
    }
}

int main(void)
{
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 1});
    mu_module *net = mu_sequential(c);
    MU_OR_DIE(c, mu_module_add(net, "in", mu_linear(c, 2, 32, NULL)));
    MU_OR_DIE(c, mu_module_add(net, "first", gated_new(c, 32)));
    MU_OR_DIE(c, mu_module_add(net, "second", gated_new(c, 32)));
    MU_OR_DIE(c, mu_module_add(net, "out", mu_linear(c, 32, 2, NULL)));
    mu_optimizer *adam = mu_adam(net, 0.01f, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c));

    char text[1000];
    mu_module_print(net, text, sizeof(text));
    printf("%s\n%lld parameters\n", text, (long long)mu_module_parameter_elements(net));

    float points[2 * BATCH], mean = 0;
    int64_t labels[BATCH];
    unsigned state = 7;
    for (int step = 1; step <= 600; step++) {
        mu_tape_reset(t);
        draw(points, labels, &state);
        mu_tensor *x = mu_tensor_from(t, MU_DIMS(BATCH, 2), points);
        mu_tensor *y = mu_tensor_from_i64(t, MU_DIMS(BATCH), labels);
        mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, net, x), y);
        mean += mu_tensor_item(loss) / 100;
        MU_OR_DIE(c, mu_backward(t, loss));
        MU_OR_DIE(c, mu_optimizer_step(adam));
        if (step % 100 == 0) {
            printf("step %d: loss %.3f\n", step, (double)mean);
            if (step < 600) {
                mean = 0;
            }
        }
    }
    float gate[32];
    MU_OR_DIE(c, mu_tensor_read(mu_parameter_tensor(mu_module_get_parameter(net, "second.gate")), gate, 32));
    printf("gate of the second layer: %.2f %.2f %.2f ...\n", (double)gate[0], (double)gate[1], (double)gate[2]);
    bool learned = mean < 0.25f;
    printf("%s\n", learned ? "learned" : "not learned");
    return mu_context_close(c) == MU_OK && learned ? 0 : 1;
}
