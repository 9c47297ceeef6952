/* Children of one host, started and ended together. */
#include "train/supervise.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"
#include "dist/host.h"

enum { TICK_NS = 200000000, CANNOT_START = 127, SIGNALLED = 128 };

static const double after_first_s = 1; /* for the others, where rank 0 has spoken for all */

/* What is passed on to every child. */
static const int passed_on[] = { SIGTERM, SIGUSR1, SIGINT, SIGHUP };

typedef struct family {
    int count, living, failed; /* failed: rank of the first; -1 */
    int code;                  /* its exit code */
    int listener, port;
    pid_t self;
    pid_t *children; /* 0: has ended */
    sigset_t before, waited;
} family;

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* In the child: a group of their own keeps the terminal's Ctrl-C from reaching them twice. */
static void become_rank(const family *f, int rank, const char *path, char *const *argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != f->self) _exit(CANNOT_START); /* it died before that */
    setpgid(0, rank ? f->children[0] : 0);
    set_number("MIXTAPE_RANK", rank);
    set_number("MIXTAPE_WORLD_SIZE", f->count);
    set_number("MIXTAPE_LOCAL_RANK", rank);
    set_number("MIXTAPE_LOCAL_WORLD_SIZE", f->count);
    char meeting[32];
    snprintf(meeting, sizeof meeting, "127.0.0.1:%d", f->port);
    setenv("MIXTAPE_RENDEZVOUS", meeting, 1);
    unsetenv("MIXTAPE_LISTENER");
    if (rank == 0) {
        int kept = dup(f->listener); /* without the mark that closes it in execv */
        if (kept >= 0) set_number("MIXTAPE_LISTENER", kept);
    }
    sigprocmask(SIG_SETMASK, &f->before, NULL);
    execvp(path, argv);
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    _exit(CANNOT_START);
}

static mt_status start(family *f, const char *path, char *const *argv)
{
    for (int r = 0; r < f->count; r++) {
        pid_t child = fork();
        if (child == 0) become_rank(f, r, path, argv);
        MT_REQUIRE(child > 0, MT_EDEVICE, "rank %d of %d cannot be started: %s", r, f->count,
                   strerror(errno));
        setpgid(child, r ? f->children[0] : child);
        f->children[r] = child, f->living++;
    }
    return MT_OK;
}

static void send_all(const family *f, int number)
{
    for (int r = 0; r < f->count; r++)
        if (f->children[r]) kill(f->children[r], number);
}

/* Takes leave of those that have ended. */
static void bury(family *f)
{
    for (int r = 0; r < f->count; r++) {
        int status;
        if (!f->children[r] || waitpid(f->children[r], &status, WNOHANG) != f->children[r])
            continue;
        f->children[r] = 0, f->living--;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : SIGNALLED + WTERMSIG(status);
        if (code && f->failed < 0) f->failed = r, f->code = code;
    }
}

static void watch_over(family *f, double grace_s)
{
    const struct timespec tick = { .tv_nsec = TICK_NS };
    double since = 0;
    while (f->living > 0) {
        int number = sigtimedwait(&f->waited, NULL, &tick);
        if (number > 0 && number != SIGCHLD) send_all(f, number);
        bury(f);
        if (f->failed < 0) continue;
        if (since == 0) since = mt_now();
        bool spoken = f->failed == 0 && f->code < SIGNALLED;
        if (mt_now() - since >= (spoken ? after_first_s : grace_s)) send_all(f, SIGKILL);
    }
}

static mt_status prepare(family *f)
{
    f->children = calloc((size_t)f->count, sizeof *f->children);
    MT_REQUIRE(f->children, MT_ENOMEM, "no memory for %d ranks", f->count);
    mt_status status = mt_host_listen(&f->listener, &f->port, "127.0.0.1");
    MT_REQUIRE(status == MT_OK, status, "cannot listen for the ranks: %s", mt_error_message());
    sigemptyset(&f->waited);
    sigaddset(&f->waited, SIGCHLD);
    for (size_t i = 0; i < sizeof passed_on / sizeof *passed_on; i++)
        sigaddset(&f->waited, passed_on[i]);
    sigprocmask(SIG_BLOCK, &f->waited, &f->before);
    return MT_OK;
}

mt_status mt_supervise(int *code, int *rank, const char *path, char *const *argv, int count,
                       double grace_s)
{
    family f = { .count = count, .failed = -1, .self = getpid() };
    *code = 0, *rank = -1;
    MT_REQUIRE(count > 0, MT_EINVAL, "%d ranks to start, must be positive", count);
    fflush(NULL);
    mt_status status = prepare(&f);
    if (status == MT_OK) {
        status = start(&f, path, argv);
        close(f.listener); /* from now on rank 0's */
        if (status != MT_OK) send_all(&f, SIGKILL);
        watch_over(&f, grace_s);
        sigprocmask(SIG_SETMASK, &f.before, NULL);
    }
    free(f.children);
    *code = f.code, *rank = f.failed;
    return status;
}
