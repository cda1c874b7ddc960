/* A group of ranks over MPI.
 *
 * Every collective is a call with a number, as in local.h. A rank posts a call by starting to gather the descriptors of
 * all ranks; when they are there, every rank comes to the same verdict from them, and only then do bytes move, in rounds
 * of at most MUI_MPI_ROUND_BYTES: slices go to whoever reduces them, are reduced there in rank order by the same loops
 * as everywhere, and are shared with all. So results are bit-identical on all ranks and equal to shared memory's, and a
 * contradiction never touches data. Rounds of several calls are under way together, on every rank in the same order.
 *
 * MPI reads and writes only memory of the group: its own, or mu_group_alloc's; other memory is copied. When a group
 * breaks in the middle of a round, that memory is left to MPI for good, and nothing of the program's can be written to
 * any more.
 *
 * Nothing here blocks in MPI but opening and closing: start, test and wait make progress, from the thread of the context
 * alone. What ranks have to say to each other beyond calls (talk): HERE (I wait, too), LEFT (I have closed the group),
 * ABORT (it is broken, and why). */
#ifndef MUI_MPI_GROUP_H
#define MUI_MPI_GROUP_H

#include "comm/mpi_table.h"
#include "comm/verdict.h"

#define MUI_MPI_ROUND_BYTES ((size_t)8 << 20) /* of each rank's data; the least a test may set is 64 */
#define MUI_MPI_ROUNDS 4                      /* under way together */
#define MUI_MPI_GATHERS 64                    /* descriptors under way together; later calls queue in their rank */
#define MUI_MPI_SEEN_BYTES 240

/* What is gathered for a call. */
typedef struct mui_mpi_header {
    mui_slot slot;              /* its hand-over words are not used: MPI hands over */
    uint32_t failed;            /* MUI_ALLOC: the rank has no memory */
    char seen[MUI_MPI_SEEN_BYTES]; /* what the rank was doing when it posted */
} mui_mpi_header;

typedef enum mui_mpi_state {
    MUI_MPI_QUEUED = 0, /* too many are being gathered */
    MUI_MPI_POSTED,     /* being gathered */
    MUI_MPI_MOVING,     /* all agree, data moves in rounds */
    MUI_MPI_FINISHED,   /* waiting for earlier calls */
    MUI_MPI_REPORTABLE  /* out of the queue, status is final */
} mui_mpi_state;

typedef struct mui_mpi_call {
    mu_request base;
    struct mui_mpi_call *next;     /* in the queue, or in the free list */
    struct mui_mpi_call *next_all; /* of all that were ever allocated */
    mui_call_spec spec;            /* its identity pointer is not used */
    mui_identity identity;
    bool identified;
    bool no_memory;                /* MUI_ALLOC: of this rank, then of any */
    mui_mpi_state state;
    mu_status status;
    double polled;                 /* when a test first found it undone; 0: not yet */
    mui_verdict verdict;
    bool gathering;                /* request is under way */
    mui_mpi_request request;
    mui_mpi_header *own;           /* one, and one of each rank behind it */
    uint64_t rounds, started, ended;
    uint64_t slice_rounds;         /* the first ones: an all-reduce's scattered part, */
    size_t slice_bytes;            /* of which each rank gets so much, its own */
} mui_mpi_call;

typedef enum mui_mpi_round_state {
    MUI_ROUND_FREE = 0,
    MUI_ROUND_SCATTERING,
    MUI_ROUND_TO_SHARE, /* waiting for its turn on the channel */
    MUI_ROUND_SHARING
} mui_mpi_round_state;

typedef struct mui_mpi_round {
    mui_mpi_round_state state;
    mui_mpi_call *call;
    uint64_t index;          /* within the call */
    mui_mpi_request request; /* while scattering or sharing */
    int *counts, *places, *got_counts, *got_places; /* one of each per rank */
    char *scratch, *stage;   /* what comes from all ranks; a copy of what is not the group's memory, behind it */
    char *base;              /* what MPI works on: the stage, or the group's own memory */
    size_t scratch_bytes;    /* of both */
} mui_mpi_round;

/* -- talk ---------------------------------------------------------------------------------------------------------- */
enum { MUI_TALK_HERE = 1, MUI_TALK_LEFT, MUI_TALK_ABORT };

typedef struct mui_mpi_message {
    uint32_t kind;
    int32_t status;
    uint64_t calls, completed; /* of the sender: how many it has started, and done */
    char text[MUI_BROKEN_BYTES];
} mui_mpi_message;

typedef struct mui_mpi_here {
    uint32_t kind;
    int32_t status;
    uint64_t calls, completed;
    char text[MUI_MPI_SEEN_BYTES];
} mui_mpi_here; /* the beginning of a message */

/* What is known of another rank by its messages. */
typedef struct mui_mpi_peer {
    uint64_t calls, completed;
    char seen[MUI_MPI_SEEN_BYTES];
    bool left, aborted;
    uint64_t told;             /* number of the call of ours it was told of last, + 1 */
    bool here_busy, last_busy; /* requests under way */
    mui_mpi_request here_request, last_request;
    mui_mpi_here here;
} mui_mpi_peer;

/* Memory of mu_group_alloc. */
typedef struct mui_mpi_block {
    struct mui_mpi_block *next;
    char *data;
    size_t bytes;
    uint64_t offset; /* of a heap that all ranks would have, to name it by */
} mui_mpi_block;

/* Somebody has broken the group: calls that all ranks had brought still complete, for a moment. */
typedef struct mui_mpi_doom {
    mu_status status; /* MU_OK: nobody has */
    uint64_t completed;
    double since;
    char text[MUI_BROKEN_BYTES];
} mui_mpi_doom;

typedef struct mui_mpi {
    mu_group base;
    const mui_mpi_table *mpi;
    mui_mpi_port *port;
    size_t memory_bytes, memory_used; /* of mu_group_alloc */
    double clock_offset;              /* of this machine's clock from rank 0's */
    bool oversubscribed;              /* more ranks on this one's cores than cores */
    bool leaving;                     /* LEFT or ABORT was sent */

    mui_mpi_call *first, *last;       /* the queue, in order of number, */
    mui_mpi_call *first_queued;       /* and from where on calls are not posted yet */
    mui_mpi_call *free_calls, *all_calls;
    uint64_t posted, completed;       /* calls */
    mui_mpi_header *headers;          /* of the last call all ranks had posted, from headers[1] on in rank order, */
    uint64_t headers_number;          /* its number + 1; 0: none yet */

    size_t round_bytes;               /* MUI_MPI_ROUND_BYTES; the same on all ranks */
    mui_mpi_round rounds[MUI_MPI_ROUNDS];
    uint64_t rounds_started, rounds_shared; /* shared: started on their channel, in order of start */
    size_t scratch_wanted;
    const void **in;                  /* room for a pointer per rank */

    mui_mpi_block *blocks;
    uint64_t heap_end;

    mui_mpi_peer *peers;              /* one per rank */
    mui_mpi_message heard, farewell;  /* being received; LEFT or ABORT, being sent */
    mui_mpi_doom doom;

    uint64_t moves;                   /* counts progress, to tell waiting from working */
    double last_look, last_listen;    /* seconds */
    uint64_t warned;                  /* number of the call somebody is late for, + 1; 0: nobody is */
    double warned_since;
    char warned_who[80];
    mui_board phase;
    mui_beacon beacon;
    mui_beacon_link beacon_link;
} mui_mpi;

/* mpi_open.c: see mu_group_from_mpi_comm; both NULL: the world. */
mu_group *mui_mpi_open(mu_context *c, const void *comm, const int *fortran, const mu_group_options *settled);
/* whole: all ranks have left it in good order. */
void mui_mpi_release(mui_mpi *g, bool whole);

/* mpi_group.c */
extern const mui_group_ops mui_mpi_ops;

/* mpi_call.c */
mu_status mui_mpi_reserve(mui_mpi *g, size_t count) MU_MUST_USE;
mui_mpi_call *mui_mpi_start(mui_mpi *g, const mui_call_spec *spec); /* NULL with an error raised */
bool mui_mpi_progress(mui_mpi *g);                            /* true when a call moved */
mu_status mui_mpi_run(mui_mpi *g, const mui_call_spec *spec); /* start and wait */
/* The same for MUI_ALLOC: *no_memory says whether this rank has none, and then whether any has none. */
mu_status mui_mpi_run_alloc(mui_mpi *g, const mui_call_spec *spec, bool *no_memory);
mu_status mui_mpi_test(mu_request *r, bool *done);
mu_status mui_mpi_wait(mu_request *r);
void mui_mpi_fail_all(mui_mpi *g, mu_status status);
bool mui_mpi_drained(mui_mpi *g); /* nothing of a broken group is under way any more; looks again */
void mui_mpi_pause(const mui_mpi *g, double waited); /* one turn of waiting, after so many seconds of it */
void mui_mpi_calls_free(mui_mpi *g);
/* An error of MPI's own: breaks the group. */
void mui_mpi_failed(mui_mpi *g, const char *what, int code);

/* mpi_rounds.c */
void mui_mpi_plan(const mui_mpi *g, mui_mpi_call *call); /* how many rounds */
bool mui_mpi_advance_rounds(mui_mpi *g);                      /* of those under way */
bool mui_mpi_start_rounds(mui_mpi *g, mui_mpi_call *call);    /* true when all of them are started */

/* mpi_talk.c */
void mui_mpi_listen(mui_mpi *g);
void mui_mpi_say_here(mui_mpi *g, int to);
/* Breaks the group here, and says so to all. The error is raised by the call that reports it. */
void mui_mpi_give_up(mui_mpi *g, mu_status status, const char *text);
void mui_mpi_check_doom(mui_mpi *g);
/* Says LEFT, unless broken, and waits until the others have left or broken; true: all have left, and all is done. */
bool mui_mpi_leave(mui_mpi *g);

/* mpi_missing.c: leavers, aborts, time. False: broken now. */
bool mui_mpi_look(mui_mpi *g, double since);
void mui_mpi_stall_over(mui_mpi *g);

#endif
