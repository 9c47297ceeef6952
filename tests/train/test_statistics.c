/* Statistics of quantized tensors: numbers known by hand, and that measuring changes no bit. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/test.h"
#include "tests/train/folder.h"

#include "train/fileio.h"
#include "train/h5.h"
#include "train/statistics.h"

enum { MEMBERS = 3, WIDTH = 32 };
static mt_stream stream;

static double field(const mt_measured *m, const char *name)
{
    for (int i = 0; i < mt_measure_field_count; i++)
        if (strcmp(mt_measure_fields[i].name, name) == 0) return mt_measure_fields[i].value(m);
    fail_msg("no field %s", name);
    return 0;
}

static void measure(mt_measured *m, const mt_qtensor *plain, const char *format, mt_dir dir)
{
    mt_format_spec spec;
    mt_qtensor out = { .group = plain->group };
    mt_measure_room room = { .bytes = 0 };
    assert_ok(mt_format_spec_parse(&spec, format));
    out.dir[dir] = mt_direction_of(spec);
    assert_ok(mt_measure_direction(m, &stream, plain, &out, dir,
                                   &(struct mt_quantize_args){ .dtype = MT_F32, .seed = 1 }, 1,
                                   &room));
    mt_measure_room_free(&room);
}

/* One row of 500, 31 of 1e-6 and a block of zeros: under "up" the scale is 2 and the small ones
 * vanish; under "floor" it is 1 and 500 is beyond 448. */
static void known_numbers(void **state)
{
    (void)state;
    static float x[2 * WIDTH] = { 500 };
    for (int i = 1; i < WIDTH; i++) x[i] = 1e-6f;
    mt_qtensor plain = mt_qtensor_plain(mt_group_uniform(1, 2, WIDTH), MT_F32, x);
    mt_measured up, down;
    measure(&up, &plain, "mxfp8", MT_ROW);
    measure(&down, &plain, "mxfp8:scale=floor", MT_ROW);
    assert_true(field(&up, "count") == 64 && field(&up, "nonfinite") == 0);
    assert_true(field(&up, "min") == 0 && field(&up, "max") == 500 && field(&up, "amax") == 500);
    assert_true(field(&up, "underflow") == 31.0 / 32 && field(&down, "underflow") == 31.0 / 32);
    assert_true(field(&up, "saturated") == 0 && field(&down, "saturated") == 1.0 / 64);
    assert_true(field(&up, "scale_min") == 2 && field(&up, "scale_max") == 2);
    assert_true(field(&down, "scale_min") == 1 && field(&down, "scale_max") == 1);
    /* 500 / 2 rounds to 256, or is cut to 448 */
    assert_true(fabs(field(&up, "mse") - 12.0 * 12 / 64) < 1e-9);
    assert_true(fabs(field(&down, "mse") - 52.0 * 52 / 64) < 1e-9);
    assert_true(fabs(field(&up, "snr") - 20 * log10(500.0 / 12)) < 1e-9);
    assert_true(fabs(field(&up, "l2") - 500) < 1e-9 && fabs(field(&up, "cosine") - 1) < 1e-9);
    double mean = (500 + 31 * (double)1e-6f) / 64;
    assert_true(fabs(field(&up, "mean") - mean) < 1e-12);
    assert_true(fabs(field(&up, "std") - sqrt(250000.0 / 64 - mean * mean)) < 1e-9);
    assert_true(up.codes[0x78] == 1 && up.codes[0] == 63 && down.codes[0x7e] == 1);
}

/* A scale that rounds to 0 is the least one, wherever its block comes; blocks of zeros have none.
 */
static void scales_of_zero(void **state)
{
    (void)state;
    for (int first = 0; first < 2; first++) {
        static float x[WIDTH];
        memset(x, 0, sizeof x);
        x[first ? 0 : 16] = 1, x[first ? 16 : 0] = 1e-6f;
        mt_qtensor plain = mt_qtensor_plain(mt_group_uniform(1, 1, WIDTH), MT_F32, x);
        mt_measured m, other, none, all = { 0 };
        measure(&m, &plain, "nvfp4", MT_ROW);
        assert_true(m.scales == 2 && field(&m, "scale_min") == 0 && field(&m, "scale_max") > 0);
        x[first ? 16 : 0] = 0;
        measure(&other, &plain, "nvfp4", MT_ROW);
        assert_true(other.scales == 1 && field(&other, "scale_min") == field(&m, "scale_max"));
        x[first ? 0 : 16] = 0;
        measure(&none, &plain, "nvfp4", MT_ROW);
        assert_true(none.scales == 0 && isnan(field(&none, "scale_min")));
        mt_measure_merge(&all, &none), mt_measure_merge(&all, first ? &m : &other);
        mt_measure_merge(&all, first ? &other : &m);
        assert_true(field(&all, "scale_min") == 0 && all.scale_max == m.scale_max);
    }
}

/* Columns that are made from rows have scales of what those hold: 0.3 is 128 / 448 there. */
static void columns_of_rows(void **state)
{
    (void)state;
    static float x[2] = { 1, 0.3f };
    mt_qtensor plain = mt_qtensor_plain(mt_group_uniform(1, 1, 2), MT_F32, x);
    mt_measured m;
    measure(&m, &plain, "fp8_block:pow2=off+source=dequantized", MT_COL);
    assert_true(fabs(field(&m, "scale_min") * 448 * 448 / 128 - 1) < 1e-6);
    assert_true(fabs(field(&m, "scale_max") * 448 - 1) < 1e-6);
    assert_true(field(&m, "saturated") == 0 && field(&m, "max") == 1);
    assert_true(fabs(field(&m, "min") - 0.3) < 1e-7 && fabs(field(&m, "mse") - 1.02e-4) < 1e-6);
}

/* Values that are no numbers are counted and left out; an empty member has no statistics. */
static void members_and_merging(void **state)
{
    (void)state;
    static int64_t rows[MEMBERS] = { 2, 0, 3 };
    static int64_t offsets[MEMBERS + 1] = { 0, 2 * WIDTH, 2 * WIDTH, 5 * WIDTH };
    static float x[5 * WIDTH];
    test_random(x, 5 * WIDTH, MT_F32, 3, 1);
    x[7] = NAN, x[100] = INFINITY;
    mt_qtensor plain =
        mt_qtensor_plain(mt_group_ragged_rows(MEMBERS, 5, WIDTH, rows, offsets), MT_F32, x);
    mt_measured m[MEMBERS], all = { 0 };
    measure(m, &plain, "nvfp4", MT_ROW);
    for (int i = 0; i < MEMBERS; i++) mt_measure_merge(&all, &m[i]);
    assert_true(field(&m[0], "count") == 63 && field(&m[0], "nonfinite") == 1);
    assert_true(field(&m[1], "count") == 0 && isnan(field(&m[1], "mean")));
    assert_true(field(&m[2], "count") == 95 && field(&all, "count") == 158);
    assert_true(field(&all, "max") == fmax(field(&m[0], "max"), field(&m[2], "max")));
    assert_true(field(&all, "l2") == sqrt(m[0].squares + m[2].squares));
    int64_t codes = 0;
    for (int i = 0; i < 16; i++) codes += all.codes[i];
    assert_int_equal(codes, 5 * WIDTH);
}

/* A rotation keeps the length, and is measured in its own basis. */
static void rotations_keep_the_length(void **state)
{
    (void)state;
    static float x[48 * WIDTH];
    test_random(x, 48 * WIDTH, MT_F32, 1, 2);
    mt_qtensor plain = mt_qtensor_plain(mt_group_uniform(1, 48, WIDTH), MT_F32, x);
    mt_measured straight, rotated;
    measure(&straight, &plain, "mxfp8", MT_COL);
    measure(&rotated, &plain, "mxfp8:rht", MT_COL);
    assert_true(fabs(field(&rotated, "l2") / field(&straight, "l2") - 1) < 0x1p-8);
    assert_true(field(&rotated, "amax") != field(&straight, "amax"));
    assert_true(field(&rotated, "snr") > 25 && field(&straight, "snr") > 25);
}

/* ---- in a run ----------------------------------------------------------------------------------
 */

static char folder[96];

static void configure(mt_config *c, const char *recipe)
{
    char set[128];
    const char *sets[] = { set };
    snprintf(set, sizeof set, "recipe=%s", recipe);
    static const char text[] =
        "model: {vocab_size: 32, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,\n"
        "  head_dim: 16, moe_intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2}\n"
        "data: {train: none.h5, sequence_length: 16}\n"
        "train: {steps: 4, batch_size: 4, micro_batch_size: 2, dtype: bf16, eval_every: 0}\n"
        "statistics: {layers: '*experts*', tensors: [X, dY_col], every: 2,\n"
        "  what_if: [mxfp4, 'mxfp4:rht', 'mxfp4:source=dequantized']}\n"
        "memory: {recompute: block}\n";
    assert_ok(mt_config_parse(c, "statistics.yaml", text, sizeof text - 1, sets, 1));
}

enum { STEPS = 12 };

static void make_step(mt_trainer *t, mt_statistics *s, int step, const int32_t *tokens,
                      const int32_t *targets)
{
    mt_step_result r;
    assert_ok(mt_statistics_begin(s, step + 1));
    assert_ok(mt_trainer_step(t, tokens, targets, &r));
    assert_ok(mt_statistics_end(s));
}

/* Steps that were replayed where the device records them, with statistics of some or without. */
static int64_t replayed(const mt_config *c, int64_t every)
{
    mt_device *device; /* that of the tests sees the host's memory, and waits for it */
    mt_trainer *t;
    mt_statistics *s = NULL;
    mt_config config = *c;
    const int32_t tokens[64] = { 0 };
    config.statistics_every = every;
    assert_int_equal(unsetenv("MT_SYNC"), 0);
    assert_ok(mt_device_open(&device, test_device_name(), NULL, 0));
    assert_int_equal(setenv("MT_SYNC", "1", 1), 0);
    assert_ok(mt_trainer_create(&t, device, &c->trainer));
    assert_ok(mt_statistics_create(&s, t, &config, NULL, folder));
    for (int step = 0; step < STEPS; step++) make_step(t, s, step, tokens, tokens);
    const int64_t count = mt_trainer_replayed(t);
    mt_statistics_destroy(&s);
    mt_trainer_destroy(&t);
    mt_device_destroy(&device);
    return count;
}

/* What is recorded stands over a step with statistics, but the first, which finds its room. */
static void steps_between_are_replayed(void **state)
{
    (void)state;
    enum { EVERY = 4 };
    mt_config c;
    if (strcmp(test_device_name(), "cpu") == 0) skip();
    configure(&c, "mxfp8");
    c.trainer.steps = STEPS, c.trainer.recompute = MT_RECOMPUTE_NONE;
    const int64_t all = replayed(&c, 0);
    assert_true(all >= STEPS - 2);
    assert_true(replayed(&c, EVERY) >= all - STEPS / EVERY - 1);
}

/* Masters after three steps. */
static void *train(const mt_config *c, bool watched, size_t *bytes)
{
    mt_trainer *t;
    mt_metrics *metrics = NULL;
    mt_metrics_past past;
    mt_statistics *s = NULL;
    int32_t tokens[64], targets[64];
    char path[128];
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    assert_ok(mt_trainer_create(&t, test_device(), &c->trainer));
    assert_ok(mt_metrics_open(&metrics, &past, path, 0));
    if (watched) assert_ok(mt_statistics_create(&s, t, c, metrics, folder));
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 64; i++) tokens[i] = (7 * i + step) % 32, targets[i] = (5 * i + 1) % 32;
        make_step(t, s, step, tokens, targets);
    }
    mt_param_store *params = mt_model_params(mt_trainer_model(t));
    *bytes = (size_t)mt_param_store_elements(params) * sizeof(float);
    void *masters = malloc(*bytes);
    memcpy(masters, mt_param_store_master(params), *bytes);
    mt_statistics_destroy(&s);
    mt_metrics_close(&metrics);
    mt_trainer_destroy(&t);
    return masters;
}

static void measuring_changes_no_bit(void **state)
{
    (void)state;
    mt_config c;
    size_t bytes, count = 0, merged = 0, what_if = 0;
    char path[128], *text = NULL;
    configure(&c, "nvfp4");
    void *plain = train(&c, false, &bytes), *watched = train(&c, true, &bytes);
    assert_memory_equal(plain, watched, bytes);
    free(plain), free(watched);
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    assert_ok(mt_file_read_all(&text, &bytes, path, 1 << 22));
    for (char *line = text; *line; line = strchr(line, '\n') + 1, count++) {
        json_error_t error;
        json_t *o = json_loads(line, JSON_DISABLE_EOF_CHECK, &error);
        assert_int_equal(json_integer_value(json_object_get(o, "step")), 2);
        merged += json_integer_value(json_object_get(o, "member")) == -1;
        what_if += json_is_true(json_object_get(o, "what_if"));
        json_decref(o);
    }
    free(text);
    /* 2 layers x (gate_up, down) x (X row in 2 formats, what_if being one there; X column, dY
     * column in 4) x (4 experts, merged) */
    assert_int_equal(count, 2 * 2 * (2 + 4 + 4) * 5);
    assert_int_equal(merged, count / 5);
    assert_int_equal(what_if, count - 2 * 2 * 3 * 5);
    mt_h5 *file;
    snprintf(path, sizeof path, "%s/statistics/step_00000002.h5", folder);
    assert_ok(mt_h5_open(&file, path));
    bool has;
    assert_ok(mt_h5_exists(file, "/model.layers.0.mlp.experts.down/X_col/nvfp4:rht/codes", &has));
    assert_true(has);
    mt_h5_close(&file);
}

enum { ROWS = 5, FIELDS = 15 };

/* What the second step has left of a tensor in a format. */
static void read_values(double values[ROWS][FIELDS], const char *tensor, const char *format)
{
    mt_h5 *file;
    mt_h5_info info;
    char path[128];
    snprintf(path, sizeof path, "%s/statistics/step_00000002.h5", folder);
    assert_ok(mt_h5_open(&file, path));
    snprintf(path, sizeof path, "/model.layers.0.mlp.experts.down/%s/%s/values", tensor, format);
    assert_ok(mt_h5_expect(file, path, MT_F64, 2, (int64_t[]){ ROWS, FIELDS }, &info));
    assert_ok(mt_h5_read(file, path, &info, values));
    mt_h5_close(&file);
}

/* Of rows in the column's format, where a recipe has no other: the same beside it and in it. */
static void columns_in_a_recipe(void **state)
{
    (void)state;
    mt_config c;
    size_t bytes;
    double used[ROWS][FIELDS], other[ROWS][FIELDS];
    configure(&c, "fprop=mxfp4 dgrad=mxfp4 wgrad=mxfp4:source=dequantized");
    free(train(&c, true, &bytes));
    read_values(used, "X_col", "mxfp4:source=dequantized");
    read_values(other, "X_col", "mxfp4:source=dequantized (what if)");
    assert_memory_equal(used, other, sizeof used);
}

/* The recipe's scales of dY are for e5m2, whose largest value is 128 times that of e4m3. */
static void delayed_scales_of_other_elements(void **state)
{
    (void)state;
    enum { SATURATED = 9, SCALE_MIN = 13 };
    mt_config c;
    size_t bytes;
    double used[ROWS][FIELDS], other[ROWS][FIELDS];
    configure(&c, "fp8_delayed");
    snprintf(c.statistics_what_if, sizeof c.statistics_what_if, "fp8_delayed");
    free(train(&c, true, &bytes));
    read_values(used, "dY_col", "fp8_delayed:e5m2");
    read_values(other, "dY_col", "fp8_delayed (what if)");
    for (int i = 0; i < ROWS; i++) {
        assert_true(other[i][SATURATED] == used[i][SATURATED]);
        assert_true(fabs(other[i][SCALE_MIN] / used[i][SCALE_MIN] - 128) < 1e-3);
    }
}

static int setup(void **state)
{
    (void)state;
    stream.device = test_device();
    folder_make(folder, sizeof folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    char path[128];
    snprintf(path, sizeof path, "%s/statistics", folder);
    return mt_dir_remove(path) == MT_OK && mt_dir_remove(folder) == MT_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_numbers),
        cmocka_unit_test(scales_of_zero),
        cmocka_unit_test(columns_of_rows),
        cmocka_unit_test(members_and_merging),
        cmocka_unit_test(rotations_keep_the_length),
        cmocka_unit_test(measuring_changes_no_bit),
        cmocka_unit_test(steps_between_are_replayed),
        cmocka_unit_test(columns_in_a_recipe),
        cmocka_unit_test(delayed_scales_of_other_elements),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
