/* torch.optim's state_dict as pickle, and its storages: see optim_write.h. */
#include "io/optim_write.h"
#include "base/alloc.h"

static void put_float(mui_pickle_writer *p, const char *key, double f)
{
    mui_pk_text(p, key);
    mui_pk_float(p, f);
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

static void put_group(const mui_optim_writer *w, mui_pickle_writer *p, int group)
{
    mui_settings g = mui_optimizer_get_settings(w->optimizer, group);
    mui_optimizer_kind kind = mui_optimizer_kind_of(w->optimizer);
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    put_float(p, "lr", g.lr);
    if (kind == MUI_OPTIMIZER_SGD) {
        put_float(p, "momentum", g.momentum);
        put_float(p, "dampening", g.dampening);
        put_float(p, "weight_decay", g.weight_decay);
        put_bool(p, "nesterov", g.nesterov);
    } else {
        mui_pk_text(p, "betas");
        mui_pk_float(p, g.beta1);
        mui_pk_float(p, g.beta2);
        mui_pk_op(p, 0x86); /* TUPLE2 */
        put_float(p, "eps", g.eps);
        put_float(p, "weight_decay", g.weight_decay);
        put_bool(p, "amsgrad", false);
        put_bool(p, "capturable", false);
        /* What tells AdamW from Adam since PyTorch 2.7; before, it is carried along unread. */
        put_bool(p, "decoupled_weight_decay", kind == MUI_OPTIMIZER_ADAMW);
    }
    put_bool(p, "maximize", false);
    put_none(p, "foreach");
    put_bool(p, "differentiable", false);
    mui_pk_text(p, "params");
    mui_pk_op(p, ']');
    mui_pk_op(p, '(');
    for (int64_t i = 0; i < w->parameters; i++) {
        if (w->numbers[i] >= 0 && mui_optimizer_get(w->optimizer, i).group == group) {
            mui_pk_int(p, w->numbers[i]);
        }
    }
    mui_pk_op(p, 'e');
    mui_pk_op(p, 'u');
}

/* State tensors that this parameter has in PyTorch: none in a group without momentum. */
static int states_of(const mui_optim_writer *w, const mui_optimizer_entry *e)
{
    bool sgd = mui_optimizer_kind_of(w->optimizer) == MUI_OPTIMIZER_SGD;
    return sgd && mui_optimizer_get_settings(w->optimizer, e->group).momentum == 0 ? 0
                                                                                    : mui_optimizer_states(w->optimizer);
}

/* State of one parameter. Storages: one for each state tensor, and for Adam one before them for its step. */
static void put_state(const mui_optim_writer *w, mui_pickle_writer *p, int64_t i, int64_t *storage)
{
    mui_optimizer_entry e = mui_optimizer_get(w->optimizer, i);
    int states = states_of(w, &e);
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

static bool has_parameters(const mui_optim_writer *w, int group)
{
    for (int64_t i = 0; i < w->parameters; i++) {
        if (w->numbers[i] >= 0 && mui_optimizer_get(w->optimizer, i).group == group) {
            return true;
        }
    }
    return false;
}

mu_status mui_optim_writer_open(mu_context *c, mu_optimizer *o, const mu_optimizer_save_options *options,
                                mui_optim_writer *out)
{
    bool trainable_only = options != NULL && options->trainable_only;
    *out = (mui_optim_writer){.context = c, .optimizer = o};
    if (o == NULL) {
        return MU_OK;
    }
    out->parameters = mui_optimizer_count(o);
    if (out->parameters < 0) {
        return mu_context_status(c);
    }
    out->numbers = mui_calloc(c, (size_t)out->parameters, sizeof(*out->numbers));
    if (out->numbers == NULL) {
        return MU_ERR_NOMEM;
    }
    int64_t next = 0, most = 0;
    for (int64_t i = 0; i < out->parameters; i++) {
        int64_t elements = mui_dims_elements(mui_optimizer_get(o, i).parameter->value.dims);
        most = elements > most ? elements : most;
    }
    out->room = mui_calloc(c, (size_t)most, sizeof(*out->room));
    if (out->room == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t i = 0; i < out->parameters; i++) {
        out->numbers[i] = -1;
    }
    for (int g = 0; g < mui_optimizer_groups(o); g++) {
        for (int64_t i = 0; i < out->parameters; i++) {
            mui_optimizer_entry e = mui_optimizer_get(o, i);
            if (e.group == g && !(trainable_only && e.parameter->frozen)) {
                out->numbers[i] = next++;
            }
        }
    }
    return MU_OK;
}

void mui_optim_writer_close(mui_optim_writer *w)
{
    mui_free(w->context, w->numbers);
    mui_free(w->context, w->room);
    *w = (mui_optim_writer){0};
}

void mui_optim_put(const mui_optim_writer *w, mui_pickle_writer *p, int64_t first_storage)
{
    int64_t storage = first_storage;
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    mui_pk_text(p, "state");
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    for (int64_t i = 0; i < w->parameters; i++) {
        if (w->numbers[i] >= 0 && mui_optimizer_get(w->optimizer, i).has_state) {
            put_state(w, p, i, &storage);
        }
    }
    mui_pk_op(p, 'u');
    mui_pk_text(p, "param_groups");
    mui_pk_op(p, ']');
    mui_pk_op(p, '(');
    for (int g = 0; g < mui_optimizer_groups(w->optimizer); g++) {
        if (has_parameters(w, g)) { /* the default group is empty where patterns name everything */
            put_group(w, p, g);
        }
    }
    mui_pk_op(p, 'e');
    mui_pk_op(p, 'u');
}

mu_status mui_optim_write(const mui_optim_writer *w, mui_archive *a, int64_t first_storage)
{
    int64_t storage = first_storage;
    mu_status s = MU_OK;
    for (int64_t i = 0; i < w->parameters && s == MU_OK; i++) {
        mui_optimizer_entry e = mui_optimizer_get(w->optimizer, i);
        int64_t elements = mui_dims_elements(e.parameter->value.dims);
        if (w->numbers[i] < 0 || !e.has_state) {
            continue;
        }
        if (a != NULL && mui_optimizer_kind_of(w->optimizer) != MUI_OPTIMIZER_SGD) {
            float step = (float)e.step;
            mui_archive_storage(a, storage++, &step, sizeof(step));
        }
        for (int k = 0; k < states_of(w, &e) && s == MU_OK; k++) {
            s = mui_optimizer_read_state(w->optimizer, i, k, w->room, elements);
            if (s == MU_OK && a != NULL) {
                mui_archive_storage(a, storage++, w->room, (size_t)elements * sizeof(float));
            }
        }
    }
    return s;
}
