/* Ranks of this host as children of one process: `mixtape train --gpus N`. */
#pragma once

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Starts `path` (as execvp finds it) with argv `count` times, each with the variables that
 * dist/launch.h reads (MIXTAPE_RANK, ...; the ranks meet at a port of the loopback), and waits for
 * all of them. SIGTERM, SIGUSR1, SIGINT and SIGHUP are passed on. After the first that fails, the
 * others have grace_s seconds to end by themselves (one, where it is rank 0 and no signal has ended
 * it); then they are killed. Nobody outlives this process.
 *
 * *code is the exit code of the first that failed, 128 + N where signal N ended it, else 0; *rank
 * which it was, -1 for none. Errors are those of starting. To be called from a process of one
 * thread that has no other children. */
mt_status mt_supervise(int *code, int *rank, const char *path, char *const *argv, int count,
                       double grace_s);

#ifdef __cplusplus
}
#endif
