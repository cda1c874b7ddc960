/* Opening a group over MPI: its channels, whether all ranks run one version of Muster, and how their clocks differ. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"
#include "comm/mpi_group.h"
#include "comm/mpi_load.h"
#include "dev/pages.h"

#include <sched.h>
#include <string.h>

#define HELLO_MAGIC 0x4d55534d50493031u

typedef struct hello {
    uint64_t magic, header_bytes;
    uint64_t host;  /* alike where one clock is shared, */
    uint64_t cores; /* and where cores are */
    double now;
} hello;

/* Ranks that may run on the same cores share them. */
static uint64_t cores_hash(uint64_t host)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) {
        CPU_ZERO(&set); /* more cores than it has room for */
    }
    for (int i = 0; i < CPU_SETSIZE; i++) {
        host = CPU_ISSET(i, &set) ? mui_hash_u64(host, (uint64_t)i) : host;
    }
    return host;
}

static mu_status await(mui_mpi *g, mui_mpi_request *request, const char *what)
{
    double begin = mui_now(), waited = 0;
    bool done = false, warned = false;
    for (;;) {
        int code = g->mpi->test(request, &done);
        if (code != 0) {
            char why[512] = "";
            g->mpi->error(code, why, sizeof(why));
            return mui_fail(g->base.context, MU_ERR_COMM, "%s: %s: %s", g->mpi->name, what, why);
        }
        if (done) {
            return MU_OK;
        }
        waited = mui_now() - begin;
        if (waited > g->base.timeout_seconds) {
            return mui_fail(g->base.context, MU_ERR_TIMEOUT, "rank %d waited %.1f s for the other %d ranks to open the "
                            "group over MPI", g->base.rank, waited, g->base.size - 1);
        }
        if (waited > g->base.warn_seconds && !warned) {
            warned = true;
            mui_log(g->base.context, MU_LOG_WARN, "waiting for %.1f s for the other %d ranks to open the group over MPI",
                    waited, g->base.size - 1);
        }
        mui_mpi_pause(g, waited);
    }
}

/* -- what ranks tell each other at the beginning --------------------------------------------------------------------- */
static mu_status exchange(mui_mpi *g, const hello *own, hello *all)
{
    mui_mpi_request request;
    int code = g->mpi->gather(g->port, own, (int)sizeof(*own), all, &request);
    if (code != 0) {
        char why[512] = "";
        g->mpi->error(code, why, sizeof(why));
        return mui_fail(g->base.context, MU_ERR_COMM, "%s: comparing ranks: %s", g->mpi->name, why);
    }
    return await(g, &request, "comparing ranks");
}

static mu_status compare(mui_mpi *g, hello *all)
{
    hello own = {.magic = HELLO_MAGIC, .header_bytes = sizeof(mui_mpi_header), .host = mui_kernel_hash()};
    own.cores = cores_hash(own.host);
    mu_status s = exchange(g, &own, all);
    int sharing = 0, first = -1;
    for (int r = 0; r < g->base.size && s == MU_OK; r++) {
        if (all[r].magic != own.magic || all[r].header_bytes != own.header_bytes) {
            s = mui_fail(g->base.context, MU_ERR_COMM, "rank %d and rank %d run different versions of Muster", r,
                         g->base.rank);
        }
        sharing += all[r].cores == own.cores;
        first = first < 0 && all[r].host == own.host ? r : first;
    }
    g->oversubscribed = sharing > mui_cores();
    /* All have come out of the exchange at about one time: what the clock of this machine's first rank says, against
     * rank 0's. Alike on all ranks of a machine, so that these are compared exactly. */
    own.now = mui_now();
    s = s == MU_OK ? exchange(g, &own, all) : s;
    g->clock_offset = s == MU_OK ? all[first].now - all[0].now : 0;
    return s;
}

static mu_status open_channels(mui_mpi *g)
{
    for (int k = 0; k < MUI_MPI_CHANNELS; k++) {
        mui_mpi_request request;
        int code = g->mpi->channel(g->port, (mui_mpi_channel)k, &request);
        if (code != 0) {
            char why[512] = "";
            g->mpi->error(code, why, sizeof(why));
            return mui_fail(g->base.context, MU_ERR_COMM, "%s: duplicating the communicator: %s", g->mpi->name, why);
        }
        mu_status s = await(g, &request, "duplicating the communicator");
        if (s != MU_OK) {
            return s;
        }
    }
    int code = g->mpi->ready(g->port);
    return code == 0 ? MU_OK : mui_fail(g->base.context, MU_ERR_COMM, "%s: setting the error handler failed", g->mpi->name);
}

/* -- memory -------------------------------------------------------------------------------------------------------- */
static mu_status allocate(mui_mpi *g)
{
    mu_context *c = g->base.context;
    size_t n = (size_t)g->base.size;
    g->peers = mui_calloc(c, n, sizeof(*g->peers));
    g->in = mui_calloc(c, n, sizeof(*g->in));
    g->headers = mui_calloc(c, n + 1, sizeof(*g->headers));
    bool all = g->peers != NULL && g->in != NULL && g->headers != NULL;
    for (int i = 0; i < MUI_MPI_ROUNDS && all; i++) {
        mui_mpi_round *r = &g->rounds[i];
        r->counts = mui_calloc(c, 4 * n, sizeof(int));
        if (r->counts == NULL) {
            return MU_ERR_NOMEM;
        }
        r->places = r->counts + n;
        r->got_counts = r->places + n;
        r->got_places = r->got_counts + n;
    }
    return all ? MU_OK : MU_ERR_NOMEM;
}

static void free_all(mui_mpi *g)
{
    mu_context *c = g->base.context;
    mui_mpi_calls_free(g);
    while (g->blocks != NULL) {
        mui_mpi_block *b = g->blocks;
        g->blocks = b->next;
        mui_pages_free(c, b->data);
        mui_free(c, b);
    }
    for (int i = 0; i < MUI_MPI_ROUNDS; i++) {
        mui_pages_free(c, g->rounds[i].scratch);
        mui_free(c, g->rounds[i].counts);
    }
    mui_free(c, g->headers);
    mui_free(c, g->port);
    mui_free(c, g->in);
    mui_free(c, g->peers);
    mui_free(c, g);
}

void mui_mpi_release(mui_mpi *g, bool whole)
{
    bool idle = mui_mpi_drained(g);
    for (int r = 0; r < g->base.size && g->peers != NULL; r++) {
        idle = idle && !g->peers[r].last_busy && !g->peers[r].here_busy;
    }
    g->mpi->close(g->port, whole);
    mui_beacon_remove(g->base.context, &g->beacon_link);
    if (idle) {
        free_all(g);
    } /* else MPI has its memory for good */
}

static void destroy(void *group)
{
    mu_group *g = group;
    g->ops->close(g);
}

mu_group *mui_mpi_open(mu_context *c, const void *comm, const int *fortran, const mu_group_options *settled)
{
    char why[512] = "";
    const mui_mpi_table *mpi = mui_mpi_load(c, comm != NULL || fortran != NULL);
    int rank = 0, size = 0;
    if (mpi == NULL) {
        return NULL;
    }
    mui_mpi *g = mui_calloc(c, 1, sizeof(*g));
    mui_mpi_port *port = g != NULL ? mui_calloc(c, 1, mpi->port_bytes) : NULL;
    if (port == NULL) {
        mui_free(c, g);
        return NULL;
    }
    if (!mpi->start(why, sizeof(why)) || !mpi->open(port, comm, fortran, &rank, &size, why, sizeof(why))) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "no group over MPI: %s", why);
        mui_free(c, port);
        mui_free(c, g);
        return NULL;
    }
    g->base = (mu_group){.ops = &mui_mpi_ops, .context = c, .rank = rank, .size = size,
                         .timeout_seconds = settled->timeout_seconds, .warn_seconds = settled->warn_seconds};
    g->mpi = mpi;
    g->port = port;
    g->memory_bytes = settled->arena_bytes;
    g->round_bytes = MUI_MPI_ROUND_BYTES;
    g->oversubscribed = true; /* until it is known */
    mu_status s = allocate(g);
    hello *all = s == MU_OK ? mui_calloc(c, (size_t)size, sizeof(*all)) : NULL;
    s = all != NULL ? open_channels(g) : MU_ERR_NOMEM;
    s = s == MU_OK ? compare(g, all) : s;
    if (s != MU_OK) {
        mpi->close(port, false); /* what was started there has no end: its memory stays, too */
        return NULL;
    }
    mui_free(c, all);
    if (size > 1) {
        g->beacon_link.beacon = &g->beacon;
        mui_beacon_add(c, &g->beacon_link);
    }
    if (mui_context_own(c, g, destroy, MUI_OWN_GROUP) != MU_OK) {
        return NULL; /* destroyed: the others learn why */
    }
    if (size > 1 && c->size == 1) {
        c->rank = rank;
        c->size = size;
    }
    return &g->base;
}
