/* What the MPI group needs of MPI, as a table of functions without any of its types: MPI_Comm and MPI_Request are other
 * types in each MPI, so this table is filled in by a plug-in compiled against one (mpi_plugin.c), loaded at run time
 * (mpi_load.c). Not for: anything that decides; that is the group's (mpi_group.h). */
#ifndef MUI_MPI_TABLE_H
#define MUI_MPI_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Changes with every change of this file. */
#define MUI_MPI_TABLE_VERSION 2u
#define MUI_MPI_TABLE_SYMBOL "muster_mpi_table"

/* A communicator and its duplicates. */
typedef struct mui_mpi_port mui_mpi_port;

/* Holds an MPI_Request. */
typedef struct mui_mpi_request {
    uint64_t bits;
} mui_mpi_request;

/* Operations of one channel match in the order in which they are started, whatever is started on others. */
typedef enum mui_mpi_channel {
    MUI_MPI_HEADERS = 0, /* descriptors of calls */
    MUI_MPI_SCATTER,     /* slices to whoever reduces them */
    MUI_MPI_GATHER,      /* reduced slices to all, and what a root has */
    MUI_MPI_TALK,        /* messages between two ranks */
    MUI_MPI_CHANNELS
} mui_mpi_channel;

/* Functions that return int return 0 or an error of MPI's, which `error` turns into text. Nothing blocks for another
 * rank but start and end. Buffers, and arrays of counts and places, stay as they are until the request is done. */
typedef struct mui_mpi_table {
    uint32_t version;  /* MUI_MPI_TABLE_VERSION */
    uint32_t bytes;    /* sizeof(mui_mpi_table) */
    const char *name;  /* "Open MPI" */
    size_t port_bytes; /* of memory that open wants, and keeps until close */
    void (*error)(int code, char *out, size_t size);
    /* Initialises MPI when nobody has. False: MPI cannot be used from here, why says so. */
    bool (*start)(char *why, size_t size);
    /* comm: an MPI_Comm *, or NULL for the world; else the Fortran communicator. False: why says so. */
    bool (*open)(mui_mpi_port *p, const void *comm, const int *fortran, int *rank, int *size, char *why, size_t room);
    /* Duplicates the communicator for a channel; the channel is there when the request is done. */
    int (*channel)(mui_mpi_port *p, mui_mpi_channel channel, mui_mpi_request *request);
    /* All channels are there: from now on their errors come back as codes. */
    int (*ready)(mui_mpi_port *p);
    /* whole: no operation is under way anywhere and the communicators can be freed; else they are left as they are, and
     * MPI is not finalised any more. */
    void (*close)(mui_mpi_port *p, bool whole);
    /* Every rank's bytes, in rank order. */
    int (*gather)(mui_mpi_port *p, const void *in, int bytes, void *out, mui_mpi_request *request);
    /* counts[r] bytes from places[r] of `in` to rank r; from rank r into got_places[r] of out. */
    int (*scatter)(mui_mpi_port *p, const void *in, const int *counts, const int *places, void *out,
                   const int *got_counts, const int *got_places, mui_mpi_request *request);
    /* In place: rank r's counts[r] bytes lie at places[r], and come there on all. */
    int (*share)(mui_mpi_port *p, void *data, const int *counts, const int *places, mui_mpi_request *request);
    int (*broadcast)(mui_mpi_port *p, void *data, int bytes, int root, mui_mpi_request *request);
    int (*send)(mui_mpi_port *p, int to, const void *data, int bytes, mui_mpi_request *request);
    /* A message that is here already, of at most `room` bytes; *from is -1 when there is none. */
    int (*receive)(mui_mpi_port *p, void *data, int room, int *from, int *bytes);
    int (*test)(mui_mpi_request *request, bool *done);
    /* Waits until something has come. NULL: nothing waits in MPI, whoever waits looks again and sleeps in between, so that
     * its patience ends. Only a simulator, which ends a program by itself when nothing can come, has it. */
    void (*idle)(mui_mpi_port *p);
} mui_mpi_table;

/* MUI_MPI_TABLE_SYMBOL of each plug-in. */
typedef const mui_mpi_table *(*mui_mpi_table_fn)(void);

#endif
