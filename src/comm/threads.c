/* A group of one, and groups whose ranks are threads of one process. */
#include "base/alloc.h"
#include "base/os.h"
#include "comm/local.h"

struct mu_thread_world {
    mui_region region;
    mu_group_options options;
};

mu_group *mu_group_self(mu_context *c)
{
    mu_group_options o;
    mui_region region;
    if (mui_failed(c) || mui_group_settings(c, NULL, &o) != MU_OK ||
        mui_region_new(&region, c, 1, mui_arena_bytes(mui_ram_bytes())) != MU_OK) {
        return NULL;
    }
    return mui_local_open(c, &mui_self_ops, 0, region, true, NULL, &o);
}

mu_thread_world *mu_thread_world_new(int size, const mu_group_options *options)
{
    if (size < 1 || size > MUI_MAX_RANKS) {
        return NULL;
    }
    mu_thread_world *w = mui_calloc(NULL, 1, sizeof(*w));
    if (w == NULL) {
        return NULL;
    }
    if (mui_group_settings(NULL, options, &w->options) != MU_OK ||
        mui_region_new(&w->region, NULL, size, w->options.arena_bytes) != MU_OK) {
        mui_free(NULL, w);
        return NULL;
    }
    return w;
}

void mu_thread_world_free(mu_thread_world *w)
{
    if (w != NULL) {
        mui_region_free(&w->region);
        mui_free(NULL, w);
    }
}

mu_group *mu_group_threads(mu_context *c, mu_thread_world *w, int rank)
{
    if (mui_failed(c)) {
        return NULL;
    }
    if (w == NULL || rank < 0 || rank >= w->region.size) {
        mui_fail(c, MU_ERR_ARG, "rank %d in a world of %d threads", rank, w != NULL ? w->region.size : 0);
        return NULL;
    }
    return mui_local_open(c, &mui_threads_ops, rank, w->region, false, NULL, &w->options);
}
