/* The one piece of state that has to be global: a signal handler has nowhere else to look. */
#include "train/signals.h"

#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static volatile sig_atomic_t pending;

/* The last files and directories that were begun; the name may be another's by now. */
enum { BEGUN = 32, NAME = 4096 };
static struct {
    char path[NAME];
    struct stat file;
    volatile sig_atomic_t there;
} begun[BEGUN];
static int begun_count;

void mt_signals_begun(const char *path)
{
    const int i = begun_count++ % BEGUN;
    begun[i].there = 0;
    if (strlen(path) >= NAME || lstat(path, &begun[i].file) != 0) return;
    strcpy(begun[i].path, path);
    begun[i].there = 1;
}

static void remove_begun(int (*remove_one)(const char *path))
{
    for (int i = 0; i < BEGUN; i++) {
        struct stat now;
        if (begun[i].there && lstat(begun[i].path, &now) == 0 &&
            now.st_dev == begun[i].file.st_dev && now.st_ino == begun[i].file.st_ino)
            remove_one(begun[i].path);
    }
}

static void clean_up(int number)
{
    remove_begun(unlink);
    remove_begun(rmdir); /* of directories, those that are empty now */
    raise(number);       /* which is as it was when the program began */
}

void mt_signals_clean_up(void)
{
    static const int numbers[] = { SIGTERM, SIGINT, SIGHUP };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction action = { .sa_handler = clean_up, .sa_flags = SA_RESETHAND }, old;
        sigemptyset(&action.sa_mask);
        if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL)
            sigaction(numbers[i], &action, NULL);
    }
}

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
