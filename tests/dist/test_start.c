/* How ranks start without anybody's help: where they meet, that all come, children of one process;
 * and what is under way on a device. No GPU and no MPI is needed. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/test.h"

#include "core/clock.h"
#include "dist/inflight.h"
#include "dist/rendezvous.h"
#include "train/supervise.h"

enum { MOST = 8 };

/* ---- where they meet ---------------------------------------------------------------------------
 */

static void set_variables(const char *const *variables)
{
    static const char *const all[] = { "MIXTAPE_RENDEZVOUS",
                                       "MIXTAPE_LISTENER",
                                       "MASTER_ADDR",
                                       "MASTER_PORT",
                                       "SLURM_JOB_ID",
                                       "TORCHELASTIC_USE_AGENT_STORE",
                                       "SLURM_STEP_ID",
                                       "SLURM_JOB_NODELIST",
                                       "SLURM_STEP_NODELIST",
                                       "PMIX_NAMESPACE",
                                       "TMPDIR",
                                       "OMPI_MCA_ess_base_jobid" };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) unsetenv(all[i]);
    for (; *variables; variables += 2) setenv(variables[0], variables[1], 1);
}

static void test_meeting(void **state)
{
    (void)state;
    static const struct {
        const char *launcher;
        int local_world;
        const char *variables[12];
        const char *host, *file, *error;
        int port;
    } rows[] = {
        { "torchrun",
          0,
          { "MASTER_ADDR", "gpu3", "MASTER_PORT", "29500" },
          "gpu3",
          "",
          NULL,
          29500 },
        { "torchrun",
          0,
          { "MASTER_ADDR", "gpu3", "MASTER_PORT", "29500", "TORCHELASTIC_USE_AGENT_STORE", "True" },
          "gpu3",
          "",
          NULL,
          29501 },
        { "torchrun",
          0,
          { "MASTER_ADDR", "gpu3" },
          "",
          "",
          "MASTER_ADDR is set, MASTER_PORT is not",
          0 },
        { "torchrun",
          0,
          { "MASTER_PORT", "5" },
          "",
          "",
          "MASTER_PORT is set, MASTER_ADDR is not",
          0 },
        { "torchrun",
          0,
          { "MASTER_ADDR", "a", "MASTER_PORT", "0" },
          "",
          "",
          "MASTER_PORT is '0', its port must be a number from 1 to 65535",
          0 },
        { "torchrun",
          0,
          { "MASTER_ADDR", "a", "MASTER_PORT", "65536" },
          "",
          "",
          "MASTER_PORT is '65536'",
          0 },
        { "torchrun",
          0,
          { "MASTER_ADDR", "a", "MASTER_PORT", "80x" },
          "",
          "",
          "MASTER_PORT is '80x'",
          0 },
        { "torchrun",
          0,
          { NULL },
          "",
          "",
          "8 processes of torchrun, not all known to be on this",
          0 },
        { "PMI",
          8,
          { "MIXTAPE_RENDEZVOUS", "h.example:99", "MASTER_ADDR", "a" },
          "h.example",
          "",
          NULL,
          99 },
        { "PMI", 8, { "MIXTAPE_RENDEZVOUS", "[fd00::2]:99" }, "fd00::2", "", NULL, 99 },
        { "PMI", 8, { "MIXTAPE_RENDEZVOUS", "[]:99" }, "", "", "is '[]:99', must name a host", 0 },
        { "torchrun", 0, { "MASTER_ADDR", "::1", "MASTER_PORT", "80" }, "::1", "", NULL, 80 },
        { "torchrun", 0, { "MASTER_ADDR", "[::1]", "MASTER_PORT", "80" }, "::1", "", NULL, 80 },
        { "PMI", 8, { "MIXTAPE_RENDEZVOUS", "file:/net/meet" }, "", "/net/meet", NULL, 0 },
        { "PMI", 8, { "MIXTAPE_RENDEZVOUS", "file:" }, "", "", "must be file: and a path", 0 },
        { "PMI", 8, { "MIXTAPE_RENDEZVOUS", "host" }, "", "", "'host', must be HOST:PORT", 0 },
        { "PMI", 8, { "MIXTAPE_RENDEZVOUS", ":7" }, "", "", "must name a host", 0 },
        { "Open MPI",
          8,
          { "PMIX_NAMESPACE", "12.3", "TMPDIR", "/var/tmp" },
          "127.0.0.1",
          "/var/tmp/mixtape-UID-12_3",
          NULL,
          0 },
        { "Open MPI",
          4,
          { "PMIX_NAMESPACE", "12.3" },
          "",
          "",
          "set MASTER_ADDR and MASTER_PORT",
          0 },
        { "SLURM",
          4,
          { "SLURM_JOB_ID", "1250", "SLURM_STEP_ID", "2", "SLURM_STEP_NODELIST",
            "gpu[03-06,9],login1" },
          "gpu03",
          "",
          NULL,
          20000 + (1250 * 16 + 2) % 20000 },
        { "SLURM",
          4,
          { "SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "a1,b2" },
          "a1",
          "",
          NULL,
          20000 + 7 * 16 },
        { "SLURM",
          4,
          { "SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "[x]" },
          "",
          "",
          "SLURM_JOB_NODELIST is '[x]', must be a list of hosts",
          0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mt_launch launch = {
            .rank = 1, .world = 8, .local_world = rows[i].local_world, .launcher = rows[i].launcher
        };
        mt_meeting m;
        char file[64];
        set_variables(rows[i].variables);
        if (rows[i].error) {
            assert_fails(mt_launch_meeting(&m, &launch), MT_ECONFIG, rows[i].error);
            continue;
        }
        assert_ok(mt_launch_meeting(&m, &launch));
        const char *uid = strstr(rows[i].file, "UID");
        snprintf(file, sizeof file, "%.*s", uid ? (int)(uid - rows[i].file) : 63, rows[i].file);
        if (uid)
            snprintf(file + strlen(file), sizeof file - strlen(file), "%ld%s", (long)getuid(),
                     uid + 3);
        assert_string_equal(m.host, rows[i].host);
        assert_string_equal(m.file, file);
        assert_int_equal(m.port, rows[i].port);
        assert_int_equal(m.listener, -1);
    }
    set_variables((const char *const[]){ NULL });
}

/* ---- that all come -----------------------------------------------------------------------------
 */

/* A process that comes to the meeting as `rank` of `world`. */
typedef struct guest {
    int rank, world;
    double late;       /* seconds after the others */
    const char *error; /* NULL: it meets the others */
} guest;

/* What is passed on: rank 0's. */
typedef struct passed {
    int number;
    char text[1000];
} passed;

static int visit(const guest *g, const mt_meeting *meeting, double timeout_s)
{
    passed data = { g->rank ? 0 : 42, "" };
    char host[MT_MEETING_HOST];
    mt_launch launch = { .rank = g->rank, .world = g->world, .launcher = "test" };
    if (!g->rank) memset(data.text, 'x', sizeof data.text - 1);
    mt_nap(g->late);
    double began = mt_now();
    mt_status status = mt_rendezvous(&data, sizeof data, host, &launch, meeting, timeout_s);
    if (mt_now() - began > timeout_s + 6) return 3;
    if (g->error) {
        bool said = status == MT_EDEVICE && strstr(mt_error_message(), g->error);
        if (!said) fprintf(stderr, "rank %d: '%s'\n", g->rank, mt_error_message());
        return said ? 0 : 2;
    }
    if (status != MT_OK) fprintf(stderr, "rank %d: %s\n", g->rank, mt_error_message());
    bool whole = data.number == 42 && strlen(data.text) == sizeof data.text - 1 && *host;
    return status == MT_OK && whole ? 0 : 1;
}

static void assert_children(const pid_t *children, int count)
{
    for (int i = 0; i < count; i++) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("guest %d ended with %x", i, (unsigned)status);
    }
}

static void start_guests(pid_t *children, const guest *guests, int count, const mt_meeting *meeting,
                         double timeout_s)
{
    fflush(NULL);
    for (int i = 0; i < count; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i]) continue;
        mt_meeting own = *meeting;
        if (guests[i].rank) own.listener = -1;
        _exit(visit(&guests[i], &own, timeout_s));
    }
}

/* All of them, at a port of the loopback whose listener rank 0 has inherited. */
static void assert_meet(const guest *guests, int count, double timeout_s)
{
    mt_meeting meeting = { .host = "127.0.0.1" };
    pid_t children[MOST];
    assert_ok(mt_host_listen(&meeting.listener, &meeting.port, "127.0.0.1"));
    start_guests(children, guests, count, &meeting, timeout_s);
    close(meeting.listener);
    assert_children(children, count);
}

static void test_all_come(void **state)
{
    (void)state;
    const guest guests[] = {
        { 2, 4, 0, NULL }, { 0, 4, 0.2, NULL }, { 3, 4, 0.5, NULL }, { 1, 4, 0.1, NULL }
    };
    assert_meet(guests, 4, 20);
}

/* Rank 0 listens by itself, at a port that the others know; it comes last. */
static void test_known_port(void **state)
{
    (void)state;
    const guest guests[] = { { 1, 3, 0, NULL }, { 0, 3, 0.3, NULL }, { 2, 3, 0, NULL } };
    mt_meeting meeting = { .host = "localhost" };
    pid_t children[MOST];
    assert_ok(mt_host_listen(&meeting.listener, &meeting.port, "127.0.0.1"));
    close(meeting.listener);
    meeting.listener = -1;
    start_guests(children, guests, 3, &meeting, 20);
    assert_children(children, 3);
}

static void test_file(void **state)
{
    (void)state;
    const guest guests[] = { { 1, 3, 0, NULL }, { 2, 3, 0.2, NULL }, { 0, 3, 0.4, NULL } };
    const char *folder = getenv("TMPDIR");
    mt_meeting meeting = { .listener = -1 };
    pid_t children[MOST];
    snprintf(meeting.file, sizeof meeting.file, "%.100s/mixtape-meeting-%d",
             folder ? folder : "/tmp", (int)getpid());
    for (int loopback = 0; loopback < 2; loopback++) {
        snprintf(meeting.host, sizeof meeting.host, "%s", loopback ? "127.0.0.1" : "");
        FILE *old = fopen(meeting.file, "w"); /* of a job that was killed */
        assert_non_null(old);
        fprintf(old, "127.0.0.1:1\n");
        fclose(old);
        start_guests(children, guests, 3, &meeting, 20);
        assert_children(children, 3);
        assert_int_not_equal(access(meeting.file, F_OK), 0);
    }
}

static void test_missing(void **state)
{
    (void)state;
    static const char words[] = "ranks 2, 3 of 4 never arrived, after 3.0 s";
    const guest two[] = { { 0, 4, 0, words }, { 1, 4, 0, words } };
    const guest one[] = { { 1, 2, 0, "rank 0 of 2 never arrived: after 1.0 s nobody answers at" } };
    assert_meet(two, 2, 3);
    mt_meeting meeting = { .host = "127.0.0.1" };
    pid_t children[MOST];
    assert_ok(mt_host_listen(&meeting.listener, &meeting.port, "127.0.0.1"));
    close(meeting.listener);
    start_guests(children, one, 1, &meeting, 1);
    assert_children(children, 1);
}

static void test_disagreement(void **state)
{
    (void)state;
    static const char twice[] = "two processes say that they are rank 1 of 3";
    static const char counts[] = "a process says that it is rank 1 of 3, rank 0 that there are 2";
    const guest same[] = { { 0, 3, 0, twice }, { 1, 3, 0, twice }, { 1, 3, 0, twice } };
    const guest other[] = { { 0, 2, 0, counts }, { 1, 3, 0, counts } };
    assert_meet(same, 3, 20);
    assert_meet(other, 2, 20);
}

/* Whoever is no rank is sent away: somebody who says nothing sensible, or leaves at once. */
static void test_strangers(void **state)
{
    (void)state;
    const guest guests[] = { { 0, 2, 0, NULL }, { 1, 2, 0, NULL } };
    static const char request[] =
        "GET / HTTP/1.1\r\nHost: here\r\nAccept: everything there is\r\n\r\n";
    mt_meeting meeting = { .host = "127.0.0.1" };
    pid_t children[MOST];
    assert_ok(mt_host_listen(&meeting.listener, &meeting.port, "127.0.0.1"));
    start_guests(children, guests, 1, &meeting, 20);
    for (int speaks = 0; speaks < 2; speaks++) {
        struct sockaddr_in at = { .sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)meeting.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        int s = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(connect(s, (struct sockaddr *)&at, sizeof at), 0);
        if (speaks) assert_true(send(s, request, sizeof request, MSG_NOSIGNAL) > 0);
        close(s);
    }
    start_guests(children + 1, guests + 1, 1, &meeting, 20);
    close(meeting.listener);
    assert_children(children, 2);
}

/* ---- children of one process -------------------------------------------------------------------
 */

static int supervise(int *rank, const char *case_name, int count, double grace_s)
{
    char self[1024];
    int code = -1;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    char *const argv[] = { self, (char *)(uintptr_t)case_name, NULL };
    assert_ok(mt_supervise(&code, rank, self, argv, count, grace_s));
    return code;
}

static void quit(int number)
{
    _exit(number == SIGTERM ? 4 : 5);
}

/* A child of mt_supervise: what it does is its name. */
static int child(const char *name)
{
    mt_launch launch;
    mt_meeting meeting;
    passed data = { 0, "" };
    char host[MT_MEETING_HOST];
    if (mt_launch_detect(&launch) != MT_OK || strcmp(launch.launcher, "mixtape") != 0) return 90;
    if (launch.local_rank != launch.rank || launch.local_world != launch.world) return 91;
    if (!strcmp(name, "meet")) {
        if (launch.rank == 0) data.number = 17;
        bool met = mt_launch_meeting(&meeting, &launch) == MT_OK &&
                   mt_rendezvous(&data, sizeof data, host, &launch, &meeting, 20) == MT_OK;
        if (!met) fprintf(stderr, "rank %d: %s\n", launch.rank, mt_error_message());
        return met && data.number == 17 ? 0 : 92;
    }
    if (!strcmp(name, "fail")) {
        if (launch.rank == 1) return 7;
        mt_nap(launch.rank == 2 ? 1.5 : 60); /* the last fails, too, but later */
        return 9;
    }
    if (!strcmp(name, "first")) return mt_nap(launch.rank > 0 ? 60 : 0), 7;
    if (!strcmp(name, "killed")) {
        if (launch.rank == 2) raise(SIGKILL);
        mt_nap(60);
    }
    if (!strcmp(name, "asked")) {
        signal(SIGTERM, quit);
        signal(SIGUSR1, quit);
        printf("%d\n", (int)getpid());
        fflush(stdout);
        mt_nap(60);
    }
    return 0;
}

static void test_children_meet(void **state)
{
    (void)state;
    int rank;
    assert_int_equal(supervise(&rank, "meet", 1, 5), 0);
    assert_int_equal(supervise(&rank, "meet", 4, 5), 0);
    assert_int_equal(rank, -1);
}

static void test_first_failure(void **state)
{
    (void)state;
    int rank;
    double began = mt_now();
    assert_int_equal(supervise(&rank, "fail", 4, 3), 7);
    assert_int_equal(rank, 1);
    assert_int_equal(supervise(&rank, "killed", 3, 0.5), 128 + SIGKILL);
    assert_int_equal(rank, 2);
    assert_int_equal(supervise(&rank, "first", 3, 60), 7);
    assert_int_equal(rank, 0);
    assert_true(mt_now() - began < 20);
    char *const none[] = { (char *)(uintptr_t) "nothing", NULL };
    int code;
    assert_ok(mt_supervise(&code, &rank, "/nowhere/nothing", none, 2, 1));
    assert_int_equal(code, 127);
    assert_fails(mt_supervise(&code, &rank, "/bin/true", none, 0, 1), MT_EINVAL, "0 ranks");
}

/* Supervises two children that wait for a signal, in a process of its own; their pids. */
static pid_t start_asked(pid_t pids[2])
{
    int ends[2], rank, scanned = 0;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t parent = fork();
    assert_true(parent >= 0);
    if (parent == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]), close(ends[1]);
        _exit(supervise(&rank, "asked", 2, 5));
    }
    close(ends[1]);
    FILE *said = fdopen(ends[0], "r");
    assert_non_null(said);
    for (int i = 0; i < 2; i++) scanned += fscanf(said, "%d", &pids[i]) == 1;
    fclose(said);
    assert_int_equal(scanned, 2);
    return parent;
}

static void test_signals(void **state)
{
    (void)state;
    const int numbers[] = { SIGTERM, SIGUSR1 }, codes[] = { 4, 5 };
    pid_t pids[2];
    for (int i = 0; i < 2; i++) {
        int status;
        pid_t parent = start_asked(pids);
        assert_int_equal(kill(parent, numbers[i]), 0);
        assert_int_equal(waitpid(parent, &status, 0), parent);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), codes[i]);
    }
    /* Nobody outlives it. */
    pid_t parent = start_asked(pids);
    assert_int_equal(kill(parent, SIGKILL), 0);
    assert_int_equal(waitpid(parent, NULL, 0), parent);
    for (int turn = 0; turn < 100; turn++) {
        char path[64], line[64];
        int alive = 0;
        for (int i = 0; i < 2; i++) { /* a zombie that nobody has buried yet is dead as well */
            snprintf(path, sizeof path, "/proc/%d/stat", (int)pids[i]);
            FILE *file = fopen(path, "r");
            if (!file) continue;
            alive += fgets(line, sizeof line, file) && !strstr(line, ") Z");
            fclose(file);
        }
        if (!alive) return;
        mt_nap(0.05);
    }
    fail_msg("a child outlives the process that has started it");
}

/* ---- what is under way -------------------------------------------------------------------------
 */

/* A device whose events are over when the test says so: those recorded before `over`. */
static int64_t recorded, over;

static mt_status later_create(mt_device *device, void **event)
{
    (void)device;
    *event = calloc(1, sizeof(int64_t));
    return *event ? MT_OK : MT_ENOMEM;
}

static void later_destroy(mt_device *device, void *event)
{
    (void)device;
    free(event);
}

static mt_status later_record(mt_stream *stream, void *event)
{
    (void)stream;
    *(int64_t *)event = ++recorded;
    return MT_OK;
}

static mt_status later_wait(mt_stream *stream, void *event)
{
    *(int64_t *)stream->impl = *(const int64_t *)event;
    return MT_OK;
}

static mt_status later_done(mt_device *device, void *event, bool *done)
{
    (void)device;
    *done = *(const int64_t *)event <= over;
    return MT_OK;
}

static void test_inflight(void **state)
{
    (void)state;
    const struct mt_device_ops ops = { .event_create = later_create,
                                       .event_destroy = later_destroy,
                                       .event_record = later_record,
                                       .event_wait = later_wait,
                                       .event_done = later_done };
    mt_device device = { .name = "later", .ops = &ops };
    int64_t followed = -1;
    mt_stream stream = { &device, &followed };
    mt_inflight *f;
    mt_watch_pending oldest;
    bool any;
    assert_ok(mt_inflight_create(&f, &device));
    assert_ok(mt_inflight_follow(f, &stream));
    assert_int_equal(followed, -1); /* nothing to wait for */
    assert_ok(mt_inflight_oldest(f, &oldest, &any));
    assert_false(any);
    for (uint64_t i = 1; i <= 3; i++) {
        mt_watch_pending call = { i, i * 10, i * 100, 0, i == 1 ? "first" : "later", "test" };
        assert_ok(mt_inflight_add(f, &stream, &call));
    }
    assert_ok(mt_inflight_follow(f, &stream));
    assert_int_equal(followed, 3);
    mt_nap(0.05);
    assert_ok(mt_inflight_oldest(f, &oldest, &any));
    assert_true(any && oldest.sequence == 1 && oldest.bytes == 10 && oldest.group == 100);
    assert_string_equal(oldest.op, "first");
    assert_string_equal(oldest.what, "test");
    assert_true(oldest.waited >= 0.04);
    over = 2;
    assert_ok(mt_inflight_oldest(f, &oldest, &any));
    assert_true(any && oldest.sequence == 3);
    assert_string_equal(oldest.op, "later");
    assert_true(oldest.waited < 0.04);     /* from when it was the oldest */
    for (uint64_t i = 4; i <= 2000; i++) { /* round the ring, never full */
        mt_watch_pending call = { i, 0, 0, 0, "many", "" };
        over = recorded - 1;
        assert_ok(mt_inflight_add(f, &stream, &call));
    }
    over = recorded;
    assert_ok(mt_inflight_oldest(f, &oldest, &any));
    assert_false(any);
    mt_inflight_destroy(&f);
    assert_null(f);
    mt_inflight_destroy(&f);
}

int main(int argc, char **argv)
{
    if (argc > 1) return child(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_meeting),       cmocka_unit_test(test_all_come),
        cmocka_unit_test(test_known_port),    cmocka_unit_test(test_file),
        cmocka_unit_test(test_missing),       cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_strangers),     cmocka_unit_test(test_children_meet),
        cmocka_unit_test(test_first_failure), cmocka_unit_test(test_signals),
        cmocka_unit_test(test_inflight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
