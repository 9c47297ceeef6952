/* The watchdog. Rank 0's thread listens to all and judges; the other threads report and obey. */
#include "dist/watch.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"

enum { TICK_MS = 100, SLOW_S = 5, WORD = 64, NOBODY = -1 };

typedef enum kind { STATE, FAULT, BYE } kind;

/* Where a rank is. */
typedef struct place {
    uint64_t sequence; /* of the collective it is in, or was in last */
    uint64_t bytes, group;
    double waited; /* seconds in it */
    int32_t waiting;
    char op[WORD], what[WORD];
} place;

/* What goes over the wire, whole; ranks are of one build. */
typedef struct message {
    int32_t kind, rank;
    place place;
    char text[MT_WATCH_TEXT];
} message;

typedef struct peer {
    int socket; /* -1: not connected */
    bool came, left;
    double heard; /* when last; its watchdog speaks at every tick */
    place place;
} peer;

struct mt_watch {
    mt_watch_options options;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t over;
    place here;
    double entered, started;
    bool stopping, faulted, reported; /* reported: this rank's own fault is known to rank 0 */
    char said[MT_WATCH_TEXT];         /* rank 0: its own fault, on the way to the thread */
    bool led;                         /* rank 0 has not left yet */
    int listener, upward;             /* sockets; upward: to rank 0 */
    int wake;                         /* can be read when the thread is to look up, or to end */
    peer *peers;                      /* rank 0: of every rank; and whom it polls */
    struct pollfd *polled_sockets;
    int *polled_ranks;
    int *firsts; /* a hash table of them, by the collective that they wait in */
    size_t first_count;
    pthread_mutex_t asking; /* of what follows, and while it is asked */
    mt_watch_poll poll;
    void *polled; /* its context */
};

/* ---- sockets -----------------------------------------------------------------------------------
 */

mt_status mt_watch_listen(int *listener, char address[MT_HOST_ADDRESS])
{
    int port = 0;
    mt_host here;
    mt_status status = mt_host_listen(listener, &port, "");
    MT_REQUIRE(status == MT_OK, status, "watchdog: cannot listen: %s", mt_error_message());
    mt_host_here(&here);
    mt_host_address(address, here.name, port, here.boot);
    return MT_OK;
}

/* Whole or not at all: whoever stands still makes no room, and must not be waited for. */
static bool send_message(int to, const message *m)
{
    struct pollfd room = { .fd = to, .events = POLLOUT };
    int ready = 0;
    if (to < 0) return false;
    do ready = poll(&room, 1, TICK_MS);
    while (ready < 0 && errno == EINTR);
    return ready > 0 && send(to, m, sizeof *m, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *m;
}

static bool receive_message(int from, message *m)
{
    if (recv(from, m, sizeof *m, MSG_WAITALL) != (ssize_t)sizeof *m) return false;
    m->text[sizeof m->text - 1] = m->place.op[WORD - 1] = m->place.what[WORD - 1] = '\0';
    return true;
}

/* ---- judging: rank 0 ---------------------------------------------------------------------------
 */

/* Where this rank is: in the oldest collective whose data are on their way, else where its host is.
 */
static place place_here(mt_watch *w, char failure[MT_WATCH_TEXT])
{
    mt_watch_pending oldest;
    *failure = '\0';
    pthread_mutex_lock(&w->lock);
    place p = w->here;
    if (p.waiting) p.waited = mt_now() - w->entered;
    pthread_mutex_unlock(&w->lock);
    pthread_mutex_lock(&w->asking);
    bool pending = w->poll && w->poll(w->polled, &oldest, failure);
    pthread_mutex_unlock(&w->asking);
    if (!pending) return p;
    p = (place){ .sequence = oldest.sequence,
                 .bytes = oldest.bytes,
                 .group = oldest.group,
                 .waited = oldest.waited,
                 .waiting = true };
    snprintf(p.op, WORD, "%s", oldest.op);
    snprintf(p.what, WORD, "%s", oldest.what);
    return p;
}

static void describe(char text[MT_WATCH_TEXT / 4], const place *p)
{
    snprintf(text, MT_WATCH_TEXT / 4, "%.32s #%llu%s%.40s%s", p->op,
             (unsigned long long)p->sequence, *p->what ? " (" : "", p->what, *p->what ? ")" : "");
}

/* Everyone hears of it, then this rank. */
static void declare(mt_watch *w, int by, const char *sentence)
{
    message m = { .kind = FAULT, .rank = by };
    snprintf(m.text, sizeof m.text, "%s", sentence);
    for (int r = 1; w->peers && r < w->options.world; r++)
        if (!w->peers[r].left) send_message(w->peers[r].socket, &m);
    pthread_mutex_lock(&w->lock);
    bool own = w->reported, first = !w->faulted;
    w->faulted = true;
    pthread_cond_broadcast(&w->over);
    pthread_mutex_unlock(&w->lock);
    if (first && !own && w->options.on_fault) w->options.on_fault(w->options.context, by, m.text);
}

/* Names the ranks that have not come to `late`'s collective; the first of them, or NOBODY. */
static int name_missing(const mt_watch *w, const place *late, char *text, size_t size)
{
    int first = NOBODY;
    size_t used = 0;
    for (int r = 0; r < w->options.world && used < size; r++) {
        const peer *p = &w->peers[r];
        if (p->left || p->place.sequence >= late->sequence) continue;
        char at[MT_WATCH_TEXT / 4] = "";
        if (p->place.sequence) describe(at, &p->place);
        used += (size_t)snprintf(text + used, size - used, "%srank %d, %s%s",
                                 first == NOBODY ? "" : "; ", r,
                                 !p->came             ? "which never arrived"
                                 : !p->place.sequence ? "which has made none"
                                 : p->place.waiting   ? "which is in "
                                                      : "which has left ",
                                 at);
        if (first == NOBODY) first = r;
    }
    return first;
}

/* All are in the collective, as far as is known: a rank whose process stands still. */
static int name_silent(const mt_watch *w, char *text, size_t size)
{
    for (int r = 1; r < w->options.world; r++) {
        const peer *p = &w->peers[r];
        double silent = mt_now() - p->heard;
        if (!p->came || p->left || silent < w->options.timeout_s / 2) continue;
        snprintf(text, size, "rank %d, which has said nothing for %.1f s", r, silent);
        return r;
    }
    snprintf(text, size, "data that does not come, though every rank is there");
    return NOBODY;
}

/* The first rank that waits in a collective of this number and group; `r`, if none before it. */
static int first_there(mt_watch *w, int r)
{
    const place *p = &w->peers[r].place;
    uint64_t hash = (p->sequence * 0x9e3779b97f4a7c15u ^ p->group) * 0xff51afd7ed558ccdu;
    for (size_t at = (size_t)(hash >> 32);; at++) {
        int *first = &w->firsts[at & (w->first_count - 1)];
        if (*first == NOBODY) *first = r;
        const place *q = &w->peers[*first].place;
        if (p->sequence == q->sequence && p->group == q->group) return *first;
    }
}

/* Ranks of one group in different collectives of one number: who differs from any of them differs
 * from the first, or another one did before. */
static bool judge_pair(mt_watch *w, int r)
{
    if (!w->peers[r].place.waiting) return false;
    int first = first_there(w, r);
    const place *p = &w->peers[first].place, *q = &w->peers[r].place;
    if (!strcmp(p->op, q->op) && p->bytes == q->bytes) return false;
    char left[MT_WATCH_TEXT / 4], right[MT_WATCH_TEXT / 4], text[MT_WATCH_TEXT];
    describe(left, p);
    describe(right, q);
    snprintf(text, sizeof text,
             "ranks do not do the same: rank %d is in %s of %llu bytes, rank %d in %s of %llu",
             first, left, (unsigned long long)p->bytes, r, right, (unsigned long long)q->bytes);
    declare(w, r, text);
    return true;
}

static void judge(mt_watch *w)
{
    char failure[MT_WATCH_TEXT];
    w->peers[0].place = place_here(w, failure);
    if (*failure) {
        declare(w, 0, failure);
        return;
    }
    for (size_t i = 0; i < w->first_count; i++) w->firsts[i] = NOBODY;
    for (int r = 0; r < w->options.world; r++) {
        const place *p = &w->peers[r].place;
        if (judge_pair(w, r)) return;
        if (!p->waiting || p->waited < w->options.timeout_s) continue;
        char at[MT_WATCH_TEXT / 4], missing[MT_WATCH_TEXT / 2] = "", text[MT_WATCH_TEXT];
        describe(at, p);
        int by = name_missing(w, p, missing, sizeof missing);
        if (by == NOBODY) by = name_silent(w, missing, sizeof missing);
        snprintf(text, sizeof text, "%s: rank %d has waited %.1f s for %s", at, r, p->waited,
                 missing);
        declare(w, by, text);
        return;
    }
    if (mt_now() - w->started < w->options.timeout_s) return;
    for (int r = 1; r < w->options.world; r++)
        if (!w->peers[r].came) {
            char text[MT_WATCH_TEXT];
            snprintf(text, sizeof text, "rank %d of %d never arrived, after %.1f s", r,
                     w->options.world, w->options.timeout_s);
            declare(w, r, text);
            return;
        }
}

static void lost(mt_watch *w, int r)
{
    peer *p = &w->peers[r];
    char at[MT_WATCH_TEXT / 4], text[MT_WATCH_TEXT];
    close(p->socket);
    p->socket = -1;
    if (p->left) return;
    describe(at, &p->place);
    snprintf(text, sizeof text, "rank %d is gone: its process has ended without a word, %s %s", r,
             p->place.sequence ? (p->place.waiting ? "in" : "after") : "before any collective",
             p->place.sequence ? at : "");
    p->left = true;
    declare(w, r, text);
}

/* One of those at the door; false: none, and errno. */
static bool accept_peer(mt_watch *w)
{
    message m;
    int s = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0) return false;
    struct timeval patience = { .tv_sec = 1 };
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (!receive_message(s, &m) || m.rank <= 0 || m.rank >= w->options.world ||
        w->peers[m.rank].came) {
        close(s);
        return true;
    }
    w->peers[m.rank] = (peer){ .socket = s, .came = true, .heard = mt_now(), .place = m.place };
    return true;
}

static void blame_door(mt_watch *w)
{
    char text[MT_WATCH_TEXT];
    bool full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    snprintf(text, sizeof text, "rank 0 cannot take in the others: %s", strerror(errno));
    if (full) declare(w, 0, text);
}

static void hear(mt_watch *w, int r)
{
    message m;
    if (!receive_message(w->peers[r].socket, &m)) {
        lost(w, r);
        return;
    }
    w->peers[r].place = m.place;
    w->peers[r].heard = mt_now();
    if (m.kind == BYE) w->peers[r].left = true;
    if (m.kind == FAULT) declare(w, r, m.text);
}

/* Those at rank 0's door: what is said to all, they hear, too. */
static void let_in(mt_watch *w)
{
    struct pollfd door = { .fd = w->listener, .events = POLLIN }; /* < 0: nobody comes */
    while (poll(&door, 1, 0) > 0 && accept_peer(w)) continue;
}

/* What rank 0 itself has met: the thread alone knows the others. */
static bool say_own(mt_watch *w)
{
    char text[MT_WATCH_TEXT];
    pthread_mutex_lock(&w->lock);
    memcpy(text, w->said, sizeof text);
    pthread_mutex_unlock(&w->lock);
    if (!*text) return false;
    let_in(w);
    declare(w, 0, text);
    return true;
}

static void lead(mt_watch *w)
{
    struct pollfd *polled = w->polled_sockets;
    int n = 0, *ranks = w->polled_ranks;
    polled[n++] = (struct pollfd){ .fd = w->listener, .events = POLLIN };
    polled[n++] = (struct pollfd){ .fd = w->wake, .events = POLLIN };
    for (int r = 1; r < w->options.world; r++) {
        if (w->peers[r].socket < 0) continue;
        ranks[n] = r;
        polled[n++] = (struct pollfd){ .fd = w->peers[r].socket, .events = POLLIN };
    }
    if (poll(polled, (nfds_t)n, TICK_MS) > 0) {
        if (polled[0].revents && !accept_peer(w)) blame_door(w);
        for (int i = 2; i < n; i++)
            if (polled[i].revents) hear(w, ranks[i]);
    }
    if (!say_own(w)) judge(w);
}

/* ---- obeying: the others -----------------------------------------------------------------------
 */

static void follow(mt_watch *w)
{
    struct pollfd polled[] = { { .fd = w->upward, .events = POLLIN },
                               { .fd = w->wake, .events = POLLIN } };
    message m = { .kind = STATE, .rank = w->options.rank };
    m.place = place_here(w, m.text);
    if (*m.text) m.kind = FAULT;
    send_message(w->upward, &m);
    if (m.kind == FAULT) {
        declare(w, m.rank, m.text);
        return;
    }
    if (m.place.waiting && m.place.waited > 2 * w->options.timeout_s + SLOW_S) {
        snprintf(m.text, sizeof m.text,
                 "rank 0 does not answer: rank %d has waited %.1f s in %.32s (%.40s)", m.rank,
                 m.place.waited, m.place.op, m.place.what);
        declare(w, 0, m.text);
        return;
    }
    if (poll(polled, 2, TICK_MS) <= 0 || !polled[0].revents) return;
    if (!receive_message(w->upward, &m)) {
        m = (message){ .kind = FAULT };
        snprintf(m.text, sizeof m.text, "rank 0 is gone: its process has ended without a word");
    }
    if (m.kind == FAULT) declare(w, m.rank, m.text);
    if (m.kind == BYE) w->led = false;
}

static bool ended(mt_watch *w)
{
    pthread_mutex_lock(&w->lock);
    bool is = w->stopping || w->faulted;
    pthread_mutex_unlock(&w->lock);
    return is;
}

static void *run(void *user)
{
    mt_watch *w = user;
    while (!ended(w)) {
        if (w->options.rank == 0)
            lead(w);
        else if (w->led)
            follow(w);
        else
            poll(&(struct pollfd){ .fd = w->wake, .events = POLLIN }, 1, TICK_MS);
    }
    return NULL;
}

/* ---- start and end -----------------------------------------------------------------------------
 */

/* Gives up before rank 0 misses this rank, which knows the reason. */
static mt_status join(mt_watch *w, const char *address)
{
    const double share = 0.9;
    const mt_watch_options *o = &w->options;
    message hello = { .kind = STATE, .rank = o->rank };
    int shown = (int)strcspn(address, "@");
    double end = w->started + share * o->timeout_s;
    mt_status status;
    do {
        status = mt_host_connect(&w->upward, address, end - mt_now());
        if (status != MT_EDEVICE) break;
        mt_nap(0.02);
    } while (mt_now() < end);
    MT_REQUIRE(status == MT_OK, status, "rank %d: rank 0 does not answer at %.*s after %.1f s: %s",
               o->rank, shown, address, mt_now() - w->started, mt_error_message());
    MT_REQUIRE(send_message(w->upward, &hello), MT_EDEVICE,
               "rank %d: rank 0 does not answer at %.*s after %.1f s", o->rank, shown, address,
               mt_now() - w->started);
    return MT_OK;
}

/* What rank 0 knows of all. */
static mt_status make_peers(mt_watch *w)
{
    size_t world = (size_t)w->options.world;
    w->peers = calloc(world, sizeof *w->peers);
    w->polled_sockets = calloc(world + 1, sizeof *w->polled_sockets);
    w->polled_ranks = calloc(world + 1, sizeof *w->polled_ranks);
    for (w->first_count = 2; w->first_count < 2 * world;) w->first_count *= 2;
    w->firsts = calloc(w->first_count, sizeof *w->firsts);
    for (size_t r = 0; w->peers && r < world; r++)
        w->peers[r] = (peer){ .socket = -1, .came = r == 0 };
    MT_REQUIRE(w->peers && w->polled_sockets && w->polled_ranks && w->firsts, MT_ENOMEM,
               "watchdog: out of memory for %zu ranks", world);
    return MT_OK;
}

static void release(mt_watch **watch)
{
    mt_watch *w = *watch;
    if (w->listener >= 0) close(w->listener);
    if (w->upward >= 0) close(w->upward);
    if (w->wake >= 0) close(w->wake);
    for (int r = 0; w->peers && r < w->options.world; r++)
        if (w->peers[r].socket >= 0) close(w->peers[r].socket);
    pthread_mutex_destroy(&w->lock);
    pthread_mutex_destroy(&w->asking);
    pthread_cond_destroy(&w->over);
    free(w->peers);
    free(w->polled_sockets);
    free(w->polled_ranks);
    free(w->firsts);
    free(w);
    *watch = NULL;
}

mt_status mt_watch_start(mt_watch **watch, const mt_watch_options *options, int listener,
                         const char *address)
{
    *watch = NULL;
    mt_watch *w = calloc(1, sizeof *w);
    if (!w && listener >= 0) close(listener);
    MT_REQUIRE(w, MT_ENOMEM, "watchdog: out of memory");
    w->options = *options, w->started = mt_now();
    w->listener = listener, w->upward = -1, w->led = true;
    pthread_mutex_init(&w->lock, NULL);
    pthread_mutex_init(&w->asking, NULL);
    pthread_cond_init(&w->over, NULL);
    w->wake = eventfd(0, EFD_CLOEXEC);
    mt_status status = MT_OK;
    if (w->wake < 0) {
        status = MT_FAIL(MT_EDEVICE, "watchdog: no eventfd: %s", strerror(errno));
    } else if (options->rank == 0) {
        status = make_peers(w);
    } else {
        status = join(w, address);
    }
    int code = status == MT_OK ? pthread_create(&w->thread, NULL, run, w) : 0;
    if (code) status = MT_FAIL(MT_EDEVICE, "watchdog: cannot start a thread: %s", strerror(code));
    if (status != MT_OK) {
        release(&w);
        return status;
    }
    *watch = w;
    return MT_OK;
}

void mt_watch_stop(mt_watch **watch)
{
    mt_watch *w = *watch;
    if (!w) return;
    message bye = { .kind = BYE, .rank = w->options.rank };
    pthread_mutex_lock(&w->lock);
    w->stopping = true;
    pthread_mutex_unlock(&w->lock);
    eventfd_write(w->wake, 1);
    pthread_join(w->thread, NULL);
    let_in(w);
    send_message(w->upward, &bye);
    for (int r = 1; w->peers && r < w->options.world; r++) send_message(w->peers[r].socket, &bye);
    release(watch);
}

void mt_watch_set_poll(mt_watch *w, mt_watch_poll poll, void *context)
{
    pthread_mutex_lock(&w->asking);
    w->poll = poll, w->polled = context;
    pthread_mutex_unlock(&w->asking);
}

void mt_watch_enter(mt_watch *w, const char *op, const char *what, uint64_t bytes, uint64_t group)
{
    pthread_mutex_lock(&w->lock);
    w->here.sequence++;
    w->here.bytes = bytes, w->here.group = group, w->here.waiting = true;
    snprintf(w->here.op, WORD, "%s", op);
    snprintf(w->here.what, WORD, "%s", what);
    w->entered = mt_now();
    pthread_mutex_unlock(&w->lock);
}

void mt_watch_leave(mt_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->here.waiting = false, w->here.waited = 0;
    pthread_mutex_unlock(&w->lock);
}

uint64_t mt_watch_sequence(const mt_watch *w)
{
    return w->here.sequence; /* written by the calling thread alone */
}

void mt_watch_fault(mt_watch *w, const char *sentence)
{
    message m = { .kind = FAULT, .rank = w->options.rank };
    snprintf(m.text, sizeof m.text, "%s", sentence);
    pthread_mutex_lock(&w->lock);
    bool told = w->faulted;
    w->reported = true;
    memcpy(w->said, m.text, sizeof w->said);
    pthread_mutex_unlock(&w->lock);
    if (told) return;
    if (w->options.rank == 0)
        eventfd_write(w->wake, 1);
    else
        send_message(w->upward, &m);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    pthread_mutex_lock(&w->lock);
    while (!w->faulted && pthread_cond_clockwait(&w->over, &w->lock, CLOCK_MONOTONIC, &until) == 0)
        continue;
    pthread_mutex_unlock(&w->lock);
}
