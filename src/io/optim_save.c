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
    mui_place before = mui_go(c, MUI_SAVING, path);
    mui_pk_start(&pickle, c);
    mu_status s = mui_optim_writer_open(c, o, options, &w);
    if (s == MU_OK) {
        mui_optim_put(&w, &pickle, 0);
        mui_pk_op(&pickle, '.');
        s = mui_archive_open(c, path, &pickle, &archive);
        s = s == MU_OK ? mui_archive_close(&archive, mui_optim_write(&w, &archive, 0)) : s;
    }
    mui_go(c, before.stage, before.path);
    mui_optim_writer_close(&w);
    mui_pk_free(&pickle);
    return s;
}
