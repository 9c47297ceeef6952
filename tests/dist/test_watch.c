/* The watchdog's own end; what it finds is tested where ranks are (test_comm, test_run). */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/support/test.h"

#include "dist/watch.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void never(void *context, int by, const char *sentence)
{
    (void)context;
    print_error("rank %d is blamed: %s\n", by, sentence);
    abort();
}

/* Rank 0 and rank 1 of two, in one process. */
static void start(mt_watch *watch[2])
{
    int listener;
    char address[MT_WATCH_ADDRESS];
    mt_watch_options options = { .world = 2, .timeout_s = 60, .on_fault = never };
    assert_ok(mt_watch_listen(&listener, address));
    assert_ok(mt_watch_start(&watch[0], &options, listener, ""));
    options.rank = 1;
    assert_ok(mt_watch_start(&watch[1], &options, -1, address));
}

/* Whoever goes first: nobody waits until the thread looks up, ten times a second. */
static void ends_at_once(void **state)
{
    (void)state;
    double waited = 0;
    for (int i = 0; i < 4; i++) {
        mt_watch *watch[2];
        start(watch);
        /* both threads are in the middle of their wait */
        nanosleep(&(struct timespec){ .tv_nsec = 30000000 }, NULL);
        for (int k = 0; k < 2; k++) {
            double before = now();
            mt_watch_stop(&watch[(i + k) % 2]);
            waited += now() - before;
            nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
        }
    }
    print_message("8 ends took %.4f s\n", waited);
    assert_true(waited < 0.1);
}

/* Whoever cannot come says why, before rank 0 says that it never arrived. */
static void says_why(void **state)
{
    (void)state;
    mt_watch *watch;
    const mt_watch_options options = { .rank = 1, .world = 2, .timeout_s = 2, .on_fault = never };
    double began = now();
    assert_fails(mt_watch_start(&watch, &options, -1, "127.0.0.1:1"), MT_EDEVICE,
                 "rank 1: rank 0 does not answer at 127.0.0.1:1 after 1.8 s: Connection refused");
    assert_true(now() - began < 2);
    assert_null(watch);
    assert_fails(mt_watch_start(&watch, &options, -1, "nowhere.invalid:80"), MT_EDEVICE,
                 "at nowhere.invalid:80 after ");
    assert_non_null(strstr(mt_error_message(), " s: ")); /* as the resolver has it */
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(ends_at_once),
                                        cmocka_unit_test(says_why) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
