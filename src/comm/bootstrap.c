/* Which group was this process started in? Read from the environment that launchers set. */
#include "base/launcher.h"
#include "base/rng.h"
#include "comm/local.h"
#include "comm/mpi_group.h"
#include "comm/shm.h"
#include "comm/trace_env.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *from_environment(void *user, const char *variable)
{
    (void)user;
    return mui_environment(variable);
}

/* All ranks of one job make the same name, other jobs of this user another. */
static mu_status make_name(mu_context *c, const mui_launcher *l, char name[64])
{
    uint64_t h = mui_hash_string(MUI_HASH_START, l->rank);
    const char *job = mui_environment("MUSTER_JOB");
    if (job != NULL) {
        h = mui_hash_string(h, job);
    } else {
        bool any = l->by_parent;
        for (size_t i = 0; i < sizeof(l->job) / sizeof(*l->job); i++) {
            const char *v = mui_environment(l->job[i]);
            h = mui_hash_string(h, v != NULL ? v : "-");
            any = any || (v != NULL && strcmp(l->job[i], "MASTER_ADDR") != 0);
        }
        if (!any) {
            return mui_fail(c, MU_ERR_ARG, "%s and %s are set, but neither MUSTER_JOB nor %s, by which the ranks could "
                            "find each other", l->rank, l->size, l->set_by_hand ? "MASTER_PORT" : l->job[0]);
        }
        h = l->by_parent ? mui_hash_u64(h, (uint64_t)getppid()) : h;
    }
    const char *restart = mui_environment("TORCHELASTIC_RESTART_COUNT");
    h = mui_hash_string(h, restart != NULL ? restart : "0");
    snprintf(name, 64, "env-%016llx", (unsigned long long)h);
    return MU_OK;
}

/* What the program asked for, or else the environment. */
static mu_status choose_engine(mu_context *c, mu_group_engine *engine)
{
    const char *asked = mui_environment("MUSTER_GROUP");
    if (asked == NULL || *engine != MU_GROUP_AUTO || strcmp(asked, "auto") == 0) {
        return MU_OK;
    }
    if (strcmp(asked, "shm") != 0 && strcmp(asked, "mpi") != 0) {
        return mui_fail(c, MU_ERR_ARG, "MUSTER_GROUP is `%s`; auto, shm or mpi was expected", asked);
    }
    *engine = asked[0] == 's' ? MU_GROUP_SHM : MU_GROUP_MPI;
    return MU_OK;
}

static mu_group *refuse_far(mu_context *c, const mui_launch *m)
{
    const mui_launcher *l = m->by;
    const char *why = l->set_by_hand ? "ranks on several machines need MPI: start them by mpirun or srun"
                                     : "ranks on several machines need MPI, but shared memory was asked for";
    if (m->local_size >= 0) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "%s is %d and only %d of these ranks are on this machine, as says %s: %s", l->size,
                 m->size, m->local_size, l->local_size != NULL ? l->local_size : l->tasks_per_node, why);
    } else if (m->nodes > 0) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "%s is %d, on as many machines as says %s, %d: %s", l->size, m->size, l->nodes,
                 m->nodes, why);
    } else {
        const char *also = l->bare_pmi ? " (or MPI_LOCALNRANKS)" : "";
        mui_fail(c, MU_ERR_UNSUPPORTED,
                 "%s is %d, but %s%s, which would tell whether all ranks are on this machine, is not set: %s", l->size, m->size,
                 l->local_size != NULL ? l->local_size : l->nodes, also, why);
    }
    return NULL;
}

static mu_group *open_mpi(mu_context *c, const mui_launch *m, const mu_group_options *settled)
{
    const mui_launcher *l = m->by;
    if (l != NULL && l->set_by_hand) {
        mui_fail(c, MU_ERR_ARG, "MPI was asked for (MUSTER_GROUP, or the group's options), but %s is %d and no variable of "
                                "mpirun or srun is set: torchrun and muster run do not start MPI", l->size, m->size);
        return NULL;
    }
    mu_group *g = mui_mpi_open(c, NULL, NULL, settled);
    if (g != NULL && m->size > 1 && (mu_group_size(g) != m->size || mu_group_rank(g) != m->rank)) {
        mui_fail(c, MU_ERR_ARG, "%s is %d and %s is %d, but MPI says that this is rank %d of %d: is the launcher that of "
                                "another MPI (MUSTER_MPI)?", l->rank, m->rank, l->size, m->size, mu_group_rank(g),
                 mu_group_size(g));
        return NULL;
    }
    return g;
}

static mu_group *open_here(mu_context *c, const mui_launch *m, const mu_group_options *settled)
{
    char name[64];
    if (m->size > MUI_MAX_RANKS) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "%s is %d; a group on one machine has at most %d ranks", m->by->size, m->size,
                 MUI_MAX_RANKS);
        return NULL;
    }
    return make_name(c, m->by, name) == MU_OK ? mui_group_meet(c, name, m->rank, m->size, settled) : NULL;
}

static mu_group *group_of_env(mu_context *c, const mu_group_options *options)
{
    mu_group_options settled;
    if (mui_failed(c) || mui_group_settings(c, options, &settled) != MU_OK ||
        choose_engine(c, &settled.engine) != MU_OK) {
        return NULL;
    }
    mui_launch m;
    bool mpi = settled.engine == MU_GROUP_MPI;
    if (mui_launch_read(c, from_environment, NULL, mpi, &m) != MU_OK) {
        return NULL;
    }
    bool alone = m.size == 1 && m.by != NULL && m.by->set_by_hand; /* as somebody said */
    if (alone || (m.size == 1 && !mpi)) {
        return mu_group_self(c);
    }
    if (mpi || (!m.here && settled.engine == MU_GROUP_AUTO && !m.by->set_by_hand)) {
        return open_mpi(c, &m, &settled);
    }
    return m.here ? open_here(c, &m, &settled) : refuse_far(c, &m);
}

mu_group *mu_group_from_env_with(mu_context *c, const mu_group_options *options)
{
    return mui_trace_from_env(c, group_of_env(c, options));
}

mu_group *mu_group_from_env(mu_context *c)
{
    return mu_group_from_env_with(c, NULL);
}
