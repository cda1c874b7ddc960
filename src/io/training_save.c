/* mu_training_save: {"model", "optimizer", "optimizer_kind", "epoch", "step_in_epoch", "step", "seed", "note"}. The
 * optimiser's part is torch.optim's state_dict. Its learning rates are Python floats, so PyTorch 1.13's weights_only
 * reader, which knows none, refuses this file (2.x takes it); files of mu_save hold no floats for that reason. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "io/save.h"
#include "optim/optimizer.h"
#include <muster/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>

typedef struct writer {
    mu_context *context;
    mui_pickle_writer pickle;
    mu_optimizer *optimizer;
    int64_t parameters;
    int64_t *numbers;      /* of parameter i: PyTorch counts them group by group */
    int64_t first_storage; /* of the optimiser's; they follow the model's */
} writer;

/* The double whose shortest decimal form is that of the float: 0.1f becomes 0.1, as the user wrote it. */
static double as_written(float f)
{
    char text[40];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) {
            return strtod(text, NULL);
        }
    }
    return (double)f;
}

static void put_float(mui_pickle_writer *p, const char *key, float f)
{
    mui_pk_text(p, key);
    mui_pk_float(p, as_written(f));
}

static void put_bool(mui_pickle_writer *p, const char *key, bool b)
{
    mui_pk_text(p, key);
    mui_pk_bool(p, b);
}

static void put_none(mui_pickle_writer *p, const char *key)
{
    mui_pk_text(p, key);
    mui_pk_op(p, 'N');
}

static void put_group(writer *w, int group)
{
    mui_pickle_writer *p = &w->pickle;
    mui_optimizer_group g = mui_optimizer_get_group(w->optimizer, group);
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    put_float(p, "lr", g.lr);
    if (mui_optimizer_kind_of(w->optimizer) == MUI_OPTIMIZER_SGD) {
        put_float(p, "momentum", g.momentum);
        put_float(p, "dampening", g.dampening);
        put_float(p, "weight_decay", g.weight_decay);
        put_bool(p, "nesterov", g.nesterov);
    } else {
        mui_pk_text(p, "betas");
        mui_pk_float(p, as_written(g.beta1));
        mui_pk_float(p, as_written(g.beta2));
        mui_pk_op(p, 0x86); /* TUPLE2 */
        put_float(p, "eps", g.eps);
        put_float(p, "weight_decay", g.weight_decay);
        put_bool(p, "amsgrad", false);
        put_bool(p, "capturable", false);
    }
    put_bool(p, "maximize", false);
    put_none(p, "foreach");
    put_bool(p, "differentiable", false);
    mui_pk_text(p, "params");
    mui_pk_op(p, ']');
    mui_pk_op(p, '(');
    for (int64_t i = 0; i < w->parameters; i++) {
        if (mui_optimizer_get(w->optimizer, i).group == group) {
            mui_pk_int(p, w->numbers[i]);
        }
    }
    mui_pk_op(p, 'e');
    mui_pk_op(p, 'u');
}

/* State of one parameter. Storages: one for each state tensor, and for Adam one before them for its step. */
static void put_state(writer *w, int64_t i, int64_t *storage)
{
    mui_pickle_writer *p = &w->pickle;
    mui_optimizer_entry e = mui_optimizer_get(w->optimizer, i);
    int states = mui_optimizer_states(w->optimizer);
    mui_pk_int(p, w->numbers[i]);
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    if (mui_optimizer_kind_of(w->optimizer) != MUI_OPTIMIZER_SGD) {
        mui_pk_text(p, "step");
        mui_pk_tensor(p, (*storage)++, MU_F32, MU_SCALAR);
    } else if (states == 0) {
        put_none(p, "momentum_buffer");
    }
    for (int k = 0; k < states; k++) {
        mui_pk_text(p, mui_optimizer_state_name(w->optimizer, k));
        mui_pk_tensor(p, (*storage)++, MU_F32, mu_tensor_dims(&e.parameter->value));
    }
    mui_pk_op(p, 'u');
}

static mu_status number_parameters(writer *w)
{
    w->parameters = mui_optimizer_count(w->optimizer);
    if (w->parameters < 0) {
        return mu_context_status(w->context);
    }
    w->numbers = mui_calloc(w->context, (size_t)w->parameters, sizeof(*w->numbers));
    if (w->numbers == NULL) {
        return MU_ERR_NOMEM;
    }
    int64_t next = 0;
    for (int g = 0; g < mui_optimizer_groups(w->optimizer); g++) {
        for (int64_t i = 0; i < w->parameters; i++) {
            if (mui_optimizer_get(w->optimizer, i).group == g) {
                w->numbers[i] = next++;
            }
        }
    }
    return MU_OK;
}

static void put_optimizer(writer *w)
{
    mui_pickle_writer *p = &w->pickle;
    int64_t storage = w->first_storage;
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    mui_pk_text(p, "state");
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    for (int64_t i = 0; i < w->parameters; i++) {
        if (mui_optimizer_get(w->optimizer, i).has_state) {
            put_state(w, i, &storage);
        }
    }
    mui_pk_op(p, 'u');
    mui_pk_text(p, "param_groups");
    mui_pk_op(p, ']');
    mui_pk_op(p, '(');
    for (int g = 0; g < mui_optimizer_groups(w->optimizer); g++) {
        put_group(w, g);
    }
    mui_pk_op(p, 'e');
    mui_pk_op(p, 'u');
}

static void put_numbers(writer *w, const mu_training *t)
{
    static const char *const kinds[] = {"SGD", "Adam", "AdamW"};
    mui_pickle_writer *p = &w->pickle;
    if (w->optimizer != NULL) {
        mui_pk_text(p, "optimizer_kind");
        mui_pk_text(p, kinds[mui_optimizer_kind_of(w->optimizer)]);
        mui_pk_text(p, "optimizer_steps");
        mui_pk_int(p, mu_optimizer_steps(w->optimizer));
    }
    mui_pk_text(p, "epoch");
    mui_pk_int(p, t->epoch);
    mui_pk_text(p, "step_in_epoch");
    mui_pk_int(p, t->step_in_epoch);
    mui_pk_text(p, "step");
    mui_pk_int(p, t->step);
    mui_pk_text(p, "seed");
    mui_pk_uint(p, t->seed);
    mui_pk_text(p, "note");
    if (t->note != NULL) {
        mui_pk_text(p, t->note);
    } else {
        mui_pk_op(p, 'N');
    }
}

/* Storages in the order in which put_optimizer numbered them. */
static mu_status write_optimizer(writer *w, mui_archive *a)
{
    int64_t storage = w->first_storage;
    mu_status s = MU_OK;
    for (int64_t i = 0; i < w->parameters && s == MU_OK; i++) {
        mui_optimizer_entry e = mui_optimizer_get(w->optimizer, i);
        int64_t elements = mui_dims_elements(e.parameter->value.dims);
        if (!e.has_state) {
            continue;
        }
        if (mui_optimizer_kind_of(w->optimizer) != MUI_OPTIMIZER_SGD) {
            float step = (float)e.step;
            mui_archive_storage(a, storage++, &step, sizeof(step));
        }
        float *row_major = mui_calloc(w->context, (size_t)elements, sizeof(*row_major));
        s = row_major != NULL ? MU_OK : MU_ERR_NOMEM;
        for (int k = 0; k < mui_optimizer_states(w->optimizer) && s == MU_OK; k++) {
            s = mui_optimizer_read_state(w->optimizer, i, k, row_major, elements);
            if (s == MU_OK) {
                mui_archive_storage(a, storage++, row_major, (size_t)elements * sizeof(*row_major));
            }
        }
        mui_free(w->context, row_major);
    }
    return s;
}

static mu_status write_file(writer *w, const mu_training *t, const mui_out_list *model, const char *path)
{
    mui_pickle_writer *p = &w->pickle;
    mui_archive archive;
    mui_pk_start(p, w->context);
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    mui_pk_text(p, "model");
    w->first_storage = mui_pk_state_dict(p, model, 0);
    if (w->optimizer != NULL) {
        mui_pk_text(p, "optimizer");
        put_optimizer(w);
    }
    put_numbers(w, t);
    mui_pk_op(p, 'u');
    mui_pk_op(p, '.');
    mu_status s = mui_archive_open(w->context, path, p, &archive);
    if (s != MU_OK) {
        return s;
    }
    s = mui_archive_tensors(&archive, model, 0);
    if (s == MU_OK && w->optimizer != NULL) {
        s = write_optimizer(w, &archive);
    }
    return mui_archive_close(&archive, s);
}

mu_status mu_training_save(const mu_training *t, const char *path)
{
    if (t == NULL || t->model == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = mu_module_context(t->model);
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (path == NULL || path[0] == '\0') {
        return mui_fail(c, MU_ERR_ARG, "mu_training_save: no path");
    }
    writer w = {.context = c, .optimizer = t->optimizer};
    mui_out_module model;
    mu_status s = mui_out_module_list(t->model, NULL, &model);
    if (s == MU_OK && w.optimizer != NULL) {
        s = number_parameters(&w);
    }
    if (s == MU_OK) {
        mui_place before = mui_go(c, MUI_SAVING, path);
        s = write_file(&w, t, &model.list, path);
        mui_go(c, before.stage, before.path);
    }
    mui_pk_free(&w.pickle);
    mui_free(c, w.numbers);
    mui_out_module_free(&model);
    return s;
}
