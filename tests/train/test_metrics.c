/* metrics.jsonl: what a line holds, and what resuming keeps of the file. */
#include <jansson.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tests/support/fault.h"
#include "tests/support/test.h"

#include "train/fileio.h"
#include "train/metrics.h"
#include "train/progress.h"

static char path[64];

static int setup(void **state)
{
    (void)state;
    snprintf(path, sizeof path, "/tmp/mixtape-metrics-%d", (int)getpid());
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

static void put(const char *text)
{
    assert_ok(mt_file_write_all(path, text, strlen(text)));
}

static void assert_file(const char *want)
{
    char *text = NULL;
    size_t bytes = 0;
    assert_ok(mt_file_read_all(&text, &bytes, path, 1 << 20));
    assert_string_equal(text, want);
    free(text);
}

static void lines_hold_every_digit(void **state)
{
    (void)state;
    mt_metrics *m = NULL;
    mt_metrics_past past;
    const mt_metrics_step step = { 3,      600, 1.0 / 3, 0.1,  2, (double)INFINITY,
                                   1e-300, 12,  0.25,    0.46, 4, 5,
                                   6,      7,   { 0 } };
    put("");
    assert_ok(mt_metrics_open(&m, &past, path, 0));
    assert_int_equal(past.last_eval, -1);
    assert_ok(mt_metrics_train(m, &step));
    assert_ok(mt_metrics_eval(m, 3, 2 * log(2), "byte", true));
    assert_ok(mt_metrics_sync(m));
    mt_metrics_close(&m);
    assert_null(m);
    FILE *file = fopen(path, "r");
    json_t *line = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL);
    assert_int_equal(json_integer_value(json_object_get(line, "step")), 3);
    assert_int_equal(json_integer_value(json_object_get(line, "tokens")), 600);
    assert_true(json_real_value(json_object_get(line, "seconds")) == step.seconds);
    assert_true(json_real_value(json_object_get(line, "lr")) == step.lr);
    assert_true(json_is_null(json_object_get(line, "grad_norm"))); /* JSON has no infinity */
    assert_true(json_real_value(json_object_get(line, "mfu")) == step.mfu);
    assert_int_equal(json_integer_value(json_object_get(line, "dropped")), 4);
    assert_int_equal(json_integer_value(json_object_get(line, "nan")), 7);
    json_decref(line);
    line = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL);
    assert_true(json_number_value(json_object_get(line, "valid_bits_per_byte")) == 2);
    assert_true(json_is_true(json_object_get(line, "full")));
    json_decref(line);
    fclose(file);
}

#define TRAIN(n) "{\"step\":" #n ",\"seconds\":" #n ".5}\n"
#define EVAL(n)  "{\"step\":" #n ",\"valid_loss\":1,\"full\":false}\n"
#define FULL(n)  "{\"step\":" #n ",\"valid_loss\":1,\"full\":true}\n"

static void resuming_drops_what_is_past_the_step(void **state)
{
    (void)state;
    static const struct {
        const char *before, *after;
        int64_t step, last_eval, last_full, unread;
        double seconds;
    } cases[] = {
        { TRAIN(1) TRAIN(2) EVAL(2) TRAIN(3) EVAL(4), TRAIN(1) TRAIN(2) EVAL(2), 2, 2, -1, 0, 2.5 },
        { TRAIN(1) TRAIN(2) FULL(2), TRAIN(1) TRAIN(2) FULL(2), 5, -1, 2, 0, 2.5 },
        { TRAIN(1) TRAIN(2), "", 0, -1, -1, 0, 0 },
        { TRAIN(1) "{\"step\":2,\"se", TRAIN(1), 9, -1, -1, 2, 1.5 }, /* cut off by a kill */
        { TRAIN(1) "{\"step\":2}", TRAIN(1) "{\"step\":2}\n", 9, -1, -1, 0, 1.5 }, /* whole */
        { TRAIN(1) "{\"step\":2,\"valid_loss\":1,\"full\":true}", TRAIN(1) FULL(2), 2, -1, 2, 0,
          1.5 },
        { TRAIN(1) "{\"step\":2}", TRAIN(1), 1, -1, -1, 0, 1.5 }, /* past the step */
        { "{\"step\":1}", "{\"step\":1}\n", 1, -1, -1, 0, 0 },
        { "{}", "", 1, -1, -1, 1, 0 },
        { "", "", 3, -1, -1, 0, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mt_metrics *m = NULL;
        mt_metrics_past past;
        put(cases[i].before);
        assert_ok(mt_metrics_open(&m, &past, path, cases[i].step));
        mt_metrics_close(&m);
        assert_file(cases[i].after);
        assert_int_equal(past.last_eval, cases[i].last_eval);
        assert_int_equal(past.last_full_eval, cases[i].last_full);
        assert_int_equal(past.unread_line, cases[i].unread);
        assert_true(past.seconds == cases[i].seconds);
    }
}

static void a_damaged_line_is_named(void **state)
{
    (void)state;
    mt_metrics *m = NULL;
    mt_metrics_past past;
    put(TRAIN(1) "{\"step\":2,,}\n" TRAIN(3));
    assert_fails(mt_metrics_open(&m, &past, path, 9), MT_EDAMAGED, "line 2");
    assert_null(m);
    assert_fails(mt_metrics_check(path, 9), MT_EDAMAGED, "line 3 behind it is of step 3");
    assert_file(TRAIN(1) "{\"step\":2,,}\n" TRAIN(3)); /* as it was */
    assert_fails(mt_metrics_open(&m, &past, "/nowhere/m", 9), MT_EIO, "/nowhere/m");
    assert_ok(mt_metrics_check("/nowhere/m", 9));
}

/* Lines up to a checkpoint's step were on the disk before it: what follows them may be anything
 * after a power cut. */
static void an_unreadable_end_is_cut_off(void **state)
{
    (void)state;
    static const struct {
        const char *end;
        int64_t step, line;
    } cases[] = {
        { "{\"loss\":2}\n", 9, 3 },
        { "???\n" TRAIN(11), 9, 3 },
        { "???\n{\"loss\":2}\n???\n", 2, 3 },
        { TRAIN(10) "???\n" TRAIN(3), 9, 0 }, /* past the step, all of it */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_metrics *m = NULL;
        mt_metrics_past past;
        char text[256];
        snprintf(text, sizeof text, "%s%s", TRAIN(1) TRAIN(2), cases[i].end);
        put(text);
        assert_ok(mt_metrics_check(path, cases[i].step));
        assert_file(text);
        assert_ok(mt_metrics_open(&m, &past, path, cases[i].step));
        mt_metrics_close(&m);
        assert_file(TRAIN(1) TRAIN(2));
        assert_int_equal(past.unread_line, cases[i].line);
        assert_true(past.seconds == 2.5);
    }
}

static void opening_survives_want_of_memory(void **state)
{
    (void)state;
    bool failed = true;
    put(TRAIN(1) TRAIN(2));
    for (int64_t n = 1; failed; n++) {
        mt_metrics *m = NULL;
        mt_metrics_past past;
        fault_arm(n, FAULT_ONCE);
        mt_status status = mt_metrics_open(&m, &past, path, 9);
        failed = fault_disarm();
        assert_int_equal(status, failed ? MT_ENOMEM : MT_OK);
        assert_true(failed == (m == NULL));
        mt_metrics_close(&m);
        assert_file(TRAIN(1) TRAIN(2)); /* and nothing of the file is lost */
    }
}

/* What the bar after 20 of 40 steps looks like on a terminal of so many columns; 0: it does not
 * say. */
static void draw_on_terminal(char text[1024], int columns, double mfu)
{
    const mt_metrics_step step = {
        .step = 20, .loss = 2.5, .lr = 3e-4, .tokens_per_second = 9e4, .mfu = mfu
    };
    const struct winsize size = { .ws_row = 24, .ws_col = (unsigned short)columns };
    mt_progress progress;
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    assert_true(slave >= 0 && ioctl(slave, TIOCSWINSZ, &size) == 0);
    fflush(NULL);
    int out = dup(1), err = dup(2);
    dup2(slave, 1), dup2(slave, 2);
    mt_progress_begin(&progress, 10, 40);
    mt_progress_step(&progress, &step, false);
    dup2(out, 1), dup2(err, 2);
    close(out), close(err);
    ssize_t n = read(master, text, 1023);
    close(slave), close(master);
    text[n > 0 ? n : 0] = '\0';
}

static void the_bar_fits_the_terminal(void **state)
{
    (void)state;
    static const int widths[] = { 200, 100, 90, 81, 80, 40, 12, 2, 1 };
    char whole[1024], text[1024];
    draw_on_terminal(whole, 0, 0.461);
    assert_non_null(strstr(whole, "\r[############            ] 20/40  0:00 left  loss 2.5000"));
    assert_non_null(strstr(whole, "90000 tok/s  MFU 46.1 %  MaxVio 0.00  dropped 0\x1b[K"));
    draw_on_terminal(whole, 0, 0);
    assert_null(strstr(whole, "MFU")); /* where it is not known */
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        draw_on_terminal(text, widths[i], 0);
        size_t used = strlen(text) - strlen("\r\x1b[K");
        assert_int_equal(text[0], '\r');
        if (used >= (size_t)widths[i]) fail_msg("%zu on %d columns", used, widths[i]);
        if (i == 0) assert_string_equal(text, whole);
        if (widths[i] == 100) /* a shorter bar, half of it full */
            assert_true(strstr(text, "\r[###  ") && strstr(text, "  ] 20/40  ") &&
                        strstr(text, "dropped 0\x1b[K"));
        if (widths[i] == 40)
            assert_string_equal(text, "\r20/40  0:00 left  loss 2.5000  lr 3.0e-\x1b[K");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_hold_every_digit),
        cmocka_unit_test(the_bar_fits_the_terminal),
        cmocka_unit_test(resuming_drops_what_is_past_the_step),
        cmocka_unit_test(a_damaged_line_is_named),
        cmocka_unit_test(an_unreadable_end_is_cut_off),
        cmocka_unit_test(opening_survives_want_of_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
