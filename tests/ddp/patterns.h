/* The pattern table: what a row is, and what its small program may call. A program is written once: reduce() does the
 * rank's part and the oracle's, one process that differentiates the mean of all ranks' losses. */
#ifndef TEST_PATTERNS_H
#define TEST_PATTERNS_H

#define TEST_MANY_FILES
#include "rig.h"

#include <muster/muster.h>

enum { STEPS = 4, MODELS = 2, KEPT = 4, MOST_RANKS = 8 };
enum { DEFAULT_SEED = 11 };

/* Where a loss is asked for. kept: tensors of this rank, from pass to pass of one step. */
typedef struct place {
    int step, pass, rank, size;
    mu_tensor *kept[KEPT];
} place;

/* One rank, or the oracle. */
typedef struct side {
    mu_context *c;
    mu_tape *t;
    mu_module *m[MODELS];
    mu_optimizer *o[MODELS];
    bool oracle;
    int rank, size;
} side;

typedef mu_tensor *(*loss_fn)(side *s, place *p);

typedef struct world world;
typedef struct row {
    int line; /* of the table of PyTorch's outcomes, from 1; 0: Muster's own row */
    const char *name;
    const char *plain, *unused,
        *fixed;             /* PyTorch: by default, find_unused_parameters, static_graph; NULL: not measured */
    const char *note;       /* what more to say than "right" */
    const char *error;      /* every rank gets an error with this text; NULL: right */
    const char *none;       /* has no meaning in Muster, and why */
    void (*run)(world *w);  /* NULL: run_losses */
    void (*build)(side *s); /* models and optimisers; NULL: the toy, SGD */
    loss_fn loss, net;      /* of run_losses, for the toy and for real layers (or `build`) */
    int64_t (*samples)(const place *p); /* NULL: the plain mean over ranks */
    int passes;                         /* reductions in a step; 0: 1 */
    bool retain;                        /* several backwards over one graph */
    bool unwrapped;                     /* run wraps, if anybody */
    const char *frozen;                 /* before wrapping */
    mu_ddp_options options;
    float decay;      /* weight decay of the default optimiser */
    double tolerance; /* 0: 1e-5 */
    int arg;          /* of run */
    int least_ranks;
} row;

struct world {
    const row *row;
    bool net; /* the row's second program */
    mu_group *g;
    int rank, size, step;
    size_t bucket;
    double began;
    side me, one;
    mu_ddp *d[MODELS];
    place mine, theirs[MOST_RANKS];
};

/* -- a program's steps -------------------------------------------------------------------------------------------- */
void begin_step(world *w, int step);
/* The reduction of model i alone, or the oracle's backward of the mean alone. */
mu_status rank_reduce(world *w, int i, loss_fn loss, int pass);
void oracle_mean(world *w, loss_fn loss, int pass);
/* Both, and it has to be right. */
void reduce(world *w, int i, loss_fn loss, int pass);
/* A micro-step: backward without a reduction, by a deferred call or by mu_backward; the next one brings it in. */
void defer(world *w, int i, loss_fn loss, int pass);
void accumulate(world *w, int i, loss_fn loss, int pass);
/* Both optimisers of model i step. */
void update(world *w, int i);
void clear(world *w, int i);
/* Gradients and values are the oracle's, and bit for bit those of the other ranks. */
void check(world *w, int i);
/* Values are, on ranks that may hold different local gradients. */
void check_values(world *w, int i);
void good_step(world *w, int step, loss_fn loss);
/* Wraps model i as the row says. */
mu_ddp *wrap(world *w, mu_module *m);
/* The common program: reductions of the row's loss, check, update. */
void run_losses(world *w);
/* This rank got the error that it should get, with all these texts (up to NULL) in it, soon; clears it. */
void expect_error(world *w, mu_status got, mu_status want, ...);
/* A file of this rank's own in /tmp. */
void own_file(const world *w, char path[96]);
/* For both sides. */
#define BOTH(s) for (side *s = &w->me; s != NULL; s = s == &w->me ? &w->one : NULL)
#define OK(w, call) expect_ok(w, call, #call)
void expect_ok(world *w, mu_status s, const char *what);

/* -- models and losses -------------------------------------------------------------------------------------------- */
uint64_t place_key(const place *p);
mu_tensor *batch(side *s, mu_dims dims, uint64_t key);
mu_tensor *labels(side *s, int64_t n, int64_t classes, uint64_t key);
void build_toy(side *s);
/* trunk (linear), heads one, two, three (linear). */
void build_heads(side *s);
/* The sum of the losses of the named heads; NULL without names. */
mu_tensor *heads_loss(side *s, const char *names, uint64_t key);
mu_tensor *trunk_of(side *s, uint64_t key);
mu_tensor *head_loss(side *s, const char *name, mu_tensor *feature, uint64_t key);
void build_mlp(side *s);
mu_tensor *mlp_loss(side *s, place *p);
void build_cnn(side *s);
mu_tensor *cnn_loss(side *s, place *p);
/* A residual network with batch norm: conv1, bn1, layer1.{conv1,bn1,conv2,bn2}, fc. */
mu_module *residual(mu_context *c, int64_t classes);
void build_residual(side *s);
mu_tensor *residual_feature(side *s, mu_module *m, uint64_t key);
mu_tensor *residual_loss(side *s, place *p);
mu_tensor *all_terms(side *s, place *p);
/* Passes x through; its backward fails when it blows. */
mu_tensor *fuse(mu_tape *t, mu_tensor *x, bool blows);

typedef struct rows {
    const row *row;
    size_t count;
} rows;
extern const rows graph_rows, change_rows, step_rows, model_rows, segment_rows;

#endif
