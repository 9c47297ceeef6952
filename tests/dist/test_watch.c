/* The watchdog in one process: its own end, and whom it names; what it finds where ranks are is
 * tested there (test_comm, test_run). */
#include <arpa/inet.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/test.h"

#include "core/clock.h"
#include "dist/watch.h"

static atomic_bool told;

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
    char address[MT_HOST_ADDRESS];
    mt_watch_options options = { .world = 2, .timeout_s = 60, .on_fault = never };
    assert_ok(mt_watch_listen(&listener, address));
    assert_ok(mt_watch_start(&watch[0], &options, listener, ""));
    options.rank = 1;
    assert_ok(mt_watch_start(&watch[1], &options, -1, address));
}

/* Whoever goes first: nobody waits until the thread looks up, ten times a second. Of several turns
 * the shortest counts: a busy machine may hold up any of them. */
static void ends_at_once(void **state)
{
    (void)state;
    for (int first = 0; first < 2; first++) {
        double least[2] = { 1, 1 };
        for (int turn = 0; turn < 4; turn++) {
            mt_watch *watch[2];
            start(watch);
            /* both threads are in the middle of their wait */
            mt_nap(0.03);
            for (int k = 0; k < 2; k++) {
                double before = mt_now();
                mt_watch_stop(&watch[first ^ k]);
                least[k] = fmin(least[k], mt_now() - before);
                mt_nap(0.005);
            }
        }
        print_message("rank %d took %.4f s, then the other %.4f s\n", first, least[0], least[1]);
        assert_true(least[0] < 0.03 && least[1] < 0.03);
    }
}

/* Rank 0 ends before it has taken in who is at its door: they hear that it was no fault. */
static void ends_before_it_begins(void **state)
{
    (void)state;
    for (int turn = 0; turn < 20; turn++) {
        int listener;
        char address[MT_HOST_ADDRESS];
        mt_watch *first, *second;
        mt_watch_options options = { .rank = 1, .world = 2, .timeout_s = 60, .on_fault = never };
        assert_ok(mt_watch_listen(&listener, address));
        assert_ok(mt_watch_start(&second, &options, -1, address));
        options.rank = 0;
        assert_ok(mt_watch_start(&first, &options, listener, ""));
        mt_watch_stop(&first);
        mt_nap(0.02); /* rank 1 finds that rank 0 is gone */
        mt_watch_stop(&second);
    }
}

/* Whoever cannot come says why, before rank 0 says that it never arrived. */
static void says_why(void **state)
{
    (void)state;
    mt_watch *watch;
    mt_watch_options options = { .rank = 1, .world = 2, .timeout_s = 4, .on_fault = never };
    double began = mt_now(), waited;
    char why[32];
    assert_fails(mt_watch_start(&watch, &options, -1, "127.0.0.1:1"), MT_EDEVICE,
                 "rank 1: rank 0 does not answer at 127.0.0.1:1 after ");
    double passed = mt_now() - began;
    assert_int_equal(
        sscanf(strstr(mt_error_message(), "after "), "after %lf s: %31[A-Za-z ]", &waited, why), 2);
    assert_string_equal(why, "Connection refused");
    assert_true(waited >= 3.6 - 0.05 && waited <= passed + 0.05);
    assert_true(passed < 4);
    assert_null(watch);
    options.timeout_s = 1;
    assert_fails(mt_watch_start(&watch, &options, -1, "nowhere.invalid:80"), MT_EDEVICE,
                 "at nowhere.invalid:80 after ");
    assert_non_null(strstr(mt_error_message(), " s: ")); /* as the resolver has it */
}

static void keep(void *context, int by, const char *sentence)
{
    assert_int_equal(by, 0);
    snprintf(context, MT_WATCH_TEXT, "%s", sentence);
    atomic_store(&told, true);
}

/* Rank 0 without a descriptor for another rank blames itself, not the rank. */
static void cannot_take_in(void **state)
{
    (void)state;
    int listener, s = socket(AF_INET, SOCK_STREAM, 0);
    char address[MT_HOST_ADDRESS], sentence[MT_WATCH_TEXT];
    mt_watch *watch;
    mt_watch_options options = { .world = 2, .timeout_s = 60, .on_fault = keep };
    options.context = sentence;
    assert_ok(mt_watch_listen(&listener, address));
    assert_ok(mt_watch_start(&watch, &options, listener, ""));
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    struct rlimit was, none;
    getrlimit(RLIMIT_NOFILE, &was);
    none = was, none.rlim_cur = (rlim_t)s;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    int connected = connect(s, (struct sockaddr *)&to, sizeof to);
    for (double began = mt_now(); !atomic_load(&told) && mt_now() - began < 5;) mt_nap(0.01);
    setrlimit(RLIMIT_NOFILE, &was);
    assert_int_equal(connected, 0);
    assert_true(atomic_load(&told));
    assert_string_equal(sentence, "rank 0 cannot take in the others: Too many open files");
    mt_watch_stop(&watch);
    close(s);
}

/* What each rank of a few has heard. */
enum { FEW = 9 };
typedef struct heard {
    atomic_bool said;
    int by;
    char sentence[MT_WATCH_TEXT];
} heard;

static void hear(void *context, int by, const char *sentence)
{
    heard *h = context;
    h->by = by;
    snprintf(h->sentence, sizeof h->sentence, "%s", sentence);
    atomic_store(&h->said, true);
}

static void start_few(mt_watch *watch[FEW], heard all[FEW])
{
    int listener;
    char address[MT_HOST_ADDRESS];
    assert_ok(mt_watch_listen(&listener, address));
    for (int r = 0; r < FEW; r++) {
        const mt_watch_options options = {
            .rank = r, .world = FEW, .timeout_s = 60, .on_fault = hear, .context = &all[r]
        };
        all[r] = (heard){ .by = -2 };
        assert_ok(mt_watch_start(&watch[r], &options, r ? -1 : listener, r ? address : ""));
    }
}

/* Ranks of two groups, or of many, are in collectives of one number: who is in another one than its
 * group is named, beside one of them; nobody where all of a group are in the same. */
static void names_who_does_something_else(void **state)
{
    (void)state;
    static const struct {
        int groups, other; /* who does something else; -1: nobody */
        bool named;
    } rows[] = { { 1, 8, true }, { 2, 7, true }, { 4, 0, true },    { 4, 4, true },
                 { 4, 8, true }, { 4, 6, true }, { FEW, 3, false }, { 1, -1, false } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mt_watch *watch[FEW];
        heard all[FEW];
        int groups = rows[i].groups, other = rows[i].other;
        start_few(watch, all);
        for (int r = 0; r < FEW; r++) {
            mt_watch_enter(watch[r], "begin", "", 1, 0);
            mt_watch_leave(watch[r]);
        }
        for (int r = 0; r < FEW; r++)
            mt_watch_enter(watch[r], r == other ? "reduce" : "gather", "w", 8,
                           (uint64_t)(r % groups) << 40);
        double began = mt_now(), waits = rows[i].named ? 10 : 0.4;
        while (!atomic_load(&all[0].said) && mt_now() - began < waits) mt_nap(0.001);
        assert_int_equal(atomic_load(&all[0].said), rows[i].named);
        for (int r = 0; r < FEW; r++) {
            int first, second;
            char op[32], words[64];
            if (!atomic_load(&all[r].said)) continue; /* not yet */
            assert_int_equal(sscanf(all[r].sentence,
                                    "ranks do not do the same: rank %d is in %31s #2 (w) of 8 "
                                    "bytes, rank %d in",
                                    &first, op, &second),
                             3);
            assert_true(first < second && first % groups == second % groups);
            assert_true(first == other || second == other);
            snprintf(words, sizeof words, ", rank %d in %s #2 (w) of 8", second,
                     first == other ? "gather" : "reduce");
            assert_non_null(strstr(all[r].sentence, words));
            assert_string_equal(op, first == other ? "reduce" : "gather");
        }
        for (int r = FEW - 1; r >= 0; r--) mt_watch_stop(&watch[r]);
    }
}

/* What rank 0 itself has met reaches all, those too whom it has not taken in yet. */
static void passes_on_its_own(void **state)
{
    (void)state;
    for (int turn = 0; turn < 8; turn++) {
        mt_watch *watch[FEW];
        heard all[FEW];
        start_few(watch, all);
        double began = mt_now();
        mt_watch_fault(watch[0], "the disk is full");
        for (int r = 1; r < FEW; r++) {
            while (!atomic_load(&all[r].said) && mt_now() - began < 5) mt_nap(0.001);
            assert_true(atomic_load(&all[r].said));
            assert_int_equal(all[r].by, 0);
            assert_string_equal(all[r].sentence, "the disk is full");
        }
        assert_false(atomic_load(&all[0].said)); /* who says it knows it */
        for (int r = FEW - 1; r >= 0; r--) mt_watch_stop(&watch[r]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(ends_at_once),
                                        cmocka_unit_test(ends_before_it_begins),
                                        cmocka_unit_test(says_why),
                                        cmocka_unit_test(cannot_take_in),
                                        cmocka_unit_test(names_who_does_something_else),
                                        cmocka_unit_test(passes_on_its_own) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
