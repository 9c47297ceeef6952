/* The program: everything is behind mt_cli_main. */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "train/cli.h"

/* The first files opened would take the place of standard ones that are closed, and what is printed
 * would land in them. What stands in fails as a closed one does: neither reads nor writes. */
static void hold_standard_files(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) != fd) return;
}

/* The usual limit is for programs that use select(): 1024, where rank 0 has a connection to each
 * other one, and a checkpoint a file of each. */
static void allow_files(void)
{
    const rlim_t wanted = 1 << 16;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
    limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/* How long threads spin for each other before they sleep. libgomp's default outlasts a time slice:
 * on a machine that has other work too, each of the hundreds of meetings a step then costs slices,
 * and a step takes ten times as long. This many turns (some tens of microseconds) still cover the
 * gaps within a step. */
static const char spin_turns[] = "4000";

/* libgomp reads its environment when it is loaded, so the program starts itself again with the
 * variable set. What the user has set stands. */
static void limit_spinning(char **argv)
{
    const char *preloaded = getenv("LD_PRELOAD"); /* valgrind's, which is /proc/self/exe */
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    if (preloaded && strstr(preloaded, "vgpreload")) return;
    if (setenv("GOMP_SPINCOUNT", spin_turns, 1) == 0) execv("/proc/self/exe", argv);
}

int main(int argc, char **argv)
{
    hold_standard_files();
    allow_files();
    signal(SIGXFSZ, SIG_IGN); /* a write past the limit of files then fails, as on a full disk */
    limit_spinning(argv);
    return mt_cli_main(argc, argv);
}
