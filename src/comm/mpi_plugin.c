/* The plug-in: MPI behind the table of mpi_table.h. Compiled once for each MPI, with MUI_MPI_NAME, which
 * MPI_Get_library_version has for no other MPI. Knows nothing of the library but that table.
 *
 * MPI is a thing of the process, not of a context: whether Muster has initialised it, and how many groups use it, is
 * kept here, in the only mutable globals there are. They are atomic, and MPI itself is called by one thread at a time
 * only, as its level of thread support wants. */
#define _DEFAULT_SOURCE /* on_exit */
#include "comm/mpi_table.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(MPI_Request) <= sizeof(mui_mpi_request), "a request must fit");

struct mui_mpi_port {
    MPI_Comm parent;
    MPI_Comm channel[MUI_MPI_CHANNELS];
};

static int open_ports;   /* not closed yet */
static int broken_ports; /* closed while operations were under way */

static MPI_Request load(const mui_mpi_request *r)
{
    MPI_Request q;
    memcpy(&q, r, sizeof(q));
    return q;
}

static void store(mui_mpi_request *r, MPI_Request q)
{
    r->bits = 0;
    memcpy(r, &q, sizeof(q));
}

static void error_text(int code, char *out, size_t size)
{
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int n = 0;
    if (MPI_Error_string(code, text, &n) != MPI_SUCCESS) {
        snprintf(text, sizeof(text), "error %d", code);
    }
    snprintf(out, size, "%s", text);
}

/* At exit, of an MPI that Muster has initialised. A group that is open or broken leaves operations without an end, for
 * which MPI_Finalize may wait for ever; the launcher ends the other processes then. MPICH's takes over the status of who
 * left first, so a rank that was the one to leave and whose program ends as if all were well must not be taken for that. */
static void finalize(int status, void *unused)
{
    int finalized = 0;
    (void)unused;
    if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) {
        return;
    }
    if (__atomic_load_n(&open_ports, __ATOMIC_ACQUIRE) == 0 && __atomic_load_n(&broken_ports, __ATOMIC_ACQUIRE) == 0) {
        MPI_Finalize();
    } else if (status == 0) {
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static bool right_library(char *why, size_t size)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int n = 0;
    MPI_Get_library_version(version, &n);
    if (strstr(version, MUI_MPI_NAME) == NULL) {
        version[strcspn(version, "\n,")] = '\0';
        snprintf(why, size, "this process has the MPI `%.100s`, for which the plug-in for " MUI_MPI_NAME " was not made",
                 version);
        return false;
    }
    return true;
}

static bool enough_threads(char *why, size_t size)
{
    int level = MPI_THREAD_SINGLE, main_thread = 0;
    MPI_Query_thread(&level);
    MPI_Is_thread_main(&main_thread);
    if (level < MPI_THREAD_FUNNELED) {
        snprintf(why, size, "MPI was initialised with MPI_THREAD_SINGLE, but Muster has threads of its own (which do not "
                            "call MPI): initialise it by MPI_Init_thread with MPI_THREAD_FUNNELED or more");
        return false;
    }
    if (level == MPI_THREAD_FUNNELED && !main_thread) {
        snprintf(why, size, "MPI was initialised with MPI_THREAD_FUNNELED, so its groups belong to the thread that did "
                            "so, which this is not; MPI_THREAD_SERIALIZED allows any");
        return false;
    }
    return true;
}

static bool start(char *why, size_t size)
{
    int initialized = 0, finalized = 0, level = 0;
    if (!right_library(why, size)) {
        return false;
    }
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized) {
        snprintf(why, size, "MPI has been finalised already");
        return false;
    }
    if (!initialized) {
        if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) {
            snprintf(why, size, "MPI_Init_thread failed");
            return false;
        }
        if (on_exit(finalize, NULL) != 0) {
            snprintf(why, size, "on_exit refuses the function that finalises MPI");
            return false;
        }
    }
    return enough_threads(why, size);
}

static bool open_port(mui_mpi_port *p, const void *comm, const int *fortran, int *rank, int *size, char *why, size_t room)
{
    int inter = 0;
    MPI_Comm parent = MPI_COMM_WORLD;
    if (comm != NULL) {
        memcpy(&parent, comm, sizeof(parent));
    } else if (fortran != NULL) {
        parent = MPI_Comm_f2c((MPI_Fint)*fortran);
    }
    if (parent == MPI_COMM_NULL) {
        snprintf(why, room, "the communicator is MPI_COMM_NULL");
        return false;
    }
    if (MPI_Comm_test_inter(parent, &inter) != MPI_SUCCESS || inter) {
        snprintf(why, room, "the communicator is an inter-communicator; one group of ranks was expected");
        return false;
    }
    p->parent = parent;
    for (int k = 0; k < MUI_MPI_CHANNELS; k++) {
        p->channel[k] = MPI_COMM_NULL;
    }
    MPI_Comm_rank(parent, rank);
    MPI_Comm_size(parent, size);
    __atomic_fetch_add(&open_ports, 1, __ATOMIC_ACQ_REL);
    return true;
}

static int start_channel(mui_mpi_port *p, mui_mpi_channel channel, mui_mpi_request *request)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = MPI_Comm_idup(p->parent, &p->channel[channel], &q);
    store(request, q);
    return code;
}

static int ready(mui_mpi_port *p)
{
    int code = MPI_SUCCESS;
    for (int k = 0; k < MUI_MPI_CHANNELS && code == MPI_SUCCESS; k++) {
        code = MPI_Comm_set_errhandler(p->channel[k], MPI_ERRORS_RETURN);
    }
    return code;
}

static void close_port(mui_mpi_port *p, bool whole)
{
    for (int k = 0; k < MUI_MPI_CHANNELS && whole; k++) {
        if (p->channel[k] != MPI_COMM_NULL) {
            MPI_Comm_free(&p->channel[k]);
        }
    }
    if (!whole) {
        __atomic_fetch_add(&broken_ports, 1, __ATOMIC_ACQ_REL);
    }
    __atomic_fetch_sub(&open_ports, 1, __ATOMIC_ACQ_REL);
}

static int gather(mui_mpi_port *p, const void *in, int bytes, void *out, mui_mpi_request *request)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = MPI_Iallgather(in, bytes, MPI_BYTE, out, bytes, MPI_BYTE, p->channel[MUI_MPI_HEADERS], &q);
    store(request, q);
    return code;
}

static int scatter(mui_mpi_port *p, const void *in, const int *counts, const int *places, void *out,
                   const int *got_counts, const int *got_places, mui_mpi_request *request)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = MPI_Ialltoallv(in, counts, places, MPI_BYTE, out, got_counts, got_places, MPI_BYTE,
                              p->channel[MUI_MPI_SCATTER], &q);
    store(request, q);
    return code;
}

static int share(mui_mpi_port *p, void *data, const int *counts, const int *places, mui_mpi_request *request)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, counts, places, MPI_BYTE,
                               p->channel[MUI_MPI_GATHER], &q);
    store(request, q);
    return code;
}

static int broadcast(mui_mpi_port *p, void *data, int bytes, int root, mui_mpi_request *request)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = MPI_Ibcast(data, bytes, MPI_BYTE, root, p->channel[MUI_MPI_GATHER], &q);
    store(request, q);
    return code;
}

static int send(mui_mpi_port *p, int to, const void *data, int bytes, mui_mpi_request *request)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = MPI_Isend(data, bytes, MPI_BYTE, to, 0, p->channel[MUI_MPI_TALK], &q);
    store(request, q);
    return code;
}

static int receive(mui_mpi_port *p, void *data, int room, int *from, int *bytes)
{
    MPI_Status status;
    int here = 0, code = MPI_Iprobe(MPI_ANY_SOURCE, 0, p->channel[MUI_MPI_TALK], &here, &status);
    *from = -1;
    if (code != MPI_SUCCESS || !here) {
        return code;
    }
    int source = status.MPI_SOURCE;
    code = MPI_Recv(data, room, MPI_BYTE, source, 0, p->channel[MUI_MPI_TALK], &status);
    if (code == MPI_SUCCESS) {
        MPI_Get_count(&status, MPI_BYTE, bytes);
        *from = source;
    }
    return code;
}

static int test(mui_mpi_request *request, bool *done)
{
    MPI_Request q = load(request);
    int flag = 0, code = MPI_Test(&q, &flag, MPI_STATUS_IGNORE);
    store(request, q);
    *done = flag != 0;
    return code;
}

static const mui_mpi_table table = {
    .version = MUI_MPI_TABLE_VERSION,
    .bytes = sizeof(mui_mpi_table),
    .name = MUI_MPI_NAME,
    .port_bytes = sizeof(struct mui_mpi_port),
    .error = error_text,
    .start = start,
    .open = open_port,
    .channel = start_channel,
    .ready = ready,
    .close = close_port,
    .gather = gather,
    .scatter = scatter,
    .share = share,
    .broadcast = broadcast,
    .send = send,
    .receive = receive,
    .test = test,
};

__attribute__((visibility("default"))) const mui_mpi_table *muster_mpi_table(void);
const mui_mpi_table *muster_mpi_table(void)
{
    return &table;
}
