/* Signals that ask a run to stop. See stop.h. */
#include "stop.h"

#include <signal.h>
#include <stddef.h>

const int stop_signals[STOP_SIGNALS] = {SIGTERM, SIGINT, SIGUSR1};

static volatile sig_atomic_t asked;
static mu_context *volatile context;

static void on_signal(int number)
{
    asked = number;
    if (number == SIGTERM) {
        mu_context_warn_soon(context);
    }
}

void stop_listen(mu_context *c, bool saves)
{
    context = c;
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_RESTART | (saves ? 0 : (int)SA_RESETHAND)},
              NULL);
    if (saves) {
        sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_RESTART}, NULL);
        sigaction(SIGINT, &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_RESTART | (int)SA_RESETHAND}, NULL);
    }
}

void stop_forget_context(void)
{
    context = NULL;
}

int stop_asked(void)
{
    return asked;
}
