/* The one piece of state that has to be global: a signal handler has nowhere else to look. */
#include "train/signals.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static volatile sig_atomic_t pending;

static const struct {
    int number;
    const char *name;
} signals[] = { { SIGTERM, "SIGTERM" }, { SIGUSR1, "SIGUSR1" }, { SIGINT, "SIGINT" } };
enum { SIGNALS = sizeof signals / sizeof signals[0] };

static void remember(int number)
{
    if (pending) _exit(128 + number);
    pending = number;
}

void mt_signals_install(void)
{
    struct sigaction action = { .sa_handler = remember, .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i].number, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

int mt_signals_pending(void)
{
    return (int)pending;
}

const char *mt_signals_name(int signal_number)
{
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i].number == signal_number) return signals[i].name;
    return "signal";
}
