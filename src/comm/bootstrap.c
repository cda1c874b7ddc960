/* Which group was this process started in? Read from the environment that launchers set. */
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"
#include "comm/local.h"
#include "comm/mpi_group.h"
#include "comm/shm.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *mui_environment(const char *variable)
{
    const char *s = variable != NULL ? getenv(variable) : NULL;
    return s != NULL && s[0] != '\0' ? s : NULL;
}

/* A whole number from least on; *out stays when the variable is not set. */
static mu_status number_of(mu_context *c, const char *variable, int least, int *out)
{
    const char *s = mui_environment(variable);
    if (s == NULL) {
        return MU_OK;
    }
    char *end = NULL;
    errno = 0;
    long n = strtol(s, &end, 10);
    if (*end != '\0' || errno != 0 || n < least || n > INT_MAX) {
        return mui_fail(c, MU_ERR_ARG, "%s is `%s`; a whole number from %d on was expected", variable, s, least);
    }
    *out = (int)n;
    return MU_OK;
}

typedef struct launcher {
    const char *who, *rank, *size, *local_size;
    const char *job[4]; /* variables that together tell one job from another */
    bool by_parent;     /* and so does the parent process */
} launcher;

static const launcher launchers[] = {
    {.who = "torchrun or muster run", .rank = "RANK", .size = "WORLD_SIZE", .local_size = "LOCAL_WORLD_SIZE",
     .job = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}},
    {.who = "Open MPI", .rank = "OMPI_COMM_WORLD_RANK", .size = "OMPI_COMM_WORLD_SIZE",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE", .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    /* Hydra sets nothing that names the job; on one machine its ranks have one parent. */
    {.who = "MPICH", .rank = "PMI_RANK", .size = "PMI_SIZE", .local_size = "MPI_LOCALNRANKS", .by_parent = true},
    {.who = "Slurm", .rank = "SLURM_PROCID", .size = "SLURM_STEP_NUM_TASKS", .local_size = NULL,
     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
};

/* What was said of the ranks on this machine. */
typedef struct locality {
    int size;       /* -1: nothing */
    bool all_local; /* all ranks are on this machine, or torchrun's do not say otherwise */
} locality;

/* Each variable must agree with the others that are set. */
static mu_status check_numbers(mu_context *c, const launcher *l, int rank, int size, locality *out)
{
    int local_rank = -1, local_size = -1;
    if (rank >= size) {
        return mui_fail(c, MU_ERR_ARG, "%s is %d, but %s is %d", l->rank, rank, l->size, size);
    }
    mu_status s = number_of(c, l->local_size, 1, &local_size);
    if (s != MU_OK) {
        return s;
    }
    if (l->local_size == NULL) { /* Slurm */
        int nodes = 1;
        s = number_of(c, "SLURM_STEP_NUM_NODES", 1, &nodes);
        if (s != MU_OK) {
            return s;
        }
        local_size = nodes == 1 ? size : size / nodes;
    }
    if (local_size > size) {
        return mui_fail(c, MU_ERR_ARG, "%s is %d, but %s is %d", l->local_size, local_size, l->size, size);
    }
    *out = (locality){local_size, local_size == size || (local_size < 0 && l == &launchers[0])};
    if (!out->all_local) {
        return MU_OK;
    }
    if (l != &launchers[0]) {
        return MU_OK;
    }
    s = number_of(c, "LOCAL_RANK", 0, &local_rank);
    if (s == MU_OK && local_rank >= 0 && local_rank != rank) {
        s = mui_fail(c, MU_ERR_ARG, "LOCAL_RANK is %d, but RANK is %d, and all %d ranks are on this machine", local_rank,
                     rank, size);
    }
    return s;
}

/* All ranks of one job make the same name, other jobs of this user another. */
static mu_status make_name(mu_context *c, const launcher *l, char name[64])
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
                            "find each other", l->rank, l->size, l == &launchers[0] ? "MASTER_PORT" : l->job[0]);
        }
        h = l->by_parent ? mui_hash_u64(h, (uint64_t)getppid()) : h;
    }
    const char *restart = mui_environment("TORCHELASTIC_RESTART_COUNT");
    h = mui_hash_string(h, restart != NULL ? restart : "0");
    snprintf(name, 64, "env-%016llx", (unsigned long long)h);
    return MU_OK;
}

/* Not set at all: size 1. */
static mu_status read_launcher(mu_context *c, const launcher *l, int *rank, int *size, locality *where)
{
    *rank = -1;
    *size = -1;
    *where = (locality){-1, true};
    mu_status s = number_of(c, l->rank, 0, rank);
    if (s == MU_OK) {
        s = number_of(c, l->size, 1, size);
    }
    if (s != MU_OK) {
        return s;
    }
    if (l == &launchers[0] && (*rank < 0) != (*size < 0)) {
        return mui_fail(c, MU_ERR_ARG, "%s is set, but %s is not", *rank < 0 ? l->size : l->rank,
                        *rank < 0 ? l->rank : l->size);
    }
    if (*rank < 0 || *size < 0) {
        *rank = 0;
        *size = 1;
        return MU_OK;
    }
    return *size > 1 || *rank > 0 ? check_numbers(c, l, *rank, *size, where) : MU_OK;
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

static mu_group *refuse_far(mu_context *c, const launcher *l, int size, const locality *where)
{
    const char *why = l == &launchers[0] ? "ranks on several machines need MPI: start them by mpirun or srun"
                                         : "ranks on several machines need MPI, but shared memory was asked for";
    if (where->size < 0) {
        mui_fail(c, MU_ERR_UNSUPPORTED,
                 "%s is %d, but %s, which would tell whether all ranks are on this machine, is not set: %s", l->size, size,
                 l->local_size, why);
    } else {
        mui_fail(c, MU_ERR_UNSUPPORTED, "%s is %d and only %d of these ranks are on this machine%s%s: %s", l->size, size,
                 where->size, l->local_size != NULL ? ", as says " : "", l->local_size != NULL ? l->local_size : "", why);
    }
    return NULL;
}

/* l: the launcher that said so; NULL: none did. */
static mu_group *open_mpi(mu_context *c, const launcher *l, int rank, int size, const mu_group_options *settled)
{
    if (l == &launchers[0]) {
        mui_fail(c, MU_ERR_ARG, "MPI was asked for (MUSTER_GROUP, or the group's options), but %s is %d and no variable of "
                                "mpirun or srun is set: torchrun and muster run do not start MPI", l->size, size);
        return NULL;
    }
    mu_group *g = mui_mpi_open(c, NULL, NULL, settled);
    if (g != NULL && l != NULL && (mu_group_size(g) != size || mu_group_rank(g) != rank)) {
        mui_fail(c, MU_ERR_ARG, "%s is %d and %s is %d, but MPI says that this is rank %d of %d: is the launcher that of "
                                "another MPI (MUSTER_MPI)?", l->rank, rank, l->size, size, mu_group_rank(g),
                 mu_group_size(g));
        return NULL;
    }
    return g;
}

static mu_group *open_here(mu_context *c, const launcher *l, int rank, int size, const mu_group_options *settled)
{
    char name[64];
    if (size > MUI_MAX_RANKS) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "%s is %d; a group on one machine has at most %d ranks", l->size, size,
                 MUI_MAX_RANKS);
        return NULL;
    }
    return make_name(c, l, name) == MU_OK ? mui_group_meet(c, name, rank, size, settled) : NULL;
}

mu_group *mu_group_from_env_with(mu_context *c, const mu_group_options *options)
{
    mu_group_options settled;
    if (mui_failed(c) || mui_group_settings(c, options, &settled) != MU_OK ||
        choose_engine(c, &settled.engine) != MU_OK) {
        return NULL;
    }
    bool mpi = settled.engine == MU_GROUP_MPI, alone = false;
    const launcher *by_torchrun = NULL;
    int torchrun_size = 1;
    for (size_t i = 0; i < sizeof(launchers) / sizeof(*launchers); i++) {
        const launcher *l = &launchers[i];
        /* Slurm's PMI plug-ins set PMI_RANK too, without saying who is local. */
        bool skip = strcmp(l->rank, "PMI_RANK") == 0 && mui_environment(l->local_size) == NULL &&
                    mui_environment("SLURM_STEP_NUM_TASKS") != NULL;
        int rank, size;
        locality where;
        if (skip) {
            continue;
        }
        if (read_launcher(c, l, &rank, &size, &where) != MU_OK) {
            return NULL;
        }
        if (size == 1 && i == 0 && mui_environment(l->rank) != NULL) {
            alone = true; /* as somebody said */
            break;
        }
        if (size == 1) {
            continue;
        }
        if (mpi && i == 0) { /* mpirun may have been given torchrun's variables, too */
            by_torchrun = l;
            torchrun_size = size;
            continue;
        }
        if (mpi || (!where.all_local && settled.engine == MU_GROUP_AUTO && i > 0)) {
            return open_mpi(c, l, rank, size, &settled);
        }
        return where.all_local ? open_here(c, l, rank, size, &settled) : refuse_far(c, l, size, &where);
    }
    if (mpi && !alone) {
        return open_mpi(c, by_torchrun, 0, torchrun_size, &settled);
    }
    return mu_group_self(c);
}

mu_group *mu_group_from_env(mu_context *c)
{
    return mu_group_from_env_with(c, NULL);
}
