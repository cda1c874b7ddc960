/* What ranks print: read from their pipes, written line by line, never mixed within a line. */
#include "commands.h"
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool write_all(int fd, const char *data, size_t n)
{
    while (n > 0) {
        ssize_t k = write(fd, data, n);
        if (k < 0 && errno == EAGAIN) { /* somebody shares a terminal that does not block */
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            poll(&p, 1, 100);
            continue;
        }
        if (k < 0 && errno != EINTR) {
            return false;
        }
        data += k > 0 ? k : 0;
        n -= k > 0 ? (size_t)k : 0;
    }
    return true;
}

/* One line with its newline, or a piece of one that is too long. */
static void emit(launch *l, rank_process *p, stream *s, const char *line, size_t n)
{
    if (p->log >= 0 && (p->to_file & s->to) != 0) {
        write_all(p->log, line, n);
    }
    if ((p->to_terminal & s->to) != 0 && !l->mute[s->to]) {
        char text[RUN_LINE_BYTES + 24];
        size_t used = p->rank == 0 ? 0 : (size_t)snprintf(text, 24, "[%d] ", p->rank);
        memcpy(text + used, line, n);
        l->mute[s->to] = !write_all(s->to, text, used + n);
    }
    size_t end = n;
    while (end > 0 && (line[end - 1] == '\n' || line[end - 1] == '\r')) {
        end--;
    }
    if (s->to == 2 && end > 0) {
        end = end < sizeof(p->last) - 1 ? end : sizeof(p->last) - 1;
        memcpy(p->last, line, end);
        p->last[end] = '\0';
    }
}

static void emit_lines(launch *l, rank_process *p, stream *s, bool ended)
{
    size_t from = 0;
    for (size_t i = 0; i < s->used; i++) {
        /* Rank 0's progress bars redraw themselves with carriage returns. */
        if (s->line[i] == '\n' || (s->line[i] == '\r' && p->rank == 0)) {
            emit(l, p, s, s->line + from, i + 1 - from);
            from = i + 1;
        }
    }
    memmove(s->line, s->line + from, s->used - from);
    s->used -= from;
    if (s->used > 0 && (ended || s->used >= RUN_LINE_BYTES - 1)) {
        s->line[s->used++] = '\n';
        emit(l, p, s, s->line, s->used);
        s->used = 0;
    }
}

bool run_pump(launch *l, rank_process *p, stream *s)
{
    ssize_t n = read(s->fd, s->line + s->used, RUN_LINE_BYTES - 1 - s->used);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) {
        return false;
    }
    s->used += n > 0 ? (size_t)n : 0;
    emit_lines(l, p, s, n <= 0);
    if (n <= 0) {
        close(s->fd);
        s->fd = -1;
    }
    return n > 0;
}

void run_drain(launch *l, rank_process *p)
{
    stream *both[2] = {&p->out, &p->err};
    for (int i = 0; i < 2; i++) {
        if (both[i]->fd >= 0) {
            fcntl(both[i]->fd, F_SETFL, O_NONBLOCK);
            while (both[i]->fd >= 0 && run_pump(l, p, both[i])) {
            }
            emit_lines(l, p, both[i], true);
        }
    }
}
