/* Environments as launchers make them, and what is read from them: no process is started, no variable is set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/launcher.h"

#include <stdio.h>
#include <string.h>

/* Looks a variable up in "A=1 B=2", user's. */
static const char *look_up(void *user, const char *variable)
{
    static char value[128];
    size_t n = strlen(variable);
    for (const char *p = user; p != NULL; p = strchr(p, ' ')) {
        p += *p == ' ';
        if (strncmp(p, variable, n) == 0 && p[n] == '=') {
            snprintf(value, sizeof(value), "%.*s", (int)strcspn(p + n + 1, " "), p + n + 1);
            return value;
        }
    }
    return NULL;
}

typedef struct expected {
    const char *env;
    const char *who; /* NULL: nobody */
    int rank, size, local_rank, local_size, node, nodes;
    bool here;
    bool mpi; /* MPI was asked for */
} expected;

#define TORCH "TORCHELASTIC_RUN_ID=none "
static const expected good[] = {
    {"", NULL, 0, 1, -1, -1, -1, -1, true, false},
    {"HOME=/root", NULL, 0, 1, -1, -1, -1, -1, true, true},
    /* torchrun and muster run */
    {TORCH "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=h "
     "TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_MAX_RESTARTS=2", "torchrun or muster run", 1, 2, 1, 2, 0, 1, true, false},
    {TORCH "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2",
     "torchrun or muster run", 3, 4, 1, 2, 1, 2, false, false},
    {"RANK=0 WORLD_SIZE=1", "torchrun or muster run", 0, 1, 0, 1, -1, -1, true, false},
    {"RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "torchrun or muster run", 0, 1, 0, 1, -1, -1,
     true, false},
    {"RANK=1 WORLD_SIZE=2", "torchrun or muster run", 1, 2, -1, -1, -1, -1, true, false},
    {"RANK=1 WORLD_SIZE=2 GROUP_WORLD_SIZE=2", "torchrun or muster run", 1, 2, -1, -1, -1, 2, false, false},
    {"RANK=1 WORLD_SIZE=2 GROUP_WORLD_SIZE=1", "torchrun or muster run", 1, 2, -1, 2, -1, 1, true, false},
    {"RANK= WORLD_SIZE=", NULL, 0, 1, -1, -1, -1, -1, true, false},
    /* torchrun started by srun or mpirun, a daemon on each machine */
    {TORCH "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 SLURM_PROCID=1 "
     "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2", "torchrun or muster run", 5, 8, 1, 4, 1, 2, false, false},
    {"MUSTER_JOB=x RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "torchrun or muster run", 1, 2, -1,
     -1, -1, -1, true, false},
    {"MUSTER_JOB=x RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3", "torchrun or muster run", 1, 2, -1,
     -1, -1, -1, true, false},
    /* Open MPI 4.1 */
    {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3 "
     "OMPI_COMM_WORLD_NODE_RANK=2 PMIX_RANK=2", "Open MPI", 2, 3, 2, 3, -1, -1, true, false},
    {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1",
     "Open MPI", 2, 3, 0, 1, -1, -1, false, false},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "Open MPI", 0, 1, 0, 1, -1, -1, true, false},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "Open MPI", 0, 2, -1, -1, -1, -1, false, false},
    /* within Slurm, which started its daemons; beside PMI's of those */
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMI_RANK=1 "
     "PMI_SIZE=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", "Open MPI", 3, 4, 1, 2, -1, -1, false, false},
    /* a script made RANK and WORLD_SIZE of them */
    {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
     "OMPI_COMM_WORLD_LOCAL_SIZE=2", "Open MPI", 3, 4, 1, 2, -1, -1, false, false},
    /* MPI was asked for, and has its own */
    {"RANK=0 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", "Open MPI", 3, 4, -1, -1, -1, -1, false, true},
    {TORCH "RANK=1 WORLD_SIZE=2", "torchrun or muster run", 1, 2, -1, -1, -1, -1, true, true},
    {"MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2", "MVAPICH2", 1, 4,
     1, 2, -1, -1, false, false},
    /* Hydra of MPICH 4.0 and Intel MPI, also in a Slurm allocation */
    {"PMI_RANK=1 PMI_SIZE=2 PMI_FD=7 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "MPICH", 1, 2, 1, 2, -1, -1, true, false},
    {"PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", "MPICH", 3, 4, 1, 2, -1,
     -1, false, false},
    /* jsrun, PALS, Flux, each beside PMI's or Open MPI's variables */
    {"JSM_NAMESPACE_RANK=5 JSM_NAMESPACE_SIZE=6 JSM_NAMESPACE_LOCAL_RANK=2 JSM_NAMESPACE_LOCAL_SIZE=3", "jsrun", 5, 6, 2, 3,
     -1, -1, false, false},
    {"PALS_RANKID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_NODEID=0 PMI_RANK=1 PMI_SIZE=2", "PALS", 1, 2, 1, 2, 0, -1, true,
     false},
    {"FLUX_TASK_RANK=2 FLUX_JOB_SIZE=3 FLUX_TASK_LOCAL_ID=2 FLUX_JOB_NNODES=1 PMI_RANK=2 PMI_SIZE=3", "Flux", 2, 3, 2, 3, -1, 1,
     true, false},
    {"FLUX_TASK_RANK=2 FLUX_JOB_SIZE=3 FLUX_TASK_LOCAL_ID=0 FLUX_JOB_NNODES=2", "Flux", 2, 3, 0, -1, -1, 2, false, false},
    /* srun; --mpi=pmi2 adds PMI's */
    {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=2",
     "Slurm", 1, 2, 1, 2, 0, 1, true, false},
    {"SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_STEP_NUM_NODES=4 "
     "SLURM_STEP_TASKS_PER_NODE=2(x3),1 PMI_RANK=6 PMI_SIZE=7", "Slurm", 6, 7, 0, 1, 3, 4, false, false},
    {"SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=4 "
     "SLURM_STEP_TASKS_PER_NODE=2(x3),1", "Slurm", 3, 7, 1, 2, 1, 4, false, false},
    {"SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=7 SLURM_STEP_NUM_NODES=4 SLURM_STEP_TASKS_PER_NODE=2(x3),1", "Slurm", 3, 7, -1, -1, -1,
     4, false, false},
    /* a batch script is none of the tasks it may start */
    {"SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_ID=7", NULL, 0, 1, -1, -1, -1, -1, true, false},
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "MPICH", 1, 2, 1, 2, -1,
     -1, true, false},
    {"PMI_RANK=0 PMI_SIZE=4", "a launcher with PMI", 0, 4, -1, -1, -1, -1, false, false},
};

static void environments_are_read(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        const expected *e = &good[i];
        char env[1024];
        snprintf(env, sizeof(env), "%s", e->env);
        mui_launch m;
        if (mui_launch_read(c, look_up, env, e->mpi, &m) != MU_OK) {
            fail_msg("`%s`: %s", e->env, mu_context_message(c));
        }
        const char *who = m.by != NULL ? m.by->who : NULL;
        if ((who == NULL) != (e->who == NULL) || (who != NULL && strcmp(who, e->who) != 0) || m.rank != e->rank ||
            m.size != e->size || m.local_rank != e->local_rank || m.local_size != e->local_size || m.node != e->node ||
            m.nodes != e->nodes || m.here != e->here) {
            fail_msg("`%s`: %s: rank %d of %d, local %d of %d, node %d of %d, here %d", e->env, who != NULL ? who : "nobody", m.rank,
                     m.size, m.local_rank, m.local_size, m.node, m.nodes, m.here);
        }
    }
    assert_int_equal(mu_context_close(c), MU_OK);
}

typedef struct refused {
    const char *env;
    const char *says[3];
} refused;

static const refused bad[] = {
    {"RANK=0", {"RANK is set, but WORLD_SIZE is not"}},
    {"WORLD_SIZE=2", {"WORLD_SIZE is set, but RANK is not"}},
    {"RANK=2 WORLD_SIZE=2", {"RANK is 2, but WORLD_SIZE is 2"}},
    {"RANK=1 WORLD_SIZE=1", {"RANK is 1, but WORLD_SIZE is 1"}},
    {"RANK=x WORLD_SIZE=2", {"RANK is `x`"}},
    {"RANK=0 WORLD_SIZE=2x", {"WORLD_SIZE is `2x`"}},
    {"RANK=0 WORLD_SIZE=99999999999", {"WORLD_SIZE is `99999999999`"}},
    {"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", {"LOCAL_WORLD_SIZE is 3, but WORLD_SIZE is 2"}},
    {"RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 LOCAL_RANK=2", {"LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"}},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=1", {"LOCAL_RANK is 1, but RANK is 0"}},
    {"RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=2 GROUP_WORLD_SIZE=2", {"GROUP_RANK is 2, but GROUP_WORLD_SIZE is 2"}},
    {"RANK=0 WORLD_SIZE=2 GROUP_WORLD_SIZE=3", {"GROUP_WORLD_SIZE is 3, but WORLD_SIZE is 2"}},
    {"RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=1",
     {"GROUP_WORLD_SIZE is 1", "WORLD_SIZE is 4", "LOCAL_WORLD_SIZE is 2"}},
    {"RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 GROUP_WORLD_SIZE=2", {"GROUP_WORLD_SIZE is 2", "LOCAL_WORLD_SIZE is 4", "WORLD_SIZE"}},
    {TORCH "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=3 TORCHELASTIC_MAX_RESTARTS=2",
     {"TORCHELASTIC_RESTART_COUNT is 3, but TORCHELASTIC_MAX_RESTARTS is 2"}},
    {"RANK=0 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4", {"WORLD_SIZE is 2, but OMPI_COMM_WORLD_SIZE is 4"}},
    {"RANK=0 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", {"RANK is 0, but OMPI_COMM_WORLD_RANK is 1"}},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
     "OMPI_COMM_WORLD_LOCAL_SIZE=2 LOCAL_WORLD_SIZE=2", {"LOCAL_RANK is 0, but OMPI_COMM_WORLD_LOCAL_RANK is 1"}},
    {"RANK=0 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3", {"WORLD_SIZE is 2, but SLURM_STEP_NUM_TASKS is 3"}},
    {"OMPI_COMM_WORLD_RANK=0", {"OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not"}},
    {"OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4", {"OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"}},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=3",
     {"OMPI_COMM_WORLD_LOCAL_SIZE is 3, but OMPI_COMM_WORLD_SIZE is 2"}},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=3 MPI_LOCALNRANKS=3",
     {"OMPI_COMM_WORLD_SIZE is 2, but PMI_SIZE is 3"}},
    {"MV2_COMM_WORLD_SIZE=2", {"MV2_COMM_WORLD_SIZE is set, but MV2_COMM_WORLD_RANK is not"}},
    {"PMI_RANK=2 PMI_SIZE=2 MPI_LOCALNRANKS=2", {"PMI_RANK is 2, but PMI_SIZE is 2"}},
    {"PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=1 MPI_LOCALRANKID=1", {"MPI_LOCALRANKID is 1, but MPI_LOCALNRANKS is 1"}},
    {"JSM_NAMESPACE_RANK=6 JSM_NAMESPACE_SIZE=6", {"JSM_NAMESPACE_RANK is 6, but JSM_NAMESPACE_SIZE is 6"}},
    {"PALS_RANKID=1 PALS_LOCAL_RANKID=1 PMI_RANK=0 PMI_SIZE=2", {"PALS_RANKID is 1, but PMI_RANK is 0"}},
    {"FLUX_TASK_RANK=0 FLUX_JOB_SIZE=3 FLUX_JOB_NNODES=4", {"FLUX_JOB_NNODES is 4, but FLUX_JOB_SIZE is 3"}},
    {"SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=2", {"SLURM_PROCID is 2, but SLURM_STEP_NUM_TASKS is 2"}},
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2(x2)", {"SLURM_STEP_NUM_TASKS is 3",
                                                                             "SLURM_STEP_TASKS_PER_NODE is `2(x2)`, 4 tasks"}},
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2(3)", {"SLURM_STEP_TASKS_PER_NODE is `2(3)`"}},
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=3,", {"SLURM_STEP_TASKS_PER_NODE is `3,`"}},
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=3(x0)", {"SLURM_STEP_TASKS_PER_NODE is `3(x0)`"}},
    {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=3 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=1 "
     "SLURM_STEP_TASKS_PER_NODE=2,1", {"SLURM_LOCALID is 1, but SLURM_STEP_TASKS_PER_NODE is 1"}},
    {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 PMI_RANK=0 PMI_SIZE=2", {"SLURM_STEP_NUM_TASKS is 3, but PMI_SIZE is 2"}},
    {"PMI_RANK=0 PMI_SIZE=none", {"PMI_SIZE is `none`"}},
};

static void contradictions_name_both_variables(void **state)
{
    (void)state;
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        char env[1024];
        snprintf(env, sizeof(env), "%s", bad[i].env);
        mui_launch m;
        if (mui_launch_read(c, look_up, env, false, &m) != MU_ERR_ARG || mu_context_status(c) != MU_ERR_ARG) {
            fail_msg("`%s` was taken", bad[i].env);
        }
        for (int k = 0; k < 3 && bad[i].says[k] != NULL; k++) {
            if (strstr(mu_context_message(c), bad[i].says[k]) == NULL) {
                fail_msg("`%s`: `%s` does not say `%s`", bad[i].env, mu_context_message(c), bad[i].says[k]);
            }
        }
        mu_context_clear(c);
    }
    mu_context_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(environments_are_read),
        cmocka_unit_test(contradictions_name_both_variables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
