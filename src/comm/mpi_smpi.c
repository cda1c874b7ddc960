/* The plug-in for SimGrid's SMPI: MPI behind the table of mpi_table.h, in simulated time. bench/scale.py is its only user.
 *
 * SMPI's own non-blocking collectives start all their messages at once, which neither MPI does with many ranks and which
 * the simulator cannot bear. So collectives are schedules of messages here, as MPICH has them: descriptors by Bruck's
 * algorithm, slices pairwise with a few exchanges under way, a broadcast along a binomial tree. A schedule goes on when
 * the rank asks for progress, not in between, as it does without a thread of the MPI's own.
 *
 * All simulated ranks live in one process and one thread; everything here belongs to a port or to an operation. */
#include "comm/mpi_table.h"

#include <mpi.h>
#include <smpi/smpi_helpers_internal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WINDOW = 4, TALK_BYTES = 4096, TAGS = 1 << 20 };
/* What the reduction after a scatter reads per second; the library's own time does not count in the simulation. */
#define REDUCE_BYTES_PER_SECOND 20e9

typedef enum kind { GATHER, EXCHANGE, BROADCAST, SEND } kind;

typedef struct operation operation;
struct operation {
    mui_mpi_port *port;
    operation *next;       /* of the port's */
    kind kind;
    int tag;
    int step, running;     /* the next to start; requests under way */
    bool done;             /* and not among the port's any more */
    const char *from;      /* SEND, EXCHANGE */
    char *to;
    const int *counts, *places; /* EXCHANGE: of what goes to each rank; NULL: `bytes` of `from` go to all */
    const int *got_counts, *got_places;
    int bytes, root;
    char *turned;          /* GATHER: blocks from this rank's on */
    size_t to_reduce;      /* bytes */
};

struct mui_mpi_port {
    MPI_Comm comm;
    int rank, size;
    int started[MUI_MPI_CHANNELS];
    operation *first;
    int count, room;       /* of requests under way; the first one is the next message of the talk */
    MPI_Request *requests;
    operation **owners;
    double polled;         /* simulated time of the last look at all requests */
    bool heard;            /* the first request is done */
    bool news;             /* something came since the last idle */
    int failed;            /* MPI's error of what went on in idle */
    MPI_Status status;
    char talk[TALK_BYTES];
};

static void error_text(int code, char *out, size_t size)
{
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int n = 0;
    MPI_Error_string(code, text, &n);
    snprintf(out, size, "%s", text);
}

static bool start(char *why, size_t size)
{
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (!initialized) {
        snprintf(why, size, "a simulated rank calls MPI_Init itself");
    }
    return initialized != 0;
}

/* -- requests ------------------------------------------------------------------------------------------------------ */
static int add(mui_mpi_port *p, operation *o, MPI_Request q)
{
    if (p->count == p->room) {
        int room = p->room * 2 + 16;
        MPI_Request *requests = realloc(p->requests, (size_t)room * sizeof(*requests));
        p->requests = requests != NULL ? requests : p->requests;
        operation **owners = realloc(p->owners, (size_t)room * sizeof(*owners));
        p->owners = owners != NULL ? owners : p->owners;
        if (requests == NULL || owners == NULL) {
            return MPI_ERR_NO_MEM;
        }
        p->room = room;
    }
    p->requests[p->count] = q;
    p->owners[p->count++] = o;
    if (o != NULL) {
        o->running++;
    }
    return MPI_SUCCESS;
}

static int put(mui_mpi_port *p, operation *o, const void *data, int bytes, int to)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = bytes > 0 ? MPI_Isend(data, bytes, MPI_BYTE, to, o->tag, p->comm, &q) : MPI_SUCCESS;
    return code == MPI_SUCCESS && bytes > 0 ? add(p, o, q) : code;
}

static int get(mui_mpi_port *p, operation *o, void *data, int bytes, int from)
{
    MPI_Request q = MPI_REQUEST_NULL;
    int code = bytes > 0 ? MPI_Irecv(data, bytes, MPI_BYTE, from, o->tag, p->comm, &q) : MPI_SUCCESS;
    return code == MPI_SUCCESS && bytes > 0 ? add(p, o, q) : code;
}

static int hear(mui_mpi_port *p, MPI_Request *q)
{
    return MPI_Irecv(p->talk, TALK_BYTES, MPI_BYTE, MPI_ANY_SOURCE, TAGS * MUI_MPI_TALK, p->comm, q);
}

/* -- schedules ----------------------------------------------------------------------------------------------------- */
/* Step k: this rank has the 2^k blocks from its own on, and fetches as many of those behind them. */
static int step_gather(mui_mpi_port *p, operation *o, bool *more)
{
    int have = 1 << o->step, n = p->size, blocks = have < n - have ? have : n - have;
    *more = have < n;
    if (!*more) {
        return MPI_SUCCESS;
    }
    o->step++;
    int code = get(p, o, o->turned + (size_t)have * (size_t)o->bytes, blocks * o->bytes, (p->rank + have) % n);
    return code != MPI_SUCCESS ? code : put(p, o, o->turned, blocks * o->bytes, (p->rank - have + n) % n);
}

static int step_exchange(mui_mpi_port *p, operation *o, bool *more)
{
    int code = MPI_SUCCESS;
    for (; o->step < p->size && o->running < 2 * WINDOW - 1 && code == MPI_SUCCESS; o->step++) {
        int to = (p->rank + o->step) % p->size, from = (p->rank - o->step + p->size) % p->size;
        code = get(p, o, o->to + o->got_places[from], o->got_counts[from], from);
        if (code == MPI_SUCCESS) {
            code = o->places != NULL ? put(p, o, o->from + o->places[to], o->counts[to], to)
                                     : put(p, o, o->from, o->bytes, to);
        }
    }
    *more = o->step < p->size || o->running > 0;
    return code;
}

/* Ranks are counted from the root on; one of them receives from the rank without its lowest bit. */
static int step_broadcast(mui_mpi_port *p, operation *o, bool *more)
{
    int n = p->size, me = (p->rank - o->root + n) % n, low = 1, code = MPI_SUCCESS;
    while (low < n && (me & low) == 0) {
        low <<= 1;
    }
    *more = o->step < 2;
    if (o->step == 0 && me != 0) {
        code = get(p, o, o->to, o->bytes, (me - low + o->root) % n);
    } else if (o->step < 2) {
        o->step = 1;
        for (int bit = low >> 1; bit > 0 && code == MPI_SUCCESS; bit >>= 1) {
            code = me + bit < n ? put(p, o, o->to, o->bytes, (me + bit + o->root) % n) : MPI_SUCCESS;
        }
    }
    o->step++;
    return code;
}

static void end(mui_mpi_port *p, operation *o)
{
    if (o->kind == GATHER) { /* block i of the turned ones is rank (rank + i) % size's */
        size_t bytes = (size_t)o->bytes, before = (size_t)(p->size - p->rank) * bytes;
        memcpy(o->to + (size_t)p->rank * bytes, o->turned, before);
        memcpy(o->to, o->turned + before, (size_t)p->rank * bytes);
        free(o->turned);
    }
    if (o->to_reduce > 0) {
        long long ns = (long long)((double)o->to_reduce / REDUCE_BYTES_PER_SECOND * 1e9);
        smpi_nanosleep(&(struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}, NULL);
    }
    operation **at = &p->first;
    while (*at != o) {
        at = &(*at)->next;
    }
    *at = o->next;
    o->done = true;
}

/* As far as it goes without waiting. */
static int advance(mui_mpi_port *p, operation *o)
{
    bool more = true;
    int code = MPI_SUCCESS;
    while (more && code == MPI_SUCCESS) {
        switch (o->kind) {
        case EXCHANGE:
            code = step_exchange(p, o, &more);
            if (more) {
                return code;
            }
            break;
        case GATHER:
            code = o->running == 0 ? step_gather(p, o, &more) : code;
            break;
        case BROADCAST:
            code = o->running == 0 ? step_broadcast(p, o, &more) : code;
            break;
        case SEND:
            more = o->step++ == 0;
            code = more ? put(p, o, o->from, o->bytes, o->root) : code;
            break;
        }
        if (o->running > 0) {
            return code;
        }
    }
    if (code == MPI_SUCCESS) {
        end(p, o);
    }
    return code;
}

/* Request i is done. */
static int completed(mui_mpi_port *p, int i)
{
    operation *o = p->owners[i];
    p->news = true;
    if (o == NULL) {
        p->heard = true;
        return MPI_SUCCESS;
    }
    p->count--;
    p->requests[i] = p->requests[p->count];
    p->owners[i] = p->owners[p->count];
    o->running--;
    return advance(p, o);
}

/* Whatever is done by now; at one simulated time, one look suffices. */
static int poll(mui_mpi_port *p)
{
    int code = p->failed;
    if (p->polled == MPI_Wtime()) {
        return code;
    }
    /* From the last on: what comes anew is behind, and is not done yet. */
    for (int i = p->count; i-- > 0 && code == MPI_SUCCESS;) {
        MPI_Status status;
        int done = 0;
        if (i < p->count && (i > 0 || !p->heard)) {
            code = MPI_Test(&p->requests[i], &done, &status);
        }
        if (code == MPI_SUCCESS && done) {
            p->status = p->owners[i] == NULL ? status : p->status;
            code = completed(p, i);
        }
    }
    p->polled = MPI_Wtime();
    return code;
}

static int begin(mui_mpi_port *p, mui_mpi_channel channel, mui_mpi_request *request, operation with)
{
    operation *o = malloc(sizeof(*o));
    if (o == NULL) {
        return MPI_ERR_NO_MEM;
    }
    *o = with;
    o->port = p;
    o->tag = (int)channel * TAGS + (channel == MUI_MPI_TALK ? 0 : p->started[channel]++ % TAGS);
    operation **last = &p->first;
    while (*last != NULL) {
        last = &(*last)->next;
    }
    *last = o;
    request->bits = (uint64_t)(uintptr_t)o;
    return advance(p, o);
}

/* -- the table ----------------------------------------------------------------------------------------------------- */
static bool open_port(mui_mpi_port *p, const void *comm, const int *fortran, int *rank, int *size, char *why, size_t room)
{
    MPI_Comm parent = MPI_COMM_WORLD;
    if (fortran != NULL) {
        snprintf(why, room, "simulated ranks are lent by mu_group_from_mpi_comm");
        return false;
    }
    if (comm != NULL) {
        memcpy(&parent, comm, sizeof(parent));
    }
    MPI_Request q;
    p->polled = -1;
    MPI_Comm_rank(parent, rank);
    MPI_Comm_size(parent, size);
    p->rank = *rank;
    p->size = *size;
    if (MPI_Comm_dup(parent, &p->comm) != MPI_SUCCESS || hear(p, &q) != MPI_SUCCESS ||
        add(p, NULL, q) != MPI_SUCCESS) {
        snprintf(why, room, "the communicator cannot be duplicated");
        return false;
    }
    return true;
}

/* One communicator serves all: tags tell channels apart. */
static int start_channel(mui_mpi_port *p, mui_mpi_channel channel, mui_mpi_request *request)
{
    (void)p;
    (void)channel;
    request->bits = 0;
    return MPI_SUCCESS;
}

static int ready(mui_mpi_port *p)
{
    return MPI_Comm_set_errhandler(p->comm, MPI_ERRORS_RETURN);
}

static void close_port(mui_mpi_port *p, bool whole)
{
    if (whole) {
        /* The talk's open receive ends by a last word to itself: SMPI takes a cancelled one for a deadlock. */
        MPI_Request last = MPI_REQUEST_NULL;
        MPI_Isend(p->talk, 0, MPI_BYTE, p->rank, TAGS * MUI_MPI_TALK, p->comm, &last);
        MPI_Wait(&p->requests[0], MPI_STATUS_IGNORE);
        MPI_Wait(&last, MPI_STATUS_IGNORE);
        MPI_Comm_free(&p->comm);
        free(p->requests);
        free(p->owners);
    }
}

static int gather(mui_mpi_port *p, const void *in, int bytes, void *out, mui_mpi_request *request)
{
    operation o = {.kind = GATHER, .bytes = bytes, .to = out, .turned = malloc((size_t)bytes * (size_t)p->size)};
    if (o.turned == NULL) {
        return MPI_ERR_NO_MEM;
    }
    memcpy(o.turned, in, (size_t)bytes);
    return begin(p, MUI_MPI_HEADERS, request, o);
}

static int scatter(mui_mpi_port *p, const void *in, const int *counts, const int *places, void *out,
                   const int *got_counts, const int *got_places, mui_mpi_request *request)
{
    memcpy((char *)out + got_places[p->rank], (const char *)in + places[p->rank], (size_t)counts[p->rank]);
    operation o = {.kind = EXCHANGE, .step = 1, .from = in, .to = out, .counts = counts, .places = places,
                   .got_counts = got_counts, .got_places = got_places,
                   .to_reduce = (size_t)got_counts[p->rank] * (size_t)p->size};
    return begin(p, MUI_MPI_SCATTER, request, o);
}

static int share(mui_mpi_port *p, void *data, const int *counts, const int *places, mui_mpi_request *request)
{
    operation o = {.kind = EXCHANGE, .step = 1, .from = (char *)data + places[p->rank], .bytes = counts[p->rank],
                   .to = data, .got_counts = counts, .got_places = places};
    return begin(p, MUI_MPI_GATHER, request, o);
}

static int broadcast(mui_mpi_port *p, void *data, int bytes, int root, mui_mpi_request *request)
{
    return begin(p, MUI_MPI_GATHER, request, (operation){.kind = BROADCAST, .to = data, .bytes = bytes, .root = root});
}

static int send(mui_mpi_port *p, int to, const void *data, int bytes, mui_mpi_request *request)
{
    return begin(p, MUI_MPI_TALK, request, (operation){.kind = SEND, .from = data, .bytes = bytes, .root = to});
}

static int receive(mui_mpi_port *p, void *data, int room, int *from, int *bytes)
{
    int code = poll(p);
    *from = -1;
    if (code != MPI_SUCCESS || !p->heard) {
        return code;
    }
    MPI_Get_count(&p->status, MPI_BYTE, bytes);
    *bytes = *bytes < room ? *bytes : room;
    memcpy(data, p->talk, (size_t)*bytes);
    *from = p->status.MPI_SOURCE;
    p->heard = false;
    p->news = true;
    return hear(p, &p->requests[0]);
}

static int test(mui_mpi_request *request, bool *done)
{
    operation *o = (operation *)(uintptr_t)request->bits;
    int code = o != NULL ? poll(o->port) : MPI_SUCCESS;
    *done = o == NULL || o->done;
    if (o != NULL && o->done) {
        free(o);
        request->bits = 0;
    }
    return code;
}

/* In simulated time nobody looks again and again. Nor is anything slept through that came since the last time: whoever
 * calls this may not have seen it yet. */
static void idle(mui_mpi_port *p)
{
    MPI_Status status;
    int i = MPI_UNDEFINED;
    if (!p->heard && !p->news && MPI_Waitany(p->count, p->requests, &i, &status) == MPI_SUCCESS && i != MPI_UNDEFINED) {
        p->status = p->owners[i] == NULL ? status : p->status;
        p->failed = completed(p, i);
    }
    p->news = false;
}

static const mui_mpi_table table = {
    .version = MUI_MPI_TABLE_VERSION,
    .bytes = sizeof(mui_mpi_table),
    .name = "SMPI",
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
    .idle = idle,
};

__attribute__((visibility("default"))) const mui_mpi_table *muster_mpi_table(void);
const mui_mpi_table *muster_mpi_table(void)
{
    return &table;
}
