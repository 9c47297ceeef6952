/* mixtape bench: every family at tiny sizes on the CPU, what it writes held against the work of a
 * case, bad arguments, and allocations that fail. */
#include "tests/train/verbs.h"

#include <jansson.h>
#include <math.h>

#include "tests/support/fault.h"
#include "train/bench.h"

/* Runs `mixtape bench <line>` and returns the objects of its JSON file as an array. */
static json_t *bench(const char *line)
{
    char words[1024];
    const char *path = in_dir("bench.json");
    snprintf(words, sizeof words, "bench --device cpu --launches 1 --json %s %s", path, line);
    assert_verb(words, MT_EXIT_DONE, "copy bandwidth");
    size_t bytes;
    char *text = get_file(path, &bytes);
    json_t *lines = json_array();
    for (char *at = strtok(text, "\n"); at; at = strtok(NULL, "\n")) {
        json_error_t error;
        json_t *object = json_loads(at, JSON_REJECT_DUPLICATES, &error);
        if (!object) fail_msg("bench %s wrote '%s': %s", line, at, error.text);
        json_array_append_new(lines, object);
    }
    free(text);
    return lines;
}

static double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) fail_msg("no number '%s'", key);
    return json_number_value(value); /* a whole one is written without a fraction */
}

static const char *word(const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));
    if (!value) fail_msg("no text '%s'", key);
    return value;
}

/* What every line has, and whether its numbers agree. */
static void check_line(const json_t *line)
{
    double ms = number(line, "ms"), floor = number(line, "floor_ms");
    assert_true(ms > 0 && isfinite(ms) && floor > 0 && isfinite(floor));
    assert_true(number(line, "rate") > 0);
    assert_true(fabs(number(line, "share") * ms - floor) <= 1e-3 * floor);
    assert_string_equal(word(line, "shape"), "nano");
}

static const json_t *find(const json_t *lines, const char *what, const char *recipe)
{
    for (size_t i = 1; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        if (!strcmp(word(line, "case"), what) && !strcmp(word(line, "recipe"), recipe)) return line;
    }
    fail_msg("no case %s under %s", what, recipe);
    return NULL;
}

/* Rate times time is the work: exactly known for these shapes. */
static void assert_work(const json_t *lines, const char *what, const char *recipe, double scale,
                        double work)
{
    const json_t *line = find(lines, what, recipe);
    double got = number(line, "rate") * scale * number(line, "ms") * 1e-3;
    if (fabs(got - work) > 1e-4 * work) fail_msg("%s: work %g, must be %g", what, got, work);
}

static void test_machine(void **state)
{
    (void)state;
    json_t *lines = bench("ops --shape nano");
    const json_t *machine = json_array_get(lines, 0);
    assert_string_equal(word(machine, "family"), "machine");
    assert_string_equal(word(machine, "device"), "cpu");
    assert_string_equal(word(machine, "dtype"), "bf16");
    assert_true(number(machine, "copy_gbs") > 0 && number(machine, "dense_tflops") > 0);
    assert_true(strlen(word(machine, "kernel_set")) > 0);
    json_decref(lines);
}

static void test_gemm(void **state)
{
    (void)state;
    enum { R = 96, N = 64, K = 32 };
    json_t *lines = bench("gemm --shape nano_gate_up --recipe none --recipe nvfp4 --dtype f32");
    assert_int_equal(json_array_size(lines), 1 + 2 * 4);
    static const char *const passes[] = { "fprop", "dgrad", "wgrad", "wgrad_add" };
    for (size_t i = 0; i < 4; i++) {
        assert_work(lines, passes[i], "none", 1e12, 2.0 * R * N * K);
        assert_work(lines, passes[i], "nvfp4", 1e12, 2.0 * R * N * K);
    }
    json_decref(lines);
    lines = bench("gemm --shape nano"); /* both shapes of the layer, gradients in bf16 too */
    assert_int_equal(json_array_size(lines), 1 + 2 * 6);
    assert_work(lines, "wgrad_bf16", "none", 1e12, 2.0 * R * N * K);
    find(lines, "wgrad_bf16_add", "none");
    json_decref(lines);
}

static void test_moe(void **state)
{
    (void)state;
    enum { ROWS = 96, D = 32, F = 32 };
    static const char *const recipes[] = { "none", "fp8_block" };
    json_t *lines = bench("moe --shape nano --recipe none --recipe fp8_block");
    for (size_t i = 0; i < 2; i++) {
        assert_work(lines, "fwd", recipes[i], 1e12, 6.0 * ROWS * D * F);
        assert_work(lines, "fwd+bwd", recipes[i], 1e12, 18.0 * ROWS * D * F);
        assert_true(number(find(lines, "fwd+bwd", recipes[i]), "activations_gb") > 0);
        assert_true(number(find(lines, "refresh", recipes[i]), "rate") > 0);
    }
    for (size_t i = 1; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        const bool left = json_object_get(line, "error") && !strcmp(word(line, "case"), "bwd");
        if (left) /* it is the rest of two passes, on a machine that may be busy */
            assert_non_null(strstr(word(line, "error"), "fwd+bwd took no longer than fwd"));
        else
            check_line(line);
    }
    assert_string_equal(word(json_array_get(lines, 0), "grad_dtype"), "f32");
    json_decref(lines);
    lines = bench("moe --shape nano --grad-dtype bf16");
    assert_string_equal(word(json_array_get(lines, 0), "grad_dtype"), "bf16");
    assert_work(lines, "fwd+bwd", "none", 1e12, 18.0 * ROWS * D * F);
    json_decref(lines);
}

static void test_quantize(void **state)
{
    (void)state;
    enum { ELEMENTS = 96 * 64, WEIGHTS = 1024 * 384 };
    json_t *lines = bench("quantize --shape nano");
    for (size_t i = 1; i < json_array_size(lines); i++) check_line(json_array_get(lines, i));
    assert_int_equal((json_array_size(lines) - 2) % 5, 0);
    assert_work(lines, "copy", "none", 1e9, ELEMENTS * 2 * 2); /* of the source, read and written */
    /* bf16 once, a code for each element, a scale for every 32 of a row */
    assert_work(lines, "quantize_row", "mxfp8", 1e9, ELEMENTS * (2 + 1 + 1.0 / 32));
    assert_work(lines, "dequantize_row", "mxfp8", 1e9, ELEMENTS * (2 + 1 + 1.0 / 32));
    /* bf16 twice: the amax comes first; a scale for each of 4 members */
    assert_work(lines, "quantize_row", "fp8_tensor", 1e9, ELEMENTS * (4 + 1) + 4 * 4);
    json_decref(lines);
    lines = bench("quantize --shape weights_nano"); /* f32 once; a scale for a square of 128 */
    assert_int_equal((json_array_size(lines) - 2) % 3, 0);
    assert_work(lines, "quantize_row", "fp8_block:2d", 1e9, WEIGHTS * (4 + 1 + 4.0 / (128 * 128)));
    json_decref(lines);
}

static void test_ops(void **state)
{
    (void)state;
    enum { T = 48, R = 96, D = 32, F = 32, PARAMS = 3 * 4 * D * F };
    json_t *lines = bench("ops --shape nano");
    for (size_t i = 1; i < json_array_size(lines); i++) check_line(json_array_get(lines, i));
    assert_work(lines, "adamw", "none", 1e9, 28.0 * PARAMS);
    assert_work(lines, "grad_norm_bf16", "none", 1e9, 2.0 * PARAMS);
    assert_work(lines, "adamw_bf16_grad", "none", 1e9, 18.0 * PARAMS);
    assert_work(lines, "gather_fwd", "none", 1e9, 2.0 * (T + R) * D);
    assert_work(lines, "swiglu_bwd", "none", 1e9, 2.0 * 5 * R * F);
    /* 2 heads of 16, sequences of 16: 8.5 keys for a query, two products */
    assert_work(lines, "attention_fwd", "none", 1e12, 2.0 * 2 * T * 8.5 * 32);
    json_decref(lines);
    lines = bench("ops --shape nano --dtype f64");
    assert_work(lines, "adamw", "none", 1e9, 56.0 * PARAMS);
    json_decref(lines);
}

static void test_step(void **state)
{
    (void)state;
    json_t *lines = bench("step --shape nano --recipe none --recipe mxfp8");
    assert_int_equal(json_array_size(lines), 1 + 2 * 2);
    for (size_t i = 1; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        check_line(line);
        assert_true(number(line, "mfu") > 0);
        double memory = number(line, "memory_gb"), plan = number(line, "plan_gb");
        assert_true(plan > 0 && fabs(memory - plan) <= 1e-3 * plan);
    }
    assert_work(lines, "f32/f32", "none", 1, 8 * 2);
    double whole = number(find(lines, "f32/f32", "none"), "plan_gb");
    json_decref(lines);
    lines = bench("step --shape nano --grad-dtype bf16");
    double memory = number(find(lines, "f32/f32", "none"), "memory_gb"),
           plan = number(find(lines, "f32/f32", "none"), "plan_gb");
    assert_true(plan < whole && fabs(memory - plan) <= 1e-3 * plan);
    json_decref(lines);
    lines = bench("step --shape nano --dtype f64");
    assert_int_equal(json_array_size(lines), 1 + 1);
    json_decref(lines);
}

static void test_every_family(void **state)
{
    (void)state;
    json_t *lines = bench("--shape nano");
    for (int f = 0; f < mt_bench_family_count; f++) {
        int count = 0;
        for (size_t i = 0; i < json_array_size(lines); i++)
            count += !strcmp(word(json_array_get(lines, i), "family"), mt_bench_families[f].name);
        if (!count) fail_msg("no case of family %s", mt_bench_families[f].name);
        assert_non_null(strstr(verb_output, mt_bench_families[f].name));
    }
    json_decref(lines);
}

/* A family without the shape says so, and a case without a figure has its line. */
static void test_nothing_is_left_out_silently(void **state)
{
    (void)state;
    assert_verb("bench --shape tiny --device cpu --launches 1", 0, "quantize  has no shape 'tiny'");
    mt_bench b = { .options = { .dtype = MT_F32 } };
    assert_ok(mt_device_open(&b.device, "cpu", NULL, 1));
    const mt_bench_case c = { .family = "moe", .shape = "nano", .what = "bwd", .recipe = "mxfp8" };
    b.json = fopen(in_dir("left.json"), "w+");
    assert_non_null(b.json);
    assert_ok(mt_bench_leave_out(&b, &c, "too short"));
    (void)MT_FAIL(MT_EUNSUPPORTED, "no kernel");
    assert_ok(mt_bench_give_up(&b, &c, MT_EUNSUPPORTED));
    assert_non_null(strstr(b.failure, "no kernel"));
    mt_device_destroy(&b.device);
    rewind(b.json);
    for (int i = 0; i < 2; i++) {
        json_t *object = json_loadf(b.json, JSON_DISABLE_EOF_CHECK, NULL);
        assert_non_null(object);
        assert_string_equal(word(object, "case"), "bwd");
        assert_null(json_object_get(object, "ms"));
        assert_non_null(strstr(word(object, "error"), i ? "no kernel; nor what" : "too short"));
        json_decref(object);
    }
    assert_int_equal(fclose(b.json), 0);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    static const struct {
        const char *line, *words;
    } cases[] = {
        { "bench gem", "did you mean gemm" },
        { "bench gemm moe", "2 arguments given" },
        { "bench --shape nanoo", "no shape 'nanoo'; there are all, gemm: mixtral_gate_up" },
        { "bench gemm --shape olmoe4", "no shape 'olmoe4'" },
        { "bench --dtype bf8", "bf8" },
        { "bench --dtype i32 --device cpu", "i32" },
        { "bench --recipe fp9", "'fp9'" },
        { "bench --grad-dtype f16", "--grad-dtype is f16" },
        { "bench --grad-dtype bf16 --dtype f32", "needs --dtype bf16" },
        { "bench --launches 0", "launches is 0" },
        { "bench --launches 1001", "launches is 1001" },
        { "bench --flushes 0", "flushes is 0" },
        { "bench --threads -1", "--threads is -1" },
        { "bench --threads 0", "--threads is 0, must be from 1 to" },
        { "bench quantize --recipe mxfp8", "quantize has no linear layers" },
        { "bench moe --kernels portable --kernels avx2", "only gemm times more than one, not moe" },
        { "bench --device plan", "computes nothing" },
        { "bench --device cpu --graph", "device cpu records no graphs" },
        { "bench --device cpu --kernels no", "kernel set 'no' is not one of" },
        { "bench --device tpu", "'tpu'" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_verb(cases[i].line, MT_EXIT_USAGE, cases[i].words);
    assert_verb("bench --json /nonexistent/x.json", MT_EXIT_FILES, "/nonexistent/x.json");
    assert_verb("bench ops --shape nano --launches 1 --device cpu --json /dev/full", MT_EXIT_FILES,
                "cannot be written");
    /* what is refused begins no file */
    char line[512];
    put_text(in_dir("kept.json"), "of yesterday");
    snprintf(line, sizeof line, "bench ops --dtype f16 --device cpu --json %s",
             in_dir("kept.json"));
    assert_verb(line, MT_EXIT_USAGE, "dtype 'f16' is not one of f64, f32, bf16");
    size_t bytes;
    char *kept = get_file(in_dir("kept.json"), &bytes);
    assert_string_equal(kept, "of yesterday");
    free(kept);
    assert_verb("bench --help", MT_EXIT_DONE, "mixtape bench [gemm|moe|quantize|ops|step]");
}

/* An allocation that fails ends a case or the run with a status, and leaves nothing behind. */
static void test_failed_allocations(void **state)
{
    (void)state;
    enum { POINTS = 3 };
    static const char *const recipes[] = { "mxfp8" };
    const mt_bench_options options = {
        .device = "cpu",
        .threads = 1,
        .shape = "nano",
        .dtype = MT_BF16,
        .recipes = recipes,
        .recipe_count = 1,
        .launches = 1,
        .flushes = 1,
    };
    const char *families[] = { "gemm", "moe", "step" };
    fflush(stdout);
    int out = dup(1), null = open("/dev/null", O_WRONLY);
    assert_true(out >= 0 && null >= 0);
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        const mt_bench_family *family;
        assert_ok(mt_bench_family_find(&family, families[f]));
        dup2(null, 1);
        mt_status status = mt_bench_run(&options, family); /* what is made once is made */
        int64_t before = fault_allocations(), live = fault_live();
        if (status == MT_OK) status = mt_bench_run(&options, family);
        int64_t count = fault_allocations() - before, leaked = fault_live() - live;
        for (int i = 0; i < POINTS && status == MT_OK && leaked == 0; i++) {
            fault_arm(1 + i * count / POINTS, FAULT_FROM);
            mt_status failed = mt_bench_run(&options, family);
            /* after a case that ran, one that failed is reported in its place */
            if (!fault_disarm() || (failed != MT_ENOMEM && failed != MT_OK)) status = MT_EINTERNAL;
            mt_error_clear();
            leaked = fault_live() - live;
        }
        fflush(stdout);
        dup2(out, 1);
        assert_int_equal(status, MT_OK);
        assert_int_equal(leaked, 0);
    }
    close(out), close(null);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_machine),       cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_moe),           cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_ops),           cmocka_unit_test(test_step),
        cmocka_unit_test(test_every_family),  cmocka_unit_test(test_nothing_is_left_out_silently),
        cmocka_unit_test(test_bad_arguments), cmocka_unit_test(test_failed_allocations),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
