/* The progress bar. */
#include "progress.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define BAR_SECONDS 0.1
#define LINE_SECONDS 5.0

double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void progress_start(progress *p, bool on, int64_t epochs, int64_t steps_per_epoch, int64_t first, int64_t last)
{
    double now = seconds_now();
    bool error = isatty(STDERR_FILENO) == 1, output = !error && isatty(STDOUT_FILENO) == 1;
    *p = (progress){.on = on, .tty = error || output, .fd = output ? STDOUT_FILENO : STDERR_FILENO,
                    .out = output ? stdout : stderr, .epochs = epochs, .steps_per_epoch = steps_per_epoch,
                    .first_step = first, .last_step = last, .started = now, .shown = now};
}

double progress_seconds(const progress *p)
{
    return seconds_now() - p->started - p->paused;
}

double progress_rate(const progress *p)
{
    double seconds = progress_seconds(p);
    return seconds > 0 ? p->images / seconds : 0;
}

void progress_pause(progress *p, double seconds)
{
    p->paused += seconds;
    p->shown += seconds;
}

void progress_clear(progress *p)
{
    if (p->on && p->tty) {
        fputs("\r\033[K", p->out);
    }
}

static int terminal_width(int fd)
{
    struct winsize w;
    return ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

static void show(progress *p, int64_t step, double lr)
{
    char where[64], line[256], bar[64] = "";
    int64_t place = step + p->offset, epoch = place > 0 ? (place - 1) / p->steps_per_epoch : 0;
    int64_t done = place - epoch * p->steps_per_epoch;
    double rate = progress_rate(p), trained = (double)(step - p->first_step);
    double left = trained > 0 ? progress_seconds(p) / trained * (double)(p->last_step - step) : 0;
    double loss = p->loss_count > 0 ? p->loss_sum / (double)p->loss_count : NAN;
    if (p->epochs > 0) {
        snprintf(where, sizeof(where), "epoch %lld/%lld  step %lld/%lld", (long long)epoch + 1, (long long)p->epochs,
                 (long long)done, (long long)p->steps_per_epoch);
    } else {
        snprintf(where, sizeof(where), "step %lld/%lld", (long long)step, (long long)p->last_step);
    }
    snprintf(line, sizeof(line), "loss %.4f  lr %.4g  %.0f images/s  ETA %d:%02d", loss, lr, rate, (int)left / 60,
             (int)left % 60);
    if (!p->tty) {
        fprintf(stderr, "%s  %s\n", where, line);
        return;
    }
    int room = terminal_width(p->fd) - (int)strlen(where) - (int)strlen(line) - 8;
    int width = room > 40 ? 40 : room;
    if (width >= 8) {
        double share = p->last_step > 0 ? (double)step / (double)p->last_step : 1;
        int full = (int)(share * width);
        int n = snprintf(bar, sizeof(bar), "[");
        for (int i = 0; i < width; i++) {
            bar[n++] = i < full ? '=' : i == full ? '>' : ' ';
        }
        snprintf(bar + n, sizeof(bar) - (size_t)n, "]  ");
    }
    fprintf(p->out, "\r%s  %s%s\033[K", where, bar, line);
    fflush(p->out);
}

void progress_step(progress *p, int64_t step, double loss, int64_t images, double lr)
{
    p->images += (double)images;
    if (isfinite(loss)) {
        p->loss_sum += loss;
        p->loss_count++;
    }
    double now = seconds_now();
    if (!p->on || now - p->shown < (p->tty ? BAR_SECONDS : LINE_SECONDS)) {
        return;
    }
    show(p, step, lr);
    p->shown = now;
    p->loss_sum = 0;
    p->loss_count = 0;
}
