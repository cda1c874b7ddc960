/* The table of launchers, and what contradicts what. */
#include "base/launcher.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Innermost first: a launcher that is started by another's rank sets its variables beside the other's. */
static const mui_launcher table[] = {
    {.who = "torchrun or muster run", .rank = "RANK", .size = "WORLD_SIZE", .local_rank = "LOCAL_RANK",
     .local_size = "LOCAL_WORLD_SIZE", .node = "GROUP_RANK", .nodes = "GROUP_WORLD_SIZE", .whole = true, .set_by_hand = true,
     .job = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}},
    {.who = "Open MPI", .rank = "OMPI_COMM_WORLD_RANK", .size = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK", .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE", .whole = true,
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.who = "MVAPICH2", .rank = "MV2_COMM_WORLD_RANK", .size = "MV2_COMM_WORLD_SIZE",
     .local_rank = "MV2_COMM_WORLD_LOCAL_RANK", .local_size = "MV2_COMM_WORLD_LOCAL_SIZE", .whole = true, .by_parent = true},
    /* Hydra sets nothing that names the job; on one machine its ranks have one parent. */
    {.who = "MPICH", .rank = "PMI_RANK", .size = "PMI_SIZE", .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS", .by_parent = true},
    {.who = "jsrun", .rank = "JSM_NAMESPACE_RANK", .size = "JSM_NAMESPACE_SIZE", .local_rank = "JSM_NAMESPACE_LOCAL_RANK",
     .local_size = "JSM_NAMESPACE_LOCAL_SIZE", .whole = true, .job = {"LSB_JOBID", "PMIX_NAMESPACE"}},
    {.who = "PALS", .rank = "PALS_RANKID", .size = "PMI_SIZE", .local_rank = "PALS_LOCAL_RANKID",
     .local_size = "PALS_LOCAL_SIZE", .node = "PALS_NODEID", .job = {"PALS_APID"}},
    {.who = "Flux", .rank = "FLUX_TASK_RANK", .size = "FLUX_JOB_SIZE", .local_rank = "FLUX_TASK_LOCAL_ID",
     .nodes = "FLUX_JOB_NNODES", .job = {"FLUX_JOB_ID", "FLUX_URI"}},
    /* SLURM_NTASKS is not asked: a batch script has it, without being one of these tasks. */
    {.who = "Slurm", .rank = "SLURM_PROCID", .size = "SLURM_STEP_NUM_TASKS", .local_rank = "SLURM_LOCALID",
     .node = "SLURM_NODEID", .nodes = "SLURM_STEP_NUM_NODES", .tasks_per_node = "SLURM_STEP_TASKS_PER_NODE",
     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
    {.who = "a launcher with PMI", .rank = "PMI_RANK", .size = "PMI_SIZE", .local_rank = "PMI_LOCAL_RANK",
     .local_size = "PMI_LOCAL_SIZE", .bare_pmi = true, .by_parent = true},
};
enum { LAUNCHERS = sizeof(table) / sizeof(*table), HYDRA = 3 };

const mui_launcher *mui_launcher_at(int i)
{
    return i >= 0 && i < LAUNCHERS ? &table[i] : NULL;
}

typedef struct source {
    mu_context *context;
    mui_lookup get;
    void *user;
} source;

static const char *value_of(const source *s, const char *variable)
{
    const char *v = variable != NULL ? s->get(s->user, variable) : NULL;
    return v != NULL && v[0] != '\0' ? v : NULL;
}

mu_status mui_read_number(mu_context *c, mui_lookup get, void *user, const char *variable, int least, int *out)
{
    const source from = {c, get, user};
    const char *s = value_of(&from, variable);
    if (s == NULL) {
        return MU_OK;
    }
    char *end = NULL;
    errno = 0;
    long n = strtol(s, &end, 10);
    if (end == s || *end != '\0' || errno != 0 || n < least || n > INT_MAX) {
        return mui_fail(c, MU_ERR_ARG, "%s is `%s`; a whole number from %d on was expected", variable, s, least);
    }
    *out = (int)n;
    return MU_OK;
}

static mu_status number_of(const source *s, const char *variable, int least, int *out)
{
    return mui_read_number(s->context, s->get, s->user, variable, least, out);
}

/* Of two numbers that do not go together. */
static mu_status contradict(const source *s, const char *a, int na, const char *b, int nb, const char *why)
{
    return mui_fail(s->context, MU_ERR_ARG, "%s is %d, but %s is %d%s", a, na, b, nb, why);
}

/* -- one launcher ------------------------------------------------------------------------------------------------ */
/* Slurm's "2(x3),1": of all nodes the sum, and the number of the one at `node`. False: it is not such a list. */
static bool read_tasks(const char *list, int node, long *sum, int *local)
{
    long at = 0;
    *sum = 0;
    for (const char *p = list;; p++) {
        char *end = NULL;
        long tasks = strtol(p, &end, 10), times = 1;
        if (end == p || tasks < 0 || tasks > INT_MAX) {
            return false;
        }
        if (end[0] == '(' && end[1] == 'x') {
            p = end + 2;
            times = strtol(p, &end, 10);
            if (end == p || times < 1 || times > INT_MAX || *end != ')') {
                return false;
            }
            end++;
        }
        if (node >= at && node < at + times) {
            *local = (int)tasks;
        }
        at += times;
        *sum += tasks * times;
        p = end;
        if (*p != ',') {
            return *p == '\0';
        }
    }
}

static mu_status read_slurm_tasks(const source *s, const mui_launcher *l, mui_launch *out)
{
    const char *list = value_of(s, l->tasks_per_node);
    long sum = 0;
    if (list == NULL) {
        return MU_OK;
    }
    if (!read_tasks(list, out->node >= 0 ? out->node : 0, &sum, &out->local_size)) {
        return mui_fail(s->context, MU_ERR_ARG, "%s is `%s`; numbers of tasks as 2(x3),1 were expected", l->tasks_per_node, list);
    }
    if (sum != out->size) {
        return mui_fail(s->context, MU_ERR_ARG, "%s is %d, but %s is `%s`, %ld tasks", l->size, out->size, l->tasks_per_node,
                        list, sum);
    }
    if (out->node < 0 && out->nodes != 1) {
        out->local_size = -1; /* which of the nodes this is was not told */
    }
    return MU_OK;
}

/* Each variable must agree with the others that are set. */
static mu_status check_locality(const source *s, const mui_launcher *l, const mui_launch *m)
{
    const char *local_size = l->local_size != NULL ? l->local_size : l->tasks_per_node;
    if (m->nodes > 0 && m->node >= m->nodes) {
        return contradict(s, l->node, m->node, l->nodes, m->nodes, "");
    }
    if (m->nodes > m->size) {
        return contradict(s, l->nodes, m->nodes, l->size, m->size, ": a machine without a rank");
    }
    if (m->local_size > m->size) {
        return contradict(s, local_size, m->local_size, l->size, m->size, "");
    }
    if (m->local_size >= 0 && m->local_rank >= m->local_size) {
        return contradict(s, l->local_rank, m->local_rank, local_size, m->local_size, "");
    }
    if (m->nodes == 1 && m->local_size >= 0 && m->local_size != m->size) {
        return mui_fail(s->context, MU_ERR_ARG, "%s is 1, but %s is %d and %s is %d", l->nodes, l->size, m->size, local_size,
                        m->local_size);
    }
    if (m->nodes > 1 && m->local_size == m->size) {
        return mui_fail(s->context, MU_ERR_ARG, "%s is %d, but %s is %d, as many as %s", l->nodes, m->nodes, local_size,
                        m->local_size, l->size);
    }
    return MU_OK;
}

/* Whether all ranks are on this machine. */
static void settle_locality(const mui_launcher *l, mui_launch *m)
{
    if (m->local_size < 0 && m->nodes == 1) {
        m->local_size = m->size;
    }
    /* Who sets RANK and WORLD_SIZE by hand and says no more means this machine. */
    m->here = m->local_size == m->size || (m->local_size < 0 && m->nodes < 0 && l->set_by_hand);
}

/* torchrun's numbers on one machine are equal; other launchers' need not be. */
static mu_status check_local_rank(const source *s, const mui_launch *m)
{
    const mui_launcher *l = m->by;
    if (m->here && m->local_rank >= 0 && m->local_rank != m->rank) {
        return mui_fail(s->context, MU_ERR_ARG, "%s is %d, but %s is %d, and all %d ranks are on this machine", l->local_rank,
                        m->local_rank, l->rank, m->rank, m->size);
    }
    return MU_OK;
}

/* out->by stays NULL when the launcher's variables are not there. */
static mu_status read_one(const source *s, const mui_launcher *l, mui_launch *out)
{
    mui_launch m = {l, -1, -1, -1, -1, -1, -1, false};
    *out = (mui_launch){NULL, 0, 1, -1, -1, -1, -1, true};
    mu_status st = number_of(s, l->rank, 0, &m.rank);
    st = st == MU_OK ? number_of(s, l->size, 1, &m.size) : st;
    if (st != MU_OK) {
        return st;
    }
    if (l->whole && (m.rank < 0) != (m.size < 0)) {
        return mui_fail(s->context, MU_ERR_ARG, "%s is set, but %s is not", m.rank < 0 ? l->size : l->rank,
                        m.rank < 0 ? l->rank : l->size);
    }
    if (m.rank < 0 || m.size < 0) {
        return MU_OK;
    }
    if (m.rank >= m.size) {
        return contradict(s, l->rank, m.rank, l->size, m.size, "");
    }
    if (m.size == 1) {
        m.local_rank = 0;
        m.local_size = 1;
        m.here = true;
        *out = m;
        return MU_OK;
    }
    st = number_of(s, l->local_rank, 0, &m.local_rank);
    st = st == MU_OK ? number_of(s, l->local_size, 1, &m.local_size) : st;
    st = st == MU_OK ? number_of(s, l->node, 0, &m.node) : st;
    st = st == MU_OK ? number_of(s, l->nodes, 1, &m.nodes) : st;
    st = st == MU_OK ? read_slurm_tasks(s, l, &m) : st;
    st = st == MU_OK ? check_locality(s, l, &m) : st;
    if (st == MU_OK) {
        settle_locality(l, &m);
        *out = m;
    }
    return st;
}

/* -- several launchers ------------------------------------------------------------------------------------------- */
static mu_status agree(const source *s, const mui_launch *a, const mui_launch *b)
{
    const char *why = ": which of the two launchers started this rank?";
    if (a->size != b->size) {
        return contradict(s, a->by->size, a->size, b->by->size, b->size, why);
    }
    if (a->rank != b->rank) {
        return contradict(s, a->by->rank, a->rank, b->by->rank, b->rank, why);
    }
    if (a->local_rank >= 0 && b->local_rank >= 0 && a->local_rank != b->local_rank) {
        return contradict(s, a->by->local_rank, a->local_rank, b->by->local_rank, b->local_rank, why);
    }
    return MU_OK;
}

static bool is_set(const source *s, const char *variable)
{
    return value_of(s, variable) != NULL;
}

/* Whether the launcher's variables can be its own: PMI's are set by many. */
static bool is_meant(const source *s, int i)
{
    return i != HYDRA || is_set(s, table[HYDRA].local_size);
}

/* The first that started several ranks. Of those after it, MPICH's have to agree with the other MPIs', and bare PMI's with
 * those of the launcher that sets them; all others may differ: a launcher of MPI's may itself have been started by another
 * (Slurm starts Open MPI's daemons, one on each node). */
static mu_status read_mpi(const source *s, mui_launch *out)
{
    mui_launch first = {NULL, 0, 1, -1, -1, -1, -1, true}, one;
    for (int i = 1; i < LAUNCHERS; i++) {
        if (!is_meant(s, i)) {
            continue;
        }
        mu_status st = read_one(s, &table[i], &one);
        if (st != MU_OK) {
            return st;
        }
        if (one.by == NULL || (first.by != NULL && one.size == 1)) {
            continue;
        }
        if (first.by == NULL || first.size == 1) {
            first = one;
            continue;
        }
        bool rivals = i == HYDRA || (one.by->bare_pmi && first.by > &table[HYDRA]);
        st = rivals ? agree(s, &first, &one) : MU_OK;
        if (st != MU_OK) {
            return st;
        }
    }
    *out = first;
    return MU_OK;
}

static mu_status check_restarts(const source *s)
{
    int restart = 0, most = INT_MAX;
    mu_status st = number_of(s, "TORCHELASTIC_RESTART_COUNT", 0, &restart);
    st = st == MU_OK ? number_of(s, "TORCHELASTIC_MAX_RESTARTS", 0, &most) : st;
    if (st == MU_OK && restart > most) {
        st = contradict(s, "TORCHELASTIC_RESTART_COUNT", restart, "TORCHELASTIC_MAX_RESTARTS", most, "");
    }
    return st;
}

mu_status mui_launch_read(mu_context *c, mui_lookup get, void *user, bool mpi, mui_launch *out)
{
    const source s = {c, get, user};
    mui_launch torch, other;
    mu_status st = read_one(&s, &table[0], &torch);
    if (st != MU_OK) {
        return st;
    }
    bool nested = torch.by != NULL && (is_set(&s, "TORCHELASTIC_RUN_ID") || is_set(&s, "MUSTER_JOB"));
    if (torch.by != NULL && ((nested && !mpi) || torch.size == 1)) {
        *out = torch; /* whatever started the launcher, or, of size 1, as somebody said */
        st = check_local_rank(&s, &torch);
        return st == MU_OK ? check_restarts(&s) : st;
    }
    st = read_mpi(&s, &other);
    if (st != MU_OK) {
        return st;
    }
    if (torch.by == NULL || (mpi && other.size > 1)) {
        *out = other;
        return MU_OK;
    }
    /* A script may have made RANK and WORLD_SIZE of the launcher's own variables; those know more. A batch script's own
     * rank is one of one. */
    if (other.size > 1) {
        *out = other;
        return agree(&s, &torch, &other);
    }
    *out = torch;
    return check_local_rank(&s, &torch);
}
