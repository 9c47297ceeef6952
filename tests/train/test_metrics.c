/* metrics.jsonl: what a line holds, and what resuming keeps of the file. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/support/fault.h"
#include "tests/support/test.h"

#include "train/fileio.h"
#include "train/metrics.h"

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
    const mt_metrics_step step = { 3, 600, 1.0 / 3, 0.1, 2,    (double)INFINITY, 1e-300, 12, 0.25,
                                   4, 5,   6,       7,   { 0 } };
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
        int64_t step, last_eval, last_full;
        double seconds;
    } cases[] = {
        { TRAIN(1) TRAIN(2) EVAL(2) TRAIN(3) EVAL(4), TRAIN(1) TRAIN(2) EVAL(2), 2, 2, -1, 2.5 },
        { TRAIN(1) TRAIN(2) FULL(2), TRAIN(1) TRAIN(2) FULL(2), 5, -1, 2, 2.5 },
        { TRAIN(1) TRAIN(2), "", 0, -1, -1, 0 },
        { TRAIN(1) "{\"step\":2,\"se", TRAIN(1), 9, -1, -1, 1.5 }, /* cut off by a kill */
        { TRAIN(1) "{\"step\":2}", TRAIN(1), 9, -1, -1, 1.5 },     /* whole, but not ended */
        { "", "", 3, -1, -1, 0 },
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
    put(TRAIN(1) "{\"loss\":2}\n");
    assert_fails(mt_metrics_open(&m, &past, path, 9), MT_EDAMAGED, "line 2: no step");
    assert_fails(mt_metrics_open(&m, &past, "/nowhere/m", 9), MT_EIO, "/nowhere/m");
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_hold_every_digit),
        cmocka_unit_test(resuming_drops_what_is_past_the_step),
        cmocka_unit_test(a_damaged_line_is_named),
        cmocka_unit_test(opening_survives_want_of_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
