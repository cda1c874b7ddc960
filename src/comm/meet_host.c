/* Rank 0's side of a meeting: it waits for the others, checks that they belong together, and hands out the region. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/os.h"
#include "comm/meet.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_GUESTS (2 * MUI_MAX_RANKS) /* connections at a time, those that have not spoken yet included */
#define BIND_SECONDS 5.0                /* how long an earlier rank 0 of that name may take to die */

typedef struct guest {
    int fd;    /* -1: free */
    int rank;  /* -1: has not spoken */
    int pid, pidfd;
} guest;

typedef struct host {
    const mui_meeting *m;
    int listener;
    guest guests[MOST_GUESTS];
    char contradiction[512]; /* not empty: the meeting has failed */
    bool warned;
} host;

MU_PRINTF(2, 3) static void contradict(host *h, const char *format, ...)
{
    if (h->contradiction[0] == '\0') {
        va_list args;
        va_start(args, format);
        vsnprintf(h->contradiction, sizeof(h->contradiction), format, args);
        va_end(args);
    }
}

static int open_pidfd(int pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static void dismiss(guest *w)
{
    if (w->fd >= 0) {
        close(w->fd);
    }
    if (w->pidfd >= 0) {
        close(w->pidfd);
    }
    *w = (guest){.fd = -1, .rank = -1, .pidfd = -1};
}

static guest *guest_of(host *h, int rank)
{
    for (int i = 0; i < MOST_GUESTS; i++) {
        if (h->guests[i].fd >= 0 && h->guests[i].rank == rank) {
            return &h->guests[i];
        }
    }
    return NULL;
}

static bool is_dead(int pidfd)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    return pidfd >= 0 && poll(&p, 1, 0) > 0;
}

static void admit(host *h)
{
    for (;;) {
        int fd = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            return;
        }
        int pid = 0;
        guest *place = NULL;
        for (int i = 0; i < MOST_GUESTS && place == NULL; i++) {
            place = h->guests[i].fd < 0 ? &h->guests[i] : NULL;
        }
        /* Strangers get no answer and change nothing. */
        if (place == NULL || !mui_peer_is_ours(fd, &pid)) {
            close(fd);
            continue;
        }
        *place = (guest){.fd = fd, .rank = -1, .pid = pid, .pidfd = -1};
    }
}

static void listen_to(host *h, guest *w)
{
    mui_hello hello;
    ssize_t n = recv(w->fd, &hello, sizeof(hello), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n != (ssize_t)sizeof(hello) || hello.magic != MUI_MEET_MAGIC || w->rank >= 0) {
        dismiss(w); /* it went away, or it is nobody we know */
        return;
    }
    int size = h->m->size;
    if (hello.version != MUI_MEET_VERSION) {
        contradict(h, "ranks were built with different versions of Muster (rank %d, pid %d)", hello.rank, w->pid);
    } else if (hello.size != size) {
        contradict(h, "ranks contradict each other: rank 0 (pid %d) is one of %d ranks, rank %d (pid %d) one of %d",
                   (int)getpid(), size, hello.rank, w->pid, hello.size);
    } else if (hello.rank < 1 || hello.rank >= size) {
        contradict(h, "pid %d says it is rank %d of %d", w->pid, hello.rank, size);
    } else {
        guest *other = guest_of(h, hello.rank);
        if (other != NULL && is_dead(other->pidfd)) {
            dismiss(other);
            other = NULL;
        }
        if (other != NULL) {
            contradict(h, "ranks contradict each other: pid %d and pid %d both say they are rank %d", other->pid, w->pid,
                       hello.rank);
        }
        w->pidfd = open_pidfd(w->pid);
        if (w->pidfd < 0) {
            contradict(h, "cannot watch rank %d (pid %d): %s", hello.rank, w->pid, mui_errno_text(errno));
        }
    }
    w->rank = hello.rank;
}

/* One round of waiting for connections, words and farewells. */
static void serve(host *h)
{
    struct pollfd fds[MOST_GUESTS + 1];
    fds[0] = (struct pollfd){.fd = h->listener, .events = POLLIN};
    for (int i = 0; i < MOST_GUESTS; i++) {
        fds[i + 1] = (struct pollfd){.fd = h->guests[i].fd, .events = POLLIN};
    }
    if (poll(fds, MOST_GUESTS + 1, 20) <= 0) {
        return;
    }
    /* Farewells of known ranks first: their places may be taken by restarted ones. */
    for (int known = 1; known >= 0; known--) {
        for (int i = 0; i < MOST_GUESTS; i++) {
            guest *w = &h->guests[i];
            if (w->fd >= 0 && w->fd == fds[i + 1].fd && fds[i + 1].revents != 0 && (w->rank >= 0) == (known != 0)) {
                fds[i + 1].revents = 0;
                listen_to(h, w);
            }
        }
    }
    if (fds[0].revents != 0) {
        admit(h);
    }
}

static void name_absent(host *h, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (int r = 1; r < h->m->size && used < size; r++) {
        if (guest_of(h, r) == NULL) {
            int n = snprintf(out + used, size - used, "%s%d", used > 0 ? ", " : "rank ", r);
            used += n > 0 ? (size_t)n : 0;
        }
    }
}

static bool all_here(host *h)
{
    for (int r = 1; r < h->m->size; r++) {
        if (guest_of(h, r) == NULL) {
            return false;
        }
    }
    return true;
}

static void tell_all(host *h, mu_status status, const char *text)
{
    mui_answer a = {.magic = MUI_MEET_MAGIC, .status = status};
    snprintf(a.text, sizeof(a.text), "%s", text);
    for (int i = 0; i < MOST_GUESTS; i++) {
        if (h->guests[i].fd >= 0 && h->guests[i].rank >= 0) {
            (void)mui_send_answer(h->guests[i].fd, &a, NULL, 0); /* who is gone needs none */
        }
    }
}

static mu_status wait_for_all(host *h)
{
    const mui_meeting *m = h->m;
    double began = mui_now();
    while (!all_here(h) || h->contradiction[0] != '\0') {
        if (h->contradiction[0] != '\0') {
            tell_all(h, MU_ERR_COMM, h->contradiction);
            return mui_fail(m->context, MU_ERR_COMM, "%s", h->contradiction);
        }
        serve(h);
        double waited = mui_now() - began;
        char absent[300], text[512];
        if (waited >= m->options->timeout_seconds && !all_here(h)) {
            name_absent(h, absent, sizeof(absent));
            snprintf(text, sizeof(text), "rank 0 waited %.1f s for the other ranks of group `%.64s`: %s never came",
                     waited, m->name, absent);
            tell_all(h, MU_ERR_TIMEOUT, text);
            return mui_fail(m->context, MU_ERR_TIMEOUT, "%s", text);
        }
        if (waited >= m->options->warn_seconds && !h->warned) {
            h->warned = true;
            name_absent(h, absent, sizeof(absent));
            mui_log(m->context, MU_LOG_WARN, "waiting for %.1f s for the other ranks of group `%s`: missing %s", waited,
                    m->name, absent);
        }
    }
    return MU_OK;
}

static mu_status open_listener(host *h)
{
    const mui_meeting *m = h->m;
    struct sockaddr_un address;
    unsigned length;
    h->listener = mui_meet_socket(m->name, &address, &length);
    if (h->listener < 0) {
        return mui_fail(m->context, MU_ERR_IO, "socket: %s", mui_errno_text(errno));
    }
    double patience = m->options->timeout_seconds < BIND_SECONDS ? m->options->timeout_seconds : BIND_SECONDS;
    for (double began = mui_now(); bind(h->listener, (struct sockaddr *)&address, length) != 0;) {
        if (errno != EADDRINUSE || mui_now() - began > patience) {
            return mui_fail(m->context, errno == EADDRINUSE ? MU_ERR_COMM : MU_ERR_IO,
                            errno == EADDRINUSE ? "another process is rank 0 of group `%s`: %s" : "group `%s`: bind: %s",
                            m->name, mui_errno_text(errno));
        }
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    if (listen(h->listener, MOST_GUESTS) != 0) {
        return mui_fail(m->context, MU_ERR_IO, "group `%s`: listen: %s", m->name, mui_errno_text(errno));
    }
    return MU_OK;
}

static mu_status hand_out(host *h, mui_region *region, int *pidfds)
{
    const mui_meeting *m = h->m;
    int fds[MUI_MAX_RANKS + 1];
    fds[1] = open_pidfd((int)getpid());
    if (fds[1] < 0) {
        return mui_fail(m->context, MU_ERR_IO, "pidfd_open: %s", mui_errno_text(errno));
    }
    mu_status s = mui_region_create(region, m->context, m->size, m->options->arena_bytes);
    if (s == MU_OK) {
        mui_answer a = {.magic = MUI_MEET_MAGIC, .status = MU_OK};
        fds[0] = region->fd;
        region->control->ranks[0].pid = (int32_t)getpid();
        for (int r = 1; r < m->size; r++) {
            fds[r + 1] = guest_of(h, r)->pidfd;
            region->control->ranks[r].pid = guest_of(h, r)->pid; /* a rank that dies before it joins has a name too */
        }
        pidfds[0] = -1;
        for (int r = 1; r < m->size; r++) {
            guest *w = guest_of(h, r);
            (void)mui_send_answer(w->fd, &a, fds, m->size + 1); /* a rank that is gone is found by its pidfd */
            pidfds[r] = w->pidfd;
        }
        for (int r = 1; r < m->size; r++) {
            guest_of(h, r)->pidfd = -1; /* kept */
        }
    } else {
        tell_all(h, s, mu_context_message(m->context));
    }
    close(fds[1]);
    return s;
}

mu_status mui_meet_as_host(const mui_meeting *m, mui_region *region, int *pidfds)
{
    host *h = mui_calloc(m->context, 1, sizeof(*h));
    if (h == NULL) {
        return MU_ERR_NOMEM;
    }
    h->m = m;
    for (int i = 0; i < MOST_GUESTS; i++) {
        h->guests[i] = (guest){.fd = -1, .rank = -1, .pidfd = -1};
    }
    mu_status s = open_listener(h);
    if (s == MU_OK) {
        s = wait_for_all(h);
    }
    /* Closed before anyone goes on, so that the name is free for the next group made under it. */
    if (h->listener >= 0) {
        close(h->listener);
    }
    if (s == MU_OK) {
        s = hand_out(h, region, pidfds);
    }
    for (int i = 0; i < MOST_GUESTS; i++) {
        dismiss(&h->guests[i]);
    }
    mui_free(m->context, h);
    return s;
}
