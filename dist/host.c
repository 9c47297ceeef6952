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

enum { NAME = 256 };
static const long second_ns = 1000000000;
static const double least_s = 0.1; /* for an attempt to tell why it fails */

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

void mt_host_address(char address[MT_HOST_ADDRESS], const char *name, int port)
{
    mt_host here;
    mt_host_here(&here);
    snprintf(address, MT_HOST_ADDRESS, "%.255s:%d@%s", name ? name : here.name, port, here.boot);
}

/* ---- names -------------------------------------------------------------------------------------
 */

/* A name that is being looked up by a thread. Resolvers wait as long as they like: who does not
 * want to wait any more leaves, and the thread frees it. */
typedef struct lookup {
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t ended;
    bool done, left;
    int code;
    struct in_addr found;
    char name[NAME];
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
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found = NULL;
    struct sockaddr_in at = { .sin_family = AF_INET };
    int code = getaddrinfo(l->name, NULL, &hints, &found);
    if (code == 0) memcpy(&at, found->ai_addr, sizeof at);
    if (code == 0) freeaddrinfo(found);
    pthread_mutex_lock(&l->lock);
    l->code = code, l->found = at.sin_addr, l->done = true;
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

/* The first IPv4 address of that name. */
static mt_status resolve(struct in_addr *at, const char *name, double seconds)
{
    lookup *l = NULL;
    struct timespec until;
    if (inet_pton(AF_INET, name, at) == 1) return MT_OK;
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
    *at = l->found;
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

/* Ends with the connection, or its error. */
static int await_connection(int s, const struct sockaddr_in *to, double end)
{
    struct pollfd ready = { .fd = s, .events = POLLOUT };
    int error = 0;
    socklen_t size = sizeof error;
    if (connect(s, (const struct sockaddr *)to, sizeof *to) == 0) return 0;
    if (errno != EINPROGRESS) return errno;
    for (int n = 0; n <= 0;) {
        double left = end - mt_now();
        if (left <= 0) return ETIMEDOUT;
        n = poll(&ready, 1, left < 1 ? (int)(left * 1e3) + 1 : 1000);
    }
    return getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

mt_status mt_host_connect(int *connection, const char *address, double seconds)
{
    char name[NAME] = "";
    int port = 0, yes = 1;
    bool here;
    if (seconds < least_s) seconds = least_s;
    double end = mt_now() + seconds;
    struct sockaddr_in to = { .sin_family = AF_INET };
    const char *at = strchr(address, '@');
    *connection = -1;
    MT_REQUIRE(sscanf(address, "%255[^:]:%d", name, &port) == 2 && port > 0 && port <= UINT16_MAX,
               MT_EDEVICE, "'%.300s' is no address, must be a name, ':' and a port", address);
    MT_TRY(means_here(&here, name, at ? at + 1 : NULL));
    MT_TRY(resolve(&to.sin_addr, here ? "127.0.0.1" : name, seconds));
    to.sin_port = htons((uint16_t)port);
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    MT_REQUIRE(s >= 0, MT_EDEVICE, "%s", strerror(errno));
    int error = await_connection(s, &to, end);
    if (!error && fcntl(s, F_SETFL, fcntl(s, F_GETFL) & ~O_NONBLOCK) != 0) error = errno;
    if (error) close(s);
    MT_REQUIRE(!error, MT_EDEVICE, "%s", strerror(error));
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    *connection = s;
    return MT_OK;
}
