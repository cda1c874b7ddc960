/* mu_training_save: {"model", "optimizer", "optimizer_kind", "epoch", "step_in_epoch", "samples_in_epoch", "step",
 * "seed", "note"}. The optimiser's part is torch.optim's state_dict. Its learning rates are Python floats, so PyTorch
 * 1.13's weights_only reader, which knows none, refuses this file (2.x takes it); files of mu_save hold no floats for that
 * reason. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "io/optim_write.h"
#include "io/out_pickle.h"
#include "io/save.h"
#include <muster/checkpoint.h>

typedef struct writer {
    mu_context *context;
    mui_pickle_writer pickle;
    mui_optim_writer optimizer;
} writer;

static void put_numbers(writer *w, const mu_training *t)
{
    mui_pickle_writer *p = &w->pickle;
    if (t->optimizer != NULL) {
        mui_pk_text(p, "optimizer_kind");
        mui_pk_text(p, mui_optimizer_kind_name(mui_optimizer_kind_of(t->optimizer)));
        mui_pk_text(p, "optimizer_steps");
        mui_pk_int(p, mu_optimizer_steps(t->optimizer));
    }
    mui_pk_text(p, "epoch");
    mui_pk_int(p, t->epoch);
    mui_pk_text(p, "step_in_epoch");
    mui_pk_int(p, t->step_in_epoch);
    if (t->samples_in_epoch > 0 || t->step_in_epoch == 0) { /* else the program counts steps only */
        mui_pk_text(p, "samples_in_epoch");
        mui_pk_int(p, t->samples_in_epoch > 0 ? t->samples_in_epoch : 0);
    }
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

static void put_all(writer *w, const mu_training *t, const mui_out_list *model, int64_t *first)
{
    mui_pickle_writer *p = &w->pickle;
    mui_pk_op(p, '}');
    mui_pk_op(p, '(');
    mui_pk_text(p, "model");
    *first = mui_pk_state_dict(p, model, 0);
    if (t->optimizer != NULL) {
        mui_pk_text(p, "optimizer");
        mui_optim_put(&w->optimizer, p, *first);
    }
    put_numbers(w, t);
    mui_pk_op(p, 'u');
    mui_pk_op(p, '.');
}

/* Where ranks share the optimiser's state, one of them writes, and has the others' parts from them. */
static mu_status write_file(writer *w, const mu_training *t, const mui_out_list *model, const char *path)
{
    mui_archive archive;
    int64_t first = 0;
    bool writes = mui_optimizer_writes(t->optimizer), opened = false;
    mu_status s = MU_OK;
    mui_pk_start(&w->pickle, w->context);
    if (writes) {
        put_all(w, t, model, &first);
        s = mui_archive_open(w->context, path, &w->pickle, &archive);
        opened = s == MU_OK;
        s = opened ? mui_archive_tensors(&archive, model, 0) : s;
    }
    s = mui_optimizer_agree(t->optimizer, s);
    if (s == MU_OK && t->optimizer != NULL) {
        s = mui_optim_write(&w->optimizer, writes ? &archive : NULL, first);
    }
    return mui_optimizer_agree(t->optimizer, opened ? mui_archive_close(&archive, s) : s);
}

mu_status mu_training_save_with(const mu_training *t, const char *path, const mu_optimizer_save_options *options)
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
    writer w = {.context = c, .optimizer = {.context = c}};
    mui_out_module model;
    mu_status s = mui_out_module_list(t->model, NULL, &model);
    if (s == MU_OK) {
        s = mui_optim_writer_open(c, t->optimizer, options, &w.optimizer);
    }
    s = mui_optimizer_settle(t->optimizer, "mu_training_save, for which all ranks are needed,", s);
    if (s == MU_OK) {
        mui_place before = mui_go(c, MUI_SAVING, path);
        s = write_file(&w, t, &model.list, path);
        mui_go(c, before.stage, before.path);
    }
    mui_pk_free(&w.pickle);
    mui_optim_writer_close(&w.optimizer);
    mui_out_module_free(&model);
    return s;
}

mu_status mu_training_save(const mu_training *t, const char *path)
{
    return mu_training_save_with(t, path, NULL);
}
