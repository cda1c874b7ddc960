/* The side of every rank but 0 in a meeting. */
#define _GNU_SOURCE
#include "base/os.h"
#include "comm/meet.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A connection to rank 0, -1 when nobody listens yet, -2 with an error raised. */
static int call_on_host(const mui_meeting *m)
{
    struct sockaddr_un address;
    unsigned length;
    int fd = mui_meet_socket(m->name, &address, &length);
    if (fd < 0) {
        mui_fail(m->context, MU_ERR_IO, "socket: %s", mui_errno_text(errno));
        return -2;
    }
    if (connect(fd, (struct sockaddr *)&address, length) != 0) {
        int e = errno;
        close(fd);
        if (e == ECONNREFUSED || e == EAGAIN || e == EINTR || e == ENOENT) {
            return -1;
        }
        mui_fail(m->context, MU_ERR_IO, "group `%s`: connect: %s", m->name, mui_errno_text(e));
        return -2;
    }
    int pid = 0;
    if (!mui_peer_is_ours(fd, &pid)) {
        close(fd);
        mui_fail(m->context, MU_ERR_COMM, "group `%s`: its socket belongs to another user", m->name);
        return -2;
    }
    mui_hello hello = {.magic = MUI_MEET_MAGIC, .version = MUI_MEET_VERSION, .rank = m->rank, .size = m->size};
    if (send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != (ssize_t)sizeof(hello)) {
        close(fd);
        return -1; /* it went away: perhaps another comes */
    }
    return fd;
}

static mu_status out_of_time(const mui_meeting *m, double waited, bool connected)
{
    if (connected) {
        return mui_fail(m->context, MU_ERR_TIMEOUT,
                        "rank %d waited %.1f s for group `%s`: rank 0 came, but still waits for other ranks", m->rank,
                        waited, m->name);
    }
    return mui_fail(m->context, MU_ERR_TIMEOUT, "rank %d waited %.1f s for group `%s`: rank 0 never came", m->rank,
                    waited, m->name);
}

/* fds gets the memfd and size pidfds. */
static mu_status wait_for_answer(const mui_meeting *m, mui_answer *a, int *fds)
{
    double began = mui_now();
    int fd = -1;
    bool warned = false;
    for (;;) {
        double waited = mui_now() - began;
        if (fd < 0) {
            fd = call_on_host(m);
            if (fd == -2) {
                return mu_context_status(m->context);
            }
        }
        /* Rank 0 has the better message, so it gets a little more time to give it. */
        if (waited >= m->options->timeout_seconds + (fd >= 0 ? 1.0 : 0.0)) {
            if (fd >= 0) {
                close(fd);
            }
            return out_of_time(m, waited, fd >= 0);
        }
        if (waited >= m->options->warn_seconds && !warned) {
            warned = true;
            mui_log(m->context, MU_LOG_WARN, "waiting for %.1f s for group `%s`: %s", waited, m->name,
                    fd >= 0 ? "rank 0 still waits for other ranks" : "missing rank 0");
        }
        if (fd < 0) {
            nanosleep(&(struct timespec){.tv_nsec = waited < 0.1 ? 1000000 : 10000000}, NULL);
            continue;
        }
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 20) > 0) {
            bool answered = mui_receive_answer(fd, a, fds, m->size + 1);
            close(fd);
            fd = -1;
            if (answered) {
                return MU_OK;
            }
            /* Rank 0 died, or this was the socket of an earlier meeting under the name: try again. */
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    }
}

mu_status mui_meet_as_guest(const mui_meeting *m, mui_region *region, int *pidfds)
{
    mui_answer a = {0};
    int fds[MUI_MAX_RANKS + 1];
    mu_status s = wait_for_answer(m, &a, fds);
    if (s != MU_OK) {
        return s;
    }
    if (a.status != MU_OK) {
        bool known = a.status < 0 && a.status >= MU_ERR_INTERNAL;
        return mui_fail(m->context, known ? (mu_status)a.status : MU_ERR_COMM, "%s", a.text);
    }
    s = mui_region_map(region, m->context, m->size, fds[0]);
    for (int r = 0; r < m->size; r++) {
        pidfds[r] = fds[r + 1];
        if (r == m->rank || s != MU_OK) {
            close(pidfds[r]);
            pidfds[r] = -1;
        }
    }
    return s;
}
