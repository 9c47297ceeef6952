/* The watchdog: a thread per rank that knows which collective its rank is in, and a star of TCP
 * connections to rank 0 over which they tell each other.
 *
 * It finds: a rank that died (its connection is gone), a rank that does not come to a collective
 * that another has waited in for too long, ranks that meet in different collectives. Rank 0 decides
 * and tells everyone; every rank's on_fault then learns which rank, which collective and why, and
 * ends its process. It does not depend on what moves the data. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dist/host.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_WATCH_TEXT = 512 };

typedef struct mt_watch mt_watch;

typedef struct mt_watch_options {
    int rank, world;
    double timeout_s; /* how long a rank may wait in a collective for the others */
    /* Called on the watchdog's thread, at most once; `by` is the rank that is blamed or that
     * reported the fault itself, -1 when none can be named. Not called on the rank that called
     * mt_watch_fault. Should end the process: the main thread may be stuck in a collective. But not
     * at once: a launcher that sees a rank end kills those that have not spoken yet. */
    void (*on_fault)(void *context, int by, const char *sentence);
    void *context;
} mt_watch_options;

/* A collective that was left while its data still move, on a device. */
typedef struct mt_watch_pending {
    uint64_t sequence, bytes, group;
    double waited; /* seconds for which it has been the oldest one */
    const char *op, *what;
} mt_watch_pending;

/* Asked several times a second on the watchdog's thread: the oldest collective under way, whose
 * texts live until the next call; false for none. What moves the data may have failed: then
 * `failure` is not "" any more, and it is this rank's fault. */
typedef bool (*mt_watch_poll)(void *context, mt_watch_pending *oldest, char failure[MT_WATCH_TEXT]);
/* Sets who is asked, after the start; until the watchdog stops. NULL: nobody, and nobody is being
 * asked when it returns. */
void mt_watch_set_poll(mt_watch *watch, mt_watch_poll poll, void *context);

/* Rank 0, before anyone starts: begins to listen; `address` goes to the others. */
mt_status mt_watch_listen(int *listener, char address[MT_HOST_ADDRESS]);
/* Starts the thread. Rank 0 passes its listener, which it then owns; the others -1, and wait for
 * rank 0 to answer for somewhat less than timeout_s. */
mt_status mt_watch_start(mt_watch **watch, const mt_watch_options *options, int listener,
                         const char *address);
/* Leaves: from now on this rank's end is no fault. NULL-safe. */
void mt_watch_stop(mt_watch **watch);

/* Around every collective, on the thread that makes it: one that only begins a transfer is followed
 * by mt_watch_poll from there. Ranks of one `group` (a number that its members share) must agree in
 * op and bytes. */
void mt_watch_enter(mt_watch *watch, const char *op, const char *what, uint64_t bytes,
                    uint64_t group);
void mt_watch_leave(mt_watch *watch);
/* Collectives entered so far. */
uint64_t mt_watch_sequence(const mt_watch *watch);

/* Ends everybody else: this rank has failed for this reason. Returns when rank 0 has passed it on,
 * or after a second. */
void mt_watch_fault(mt_watch *watch, const char *sentence);

#ifdef __cplusplus
}
#endif
