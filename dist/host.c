/* Which host this is, and the way to others. */
#include "dist/host.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"

enum { ADDRESSES = 8, BACKLOG = 4096 };
static const long second_ns = 1000000000;
static const double least_s = 0.1; /* for an attempt to tell why it fails */
static const double turn_s = 2;    /* of an address: who connects tries again */

/* ---- this host ---------------------------------------------------------------------------------
 */

void mt_host_here(mt_host *host)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    *host = (mt_host){ "", "" };
    if (gethostname(host->name, sizeof host->name - 1) != 0)
        snprintf(host->name, sizeof host->name, "localhost");
    if (file && fgets(host->boot, sizeof host->boot, file))
        host->boot[strcspn(host->boot, "\n")] = '\0';
    if (file) fclose(file);
}

/* ---- addresses ---------------------------------------------------------------------------------
 */

void mt_host_address(char address[MT_HOST_ADDRESS], const char *name, int port, const char *boot)
{
    bool brackets = strchr(name, ':') != NULL;
    snprintf(address, MT_HOST_ADDRESS, "%s%.255s%s:%d%s%.71s", brackets ? "[" : "", name,
             brackets ? "]" : "", port, boot ? "@" : "", boot ? boot : "");
}

mt_status mt_host_parts(char name[MT_HOST_NAME], int *port, const char **boot, const char *address)
{
    const char *form = *address == '[' ? "[%255[^]]]:%d" : "%255[^:]:%d", *at;
    *port = 0;
    MT_REQUIRE(sscanf(address, form, name, port) == 2 && *port > 0 && *port <= UINT16_MAX,
               MT_EDEVICE, "'%.300s' is no address, must be a name, ':' and a port", address);
    at = strchr(address, '@');
    *boot = at ? at + 1 : NULL;
    return MT_OK;
}

/* ---- names -------------------------------------------------------------------------------------
 */

/* What a name means, to connect to at a port. */
typedef struct addresses {
    int count;
    struct address {
        union {
            struct sockaddr any;
            struct sockaddr_in v4;
            struct sockaddr_in6 v6;
        };
        socklen_t size;
    } at[ADDRESSES];
} addresses;

static void set_port(struct address *a, int port)
{
    if (a->any.sa_family == AF_INET6)
        a->v6.sin6_port = htons((uint16_t)port);
    else
        a->v4.sin_port = htons((uint16_t)port);
}

/* Whether it is an address by itself. */
static bool is_numeric(struct address *a, const char *name)
{
    *a = (struct address){ .v4 = { .sin_family = AF_INET }, .size = sizeof a->v4 };
    if (inet_pton(AF_INET, name, &a->v4.sin_addr) == 1) return true;
    *a = (struct address){ .v6 = { .sin6_family = AF_INET6 }, .size = sizeof a->v6 };
    return inet_pton(AF_INET6, name, &a->v6.sin6_addr) == 1;
}

/* A name that is being looked up by a thread. Resolvers wait as long as they like: who does not
 * want to wait any more leaves, and the thread frees it. */
typedef struct lookup {
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t ended;
    bool done, left;
    int code;
    addresses found;
    char name[MT_HOST_NAME];
} lookup;

static void free_lookup(lookup *l)
{
    pthread_cond_destroy(&l->ended);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static void *look_up(void *user)
{
    lookup *l = user;
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found = NULL;
    addresses list = { 0 };
    int code = getaddrinfo(l->name, NULL, &hints, &found);
    for (struct addrinfo *i = code ? NULL : found; i && list.count < ADDRESSES; i = i->ai_next) {
        struct address *to = &list.at[list.count];
        if (i->ai_family != AF_INET && i->ai_family != AF_INET6) continue;
        memcpy(&to->any, i->ai_addr, to->size = i->ai_addrlen);
        list.count++;
    }
    if (code == 0) freeaddrinfo(found);
    pthread_mutex_lock(&l->lock);
    l->code = code ? code : list.count ? 0 : EAI_FAMILY, l->found = list, l->done = true;
    bool left = l->left;
    pthread_cond_signal(&l->ended);
    pthread_mutex_unlock(&l->lock);
    if (left) free_lookup(l);
    return NULL;
}

static mt_status begin_lookup(lookup **begun, const char *name)
{
    lookup *l = calloc(1, sizeof *l);
    MT_REQUIRE(l, MT_ENOMEM, "no memory to look up '%s'", name);
    snprintf(l->name, sizeof l->name, "%s", name);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->ended, NULL);
    int code = pthread_create(&l->thread, NULL, look_up, l);
    if (code) free_lookup(l);
    MT_REQUIRE(code == 0, MT_EDEVICE, "cannot start a thread to look up '%s': %s", name,
               strerror(code));
    *begun = l;
    return MT_OK;
}

static mt_status resolve(addresses *found, const char *name, double seconds)
{
    lookup *l = NULL;
    struct timespec until;
    found->count = 1;
    if (is_numeric(&found->at[0], name)) return MT_OK;
    MT_TRY(begin_lookup(&l, name));
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    until.tv_nsec += (long)((seconds - (double)(time_t)seconds) * (double)second_ns);
    if (until.tv_nsec >= second_ns) until.tv_sec++, until.tv_nsec -= second_ns;
    pthread_mutex_lock(&l->lock);
    for (int late = 0; !l->done && !late;)
        late = pthread_cond_clockwait(&l->ended, &l->lock, CLOCK_MONOTONIC, &until);
    bool done = l->done;
    if (!done) {
        pthread_detach(l->thread);
        l->left = true;
    }
    pthread_mutex_unlock(&l->lock);
    MT_REQUIRE(done, MT_EDEVICE, "the name '%s' is still being looked up, after %.1f s", name,
               seconds);
    pthread_join(l->thread, NULL);
    int code = l->code;
    *found = l->found;
    free_lookup(l);
    MT_REQUIRE(code == 0, MT_EDEVICE, "the name '%s': %s", name, gai_strerror(code));
    return MT_OK;
}

/* ---- connections -------------------------------------------------------------------------------
 */

/* Who has the name of this host is this host, or cannot be told from it. */
static mt_status means_here(bool *here, const char *name, const char *boot)
{
    mt_host host;
    *here = false;
    mt_host_here(&host);
    if (!boot || strcmp(name, host.name) != 0) return MT_OK;
    MT_REQUIRE(!strcmp(boot, host.boot), MT_ECONFIG,
               "another host is named '%s' as well as this one: each needs a name of its own",
               name);
    *here = true;
    return MT_OK;
}

/* Of all addresses of a family. */
static struct address any_address(int family)
{
    if (family == AF_INET)
        return (struct address){ .v4 = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_ANY) } },
                                 .size = sizeof(struct sockaddr_in) };
    return (struct address){ .v6 = { .sin6_family = AF_INET6, .sin6_addr = in6addr_any },
                             .size = sizeof(struct sockaddr_in6) };
}

static bool is_loopback(const struct address *a)
{
    if (a->any.sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr);
    return ntohl(a->v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

/* A socket that listens there, or -1 and errno. */
static int listen_at(struct address *at, int *port)
{
    int yes = 1, no = 0, s = socket(at->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s < 0) return s;
    set_port(at, *port);
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    bool ok = at->any.sa_family == AF_INET ||
              setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) == 0;
    ok = ok && bind(s, &at->any, at->size) == 0 && listen(s, BACKLOG) == 0 &&
         getsockname(s, &at->any, &at->size) == 0;
    if (!ok) {
        int error = errno;
        close(s);
        errno = error;
        return -1;
    }
    *port = (int)ntohs(at->any.sa_family == AF_INET6 ? at->v6.sin6_port : at->v4.sin_port);
    return s;
}

mt_status mt_host_listen(int *listener, int *port, const char *name)
{
    struct address own;
    bool alone = is_numeric(&own, strcmp(name, "localhost") ? name : "127.0.0.1");
    if (!alone || !is_loopback(&own)) own = any_address(AF_INET6), alone = false;
    *listener = listen_at(&own, port);
    if (*listener < 0 && !alone) { /* a host without IPv6 */
        own = any_address(AF_INET);
        *listener = listen_at(&own, port);
    }
    MT_REQUIRE(*listener >= 0, MT_EDEVICE, "%s", strerror(errno));
    return MT_OK;
}

/* Ends with the connection, or its error. */
static int await_connection(int s, const struct address *to, double end)
{
    struct pollfd ready = { .fd = s, .events = POLLOUT };
    int error = 0;
    socklen_t size = sizeof error;
    if (connect(s, &to->any, to->size) == 0) return 0;
    if (errno != EINPROGRESS) return errno;
    for (int n = 0; n <= 0;) {
        double left = end - mt_now();
        if (left <= 0) return ETIMEDOUT;
        n = poll(&ready, 1, left < 1 ? (int)(left * 1e3) + 1 : 1000);
    }
    return getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

/* *s, or -1 and the error. */
static int try_address(int *s, const struct address *to, double end)
{
    int yes = 1;
    *s = socket(to->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*s < 0) return errno;
    int error = await_connection(*s, to, end);
    if (!error && fcntl(*s, F_SETFL, fcntl(*s, F_GETFL) & ~O_NONBLOCK) != 0) error = errno;
    if (!error) setsockopt(*s, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (error) close(*s), *s = -1;
    return error;
}

mt_status mt_host_connect(int *connection, const char *address, double seconds)
{
    char name[MT_HOST_NAME] = "";
    const char *boot;
    int port = 0, error = 0;
    bool here;
    addresses to;
    if (seconds < least_s) seconds = least_s;
    double end = mt_now() + seconds;
    *connection = -1;
    MT_TRY(mt_host_parts(name, &port, &boot, address));
    MT_TRY(means_here(&here, name, boot));
    MT_TRY(resolve(&to, here ? "127.0.0.1" : name, seconds));
    for (int i = 0; i < to.count && *connection < 0; i++) {
        double now = mt_now(), turn = (end - now) / (to.count - i);
        if (turn > turn_s) turn = turn_s;
        set_port(&to.at[i], port);
        error = try_address(connection, &to.at[i], now + turn);
    }
    MT_REQUIRE(*connection >= 0, MT_EDEVICE, "%s", strerror(error));
    return MT_OK;
}
