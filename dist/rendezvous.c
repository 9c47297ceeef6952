/* The first meeting of the ranks. */
#include "dist/rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"

enum { SENTENCE = 400, LISTED = 8, NAP_NS = 20000000, HEAR_S = 5 };

static const uint64_t magic = 0x316570617478696du; /* "mixtape1" */

/* What a rank says when it comes, and what it hears: the failure, or `bytes` of data behind it. */
typedef struct hello {
    uint64_t magic, bytes;
    int32_t rank, world;
} hello;

typedef struct answer {
    uint64_t magic;
    int32_t failed, unused;
    char sentence[SENTENCE];
} answer;

static void nap(void)
{
    nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
}

static bool send_all(int to, const void *data, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        ssize_t n = send(to, (const char *)data + at, bytes - at, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += (size_t)n;
    }
    return true;
}

/* All of it, within so many seconds. */
static bool receive_all(int from, void *data, size_t bytes, double seconds)
{
    double end = mt_now() + seconds;
    for (size_t at = 0; at < bytes;) {
        double left = end - mt_now();
        struct pollfd ready = { .fd = from, .events = POLLIN };
        if (left <= 0) return false;
        if (poll(&ready, 1, (int)(left * 1e3) + 1) <= 0) continue;
        ssize_t n = recv(from, (char *)data + at, bytes - at, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += (size_t)n;
    }
    return true;
}

/* ---- listening ---------------------------------------------------------------------------------
 */

static mt_status listen_at(int *listener, int *port, const char *host)
{
    int asked = *port;
    mt_status status = mt_host_listen(listener, port, host);
    MT_REQUIRE(status == MT_OK, status, "rank 0 cannot listen at port %d: %s", asked,
               mt_error_message());
    return MT_OK;
}

/* Where the others look for rank 0: whole, or not at all. */
static mt_status write_place(const char *path, const char *host, int port)
{
    char next[MT_MEETING_HOST + 16], address[MT_HOST_ADDRESS], text[MT_HOST_ADDRESS + 1];
    mt_host here;
    mt_host_here(&here);
    mt_host_address(address, *host ? host : here.name, port, here.boot);
    int n = snprintf(text, sizeof text, "%s\n", address);
    snprintf(next, sizeof next, "%s.%ld", path, (long)getpid());
    (void)unlink(next);
    int file = open(next, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool ok = file >= 0 && write(file, text, (size_t)n) == (ssize_t)n;
    if (file >= 0 && close(file) != 0) ok = false;
    if (ok && rename(next, path) == 0) return MT_OK;
    mt_status status =
        MT_FAIL(MT_EIO, "%s, where the ranks look for rank 0: %s", path, strerror(errno));
    (void)unlink(next);
    return status;
}

static mt_status begin_listening(int *listener, const mt_meeting *m)
{
    int port = *m->file ? 0 : m->port;
    *listener = m->listener;
    if (*listener >= 0) return MT_OK;
    MT_TRY(listen_at(listener, &port, m->host));
    if (!*m->file) return MT_OK;
    mt_status status = write_place(m->file, m->host, port);
    if (status == MT_OK) return MT_OK;
    close(*listener);
    *listener = -1;
    return status;
}

/* ---- rank 0 ------------------------------------------------------------------------------------
 */

typedef struct gate {
    const mt_launch *launch;
    int listener, missing;
    int *sockets; /* of each rank; -1: has not come */
} gate;

/* "rank 2 of 4 has", "ranks 1, 3 of 4 have". */
static void name_missing(char text[SENTENCE], const gate *g)
{
    size_t used = (size_t)snprintf(text, SENTENCE, "rank%s", g->missing > 1 ? "s" : "");
    int named = 0;
    for (int r = 1; r < g->launch->world && used < SENTENCE; r++) {
        if (g->sockets[r] >= 0) continue;
        if (named == LISTED) {
            used += (size_t)snprintf(text + used, SENTENCE - used, " and others");
            break;
        }
        used += (size_t)snprintf(text + used, SENTENCE - used, "%s %d", named++ ? "," : "", r);
    }
    if (used < SENTENCE)
        snprintf(text + used, SENTENCE - used, " of %d never arrived", g->launch->world);
}

/* Somebody at the door: a rank, a fault of theirs, or a stranger, who is sent away. */
static mt_status let_in(gate *g, uint64_t bytes, double seconds)
{
    hello said;
    int world = g->launch->world, s = accept4(g->listener, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0) return MT_OK;
    if (!receive_all(s, &said, sizeof said, seconds) || said.magic != magic) {
        close(s);
        return MT_OK;
    }
    bool known = said.rank > 0 && said.rank < world && said.world == world && said.bytes == bytes;
    if (known && g->sockets[said.rank] < 0) {
        g->sockets[said.rank] = s, g->missing--;
        return MT_OK;
    }
    answer no = { .magic = magic, .failed = 1 };
    if (known)
        snprintf(no.sentence, SENTENCE, "two processes say that they are rank %d of %d",
                 (int)said.rank, world);
    else
        snprintf(no.sentence, SENTENCE,
                 "a process says that it is rank %d of %d, rank 0 that there are %d%s",
                 (int)said.rank, (int)said.world, world,
                 said.bytes == bytes ? "" : "; it is of another build");
    send_all(s, &no, sizeof no);
    close(s);
    return MT_FAIL(MT_EDEVICE, "%s", no.sentence);
}

static mt_status wait_for_all(gate *g, uint64_t bytes, double timeout_s)
{
    double began = mt_now();
    while (g->missing > 0) {
        double left = began + timeout_s - mt_now();
        struct pollfd door = { .fd = g->listener, .events = POLLIN };
        char missing[SENTENCE];
        if (left <= 0) {
            name_missing(missing, g);
            return MT_FAIL(MT_EDEVICE, "%s, after %.1f s", missing, timeout_s);
        }
        if (poll(&door, 1, left < 1 ? (int)(left * 1e3) + 1 : 1000) > 0)
            MT_TRY(let_in(g, bytes, left < HEAR_S ? left : HEAR_S));
    }
    return MT_OK;
}

static mt_status receive_ranks(const void *data, size_t bytes, const mt_launch *launch,
                               const mt_meeting *meeting, double timeout_s)
{
    gate g = { .launch = launch, .listener = -1, .missing = launch->world - 1 };
    MT_TRY(begin_listening(&g.listener, meeting));
    g.sockets = malloc((size_t)launch->world * sizeof *g.sockets);
    for (int r = 0; g.sockets && r < launch->world; r++) g.sockets[r] = -1;
    mt_status status = g.sockets ? wait_for_all(&g, bytes, timeout_s)
                                 : MT_FAIL(MT_ENOMEM, "rendezvous: out of memory");
    answer a = { .magic = magic, .failed = status != MT_OK };
    if (a.failed) snprintf(a.sentence, sizeof a.sentence, "%s", mt_error_message());
    for (int r = 1; g.sockets && r < launch->world; r++) {
        if (g.sockets[r] < 0) continue;
        bool sent = send_all(g.sockets[r], &a, sizeof a) &&
                    (a.failed || send_all(g.sockets[r], data, bytes));
        close(g.sockets[r]);
        if (!sent && status == MT_OK)
            status = MT_FAIL(MT_EDEVICE, "rank %d came to rank 0 and is gone", r);
    }
    if (*meeting->file) (void)unlink(meeting->file);
    close(g.listener);
    free(g.sockets);
    return status;
}

/* ---- the others --------------------------------------------------------------------------------
 */

/* Where rank 0 is at present. */
static mt_status find_place(char address[MT_HOST_ADDRESS], const mt_meeting *m)
{
    mt_host_address(address, m->host, m->port, NULL);
    if (!*m->file) return MT_OK;
    FILE *file = fopen(m->file, "re");
    MT_REQUIRE(file, MT_EDEVICE, "%s", strerror(errno));
    bool read = fgets(address, MT_HOST_ADDRESS, file) != NULL;
    fclose(file);
    MT_REQUIRE(read, MT_EDEVICE, "it is empty");
    address[strcspn(address, "\n")] = '\0';
    return MT_OK;
}

/* One attempt, which fails with MT_EDEVICE as long as nobody answers: what does and is not rank 0
 * is as nobody. *met once rank 0 has answered, whatever it says; `host` is where. */
static mt_status try_to_meet(bool *met, void *data, size_t bytes, char host[MT_MEETING_HOST],
                             const mt_launch *launch, const mt_meeting *meeting, double seconds,
                             double timeout_s)
{
    hello said = { magic, bytes, launch->rank, launch->world };
    answer heard;
    char address[MT_HOST_ADDRESS];
    const char *boot;
    int port, s;
    MT_TRY(find_place(address, meeting));
    MT_TRY(mt_host_parts(host, &port, &boot, address));
    MT_TRY(mt_host_connect(&s, address, seconds));
    mt_status status = MT_OK;
    *met = send_all(s, &said, sizeof said) &&
           receive_all(s, &heard, sizeof heard, timeout_s + HEAR_S) && heard.magic == magic;
    if (!*met)
        status = MT_FAIL(MT_EDEVICE, "who answers is not rank 0");
    else if (heard.failed)
        status = MT_FAIL(MT_EDEVICE, "%.*s", SENTENCE - 1, heard.sentence);
    else if (!receive_all(s, data, bytes, HEAR_S))
        status = MT_FAIL(MT_EDEVICE, "rank 0 is gone: it ended while the ranks met");
    close(s);
    return status;
}

/* Rank 0 waits as long from when it came; whoever has met it hears the end of that. */
static mt_status go_to_rank_0(void *data, size_t bytes, char host[MT_MEETING_HOST],
                              const mt_launch *launch, const mt_meeting *meeting, double timeout_s)
{
    double end = mt_now() + timeout_s;
    char address[MT_HOST_ADDRESS];
    bool met = false;
    mt_host_address(address, meeting->host, meeting->port, NULL);
    for (;;) {
        mt_status status =
            try_to_meet(&met, data, bytes, host, launch, meeting, end - mt_now(), timeout_s);
        if (met) return status;
        bool later = status == MT_EDEVICE || status == MT_ECONFIG; /* a file of another day */
        MT_REQUIRE(later, status, "rank %d cannot go to rank 0: %s", launch->rank,
                   mt_error_message());
        nap();
        if (mt_now() >= end) break;
    }
    if (*meeting->file)
        return MT_FAIL(MT_EDEVICE,
                       "rank %d: rank 0 of %d never arrived: after %.1f s nobody answers at the "
                       "place that %s names: %s",
                       launch->rank, launch->world, timeout_s, meeting->file, mt_error_message());
    return MT_FAIL(MT_EDEVICE,
                   "rank %d: rank 0 of %d never arrived: after %.1f s nobody answers at %s: %s",
                   launch->rank, launch->world, timeout_s, address, mt_error_message());
}

mt_status mt_rendezvous(void *data, size_t bytes, char host[MT_MEETING_HOST],
                        const mt_launch *launch, const mt_meeting *meeting, double timeout_s)
{
    snprintf(host, MT_MEETING_HOST, "%s", *meeting->host ? meeting->host : "localhost");
    if (launch->rank == 0) return receive_ranks(data, bytes, launch, meeting, timeout_s);
    return go_to_rank_0(data, bytes, host, launch, meeting, timeout_s);
}
