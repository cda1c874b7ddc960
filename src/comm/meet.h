/* How processes of one machine find each other: over an abstract unix socket, on which rank 0 hands out the memfd of
 * the shared region and a pidfd of every rank. Nothing of it has a name in any file system, so nothing is left behind
 * by whatever kills the ranks. */
#ifndef MUI_MEET_H
#define MUI_MEET_H

#include "comm/region.h"

#include <sys/socket.h>
#include <sys/un.h>

typedef struct mui_meeting {
    mu_context *context;
    const char *name; /* what the ranks agreed on */
    int rank, size;
    const mu_group_options *options; /* settled */
} mui_meeting;

/* Rank 0 is the host, the others are guests. Blocks until all ranks have come. On success *region is mapped and
 * pidfds[r] is open for each rank but the own one, which is -1; both are the caller's. */
mu_status mui_meet_as_host(const mui_meeting *m, mui_region *region, int *pidfds) MU_MUST_USE;
mu_status mui_meet_as_guest(const mui_meeting *m, mui_region *region, int *pidfds) MU_MUST_USE;

/* meet_socket.c: what both sides need. */
typedef struct mui_hello {
    uint32_t magic, version;
    int32_t rank, size;
} mui_hello;
typedef struct mui_answer {
    uint32_t magic;
    int32_t status; /* MU_OK: the message carries the memfd and size pidfds */
    char text[512];
} mui_answer;
#define MUI_MEET_MAGIC 0x4d555354u
#define MUI_MEET_VERSION 2u

int mui_meet_socket(const char *name, struct sockaddr_un *address, unsigned *length); /* -1: errno */
/* Whether the process at the other end runs as the same user. */
bool mui_peer_is_ours(int fd, int *pid);
/* Sends or receives an answer with its descriptors, which become the receiver's; false: the other side is gone or the
 * message is not one of ours. */
bool mui_send_answer(int fd, const mui_answer *a, const int *fds, int count);
bool mui_receive_answer(int fd, mui_answer *a, int *fds, int count);

#endif
