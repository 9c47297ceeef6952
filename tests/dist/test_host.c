/* Names and connections that take too long, that mean another host, or this one alone: what ranks
 * say of them, and when. Resolvers of this program do as it says. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/test.h"

#include "core/clock.h"
#include "dist/rendezvous.h"
#include "dist/watch.h"
#include "tests/support/fault.h"

static const double slow_s = 4; /* that a lookup of "slow" takes */
static atomic_int looking_up;

/* In place of libc's. "this" is, as on Debian, a host whose own name means 127.0.1.1; "both" means
 * ::1 and 127.0.0.1, "two" 127.0.0.1 and 127.0.1.1. */
int getaddrinfo(const char *restrict name, const char *restrict service,
                const struct addrinfo *restrict hints, struct addrinfo **restrict found)
{
    static _Thread_local struct sockaddr_in at, at4;
    static _Thread_local struct sockaddr_in6 at6;
    static _Thread_local struct addrinfo first, second;
    bool both = !strcmp(name, "both"), two = !strcmp(name, "two");
    (void)service, (void)hints;
    atomic_fetch_add(&looking_up, 1);
    if (!strcmp(name, "slow")) mt_nap(slow_s);
    at = (struct sockaddr_in){ .sin_family = AF_INET,
                               .sin_addr = { htonl(INADDR_LOOPBACK + (both ? 0 : 256)) } };
    at4 = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    at6 = (struct sockaddr_in6){ .sin6_family = AF_INET6, .sin6_addr = in6addr_loopback };
    first = (struct addrinfo){ .ai_family = AF_INET6,
                               .ai_addr = (struct sockaddr *)&at6,
                               .ai_addrlen = sizeof at6,
                               .ai_next = &second };
    if (two)
        first = (struct addrinfo){ .ai_family = AF_INET,
                                   .ai_addr = (struct sockaddr *)&at4,
                                   .ai_addrlen = sizeof at4,
                                   .ai_next = &second };
    second = (struct addrinfo){ .ai_family = AF_INET,
                                .ai_addr = (struct sockaddr *)&at,
                                .ai_addrlen = sizeof at };
    *found = both || two ? &first : &second;
    atomic_fetch_sub(&looking_up, 1);
    return both || two || !strcmp(name, "this") ? 0 : EAI_NONAME;
}

void freeaddrinfo(struct addrinfo *found)
{
    (void)found;
}

static void never(void *context, int by, const char *sentence)
{
    (void)context;
    print_error("rank %d is blamed: %s\n", by, sentence);
    abort();
}

/* The watchdog of rank 1, to which rank 0 has said this address. */
static mt_status start_watch(const char *address, double timeout_s)
{
    mt_watch *watch;
    const mt_watch_options options = {
        .rank = 1, .world = 2, .timeout_s = timeout_s, .on_fault = never
    };
    mt_status status = mt_watch_start(&watch, &options, -1, address);
    mt_watch_stop(&watch);
    return status;
}

static mt_status meet(int rank, const mt_meeting *meeting, double timeout_s)
{
    int data = 0;
    char host[MT_MEETING_HOST];
    const mt_launch launch = { .rank = rank, .world = 2, .launcher = "test" };
    return mt_rendezvous(&data, sizeof data, host, &launch, meeting, timeout_s);
}

/* An address of this host at which nobody listens. */
static int free_port(void)
{
    int listener, port = 0;
    assert_ok(mt_host_listen(&listener, &port, "127.0.0.1"));
    close(listener);
    return port;
}

static void slow_names(void **state)
{
    (void)state;
    int connection;
    int64_t live = fault_live();
    mt_meeting meeting = { .host = "slow", .port = free_port(), .listener = -1 };
    char words[128];
    double began = mt_now();
    assert_fails(mt_host_connect(&connection, "slow:80", 0.2), MT_EDEVICE,
                 "the name 'slow' is still being looked up, after 0.2 s");
    assert_fails(mt_host_connect(&connection, "slow:80", -1), MT_EDEVICE, "looked up, after 0.1 s");
    assert_fails(start_watch("slow:80", 0.5), MT_EDEVICE,
                 "rank 1: rank 0 does not answer at slow:80 after ");
    assert_non_null(strstr(mt_error_message(), " s: the name 'slow' is still being looked up"));
    snprintf(words, sizeof words,
             "rank 1: rank 0 of 2 never arrived: after 0.5 s nobody answers at slow:%d: the name "
             "'slow' is still being looked up",
             meeting.port);
    assert_fails(meet(1, &meeting, 0.5), MT_EDEVICE, words);
    /* nor does rank 0 wait for its own name */
    assert_fails(meet(0, &meeting, 0.5), MT_EDEVICE, "rank 1 of 2 never arrived, after 0.5 s");
    assert_true(mt_now() - began < slow_s);
    while (atomic_load(&looking_up)) mt_nap(0.01);
    for (int i = 0; i < 500 && fault_live() != live; i++) mt_nap(0.01);
    assert_int_equal(fault_live(), live); /* who was left alone has cleared up */
}

static void names_that_nobody_has(void **state)
{
    (void)state;
    int connection;
    assert_fails(mt_host_connect(&connection, "nobody:80", 5), MT_EDEVICE,
                 "the name 'nobody': Name or service not known");
    assert_int_equal(connection, -1);
    static const char *const none[] = { "", "nobody", "nobody:", ":80", "a:0", "a:65536", "a:x" };
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        assert_fails(mt_host_connect(&connection, none[i], 5), MT_EDEVICE, "is no address");
}

/* Two ranks do, at a port where nobody listens yet. */
static void assert_meet(const char *host, int port)
{
    mt_meeting meeting = { .port = port, .listener = -1 };
    int status;
    snprintf(meeting.host, sizeof meeting.host, "%s", host);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(meet(0, &meeting, 5) != MT_OK);
    mt_status met = meet(1, &meeting, 5);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_ok(met);
    assert_int_equal(status, 0);
}

static void assert_reached(const char *name, int port, bool reached)
{
    char address[MT_HOST_ADDRESS];
    int connection;
    mt_host_address(address, name, port, NULL);
    if (reached) {
        assert_ok(mt_host_connect(&connection, address, 5));
        close(connection);
    } else {
        assert_fails(mt_host_connect(&connection, address, 5), MT_EDEVICE, "refused");
    }
}

/* Of a name's addresses the one that answers is taken; a loopback is all that it listens at. */
static void names_of_several_addresses(void **state)
{
    (void)state;
    int listener, port = 0;
    assert_ok(mt_host_listen(&listener, &port, "127.0.0.1"));
    assert_reached("both", port, true);
    assert_reached("this", port, false);
    close(listener);
    assert_reached("both", port, false);
    port = 0;
    assert_ok(mt_host_listen(&listener, &port, "localhost"));
    assert_reached("both", port, true);
    assert_reached("this", port, false);
    close(listener);
}

static void addresses_as_text(void **state)
{
    (void)state;
    static const struct {
        const char *name, *boot, *text;
    } cases[] = { { "node1", NULL, "node1:29500" },
                  { "10.0.0.1", "a-b", "10.0.0.1:29500@a-b" },
                  { "::1", NULL, "[::1]:29500" },
                  { "fe80::1%eth0", "", "[fe80::1%eth0]:29500@" } };
    static const char *const none[] = { "[::1]", "[::1:80", "[]:80", "[::1]80", "[::1]:0" };
    char text[MT_HOST_ADDRESS], name[MT_HOST_NAME];
    const char *boot;
    int port;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_host_address(text, cases[i].name, 29500, cases[i].boot);
        assert_string_equal(text, cases[i].text);
        assert_ok(mt_host_parts(name, &port, &boot, text));
        assert_string_equal(name, cases[i].name);
        assert_int_equal(port, 29500);
        assert_int_equal(boot == NULL, cases[i].boot == NULL);
        if (boot) assert_string_equal(boot, cases[i].boot);
    }
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        assert_fails(mt_host_parts(name, &port, &boot, none[i]), MT_EDEVICE, "is no address");
}

/* What listens at all addresses is reached by IPv6 as well as by IPv4, what listens at ::1 by that
 * alone, and ranks meet there. */
static void addresses_of_ipv6(void **state)
{
    (void)state;
    int listener, port = 0;
    if (mt_host_listen(&listener, &port, "::1") != MT_OK) skip(); /* a host without IPv6 */
    assert_reached("::1", port, true);
    assert_reached("127.0.0.1", port, false);
    close(listener);
    port = 0;
    assert_ok(mt_host_listen(&listener, &port, ""));
    assert_reached("::1", port, true);
    assert_reached("127.0.0.1", port, true);
    close(listener);
    assert_meet("::1", port);
    const mt_meeting nobody = { .host = "::1", .port = port, .listener = -1 };
    char words[64];
    snprintf(words, sizeof words, "nobody answers at [::1]:%d: ", port);
    assert_fails(meet(1, &nobody, 0.2), MT_EDEVICE, words);
}

/* A host whose packets are lost: a listener that takes nobody in. */
typedef struct lost_host {
    int listener, port, fill[4];
} lost_host;

static void begin_losing(lost_host *lost, in_addr_t address)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(address) } };
    socklen_t size = sizeof at;
    lost->listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(lost->listener, (struct sockaddr *)&at, size), 0);
    assert_int_equal(listen(lost->listener, 0), 0);
    assert_int_equal(getsockname(lost->listener, (struct sockaddr *)&at, &size), 0);
    for (int i = 0; i < 4; i++) {
        lost->fill[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(lost->fill[i], (struct sockaddr *)&at, size);
    }
    mt_nap(0.1);
    lost->port = (int)ntohs(at.sin_port);
}

static void end_losing(lost_host *lost)
{
    for (int i = 0; i < 4; i++) close(lost->fill[i]);
    close(lost->listener);
}

static void lost_packets(void **state)
{
    (void)state;
    int connection;
    lost_host lost;
    char address[64];
    begin_losing(&lost, INADDR_LOOPBACK);
    snprintf(address, sizeof address, "127.0.0.1:%d", lost.port);
    double began = mt_now();
    assert_fails(mt_host_connect(&connection, address, 0.3), MT_EDEVICE, "Connection timed out");
    assert_fails(start_watch(address, 0.5), MT_EDEVICE, "Connection timed out");
    assert_true(mt_now() - began < 20); /* the system's own patience is minutes */
    end_losing(&lost);
}

/* Of two ranks this one, whose rank 0 comes so much later, as another process. */
static void meet_late(const mt_meeting *own, const mt_meeting *its, double late)
{
    int status;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        mt_nap(late);
        _exit(meet(0, own, 8) != MT_OK);
    }
    mt_status met = meet(1, its, 8);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_ok(met);
    assert_int_equal(status, 0);
}

/* Rank 0 comes late to the first address of its name; the other one never answers. */
static void an_address_that_never_answers(void **state)
{
    (void)state;
    lost_host lost;
    begin_losing(&lost, INADDR_LOOPBACK + 256);
    const mt_meeting own = { .host = "127.0.0.1", .port = lost.port, .listener = -1 };
    const mt_meeting its = { .host = "two", .port = lost.port, .listener = -1 };
    meet_late(&own, &its, 0.3);
    end_losing(&lost);
}

/* What a run that was killed has left where ranks look for rank 0. */
static void leave_file(mt_meeting *meeting, const char *address)
{
    const char *folder = getenv("TMPDIR");
    snprintf(meeting->file, sizeof meeting->file, "%.100s/mixtape-meeting-%d",
             folder ? folder : "/tmp", (int)getpid());
    FILE *file = fopen(meeting->file, "w");
    assert_non_null(file);
    fprintf(file, "%s\n", address);
    fclose(file);
}

/* Its host is not there any more. Rank 0 of this run comes later. */
static void a_file_of_a_host_that_is_gone(void **state)
{
    (void)state;
    lost_host lost;
    char address[64];
    mt_meeting meeting = { .host = "127.0.0.1", .listener = -1 };
    begin_losing(&lost, INADDR_LOOPBACK);
    snprintf(address, sizeof address, "127.0.0.1:%d", lost.port);
    leave_file(&meeting, address);
    meet_late(&meeting, &meeting, 0.5);
    unlink(meeting.file);
    end_losing(&lost);
}

/* Its own name means this host, though no resolver knows it; another host may have that name. */
static void hosts_of_one_name(void **state)
{
    (void)state;
    mt_host here;
    mt_meeting meeting = { .listener = -1 };
    char address[MT_HOST_ADDRESS], other[MT_HOST_ADDRESS], words[256];
    int listener, port = 0, connection;
    mt_host_here(&here);
    assert_ok(mt_host_listen(&listener, &port, ""));
    mt_host_address(address, here.name, port, here.boot);
    assert_ok(mt_host_connect(&connection, address, 5));
    close(connection);
    snprintf(other, sizeof other, "%s:%d@another-start", here.name, port);
    snprintf(words, sizeof words, "another host is named '%s' as well as this one", here.name);
    double began = mt_now();
    assert_fails(mt_host_connect(&connection, other, 60), MT_ECONFIG, words);
    assert_fails(start_watch(other, 60), MT_ECONFIG, words);
    assert_true(mt_now() - began < 20);
    leave_file(&meeting, other);
    assert_fails(meet(1, &meeting, 0.3), MT_EDEVICE, words); /* rank 0 may still write it anew */
    unlink(meeting.file);
    close(listener);
}

/* Rank 0 listens where the others look for it, not where its own resolver says. */
static void a_name_with_an_address_of_its_own(void **state)
{
    (void)state;
    assert_meet("this", free_port());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slow_names),
        cmocka_unit_test(names_that_nobody_has),
        cmocka_unit_test(names_of_several_addresses),
        cmocka_unit_test(addresses_as_text),
        cmocka_unit_test(addresses_of_ipv6),
        cmocka_unit_test(lost_packets),
        cmocka_unit_test(an_address_that_never_answers),
        cmocka_unit_test(a_file_of_a_host_that_is_gone),
        cmocka_unit_test(hosts_of_one_name),
        cmocka_unit_test(a_name_with_an_address_of_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
