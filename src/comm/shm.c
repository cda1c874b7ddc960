/* Groups whose ranks are processes of one machine. */
#include "base/alloc.h"
#include "comm/local.h"
#include "comm/meet.h"
#include "comm/shm.h"

#include <string.h>

mu_group *mui_group_meet(mu_context *c, const char *name, int rank, int size, const mu_group_options *settled)
{
    int *pidfds = mui_alloc(c, (size_t)size * sizeof(*pidfds));
    if (pidfds == NULL) {
        return NULL;
    }
    memset(pidfds, 0xff, (size_t)size * sizeof(*pidfds)); /* all -1 */
    mui_region region;
    mui_meeting m = {.context = c, .name = name, .rank = rank, .size = size, .options = settled};
    mu_status s = rank == 0 ? mui_meet_as_host(&m, &region, pidfds) : mui_meet_as_guest(&m, &region, pidfds);
    if (s != MU_OK) {
        mui_free(c, pidfds);
        return NULL;
    }
    return mui_local_open(c, &mui_shm_ops, rank, region, true, pidfds, settled);
}

mu_group *mu_group_shm(mu_context *c, const char *name, int rank, int size, const mu_group_options *options)
{
    mu_group_options settled;
    if (mui_failed(c) || mui_group_settings(c, options, &settled) != MU_OK) {
        return NULL;
    }
    if (size < 1 || size > MUI_MAX_RANKS || rank < 0 || rank >= size) {
        mui_fail(c, MU_ERR_ARG, "rank %d of %d; a group on one machine has 1 to %d ranks", rank, size, MUI_MAX_RANKS);
        return NULL;
    }
    size_t n = name != NULL ? strlen(name) : 0;
    if (n < 1 || n > 64 ||
        strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") != n) {
        mui_fail(c, MU_ERR_ARG, "group name `%s`: 1 to 64 of [A-Za-z0-9._-] were expected", n > 0 ? name : "");
        return NULL;
    }
    return mui_group_meet(c, name, rank, size, &settled);
}
