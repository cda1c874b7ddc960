/* mu_optimizer_save. */
#include "base/beacon.h"
#include "io/optim_write.h"

mu_status mu_optimizer_save(mu_optimizer *o, const char *path, const mu_optimizer_save_options *options)
{
    if (o == NULL) {
        return mui_fail(NULL, MU_ERR_ARG, "mu_optimizer_save: the optimiser is NULL");
    }
    mu_context *c = mui_optimizer_context(o);
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (path == NULL || path[0] == '\0') {
        return mui_fail(c, MU_ERR_ARG, "mu_optimizer_save: no path");
    }
    mui_optim_writer w;
    mui_pickle_writer pickle;
    mui_archive archive;
    bool writes = mui_optimizer_writes(o), opened = false;
    mui_place before = mui_go(c, MUI_SAVING, path);
    mui_pk_start(&pickle, c);
    mu_status s = mui_optim_writer_open(c, o, options, &w);
    s = mui_optimizer_settle(o, "mu_optimizer_save, for which all ranks are needed,", s);
    if (s == MU_OK && writes) {
        mui_optim_put(&w, &pickle, 0);
        mui_pk_op(&pickle, '.');
        s = mui_archive_open(c, path, &pickle, &archive);
        opened = s == MU_OK;
    }
    s = mui_optimizer_agree(o, s);
    s = s == MU_OK ? mui_optim_write(&w, writes ? &archive : NULL, 0) : s;
    s = mui_optimizer_agree(o, opened ? mui_archive_close(&archive, s) : s);
    mui_go(c, before.stage, before.path);
    mui_optim_writer_close(&w);
    mui_pk_free(&pickle);
    return s;
}
