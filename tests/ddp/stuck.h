/* A small network whose ranks can be made to stop at a known place, and which writes down, outside of the library, how
 * far its backward has come: the oracle for what errors say about a rank that is missing. */
#ifndef TEST_STUCK_H
#define TEST_STUCK_H

#include "rig.h"

#include "base/os.h"
#include "tape/op.h"

enum { LAYERS = 6 };

/* Written by one rank, read by the test. */
typedef struct journal {
    int reduction; /* begun; atomic */
    int layers;    /* whose backward was entered in it, counted from the end; atomic */
} journal;

typedef enum stop_place { NOWHERE, IN_FORWARD, IN_BACKWARD, BEFORE_FORWARD, BEFORE_STEP } stop_place;

/* One rank's copy, in its own memory. */
typedef struct walker {
    journal *journal; /* may be NULL */
    int step;         /* the one now running, from 1 */
    stop_place place;
    int stop_step, stop_layer; /* in that step, or the first after it that passes there */
    void (*stop)(void *arg);   /* what it does there */
    void *arg;
} walker;

static inline void walker_at(walker *w, stop_place place, int layer)
{
    if (w->place == place && w->step >= w->stop_step && layer == w->stop_layer) {
        w->place = NOWHERE;
        w->journal = NULL; /* whoever reads it must find what was there now */
        w->stop(w->arg);
    }
}

static inline void sleep_for(double seconds)
{
    for (double until = mui_now() + seconds; mui_now() < until;) {
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
}

/* -- an operation that passes through a place ---------------------------------------------------------------------- */
typedef struct mark_attr {
    walker *walker;
    int layer;
} mark_attr;

static inline mu_status mark_backward(mui_backward *b, mui_node *n)
{
    const mark_attr *a = n->attr;
    if (a->walker->journal != NULL) {
        __atomic_store_n(&a->walker->journal->layers, LAYERS - a->layer, __ATOMIC_SEQ_CST);
    }
    walker_at(a->walker, IN_BACKWARD, a->layer);
    return mui_grad_pass(b, n, 0);
}

static inline mu_tensor *mark(mu_tape *t, mu_tensor *x, walker *w, int layer)
{
    static const mui_op op = {.name = "mark", .backward = mark_backward};
    if (x == NULL) {
        return NULL;
    }
    mu_tensor *y = mui_tensor_view(t, x, x->dims, x->stride, 0);
    mark_attr a = {w, layer};
    return mui_record(t, &op, y, &x, 1, &a, sizeof(a), NULL, 0);
}

/* -- the network --------------------------------------------------------------------------------------------------- */
typedef struct layer {
    mu_module *module;
    walker *walker;
    int index;
} layer;

/* x + mean(w * w * something): backward enters the mark, then completes w. */
static inline mu_tensor *layer_forward(void *self, mu_tape *t, mu_tensor *x)
{
    layer *l = self;
    walker_at(l->walker, IN_FORWARD, l->index);
    mu_tensor *w = mu_parameter_tensor(mu_module_get_parameter(l->module, "w"));
    float numbers[RIG_MOST];
    for (int i = 0; i < 7 + l->index; i++) {
        numbers[i] = (float)(mix((uint64_t)(l->walker->step * 100 + i)) % 2001) / 1000.0F - 1.0F;
    }
    mu_tensor *v = mu_tensor_from(t, MU_DIMS(7 + l->index), numbers);
    return mark(t, mu_add(t, x, mu_mean(t, mu_mul(t, mu_mul(t, w, w), v))), l->walker, l->index);
}

static inline mu_module *layer_new(mu_context *c, walker *w, int index)
{
    layer *l = malloc(sizeof(*l));
    *l = (layer){.walker = w, .index = index};
    l->module = mu_module_new(c, "Layer", &(mu_module_options){.forward = layer_forward, .self = l, .destroy = free});
    mu_module_parameter(l->module, "w", MU_DIMS(7 + index), (mu_init){MU_INIT_NORMAL, 1.0F});
    return l->module;
}

/* Children layer0 to layer5, run in this order; gradients become ready in the order in which they are first reduced. */
static inline mu_module *net_new(mu_context *c, walker *w)
{
    mu_module *net = mu_module_new(c, "Net", NULL);
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof(name), "layer%d", i);
        if (mu_module_add(net, name, layer_new(c, w, i)) != MU_OK) {
            return NULL;
        }
    }
    return net;
}

/* Forward of the next step. */
static inline mu_tensor *net_loss(mu_tape *t, mu_module *net, walker *w, int rank)
{
    w->step++;
    walker_at(w, BEFORE_FORWARD, 0);
    mu_tape_reset(t);
    float x = (float)rank;
    mu_tensor *loss = mu_forward(t, net, mu_tensor_from(t, MU_SCALAR, &x));
    if (w->journal != NULL) {
        __atomic_store_n(&w->journal->layers, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&w->journal->reduction, w->step, __ATOMIC_SEQ_CST);
    }
    return loss;
}

#endif
