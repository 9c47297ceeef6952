/* The program: everything is behind mt_cli_main. */
#include <stdlib.h>
#include <unistd.h>

#include "train/cli.h"

/* How long threads spin for each other before they sleep. libgomp's default outlasts a time slice:
 * on a machine that has other work too, each of the hundreds of meetings a step then costs slices,
 * and a step takes ten times as long. This many turns (some tens of microseconds) still cover the
 * gaps within a step. */
static const char spin_turns[] = "4000";

/* libgomp reads its environment when it is loaded, so the program starts itself again with the
 * variable set. What the user has set stands. */
static void limit_spinning(char **argv)
{
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    if (setenv("GOMP_SPINCOUNT", spin_turns, 1) == 0) execv("/proc/self/exe", argv);
}

int main(int argc, char **argv)
{
    limit_spinning(argv);
    return mt_cli_main(argc, argv);
}
