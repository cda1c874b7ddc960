/* mu_load. */
#include "base/beacon.h"
#include "comm/agree.h"
#include "io/load_plan.h"

static mu_status read_plan(mui_plan *p, const char *path, const mu_load_options *o)
{
    mu_checkpoint_file *k = mu_checkpoint_open_with(p->context, path, o->file);
    if (k == NULL) {
        return mu_context_status(p->context);
    }
    mu_status s = mui_plan_make(p, k, o);
    if (s != MU_OK) {
        mu_checkpoint_close(k);
        return s;
    }
    return mui_plan_verify(p, k);
}

/* Whatever fails makes all ranks go back to what they had, until the last step, in which nothing but the group can. */
static mu_status apply(mui_plan *p, mu_group *g, mu_load_report *report)
{
    mui_snapshot snapshot = {0};
    mu_load_report filled = {0};
    mu_status s = mui_plan_prepare(p, g);
    if (s != MU_OK) {
        return s;
    }
    s = mui_snapshot_take(&p->states, p->fragile, NULL, &snapshot);
    s = mui_agree(p->context, g, s == MU_OK ? mui_plan_report(p, &filled) : s);
    if (s == MU_OK) {
        s = mui_plan_write_laid_out(p, g);
        if (s != MU_OK) {
            mui_snapshot_restore(&snapshot);
        }
    }
    s = s == MU_OK ? mui_plan_write_plain(p, g) : s;
    if (s == MU_OK && report != NULL) {
        *report = filled;
    }
    mui_snapshot_free(&snapshot);
    return s;
}

mu_status mu_load(mu_module *root, const char *path, const mu_load_options *options, mu_load_report *report)
{
    static const mu_load_options defaults;
    const mu_load_options *o = options != NULL ? options : &defaults;
    if (root == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = mu_module_context(root);
    mui_plan plan = {0};
    mu_status s = mu_context_status(c);
    if (s == MU_OK && (path == NULL || path[0] == '\0')) {
        s = mui_fail(c, MU_ERR_ARG, "mu_load: no path");
    }
    s = mui_agree(c, o->group, s == MU_OK ? mui_plan_open(c, root, &plan) : s);
    if (s == MU_OK) {
        mui_place before = mui_go(c, MUI_READING, path);
        s = mui_is_reader(o->group) ? read_plan(&plan, path, o) : MU_OK;
        mui_go(c, before.stage, before.path);
        s = mui_agree(c, o->group, s);
    }
    if (s == MU_OK) {
        s = mui_plan_share(&plan, o->group);
    }
    if (s == MU_OK) {
        s = apply(&plan, o->group, report);
    }
    mui_plan_close(&plan);
    return s;
}
