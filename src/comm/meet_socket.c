/* The socket of a meeting and the messages on it. */
#define _GNU_SOURCE
#include "comm/meet.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int mui_meet_socket(const char *name, struct sockaddr_un *address, unsigned *length)
{
    /* Sequenced packets: a message arrives whole or not at all. */
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    /* A leading zero byte: the abstract namespace. */
    int n = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "muster/%u/%s", (unsigned)getuid(), name);
    *length = (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return fd;
}

bool mui_peer_is_ours(int fd, int *pid)
{
    struct ucred who;
    socklen_t n = sizeof(who);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0 || n != sizeof(who) || who.uid != getuid()) {
        return false;
    }
    *pid = (int)who.pid;
    return true;
}

typedef union fd_space {
    char bytes[CMSG_SPACE(sizeof(int) * (MUI_MAX_RANKS + 1))];
    struct cmsghdr align;
} fd_space;

bool mui_send_answer(int fd, const mui_answer *a, const int *fds, int count)
{
    fd_space space;
    struct iovec io = {.iov_base = (void *)(uintptr_t)a, .iov_len = sizeof(*a)};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1};
    if (count > 0) {
        memset(&space, 0, sizeof(space));
        m.msg_control = space.bytes;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)count);
    }
    ssize_t n;
    do {
        n = sendmsg(fd, &m, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(*a);
}

bool mui_receive_answer(int fd, mui_answer *a, int *fds, int count)
{
    fd_space space;
    struct iovec io = {.iov_base = a, .iov_len = sizeof(*a)};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = space.bytes, .msg_controllen = sizeof(space)};
    ssize_t n;
    do {
        n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return false;
    }
    int got = 0;
    const struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        got = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    }
    bool whole = n == (ssize_t)sizeof(*a) && a->magic == MUI_MEET_MAGIC && (m.msg_flags & MSG_CTRUNC) == 0 &&
                 (a->status != MU_OK || got == count);
    for (int i = 0; i < got; i++) {
        int one;
        memcpy(&one, CMSG_DATA(c) + sizeof(int) * (size_t)i, sizeof(one));
        if (whole && a->status == MU_OK) {
            fds[i] = one;
        } else {
            close(one);
        }
    }
    if (whole) {
        a->text[sizeof(a->text) - 1] = '\0';
    }
    return whole;
}
